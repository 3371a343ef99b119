"""Lightning callbacks: what is optional or only observes."""

from qat.callbacks.calibrate import Calibrate
from qat.callbacks.history import History

__all__ = ["Calibrate", "History"]
