"""A convolution that runs on integers in its forward and trains as LSQ: codes are what it computes with and keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat import kernels
from qat.functional._checks import QatFunction, once_differentiable
from qat.kernels import integer

__all__ = ["Grid", "IntegerConv2d"]


class Grid(NamedTuple):
    """What a Function must know of a quantizer besides its scale: the codes, and LSQ's gradient scale."""

    qmin: int
    qmax: int
    gain: float


def in_channels_last(t: Tensor) -> bool:
    """Whether torch takes t for one in channels_last: by its strides, which tell also where a size of 1 leaves both."""
    _, channel, row, column = t.stride()
    return channel == 1 and column >= t.shape[1] and row >= column * t.shape[3] and t.numel() > t.shape[0]


class IntegerConv2d(QatFunction):
    """`IntegerConv2d.apply(x, scale, weight, weight_scale, bias, grid, weight_grid, geometry, train, relu)`.

    As `conv2d(lsq(x, scale), lsq(weight, weight_scale), bias)`, values and gradients, but the products are of int8
    codes and their sums of int32, so y differs from the float convolution of the same values by float32 rounding only.

    Saves for backward the codes and the residue of x, a byte each per element; the weight is alive anyway.

    Args (of apply):
        x: float32 (N, C, H, W).
        scale: float32 (1,), raw.
        weight: float32 (O, C / groups, kH, kW).
        weight_scale: float32 (O,), raw.
        bias: float32 (O,) or None.
        grid: of x; qmin < 0 for signed codes.
        weight_grid: of the weight.
        geometry: (stride, padding, dilation, groups), the first three as lists of two integers.
        train: whether a backward will come; without, no residue is made.
        relu: whether x is what enters a ReLU, in whose place the quantizer stands (qmin is 0).

    Returns:
        y: float32 (N, O, H', W'), in memory as `conv2d` returns it; the codes of x, uint8, shifted by 128 if signed;
        the residue, int8. The last two have no gradient. NaN anywhere in x makes all of y NaN, for integers cannot
        carry it through.
    """

    @staticmethod
    def forward(
        x: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        grid: Grid,
        weight_grid: Grid,
        geometry: tuple[list[int], list[int], list[int], int],
        train: bool,
        relu: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        s, ws = kernels.positive(scale), kernels.positive(weight_scale)
        last = in_channels_last(x) or in_channels_last(weight)  # then conv2d returns it so
        x = x.contiguous(memory_format=torch.channels_last)
        signed = grid.qmin < 0
        shift = integer.SHIFT if signed else 0
        codes, residue, poisoned = kernels.encode_bytes(x, s, grid.qmin, grid.qmax, shift, train, relu)
        weight_codes, weight_poisoned = kernels.encode_weight(weight, ws, weight_grid.qmin, weight_grid.qmax)
        ws = torch.where(weight_poisoned, float("nan"), ws)
        step = float("nan") if poisoned.item() else s.item()
        y = integer.convolve(codes, step, signed, weight_codes, ws, bias, *geometry)
        if not last:
            y = torch.empty(y.shape).copy_(y)  # not contiguous(), which leaves strides of sizes of 1 as they are
        return y, codes, residue

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor | None]) -> None:
        _, scale, weight, weight_scale, bias, ctx.grid, ctx.weight_grid, ctx.geometry, *_ = inputs
        _, codes, residue = output
        ctx.mark_non_differentiable(*(t for t in (codes, residue) if t is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(codes, residue, scale, weight, weight_scale)
        ctx.bias = bias is not None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 10
        codes, residue, scale, weight, weight_scale = ctx.saved_tensors
        grid, weight_grid, (stride, padding, dilation, groups) = ctx.grid, ctx.weight_grid, ctx.geometry
        s, ws = kernels.positive(scale), kernels.positive(weight_scale)
        x_needs, w_needs = ctx.needs_input_grad[:2], ctx.needs_input_grad[2:4]
        needs = (any(x_needs), any(w_needs), ctx.bias and ctx.needs_input_grad[4])
        shift = integer.SHIFT if grid.qmin < 0 else 0
        grad_x, grad_w, grad_bias = torch.ops.aten.convolution_backward(
            g,
            kernels.decode_bytes(codes, s, shift),
            kernels.fake_quantize(weight, ws, weight_grid.qmin, weight_grid.qmax, 0)[0],
            [weight.shape[0]] if ctx.bias else None,
            stride,
            padding,
            dilation,
            False,
            [0, 0],
            groups,
            needs,
        )
        grad_scale = grad_weight_scale = None
        if needs[0]:
            grad_x, grad_scale = kernels.lsq_grad(grad_x, residue, s, grid.qmin, grid.qmax, None, x_needs, spare=True)
            if grad_scale is not None:
                grad_scale = kernels.positive_grad(grad_scale * grid.gain, scale)
        if needs[1]:
            grad_w, grad_weight_scale = kernels.lsq_grad_exact(
                grad_w, weight, ws, weight_grid.qmin, weight_grid.qmax, 0, w_needs, spare=True
            )
            if grad_weight_scale is not None:
                grad_weight_scale = kernels.positive_grad(grad_weight_scale * weight_grid.gain, weight_scale)
        return grad_x, grad_scale, grad_w, grad_weight_scale, grad_bias, None, None, None, None, None
