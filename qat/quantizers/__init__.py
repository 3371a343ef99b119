"""Quantizers: modules that own scale state, one method per file.

`METHODS` maps a `quant.method` name to its quantizers of (weights, activations). A new method is a class and a row: the
table is the one that `qat.config` checks names with, and a caller may add to it.
"""

from qat import config
from qat.quantizers.base import Quantizer
from qat.quantizers.binary import BinaryActivationQuantizer, BinaryQuantizer
from qat.quantizers.dorefa import DoReFaActivationQuantizer, DoReFaQuantizer
from qat.quantizers.ewgs import EWGSQuantizer
from qat.quantizers.fp8 import FP8Quantizer
from qat.quantizers.lsq import LSQQuantizer
from qat.quantizers.lsq_plus import LSQPlusQuantizer, LSQPlusWeightQuantizer
from qat.quantizers.mixed_precision import MixedPrecisionQuantizer
from qat.quantizers.observer import Observer
from qat.quantizers.pact import PACTQuantizer
from qat.quantizers.ste import STEQuantizer
from qat.quantizers.stochastic import StochasticQuantizer
from qat.quantizers.ternary import TernaryQuantizer
from qat.quantizers.tqt import TQTQuantizer

METHODS: dict[str, tuple[type[Quantizer], type[Quantizer]]] = config.METHODS
METHODS |= {
    "lsq": (LSQQuantizer, LSQQuantizer),
    "ste": (STEQuantizer, STEQuantizer),
    "lsq_plus": (LSQPlusWeightQuantizer, LSQPlusQuantizer),
    "pact": (DoReFaQuantizer, PACTQuantizer),  # as in its paper, section 4
    "dorefa": (DoReFaQuantizer, DoReFaActivationQuantizer),
    "ewgs": (EWGSQuantizer, EWGSQuantizer),
    "tqt": (TQTQuantizer, TQTQuantizer),
    "stochastic": (StochasticQuantizer, StochasticQuantizer),
    "binary": (BinaryQuantizer, BinaryActivationQuantizer),
    "ternary": (TernaryQuantizer, LSQQuantizer),
}

__all__ = ["METHODS", "FP8Quantizer", "MixedPrecisionQuantizer", "Observer", "Quantizer"]
