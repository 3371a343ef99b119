"""qat: quantization-aware training for torchvision models.

model = qat.quantize(model, bits=4)     # swap in quantizers; keep what it returns
qat.calibrate(model, batches)           # set every scale from data
...                                     # train as before
model = qat.load("run/best.ckpt")       # rebuild from a checkpoint
"""

from qat.calibrate import calibrate
from qat.checkpoint import load, save
from qat.config import QatError, QuantConfig, Rule, TensorConfig
from qat.optim import param_groups
from qat.planning import plan
from qat.swap import dequantize, disabled, quantize, set_bits

__version__ = "0.1.0"

__all__ = [
    "QatError",
    "QuantConfig",
    "Rule",
    "TensorConfig",
    "calibrate",
    "dequantize",
    "disabled",
    "load",
    "param_groups",
    "plan",
    "quantize",
    "save",
    "set_bits",
]
