"""PACT: the clipping level of an activation is learned."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from qat import kernels
from qat.functional import PACT
from qat.quantizers.base import Quantizer


class PACTQuantizer(Quantizer):
    """Learned clipping level `alpha`; the Function is `qat.functional.PACT`. Weight decay is its L2 penalty."""

    method = "pact"
    paper = "Choi et al. 2018, arXiv:1805.06085, eqs. 1-3"
    allowed_bits = range(1, 9)
    parameter: ClassVar[str] = "alpha"
    decays = True
    keeps_range = True

    alpha: nn.Parameter

    @property
    def qmin(self) -> int:
        """Least code; symmetric if signed, as the clip is."""
        return -self.qmax if self.is_signed else 0

    @property
    def step(self) -> Tensor:
        """alpha / qmax."""
        return kernels.positive(self.alpha.detach()) / self.qmax

    def raw_of(self, step: Tensor) -> Tensor:
        """Alpha of a step."""
        return step * self.qmax

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        values: Tensor = PACT.apply(x, self.alpha, self.qmin, self.qmax, self.axis)[0]
        return values

    def default_init(self) -> str:
        """Nothing clipped at first: the gradient and the penalty pull alpha down from there."""
        return "minmax"
