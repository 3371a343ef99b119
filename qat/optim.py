"""Parameter groups for training a quantized model in any loop."""

from __future__ import annotations

from typing import Any

from torch import nn

from qat.quantizers import Quantizer


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, scale_lr: float | None = None
) -> list[dict[str, Any]]:
    """Split the trainable parameters into weights, norms and biases, scales, and PACT's clipping levels.

    Weight decay acts on weights: on a scale it would shrink the range, on norms and biases it does not help. PACT's
    clipping levels need it (their paper's L2 penalty), since their gradient alone hardly ever pulls them down.

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
    learned = {id(p): q.decays for q in model.modules() if isinstance(q, Quantizer) for p in q.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    own = [p for p in trained if id(p) not in learned]
    rate = lr if scale_lr is None else scale_lr
    groups = [
        ("weights", [p for p in own if p.ndim > 1], lr, weight_decay),
        ("norms and biases", [p for p in own if p.ndim <= 1], lr, 0.0),
        ("scales", [p for p in trained if learned.get(id(p)) is False], rate, 0.0),
        ("clipping levels", [p for p in trained if learned.get(id(p)) is True], rate, weight_decay),
    ]
    return [{"name": n, "params": ps, "lr": r, "weight_decay": wd} for n, ps, r, wd in groups if ps]
