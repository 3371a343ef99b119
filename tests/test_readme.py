"""What the README shows runs, and every file and name it mentions exists."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_python_blocks_run_in_order(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block.replace("/tmp/", f"{tmp_path}/"), "README.md", "exec"), names)
    assert names["x"].grad is not None  # the last block's own claim
    assert names["scale"].grad is not None


def path_table() -> list[tuple[str, str]]:
    """(file, name) of the table `One tensor, from the command to the arithmetic`."""
    table = README.split("One tensor, from the command to the arithmetic")[1].split("\n\n")[1]
    found = []
    for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", table):
        found += [(file, name) for name in re.findall(r"`([\w.]+)`", names)]
    return found


def test_path_table_is_read() -> None:
    assert len(path_table()) >= 8


@pytest.mark.parametrize(("file", "name"), path_table())
def test_path_through_the_code_resolves(file: str, name: str) -> None:
    target = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        target = getattr(target, part)
    assert callable(target)


def test_links_and_files_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_every_command_line_key_exists() -> None:
    from qat.config import check_arguments
    from qat.models import names

    commands = re.findall(r"^python train\.py (.*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        import shlex

        check_arguments(shlex.split(command), names())


def test_methods_page_has_a_row_for_every_method() -> None:
    from qat.quantizers import METHODS

    page = (ROOT / "docs" / "methods.md").read_text()
    missing = [name for name in METHODS if f"| `{name}` |" not in page]
    assert not missing
