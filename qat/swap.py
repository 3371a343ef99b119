"""Replace layers by their quantized twins as a plan says, and back; change bits; keep checkpoints loadable."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from qat.config import Format, QatError, QuantConfig, closest, parse_bits
from qat.layers import LAYERS, AnyQuantizer, QuantLayer
from qat.planning import Plan, PlanEntry, TensorPlan, plan
from qat.quantizers import METHODS, FP8Quantizer, MixedPrecisionQuantizer, Quantizer

__all__ = [
    "apply_plan",
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

    Parameters, their names and the user's hooks stay; `conv1.weight_quantizer.scale` and so on are new. Weight scales
    are set at once, activations need `qat.calibrate`. With `bits="float"` the model comes back unchanged.

    Args:
        model: any module; its Conv2d and Linear layers (exact types, see `qat.layers.LAYERS`) are quantized.
        config: the whole choice; or
        bits: 1..8, `w4a8`, `float`, `bf16`, `fp16`.

    Returns:
        The same model object, unless it is itself such a layer.

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
    """Swap the layers that a plan names. Layers reached by several names stay one object.

    Raises:
        QatError: a name in the plan is not such a layer of the model.
    """
    twins: dict[nn.Module, nn.Module] = {}
    tied: dict[int, AnyQuantizer] = {}
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        names.setdefault(module, name)
    by_name = {name: module for module, name in names.items()}
    for e in todo.quantized:
        layer = by_name.get(e.name)
        if layer is None or type(layer) not in LAYERS:
            raise QatError(
                f"the plan names {e.name!r} ({e.type}), which this model does not have{closest(e.name, by_name)}"
            )
        cls = LAYERS[type(layer)]
        assert e.weight and e.act
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if id(weight) not in tied:
            tied[id(weight)] = make_quantizer(e.weight, f"{e.name}.weight_quantizer", weight, cls.channel_axis)
        twin = cls.from_float(layer, tied[id(weight)], make_quantizer(e.act, f"{e.name}.input_quantizer", weight))
        twin.reason, twin.fixed, twin.forward_mode = e.reason, e.fixed, e.forward
        twins[layer] = twin
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child in twins:
                parent._modules[key] = twins[child]
    model = twins.get(model, model)
    if twins:
        initialise_weights(model)
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

    >>> type(dequantize(quantize(nn.Sequential(nn.Linear(4, 4)), bits=4))[0]).__name__
    'Linear'
    """
    twins: dict[nn.Module, nn.Module] = {m: m.to_float() for m in model.modules() if isinstance(m, QuantLayer)}
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child in twins:
                parent._modules[key] = twins[child]
    remove_loading(model)
    return twins.get(model, model)


def warn_about_optimizers(model: nn.Module) -> None:
    """An optimizer made before the swap cannot hold the scales: say so."""
    ours = {id(p) for p in model.parameters()}
    gc.collect()  # an optimizer that nobody can reach any more does not count
    for o in gc.get_objects():
        if issubclass(type(o), torch.optim.Optimizer) and any(
            id(p) in ours for g in o.param_groups for p in g["params"]
        ):
            warnings.warn(
                f"this model's {type(o).__name__} was made before qat.quantize, so it does not train the scales: "
                "make it again, for instance from qat.param_groups(model, lr=...)",
                stacklevel=3,
            )
            return


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


@torch.no_grad()
def initialise_weights(model: nn.Module) -> None:
    """Set every weight scale from its weight, in place."""
    for layer in quantized_layers(model).values():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        if isinstance(layer.weight_quantizer, Quantizer) and not weight.is_meta:
            layer.weight_quantizer.calibrate(weight)


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
        layer for name, layer in layers.items() if (fnmatch.fnmatchcase(name, match) if match else not layer.fixed)
    ]
    if not chosen:
        raise QatError(f"{match!r} matches no quantized layer{closest(match or '', layers)}")
    formats = parse_bits(bits)
    changes = []
    for layer in chosen:
        for q, f in ((layer.weight_quantizer, formats[0]), (layer.input_quantizer, formats[1])):
            if not isinstance(q, Quantizer) or not f.is_integer:
                raise QatError(
                    f"set_bits changes integers to integers; got bits={bits!r} (quantize the float model anew)"
                )
            changes.append((q, f.bits))
    for q, new in {id(q): (q, new) for q, new in changes}.values():
        q.set_bits(new)
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
        f"{prefix}{name}.{key}": value
        for name, q in module.named_modules(remove_duplicate=False)
        if isinstance(q, Quantizer)
        for key, value in q.state_dict().items()
    }
    absent = [key for key in own if key not in state_dict]
    if len(absent) == len(own):
        for key, value in own.items():
            state_dict[key] = torch.zeros_like(value) if key.endswith(".calibrated") else value
        module.__dict__["_qat_float_checkpoint"] = True
    elif absent:
        errors.append(
            f"expected all quantizer state or none of it (a float checkpoint); {len(absent)} of {len(own)} keys are "
            f"missing, the first is {absent[0]!r}"
        )


def after_loading(module: nn.Module, incompatible_keys: Any) -> None:
    """After a float checkpoint: weight scales from the new weights; activations wait for qat.calibrate."""
    if module.__dict__.pop("_qat_float_checkpoint", False):
        initialise_weights(module)
