"""NumPy semantics of quantizers that ONNX lacks: those of QONNX, under internal names.

`QUANT` takes (data, scale, zero point, bit width) and has the attributes ``signed``, ``narrow`` and
``rounding_mode``. `MULTI_THRESHOLD` takes (data, thresholds) and has ``out_scale`` and
``out_bias``; channels are axis 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from onnx import helper

from bnncc.errors import UnsupportedOp
from bnncc.ir import numeric
from bnncc.ir.dims import channel_shape
from bnncc.ir.pieces import Expression
from bnncc.topi_binary import quantization

Array = np.ndarray[Any, Any]

QUANT = "bnncc.Quant"
"""Operator: rounds to integers of a given width, and converts back to numbers."""

MULTI_THRESHOLD = "bnncc.MultiThreshold"
"""Operator: counts the thresholds that a value reaches."""


def _away(x: Array) -> Array:
    return np.copysign(np.ceil(np.abs(x)), x)


def _half_away(x: Array) -> Array:
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.sign(x), whole)


def _half_to_zero(x: Array) -> Array:
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) > 0.5, whole + np.sign(x), whole)


ROUNDING: dict[str, Callable[[Array], Array]] = {
    "ROUND": np.rint,
    "HALF_EVEN": np.rint,
    "HALF_UP": _half_away,
    "HALF_DOWN": _half_to_zero,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "UP": _away,
    "DOWN": np.trunc,
}
"""Rounding functions by mode (upper case); ``UP`` is away from 0, ``DOWN`` towards 0."""


def integer_range(bits: float, *, signed: bool, narrow: bool) -> tuple[float, float]:
    """Return the smallest and the largest integer that QONNX's Quant rounds to.

    Parameters
    ----------
    bits : float
        Bit width, at least 1. Fractions are allowed, as in QONNX.
    signed : bool
        Whether integers can be negative.
    narrow : bool
        Whether one end is excluded: the lowest if signed, otherwise the highest.

    Examples
    --------
    >>> integer_range(2, signed=True, narrow=True), integer_range(4, signed=False, narrow=False)
    ((-1.0, 1.0), (0.0, 15.0))
    """
    if signed:
        return float(-(2 ** (bits - 1)) + narrow), float(2 ** (bits - 1) - 1)
    return 0.0, float(2**bits - 1 - narrow)


def quant(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate `QUANT`: ``(round(clip(x / scale + zero, low, high)) - zero) * scale``.

    Signed integers of one bit are -1 and +1, the sign of ``x / scale + zero`` with +1 at 0.

    Raises
    ------
    UnsupportedOp
        If the rounding mode is not in `ROUNDING`.
    """
    x, scale, zero, width = ins
    mode = str(attrs.get("rounding_mode", "ROUND")).upper()
    if mode not in ROUNDING:
        raise UnsupportedOp(
            f"Quant: its rounding mode is `{mode}`, not one of {', '.join(ROUNDING)}"
        )
    bits, signed = float(np.asarray(width).reshape(-1)[0]), bool(attrs.get("signed", 1))
    level = x / scale.astype(x.dtype) + zero.astype(x.dtype)
    if bits == 1 and signed:
        level = np.where(level >= 0, x.dtype.type(1), x.dtype.type(-1))
    else:
        low, high = integer_range(bits, signed=signed, narrow=bool(attrs.get("narrow", 0)))
        level = ROUNDING[mode](np.clip(level, x.dtype.type(low), x.dtype.type(high)))
    return [((level - zero.astype(x.dtype)) * scale.astype(x.dtype)).astype(x.dtype)]


def multi_threshold(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate `MULTI_THRESHOLD`: ``out_scale * count(x >= thresholds[channel]) + out_bias``."""
    x, thresholds = ins
    column = channel_shape(x.ndim)
    count = np.zeros(x.shape, x.dtype)
    for step in range(thresholds.shape[1]):
        count += x >= thresholds[:, step].reshape(column)
    scale, bias = (x.dtype.type(attrs.get(k, d)) for k, d in (("out_scale", 1), ("out_bias", 0)))
    return [scale * count + bias]


LEVELS = "bnncc.Levels"
"""Operator that replaces recognised quantizers: input data; attributes ``thresholds`` (float32
``[count]``, or ``[channels, count]``, ascending) and ``values`` (float32 ``[count + 1]``, ascending
or descending)."""


def levels(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate `LEVELS`: the value indexed by the number of thresholds that the input reaches."""
    x, limits = ins[0], attrs["thresholds"]
    if limits.ndim == 1:
        return [attrs["values"][np.searchsorted(limits, x, side="right")]]
    column = channel_shape(x.ndim)
    count = np.zeros(x.shape, np.int64)
    for step in range(limits.shape[1]):
        count += x >= limits[:, step].reshape(column)
    return [attrs["values"][count]]


def quantize_linear(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate ONNX QuantizeLinear to integers.

    Raises
    ------
    UnsupportedOp
        If the output type is not an integer.
    """
    x, scale = ins[:2]
    zero = ins[2] if len(ins) > 2 and ins[2] is not None else None
    kind = np.dtype(np.uint8) if zero is None else zero.dtype
    if zero is None and attrs.get("output_dtype"):
        kind = helper.tensor_dtype_to_np_dtype(attrs["output_dtype"])
    low, high = _limits(kind)
    level = np.rint(x / _along(scale, x, attrs))
    if zero is not None:
        level = level + _along(zero.astype(np.float32), x, attrs)
    return [np.clip(level, low, high).astype(np.int64).astype(kind)]


def dequantize_linear(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate ONNX DequantizeLinear."""
    x, scale = ins[:2]
    level = x.astype(scale.dtype)
    if len(ins) > 2 and ins[2] is not None:
        level = level - _along(ins[2].astype(scale.dtype), x, attrs)
    return [level * _along(scale, x, attrs)]


def _along(value: Array, x: Array, attrs: dict[str, Any]) -> Array:
    """Expand a parameter to elements: one for all, one per index of an axis, or one per block."""
    if value.size == 1:
        return value.reshape(())
    axis = int(attrs.get("axis", 1)) % x.ndim
    if value.ndim == 1:
        return value.reshape((-1,) + (1,) * (x.ndim - 1 - axis))
    size = int(attrs.get("block_size", 0)) or -(-x.shape[axis] // value.shape[axis])
    return np.repeat(value, size, axis).take(range(x.shape[axis]), axis)


def _limits(kind: Any) -> tuple[float, float]:
    try:
        info = ml_dtypes.iinfo(kind)
    except ValueError:
        raise UnsupportedOp(f"QuantizeLinear to {np.dtype(kind).name} is not supported") from None
    return float(info.min), float(info.max)


PLAIN = {"ROUND": "Round", "HALF_EVEN": "Round", "FLOOR": "Floor", "CEIL": "Ceil"}
"""Rounding modes that are operators of ONNX."""


def rounded(write: Expression, mode: str, x: str) -> str:
    """Write the rounding of `x` with a mode of `bnncc.ir.quantizers.ROUNDING`."""
    if mode in PLAIN:
        return write(PLAIN[mode], x)
    sign, size = write("Sign", x), write("Abs", x)
    if mode.startswith("HALF"):
        # With exactly 0.5, the number just below a tie would be rounded up.
        half = float(np.nextafter(np.float32(0.5), np.float32(0))) if mode == "HALF_UP" else -0.5
        size = write("Add", size, write.constant(half))
    whole = write("Ceil" if mode in ("UP", "HALF_DOWN") else "Floor", size)
    return write("Mul", sign, whole)


QUANTIZED_CONV = "bnncc.QuantizedConv"
"""Operator that replaces a Conv in `transform.first_layer`: data, rounded weights; attributes of
Conv, ``operands``, ``scale`` and ``bias`` (float64, per filter) and ``zero_points`` (for uint8: the
value that stands for 0 in each channel)."""


def quantized_conv(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate `QUANTIZED_CONV` with sums in float64, which are exact for integers."""
    data, weight = ins[:2]
    units = np.ones(data.shape[0])
    if attrs["zero_points"]:
        rounded = data.astype(np.float64) - np.array(attrs["zero_points"]).reshape(1, -1, 1, 1)
    elif attrs["operands"] == "float16":
        with np.errstate(over="ignore"):
            rounded = data.astype(np.float16).astype(np.float64)
    elif attrs["operands"] == "bfloat16":
        rounded = quantization.to_bfloat16(data).astype(np.float64)
    else:
        top = np.abs(data).max(axis=(1, 2, 3), initial=np.float32(0))
        top = np.maximum(top, np.float32(quantization.SMALLEST))
        factor = (np.float32(quantization.LEVELS) / top).reshape(-1, 1, 1, 1)
        rounded = np.rint(data * factor).astype(np.float64)
        units = (top / np.float32(quantization.LEVELS)).astype(np.float64)
    sums = numeric.convolve(rounded, weight.astype(np.float64), attrs)
    scale, bias = (np.asarray(attrs[k]).reshape(1, -1, 1, 1) for k in ("scale", "bias"))
    return [(sums * units.reshape(-1, 1, 1, 1) * scale + bias).astype(np.float32)]
