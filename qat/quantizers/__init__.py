"""Quantizers: modules that own scale state, one method per file. `QUANTIZERS` maps `quant.method` to the class."""

from qat.quantizers.base import Quantizer
from qat.quantizers.lsq import LSQQuantizer
from qat.quantizers.mixed_precision import MixedPrecisionQuantizer
from qat.quantizers.observer import Observer
from qat.quantizers.ste import STEQuantizer

QUANTIZERS: dict[str, type[Quantizer]] = {q.method: q for q in (LSQQuantizer, STEQuantizer)}

__all__ = ["QUANTIZERS", "LSQQuantizer", "MixedPrecisionQuantizer", "Observer", "Quantizer", "STEQuantizer"]
