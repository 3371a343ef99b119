"""LSQ+: a learned scale and a learned offset, Bhalgat et al. 2020, arXiv:2004.09576."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qat import kernels
from qat.functional._checks import QatFunction, check_range, check_scale, check_tensor, once_differentiable

__all__ = ["LSQPlus", "lsq_plus", "zero_point"]


def zero_point(offset: Tensor, qmin: int, qmax: int) -> Tensor:
    """The integer zero point of a learned offset: rounded, kept within the codes. Float32, one element."""
    return offset.round().clamp(qmin, qmax)


class LSQPlus(QatFunction):
    """`LSQPlus.apply(x, scale, offset, qmin, qmax, gain) -> (values, residue)`; see `lsq_plus`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, offset: Tensor, qmin: int, qmax: int, gain: float
    ) -> tuple[Tensor, Tensor | None]:
        check_tensor(x, "x", "LSQPlus")
        check_scale(x, scale, None, "LSQPlus")
        check_range(qmin, qmax, "LSQPlus")
        check_scale(x, offset, None, "LSQPlus", "offset")
        s, z = kernels.positive(scale), zero_point(offset, qmin, qmax).reshape(())
        result: tuple[Tensor, Tensor] = kernels.fake_quantize(x, s, qmin - z, qmax - z, None, lean=True)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, scale, offset, ctx.qmin, ctx.qmax, ctx.gain = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], scale, offset)
        ctx.dtype = x.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 6
        residue, scale, offset = ctx.saved_tensors
        s, z = kernels.positive(scale), zero_point(offset, ctx.qmin, ctx.qmax).reshape(())
        grad_x, grad_scale = kernels.lsq_grad(g, residue, s, ctx.qmin - z, ctx.qmax - z, None, ctx.needs_input_grad[:2])
        grad_offset = None
        if grad_x is not None:
            grad_x = grad_x.to(ctx.dtype)
        if grad_scale is not None:
            grad_scale = kernels.positive_grad(grad_scale * ctx.gain, scale)
        if ctx.needs_input_grad[2]:
            clipped = (g.float() - kernels.ste_grad(g, residue)).sum()
            grad_offset = (-ctx.gain * clipped * s.reshape(())).reshape(offset.shape)
        return grad_x, grad_scale, grad_offset, None, None, None


def lsq_plus(x: Tensor, scale: Tensor, offset: Tensor, qmin: int, qmax: int, gain: float = 1.0) -> Tensor:
    """Fake-quantize x onto a grid with learned scale and learned zero point (LSQ+ eqs. 4-8, in zero-point form).

        z = clamp(round(offset), qmin, qmax)            an integer, so the grid deploys as it is and holds zero exactly
        values = (clamp(round(v) + z, qmin, qmax) - z) * s,   v = x / s,   s = |scale|
        dL/dx      = dL/dvalues where qmin - z <= v <= qmax - z, else 0
        dL/dscale  = gain * sum dL/dvalues * (round(v) - v inside; qmin - z below; qmax - z above)
        dL/doffset = gain * sum dL/dvalues * (0 inside; -s outside)

    The paper adds a float beta = -z * s; rounding it to the grid is what makes it deployable.

    Args:
        x: floating tensor of any shape.
        scale: float32, one element.
        offset: float32, one element, in units of codes.
        qmin: least code, <= 0.
        qmax: largest code, > 0.
        gain: factor on the gradients of scale and offset.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        QatError: wrong dtypes or shapes.

    Example:
        >>> import torch
        >>> from qat.functional import lsq_plus
        >>> x = torch.tensor([-0.4, 0.3, 9.0], requires_grad=True)
        >>> offset = torch.tensor([1.0], requires_grad=True)
        >>> y = lsq_plus(x, torch.tensor([0.5]), offset, 0, 15); y.tolist()
        [-0.5, 0.5, 7.0]
        >>> y.sum().backward(); offset.grad.item()
        -0.5
    """
    values: Tensor = LSQPlus.apply(x, scale, offset, qmin, qmax, gain)[0]
    return values
