"""LSQ+: activations with a learned zero point, weights with the paper's initial scale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from qat import kernels
from qat.functional import LSQPlus
from qat.functional.lsq_plus import zero_point
from qat.quantizers.base import Quantizer
from qat.quantizers.initial import least_error
from qat.quantizers.lsq import LSQQuantizer


class LSQPlusWeightQuantizer(LSQQuantizer):
    """LSQ with LSQ+'s initial scale for weights (section 3.3): max |mean +- 3 std| / 2^(bits - 1)."""

    method = "lsq_plus"
    paper = "Bhalgat et al. 2020, arXiv:2004.09576, section 3"

    def initial_step(self, values: Tensor, counts: Tensor | None) -> Tensor:
        """The paper's, unless another was asked for."""
        if self.init is not None:
            return super().initial_step(values, counts)
        std, mean = torch.std_mean(values, dim=1, correction=0)
        return torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs()) / 2 ** (self.bits - 1)


class LSQPlusQuantizer(Quantizer):
    """Learned scale and zero point of an activation; the Function is `qat.functional.LSQPlus`.

    The codes are unsigned, 0 .. 2^bits - 1, with the zero point among them; `offset` is its learned form.
    """

    method = "lsq_plus"
    paper = "Bhalgat et al. 2020, arXiv:2004.09576, eqs. 4-8"
    allowed_bits = range(1, 9)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offset = nn.Parameter(torch.zeros_like(self.scale), requires_grad=self.scale.requires_grad)

    @property
    def qmin(self) -> int:
        """Least code."""
        return 0

    @property
    def qmax(self) -> int:
        """Largest code."""
        return int(2**self.bits - 1)

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        values: Tensor = LSQPlus.apply(x, self.scale, self.offset, self.qmin, self.qmax, self.gain(x))[0]
        if self.training:
            self.refresh()
        return values

    def set_bits(self, bits: int) -> None:
        """Change the code range; the zero point divides the new one as it did the old."""
        before = self.qmax
        super().set_bits(bits)
        with torch.no_grad():
            self.offset.mul_(self.qmax / before)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the `zero_point` buffer up to the learned offset."""
        self.zero_point.copy_(zero_point(self.offset.detach(), self.qmin, self.qmax))

    def codes(self, x: Tensor) -> Tensor:
        """Codes of x, zero point included."""
        self.refresh()
        z = self.zero_point.float().reshape(())
        return kernels.encode(x, self.step, self.qmin - z, self.qmax - z, None)[0] + z

    def decode(self, codes: Tensor) -> Tensor:
        """Values of codes, float32."""
        self.refresh()
        return super().decode(codes)

    def initial_step(self, values: Tensor, counts: Tensor | None) -> Tensor:
        """Least squared error over scale and zero point together (section 3.3), by search."""
        low, high = min(values.min().item(), 0.0), max(values.max().item(), 0.0)
        if high <= low:
            return values.new_zeros(1)
        best, least, offset = values.new_zeros(1), math.inf, 0
        # A zero point fixes how the range is divided at zero: near the data's own division lies the best.
        middle = round(-low / (high - low) * self.qmax)
        for z in range(max(0, middle - 3), min(self.qmax, middle + 3) + 1):
            lower, upper = -z, self.qmax - z
            fits = max(high / upper if upper else 0.0, low / lower if lower else 0.0)
            if fits <= 0:
                continue
            step = least_error(values.new_full((1,), fits), values, counts, lower, upper)
            codes, _ = kernels.encode(values, step, lower, upper, axis=0)
            errors = (kernels.decode(codes, step, axis=0) - values).double().square()
            error = (errors if counts is None else errors * counts).sum().item()
            if error < least:
                best, least, offset = step, error, z
        with torch.no_grad():
            self.offset.fill_(float(offset))
            self.zero_point.fill_(offset)
        return best
