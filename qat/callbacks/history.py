"""One line per epoch: into metrics.csv always, on the screen where there is no progress bar."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any

import lightning as L

from qat.files import write_text

COLUMNS = ("stage", "epoch", "step", "train/loss", "train/acc", "val/loss", "val/acc", "lr", "seconds", "waiting")


class History(L.Callback):
    """Adds a row to `metrics.csv` after every epoch, both stages and resumed runs in one file.

    `waiting` is the share of an epoch's training time in which the step waited for data, validation left out.

    Args:
        path: the CSV file.
        show: whether to print each row as a line.
    """

    def __init__(self, path: Path, show: bool) -> None:
        self.path, self.show = path, show
        self.start = self.step_end = self.waited = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.start = self.step_end = time.perf_counter()
        self.waited = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """The batch is there: what passed since the last step was waiting."""
        self.waited += time.perf_counter() - self.step_end

    def on_train_batch_end(self, *_: Any) -> None:
        """From now on the next batch is waited for."""
        self.step_end = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the row: validation has run by now."""
        if not trainer.is_global_zero:
            return
        m = {key: float(value) for key, value in trainer.callback_metrics.items()}
        waiting = self.waited / max(self.step_end - self.start, 1e-9)
        row = {
            "stage": str(pl_module.stage),
            "epoch": str(trainer.current_epoch),
            "step": str(trainer.global_step),
            "lr": f"{trainer.optimizers[0].param_groups[0]['lr']:.3g}",
            "seconds": f"{time.perf_counter() - self.start:.2f}",
            "waiting": f"{waiting:.3f}",
        } | {key: f"{m[key]:.5g}" for key in COLUMNS[3:7] if key in m}
        self.write(row)
        if self.show:
            print(
                f"{row['stage']:9s} epoch {trainer.current_epoch + 1:3d}/{trainer.max_epochs}  "
                f"loss {m['train/loss']:.4f}  train {m['train/acc']:5.1f} %  "
                f"val {m.get('val/acc', float('nan')):5.1f} %  {row['seconds']} s, {waiting:.0%} waiting for data",
                flush=True,
            )

    def write(self, row: dict[str, str]) -> None:
        """Write the file anew with one more row, in place of one that a killed run left without its checkpoint."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for old in csv.DictReader(self.path.read_text().splitlines()) if self.path.exists() else ():
            if (old["stage"], old["epoch"]) == (row["stage"], row["epoch"]):
                break
            writer.writerow(old)
        writer.writerow(row)
        write_text(text.getvalue(), self.path)
