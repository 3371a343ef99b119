"""Ternary weights."""

from __future__ import annotations

import torch
from torch import Tensor

from qat import kernels
from qat.functional import Ternary
from qat.functional.ternary import ternary_codes
from qat.quantizers.base import Quantizer


class TernaryQuantizer(Quantizer):
    """Ternary weight network; the Function is `qat.functional.Ternary`. The scale follows the weight."""

    method = "ternary"
    paper = "Li et al. 2016, arXiv:1605.04711, eqs. 3-6"
    allowed_bits = range(2, 3)
    learns = False

    @property
    def qmin(self) -> int:
        """Least code."""
        return -1

    @property
    def qmax(self) -> int:
        """Largest code."""
        return 1

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        values: Tensor = Ternary.apply(x, self.axis)
        return values

    def codes(self, x: Tensor) -> Tensor:
        """Codes of x, after making the scale that of x."""
        codes, step = ternary_codes(x, self.axis)
        self.set_step(torch.where(step.isnan(), self.step, step))
        return codes

    def initial_step(self, values: Tensor, counts: Tensor | None) -> Tensor:
        """The mean magnitude of the weights that are not at zero."""
        step = ternary_codes(values, 0)[1]
        return torch.where(step > kernels.SCALE_FLOOR, step, 0.0)
