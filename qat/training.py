"""The Lightning module: loss, metrics, optimizer and schedule, for the float stage and the quantized one alike."""

from __future__ import annotations

import ctypes
import math
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from qat.checkpoint import describe
from qat.config import OptimConfig, QatError
from qat.optim import param_groups

__all__ = ["AUX_WEIGHT", "Classifier", "Cosine", "keep_freed_memory"]

AUX_WEIGHT = 0.3
"""Weight of the auxiliary heads' losses (Szegedy et al. 2014, section 5)."""


class Classifier(L.LightningModule):
    """Trains an image classifier; the model arrives already quantized, or float.

    Logs `train/loss`, `train/acc`, `val/loss`, `val/acc`, `test/acc` and `lr`; accuracies in percent.

    Args:
        model: maps images (N, 3, H, W) to logits (N, num_classes), in training perhaps with auxiliary logits.
        num_classes: number of classes.
        optim: learning rates and the like.
        stage: `float` or `quantized`, for checkpoints and logs.
        builder: how `qat.load` rebuilds the float model.
    """

    def __init__(
        self, model: nn.Module, num_classes: int, optim: OptimConfig, stage: str, builder: dict[str, Any]
    ) -> None:
        super().__init__()
        self.model, self.optim, self.stage, self.builder = model, optim, stage, builder
        self.results: dict[str, Any] = {}  # what earlier stages measured; travels in the checkpoints
        accuracy = Percent(num_classes, average="micro")
        self.accuracy = nn.ModuleDict({f"{split}_acc": accuracy.clone() for split in ("train", "val", "test")})

    def forward(self, x: Tensor) -> Any:
        """The model's output."""
        return self.model(x)

    def step(self, batch: tuple[Tensor, Tensor], split: str) -> Tensor:
        """Loss of a batch; logs it with the accuracy."""
        x, y = batch
        output = self.model(x)
        logits, *aux = [output] if isinstance(output, Tensor) else [o for o in output if o is not None]
        loss = nn.functional.cross_entropy(logits, y)
        for other in aux:
            loss = loss + AUX_WEIGHT * nn.functional.cross_entropy(other, y)
        accuracy = cast(Metric, self.accuracy[f"{split}_acc"])
        accuracy.update(logits, y)
        self.log(f"{split}/loss", loss, on_step=False, on_epoch=True, batch_size=len(y), sync_dist=split != "train")
        self.log(f"{split}/acc", accuracy, on_step=False, on_epoch=True, batch_size=len(y))
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Loss to minimise.

        Raises:
            QatError: it is not finite.
        """
        loss = self.step(batch, "train")
        # On a GPU reading the loss waits for the device, so there it is looked at now and then.
        if (loss.device.type == "cpu" or index % 50 == 0) and not math.isfinite(loss.item()):
            bad = (
                "the images of that batch have NaN or infinite values"
                if not batch[0].isfinite().all()
                else ("the images are finite, so lower optim.lr (or optim.float_lr)")
            )
            raise QatError(
                f"the loss is {loss.item()} in the {self.stage} stage, epoch {self.current_epoch}, batch {index}: {bad}"
            )
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Loss and accuracy."""
        self.step(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Loss and accuracy."""
        self.step(batch, "test")

    def configure_optimizers(self) -> Any:
        """SGD over `qat.param_groups`, with one cosine from the base rate to zero, stepped every batch."""
        o = self.optim
        lr = o.float_lr if self.stage == "float" else o.lr
        groups = param_groups(self.model, lr, o.weight_decay, o.scale_lr)
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=o.momentum, nesterov=o.nesterov)
        total = max(1, int(self.trainer.estimated_stepping_batches))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, Cosine(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what `qat.load` and `resume=` need, as plain data."""
        checkpoint["qat"] = describe(self.model, self.builder) | {"stage": self.stage, "results": dict(self.results)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what earlier stages measured."""
        self.results = dict(checkpoint.get("qat", {}).get("results", {}))


class Percent(MulticlassAccuracy):
    """Accuracy in percent."""

    def compute(self) -> Tensor:
        """Of all batches since the last reset."""
        return 100 * super().compute()


class Cosine:
    """Factor on the learning rate at a step: half a cosine, from 1 to 0 over `total` steps."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __call__(self, step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * min(step / self.total, 1.0)))


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
