"""`kernels/reference.py`, the specification: against NumPy in float64, and what a byte in place of a float costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracles import FUNCTIONS, along

import qat.functional as F
from qat import kernels
from qat.kernels import ABOVE, BELOW, NAN, SCALE_FLOOR, STEPS

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NEVER = math.nan


# --- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "used", "sign"),
    [
        (0.5, 0.5, 1),
        (-0.5, 0.5, -1),
        (0.0, SCALE_FLOOR, 1),
        (-0.0, SCALE_FLOOR, 1),
        (1e-40, SCALE_FLOOR, 1),
        (-1e-40, SCALE_FLOOR, -1),
        (SCALE_FLOOR / 2, SCALE_FLOOR, 1),
        (-SCALE_FLOOR / 2, SCALE_FLOOR, -1),
        (SCALE_FLOOR, SCALE_FLOOR, 1),
        (math.inf, math.inf, 1),
        (math.nan, math.nan, 1),
    ],
)
def test_positive(raw, used, sign):
    """Absolute value, floored; the gradient has the raw sign everywhere, so that it lives at the floor too."""
    scale = torch.tensor([raw])
    assert kernels.positive(scale).tolist() == pytest.approx([used], nan_ok=True, rel=0, abs=0)
    assert kernels.positive_grad(torch.tensor([3.0]), scale).tolist() == [3.0 * sign]


def test_floor():
    """The product of two floors, as in a bias grid, is a normal float32."""
    floor = torch.tensor(SCALE_FLOOR)
    assert floor * floor >= torch.finfo(torch.float32).smallest_normal
    assert kernels.positive(torch.tensor([1.0], dtype=torch.float16)).dtype == torch.float32


@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1, -3])
def test_sharing(axis):
    """`broadcast` hands a scale to its elements, `reduce_to_scale` is its adjoint and gives the scale's shape back."""
    t = torch.randn(4, 3, 5)
    for scale in [torch.randn(1), torch.randn(())] if axis is None else [torch.randn(t.shape[axis])]:
        spread = kernels.broadcast(scale, 3, axis)
        assert torch.equal(
            spread.expand(t.shape).double(), torch.from_numpy(along(scale.double().numpy(), 3, axis)) + 0 * t
        )
        total = kernels.reduce_to_scale(t, scale, axis)
        assert total.shape == scale.shape
        torch.testing.assert_close((spread * t).sum(), (scale * total).sum())


def test_reduce_vectors_and_scalars():
    assert kernels.reduce_to_scale(torch.tensor([1.0, 2.0]), torch.ones(2), 0).tolist() == [1.0, 2.0]
    assert kernels.reduce_to_scale(torch.tensor(3.0), torch.ones(1), None).tolist() == [3.0]
    assert kernels.reduce_to_scale(torch.zeros(0), torch.ones(1), None).tolist() == [0.0]


# --- encode and decode ------------------------------------------------------------------------------------------------

# x / scale, codes on -2..3, residue: 252 (codes - x / scale), or where it lies
TABLE = [
    (-1e30, -2, BELOW),
    (-math.inf, -2, BELOW),
    (-2.5, -2, BELOW),
    (-2.0625, -2, BELOW),
    (-2.0, -2, 0),
    (-1.75, -2, -63),
    (-1.5, -2, -126),
    (-0.5, 0, 126),
    (-0.25, 0, 63),
    (-0.0, 0, 0),
    (0.0, 0, 0),
    (1e-40, 0, 0),
    (0.5, 0, -126),
    (0.75, 1, 63),
    (1.5, 2, 126),
    (2.0, 2, 0),
    (2.5, 2, -126),
    (2.75, 3, 63),
    (3.0, 3, 0),
    (3.0625, 3, ABOVE),
    (3.5, 3, ABOVE),
    (1e30, 3, ABOVE),
    (math.inf, 3, ABOVE),
    (math.nan, NEVER, NAN),
]


def test_marks():
    """The marks are bytes that no residue inside the range can be."""
    assert len({BELOW, ABOVE, NAN}) == 3
    assert all(-128 <= mark <= 127 and abs(mark) > STEPS / 2 for mark in (BELOW, ABOVE, NAN))
    assert STEPS / 2 == 126


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", ["numbers", "tensors"])
@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_encode(scale, bounds, dtype):
    """The table, at several scales and in every dtype that holds its x."""
    v, codes, residue = (torch.tensor(column, dtype=torch.float64) for column in zip(*TABLE, strict=True))
    x = (v * scale).to(dtype)
    held = (x.double() == v * scale) | v.isnan()
    assert held.sum() >= 20
    low, high = (-2, 3) if bounds == "numbers" else (torch.tensor(-2.0), torch.tensor(3.0))
    got, byte = kernels.encode(x, torch.tensor([scale]), low, high, None, lean=True)
    assert got.dtype == torch.float32
    assert byte.dtype == torch.int8
    assert torch.equal(got[held].nan_to_num(99), codes[held].float().nan_to_num(99))
    assert torch.equal(byte[held], residue[held].to(torch.int8))
    same, none = kernels.encode(x, torch.tensor([scale]), low, high, None)
    assert torch.equal(same.nan_to_num(99), got.nan_to_num(99))
    assert none is None


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_encode_per_channel(axis):
    x = torch.randn(4, 3, 5)
    scale = torch.rand(1 if axis is None else x.shape[axis]) + 0.1
    codes, _ = kernels.encode(x, scale, -8, 7, axis)
    s = along(scale.numpy(), 3, axis)
    assert np.array_equal(codes.numpy(), np.clip(np.rint(x.numpy() / s), -8, 7))
    assert np.array_equal(kernels.decode(codes, scale, axis).numpy(), codes.numpy() * s)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_decode_integers(dtype):
    values = kernels.decode(torch.tensor([0, 1, 100], dtype=dtype), torch.tensor([0.25]), None)
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0, 0.25, 25.0]


def test_inputs_are_left_alone():
    x, scale, g = torch.randn(3, 4), torch.rand(3) + 0.1, torch.randn(3, 4)
    before = [t.clone() for t in (x, scale, g)]
    codes, residue = kernels.encode(x, scale, -8, 7, 0, lean=True)
    kernels.decode(codes, scale, 0)
    kernels.lsq_grad(g, residue, scale, -8, 7, 0, (True, True))
    kernels.lsq_grad_exact(g, x, scale, -8, 7, 0, (True, True))
    kernels.positive(scale), kernels.positive_grad(g, x)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, scale, g), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_round_dtype(dtype):
    x = torch.tensor([1.0, 1 + 2**-12, 1e-30, 1e30, math.nan, -0.0])
    rounded = kernels.round_dtype(x, dtype)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded.nan_to_num(7), x.to(dtype).float().nan_to_num(7))


# --- gradients --------------------------------------------------------------------------------------------------------


def test_gradients_of_the_table():
    """Both gradients from the residue and from x itself, element by element."""
    v, codes, residue = (torch.tensor(column, dtype=torch.float64) for column in zip(*TABLE, strict=True))
    n = len(v)
    g = torch.linspace(-2, 3, n)
    inside = (v >= -2) & (v <= 3)
    grad_x = torch.where(v.isnan(), torch.nan, torch.where(inside, g, 0.0))
    slope = torch.where(inside, codes - v, codes)  # the code of a saturated element is its end
    scale = torch.ones(n)
    byte = residue.to(torch.int8)
    x = v.float()
    for gx, gs in (
        kernels.lsq_grad(g, byte, scale, -2, 3, 0, (True, True)),
        kernels.lsq_grad_exact(g, x, scale, -2, 3, 0, (True, True)),
        kernels.lsq_grad(g, byte, scale, torch.tensor(-2.0), torch.tensor(3.0), 0, (True, True)),
    ):
        assert torch.equal(gx.nan_to_num(99), grad_x.float().nan_to_num(99))
        torch.testing.assert_close(gs, (slope * g).float(), equal_nan=True, rtol=0, atol=1e-6)
    assert torch.equal(kernels.ste_grad(g, byte).nan_to_num(99), grad_x.float().nan_to_num(99))


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (False, False)])
def test_needs(needs):
    """What is not needed is not computed."""
    x, g, scale = torch.randn(10), torch.randn(10), torch.ones(1)
    _, residue = kernels.encode(x, scale, -2, 1, None, lean=True)
    for grads in (
        kernels.lsq_grad(g, residue, scale, -2, 1, None, needs),
        kernels.lsq_grad_exact(g, x, scale, -2, 1, None, needs),
    ):
        assert tuple(grad is not None for grad in grads) == needs


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_float32(dtype):
    x, g, scale = torch.randn(10).to(dtype), torch.randn(10).to(dtype), torch.ones(1)
    _, residue = kernels.encode(x, scale, -2, 1, None, lean=True)
    both = (True, True)
    grads = [*kernels.lsq_grad(g, residue, scale, -2, 1, None, both)]
    grads += kernels.lsq_grad_exact(g, x, scale, -2, 1, None, both)
    assert all(grad.dtype == torch.float32 for grad in grads)


# --- a byte in place of a float ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipped", [False, True])
def test_lean_gradients(clipped):
    """The gradient of x is the same bit for bit; that of the scale is within 1/504 per element, and unbiased.

    100 draws, as 100 channels: RMS error at most 0.5 % of the RMS gradient (with nothing clipped it should be 1/252).
    """
    draws, n, qmin, qmax = 100, 4096, -8, 7
    x, g = torch.randn(draws, n).clamp(-3.5, 3.5), torch.randn(draws, n)
    scale = (torch.rand(draws) * 0.1 + (0.2 if clipped else 0.5)).requires_grad_()
    x.requires_grad_()
    inside = ((x / scale[:, None]) >= qmin) & ((x / scale[:, None]) <= qmax)
    assert 0.01 < (~inside).float().mean() < 0.3 if clipped else inside.all()
    (y0, gx0, gs0), (y1, gx1, gs1) = (
        (y, *torch.autograd.grad(y, (x, scale), g))
        for y in (F.lsq(x, scale, qmin, qmax, axis=0, lean=lean) for lean in (False, True))
    )
    assert torch.equal(y0, y1)
    assert torch.equal(gx0, gx1)
    error, size = (gs1 - gs0).double(), gs0.double()
    assert (error.abs() <= (g.abs() * inside).sum(1) / 504).all()
    ratio = (error.square().mean() / size.square().mean()).sqrt()
    assert ratio <= 0.005
    assert clipped or ratio > 0.003
    assert error.mean().abs() <= 3 * error.std() / math.sqrt(draws)


@pytest.mark.parametrize("name", ["LSQ", "EWGS", "TQT", "Stochastic"])
def test_residue_worst_case(name):
    """One element per scale: a slope is off by at most half a step of the byte; it is reached, in both senses."""
    n, steps = 4001, 126 if name == "Stochastic" else 252
    x = torch.linspace(0.01, 2.99, n)
    noise = torch.full((n,), 0.5)
    raw = torch.full((n,), 2.0 if name == "TQT" else 1.0, requires_grad=True)  # a step of 1 on the codes 0..3
    given = {"x": x, "scale": raw, "log2_threshold": raw, "noise": noise, "qmin": 0, "qmax": 3, "axis": 0}
    given |= {"gain": 1.0, "lean": True, "delta": 0.0}
    getattr(F, name).apply(*(given[a] for a in FUNCTIONS[name].arguments))[0].sum().backward()
    slope = raw.grad / (math.log(2) if name == "TQT" else 1.0)
    codes = x.floor() + (noise < x - x.floor()) if name == "Stochastic" else x.round()
    error = (slope - (codes - x)).double()
    assert error.abs().max() <= 0.5 / steps + 1e-6
    assert error.max() >= 0.49 / steps
    assert error.min() <= -0.49 / steps
    assert error.mean().abs() <= 0.02 / steps
