"""Low-precision forward, float32 backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat import kernels
from qat.config import QatError
from qat.functional._checks import QatFunction, check_tensor

__all__ = ["MixedPrecision", "mixed_precision"]

LOW = (torch.bfloat16, torch.float16)


class MixedPrecision(QatFunction):
    """`MixedPrecision.apply(x, dtype) -> values`; see `mixed_precision`. Saves nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        check_tensor(x, "x", "MixedPrecision")
        if dtype not in LOW:
            raise QatError(f"MixedPrecision: dtype must be torch.bfloat16 or torch.float16; got {dtype}")
        values = kernels.round_dtype(x, dtype)
        return values.clone() if values is x else values  # x already has that dtype: an output must not be the input

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None]:
        return g, None


def mixed_precision(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Round x to bfloat16 or float16 in the forward; pass the gradient through in x's own dtype.

    The values are those of `dtype`, held in x's dtype, so what follows sees the precision of deployment while gradients
    and accumulation stay float32 (Micikevicius et al. 2018, arXiv:1710.03740, keep a float32 master copy likewise).
    Beyond the range of float16 (65504) values become infinite, as a cast makes them.

    Args:
        x: floating tensor of any shape.
        dtype: torch.bfloat16 or torch.float16.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        QatError: x not a floating tensor, or another dtype.

    Example:
        >>> import torch
        >>> from qat.functional import mixed_precision
        >>> x = torch.tensor([1.001], requires_grad=True)
        >>> y = mixed_precision(x); y.item()
        1.0
        >>> (3 * y).backward(); x.grad.item()
        3.0
    """
    values: Tensor = MixedPrecision.apply(x, dtype)
    return values
