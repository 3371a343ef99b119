"""Every quantizer: its code range, Function, gradient scale, initial scale, deployed codes and state.

Parametrized by `oracles.METHODS`: a new method is tested by an entry there.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from oracles import FLOOR, FUNCTIONS, Role
from torch import Tensor

from qat import kernels
from qat.config import QatError
from qat.quantizers import METHODS, FP8Quantizer, MixedPrecisionQuantizer, Observer, Quantizer

AnyQuantizer = Quantizer | MixedPrecisionQuantizer


def role_of(method: str, weight: bool) -> Role:
    """The oracle of a method's weights or activations."""
    return oracles.METHODS[method].weight if weight else oracles.METHODS[method].activation


def kinds(learned: bool = False, scaled: bool = True, integer: bool = False) -> list:
    """(method, weight) as test parameters: those that learn, have a scale, have integer codes."""
    return [
        pytest.param(method, weight, id=f"{method}-{'weight' if weight else 'activation'}")
        for method in oracles.METHODS
        for weight in (True, False)
        if not (learned and not role_of(method, weight).learns)
        and not (scaled and method == "mixed_precision")
        and not (integer and not role_of(method, weight).integer)
    ]


every = pytest.mark.parametrize(("method", "weight"), kinds())
learning = pytest.mark.parametrize(("method", "weight"), kinds(learned=True))
deployed = pytest.mark.parametrize(("method", "weight"), kinds(integer=True))


def make(method: str, weight: bool, bits: int, dtype: torch.dtype = torch.float8_e4m3fn, **arguments: Any) -> Any:
    """A quantizer that is not calibrated."""
    arguments = {"weight": weight, "name": "layer.quantizer", **arguments}
    if method == "fp8":
        return FP8Quantizer(dtype, **arguments)
    return METHODS[method][0 if weight else 1](bits, **arguments)


def ready(method: str, weight: bool, bits: int, x: Tensor, signed: bool = True, **arguments: Any) -> Any:
    """A quantizer calibrated for x."""
    q = make(method, weight, bits, **arguments)
    q.calibrate(x if weight else observed(x if signed else x.relu()))
    return q


def observed(x: Tensor) -> Observer:
    """Statistics of one batch."""
    observer = Observer()
    observer.update(x)
    return observer


def signs(role: Role, weight: bool, bits: int) -> list[bool]:
    """Whether tensors can be signed, unsigned or both: one signed bit needs a method of its own."""
    if weight:
        return [True]
    return [False, True] if role.codes(bits, True)[1] > 0 else [False]


def data(weight: bool, signed: bool = True, size: int = 3) -> Tensor:
    """A convolution's weight, or a batch of features."""
    x = torch.randn(6, 4, size, size) * 0.2 if weight else torch.randn(5, 4, 2 * size, 2 * size)
    return x if signed else x.relu()


def granularities(method: str, weight: bool, size: int = 3) -> list[dict[str, Any]]:
    """Per tensor, per channel and per group, as far as a method has them; for `data` of that size."""
    if not weight:
        return [{}]
    if method in ("pact", "dorefa"):
        return [{}]  # DoReFa: one scale by definition
    return [{}, {"axis": 0, "channels": 6}, {"axis": 0, "channels": 24, "group": size**2}]


def rows_of(x: Tensor, how: dict[str, Any]) -> np.ndarray:
    """float64, one row per scale."""
    rows = 1 if not how else how["channels"]
    return x.detach().double().reshape(rows, -1).numpy()


def grads_of(q: AnyQuantizer) -> list[Tensor]:
    """Of everything that is learned."""
    return [p.grad for p in q.parameters() if p.requires_grad]


def some(bits: range) -> list[int]:
    """The fewest, 4 if they are among them, and the most."""
    return sorted({bits[0], bits[-1], *({4} & set(bits))})


# --- grid -------------------------------------------------------------------------------------------------------------


@every
def test_code_range(method, weight):
    """Narrow weights from 3 bits on, all four codes at 2; activations two's complement or unsigned."""
    role = role_of(method, weight)
    assert make(method, weight, role.bits[0]).allowed_bits == role.bits
    if method == "fp8":
        return
    for bits in role.bits:
        for signed in signs(role, weight, bits):
            q = ready(method, weight, bits, data(weight), signed)
            assert (q.qmin, q.qmax) == role.codes(bits, signed)
            assert q.is_signed == bool(q.signed) == signed
            assert q.integer == (bits <= role.integer)


@pytest.mark.parametrize(
    ("method", "weight", "bits", "expected"),
    [
        ("lsq", True, 2, (-2, 1)),
        ("lsq", True, 3, (-3, 3)),
        ("lsq", True, 4, (-7, 7)),
        ("lsq", True, 8, (-127, 127)),
        ("lsq", False, 2, (-2, 1)),
        ("lsq", False, 8, (-128, 127)),
        ("lsq_plus", False, 1, (0, 1)),
        ("lsq_plus", False, 8, (0, 255)),
        ("pact", False, 8, (-127, 127)),
        ("dorefa", True, 2, (-3, 3)),
        ("binary", True, 1, (-1, 1)),
        ("ternary", True, 2, (-1, 1)),
    ],
)
def test_code_range_in_numbers(method, weight, bits, expected):
    q = ready(method, weight, bits, data(weight))
    assert (q.qmin, q.qmax) == expected


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("method", "weight"), kinds())
def test_number_of_levels(method, weight, signed):
    """At most 2^bits values are used, and all of them by data that reaches everywhere."""
    role = role_of(method, weight)
    for bits in role.bits:
        if signed not in signs(role, weight, bits) or method == "fp8":
            continue
        q = ready(method, weight, bits, data(weight), signed)
        x = torch.linspace(-1.5, 1.5, 4001) * float(q.step.max()) * max(-q.qmin, q.qmax)
        if method in ("binary", "ternary"):
            most = 3 if method == "ternary" and weight else 2**bits
        elif method == "tqt" or not weight:
            most = q.qmax - q.qmin + 1
        else:
            most = 2**bits if bits == 2 or method in ("pact", "dorefa") else 2**bits - 1
        if method == "lsq_plus" and not weight:
            x = torch.linspace(-300, 300, 6001) * float(q.step)
        assert q.eval()(x).unique().numel() == most


@pytest.mark.parametrize(("method", "weight"), kinds(scaled=False))
def test_other_bits_are_refused(method, weight):
    role = role_of(method, weight)
    if method == "mixed_precision":
        assert MixedPrecisionQuantizer(torch.bfloat16).bits in role.bits
        return
    q = ready(method, weight, role.bits[-1], data(weight))
    for bits in {0, 1, 2, 8, 9, 16} - set(role.bits):
        with pytest.raises(QatError, match=f"{q.method} has .* bits; got {bits}$"):
            q.set_bits(bits)


def test_one_signed_bit_is_refused_by_name():
    """PACT and DoReFa have no one-bit codes for signed tensors: calibration says so, and for which layer."""
    for method in ("pact", "dorefa"):
        q = make(method, False, 1)
        with pytest.raises(QatError, match=rf"^layer\.quantizer: {method} has no signed codes of 1 bit") as caught:
            q.calibrate(observed(torch.randn(100)))
        assert "\n" not in str(caught.value)
        assert not q.is_calibrated
        assert not q.is_signed
        q.calibrate(observed(torch.rand(100)))
        assert q(torch.rand(100)).unique().numel() == 2


# --- forward and backward against the closed forms --------------------------------------------------------------------


def closed_form(
    method: str, q: Any, x: Tensor, g: np.ndarray, bits: int, how: dict[str, Any], signed: bool, noise: Any = None
) -> tuple[oracles.Result, str]:
    """What the papers say of a quantizer with this raw state; and the name of its Function."""
    role = role_of(method, q.weight)
    name = role.functions[signed]
    name = role.evaluation if role.evaluation and not q.training else name
    qmin, qmax = role.codes(bits, signed)
    rows = x.reshape(-1, how["group"]) if "group" in how else x
    n = rows.numel() / q.raw.numel() if q.weight else x[0].numel()
    options: dict[str, Any] = {"qmin": qmin, "qmax": qmax, "bits": bits, "axis": how.get("axis"), "delta": 1e-3}
    options |= {"gain": 1 / math.sqrt(n * qmax) if role.gain else 1.0, "lean": not q.weight}
    options |= {"format": "float8_e4m3fn"}
    state = {key: p.detach().double().numpy() for key, p in q.named_parameters()}
    seen = rows.detach().float().double().numpy()
    options["noise"] = None if noise is None else noise.reshape(seen.shape)
    return FUNCTIONS[name].closed_form(seen, g.reshape(seen.shape), **state, **options), name


@every
def test_forward_and_backward(method, weight, monkeypatch):
    """Values and all gradients, for all bits, both signs and every granularity: range, gain and sharing are right."""
    role, rng = role_of(method, weight), np.random.default_rng(0)
    for bits in role.bits:
        for signed, how in [(s, h) for s in signs(role, weight, bits) for h in granularities(method, weight)]:
            x = data(weight, signed)
            q = ready(method, weight, bits, x, signed, **how)
            with torch.no_grad():
                q.raw.mul_(
                    -0.7 if method != "tqt" and not weight else 0.7
                )  # off the initial one, some beyond the range
            g = rng.choice([-1.0, -0.5, 0.25, 0.75], tuple(x.shape))
            noise = torch.rand((x.numel() // how["group"], how["group"]) if "group" in how else x.shape)
            monkeypatch.setattr(torch, "rand_like", lambda *_, noise=noise, **__: noise)
            for training in (True, False):
                q.train(training)
                x, shape = x.detach().requires_grad_(), x.shape
                expected, name = closed_form(method, q, x, g, bits, how, signed, noise.double().numpy())
                skip = oracles.undecided(expected, {}, {"bits": bits})
                g = np.where(np.broadcast_to(skip, expected.values.shape).reshape(shape), 0.0, g)
                expected, _ = closed_form(method, q, x, g, bits, how, signed, noise.double().numpy())
                q.zero_grad()
                values = q(x)
                values.backward(torch.from_numpy(g).float())
                found = {"x": x.grad.double().numpy().reshape(expected.values.shape)}
                found |= {k: getattr(q, k).grad.double().numpy() for k in FUNCTIONS[name].learned}
                x.grad = None
                oracles.assert_result(
                    expected,
                    values.detach().double().numpy().reshape(expected.values.shape),
                    found,
                    "float32",
                    oracle=FUNCTIONS[name],
                    skip=np.broadcast_to(skip, expected.values.shape),
                )
                assert all(p.grad is None for k, p in q.named_parameters() if k not in found)


@learning
def test_gain_leaves_the_batch_out(method, weight):
    """A mean loss moves an activation's scale alike at every batch size; a weight's N counts what shares one scale."""
    role = role_of(method, weight)
    if weight:
        one, many = make(method, True, 4), make(method, True, 4, channels=6, axis=0)
        w = data(True)
        assert one.gain(w) == pytest.approx(1 / math.sqrt(216 * 7))
        assert many.gain(w) == pytest.approx(1 / math.sqrt(36 * 7))
        return
    x = data(False)
    q = ready(method, False, role.bits[-1], x)
    moved = []
    for batch in (x, x.repeat(4, 1, 1, 1)):
        q.zero_grad()
        (q.eval()(batch).square().sum() / batch.shape[0]).backward()
        moved.append(torch.cat([g.reshape(-1) for g in grads_of(q)]))
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-5)


# --- initial scales ---------------------------------------------------------------------------------------------------


@every
def test_initial_step(method, weight):
    """The formula of the paper; where the step is searched, the squared error of the best of 150 steps, nearly."""
    role = role_of(method, weight)
    for bits in role.bits:
        for signed, how in [(s, h) for s in signs(role, weight, bits) for h in granularities(method, weight, 13)]:
            x = data(weight, signed, 13)
            q = ready(method, weight, bits, x, signed, **how)
            rows = rows_of(x, how)
            low, high = role.codes(bits, signed)
            step = q.step.double().numpy()
            if method == "fp8":
                np.testing.assert_allclose(step, np.abs(rows).max(1) / 448, rtol=2.0**-11)
            elif role.step is None:
                continue  # LSQ+: its own test
            elif role.searched(bits, signed):
                if "group" in how or bits in (5, 7):
                    continue
                least = oracles.squared_error(rows, oracles.least_squares_step(rows, low, high, bits), low, high)
                ratio = oracles.squared_error(rows, step, low, high) / least
                assert ratio.mean() <= (1.01 if bits <= 4 else 1.05)
                assert ratio.max() <= (1.03 if bits <= 4 else 1.3)  # single values decide
            elif method == "tqt":
                assert (np.log2(step) % 1 == 0).all()
                ratio = step / oracles.least_squares_step(rows, low, high, bits)
                assert (np.abs(np.log2(ratio)) <= 0.6).all()
            else:
                expected = role.step(rows, low, high, bits)
                # A histogram of 4096 bins stands for an activation. DoReFa: a weight may lie next to a tie.
                rtol = 2.0**-8 if not weight or method in ("pact", "dorefa") else 1e-5
                np.testing.assert_allclose(step, expected, rtol=rtol)


@pytest.mark.parametrize("init", ["lsq", "minmax", "percentile", "mse"])
def test_initialisers(init):
    """The four that can be asked for, per channel, against NumPy; of many weights, the search looks at some."""
    w = torch.randn(3, 12000 if init == "percentile" else 4608)
    rows, magnitudes = w.double().numpy(), w.abs().double().numpy()
    for bits, high in ((4, 7), (8, 127)):
        q = make("lsq", True, bits, axis=0, channels=3, init=init)
        q.calibrate(w)
        step = q.step.double().numpy()
        if init == "lsq":
            np.testing.assert_allclose(step, 2 * magnitudes.mean(1) / math.sqrt(high), rtol=1e-5)
        elif init == "minmax":
            np.testing.assert_allclose(step, magnitudes.max(1) / high, rtol=1e-6)
        elif init == "percentile":
            expected = np.quantile(magnitudes, 0.9999, axis=1, method="inverted_cdf") / high
            np.testing.assert_allclose(step, expected, rtol=1e-6)
            assert (step < magnitudes.max(1) / high).all()
        else:
            least = oracles.squared_error(rows, oracles.least_squares_step(rows, -high, high, bits), -high, high)
            assert (oracles.squared_error(rows, step, -high, high) <= 1.1 * least).all()


def skewed() -> dict[str, Tensor]:
    """Activations that LSQ+ is for, and some that it need not be."""
    x = torch.randn(2000)
    return {
        "silu": torch.nn.functional.silu(2 * x),
        "hardswish": torch.nn.functional.hardswish(3 * x),
        "gelu": torch.nn.functional.gelu(x),
        "leaky": torch.nn.functional.leaky_relu(x, 0.1),
        "relu": x.relu(),
        "gaussian": x,
        "shifted": x - 3,
        "outlier": torch.cat([torch.nn.functional.silu(x), torch.tensor([40.0])]),
        "heavy": torch.nn.functional.silu(torch.distributions.StudentT(3.0).sample((2000,))),
        "negative": -x.relu(),
        "far": x * 0.1 + 5,
    }


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", sorted(skewed()))
def test_lsq_plus_activations(kind, bits):
    """The search over step and zero point is within 3 % of the best squared error of all pairs (8 bits: of many)."""
    x = skewed()[kind]
    q = ready("lsq_plus", False, bits, x)
    rows, high = x.double().numpy()[None], 2**bits - 1
    z, step = int(q.zero_point), q.step.double().numpy()
    assert 0 <= z <= high
    best = math.inf
    for other in range(high + 1) if bits < 8 else sorted({0, high, *range(max(0, z - 20), min(high, z + 20), 4)}):
        lower, upper = -other, high - other
        fits = max(rows.max() / upper if upper else 0.0, rows.min() / lower if lower else 0.0)
        if fits > 0:
            for factor in np.geomspace(1.0, 0.02 if bits < 8 else 0.5, 60 if bits < 4 else 30):
                best = min(best, oracles.squared_error(rows, np.array([fits * factor]), lower, upper).item())
    assert oracles.squared_error(rows, step, -z, high - z).item() <= 1.03 * best


@every
@pytest.mark.parametrize(
    "kind", ["zeros", "one dead channel", "constant", "negative constant", "tiny", "huge", "one value"]
)
def test_calibration_of_poor_data(method, weight, kind):
    """Zero, constant, tiny and huge tensors and dead channels: a positive, finite step, finite values and gradients."""
    role = role_of(method, weight)
    x = {
        "zeros": torch.zeros(6, 4, 3, 3),
        "one dead channel": data(True) * torch.tensor([1.0, 1, 0, 1, 1, 1]).reshape(6, 1, 1, 1),
        "constant": torch.full((6, 4, 3, 3), 0.3),
        "negative constant": torch.full((6, 4, 3, 3), -0.3),
        "tiny": data(True) * 1e-38,
        "huge": data(True) * 1e30,
        "one value": torch.full((6, 1, 1, 1), 0.3),
    }[kind]
    for bits in some(role.bits):
        if not weight and True not in signs(role, weight, bits):
            x = x.abs()
        for how in granularities(method, weight)[: 1 if kind == "one value" else 2]:
            q = make(method, weight, bits, **how)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                q.calibrate(x if weight else observed(x))
            zero = kind == "zeros" or (kind == "tiny" and weight and q.method in ("dorefa", "ternary"))
            assert len(caught) == (zero and not (method == "dorefa" and not weight))  # whose range is 0..1 anyway
            assert all("only zeros seen" in str(w.message) for w in caught)
            assert (q.step > 0).all()
            assert q.step.isfinite().all()
            assert all(p.isfinite().all() for p in q.parameters())
            leaf = x.clone().requires_grad_()
            values = q(leaf)
            values.sum().backward()
            assert values.isfinite().all()
            assert leaf.grad.isfinite().all()
            if kind == "constant" and role.searched(bits, False) and q.method not in ("dorefa", "lsq_plus"):
                torch.testing.assert_close(values, x, rtol=0.02, atol=0)


@every
def test_bad_data_is_refused(method, weight):
    """NaN and infinity do not become a scale, and the layer is named."""
    for bad in (math.nan, math.inf):
        q = make(method, weight, role_of(method, weight).bits[-1])
        x = data(weight)
        x[0, 0, 0, 0] = bad
        before = copy.deepcopy(q.state_dict())
        with pytest.raises(QatError, match=r"^layer\.quantizer: .*(NaN|finite)"):
            q.calibrate(x) if weight else calibrate_through_forward(q, x)
        assert not q.is_calibrated
        assert all(torch.equal(before[k], v) for k, v in q.state_dict().items())
    if not weight:
        with pytest.raises(QatError, match=r"^layer\.quantizer: no calibration data"):
            make(method, False, role_of(method, weight).bits[-1]).calibrate(Observer())


def calibrate_through_forward(q: Quantizer, x: Tensor) -> None:
    """As qat.calibrate does it."""
    q.observer = Observer()
    q(x)
    q.calibrate(q.observer)


@every
def test_uncalibrated_raises(method, weight):
    q = make(method, weight, role_of(method, weight).bits[-1])
    with pytest.raises(QatError, match=r"^layer\.quantizer has no scale yet: run qat\.calibrate"):
        q(data(weight))
    q.enabled = False
    x = data(weight)
    assert q(x) is x


# --- deployed codes ---------------------------------------------------------------------------------------------------


@deployed
def test_codes_are_the_forward(method, weight):
    """decode(encode(x)) is forward(x) in evaluation, bit for bit, with codes of the declared range in one byte."""
    role = role_of(method, weight)
    for bits in role.bits:
        for signed, how in [(s, h) for s in signs(role, weight, bits) for h in granularities(method, weight)]:
            x = data(weight, signed)
            q = ready(method, weight, bits, x, signed, **how).eval()
            if not q.integer:
                assert "group" in how or bits > role.integer
                with pytest.raises(QatError, match=f"{q.method} has no integer codes"):
                    q.encode(x)
                continue
            low, high = role.codes(bits, signed)
            factor = torch.tensor(1.0 if weight else 1.3)  # beyond the range, too
            for t in (x * factor, (x * factor).bfloat16(), torch.zeros_like(x), -torch.zeros_like(x)):
                codes = q.encode(t)
                assert codes.dtype == (torch.int8 if low < 0 else torch.uint8)
                assert low <= codes.min()
                assert codes.max() <= high
                assert torch.equal(q.decode(codes).to(t.dtype), q(t))
                assert torch.equal(q.encode(t), codes)
            if q.method not in ("binary", "ternary", "dorefa") or not weight:
                ends = q.encode(torch.where(x > 0, torch.inf, -torch.inf))
                assert torch.equal(ends.int(), torch.where(x > 0, high, low).int())
            q.encode(x)
            nan, state = x.clone(), copy.deepcopy(q.state_dict())
            nan[0, 0, 0, 0] = math.nan
            with pytest.raises(QatError, match="cannot encode NaN"):
                q.encode(nan)
            assert q(nan)[0, 0, 0, 0].isnan()
            assert all(v.isfinite().all() for v in q.state_dict().values())
            assert q.encode(x) is not None
            assert all(torch.equal(v, q.state_dict()[k]) for k, v in state.items())


@pytest.mark.parametrize("method", ["binary", "ternary"])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-20])
def test_codes_of_tiny_weights(method, size):
    """Weights below the floor of a scale: forward and decoded codes are still the same."""
    w = torch.full((4, 5), size) * torch.tensor([1.0, -1, 0.1, 0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q = ready(method, True, 1 if method == "binary" else 2, w, axis=0, channels=4).eval()
    assert torch.equal(q.decode(q.encode(w)), q(w))


@pytest.mark.parametrize("bits", range(1, 9))
def test_lsq_plus_holds_zero(bits):
    """The deployed grid of any learned offset has an integer zero point among its codes, which is exactly zero."""
    q = ready("lsq_plus", False, bits, torch.randn(1000))
    for offset in (-5.0, -0.4, 0.5, 1.5, 2.6, 300.0):
        with torch.no_grad():
            q.offset.fill_(offset)
        zero = torch.zeros(3)
        for training in (True, False):
            assert torch.equal(q.train(training)(zero), zero)
        codes = q.encode(zero)
        assert q.zero_point.dtype == torch.int32
        assert (codes.int() == q.zero_point).all()
        assert int(q.zero_point) == min(max(round(offset), 0), 2**bits - 1)
        assert torch.equal(q.decode(codes), zero)
        x = torch.randn(500) * 3
        assert torch.equal(q.eval()(x), q.decode(q.encode(x)))


def test_lsq_plus_follows_its_offset():
    """The zero point of the state is that of the offset after every training step."""
    q = ready("lsq_plus", False, 4, torch.randn(1000)).train()
    with torch.no_grad():
        q.offset.fill_(3.0)
    q(torch.randn(4))
    assert int(q.zero_point) == 3


# --- changing bits ----------------------------------------------------------------------------------------------------


@every
def test_set_bits(method, weight):
    """The step follows as LSQ's initial one does; what a method fixes in another way stays that way."""
    role = role_of(method, weight)
    many, few = role.bits[-1], role.bits[0]
    for signed in signs(role, weight, few):
        x = data(weight, signed)
        q = ready(method, weight, many, x, signed)
        before, raw = q.step.clone(), q.raw.detach().clone()
        qmax = q.qmax
        identity = id(q.raw)
        q.set_bits(few)
        assert id(q.raw) == identity
        assert (q.bits, q.qmin, q.qmax) == (few, *role.codes(few, signed)) or method == "fp8"
        if method == "fp8" or len(role.bits) == 1:
            assert torch.equal(q.step, before)
        elif q.method in ("tqt", "pact") or (q.method == "dorefa" and weight):
            assert torch.equal(q.raw, raw)  # threshold, alpha, magnitude
        elif method == "dorefa" and not signed:
            torch.testing.assert_close(q.step, torch.tensor([1 / q.qmax]))  # the range stays 0..1
        else:
            torch.testing.assert_close(q.step, before * math.sqrt(qmax / q.qmax))
        again = copy.deepcopy(q)
        again.set_bits(many)
        torch.testing.assert_close(again.step, before, rtol=1e-5, atol=0)


def test_lsq_plus_set_bits_keeps_the_range():
    """The zero point divides the new codes as it divided the old ones: neither end of the range is lost."""
    silu = torch.nn.functional.silu(torch.randn(5000) * 2)
    for x in (silu, torch.randn(5000), -silu):
        q = ready("lsq_plus", False, 8, x).eval()
        share = int(q.zero_point) / 255
        assert 0 < share < 1
        for bits in (4, 3, 2, 4):
            q.set_bits(bits)
            assert abs(int(q.zero_point) / q.qmax - share) <= 0.5 / q.qmax + 1e-6
            assert torch.equal(q(x), q.decode(q.encode(x)))
            assert len(q(x).sign().unique()) >= 2


# --- scales cannot go bad ---------------------------------------------------------------------------------------------

LOSSES = {
    "fit": lambda y, x: (y - x.flip(0) / 2).square().mean(),  # to something else than x
    "up": lambda y, x: -(y * x.sign()).mean() * 10,
    "down": lambda y, x: (y * x.sign()).mean() * 10,
}


def train_scale(q: Any, x: Tensor, loss: str, precision: str, steps: int = 200) -> list[bool]:
    """Plain SGD at learning rate 1 on what is learned; returns at which of the last 20 steps it still learned."""
    decay = 1e-4 if q.decays else 0.0  # PACT's L2 penalty is part of the method
    parameters = [p for p in q.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1.0, weight_decay=decay)
    dtype = getattr(torch, precision)
    used, grads = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16 if precision == "float32" else dtype, enabled=precision != "float32"):
            y = q(x.to(dtype))
            value = LOSSES[loss](y.float(), x)
        value.backward()
        assert y.dtype == dtype
        assert all(p.grad.dtype == p.dtype == torch.float32 for p in parameters)
        grads.append(torch.cat([p.grad.reshape(-1) for p in parameters]))
        optimizer.step()
        used.append(q.step)
    assert torch.stack(grads).isfinite().all()
    assert used[0].dtype == torch.float32
    assert (torch.stack(used) > 0).all()
    assert torch.stack(used).isfinite().all()
    return (torch.stack(grads)[-20:] != 0).any(1).tolist()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("loss", LOSSES)
@learning
def test_scales_cannot_go_bad(method, weight, loss, precision):
    """200 steps at learning rate 1, fitting or pushed one way: the step stays positive and finite and still learns.

    There are two exceptions, which the papers have too. PACT's gradient is that of the clipped values alone: an alpha
    beyond all values has none, and only the penalty (weight decay) brings it back. LSQ+'s scale has none where all
    values lie beyond that end of the range which is zero: there its offset has one.
    """
    role = role_of(method, weight)
    few, many = role.bits[0], role.bits[-1]
    cases = {(few, signs(role, weight, few)[-1])}  # signed where it can be
    if precision == "float32":
        cases.add((many, signs(role, weight, many)[0]))
    for bits, signed in cases:
        x = torch.randn(8, 32) if signed else torch.rand(8, 32) * 2
        q = ready(method, weight, bits, x, signed).train()
        alive = train_scale(q, x, loss, precision)
        if method == "pact" and not all(alive):
            assert q.alpha.abs() > x.abs().max() * (1 - 2**-7)  # nothing is clipped, at this precision
            before = q.alpha.abs().item()
            train_scale(q, x, loss, precision, steps=20)
            assert q.alpha.abs().item() <= before  # the penalty pulls
        else:
            assert all(alive), f"{bits} bits, signed {signed}: {q.step}"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("loss", LOSSES)
@learning
def test_scales_cannot_go_bad_at_all_bits(method, weight, loss, precision):
    """The same for all bits and per channel."""
    role = role_of(method, weight)
    for bits in role.bits:
        how = {"axis": 0, "channels": 8} if weight else {}
        for signed in signs(role, weight, bits):
            x = torch.randn(8, 64) if signed else torch.rand(8, 64) * 2
            train_scale(ready(method, weight, bits, x, signed, **how).train(), x, loss, precision, 1000)


@learning
def test_huge_gradients(method, weight):
    """fp16 tensors with fp16's largest gradient everywhere: a finite float32 gradient for whatever is learned."""
    role = role_of(method, weight)
    for bits in some(role.bits):
        x = torch.randn(64, 64)
        q = ready(method, weight, bits, x, True in signs(role, weight, bits)).train()
        y = q((x * 4).half())
        y.backward(torch.full_like(y, 65504.0))
        for grad in grads_of(q):
            assert grad.dtype == torch.float32
            assert grad.isfinite().all()


@learning
def test_a_dead_scale_comes_back(method, weight):
    """From a raw value of zero, or just beyond it, where all values are zero, the scale learns its way back."""
    role = role_of(method, weight)
    for start in (0.0, -1e-3):
        for bits in {role.bits[0], role.bits[-1]} - {1}:
            x = torch.randn(8, 64)
            q = ready(method, weight, bits, x, True).train()
            if method == "tqt":
                continue  # its parameter is a logarithm: zero is a threshold like others
            with torch.no_grad():
                q.raw.fill_(start)
            optimizer = torch.optim.SGD([q.raw], lr=0.5)
            errors = []
            for _ in range(100):
                optimizer.zero_grad()
                error = (q(x) - x).square().mean()
                error.backward()
                optimizer.step()
                errors.append(error.item())
            assert errors[0] > 0.8
            assert errors[-1] < 0.4
            assert q.step > 1e-3


# --- state ------------------------------------------------------------------------------------------------------------


@every
def test_state_dict(method, weight):
    """A fresh quantizer that loads the state computes the same, and its Python mirrors are right."""
    role = role_of(method, weight)
    for bits in (role.bits[0], role.bits[-1]):
        for signed, how in [(s, h) for s in signs(role, weight, bits) for h in granularities(method, weight)]:
            x = data(weight, signed)
            q = ready(method, weight, bits, x, signed, **how).eval()
            file = io.BytesIO()
            torch.save(q.state_dict(), file)
            file.seek(0)
            fresh = make(method, weight, bits, **how).eval()
            fresh.load_state_dict(torch.load(file, weights_only=True))
            assert fresh.is_calibrated
            assert fresh.is_signed == q.is_signed
            assert torch.equal(fresh(x), q(x))
            if q.integer:
                assert torch.equal(fresh.decode(fresh.encode(x)), q(x))
            assert {k: v.shape for k, v in fresh.state_dict().items()} == {
                k: v.shape for k, v in q.state_dict().items()
            }


@pytest.mark.parametrize(("method", "weight"), kinds(scaled=False))
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(method, weight, how):
    """A copy computes the same and shares nothing."""
    x = data(weight)
    if method == "mixed_precision":
        q: Any = MixedPrecisionQuantizer(torch.bfloat16)
    else:
        q = ready(method, weight, role_of(method, weight).bits[-1], x).eval()
    other = copy.deepcopy(q) if how == "deepcopy" else pickle.loads(pickle.dumps(q))
    assert torch.equal(other(x), q(x))
    assert not {p.data_ptr() for p in q.parameters()} & {p.data_ptr() for p in other.parameters()}
    before = q(x)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.7)
    assert torch.equal(q(x), before)


@every
def test_scales_stay_float32(method, weight):
    """model.half(), .double() and .bfloat16() leave the scales in float32, to the bit."""
    x = data(weight)
    q = ready(method, weight, role_of(method, weight).bits[-1], x)
    before = [p.clone() for p in q.parameters()]
    for change in (q.half, q.double, q.bfloat16):
        change()
        assert all(p.dtype == torch.float32 for p in q.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, q.parameters(), strict=True))


@every
def test_parameters(method, weight):
    """One element per scale from construction on; trained only where the method learns, and not with learn=False."""
    role = role_of(method, weight)
    bits = role.bits[-1]
    for learn in (True, False):
        q = make(method, weight, bits, learn=learn)
        assert all(p.requires_grad == (learn and role.learns) for p in q.parameters())
        shapes = {k: v.shape for k, v in q.state_dict().items()}
        q.calibrate(data(weight) if weight else observed(data(weight)))
        assert {k: v.shape for k, v in q.state_dict().items()} == shapes
        assert all(p.requires_grad == (learn and role.learns) for p in q.parameters())
    assert type(q).learns == role.learns
    assert q.paper
    assert method in (q.method, "pact", "ternary")  # their other halves are DoReFa and LSQ


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision(dtype):
    q, x = MixedPrecisionQuantizer(dtype), torch.randn(100, requires_grad=True)
    y = q(x)
    expected = oracles.mixed_precision(x.detach().double().numpy(), np.ones(100), format=str(dtype)[6:])
    assert np.array_equal(y.detach().double().numpy(), expected.values)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(100))
    q.enabled = False
    assert q(x) is x
    assert not q.integer


def test_floor_is_the_kernels():
    assert kernels.SCALE_FLOOR == FLOOR
