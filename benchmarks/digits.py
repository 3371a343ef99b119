"""Accuracy on the digits: ResNet-18 at 4, 3 and 2 bits against float, mean and spread over seeds.

    python benchmarks/digits.py --out benchmarks/results/digits.json

Runs train.py: per seed once in float, then each bit width from that float checkpoint. About 12 minutes on two cores.
Finished runs are kept in --work and not repeated, so an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torchvision

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """One training run; its metrics, from before if it is there."""
    if not (folder / "metrics.json").exists():
        command = [sys.executable, "train.py", *arguments, f"hydra.run.dir={folder}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return metrics


def main() -> None:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--bits", nargs="+", default=["4", "3", "2"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--method", default="lsq")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "benchmarks" / "digits")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        base = options.work / f"{options.model}_float_{seed}"
        start = run(base, f"model={options.model}", "bits=float", "recipe.epochs=0", f"seed={seed}")
        for bits in options.bits:
            folder = options.work / f"{options.model}_{options.method}_{bits}_{seed}"
            arguments = (f"model={options.model}", f"bits={bits}", f"quant.method={options.method}", f"seed={seed}")
            metrics = run(folder.resolve(), *arguments, f"model.checkpoint={(base / 'float.ckpt').resolve()}")
            row = {"data": "digits", "model": options.model, "method": options.method, "bits": metrics["bits"]}
            row |= {"placement": "layer", "seed": seed, "epochs": 10}
            row |= {"accuracy": metrics["quantized_accuracy"], "float_accuracy": start["float_accuracy"]}
            row |= {"calibrated_accuracy": metrics["calibrated_accuracy"]}
            row |= {"seconds": start["seconds"] + metrics["seconds"]}
            rows.append(row)
            print(row, flush=True)
    print(f"\n{'bits':8s}{'accuracy':>16s}{'float':>16s}{'difference':>12s}{'calibrated only':>18s}{'seconds':>10s}")
    for bits in dict.fromkeys(row["bits"] for row in rows):
        own = [row for row in rows if row["bits"] == bits]
        quantized, start_, calibrated = (
            [row[key] for row in own] for key in ("accuracy", "float_accuracy", "calibrated_accuracy")
        )
        difference = statistics.mean(quantized) - statistics.mean(start_)
        seconds = statistics.median(row["seconds"] for row in own)
        cells = f"{spread(quantized):>16s}{spread(start_):>16s}{difference:>+12.2f}{spread(calibrated):>18s}"
        print(f"{bits:8s}{cells}{seconds:>10.0f}")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"torchvision": torchvision.__version__, "lightning": lightning.__version__}
    if options.out:
        machine = f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": machine, "versions": versions, "rows": rows}, indent=1) + "\n")


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.2f} +- {statistics.stdev(values) if len(values) > 1 else 0:.2f}"


if __name__ == "__main__":
    main()
