"""LSQ: the scale is learned."""

from __future__ import annotations

from torch import Tensor

from qat.functional import LSQ
from qat.quantizers.base import Quantizer


class LSQQuantizer(Quantizer):
    """Learned step size; the Function is `qat.functional.LSQ`."""

    method = "lsq"
    paper = "Esser et al. 2020, arXiv:1902.08153, eqs. 1-3"

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        values: Tensor = LSQ.apply(x, self.scale, self.qmin, self.qmax, self.axis, self.gain(x), not self.weight)[0]
        return values

    def default_init(self) -> str:
        """The paper's step; least error for activations of many bits, where that step leaves most codes unused."""
        return "lsq" if self.weight or self.bits <= 4 else "mse"
