"""Autograd Functions, one method per file: the class is used through `.apply`, beside it a typed function.

from qat.functional import LSQ, lsq
values, residue = LSQ.apply(x, scale, qmin, qmax, axis, gain, lean)
values = lsq(x, scale, qmin, qmax, axis=0)
"""

from qat.functional.binary import Binary, BinaryActivation, binary, binary_activation
from qat.functional.dorefa import DoReFa, dorefa
from qat.functional.ewgs import EWGS, ewgs
from qat.functional.fp8 import FP8, fp8
from qat.functional.lsq import LSQ, lsq
from qat.functional.lsq_plus import LSQPlus, lsq_plus
from qat.functional.mixed_precision import MixedPrecision, mixed_precision
from qat.functional.pact import PACT, pact
from qat.functional.relu import LeanReLU, LeanReLUInplace, relu
from qat.functional.ste import STE, ste
from qat.functional.stochastic import Stochastic, stochastic
from qat.functional.ternary import Ternary, ternary
from qat.functional.tqt import TQT, tqt

__all__ = [
    "EWGS",
    "FP8",
    "LSQ",
    "PACT",
    "STE",
    "TQT",
    "Binary",
    "BinaryActivation",
    "DoReFa",
    "LSQPlus",
    "LeanReLU",
    "LeanReLUInplace",
    "MixedPrecision",
    "Stochastic",
    "Ternary",
    "binary",
    "binary_activation",
    "dorefa",
    "ewgs",
    "fp8",
    "lsq",
    "lsq_plus",
    "mixed_precision",
    "pact",
    "relu",
    "ste",
    "stochastic",
    "ternary",
    "tqt",
]
