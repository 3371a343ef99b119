"""The Lightning module and callbacks: modes, losses, optimizer, seeds, and what is kept in checkpoints."""

from __future__ import annotations

import csv
import math
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qat
from qat.callbacks import Calibrate, History
from qat.config import Config, OptimConfig, QatError
from qat.training import AUX_WEIGHT, Classifier, keep_freed_memory, settle_norms

BUILDER: dict[str, Any] = {"name": "none", "num_classes": 3}
Batch = tuple[Tensor, Tensor]


def small_model() -> nn.Module:
    conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
    head = nn.Linear(4, 3)
    return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), head)


class Batches:
    """What our loaders are: sized, and not a list, which Lightning takes for several loaders."""

    def __init__(self, n: int = 2, size: int = 8, seed: int = 0, poison: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.batches = [
            (torch.randn(size, 3, 6, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
            for _ in range(n)
        ]
        if poison is not None:
            self.batches[poison][0][3, 1, 2, 2] = math.nan

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        yield from self.batches


def classifier(model: nn.Module | None = None, stage: str = "quantized", **optim: Any) -> Classifier:
    config = Config(optim=OptimConfig(**optim))
    return Classifier(small_model() if model is None else model, config, stage, BUILDER)


def trainer(tmp_path: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"} | options
    return L.Trainer(
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def fit(engine: L.Trainer, lit: Classifier, train: Batches | None = None, **options: Any) -> None:
    engine.fit(lit, train or Batches(), Batches(seed=1), **options)


class Spy(L.Callback):
    """Notes what a fit does at each step."""

    def __init__(self) -> None:
        self.modes: set[bool] = set()
        self.rates: list[dict[str, float]] = []
        self.dropped: list[Tensor] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        self.modes |= {module.training for module in pl_module.modules()}
        self.rates.append({group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups})
        state = torch.get_rng_state()
        self.dropped.append(F.dropout(torch.ones(64)))
        torch.set_rng_state(state)


# --- modes ------------------------------------------------------------------------------------------------------------


def test_fit_after_test_trains_batch_norm(tmp_path: Path):
    """As train.py does it: a test of the calibrated model, then a fit of the same module."""
    lit = classifier(qat.quantize(small_model(), bits=4))
    spy = Spy()
    engine = trainer(tmp_path, Calibrate(Batches), spy)
    engine.test(lit, Batches(), verbose=False)
    before = lit.model[1].running_mean.clone()
    assert torch.equal(before, torch.zeros(4))  # neither calibration nor a test moves it
    fit(engine, lit)
    assert spy.modes == {True}
    assert not torch.equal(lit.model[1].running_mean, before)


@pytest.mark.parametrize(
    ("momentum", "steps", "expected"),
    [
        (0.1, 240, 0.1),  # the usual one is right for all but the shortest training
        (0.01, 240, 10 / 240),
        (0.0003, 240, 10 / 240),
        (0.0003, 10**6, 0.0003),
        (0.1, 4, 0.5),
        (0.1, 0, 0.5),
        (None, 4, None),  # a plain mean over all steps
    ],
)
def test_momentum_of_norms(momentum: float | None, steps: int, expected: float | None):
    model = nn.Sequential(nn.BatchNorm2d(2, momentum=momentum), nn.LayerNorm(2))  # type: ignore[arg-type]
    settle_norms(model, steps)
    assert model[0].momentum == expected


def test_running_statistics_follow_a_short_training(tmp_path: Path):
    """With a momentum made for long ones, such as MNASNet's, they would stay near mean 0 and variance 1."""
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=0.0003), nn.Flatten(), nn.Linear(108, 3))
    data = Batches(20)
    for images, _ in data.batches:
        images.mul_(5).add_(7)
    fit(trainer(tmp_path, max_epochs=2), classifier(model, "float"), data)
    torch.testing.assert_close(model[0].running_mean, torch.full((3,), 7.0), rtol=0.05, atol=0)
    torch.testing.assert_close(model[0].running_var, torch.full((3,), 25.0), rtol=0.15, atol=0)


# --- loss -------------------------------------------------------------------------------------------------------------

Aux = namedtuple("Aux", ["logits", "aux2", "aux1"])


class WithAux(nn.Module):
    """Returns what GoogLeNet does: logits and auxiliary logits in training, None or plain logits otherwise."""

    def __init__(self, aux: Tensor | None) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.aux = aux

    def forward(self, x: Tensor) -> Tensor | Aux:
        y = self.head(x.mean((2, 3)))
        return Aux(y, self.aux, None) if self.training else y


@pytest.mark.parametrize("aux", [None, torch.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1]]], ids=["none", "one"])
def test_auxiliary_logits(aux: Tensor | None, monkeypatch: pytest.MonkeyPatch):
    lit = classifier(WithAux(aux))
    monkeypatch.setattr(lit, "log", lambda *args, **kwargs: None)
    x, y = Batches(1).batches[0]
    main = F.cross_entropy(lit.model.head(x.mean((2, 3))), y)
    extra = 0 if aux is None else AUX_WEIGHT * F.cross_entropy(aux, y)
    torch.testing.assert_close(lit.step((x, y), "train"), main + extra)
    torch.testing.assert_close(lit.eval().step((x, y), "val"), main)


def test_accuracy_is_in_percent(tmp_path: Path):
    lit = classifier()
    result = trainer(tmp_path).test(lit, Batches(3), verbose=False)[0]
    x, y = (torch.cat(part) for part in zip(*Batches(3), strict=True))
    with torch.no_grad():
        right = (lit.eval()(x).argmax(1) == y).float().mean().item()
    assert result["test/acc"] == pytest.approx(100 * right)
    assert 1 < result["test/acc"] < 100


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_an_empty_batch_is_refused(split: str):
    with pytest.raises(QatError, match=f"at least one image.*{split}"):
        classifier().step((torch.zeros(0, 3, 6, 6), torch.zeros(0, dtype=torch.int64)), split)


@pytest.mark.parametrize("stage", ["float", "quantized"])
def test_nan_in_an_image(tmp_path: Path, stage: str):
    model = small_model()
    if stage == "quantized":
        model = qat.quantize(model, bits=4)
        qat.calibrate(model, Batches())
    with pytest.raises(QatError, match=rf"loss is nan in the {stage} stage, epoch 1, batch 1: the images .* NaN"):
        fit(trainer(tmp_path), classifier(model, stage), Batches(3, poison=1))


@pytest.mark.parametrize(("stage", "key"), [("float", "float_lr"), ("quantized", "lr")])
def test_divergence(tmp_path: Path, stage: str, key: str):
    lit = classifier(stage=stage, lr=1e30, float_lr=1e30)
    with pytest.raises(QatError, match=rf"the {stage} stage, epoch 1, batch \d: .*less than optim.{key}=1e\+30"):
        fit(trainer(tmp_path), lit, Batches(9))


def test_divergence_is_seen_before_the_epoch_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a GPU not every loss is looked at, but the epoch's mean is, before any checkpoint."""
    saver = L.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    lit = classifier()
    monkeypatch.setattr(lit, "training_step", lambda batch, batch_idx: lit.step(batch, "train"))
    with pytest.raises(QatError, match="loss is nan in the quantized stage, epoch 1:"):
        fit(trainer(tmp_path, saver, enable_checkpointing=True), lit, Batches(3, poison=1))
    assert not list(tmp_path.glob("*.ckpt"))


# --- optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_lr", [None, 0.003])
@pytest.mark.parametrize(("stage", "rate"), [("float", 0.5), ("quantized", 0.25)])
def test_groups(tmp_path: Path, stage: str, rate: float, scale_lr: float | None):
    """Weight decay on weights only; every trained parameter in one group; each stage its own rate."""
    model = qat.quantize(small_model(), bits=4)
    lit = classifier(model, stage, lr=0.25, float_lr=0.5, scale_lr=scale_lr, weight_decay=0.01)
    lit.trainer = trainer(tmp_path, max_steps=10)
    optimizer = lit.configure_optimizers()["optimizer"]
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {g["name"]: ({names[id(p)] for p in g["params"]}, g["weight_decay"]) for g in optimizer.param_groups}
    scales = {"0.weight_quantizer.scale", "6.weight_quantizer.scale", "6.input_quantizer.scale"}  # not the image's
    assert groups == {
        "weights": ({"0.weight", "6.weight"}, 0.01),
        "norms and biases": ({"1.weight", "1.bias", "6.bias"}, 0.0),
        "scales": (scales, 0.0),
    }
    assert [g["initial_lr"] for g in optimizer.param_groups] == [rate, rate, rate if scale_lr is None else scale_lr]


@pytest.mark.parametrize(("epochs", "accumulate"), [(1, 1), (2, 1), (2, 2)])
def test_schedule(tmp_path: Path, epochs: int, accumulate: int):
    """Half a cosine over the optimizer's steps, all groups alike."""
    spy = Spy()
    model = qat.quantize(small_model(), bits=4)
    lit = classifier(model, lr=0.1, scale_lr=0.01)
    engine = trainer(tmp_path, Calibrate(Batches), spy, max_epochs=epochs, accumulate_grad_batches=accumulate)
    fit(engine, lit, Batches(6))
    total = 6 * epochs // accumulate
    assert engine.global_step == total
    steps = [batch // accumulate for batch in range(6 * epochs)]
    factors = [0.5 * (1 + math.cos(math.pi * step / total)) for step in steps]
    assert [r["weights"] for r in spy.rates] == pytest.approx([0.1 * f for f in factors])
    assert [r["scales"] for r in spy.rates] == pytest.approx([0.01 * f for f in factors])
    assert engine.optimizers[0].param_groups[0]["lr"] == pytest.approx(0)


def test_a_longer_resumption_has_a_longer_schedule(tmp_path: Path):
    """torch restores the attributes of a schedule's callable: the old total would leave rate 0 for the new epochs."""
    first = trainer(tmp_path, max_epochs=1)
    fit(first, classifier(lr=0.1))
    first.save_checkpoint(tmp_path / "last.ckpt")
    spy = Spy()
    second = trainer(tmp_path, spy, max_epochs=2)
    fit(second, classifier(lr=0.1), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert len(spy.rates) == 2
    assert spy.rates[1]["weights"] == pytest.approx(0.1 * 0.5 * (1 + math.cos(math.pi * 3 / 4)))


# --- seeds ------------------------------------------------------------------------------------------------------------


def drawn(tmp_path: Path, seed: int, stage: str = "float", epochs: int = 2) -> list[Tensor]:
    spy = Spy()
    lit = Classifier(small_model(), Config(seed=seed), stage, BUILDER)
    fit(trainer(tmp_path, spy, max_epochs=epochs), lit)
    return spy.dropped


def test_dropout_depends_on_seed_stage_and_epoch_only(tmp_path: Path):
    torch.manual_seed(1)
    first = drawn(tmp_path, seed=5)
    torch.manual_seed(2)
    torch.randn(100)
    assert all(torch.equal(a, b) for a, b in zip(first, drawn(tmp_path, seed=5), strict=True))
    for other in (drawn(tmp_path, seed=6), drawn(tmp_path, seed=5, stage="quantized")):
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[2])  # the first batches of two epochs


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoint_is_plain_data(tmp_path: Path):
    model = qat.quantize(small_model(), bits=4)
    lit = Classifier(model, Config(seed=3), "quantized", BUILDER, {"float_accuracy": 12.5})
    engine = trainer(tmp_path, Calibrate(Batches))
    fit(engine, lit)
    engine.save_checkpoint(tmp_path / "x.ckpt")
    about = torch.load(tmp_path / "x.ckpt", weights_only=True)["qat"]
    assert about["stage"] == "quantized"
    assert about["results"] == {"float_accuracy": 12.5}
    assert about["builder"] == BUILDER
    assert about["config"]["seed"] == 3
    assert [entry["name"] for entry in about["plan"]] == ["0", "6"]
    x = Batches(1).batches[0][0]
    assert torch.equal(qat.load(tmp_path / "x.ckpt", model=small_model())(x), model.eval()(x))


# --- callbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fit", "test"])
def test_calibrates_what_is_not_calibrated(tmp_path: Path, how: str):
    lit = classifier(qat.quantize(small_model(), bits=4))
    asked: list[int] = []

    def some() -> Batches:
        asked.append(1)
        return Batches()

    engine = trainer(tmp_path, Calibrate(some))
    for _ in range(2):  # the second time nothing is left to do
        if how == "fit":
            fit(engine, lit)
        else:
            engine.test(lit, Batches(), verbose=False)
        assert len(asked) == 1


def test_leaves_float_models_alone(tmp_path: Path):
    def none() -> Batches:
        raise AssertionError

    fit(trainer(tmp_path, Calibrate(none)), classifier())


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lit = classifier()
    path = tmp_path / "metrics.csv"
    fit(trainer(tmp_path, History(path, show=True), max_epochs=2), lit)
    first, second = rows(path)
    assert (first["stage"], first["epoch"], first["step"], second["epoch"], second["step"]) == (
        "quantized",
        "0",
        "2",
        "1",
        "4",
    )
    assert all(float(first[key]) > 0 for key in ("train/loss", "val/loss", "lr", "seconds"))
    assert 0 <= float(first["val/acc"]) <= 100
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in printed] == [["quantized", "epoch", "1/2"], ["quantized", "epoch", "2/2"]]


def test_history_without_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fit(trainer(tmp_path, History(tmp_path / "metrics.csv", show=False), limit_val_batches=0), classifier())
    assert rows(tmp_path / "metrics.csv")[0]["val/acc"] == ""
    assert not capsys.readouterr().out


def test_history_replaces_rows_of_a_killed_run(tmp_path: Path):
    """The row of an epoch is written before its checkpoint: whoever resumes runs that epoch, and those after, again."""
    history = History(tmp_path / "metrics.csv", show=False)
    for stage, epoch, loss in [("float", "0", "1"), ("quantized", "0", "2"), ("quantized", "1", "3")]:
        history.write({"stage": stage, "epoch": epoch, "train/loss": loss})
    history.write({"stage": "quantized", "epoch": "0", "train/loss": "4"})
    assert [(r["stage"], r["epoch"], r["train/loss"]) for r in rows(tmp_path / "metrics.csv")] == [
        ("float", "0", "1"),
        ("quantized", "0", "4"),
    ]


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_keep_freed_memory_says_whether(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())  # a C library without mallopt
    assert keep_freed_memory() is False
