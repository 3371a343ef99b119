"""Set every scale from data: one pass over calibration batches, in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qat.config import QatError
from qat.quantizers import Observer, Quantizer
from qat.swap import all_or_nothing, check_scale, disabled, initialise_weights, quantized_layers, quantizers_of

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
    if isinstance(batches, Tensor):
        raise QatError("expected an iterable of batches, got one tensor: qat.calibrate(model, [batch])")
    everything = [m for m in model.modules() if isinstance(m, Quantizer)]
    # Under a caller's inference_mode, new tensors could never enter autograd again: step out of it.
    with torch.inference_mode(False), torch.no_grad(), all_or_nothing(everything):
        observers = observe(model, inputs, () if batches is None else batches)
        unreached = [name for name, observer in observers.items() if observer.total == 0]
        if inputs and len(unreached) == len(inputs):
            raise QatError("no calibration data: expected batches of inputs, got none (an iterator already used up?)")
        initialise_weights(model)
        for name, quantizer in inputs.items():
            if name not in unreached:
                quantizer.calibrate(observers[name])
                check_scale(quantizer)
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
    reached: set[str] = set()
    try:
        with disabled(model):
            for batch in batches:
                before = {name: observer.total for name, observer in observers.items()}
                attach(inputs, observers)
                for module in modes:  # not model.eval(): an override might change weights, and is not undone
                    module.training = False
                run(model, batch, device)
                reached |= {name for name, observer in observers.items() if observer.total > before[name]}
                if len(reached) < len(inputs):
                    attach(inputs, {name: o for name, o in observers.items() if name not in reached})
                    run_as_if_training(model, batch, device)
    finally:
        attach(inputs, {})
        for module, mode in modes.items():
            module.training = mode
    for observer in observers.values():
        observer.reduce()
    return observers


def attach(inputs: dict[str, Quantizer], observers: Mapping[str, Observer]) -> None:
    """Give every input quantizer its observer, or none."""
    for name, quantizer in inputs.items():
        quantizer.observer = observers.get(name)


def run_as_if_training(model: nn.Module, batch: Any, device: torch.device) -> None:
    """One forward that reaches what runs only in training, such as auxiliary heads; norms and dropout stay in eval."""
    for module in model.modules():
        module.training = next(module.children(), None) is not None
    try:
        run(model, batch, device)
    except QatError:
        raise
    except Exception:  # a model that needs its targets in training, for instance: what is hidden stays unreached
        return


def run(model: nn.Module, batch: Any, device: torch.device) -> None:
    """One forward of a batch in any of the forms that `calibrate` takes."""
    if isinstance(batch, Mapping):
        model(**{key: place(value, device) for key, value in batch.items()})
        return
    x = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(x, Tensor):
        raise QatError(f"expected batches of tensors, (input, ...) tuples or dicts; got {type(x).__name__}")
    model(place(x, device))


def place(value: Any, device: torch.device) -> Any:
    """A tensor on the model's device; copied if it is from inference mode, since nothing may write to such a one."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(device)
    return value.clone() if value.is_inference() else value
