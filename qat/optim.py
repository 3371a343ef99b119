"""Parameter groups for training a quantized model in any loop."""

from __future__ import annotations

from typing import Any

from torch import nn

from qat.quantizers import Quantizer


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, scale_lr: float | None = None
) -> list[dict[str, Any]]:
    """Split the trainable parameters into weights, norms and biases, and scales.

    Weight decay acts on weights only: on a scale it would shrink the range, on norms and biases it does not help.

    Args:
        model: quantized or float.
        lr: learning rate of weights, norms and biases.
        weight_decay: of the weights.
        scale_lr: learning rate of the scales; None for lr.

    Returns:
        Groups with keys `name`, `params`, `lr`, `weight_decay`, for any torch optimizer; no group is empty.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> optimizer = torch.optim.SGD(param_groups(model, lr=0.1, weight_decay=1e-4), momentum=0.9)
        >>> [(g["name"], g["weight_decay"]) for g in optimizer.param_groups]
        [('weights', 0.0001), ('norms and biases', 0.0)]
    """
    scales = {id(q.scale) for q in model.modules() if isinstance(q, Quantizer)}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        ("weights", [p for p in trained if p.ndim > 1], lr, weight_decay),
        ("norms and biases", [p for p in trained if p.ndim <= 1 and id(p) not in scales], lr, 0.0),
        ("scales", [p for p in trained if id(p) in scales], lr if scale_lr is None else scale_lr, 0.0),
    ]
    return [{"name": n, "params": ps, "lr": rate, "weight_decay": wd} for n, ps, rate, wd in groups if ps]
