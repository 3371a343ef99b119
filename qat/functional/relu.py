"""ReLUs that keep one byte per element for the backward instead of the whole output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat.config import QatError
from qat.functional._checks import QatFunction, check_tensor

__all__ = ["LeanReLU", "LeanReLUInplace", "relu"]


class LeanReLU(QatFunction):
    """`LeanReLU.apply(x) -> (y, mask)`; see `relu`. Saves the mask, a bool per element: True where x > 0 or NaN."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        check_tensor(x, "x", "LeanReLU")
        y = torch.relu(x)
        return y, passes(y)

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
    """`LeanReLUInplace.apply(x) -> x`, overwritten; see `relu`. Saves the mask as `LeanReLU` does.

    Saving x would be wrong: the backward would find it overwritten, by this Function or by a later one. The mask is a
    tensor of its own. It is no second output because autograd allows only one where x is a view.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        check_tensor(x, "x", "LeanReLUInplace")
        if torch.compiler.is_compiling():  # torch 2.14 drops this backward when x is an input of the graph
            raise QatError("LeanReLUInplace does not compile: write qat.functional.relu(x, inplace=True)")
        x.relu_()
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(passes(output))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Tensor | None:
        (mask,) = ctx.saved_tensors
        return None if g is None else torch.where(mask, g, 0.0)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, ...], x: Tensor) -> tuple[Tensor, int]:
        """Elementwise, so the batch is one more dimension; the generated rule does not take dirty inputs."""
        return LeanReLUInplace.apply(x), in_dims[0]


def passes(y: Tensor) -> Tensor:
    """Where the gradient of y = relu(x) passes: where y > 0, and at NaN, as for torch."""
    return ~(y <= 0)


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
    if inplace and (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        return x.relu_()  # a compiler chooses itself what to save
    y: Tensor = LeanReLUInplace.apply(x) if inplace else LeanReLU.apply(x)[0]
    return y
