"""8-bit floats, Micikevicius et al. 2022, arXiv:2209.05433."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat import kernels
from qat.config import QatError
from qat.functional._checks import QatFunction, check_scale, check_tensor, once_differentiable

__all__ = ["FP8", "fp8", "fp8_max"]

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def fp8_max(dtype: torch.dtype) -> float:
    """Largest finite value: 448 for e4m3, 57344 for e5m2."""
    return torch.finfo(dtype).max


class FP8(QatFunction):
    """`FP8.apply(x, scale, dtype, axis) -> (values, mask)`; see `fp8`. Saves a byte per element."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor, dtype: torch.dtype, axis: int | None) -> tuple[Tensor, Tensor]:
        check_tensor(x, "x", "FP8")
        check_scale(x, scale, axis, "FP8")
        if dtype not in DTYPES:
            raise QatError(f"FP8: dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got {dtype}")
        s = kernels.positive(scale)
        v = x.float() / kernels.broadcast(s, x.ndim, axis)
        inside = v.clamp(-fp8_max(dtype), fp8_max(dtype))  # a cast beyond the range would give NaN or infinity
        mask = torch.where(v.isnan(), kernels.NAN, torch.where(v == inside, 0, kernels.ABOVE)).to(torch.int8)
        return kernels.decode(inside.to(dtype), s, axis).to(x.dtype), mask

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])
        ctx.dtype = inputs[0].dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, None, None, None]:
        if g is None or not ctx.needs_input_grad[0]:
            return None, None, None, None
        (mask,) = ctx.saved_tensors
        return kernels.ste_grad(g, mask).to(ctx.dtype), None, None, None


def fp8(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, axis: int | None = None) -> Tensor:
    """Round x / scale to an 8-bit float, saturating, and scale it back; straight-through gradient within the range.

        values = fp8(clamp(x / s, -max, max)) * s,   max = 448 (e4m3) or 57344 (e5m2)
        dL/dx  = dL/dvalues where |x / s| <= max, else 0

    Not a uniform grid: there are no integer codes, and a deployed model keeps such a tensor in float.

    Args:
        x: floating tensor of any shape.
        scale: float32, one element, or one per channel of `axis`; gets no gradient.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        axis: channel dimension of a per-channel scale.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        QatError: wrong dtypes or shapes.

    Example:
        >>> import torch
        >>> from qat.functional import fp8
        >>> fp8(torch.tensor([1.06, 500.0]), torch.ones(1)).tolist()
        [1.0, 448.0]
    """
    values: Tensor = FP8.apply(x, scale, dtype, axis)[0]
    return values
