"""Cost of one training step against the float model: time, bytes saved for backward, peak memory.

    python benchmarks/training_step.py --model resnet18 --batch 32 --size 64 --out FILE

All rows run in one process, one step of each in turn, and the ratios are of medians; the float row is the faster of the
two memory formats. Every row has the same allocator setting (freed memory stays in the process). `brevitas` appears if
it is installed (benchmarks/requirements.txt).
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import qat
from qat import kernels
from qat.training import keep_freed_memory


def lsq_net(model: nn.Module, bits: int, first_last: int = 8) -> nn.Module:
    """The usual eager LSQ: round by detach, gradients by autograd, as in lsq-net; per-channel weights, bias kept."""

    def grad_scale(s: Tensor, factor: float) -> Tensor:
        return (s - s * factor).detach() + s * factor

    def quantize(x: Tensor, s: Tensor, low: int, high: int, n: float) -> Tensor:
        s = grad_scale(s, 1 / (n * high) ** 0.5)
        v = (x / s).clamp(low, high)
        return (v + (v.round() - v).detach()) * s

    class Conv(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return self._conv_forward(*operands(self, x), self.bias)

    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(*operands(self, x), self.bias)

    def operands(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        b = layer.b
        low, high = (-(2 ** (b - 1)), 2 ** (b - 1) - 1) if layer.signed else (0, 2**b - 1)
        weight_high = 2 ** (b - 1) - 1
        w = layer.weight
        shape = (-1,) + (1,) * (w.ndim - 1)
        return (
            quantize(x, layer.s, low, high, x[0].numel()),
            quantize(w, layer.ws.view(shape), -weight_high, weight_high, w[0].numel()),
        )

    layers = [m for m in model.modules() if type(m) in (nn.Conv2d, nn.Linear)]
    for i, layer in enumerate(layers):
        layer.__class__ = Conv if isinstance(layer, nn.Conv2d) else Linear
        layer.b = first_last if i in (0, len(layers) - 1) else bits
        layer.signed = i == 0
        high = 2 ** (layer.b - 1) - 1
        mean = layer.weight.detach().abs().flatten(1).mean(1)
        layer.ws = nn.Parameter(2 * mean / high**0.5)
        layer.s = nn.Parameter(torch.tensor(4.0 / (2**layer.b - 1)), requires_grad=i > 0)
    return model


def brevitas_model(model: nn.Module, bits: int, first_last: int = 8) -> nn.Module:
    """Brevitas' layers in place of torch's: learned scales, per-channel weights."""
    import brevitas.nn as qnn
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Uint8ActPerTensorFloat

    layers = [(n, m) for n, m in model.named_modules() if type(m) in (nn.Conv2d, nn.Linear)]
    for i, (name, layer) in enumerate(layers):
        b = first_last if i in (0, len(layers) - 1) else bits
        arguments: dict[str, Any] = {
            "bias": layer.bias is not None,
            "weight_quant": Int8WeightPerChannelFloat,
            "weight_bit_width": b,
            "input_quant": Int8ActPerTensorFloat if i == 0 else Uint8ActPerTensorFloat,
            "input_bit_width": b,
            "return_quant_tensor": False,
        }
        if isinstance(layer, nn.Conv2d):
            geometry = {k: getattr(layer, k) for k in ("stride", "padding", "dilation", "groups")}
            new: nn.Module = qnn.QuantConv2d(
                layer.in_channels, layer.out_channels, layer.kernel_size, **geometry, **arguments
            )
        else:
            new = qnn.QuantLinear(layer.in_features, layer.out_features, **arguments)
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, new)
    return model


def ours(model: nn.Module, bits: int, x: Tensor, forward: str) -> nn.Module:
    """Our default configuration, calibrated."""
    model = qat.quantize(model, qat.QuantConfig(bits=bits, forward=forward))
    qat.calibrate(model, [x])
    return model.train()


def stepper(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One SGD step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


class Held:
    """A tensor that the graph holds; alive as long as the graph needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Bytes that autograd keeps for backward: every storage once, parameters and the input left out.

    Counted where the forward ends: what belongs to a part of the graph that nothing leads to is free again by then.
    """
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x, y)}
    held: weakref.WeakSet[Held] = weakref.WeakSet()

    def pack(t: Tensor) -> Held:
        held.add(h := Held(t))
        return h

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda h: h.tensor):
        loss = nn.functional.cross_entropy(model(x), y)
    storages = {s.data_ptr(): s.nbytes() for s in (h.tensor.untyped_storage() for h in held)}
    del loss
    return sum(size for pointer, size in storages.items() if pointer not in known)


def peak_bytes(step: Callable[[], None]) -> int:
    """Peak of what torch allocated on the CPU during one step, above what was there before."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    result = profile.profiler.kineto_results
    assert result is not None
    events = sorted((e for e in result.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    total = peak = 0
    for e in events:
        total += e.nbytes()
        peak = max(peak, total)
    return peak


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", nargs="+", default=["ours", "ours-fake", "ours-eager", "eager-lsq", "brevitas"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    torch.manual_seed(0)

    x = torch.randn(options.batch, 3, options.size, options.size)
    y = torch.randint(10, (options.batch,))
    model = torchvision.models.get_model(options.model, weights=None, num_classes=10).train()
    last = torch.channels_last
    fast, x_last = copy.deepcopy(model).to(memory_format=last), x.to(memory_format=last)

    candidates: dict[str, tuple[nn.Module, Tensor, str]] = {
        "float channels_last": (fast, x_last, "reference"),
        "float contiguous": (model, x, "reference"),
    }
    for name in options.rows:
        twin = copy.deepcopy(fast)
        if name == "eager-lsq":
            candidates[name] = (lsq_net(twin, options.bits), x_last, "reference")
        elif name == "brevitas":
            try:
                candidates[name] = (brevitas_model(twin, options.bits).train(), x_last, "reference")
            except ImportError:
                print("brevitas is not installed: no such row (pip install -r benchmarks/requirements.txt)")
        else:
            forward = "auto" if name == "ours" else "fake"
            implementation = "reference" if name == "ours-eager" else "compiled"
            with kernels.use(implementation):
                candidates[name] = (ours(twin, options.bits, x_last, forward), x_last, implementation)

    steps = {name: stepper(m, images, y) for name, (m, images, _) in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(options.steps + 2):  # two to warm up
        for name, step in steps.items():
            with kernels.use(candidates[name][2]):
                start = time.perf_counter()
                step()
                elapsed = time.perf_counter() - start
            if round_ >= 2:
                times[name].append(elapsed)
    seconds = {name: statistics.median(t) for name, t in times.items()}
    best = min(("float channels_last", "float contiguous"), key=lambda n: seconds[n])
    rows = []
    for name, (m, images, implementation) in candidates.items():
        with kernels.use(implementation):
            row = {"saved_ratio": saved_bytes(m, images, y), "peak_ratio": peak_bytes(steps[name])}
        ordered = sorted(times[name])
        row |= {"name": "float" if name == best else name, "step_ratio": seconds[name] / seconds[best]}
        row |= {"spread": (ordered[len(ordered) * 3 // 4] - ordered[len(ordered) // 4]) / seconds[name]}
        row |= {"milliseconds": seconds[name] * 1e3}
        rows.append(row)
    base = next(row for row in rows if row["name"] == "float")
    base_saved, base_peak = base["saved_ratio"], base["peak_ratio"]
    for row in rows:
        row["saved_ratio"] /= base_saved
        row["peak_ratio"] /= base_peak

    print(f"{options.model}, batch {options.batch}, {options.size}x{options.size}, W{options.bits}A{options.bits}")
    print(f"{'':22s}{'step':>8s}{'saved':>8s}{'peak':>8s}{'spread':>8s}{'ms':>9s}")
    for row in rows:
        numbers = f"{row['step_ratio']:8.2f}{row['saved_ratio']:8.2f}{row['peak_ratio']:8.2f}{row['spread']:8.2f}"
        print(f"{row['name']:22s}{numbers}{row['milliseconds']:9.1f}")
    if options.out:
        machine = f"{platform.machine()}, {options.threads} threads, {torch.backends.cpu.get_cpu_capability()}"
        content = {"machine": machine, "versions": {"torch": torch.__version__}, "rows": rows}
        content |= {k: getattr(options, k) for k in ("model", "batch", "size", "bits", "steps")}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
