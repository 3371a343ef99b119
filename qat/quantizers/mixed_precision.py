"""bf16 and fp16: rounded in the forward, nothing to calibrate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qat.functional import MixedPrecision


class MixedPrecisionQuantizer(nn.Module):
    """Rounds to bfloat16 or float16 in the forward; the Function is `qat.functional.MixedPrecision`. No state."""

    method = "mixed_precision"
    integer = False
    deterministic = True
    paper = "Micikevicius et al. 2018, arXiv:1710.03740"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.bits, self.enabled = dtype, 16, True

    def forward(self, x: Tensor) -> Tensor:
        """Values of x; disabled, x itself."""
        if not self.enabled:
            return x
        values: Tensor = MixedPrecision.apply(x, self.dtype)
        return values

    def extra_repr(self) -> str:
        """The dtype."""
        return str(self.dtype).removeprefix("torch.")
