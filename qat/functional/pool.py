"""Max pooling that keeps two bytes per window for the backward, where torch keeps its input and eight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat.functional._checks import QatFunction, check_tensor

__all__ = ["LeanMaxPool2d"]

Pair = list[int]


class LeanMaxPool2d(QatFunction):
    """`LeanMaxPool2d.apply(x, kernel_size, stride, padding, dilation, ceil_mode) -> (y, indices)`.

    As `torch.nn.functional.max_pool2d`, values and gradients. The gradient depends on where each maximum was, and of x
    on its shape only: x, which torch keeps for that, is not saved, and the places are int16 where a plane has so few.

    Args (of apply):
        x: floating (N, C, H, W).
        kernel_size, stride, padding, dilation: lists of two integers.
        ceil_mode: as in torch.

    Returns:
        y: (N, C, H', W') in x's dtype and memory format; and the indices, which have no gradient.
    """

    @staticmethod
    def forward(
        x: Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
    ) -> tuple[Tensor, Tensor]:
        check_tensor(x, "x", "LeanMaxPool2d")
        y, indices = torch.ops.aten.max_pool2d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode)
        places = x.shape[-1] * x.shape[-2]
        return y, indices.to(torch.int16 if places <= 2**15 else torch.int32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, *ctx.geometry = inputs
        ctx.shape = x.shape
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        ctx.layout = torch.channels_last if last else torch.contiguous_format
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 6
        (indices,) = ctx.saved_tensors
        like_x = torch.empty(ctx.shape, dtype=g.dtype, device=g.device, memory_format=ctx.layout)  # never read
        backward = torch.ops.aten.max_pool2d_with_indices_backward
        return backward(g, like_x, *ctx.geometry, indices.long()), None, None, None, None, None
