"""Names the layers whose scales go wrong in training."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from qat import kernels
from qat.quantizers import FP8Quantizer, Quantizer
from qat.swap import quantized_layers

__all__ = ["ScaleWatch"]


class ScaleWatch(L.Callback):
    """Warns, once per kind, at the end of a training epoch, and names every scale that went wrong.

    Wrong is a scale that learns but did not move in the epoch, being in no optimizer or getting no gradient (near the
    end of a schedule steps may well be smaller than a float32's last bit: that is no fault); one that exploded or
    vanished, as used: beyond 100 times its calibrated value, below a 100th of it, at the floor, or not finite; and one
    that clips more than half of its weight. The device is waited for once per epoch.

    Args:
        factor: how far from its calibrated value a scale may go, either way.
        clipped: the share of a weight that may be clipped.
    """

    def __init__(self, factor: float = 100.0, clipped: float = 0.5) -> None:
        self.factor, self.clipped = factor, clipped
        self.calibrated: dict[str, Tensor] = {}  # scales as used, before any training
        self.before: dict[str, Tensor] = {}  # raw parameters at the start of the epoch
        self.pulls: dict[str, Tensor] = {}  # sums of the gradients' magnitudes, of LOOKS steps
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The calibrated scales, for a resumed run."""
        return {"calibrated": {name: step.cpu() for name, step in self.calibrated.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them back."""
        self.calibrated = dict(state_dict["calibrated"])

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember where the scales are."""
        learned = learned_scales(pl_module)
        self.steps = trainer.global_step
        self.pulls = {}
        self.before = {name: q.raw.detach().clone() for name, q in learned.items()}
        for name, q in learned.items():
            reference = self.calibrated.get(name)
            if reference is None or reference.shape != q.raw.shape:
                self.calibrated[name] = q.step.clone()

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """See which scales get a gradient."""
        if trainer.global_step - self.steps >= LOOKS:
            return
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, q in learned_scales(pl_module).items():
            if id(q.raw) in owned and q.raw.grad is not None:
                self.pulls[name] = self.pulls.get(name, 0.0) + q.raw.grad.abs().sum()

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look, and warn."""
        if not trainer.is_global_zero or trainer.global_step == self.steps:
            return
        learned = {name: q for name, q in learned_scales(pl_module).items() if name in self.before}
        weights = clippable_weights(pl_module)
        findings = [(STILL, q.name or name, self.still(q.raw, name)) for name, q in learned.items()]
        findings += [(USELESS, q.name or name, self.useless(q.step, name)) for name, q in learned.items()]
        findings += [(CLIPPED, q.name or name, share_clipped(q, w) > self.clipped) for name, (q, w) in weights.items()]
        if not findings:
            return
        device = pl_module.device
        found = torch.stack([flag.to(device) for *_, flag in findings]).tolist()
        for kind in (STILL, USELESS, CLIPPED):
            names = [name for (k, name, _), flag in zip(findings, found, strict=True) if flag and k == kind]
            if names:
                warnings.warn(kind.format(names=", ".join(names)), stacklevel=1)

    def still(self, raw: Tensor, name: str) -> Tensor:
        """Whether a scale stayed where it was, and not for want of a learning rate (a bool tensor)."""
        return (raw == self.before[name]).all() & (self.pulls.get(name, torch.zeros_like(raw.sum())) == 0)

    def useless(self, step: Tensor, name: str) -> Tensor:
        """Whether any scale of a quantizer is (a bool tensor)."""
        change = step / self.calibrated[name].to(step.device)
        # NaN compares false: ask for what is good.
        good = (change < self.factor) & (change > 1 / self.factor) & (step > kernels.SCALE_FLOOR) & step.isfinite()
        return ~good.all()


STILL = "scales that did not move in this epoch (are they in the optimizer, do their layers get a gradient?): {names}"
USELESS = "scales that exploded or vanished since calibration (try a lower optim.scale_lr): {names}"
CLIPPED = "scales so small that they clip more than half of the weight (try a lower optim.scale_lr): {names}"


LOOKS = 8
"""Gradients are looked at in so many steps of an epoch: enough to tell none from a small one."""


def learned_scales(module: nn.Module) -> dict[str, Quantizer]:
    """Calibrated quantizers with a trainable scale, each once."""
    return {
        name: m
        for name, m in module.named_modules()
        if isinstance(m, Quantizer) and m.is_calibrated and m.raw.requires_grad
    }


def clippable_weights(module: nn.Module) -> dict[str, tuple[Quantizer, Tensor]]:
    """Weights whose grid has ends, with their quantizers; a method with codes of its own is not asked."""
    found: dict[int, tuple[str, tuple[Quantizer, Tensor]]] = {}
    for name, layer in quantized_layers(module).items():
        q, weight = layer.weight_quantizer, layer.weight
        assert isinstance(weight, Tensor)
        if isinstance(q, Quantizer) and type(q).codes is Quantizer.codes and not isinstance(q, FP8Quantizer):
            found.setdefault(id(q), (f"{name}.weight_quantizer", (q, weight)))
    return dict(found.values())


def share_clipped(q: Quantizer, weight: Tensor) -> Tensor:
    """Share of a weight's elements beyond the ends of its codes."""
    w = weight.detach() if q.group is None else weight.detach().reshape(-1, q.group)
    step = kernels.broadcast(q.step, w.ndim, q.axis)
    return ((w > q.qmax * step) | (w < q.qmin * step)).float().mean()
