"""ReLUs that keep one byte per element for the backward instead of the whole output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qat import kernels
from qat.config import QatError
from qat.functional._checks import QatFunction, check_tensor

__all__ = ["LeanReLU", "LeanReLUInplace", "relu"]


class LeanReLU(QatFunction):
    """`LeanReLU.apply(x, limit) -> (y, mask)`; see `relu`. Saves the mask, a byte per element: 1 where it passes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
        check_tensor(x, "x", "LeanReLU")
        result: tuple[Tensor, Tensor] = kernels.relu_mask(x, limit)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        (mask,) = ctx.saved_tensors
        return None if g is None else kernels.relu_grad(g, mask), None


class LeanReLUInplace(QatFunction):
    """`LeanReLUInplace.apply(x, limit) -> x`, overwritten; see `relu`. Saves the mask as `LeanReLU` does.

    Saving x would be wrong: the backward would find it overwritten, by this Function or by a later one. The mask is a
    tensor of its own. It is no second output because autograd allows only one where x is a view.
    """

    @staticmethod
    def forward(x: Tensor, limit: float | None) -> Tensor:
        check_tensor(x, "x", "LeanReLUInplace")
        if torch.compiler.is_compiling():  # torch 2.14 drops this backward when x is an input of the graph
            raise QatError("LeanReLUInplace does not compile: write qat.functional.relu(x, inplace=True)")
        rectify(x, limit)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, limit = inputs
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(kernels.relu_mask(output, limit)[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None]:
        (mask,) = ctx.saved_tensors
        return None if g is None else kernels.relu_grad(g, mask), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, limit: float | None) -> tuple[Tensor, int | None]:
        """Elementwise, so the batch is one more dimension; the generated rule does not take dirty inputs."""
        return LeanReLUInplace.apply(x, limit), in_dims[0]


def rectify(x: Tensor, limit: float | None) -> Tensor:
    """torch's own ReLU, or with a limit of 6 its ReLU6, in place."""
    return x.relu_() if limit is None else nn.functional.hardtanh_(x, 0.0, limit)


def relu(x: Tensor, inplace: bool = False, limit: float | None = None) -> Tensor:
    """max(x, 0), as `torch.relu` in values and gradients, keeping a byte per element where that keeps its output.

    Args:
        x: floating tensor of any shape.
        inplace: overwrite x (not a leaf that requires grad, as for torch).
        limit: min(max(x, 0), limit), as `torch.nn.functional.hardtanh(x, 0, limit)`; 6 makes it a ReLU6.

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
        return rectify(x, limit)  # a compiler chooses itself what to save
    y: Tensor = LeanReLUInplace.apply(x, limit) if inplace else LeanReLU.apply(x, limit)[0]
    return y
