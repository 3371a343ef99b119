"""TQT: trained thresholds with power-of-two scales, Jain et al. 2019, arXiv:1903.08066."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qat import kernels
from qat.functional._checks import QatFunction, check_range, check_scale, check_tensor, once_differentiable

__all__ = ["TQT", "power_of_two_step", "tqt"]

EXPONENT = 40.0
"""Thresholds as used lie within 2^-40 .. 2^40; the parameter keeps its gradient beyond."""


def power_of_two_step(log2_threshold: Tensor, qmax: int) -> Tensor:
    """2^ceil(log2 t) / (qmax + 1), exact powers of two; qmax + 1 is 2^(b-1) signed and 2^b unsigned, as in eq. 4."""
    exponent = log2_threshold.clamp(-EXPONENT, EXPONENT).ceil() - round(math.log2(qmax + 1))
    return torch.ldexp(torch.ones_like(exponent), exponent)


class TQT(QatFunction):
    """`TQT.apply(x, log2_threshold, qmin, qmax, axis, gain) -> (values, residue)`; see `tqt`. Saves a byte each."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, log2_threshold: Tensor, qmin: int, qmax: int, axis: int | None, gain: float
    ) -> tuple[Tensor, Tensor | None]:
        check_tensor(x, "x", "TQT")
        check_scale(x, log2_threshold, axis, "TQT", "log2_threshold")
        check_range(qmin, qmax, "TQT")
        s = power_of_two_step(log2_threshold, qmax)
        result: tuple[Tensor, Tensor] = kernels.fake_quantize(x, s, qmin, qmax, axis, lean=True)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, threshold, ctx.qmin, ctx.qmax, ctx.axis, ctx.gain = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], threshold)
        ctx.dtype = x.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 6
        residue, threshold = ctx.saved_tensors
        s = power_of_two_step(threshold, ctx.qmax)
        grad_x, grad_scale = kernels.lsq_grad(g, residue, s, ctx.qmin, ctx.qmax, ctx.axis, ctx.needs_input_grad[:2])
        if grad_x is not None:
            grad_x = grad_x.to(ctx.dtype)
        if grad_scale is not None:
            grad_scale = grad_scale * s * (math.log(2) * ctx.gain)
        return grad_x, grad_scale, None, None, None, None


def tqt(x: Tensor, log2_threshold: Tensor, qmin: int, qmax: int, axis: int | None = None, gain: float = 1.0) -> Tensor:
    """Fake-quantize with a power-of-two scale whose threshold is learned in the log domain (TQT eqs. 4-8).

        s = 2^ceil(log2 t) / (qmax + 1)
        values = clamp(round(v), qmin, qmax) * s,   v = x / s
        dL/dx      = dL/dvalues where qmin <= v <= qmax, else 0
        dL/dlog2 t = gain * s ln 2 * sum dL/dvalues * (round(v) - v inside; qmin below; qmax above)

    Inside is where v lies within the range, as for all methods here; the paper takes round(v) (eqs. 6-7), which lets
    half a step more pass at each end. Thresholds beyond 2^+-40 are used as that.

    Args:
        x: floating tensor of any shape.
        log2_threshold: float32, one element, or one per channel of `axis`; any sign.
        qmin: least code, <= 0.
        qmax: largest code, 2^k - 1.
        axis: channel dimension of per-channel thresholds.
        gain: factor on the threshold's gradient (the paper trains it with Adam, which needs none).

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        QatError: wrong dtypes or shapes.

    Example:
        >>> import torch
        >>> from qat.functional import tqt
        >>> tqt(torch.tensor([0.3, 0.9, 5.0]), torch.tensor([-0.2]), 0, 3).tolist()  # s = 2^0 / 4
        [0.25, 0.75, 0.75]
    """
    values: Tensor = TQT.apply(x, log2_threshold, qmin, qmax, axis, gain)[0]
    return values
