"""Quantized layers: the float layer with an `input_quantizer` and a `weight_quantizer` in front of the same operation.

`LAYERS` says which float type becomes which quantized one, by exact type; a caller may add to it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from qat.functional.integer import Grid, IntegerConv2d
from qat.kernels import integer
from qat.lean import before_relu
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
    forward_mode: str = "fake"  # or integer: convolve codes
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
        for name in ("reason", "fixed", "forward_mode"):
            self.__dict__.pop(name, None)
        self.__class__ = self.float_type  # type: ignore[assignment]
        return self

    @classmethod
    def takes_integers(cls, layer: nn.Module) -> bool:
        """Whether a float layer of this type and geometry gains from an integer forward."""
        return False

    def on_integers(self, x: Tensor) -> bool:
        """Whether to convolve codes here and now: as planned, and nothing watches or changes the values between."""
        q, w = self.input_quantizer, self.weight_quantizer
        return (
            self.forward_mode == "integer"
            and not torch.compiler.is_compiling()  # first, and tracing: no question to x may enter the graph
            and not torch.jit.is_tracing()
            and type(x) in (Tensor, nn.Parameter)
            and x.device.type == "cpu"
            and x.dtype == self.weight.dtype == torch.float32
            and x.numel() > 0
            and not torch.is_autocast_enabled("cpu")
            and isinstance(q, Quantizer)
            and isinstance(w, Quantizer)
            and q.enabled
            and w.enabled
            and q.is_calibrated
            and q.observer is None
            and not (q._forward_hooks or q._forward_pre_hooks or w._forward_hooks or w._forward_pre_hooks)
            and integer.available()
        )

    def convolve(self, x: Tensor, weight: Tensor, geometry: Any) -> Tensor:
        """Convolution of the codes of x (N, C, H, W) and of a weight (O, C / groups, kH, kW)."""
        q, w = self.input_quantizer, self.weight_quantizer
        assert isinstance(q, Quantizer)
        assert isinstance(w, Quantizer)
        grid, weight_grid = Grid(q.qmin, q.qmax, q.gain(x)), Grid(w.qmin, w.qmax, w.gain(weight))
        train = torch.is_grad_enabled() and (x.requires_grad or q.scale.requires_grad)
        cut, limit = before_relu(x)
        relu = cut is not None and not q.is_signed and (limit is None or float(q.step) * q.qmax <= limit)
        x = cut if relu and cut is not None else x
        arguments = x, q.scale, weight, w.scale, self.bias, grid, weight_grid, geometry, train, relu
        y: Tensor = IntegerConv2d.apply(*arguments)[0]
        return y


class QuantConv2d(QuantLayer, nn.Conv2d):
    """`nn.Conv2d` on quantized input and weight. Shapes, padding modes and groups as there."""

    float_type = nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        """Convolve values of x (N, C, H, W) with values of the weight; padding is exact zero."""
        if x.ndim == 4 and self.on_integers(x):
            geometry = list(self.stride), list(self.padding), list(self.dilation), self.groups
            return self.convolve(x, self.weight, geometry)
        return self._conv_forward(self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)

    @classmethod
    def takes_integers(cls, layer: nn.Module) -> bool:
        """Zero padding, given in numbers, and not depthwise (which integers do not speed up)."""
        assert isinstance(layer, nn.Conv2d)
        depthwise = layer.groups > 1 and layer.groups == layer.in_channels
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str) and not depthwise


class QuantLinear(QuantLayer, nn.Linear):
    """`nn.Linear` on quantized input and weight; any leading dimensions."""

    float_type = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Multiply values of x (..., in_features) by values of the weight."""
        if self.on_integers(x):
            rows = x.reshape(-1, self.in_features, 1, 1)
            y = self.convolve(rows, self.weight[:, :, None, None], ([1, 1], [0, 0], [1, 1], 1))
            return y.reshape(*x.shape[:-1], self.out_features)
        return nn.functional.linear(self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)

    @classmethod
    def takes_integers(cls, layer: nn.Module) -> bool:
        """Always: as a 1x1 convolution."""
        return True


LAYERS: dict[type[nn.Module], type[QuantLayer]] = {nn.Conv2d: QuantConv2d, nn.Linear: QuantLinear}
