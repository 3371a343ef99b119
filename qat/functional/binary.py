"""One bit: XNOR-Net's weights (Rastegari et al. 2016, arXiv:1603.05279) and signed activations with a learned scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat import kernels
from qat.functional._checks import QatFunction, check_axis, check_scale, check_tensor, once_differentiable

__all__ = ["Binary", "BinaryActivation", "binary", "binary_activation", "binary_codes", "binary_step"]


def binary_codes(x: Tensor) -> Tensor:
    """+1 where x >= 0, else -1; NaN stays NaN. Float32."""
    x = x.float()
    return torch.where(x.isnan(), x, torch.where(x >= 0, 1.0, -1.0))


def binary_step(w: Tensor, axis: int | None) -> Tensor:
    """XNOR-Net's scale (eq. 6): the mean of |w|, floored as all scales are; shape (1,) or one per channel of `axis`."""
    magnitudes = w.float().abs()
    rows = magnitudes.reshape(1, -1) if axis is None else magnitudes.movedim(axis, 0).unsqueeze(-1).flatten(1)
    return rows.mean(1).clamp_min(kernels.SCALE_FLOOR)


class Binary(QatFunction):
    """`Binary.apply(w, axis) -> values`; see `binary`. Saves w, a Parameter that is alive anyway."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, axis: int | None) -> Tensor:
        check_tensor(w, "w", "Binary")
        check_axis(w, axis, "Binary")
        return kernels.decode(binary_codes(w), binary_step(w, axis), axis).to(w.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0])
        ctx.axis = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None]:
        if g is None:
            return None, None
        (w,) = ctx.saved_tensors
        axis, g = ctx.axis, g.float()
        codes, step = binary_codes(w), binary_step(w, axis)
        scale = kernels.broadcast(step, w.ndim, axis)
        sums = kernels.broadcast(kernels.reduce_to_scale(g * codes, step, axis), w.ndim, axis)
        through_sign = torch.where(w.float().abs() <= 1, g * scale, scale - scale)
        return (through_sign + codes * sums * (step.numel() / max(w.numel(), 1))).to(w.dtype), None


def binary(w: Tensor, axis: int | None = None) -> Tensor:
    """Binarize a weight: its signs times its mean magnitude (XNOR-Net eqs. 4-6).

        values = a * sign(w),   a = mean |w|   (per tensor, or per channel of n weights; >= 2^-60),   sign(0) = +1
        dL/dw  = a * dL/dvalues * [|w| <= 1]  +  sign(w) / n * sum of dL/dvalues * sign(w)

    The second term is the chain rule through `a`. (The paper writes it for one weight alone, as if each had its own a;
    most implementations leave it out.)

    Args:
        w: floating tensor of any shape.
        axis: channel dimension; None for one scale per tensor.

    Returns:
        Tensor of w's shape and dtype, two levels per channel; no zero.

    Raises:
        QatError: w is not a floating tensor, or has no such axis.

    Example:
        >>> import torch
        >>> from qat.functional import binary
        >>> w = torch.tensor([-0.5, 1.5], requires_grad=True)
        >>> y = binary(w); y.tolist()
        [-1.0, 1.0]
        >>> y[1].backward(); w.grad.tolist()  # |1.5| > 1: only through the mean
        [-0.5, 0.5]
    """
    values: Tensor = Binary.apply(w, axis)
    return values


class BinaryActivation(QatFunction):
    """`BinaryActivation.apply(x, scale, axis, gain) -> (values, residue)`; see `binary_activation`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor, axis: int | None, gain: float) -> tuple[Tensor, Tensor]:
        check_tensor(x, "x", "BinaryActivation")
        check_scale(x, scale, axis, "BinaryActivation")
        s = kernels.positive(scale)
        codes = binary_codes(x)
        outside = x.float().abs() > kernels.broadcast(s, x.ndim, axis)
        residue = torch.where(outside, codes * kernels.ABOVE, codes)
        residue = torch.where(x.isnan(), float(kernels.NAN), residue).to(torch.int8)
        return kernels.decode(codes, s, axis).to(x.dtype), residue

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, scale, ctx.axis, ctx.gain = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], scale)
        ctx.dtype = x.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 4
        residue, scale = ctx.saved_tensors
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_x = kernels.ste_grad(g, residue).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            slope = kernels.slope(residue, -1, 1, steps=1.0)
            grad_scale = kernels.reduce_to_scale(slope * g.float(), scale, ctx.axis) * ctx.gain
            grad_scale = kernels.positive_grad(grad_scale, scale)
        return grad_x, grad_scale, None, None


def binary_activation(x: Tensor, scale: Tensor, axis: int | None = None, gain: float = 1.0) -> Tensor:
    """Binarize a signed activation onto {-s, +s} with a learned s.

        values    = s * sign(x),   sign(0) = +1
        dL/dx     = dL/dvalues where |x| <= s, else 0   (BinaryNet's clipped estimator, arXiv:1602.02830 eq. 4, at s)
        dL/dscale = gain * sum of dL/dvalues * sign(x)

    Args:
        x: floating tensor of any shape.
        scale: float32, one element, or one per channel of `axis`.
        axis: channel dimension of a per-channel scale.
        gain: factor on the scale's gradient.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        QatError: wrong dtypes or shapes.

    Example:
        >>> import torch
        >>> from qat.functional import binary_activation
        >>> binary_activation(torch.tensor([-3.0, 0.0, 0.2]), torch.tensor([0.5])).tolist()
        [-0.5, 0.5, 0.5]
    """
    values: Tensor = BinaryActivation.apply(x, scale, axis, gain)[0]
    return values
