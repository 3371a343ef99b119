"""Learned step size quantization: LSQ, Esser et al. 2020, arXiv:1902.08153."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qat import kernels
from qat.functional._checks import QatFunction, check_range, check_scale, check_tensor, once_differentiable

__all__ = ["LSQ", "lsq"]


class LSQ(QatFunction):
    """`LSQ.apply(x, scale, qmin, qmax, axis, gain, lean) -> (values, residue)`; see `lsq`.

    Saves x and scale (weights: x is a Parameter, alive anyway), or with `lean` one byte per element in place of x.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, qmin: int, qmax: int, axis: int | None, gain: float, lean: bool
    ) -> tuple[Tensor, Tensor | None]:
        check_tensor(x, "x", "LSQ")
        check_scale(x, scale, axis, "LSQ")
        check_range(qmin, qmax, "LSQ")
        s = kernels.positive(scale)
        result: tuple[Tensor, Tensor] = kernels.fake_quantize(x, s, qmin, qmax, axis, lean)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        x, scale, ctx.qmin, ctx.qmax, ctx.axis, ctx.gain, ctx.lean = inputs
        residue = output[1]
        if residue is not None:
            ctx.mark_non_differentiable(residue)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(residue if ctx.lean else x, scale)
        ctx.dtype = x.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 7
        saved, scale = ctx.saved_tensors
        grad = kernels.lsq_grad if ctx.lean else kernels.lsq_grad_exact
        grad_x, grad_scale = grad(
            g, saved, kernels.positive(scale), ctx.qmin, ctx.qmax, ctx.axis, ctx.needs_input_grad[:2]
        )
        if grad_x is not None:
            grad_x = grad_x.to(ctx.dtype)
        if grad_scale is not None:
            grad_scale = kernels.positive_grad(grad_scale * ctx.gain, scale)
        return grad_x, grad_scale, None, None, None, None, None


def lsq(
    x: Tensor, scale: Tensor, qmin: int, qmax: int, axis: int | None = None, gain: float = 1.0, lean: bool = False
) -> Tensor:
    """Fake-quantize x onto a grid whose scale is learned (LSQ eqs. 1-3).

        values = clamp(round(v), qmin, qmax) * s,   v = x / s,   s = |scale|, floored at 2^-60
        dL/dx     = dL/dvalues                        where qmin <= v <= qmax, else 0
        dL/dscale = gain * sign(scale) * sum dL/dvalues * (round(v) - v   inside the range
                                                          qmin below, qmax above)

    The paper's gain is 1 / sqrt(N * qmax) (section 2.2); quantizers compute it. Its mask excludes the two ends of the
    range, ours includes them: a value exactly on the last code is not clipped.

    Args:
        x: floating tensor of any shape. The arithmetic and the scale's gradient are float32, also under autocast.
        scale: float32, one element, or shape (C,) for one per channel of `axis`. The values do not depend on its sign.
        qmin: least code, <= 0.
        qmax: largest code, > 0.
        axis: channel dimension of a per-channel scale; None for one scale per tensor.
        gain: factor on the scale's gradient.
        lean: save a byte per element instead of x. The gradient of x stays exact; the scale's is off by at most
            1/504 of a step per element, without bias.

    Returns:
        Tensor of x's shape and dtype with at most qmax - qmin + 1 levels (per channel). NaN stays NaN.

    Raises:
        QatError: x not a floating tensor, scale not float32 or of another shape, a range without 0.

    Example:
        >>> import torch
        >>> from qat.functional import lsq
        >>> x = torch.tensor([-1.0, 0.3, 9.0], requires_grad=True)
        >>> scale = torch.tensor([0.5], requires_grad=True)
        >>> y = lsq(x, scale, 0, 15)
        >>> y.sum().backward(); x.grad.tolist()
        [0.0, 1.0, 0.0]
        >>> scale.grad.tolist()  # 0 below, round(0.6) - 0.6 inside, 15 above
        [15.399999618530273]
    """
    values: Tensor = LSQ.apply(x, scale, qmin, qmax, axis, gain, lean)[0]
    return values
