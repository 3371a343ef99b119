"""Files that are written whole or not at all, read without running anybody's code, and kept one folder per run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from qat.config import Config, QatError

__all__ = ["prune", "read_checkpoint", "resume_point", "run_folder", "write_checkpoint", "write_text"]


@contextlib.contextmanager
def whole(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write beside `path`, which takes its place only if the block succeeds."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~UMASK)  # mkstemp makes private files
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


UMASK = os.umask(0)
os.umask(UMASK)


def write_checkpoint(content: dict[str, Any], path: str | Path) -> None:
    """`torch.save`; an old file stays until the new one is whole."""
    with whole(path) as file:
        torch.save(content, file)


def write_text(text: str, path: str | Path) -> None:
    """Write text; an old file stays until the new one is whole."""
    with whole(path) as file:
        file.write(text.encode())


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint file with `weights_only=True`, onto the CPU.

    Raises:
        QatError: no such file, truncated, not a checkpoint, or one that would need to run code.
    """
    path = Path(path)
    if not path.is_file():
        raise QatError(f"no checkpoint at {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about files that torch did not write; they load, or are refused below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = str(error).strip().split("\n")[0]
        raise QatError(f"{path} is not a plain checkpoint of tensors and is not loaded: {first}") from None
    except Exception as error:  # whatever an unpickler says about bytes that are no pickle: there are many kinds
        first = str(error).strip().split("\n")[0] or type(error).__name__
        raise QatError(
            f"{path} is damaged or not a checkpoint ({first}); expected a file saved by qat or torch.save"
        ) from None
    if not isinstance(content, dict):
        raise QatError(f"{path}: expected a checkpoint, a dict; got {type(content).__name__}")
    return content


# --- the folder of a run ----------------------------------------------------------------------------------------------

CLAIM = "config.yaml"
"""The first file of a run; who creates it has the folder."""

FREE_TO_CHANGE = ("resume", "trainer", "logger", "recipe.epochs", "recipe.float_epochs", "data.root", "data.workers")
"""What may differ between a run and its resumption."""


@contextlib.contextmanager
def run_folder(new: Path, resume: str | None = None) -> Iterator[Path]:
    """The folder to work in: a new one that no other run has, removed again if nothing is saved there; or an old one.

    Args:
        new: of a new run. Another run that began in the same second may have it: then `new`__2, and so on.
        resume: None for a new run; `last` for the latest run beside `new`; a run folder, or a checkpoint in one.

    Raises:
        QatError: there is nothing to resume.
    """
    if resume is not None:
        yield find_run(new.parent, resume)
    elif "LOCAL_RANK" in os.environ:  # a distributed run, of which another process has made the folder
        yield new
    else:
        folder = claim(new)
        try:
            yield folder
        finally:
            if (folder / CLAIM).stat().st_size == 0:
                (folder / CLAIM).unlink()
                prune(folder)


def claim(folder: Path) -> Path:
    """Make a folder of this name, or with a number behind it, that is nobody else's."""
    for n in itertools.count(2):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CLAIM).open("x").close()
        except FileExistsError:
            folder = folder.with_name(f"{folder.name.partition('__')[0]}__{n}")
        except FileNotFoundError:  # somebody else has just pruned it
            continue
        else:
            break
    return folder


def prune(folder: Path) -> None:
    """Remove a folder if it is empty, and those above it, up to the working directory, that are empty then."""
    with contextlib.suppress(OSError):
        os.removedirs(os.path.relpath(folder))


def find_run(runs: Path, resume: str) -> Path:
    """The folder of the run to go on with, which has a last.ckpt."""
    if resume == "last":
        found = sorted(path.parent for path in runs.glob("*/last.ckpt"))
        if not found:
            raise QatError(f"nothing to resume: no run with a last.ckpt in {runs}; leave out resume= to start one")
        return found[-1]
    folder = Path(resume).parent if resume.endswith(".ckpt") else Path(resume)
    if not (folder / "last.ckpt").is_file():
        raise QatError(f"nothing to resume: expected resume=last, or a run folder with a last.ckpt; got {resume!r}")
    return folder


def resume_point(config: Config, folder: Path) -> dict[str, Any]:
    """The last checkpoint of the run in `folder`, checked to be of the same experiment.

    Raises:
        QatError: it is damaged, not of such a run, of another configuration, or the run is complete.
    """
    path = folder / "last.ckpt"
    content = read_checkpoint(path)
    about = content.get("qat")
    if not isinstance(about, dict) or not isinstance(about.get("config"), dict):
        raise QatError(f"nothing to resume: expected a checkpoint of train.py; got {path}")
    before, now = flatten(about["config"]), flatten(dataclasses.asdict(config))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and not key.startswith(FREE_TO_CHANGE):
            raise QatError(
                f"{folder} was run with {key}={before.get(key)}; got {key}={now.get(key)}: "
                "give resume= the run's own values, or leave it out to start a new run"
            )
    done = about["stage"] == "quantized" and content["epoch"] + 1 >= config.recipe.epochs
    if done and (folder / "metrics.json").exists():
        raise QatError(f"nothing to resume: {folder} is complete; to train longer, raise recipe.epochs")
    return content


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, sub in tree.items():
        flat |= flatten(sub, f"{prefix}.{key}" if prefix else str(key))
    return flat
