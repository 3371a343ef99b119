"""Files that are written whole or not at all, and read without running anybody's code."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from qat.config import QatError

__all__ = ["read_checkpoint", "write_checkpoint", "write_text"]


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
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = str(error).strip().split("\n")[0]
        raise QatError(f"{path} is not a plain checkpoint of tensors and is not loaded: {first}") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        first = str(error).strip().split("\n")[0]
        raise QatError(
            f"{path} is damaged or not a checkpoint ({first}); expected a file saved by qat or torch.save"
        ) from None
    if not isinstance(content, dict):
        raise QatError(f"{path}: expected a checkpoint, a dict; got {type(content).__name__}")
    return content
