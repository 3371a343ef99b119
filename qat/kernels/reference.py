"""The specification: every quantizer's arithmetic in plain torch, forward and backward.

Pure functions of tensors: no autograd, modules or configuration. All arithmetic is float32, whatever comes in, and
every fast path is tested against this file in both directions. NaN is looked for by x != x, and bytes are compared as
floats: compiled, that is vectorized, while isnan and comparisons of bytes are not, at ten times the cost.

Words: `codes` are integers (held here as float32, so that NaN stays NaN), `values = codes * scale` are what the next
operation sees, `residue` is the least that the backward needs. A residue is one signed byte per element:

    -126 .. 126   inside the range, its ends included: (codes - x / scale) in steps of 1/252, so 1/2 is 126
    BELOW, ABOVE  saturated at qmin, at qmax
    NAN           x was NaN

`scale` is positive and has one element, or one per channel of `axis`.
"""

from __future__ import annotations

import torch
from torch import Tensor

Bound = int | Tensor

BELOW, ABOVE, NAN = -127, 127, -128
STEPS = 252.0
"""Residue steps per code: 126 steps are half a code, so rounding is symmetric and +-127 stay free as marks."""

SCALE_FLOOR = 2.0**-60
"""Least scale as used. The product of two floors is still a normal float32, so bias grids never underflow."""


def positive(scale: Tensor) -> Tensor:
    """Scale as used, from the raw parameter: absolute value, floored. NaN stays NaN."""
    return scale.float().abs().clamp_min(SCALE_FLOOR)


def positive_grad(g: Tensor, scale: Tensor) -> Tensor:
    """Gradient of `positive`: the sign of the raw value, also below the floor, where it must keep learning."""
    return torch.where(scale < 0, -g, g)


def broadcast(scale: Tensor, ndim: int, axis: int | None) -> Tensor:
    """View a scale of one element, or of one per channel, so that it broadcasts over a tensor of `ndim` dimensions."""
    if axis is None:
        return scale.reshape(())
    shape = [1] * ndim
    shape[axis] = -1
    return scale.reshape(shape)


def reduce_to_scale(t: Tensor, scale: Tensor, axis: int | None) -> Tensor:
    """Sum over all elements that share one scale; the result has the shape of `scale`."""
    if axis is None:
        return t.sum().reshape(scale.shape)
    rest = [d for d in range(t.ndim) if d != axis % t.ndim]
    return (t.sum(rest) if rest else t).reshape(scale.shape)


def encode(
    x: Tensor,
    scale: Tensor,
    qmin: Bound,
    qmax: Bound,
    axis: int | None,
    lean: bool = False,
    relu: bool | Tensor = False,
) -> tuple[Tensor, Tensor | None]:
    """Codes, and with `lean` the residue: what `lsq_grad` and `ste_grad` need in place of x, one int8 per element.

    codes = clamp(round(x / scale), qmin, qmax), half to even, by true division as the runtimes do it. With a zero point
    z the range is shifted instead, to qmin - z .. qmax - z (then the bounds may be tensors), and codes count from z.

    With `relu`, x is what enters a ReLU and qmin is 0: codes as of relu(x), and no gradient passes at 0 either.
    """
    v = x.float() / broadcast(scale, x.ndim, axis)
    inside = clamp(v, qmin, qmax)  # clamp and round commute, as the ends are integers; clamped first, v tells the rest
    codes = inside.round()
    if not lean:
        return codes, None
    residue = ((codes - v) * STEPS).round()
    kept = v == inside
    if relu is not False:
        kept = kept & ((v > 0) | ~torch.as_tensor(relu, device=v.device))
    marks = torch.where(v > inside, float(ABOVE), torch.where(v <= inside, float(BELOW), float(NAN)))
    return codes, torch.where(kept, residue, marks).to(torch.int8)


def fake_quantize(
    x: Tensor, scale: Tensor, qmin: Bound, qmax: Bound, axis: int | None, lean: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Values in x's dtype, decode(encode(x)), and with `lean` the residue."""
    codes, residue = encode(x, scale, qmin, qmax, axis, lean)
    return decode(codes, scale, axis).to(x.dtype), residue


def encode_bytes(
    x: Tensor,
    scale: Tensor,
    qmin: Bound,
    qmax: Bound,
    shift: int | Tensor,
    lean: bool = False,
    relu: bool | Tensor = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Codes as uint8, shifted by `shift`; with `lean` the residue; and the number of NaNs, which no byte holds."""
    codes, residue = encode(x, scale, qmin, qmax, None, lean, relu)
    sound = codes == codes
    poisoned = torch.where(sound, 0.0, 1.0).sum()
    return torch.where(sound, codes + shift, 0.0).to(torch.uint8), residue, poisoned


def decode_bytes(codes: Tensor, scale: Tensor, shift: int | Tensor) -> Tensor:
    """Values of the codes that `encode_bytes` makes, float32."""
    return (codes.float() - shift) * scale.reshape(())


def encode_weight(w: Tensor, scale: Tensor, qmin: Bound, qmax: Bound) -> tuple[Tensor, Tensor]:
    """Codes of a weight with one scale per first dimension, as int8; and which of those channels had a NaN."""
    codes, _ = encode(w, scale, qmin, qmax, 0)
    sound = codes == codes
    return torch.where(sound, codes, 0.0).to(torch.int8), torch.where(sound, 0.0, 1.0).flatten(1).sum(1) > 0


def relu_mask(x: Tensor, limit: float | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """relu(x), or with a limit hardtanh(x, 0, limit); and as uint8, 1 where its gradient passes, at NaN too."""
    y = torch.relu(x) if limit is None else x.clamp(0 * limit, limit)  # type: ignore[arg-type]
    passes = y != 0 if limit is None else (y != 0) & (y != limit)
    return y, torch.where(passes, 1.0, 0.0).to(torch.uint8)


def relu_grad(g: Tensor, mask: Tensor) -> Tensor:
    """Gradient of a ReLU from its mask."""
    return torch.where(mask.float() != 0, g, 0.0)


def clamp(v: Tensor, qmin: Bound, qmax: Bound) -> Tensor:
    """v limited to qmin..qmax, both numbers or both tensors; NaN stays NaN."""
    return v.clamp(qmin, qmax)  # type: ignore[arg-type]


def decode(codes: Tensor, scale: Tensor, axis: int | None) -> Tensor:
    """values = codes * scale, in float32."""
    return codes.float() * broadcast(scale, codes.ndim, axis)


def ste_grad(g: Tensor, residue: Tensor) -> Tensor:
    """Straight-through gradient of x: g where qmin <= x / scale <= qmax, else 0; NaN where x was NaN."""
    r = residue.float()
    outside = torch.where(r == NAN, float("nan"), 0.0)
    return torch.where((r > BELOW) & (r < ABOVE), g.float(), outside)


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
    """Gradients of (x, scale) from the residue, those that are needed. With `spare`, g may be overwritten by the first.

    The first is exact. The second (see `lsq_grad_exact`) is off by at most |g| / 504 per element, without bias.
    """
    grad_x = ste_grad(g, residue) if needs[0] else None
    if not needs[1]:
        return grad_x, None
    return grad_x, reduce_to_scale(slope(residue, qmin, qmax) * g.float(), scale, axis)


def slope(residue: Tensor, qmin: Bound, qmax: Bound, steps: float = STEPS) -> Tensor:
    """d values / d scale from the residue, float32."""
    r = residue.float()
    marked = torch.where(r == ABOVE, qmax, torch.where(r == BELOW, qmin, r / steps))
    return torch.where(r == NAN, float("nan"), marked)


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
    """Gradients of (x, scale) from x itself, for tensors that stay alive anyway (weights); those that are needed.

    With `spare`, g may be overwritten by the first.

    With v = x / scale (LSQ eqs. 2 and 3, the ends of the range counted as inside):
        d values / d x      1 inside, 0 outside
        d values / d scale  round(v) - v inside, qmin below, qmax above
    """
    v = x.float() / broadcast(scale, x.ndim, axis)
    clamped = clamp(v, qmin, qmax)
    inside = v == clamped
    g = g.float()
    # clamped - clamped is 0, or NaN where x was NaN
    grad_x = torch.where(inside, g, clamped - clamped) if needs[0] else None
    if not needs[1]:
        return grad_x, None
    slopes = clamped.round() - torch.where(inside, v, 0.0)
    return grad_x, reduce_to_scale(slopes * g, scale, axis)


def round_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to a lower float precision and back: the values of `dtype`, in the dtype of x."""
    return x.to(dtype).to(x.dtype)
