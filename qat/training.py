"""The Lightning module: loss, metrics, optimizer and schedule, for the float stage and the quantized one alike."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from qat.checkpoint import describe
from qat.config import Config, QatError
from qat.optim import param_groups

__all__ = ["AUX_WEIGHT", "Classifier", "keep_freed_memory", "settle_norms"]

AUX_WEIGHT = 0.3
"""Weight of the auxiliary heads' losses (Szegedy et al. 2014, section 5)."""


class Classifier(L.LightningModule):
    """Trains an image classifier; the model arrives already quantized, or float.

    Logs `train/loss`, `train/acc`, `val/loss`, `val/acc`, `test/acc` and `lr`; accuracies in percent. The best epoch is
    the one of the largest `val/score`: the accuracy, and where it ties, as on few images it does, the lesser loss.

    Args:
        model: maps images (N, 3, H, W) to logits (N, num_classes), in training perhaps with auxiliary logits.
        config: learning rates, the seed; kept in the checkpoints.
        stage: `float` or `quantized`.
        builder: how `qat.load` rebuilds the float model, see `qat.checkpoint.describe`.
        results: what earlier stages measured; kept in the checkpoints.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        stage: str,
        builder: dict[str, Any],
        results: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.config, self.stage, self.builder = model, config, stage, builder
        self.results = {} if results is None else results
        accuracy = Percent(builder["num_classes"], average="micro", validate_args=False)
        self.accuracy = nn.ModuleDict({f"{split}_acc": accuracy.clone() for split in ("train", "val", "test")})

    def forward(self, x: Tensor) -> Any:
        """The model's output."""
        return self.model(x)

    def step(self, batch: tuple[Tensor, Tensor], split: str) -> Tensor:
        """Loss of a batch; logs it with the accuracy.

        Raises:
            QatError: the batch is empty.
        """
        x, y = batch
        if len(y) == 0:
            raise QatError(f"expected at least one image in a batch; got an empty one from the {split} loader")
        output = self.model(x)
        logits, *aux = [output] if isinstance(output, Tensor) else [o for o in output if o is not None]
        loss = nn.functional.cross_entropy(logits, y)
        for other in aux:
            loss = loss + AUX_WEIGHT * nn.functional.cross_entropy(other, y)
        accuracy = cast(Metric, self.accuracy[f"{split}_acc"])
        accuracy.update(logits, y)
        self.log(f"{split}/loss", loss, on_step=False, on_epoch=True, batch_size=len(y), sync_dist=split != "train")
        self.log(f"{split}/acc", accuracy, on_step=False, on_epoch=True, batch_size=len(y))
        if split == "val":
            share = (logits.argmax(1) == y).float().mean()
            self.log("val/score", 100 * share - loss.float() / 100, on_step=False, on_epoch=True, batch_size=len(y))
        return loss

    def on_fit_start(self) -> None:
        """Let the running statistics of batch norms follow a short training: see `settle_norms`."""
        settle_norms(self.model, int(self.trainer.estimated_stepping_batches))

    def on_train_epoch_start(self) -> None:
        """Seed dropout and its like by the epoch, so that a resumed run draws what an undisturbed one does."""
        parts = (self.config.seed, self.stage, self.current_epoch, self.global_rank)
        torch.manual_seed(zlib.crc32(repr(parts).encode()))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Loss to minimise.

        Raises:
            QatError: it is not finite.
        """
        loss = self.step(batch, "train")
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], on_step=True, on_epoch=False)
        # On a GPU reading the loss waits for the device, so there it is looked at now and then.
        if loss.device.type == "cpu" or index % 50 == 0:
            self.require_finite(loss, f", batch {index}", batch[0])
        return loss

    def on_train_epoch_end(self) -> None:
        """Look at the mean loss, before anything is saved."""
        self.require_finite(self.trainer.callback_metrics["train/loss"])

    def require_finite(self, loss: Tensor, where: str = "", images: Tensor | None = None) -> None:
        """Stop at a loss that is not finite."""
        if math.isfinite(loss.item()):
            return
        key = "float_lr" if self.stage == "float" else "lr"
        why = f"training diverged; try less than optim.{key}={getattr(self.config.optim, key)}"
        if images is not None and not images.isfinite().all():
            why = "the images of that batch have NaN or infinite values; look at the data"
        epoch = self.current_epoch + 1
        raise QatError(f"the loss is {loss.item()} in the {self.stage} stage, epoch {epoch}{where}: {why}")

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Loss and accuracy."""
        self.step(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Loss and accuracy."""
        self.step(batch, "test")

    def configure_optimizers(self) -> Any:
        """SGD over `qat.param_groups`, with one cosine from the base rate to zero, stepped every batch."""
        o = self.config.optim
        lr = o.float_lr if self.stage == "float" else o.lr
        groups = param_groups(self.model, lr, o.weight_decay, o.scale_lr)
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=o.momentum, nesterov=o.nesterov)
        total = max(1, int(self.trainer.estimated_stepping_batches))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what `qat.load` and `resume=` need, as plain data."""
        run = {"stage": self.stage, "results": dict(self.results), "config": dataclasses.asdict(self.config)}
        checkpoint["qat"] = describe(self.model, self.builder) | run


class Percent(MulticlassAccuracy):
    """Accuracy in percent."""

    def compute(self) -> Tensor:
        """Of all batches since the last reset."""
        return 100 * super().compute()


def cosine(total: int) -> Callable[[int], float]:
    """Factor on the learning rate at a step: half a cosine, from 1 to 0 over `total` steps.

    A function, since a LambdaLR saves and restores the attributes of any other callable: a run that resumes with more
    epochs would keep the old total, and train at rate 0.
    """
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(step / total, 1.0)))


def settle_norms(model: nn.Module, steps: int) -> None:
    """Raise the momentum of batch norms to 10 / steps (0.5 at most) where it is less.

    MobileNetV3 and MNASNet come with 0.01 and 0.0003, for training of many thousands of steps. In a few hundred their
    running statistics stay near the initial ones: the model trains, yet evaluates, and calibrates, at chance.
    """
    least = min(0.5, 10 / max(steps, 1))
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.momentum is not None:
            module.momentum = max(module.momentum, least)


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed memory in the process; returns whether it did.

    Activations are freed and allocated anew every step. By default each large one is handed back to the kernel, and
    comes again as pages to be zeroed one by one, which costs an elementwise operation several times its own work.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False  # not glibc
    trim_threshold, mmap_max = -1, -4  # malloc.h
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))
