"""Calibrates a quantized model when a Trainer first uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import lightning as L
from torch import nn

from qat.calibrate import calibrate
from qat.quantizers import Quantizer


class Calibrate(L.Callback):
    """Calls `qat.calibrate` at the start of a fit or test, if any scale is not set yet.

    By then the model is on its device and loaded from a checkpoint if there is one, and the processes of a distributed
    run can talk to each other. Resuming finds every scale set, and changes nothing.

    Args:
        batches: called for the calibration batches.
    """

    def __init__(self, batches: Callable[[], Iterable[Any]]) -> None:
        self.batches = batches

    def run(self, module: L.LightningModule) -> None:
        """Calibrate unless done."""
        quantizers = [m for m in module.modules() if isinstance(m, Quantizer)]
        if any(not q.is_calibrated for q in quantizers):
            calibrate(cast(nn.Module, module.model), self.batches())

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before the sanity check and the first step."""
        self.run(pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before an evaluation of the calibrated, not yet trained model."""
        self.run(pl_module)
