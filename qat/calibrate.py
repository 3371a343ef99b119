"""Set every scale from data: one pass over calibration batches, in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qat.config import QatError
from qat.quantizers import Observer, Quantizer
from qat.swap import disabled, initialise_weights, quantized_layers, quantizers_of

__all__ = ["calibrate"]


def calibrate(model: nn.Module, batches: Iterable[Any] | None = None) -> None:
    """Set every scale, and whether each activation is signed, from a few batches of training data.

    Runs the model in eval mode with the bits off, so no buffer of it moves; modes are restored. Everything is written
    into existing parameters and buffers, so optimizers, DDP and `torch.inference_mode` around the call are all fine.
    In a distributed run every rank passes its own batches and all arrive at the same scales.

    Args:
        model: a quantized model.
        batches: any iterable of tensors, of tuples or lists whose first item is the input, or of dicts of keyword
            arguments. They are moved to the model's device. None if only weights are quantized.

    Raises:
        QatError: the model is not quantized, there is no data, or data or weights have NaN or infinite values.
            Then no scale has changed.

    Example:
        >>> from qat.swap import quantize
        >>> model = quantize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), bits=4)
        >>> calibrate(model, [torch.randn(16, 4) for _ in range(2)])
        >>> model[0].input_quantizer.is_signed, model[2].input_quantizer.is_signed
        (True, False)
    """
    if not quantizers_of(model):
        raise QatError("the model is not quantized: call qat.quantize(model, bits=...) first")
    inputs = {
        name: layer.input_quantizer
        for name, layer in quantized_layers(model).items()
        if isinstance(layer.input_quantizer, Quantizer)
    }
    if inputs and batches is None:
        raise QatError(f"{len(inputs)} activations need data: qat.calibrate(model, batches)")
    # Under a caller's inference_mode, new tensors could never enter autograd again: step out of it.
    with torch.inference_mode(False), torch.no_grad():
        observers = observe(model, inputs, batches or ())
        unreached = [name for name, observer in observers.items() if observer.total == 0]
        if inputs and len(unreached) == len(inputs):
            raise QatError("no calibration data: expected batches of inputs, got none (an iterator already used up?)")
        initialise_weights(model)
        for name, quantizer in inputs.items():
            if name not in unreached:
                quantizer.calibrate(observers[name])
    if unreached:
        warnings.warn(
            f"no calibration data reached {', '.join(unreached)}: unused, or a module around them reads their weights "
            "itself; running them will be an error",
            stacklevel=2,
        )


def observe(model: nn.Module, inputs: dict[str, Quantizer], batches: Iterable[Any]) -> dict[str, Observer]:
    """Run the batches through the float model and return what each input quantizer saw."""
    observers = {name: Observer() for name in inputs}
    modes = {module: module.training for module in model.modules()}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    last = None
    try:
        model.eval()
        for name, quantizer in inputs.items():
            quantizer.observer = observers[name]
        with disabled(model):
            for last in batches:
                run(model, last, device)
            if last is not None and any(observer.total == 0 for observer in observers.values()):
                # Auxiliary heads run only in training: let the containers, but no norm or dropout, believe it is.
                for module in modes:
                    module.training = next(module.children(), None) is not None
                run(model, last, device)
    finally:
        for quantizer in inputs.values():
            quantizer.observer = None
        for module, mode in modes.items():
            module.training = mode
    for observer in observers.values():
        observer.reduce()
    return observers


def run(model: nn.Module, batch: Any, device: torch.device) -> None:
    """One forward of a batch in any of the forms that `calibrate` takes."""
    if isinstance(batch, Mapping):
        model(**{key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()})
        return
    x = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(x, Tensor):
        raise QatError(f"expected batches of tensors, (input, ...) tuples or dicts; got {type(x).__name__}")
    model(x.to(device))
