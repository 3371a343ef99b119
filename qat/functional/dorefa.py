"""DoReFa-Net's weights, Zhou et al. 2016, arXiv:1606.06160."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat import kernels
from qat.config import QatError
from qat.functional._checks import QatFunction, check_scale, check_tensor, once_differentiable

__all__ = ["DoReFa", "dorefa", "dorefa_codes"]


def normalised(w: Tensor) -> tuple[Tensor, Tensor]:
    """tanh(w) in float32 and the largest of |tanh(w)|; 1 if that is zero, or so small that dividing would overflow."""
    t = w.float().tanh()
    largest = t.abs().amax() if torch.jit.is_tracing() or t.numel() else t.new_ones(())
    return t, torch.where(largest < kernels.SCALE_FLOOR, 1.0, largest)


def dorefa_codes(w: Tensor, bits: int) -> Tensor:
    """Codes of DoReFa weights: the odd integers -(2^bits - 1) .. 2^bits - 1, float32, so values = codes * scale / n."""
    n = 2**bits - 1
    t, largest = normalised(w)
    return 2 * ((t / (2 * largest) + 0.5) * n).round() - n


class DoReFa(QatFunction):
    """`DoReFa.apply(w, scale, bits) -> values`; see `dorefa`. Saves w, a Parameter that is alive anyway."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, scale: Tensor, bits: int) -> Tensor:
        check_tensor(w, "w", "DoReFa")
        check_scale(w, scale, None, "DoReFa")
        if not 2 <= bits <= 8:
            raise QatError(f"DoReFa: bits must be 2..8; got {bits} (1 bit: use a binary method)")
        step = kernels.positive(scale) / (2**bits - 1)
        return kernels.decode(dorefa_codes(w, bits), step, None).to(w.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None, None]:
        if g is None or not ctx.needs_input_grad[0]:
            return None, None, None
        w, scale = ctx.saved_tensors
        t, largest = normalised(w)
        g = g.float() * kernels.positive(scale).reshape(()) / largest
        # The largest weight divides all: it gets the sum's share, split among equals as torch's amax splits it.
        top = (t.abs() == largest).float()
        share = (g * t).sum() / largest / top.sum().clamp_min(1)
        return ((g - share * top * t.sign()) * (1 - t.square())).to(w.dtype), None, None


def dorefa(w: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Fake-quantize a weight as DoReFa-Net does (eq. 9), times a fixed scale.

        values = scale * (2 * round(n * u) / n - 1),   u = tanh(w) / (2 max|tanh(w)|) + 1/2,   n = 2^bits - 1
        dL/dw  = through tanh and max, rounding passed straight; where all of w is zero, the max counts as 1

    The paper's weights fill [-1, 1] whatever w was, which a layer with no norm after it does not survive: `scale` gives
    them the magnitude of w back (the paper: 1). The grid has half steps: zero is not on it.

    Args:
        w: floating tensor of any shape.
        scale: float32, one element; gets no gradient.
        bits: 2..8.

    Returns:
        Tensor of w's shape and dtype, of at most 2^bits levels.

    Raises:
        QatError: wrong dtypes or shapes, bits out of range.

    Example:
        >>> import torch
        >>> from qat.functional import dorefa
        >>> w = torch.tensor([-2.0, 0.1, 1.0], requires_grad=True)
        >>> [round(v, 4) for v in dorefa(w, torch.ones(1), 2).tolist()]
        [-1.0, 0.3333, 1.0]
    """
    values: Tensor = DoReFa.apply(w, scale, bits)
    return values
