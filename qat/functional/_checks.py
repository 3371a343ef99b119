"""Input checks shared by the Functions: each failure is one line that says what was expected and what came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from qat.config import QatError


class QatFunction(Function):
    """Base of the Functions: using one other than through `.apply` is an error that says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Does not call super: torch only warns here, and then fails somewhere less clear.
        name = type(self).__name__
        raise QatError(f"{name} is an autograd Function: write {name}.apply(...), not {name}(...)")


def check_tensor(x: Any, name: str, function: str) -> None:
    """Raise QatError unless x is a floating tensor."""
    if not isinstance(x, Tensor):
        raise QatError(f"{function}: {name} must be a tensor; got {type(x).__name__}")
    if not x.is_floating_point():
        raise QatError(f"{function}: {name} must be a floating tensor; got {x.dtype}")


def check_scale(x: Tensor, scale: Any, axis: int | None, function: str) -> None:
    """Raise QatError unless scale is float32 with one element, or one per channel of `axis`."""
    check_tensor(scale, "scale", function)
    if scale.dtype != torch.float32:
        raise QatError(f"{function}: scale must be float32, also under AMP; got {scale.dtype} (try scale.float())")
    if axis is None:
        if scale.numel() != 1:
            raise QatError(f"{function}: one scale per tensor needs 1 element; got {tuple(scale.shape)} (try axis=0)")
        return
    if not -x.ndim <= axis < x.ndim:
        raise QatError(f"{function}: axis must be a dimension of x, {-x.ndim} to {x.ndim - 1}; got {axis}")
    if scale.ndim != 1 or scale.shape[0] != x.shape[axis]:
        raise QatError(
            f"{function}: scale must have shape ({x.shape[axis]},), one per channel of axis {axis}; "
            f"got {tuple(scale.shape)}"
        )


def check_range(qmin: int, qmax: int, function: str) -> None:
    """Raise QatError unless the codes qmin..qmax include 0 and one positive code."""
    if not qmin <= 0 < qmax:
        raise QatError(
            f"{function}: expected qmin <= 0 < qmax, got qmin={qmin}, qmax={qmax} (1-bit signed: use a binary method)"
        )
