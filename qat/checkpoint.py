"""Checkpoints that rebuild the model: a state dict and the plan as plain data, read without unpickling code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from qat.config import QatError
from qat.files import read_checkpoint, write_checkpoint
from qat.models import build
from qat.planning import Plan
from qat.swap import apply_plan, live_plan, quantizers_of

__all__ = ["describe", "load", "save"]

FORMAT = 1
PREFIX = "model."
"""Where a Lightning module keeps the model, and so how its state dict names it."""


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
    write_checkpoint({"state_dict": model.state_dict(), "qat": describe(model, builder)}, path)


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
    if model is None:
        builder = about.get("builder")
        if not isinstance(builder, dict):
            raise QatError(f"{path} was saved from a model of your own: qat.load(path, model=YourModel())")
        model, _ = build(str(builder.get("name")), int(builder.get("num_classes", 1000)))
    state = content["state_dict"]
    own = {k.removeprefix(PREFIX): v for k, v in state.items() if k.startswith(PREFIX)}
    if len(own) != len(state):
        own = state
    plan = Plan.from_dicts(about.get("plan") or [])
    if plan.entries:
        model = apply_plan(model, plan)
    try:
        model.load_state_dict(own)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).split("\n")]
        raise QatError(f"{path} does not fit {type(model).__name__}: {' '.join(lines[1:2]) or lines[0]}") from None
    return model.eval()
