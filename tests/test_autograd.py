"""What the autograd Functions owe their users beyond right numbers: one test per promise, over all of them."""

import copy
import dataclasses
import functools
import inspect
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap
from torch.utils.checkpoint import checkpoint

import qat
from qat import functional
from qat.config import QatError
from qat.functional import (
    EWGS,
    FP8,
    LSQ,
    PACT,
    STE,
    TQT,
    Binary,
    BinaryActivation,
    DoReFa,
    LeanReLU,
    LeanReLUInplace,
    LSQPlus,
    MixedPrecision,
    Stochastic,
    Ternary,
)
from qat.functional._checks import QatFunction
from qat.quantizers import METHODS
from qat.swap import quantized_layers

SHAPE = (4, 6)


@dataclasses.dataclass(frozen=True)
class Case:
    """One Function with arguments to call it with."""

    function: type[QatFunction]
    arguments: Callable[[], tuple]  # those after x
    learned: tuple[int, ...] = ()  # which of all inputs, beside x, get a gradient
    saved: float = 1  # bytes per element kept for the backward, beyond x's own
    twice: bool = False  # can be differentiated twice
    public: Callable[..., Any] | None = None  # of an in-place Function: what to call where a compiler reads it

    def values(self, x, *arguments):
        """The first output. The in-place one gets an x that may be overwritten."""
        return first(self.function.apply(x if self.public is None else x * 1, *arguments))

    def compilable(self, x, *arguments):
        """As `values`, in the form that is promised to compile."""
        return self.values(x, *arguments) if self.public is None else self.public(x * 1, *arguments)


def first(output):
    return output[0] if isinstance(output, tuple) else output


def one(value):
    return torch.tensor([value])


def per_channel():
    return torch.tensor([0.2, 0.3, 0.4, 0.5])


CASES = {
    "ste": Case(STE, lambda: (one(0.3), -4, 3, None)),
    "ste-channel": Case(STE, lambda: (per_channel(), 0, 7, 0)),
    "lsq": Case(LSQ, lambda: (one(0.3), -4, 3, None, 0.1, False), (1,), saved=0),
    "lsq-channel": Case(LSQ, lambda: (per_channel(), -4, 3, 0, 0.1, False), (1,), saved=0),
    "lsq-lean": Case(LSQ, lambda: (one(-0.3), 0, 7, None, 0.1, True), (1,)),
    "lsq-lean-channel": Case(LSQ, lambda: (per_channel(), -4, 3, -2, 0.1, True), (1,)),
    "lsq_plus": Case(LSQPlus, lambda: (one(0.2), one(5.3), 0, 15, 0.1), (1, 2)),
    "pact": Case(PACT, lambda: (one(1.0), 0, 15, None), (1,)),
    "pact-channel": Case(PACT, lambda: (2 * per_channel(), -15, 15, 0), (1,)),
    "dorefa": Case(DoReFa, lambda: (one(1.5), 3), saved=0),
    "ewgs": Case(EWGS, lambda: (one(0.3), -4, 3, None, 0.1, 0.2), (1,)),
    "tqt": Case(TQT, lambda: (one(0.4), -4, 3, None, 0.1), (1,)),
    "tqt-channel": Case(TQT, lambda: (per_channel(), -4, 3, 0, 0.1), (1,)),
    "stochastic": Case(Stochastic, lambda: (one(0.3), torch.rand(SHAPE), -4, 3, None, 0.1), (1,)),
    "binary": Case(Binary, lambda: (None,), saved=0),
    "binary-channel": Case(Binary, lambda: (0,), saved=0),
    "binary_activation": Case(BinaryActivation, lambda: (one(0.5), None, 0.1), (1,)),
    "ternary": Case(Ternary, lambda: (None,), saved=0),
    "ternary-channel": Case(Ternary, lambda: (0,), saved=0),
    "fp8": Case(FP8, lambda: (one(0.01), torch.float8_e4m3fn, None)),
    "fp8-e5m2": Case(FP8, lambda: (per_channel() / 50000, torch.float8_e5m2, 0)),
    "mixed_precision": Case(MixedPrecision, lambda: (torch.bfloat16,), saved=0, twice=True),
    "relu": Case(LeanReLU, lambda: (None,), twice=True),
    "relu-inplace": Case(
        LeanReLUInplace, lambda: (None,), twice=True, public=lambda x, limit: functional.relu(x, True, limit)
    ),
}
WITH_RESIDUE = {n: c for n, c in CASES.items() if not n.startswith(("dorefa", "binary", "ternary", "mixed", "relu-in"))}
WITH_RESIDUE |= {"binary_activation": CASES["binary_activation"]}
WITH_SCALE = {n: c for n, c in CASES.items() if c.arguments() and isinstance(c.arguments()[0], torch.Tensor)}

every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def some(*names):
    """These cases, and marked slow the others."""
    marks = {True: (), False: pytest.mark.slow}
    return pytest.mark.parametrize("case", [pytest.param(c, id=n, marks=marks[n in names]) for n, c in CASES.items()])


every_with_residue = pytest.mark.parametrize("case", WITH_RESIDUE.values(), ids=WITH_RESIDUE)


@pytest.fixture
def x(seed):
    return torch.randn(SHAPE)


@pytest.fixture
def weights(seed):
    """What the outputs are multiplied by, so that every element has a gradient of its own."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def leaves(case, x, arguments):
    """Fresh leaves for x and what is learned, the rest as it is."""
    wanted = {0, *case.learned}
    return [a.detach().clone().requires_grad_() if i in wanted else a for i, a in enumerate((x, *arguments))]


def gradients(case, inputs, weights, call=None):
    """Output and gradients of x and what is learned."""
    out = (call or case.values)(*inputs)
    (out * weights).sum().backward()
    return [out.detach(), *(inputs[i].grad for i in (0, *case.learned))]


def assert_close(got, want, exact=False):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        if exact:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b)


def test_every_function_has_a_case():
    exported = {getattr(functional, name) for name in functional.__all__}
    classes = {f for f in exported if isinstance(f, type) and issubclass(f, QatFunction)}
    assert {case.function for case in CASES.values()} == classes


# --- the form ---------------------------------------------------------------------------------------------------------


@every
def test_forward_has_no_ctx(case):
    """So that torch.func and torch.compile can call it."""
    own = vars(case.function)
    assert {"forward", "setup_context", "backward"} <= set(own)
    assert next(iter(inspect.signature(case.function.forward).parameters)) in ("x", "w")
    assert list(inspect.signature(case.function.setup_context).parameters) == ["ctx", "inputs", "output"]
    assert own.get("generate_vmap_rule") or "vmap" in own


@pytest.fixture
def returned(case, monkeypatch):
    """What the backward of the case's Function returns, call by call."""
    calls = []
    backward = case.function.backward

    def spy(ctx, *g):
        result = backward(ctx, *g)
        calls.append(result if isinstance(result, tuple) else (result,))
        return result

    monkeypatch.setattr(case.function, "backward", staticmethod(spy))
    return calls


@every
def test_one_gradient_per_input_and_none_for_what_is_no_tensor(case, x, weights, returned):
    inputs = leaves(case, x, case.arguments())
    gradients(case, inputs, weights)
    (got,) = returned
    assert len(got) == len(inputs)
    for i, (gradient, given) in enumerate(zip(got, inputs, strict=True)):
        if i in (0, *case.learned):
            assert gradient.shape == given.shape
            assert gradient.dtype == given.dtype
            assert gradient.any()
        else:
            assert gradient is None


@every
def test_computes_only_the_gradients_that_are_needed(case, x, weights, returned):
    """x alone gets what it gets among others, and each learned input likewise; for the rest nothing is computed."""
    want = gradients(case, leaves(case, x, arguments := case.arguments()), weights)[1:]
    for index, gradient in zip((0, *case.learned), want, strict=True):
        alone = [x.clone(), *arguments]
        alone[index] = alone[index].clone().requires_grad_()
        (case.values(*alone) * weights).sum().backward()
        assert torch.equal(alone[index].grad, gradient)
        assert [i for i, g in enumerate(returned[-1]) if g is not None] == [index]


@every_with_residue
def test_residue_is_not_differentiable(case, x):
    """An output that never requires grad, whatever the inputs do, and keeps nothing alive."""
    values, residue = case.function.apply(*leaves(case, x, case.arguments()))
    assert values.requires_grad
    if residue is None:
        assert case.function is LSQ  # without lean there is none
        return
    assert residue.dtype in (torch.int8, torch.uint8, torch.bool)
    assert residue.shape == x.shape
    assert not residue.requires_grad
    assert residue.grad_fn is None
    values.sum().backward()
    assert residue.grad is None


class Ignore(torch.autograd.Function):
    """Sends no gradient back, not even zeros."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return None


@every
def test_no_gradient_is_materialised(case, x, monkeypatch):
    """An output that nothing was asked of gives None to the backward, not a tensor of zeros, and None comes back."""
    seen = []
    backward = case.function.backward
    monkeypatch.setattr(case.function, "backward", staticmethod(lambda ctx, *g: seen.append(g) or backward(ctx, *g)))

    inputs = leaves(case, x, case.arguments())
    case.values(*inputs).sum().backward()
    assert all(g is None for g in seen[-1][1:])  # the residue's

    inputs = leaves(case, x, case.arguments())
    Ignore.apply(case.values(*inputs)).sum().backward()
    assert all(g is None for g in seen[-1])
    assert all(inputs[i].grad is None for i in (0, *case.learned))


# --- memory -----------------------------------------------------------------------------------------------------------


def kept(call, *inputs):
    """Bytes that a call keeps for its backward, beyond its inputs' own storage."""
    own = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, torch.Tensor)}
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = call(*inputs)
    del out
    return sum(size for key, size in saved.items() if key not in own)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_saved_for_backward(case, dtype):
    """A mask or residue of one byte per element instead of the input; nothing where x is a weight, alive anyway."""
    x = torch.randn(SHAPE, dtype=dtype)
    inputs = leaves(case, x, case.arguments())
    inputs[0] = inputs[0] * 1  # not a leaf: the in-place one may overwrite it
    assert kept(case.function.apply, *inputs) / x.numel() == case.saved


def test_what_others_save():
    """The measure itself: torch's ReLU keeps its output, 4 bytes per element; a multiplication both factors."""
    x = torch.randn(64, 32, requires_grad=True)
    assert kept(torch.relu, x) / x.numel() == 4
    assert kept(torch.mul, x, x) == 0
    assert kept(lambda x: (2 * x) * (3 * x), x) / x.numel() == 8
    assert kept(functional.relu, x) / x.numel() == 1


def test_lean_saves_a_byte_where_exact_saves_x():
    """Without lean x itself is kept (same storage): free for a Parameter, 4 bytes for an activation made for it."""
    x = torch.randn(64, 32, requires_grad=True)
    scale = one(0.3).requires_grad_()
    for lean, activation, weight in ((False, 4, 0), (True, 1, 1)):
        lsq = functools.partial(functional.lsq, qmin=-4, qmax=3, lean=lean)
        assert kept(lambda x, s: lsq(x.sin(), s), x, scale) / x.numel() == activation  # noqa: B023
        assert kept(lsq, x, scale) / x.numel() == weight


def test_nothing_is_kept_where_nothing_learns():
    x, scale = torch.randn(64, 32), one(0.3)
    with torch.no_grad():
        assert kept(lambda x, s: functional.lsq(x, s, -4, 3, lean=True), x, scale) == 0
    assert functional.lsq(x, scale, -4, 3, lean=True).grad_fn is None


# --- in place ---------------------------------------------------------------------------------------------------------


def test_inplace_overwrites(x):
    want = x.relu()
    base = x.clone().requires_grad_()
    y = base * 1
    version = y._version
    z = functional.relu(y, inplace=True)
    assert z is y
    assert torch.equal(y, want)
    assert y._version > version  # whoever saved y before finds out
    assert "LeanReLUInplace" in type(z.grad_fn).__name__
    z.sum().backward()
    assert torch.equal(base.grad, (x > 0).float())


def test_inplace_is_right_even_if_overwritten_later(x):
    """torch's keeps its output and has to refuse; ours keeps a mask."""

    def run(relu):
        base = x.clone().requires_grad_()
        y = relu(base * 1)
        y.mul_(-3)  # positive values become negative: read later, they would tell the wrong sign
        y.sum().backward()
        return base.grad

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(torch.relu_)
    assert torch.equal(run(lambda y: functional.relu(y, inplace=True)), -3.0 * (x > 0))


def test_inplace_refuses_what_torch_refuses(x):
    def leaf(relu):
        relu(x.clone().requires_grad_())

    def view_of_leaf(relu):
        relu(x.clone().requires_grad_()[0])

    def one_of_several_views(relu):
        relu((x.clone().requires_grad_() * 1).chunk(2)[0])

    def needed_elsewhere(relu):
        y = x.clone().requires_grad_().exp()
        relu(y)
        y.sum().backward()

    for use in (leaf, view_of_leaf, one_of_several_views, needed_elsewhere):
        for relu in (torch.relu_, functools.partial(functional.relu, inplace=True)):
            with pytest.raises(RuntimeError, match=r"leaf Variable|returns multiple views|modified by an inplace"):
                use(relu)


def test_inplace_on_a_view_changes_its_base(x, weights):
    def run(relu):
        leaf = x.clone().requires_grad_()
        base = leaf * 1
        relu(base[1:3].t())
        (base * weights).sum().backward()
        return base.detach(), leaf.grad

    assert_close(run(functools.partial(functional.relu, inplace=True)), run(torch.relu_), exact=True)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_relu_is_torchs(inplace, dtype):
    """At both zeros, infinities and NaN too, values and gradients."""
    special = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40]
    x = torch.tensor(special, dtype=dtype).repeat(8).reshape(9, 8)
    got, want = (x.clone().requires_grad_() for _ in range(2))
    ours = functional.relu(got * 1, inplace=inplace)
    torchs = torch.relu(want * 1)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0, equal_nan=True)
    ours.backward(torch.full_like(x, 3))
    torchs.backward(torch.full_like(x, 3))
    assert torch.equal(got.grad, want.grad)


# --- derivatives ------------------------------------------------------------------------------------------------------

GRID = torch.tensor([[-3.0, -1.0, 0.0], [1.0, 2.0, 1.0]], dtype=torch.float64)
SATURATED = torch.tensor([[-9.0, 9.0], [7.0, -5.0]], dtype=torch.float64)
KINKED = torch.tensor([[-2.0, -0.5], [0.5, 3.0]], dtype=torch.float64)
HALF = torch.tensor([0.5], dtype=torch.float64)

SMOOTH = {
    # Differentiable functions, in float64, as gradcheck wants it
    "relu": (lambda x: functional.relu(x), KINKED, 1e-6),
    "relu-inplace": (lambda x: functional.relu(x * 1, inplace=True), KINKED, 1e-6),
    # Saturated, the values are a multiple of the scale and no longer depend on x: straight lines, wide steps
    "lsq-saturated": (lambda s: functional.lsq(SATURATED, s.float(), -4, 3), HALF, 2**-6),
    "lsq-lean-saturated": (lambda s: functional.lsq(SATURATED, s.float(), -4, 3, lean=True), HALF, 2**-6),
    "lsq-negative-scale": (lambda s: functional.lsq(SATURATED, s.float(), -4, 3), -HALF, 2**-6),
    "ewgs-saturated": (lambda s: functional.ewgs(SATURATED, s.float(), -4, 3), HALF, 2**-6),
    "pact-saturated": (lambda a: functional.pact(SATURATED, a.float(), -7, 7), HALF, 2**-6),
    "binary_activation-outside": (lambda s: functional.binary_activation(SATURATED, s.float()), HALF, 2**-6),
    "lsq-saturated-x": (lambda x: functional.lsq(x, torch.tensor([0.5]), -4, 3), SATURATED, 2**-6),
    # Beyond |w| = 1 a binary weight moves its tensor's mean only
    "binary-outside": (lambda w: functional.binary(w), SATURATED, 0.25),
    # Taken over whole steps of the grid a staircase is a straight line: that is the straight-through estimator
    "ste": (lambda x: functional.ste(x, torch.ones(1), -8, 7), GRID, 1.0),
    "lsq": (lambda x: functional.lsq(x, torch.ones(1), -8, 7), GRID, 1.0),
    "lsq-lean": (lambda x: functional.lsq(x, torch.ones(1), -8, 7, lean=True), GRID, 1.0),
    "lsq_plus": (lambda x: functional.lsq_plus(x, torch.ones(1), torch.tensor([7.0]), 0, 15), GRID, 1.0),
    "ewgs": (lambda x: functional.ewgs(x, torch.ones(1), -8, 7), GRID, 1.0),
    "tqt": (lambda x: functional.tqt(x, torch.tensor([3.0]), -8, 7), GRID, 1.0),
    "pact": (lambda x: functional.pact(x, torch.tensor([15.0]), -15, 15), GRID, 1.0),
    "mixed_precision": (lambda x: functional.mixed_precision(x), GRID, 1.0),
}


@pytest.mark.parametrize(("function", "at", "eps"), SMOOTH.values(), ids=SMOOTH)
def test_gradcheck(function, at, eps):
    """Against finite differences, with undefined and batched gradients, where the function is what the gradient says.

    Inside the range the gradient of a learned scale is the straight-through estimator's, no derivative of the values:
    the closed forms of the papers are checked in test_functional.py.
    """
    assert gradcheck(function, (at.clone().requires_grad_(),), eps=eps, atol=1e-4, check_batched_grad=True)


@every
def test_second_derivative_is_an_error_or_right(case, x, weights):
    """Codes have none: an error, through autograd and through torch.func, which left alone would answer zero."""
    _, *arguments = leaves(case, x, case.arguments())

    def loss(x):
        return (case.values(x, *arguments).square() * weights).sum()

    def slope(x):
        return grad(loss)(x).sum()

    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    if case.twice:
        (got,) = torch.autograd.grad(gradient.sum(), leaf)
        want = 2 * weights * (x > 0 if "ReLU" in case.function.__name__ else 1)
        assert torch.equal(got, want)
        assert torch.equal(grad(slope)(x), want)
        return
    refused = pytest.raises(QatError, match=rf"differentiate {case.function.__name__} twice.*codes")
    with refused:
        gradient.sum().backward()
    with refused:
        grad(slope)(x)
    with refused:
        vmap(grad(slope))(torch.stack([x, 2 * x]))
    with refused:
        jacrev(grad(loss))(x)
    with refused:
        slope(leaf).backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch, loading its own rules
@every
def test_forward_mode_is_an_error(case, x):
    """So `torch.func.hessian`, forward over reverse, is one too."""
    arguments = case.arguments()
    with pytest.raises((NotImplementedError, RuntimeError), match="jvp"):
        jacfwd(lambda x: case.values(x, *arguments))(x)
    with pytest.raises((NotImplementedError, RuntimeError), match="jvp"):
        hessian(lambda x: case.values(x, *arguments).square().sum())(x)


def test_second_derivative_of_a_linear_loss_is_refused_too(x):
    """The gradient then does not depend on the loss's, but on what was saved."""
    w = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(functional.dorefa(w, torch.ones(1), 3).sum(), w, create_graph=True)
    with pytest.raises(QatError, match="DoReFa twice"):
        gradient.sum().backward()
    with pytest.raises(QatError, match="DoReFa twice"):
        grad(lambda w: grad(lambda w: functional.dorefa(w, torch.ones(1), 3).sum())(w).sum())(x)


@every
def test_first_derivative_with_create_graph(case, x, weights):
    """`create_graph=True` alone changes nothing."""
    want = gradients(case, leaves(case, x, arguments := case.arguments()), weights)[1:]
    inputs = leaves(case, x, arguments)
    out = (case.values(*inputs) * weights).sum()
    wanted = [inputs[i] for i in (0, *case.learned)]
    got = torch.autograd.grad(out, wanted, create_graph=True, retain_graph=True)
    assert_close([g.detach() for g in got], want, exact=True)
    assert_close(torch.autograd.grad(out, wanted), want, exact=True)  # a second time, from the same graph


# --- clear errors -----------------------------------------------------------------------------------------------------


@every
def test_a_function_is_applied_not_called(case, x):
    name = case.function.__name__
    with pytest.raises(QatError, match=rf"write {name}.apply\(\.\.\.\), not {name}\(\.\.\.\)"):
        case.function()(x)
    with pytest.raises(QatError, match=rf"{name}.apply"):
        case.function(x, *case.arguments())


@every
@pytest.mark.parametrize("bad", [None, 1.5, [1.0, 2.0], torch.arange(24).reshape(SHAPE), torch.ones(SHAPE).cfloat()])
def test_x_must_be_a_floating_tensor(case, bad):
    with pytest.raises(QatError, match=rf"{case.function.__name__}: [xw] must be a (floating )?tensor; got \w+"):
        case.function.apply(bad, *case.arguments())


@pytest.mark.parametrize("case", WITH_SCALE.values(), ids=WITH_SCALE)
@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0.3, "must be a tensor; got float"),
        (torch.tensor([1]), "must be a floating tensor; got torch.int64"),
        (one(0.3).double(), r"must be float32, also under AMP; got torch.float64 \(try \w+.float\(\)\)"),
        (one(0.3).half(), "must be float32"),
        (torch.ones(3), r"needs 1 element; got \(3,\)|must have shape \(\d,\), one per channel of axis -?\d; got"),
        (torch.ones(0), r"needs 1 element; got \(0,\)|must have shape"),
        (torch.ones(4, 6), r"needs 1 element; got \(4, 6\)|must have shape \(4,\)"),
    ],
    ids=["float", "int", "double", "half", "three", "none", "matrix"],
)
def test_scale_must_fit(case, x, scale, message):
    with pytest.raises(QatError, match=rf"^{case.function.__name__}: .*({message})"):
        case.function.apply(x, scale, *case.arguments()[1:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: functional.lsq(x, torch.ones(4), -4, 3, axis=2), "axis must be a dimension of x, -2 to 1; got 2"),
        (lambda x: functional.binary(x, axis=5), "Binary: axis must be a dimension of x"),
        (lambda x: functional.ternary(x, axis=-3), "Ternary: axis must be a dimension of x"),
        (lambda x: functional.lsq(x, torch.ones(1), 1, 3), "expected qmin <= 0 < qmax, got qmin=1, qmax=3"),
        (lambda x: functional.ste(x, torch.ones(1), -1, 0), "expected qmin <= 0 < qmax"),
        (lambda x: functional.lsq_plus(x, torch.ones(1), 3.0, 0, 15), "offset must be a tensor; got float"),
        (lambda x: functional.lsq_plus(x, torch.ones(1), torch.ones(4), 0, 15), "offset per tensor needs 1 element"),
        (lambda x: functional.stochastic(x, torch.ones(1), 0, 3, noise=0.5), "noise must be a tensor; got float"),
        (lambda x: functional.stochastic(x, torch.ones(1), 0, 3, noise=torch.rand(4)), r"noise must have x's shape"),
        (lambda x: functional.dorefa(x, torch.ones(1), 9), r"bits must be 2..8; got 9"),
        (lambda x: functional.fp8(x, torch.ones(1), torch.float16), "dtype must be torch.float8_e4m3fn or"),
        (lambda x: functional.mixed_precision(x, torch.float64), "dtype must be torch.bfloat16 or torch.float16"),
    ],
)
def test_other_arguments_must_fit(x, call, message):
    with pytest.raises(QatError, match=message):
        call(x)


# --- where the tensors come from and go to ----------------------------------------------------------------------------


@every
def test_one_tensor_used_twice(case, x, weights):
    """Gradients of all uses add up."""
    single = gradients(case, leaves(case, x, arguments := case.arguments()), weights)[1:]
    inputs = leaves(case, x, arguments)
    out = case.values(*inputs) + 2 * case.values(*inputs)
    (out * weights).sum().backward()
    assert_close([inputs[i].grad for i in (0, *case.learned)], [3 * g for g in single])


@every
def test_hooks_on_the_output(case, x, weights):
    """A tensor hook sees the gradient and may replace it; a module's backward hook sees it pass."""
    seen = []
    want = gradients(case, leaves(case, x, arguments := case.arguments()), 2 * weights)[1:]

    def hooked(*inputs):
        y = case.values(*inputs)
        y.register_hook(lambda g: seen.append(g) or 2 * g)
        return y

    inputs = leaves(case, x, arguments)
    assert_close(gradients(case, inputs, weights, hooked)[1:], want)
    assert torch.equal(seen[0], weights)

    module = Wrapped(case, arguments)
    module.register_full_backward_hook(lambda m, g_in, g_out: seen.append(g_out[0]))
    (module(x.clone().requires_grad_()) * weights).sum().backward()
    assert torch.equal(seen[-1], weights)


@every
def test_non_contiguous_and_expanded_gradients(case, x, weights):
    """What comes back may be a view: a transposed or an expanded gradient."""
    inputs = leaves(case, x, arguments := case.arguments())
    want = gradients(case, inputs, torch.full(SHAPE, 0.5))[1:]
    inputs = leaves(case, x, arguments)
    case.values(*inputs).backward(torch.tensor(0.5).expand(SHAPE))
    assert_close([inputs[i].grad for i in (0, *case.learned)], want)
    inputs = leaves(case, x, arguments)
    case.values(*inputs).t().backward(torch.full(SHAPE[::-1], 0.5))
    assert_close([inputs[i].grad for i in (0, *case.learned)], want)


@every
def test_threads(case, weights):
    """Eight threads, each with tensors of its own, get what one after the other gets: no state outside ctx."""
    arguments = case.arguments()
    xs = [torch.randn(SHAPE) * (k + 1) for k in range(8)]
    want = [gradients(case, leaves(case, x, arguments), weights) for x in xs]
    got: list = [None] * len(xs)
    start = threading.Barrier(len(xs))

    def work(k):
        start.wait()
        for _ in range(5):
            got[k] = gradients(case, leaves(case, xs[k], arguments), weights)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(xs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, exact=True)


@every
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(case, x, weights, use_reentrant):
    """torch.utils.checkpoint runs the forward again in the backward."""
    arguments = case.arguments()
    want = gradients(case, leaves(case, x, arguments), weights)
    again = functools.partial(checkpoint, case.values, use_reentrant=use_reentrant)
    assert_close(gradients(case, leaves(case, x, arguments), weights, again), want, exact=True)


# --- torch.func -------------------------------------------------------------------------------------------------------


def batched(case, arguments, count=3):
    """x and each tensor argument, `count` times with changes."""
    x = torch.randn(count, *SHAPE)
    return [x, *(torch.stack([a * (1 + k / 4) for k in range(count)]) for a in arguments if is_tensor(a))]


def is_tensor(a):
    return isinstance(a, torch.Tensor)


def over_tensors(case, arguments):
    """`case.values` as a function of its tensor inputs alone."""

    def call(x, *tensors):
        rest = iter(tensors)
        return case.values(x, *(next(rest) if is_tensor(a) else a for a in arguments))

    return call


@every
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_vmap(case, dim):
    """Over x's every dimension, with the other tensors in the batch too."""
    call = over_tensors(case, arguments := case.arguments())
    x, *others = batched(case, arguments)
    want = torch.stack([call(*(t[k] for t in (x, *others))) for k in range(3)])
    got = vmap(call, in_dims=(dim, *(0 for _ in others)))(x.movedim(0, dim), *others)
    assert torch.equal(got, want)
    got = vmap(call, in_dims=(dim, *(0 for _ in others)), out_dims=1)(x.movedim(0, dim), *others)
    assert torch.equal(got.movedim(1, 0), want)


@every
def test_vmap_over_some(case):
    """Over x with the others shared, over each other with x shared; and nested."""
    call = over_tensors(case, arguments := case.arguments())
    x, *others = batched(case, arguments)
    shared = [t[0] for t in others]
    want = torch.stack([call(t, *shared) for t in x])
    assert torch.equal(vmap(lambda x: call(x, *shared))(x), want)
    assert torch.equal(vmap(vmap(lambda x: call(x, *shared)))(torch.stack([x, x])), torch.stack([want, want]))
    for i, other in enumerate(others):
        tensors = [x[0], *shared]
        dims = [None] * len(tensors)
        dims[i + 1] = 0
        tensors[i + 1] = other
        want = torch.stack([call(*tensors[: i + 1], t, *tensors[i + 2 :]) for t in other])
        assert torch.equal(vmap(call, in_dims=tuple(dims))(*tensors), want)


@every
def test_func_grad(case, x, weights):
    """`torch.func.grad` is autograd's; `vmap(grad)` gives one gradient per sample; `jacrev` all of the Jacobian."""
    arguments = case.arguments()
    which = (0, *case.learned)
    inputs = (x, *arguments)

    def loss(*wanted):
        given = list(inputs)
        for i, t in zip(which, wanted, strict=True):
            given[i] = t
        return (case.values(*given) * weights).sum()

    def reference(*wanted):
        given = list(inputs)
        for i, t in zip(which, wanted, strict=True):
            given[i] = t
        return gradients(case, leaves(case, given[0], given[1:]), weights)[1:]

    wanted = [inputs[i] for i in which]
    slopes = grad(loss, argnums=tuple(range(len(which))))
    assert_close(slopes(*wanted), reference(*wanted))

    several = [torch.stack([t * (1 + k / 4) for k in range(3)]) for t in wanted]
    each = [reference(*(t[k] for t in several)) for k in range(3)]
    assert_close(vmap(slopes)(*several), [torch.stack(g) for g in zip(*each, strict=True)])

    rows = jacrev(lambda x: case.values(x, *arguments))(x)
    weights.abs_()  # EWGS's gradient depends on the sign of what comes in: a row times -1 is not its answer to -1
    torch.testing.assert_close((rows * weights[..., None, None]).sum((0, 1)), reference(*wanted)[0])


@every
def test_per_sample_gradients_inside_and_outside(case, x, weights):
    """`grad(vmap)` is the sum over the batch."""
    call = over_tensors(case, arguments := case.arguments())
    xs, *others = batched(case, arguments)
    shared = [t[0] for t in others]
    inside = grad(lambda xs: vmap(lambda x: (call(x, *shared) * weights).sum())(xs).sum())(xs)
    outside = vmap(grad(lambda x: (call(x, *shared) * weights).sum()))(xs)
    torch.testing.assert_close(inside, outside)


# --- compilers --------------------------------------------------------------------------------------------------------


class Counting:
    """A torch.compile backend that counts the graphs it is given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs, **options):
        self.graphs += 1
        return aot_eager(graph, example_inputs, **options)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every
def test_compiles_to_one_graph_equal_to_eager(case, x, weights, fresh_compiler):
    backend = Counting()
    compiled = torch.compile(case.compilable, fullgraph=True, backend=backend)
    arguments = case.arguments()
    want = gradients(case, leaves(case, x, arguments), weights)
    for _ in range(3):
        got = gradients(case, leaves(case, x, arguments), weights, compiled)
        assert torch.equal(got[0], want[0])
        assert_close(got, want)
    assert backend.graphs == 1
    with torch.no_grad():
        assert torch.equal(compiled(x, *arguments), want[0])
    assert backend.graphs == 2  # without gradients it is another graph, once
    with torch.no_grad():
        compiled(x, *arguments)
    assert backend.graphs == 2


@some("lsq-lean-channel", "binary", "mixed_precision", "relu-inplace")
def test_compiles_with_dynamic_shapes(case, fresh_compiler):
    """No more graphs for other numbers of columns (for the first torch makes two: it starts over for constants)."""
    backend, graphs = Counting(), []
    compiled = torch.compile(case.compilable, fullgraph=True, backend=backend, dynamic=True)
    for columns in (6, 9, 17):
        arguments = [torch.rand(4, columns) if is_tensor(a) and a.ndim == 2 else a for a in case.arguments()]
        x, weights = torch.randn(4, columns), torch.randn(4, columns)
        want = gradients(case, leaves(case, x, arguments), weights)
        assert_close(gradients(case, leaves(case, x, arguments), weights, compiled), want)
        graphs.append(backend.graphs)
    assert graphs[0] == graphs[2] <= 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's look
def test_the_inplace_function_itself_refuses_to_compile(x, fresh_compiler):
    """torch would drop its backward when x is an input of the graph; `relu(x, inplace=True)` compiles."""
    compiled = torch.compile(LeanReLUInplace.apply, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"functional.relu\(x, inplace=True\)"):
        compiled(x.clone(), None)
    for discard in (False, True):
        leaf = x.clone().requires_grad_()
        y = leaf * 1
        compiled = torch.compile(functools.partial(functional.relu, inplace=True), fullgraph=True, backend="aot_eager")
        z = compiled(y)
        (y if discard else z).sum().backward()
        assert torch.equal(y, x.relu())
        assert torch.equal(leaf.grad, (x > 0).float())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lsq-lean", "lsq_plus", "binary-channel", "relu"])
def test_compiles_with_inductor(name, weights, fresh_compiler):
    case = CASES[name]
    x = torch.randn(SHAPE)
    compiled = torch.compile(case.compilable, fullgraph=True)
    arguments = case.arguments()
    want = gradients(case, leaves(case, x, arguments), weights)
    got = gradients(case, leaves(case, x, arguments), weights, compiled)
    if name != "binary-channel":  # a mean may be summed in another order
        assert torch.equal(got[0], want[0])
    assert_close(got, want)


# --- modules ----------------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """A Function in a module: tensor arguments are parameters (learned) or buffers, the rest attributes."""

    def __init__(self, case, arguments):
        super().__init__()
        self.case, self.order = case, []
        for i, a in enumerate(arguments, start=1):
            self.order.append(f"a{i}")
            if i in case.learned:
                self.register_parameter(f"a{i}", nn.Parameter(a.clone()))
            elif is_tensor(a):
                self.register_buffer(f"a{i}", a.clone())
            else:
                setattr(self, f"a{i}", a)

    def forward(self, x):
        return self.case.compilable(x, *(getattr(self, name) for name in self.order))


@every
def test_modules_export(case, x):
    """`torch.export` in eval, with a free batch size where the arguments leave it free: the same values, no Python."""
    module = Wrapped(case, arguments := case.arguments()).eval()
    free = case.function is not Stochastic and not any(is_tensor(a) and a.numel() == 4 for a in arguments)
    dims = ({0: torch.export.Dim("n", min=2)},) if free else None
    program = torch.export.export(module, (x,), dynamic_shapes=dims)
    operations = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(name.startswith("aten.") for name in operations)
    for again in (x, torch.randn(7, 6)) if free else (x,):
        assert torch.equal(program.module()(again), module(again))


def saved_trace(module, x):
    """Traced, saved and loaded."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(module, (x,)), file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:FutureWarning")
@every
def test_modules_trace_and_the_trace_can_be_saved(case, x):
    """`torch.jit.trace` gives operations, no calls into Python, which TorchScript cannot save."""
    module = Wrapped(case, case.arguments()).eval()
    assert torch.equal(saved_trace(module, x)(x), module(x))


@every
def test_functional_call(case, x, weights):
    """Parameters given from outside get the gradients."""
    module = Wrapped(case, arguments := case.arguments())
    want = gradients(case, leaves(case, x, arguments), weights)
    inputs = leaves(case, x, arguments)
    own = {f"a{i}": inputs[i] for i in case.learned}
    out = functional_call(module, own, (inputs[0],))
    (out * weights).sum().backward()
    assert_close([out.detach(), *(inputs[i].grad for i in (0, *case.learned))], want, exact=True)
    assert all(p.grad is None for p in module.parameters())


def small_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(128, 5)
    )


def all_choices():
    """Every method, at 4 bits if it has them, and the formats that are not integers."""
    choices = {}
    for name, quantizers in METHODS.items():
        weight, act = (4 if 4 in q.allowed_bits else q.allowed_bits[0] for q in quantizers)
        choices[name] = qat.QuantConfig(bits=f"w{weight}a{act}", method=name, learn_input_scale=True)
    choices |= {bits: qat.QuantConfig(bits=bits) for bits in ("bf16", "fp16", "fp8", "fp8_e5m2")}
    return choices | {"groups": qat.QuantConfig(bits=4, weight=qat.TensorConfig(granularity=9))}


CHOICES = all_choices()


@functools.cache
def original(name):
    model = qat.quantize(small_model(), CHOICES[name])
    qat.calibrate(model, [torch.randn(16, 3, 8, 8)])
    return model


def calibrated(name):
    """A model of one method, in training mode."""
    return copy.deepcopy(original(name))


def on_floats(model):
    """A copy with the float forward, which is the one that tracing and exporting take."""
    model = copy.deepcopy(model)
    for layer in quantized_layers(model).values():
        layer.forward_mode = "fake"
    return model


def some_choices(*names):
    """These, and marked slow the others."""
    marks = {True: (), False: pytest.mark.slow}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks[n in names]) for n in CHOICES])


@pytest.fixture(params=CHOICES)
def model(request):
    """One per method."""
    return calibrated(request.param)


@pytest.fixture
def images(seed):
    return torch.randn(4, 3, 8, 8)


def step(model, images, call=None):
    """Outputs and every gradient of one backward, from the same random numbers each time."""
    model.zero_grad()
    torch.manual_seed(3)
    out = (call or model)(images)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_model_gradients_reach_everything_that_learns(model, images):
    step(model, images)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_model_copies(model, images, tmp_path):
    """deepcopy, pickle, torch.save and a state dict: the same values and gradients, and nothing shared."""
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    torch.save(model, tmp_path / "whole.pt")
    copies.append(torch.load(tmp_path / "whole.pt", weights_only=False))
    qat.save(model, tmp_path / "model.ckpt")
    copies.append(qat.load(tmp_path / "model.ckpt", model=small_model()).train())
    want = step(model, images)
    for other in copies:
        assert_close(step(other, images), want, exact=True)
        assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}


def test_model_in_threads(model, images):
    """One model, eight threads in eval: the values of one."""
    model.eval()
    want = model(images).detach()
    got: list = [None] * 8

    def work(k):
        with torch.no_grad():
            got[k] = model(images)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(y, want) for y in got)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_model_checkpointing(model, images, use_reentrant):
    """Layers 2 to the end run again in the backward; random rounding repeats itself."""
    model[1].momentum = 0.0
    want = step(model, images)

    def call(x):
        x = model[0](x)
        return checkpoint(model[1:], x, use_reentrant=use_reentrant)

    assert_close(step(model, images, call), want)


def test_model_functional_call(model, images):
    """The state as an argument, and per-sample gradients through it."""
    model.eval()
    state = {k: v.detach() for k, v in model.state_dict(keep_vars=True).items()}
    assert torch.equal(functional_call(model, state, (images,)), model(images))


@some_choices("lsq_plus")
def test_model_compiles(name, images, fresh_compiler):
    """In training: one graph, equal to eager, and another when the batch size changes."""
    model = calibrated(name)
    backend, graphs = Counting(), []
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for batch in (images, images, images[:3]):
        want = step(model, batch)
        assert_close(step(model, batch, compiled), want)
        graphs.append(backend.graphs)
    assert graphs == [1, 1, 2]


@some_choices("lsq", "lsq_plus", "dorefa", "groups")
def test_model_exports(name, images):
    """In eval, with a free batch size."""
    model = calibrated(name).eval()
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    for batch in (images, torch.randn(7, 3, 8, 8)):
        torch.testing.assert_close(program.module()(batch), model(batch))


def test_export_leaves_the_image_size_free(images):
    """A quantizer reads no sizes there: not even for the gradient scale."""
    model = qat.quantize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), bits=4)
    qat.calibrate(model, [images])
    auto = torch.export.Dim.AUTO
    program = torch.export.export(model.eval(), (images,), dynamic_shapes=({0: auto, 2: auto, 3: auto},))
    other = torch.randn(2, 3, 11, 13)
    assert torch.equal(program.module()(other), on_floats(model)(other))


def test_model_traces(model, images):
    """`torch.jit.trace` in eval equals eager, also after saving and for another batch; it warns of nothing of ours."""
    model.eval()
    with pytest.warns(FutureWarning, match=r"torch.jit.* is deprecated") as caught:
        loaded = saved_trace(model, images)
    assert {w.category for w in caught} == {FutureWarning}
    for batch in (images, torch.randn(7, 3, 8, 8)):
        assert torch.equal(loaded(batch), on_floats(model)(batch))


def test_mixed_precision_in_a_module(images):
    """Values of bfloat16 held in float32, float32 gradients, no rounding of them."""
    model = qat.quantize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)), bits="bf16")
    seen = []
    model[2].input_quantizer.register_forward_hook(lambda m, args, y: seen.append((args[0], y)))
    model(images).square().sum().backward()
    ((before, after),) = seen
    assert after.dtype == torch.float32
    assert torch.equal(after, before.bfloat16().float())
    assert not torch.equal(after, before)
    gradient = model[0].weight.grad
    assert gradient.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float())
