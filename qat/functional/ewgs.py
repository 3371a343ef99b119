"""EWGS: element-wise gradient scaling, Lee et al. 2021, arXiv:2104.00903."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qat import kernels
from qat.functional._checks import QatFunction, check_range, check_scale, check_tensor, once_differentiable

__all__ = ["EWGS", "ewgs"]


class EWGS(QatFunction):
    """`EWGS.apply(x, scale, qmin, qmax, axis, gain, delta) -> (values, residue)`; see `ewgs`. Saves a byte each."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, qmin: int, qmax: int, axis: int | None, gain: float, delta: float
    ) -> tuple[Tensor, Tensor | None]:
        check_tensor(x, "x", "EWGS")
        check_scale(x, scale, axis, "EWGS")
        check_range(qmin, qmax, "EWGS")
        s = kernels.positive(scale)
        result: tuple[Tensor, Tensor] = kernels.fake_quantize(x, s, qmin, qmax, axis, lean=True)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, scale, ctx.qmin, ctx.qmax, ctx.axis, ctx.gain, ctx.delta = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], scale)
        ctx.dtype = x.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 7
        residue, scale = ctx.saved_tensors
        s = kernels.positive(scale)
        needs = ctx.needs_input_grad[:2]
        grad_x, grad_scale = kernels.lsq_grad(g, residue, s, ctx.qmin, ctx.qmax, ctx.axis, needs)
        if grad_x is not None:
            error = residue.float() * (-1 / kernels.STEPS / (ctx.qmax - ctx.qmin))  # x - values, range as 0..1
            grad_x = (grad_x + ctx.delta * grad_x.abs() * error).to(ctx.dtype)
        if grad_scale is not None:
            grad_scale = kernels.positive_grad(grad_scale * ctx.gain, scale)
        return grad_x, grad_scale, None, None, None, None, None


def ewgs(
    x: Tensor, scale: Tensor, qmin: int, qmax: int, axis: int | None = None, gain: float = 1.0, delta: float = 1e-3
) -> Tensor:
    """Fake-quantize as LSQ; scale each element's gradient by where it lies in its step (EWGS eq. 5).

        values = clamp(round(v), qmin, qmax) * s,   v = x / s
        dL/dx  = g * (1 + delta * sign(g) * e) inside, 0 outside;   g = dL/dvalues,   e = (v - round(v)) / (qmax - qmin)

    `e` is in the paper's units, in which the whole range is 1. (Where it is taken in codes, delta acts 2^bits - 1 times
    as strongly.) The scale's gradient is LSQ's; e is known to 1/504 of a step.

    Args:
        x: floating tensor of any shape.
        scale: float32, one element, or one per channel of `axis`.
        qmin: least code, <= 0.
        qmax: largest code, > 0.
        axis: channel dimension of a per-channel scale.
        gain: factor on the scale's gradient.
        delta: strength, >= 0; 0 is the straight-through estimator.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        QatError: wrong dtypes or shapes.

    Example:
        >>> import torch
        >>> from qat.functional import ewgs
        >>> x = torch.tensor([0.25, 0.75], requires_grad=True)
        >>> ewgs(x, torch.ones(1), 0, 3, delta=0.3).sum().backward()
        >>> [round(v, 4) for v in x.grad.tolist()]  # 1 + 0.3 * (+-0.25) / 3
        [1.025, 0.975]
    """
    values: Tensor = EWGS.apply(x, scale, qmin, qmax, axis, gain, delta)[0]
    return values
