"""What the Functions share: a base class, `once_differentiable`, and input checks.

Each failure of a check is one line that says what was expected and what came.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Forward with autograd, except under `torch.jit.trace`, which cannot save a model that calls Python."""
        if torch.compiler.is_dynamo_compiling():
            return cls.apply(*args)  # no recursion: the compiler reads it as torch's own
        if torch.jit.is_tracing():
            return cls.forward(*(a.detach() if isinstance(a, Tensor) else a for a in args))
        return super().apply(*args)


class NoSecondDerivative(Function):
    """Passes `count` tensors through; its backward is an error. The rest of `tensors` is what they depend on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> None:
        raise QatError(
            f"trying to differentiate {ctx.name} twice: its codes have no second derivative "
            "(leave out create_graph=True, or the outer torch.func.grad)"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make differentiating the result of a backward an error.

    torch's decorator of this name does so for torch.autograd, but under torch.func it makes all second derivatives
    zero, without a word (2.14).
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *g: Tensor | None) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *g)  # there torch itself refuses a second derivative
        with torch.no_grad():
            result = backward(ctx, *g)
        if not torch.is_grad_enabled():
            return result
        grads = result if isinstance(result, tuple) else (result,)
        given = [t for t in grads if t is not None]
        name = type(ctx).__name__.removesuffix("Backward").removesuffix("Generated")
        sources = [t for t in (*g, *ctx.saved_tensors) if t is not None and t.is_floating_point()]
        marked = iter(NoSecondDerivative.apply(name, len(given), *given, *sources))
        return tuple(None if t is None else next(marked) for t in grads)

    return wrapper


def check_tensor(x: Any, name: str, function: str) -> None:
    """Raise QatError unless x is a floating tensor."""
    if not isinstance(x, Tensor):
        raise QatError(f"{function}: {name} must be a tensor; got {type(x).__name__}")
    if not x.is_floating_point():
        raise QatError(f"{function}: {name} must be a floating tensor; got {x.dtype}")


def check_axis(x: Tensor, axis: int | None, function: str) -> None:
    """Raise QatError unless axis is a dimension of x, or None."""
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise QatError(f"{function}: axis must be a dimension of x, {-x.ndim} to {x.ndim - 1}; got {axis}")


def check_scale(x: Tensor, scale: Any, axis: int | None, function: str, name: str = "scale") -> None:
    """Raise QatError unless scale is float32 with one element, or one per channel of `axis`."""
    check_tensor(scale, name, function)
    if scale.dtype != torch.float32:
        raise QatError(f"{function}: {name} must be float32, also under AMP; got {scale.dtype} (try {name}.float())")
    if torch.jit.is_tracing():
        return  # sizes are tensors there, and comparing them warns
    if axis is None:
        if scale.numel() != 1:
            raise QatError(f"{function}: one {name} per tensor needs 1 element; got {tuple(scale.shape)} (try axis=0)")
        return
    check_axis(x, axis, function)
    if scale.ndim != 1 or scale.shape[0] != x.shape[axis]:
        raise QatError(
            f"{function}: {name} must have shape ({x.shape[axis]},), one per channel of axis {axis}; "
            f"got {tuple(scale.shape)}"
        )


def check_range(qmin: int, qmax: int, function: str) -> None:
    """Raise QatError unless the codes qmin..qmax include 0 and one positive code."""
    if not qmin <= 0 < qmax:
        raise QatError(
            f"{function}: expected qmin <= 0 < qmax, got qmin={qmin}, qmax={qmax} (1-bit signed: use a binary method)"
        )
