"""Ternary weight networks, Li et al. 2016, arXiv:1605.04711."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat import kernels
from qat.functional._checks import QatFunction, check_axis, check_tensor, once_differentiable

__all__ = ["Ternary", "ternary", "ternary_codes"]

THRESHOLD = 0.7
"""Times mean |w|: the paper's approximation of the best threshold (eq. 6)."""


def ternary_codes(w: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Codes -1, 0, 1 (float32; NaN stays) and the step (eq. 5: mean |w| of the others than 0), shape (1,) or (C,)."""
    magnitudes = w.float().abs()
    rows = magnitudes.reshape(1, -1) if axis is None else magnitudes.movedim(axis, 0).unsqueeze(-1).flatten(1)
    mean = rows.mean(1)
    kept = magnitudes > THRESHOLD * kernels.broadcast(mean, w.ndim, axis)
    count = kernels.reduce_to_scale(kept.float(), mean, axis)
    total = kernels.reduce_to_scale(torch.where(kept, magnitudes, 0.0), mean, axis)
    step = total / count.clamp_min(1) + (mean - mean)  # NaN anywhere in a channel shows in its step
    codes = torch.where(kept, w.float().sign(), torch.where(w.isnan(), w.float(), 0.0))
    return codes, step.clamp_min(kernels.SCALE_FLOOR)


class Ternary(QatFunction):
    """`Ternary.apply(w, axis) -> values`; see `ternary`. Saves nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, axis: int | None) -> Tensor:
        check_tensor(w, "w", "Ternary")
        check_axis(w, axis, "Ternary")
        codes, step = ternary_codes(w, axis)
        return kernels.decode(codes, step, axis).to(w.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None]:
        return g, None


def ternary(w: Tensor, axis: int | None = None) -> Tensor:
    """Ternarize a weight to {-a, 0, a} (TWN eqs. 3-6).

        d = 0.7 mean |w|,   a = mean of |w| where |w| > d,   values = a * sign(w) where |w| > d, else 0
        dL/dw = dL/dvalues, everywhere: the float weight takes the ternary weight's gradient (section 2.3)

    Args:
        w: floating tensor of any shape.
        axis: channel dimension; None for one threshold and step per tensor.

    Returns:
        Tensor of w's shape and dtype, three levels per channel.

    Raises:
        QatError: w is not a floating tensor, or has no such axis.

    Example:
        >>> import torch
        >>> from qat.functional import ternary
        >>> ternary(torch.tensor([-2.0, 0.1, 1.0, 4.0])).round(decimals=4).tolist()  # d = 1.2425, a = (2 + 4) / 2
        [-3.0, 0.0, 0.0, 3.0]
    """
    values: Tensor = Ternary.apply(w, axis)
    return values
