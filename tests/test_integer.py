"""The integer forward against the float path: a convolution of codes is the convolution of the values."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sklearn import datasets
from torch import nn

import qat
from qat.functional import lsq
from qat.functional.integer import Grid, IntegerConv2d
from qat.kernels import integer

pytestmark = pytest.mark.skipif(not integer.available(), reason="this CPU does not convolve int8 codes exactly")

RANGES = {"unsigned 4": (0, 15), "signed 4": (-8, 7), "unsigned 8": (0, 255), "signed 8": (-128, 127), "2": (0, 3)}
GEOMETRIES = {
    "3x3": (16, 8, 3, [1, 1], [1, 1], [1, 1], 1),
    "stride": (16, 8, 3, [2, 1], [1, 0], [1, 1], 1),
    "dilation": (16, 8, 3, [1, 1], [2, 2], [2, 2], 1),
    "groups": (16, 8, 3, [1, 1], [1, 1], [1, 1], 4),
    "depthwise": (16, 16, 3, [1, 1], [1, 1], [1, 1], 16),
    "1x1": (5, 7, 1, [1, 1], [0, 0], [1, 1], 1),
    "stem": (3, 8, 7, [2, 2], [3, 3], [1, 1], 1),
}


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 2e-6) -> bool:
    """Equal within float32 rounding of sums."""
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


@pytest.mark.parametrize("bits", RANGES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_equals_the_convolution_of_values(name: str, bits: str) -> None:
    inputs, outputs, kernel, stride, padding, dilation, groups = GEOMETRIES[name]
    geometry = (stride, padding, dilation, groups)
    qmin, qmax = RANGES[bits]
    x = torch.randn(3, inputs, 9, 10)
    weight = torch.randn(outputs, inputs // groups, kernel, kernel) * 0.1
    state = [x, torch.tensor([2.5 / qmax]), weight, torch.full((outputs,), -0.02), torch.randn(outputs)]
    ours = [t.clone().requires_grad_() for t in state]
    float_ = [t.clone().requires_grad_() for t in state]

    y = IntegerConv2d.apply(*ours, Grid(qmin, qmax, 0.3), Grid(-7, 7, 0.2), geometry, True, False)[0]
    expected = F.conv2d(
        lsq(float_[0], float_[1], qmin, qmax, None, 0.3), lsq(float_[2], float_[3], -7, 7, 0, 0.2), float_[4], *geometry
    )
    assert close(y, expected)
    g = torch.randn_like(expected)
    y.backward(g)
    expected.backward(g)
    for i, (a, b) in enumerate(zip(ours, float_, strict=True)):
        assert a.grad is not None
        if i == 1:  # from a byte per element: unbiased, within 1/504 of a step each
            slack = (g.abs().sum() * weight.abs().max() * kernel * kernel / 504 * 0.3).item()
            assert abs((a.grad - b.grad).item()) <= slack
        else:
            assert close(a.grad, b.grad)


def test_sums_beyond_sixteen_bits_do_not_saturate() -> None:
    x = torch.full((1, 64, 5, 5), 255.0)
    weight = torch.full((4, 64, 3, 3), 127.0)
    one = torch.ones(1)
    geometry = ([1, 1], [1, 1], [1, 1], 1)
    y = IntegerConv2d.apply(
        x, one, weight, torch.ones(4), None, Grid(0, 255, 1.0), Grid(-127, 127, 1.0), geometry, False, False
    )[0]
    assert y.max().item() == 255 * 127 * 64 * 9


@pytest.mark.parametrize("where", ["input", "weight"])
def test_nan_stays_nan(where: str) -> None:
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(3, 4, 3, 3)
    (x if where == "input" else weight).view(-1)[7] = float("nan")
    geometry = ([1, 1], [1, 1], [1, 1], 1)
    arguments = (Grid(0, 15, 1.0), Grid(-7, 7, 1.0), geometry, False, False)
    y = IntegerConv2d.apply(x, torch.tensor([0.1]), weight, torch.full((3,), 0.1), None, *arguments)[0]
    assert y.isnan().any()
    assert y.isnan().all() or where == "weight"  # a weight's NaN poisons its own output channel
    if where == "weight":
        assert y[:, 0].isnan().all()
        assert not y[:, 1:].isnan().any()


def net() -> nn.Module:
    """Convolutions of several kinds and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding="same"),
        nn.ReLU(),
        nn.Conv2d(16, 32, 1, bias=False),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def pair(bits: int = 4) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The same network with integer and with fake forward, calibrated; and images."""
    torch.manual_seed(0)
    model, x = net(), torch.randn(8, 3, 12, 12)
    models = []
    for forward in ("integer", "fake"):
        twin = qat.quantize(copy.deepcopy(model), qat.QuantConfig(bits=bits, forward=forward))
        qat.calibrate(twin, [x])
        models.append(twin)
    return models[0], models[1], x


def test_plan_says_which_layers_run_on_integers() -> None:
    for forward, linear in (("integer", "integer"), ("auto", "fake")):  # linear layers gain nothing
        planned = {e.name: e.forward for e in qat.plan(net(), qat.QuantConfig(forward=forward)).quantized}
        assert planned == {"0": "integer", "2": "fake", "4": "fake", "6": "integer", "9": linear}
    assert {e.forward for e in qat.plan(net(), qat.QuantConfig(forward="fake")).quantized} == {"fake"}


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_model_trains_alike_on_integers_and_floats(bits: int) -> None:
    ours, fake, x = pair(bits)
    a, b = ours.train()(x), fake.train()(x)
    # A sum rounded otherwise may flip a code further on: outputs agree to well below one step, not to the last bit.
    assert (a - b).norm() <= 1e-2 * b.norm()
    a.square().sum().backward()
    b.square().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), fake.parameters(), strict=True):
        if p.requires_grad:
            assert p.grad is not None, name
            assert (p.grad - q.grad).norm() <= 3e-2 * q.grad.norm() + 1e-6, name


def test_what_is_kept_for_backward_is_two_bytes_per_input_element() -> None:
    model = qat.quantize(
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)), qat.QuantConfig(forward="auto", learn_input_scale=True)
    )
    x = torch.randn(4, 16, 8, 8)
    qat.calibrate(model, [x])
    parameters = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() not in parameters:
            kept[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.train()(x.requires_grad_())
    assert sum(kept.values()) == 2 * x.numel()


@pytest.mark.parametrize("why", ["autocast", "disabled", "hook", "double", "empty", "unavailable", "compiling"])
def test_falls_back_to_the_float_path(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, fake, x = pair()
    called = []
    monkeypatch.setattr(IntegerConv2d, "forward", staticmethod(lambda *a: called.append(a)))
    ours.eval(), fake.eval()
    if why == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ours(x), fake(x))
    elif why == "disabled":
        with qat.disabled(ours), qat.disabled(fake):
            assert torch.equal(ours(x), fake(x))
    elif why == "hook":
        seen = []
        for m in ours.modules():
            if hasattr(m, "input_quantizer"):
                m.input_quantizer.register_forward_hook(lambda *a: seen.append(a))
        assert torch.equal(ours(x), fake(x))
        assert len(seen) == 5
    elif why == "double":
        assert torch.equal(ours.double()(x.double()), fake.double()(x.double()))
    elif why == "empty":
        assert ours(x[:0]).shape == (0, 10)
    elif why == "unavailable":
        monkeypatch.setattr(integer, "available", lambda: False)
        assert torch.equal(ours(x), fake(x))
    else:
        assert torch.equal(torch.compile(ours, backend="eager")(x), fake(x))
    assert not called


def test_choice_travels_in_the_checkpoint(tmp_path) -> None:
    ours, _, x = pair()
    qat.save(ours, tmp_path / "m.ckpt")
    again = qat.load(tmp_path / "m.ckpt", net())
    assert [m.forward_mode for m in again.modules() if hasattr(m, "forward_mode")].count("integer") == 3
    assert torch.equal(again(x), ours.eval()(x))


@pytest.mark.parametrize("shape", [(128,), (5, 128), (2, 3, 128)])
def test_linear_takes_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    layers = []
    for forward in ("integer", "fake"):
        torch.manual_seed(1)
        layer = qat.quantize(nn.Linear(128, 10), qat.QuantConfig(bits=8, forward=forward))
        qat.calibrate(layer, [torch.randn(64, 128)])
        layers.append(layer.eval())
    x = torch.randn(shape)
    a, b = (layer(x) for layer in layers)
    assert a.shape == b.shape == (*shape[:-1], 10)
    assert close(a, b)


@pytest.mark.parametrize("weight_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("input_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sizes", [(2, 8, 6, 5), (2, 8, 1, 1), (2, 1, 6, 5)])
def test_output_lies_in_memory_as_that_of_conv2d(sizes, input_format, weight_format) -> None:
    """A model that calls `view` on it would break otherwise."""
    layer = nn.Conv2d(sizes[1], 4, 3, padding=1).to(memory_format=weight_format)
    x = torch.randn(sizes).contiguous(memory_format=input_format)
    expected = layer(x)
    quantized = qat.quantize(copy.deepcopy(layer), bits=4)
    assert quantized.forward_mode == "integer" or sizes[1] == 1
    qat.calibrate(quantized, [x])
    assert quantized(x).stride() == expected.stride()


@pytest.mark.parametrize("model", ["float", "integer"])
@pytest.mark.parametrize("saturated", [False, True])
def test_scale_gradient_of_a_byte_is_within_half_a_percent(saturated: bool, model: str) -> None:
    """RMS error of 100 draws against the RMS of LSQ's closed form (eqs. 2 and 3) in float64."""
    generator = torch.Generator().manual_seed(1)
    qmin, qmax = 0, 15
    scale = torch.tensor([0.04 if saturated else 0.4])
    errors, exact = [], []
    for _ in range(100):
        x = torch.randn(4, 16, 8, 8, generator=generator).abs().clamp_max(5.9)
        g = torch.randn(x.shape, generator=generator)
        s = scale.clone().requires_grad_()
        if model == "float":
            lsq(x.requires_grad_(), s, qmin, qmax, lean=True).backward(g)
        else:  # the identity as a 1x1 convolution hands g on as it is
            eye, one = torch.eye(16)[:, :, None, None], torch.ones(16)
            arguments = Grid(qmin, qmax, 1.0), Grid(-1, 1, 1.0), ([1, 1], [0, 0], [1, 1], 1), True, False
            IntegerConv2d.apply(x.requires_grad_(), s, eye, one, None, *arguments)[0].backward(g)
        v = x.detach().double() / scale.double()
        slope = torch.where(v > qmax, float(qmax), torch.where(v < qmin, float(qmin), v.round() - v))
        exact.append((slope * g.double()).sum())
        errors.append(s.grad.double()[0] - exact[-1])
    assert bool((v > qmax).any()) == saturated
    ratio = torch.stack(errors).square().mean().sqrt() / torch.stack(exact).square().mean().sqrt()
    assert 0 < ratio <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 4])
def test_trained_model_says_the_same_on_integers_and_floats(bits: int) -> None:
    """Top-1 on scikit-learn's digits, all 1797 of them: at most one differs."""
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None].div(8).sub(1).expand(-1, 3, -1, -1).contiguous()
    labels = torch.tensor(digits.target)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    model = qat.quantize(model, bits=bits)
    qat.calibrate(model, [images[:256]])
    optimizer = torch.optim.Adam(qat.param_groups(model, lr=3e-3))
    for _ in range(8):
        for index in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[index]), labels[index]).backward()
            optimizer.step()
    model.eval()
    answers = []
    for mode in ("integer", "fake"):
        for layer in model.modules():
            if hasattr(layer, "forward_mode"):
                layer.forward_mode = mode
        with torch.no_grad():
            answers.append(model(images).argmax(1))
    assert (answers[0] == labels).float().mean() > 0.95
    assert (answers[0] == answers[1]).float().mean() >= 0.999
