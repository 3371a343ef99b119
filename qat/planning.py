"""Decide what becomes quantized and why, in a form that can be printed and stored."""

from __future__ import annotations

import dis
import fnmatch
import inspect
import types
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from qat.config import Format, QatError, QuantConfig, check_granularity, closest, parse_bits, parse_format
from qat.kernels import integer
from qat.layers import LAYERS, QuantLayer
from qat.quantizers import METHODS, Quantizer
from qat.quantizers.base import spell

__all__ = ["Plan", "PlanEntry", "TensorPlan", "plan"]


@dataclass
class TensorPlan:
    """What happens to one tensor of a layer: its weight, or what enters it."""

    format: Format = field(default_factory=lambda: Format(32))
    method: str = "lsq"
    init: str | None = None
    learn: bool = True
    granularity: str | int = "tensor"  # tensor, channel, or weights per group

    def __str__(self) -> str:
        if not self.format.is_integer:
            return str(self.format)
        text = f"{self.format} {self.method}"
        if isinstance(self.granularity, int):
            text += f", groups of {self.granularity}"
        learns = any(quantizer.learns for quantizer in METHODS[self.method])
        return text + (", fixed scale" if learns and not self.learn else "")


@dataclass
class PlanEntry:
    """One layer: what happens to its weight and input, and why. Both None where the layer stays float."""

    name: str
    type: str
    weight: TensorPlan | None
    act: TensorPlan | None
    reason: str
    forward: str = "fake"  # or integer: codes are convolved, not values
    fixed: bool = False  # an exception (first, last, rule), which set_bits without a match leaves alone


@dataclass
class Plan:
    """Every layer with weights, in the model's order. Print it; `qat.quantize` applies the same."""

    entries: list[PlanEntry]

    @property
    def quantized(self) -> list[PlanEntry]:
        """The entries that will be, or are, quantized."""
        return [e for e in self.entries if e.weight is not None]

    def __str__(self) -> str:
        rows = [("layer", "type", "weight", "input", "reason")]
        norms: dict[str, int] = {}
        for e in self.entries:
            if e.weight is None and e.type.startswith(NORMS):
                norms[f"{e.type}: {e.reason}"] = norms.get(f"{e.type}: {e.reason}", 0) + 1
            else:
                rows.append((e.name or "(model)", e.type, str(e.weight or "float"), str(e.act or "float"), e.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)) + "  " + row[4] for row in rows]
        lines += [f"{n} x {text}" for text, n in norms.items()]
        return "\n".join(line.rstrip() for line in [*lines, self.coverage])

    @property
    def coverage(self) -> str:
        """One line: how many layers of each type are quantized."""
        counts: dict[str, list[int]] = {}
        for e in self.entries:
            if not e.type.startswith(NORMS):
                counts.setdefault(e.type.removeprefix("Quant"), []).append(e.weight is not None)
        return "quantized: " + ", ".join(f"{t} {sum(c)}/{len(c)}" for t, c in counts.items())

    def to_dicts(self) -> list[dict[str, Any]]:
        """Plain dicts of the quantized entries, for checkpoints and JSON."""
        return [
            {"name": e.name, "type": e.type, "reason": e.reason, "forward": e.forward, "fixed": e.fixed}
            | {
                key: {
                    "bits": str(t.format),
                    "method": t.method,
                    "init": t.init,
                    "learn": t.learn,
                    "granularity": t.granularity,
                }
                for key, t in (("weight", e.weight), ("act", e.act))
                if t is not None
            }
            for e in self.quantized
        ]

    @classmethod
    def from_dicts(cls, rows: list[dict[str, Any]]) -> Plan:
        """The inverse of `to_dicts`.

        Raises:
            QatError: the rows are not a plan.
        """

        def tensor(row: dict[str, Any]) -> TensorPlan:
            number = parse_format(row["bits"])
            if number.is_integer and row["method"] not in METHODS:
                raise QatError(f"the plan uses method {row['method']!r}, which this version does not have")
            granularity = row["granularity"]
            check_granularity(granularity)
            return TensorPlan(number, row["method"], row["init"], bool(row["learn"]), granularity)

        try:
            return cls(
                [
                    PlanEntry(
                        r["name"],
                        r["type"],
                        tensor(r["weight"]),
                        tensor(r["act"]),
                        r["reason"],
                        r["forward"],
                        bool(r["fixed"]),
                    )
                    for r in rows
                ]
            )
        except (KeyError, TypeError) as error:
            raise QatError(f"expected a quantization plan, got something else ({error!r})") from None


ENDS = ("first layer", "last layer")
NORMS = ("BatchNorm", "SyncBatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "LocalResponseNorm")


def plan(model: nn.Module, config: QuantConfig | None = None, *, bits: Any = None) -> Plan:
    """Decide what `quantize` would do, without doing it. Works on any device, also `meta`.

    Raises:
        QatError: a bad configuration, a rule that matches nothing, no quantizable layer, an already quantized model.
    """
    config = resolve(config, bits)
    if not isinstance(model, nn.Module):
        raise QatError(f"expected a torch.nn.Module; got {model!r}")
    reads = {cls: weight_reads(cls) for cls in {type(module) for module in model.modules()}}
    readers: dict[nn.Module, str] = {}  # layers whose weight another module reads, and that module's type
    for module in model.modules():
        if isinstance(module, QuantLayer | Quantizer):
            raise QatError(
                "the model is already quantized: change it with qat.set_bits, or undo with qat.dequantize first"
            )
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise QatError("quantize the model before DistributedDataParallel wraps it, or the scales are not reduced")
        for path in reads[type(module)]:
            layer = find(module, path)
            if layer is not None:
                readers.setdefault(layer, type(module).__name__)
    entries: list[PlanEntry] = []
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is None and not nn.utils.parametrize.is_parametrized(module):
            continue
        reason = float_reason(module, readers.get(module, ""))
        tensor = None if reason else TensorPlan()
        entries.append(PlanEntry(name, type(module).__name__, tensor, tensor and replace(tensor), reason))
    result = Plan(entries)
    todo = result.quantized
    if not todo:
        raise QatError(
            f"nothing to quantize: {type(model).__name__} has no {' or '.join(t.__name__ for t in LAYERS)} layer"
            + (f" that can be quantized ({entries[0].name or 'it'}: {entries[0].reason})" if entries else "")
        )
    choose_formats(todo, config)
    check_tied(model, todo)
    for e in todo:
        assert e.weight and e.act
        if e.weight.format.is_float and e.act.format.is_float:
            e.weight = e.act = None
            e.reason = "its bits are float" + ("" if e.reason == "default" else f" ({e.reason})")
    check_groups(model, todo)
    choose_forward(model, todo, config.forward)
    return result


# --- what stays float -------------------------------------------------------------------------------------------------


def float_reason(module: nn.Module, reader: str) -> str:
    """Why a module with parameters stays float; empty for a layer that can be quantized."""
    name = type(module).__name__
    if name.startswith(("BatchNorm", "SyncBatchNorm")):
        return "float in training, part of the layer before it when deployed"
    if name.startswith(NORMS):
        return "a normalization: float"
    if reader:
        return f"{reader} reads its weight itself, so it would pass a quantizer by"
    if nn.utils.parametrize.is_parametrized(module):
        return "its weight is computed by a parametrization"
    if any(nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
        return "lazy, without a weight so far: run a batch through the model first"
    if type(module) not in LAYERS:
        for base in LAYERS:
            if isinstance(module, base):
                return f"a subclass of {base.__name__}: add it to qat.layers.LAYERS to quantize it"
        return "no quantized form of this type"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        return "its weight is not a Parameter: a hook computes it"
    if not weight.is_floating_point() or weight.numel() == 0:
        return f"a weight of {weight.dtype}".replace("torch.", "") if weight.numel() else "its weight has no elements"
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    return ""


LOADS = ("LOAD_ATTR", "LOAD_METHOD")
METADATA = {"device", "dim", "dtype", "is_cuda", "ndim", "numel", "requires_grad", "shape", "size"}
"""What a forward may ask of a weight without computing with it."""


def weight_reads(cls: type[nn.Module]) -> tuple[str, ...]:
    """The `a.b` of every `self.a.b.weight` that the forward of a module type reads, found in its bytecode.

    Attention modules compute with their children's weights without calling the children, and some types do so on a
    fast path only; a quantizer inside such a child would never run.
    """
    found: dict[str, None] = {}
    todo, seen = [getattr(cls, "forward", None)], set()
    while todo:
        code = todo.pop()
        code = getattr(inspect.unwrap(code), "__code__", None) if callable(code) else code
        if not isinstance(code, types.CodeType) or code in seen:
            continue
        seen.add(code)
        todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        path: list[str] = []
        for i in [*dis.get_instructions(code), None]:
            if i is not None and i.opname in LOADS:
                path.append(i.argval)
                continue
            at = path.index("weight", 1) if "weight" in path[1:] else 0
            if at and not METADATA.intersection(path[at + 1 : at + 2]):
                found[".".join(path[:at])] = None
            method = getattr(cls, path[0], None) if path else None
            if inspect.isfunction(method) and getattr(nn.Module, path[0], None) is not method:
                todo.append(method)
            path = []
    return tuple(found)


def find(module: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a dotted path, or None."""
    for name in path.split("."):
        child = module._modules.get(name)
        if child is None:
            return None
        module = child
    return module


# --- what becomes quantized -------------------------------------------------------------------------------------------


def resolve(config: QuantConfig | None, bits: Any) -> QuantConfig:
    """One checked QuantConfig from the two ways to ask."""
    if config is not None and bits is not None:
        raise QatError("give either a QuantConfig or bits=, not both (QuantConfig has a field bits)")
    return (config or QuantConfig(bits=4 if bits is None else bits)).check()


def choose_formats(todo: list[PlanEntry], config: QuantConfig) -> None:
    """Fill in formats, methods and reasons; the weakest choice first (see QuantConfig)."""
    weight, act = parse_bits(config.bits)
    weight = weight if config.weight.bits is None else parse_format(config.weight.bits, "quant.weight.bits")
    act = act if config.act.bits is None else parse_format(config.act.bits, "quant.act.bits")
    for e in todo:
        assert e.weight and e.act
        granularity = config.weight.granularity or "channel"
        e.weight = TensorPlan(
            weight, config.weight.method or config.method, config.weight.init, granularity=granularity
        )
        e.act = TensorPlan(act, config.act.method or config.method, config.act.init)
        e.reason = "default"
    ends = [(todo[0], "first layer"), (todo[-1], "last layer")]
    if config.first_last_bits is not None:
        formats = parse_bits(config.first_last_bits, "quant.first_last_bits")
        for e, why in ends:
            assert e.weight and e.act
            # An exception for accuracy: it never takes bits away.
            if formats[0].bits > e.weight.format.bits:
                e.weight.format, e.reason, e.fixed = formats[0], why, True
            if formats[1].bits > e.act.format.bits:
                e.act.format, e.reason, e.fixed = formats[1], why, True
    for rule in config.rules:
        matched = [e for e in todo if fnmatch.fnmatchcase(e.name, rule.match)]
        if not matched:
            names = [e.name for e in todo]
            hint = f" (try match='{rule.match}.*')" if any(n.startswith(rule.match + ".") for n in names) else ""
            raise QatError(
                f"the rule {rule.match!r} matches no quantizable layer{hint or closest(rule.match, names)}; "
                "qat.plan prints their names"
            )
        for e in matched:
            assert e.weight and e.act
            if rule.bits is not None:
                e.weight.format, e.act.format = parse_bits(rule.bits)
            if rule.method is not None:
                e.weight.method = e.act.method = rule.method
            e.reason, e.fixed = f"rule {rule.match}", True
    first = todo[0]
    assert first.act
    if not config.learn_input_scale:
        first.act.learn = False
    for e in todo:
        for t, role in ((e.weight, 0), (e.act, 1)):
            assert t
            choose_method(t, role, e)


def choose_method(t: TensorPlan, role: int, e: PlanEntry) -> None:
    """Settle which quantizer takes a weight (role 0) or activation (1), where its method does not have its bits."""
    if t.format.is_integer:
        quantizer = METHODS[t.method][role]
        if t.format.bits not in quantizer.allowed_bits:
            if t.format.bits == 1:
                quantizer = METHODS["binary"][role]
            elif e.reason in ("first layer", "last layer"):
                quantizer = METHODS["lsq"][role]
            else:
                raise QatError(
                    f"{e.name}: {quantizer.method} has {spell(quantizer.allowed_bits)} bits, got {t.format.bits}; "
                    f"try bits={quantizer.allowed_bits[0]}"
                )
        t.method = quantizer.method
        t.learn = t.learn and quantizer.learns
        if quantizer.per_tensor:
            t.granularity = "tensor"


def choose_forward(model: nn.Module, todo: list[PlanEntry], forward: str) -> None:
    """Convolve codes wherever a layer can and this machine does so exactly: `auto` convolutions, `integer` all."""
    for e in todo:
        layer = model.get_submodule(e.name)
        plain = e.weight and e.act and e.weight.format.is_integer and e.act.format.is_integer
        if (
            forward != "fake"
            and plain
            and e.weight
            and e.act
            and (e.weight.method, e.act.method, e.weight.granularity) == ("lsq", "lsq", "channel")
            and LAYERS[type(layer)].takes_integers(layer)
            and not (forward == "auto" and isinstance(layer, nn.Linear))  # exact, but slower: 1.7x in ViT-B/16
            and integer.available()
        ):
            e.forward = "integer"


def check_groups(model: nn.Module, todo: list[PlanEntry]) -> None:
    """A group must not straddle two output channels: where it would, one scale per channel instead."""
    for e in todo:
        layer = model.get_submodule(e.name)
        weight, axis = layer.weight, LAYERS[type(layer)].channel_axis
        if e.weight and isinstance(e.weight.granularity, int):
            assert isinstance(weight, nn.Parameter)
            if axis != 0 or weight[0].numel() % e.weight.granularity:
                e.reason += f"; per channel: no whole groups in {weight[0].numel()} weights"
                e.weight.granularity = "channel"


def check_tied(model: nn.Module, todo: list[PlanEntry]) -> None:
    """Layers that share one weight must quantize it alike: an exception for one end of the model holds for both."""
    sharing: dict[int, list[PlanEntry]] = {}
    for e in todo:
        sharing.setdefault(id(model.get_submodule(e.name).weight), []).append(e)
    for group in sharing.values():
        ends = [e for e in group if e.reason in ENDS]
        for e in group:
            if ends and e.reason == "default":
                e.weight, e.reason = (
                    ends[0].weight and replace(ends[0].weight),
                    f"shares its weight with {ends[0].name}",
                )
                e.fixed = True
        for e in group:
            if e.weight != group[0].weight:
                raise QatError(
                    f"{group[0].name} and {e.name} share one weight but not its bits ({group[0].weight} and "
                    f"{e.weight}): give both the same rule"
                )
