"""What pyproject.toml, the README and CI promise each other."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()


def readme_command(name: str) -> str:
    """The command below `<!-- ci: name -->` in the README."""
    found = re.findall(rf"^<!-- ci: {name} -->\n```bash\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_python_range():
    """3.11 is CI's and Docker's; hydra-core 1.3 does not start on 3.14."""
    allowed = SpecifierSet(PYPROJECT["project"]["requires-python"])
    assert [f"3.{minor}" for minor in range(9, 16) if f"3.{minor}.0" in allowed] == ["3.11", "3.12", "3.13"]


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("torch", ["2.11.0", "2.14.1"], ["2.10.0"]),
        ("torchvision", ["0.26.0", "0.29.1"], ["0.25.0"]),
        ("lightning", ["2.6.4", "2.6.6"], ["2.6.1", "2.6.2", "2.6.3", "2.7.0"]),
        ("hydra-core", ["1.3.2", "1.3.8"], ["1.3.1", "1.4.0"]),
        ("torchmetrics", ["1.8.0", "1.9.0"], ["2.0.0"]),
        ("scikit-learn", ["1.5.0", "1.9.1"], ["1.4.0"]),
        ("numpy", ["1.26.0", "2.4.6"], ["1.25.0"]),
    ],
)
def test_dependency_ranges(name, accepted, refused):
    ranges = {r.name: r.specifier for r in map(Requirement, PYPROJECT["project"]["dependencies"])}
    assert all(version in ranges[name] for version in accepted)
    assert not any(version in ranges[name] for version in refused)


def test_extras():
    extras = PYPROJECT["project"]["optional-dependencies"]
    tools = {Requirement(r).name for r in extras["dev"]}
    assert {"pytest", "hypothesis", "ruff", "mypy", "import-linter"} <= tools
    assert {"dev", "export", "tensorboard"} <= set(extras)


def test_types_are_shipped():
    assert (ROOT / "qat" / "py.typed").exists()
    assert PYPROJECT["tool"]["setuptools"]["package-data"]["qat"] == ["py.typed"]


@pytest.mark.parametrize(
    ("name", "install", "last"),
    [
        ("train", "pip install -e .", ".venv/bin/python train.py model=resnet18 bits=4"),
        ("test", "pip install -e '.[dev]'", ".venv/bin/python -m pytest"),
    ],
)
def test_readme_commands(name, install, last):
    """One line to paste, in an environment of its own: many a system Python refuses a bare pip install (PEP 668)."""
    make, pip, run = readme_command(name).split(" && ")
    assert make == "python3 -m venv .venv"
    assert pip == f".venv/bin/{install}"
    assert run == last


@pytest.mark.parametrize("name", ["train", "test"])
def test_ci_runs_the_readme(name):
    """CI has no command of its own that could drift from the README's."""
    shown = subprocess.run([ROOT / ".ci" / "run", "--show", name], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == readme_command(name)
    script = (ROOT / ".ci" / "run").read_text()
    assert "-m pytest" not in script
    assert "train.py" not in script


@pytest.mark.parametrize(
    "readme",
    [
        "no marker",
        "<!-- ci: train -->\n",
        "<!-- ci: train -->\n```bash\ntrue",
        "<!-- ci: train -->\n```bash\n```",
        "<!-- ci: train -->\nwords\n```bash\ntrue\n```",
        "<!-- ci: train -->\n```bash\ntrue\n```\n<!-- ci: train -->\n```bash\nfalse\n```",
    ],
    ids=["none", "no-block", "open-block", "empty-block", "words-between", "twice"],
)
def test_ci_refuses_a_readme_without_the_command(tmp_path, readme):
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "README.md").write_text(readme + "\n")
    shown = subprocess.run(["bash", script, "--show", "train"], capture_output=True, text=True, check=False)
    assert shown.returncode != 0
    assert "ci: train" in shown.stderr


def test_layers_are_told_as_they_are_checked():
    """CONTRIBUTING's table lists, lowest first, the layers of the import contract."""
    contract = next(c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["id"] == "layers")
    checked = [re.findall(r"\w+", layer) for layer in reversed(contract["layers"])]
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| layer | job |\n|---|---|\n")[1].split("\n\n")[0]
    told = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()]
    assert told == checked
