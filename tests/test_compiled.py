"""The compiled kernels against the reference: the same bits forward, gradients within the rounding of a sum."""

import pytest
import torch

import qat
from qat import kernels
from qat.functional import lsq, ste
from qat.kernels import compiled, reference

pytestmark = pytest.mark.skipif(not kernels.has_compiler(), reason="needs a C++ compiler")

LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
}


def data(layout: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values around a range, with the awkward ones among them."""
    x = torch.randn(6, 5, 7, 9)
    x.view(-1)[:6] = torch.tensor([0.0, -0.0, 1e30, -1e30, float("nan"), float("inf")])
    return LAYOUTS[layout](x.to(dtype))


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits_and_gradients(layout: str, axis: int | None) -> None:
    x = data(layout)
    g = torch.randn(x.shape)  # contiguous: not the layout of a channels_last x
    scale = torch.tensor([0.1]) if axis is None else torch.linspace(0.05, 0.3, 6)
    assert compiled.supported(x, axis)
    for lean in (False, True):
        got, residue = compiled.fake_quantize(x, scale, -7, 7, axis, lean)
        expected, expected_residue = reference.fake_quantize(x, scale, -7, 7, axis, lean)
        assert torch.equal(got.nan_to_num(123.0), expected.nan_to_num(123.0))
        assert got.stride() == x.stride()
        assert residue is expected_residue is None or torch.equal(residue, expected_residue)
    clean = x.clone().nan_to_num_(0.5, 3.0, -3.0)
    _, residue = reference.fake_quantize(clean, scale, -7, 7, axis, True)
    pairs = [
        (
            compiled.lsq_grad(g, residue, scale, -7, 7, axis, (True, True)),
            reference.lsq_grad(g, residue, scale, -7, 7, axis, (True, True)),
        ),
        (
            compiled.lsq_grad_exact(g, clean, scale, -7, 7, axis, (True, True)),
            reference.lsq_grad_exact(g, clean, scale, -7, 7, axis, (True, True)),
        ),
    ]
    for (a, a_scale), (b, b_scale) in pairs:
        assert torch.equal(a, b)
        assert a_scale.shape == scale.shape
        torch.testing.assert_close(a_scale, b_scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spare_gradient_lends_its_memory_and_nothing_else(layout: str, axis: int | None) -> None:
    x = data(layout).nan_to_num_(0.5, 3.0, -3.0)
    scale = torch.tensor([0.1]) if axis is None else torch.linspace(0.05, 0.3, 6)
    _, residue = reference.fake_quantize(x, scale, -7, 7, axis, True)
    for kernel, of in ((compiled.lsq_grad, residue), (compiled.lsq_grad_exact, x)):
        for same in (True, False):
            g = torch.randn_like(x) if same else torch.randn(x.shape)
            kept = g.clone()
            expected = kernel(g, of, scale, -7, 7, axis, (True, True))
            assert torch.equal(g, kept)
            got = kernel(g, of, scale, -7, 7, axis, (True, True), spare=True)
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])
            assert got[0].stride() == x.stride()
            if g.stride() == x.stride():
                assert got[0].data_ptr() == g.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes(layout: str) -> None:
    x, scale = data(layout).nan_to_num_(0.0), torch.tensor([0.1])
    for a, b in zip(
        compiled.encode_bytes(x, scale, -8, 7, 128, True),
        reference.encode_bytes(x, scale, -8, 7, 128, True),
        strict=True,
    ):
        assert torch.equal(a, b)
    codes = reference.encode_bytes(x, scale, -8, 7, 128)[0]
    assert torch.equal(compiled.decode_bytes(codes, scale, 128), reference.decode_bytes(codes, scale, 128))
    assert compiled.encode_bytes(data(layout), scale, 0, 15, 0)[2].item()  # there is a NaN


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("axis", [None, 0])
def test_other_dtypes(dtype: torch.dtype, axis: int | None) -> None:
    x = data("contiguous", dtype).nan_to_num_(0.5, 3.0, -3.0).requires_grad_()
    scale = (torch.tensor([0.1]) if axis is None else torch.linspace(0.05, 0.3, 6)).requires_grad_()
    g = torch.randn(x.shape).to(dtype)
    results = []
    for name in ("reference", "compiled"):
        with kernels.use(name):
            y = lsq(x, scale, -7, 7, axis, 0.1, lean=axis is None)
            results.append((y, *torch.autograd.grad(y, (x, scale), g)))
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_one_graph_for_all_shapes_and_modes() -> None:
    compiled.build.cache_clear()
    scale = torch.tensor([0.1], requires_grad=True)
    with kernels.use("compiled"):
        for shape in [(10, 3), (4, 4, 6, 6), (1000,), (1, 1), (1,), (300, 700)]:
            for qmax in (3, 15, 255):
                x = torch.randn(shape, requires_grad=True)
                with torch.set_grad_enabled(qmax != 3), torch.autocast("cpu", torch.bfloat16, enabled=qmax == 15):
                    y = ste(x, scale, 0, qmax)
                if qmax != 3:
                    y.sum().backward()
    assert compiled.build.cache_info().misses == 2  # forward and backward


@pytest.mark.parametrize("case", ["empty", "strided", "vmap", "axis 1"])
def test_reference_where_compiled_cannot(case: str) -> None:
    scale = torch.tensor([0.1])
    with kernels.use("compiled"):
        if case == "empty":
            assert lsq(torch.randn(0, 3), scale, 0, 15).shape == (0, 3)
        elif case == "strided":
            x = torch.randn(8, 8)[:, ::2]
            assert torch.equal(lsq(x, scale, 0, 15), lsq(x.contiguous(), scale, 0, 15))
        elif case == "vmap":
            x = torch.randn(3, 5)
            assert torch.equal(torch.func.vmap(lambda t: lsq(t, scale, 0, 15))(x), lsq(x, scale, 0, 15))
        else:
            x, scales = torch.randn(4, 3), torch.tensor([0.1, 0.2, 0.3])
            assert torch.equal(lsq(x, scales, -8, 7, 1)[:, 1], lsq(x[:, 1].contiguous(), scales[1:2], -8, 7))


def test_unknown_name_is_an_error() -> None:
    with (
        pytest.raises(kernels.QatError, match="QAT_KERNELS must be one of auto, reference, compiled"),
        kernels.use("fast"),
    ):
        pass


@pytest.mark.parametrize("limit", [None, 6.0])
def test_relu(limit: float | None) -> None:
    x = data("channels_last") * 8
    expected, got = reference.relu_mask(x, limit), compiled.relu_mask(x, limit)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
    g = torch.randn_like(x)
    assert torch.equal(compiled.relu_grad(g, got[1]), reference.relu_grad(g, got[1]))


def test_auto_leaves_small_tensors_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QAT_KERNELS", raising=False)
    assert kernels.mode() == "auto"
    assert kernels.implementation(torch.ones(kernels.SMALL - 1), None) is reference
    assert kernels.implementation(torch.ones(kernels.SMALL), None) is compiled
    with kernels.use("reference"):
        assert kernels.implementation(torch.ones(kernels.SMALL), None) is reference
    with kernels.use("compiled"):
        assert kernels.implementation(torch.ones(3), None) is compiled


def test_warm_up_builds_what_a_training_step_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 2))
    model = qat.quantize(model, bits=4)
    x = torch.randn(4, 3, 8, 8)
    qat.calibrate(model, [x])
    with kernels.use("compiled"):
        kernels.warm_up(x.device)
        monkeypatch.setattr(compiled, "compiled", lambda function, arguments: built(function, arguments, compiled))
        model.train()(x).sum().backward()
        model.eval()(x)


def built(function, arguments, module):
    """The kernel, if it is there already."""
    before = module.build.cache_info().misses
    kernel = module.build(function, tuple((a.dtype, a.ndim, a.device) for a in arguments))
    assert module.build.cache_info().misses == before, function.__name__
    return kernel


def test_a_compiler_that_fails_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Python.h: No such file or directory\nand more")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fail)
    compiled.build.cache_clear()
    x, scale = torch.randn(30, 40), torch.tensor([0.1])
    try:
        with kernels.use("compiled"):
            with pytest.warns(UserWarning, match="cannot build kernels .*Python.h: No such file"):
                y = ste(x, scale, -8, 7)
            assert torch.equal(ste(x, scale, -8, 7), y)  # a second warning would be an error
        assert torch.equal(y, reference.fake_quantize(x, scale, -8, 7, None)[0])
    finally:
        compiled.build.cache_clear()
