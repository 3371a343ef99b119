"""Values and gradients against Brevitas, which had no part in writing ours: how many differ, and by how much.

    pip install -r benchmarks/requirements.txt
    python benchmarks/brevitas_oracle.py --out benchmarks/results/brevitas_oracle.json

Brevitas computes its gradients by autograd through straight-through rounding and clamping; ours are written out. They
differ on purpose in one place: between the end of the range and half a step beyond, Brevitas, which clamps after it
rounds, lets the gradient of x pass. Those elements get no gradient here. Exit code 1 if anything else differs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import brevitas
import torch
from brevitas.core.quant import BinaryQuant, IntQuant, TernaryQuant
from brevitas.function.ops_ste import abs_binary_sign_grad, ceil_ste
from torch import Tensor, nn

from qat.functional import binary, lsq, lsq_plus, ste, ternary, tqt

TOLERANCE = 1e-3
"""On gradients of a scale: some methods keep a byte per element of x for it (docs/methods.md)."""

Case = tuple[str, Callable[..., Tensor], Callable[..., Tensor], list[Tensor], Tensor]


class Given(nn.Module):
    """A scale that does not depend on x."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """The scale."""
        return self.scale


def settled(v: Tensor, qmin: int, qmax: int) -> Tensor:
    """1 where rounding does not carry v over an end of the range, else 0."""
    return (((v >= qmin) & (v <= qmax)) == ((v.round() >= qmin) & (v.round() <= qmax))).float()


def int_quant(bits: int, signed: bool, narrow: bool) -> Callable[..., Tensor]:
    """Brevitas' integer quantizer as a function of x, scale and zero point."""
    module = IntQuant(narrow_range=narrow, signed=signed, input_view_impl=nn.Identity())
    zero = torch.tensor(0.0)
    return lambda x, s, z=zero: module(s, z, torch.tensor(float(bits)), x)


def cases(n: int) -> Iterator[Case]:
    """Name, ours, theirs, arguments (x first), mask on the incoming gradient."""
    for bits in (2, 3, 4, 8):
        for signed in (True, False):
            narrow = signed and bits > 2
            qmax = 2 ** (bits - signed) - 1
            qmin = -(qmax + (not narrow)) if signed else 0
            theirs = int_quant(bits, signed, narrow)
            tag = f"{'int' if signed else 'uint'}{bits}"
            x, scale = torch.randn(n) + 0.5, torch.tensor([2.0 / max(qmax, 1)])
            mask = settled(x / scale, qmin, qmax)
            yield f"lsq {tag}", lambda x, s, a=qmin, b=qmax: lsq(x, s, a, b), theirs, [x, scale], mask
            fixed = scale.clone()
            yield (
                f"ste {tag}",
                lambda x, s=fixed, a=qmin, b=qmax: ste(x, s, a, b),
                lambda x, s=fixed, f=theirs: f(x, s),
                [x],
                mask,
            )
            w = torch.randn(16, n // 16) + 0.5
            scales = torch.rand(16) + 0.5
            scales /= max(qmax, 1)
            column = scales[:, None]
            yield (
                f"lsq {tag} per channel",
                lambda x, s, a=qmin, b=qmax: lsq(x, s, a, b, axis=0),
                lambda x, s, f=theirs: f(x, s[:, None]),
                [w, scales],
                settled(w / column, qmin, qmax),
            )
    theirs, offset = int_quant(4, False, False), torch.tensor([3.0])
    x, scale = torch.randn(n) + 0.5, torch.tensor([0.2])
    mask = settled(x / scale, -3, 12)
    yield (
        "lsq_plus uint4, zero point 3",
        lambda x, s: lsq_plus(x, s, offset, 0, 15),
        lambda x, s: theirs(x, s, offset),
        [x, scale],
        mask,
    )
    threshold = torch.tensor([0.7])
    four = int_quant(4, True, False)
    step = 2 ** threshold.ceil() / 8
    yield (
        "tqt int4",
        lambda x, t: tqt(x, t, -8, 7),
        lambda x, t: four(x, 2 ** ceil_ste(t) / 8),
        [x, threshold],
        settled(x / step, -8, 7),
    )
    w = torch.rand(16, n // 16) * 1.98 - 0.99

    def xnor(w: Tensor) -> Tensor:
        # both terms of the chain rule: their sign passes the gradient straight through, and so does their |w|'s mean
        result: Tensor = BinaryQuant(Given(abs_binary_sign_grad(w).mean(1, keepdim=True)))(w)[0]
        return result

    yield "binary per channel", lambda w: binary(w, axis=0), xnor, [w], torch.ones_like(w)
    cut = 0.7 * w.abs().mean(1, keepdim=True)
    kept = w.abs() > cut
    level = (w.abs() * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
    rows = [TernaryQuant(Given(a), (t / a).item()) for a, t in zip(level, cut, strict=True)]

    def by_rows(w: Tensor) -> Tensor:
        return torch.stack([row(x)[0] for row, x in zip(rows, w, strict=True)])

    yield "ternary per channel (values)", lambda w: ternary(w, axis=0), by_rows, [w], torch.zeros_like(w)


def compare(case: Case) -> dict[str, Any]:
    """Largest differences: of values in units of the largest, of each gradient relative to its norm."""
    name, ours, theirs, arguments, mask = case
    g = (1 + torch.randn_like(arguments[0]) / 2) * mask  # with a mean, and so have the data: no sum cancels
    results = []
    for function in (ours, theirs):
        leaves = [a.clone().requires_grad_() for a in arguments]
        y = function(*leaves)
        grads = torch.autograd.grad(y, leaves, g) if mask.any() else ()
        results.append((y.detach(), grads))
    (y, grads), (y_theirs, grads_theirs) = results
    row: dict[str, Any] = {"name": name, "elements": y.numel()}
    row["values_unequal"] = int((y != y_theirs).sum())
    row["grad_x"], row["grad_scale"] = None, None
    for key, a, b in zip(("grad_x", "grad_scale"), grads, grads_theirs, strict=False):
        row[key] = ((a - b).norm() / b.norm()).item()
    return row


def main() -> int:
    """Compare, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    rows = [compare(case) for case in cases(options.elements)]
    print(f"{'':32s}{'values unequal':>16s}{'grad of x':>12s}{'of scale':>12s}   (relative differences)")
    for row in rows:
        cells = "".join(f"{'-' if row[k] is None else format(row[k], '.1e'):>12s}" for k in ("grad_x", "grad_scale"))
        print(f"{row['name']:32s}{row['values_unequal']:>16d}{cells}")
    good = all(
        row["values_unequal"] <= 1e-4 * row["elements"]
        and (row["grad_x"] or 0) <= 1e-6
        and (row["grad_scale"] or 0) <= TOLERANCE
        for row in rows
    )
    if options.out:
        versions = {"torch": torch.__version__, "brevitas": brevitas.__version__}
        content = {"versions": versions, "seed": options.seed, "rows": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    print("all agree" if good else "NOT ALL AGREE")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
