"""Stochastic rounding in training, to nearest in evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from qat.functional import Stochastic
from qat.quantizers.lsq import LSQQuantizer


class StochasticQuantizer(LSQQuantizer):
    """Random rounding while training, with a learned scale; the Function is `qat.functional.Stochastic`.

    In evaluation, and so when deployed, it rounds to nearest as LSQ does.
    """

    method = "stochastic"
    paper = "Gupta et al. 2015, arXiv:1502.02551, section 3.2"
    deterministic = False

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        if not self.training:
            return super().quantize(x)
        noise = torch.rand_like(x, dtype=torch.float32)
        values: Tensor = Stochastic.apply(x, self.scale, noise, self.qmin, self.qmax, self.axis, self.gain(x))[0]
        return values
