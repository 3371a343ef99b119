"""Stochastic rounding, Gupta et al. 2015, arXiv:1502.02551."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat import kernels
from qat.config import QatError
from qat.functional._checks import QatFunction, check_range, check_scale, check_tensor, once_differentiable

__all__ = ["Stochastic", "stochastic"]

STEPS = 126.0
"""Residue steps per code: rounding errs by up to a whole step here, not half a one."""


class Stochastic(QatFunction):
    """`Stochastic.apply(x, scale, noise, qmin, qmax, axis, gain) -> (values, residue)`; see `stochastic`.

    Saves a byte per element: the codes could not be computed again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, noise: Tensor, qmin: int, qmax: int, axis: int | None, gain: float
    ) -> tuple[Tensor, Tensor]:
        check_tensor(x, "x", "Stochastic")
        check_scale(x, scale, axis, "Stochastic")
        check_range(qmin, qmax, "Stochastic")
        check_tensor(noise, "noise", "Stochastic")
        if not torch.jit.is_tracing() and noise.shape != x.shape:
            raise QatError(f"Stochastic: noise must have x's shape {tuple(x.shape)}; got {tuple(noise.shape)}")
        s = kernels.positive(scale)
        v = x.float() / kernels.broadcast(s, x.ndim, axis)
        inside = kernels.clamp(v, qmin, qmax)
        down = inside.floor()
        codes = down + (noise < inside - down)  # not floor(v + noise): that sum rounds up too often
        marks = torch.where(
            v > inside, float(kernels.ABOVE), torch.where(v < inside, float(kernels.BELOW), float(kernels.NAN))
        )
        residue = torch.where(v == inside, ((codes - v) * STEPS).round(), marks).to(torch.int8)
        return kernels.decode(codes, s, axis).to(x.dtype), residue

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, scale, _, ctx.qmin, ctx.qmax, ctx.axis, ctx.gain = inputs
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
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_x = kernels.ste_grad(g, residue).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            slope = kernels.slope(residue, ctx.qmin, ctx.qmax, STEPS)
            grad_scale = kernels.reduce_to_scale(slope * g.float(), scale, ctx.axis) * ctx.gain
            grad_scale = kernels.positive_grad(grad_scale, scale)
        return grad_x, grad_scale, None, None, None, None, None


def stochastic(
    x: Tensor,
    scale: Tensor,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    gain: float = 1.0,
    noise: Tensor | None = None,
) -> Tensor:
    """Fake-quantize with unbiased random rounding (Gupta et al. section 3.2); gradients as LSQ's, of the codes drawn.

        values = (floor(v) + [u < v - floor(v)]) * s,   v = clamp(x / s, qmin, qmax),   u uniform in [0, 1)

    Args:
        x: floating tensor of any shape.
        scale: float32, one element, or one per channel of `axis`.
        qmin: least code, <= 0.
        qmax: largest code, > 0.
        axis: channel dimension of a per-channel scale.
        gain: factor on the scale's gradient.
        noise: u, float32 of x's shape; None to draw it from torch's generator.

    Returns:
        Tensor of x's shape and dtype; inside the range its mean over draws is x.

    Raises:
        QatError: wrong dtypes or shapes.

    Example:
        >>> import torch
        >>> from qat.functional import stochastic
        >>> stochastic(torch.tensor([0.3, 0.3]), torch.ones(1), 0, 3, noise=torch.tensor([0.6, 0.2])).tolist()
        [0.0, 1.0]
    """
    noise = torch.rand_like(x, dtype=torch.float32) if noise is None else noise
    values: Tensor = Stochastic.apply(x, scale, noise, qmin, qmax, axis, gain)[0]
    return values
