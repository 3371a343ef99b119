"""How many bytes a model takes, as float32 and with its codes packed."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from qat.quantizers import MixedPrecisionQuantizer, Quantizer
from qat.swap import quantized_layers

FLOAT_BYTES = 4


def float_bytes(model: nn.Module) -> int:
    """Bytes of the float model: every parameter and float buffer as float32, shared ones once; no quantizer state."""
    skip = {id(t) for q in model.modules() if isinstance(q, Quantizer) for t in (*q.parameters(), *q.buffers())}
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    return sum(t.numel() * FLOAT_BYTES for key, t in tensors.items() if key not in skip)


def quantized_bytes(model: nn.Module) -> int:
    """Bytes of the deployed model: packed weight codes, scales, biases, and whatever stays float.

    A batch norm counts as one float32 per channel, the bias that is left of it once its factor is merged into the
    scales of the convolution before it.
    """
    layers = quantized_layers(model)
    total, counted = 0, set()
    for layer in layers.values():
        weight, quantizer = layer.weight, layer.weight_quantizer
        assert isinstance(weight, nn.Parameter)
        if id(weight) not in counted and isinstance(quantizer, Quantizer | MixedPrecisionQuantizer):
            counted.add(id(weight))
            total += -(-weight.numel() * quantizer.bits // 8)
            total += quantizer.raw.numel() * FLOAT_BYTES if isinstance(quantizer, Quantizer) else 0
        if isinstance(layer.input_quantizer, Quantizer):
            total += FLOAT_BYTES + 1  # scale and zero point
    for module in model.modules():
        if isinstance(module, Quantizer):
            continue
        if isinstance(module, _BatchNorm):
            total += module.num_features * FLOAT_BYTES
            continue
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if t.is_floating_point() and id(t) not in counted:
                counted.add(id(t))
                total += t.numel() * FLOAT_BYTES
    return total
