"""DoReFa: weights through tanh, activations clipped to 0..1."""

from __future__ import annotations

import torch
from torch import Tensor

from qat import kernels
from qat.functional import DoReFa
from qat.functional.dorefa import dorefa_codes
from qat.quantizers.base import Quantizer
from qat.quantizers.ste import STEQuantizer


class DoReFaQuantizer(Quantizer):
    """DoReFa weights; the Function is `qat.functional.DoReFa`. One scale per tensor, fixed, gives the magnitude back.

    The codes are the odd integers from -(2^bits - 1) to 2^bits - 1: they need one bit more than `bits` in an integer
    container, so at 8 bits there is none.
    """

    method = "dorefa"
    paper = "Zhou et al. 2016, arXiv:1606.06160, eq. 9"
    learns = False
    per_tensor = True
    keeps_range = True

    @property
    def qmin(self) -> int:
        """Least code."""
        return -self.qmax

    @property
    def qmax(self) -> int:
        """Largest code."""
        return int(2**self.bits - 1)

    @property
    def integer(self) -> bool:
        """Up to 7 bits, where the odd codes fit into int8."""
        return self.bits <= 7

    @property
    def step(self) -> Tensor:
        """The fixed magnitude / qmax."""
        return kernels.positive(self.scale.detach()) / self.qmax

    def raw_of(self, step: Tensor) -> Tensor:
        """Magnitude of a step."""
        return step * self.qmax

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        values: Tensor = DoReFa.apply(x, self.scale, self.bits)
        return values

    def codes(self, x: Tensor) -> Tensor:
        """Codes of x."""
        return dorefa_codes(x, self.bits)

    def initial_step(self, values: Tensor, counts: Tensor | None) -> Tensor:
        """The step with which the values are nearest to the weights."""
        codes = dorefa_codes(values, self.bits)
        return ((codes * values).sum() / codes.square().sum()).clamp_min(0).reshape(1)


class DoReFaActivationQuantizer(STEQuantizer):
    """DoReFa activations (section 2.3): clipped to 0..1, whatever the data; the Function is `qat.functional.STE`.

    A signed input, such as the image, has no place in 0..1: it gets the scale that calibration finds.
    """

    method = "dorefa"
    paper = "Zhou et al. 2016, arXiv:1606.06160, section 2.3"
    allowed_bits = range(1, 9)

    def initial_step(self, values: Tensor, counts: Tensor | None) -> Tensor:
        """1 / (2^bits - 1), or the calibrated one of a signed tensor."""
        if self.is_signed:
            return super().initial_step(values, counts)
        return torch.full((1,), 1 / self.qmax)

    def set_bits(self, bits: int) -> None:
        """Change the code range; unsigned, it remains 0..1."""
        super().set_bits(bits)
        if not self.is_signed:
            self.set_step(torch.full_like(self.step, 1 / self.qmax))
