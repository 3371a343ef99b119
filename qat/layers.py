"""Quantized layers: the float layer with an `input_quantizer` and a `weight_quantizer` in front of the same operation.

`LAYERS` says which float type becomes which quantized one, by exact type; a caller may add to it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from torch import Tensor, nn

from qat.quantizers import MixedPrecisionQuantizer, Quantizer

AnyQuantizer = Quantizer | MixedPrecisionQuantizer | nn.Identity


class QuantLayer(nn.Module):
    """A float layer's own state and hyper-parameters, plus two quantizers.

    Nothing is cloned: parameters, buffers, hooks and attributes are the float layer's, so optimizers, tied weights and
    float checkpoints keep working. A quantizer is `nn.Identity` where that tensor stays float.
    """

    float_type: ClassVar[type[nn.Module]]
    channel_axis: ClassVar[int] = 0  # the weight's output channels

    input_quantizer: AnyQuantizer
    weight_quantizer: AnyQuantizer
    reason: str = ""  # why it has these bits, for the plan
    fixed: bool = False  # an exception (first, last, rule), which set_bits without a match leaves alone

    @classmethod
    def from_float(cls, layer: nn.Module, weight_quantizer: AnyQuantizer, input_quantizer: AnyQuantizer) -> Self:
        """Make the quantized twin of a float layer, which shares all its state."""
        quantized = retype(layer, cls)
        quantized.weight_quantizer = weight_quantizer
        quantized.input_quantizer = input_quantizer
        return quantized

    def to_float(self) -> nn.Module:
        """Make the float twin, which shares all state but the quantizers."""
        layer = retype(self, self.float_type)
        del layer._modules["weight_quantizer"], layer._modules["input_quantizer"]
        return layer


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


def retype(module: nn.Module, cls: type[nn.Module]) -> Any:
    """A module of another class with the same attributes, Parameters, buffers and hooks; submodules listed apart."""
    twin = cls.__new__(cls)
    twin.__dict__.update(module.__dict__)
    twin._modules = dict(module._modules)
    return twin
