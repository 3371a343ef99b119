"""EWGS: LSQ with element-wise gradient scaling."""

from __future__ import annotations

from torch import Tensor

from qat.functional import EWGS
from qat.quantizers.lsq import LSQQuantizer


class EWGSQuantizer(LSQQuantizer):
    """Learned step size, element-wise scaled gradients; the Function is `qat.functional.EWGS`."""

    method = "ewgs"
    paper = "Lee et al. 2021, arXiv:2104.00903, eq. 5"
    delta = 1e-3  # in the paper's units, the range as 0..1

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        gain = self.gain(x)
        values: Tensor = EWGS.apply(x, self.scale, self.qmin, self.qmax, self.axis, gain, self.delta)[0]
        return values
