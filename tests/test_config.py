"""Configuration: what a user may write is read as meant, and everything else is refused in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import train
from qat.config import (
    DATASETS,
    GROUPS,
    LOGGERS,
    METHODS,
    NAMED_FORMATS,
    Config,
    DataConfig,
    Format,
    OptimConfig,
    QatError,
    QuantConfig,
    RecipeConfig,
    Rule,
    TensorConfig,
    bits_name,
    check_arguments,
    parse_bits,
    schema_keys,
)
from qat.files import flatten
from qat.models import names

CONFIGS = Path(train.__file__).parent / "configs"
GOLDEN = Path(__file__).parent / "golden"
INTEGERS = tuple(range(1, 9))


def refused(config: Any) -> str:
    """The one line that a configuration is refused with."""
    with pytest.raises(QatError) as caught:
        config.check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", INTEGERS)
def test_integer_bits(bits: int):
    for written in (bits, str(bits), f" {bits} ", f"w{bits}a{bits}", f"W{bits}A{bits}"):
        assert parse_bits(written) == (Format(bits), Format(bits))
    assert Format(bits).is_integer
    assert not Format(bits).is_float


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    [
        ("float", 32, None),
        ("bf16", 16, "bfloat16"),
        ("fp16", 16, "float16"),
        ("fp8", 8, "float8_e4m3fn"),
        ("fp8_e4m3", 8, "float8_e4m3fn"),
        ("fp8_e5m2", 8, "float8_e5m2"),
    ],
)
def test_named_bits(name: str, size: int, dtype: str | None):
    weight, act = parse_bits(name)
    assert weight == act == Format(size, dtype)
    assert parse_bits(name.upper()) == (weight, act)
    assert not weight.is_integer
    assert weight.is_float == (name == "float")
    assert parse_bits(str(weight)) == (weight, act)


def test_every_named_format_is_tested_above():
    assert set(NAMED_FORMATS) == {"float", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2"}


@given(weight=st.sampled_from(INTEGERS), act=st.sampled_from(INTEGERS))
def test_weights_and_activations_apart(weight: int, act: int):
    assert parse_bits(f"w{weight}a{act}") == (Format(weight), Format(act))
    assert bits_name(f"w{weight}a{act}") == bits_name(3, weight, act) == f"w{weight}a{act}"


@pytest.mark.parametrize("written", ["wbf16a8", "w8afloat", "w4afp8_e5m2"])
def test_mixed_formats(written: str):
    assert bits_name(written) == written


NOT_BITS = [0, 9, 99, -1, 1.5, 4.0, True, False, None, "", " ", "0", "9", "4.0", "+4", "4 4", "four", "٤"]
NOT_BITS += ["w4", "a4", "w4a", "wa4", "w4a9", "w0a4", "w4a4a4", "wfloata4", "int4", "fp4", [4], {"bits": 4}]


@pytest.mark.parametrize("bits", NOT_BITS, ids=repr)
def test_not_bits(bits: Any):
    with pytest.raises(QatError) as caught:
        parse_bits(bits)
    text = str(caught.value)
    assert text.startswith("bits must be 1 to 8")
    assert f"got {bits!r}" in text
    assert "(try bits=" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("w4a4", (4, None, None)),
        ("w4a8", ("w4a8", None, None)),
        ("w2a4", (4, 2, None)),
        ("w4a8", (4, None, 8)),
        ("w2a3", ("w5a6", 2, 3)),
        ("float", ("float", None, None)),
        ("fp8", ("fp8_e4m3", None, None)),
        ("w4abf16", ("bf16", 4, None)),
    ],
)
def test_names(name: str, config: tuple[Any, Any, Any]):
    """A run's folder is called after what the quantizers do."""
    assert bits_name(*config) == name


# --- checks of the dataclasses ----------------------------------------------------------------------------------------


def test_defaults_are_good():
    assert Config().check() == Config()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_a_choice_everywhere(method: str):
    tensor = TensorConfig(method=method)
    QuantConfig(method=method, weight=tensor, act=tensor, rules=[Rule(match="fc", method=method)]).check()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (QuantConfig(bits=99), ["bits must be", "got 99"]),
        (QuantConfig(bits="foo"), ["bits must be", "got 'foo'"]),
        (QuantConfig(weight=TensorConfig(bits=0)), ["quant.weight.bits must be", "got 0", "quant.weight.bits=4"]),
        (QuantConfig(act=TensorConfig(bits="w4a4")), ["quant.act.bits must be", "got 'w4a4'"]),
        (QuantConfig(first_last_bits=9), ["quant.first_last_bits must be", "got 9"]),
        (QuantConfig(method="lsk"), ["quant.method must be one of", "got 'lsk'", "closest: lsq"]),
        (QuantConfig(weight=TensorConfig(method="foo")), ["quant.weight.method", "got 'foo'"]),
        (QuantConfig(act=TensorConfig(init="foo")), ["quant.act.init", "got 'foo'", "percentile"]),
        (QuantConfig(placement="foo"), ["quant.placement", "got 'foo'", "layer"]),
        (QuantConfig(rules=[Rule(bits=4)]), ["match="]),
        (QuantConfig(rules=[Rule(match="fc")]), ["'fc'", "changes nothing", "bits or method"]),
        (QuantConfig(rules=[Rule(match="fc", bits=99)]), ["rule 'fc': bits", "got 99"]),
        (QuantConfig(rules=[Rule(match="fc", method="foo")]), ["rule 'fc': method", "got 'foo'"]),
        (Config(quant=QuantConfig(bits=99)), ["bits must be", "got 99"]),
        (Config(budget=4), ["bits=auto", "budget=4"]),
        (Config(seed=-1), ["seed", "got -1", "seed=0"]),
        (Config(seed=2**32), ["seed", "4294967295"]),
        (Config(data=DataConfig(name="digit")), ["data must be one of", "closest: digits"]),
        (Config(data=DataConfig(batch_size=0)), ["data.batch_size", "at least 1", "got 0", "data.batch_size=64"]),
        (Config(data=DataConfig(image_size=0)), ["data.image_size", "got 0"]),
        (Config(data=DataConfig(num_classes=1)), ["data.num_classes", "at least 2"]),
        (Config(data=DataConfig(workers=-1)), ["data.workers", "got -1"]),
        (Config(data=DataConfig(val_fraction=2)), ["data.val_fraction", "between 0 and 1", "got 2"]),
        (Config(data=DataConfig(val_fraction=0)), ["data.val_fraction", "got 0"]),
        (Config(data=DataConfig(val_fraction=float("nan"))), ["data.val_fraction", "got nan"]),
        (Config(recipe=RecipeConfig(epochs=-1)), ["recipe.epochs", "got -1"]),
        (Config(recipe=RecipeConfig(float_epochs=-1)), ["recipe.float_epochs", "got -1"]),
        (Config(recipe=RecipeConfig(calibration_batches=0)), ["recipe.calibration_batches", "got 0"]),
        (Config(optim=OptimConfig(lr=-1.0)), ["optim.lr", "got -1.0", "optim.lr=0.01"]),
        (Config(optim=OptimConfig(lr=float("nan"))), ["optim.lr", "finite", "got nan"]),
        (Config(optim=OptimConfig(float_lr=float("inf"))), ["optim.float_lr", "finite", "got inf"]),
        (Config(optim=OptimConfig(scale_lr=-1.0)), ["optim.scale_lr", "optim.scale_lr=null"]),
        (Config(optim=OptimConfig(weight_decay=-1.0)), ["optim.weight_decay"]),
        (Config(optim=OptimConfig(momentum=-0.5)), ["optim.momentum"]),
        (Config(optim=OptimConfig(momentum=0.0)), ["optim.momentum=0", "optim.nesterov=false"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_values(config: Any, words: list[str]):
    """The line says which key, what came, and what to type."""
    text = refused(config)
    assert all(word in text for word in words), text


# --- the YAML files ---------------------------------------------------------------------------------------------------


def composed(*overrides: str) -> Config:
    """What train.py gets from these arguments."""
    train.register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config: Config = OmegaConf.to_object(compose("train", list(overrides)))  # type: ignore[assignment]
    return config.check()


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def test_groups_are_the_folders():
    assert set(GROUPS) == {path.name for path in CONFIGS.iterdir() if path.is_dir()}


@pytest.mark.parametrize("choice", [f"{group}={choice}" for group in GROUPS for choice in choices(group)])
def test_every_choice_composes(choice: str):
    group, _, name = choice.partition("=")
    config = composed(choice)
    if group in ("data", "logger", "model"):
        assert getattr(config, group).name == name


def test_data_and_logger_files_are_the_known_names():
    assert set(choices("data")) == set(DATASETS)
    assert set(choices("logger")) == set(LOGGERS)


@pytest.mark.parametrize("name", [*names()[::16], "resnet18"])
def test_model_takes_any_torchvision_classifier(name: str):
    assert composed(f"model={name}").model.name == name
    assert composed(f"model={name}", "model.checkpoint=x.pth").model.checkpoint == "x.pth"


def test_yaml_files_set_known_keys_only():
    """A key that the schema lacks is refused when composed; one that the files lack has the library's value."""
    ours = flatten(dataclasses.asdict(composed()))
    library = flatten(dataclasses.asdict(Config()))
    assert {key for key in ours if not key.startswith("trainer")} == {key for key in library if key != "trainer"}


def test_trainer_files_have_the_same_keys():
    """So that `trainer=gpu trainer.KEY=` takes what `trainer=cpu trainer.KEY=` takes."""
    keys = {choice: sorted(OmegaConf.load(CONFIGS / "trainer" / f"{choice}.yaml")) for choice in choices("trainer")}
    assert len({tuple(k) for k in keys.values()}) == 1, keys


def test_one_number_sets_all_bits():
    assert composed("bits=3").quant == composed("quant.bits=3").quant == dataclasses.replace(composed().quant, bits=3)


def test_the_nearer_key_wins():
    config = composed("bits=4", "quant.weight.bits=2")
    assert (config.quant.bits, config.quant.weight.bits, config.quant.act.bits) == (4, 2, None)


def test_rules_from_the_command_line():
    config = composed("quant.rules=[{match: 'layer4.*', bits: 2}, {match: fc, method: ste, bits: w8a4}]")
    assert config.quant.rules == [Rule("layer4.*", 2), Rule("fc", "w8a4", "ste")]


def test_trainer_takes_any_argument_with_a_plus():
    assert composed("+trainer.limit_train_batches=2").trainer["limit_train_batches"] == 2


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_experiments_change_something(experiment: str):
    """With `experiment` before `_self_` in the defaults an experiment's root keys would be ignored in silence."""
    assert composed(f"experiment={experiment}") != composed()


EXPERIMENT = """\
# @package _global_
defaults:
  - override /data: synthetic
  - override /model: vgg11
bits: 2
recipe: { epochs: 3 }
data: { batch_size: 7 }
quant: { first_last_bits: null }
"""


def test_order(tmp_path: Path):
    """The command line wins over an experiment, and that over groups and root values."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    mine = [f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"]
    config = composed(*mine)
    assert (config.data.name, config.model.name, config.bits, config.quant.bits) == ("synthetic", "vgg11", 2, 2)
    assert (config.recipe.epochs, config.data.batch_size, config.quant.first_last_bits) == (3, 7, None)
    config = composed(*mine, "bits=3", "recipe.epochs=5", "data=digits", "data.batch_size=9", "model=resnet18")
    assert (config.data.name, config.model.name, config.bits, config.quant.bits) == ("digits", "resnet18", 3, 3)
    assert (config.recipe.epochs, config.data.batch_size) == (5, 9)


# --- the command line -------------------------------------------------------------------------------------------------

TRAINER_KEYS = ("accelerator", "devices", "precision")
CHOICES = {group: choices(group) for group in GROUPS if group != "model"}


def check(*arguments: str) -> None:
    check_arguments(arguments, names(), TRAINER_KEYS, CHOICES)


@pytest.mark.parametrize(
    "argument",
    [
        "bits=4",
        "bits=2,3,4,8",
        "seed=1",
        "resume=last",
        "resume=",
        "model=resnet18",
        "model=resnet18,mobilenet_v2",
        "model='resnet18,vgg11'",
        "model=choice(resnet18,vgg11)",
        "model.weights=DEFAULT",
        "quant.weight.bits=2",
        "quant.rules=[{match: fc, bits: 8}]",
        "data=digits,cifar10",
        "experiment=null",
        "+experiment=digits_w2a2",
        "trainer=cpu",
        "trainer.precision=bf16-mixed",
        "+trainer.limit_train_batches=2",
        "+trainer.strategy.x=2",
        "~trainer.precision",
        "hydra.run.dir=/tmp/x",
        "hydra/launcher=joblib",
        "+hydra.verbose=true",
        "-m",
        "--multirun",
        "--help",
        "--cfg=job",
    ],
)
def test_good_arguments(argument: str):
    check("bits=4", argument)


@pytest.mark.parametrize(
    "arguments",
    [["--cfg", "job"], ["-c", "all", "-p", "quant"], ["--info", "defaults"], ["--config-name", "mine"]],
    ids=" ".join,
)
def test_options_with_a_value(arguments: list[str]):
    check(*arguments, "bits=4")
    with pytest.raises(QatError, match="bit"):
        check(*arguments, "bit=4")


def test_own_config_folder():
    """Its choices are not ours to know; keys are still checked."""
    check("--config-dir", "mine", "experiment=mine", "data=mine")
    with pytest.raises(QatError, match="bit"):
        check("--config-dir", "mine", "bit=4")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("bit=2", ["no key 'bit'", "closest: bits"]),
        ("+bit=2", ["no key 'bit'", "closest: bits"]),
        ("++bit=2", ["no key 'bit'", "closest: bits"]),
        ("~bit", ["no key 'bit'"]),
        ("bit=2,3", ["no key 'bit'"]),
        ("quant.wieght.bits=2", ["no key 'quant.wieght.bits'", "closest: quant.weight.bits"]),
        ("quant.rules.0.bits=2", ["no key 'quant.rules.0.bits'"]),
        ("datta=digits", ["no key 'datta'", "closest: data"]),
        ("+bits=2", ["'bits' is an ordinary key", "bits=2, without the +"]),
        ("++data.root=x", ["'data.root' is an ordinary key"]),
        ("model=resnet19", ["no model 'resnet19'", "closest: resnet18", "torchvision"]),
        ("model=resnet18,vg11", ["no model 'vg11'", "closest: vgg11"]),
        ("model=", ["no model ''"]),
        ("data=digit", ["no data 'digit'", "closest: digits", "data= takes cifar10"]),
        ("trainer=tpu", ["no trainer 'tpu'", "trainer= takes auto, cpu, ddp, gpu"]),
        ("experiment=foo", ["no experiment 'foo'", "digits_w2a2"]),
        ("trainer.precison=32-true", ["no key 'trainer.precison'", "closest: precision", "+trainer.precison=32-true"]),
        ("trainer.max_epoch=2", ["no key 'trainer.max_epoch'", "+trainer.max_epoch=2"]),
        ("bits", ["expected key=value, got 'bits'"]),
        ("resnet18", ["expected key=value, got 'resnet18'"]),
        ("--bits=4", ["no dashes", "write bits=4"]),
        ("--bits", ["no dashes", "write bits=VALUE"]),
        ("--model=resnet18", ["no dashes", "write model=resnet18"]),
        ("hydrant=4", ["no key 'hydrant'"]),
        ("=4", ["no key ''"]),
    ],
)
def test_bad_arguments(argument: str, words: list[str]):
    with pytest.raises(QatError) as caught:
        check("seed=0", argument)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


@given(key=st.sampled_from(sorted(schema_keys())), value=st.text(max_size=9))
def test_every_key_of_the_schema_is_an_argument(key: str, value: str):
    if key not in GROUPS:
        check(f"{key}={value}")


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def help_text() -> str:
    """What `python train.py --help` prints."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["train.py", "--help"])
        patch.setattr(train, "quiet", lambda: None)
        with pytest.raises(SystemExit, match="0"):
            train.command()
    return out.getvalue()


def test_help_is_as_reviewed(help_text: str):
    """After a change: `python train.py --help > tests/golden/help.txt`, and look at the difference."""
    assert help_text.strip() == (GOLDEN / "help.txt").read_text().strip()


def test_help_is_one_screen(help_text: str):
    lines = help_text.strip().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120


def test_help_names_every_group_and_choice(help_text: str):
    for group in GROUPS:
        line = next(line for line in help_text.splitlines() if line.split()[:1] == [group])
        assert group == "model" or all(choice in line for choice in choices(group)), line


def test_help_examples_are_accepted(help_text: str):
    examples = [line.split("   ")[0] for line in map(str.strip, help_text.splitlines()) if line.startswith("python ")]
    assert len(examples) >= 5
    for example in examples:
        check(*shlex.split(example)[2:])
