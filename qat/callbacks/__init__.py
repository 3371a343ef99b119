"""Lightning callbacks: what is optional or only observes."""

from qat.callbacks.calibrate import Calibrate
from qat.callbacks.history import History
from qat.callbacks.scales import ScaleWatch

__all__ = ["Calibrate", "History", "ScaleWatch"]
