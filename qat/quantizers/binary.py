"""One bit: XNOR weights, and activations on {-s, s} or {0, s}."""

from __future__ import annotations

import torch
from torch import Tensor

from qat.functional import Binary, BinaryActivation
from qat.functional.binary import binary_codes, binary_step
from qat.quantizers.base import Quantizer
from qat.quantizers.lsq import LSQQuantizer


class BinaryQuantizer(Quantizer):
    """Signs times the mean magnitude; the Function is `qat.functional.Binary`.

    The scale follows the weight; `scale` holds that of the last calibration or encoding.
    """

    method = "binary"
    paper = "Rastegari et al. 2016, arXiv:1603.05279, eqs. 4-6"
    allowed_bits = range(1, 2)
    learns = False

    @property
    def qmin(self) -> int:
        """Least code (0 is none of them)."""
        return -1

    @property
    def qmax(self) -> int:
        """Largest code."""
        return 1

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        values: Tensor = Binary.apply(x, self.axis)
        return values

    def codes(self, x: Tensor) -> Tensor:
        """Codes of x, after making the scale that of x."""
        step = binary_step(x, self.axis)
        self.set_step(torch.where(step.isnan(), self.step, step))
        return binary_codes(x)

    def initial_step(self, values: Tensor, counts: Tensor | None) -> Tensor:
        """The mean magnitude."""
        return values.abs().mean(1)


class BinaryActivationQuantizer(LSQQuantizer):
    """One-bit activations with a learned scale: {-s, s} if signed (`qat.functional.BinaryActivation`), else {0, s}."""

    method = "binary"
    paper = "Hubara et al. 2016, arXiv:1602.02830, eq. 4; unsigned: Esser et al. 2020, arXiv:1902.08153"
    allowed_bits = range(1, 2)

    @property
    def qmin(self) -> int:
        """Least code."""
        return -1 if self.is_signed else 0

    @property
    def qmax(self) -> int:
        """Largest code."""
        return 1

    def quantize(self, x: Tensor) -> Tensor:
        """Values of x."""
        if not self.is_signed:
            return super().quantize(x)
        values: Tensor = BinaryActivation.apply(x, self.scale, self.axis, self.gain(x))[0]
        return values

    def codes(self, x: Tensor) -> Tensor:
        """Codes of x."""
        return binary_codes(x) if self.is_signed else super().codes(x)

    def initial_step(self, values: Tensor, counts: Tensor | None) -> Tensor:
        """Least squared error: the mean magnitude if signed."""
        if not self.is_signed:
            return super().initial_step(values, counts)
        magnitudes = values.abs() if counts is None else values.abs() * counts
        return magnitudes.sum(1) / (values.shape[1] if counts is None else counts.sum(1))
