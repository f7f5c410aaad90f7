"""Types that neither NumPy nor registers support: int4, uint2, float8, float4.

Inside the network, such a tensor is a float32 tensor with the same numbers (see `linear`). As an
input or output it is bytes: integers as int8 or uint8, floats as uint8 with their bits.

    input of int4       ->  int8 input, Cast
    input of float8     ->  uint8 input, a table of 256 numbers
    Cast(x) to int4     ->  the low four bits of the integer
    Cast(x) to float8   ->  number of thresholds that |x| reaches, and the value of that step
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bnncc.errors import UnsupportedOp
from bnncc.frontend.formula import Number, number
from bnncc.ir.infer import NARROW_FLOATS
from bnncc.ir.pieces import Expression

_WHOLE = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
CARRIERS = {**_WHOLE, **dict.fromkeys(NARROW_FLOATS, "uint8")}
"""Type of each narrow type at the network's boundary."""


@dataclass(frozen=True)
class _Format:
    """Values of a narrow float type."""

    values: np.ndarray
    """float64: non-negative finite values, by code."""
    sign: int
    """The sign bit, or 0 if there is none."""
    infinite: bool
    """Whether the code after the largest number is infinity."""
    nan: int
    """A code of NaN, or -1 if there is none."""


def _format(dtype: str) -> _Format:
    bits = 4 if dtype.startswith("float4") else 8
    codes = np.arange(1 << bits, dtype=np.uint8)
    every = codes.view(np.dtype(dtype)).astype(np.float64)
    sign = 0 if "e8m0" in dtype else 1 << (bits - 1)
    half = every[: sign or None]
    values = half[np.isfinite(half)]
    nans = np.flatnonzero(np.isnan(every))
    return _Format(values, sign, bool(np.isinf(half).any()), int(nans[0]) if nans.size else -1)


def decoded(write: Expression, x: str, dtype: str) -> str:
    """Convert bytes at the network's boundary to float32."""
    if dtype in _WHOLE:
        return write.cast(x, "float32")
    form = _format(dtype)
    byte = number(write, write.cast(x, "int64"), "int64")
    size = len(form.values)
    code = byte("BitwiseAnd", form.sign - 1) if form.sign else byte
    table = write.constant(form.values, "float32")
    made = number(write, write("Gather", table, code("Min", size - 1).name), "float32")
    if form.infinite:
        made = made.choose(code.equals(size), np.inf, made)
    if form.sign:
        made = made.choose(byte >= form.sign, -made, made)
    if form.nan >= 0:
        # In formats that use -0 for NaN, only that code is NaN.
        damaged = byte.equals(form.nan) if form.nan == form.sign else code >= form.nan
        made = made.choose(damaged, _nan(made), made)
    return made.name


def _nan(like: Number) -> Number:
    """Return NaN in the shape of `like`; computed, because a NaN constant would be rejected."""
    return (-1 - abs(like))("Sqrt")


def encoded(write: Expression, x: str, dtype: str) -> str:
    """Convert float32 numbers of a narrow type to bytes."""
    if dtype in _WHOLE:
        return write.cast(x, _WHOLE[dtype])
    form = _format(dtype)
    steps = form.values[1:]
    if form.infinite:
        steps = np.append(steps, np.inf)
    real = number(write, x, "float32")
    code = number(write, _reached(write, abs(real).name, steps), "int64")
    if form.sign:
        code = code + code.choose(_negative(real, form), form.sign, 0)
    if form.nan >= 0:
        code = code.choose(real("IsNaN"), form.nan, code)
    return write.cast(code.name, "uint8")


def _negative(x: Number, form: _Format) -> Number:
    """Return a mask of negative numbers, including -0 if the format has it."""
    below = x < 0
    return below if form.nan == form.sign else below | (x.equals(0) & (1 / x < 0))


def _reached(write: Expression, x: str, thresholds: np.ndarray) -> str:
    """Return the number of thresholds that `x` reaches, as int64."""
    levels = write.constant(thresholds, "float32")
    compared = write("GreaterOrEqual", write.unsqueeze(x, -1), levels)
    return write("ReduceSum", write.cast(compared, "int64"), write.ints(-1), keepdims=0)


def rounded(
    write: Expression, x: str, source: str, dtype: str, saturate: bool, mode: str = "up"
) -> str:
    """Return `x`, of type `source`, cast to a narrow type, as float32.

    Raises
    ------
    UnsupportedOp
        If the rounding mode is not supported.
    """
    if dtype in _WHOLE:
        return _wrapped(write, x, dtype)
    if source == "float64":
        raise UnsupportedOp(f"{write.where}: casts float64 to {dtype}; cast to float32 before")
    if source != "float32":
        x = write.cast(x, "float32")
    form = _format(dtype)
    values = form.values.astype(np.float32)
    real = number(write, x, "float32")
    size, low = abs(real), values[:-1]
    if form.sign:
        middle = (form.values[:-1] + form.values[1:]) / 2
        behind = form.values[-1] + (form.values[-1] - form.values[-2])
        even = np.arange(1, len(values)) % 2 == 0
        over = np.float32((form.values[-1] + behind) / 2)
        over = over if len(values) % 2 == 0 else np.nextafter(over, np.float32(np.inf))
        exact = middle.astype(np.float32)
        steps = np.where(even, exact, np.nextafter(exact, np.float32(np.inf)))
    elif mode == "up":
        steps, over = np.nextafter(low, np.float32(np.inf)), None
    elif mode == "down":
        steps, over = values[1:], None
    else:
        raise UnsupportedOp(f"{write.where}: `round_mode` = {mode!r} is not supported")
    table = write.constant(values, "float32")
    made = number(write, write("Gather", table, _reached(write, size.name, steps)), "float32")
    if not saturate and over is not None and not dtype.startswith("float4"):
        made = made.choose(size >= over, np.inf if form.infinite else _nan(size), made)
    if form.sign:
        made = made.choose(_negative(real, form), -made, made)
    if form.nan == form.sign and form.sign:  # no -0
        made = made.choose(made.equals(0), 0, made)
    return made.choose(real("IsNaN"), real, made).name


def _wrapped(write: Expression, x: str, dtype: str) -> str:
    """Return the low bits of an integer, or of a truncated float."""
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    low = write("BitwiseAnd", write.cast(x, "int32"), write.constant((1 << bits) - 1, "int32"))
    if not dtype.startswith("u"):
        top = write.constant(1 << (bits - 1), "int32")
        low = write("Sub", write("BitwiseXor", low, top), top)
    return write.cast(low, "float32")
