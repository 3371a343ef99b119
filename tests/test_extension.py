"""A method from outside: the code in CONTRIBUTING.md's "Adding a method" works as it stands there."""

import copy
import pickle
import re
import sys
import types
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
from torch import nn

import qat
from qat import config, quantizers
from qat.config import QatError
from qat.swap import live_plan

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def qil():
    """The section's code, as a module; its row is taken out again."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Adding a method\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert [b.splitlines()[0].removeprefix("# ").split(";")[0] for b in blocks] == [
        "qat/functional/qil.py",
        "qat/quantizers/qil.py",
        "tests/oracles.py",
    ]
    module = types.ModuleType("qil_from_contributing")
    sys.modules[module.__name__] = module
    before = dict(quantizers.METHODS)
    exec(compile("\n".join(blocks), "CONTRIBUTING.md", "exec"), module.__dict__)
    yield module
    quantizers.METHODS.clear()
    quantizers.METHODS.update(before)
    del sys.modules[module.__name__]


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 5)
    )


def test_one_table_holds_the_methods():
    """The names that the configuration takes are the rows that there are."""
    assert config.METHODS is quantizers.METHODS
    with pytest.raises(QatError, match=r"quant.method must be one of lsq, ste, .*; got 'qil'"):
        qat.QuantConfig(method="qil").check()


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("qmin", [-7, 0])
@pytest.mark.parametrize("c", [0.7, -0.5])
def test_function_equals_its_closed_form(qil, axis, qmin, c):
    x = torch.randn(6, 5, 4, dtype=torch.float64).float()
    n = 1 if axis is None else x.shape[axis]
    center = (c * (1 + torch.rand(n) / 4)).requires_grad_()
    distance = (0.4 * (1 + torch.rand(n) / 4)).requires_grad_()
    x.requires_grad_()
    g = torch.randn_like(x)
    values = qil.QIL.apply(x, center, distance, qmin, 7, axis, 0.1)
    values.backward(g)
    arrays = (t.detach().double().numpy() for t in (x, g, center, distance))
    x_, g_, c_, d_ = arrays
    want = qil.qil(x_, g_, center=c_, distance=d_, qmin=qmin, qmax=7, axis=axis, gain=0.1)
    decided = want.distance > oracles.NEAR
    assert decided.mean() > 0.99
    np.testing.assert_allclose(values.detach().numpy()[decided], want.values[decided], rtol=1e-6)
    np.testing.assert_allclose(x.grad.numpy()[decided], want.grads["x"][decided], rtol=1e-5, atol=1e-7)
    for name, got in (("center", center.grad), ("distance", distance.grad)):
        assert np.all(np.abs(got.numpy() - want.grads[name]) <= 2**-18 * want.sizes[name])


def test_function_keeps_the_promises_of_the_others(qil):
    with pytest.raises(QatError, match=r"write QIL.apply\(...\)"):
        qil.QIL(1)
    with pytest.raises(QatError, match="QIL: center must be float32"):
        qil.QIL.apply(torch.randn(4), torch.ones(1).double(), torch.ones(1), -7, 7, None, 1.0)
    assert qil.QIL.apply(torch.tensor([float("nan"), 0.5]), torch.ones(1), torch.ones(1), -7, 7, None, 1.0)[0].isnan()

    def values(x):
        return qil.QIL.apply(x, torch.tensor([0.5]), torch.tensor([0.4]), -7, 7, None, 1.0)

    x = torch.randn(3, 4)
    assert torch.equal(torch.func.vmap(values)(x), values(x))
    leaf = x.clone().requires_grad_()
    values(leaf).sum().backward()
    assert torch.equal(torch.func.grad(lambda x: values(x).sum())(x), leaf.grad)
    compiled = torch.compile(values, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), values(x))


@pytest.mark.parametrize(
    ("bits", "granularity"), [(2, "channel"), (3, "channel"), (8, "channel"), ("w4a8", "tensor"), (4, 9)]
)
def test_from_quantize_to_load(qil, bits, granularity, tmp_path):
    settings = qat.QuantConfig(bits=bits, method="qil", weight=qat.TensorConfig(granularity=granularity))
    model = qat.quantize(network(), settings)
    images = torch.randn(16, 3, 8, 8)
    qat.calibrate(model, [images])
    optimizer = torch.optim.SGD(qat.param_groups(model, lr=0.05, weight_decay=1e-4), momentum=0.9)
    learned = {g["name"]: g for g in optimizer.param_groups}["scales"]["params"]
    assert len(learned) == 10  # center and distance of each tensor but the image
    before = [p.detach().clone() for p in model.parameters()]
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(images), torch.arange(16) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = {id(p) for p, old in zip(model.parameters(), before, strict=True) if not torch.equal(p, old)}
    assert {id(p) for p in learned} <= moved

    model.eval()
    with torch.no_grad():
        want = model(images)
    path = tmp_path / "model.ckpt"
    qat.save(model, path)
    for other in (qat.load(path, model=network()), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(other(images), want)
    assert {e.weight.method for e in live_plan(model).entries} == {"qil"}
    assert "4 qil" in str(qat.plan(network(), qat.QuantConfig(bits=4, method="qil")))

    layer = model[3]
    quantizer = layer.weight_quantizer
    if quantizer.integer:
        codes = quantizer.encode(layer.weight)
        assert quantizer.qmin <= codes.min() <= codes.max() <= quantizer.qmax
        torch.testing.assert_close(quantizer.decode(codes), quantizer(layer.weight), rtol=1e-6, atol=0)
    qat.set_bits(model, 5)
    assert model(images).isfinite().all()


def test_rules_and_other_methods_go_together(qil):
    rules = [qat.Rule(match="3", method="qil", bits=3)]
    model = qat.quantize(network(), qat.QuantConfig(bits=4, rules=rules))
    assert [type(model[i].weight_quantizer).__name__ for i in (0, 3, 5)] == [
        "LSQQuantizer",
        "QILQuantizer",
        "LSQQuantizer",
    ]
    mixed = qat.QuantConfig(bits=4, weight=qat.TensorConfig(method="qil"))
    plan = qat.plan(network(), mixed)
    assert [(e.weight.method, e.act.method) for e in plan.quantized] == [("qil", "lsq")] * 3
