"""The 4-bit export: checked before, calibrated on the training rows, checked after."""

from tuneserve.quantize.export import QuantizeResult, quantize_model

__all__ = ["QuantizeResult", "quantize_model"]
