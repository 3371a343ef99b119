"""Fake-quantize with a fixed scale and the straight-through estimator (Bengio et al. 2013, arXiv:1308.3432)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qat import kernels
from qat.functional._checks import QatFunction, check_range, check_scale, check_tensor, once_differentiable

__all__ = ["STE", "ste"]


class STE(QatFunction):
    """`STE.apply(x, scale, qmin, qmax, axis) -> (values, residue)`; see `ste`.

    Saves one byte per element (the residue), never x.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor, qmin: int, qmax: int, axis: int | None) -> tuple[Tensor, Tensor]:
        check_tensor(x, "x", "STE")
        check_scale(x, scale, axis, "STE")
        check_range(qmin, qmax, "STE")
        s = kernels.positive(scale)
        result: tuple[Tensor, Tensor] = kernels.fake_quantize(x, s, qmin, qmax, axis, lean=True)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])
        ctx.dtype = inputs[0].dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, None, None, None, None]:
        if g is None or not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        (residue,) = ctx.saved_tensors
        return kernels.ste_grad(g, residue).to(ctx.dtype), None, None, None, None


def ste(x: Tensor, scale: Tensor, qmin: int, qmax: int, axis: int | None = None) -> Tensor:
    """Fake-quantize x onto a grid whose scale is fixed; the gradient passes where x is inside the range.

        values = clamp(round(x / s), qmin, qmax) * s,   s = |scale|
        dL/dx  = dL/dvalues  where qmin <= x / s <= qmax, else 0

    Args:
        x: floating tensor of any shape. The arithmetic is float32.
        scale: float32, one element, or shape (C,) for one per channel of `axis`. It gets no gradient.
        qmin: least code, <= 0.
        qmax: largest code, > 0.
        axis: channel dimension of a per-channel scale; None for one scale per tensor.

    Returns:
        Tensor of x's shape and dtype with at most qmax - qmin + 1 levels (per channel). NaN stays NaN.

    Raises:
        QatError: x not a floating tensor, scale not float32 or of another shape, a range without 0.

    Example:
        >>> import torch
        >>> from qat.functional import ste
        >>> x = torch.tensor([-1.0, 0.3, 9.0], requires_grad=True)
        >>> y = ste(x, torch.tensor([0.5]), 0, 15)
        >>> y.tolist()
        [0.0, 0.5, 7.5]
        >>> y.sum().backward(); x.grad.tolist()
        [0.0, 1.0, 0.0]
    """
    values: Tensor = STE.apply(x, scale, qmin, qmax, axis)[0]
    return values
