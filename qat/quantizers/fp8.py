"""8-bit floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat.functional import FP8
from qat.functional.fp8 import fp8_max
from qat.quantizers.base import Quantizer


class FP8Quantizer(Quantizer):
    """e4m3 or e5m2 with a fixed scale that makes the largest value just fit; the Function is `qat.functional.FP8`."""

    method = "fp8"
    paper = "Micikevicius et al. 2022, arXiv:2209.05433"
    allowed_bits = range(8, 9)
    learns = False

    def __init__(self, dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(8, **kwargs)
        self.dtype = dtype

    @property
    def integer(self) -> bool:
        """Its grid is not uniform: deployed as float."""
        return False

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        values: Tensor = FP8.apply(x, self.scale, self.dtype, self.axis)[0]
        return values

    def initial_step(self, values: Tensor, counts: Tensor | None) -> Tensor:
        """Largest magnitude over the largest 8-bit float."""
        return values.abs().amax(1) / fp8_max(self.dtype)

    def extra_repr(self) -> str:
        """Dtype and granularity."""
        return f"{str(self.dtype).removeprefix('torch.')}, {super().extra_repr()}"
