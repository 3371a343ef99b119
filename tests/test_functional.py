"""Every Function against its closed form in `oracles.py`: values, gradient of x, gradients of scale, offset, threshold.

The suite is parametrized by `oracles.FUNCTIONS`: a new Function is tested by an entry there.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import oracles
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import FLOOR, FUNCTIONS, Oracle, Result, along
from torch import Tensor

import qat.functional as F
from qat.config import QatError
from qat.quantizers import METHODS

DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
SHAPE = (4, 3, 5, 6)


EVERY = [
    pytest.param(name, axis, id=f"{name}-axis{axis}") for name, oracle in FUNCTIONS.items() for axis in oracle.axes
]
every_axis = pytest.mark.parametrize(("name", "axis"), EVERY)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def array(t: Tensor) -> np.ndarray:
    """float64 NumPy."""
    return t.detach().double().cpu().numpy()


def dyadic(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Gradients that every dtype holds, none of them 0."""
    return rng.choice([-2.0, -1.5, -1.0, -0.5, 0.25, 0.75, 1.0, 1.75], shape)


def call(name: str, x: Tensor, state: dict[str, Tensor], options: dict[str, Any], axis: int | None) -> Tensor:
    """Values of a Function, through its `apply`."""
    x = x.clone() if name == "LeanReLUInplace" else x  # a leaf cannot be overwritten
    present: dict[str, Any] = {"x": x, "axis": axis, **state, **options}
    if "format" in options:
        present["dtype"] = getattr(torch, options["format"])
    out = getattr(F, name).apply(*(present[argument] for argument in FUNCTIONS[name].arguments))
    return out[0] if isinstance(out, tuple) else out


def tensors(name: str, state: dict[str, np.ndarray], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The state as float32 tensors, what is learned with gradients."""
    return {
        k: torch.from_numpy(np.asarray(v)).to(device).requires_grad_(k in FUNCTIONS[name].learned)
        for k, v in state.items()
    }


def closed(
    name: str, x: Tensor, g: np.ndarray, state: dict[str, np.ndarray], axis: int | None, options: dict[str, Any]
) -> Result:
    """The closed form, for x as the Function sees it."""
    oracle = FUNCTIONS[name]
    seen = array(x.float() if oracle.float32 else x)
    return oracle.closed_form(seen, g, **{k: v.astype(float) for k, v in state.items()}, **options, axis=axis)


def prove(
    name: str,
    x: Tensor,
    state: dict[str, np.ndarray],
    options: dict[str, Any],
    axis: int | None,
    rng: np.random.Generator,
    *,
    exact: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call a Function on x, of any dtype, device and layout, and compare values and gradients with the closed form.

    With `exact` no element may be near a decision without being on it. Returns values and gradients.
    """
    oracle = FUNCTIONS[name]
    dtype = str(x.dtype).removeprefix("torch.")
    g = dyadic(rng, tuple(x.shape))
    skip = oracles.undecided(closed(name, x, g, state, axis, options), state, options)
    skip = np.broadcast_to(skip, g.shape)
    assert skip.sum() <= (0 if exact else max(4, 0.1 * skip.size))
    g = np.where(skip, 0.0, g)
    expected = closed(name, x, g, state, axis, options)

    x = x.detach().requires_grad_()
    given = tensors(name, state, x.device)
    values = call(name, x, given, options, axis)
    leaves = {"x": x, **{k: given[k] for k in oracle.learned}}
    found = torch.autograd.grad(values, list(leaves.values()), torch.from_numpy(np.asarray(g)).to(x.device, x.dtype))
    grads = dict(zip(leaves, found, strict=True))
    for k, grad in grads.items():
        assert grad.dtype == (x.dtype if k == "x" else torch.float32)
        assert grad.shape == leaves[k].shape
    assert values.dtype == x.dtype
    assert values.shape == x.shape
    assert order(values) == order(x) or not is_dense(x)
    try:
        numbers = {k: array(v) for k, v in grads.items()}
        oracles.assert_result(expected, array(values), numbers, dtype, oracle=oracle, skip=skip)
    except AssertionError as error:
        error.add_note(f"{name}, axis {axis}, {options}, {dtype} {tuple(x.shape)}, {state}")
        raise
    return values.detach(), grads


def is_dense(x: Tensor) -> bool:
    """Every element of a piece of memory once, in whatever order: results have this order, too."""
    expected = 1
    for stride, size in sorted(order(x)):
        if stride != expected:
            return False
        expected *= size
    return True


def order(x: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that have a stride to speak of."""
    return [(stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def random_x(
    oracle: Oracle,
    rng: np.random.Generator,
    shape: tuple[int, ...],
    state: dict[str, np.ndarray],
    options: dict[str, Any],
    axis: int | None,
    dtype: torch.dtype,
    *,
    ends: bool = True,
) -> Tensor:
    """Random x within and beyond the range, and next to both ends, as the dtype has it."""
    low, high = oracles.limits(state, options)
    v = oracle.draw(rng, shape, low, high)
    near = 1 + torch.finfo(dtype).eps * np.array([0, 1, -1])
    if ends:
        v.reshape(-1)[:6] = np.concatenate([low * near, high * near])
    return torch.from_numpy(np.asarray(v * along(oracles.steps(state, options), len(shape), axis))).to(dtype)


def new_state(
    oracle: Oracle, rng: np.random.Generator | None, shape: tuple[int, ...], options: dict[str, Any], axis: int | None
) -> dict[str, np.ndarray]:
    """State for x of a shape: random, or without a generator powers of two."""
    state = oracle.state(rng, 1 if axis is None else shape[axis], **options)
    if "noise" in oracle.arguments:
        quarters = ((np.arange(math.prod(shape)) % 3 + 1) / 4).reshape(shape)
        state["noise"] = np.asarray(quarters if rng is None else rng.random(shape), dtype=np.float32)
    return state


# --- the registry -----------------------------------------------------------------------------------------------------


def test_every_function_has_an_oracle():
    classes = {n for n in F.__all__ if isinstance(getattr(F, n), type)}
    assert classes == set(FUNCTIONS)
    typed = set(F.__all__) - classes
    assert {n.replace("_", "") for n in typed} == {n.lower() for n in classes} - {"leanrelu", "leanreluinplace"} | {
        "relu"
    }


def test_every_method_has_an_oracle():
    assert {*METHODS, "fp8", "mixed_precision"} == set(oracles.METHODS)
    assert set(oracles.ORACLES) == set(FUNCTIONS) | set(oracles.METHODS)


@pytest.mark.parametrize("name", [n for n, o in FUNCTIONS.items() if o.surrogate])
def test_oracles_differentiate_their_surrogates(name):
    """The oracles' own gradients: where rounding adds a constant, they are ordinary derivatives (by differences)."""
    oracle, rng = FUNCTIONS[name], np.random.default_rng(0)
    for options, axis in itertools.product(oracle.options, oracle.axes):
        options = {**options, "gain": 1.0} if "gain" in options else options
        shape = (2, 3, 4)
        state = {k: v.astype(float) for k, v in new_state(oracle, rng, shape, options, axis).items()}
        low, high = oracles.limits(state, options)
        x = oracle.draw(rng, shape, low, high) * along(oracles.steps(state, options), 3, axis)
        g = dyadic(rng, shape)
        expected = oracle.closed_form(x, g, **state, **options, axis=axis)
        smooth = oracle.surrogate(x, state, {**options, "axis": axis})
        for key, point in {"x": x, **{k: state[k] for k in oracle.learned}}.items():
            slope = np.zeros(point.size)
            for i in range(point.size):
                change = np.zeros(point.size)
                change[i] = 1e-7 * max(1e-2, abs(point.reshape(-1)[i]))
                ends = [point + sign * change.reshape(point.shape) for sign in (1, -1)]
                up, down = (smooth(e, state) if key == "x" else smooth(x, {**state, key: e}) for e in ends)
                slope[i] = (g * (up - down)).sum() / (2 * change[i])
            np.testing.assert_allclose(expected.grads[key].reshape(-1), slope, rtol=1e-4, atol=1e-4, err_msg=key)


# --- against the closed forms -----------------------------------------------------------------------------------------


@every_dtype
@every_axis
def test_random(name, axis, dtype, device):
    """Random x within and beyond the range and next to its ends, random scales."""
    oracle, rng = FUNCTIONS[name], np.random.default_rng(1)
    for options in oracle.options:
        state = new_state(oracle, rng, SHAPE, options, axis)
        x = random_x(oracle, rng, SHAPE, state, options, axis, DTYPES[dtype]).to(device)
        prove(name, x, state, options, axis, rng)


def special_x(
    oracle: Oracle, state: dict[str, np.ndarray], options: dict[str, Any], axis: int | None, dtype: torch.dtype
) -> Tensor:
    """Codes, ties, range ends and points beyond, exact in the dtype; zeros, subnormal, huge and infinite values."""
    low, high = oracles.limits(state, options)
    steps = oracles.steps(state, options)
    v = np.unique(oracle.points(low, high, **options))
    rows = torch.from_numpy(np.concatenate([[0.0, -0.0], v]) * steps[:, None])
    kept = (rows.to(dtype).double() == rows).all(0)
    assert kept.sum() >= 10
    rows = rows[:, kept].to(dtype)
    info = torch.finfo(dtype)
    extremes = [info.smallest_normal * 2, info.smallest_normal * info.eps, min(1e30, info.max)]
    extremes += [math.inf] if oracle.infinite else []
    if dtype == torch.float64:  # float32 rounds these to the ends: they count as that
        extremes = [*extremes, high * steps[0] * (1 - 2**-40), high * steps[0] * (1 + 2**-40)]
    extremes = torch.tensor([[*extremes, *(-e for e in extremes)]], dtype=torch.float64).to(dtype)
    rows = torch.cat([rows, extremes.expand(len(steps), -1)], 1)
    if axis is None:
        return rows[0]
    return {0: rows, 1: rows.T.contiguous(), -1: rows.T.unsqueeze(1).contiguous()}[axis]


@every_dtype
@every_axis
def test_special_points(name, axis, dtype):
    """Both ends of the range, ties, zeros, subnormal, huge and infinite x."""
    oracle, rng = FUNCTIONS[name], np.random.default_rng(2)
    for options in oracle.options:
        state = new_state(oracle, None, (3,) if axis == 0 else (1, 3), options, axis)
        x = special_x(oracle, state, options, axis, DTYPES[dtype])
        state = new_state(oracle, None, tuple(x.shape), options, axis)
        prove(name, x, state, options, axis, rng, exact=not oracle.joint)


@every_dtype
@every_axis
def test_nan(name, axis, dtype):
    """NaN stays where it is, in values and in the gradient of x, and shows in the gradient of its own scale only."""
    oracle, rng = FUNCTIONS[name], np.random.default_rng(3)
    place = (1, 2, 3, 4)
    for options in oracle.options:
        state = new_state(oracle, rng, SHAPE, options, axis)
        x = random_x(oracle, rng, SHAPE, state, options, axis, DTYPES[dtype])
        x[place] = math.nan
        values, grads = prove(name, x, state, options, axis, rng)
        spoilt = torch.zeros(SHAPE, dtype=torch.bool)
        spoilt[place] = True
        mine = torch.tensor([True]) if axis is None else spoilt.movedim(axis, 0).flatten(1).any(1)
        if oracle.joint:
            spoilt = torch.from_numpy(along(mine.numpy(), 4, axis)).expand(SHAPE)
        assert torch.equal(values.isnan(), spoilt)
        assert torch.equal(grads.pop("x").isnan(), spoilt & (not oracle.passes_nan))
        for grad in grads.values():
            assert torch.equal(grad.isnan(), mine)


LAYOUTS = {
    "transposed": lambda t: t.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "sliced": lambda t: t.repeat(2, 1, 1, 2)[::2, ..., 1::2],
    "expanded": lambda t: t[:1, :, :1].expand(SHAPE),
    "offset": lambda t: torch.cat([t[:1], t])[1:],
    "empty": lambda t: t[:, :, :0],
    "one element": lambda t: t[3:, 2:, 4:, 5:],
    "vector": lambda t: t[0, :, 0, 0],
}


@every_axis
def test_layouts(name, axis, device):
    """Dense in another order, with gaps, overlapping, at an offset; empty, one element, one dimension."""
    oracle, rng = FUNCTIONS[name], np.random.default_rng(4)
    options = oracle.options[-1]
    for layout, change in LAYOUTS.items():
        if layout == "vector" and axis == 1:
            continue
        scales = new_state(oracle, rng, SHAPE, options, axis)
        x = change(random_x(oracle, rng, SHAPE, scales, options, axis, torch.float32, ends=False).to(device))
        state = new_state(oracle, rng, tuple(x.shape), options, axis)
        prove(name, x, state, options, axis, rng)


@pytest.mark.parametrize("shape", [(), (0,), (1,)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_small(name, shape):
    """0-d, empty and 1-element tensors, with a scale of shape (1,) or ()."""
    oracle, rng = FUNCTIONS[name], np.random.default_rng(5)
    for options in oracle.options:
        state = new_state(oracle, rng, shape, options, None)
        x = random_x(oracle, rng, shape, state, options, None, torch.float32, ends=False)
        prove(name, x, state, options, None, rng)
        bare = {k: v if k == "noise" else v.reshape(()) for k, v in state.items()}
        _, grads = prove(name, x, bare, options, None, rng)
        if shape == (0,):
            assert all(grad.count_nonzero() == 0 for grad in grads.values())


# --- the scale as used ------------------------------------------------------------------------------------------------

WITH_SCALE = [n for n, o in FUNCTIONS.items() if {"scale", "alpha"} & set(o.arguments)]
RAW = [-0.25, 0.0, -0.0, 1e-30, -1e-30, 1e-42, FLOOR, -FLOOR, FLOOR / 2, FLOOR * 2, 1e-3, 2.0**20, -(2.0**20)]


@pytest.mark.parametrize("name", WITH_SCALE)
def test_raw_scales(name):
    """Negative, zero and tiny raw scales: positive as used, and their gradient keeps the raw sign, at the floor too."""
    oracle, rng = FUNCTIONS[name], np.random.default_rng(6)
    for options, raw in itertools.product(oracle.options, RAW):
        key = "alpha" if "alpha" in oracle.arguments else "scale"
        state = new_state(oracle, rng, (60,), options, None)
        factor = np.float32(options["qmax"] if key == "alpha" and abs(raw) > FLOOR else 1)
        state[key] = np.array([raw], dtype=np.float32) * factor
        x = random_x(oracle, rng, (60,), state, options, None, torch.float32)
        values, grads = prove(name, x, state, options, None, rng)
        assert values.isfinite().all()
        if key in oracle.learned:
            assert grads[key].isfinite().all()
            assert grads[key] != 0
            pushed_up = x.abs() * 1e3 + 1  # all saturated: a larger scale gives larger values
            learned = tensors(name, {**state, key: state[key]})
            call(name, pushed_up, learned, options, None).sum().backward()
            if oracles.limits(state, options)[1] > 0:
                assert learned[key].grad.sign().item() == (-1 if raw < 0 else 1)


@pytest.mark.parametrize("raw", [-100.0, -40.5, -40.0, -39.5, -1.0, 0.0, 1e-6, 1.0, 1.0000001, 40.0, 41.0, 100.0])
def test_raw_thresholds(raw):
    """TQT: ceil at and next to integers, and thresholds beyond 2^+-40 that keep their gradient."""
    oracle, rng = FUNCTIONS["TQT"], np.random.default_rng(7)
    for options in oracle.options:
        state = {"log2_threshold": np.array([raw], dtype=np.float32)}
        x = random_x(oracle, rng, (60,), state, options, None, torch.float32)
        _, grads = prove("TQT", x, state, options, None, rng)
        assert grads["log2_threshold"].isfinite().all()
        assert grads["log2_threshold"] != 0


@pytest.mark.parametrize("offset", [-1e9, -3.0, -0.5, 0.0, 0.5, 1.5, 2.5, 3.49, 7.0, 255.0, 1e9])
def test_raw_offsets(offset):
    """LSQ+: the zero point is the offset rounded half to even and kept within the codes, at both ends too."""
    oracle, rng = FUNCTIONS["LSQPlus"], np.random.default_rng(8)
    for options in oracle.options:
        state = {"scale": np.array([0.25], np.float32), "offset": np.array([offset], np.float32)}
        x = special_x(oracle, state, options, None, torch.float32)
        values, grads = prove("LSQPlus", x, state, options, None, rng, exact=True)
        assert values.min() == oracles.limits(state, options)[0] * 0.25
        assert values.max() == oracles.limits(state, options)[1] * 0.25
        assert grads["offset"].isfinite().all()
        assert grads["offset"] != 0


def test_division_is_true_division():
    """x * (1 / s) gives other codes for x next to a tie; ONNX's QuantizeLinear divides. Here the float32 quotient."""
    differ = 0
    for s in np.linspace(0.05, 0.15, 50, dtype=np.float32):
        x = (np.arange(-300, 300, dtype=np.float32) + np.float32(0.5)) * s
        quotient = np.rint(x / s)
        differ += (np.rint(x * (np.float32(1) / s)) != quotient).sum()
        raw = torch.from_numpy(s.reshape(1))
        for values in (F.lsq(torch.from_numpy(x), raw, -512, 511), F.ste(torch.from_numpy(x), raw, -512, 511)):
            assert np.array_equal(np.rint(values.numpy() / s), quotient)
    assert differ > 1000


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast(name, dtype):
    """Under autocast the results are those without, in the input's dtype, and the scale's gradient is float32."""
    oracle, rng = FUNCTIONS[name], np.random.default_rng(9)
    for options, of in itertools.product(oracle.options, ("float32", dtype)):
        state = new_state(oracle, rng, SHAPE, options, None)
        x = random_x(oracle, rng, SHAPE, state, options, None, DTYPES[of])
        with torch.autocast("cpu", DTYPES[dtype]):
            inside, grads = prove(name, x, state, options, None, rng)
            assert inside.dtype == x.dtype
            assert all(g.dtype == torch.float32 for k, g in grads.items() if k != "x")
        assert torch.equal(call(name, x, tensors(name, state), options, None), inside)


@pytest.mark.parametrize("name", [n for n, o in FUNCTIONS.items() if o.learned])
def test_fp16_gradients_do_not_overflow(name):
    """The largest fp16 gradient everywhere: the scale's gradient, reduced in float32, is finite."""
    oracle = FUNCTIONS[name]
    for options in oracle.options:
        state = new_state(oracle, None, (1 << 14,), options, None)
        x = torch.full((1 << 14,), 60000.0, dtype=torch.float16, requires_grad=True)
        learned = tensors(name, state)
        y = call(name, x, learned, options, None)
        y.backward(torch.full_like(y, 65504.0))
        assert x.grad.dtype == torch.float16
        for key in oracle.learned:
            assert learned[key].grad.dtype == torch.float32
            assert learned[key].grad.isfinite().all()
            if options.get("qmax") != 1:
                assert learned[key].grad.abs() > 65504


# --- properties -------------------------------------------------------------------------------------------------------

finite = st.floats(-1000, 1000, width=32)
vectors = hnp.arrays(np.float32, hnp.array_shapes(max_dims=1, max_side=16), elements=finite)
few = settings(max_examples=25)  # for each Function
step_sizes = st.floats(2.0**-8, 4.0, width=32)


def named(flag: str) -> Any:
    """Parametrize over the Functions of which `flag` is true."""
    return pytest.mark.parametrize("name", [n for n, o in FUNCTIONS.items() if getattr(o, flag)])


@st.composite
def problems(draw: Any, name: str, exact: bool = False) -> tuple[Tensor, dict[str, np.ndarray], dict[str, Any]]:
    """x, state and options of a Function, per tensor; with `exact` on powers of two."""
    oracle = FUNCTIONS[name]
    options = draw(st.sampled_from(oracle.options))
    x = draw(vectors)
    state = new_state(oracle, None, x.shape, options, None)
    for key in state:
        if key in ("scale", "alpha"):
            size = 2.0 ** draw(st.integers(-8, 3)) if exact else draw(step_sizes)
            state[key] = np.array([size], np.float32) * np.float32(options["qmax"] if key == "alpha" else 1)
        elif key == "log2_threshold":
            state[key] = np.array([draw(st.floats(-6, 6, width=32))], np.float32)
        elif key == "offset":
            state[key] = np.array([draw(st.integers(options["qmin"], options["qmax"]))], np.float32)
        elif key == "noise":
            state[key] = draw(hnp.arrays(np.float32, x.shape, elements=st.floats(0, 1, width=32, exclude_max=True)))
    return torch.from_numpy(x), state, options


def quantize(name: str, x: Tensor, state: dict[str, np.ndarray], options: dict[str, Any]) -> Tensor:
    """Values only."""
    return call(name, x, tensors(name, state), options, None).detach()


@named("levels")
@few
@given(data=st.data())
def test_levels(name, data):
    """At most 2^bits different values."""
    x, state, options = data.draw(problems(name))
    # more elements than levels: what was drawn, and the whole range
    x = torch.cat([x, torch.linspace(-1100, 1100, 1501)])
    if "noise" in state:
        state["noise"] = np.resize(state["noise"], x.shape).astype(np.float32)
    assert quantize(name, x, state, options).unique().numel() <= FUNCTIONS[name].levels(options)


@pytest.mark.parametrize("name", ["STE", "LSQ", "PACT", "EWGS", "TQT", "Stochastic", "BinaryActivation", "FP8"])
def test_levels_per_channel(name):
    """... and per channel."""
    oracle, rng = FUNCTIONS[name], np.random.default_rng(10)
    for options, axis in itertools.product(oracle.options, (0, 1)):
        shape = (3, 5000) if axis == 0 else (5000, 3)
        state = new_state(oracle, rng, shape, options, axis)
        x = random_x(oracle, rng, shape, state, options, axis, torch.float32)
        for row in call(name, x, tensors(name, state), options, axis).detach().movedim(axis, 0):
            count, most = row.unique().numel(), oracle.levels(options)
            assert count <= most
            assert name == "FP8" or count == most


@named("idempotent")
@few
@given(data=st.data())
def test_idempotent(name, data):
    """Values are quantized to themselves, or as the table says."""
    oracle = FUNCTIONS[name]
    x, state, options = data.draw(problems(name, exact=name == "Stochastic"))
    once = quantize(name, x, state, options)
    twice = quantize(name, once, state, options)
    if oracle.idempotent == "yes" or name == "Stochastic":  # on powers of two no rounding error is left
        assert torch.equal(once, twice)
    elif "mean" in oracle.idempotent:
        torch.testing.assert_close(once, twice, rtol=1e-5, atol=1e-12)


def test_exceptions_to_idempotence_are_real():
    w = torch.randn(100)
    once = F.dorefa(w, torch.ones(1), 4)
    assert not torch.allclose(once, F.dorefa(once, torch.ones(1), 4))


@named("closed_form")
@few
@given(data=st.data())
def test_monotone(name, data):
    """x <= y gives values in the same order (stochastic: at the same noise)."""
    x, state, options = data.draw(problems(name))
    if "noise" in state:
        state["noise"] = np.full_like(state["noise"], state["noise"].flat[0])
    values = quantize(name, x.sort().values, state, options)
    assert (values.diff() >= 0).all()


@named("half_step")
@few
@given(data=st.data())
def test_error_inside(name, data):
    """At most half a step from x inside the range; less than a step if stochastic."""
    oracle = FUNCTIONS[name]
    x, state, options = data.draw(problems(name))
    step = torch.from_numpy(oracles.steps(state, options))
    low, high = oracles.limits(state, options)
    x = x.double().clamp(low * step, high * step).float()
    error = (quantize(name, x, state, options).double() - x.double()).abs()
    rounding = (x.abs().double() + step) * 2.0**-22
    assert (error <= oracle.half_step * step + rounding).all()
    if name == "Stochastic":
        assert (error < step + rounding).all()


@pytest.mark.parametrize(("name", "relative"), [("float8_e4m3fn", 2**-4), ("float8_e5m2", 2**-3)])
@few
@given(x=hnp.arrays(np.float32, 20, elements=st.floats(2.0**-6, 256, width=32)))
def test_error_of_floats(name, relative, x):
    """Half a unit in the last place."""
    x = torch.from_numpy(x)
    error = (F.fp8(x, torch.ones(1), getattr(torch, name)) - x).abs()
    assert (error <= relative * x).all()


@pytest.mark.parametrize(("dtype", "relative"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@few
@given(x=hnp.arrays(np.float32, 20, elements=st.floats(2.0**-14, 60000, width=32)))
def test_error_of_mixed_precision(dtype, relative, x):
    x = torch.from_numpy(x)
    assert ((F.mixed_precision(x, dtype) - x).abs() <= relative * x).all()


@few
@given(data=st.data())
def test_error_of_dorefa(data):
    """Half a step of the grid from tanh(w) / max|tanh(w)|."""
    x, state, options = data.draw(problems("DoReFa"))
    if not x.count_nonzero():
        return
    t, s = x.double().tanh(), float(state["scale"].item())
    error = (quantize("DoReFa", x, state, options).double() - s * t / t.abs().max()).abs()
    assert (error <= s / (2 ** options["bits"] - 1) * (1 + 1e-4)).all()


@pytest.mark.parametrize("name", FUNCTIONS)
@few
@given(data=st.data())
def test_zero(name, data):
    """Zero is a value of every grid but those of one bit and of DoReFa."""
    x, state, options = data.draw(problems(name))
    x = torch.cat([x, torch.zeros(2), -torch.zeros(1)])
    if "noise" in state:
        state["noise"] = np.resize(state["noise"], x.shape).astype(np.float32)
    zero = quantize(name, x, state, options)[-3:]
    if FUNCTIONS[name].keeps_zero:
        assert (zero == 0).all()
    elif x.count_nonzero():
        assert (zero > 0).all()


@named("blocks")
@few
@given(data=st.data())
def test_no_gradient_outside(name, data):
    """Beyond the range the gradient of x is zero, whatever comes in."""
    x, state, options = data.draw(problems(name))
    low, high = oracles.limits(state, options)
    step = float(oracles.steps(state, options).item())
    if name.startswith("LeanReLU"):
        beyond = -x.abs() - 1e-3
    elif low == 0 or high == 0:
        beyond = torch.where(x < 0, low * step - x.abs() - 1e-3, high * step * 1.001 + x.abs() + 1e-3)
    else:
        beyond = torch.where(x < 0, low * step * 1.001 - x.abs(), high * step * 1.001 + x.abs())
    beyond.requires_grad_()
    values = call(name, beyond, tensors(name, state), options, None)
    (grad,) = torch.autograd.grad(values, beyond, torch.full_like(values, 1e6))
    assert grad.count_nonzero() == 0


@pytest.mark.parametrize("name", [n for n, o in FUNCTIONS.items() if o.scales_with is not None])
@few
@given(data=st.data(), k=st.integers(-10, 10))
def test_power_of_two_equivariance(name, data, k):
    """q(2^k x, 2^k s) = 2^k q(x, s), exactly."""
    oracle = FUNCTIONS[name]
    x, state, options = data.draw(problems(name))
    x = torch.where(x.abs() < 1e-3, 0.0, x)  # a format's subnormal numbers have a fixed step
    assume(name != "Binary" or x.count_nonzero())  # the floor of a scale has a fixed size
    if name in ("MixedPrecision", "FP8"):
        x = x.clamp(-30.0, 30.0)
    if options.get("format") == "float16":
        x, k = torch.where(x.abs() < 1, x.sign(), x), abs(k) % 6
    factor = np.float32(2.0**k)
    scaled = {
        key: (v + np.float32(k) if key == "log2_threshold" else v * factor) if key in oracle.scales_with else v
        for key, v in state.items()
    }
    if "log2_threshold" in state:
        whole = np.floor(state["log2_threshold"] * 4) / 4  # so that adding k rounds nothing
        state, scaled = {"log2_threshold": whole}, {"log2_threshold": whole + np.float32(k)}
    assert torch.equal(
        quantize(name, x * factor.item(), scaled, options), quantize(name, x, state, options) * factor.item()
    )


@few
@given(x=hnp.arrays(np.float32, 20, elements=st.floats(-30, 30, width=32)), k=st.integers(-3, 3))
def test_odd(x, k):
    """A symmetric range treats x and -x alike, in values and gradients."""
    x = torch.cat([torch.from_numpy(x), torch.tensor([7.0, 3.5, 0.5]) * 2.0**k])
    step = torch.tensor([2.0**k])
    for name in ("STE", "LSQ", "EWGS", "PACT"):
        options = {"qmin": -7, "qmax": 7, "gain": 1.0, "delta": 0.0, "lean": True}
        found = []
        for sign in (1.0, -1.0):
            leaf = (sign * x).requires_grad_()
            raw = (step * (7 if name == "PACT" else 1)).requires_grad_()
            values = call(name, leaf, {"scale": raw, "alpha": raw}, options, None)
            grads = torch.autograd.grad(values, (leaf, raw), torch.full_like(leaf, sign), allow_unused=True)
            found.append((values * sign, grads[0] * sign, grads[1] if grads[1] is not None else torch.zeros(1)))
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b), name


def test_stochastic_rounding_is_unbiased():
    """Inside the range the mean over draws is x, to 4 standard errors and one draw."""
    x = torch.linspace(-2.0, 1.0, 61)
    draws = 20000
    mean = F.stochastic(x.expand(draws, -1), torch.tensor([0.3]), -8, 7).double().mean(0)
    v = x.double() / 0.3
    fraction = v - v.floor()
    error = 0.3 * (fraction * (1 - fraction) / draws).sqrt()
    assert ((mean - x.double()).abs() <= 4 * error + 0.3 / draws).all()


# --- independent implementations --------------------------------------------------------------------------------------


def away_from_the_ends(x: Tensor, step: Tensor, low: float, high: float) -> Tensor:
    """x without what lies up to a step beyond an end: torch's ops mask on the rounded value and let half of it pass."""
    v = x / step
    return torch.where(((v > high) & (v < high + 1)) | ((v < low) & (v > low - 1)), torch.zeros(()), x)


@pytest.mark.parametrize(("qmin", "qmax"), [(-128, 127), (-8, 7), (-2, 1), (0, 255), (0, 15)])
@pytest.mark.parametrize("z", [0, 3])
def test_torch_learnable_per_tensor(qmin, qmax, z):
    """torch's own learnable op: values and all gradients of LSQ and LSQ+, on powers of two (it multiplies by 1 / s)."""
    z = z if qmin == 0 else 0
    for k in (-4, -2, 0, 3):
        step = 2.0**k
        x = torch.cat([torch.randn(2000) * qmax, torch.arange(qmin - z, qmax - z + 1) * 1.0]) * step
        x = away_from_the_ends(x, torch.tensor(step), qmin - z, qmax - z)
        g = torch.from_numpy(dyadic(np.random.default_rng(k + 10), x.shape)).float()
        leaves = [
            [x.clone().requires_grad_(), torch.tensor([step], requires_grad=True), torch.tensor([z * 1.0])]
            for _ in range(2)
        ]
        for _, _, offset in leaves:
            offset.requires_grad_()
        ours = (
            F.lsq_plus(*leaves[0], qmin, qmax, gain=0.5)
            if qmin == 0
            else F.lsq(leaves[0][0], leaves[0][1], qmin, qmax, gain=0.5)
        )
        theirs = torch._fake_quantize_learnable_per_tensor_affine(*leaves[1], qmin, qmax, 0.5)
        assert torch.equal(ours, theirs)
        ours.backward(g), theirs.backward(g)
        size = g.abs().sum() * qmax * 0.5
        for mine, torchs, slack in zip(*leaves, (0.0, 0.5 / 504 * g.abs().sum(), 0.0), strict=True):
            if mine.grad is not None:
                limit = 0.0 if mine.numel() > 1 else float(slack if qmin == 0 else 0) + float(size) * 2.0**-20
                assert (mine.grad - torchs.grad).abs().max() <= limit


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_torch_learnable_per_channel(axis):
    x = torch.randn(4, 3, 6) * 5
    channels = x.shape[axis]
    scale = 2.0 ** -torch.arange(channels).float()
    x = away_from_the_ends(x, torch.from_numpy(along(scale.numpy(), 3, axis)), -8, 7)
    g = torch.randn(4, 3, 6)
    found = []
    for theirs in (False, True):
        leaf, s = x.clone().requires_grad_(), scale.clone().requires_grad_()
        if theirs:
            y = torch._fake_quantize_learnable_per_channel_affine(leaf, s, torch.zeros(channels), axis % 3, -8, 7, 0.25)
        else:
            y = F.lsq(leaf, s, -8, 7, axis, 0.25)
        y.backward(g)
        found.append((y.detach(), leaf.grad, s.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("qmin", "qmax"), [(-128, 127), (-7, 7), (0, 255)])
def test_torch_fake_quantize(qmin, qmax):
    """torch.fake_quantize_per_tensor_affine: the values of STE, ties included, on powers of two."""
    for k in (-6, -1, 0, 2):
        v = torch.cat([torch.randn(3000) * qmax, torch.arange(2 * qmin - 5, 2 * qmax + 5) / 2])
        x = v * 2.0**k
        mine, theirs = away_from_the_ends(x, torch.tensor(2.0**k), qmin, qmax), None
        mine, theirs = mine.clone().requires_grad_(), mine.clone().requires_grad_()
        a = F.ste(mine, torch.tensor([2.0**k]), qmin, qmax)
        b = torch.fake_quantize_per_tensor_affine(theirs, 2.0**k, 0, qmin, qmax)
        assert torch.equal(a, b)
        a.sum().backward(), b.sum().backward()
        assert torch.equal(mine.grad, theirs.grad)
        assert torch.equal(
            F.ste(x, torch.tensor([2.0**k]), qmin, qmax),
            torch.fake_quantize_per_tensor_affine(x, 2.0**k, 0, qmin, qmax),
        )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_fp8_number(dtype):
    """All 256 bytes are values of themselves, and torch's cast agrees on everything that does not overflow."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    one = torch.ones(1)
    assert torch.equal(F.fp8(numbers, one, dtype), numbers)
    between = torch.cat([(numbers[:, None] + numbers * f).flatten() for f in (1e-3, 0.1, 0.5)])
    between = between.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    assert torch.equal(F.fp8(between, one, dtype), between.to(dtype).float())


def test_torch_relu():
    for inplace in (False, True):
        x = torch.tensor([-math.inf, -1.0, -0.0, 0.0, 1e-45, 2.0, math.inf, math.nan], dtype=torch.float64)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        a, b = F.relu(mine.clone(), inplace), torch.relu(theirs)
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        a.sum().backward(), b.sum().backward()
        assert torch.equal(mine.grad, theirs.grad)


def test_relu_gradcheck():
    x = (torch.randn(20, dtype=torch.float64).sign() + torch.rand(20, dtype=torch.float64) / 2).requires_grad_()
    assert torch.autograd.gradcheck(F.relu, x)
    assert torch.autograd.gradcheck(lambda t: F.relu(t.clone(), inplace=True), x)


def test_dorefa_gradient_by_autograd():
    """tanh and max differentiated by torch, rounding passed: also where several weights share the maximum."""
    for w in (torch.randn(50), torch.tensor([0.5, -0.5, 0.25, 0.5]), torch.tensor([2.0])):
        mine, theirs = w.clone().requires_grad_(), w.double().requires_grad_()
        g = torch.randn(w.shape)
        F.dorefa(mine, torch.tensor([0.7]), 4).backward(g)
        t = theirs.tanh()
        (float(torch.tensor(0.7)) * t / t.abs().max()).backward(g.double())
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_published_numbers():
    """Worked by hand from the papers' formulas: they hold for the oracles' author as well."""
    # PACT, eq. 2: 2 bits and alpha = 3 give the levels 0, 1, 2, 3
    assert F.pact(torch.tensor([-1.0, 0.4, 1.6, 7.0]), torch.tensor([3.0]), 0, 3).tolist() == [0.0, 0.0, 2.0, 3.0]
    # Micikevicius 2022, table 1
    least = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}
    most = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
    for dtype in least:
        assert F.fp8(torch.tensor([1e9, least[dtype]]), torch.ones(1), dtype).tolist() == [most[dtype], least[dtype]]
    # DoReFa, eq. 9, 2 bits: the levels are -1, -1/3, 1/3, 1
    levels = F.dorefa(torch.linspace(-3, 3, 99), torch.ones(1), 2).unique()
    torch.testing.assert_close(levels, torch.tensor([-1.0, -1 / 3, 1 / 3, 1.0]))
    # XNOR-Net eq. 6 and TWN eqs. 5-6: means of |w|
    w = torch.tensor([-0.3, 0.1, 0.2, -1.0])
    assert F.binary(w).abs().unique().item() == pytest.approx(0.4)
    assert F.ternary(w).tolist() == pytest.approx([-0.65, 0.0, 0.0, -0.65]) or F.ternary(w).tolist() == pytest.approx(
        [0.0, 0.0, 0.0, -1.0]
    )


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calling_instead_of_applying(name):
    with pytest.raises(QatError, match=rf"^{name} is an autograd Function: write {name}\.apply") as caught:
        getattr(F, name)(torch.ones(3))
    assert "\n" not in str(caught.value)


BAD = {
    "no tensor": ("x", [1.0, 2.0], "must be a tensor; got list"),
    "integers": ("x", torch.ones(4, 3, dtype=torch.int64), "must be a floating tensor; got torch.int64"),
    "None": ("x", None, "must be a tensor; got NoneType"),
    "double scale": ("scale", torch.ones(1, dtype=torch.float64), "must be float32"),
    "half scale": ("scale", torch.ones(1, dtype=torch.float16), "must be float32"),
    "integer scale": ("scale", torch.ones(1, dtype=torch.int32), "must be a floating tensor"),
    "number as scale": ("scale", 0.5, "must be a tensor; got float"),
    "two scales": ("scale", torch.ones(2), "1 element"),
    "no scale": ("scale", torch.ones(0), "1 element"),
    "positive qmin": ("qmin", 1, "qmin <= 0 < qmax, got qmin=1"),
    "no codes": ("qmax", 0, "qmin <= 0 < qmax"),
    "noise of another shape": ("noise", torch.rand(3), "noise must have x's shape"),
    "no noise": ("noise", 0.5, "noise must be a tensor"),
    "offset of another dtype": ("offset", torch.zeros(1, dtype=torch.float64), "offset must be float32"),
    "two offsets": ("offset", torch.zeros(2), "1 element"),
    "number as offset": ("offset", 1.0, "offset must be a tensor"),
    "1 bit": ("bits", 1, "bits must be 2..8; got 1"),
    "another dtype": ("dtype", torch.float32, "dtype must be"),
    "axis too large": ("axis", 2, "axis must be a dimension of x, -2 to 1; got 2"),
    "axis too small": ("axis", -3, "axis must be a dimension of x, -2 to 1; got -3"),
    "one scale for an axis": ("axis", 0, r"must have shape \(4,\), one per channel of axis 0; got \(1,\)"),
}


NAMES = {"PACT": "alpha", "TQT": "log2_threshold"}
"""What takes the place of `scale`."""


def bad_calls() -> list:
    """Each wrong argument of each Function that has it."""
    found = []
    for name, oracle in FUNCTIONS.items():
        for wrong, (argument, value, message) in BAD.items():
            argument = NAMES.get(name, argument) if argument == "scale" else argument
            scaled = {"scale", "alpha", "log2_threshold"} & set(oracle.arguments)
            if argument in oracle.arguments and (wrong != "one scale for an axis" or scaled):
                found.append(pytest.param(name, argument, value, message, id=f"{name}-{wrong}"))
    return found


@pytest.mark.parametrize(("name", "argument", "value", "message"), bad_calls())
def test_errors(name, argument, value, message):
    """One line that names the Function and says what was expected and what came."""
    oracle = FUNCTIONS[name]
    options = oracle.options[0]
    present: dict[str, Any] = {"x": torch.randn(4, 3), "axis": None, **options}
    present |= tensors(name, new_state(oracle, None, (4, 3), options, None))
    if "format" in options:
        present["dtype"] = getattr(torch, options["format"])
    present[argument] = value
    with pytest.raises(QatError, match=message) as caught:
        getattr(F, name).apply(*(present[a] for a in oracle.arguments))
    assert str(caught.value).startswith(f"{name}: ")
    assert "\n" not in str(caught.value)
