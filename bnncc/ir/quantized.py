"""What a convolution with rounded operands computes, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from bnncc.ir import numeric
from bnncc.topi_binary.quantization import LEVELS, SMALLEST, to_bfloat16

Array = np.ndarray[Any, Any]

QUANTIZED_CONV = "bnncc.QuantizedConv"
"""Operator that `transform.first_layer` puts in place of a Conv: data, rounded weights; attributes
of Conv, ``operands``, ``scale`` and ``bias`` (float64, of each filter) and ``zero_points`` (for
bytes: what stands for 0 in each channel)."""


def quantized_conv(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate `QUANTIZED_CONV`: sums in float64, which are exact for integers."""
    data, weight = ins[:2]
    units = np.ones(data.shape[0])
    if attrs["zero_points"]:
        rounded = data.astype(np.float64) - np.array(attrs["zero_points"]).reshape(1, -1, 1, 1)
    elif attrs["operands"] == "float16":
        with np.errstate(over="ignore"):
            rounded = data.astype(np.float16).astype(np.float64)
    elif attrs["operands"] == "bfloat16":
        rounded = to_bfloat16(data).astype(np.float64)
    else:
        top = np.abs(data).max(axis=(1, 2, 3), initial=np.float32(0))
        top = np.maximum(top, np.float32(SMALLEST))
        factor = (np.float32(LEVELS) / top).reshape(-1, 1, 1, 1)
        rounded = np.rint(data * factor).astype(np.float64)
        units = (top / np.float32(LEVELS)).astype(np.float64)
    sums = numeric.convolve(rounded, weight.astype(np.float64), attrs)
    scale, bias = (np.asarray(attrs[k]).reshape(1, -1, 1, 1) for k in ("scale", "bias"))
    return [(sums * units.reshape(-1, 1, 1, 1) * scale + bias).astype(np.float32)]
