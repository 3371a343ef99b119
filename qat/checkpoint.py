"""Checkpoints that rebuild the model: a state dict and the plan as plain data, read without unpickling code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from qat.config import QatError
from qat.files import read_checkpoint, write_checkpoint
from qat.models import build, without_prefix
from qat.planning import Plan
from qat.swap import apply_plan, dequantize, live_plan, quantizers_of

__all__ = ["describe", "load", "save"]

FORMAT = 1


def describe(model: nn.Module, builder: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a checkpoint needs beside the state dict: plain dicts, lists and strings.

    Args:
        model: quantized or float.
        builder: arguments of `qat.models.build` that make the float model, such as
            `{"name": "resnet18", "num_classes": 10}`; None for a model of your own.
    """
    plan = live_plan(model).to_dicts() if quantizers_of(model) else []
    return {"format": FORMAT, "builder": builder, "plan": plan}


def save(model: nn.Module, path: str | Path, builder: dict[str, Any] | None = None) -> None:
    """Write a checkpoint that `load` rebuilds, from any training loop. Atomic: an old file stays till the new is whole.

    Args:
        model: quantized or float.
        path: the file.
        builder: see `describe`; without it `load` needs the float model.
    """
    model = unwrap(model)
    write_checkpoint({"state_dict": model.state_dict(), "qat": describe(model, builder)}, path)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile and data parallelism, whose names it has."""
    while hasattr(model, "_orig_mod") or isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    return model


def load(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Rebuild a model from a checkpoint: build the float model, apply the plan, load the state. In eval mode.

    Args:
        path: `best.ckpt` of a run, or a file that `save` wrote.
        model: the float model, if the checkpoint does not know how to build it. It is quantized in place.

    Returns:
        The model; keep what is returned.

    Raises:
        QatError: not such a checkpoint, of another model, or one that needs `model`.
    """
    content = read_checkpoint(path)
    about = content.get("qat")
    if not isinstance(about, dict) or not isinstance(content.get("state_dict"), dict):
        raise QatError(
            f"{path} is not a qat checkpoint: expected the keys 'qat' and 'state_dict' (a float state dict goes "
            "to model.checkpoint=, or to load_state_dict)"
        )
    if about.get("format") != FORMAT:
        raise QatError(f"{path} has checkpoint format {about.get('format')!r}; this version reads {FORMAT}")
    plan = Plan.from_dicts(about.get("plan") or [])
    if model is None:
        builder = about.get("builder")
        if not isinstance(builder, dict):
            raise QatError(f"{path} was saved from a model of your own: qat.load(path, model=YourModel())")
        classes = builder.get("num_classes", 1000)
        model, _ = build(str(builder.get("name")), classes if isinstance(classes, int) else 1000)
    if plan.entries:
        apply_plan(model, plan)
    state = without_prefix(content["state_dict"], model)
    try:
        absent = [key for key in model.state_dict() if key.endswith(".calibrated") and key not in state]
        if absent:  # load_state_dict would take a state dict without any for a float one
            raise RuntimeError(f"it lacks the state of quantizers, such as {absent[0]!r}")
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        if plan.entries:
            dequantize(model)
        lines = [line.strip() for line in str(error).split("\n")]
        raise QatError(f"{path} does not fit {type(model).__name__}: {' '.join(lines[1:2]) or lines[0]}") from None
    return model.eval()
