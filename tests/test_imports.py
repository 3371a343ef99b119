"""`import qat` is cheap, and the import contracts hold, and bite."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

HEAVY = {"hydra", "lightning", "omegaconf", "onnx", "onnxruntime", "sklearn", "torchmetrics", "torchvision", "triton"}

# In seconds, and not a benchmark: it catches a scikit-learn, a torchvision or a torch._dynamo that came in by a side
# door, at 0.8 s and up each, where `import qat` beyond torch takes 0.03 s.
LIMIT = 0.3

IMPORT_QAT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import qat
seconds = time.perf_counter() - start
added = {name.split(".")[0] for name in set(sys.modules) - before}
print(json.dumps({"file": qat.__file__, "seconds": seconds, "added": sorted(added)}))
"""


@pytest.fixture(scope="module")
def fresh_import() -> dict:
    """What `import qat` does in a fresh process that has torch already: the fastest of up to three."""
    runs = []
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", IMPORT_QAT], cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        runs.append(json.loads(run.stdout))
        if runs[-1]["seconds"] < LIMIT:
            break
    return min(runs, key=lambda run: run["seconds"])


def test_import_loads_nothing_heavy(fresh_import):
    """Beyond what torch itself loads, which on some platforms includes triton."""
    assert Path(fresh_import["file"]) == ROOT / "qat" / "__init__.py"
    assert not HEAVY & set(fresh_import["added"])


def test_import_is_quick(fresh_import):
    assert fresh_import["seconds"] < LIMIT


# --- contracts --------------------------------------------------------------------------------------------------------


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter in a folder that holds pyproject.toml and qat/."""
    pytest.importorskip("importlinter")
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_logo=True, no_cache=True))"
    env = os.environ | {"COLUMNS": "200"}  # or a verdict may be wrapped
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def test_import_contracts_hold():
    run = lint_imports(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("data.py", "import lightning.pytorch, torchmetrics", None),
        ("callbacks/scales.py", "from lightning.pytorch import Callback", None),
        ("__main__.py", "from qat import data, layers", None),
        ("quantizers/lsq.py", "from qat import layers", "layers"),
        ("fold.py", "from qat.calibrate import x", "layers"),
        ("kernels/reference.py", "import qat", "layers"),
        ("stray.py", "", "layers"),
        ("config.py", "import omegaconf", "no-hydra"),
        ("training.py", "def f():\n    from hydra import compose", "no-hydra"),
        ("models.py", "from lightning.pytorch import Trainer", "lightning"),
        ("kernels/reference.py", "import torchmetrics", "lightning"),
    ],
)
def test_import_contracts_bite(tmp_path, file, line, broken):
    """In a package of empty layers one more line keeps all contracts, or breaks the one that is meant for it."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = re.findall(r"\w+", " ".join(contracts[0]["layers"]))
    for name in layers:
        (tmp_path / "qat" / name).mkdir(parents=True)
        (tmp_path / "qat" / name / "__init__.py").touch()
    (tmp_path / "qat" / "__init__.py").write_text(f"from qat import {', '.join(layers)}\n")

    changed = tmp_path / "qat" / file
    if changed.stem in layers:
        changed = changed.with_suffix("") / "__init__.py"
    changed.write_text(f"{line}\n")

    run = lint_imports(tmp_path)
    assert run.returncode == (broken is not None), run.stdout + run.stderr
    verdicts = dict(re.findall(r"^(.+) (KEPT|BROKEN)", run.stdout, re.MULTILINE))
    assert verdicts == {c["name"]: "BROKEN" if c["id"] == broken else "KEPT" for c in contracts}
