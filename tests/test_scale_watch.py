"""ScaleWatch: a scale that stops moving, explodes, vanishes or clips its weight is named, and a healthy one is not."""

import warnings
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qat
from qat import kernels
from qat.callbacks import ScaleWatch
from qat.quantizers import METHODS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class Lit(L.LightningModule):
    """The smallest loop; `scale_lr` is the learning rate of the scales."""

    def __init__(self, model, scale_lr=0.01, forget=()):
        super().__init__()
        self.model, self.scale_lr, self.forget = model, scale_lr, forget

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        groups = qat.param_groups(self.model, lr=0.01, weight_decay=1e-4, scale_lr=self.scale_lr)
        forgotten = {id(q.raw) for q in self.forget}
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in forgotten]
        tqt = any(getattr(m, "method", "") == "tqt" for m in self.model.modules())
        return (torch.optim.Adam if tqt else torch.optim.SGD)(groups, lr=0.01)  # Adam: as its paper does


@pytest.fixture
def loader(seed):
    x = torch.randn(24, 3, 8, 8)
    return DataLoader(TensorDataset(x, torch.arange(24) % 5), batch_size=8)


def quantized(method="lsq", **options):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    bits = "w{}a{}".format(*(4 if 4 in q.allowed_bits else q.allowed_bits[0] for q in METHODS[method]))
    model = qat.quantize(model, qat.QuantConfig(bits=bits, method=method, **options))
    qat.calibrate(model, [torch.randn(64, 3, 8, 8)])
    return model


def fit(lit, loader, watch=None, **options):
    """Train; returns the warnings as {kind: names}."""
    watch = watch or ScaleWatch()
    settings = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "callbacks": [watch]}
    trainer = L.Trainer(**settings | options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(lit, loader)
    return told(caught)


def told(caught):
    lines = [str(w.message) for w in caught if str(w.message).startswith("scales")]
    assert all("\n" not in line for line in lines)
    kinds = {"did not move": "still", "exploded": "useless", "clip": "clipped"}
    found = [(next(k for word, k in kinds.items() if word in line), line.rpartition(": ")[2]) for line in lines]
    assert len({kind for kind, _ in found}) == len(found)  # one line per kind
    return {kind: names.split(", ") for kind, names in found}


@pytest.mark.parametrize("method", METHODS)
def test_says_nothing_of_healthy_scales(method, loader):
    assert fit(Lit(quantized(method)), loader, max_epochs=2) == {}


def test_says_nothing_of_a_float_model(loader):
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    assert fit(Lit(model), loader) == {}


@pytest.mark.parametrize("method", [m for m, (_, act) in METHODS.items() if act.learns])
def test_names_what_does_not_move(method, loader):
    model = quantized(method)
    stuck = model[2].input_quantizer
    assert fit(Lit(model, forget=[stuck]), loader) == {"still": ["2.input_quantizer"]}


class Schedule(Lit):
    """As `train.py` does: a cosine over all steps."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def moved_until_spent(factor, loader):
    """Warnings per epoch of four, where a scale's gradient is so small that only a high rate moves it."""
    model = quantized()
    model[2].input_quantizer.raw.register_hook(lambda g: torch.full_like(g, 1e-4))
    lit = Schedule(model, scale_lr=0.1)
    lit.factor = factor
    return fit(lit, loader, max_epochs=4)


def test_a_rate_that_has_run_out_moves_nothing(loader):
    """At the end of a schedule steps are smaller than the last bit; that is no fault. At its start it is one."""
    assert moved_until_spent(lambda step: 1.0 if step < 9 else 1e-4, loader) == {}
    assert moved_until_spent(lambda step: 1.0 if step < 9 else 0.0, loader) == {}
    model = quantized()
    model[2].input_quantizer.raw.register_hook(torch.zeros_like)
    lit = Schedule(model)
    lit.factor = lambda step: 1.0 if step < 2 else 0.0
    assert fit(lit, loader) == {"still": ["2.input_quantizer"]}


def test_no_rate_asked_for(loader):
    """`optim.scale_lr=0` is a choice."""
    assert fit(Lit(quantized(), scale_lr=0.0), loader) == {}


def test_without_steps_nothing_had_to_move(loader):
    model = quantized()
    lit = Lit(model, forget=[m for m in model.modules() if hasattr(m, "raw")])
    assert len(fit(lit, loader)["still"]) == 5  # the image's scale is fixed
    assert fit(lit, loader, limit_train_batches=0) == {}


def test_a_fixed_scale_need_not_move(loader):
    model = quantized()
    model[2].input_quantizer.raw.requires_grad_(False)
    assert fit(Lit(model, forget=[model[2].input_quantizer]), loader) == {}


@pytest.mark.parametrize(
    ("method", "factor"),
    [(m, 1000.0) for m, (weight, _) in METHODS.items() if weight.learns]
    + [("lsq", 1e-3), ("lsq", float("nan")), ("lsq", float("inf")), ("lsq", 0.0), ("tqt", 1e-3)],
)
def test_names_what_explodes_and_vanishes(method, factor, loader):
    """One channel of eight is enough."""
    model = quantized(method)
    watch = ScaleWatch()
    weight, act = model[2].weight_quantizer, model[5].input_quantizer

    class Spoil(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            for q in (weight, act):
                step = q.step.clone()
                step[0] = step[0] * factor if factor else kernels.SCALE_FLOOR
                q.raw.data.copy_(q.raw_of(step))

    found = fit(Lit(model), loader, callbacks=[Spoil(), watch])
    assert found["useless"] == ["2.weight_quantizer", "5.input_quantizer"]
    assert "still" not in found


def test_compares_with_calibration_not_with_last_epoch(loader):
    """Twenty times per epoch passes each time, and in the second epoch is 400 times."""
    model = quantized()
    q = model[5].input_quantizer

    class Grow(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            q.raw.data.mul_(20)

    watch = ScaleWatch()
    assert "useless" not in fit(Lit(model, scale_lr=1e-6), loader, callbacks=[Grow(), watch])
    found = fit(Lit(model, scale_lr=1e-6), loader, callbacks=[Grow(), watch])
    assert found["useless"] == ["5.input_quantizer"]


def test_a_resumed_run_keeps_the_calibrated_scales(loader, tmp_path):
    model = quantized()
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    fit(Lit(model), loader, **options)
    (path,) = tmp_path.rglob("*.ckpt")
    content = torch.load(path, weights_only=True)
    scales = content["callbacks"]["ScaleWatch"]["calibrated"]
    assert set(scales) == {f"model.{n}" for n, m in model.named_modules() if hasattr(m, "raw") and m.raw.requires_grad}
    model[5].input_quantizer.raw.data.mul_(1000)
    content["state_dict"]["model.5.input_quantizer.scale"].mul_(1000)
    torch.save(content, path)

    watch = ScaleWatch()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Lit(model), loader, ckpt_path=path, weights_only=True)
    assert told(caught)["useless"] == ["5.input_quantizer"]


@pytest.mark.parametrize(
    ("method", "granularity"),
    [("lsq", "channel"), ("lsq", "tensor"), ("lsq", 9), ("ste", "channel"), ("tqt", "channel"), ("ewgs", "tensor")],
)
def test_names_weights_that_are_clipped(method, granularity, loader):
    """At a 30th of the scale nearly everything is; the calibrated value is near enough for no other warning."""
    model = quantized(method, weight=qat.TensorConfig(granularity=granularity, method=method))
    q = model[2].weight_quantizer
    q.raw.data.copy_(q.raw_of(q.step / 32))
    found = fit(Lit(model, scale_lr=1e-9), loader)
    assert found.pop("clipped") == ["2.weight_quantizer"]
    assert found == {} or set(found) == {"still"}  # so small a rate may be none


@pytest.mark.parametrize("bits", ["fp8", "bf16", 2])
def test_other_formats(bits, loader):
    model = qat.quantize(nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 5)), bits=bits)
    if bits != "bf16":
        qat.calibrate(model, [torch.randn(64, 3, 8, 8)])
    assert fit(Lit(model), loader, max_epochs=2) == {}


def test_shared_weights_are_named_once(loader):
    first = nn.Linear(16, 16)
    second = nn.Linear(16, 16)
    second.weight = first.weight
    head = nn.Sequential(nn.Flatten(), nn.Linear(192, 16))
    model = qat.quantize(nn.Sequential(head, first, second, nn.Linear(16, 5)), bits=4)
    qat.calibrate(model, [torch.randn(64, 3, 8, 8)])
    q = model[1].weight_quantizer
    assert q is model[2].weight_quantizer
    q.raw.data.div_(32)
    assert fit(Lit(model, forget=[q]), loader) == {"clipped": ["1.weight_quantizer"], "still": ["1.weight_quantizer"]}


def test_a_channel_may_stand_still(recwarn):
    """As a dead one does, whose gradient is zero; the scale's others move."""
    model = quantized()
    lit, watch = Lit(model), ScaleWatch()
    watch.on_train_epoch_start(SimpleNamespace(global_step=0), lit)
    for p in (p for p in model.parameters() if p.numel() in (1, 8, 5) and p.requires_grad):
        p.data[:1].mul_(1.01)
    watch.on_train_epoch_end(SimpleNamespace(global_step=3, is_global_zero=True), lit)
    assert not recwarn.list


def test_one_wait_for_the_device_per_epoch(monkeypatch):
    """What was found is fetched as one tensor; nothing else reads a value."""
    model = quantized()
    lit, watch = Lit(model), ScaleWatch()
    trainer = SimpleNamespace(global_step=0, is_global_zero=True)
    watch.on_train_epoch_start(trainer, lit)
    trainer.global_step = 3
    fetched = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: fetched.append(tuple(t.shape)) or tolist(t))
    for name in ("item", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} waits for the device"))
    with pytest.warns(UserWarning, match="did not move"):
        watch.on_train_epoch_end(trainer, lit)
    assert fetched == [(5 + 5 + 3,)]  # learned scales twice, weights once
    watch.on_train_epoch_end(SimpleNamespace(global_step=9, is_global_zero=False), lit)  # another process says nothing
