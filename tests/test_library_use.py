"""The loop of the README in somebody else's training code: plain torch, no Lightning, no Hydra."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import qat

ROOT = Path(__file__).resolve().parents[1]


class Digits(nn.Module):
    """A small convolutional network, as anybody would write it."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Linear(32 * 16, 10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


@pytest.fixture(scope="module")
def data():
    """Training and test images, 8x8, in a fixed order."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(images[order], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels[order])
    return (x[:1400], y[:1400]), (x[1400:], y[1400:])


def train(model, optimizer, data, epochs):
    x, y = data
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, data) -> float:
    x, y = data
    return (model.eval()(x).argmax(1) == y).double().mean().item() * 100


@pytest.fixture(scope="module")
def trained(data):
    """A float model to begin with."""
    torch.manual_seed(0)
    model = Digits()
    train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), data[0], epochs=3)
    assert accuracy(model, data[1]) > 95
    return model


def copy_of(model):
    fresh = Digits()
    fresh.load_state_dict(model.state_dict())
    return fresh


OPTIMIZERS = {
    "groups of ours": lambda m: torch.optim.SGD(qat.param_groups(m, lr=0.01, weight_decay=1e-4), momentum=0.9),
    "all parameters": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    "adam": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bits", [4, 2])
def test_quantize_calibrate_train(trained, data, bits, optimizer, tmp_path):
    """Two epochs at low bits keep the accuracy; the saved model is the trained one."""
    model = copy_of(trained)
    model = qat.quantize(model, bits=bits)
    qat.calibrate(model, data[0][0].split(100)[:4])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, OPTIMIZERS[optimizer](model), data[0], epochs=2)
    after = accuracy(model, data[1])
    assert after > accuracy(trained, data[1]) - (2 if bits == 4 else 5)
    assert after > 85
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == before.keys() - {"features.0.input_quantizer.scale"}  # the image's own is fixed

    qat.save(model, tmp_path / "digits.ckpt")
    again = qat.load(tmp_path / "digits.ckpt", model=Digits())
    assert accuracy(again, data[1]) == after
    assert accuracy(qat.dequantize(again), data[1]) != 0


def test_from_scratch_without_a_float_model(data):
    """Two epochs at 4 bits from random weights."""
    model = qat.quantize(Digits(), bits=4)
    qat.calibrate(model, [data[0][0][:256]])
    train(model, torch.optim.SGD(qat.param_groups(model, lr=0.05), momentum=0.9), data[0], epochs=2)
    assert accuracy(model, data[1]) > 85


def test_bits_may_go_down_while_training(trained, data):
    model = qat.quantize(copy_of(trained), bits=8)
    qat.calibrate(model, [data[0][0][:256]])
    optimizer = torch.optim.SGD(qat.param_groups(model, lr=0.01), momentum=0.9)
    for bits in (6, 4, 3):
        qat.set_bits(model, bits, "*")
        train(model, optimizer, data[0], epochs=1)
    assert accuracy(model, data[1]) > 90


def test_mixed_precision_and_gradient_scaling(trained, data):
    """bf16 autocast, accumulation over two batches, clipping: a loop of today."""
    model = qat.quantize(copy_of(trained), bits=4)
    qat.calibrate(model, [data[0][0][:256]])
    optimizer = torch.optim.SGD(qat.param_groups(model, lr=0.01), momentum=0.9)
    x, y = data[0]
    model.train()
    for i, batch in enumerate(torch.randperm(len(y)).split(50)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch]) / 2
        loss.backward()
        if i % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert accuracy(model, data[1]) > 90


def test_param_groups():
    """Every trainable parameter once: weights decay, norms, biases and scales do not; frozen ones are left out."""
    model = qat.quantize(Digits(), bits=4)
    model.classifier.bias.requires_grad_(False)
    groups = {g["name"]: g for g in qat.param_groups(model, lr=0.1, weight_decay=1e-4, scale_lr=0.01)}
    names = {id(p): n for n, p in model.named_parameters()}
    got = {name: {names[id(p)] for p in g["params"]} for name, g in groups.items()}
    assert got == {
        "weights": {"features.0.weight", "features.3.weight", "classifier.weight"},
        "norms and biases": {"features.1.weight", "features.1.bias", "features.4.weight", "features.4.bias"},
        "scales": {n for n in names.values() if n.endswith("scale")} - {"features.0.input_quantizer.scale"},
    }
    assert [(g["lr"], g["weight_decay"]) for g in groups.values()] == [(0.1, 1e-4), (0.1, 0.0), (0.01, 0.0)]
    assert [g["name"] for g in qat.param_groups(nn.Linear(2, 2, bias=False), lr=0.1)] == ["weights"]


PROCESS = """
import sys, torch, qat
from torch import nn
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
model = qat.quantize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), bits=4)
data = torch.load(f"{folder}/data.pt")
qat.calibrate(model, data[rank])
calibrated = {k: v.clone() for k, v in model.state_dict().items()}
wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(qat.param_groups(model, lr=0.1), lr=0.1)
for x in data[rank][:3]:
    optimizer.zero_grad()
    wrapped(x).square().mean().backward()
    optimizer.step()
torch.save((calibrated, model.state_dict()), f"{folder}/{rank}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Each has its own batches; both arrive at the scales of one process that has all, and stay equal in training."""
    batches = [[(10.0**r) * torch.randn(8, 4).sub(r) for _ in range(3)] for r in range(2)]
    torch.save(batches, tmp_path / "data.pt")
    runs = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(rank), str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors.decode()
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    torch.manual_seed(0)
    model = qat.quantize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), bits=4)
    qat.calibrate(model, batches[1] + batches[0])
    for key, value in model.state_dict().items():
        assert torch.equal(results[0][0][key], value), key
        assert torch.equal(results[1][0][key], value), key
        assert torch.equal(results[0][1][key], results[1][1][key]), key
    assert not torch.equal(results[0][1]["2.weight"], results[0][0]["2.weight"])
