"""Initial scales: LSQ's step, min-max, percentile and least squared error."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qat import kernels

PERCENTILE = 0.9999
SEARCH_SAMPLES, SEARCH_TAIL = 1024, 64
"""Per channel, the squared-error search looks at this many weights, and at all of the largest, which may be clipped."""


def initial_scale(init: str, values: Tensor, counts: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """First scale for data on the codes qmin..qmax, one per row.

    Args:
        init: `lsq` (2 mean|v| / sqrt(qmax), LSQ section 2.1), `minmax` (the range just fits), `percentile` (99.99 % of
            |v| fit), `mse` (least squared error, searched).
        values: float32 of shape (rows, n): a weight with its channels first, or the centres of a histogram.
        counts: how often each value occurs, of the same shape; None for once each.
        qmin: least code, <= 0.
        qmax: largest code, > 0.

    Returns:
        float32 of shape (rows,), never negative; 0 where a row is all zero.
    """
    if init == "lsq":
        total = counts.sum(1) if counts is not None else float(values.shape[1])
        mean = (values.abs() * (1.0 if counts is None else counts)).sum(1) / total
        return 2 * mean / math.sqrt(qmax)
    fits = values.amax(1) / qmax
    if qmin < 0:
        fits = torch.maximum(fits, values.amin(1) / qmin)
    fits = fits.clamp_min(0)
    if init == "minmax":
        return fits
    if init == "percentile":
        return torch.minimum(fits, percentile(values.abs(), counts) / qmax)
    if init == "mse":
        return least_error(fits, values, counts, qmin, qmax)
    raise AssertionError(init)


def percentile(magnitudes: Tensor, counts: Tensor | None) -> Tensor:
    """The magnitude that PERCENTILE of each row does not exceed; shape (rows,)."""
    ordered, order = magnitudes.sort(1)
    counts = torch.ones_like(ordered) if counts is None else counts.gather(1, order)
    share = counts.double().cumsum(1) / counts.double().sum(1, keepdim=True)
    index = (share < PERCENTILE).sum(1, keepdim=True).clamp_max(ordered.shape[1] - 1)
    return ordered.gather(1, index).squeeze(1)


def sample(values: Tensor) -> tuple[Tensor, Tensor]:
    """Evenly spaced values of each row, and its largest magnitudes; and how many each of them stands for."""
    stride = -(-values.shape[1] // SEARCH_SAMPLES)
    spaced, magnitudes = values[:, ::stride], values.abs()
    largest = values.gather(1, magnitudes.topk(SEARCH_TAIL, dim=1, sorted=False).indices)
    counts = torch.where(spaced.abs() < largest.abs().amin(1, keepdim=True), float(stride), 0.0)
    return torch.cat([spaced, largest], 1), torch.cat([counts, torch.ones_like(largest)], 1)


def least_error(fits: Tensor, values: Tensor, counts: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """The scale of least squared error per row, searched below `fits` (coarsely by factors, then between them)."""
    if counts is None and values.shape[1] > SEARCH_SAMPLES:
        values, counts = sample(values)
    best, least = fits.clone(), torch.full_like(fits, math.inf)
    coarse = [2 ** (-k / 4) for k in range(25)]  # 1 down to 1/64
    for factors in (coarse, [2 ** (k / 32) for k in range(-7, 8)]):
        centre = best.clone() if factors is not coarse else fits
        for factor in factors:
            scale = (centre * factor).clamp_min(kernels.SCALE_FLOOR)
            codes, _ = kernels.encode(values, scale, qmin, qmax, axis=0)
            error = (kernels.decode(codes, scale, axis=0) - values).square()
            error = (error if counts is None else error * counts).sum(1)
            better = error < least
            best, least = torch.where(better, centre * factor, best), torch.where(better, error, least)
    return best
