"""Kernels: the arithmetic of quantization on plain tensors. `reference` is the specification."""

from qat.kernels.reference import (
    ABOVE,
    BELOW,
    NAN,
    SCALE_FLOOR,
    STEPS,
    broadcast,
    decode,
    encode,
    lsq_grad,
    lsq_grad_exact,
    positive,
    positive_grad,
    reduce_to_scale,
    round_dtype,
    ste_grad,
)

__all__ = [
    "ABOVE",
    "BELOW",
    "NAN",
    "SCALE_FLOOR",
    "STEPS",
    "broadcast",
    "decode",
    "encode",
    "lsq_grad",
    "lsq_grad_exact",
    "positive",
    "positive_grad",
    "reduce_to_scale",
    "round_dtype",
    "ste_grad",
]
