"""Autograd Functions, one method per file: the class is used through `.apply`, beside it a typed function.

from qat.functional import LSQ, lsq
values, residue = LSQ.apply(x, scale, qmin, qmax, axis, gain, lean)
values = lsq(x, scale, qmin, qmax, axis=0)
"""

from qat.functional.lsq import LSQ, lsq
from qat.functional.mixed_precision import MixedPrecision, mixed_precision
from qat.functional.ste import STE, ste

__all__ = ["LSQ", "STE", "MixedPrecision", "lsq", "mixed_precision", "ste"]
