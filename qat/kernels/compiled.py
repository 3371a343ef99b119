"""The reference arithmetic through torch.compile: one pass over memory instead of a dozen.

Same names, arguments and results as in `reference.py`. Each function is compiled once per case (per tensor or per
channel, dtype, what is needed), not per shape: tensors are seen as flat, or as (channels, rest), in the order in which
they lie in memory, and ranges come as tensors, so that no number is baked in. torch caches the compiled code on disk.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qat.kernels import reference
from qat.kernels.reference import Bound

__all__ = [
    "decode_bytes",
    "encode_bytes",
    "encode_weight",
    "fake_quantize",
    "lsq_grad",
    "lsq_grad_exact",
    "relu_grad",
    "relu_mask",
    "ste_grad",
    "supported",
    "warm_up",
]


# --- views ------------------------------------------------------------------------------------------------------------


def supported(x: Tensor, axis: int | None) -> bool:
    """Whether these functions take x: some elements, dense, per channel only of the first dimension."""
    return x.numel() > 0 and dense(x) and (axis is None or (axis in (0, -x.ndim) and x.ndim > 1))


def dense(x: Tensor) -> bool:
    """Contiguous, or contiguous as channels_last."""
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))


def flat(x: Tensor, axis: int | None) -> Tensor:
    """x in the order in which it lies in memory, shape (numel,) or (channels, rest). A view."""
    if not x.is_contiguous():
        x = x.permute(0, 2, 3, 1)
    return x.reshape(-1) if axis is None else x.reshape(x.shape[0], -1)


def like(y: Tensor, x: Tensor) -> Tensor:
    """A flat result in the shape and layout of x. A view."""
    return y.as_strided(x.shape, x.stride())


def aligned(g: Tensor, x: Tensor) -> Tensor:
    """A gradient in the memory order of x."""
    return (
        g
        if g.stride() == x.stride()
        else torch.empty_strided(x.shape, x.stride(), dtype=g.dtype, device=g.device).copy_(g)
    )


def flat_scale(scale: Tensor, axis: int | None) -> Tensor:
    """Scale of no dimensions, or of shape (channels,)."""
    return scale.reshape(()) if axis is None else scale.reshape(-1)


@functools.cache
def constant(value: float, device: torch.device) -> Tensor:
    """A code as a float32 tensor of no dimensions."""
    with torch.inference_mode(False):
        return torch.tensor(float(value), device=device)


@functools.cache
def flag(value: bool, device: torch.device) -> Tensor:
    """A bool tensor of no dimensions."""
    with torch.inference_mode(False):
        return torch.tensor(value, device=device)


def bound(value: Bound, x: Tensor) -> Tensor:
    """One end of the range as a tensor."""
    return value if isinstance(value, Tensor) else constant(value, x.device)


ROWS, COLUMNS = 61, 16411
"""Sizes of the tensors that kernels are made with: large, so that they run on all cores, unlike each other, and odd."""


def compiled(function: Callable[..., Any], arguments: tuple[Tensor, ...]) -> Callable[..., Any]:
    """The function as one kernel for all shapes of arguments of these dtypes, dimensions and devices."""
    return build(function, tuple((a.dtype, a.ndim, a.device) for a in arguments))


@functools.cache
def build(function: Callable[..., Any], kinds: tuple[tuple[torch.dtype, int, torch.device], ...]) -> Callable[..., Any]:
    """Trace and compile.

    As `torch.compile(dynamic=True)` does it, but without the part that looks, at each call, whether a new case has
    come: what can differ from call to call is in `kinds`. A call costs a quarter then, which most tensors are small
    enough to notice. Sizes stay symbols, also those that are 1.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    rows = max(ndim for _, ndim, _ in kinds) == 2
    shapes = {0: (), 1: (ROWS,) if rows else (ROWS * COLUMNS,), 2: (ROWS, COLUMNS)}
    examples = [torch.ones(shapes[ndim], dtype=dtype, device=device) for dtype, ndim, device in kinds]
    graph = make_fx(function, tracing_mode="symbolic")(*examples)
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    try:
        with torch._functorch.config.patch(enable_autograd_cache=False):  # cannot hash such a graph; kernels are cached
            kernel: Any = compile_fx(graph, inputs)
    except Exception as error:  # a compiler that is there may still fail in a dozen ways; the arithmetic is the same
        reason = str(error).strip().split("\n")[0][:200]
        warnings.warn(
            f"the C++ compiler cannot build kernels ({type(error).__name__}: {reason}): using the slower reference "
            "ones; QAT_KERNELS=reference asks for them from the start",
            stacklevel=2,
        )
        return function
    return kernel


def call(function: Callable[..., Any], *arguments: Tensor) -> Any:
    """Run a kernel where autograd and autocast do not see it: they would multiply the cases."""
    if torch._C._is_any_autocast_enabled():  # entering and leaving costs as much as the kernel of a small tensor
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return call(function, *arguments)
    with torch.no_grad():
        detached = tuple(a.detach() for a in arguments)
        result = compiled(function, detached)(*detached)
        return result[0] if isinstance(result, list | tuple) and len(result) == 1 else result


# --- the kernels, on flat tensors -------------------------------------------------------------------------------------
# A flat tensor has one dimension and one scale, or two and a scale for each row.


def axis_of(x: Tensor) -> int | None:
    """None for a flat tensor of one scale, 0 for rows."""
    return 0 if x.ndim == 2 else None


def values(x: Tensor, scale: Tensor, qmin: Tensor, qmax: Tensor) -> Any:
    """Forward for tensors that stay alive."""
    return reference.fake_quantize(x, scale, qmin, qmax, axis_of(x))[0]


def values_and_residue(x: Tensor, scale: Tensor, qmin: Tensor, qmax: Tensor) -> Any:
    """Forward for all others."""
    return reference.fake_quantize(x, scale, qmin, qmax, axis_of(x), lean=True)


def both_grads(g: Tensor, residue: Tensor, scale: Tensor, qmin: Tensor, qmax: Tensor) -> Any:
    """Backward from the residue."""
    grad_x, grad_scale = reference.lsq_grad(g, residue, scale, qmin, qmax, axis_of(g), (True, True))
    assert grad_x is not None
    return grad_x.to(g.dtype), grad_scale


def both_grads_exact(g: Tensor, x: Tensor, scale: Tensor, qmin: Tensor, qmax: Tensor) -> Any:
    """Backward from x."""
    grad_x, grad_scale = reference.lsq_grad_exact(g, x, scale, qmin, qmax, axis_of(g), (True, True))
    assert grad_x is not None
    return grad_x.to(g.dtype), grad_scale


def both_grads_into(g: Tensor, residue: Tensor, scale: Tensor, qmin: Tensor, qmax: Tensor) -> Any:
    """Backward from the residue; that of x overwrites g, which the caches still hold."""
    grad_x, grad_scale = both_grads(g, residue, scale, qmin, qmax)
    g.copy_(grad_x)
    return grad_scale


def both_grads_exact_into(g: Tensor, x: Tensor, scale: Tensor, qmin: Tensor, qmax: Tensor) -> Any:
    """Backward from x; that of x overwrites g."""
    grad_x, grad_scale = both_grads_exact(g, x, scale, qmin, qmax)
    g.copy_(grad_x)
    return grad_scale


def bytes_and_residue(x: Tensor, scale: Tensor, qmin: Tensor, qmax: Tensor, shift: Tensor, relu: Tensor) -> Any:
    """Forward of an integer layer in training."""
    return reference.encode_bytes(x, scale, qmin, qmax, shift, lean=True, relu=relu)


def rectified_and_mask(x: Tensor) -> Any:
    """Forward of a ReLU."""
    return reference.relu_mask(x)


def limited_and_mask(x: Tensor, limit: Tensor) -> Any:
    """Forward of a ReLU with a limit."""
    return reference.relu_mask(x, limit)


def bytes_only(x: Tensor, scale: Tensor, qmin: Tensor, qmax: Tensor, shift: Tensor) -> Any:
    """Forward of an integer layer in evaluation."""
    codes, _, poisoned = reference.encode_bytes(x, scale, qmin, qmax, shift)
    return codes, poisoned


# --- the same names and arguments as the reference --------------------------------------------------------------------


def fake_quantize(
    x: Tensor, scale: Tensor, qmin: Bound, qmax: Bound, axis: int | None, lean: bool = False
) -> tuple[Tensor, Tensor | None]:
    """See `reference.fake_quantize`."""
    arguments = flat(x, axis), flat_scale(scale, axis), bound(qmin, x), bound(qmax, x)
    if lean:
        y, residue = call(values_and_residue, *arguments)
        return like(y, x), like(residue, x)
    return like(call(values, *arguments), x), None


def lsq_grad(
    g: Tensor,
    residue: Tensor,
    scale: Tensor,
    qmin: Bound,
    qmax: Bound,
    axis: int | None,
    needs: tuple[bool, bool],
    spare: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """See `reference.lsq_grad`."""
    flat_g, flat_residue = flat(aligned(g, residue), axis), flat(residue, axis)
    if not needs[1]:
        return like(call(reference.ste_grad, flat_g, flat_residue), residue), None
    grads = both_grads_into if spare else both_grads
    grad_x, grad_scale = two(grads, flat_g, flat_residue, flat_scale(scale, axis), bound(qmin, g), bound(qmax, g))
    return like(grad_x, residue) if needs[0] else None, grad_scale.reshape(scale.shape)


def lsq_grad_exact(
    g: Tensor,
    x: Tensor,
    scale: Tensor,
    qmin: Bound,
    qmax: Bound,
    axis: int | None,
    needs: tuple[bool, bool],
    spare: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """See `reference.lsq_grad_exact`."""
    flat_g, flat_x = flat(aligned(g, x), axis), flat(x, axis)
    grads = both_grads_exact_into if spare else both_grads_exact
    grad_x, grad_scale = two(grads, flat_g, flat_x, flat_scale(scale, axis), bound(qmin, g), bound(qmax, g))
    return like(grad_x, x) if needs[0] else None, grad_scale.reshape(scale.shape) if needs[1] else None


def two(grads: Callable[..., Any], g: Tensor, *arguments: Tensor) -> Any:
    """Both gradients, also of a kernel that writes the first over g."""
    result = call(grads, g, *arguments)
    return (g, result) if isinstance(result, Tensor) else result


def ste_grad(g: Tensor, residue: Tensor) -> Tensor:
    """See `reference.ste_grad`."""
    return like(call(reference.ste_grad, flat(aligned(g, residue), None), flat(residue, None)), residue)


def encode_bytes(
    x: Tensor,
    scale: Tensor,
    qmin: Bound,
    qmax: Bound,
    shift: int | Tensor,
    lean: bool = False,
    relu: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See `reference.encode_bytes`."""
    arguments = flat(x, None), flat_scale(scale, None), bound(qmin, x), bound(qmax, x), bound(shift, x)
    if lean:
        codes, residue, poisoned = call(bytes_and_residue, *arguments, flag(relu, x.device))
        return like(codes, x), like(residue, x), poisoned
    codes, poisoned = call(bytes_only, *arguments)
    return like(codes, x), None, poisoned


def relu_mask(x: Tensor, limit: float | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.relu_mask`."""
    if limit is None:
        y, mask = call(rectified_and_mask, flat(x, None))
    else:
        y, mask = call(limited_and_mask, flat(x, None), constant(limit, x.device))
    return like(y, x), like(mask, x)


def relu_grad(g: Tensor, mask: Tensor) -> Tensor:
    """See `reference.relu_grad`."""
    return like(call(reference.relu_grad, flat(aligned(g, mask), None), flat(mask, None)), mask)


def decode_bytes(codes: Tensor, scale: Tensor, shift: int | Tensor) -> Tensor:
    """See `reference.decode_bytes`."""
    return like(call(reference.decode_bytes, flat(codes, None), flat_scale(scale, None), bound(shift, codes)), codes)


def encode_weight(w: Tensor, scale: Tensor, qmin: Bound, qmax: Bound) -> tuple[Tensor, Tensor]:
    """See `reference.encode_weight`."""
    codes, poisoned = call(reference.encode_weight, flat(w, 0), flat_scale(scale, 0), bound(qmin, w), bound(qmax, w))
    return like(codes, w), poisoned


def warm_up(device: torch.device) -> None:
    """Build what LSQ on float32 calls on a device: activations per tensor, weights per channel, in both forwards."""
    x, scale, scales = torch.ones(64, 64, device=device), torch.ones(1, device=device), torch.ones(64, device=device)
    fake_quantize(x, scale, 0, 15, None)
    _, residue = fake_quantize(x, scale, 0, 15, None, lean=True)
    assert residue is not None
    lsq_grad(x, residue, scale, 0, 15, None, (True, True))
    lsq_grad(x.clone(), residue, scale, 0, 15, None, (True, True), spare=True)
    codes, _, _ = encode_bytes(x, scale, 0, 15, 0)
    encode_bytes(x, scale, 0, 15, 0, lean=True, relu=True)
    decode_bytes(codes, scale, 0)
    fake_quantize(x, scales, -7, 7, 0)
    lsq_grad_exact(x, x, scales, -7, 7, 0, (True, True))
    lsq_grad_exact(x.clone(), x, scales, -7, 7, 0, (True, True), spare=True)
    encode_weight(x, scales, -7, 7)
    for limit in (None, 6.0):
        _, mask = relu_mask(x, limit)
        relu_grad(x, mask)
