"""Replace layers by their quantized twins as a plan says, and back; change bits; keep checkpoints loadable."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from qat.config import Format, QatError, QuantConfig, closest, parse_bits
from qat.layers import LAYERS, AnyQuantizer, QuantLayer
from qat.lean import make_lean, undo_lean
from qat.planning import Plan, PlanEntry, TensorPlan, float_reason, plan
from qat.quantizers import METHODS, FP8Quantizer, MixedPrecisionQuantizer, Quantizer

__all__ = [
    "all_or_nothing",
    "apply_plan",
    "check_scale",
    "dequantize",
    "disabled",
    "initialise_weights",
    "live_plan",
    "quantize",
    "quantized_layers",
    "quantizers_of",
    "set_bits",
]


def quantize(model: nn.Module, config: QuantConfig | None = None, *, bits: Any = None) -> nn.Module:
    """Put quantizers in front of every convolution and linear layer, in place; keep what is returned.

    ReLUs and max pools keep less for the backward from then on (`qat.lean`), at the same values and gradients.
    Parameters, their names and the user's hooks stay; `conv1.weight_quantizer.scale` and so on are new. Weight scales
    are set at once, activations need `qat.calibrate`. With `bits="float"` the model comes back unchanged.

    Args:
        model: any module; its Conv2d and Linear layers (exact types, see `qat.layers.LAYERS`) are quantized.
        config: the whole choice; or
        bits: 1..8, `w4a8`, `float`, `bf16`, `fp16`.

    Returns:
        The same model object.

    Raises:
        QatError: see `plan`; then the model is untouched.

    Example:
        >>> model = quantize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10)), bits=4)
        >>> model[0].weight_quantizer.bits, model[3].input_quantizer.bits
        (8, 8)
    """
    todo = plan(model, config, bits=bits)
    warn_about_optimizers(model)
    return apply_plan(model, todo)


def apply_plan(model: nn.Module, todo: Plan) -> nn.Module:
    """Swap the layers that a plan names. Nothing is changed before all quantizers are made and have their scale.

    Raises:
        QatError: a name in the plan is not such a layer of the model, or a weight has NaN or infinite values.
    """
    layers = dict(model.named_modules())
    tied: dict[int, AnyQuantizer] = {}
    swaps: list[tuple[PlanEntry, nn.Module, AnyQuantizer, AnyQuantizer]] = []
    # Under a caller's inference_mode, new tensors could never enter autograd again: step out of it.
    with torch.inference_mode(False), torch.no_grad():
        for e in todo.quantized:
            layer = layers.get(e.name)
            if isinstance(layer, QuantLayer):
                raise QatError(f"{e.name} is quantized already: give the float model")
            if layer is None or type(layer) not in LAYERS or float_reason(layer, ""):
                raise QatError(
                    f"the plan names {e.name!r} ({e.type}), which this model does not have{closest(e.name, layers)}"
                )
            assert e.weight and e.act
            weight: Tensor = layer.weight
            prefix = f"{e.name}." if e.name else ""
            if id(weight) not in tied:
                axis = LAYERS[type(layer)].channel_axis
                quantizer = make_quantizer(e.weight, f"{prefix}weight_quantizer", weight, axis)
                initialise_weight(quantizer, weight)
                tied[id(weight)] = quantizer
            act = make_quantizer(e.act, f"{prefix}input_quantizer", weight)
            swaps.append((e, layer, tied[id(weight)], act))
    if swaps:
        make_lean(model)
    for e, layer, weight_quantizer, act in swaps:
        quantized = LAYERS[type(layer)].from_float(layer, weight_quantizer, act)
        quantized.reason, quantized.fixed, quantized.forward_mode = e.reason, e.fixed, e.forward
    if swaps:
        install_loading(model)
    return model


def make_quantizer(t: TensorPlan, name: str, weight: Tensor, axis: int | None = None) -> AnyQuantizer:
    """The quantizer of a weight (axis: its output channels), or of what enters its layer (axis None)."""
    if t.format.is_float:
        return nn.Identity()
    channels, group = 1, None
    if axis is None or t.granularity == "tensor":
        is_weight, axis = axis is not None, None
    else:
        is_weight, channels = True, weight.shape[axis]
        if isinstance(t.granularity, int):
            axis, group, channels = 0, t.granularity, weight.numel() // t.granularity
    arguments: dict[str, Any] = {"weight": is_weight, "channels": channels, "axis": axis, "group": group}
    arguments |= {"init": t.init, "learn": t.learn, "name": name, "device": weight.device}
    if t.format.dtype is None:
        return METHODS[t.method][0 if is_weight else 1](t.format.bits, **arguments)
    dtype = getattr(torch, t.format.dtype)
    return FP8Quantizer(dtype, **arguments) if t.format.bits == 8 else MixedPrecisionQuantizer(dtype)


def dequantize(model: nn.Module) -> nn.Module:
    """Give the float layers back, with the weights as trained, in place; keep what is returned.

    Raises:
        QatError: a quantized layer was parametrized since; then the model is untouched.

    >>> type(dequantize(quantize(nn.Sequential(nn.Linear(4, 4)), bits=4))[0]).__name__
    'Linear'
    """
    layers = [m for m in model.modules() if isinstance(m, QuantLayer)]
    for layer in layers:
        if nn.utils.parametrize.is_parametrized(layer):
            raise QatError(
                "a quantized layer was parametrized: torch.nn.utils.parametrize.remove_parametrizations first"
            )
    for layer in layers:
        layer.to_float()
    undo_lean(model)
    for module in model.modules():
        remove_loading(module)
    return model


def warn_about_optimizers(model: nn.Module) -> None:
    """An optimizer made before the swap cannot hold the scales: say so."""
    if optimizer_of(model) is None:
        return
    gc.collect()  # one that nobody can reach any more does not count
    optimizer = optimizer_of(model)
    if optimizer is not None:
        warnings.warn(
            f"this model's {type(optimizer).__name__} was made before qat.quantize, so it does not train the scales: "
            "make it again, for instance from qat.param_groups(model, lr=...)",
            stacklevel=3,
        )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer | None:
    """An optimizer that has one of the model's parameters."""
    ours = {id(p) for p in model.parameters()}
    types: list[type] = [torch.optim.Optimizer]
    for cls in types:
        types += cls.__subclasses__()
    objects = gc.get_objects()  # half a million or so: no line of Python for each
    found = itertools.compress(objects, map({id(cls) for cls in types}.__contains__, map(id, map(type, objects))))
    for optimizer in found:
        groups = getattr(optimizer, "param_groups", ())  # one whose constructor failed has none
        if any(id(p) in ours for group in groups for p in group["params"]):
            return optimizer
    return None


# --- the swapped model ------------------------------------------------------------------------------------------------


def quantized_layers(model: nn.Module) -> dict[str, QuantLayer]:
    """Quantized layers by name, each once."""
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLayer)}


def quantizers_of(model: nn.Module) -> list[Quantizer | MixedPrecisionQuantizer]:
    """All quantizers, each once."""
    return [m for m in model.modules() if isinstance(m, Quantizer | MixedPrecisionQuantizer)]


def live_plan(model: nn.Module) -> Plan:
    """The plan as the model is now: what `qat.set_bits` changed included."""

    def format_of(q: Quantizer) -> Format:
        return Format(8, str(q.dtype).removeprefix("torch.")) if isinstance(q, FP8Quantizer) else Format(q.bits)

    def tensor(q: AnyQuantizer) -> TensorPlan:
        if isinstance(q, Quantizer):
            granularity = q.group or ("tensor" if q.axis is None else "channel")
            return TensorPlan(format_of(q), q.method, q.init, q.raw.requires_grad, granularity)
        if isinstance(q, MixedPrecisionQuantizer):
            return TensorPlan(Format(16, str(q.dtype).removeprefix("torch.")))
        return TensorPlan()

    entries = [
        PlanEntry(
            name,
            layer.float_type.__name__,
            tensor(layer.weight_quantizer),
            tensor(layer.input_quantizer),
            layer.reason,
            layer.forward_mode,
            layer.fixed,
        )
        for name, layer in quantized_layers(model).items()
    ]
    return Plan(entries)


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Within the context the bits are off: the model computes what the float model computes, bit for bit."""
    quantizers = quantizers_of(model)
    before = [q.enabled for q in quantizers]
    try:
        for q in quantizers:
            q.enabled = False
        yield model
    finally:
        for q, state in zip(quantizers, before, strict=True):
            q.enabled = state


def initialise_weights(model: nn.Module) -> None:
    """Set every weight scale from its weight, in place."""
    for layer in quantized_layers(model).values():
        initialise_weight(layer.weight_quantizer, layer.weight)  # type: ignore[arg-type]


@torch.no_grad()
def initialise_weight(quantizer: AnyQuantizer, weight: Tensor) -> None:
    """Set a weight's scale, if it has one, in place."""
    if not isinstance(quantizer, Quantizer) or weight.is_meta:
        return
    quantizer.calibrate(weight)
    check_scale(quantizer)


def check_scale(quantizer: Quantizer) -> None:
    """Raise QatError unless calibration gave a positive finite scale."""
    if not (quantizer.step.isfinite().all() and quantizer.qmax > 0):
        raise QatError(
            f"{quantizer.name}: {quantizer.bits} bits cannot hold its values (negative ones need 2 bits, and all of "
            "them a magnitude below 1e37)"
        )


@contextlib.contextmanager
def all_or_nothing(quantizers: list[Quantizer]) -> Iterator[None]:
    """If the block fails, every quantizer is as before."""
    before = [(q, q.bits, {key: value.clone() for key, value in q.state_dict().items()}) for q in quantizers]
    try:
        yield
    except BaseException:
        for q, bits, state in before:
            q.bits = bits
            q.load_state_dict(state)
        raise


def set_bits(model: nn.Module, bits: Any, match: str | None = None) -> Plan:
    """Change the bit widths of a quantized model, in place; scales follow as the LSQ step does, by 1 / sqrt(qmax).

    Args:
        model: a quantized model.
        bits: 1..8 or `w4a8`.
        match: a glob over layer names; None for all layers but the exceptions (first, last, rules).

    Returns:
        The plan as it is now.

    Raises:
        QatError: the model is not quantized, nothing matches, or a tensor would change between integer and float.
    """
    layers = quantized_layers(model)
    if not layers:
        raise QatError("the model is not quantized: call qat.quantize(model, bits=...) first")
    chosen = [
        name for name, layer in layers.items() if (fnmatch.fnmatchcase(name, match) if match else not layer.fixed)
    ]
    if not chosen:
        why = (
            f"{match!r} matches no quantized layer{closest(match, layers)}" if match else "every layer is an exception"
        )
        raise QatError(f"{why}: give match=, a glob over layer names")
    formats = parse_bits(bits)
    changes: dict[Quantizer, int] = {}
    for name in chosen:
        for q, f in ((layers[name].weight_quantizer, formats[0]), (layers[name].input_quantizer, formats[1])):
            if not isinstance(q, Quantizer) or not f.is_integer:
                raise QatError(
                    f"set_bits changes integers to integers; got bits={bits!r} for {name} (quantize the float model "
                    "anew)"
                )
            changes[q] = f.bits
    for name in [n for n in layers if n not in chosen]:
        shared = layers[name].weight_quantizer
        if isinstance(shared, Quantizer) and changes.pop(shared, shared.bits) != shared.bits and match:
            other = next(n for n in chosen if layers[n].weight_quantizer is shared)
            raise QatError(f"{other} and {name} share one weight, so its bits too: match= must take both or none")
    with all_or_nothing(list(changes)):
        for quantizer, new in changes.items():
            quantizer.set_bits(new)
    return live_plan(model)


# --- loading ----------------------------------------------------------------------------------------------------------


def install_loading(model: nn.Module) -> None:
    """Let the model load float checkpoints, and refuse a partial set of quantizer state."""
    handles = (
        model.register_load_state_dict_pre_hook(before_loading),
        model.register_load_state_dict_post_hook(after_loading),
    )
    model.__dict__["_qat_loading"] = [h.id for h in handles]


def remove_loading(model: nn.Module) -> None:
    """Undo `install_loading`."""
    pre, post = model.__dict__.pop("_qat_loading", (None, None))
    model._load_state_dict_pre_hooks.pop(pre, None)
    model._load_state_dict_post_hooks.pop(post, None)


def before_loading(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """No quantizer keys at all: a float checkpoint, so fill in an uncalibrated state. Some but not all: an error."""
    own = {
        f"{prefix}{name}.{key}": uncalibrated(q, key, value)
        for name, q in module.named_modules(remove_duplicate=False)
        if isinstance(q, Quantizer)
        for key, value in q.state_dict().items()
    }
    absent = [key for key in own if key not in state_dict]
    if len(absent) == len(own):
        state_dict.update(own)
        module.__dict__["_qat_float_checkpoint"] = True
    elif absent:
        errors.append(
            f"expected all quantizer state or none of it (a float checkpoint); {len(absent)} of {len(own)} keys are "
            f"missing, the first is {absent[0]!r}"
        )


def uncalibrated(quantizer: Quantizer, key: str, value: Tensor) -> Tensor:
    """One item of a quantizer's state, as it was before calibration. Real, also where the model is still on meta."""
    fresh = {"calibrated": False, "signed": quantizer.weight, "zero_point": 0}
    if key in fresh or value.is_meta:
        return torch.full(
            value.shape, fresh.get(key, 1), dtype=value.dtype, device=None if value.is_meta else value.device
        )
    return value


def after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    """After a float checkpoint: weight scales from the new weights; activations wait for qat.calibrate."""
    if module.__dict__.pop("_qat_float_checkpoint", False):
        initialise_weights(module)
