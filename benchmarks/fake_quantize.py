"""Time of fake-quantizing a tensor, forward and with backward, against memory bandwidth, ReLU and the peers.

    python benchmarks/fake_quantize.py --elements 1e3 1e5 1e7 --out benchmarks/results/fake_quantize.json
    python benchmarks/fake_quantize.py --methods          # every registered method instead of the peers

All rows take the same float32 tensor in turn, within one process, and every figure is a median. `relu` is the ratio to
torch's ReLU, forward and backward; GB/s counts what must move: x in and values out, and for the backward the gradient
in, the gradient out and a byte per element (a float for weights). The roofline is `copy`, of the same bytes in and out.
Brevitas and torchao appear if they are installed (benchmarks/requirements.txt).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qat import kernels
from qat.functional import lsq
from qat.quantizers import METHODS, Observer
from qat.training import keep_freed_memory

Row = tuple[str, Callable[[Tensor], Tensor]]
QMAX = 15


def eager_lsq(x: Tensor, scale: Tensor, gain: float = 1e-3) -> Tensor:
    """As lsq-net writes it."""
    s = (scale - scale * gain).detach() + scale * gain
    v = (x / s).clamp(0, QMAX)
    return (v + (v.round() - v).detach()) * s


def detach_idiom(x: Tensor, scale: Tensor) -> Tensor:
    """The shortest way: straight through everything, the scale fixed."""
    return x + ((x / scale).round().clamp(0, QMAX) * scale - x).detach()


def ours(implementation: str, scale: Tensor, axis: int | None, lean: bool) -> Callable[[Tensor], Tensor]:
    """LSQ with one of the kernels."""

    def call(x: Tensor) -> Tensor:
        with kernels.use(implementation):
            return lsq(x, scale, 0, QMAX, axis, 1e-3, lean)

    return call


def rows(x: Tensor, channels: int) -> list[Row]:
    """Everything that is compared, each with a scale of its own where it learns one."""

    def per_tensor() -> Tensor:
        return torch.tensor([0.2], requires_grad=True)

    per_channel = torch.full((channels,), 0.2, requires_grad=True)
    zero, zeros = torch.zeros(1), torch.zeros(channels)
    scale, eager, wide = per_tensor(), per_tensor(), per_channel.detach().clone().requires_grad_()
    aten = torch._fake_quantize_learnable_per_tensor_affine
    aten_channel = torch._fake_quantize_learnable_per_channel_affine
    result: list[Row] = [
        ("relu", torch.relu),
        ("ours", ours("compiled", per_tensor(), None, True)),
        ("ours per channel", ours("compiled", per_channel, 0, False)),
        ("ours, reference kernels", ours("reference", per_tensor(), None, True)),
        ("eager lsq", lambda x: eager_lsq(x, eager)),
        ("eager lsq per channel", lambda x, s=wide: eager_lsq(x, s[:, None])),
        ("detach idiom", lambda x: detach_idiom(x, zero + 0.2)),
        ("aten learnable", lambda x: aten(x, scale, zero, 0, QMAX, 1e-3)),
        ("aten learnable per channel", lambda x: aten_channel(x, wide, zeros, 0, 0, QMAX, 1e-3)),
    ]
    try:
        from brevitas.core.quant import IntQuant

        quant = IntQuant(narrow_range=False, signed=False, input_view_impl=nn.Identity())
        s, bits = per_tensor(), torch.tensor(4.0)
        result.append(("brevitas", lambda x: quant(s, torch.tensor(0.0), bits, x)))
    except ImportError:
        print("brevitas is not installed: no such row")
    try:
        from torchao.quantization.quant_primitives import _fake_quantize_affine

        fixed, point = torch.tensor([0.2]), torch.zeros(1, dtype=torch.int32)
        shape = tuple(x.shape)
        result.append(
            ("torchao, fixed scale", lambda x: _fake_quantize_affine(x, shape, fixed, point, torch.uint8, 0, QMAX))
        )
    except ImportError:
        print("torchao is not installed: no such row")
    return result


def method_rows(x: Tensor, channels: int) -> list[Row]:
    """Every registered method, as the quantizer that a model would have: for weights per channel, and activations."""
    result: list[Row] = [("relu", torch.relu)]
    for name, types in METHODS.items():
        for cls, weight in zip(types, (True, False), strict=True):
            bits = 4 if 4 in cls.allowed_bits else cls.allowed_bits[0]
            per_channel = weight and not cls.per_tensor
            q = cls(bits, weight=weight, channels=channels if per_channel else 1, axis=0 if per_channel else None)
            if weight:
                q.calibrate(x.detach())
            else:
                observer = Observer()
                observer.update(x.detach().abs())
                q.calibrate(observer)
            result.append((f"{name} {'weight' if weight else 'activation'}", q))
    return result


def measure(rows: list[Row], x: Tensor, repeats: int) -> list[dict[str, Any]]:
    """Medians of forward, and forward with backward, all rows in turn."""
    x = x.requires_grad_()
    g = torch.randn_like(x)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name, _ in rows}
    copies: list[float] = []
    inner = max(1, min(200, 1_000_000 // x.numel()))  # of small tensors many in a row: a clock tick is not nothing
    for round_ in range(repeats + 2):
        start = time.perf_counter()
        for _ in range(inner):
            x.detach().clone()
        copies.append((time.perf_counter() - start) / inner)
        for name, function in rows:
            forward = both = 0.0
            for _ in range(inner):
                start = time.perf_counter()
                y = function(x)
                middle = time.perf_counter()
                y.backward(g)
                both += time.perf_counter() - start
                forward += middle - start
                x.grad = None
                del y
            if round_ >= 2:
                times[name][0].append(forward / inner)
                times[name][1].append(both / inner)
    relu = statistics.median(times["relu"][1])
    copy = statistics.median(copies[2:])
    found = [{"name": "copy", "elements": x.numel(), "forward_us": copy * 1e6, "gb_per_s": x.numel() * 8 / copy / 1e9}]
    for name, _ in rows:
        forward, both = (statistics.median(t) for t in times[name])
        ordered = sorted(times[name][1])
        spread = (ordered[len(ordered) * 3 // 4] - ordered[len(ordered) // 4]) / both
        found.append(
            {"name": name, "elements": x.numel(), "forward_us": forward * 1e6, "both_us": both * 1e6}
            | {"relu_ratio": both / relu, "spread": spread, "gb_per_s": x.numel() * 17 / both / 1e9}
        )
    return found


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=float, nargs="+", default=[1e3, 1e4, 1e5, 1e6, 1e7])
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--methods", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    for n in options.elements:
        columns = max(1, int(n) // options.channels)
        x = torch.randn(options.channels, columns)
        make = method_rows if options.methods else rows
        with kernels.use("compiled"):
            found = measure(make(x, options.channels), x, options.repeats if n < 5e7 else 3)
        results += found
        print(f"\n{x.numel():,} elements   {'forward us':>12s}{'both us':>12s}{'/ relu':>8s}{'GB/s':>8s}{'spread':>8s}")
        for row in found:
            cells = f"{row['forward_us']:12.1f}{row.get('both_us', 0):12.1f}{row.get('relu_ratio', 0):8.2f}"
            print(f"{row['name']:28s}{cells}{row['gb_per_s']:8.1f}{row.get('spread', 0):8.2f}", flush=True)
    if options.out:
        machine = f"{platform.machine()}, {options.threads} threads, {torch.backends.cpu.get_cpu_capability()}"
        content = {"machine": machine, "versions": {"torch": torch.__version__}, "rows": results}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
