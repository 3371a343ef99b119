"""Lean ReLUs and pools: torch's values and gradients, fewer bytes, and a quantizer in a ReLU's place."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat import lean
from qat.functional.pool import LeanMaxPool2d
from qat.kernels import integer

needs_integers = pytest.mark.skipif(not integer.available(), reason="this CPU does not convolve int8 exactly")


def special(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values, and among them both ends of the ReLUs, signed zeros, infinities, NaN."""
    x = 4 * torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.view(-1)[:9] = torch.tensor([0.0, -0.0, 6.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 5.9999])
    return x


def values_and_grads(module: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Of the module on a copy of x, with a gradient that differs from element to element."""
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = module(leaf * 1)  # in place is not allowed on a leaf
    y.backward(torch.linspace(1, 2, y.numel()).reshape(y.shape).to(y.dtype))
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for the payload of NaNs."""
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("float_type", [nn.ReLU, nn.ReLU6])
def test_relus(float_type: Any, alone: bool, inplace: bool, dtype: torch.dtype) -> None:
    """Values and gradients are torch's, at both ends and at NaN too."""
    x = special(2, 3, 8, 8, dtype=dtype)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = x.contiguous(memory_format=layout)
        expected = values_and_grads(float_type(), x)
        module = lean.LEAN[float_type].from_float(float_type(inplace=inplace), alone)
        got = values_and_grads(module, x)
        assert same(got[0], expected[0])
        # torch's ReLU6 is of two minds about the gradient at NaN (vectorized 0, else passed on); ours passes it on
        where = ~x.isnan() if float_type is nn.ReLU6 else torch.ones_like(x, dtype=torch.bool)
        assert same(got[1][where], expected[1][where])


POOLS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
]


@pytest.mark.parametrize("geometry", POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pools(geometry: dict[str, Any], dtype: torch.dtype) -> None:
    """Values, gradients and memory format are torch's; overlapping windows and ties included."""
    x = special(2, 3, 9, 11, dtype=dtype).round()
    for layout in (torch.contiguous_format, torch.channels_last):
        x = x.contiguous(memory_format=layout)
        float_module = nn.MaxPool2d(**geometry)
        expected = values_and_grads(float_module, x)
        got = values_and_grads(lean.MaxPool2d.from_float(copy.deepcopy(float_module), False), x)
        assert all(map(same, got, expected))
        assert got[0].stride() == expected[0].stride()


@pytest.mark.parametrize("shape", [(2, 5, 2, 2), (2, 1, 4, 4), (1, 3, 3, 5)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradient_of_a_pool_lies_in_memory_as_torchs(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    """An output of one place is contiguous in both formats; what comes before the pool must not notice."""
    x = torch.randn(shape).contiguous(memory_format=layout)
    whole = {"kernel_size": shape[2:]}
    strides = []
    for module in (nn.MaxPool2d(**whole), lean.MaxPool2d.from_float(nn.MaxPool2d(**whole), False)):
        seen: list[Tensor] = []
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        inner = leaf * 1
        inner.register_hook(seen.append)
        module(inner).sum().backward()
        strides.append(seen[0].stride())
    assert strides[0] == strides[1]


def test_pool_of_a_large_plane() -> None:
    """More places than int16 counts."""
    x = torch.randn(1, 1, 300, 300)
    y, indices = LeanMaxPool2d.apply(x, [2, 2], [2, 2], [0, 0], [1, 1], False)
    assert indices.dtype == torch.int32
    assert torch.equal(y, nn.functional.max_pool2d(x, 2))
    module = lean.MaxPool2d.from_float(nn.MaxPool2d(2), False)
    assert all(map(same, values_and_grads(module, x), values_and_grads(nn.MaxPool2d(2), x)))


def kept(model: nn.Module, x: Tensor) -> dict[torch.dtype, int]:
    """Elements by dtype that the graph holds once the forward is done, parameters left out."""

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    held: weakref.WeakSet[Held] = weakref.WeakSet()
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}

    def pack(t: Tensor) -> Held:
        held.add(h := Held(t))
        return h

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda h: h.tensor):
        y = model(x)
    storages = {h.tensor.untyped_storage().data_ptr(): h.tensor for h in held}
    result: dict[torch.dtype, int] = {}
    for pointer, t in storages.items():
        if pointer not in known:
            result[t.dtype] = result.get(t.dtype, 0) + t.numel()
    del y
    return result


def test_bytes_kept() -> None:
    """A byte per element for a ReLU, two per window for a pool, and of neither a float."""
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    relu = lean.ReLU.from_float(nn.ReLU(), True)
    pool = lean.MaxPool2d.from_float(nn.MaxPool2d(2), True)
    assert kept(relu, x) == {torch.uint8: x.numel()}
    assert kept(pool, x) == {torch.int16: x.numel() // 4}


# --- in a model -------------------------------------------------------------------------------------------------------


def net(relu: type[nn.Module] = nn.ReLU, inplace: bool = True) -> nn.Module:
    """Convolutions with a ReLU between, one with a pool after it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        relu(inplace=inplace),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        relu(inplace=inplace),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3, padding=1),
        relu(inplace=inplace),
        nn.Conv2d(8, 4, 1),
    )


def quantized(model: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    """Calibrated, in training, all layers on integers where they can."""
    model = qat.quantize(model, qat.QuantConfig(bits=4, forward="integer", **options))
    qat.calibrate(model, [x])
    return model.train()


def compare(model: nn.Module, twin: nn.Module, x: Tensor) -> None:
    """Values are equal, and so is every gradient, but for the order in which autograd adds them up."""
    results = []
    for m in (model, twin):
        leaf = x.clone().requires_grad_()
        y = m(leaf)
        m.zero_grad()
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in m.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


@needs_integers
@pytest.mark.parametrize("relu", [nn.ReLU, nn.ReLU6])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_quantizer_in_place_of_a_relu(relu: Any, inplace: bool) -> None:
    """Nothing of the ReLUs is kept, and values and gradients are those of torch's ReLU and pool."""
    x = torch.randn(2, 3, 8, 8)
    model = quantized(net(relu, inplace), x)
    twin = copy.deepcopy(model)
    lean.undo_lean(twin)
    assert not any(isinstance(m, lean.LeanModule) for m in twin.modules())
    compare(model, twin, x)
    counts = kept(model, x)
    assert counts[torch.uint8] - x.numel() == counts[torch.int8]  # codes; residues, but of the image; and no mask
    assert counts[torch.int16] == 2 * 8 * 16  # the pool's places
    assert counts[torch.float32] < 1500  # the norm's input and the loss; no ReLU's or pool's


@needs_integers
def test_no_gradient_at_zero() -> None:
    """Where a ReLU's input is exactly zero torch passes no gradient on, and neither does the quantizer in its place."""
    model = net()
    nn.init.zeros_(model[3].weight)  # a batch norm whose output is all zero
    x = torch.randn(2, 3, 8, 8)
    with pytest.warns(UserWarning, match="only zeros"):
        model = quantized(model, x)
    model(x).sum().backward()
    assert model[3].bias.grad.abs().sum() == 0
    assert model[2].weight.grad.abs().sum() == 0


@needs_integers
def test_a_limit_below_the_range() -> None:
    """A ReLU6 cuts at 6 what a scale learned to reach further would let through."""
    x = 20 * torch.randn(2, 3, 8, 8)
    model = quantized(net(nn.ReLU6), x)
    with torch.no_grad():
        for i in (2, 6, 8):
            model[i].input_quantizer.scale.fill_(1.0)  # up to 15
    twin = copy.deepcopy(model)
    lean.undo_lean(twin)
    compare(model, twin, x)


class Reads(nn.Module):
    """Code that a merged ReLU must not change: the argument says what it does between ReLU and convolution."""

    def __init__(self, what: str, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.relu = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace)
        self.second, self.third = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions."""
        h = self.norm(self.first(x))
        alias = h.add_(0.0)
        y = self.relu(h)
        if self.what == "overwrites the output":  # torch's own ReLU keeps its output, and refuses the backward then
            y = y * -1.0 if type(self.relu) is nn.ReLU else y.mul_(-1.0)
        elif self.what == "overwrites the input" and type(self.relu) is not nn.ReLU:
            h.detach().sub_(3.0)
        elif self.what == "reads the input":
            return self.second(y) + self.third(h)
        elif self.what == "reads an alias":
            return self.second(y) + self.third(alias)
        elif self.what == "uses it twice":
            return self.second(y) + self.third(y) + y[..., 1:-1, 1:-1]
        elif self.what == "branches on data":
            y = y if bool(y.detach().sum() > 0) else -y
        return self.second(y) + self.third(y)


@needs_integers
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "what",
    [
        "overwrites the output",
        "overwrites the input",
        "reads the input",
        "reads an alias",
        "uses it twice",
        "branches on data",
    ],
)
def test_code_around_a_relu(what: str, inplace: bool) -> None:
    """In-place ReLUs stay in place where something may read their input, and what is overwritten is not merged."""
    x = torch.randn(2, 3, 9, 9)
    model = quantized(Reads(what, inplace), x)
    twin = copy.deepcopy(model)
    lean.undo_lean(twin)
    if what == "overwrites the input" and inplace:
        pytest.skip("then the output is overwritten with it, in torch too")
    compare(model, twin, x)


def test_evaluation_and_compilation_are_torchs_own() -> None:
    """Without a backward there is nothing to keep."""
    x = torch.randn(2, 3, 8, 8)
    module = lean.ReLU.from_float(nn.ReLU(inplace=True), True)
    with torch.no_grad():
        y = x.clone()
        assert module(y) is y
        assert lean.before_relu(y) == (None, None)
    module = lean.ReLU.from_float(nn.ReLU(), True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    compiled(leaf).sum().backward()
    assert torch.equal(leaf.grad, (x > 0).float())


def test_back_to_float() -> None:
    """Types, attributes and state are as they were."""
    model = net()
    types, keys = [type(m) for m in model.modules()], list(model.state_dict())
    model = qat.quantize(model, bits=4)
    assert any(isinstance(m, lean.LeanModule) for m in model.modules())
    assert isinstance(model[1], nn.ReLU)
    model = qat.dequantize(model)
    assert [type(m) for m in model.modules()] == types
    assert list(model.state_dict()) == keys
    assert "alone" not in vars(model[1])


def test_float_bits_change_nothing() -> None:
    """No quantized layer, no lean one."""
    assert not any(isinstance(m, lean.LeanModule) for m in qat.quantize(net(), bits="float").modules())


def test_checkpointing_and_threads() -> None:
    """torch.utils.checkpoint runs the forward twice, the second time from a detached input or the same one."""
    x = torch.randn(2, 3, 8, 8)
    model = quantized(net(), x)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.momentum = 0.0
    grads = []
    for reentrant in (None, False, True):
        leaf = x.clone().requires_grad_()
        h = model[:5](leaf)
        if reentrant is None:
            y = model[5:](h)
        else:
            y = torch.utils.checkpoint.checkpoint(model[5:], h, use_reentrant=reentrant)
        y.square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])
