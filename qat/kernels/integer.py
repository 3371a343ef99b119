"""Convolution of codes on a CPU: int8 products summed in int32, scaled to float32 once.

The operators are torch's own, behind `torch.compile`'s quantized convolutions, but not public: they are looked up once
and tested before they are first used, and whoever calls must be ready for `available()` to be False.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["available", "convolve"]

SHIFT = 128
"""The operators take unsigned inputs only: signed codes are shifted by this, which then is their zero point."""


def convolve(
    codes: Tensor,
    scale: float,
    signed: bool,
    weight_codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """(codes * scale) convolved with (weight_codes * weight_scale), plus bias.

    Args:
        codes: uint8 (N, C, H, W), in channels_last; shifted by SHIFT if `signed`.
        scale: of the input.
        signed: whether the codes are shifted.
        weight_codes: int8 (O, C / groups, kH, kW).
        weight_scale: float32 (O,).
        bias: float32 (O,) or None.
        stride: two integers, and likewise padding (with exact zeros) and dilation.
        padding: see stride.
        dilation: see stride.
        groups: as in a convolution.

    Returns:
        float32 (N, O, H', W'), in channels_last.
    """
    zero = SHIFT if signed else 0
    one = torch.ones(1)  # packing does not depend on the scales, but reads each given to it
    packed = torch.ops.onednn.qconv_prepack(
        weight_codes, one, scale, zero, stride, padding, dilation, groups, list(codes.shape)
    )
    zeros = torch.zeros(weight_codes.shape[0], dtype=torch.long)
    result: Tensor = torch.ops.onednn.qconv_pointwise(
        codes,
        scale,
        zero,
        packed,
        weight_scale,
        zeros,
        bias,
        stride,
        padding,
        dilation,
        groups,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        None,
    )
    return result


@functools.cache
def available() -> bool:
    """Whether this machine convolves codes exactly: the operators are there, and neither sums nor products saturate.

    The test is the worst case, 255 x 127 in every product: CPUs without VNNI add pairs of products in 16 bits.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    try:
        for signed in (False, True):
            for codes in (
                torch.full((2, 64, 6, 6), 255, dtype=torch.uint8),
                torch.randint(0, 256, (2, 64, 6, 6), dtype=torch.uint8, generator=generator),
            ):
                codes = codes.contiguous(memory_format=torch.channels_last)
                weight = torch.full((32, 64, 3, 3), 127, dtype=torch.int8)
                weight[::2] = torch.randint(-127, 128, (16, 64, 3, 3), generator=generator).to(torch.int8)
                scales = 2.0 ** -(torch.arange(32) % 5)
                got = convolve(codes, 1.0, signed, weight, scales, None, [1, 1], [1, 1], [1, 1], 1)
                exact = torch.nn.functional.conv2d(codes.double() - SHIFT * signed, weight.double(), padding=1)
                exact *= scales.double()[:, None, None]
                if not torch.equal(got.double(), exact.float().double()):
                    return False
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return False
    return True
