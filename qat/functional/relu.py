"""ReLUs that keep one byte per element for the backward instead of the whole output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat.functional._checks import QatFunction, check_tensor

__all__ = ["LeanReLU", "LeanReLUInplace", "relu"]


class LeanReLU(QatFunction):
    """`LeanReLU.apply(x) -> (y, mask)`; see `relu`. Saves a bool per element."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        check_tensor(x, "x", "LeanReLU")
        y = torch.relu(x)
        return y, y > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> Tensor | None:
        (mask,) = ctx.saved_tensors
        return None if g is None else torch.where(mask, g, 0.0)


class LeanReLUInplace(QatFunction):
    """`LeanReLUInplace.apply(x) -> (x, mask)`: overwrites x; see `relu`.

    The mask is made before x is overwritten. Saving x itself and comparing it in the backward would work by luck only
    (relu(x) > 0 exactly where x > 0), and saving it unmarked would hand autograd a changed tensor.
    """

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        check_tensor(x, "x", "LeanReLUInplace")
        mask = x > 0
        return x.relu_(), mask

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> Tensor | None:
        (mask,) = ctx.saved_tensors
        return None if g is None else torch.where(mask, g, 0.0)


def relu(x: Tensor, inplace: bool = False) -> Tensor:
    """max(x, 0), as `torch.relu` in values and gradients, keeping a byte per element where that keeps its output.

    Args:
        x: floating tensor of any shape.
        inplace: overwrite x (not a leaf that requires grad, as for torch).

    Returns:
        Tensor of x's shape and dtype; x itself if in place.

    Raises:
        QatError: x is not a floating tensor.

    Example:
        >>> import torch
        >>> from qat.functional import relu
        >>> x = torch.tensor([-1.0, 2.0], requires_grad=True)
        >>> relu(x).sum().backward(); x.grad.tolist()
        [0.0, 1.0]
    """
    y: Tensor = (LeanReLUInplace if inplace else LeanReLU).apply(x)[0]
    return y
