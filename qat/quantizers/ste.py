"""Fixed scale with the straight-through estimator."""

from __future__ import annotations

from torch import Tensor

from qat.functional import STE
from qat.quantizers.base import Quantizer


class STEQuantizer(Quantizer):
    """Scale fixed by calibration; the Function is `qat.functional.STE`."""

    method = "ste"
    paper = "Bengio et al. 2013, arXiv:1308.3432"
    learns = False

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        values: Tensor = STE.apply(x, self.scale, self.qmin, self.qmax, self.axis)[0]
        return values
