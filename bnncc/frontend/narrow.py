"""Types that neither NumPy nor a register has: int4, uint2, float8, float4.

Inside the network such a tensor is a float32 tensor of the same numbers (`linear`'s twins). At the
network's edge it is bytes: integers as int8 or uint8, floats as the uint8 of their bits.

    input of int4       ->  int8 input, Cast
    input of float8     ->  uint8 input, a table of 256 numbers
    Cast(x) to int4     ->  the low four bits of the integer
    Cast(x) to float8   ->  how many thresholds |x| has reached, and the number of that step
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
"""What each narrow type is at the edge of a network."""


@dataclass(frozen=True)
class _Format:
    """The numbers of a narrow float."""

    values: np.ndarray
    """float64: those of 0 or more that are finite, by code."""
    sign: int
    """The bit of the sign, 0 if there is none."""
    infinite: bool
    """Whether the code behind the largest number is infinity."""
    nan: int
    """A code of NaN, -1 if there is none."""


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
    """Return the float32 numbers of bytes at the edge."""
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
        # Where NaN is what would be -0, only that code is it.
        damaged = byte.equals(form.nan) if form.nan == form.sign else code >= form.nan
        made = made.choose(damaged, _nan(made), made)
    return made.name


def _nan(like: Number) -> Number:
    """Return NaN in the shape of `like`; a constant one would be taken for damage."""
    return (-1 - abs(like))("Sqrt")


def encoded(write: Expression, x: str, dtype: str) -> str:
    """Return the bytes of float32 numbers that are of a narrow type."""
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
    """Return which numbers have a sign; -0 has one where the format has a -0."""
    below = x < 0
    return below if form.nan == form.sign else below | (x.equals(0) & (1 / x < 0))


def _reached(write: Expression, x: str, thresholds: np.ndarray) -> str:
    """Return how many thresholds `x` has reached, as int64."""
    levels = write.constant(thresholds, "float32")
    compared = write("GreaterOrEqual", write.unsqueeze(x, -1), levels)
    return write("ReduceSum", write.cast(compared, "int64"), write.ints(-1), keepdims=0)


def rounded(
    write: Expression, x: str, source: str, dtype: str, saturate: bool, mode: str = "up"
) -> str:
    """Return the float32 numbers of `x`, of type `source`, cast to a narrow type.

    Raises
    ------
    UnsupportedOp
        If the rounding is not known.
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
    """Return the low bits of an integer, or of a float without its fraction."""
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    low = write("BitwiseAnd", write.cast(x, "int32"), write.constant((1 << bits) - 1, "int32"))
    if not dtype.startswith("u"):
        top = write.constant(1 << (bits - 1), "int32")
        low = write("Sub", write("BitwiseXor", low, top), top)
    return write.cast(low, "float32")
