"""Quantized layers against torch's own operations on fake-quantized tensors, over the shapes that torch allows."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.quantizers import Quantizer


def fake(q: Quantizer, x: Tensor) -> Tensor:
    """Values of x by torch's own fake-quantize operations."""
    if q.axis is None:
        return torch.fake_quantize_per_tensor_affine(x.detach(), q.step.item(), 0, q.qmin, q.qmax)
    zeros = torch.zeros(q.step.shape, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x.detach(), q.step, zeros, q.axis, q.qmin, q.qmax)


def quantized(layer: nn.Module, x: Tensor, bits=4) -> nn.Module:
    qat.quantize(layer, qat.QuantConfig(bits=bits, first_last_bits=None, learn_input_scale=True))
    qat.calibrate(layer, [x])
    return layer


CONVOLUTIONS = {
    "plain": ({}, (2, 4, 7, 7)),
    "one by one": ({"kernel_size": 1}, (2, 4, 7, 7)),
    "rectangular": ({"kernel_size": (1, 5), "padding": (0, 2), "stride": (2, 1)}, (2, 4, 7, 9)),
    "stride": ({"stride": 2, "padding": 1}, (2, 4, 7, 7)),
    "dilation": ({"dilation": 2, "padding": 2}, (2, 4, 7, 7)),
    "groups": ({"groups": 2}, (2, 4, 7, 7)),
    "depthwise": ({"groups": 4, "out_channels": 4}, (2, 4, 7, 7)),
    "depthwise, two each": ({"groups": 4, "out_channels": 8, "padding": 1}, (2, 4, 7, 7)),
    "no bias": ({"bias": False}, (2, 4, 7, 7)),
    "same": ({"padding": "same"}, (2, 4, 7, 7)),
    "same, even kernel": ({"padding": "same", "kernel_size": 4}, (2, 4, 7, 7)),
    "same, dilated": ({"padding": "same", "kernel_size": 2, "dilation": 3}, (2, 4, 7, 7)),
    "valid": ({"padding": "valid"}, (2, 4, 7, 7)),
    "reflect": ({"padding": 2, "padding_mode": "reflect"}, (2, 4, 7, 7)),
    "replicate": ({"padding": 2, "padding_mode": "replicate"}, (2, 4, 7, 7)),
    "circular": ({"padding": (1, 2), "padding_mode": "circular"}, (2, 4, 7, 7)),
    "reflect, same, even": ({"padding": "same", "kernel_size": 4, "padding_mode": "reflect"}, (2, 4, 7, 7)),
    "unbatched": ({"padding": 1}, (4, 7, 7)),
    "one pixel": ({"kernel_size": 1}, (1, 4, 1, 1)),
    "one channel each": ({"in_channels": 1, "out_channels": 1}, (2, 1, 7, 7)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch, about the float layer too
@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case, bits):
    """Equal to the float layer of the same values; padding is exact zero; gradients of input, weight, bias flow."""
    arguments, shape = CONVOLUTIONS[case]
    layer = nn.Conv2d(**({"in_channels": 4, "out_channels": 6, "kernel_size": 3} | arguments))
    reference = copy.deepcopy(layer)
    x = torch.randn(shape, requires_grad=True)
    quantized(layer, x, bits)
    with torch.no_grad():
        reference.weight.copy_(fake(layer.weight_quantizer, layer.weight))
    values = fake(layer.input_quantizer, x).requires_grad_()
    y, expected = layer(x), reference(values)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6 * float(expected.detach().abs().max()))

    g = torch.randn_like(y)
    y.backward(g)
    expected.backward(g)
    v = x.detach() / layer.input_quantizer.step
    inside = (v >= layer.input_quantizer.qmin) & (v <= layer.input_quantizer.qmax)
    torch.testing.assert_close(x.grad, values.grad * inside)
    w = layer.weight.detach() / layer.weight_quantizer.step.reshape(-1, 1, 1, 1)
    inside = (w >= layer.weight_quantizer.qmin) & (w <= layer.weight_quantizer.qmax)
    torch.testing.assert_close(layer.weight.grad, reference.weight.grad * inside)
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, reference.bias.grad)
    assert layer.weight_quantizer.scale.grad.isfinite().all()
    assert layer.input_quantizer.scale.grad.isfinite().all()


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (1, 2, 3, 4), (1, 4)])
@pytest.mark.parametrize(("out", "bias"), [(1, False), (5, True)])
def test_linear(shape, out, bias, bits):
    layer, x = nn.Linear(4, out, bias=bias), torch.randn(shape)
    quantized(layer, x, bits)
    expected = F.linear(fake(layer.input_quantizer, x), fake(layer.weight_quantizer, layer.weight), layer.bias)
    y = layer(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6 * float(expected.detach().abs().max()))
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_per_channel_scales_belong_to_output_channels():
    """One output channel larger than the others has the larger scale, also with groups."""
    for groups in (1, 2, 4):
        layer = nn.Conv2d(4, 8, 3, groups=groups)
        layer.weight.data[5] *= 100
        quantized(layer, torch.randn(2, 4, 7, 7))
        assert layer.weight_quantizer.step.argmax() == 5
        assert layer.weight_quantizer.step.shape == (8,)


def test_at_most_two_to_the_bits_levels():
    for bits in (2, 3, 4, 8):
        layer = quantized(nn.Conv2d(4, 6, 3), torch.randn(2, 4, 7, 7).relu(), bits)
        values = layer.input_quantizer(torch.randn(64, 4, 9, 9))
        assert 2 ** (bits - 1) <= len(values.unique()) <= 2**bits
        assert all(len(c.unique()) <= 2**bits - (bits > 2) for c in layer.weight_quantizer(layer.weight))


# --- empty batches ----------------------------------------------------------------------------------------------------


def outcome(model: nn.Module, x: Tensor) -> object:
    """Shape of the output and of the input's gradient, or the type of the error."""
    x = x.clone().requires_grad_()
    try:
        y = model(x)
        y.sum().backward()
    except Exception as error:
        return type(error)
    return y.shape, x.grad.shape, y.dtype


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
        (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (2, 4, 8, 8)),
        (lambda: nn.Linear(4, 1), (2, 4)),
        (lambda: nn.Linear(4, 2), (2, 3, 4)),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)), (2, 3, 8, 8)),
        (lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2)), (2, 3, 4, 4)),
    ],
)
@pytest.mark.parametrize("bits", [1, 4, "bf16", "fp8"])
def test_empty_batches_as_in_float(make, shape, training, bits):
    model, empty = make(), torch.zeros(0, *shape[1:])
    reference = copy.deepcopy(model).train(training)
    qat.quantize(model, bits=bits)
    qat.calibrate(model, [torch.randn(shape)])
    assert outcome(model.train(training), empty) == outcome(reference, empty)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_wrong_inputs_fail_as_in_float():
    layer = quantized(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8))
    for bad in (torch.randn(2, 5, 8, 8), torch.randn(2, 3, 1, 1), torch.randn(3)):
        with pytest.raises(RuntimeError):
            layer(bad)
    with pytest.raises(qat.QatError, match="must be a floating tensor"):
        layer(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))


def test_nan_in_nan_out():
    """A NaN is not hidden by a code: it reaches the output and the gradients, as in float."""
    layer = quantized(nn.Conv2d(3, 4, 1), torch.randn(2, 3, 4, 4))
    layer.forward_mode = "fake"  # integers spread it: tests/test_integer.py
    x = torch.randn(2, 3, 4, 4)
    x[1, 0, 2, 2] = torch.nan
    y = layer(x)
    assert y[1, :, 2, 2].isnan().all()
    assert y.isnan().sum() == 4
    y.sum().backward()
    assert layer.weight.grad.isnan().any()


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4, 8, "bf16", "fp8"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [lambda: nn.Conv2d(3, 4, 3), lambda: nn.Linear(8, 4)])
def test_autocast(make, low, bits):
    """The output has the dtype the float layer's would; scales and their gradients are float32; values are near."""
    layer, x = make(), torch.randn(2, 3, 8, 8)
    reference = copy.deepcopy(layer)
    quantized(layer, x, bits)
    exact = layer(x)
    with torch.autocast("cpu", low):
        y = layer(x)
        again = layer(x.to(low))
        assert y.dtype == again.dtype == reference(x).dtype == low
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)
    y.float().square().sum().backward()
    for p in layer.parameters():
        assert p.dtype == torch.float32
        assert p.grad is None or p.grad.dtype == torch.float32


@pytest.mark.parametrize("method", ["lsq", "ste", "pact", "lsq_plus", "tqt", "dorefa"])
@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.double()])
def test_casts_keep_scales_float32(method, cast):
    """Unrounded, and the same Parameters, so that an optimizer stays good; there and back."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 3, 8, 8)
    qat.quantize(model, qat.QuantConfig(bits=4, method=method))
    qat.calibrate(model, [x])
    quantizers = [m for m in model.modules() if isinstance(m, Quantizer)]
    before = [[(p, p.detach().clone()) for p in q.parameters()] for q in quantizers]
    cast(model)
    assert model[0].weight.dtype != torch.float32
    for q, parameters in zip(quantizers, before, strict=True):
        for p, (same, value) in zip(q.parameters(), parameters, strict=True):
            assert p is same
            assert p.dtype == torch.float32
            assert torch.equal(p, value)
    y = model(x.to(model[0].weight.dtype))
    assert y.dtype == model[0].weight.dtype
    y.float().sum().backward()
    assert model[1].weight.grad.dtype == model[0].weight.dtype
    model.float()
    assert model(x).isfinite().all()


# --- what torch does with modules -------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.conv2, self.fc = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.conv2(self.conv(x).relu()).mean((2, 3)))


def small(bits=4) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(4, 3, 8, 8)
    qat.calibrate(qat.quantize(model, bits=bits), [x])
    return model, x


def grads(model: nn.Module, run, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    y = run(x)
    y.square().sum().backward()
    return y.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("bits", [4, "bf16", "w4afloat"])
def test_compile(bits):
    """One graph without breaks; outputs and gradients of eager mode, also with the bits off and after set_bits."""
    model, x = small(bits)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def check():
        expected, gradients = grads(model, model, x)
        got, same = grads(model, compiled, x)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(same, gradients)

    check()
    if bits == 4:
        with qat.disabled(model):
            check()
        check()
        qat.set_bits(model, 2)
        check()
        qat.dequantize(model)
        check()


def test_compiled_before_it_is_quantized():
    """Compiled code notices the swap, in both ways to compile."""
    for make in (lambda m: torch.compile(m, backend="aot_eager"), lambda m: (m.compile(backend="aot_eager"), m)[1]):
        torch._dynamo.reset()
        model, x = Small(), torch.randn(4, 3, 8, 8)
        compiled = make(model)
        compiled(x)
        qat.calibrate(qat.quantize(model, bits=2), [x])
        torch.testing.assert_close(compiled(x), copy.deepcopy(model)(x))


@pytest.mark.slow
def test_compile_inductor():
    model, x = small()
    torch._dynamo.reset()
    expected, gradients = grads(model, model, x)
    got, same = grads(model, torch.compile(model, fullgraph=True), x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(same, gradients)


def test_export():
    model, x = small()
    model.eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    other = torch.randn(7, 3, 8, 8)
    torch.testing.assert_close(program.module()(other), model(other))


def test_functional_call_and_grad_mode():
    model, x = small()
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters() if name.endswith(("weight", "bias"))}
    assert torch.func.functional_call(model, zeros, (x,)).eq(0).all()
    doubled = {"fc.weight_quantizer.scale": 2 * model.fc.weight_quantizer.scale}
    assert not torch.equal(torch.func.functional_call(model, doubled, (x,)), model(x))
    with torch.no_grad():
        assert not model(x).requires_grad
    with torch.inference_mode():
        assert model(x).is_inference()


def test_gradients_of_frozen_parts():
    """Nothing learns that is frozen; the rest does."""
    for frozen in itertools.product([True, False], repeat=2):
        model, x = small()
        model.conv2.weight.requires_grad_(not frozen[0])
        model.conv2.weight_quantizer.scale.requires_grad_(not frozen[1])
        model(x).sum().backward()
        assert (model.conv2.weight.grad is None) == frozen[0]
        assert (model.conv2.weight_quantizer.scale.grad is None) == frozen[1]
        assert model.conv.weight.grad is not None


def test_the_scale_of_the_image_is_fixed():
    model, x = small()
    x.requires_grad_()
    model(x).sum().backward()
    assert model.conv.input_quantizer.scale.grad is None
    assert model.conv2.input_quantizer.scale.grad is not None


def test_distributed_data_parallel(tmp_path):
    """One process: parameters and their gradients as without it, and calibrate takes the wrapped model."""
    model, x = small()
    expected = grads(model, model, x)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        got = grads(model, wrapped, x)
        torch.testing.assert_close(got, expected)
        before = model.state_dict()
        qat.calibrate(wrapped, [x])
        torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
        with qat.disabled(wrapped):
            wrapped(x)
    finally:
        torch.distributed.destroy_process_group()


def test_data_parallel_replicas():
    model, x = small()
    torch.testing.assert_close(model._replicate_for_data_parallel()(x), model(x))


def test_moving_average_model():
    """Deep-copied, averaged, still quantized."""
    model, x = small()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    model.conv.weight.data.mul_(2)
    average.update_parameters(model)
    average.update_parameters(model)
    assert average(x).isfinite().all()
    assert average.module.conv.input_quantizer.is_calibrated
