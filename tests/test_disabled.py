"""With the bits off, a quantized model is the float model, bit for bit: every family, both modes, gradients too."""

import copy

import pytest
import torch
import zoo
from torch import Tensor, nn

import qat


def outputs(result) -> list[Tensor]:
    """The tensors in what a model returned."""
    return [result] if isinstance(result, Tensor) else [t for t in result if t is not None]


def step(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs and parameter gradients of one training step, from one random state."""
    torch.manual_seed(1)
    model.train().zero_grad()
    result = outputs(model(x))
    sum(t.square().sum() for t in result).backward()
    return [t.detach() for t in result], [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in zoo.SLOW else []) for name in zoo.FAMILIES]
)
def test_families(family):
    """Disabled: equal to float in eval and train, outputs and gradients. Then calibrated: trains, all finite."""
    build, size = zoo.FAMILIES[family]
    model = build()
    x = torch.randn(2, 3, size, size)
    reference = copy.deepcopy(model)
    qat.quantize(model, bits=4)

    reference.eval(), model.eval()
    with torch.no_grad(), qat.disabled(model):
        assert all(map(torch.equal, outputs(reference(x)), outputs(model(x))))
    expected, gradients = step(reference, x)
    with qat.disabled(model):
        got, same = step(model, x)
    assert all(map(torch.equal, expected, got))
    assert len(gradients) == len(same)
    assert all(map(torch.equal, gradients, same))
    for key, value in reference.state_dict().items():  # batch norms moved alike
        assert torch.equal(model.state_dict()[key], value)

    qat.calibrate(model, [x])
    quantized, gradients = step(model, x)
    assert all(t.isfinite().all() for t in [*quantized, *gradients])
    assert not torch.equal(quantized[0], expected[0])
    learned = [p for q in model.modules() if isinstance(q, qat.swap.Quantizer) for p in q.parameters()]
    assert all(p.grad is not None for p in learned if p.requires_grad)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 4))


@pytest.mark.parametrize("bits", [1, 2, "w4a8", "w3afloat", "bf16", "fp16", "fp8"])
def test_every_form_of_bits_goes_off(bits):
    model, x = net(), torch.randn(2, 3, 8, 8)
    expected = model(x)
    qat.quantize(model, bits=bits)  # not calibrated: with the bits off nobody asks for a scale
    with qat.disabled(model) as same:
        assert same is model
        assert torch.equal(model(x), expected)


def test_float_bits_change_nothing():
    model = net()
    types, keys = [type(m) for m in model.modules()], list(model.state_dict())
    assert qat.quantize(model, bits="float") is model
    assert [type(m) for m in model.modules()] == types
    assert list(model.state_dict()) == keys
    assert not model._load_state_dict_pre_hooks


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_layout(dtype, memory_format):
    """Off: equal. On: the dtype and layout that the float model's output has."""
    model = nn.Sequential(*net()[:3]).to(dtype).to(memory_format=memory_format)
    x = torch.randn(2, 3, 8, 8, dtype=dtype).to(memory_format=memory_format)
    expected = model(x)
    qat.calibrate(qat.quantize(model, bits=4), [x])
    with qat.disabled(model):
        assert torch.equal(model(x), expected)
    got = model(x)
    assert (got.dtype, got.stride()) == (expected.dtype, expected.stride())
    assert not torch.equal(got, expected)
    assert (got - expected).abs().mean() < expected.abs().mean()


def test_nesting_and_exceptions_restore():
    model, x = net(), torch.randn(2, 3, 8, 8)
    expected = model(x)
    qat.calibrate(qat.quantize(model, bits=2), [x])
    on = model(x)
    with qat.disabled(model):
        with qat.disabled(model):
            assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
        with pytest.raises(ZeroDivisionError), qat.disabled(model):
            _ = 1 / 0
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), on)
    with pytest.raises(ZeroDivisionError), qat.disabled(model):
        _ = 1 / 0
    assert torch.equal(model(x), on)
    with qat.disabled(model[2]):  # a part of the model
        partly = model(x)
    assert not torch.equal(partly, on)
    assert not torch.equal(partly, expected)
