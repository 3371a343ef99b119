"""What can be configured: plain dataclasses, their defaults, and the checks that turn a bad value into one clear line.

Standard library only. The dataclasses own types, library defaults and documentation; the YAML files in `configs/` own
the choices of an experiment. `check_arguments` reads a command line before Hydra does, because Hydra's own answer to a
misspelt key is to suggest `+key`, which would then be ignored in silence.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

__all__ = [
    "METHODS",
    "Config",
    "DataConfig",
    "Format",
    "LoggerConfig",
    "ModelConfig",
    "OptimConfig",
    "QatError",
    "QuantConfig",
    "RecipeConfig",
    "Rule",
    "TensorConfig",
    "bits_name",
    "check_arguments",
    "closest",
    "parse_bits",
]


class QatError(ValueError):
    """Raised for anything a user can mend. The text says what was expected, what came, and what to type."""


# --- bits -------------------------------------------------------------------------------------------------------------

NAMED_FORMATS = {
    "float": None,
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""The formats that are not integers, by the name a user types; the value is torch's dtype name."""

BITS_HELP = "1 to 8, w<bits>a<bits> such as w4a8, float, bf16, fp16, fp8, fp8_e5m2"


@dataclass(frozen=True)
class Format:
    """The number format of one tensor: an integer of `bits`, or a floating dtype, or float32 left alone.

    Attributes:
        bits: storage bits per element: 1 to 8 for integers, 8 or 16 for low floats, 32 for float.
        dtype: torch dtype name of a low-precision float; None for integers and for float.
    """

    bits: int
    dtype: str | None = None

    @property
    def is_float(self) -> bool:
        """True when the tensor is left as it is."""
        return self.bits == 32

    @property
    def is_integer(self) -> bool:
        """True when the tensor becomes integer codes."""
        return not self.is_float and self.dtype is None

    def __str__(self) -> str:
        if self.is_float:
            return "float"
        if self.dtype is None:
            return str(self.bits)
        return next(name for name, dtype in NAMED_FORMATS.items() if dtype == self.dtype)


def parse_format(bits: Any, where: str = "bits") -> Format:
    """Read the format of one tensor: an integer 1..8 or one of `NAMED_FORMATS`.

    Raises:
        QatError: for anything else, naming `where`.
    """
    if isinstance(bits, Format):
        return bits
    text = str(bits).strip().lower()
    if text in NAMED_FORMATS:
        dtype = NAMED_FORMATS[text]
        return Format(32) if dtype is None else Format(8 if dtype.startswith("float8") else 16, dtype)
    if isinstance(bits, bool) or not re.fullmatch(r"[0-9]+", text) or not 1 <= int(text) <= 8:
        raise QatError(f"{where} must be {BITS_HELP}; got {bits!r} (try {where}=4)")
    return Format(int(text))


def parse_bits(bits: Any, where: str = "bits") -> tuple[Format, Format]:
    """Read a bit width as a user writes it into the formats of (weights, activations).

    >>> [str(f) for f in parse_bits("w4a8")]
    ['4', '8']
    >>> [str(f) for f in parse_bits(3)]
    ['3', '3']

    Raises:
        QatError: outside 1..8 and not a named form.
    """
    if isinstance(bits, str) and (pair := re.fullmatch(r"w([a-z0-9_]+?)a([a-z0-9_]+)", bits.strip().lower())):
        try:
            return parse_format(pair[1], where), parse_format(pair[2], where)
        except QatError:
            raise QatError(f"{where} must be {BITS_HELP}; got {bits!r} (try {where}=w4a8)") from None
    both = parse_format(bits, where)
    return both, both


def bits_name(bits: Any, weight_bits: Any = None, act_bits: Any = None) -> str:
    """Name a run by its bit widths, for folders and tables: `w4a4`, `w2a8`, `fp8`, `float`.

    >>> bits_name(4, act_bits=8)
    'w4a8'
    >>> bits_name("bf16")
    'bf16'
    """
    weight, act = parse_bits(bits)
    weight = weight if weight_bits is None else parse_format(weight_bits, "quant.weight.bits")
    act = act if act_bits is None else parse_format(act_bits, "quant.act.bits")
    return str(weight) if weight == act and not weight.is_integer else f"w{weight}a{act}"


# --- the configuration tree -------------------------------------------------------------------------------------------

METHODS: dict[str, Any] = {}  # by name: the table of qat.quantizers, which fills it; a caller may add to it
INITS = ("lsq", "minmax", "percentile", "mse")
PLACEMENTS = ("layer",)
FORWARDS = ("auto", "integer", "fake")
LOGGERS = ("csv", "tensorboard")
DATASETS = ("digits", "fashion_mnist", "cifar10", "cifar100", "imagenet", "imagefolder", "synthetic")


@dataclass
class TensorConfig:
    """How one kind of tensor (weights, or activations) is quantized; null means what `QuantConfig` says."""

    bits: Any = None
    method: str | None = None
    init: str | None = None  # initial scale: lsq | minmax | percentile | mse; null: the method's own choice
    granularity: Any = None  # weights: channel | tensor | weights per group, such as 64; null: channel


@dataclass
class Rule:
    """One exception: every layer whose name matches the glob gets these bits, or this method, or both."""

    match: str = ""
    bits: Any = None
    method: str | None = None


@dataclass
class QuantConfig:
    """What `qat.quantize` does. `QuantConfig(bits=4)` is a complete choice.

    Precedence, weakest first: `bits`, `weight.bits` / `act.bits`, `first_last_bits`, then `rules` in their order.
    """

    bits: Any = 4
    method: str = "lsq"
    weight: TensorConfig = field(default_factory=TensorConfig)
    act: TensorConfig = field(default_factory=TensorConfig)
    first_last_bits: Any = 8  # never fewer bits than asked for elsewhere; null: no exception
    rules: list[Rule] = field(default_factory=list)
    placement: str = "layer"
    forward: str = "auto"  # convolve codes where this machine does so exactly (CPU); integer: linear too; fake: values
    learn_input_scale: bool = False  # the image's scale: learning it needs the image's gradient, 7-9 % of a step

    def check(self) -> QuantConfig:
        """Return self, or raise QatError naming the first bad value."""
        parse_bits(self.bits)
        for name, tensor in (("weight", self.weight), ("act", self.act)):
            if tensor.bits is not None:
                parse_format(tensor.bits, f"quant.{name}.bits")
            if tensor.method is not None:
                choose(tensor.method, METHODS, f"quant.{name}.method")
            if tensor.init is not None:
                choose(tensor.init, INITS, f"quant.{name}.init")
        check_granularity(self.weight.granularity)
        if self.act.granularity not in (None, "tensor"):
            raise QatError(f"quant.act.granularity can only be tensor; got {self.act.granularity!r}")
        choose(self.method, METHODS, "quant.method")
        choose(self.placement, PLACEMENTS, "quant.placement")
        choose(self.forward, FORWARDS, "quant.forward")
        if self.first_last_bits is not None:
            parse_bits(self.first_last_bits, "quant.first_last_bits")
        for rule in self.rules:
            if not rule.match:
                raise QatError("a rule in quant.rules needs match=, a glob over layer names such as 'layer4.*'")
            if rule.bits is None and rule.method is None:
                raise QatError(f"the rule for {rule.match!r} in quant.rules changes nothing: give it bits or method")
            if rule.bits is not None:
                parse_bits(rule.bits, f"rule {rule.match!r}: bits")
            if rule.method is not None:
                choose(rule.method, METHODS, f"rule {rule.match!r}: method")
        return self


def check_granularity(value: Any) -> None:
    """Raise QatError unless this is how weights can share scales."""
    size = value if isinstance(value, int) and not isinstance(value, bool) else 0
    if value not in (None, "channel", "tensor") and size < 2:
        raise QatError(f"quant.weight.granularity must be channel, tensor or a group size from 2 on; got {value!r}")


@dataclass
class ModelConfig:
    """Which torchvision classifier, and where its float weights come from."""

    name: str = "resnet18"
    weights: str | None = None  # a torchvision weights name, such as DEFAULT (downloaded)
    checkpoint: str | None = None  # a file with a float state dict, or a checkpoint of an earlier float run


@dataclass
class DataConfig:
    """Which images, and how they are batched."""

    name: str = "digits"
    root: str | None = None  # folder with the files; null: the data set's own usual place
    image_size: int = 32
    batch_size: int = 64
    num_classes: int = 10  # for `synthetic`; other data sets know theirs
    val_fraction: float = 0.1  # fixed share of the training images that chooses the best checkpoint
    limit: int | None = None  # use only the first N training images of the fixed shuffle
    augment: bool = True
    workers: int = 2  # only image folders use worker processes


@dataclass
class OptimConfig:
    """SGD with momentum and a cosine schedule; scales, biases and norms have no weight decay."""

    lr: float = 0.01  # quantization-aware stage
    scale_lr: float | None = None  # null: lr
    float_lr: float = 0.01  # float stage
    momentum: float = 0.9
    weight_decay: float = 1e-4
    nesterov: bool = True


@dataclass
class RecipeConfig:
    """How long each stage trains."""

    float_epochs: int = 10  # only when the model does not come trained (model.weights, model.checkpoint)
    epochs: int = 10
    calibration_batches: int = 8


@dataclass
class LoggerConfig:
    """Where metrics go besides metrics.csv."""

    name: str = "csv"


@dataclass
class Config:
    """The whole experiment: the schema that every key on the command line is checked against."""

    bits: Any = 4
    budget: Any = None
    seed: int = 0
    resume: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    trainer: dict[str, Any] = field(default_factory=dict)  # arguments of lightning's Trainer
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    def check(self) -> Config:
        """Return self, or raise QatError naming the first bad value."""
        self.quant.check()
        if self.budget is not None:
            raise QatError(f"budget goes with bits=auto, which this version does not have; got budget={self.budget!r}")
        choose(self.data.name, DATASETS, "data")
        choose(self.logger.name, LOGGERS, "logger")
        for path, least in (
            ("seed", 0),
            ("data.batch_size", 1),
            ("data.image_size", 1),
            ("data.num_classes", 2),
            ("data.workers", 0),
            ("recipe.float_epochs", 0),
            ("recipe.epochs", 0),
            ("recipe.calibration_batches", 1),
            ("optim.lr", 0),
            ("optim.scale_lr", 0),
            ("optim.float_lr", 0),
            ("optim.momentum", 0),
            ("optim.weight_decay", 0),
        ):
            value = operator.attrgetter(path)(self)
            if value is not None and not least <= value < math.inf:
                finite = " and finite" if isinstance(value, float) else ""
                raise QatError(f"{path} must be at least {least}{finite}; got {value} (try {path}={suggestion(path)})")
        if self.seed >= 2**32:
            raise QatError(f"seed must be at most {2**32 - 1}; got {self.seed} (try seed=0)")
        if self.optim.nesterov and self.optim.momentum == 0:
            raise QatError("optim.nesterov needs a momentum; got optim.momentum=0 (try optim.nesterov=false)")
        if not 0 < self.data.val_fraction < 1:
            raise QatError(f"data.val_fraction must lie between 0 and 1; got {self.data.val_fraction}")
        return self


GROUPS = ("model", "quant", "data", "optim", "recipe", "trainer", "logger", "experiment")
"""The config groups: a bare `group=choice` picks a YAML file."""


# --- checks of names --------------------------------------------------------------------------------------------------


def closest(name: str, known: Iterable[str], n: int = 3) -> str:
    """Spell out the nearest known names, for the end of an error: ` (closest: a, b)`, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=n, cutoff=0.5)
    return f" (closest: {', '.join(found)})" if found else ""


def choose(value: str, known: Iterable[str], where: str) -> str:
    """Return `value` if it is one of `known`, else raise QatError."""
    known = tuple(known)
    if value not in known:
        raise QatError(f"{where} must be one of {', '.join(known)}; got {value!r}{closest(str(value), known, 1)}")
    return value


def suggestion(path: str) -> str:
    """The library's own value of a key such as `data.batch_size`, as one types it."""
    value = operator.attrgetter(path)(Config())
    return "null" if value is None else str(value)


def schema_keys(node: type = Config, prefix: str = "") -> dict[str, type]:
    """All keys of the configuration tree by dotted path, with their types."""
    keys: dict[str, type] = {}
    for name, hint in get_type_hints(node).items():
        keys[prefix + name] = hint
        if dataclasses.is_dataclass(hint):
            keys |= schema_keys(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
    return keys


VALUED = ("--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp")
"""Hydra's options whose value is the next argument."""


def check_arguments(
    arguments: Sequence[str],
    models: Sequence[str],
    trainer_keys: Sequence[str] = (),
    choices: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Check `key=value` arguments of train.py against the schema, before Hydra sees them.

    Args:
        arguments: what follows `python train.py`.
        models: every name that `model=` takes.
        trainer_keys: the keys that the trainer YAML files set; others need `+trainer.key=`.
        choices: the choices of the other groups, by group; those left out may have any.

    Raises:
        QatError: an unknown key (with or without `+`), an unknown model or choice, a word that is not `key=value`.
    """
    keys = schema_keys()
    choices = {**(choices or {}), "model": models}
    if any(argument.startswith(("--config-dir", "-cd")) for argument in arguments):  # a user's own YAML files
        choices = {}
    before = ""
    for argument in arguments:
        before, option = argument, before
        if option in VALUED or option in ("--info", "-i") or argument.lstrip("+~").startswith(("hydra.", "hydra/")):
            continue
        name, _, value = argument.lstrip("-+~").partition("=")
        if argument.startswith("-"):
            if name in keys or name in GROUPS:
                raise QatError(f"keys have no dashes; got {argument!r}: write {name}={value or 'VALUE'}")
            continue
        if "=" not in argument and not argument.startswith("~"):
            raise QatError(
                f"expected key=value, got {argument!r}{closest(argument, keys)} (try python train.py --help)"
            )
        plus, name = argument.startswith("+"), name.split("@")[0]
        if name in choices and not set(value) & set("([{$*"):  # which Hydra would expand
            for choice in value.strip("'\"").split(","):
                if choice not in (*choices[name], "null"):
                    raise QatError(f"no {name} {choice!r}{closest(choice, choices[name])}; {expected(name, choices)}")
        elif name.startswith("trainer."):
            option = name.removeprefix("trainer.").split(".")[0]
            if not plus and trainer_keys and option not in trainer_keys:
                raise QatError(
                    f"no key {name!r}{closest(option, trainer_keys)}; "
                    f"any other argument of lightning's Trainer is written +{name}={value}"
                )
        elif name not in keys and name not in GROUPS:
            raise QatError(f"no key {name!r}{closest(name, [*keys, *GROUPS])} (python train.py --cfg job prints all)")
        elif plus and name not in GROUPS:
            raise QatError(f"{name!r} is an ordinary key: write {name}={value}, without the +")


def expected(group: str, choices: Mapping[str, Sequence[str]]) -> str:
    """What a group takes, for the end of an error."""
    return f"{group}= takes " + ("a torchvision classifier" if group == "model" else ", ".join(choices[group]))
