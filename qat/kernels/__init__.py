"""Kernels: the arithmetic of quantization on plain tensors, and the choice between its implementations.

`reference` is the specification, plain torch; `compiled` the same arithmetic through torch.compile. `QAT_KERNELS`, or
`with qat.kernels.use(...)`, chooses one; by default, `auto`, large tensors on a CPU go to `compiled` and all others to
`reference`. `reference` runs wherever another cannot: while torch traces or compiles (its own compiler then fuses the
arithmetic with its neighbours), under functorch, on fake, empty or strided tensors.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from qat.config import QatError
from qat.kernels import reference
from qat.kernels.reference import (
    ABOVE,
    BELOW,
    NAN,
    SCALE_FLOOR,
    STEPS,
    broadcast,
    clamp,
    decode,
    encode,
    positive,
    positive_grad,
    reduce_to_scale,
    round_dtype,
    slope,
)

__all__ = [
    "ABOVE",
    "BELOW",
    "NAN",
    "SCALE_FLOOR",
    "STEPS",
    "broadcast",
    "clamp",
    "decode",
    "decode_bytes",
    "encode",
    "encode_bytes",
    "encode_weight",
    "fake_quantize",
    "lsq_grad",
    "lsq_grad_exact",
    "mode",
    "positive",
    "positive_grad",
    "reduce_to_scale",
    "relu_grad",
    "relu_mask",
    "round_dtype",
    "slope",
    "ste_grad",
    "use",
    "warm_up",
]

MODES = ("auto", "reference", "compiled")
SMALL = 4096
"""Elements below which `auto` takes the reference: a compiled call gains nothing there, and need not be compiled."""

_mode: str | None = None


def mode() -> str:
    """The choice in force: of `use`, else of `QAT_KERNELS`, else `auto`."""
    return _mode or checked(os.environ.get("QAT_KERNELS", "auto"))


def checked(name: str) -> str:
    """The name of an implementation that can run here.

    Raises:
        QatError: there is none of that name.
    """
    if name not in MODES:
        raise QatError(f"QAT_KERNELS must be one of {', '.join(MODES)}; got {name!r}")
    return name if name == "reference" or has_compiler() else "reference"


@functools.cache
def has_compiler() -> bool:
    """Whether torch.compile can build for the CPU; says so once if not."""
    if shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++"):
        return True
    warnings.warn("no C++ compiler found: using the slower reference kernels (apt-get install g++)", stacklevel=3)
    return False


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Use one implementation within the context, in all threads.

    >>> with use("reference"):
    ...     mode()
    'reference'
    """
    global _mode
    before, _mode = _mode, checked(name)
    try:
        yield
    finally:
        _mode = before


def warm_up(device: torch.device) -> None:
    """Compile now, or load from the disk cache, what a float32 model will call on a device, not in its first step."""
    if mode() == "compiled" or (mode() == "auto" and device.type == "cpu"):
        from qat.kernels import compiled

        compiled.warm_up(device)


def implementation(x: Tensor, axis: int | None) -> Any:
    """The module whose kernels take x here and now."""
    if (
        torch.compiler.is_compiling()  # first: nothing below should be traced
        or type(x) not in (Tensor, nn.Parameter)  # fake tensors and other subclasses
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
        or (choice := mode()) == "reference"
        or (choice == "auto" and (x.numel() < SMALL or x.device.type != "cpu"))
        or x.device.type not in ("cpu", "cuda")
    ):
        return reference
    from qat.kernels import compiled

    return compiled if compiled.supported(x, axis) else reference


def fake_quantize(x: Tensor, scale: Tensor, qmin: Any, qmax: Any, axis: int | None, lean: bool = False) -> Any:
    """See `reference.fake_quantize`."""
    return implementation(x, axis).fake_quantize(x, scale, qmin, qmax, axis, lean)


def lsq_grad(
    g: Tensor, residue: Tensor, scale: Tensor, qmin: Any, qmax: Any, axis: int | None, needs: Any, spare: bool = False
) -> Any:
    """See `reference.lsq_grad`."""
    return implementation(residue, axis).lsq_grad(g, residue, scale, qmin, qmax, axis, needs, spare)


def lsq_grad_exact(
    g: Tensor, x: Tensor, scale: Tensor, qmin: Any, qmax: Any, axis: int | None, needs: Any, spare: bool = False
) -> Any:
    """See `reference.lsq_grad_exact`."""
    return implementation(x, axis).lsq_grad_exact(g, x, scale, qmin, qmax, axis, needs, spare)


def ste_grad(g: Tensor, residue: Tensor) -> Tensor:
    """See `reference.ste_grad`."""
    result: Tensor = implementation(residue, None).ste_grad(g, residue)
    return result


def encode_bytes(
    x: Tensor, scale: Tensor, qmin: int, qmax: int, shift: int, lean: bool = False, relu: bool = False
) -> Any:
    """See `reference.encode_bytes`."""
    return implementation(x, None).encode_bytes(x, scale, qmin, qmax, shift, lean, relu)


def relu_mask(x: Tensor, limit: float | None = None) -> Any:
    """See `reference.relu_mask`."""
    return implementation(x, None).relu_mask(x, limit)


def relu_grad(g: Tensor, mask: Tensor) -> Tensor:
    """See `reference.relu_grad`."""
    result: Tensor = implementation(mask, None).relu_grad(g, mask)
    return result


def decode_bytes(codes: Tensor, scale: Tensor, shift: int) -> Tensor:
    """See `reference.decode_bytes`."""
    result: Tensor = implementation(codes, None).decode_bytes(codes, scale, shift)
    return result


def encode_weight(w: Tensor, scale: Tensor, qmin: int, qmax: int) -> Any:
    """See `reference.encode_weight`."""
    return implementation(w, 0).encode_weight(w, scale, qmin, qmax)
