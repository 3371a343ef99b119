"""Float model -> quantize -> calibrate -> train -> evaluate, top to bottom.

    python train.py model=resnet18 bits=4
    python train.py --help

The only file that knows Hydra: past `main` there are the plain dataclasses of `qat.config`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to the end of this file, where they become one line

import hydra
import lightning as L
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import PassThroughProfiler
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

import qat
from qat import kernels, models
from qat.callbacks import Calibrate, History, ScaleWatch
from qat.config import GROUPS, Config, QatError, bits_name, check_arguments, choose
from qat.data import DataModule
from qat.files import prune, read_checkpoint, resume_point, run_folder, write_text
from qat.planning import Plan
from qat.report import float_bytes, quantized_bytes
from qat.training import Classifier, keep_freed_memory

CONFIGS = Path(__file__).parent / "configs"


def train(config: Config, folder: Path) -> dict[str, Any]:
    """Run one experiment in `folder` and return its metrics."""
    started = time.perf_counter()
    L.seed_everything(config.seed, workers=True, verbose=False)
    resumed = None if config.resume is None else resume_point(config, folder)
    stage: str = resumed["qat"]["stage"] if resumed else "float"
    results: dict[str, Any] = dict(resumed["qat"]["results"]) if resumed else {}
    last = folder / "last.ckpt"

    # Data, float model, plan: whatever is wrong with them is found before any training
    data = DataModule(config.data, seed=config.seed)
    data.prepare_data()
    data.setup()
    builder: dict[str, Any] = {"name": config.model.name, "num_classes": data.num_classes}
    source: dict[str, Any] = {"weights": config.model.weights, "checkpoint": config.model.checkpoint}
    model, trained = models.build(**builder, **({} if resumed else source))
    models.check_input(model, data.input_shape)
    model = model.to(memory_format=torch.channels_last)
    plan = qat.plan(model, config.quant)
    size_float = float_bytes(model)
    kept = config.trainer.get("tune_allocator", True) and keep_freed_memory()
    trainer = make_trainer(config, folder, data, stage)
    if trainer.is_global_zero:
        write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))), folder / "config.yaml")
        write_text(f"{plan}\n", folder / "plan.txt")
        print(f"model     {config.model.name}, {size_float / 1e6:.1f} MB as float32")
        print(f"data      {data.describe()}")
        print(f"bits      {name_of(config)}; {plan.coverage}")
        memory = ", freed memory stays in the process (trainer.tune_allocator=false: it does not)" if kept else ""
        print(f"device    {trainer.strategy.root_device}, precision {trainer.precision}{memory}")
        print(f"folder    {folder}" + (f", resumed in the {stage} stage" if resumed else ""), flush=True)
    warm_up(trainer, plan)

    # Float stage, unless the model came trained
    if stage == "float":
        lit = Classifier(model, config, "float", builder)
        if not trained:
            trainer.fit(lit, data, ckpt_path=last if resumed else None, weights_only=True)
        load_best(trainer, lit, folder / "float.ckpt")
        results["float_accuracy"] = test(trainer, lit, data)
        trainer = make_trainer(config, folder, data, "quantized")
        data.trainer = None  # it kept the float stage's trainer alive, and with it the optimizer
        del lit

    # Quantize, calibrate (a callback of the trainer's does), train
    model = qat.quantize(model, config.quant)
    lit = Classifier(model, config, "quantized", builder, results)
    if stage == "float":
        results["calibrated_accuracy"] = test(trainer, lit, data)
    trainer.fit(lit, data, ckpt_path=last if stage == "quantized" else None, weights_only=True)
    load_best(trainer, lit, folder / "best.ckpt")

    # Result
    metrics = {
        "model": config.model.name,
        "data": config.data.name,
        "bits": name_of(config),
        "seed": config.seed,
        **results,
        "quantized_accuracy": test(trainer, lit, data),
        "size_float_bytes": size_float,
        "size_quantized_bytes": quantized_bytes(model),
        "seconds": round(time.perf_counter() - started, 1),
    }
    if trainer.is_global_zero:
        write_text(json.dumps(metrics, indent=2) + "\n", folder / "metrics.json")
        print(summary(metrics, folder), flush=True)
    return metrics


# --- the parts of it --------------------------------------------------------------------------------------------------


def make_trainer(config: Config, folder: Path, data: DataModule, stage: str) -> L.Trainer:
    """A Trainer for one stage, which keeps its best epoch (on the validation images) and its last."""
    terminal = sys.stdout.isatty()
    best = ModelCheckpoint(
        folder, filename={"float": "float", "quantized": "best"}[stage], monitor="val/score", mode="max", **OVERWRITE
    )
    last = ModelCheckpoint(folder, filename="last", save_on_train_epoch_end=True, **OVERWRITE)
    callbacks: list[L.Callback] = [
        best,
        last,
        Calibrate(lambda: data.calibration_batches(config.recipe.calibration_batches)),
        History(folder / "metrics.csv", show=not terminal),
        ScaleWatch(),
    ]
    if terminal:
        callbacks.append(TQDMProgressBar(refresh_rate=10, leave=False))
    options: dict[str, Any] = {
        "max_epochs": config.recipe.float_epochs if stage == "float" else config.recipe.epochs,
        "logger": False,
        "default_root_dir": folder,
        "enable_progress_bar": terminal,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    options |= config.trainer
    if options.get("precision") is None:
        gpu = torch.cuda.is_available() and options.get("accelerator") in ("auto", "gpu", "cuda")
        options["precision"] = "bf16-mixed" if gpu else "32-true"
    choose(str(options["precision"]), PRECISIONS, "trainer.precision")
    options.pop("tune_allocator", None)
    try:
        if config.logger.name == "tensorboard":
            options["logger"] = TensorBoardLogger(folder, name="tensorboard", version=stage)
        return L.Trainer(callbacks=callbacks, **options)
    except (TypeError, ValueError, MisconfigurationException, ModuleNotFoundError) as error:
        hint = " (trainer=cpu runs anywhere)" if "backend" in str(error) or "accelerator" in str(error) else ""
        raise QatError(f"trainer: {one_line(error)}{hint}") from None


def warm_up(trainer: L.Trainer, plan: Plan) -> None:
    """Compile the kernels before the first epoch, and say so: the first time it takes half a minute."""
    device = trainer.strategy.root_device
    if not plan.quantized or kernels.mode() == "reference" or device.type != "cpu":
        return
    if trainer.is_global_zero:
        print("kernels   compiling (the first time up to half a minute, then cached)", end="", flush=True)
    started = time.perf_counter()
    kernels.warm_up(device)
    if trainer.is_global_zero:
        print(f": {time.perf_counter() - started:.0f} s", flush=True)


PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "32", "bf16", "16")
OVERWRITE: dict[str, Any] = {"enable_version_counter": False}  # best.ckpt, never best-v1.ckpt


def load_best(trainer: L.Trainer, lit: Classifier, path: Path) -> None:
    """Load the stage's best epoch; if there was none (nothing trained), the model as it is becomes it."""
    if path.exists():
        lit.load_state_dict(read_checkpoint(path)["state_dict"])
    else:
        trainer.strategy.connect(lit)
        trainer.save_checkpoint(path)


def test(trainer: L.Trainer, lit: Classifier, data: DataModule) -> float:
    """Accuracy on the test images, in percent. Not profiled: trainer.profiler is there to look at training."""
    profiler = vars(trainer)["profiler"]
    vars(trainer)["profiler"] = PassThroughProfiler()
    accuracy = trainer.test(lit, data, verbose=False)[0]["test/acc"]
    vars(trainer)["profiler"] = profiler
    return round(accuracy, 3)


def name_of(config: Config) -> str:
    """The bits as in the folder's name: `w4a4`."""
    return bits_name(config.quant.bits, config.quant.weight.bits, config.quant.act.bits)


def summary(metrics: dict[str, Any], folder: Path) -> str:
    """The table at the end."""
    smaller = metrics["size_float_bytes"] / metrics["size_quantized_bytes"]
    rows = [
        ("float", f"{metrics['float_accuracy']:.2f} %", f"{metrics['size_float_bytes'] / 1e6:.2f} MB"),
        ("calibrated", f"{metrics['calibrated_accuracy']:.2f} %", ""),
        (
            f"{metrics['bits']} trained",
            f"{metrics['quantized_accuracy']:.2f} %",
            f"{metrics['size_quantized_bytes'] / 1e6:.2f} MB ({smaller:.1f}x smaller)",
        ),
    ]
    title = f"{metrics['model']} on {metrics['data']}"
    width = max(24, len(title))
    lines = [f"{title:{width}s} accuracy   size"]
    lines += [f"  {name:{width - 2}s} {accuracy:>8s}   {size}".rstrip() for name, accuracy, size in rows]
    return "\n".join(["", *lines, f"{metrics['seconds']:.0f} s; all of it is in {folder}"])


# --- Hydra ------------------------------------------------------------------------------------------------------------


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
def main(cfg: DictConfig) -> float:
    """Compose the configuration, choose the folder, train; say in one line what went wrong, or how to go on."""
    folder = new = Path(HydraConfig.get().runtime.output_dir)
    prune(new)  # Hydra made it; run_folder makes it again once there is something to save
    try:
        config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
        config.check()
        if HydraConfig.get().mode == RunMode.MULTIRUN and config.trainer.get("devices") not in (1, "1", "auto"):
            raise QatError("a sweep (-m) trains on one device per job: trainer.devices=1, or start the jobs one by one")
        with run_folder(new, config.resume) as folder:
            return float(train(config, folder)["quantized_accuracy"])
    except Exception as error:
        stop(error)
    except (KeyboardInterrupt, SystemExit) as error:  # Ctrl-C; within a fit Lightning makes a SystemExit of it
        if KeyboardInterrupt not in (type(error), type(error.__context__)):
            raise
        print(f"interrupted{how_to_go_on(folder)}", file=sys.stderr)
        raise SystemExit(130) from None


def stop(error: Exception) -> NoReturn:
    """Exit with one line that says what the user can mend; let a defect of ours through with its traceback."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for link in chain:
        if isinstance(link, QatError):
            raise SystemExit(f"error: {one_line(link)}") from None
        for kind, text, advice in KNOWN:
            if isinstance(link, kind) and text in str(link):
                raise SystemExit(f"error: {one_line(link)}; {advice}") from None
    if isinstance(error, HydraException | OmegaConfBaseException):
        first_two = dict.fromkeys(one_line(link).rstrip(".") for link in chain[:2])
        raise SystemExit(f"error: {': '.join(first_two)}") from None
    raise error


KNOWN: tuple[tuple[type[Exception], str, str], ...] = (
    (ConfigKeyError, "not in 'Rule'", "a rule in quant.rules is {match: GLOB, bits: BITS, method: METHOD}"),
    (torch.OutOfMemoryError, "", "lower data.batch_size"),
    (RuntimeError, "can't allocate memory", "lower data.batch_size"),
    (ValueError, "Expected more than 1 value per channel", "batch norm needs a larger data.batch_size or image_size"),
    (OSError, "No space left", "make room, then go on with resume=last"),
    (MisconfigurationException, "", "see trainer= and +trainer.* on the command line"),
)
"""Errors of other libraries that the user can mend: kind, a part of their text, what to do."""


def how_to_go_on(folder: Path) -> str:
    """The command that resumes the run in `folder`, for the end of a line."""
    if not (folder / "last.ckpt").exists():
        return " before an epoch was complete: nothing to resume"
    given = [word for word in HydraConfig.get().overrides.task if not word.startswith("resume=")]
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    beside = folder.absolute().parent == Path(HydraConfig.get().runtime.output_dir).parent
    usual = beside and not sweep and not any(word.startswith("hydra") for word in sys.argv[1:])
    words = [*given, "resume=last" if usual else f"resume={os.path.relpath(folder)}"]
    return f"; to go on: python {shlex.join([sys.argv[0], *words])}"


def one_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return str(error).strip().split("\n")[0]


def register() -> None:
    """Make the schema, the resolver and a `model` choice for every torchvision classifier known to Hydra."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name in models.names():
        if not (CONFIGS / "model" / f"{name}.yaml").exists():
            store.store(group="model", name=name, node={"name": name})
    OmegaConf.register_new_resolver("bits_name", bits_name, replace=True)


def quiet() -> None:
    """Our own messages in one line each; none of the tips and notices of the libraries."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    if not sys.warnoptions:
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("default", module=r"qat\.|train$|__main__$")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # no CUDA runtime: not needed
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # the table of trainer.profiler


def command() -> None:
    """What `python train.py` does."""
    quiet()
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))  # argparse wants it first
    try:
        trainer_keys = {str(key) for path in (CONFIGS / "trainer").glob("*.yaml") for key in OmegaConf.load(path)}
        choices = {group: sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")) for group in GROUPS}
        check_arguments(sys.argv[1:], models.names(), sorted(trainer_keys), choices)
        register()
        main()
    except Exception as error:
        stop(error)


if __name__ == "__main__":
    command()
