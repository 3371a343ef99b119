"""What a run reports: sizes, tables."""

from qat.report.size import float_bytes, quantized_bytes

__all__ = ["float_bytes", "quantized_bytes"]
