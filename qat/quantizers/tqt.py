"""TQT: power-of-two scales with learned thresholds."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor, nn

from qat.functional import TQT
from qat.functional.tqt import power_of_two_step
from qat.quantizers.base import Quantizer


class TQTQuantizer(Quantizer):
    """Learned log2 of the threshold; the Function is `qat.functional.TQT`."""

    method = "tqt"
    paper = "Jain et al. 2019, arXiv:1903.08066, eqs. 4-8"
    parameter: ClassVar[str] = "log2_threshold"
    keeps_range = True

    log2_threshold: nn.Parameter

    @property
    def step(self) -> Tensor:
        """A power of two."""
        return power_of_two_step(self.log2_threshold.detach(), self.qmax)

    def raw_of(self, step: Tensor) -> Tensor:
        """The middle of the thresholds whose power of two is nearest to `step`."""
        return (step.log2() + math.log2(self.qmax + 1)).round() - 0.5

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        values: Tensor = TQT.apply(x, self.log2_threshold, self.qmin, self.qmax, self.axis, self.gain(x))[0]
        return values
