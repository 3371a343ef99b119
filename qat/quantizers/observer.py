"""Statistics of an activation over calibration batches: range and histogram in fixed memory."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from qat.config import QatError

BINS = 4096


class Observer:
    """Minimum, maximum and a histogram of everything `update` was given.

    The histogram covers [-limit, limit] with limit a power of two, so a larger range merges bins two by two, exactly:
    the result does not depend on the order of the batches, and adds up over processes.

    Attributes:
        minimum, maximum: over all values seen; +inf and -inf before the first.
        limit: half width of the histogram; 0 until a value other than zero was seen.
        counts: float64 tensor of shape (BINS,).
        total: values seen.
    """

    def __init__(self) -> None:
        self.minimum = math.inf
        self.maximum = -math.inf
        self.limit = 0.0
        self.total = 0
        self.counts = torch.zeros(BINS, dtype=torch.float64)

    def update(self, x: Tensor) -> None:
        """Add all elements of x (any float dtype, any device).

        Raises:
            QatError: x has NaN or infinite values.
        """
        if x.numel() == 0:
            return
        x = x.detach().float()
        low, high = (t.item() for t in x.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise QatError(f"expected finite values, got a range of {low} to {high}")
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self.total += x.numel()
        self.widen(max(-low, high))
        if self.limit > 0:
            self.counts += x.histc(BINS, -self.limit, self.limit).double().cpu()
        else:
            self.counts[BINS // 2] += x.numel()  # all zeros so far

    def widen(self, largest: float) -> None:
        """Make the histogram reach `largest`."""
        if largest <= self.limit:
            return
        limit = 2.0 ** math.ceil(math.log2(max(largest, 2.0**-120)))
        while 0 < self.limit < limit:
            pairs = self.counts.view(-1, 2).sum(1)
            self.counts = torch.zeros_like(self.counts)
            self.counts[BINS // 4 : 3 * BINS // 4] = pairs
            self.limit *= 2
        self.limit = limit

    def reduce(self) -> None:
        """Combine with the observers of all other processes, so that every rank computes the same scale."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        ends = torch.tensor([self.maximum, -self.minimum, self.limit], dtype=torch.float64, device=device)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        self.maximum, self.minimum = ends[0].item(), -ends[1].item()
        self.widen(ends[2].item())
        sums = torch.cat([self.counts, torch.tensor([self.total], dtype=torch.float64)]).to(device)
        dist.all_reduce(sums)
        self.counts, self.total = sums[:-1].cpu(), int(sums[-1].item())

    def samples(self) -> tuple[Tensor, Tensor]:
        """Bin centres and counts of the bins that are not empty, float32, each of shape (1, n), n >= 1."""
        centres = (torch.arange(BINS, dtype=torch.float64) + 0.5) * (2 * self.limit / BINS) - self.limit
        centres = centres.clamp(self.minimum, self.maximum)
        full = self.counts > 0
        return centres[full].float().unsqueeze(0), self.counts[full].float().unsqueeze(0)
