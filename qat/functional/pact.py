"""PACT: a learned clipping level, Choi et al. 2018, arXiv:1805.06085."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat import kernels
from qat.config import QatError
from qat.functional._checks import QatFunction, check_range, check_scale, check_tensor, once_differentiable

__all__ = ["PACT", "pact"]


class PACT(QatFunction):
    """`PACT.apply(x, alpha, qmin, qmax, axis) -> (values, mask)`; see `pact`. Saves a byte per element."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, alpha: Tensor, qmin: int, qmax: int, axis: int | None) -> tuple[Tensor, Tensor]:
        check_tensor(x, "x", "PACT")
        check_scale(x, alpha, axis, "PACT", "alpha")
        check_range(qmin, qmax, "PACT")
        if qmin not in (0, -qmax):
            raise QatError(f"PACT: qmin must be 0 or -qmax, as the clip is symmetric; got qmin={qmin}, qmax={qmax}")
        a = kernels.positive(alpha)
        codes, _ = kernels.encode(x, a / qmax, qmin, qmax, axis)
        top, v = kernels.broadcast(a, x.ndim, axis), x.float()
        # The paper's mask, x >= alpha, counts the end itself as clipped: other than the residue of LSQ.
        below = v < 0 if qmin == 0 else v <= -top
        mask = torch.where(v >= top, kernels.ABOVE, torch.where(below, kernels.BELOW, 0))
        mask = torch.where(x.isnan(), kernels.NAN, mask).to(torch.int8)
        return kernels.decode(codes, a / qmax, axis).to(x.dtype), mask

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, alpha, ctx.qmin, _, ctx.axis = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], alpha)
        ctx.dtype = x.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 5
        mask, alpha = ctx.saved_tensors
        grad_x = grad_alpha = None
        if ctx.needs_input_grad[0]:
            grad_x = kernels.ste_grad(g, mask).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            slope = kernels.slope(mask, 0 if ctx.qmin == 0 else -1, 1)
            grad_alpha = kernels.reduce_to_scale(slope * g.float(), alpha, ctx.axis)
            grad_alpha = kernels.positive_grad(grad_alpha, alpha)
        return grad_x, grad_alpha, None, None, None


def pact(x: Tensor, alpha: Tensor, qmin: int, qmax: int, axis: int | None = None) -> Tensor:
    """Clip x at a learned level alpha, then fake-quantize with scale alpha / qmax (PACT eqs. 1-3).

        values    = round(clip(x, 0, alpha) / s) * s,   s = alpha / qmax
        dL/dx     = dL/dvalues where 0 <= x < alpha, else 0
        dL/dalpha = sum of dL/dvalues where x >= alpha

    The rounding error does not enter alpha's gradient, which alone can only push alpha up where that lowers the loss:
    train alpha with an L2 penalty (`qat.param_groups` gives it the weight decay). With qmin < 0, for signed inputs that
    the paper does not treat, the clip is symmetric: |x| >= alpha counts as clipped, and alpha's gradient below is
    -dL/dvalues.

    Args:
        x: floating tensor of any shape.
        alpha: float32, one element, or one per channel of `axis`.
        qmin: 0, or -qmax for signed inputs.
        qmax: largest code, > 0.
        axis: channel dimension of a per-channel alpha.

    Returns:
        Tensor of x's shape and dtype.

    Raises:
        QatError: wrong dtypes or shapes, another qmin.

    Example:
        >>> import torch
        >>> from qat.functional import pact
        >>> x = torch.tensor([-1.0, 0.4, 2.0], requires_grad=True)
        >>> alpha = torch.tensor([1.5], requires_grad=True)
        >>> pact(x, alpha, 0, 3).sum().backward(); x.grad.tolist(), alpha.grad.item()
        ([0.0, 1.0, 0.0], 1.0)
    """
    values: Tensor = PACT.apply(x, alpha, qmin, qmax, axis)[0]
    return values
