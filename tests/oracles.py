"""Closed forms of every method in float64 NumPy, written from the papers: what the proof suite compares `qat` with.

Nothing here imports qat or torch, and no gradient here comes from automatic differentiation. `FUNCTIONS` has an entry
per autograd Function, `METHODS` one per `quant.method`; `ORACLES` holds both, and a test asks that nothing is missing.
A new method is tested by adding its entry: the suite is parametrized by these tables.

Conventions that the papers leave open or set otherwise (docs/methods.md gives the reasons):

    x            is rounded to float32 first: the arithmetic is float32 whatever comes in
    rounding     half to even
    scale        as used is max(|raw|, 2^-60); its gradient carries the sign of the raw value, +1 at 0
    inside       qmin <= x / s <= qmax, the ends included (LSQ's paper leaves them out; TQT's has round(x / s) in place
                 of x / s, half a step more on each side; PACT's x >= alpha is kept)
    NaN          stays NaN, and so does its gradient, unless the gradient passes everywhere
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray
State = dict[str, Array]

FLOOR = 2.0**-60


@dataclass
class Result:
    """What a Function should return, and how well float32 can know it.

    Attributes:
        values: before they are rounded to float32.
        grads: by argument; `x` among them.
        sizes: by argument, the sum of the magnitudes that a gradient adds up: float32 errs in proportion to it. A
            gradient without a size is exact.
        slack: by argument, what saving a byte per element instead of x costs at most.
        distance: of each element from the nearest decision (a tie, an end of the range), in codes. Where it is tiny but
            not zero, float32 may decide otherwise; where it is zero, the division is exact in both.
    """

    values: Array
    grads: dict[str, Array]
    sizes: dict[str, Array] = field(default_factory=dict)
    slack: dict[str, Array] = field(default_factory=dict)
    distance: Array = field(default_factory=lambda: np.array(np.inf))


def quiet(closed_form: Callable[..., Result]) -> Callable[..., Result]:
    """NaN and infinity are among the inputs: no warnings about them."""

    @functools.wraps(closed_form)
    def wrapper(*args: Any, **kwargs: Any) -> Result:
        with np.errstate(all="ignore"):
            return closed_form(*args, **kwargs)

    return wrapper


# --- shared pieces ----------------------------------------------------------------------------------------------------


def as_used(raw: Array) -> tuple[Array, Array]:
    """(scale as used, its derivative by the raw value)."""
    return np.maximum(np.abs(raw), FLOOR), np.where(raw < 0, -1.0, 1.0)


def along(scale: Array, ndim: int, axis: int | None) -> Array:
    """One scale, or one per channel, shaped to multiply a tensor."""
    if axis is None:
        return scale.reshape(())
    shape = [1] * ndim
    shape[axis] = scale.size
    return scale.reshape(shape)


def total(t: Array, shape: tuple[int, ...], axis: int | None) -> Array:
    """Sum over what shares one scale."""
    others = None if axis is None else tuple(d for d in range(t.ndim) if d != axis % t.ndim)
    return t.sum(axis=others).reshape(shape)


def choose(below: Array, inside: Array, above: Array, low: Any, middle: Any, high: Any) -> Array:
    """Piecewise; NaN where none of the three holds."""
    return np.select([below, inside, above], [low * np.ones_like(middle), middle, high * np.ones_like(middle)], np.nan)


class Grid:
    """x on the codes low..high of step s (of x's shape): where it lies, its code, and LSQ's d values / d s (eq. 3)."""

    def __init__(self, x: Array, s: Array, low: float, high: float, noise: Array | None = None) -> None:
        v = x / s
        self.below, self.inside, self.above = v < low, (v >= low) & (v <= high), v > high
        fraction = v - np.floor(v)
        rounded = np.rint(v) if noise is None else np.floor(v) + (noise < fraction)
        self.v = v
        self.codes = choose(self.below, self.inside, self.above, low, rounded, high)
        self.slope = choose(self.below, self.inside, self.above, low, rounded - v, high)
        self.size = choose(self.below, self.inside, self.above, abs(low), np.abs(v) + np.abs(rounded), abs(high))
        tie = np.abs(fraction - (0.5 if noise is None else noise))
        tie = np.minimum(tie, 1 - tie) if noise is not None else tie  # just below a code or on it: all but the same
        ends = [np.abs(v - end) for end in (low, high) if end != 0]  # the sign of v is never in doubt
        self.distance = np.minimum.reduce([tie, *ends])

    def pass_through(self, g: Array) -> Array:
        """The straight-through gradient: g inside, 0 outside."""
        return choose(self.below, self.inside, self.above, 0.0, g, 0.0)


def learned(
    x: Array, g: Array, raw: Array, low: float, high: float, axis: int | None, gain: float, byte: float, **rest: Any
) -> Result:
    """LSQ's values and gradients on low..high; slopes are kept in a byte of so many steps per code (0: exactly)."""
    s, sign = as_used(raw)
    grid = Grid(x, along(s, x.ndim, axis), low, high, **rest)

    def add(t: Array) -> Array:
        return total(t, raw.shape, axis) * gain

    return Result(
        values=grid.codes * along(s, x.ndim, axis),
        grads={"x": grid.pass_through(g), "scale": add(g * grid.slope) * sign},
        sizes={"scale": add(np.abs(g) * grid.size)},
        slack={"scale": add(np.abs(g) * lost(grid.slope, byte) * grid.inside)} if byte else {},
        distance=grid.distance,
    )


BYTE, LONG_BYTE = 252.0, 126.0
"""Steps per code of a residue: half a code, or a whole one of stochastic rounding, is 126 of them."""


def lost(slope: Array, steps: float) -> Array:
    """How far a slope inside the range is from what the byte holds; at most 1/504 of a code (stochastic: 1/252)."""
    return np.where(np.isfinite(slope), np.abs(np.rint(slope * steps) / steps - slope), 0.0)


# --- the methods ------------------------------------------------------------------------------------------------------


@quiet
def ste(x: Array, g: Array, *, scale: Array, qmin: int, qmax: int, axis: int | None, **_: Any) -> Result:
    """Bengio 2013: round in the forward, identity within the range in the backward."""
    result = learned(x, g, scale, qmin, qmax, axis, 1.0, 0.0)
    return Result(result.values, {"x": result.grads["x"]}, distance=result.distance)


@quiet
def lsq(
    x: Array, g: Array, *, scale: Array, qmin: int, qmax: int, axis: int | None, gain: float, lean: bool, **_: Any
) -> Result:
    """Esser 2020: eq. 1 codes, eq. 2 values, eq. 3 gradient of the scale, eq. 5 gradient of x."""
    return learned(x, g, scale, qmin, qmax, axis, gain, BYTE * lean)


@quiet
def lsq_plus(x: Array, g: Array, *, scale: Array, offset: Array, qmin: int, qmax: int, gain: float, **_: Any) -> Result:
    """Bhalgat 2020, eqs. 4-8, with the offset beta = -z s for an integer z: beta's gradient is 1 outside, 0 inside."""
    z = float(np.clip(np.rint(offset), qmin, qmax).item())
    result = learned(x, g, scale, qmin - z, qmax - z, None, gain, BYTE)
    s = as_used(scale)[0].item()
    grid = Grid(x, np.array(s), qmin - z, qmax - z)
    outside = choose(grid.below, grid.inside, grid.above, g, 0.0 * g, g)
    result.grads["offset"] = (gain * -s * outside.sum()).reshape(offset.shape)
    result.sizes["offset"] = (gain * s * np.abs(g).sum()).reshape(offset.shape)
    return result


@quiet
def pact(x: Array, g: Array, *, alpha: Array, qmin: int, qmax: int, axis: int | None, **_: Any) -> Result:
    """Choi 2018: y = clip(x, 0, alpha) (eq. 1), rounded to alpha / n (eq. 2), dy / dalpha = [x >= alpha] (eq. 3).

    For signed x, which the paper does not have, the odd function of that: clipped where |x| >= alpha.
    """
    raw, (a, sign) = alpha, as_used(alpha)
    a = along(a, x.ndim, axis)
    grid = Grid(x, a / qmax, qmin, qmax)
    above = x >= a
    below = x <= -a if qmin < 0 else x < 0
    inside = ~above & ~below & ~np.isnan(x)
    slope = choose(below, inside, above, -1.0 if qmin < 0 else 0.0, np.zeros_like(x), 1.0)
    return Result(
        values=grid.codes * (a / qmax),
        grads={"x": choose(below, inside, above, 0.0, g, 0.0), "alpha": total(g * slope, raw.shape, axis) * sign},
        sizes={"alpha": total(np.abs(g * slope), raw.shape, axis)},
        distance=np.where(inside, np.abs(grid.v - np.floor(grid.v) - 0.5), np.inf),
    )


@quiet
def dorefa(w: Array, g: Array, *, scale: Array, bits: int, **_: Any) -> Result:
    """Zhou 2016, eq. 9: 2 quantize(tanh(w) / (2 max|tanh(w)|) + 1/2) - 1, here times a fixed scale.

    Rounding passes the gradient, so what is differentiated is scale * t_i / m with t = tanh(w), m = max|t|:
        d / dw_j = scale * (1 - t_j^2) * (delta_ij / m - t_i sign(t_j) [|t_j| = m] / (m^2 * how many reach m))
    Where all weights are zero (below 2^-60), m counts as 1.
    """
    s, n = as_used(scale)[0].item(), 2**bits - 1
    t = np.tanh(w)
    m = np.abs(t).max() if t.size else 1.0
    m = 1.0 if m < FLOOR else m
    u = t / (2 * m) + 0.5
    top = np.abs(t) == m
    share = (g * t).sum() / m**2 / max(top.sum(), 1)
    slope = 1 - t**2
    return Result(
        values=s * (2 * np.rint(n * u) / n - 1),
        grads={"x": s * slope * (g / m - share * np.sign(t) * top)},
        sizes={"x": s * (np.abs(g) / m + np.abs(g * t).sum() / m**2 * top)},
        distance=np.abs(n * u - np.floor(n * u) - 0.5),
    )


@quiet
def ewgs(
    x: Array,
    g: Array,
    *,
    scale: Array,
    qmin: int,
    qmax: int,
    axis: int | None,
    gain: float,
    delta: float,
    **_: Any,
) -> Result:
    """Lee 2021: x_n = clip((x - l) / (u - l), 0, 1), and eq. 5, g_n = g_q (1 + delta sign(g_q) (x_n - x_q))."""
    result = learned(x, g, scale, qmin, qmax, axis, gain, BYTE)
    s = along(as_used(scale)[0], x.ndim, axis)
    lower, upper = qmin * s, qmax * s
    normalised, quantized = (x - lower) / (upper - lower), (result.values - lower) / (upper - lower)
    inside = result.grads["x"] != 0
    result.grads["x"] = np.where(inside, g * (1 + delta * np.sign(g) * (normalised - quantized)), result.grads["x"])
    result.sizes["x"] = np.abs(result.grads["x"])
    result.slack["x"] = np.abs(g) * delta * lost(quantized - normalised, BYTE * (qmax - qmin)) * inside
    return result


@quiet
def tqt(
    x: Array, g: Array, *, log2_threshold: Array, qmin: int, qmax: int, axis: int | None, gain: float, **_: Any
) -> Result:
    """Jain 2019: s = 2^ceil(log2 t) / 2^(b-1) signed, / 2^b unsigned (eq. 4); eqs. 6-8, d / dlog2 t = s ln2 d / ds."""
    power = {2**k - 1: k for k in range(1, 9)}[qmax]  # b - 1 signed, b unsigned
    s = 2.0 ** (np.ceil(np.clip(log2_threshold, -40, 40)) - power)
    result = learned(x, g, s, qmin, qmax, axis, gain, BYTE)
    for part in (result.grads, result.sizes, result.slack):
        part["log2_threshold"] = part.pop("scale") * s * np.log(2)
    return result


@quiet
def stochastic(
    x: Array,
    g: Array,
    *,
    scale: Array,
    noise: Array,
    qmin: int,
    qmax: int,
    axis: int | None,
    gain: float,
    **_: Any,
) -> Result:
    """Gupta 2015, section 3.2: up with probability (x - floor(x)) / step; LSQ's gradient of the code that was drawn."""
    return learned(x, g, scale, qmin, qmax, axis, gain, LONG_BYTE, noise=noise)


@quiet
def binary(w: Array, g: Array, *, axis: int | None, **_: Any) -> Result:
    """Rastegari 2016: a = mean|w| (eq. 6), values a sign(w) (eq. 4); both factors differentiated, sign by [|w| <= 1].

    d / dw_j = a [|w_j| <= 1] delta_ij + sign(w_i) sign(w_j) / n
    """
    shape = (1,) if axis is None else (w.shape[axis],)
    n = w.size / shape[0]
    a = along(np.maximum(total(np.abs(w), shape, axis) / n, FLOOR), w.ndim, axis)
    sign = np.where(np.isnan(w), np.nan, np.where(w >= 0, 1.0, -1.0))
    through_mean = along(total(g * sign, shape, axis), w.ndim, axis) / n
    return Result(
        values=a * sign,
        grads={"x": a * g * np.where(np.isnan(w), np.nan, np.abs(w) <= 1) + sign * through_mean},
        sizes={"x": a * np.abs(g) + along(total(np.abs(g), shape, axis), w.ndim, axis) / n},
    )


@quiet
def binary_activation(x: Array, g: Array, *, scale: Array, axis: int | None, gain: float, **_: Any) -> Result:
    """Hubara 2016: sign(x), gradient where |x| <= 1 (eq. 4), both with the unit s; values s sign(x), so ds: sign(x)."""
    s, d = as_used(scale)
    s = along(s, x.ndim, axis)
    sign = np.where(np.isnan(x), np.nan, np.where(x >= 0, 1.0, -1.0))
    return Result(
        values=s * sign,
        grads={
            "x": np.where(np.isnan(x), np.nan, np.where(np.abs(x) <= s, g, 0.0)),
            "scale": gain * d * total(g * sign, scale.shape, axis),
        },
        sizes={"scale": gain * total(np.abs(g), scale.shape, axis)},
    )


@quiet
def ternary(w: Array, g: Array, *, axis: int | None, **_: Any) -> Result:
    """Li 2016: threshold 0.7 mean|w| (eq. 6), a = mean of |w| beyond it (eq. 5); the gradient passes (section 2.3)."""
    shape = (1,) if axis is None else (w.shape[axis],)
    n = max(w.size / shape[0], 1)
    mean = along(total(np.abs(w), shape, axis) / n, w.ndim, axis)
    kept = np.abs(w) > 0.7 * mean
    count = np.maximum(total(kept, shape, axis), 1)
    a = along(np.maximum(total(np.abs(w) * kept, shape, axis) / count, FLOOR), w.ndim, axis)
    return Result(
        values=np.where(np.isnan(mean), np.nan, a * np.sign(w) * kept),
        grads={"x": g},
        distance=np.abs(np.abs(w) / mean - 0.7),
    )


# --- floating formats -------------------------------------------------------------------------------------------------

FORMATS = {  # mantissa bits, exponent of the least normal number, largest finite value
    "float8_e4m3fn": (3, -6, 448.0),
    "float8_e5m2": (2, -14, 57344.0),
    "float16": (10, -14, 65504.0),
    "bfloat16": (7, -126, (2 - 2.0**-7) * 2.0**127),
    "float32": (23, -126, (2 - 2.0**-23) * 2.0**127),
}


def spacing(v: Array, dtype: str) -> Array:
    """Distance of neighbouring numbers of a format around v."""
    mantissa, least, _ = FORMATS[dtype]
    exponent = np.frexp(np.where(np.isfinite(v), v, 0.0))[1] - 1
    return 2.0 ** (np.maximum(np.where(v == 0, least, exponent), least) - mantissa)


def cast(v: Array, dtype: str) -> Array:
    """v rounded to a format, half to even, and to infinity beyond its range."""
    if dtype == "float64":
        return v
    with np.errstate(all="ignore"):
        step = spacing(v, dtype)
        rounded = np.where(np.isfinite(v), np.rint(v / step) * step, v)
        return np.where(np.abs(rounded) > FORMATS[dtype][2], np.copysign(np.inf, v), rounded)


@quiet
def fp8(x: Array, g: Array, *, scale: Array, format: str, axis: int | None, **_: Any) -> Result:
    """Micikevicius 2022, table 1: the nearest 8-bit float of x / s, saturating; gradient within the range."""
    s, largest = along(as_used(scale)[0], x.ndim, axis), FORMATS[format][2]
    v = x / s
    inside = np.clip(v, -largest, largest)
    step = spacing(inside, format)
    tie = np.abs(np.abs(inside / step) % 1 - 0.5)
    return Result(
        values=cast(inside, format) * s,
        grads={"x": np.where(np.isnan(v), np.nan, np.where(np.abs(v) <= largest, g, 0.0))},
        distance=np.minimum(tie, np.abs(np.abs(v) - largest) / spacing(np.array(largest), format)),
    )


@quiet
def mixed_precision(x: Array, g: Array, *, format: str, **_: Any) -> Result:
    """Micikevicius 2018: values of the low format, the gradient of the float32 master copy."""
    return Result(values=cast(x, format), grads={"x": g})


@quiet
def relu(x: Array, g: Array, **_: Any) -> Result:
    """max(x, 0); gradient where x > 0, and, as torch has it, at NaN."""
    return Result(values=np.maximum(x, 0.0), grads={"x": np.where(x <= 0, 0.0, g)})


# --- what the suite feeds them ----------------------------------------------------------------------------------------


def one_or_random(rng: np.random.Generator | None, n: int) -> Array:
    """n scales in float32: powers of two without a generator, so that x / s is exact."""
    return (2.0 ** -(2.0 - np.arange(n) % 3) if rng is None else rng.uniform(0.02, 0.3, n)).astype(np.float32)


def scale_state(rng: np.random.Generator | None, n: int, **_: Any) -> State:
    """A scale."""
    return {"scale": one_or_random(rng, n)}


def alpha_state(rng: np.random.Generator | None, n: int, *, qmax: int, **_: Any) -> State:
    """PACT's clipping level: n / qmax is the scale."""
    return {"alpha": one_or_random(rng, n) * np.float32(qmax)}


def threshold_state(rng: np.random.Generator | None, n: int, **_: Any) -> State:
    """TQT's log2 t: an integer (which ceil leaves alone) and others."""
    drawn = np.array([1.0, -0.3, 0.7])[np.arange(n) % 3] if rng is None else rng.uniform(-2, 2, n)
    return {"log2_threshold": drawn.astype(np.float32)}


def offset_state(rng: np.random.Generator | None, n: int, *, qmin: int, qmax: int, **_: Any) -> State:
    """LSQ+'s scale and offset, the zero point being odd: round(v) + z then differs from round(v + z) at ties."""
    offset = qmin + (1.25 if rng is None else rng.uniform(0.2, 0.6) * (qmax - qmin))
    return {"scale": one_or_random(rng, n), "offset": np.array([offset], dtype=np.float32)}


def no_state(rng: np.random.Generator | None, n: int, **_: Any) -> State:
    """Nothing beside x."""
    return {}


def steps(state: State, options: dict[str, Any]) -> Array:
    """What one code is worth in x, per scale."""
    if "scale" in state and "bits" not in options:
        return as_used(state["scale"].astype(float))[0]
    if "alpha" in state:
        return as_used(state["alpha"].astype(float))[0] / options["qmax"]
    if "log2_threshold" in state:
        power = round(np.log2(options["qmax"] + 1))
        return 2.0 ** (np.ceil(np.clip(state["log2_threshold"].astype(float), -40, 40)) - power)
    return np.ones(1)


def limits(state: State, options: dict[str, Any]) -> tuple[float, float]:
    """Ends of the range in codes from zero on."""
    if "format" in options:
        return -FORMATS[options["format"]][2], FORMATS[options["format"]][2]
    if "qmax" not in options:
        return -1.0, 1.0
    z = float(np.clip(np.rint(state["offset"]), options["qmin"], options["qmax"]).item()) if "offset" in state else 0.0
    return options["qmin"] - z, options["qmax"] - z


def draw_codes(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> Array:
    """Inside the range for the most part, and some way beyond either end."""
    beyond = 1 + 0.15 * (high - low)
    return rng.uniform(low - beyond, high + beyond, shape)


def draw_weights(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> Array:
    """Gaussian, some beyond 1."""
    return rng.normal(0.0, 0.7, shape)


def draw_wide(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> Array:
    """Of all magnitudes that a format has, beyond its range too."""
    exponents = rng.uniform(-12, min(np.log2(high) + 1, 20.0), shape)
    return rng.choice([-1.0, 1.0], shape) * 2.0**exponents


def code_points(low: float, high: float, **_: Any) -> Array:
    """Codes, ties and quarters of the whole range or of its ends and middle; both ends, and beyond them."""
    span = np.arange(low, high + 1)
    if len(span) > 40:
        span = np.unique(np.concatenate([span[:6], span[-6:], np.arange(-6, 7), span[:: len(span) // 9]]))
    inner = (span[:, None] + np.array([-0.5, -0.25, 0.0, 0.25, 0.5])).ravel()
    outer = [0.25, 0.5, 0.75, 1.0, 1.5, 100.0]
    return np.unique(np.concatenate([inner, low - np.array(outer), high + np.array(outer)]))


def weight_points(low: float, high: float, **_: Any) -> Array:
    """Zero, where the sign and DoReFa's middle tie decide, and around +-1, where XNOR's mask ends."""
    return np.array([0.0, -0.0, 1.0, -1.0, 1.0078125, -1.0078125, 0.25, -0.5, 2.0, -3.0, 0.125, 0.375, 0.375, -0.375])


def float_points(low: float, high: float, *, format: str, **_: Any) -> Array:
    """Numbers of a format, the ties between them, its subnormal numbers and both sides of its largest."""
    mantissa, least, largest = FORMATS[format]
    ulp = 2.0**-mantissa
    normal = np.outer(2.0 ** np.array([0, 3, least]), 1 + ulp * np.array([0, 0.5, 1, 1.25, 1.5, 1.75, 2, 2.5])).ravel()
    subnormal = 2.0 ** (least - mantissa) * np.array([0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3.5])
    last = spacing(np.array(largest), format)
    ends = np.array([largest, largest - last / 2, largest + last / 4, largest + last / 2, largest + last])
    points = np.concatenate([normal, subnormal, ends])
    return np.concatenate([points, -points])


# --- comparing --------------------------------------------------------------------------------------------------------

TOLERANCE = {"float64": 2.0**-22, "float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative error of one element: two float32 roundings, or the last bit of a lower dtype that follows from them."""

SUM_TOLERANCE = 2.0**-20
"""Error of a float32 sum, relative to the sum of magnitudes (`Result.sizes`)."""

NEAR = 1e-5
"""Closer to a decision than this, in codes, without being on it: float32 may decide otherwise. For codes beyond 40,
whose quotient is less exact, 2^-22 of the code."""


def undecided(result: Result, state: State, options: dict[str, Any]) -> Array:
    """The elements that are left out of a comparison."""
    largest = max(map(abs, limits(state, options))) if "qmax" in options else 2.0 ** options.get("bits", 0)
    return (result.distance > 0) & (result.distance < max(NEAR, largest * 2.0**-22))


def assert_within(got: Array, expected: Array, allowed: Array | float, what: str) -> None:
    """Equal to within `allowed`, NaN and infinities alike; names the worst element."""
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    with np.errstate(all="ignore"):
        error = np.where((got == expected) | (np.isnan(got) & np.isnan(expected)), 0.0, np.abs(got - expected))
        excess = np.where(np.isnan(error), np.inf, error - allowed * np.ones_like(error))
    if got.size and excess.max() > 0:
        worst = np.unravel_index(excess.argmax(), got.shape)
        raise AssertionError(f"{what}: {got[worst]} at {worst}, expected {expected[worst]} +- {allowed}")


def assert_result(
    expected: Result,
    values: Array,
    grads: dict[str, Array],
    dtype: str,
    *,
    oracle: Oracle,
    skip: Array | None = None,
) -> None:
    """Compare values and gradients with a closed form; see `TOLERANCE`.

    Args:
        expected: of the closed form.
        values, grads: what came, as float64.
        dtype: of x.
        oracle: that the closed form belongs to.
        skip: the elements that are left out of values and grad x.
    """
    skip = np.zeros(values.shape, bool) if skip is None else skip
    target = cast(cast(expected.values, "float32") if oracle.float32 else expected.values, dtype)
    allowed = np.zeros(target.shape) if oracle.rounds_once else TOLERANCE[dtype] * np.abs(target) + tiny(dtype)
    assert_within(np.where(skip, 0.0, values), np.where(skip, 0.0, target), allowed, "values")
    for name, got in grads.items():
        want = cast(expected.grads[name], dtype if name == "x" else "float32")
        allowed = np.zeros(want.shape)
        if name in expected.sizes:
            allowed = SUM_TOLERANCE * expected.sizes[name] + tiny("float32")
            if name == "x":
                allowed = allowed + TOLERANCE[dtype] * np.abs(want) + tiny(dtype)
        if name in expected.slack:
            allowed = allowed + expected.slack[name]
        if name == "x":
            got, want = np.where(skip, 0.0, got), np.where(skip, 0.0, want)
        assert_within(got, want, allowed, f"gradient of {name}")


def tiny(dtype: str) -> float:
    """The least positive number of a dtype: what rounding costs near zero."""
    return float(spacing(np.zeros(1), "float32" if dtype == "float64" else dtype).item())


# --- the registry -----------------------------------------------------------------------------------------------------

RANGES = ({"qmin": -2, "qmax": 1}, {"qmin": -7, "qmax": 7}, {"qmin": 0, "qmax": 3}, {"qmin": 0, "qmax": 255})
AXES = (None, 0, 1, -1)


@dataclass(frozen=True)
class Oracle:
    """One Function: its closed form, how to call it, what to feed it, and what else is true of it.

    Attributes:
        closed_form: (x, dL/dvalues, state, options) -> Result.
        arguments: of the Function's `apply`, in order; what is not in the state or the options is `x` or `axis`.
        state: makes what has a gradient or could have one.
        learned: those of the state that have one.
        options: the variants that are tested.
        axes: the channel dimensions that are tested.
        draw, points: random x and special ones, in codes.
        rounds_once: values are one float32 product, so they must be equal, not close.
        infinite: takes infinite x (a mean of weights does not).
        passes_nan: the gradient passes at NaN as everywhere.
        joint: values depend on all x of a channel, so one NaN spoils them all.
        float32: x is rounded to float32 first.
        levels: at most so many different values per scale.
        idempotent: quantizing values again changes nothing, or why not.
        half_step: largest error inside the range, in steps; None where there is no step.
        keeps_zero: zero maps to zero.
        blocks: the gradient is zero outside the range.
        scales_with: arguments besides x that are doubled when x is, for the values to double; None: they do not.
        surrogate: (x, state, options) -> a smooth function of (x, state) whose derivatives there are the gradients.
    """

    closed_form: Callable[..., Result]
    arguments: tuple[str, ...]
    state: Callable[..., State]
    learned: tuple[str, ...] = ()
    options: tuple[dict[str, Any], ...] = ({},)
    axes: tuple[int | None, ...] = AXES
    draw: Callable[..., Array] = draw_codes
    points: Callable[..., Array] = code_points
    rounds_once: bool = True
    infinite: bool = True
    passes_nan: bool = False
    joint: bool = False
    float32: bool = True
    levels: Callable[[dict[str, Any]], int] | None = lambda options: options["qmax"] - options["qmin"] + 1
    idempotent: str = "yes"
    half_step: float | None = 0.5
    keeps_zero: bool = True
    blocks: bool = True
    scales_with: tuple[str, ...] | None = ("scale",)
    surrogate: Callable[..., Callable[..., Array]] | None = None


def smooth_grid(x0: Array, state0: State, options: dict[str, Any]) -> Callable[..., Array]:
    """The estimator's own function: rounding adds a constant, found at (x0, state0), to what was clipped."""

    def parts(x: Array, state: State) -> tuple[Array, Array]:
        axis = options.get("axis")
        if "log2_threshold" in state:  # ceil adds a constant, too
            exponent = state["log2_threshold"] + np.ceil(state0["log2_threshold"]) - state0["log2_threshold"]
            s = along(2.0**exponent / (options["qmax"] + 1), x.ndim, axis)
        else:
            s = along(np.abs(state["scale"]), x.ndim, axis)
        z = 0.0
        if "offset" in state:
            z = (state["offset"] + np.rint(state0["offset"]) - state0["offset"]).item()
        return np.clip(x / s, options["qmin"] - z, options["qmax"] - z), s

    clipped, _ = parts(x0, state0)
    noise = state0.get("noise")
    rounded = np.rint(clipped) if noise is None else np.floor(clipped) + (noise < clipped - np.floor(clipped))

    def smooth(x: Array, state: State) -> Array:
        v, s = parts(x, state)
        return (v + rounded - clipped) * s

    return smooth


def smooth_pact(x0: Array, state0: State, options: dict[str, Any]) -> Callable[..., Array]:
    """The clip; rounding adds a constant."""

    def smooth(x: Array, state: State) -> Array:
        a = along(state["alpha"], x.ndim, options.get("axis"))
        return np.clip(x, -a if options["qmin"] < 0 else 0.0, a)

    return smooth


def smooth_dorefa(x0: Array, state0: State, options: dict[str, Any]) -> Callable[..., Array]:
    """tanh over its largest magnitude; rounding adds a constant."""
    return lambda x, state: state["scale"] * np.tanh(x) / np.abs(np.tanh(x)).max()


def smooth_binary(x0: Array, state0: State, options: dict[str, Any]) -> Callable[..., Array]:
    """The mean magnitude times a sign that moves as clip(x, -1, 1) does."""

    def smooth(x: Array, state: State) -> Array:
        axis = options.get("axis")
        others = None if axis is None else tuple(d for d in range(x.ndim) if d != axis % x.ndim)
        moved = np.where(x0 >= 0, 1.0, -1.0) + np.clip(x, -1, 1) - np.clip(x0, -1, 1)
        return np.abs(x).mean(axis=others, keepdims=True) * moved

    return smooth


RANGE_ARGUMENTS = ("qmin", "qmax", "axis")
BITS = tuple({"bits": bits} for bits in (2, 3, 4, 8))
LEARNED_STEP: dict[str, Any] = {"state": scale_state, "learned": ("scale",), "surrogate": smooth_grid}
WEIGHT_ONLY: dict[str, Any] = {
    "state": no_state,
    "draw": draw_weights,
    "points": weight_points,
    "infinite": False,
    "joint": True,
    "rounds_once": False,
    "half_step": None,
    "blocks": False,
    "scales_with": (),
}
RELU: dict[str, Any] = {
    "arguments": ("x", "limit"),
    "state": no_state,
    "options": ({"limit": None},),  # the others are in tests/test_lean.py
    "axes": (None,),
    "passes_nan": True,
    "float32": False,
    "levels": None,
    "half_step": None,
    "scales_with": (),
    "surrogate": lambda x0, state0, options: lambda x, state: np.maximum(x, 0.0),
}

FUNCTIONS: dict[str, Oracle] = {
    "STE": Oracle(ste, ("x", "scale", *RANGE_ARGUMENTS), scale_state, options=RANGES),
    "LSQ": Oracle(
        lsq,
        ("x", "scale", *RANGE_ARGUMENTS, "gain", "lean"),
        options=tuple({**r, "gain": 0.125, "lean": lean} for r in RANGES for lean in (False, True)),
        **LEARNED_STEP,
    ),
    "LSQPlus": Oracle(
        lsq_plus,
        ("x", "scale", "offset", "qmin", "qmax", "gain"),
        offset_state,
        ("scale", "offset"),
        options=tuple({**r, "gain": 0.125} for r in (*RANGES, {"qmin": 0, "qmax": 15})),
        axes=(None,),
        surrogate=smooth_grid,
    ),
    "PACT": Oracle(
        pact,
        ("x", "alpha", *RANGE_ARGUMENTS),
        alpha_state,
        ("alpha",),
        options=({"qmin": 0, "qmax": 3}, {"qmin": 0, "qmax": 255}, {"qmin": -7, "qmax": 7}, {"qmin": -1, "qmax": 1}),
        rounds_once=False,
        scales_with=("alpha",),
        surrogate=smooth_pact,
    ),
    "DoReFa": Oracle(
        dorefa,
        ("x", "scale", "bits"),
        **{**WEIGHT_ONLY, "state": scale_state, "infinite": True, "scales_with": None},
        options=BITS,
        axes=(None,),
        levels=lambda options: 2 ** options["bits"],
        idempotent="values pass through tanh and fill the range anew",
        keeps_zero=False,
        surrogate=smooth_dorefa,
    ),
    "EWGS": Oracle(
        ewgs,
        ("x", "scale", *RANGE_ARGUMENTS, "gain", "delta"),
        options=tuple({**r, "gain": 0.125, "delta": 0.5} for r in RANGES),
        **{**LEARNED_STEP, "surrogate": None},  # its estimator is the derivative of nothing
    ),
    "TQT": Oracle(
        tqt,
        ("x", "log2_threshold", *RANGE_ARGUMENTS, "gain"),
        threshold_state,
        ("log2_threshold",),
        options=tuple({**r, "gain": 0.125} for r in RANGES),
        scales_with=("log2_threshold",),
        surrogate=smooth_grid,
    ),
    "Stochastic": Oracle(
        stochastic,
        ("x", "scale", "noise", *RANGE_ARGUMENTS, "gain"),
        options=tuple({**r, "gain": 0.125} for r in RANGES),
        idempotent="where values / s falls short of its code by a rounding error, noise above 1 - 1e-5 rounds it down",
        half_step=1.0,
        **LEARNED_STEP,
    ),
    "Binary": Oracle(
        binary,
        ("x", "axis"),
        levels=lambda options: 2,
        idempotent="up to the rounding of a mean",
        keeps_zero=False,
        surrogate=smooth_binary,
        **WEIGHT_ONLY,
    ),
    "BinaryActivation": Oracle(
        binary_activation,
        ("x", "scale", "axis", "gain"),
        options=({"gain": 0.125},),
        **{**LEARNED_STEP, "surrogate": None},  # sign, and the scale in front of it, are estimated apart
        levels=lambda options: 2,
        half_step=None,
        keeps_zero=False,
    ),
    "Ternary": Oracle(
        ternary,
        ("x", "axis"),
        levels=lambda options: 3,
        idempotent="up to the rounding of a mean",
        passes_nan=True,
        **WEIGHT_ONLY,
    ),
    "FP8": Oracle(
        fp8,
        ("x", "scale", "dtype", "axis"),
        scale_state,
        options=({"format": "float8_e4m3fn"}, {"format": "float8_e5m2"}),
        draw=draw_wide,
        points=float_points,
        levels=lambda options: 254 if options["format"] == "float8_e4m3fn" else 248,
        half_step=None,
    ),
    "MixedPrecision": Oracle(
        mixed_precision,
        ("x", "dtype"),
        no_state,
        options=({"format": "bfloat16"}, {"format": "float16"}),
        axes=(None,),
        draw=draw_wide,
        points=float_points,
        passes_nan=True,
        levels=None,
        half_step=None,
        blocks=False,
        scales_with=(),
    ),
    "LeanReLU": Oracle(relu, **RELU),
    "LeanReLUInplace": Oracle(relu, **RELU),
}


# --- quantizers -------------------------------------------------------------------------------------------------------


def weight_range(bits: int, signed: bool) -> tuple[int, int]:
    """Symmetric from 3 bits on, all four codes at 2."""
    return (-(2 ** (bits - 1)) + (bits > 2), 2 ** (bits - 1) - 1)


def activation_range(bits: int, signed: bool) -> tuple[int, int]:
    """Two's complement, or from 0 on."""
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


def clip_range(bits: int, signed: bool) -> tuple[int, int]:
    """PACT: symmetric if signed."""
    high = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    return (-high if signed else 0), high


def unsigned_range(bits: int, signed: bool) -> tuple[int, int]:
    """LSQ+: the zero point has the sign."""
    return 0, 2**bits - 1


def odd_range(bits: int, signed: bool) -> tuple[int, int]:
    """DoReFa: the odd integers."""
    return -(2**bits - 1), 2**bits - 1


def sign_range(bits: int, signed: bool) -> tuple[int, int]:
    """-1 and 1, with or without 0; unsigned 0 and 1."""
    return (-1 if signed else 0), 1


def lsq_step(values: Array, low: int, high: int, bits: int) -> Array:
    """LSQ section 2.1: 2 mean|v| / sqrt(qmax)."""
    return 2 * np.abs(values).mean(1) / np.sqrt(high)


def squared_error(values: Array, s: Array, low: float, high: float) -> Array:
    """Mean squared error of each row at its step."""
    codes = np.clip(np.rint(values / s[:, None]), low, high)
    return ((codes * s[:, None] - values) ** 2).mean(1)


def least_squares_step(values: Array, low: float, high: float, bits: int) -> Array:
    """The step of least squared error, by trying 150 of them."""
    fits = np.maximum(values.max(1) / high if high else 0.0, values.min(1) / low if low else 0.0)
    factors = np.geomspace(1.0, 2.0**-4, 150)
    errors = np.stack([squared_error(values, fits * f, low, high) for f in factors])
    return fits * factors[errors.argmin(0)]


def lsq_plus_step(values: Array, low: int, high: int, bits: int) -> Array:
    """LSQ+ section 3.3: max(|mean - 3 std|, |mean + 3 std|) / 2^(b-1)."""
    mean, std = values.mean(1), values.std(1)
    return np.maximum(np.abs(mean - 3 * std), np.abs(mean + 3 * std)) / 2 ** (bits - 1)


def pact_step(values: Array, low: int, high: int, bits: int) -> Array:
    """alpha at the largest magnitude."""
    return np.abs(values).max(1) / high


def dorefa_step(values: Array, low: int, high: int, bits: int) -> Array:
    """The step a that is nearest, in sum (a codes - w)^2: a = sum codes w / sum codes^2."""
    t = np.tanh(values)
    codes = 2 * np.rint((t / (2 * np.abs(t).max()) + 0.5) * high) - high
    return np.array([(codes * values).sum() / (codes**2).sum()])


def unit_step(values: Array, low: int, high: int, bits: int) -> Array:
    """DoReFa activations fill 0..1; signed ones, which the paper does not have, are searched."""
    return np.full(values.shape[0], 1 / high) if low == 0 else least_squares_step(values, low, high, bits)


def power_step(values: Array, low: int, high: int, bits: int) -> Array:
    """TQT: the power of two nearest to the step of least squared error."""
    return 2.0 ** np.rint(np.log2(least_squares_step(values, low, high, bits)))


def mean_step(values: Array, low: int, high: int, bits: int) -> Array:
    """XNOR: the mean magnitude; at {0, s} LSQ's step."""
    return np.abs(values).mean(1) * (1 if low < 0 else 2)


def ternary_step(values: Array, low: int, high: int, bits: int) -> Array:
    """TWN: the mean of what exceeds 0.7 of the mean."""
    magnitudes = np.abs(values)
    kept = magnitudes > 0.7 * magnitudes.mean(1, keepdims=True)
    return (magnitudes * kept).sum(1) / kept.sum(1)


@dataclass(frozen=True)
class Role:
    """A method's quantizer of weights, or of activations.

    Attributes:
        functions: names in FUNCTIONS of what it applies in training to (unsigned, signed) tensors.
        bits: those that it has.
        codes: (bits, signed) -> least and largest.
        step: (rows, qmin, qmax, bits) -> initial scale as used per row; None: no closed form (LSQ+ activations).
        gain: has LSQ's gradient scale, 1 / sqrt(N qmax).
        learns: has a trained Parameter.
        integer: up to how many bits its codes deploy as integers.
        searched: the step comes from a search, so it is judged by its squared error.
        evaluation: the Function in evaluation, where it is another.
    """

    functions: tuple[str, str]
    bits: range = range(2, 9)
    codes: Callable[[int, bool], tuple[int, int]] = weight_range
    step: Callable[[Array, int, int, int], Array] | None = lsq_step
    gain: bool = True
    learns: bool = True
    integer: int = 8
    searched: Callable[[int, bool], bool] = lambda bits, signed: False
    evaluation: str | None = None


@dataclass(frozen=True)
class Method:
    """A `quant.method`: its quantizers."""

    weight: Role
    activation: Role


def beyond_four(bits: int, signed: bool) -> bool:
    """LSQ's step at few bits, the searched one beyond."""
    return bits > 4


def always(bits: int, signed: bool) -> bool:
    """Searched at all bits."""
    return True


def both(name: str, **rest: Any) -> Method:
    """A method with the same Function for weights and activations."""
    return Method(Role((name, name), **rest), Role((name, name), codes=activation_range, **rest))


def lsq_like(name: str, **rest: Any) -> Method:
    """LSQ's step, which activations of more than four bits do not take."""
    return Method(Role((name, name), **rest), Role((name, name), codes=activation_range, searched=beyond_four, **rest))


FIXED: dict[str, Any] = {"gain": False, "learns": False}
LSQ_ACTIVATION = Role(("LSQ", "LSQ"), codes=activation_range, searched=beyond_four)
DOREFA_WEIGHT = Role(("DoReFa", "DoReFa"), codes=odd_range, step=dorefa_step, integer=7, **FIXED)

METHODS: dict[str, Method] = {
    "lsq": lsq_like("LSQ"),
    "ste": both("STE", step=least_squares_step, searched=always, **FIXED),
    "lsq_plus": Method(
        Role(("LSQ", "LSQ"), step=lsq_plus_step),
        Role(("LSQPlus", "LSQPlus"), bits=range(1, 9), codes=unsigned_range, step=None, searched=always),
    ),
    "pact": Method(
        DOREFA_WEIGHT, Role(("PACT", "PACT"), bits=range(1, 9), codes=clip_range, step=pact_step, gain=False)
    ),
    "dorefa": Method(
        DOREFA_WEIGHT,
        Role(
            ("STE", "STE"),
            bits=range(1, 9),
            codes=activation_range,
            step=unit_step,
            searched=lambda bits, signed: signed,
            **FIXED,
        ),
    ),
    "ewgs": lsq_like("EWGS"),
    "tqt": both("TQT", step=power_step),
    "stochastic": lsq_like("Stochastic", evaluation="LSQ"),
    "binary": Method(
        Role(("Binary", "Binary"), bits=range(1, 2), codes=sign_range, step=mean_step, **FIXED),
        Role(("LSQ", "BinaryActivation"), bits=range(1, 2), codes=sign_range, step=mean_step),
    ),
    "ternary": Method(
        Role(("Ternary", "Ternary"), bits=range(2, 3), codes=sign_range, step=ternary_step, **FIXED), LSQ_ACTIVATION
    ),
    "fp8": both("FP8", bits=range(8, 9), integer=0, step=None, **FIXED),
    "mixed_precision": both("MixedPrecision", bits=range(16, 17), integer=0, step=None, **FIXED),
}

ORACLES: dict[str, Oracle | Method] = {**FUNCTIONS, **METHODS}
