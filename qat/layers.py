"""Quantized layers: the float layer with an `input_quantizer` and a `weight_quantizer` in front of the same operation.

`LAYERS` says which float type becomes which quantized one, by exact type; a caller may add to it.
"""

from __future__ import annotations

from typing import ClassVar, Self

from torch import Tensor, nn

from qat.quantizers import MixedPrecisionQuantizer, Quantizer

AnyQuantizer = Quantizer | MixedPrecisionQuantizer | nn.Identity


class QuantLayer(nn.Module):
    """A float layer's own state and hyper-parameters, plus two quantizers.

    It is the float layer itself, of another class: parameters, buffers, hooks and attributes stay, so optimizers, tied
    weights and float checkpoints keep working. A quantizer is `nn.Identity` where that tensor stays float.
    """

    float_type: ClassVar[type[nn.Module]]
    channel_axis: ClassVar[int] = 0  # the weight's output channels

    input_quantizer: AnyQuantizer
    weight_quantizer: AnyQuantizer
    reason: str = ""  # why it has these bits, for the plan
    fixed: bool = False  # an exception (first, last, rule), which set_bits without a match leaves alone

    @classmethod
    def from_float(cls, layer: nn.Module, weight_quantizer: AnyQuantizer, input_quantizer: AnyQuantizer) -> Self:
        """Turn a float layer into this quantized one, in place: whoever holds the layer holds the quantized one."""
        # As torch's own parametrizations and lazy modules do it. A second object would leave the float layer working,
        # unquantized, for lists, closures, hooks and compiled code that hold it.
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.weight_quantizer = weight_quantizer.train(layer.training)
        layer.input_quantizer = input_quantizer.train(layer.training)
        return layer

    def to_float(self) -> nn.Module:
        """Undo `from_float`, in place."""
        for name in ("weight_quantizer", "input_quantizer"):
            delattr(self, name)
        for name in ("reason", "fixed"):
            self.__dict__.pop(name, None)
        self.__class__ = self.float_type  # type: ignore[assignment]
        return self


class QuantConv2d(QuantLayer, nn.Conv2d):
    """`nn.Conv2d` on quantized input and weight. Shapes, padding modes and groups as there."""

    float_type = nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        """Convolve values of x (N, C, H, W) with values of the weight; padding is exact zero."""
        return self._conv_forward(self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)


class QuantLinear(QuantLayer, nn.Linear):
    """`nn.Linear` on quantized input and weight; any leading dimensions."""

    float_type = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Multiply values of x (..., in_features) by values of the weight."""
        return nn.functional.linear(self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)


LAYERS: dict[type[nn.Module], type[QuantLayer]] = {nn.Conv2d: QuantConv2d, nn.Linear: QuantLinear}
