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
from bnncc.ir.datatypes import NARROW_FLOATS
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
    code = write.cast(x, "int64")
    size = len(form.values)
    if form.sign:
        code = write("BitwiseAnd", code, write.constant(form.sign - 1, "int64"))
    index = write("Min", code, write.constant(size - 1, "int64"))
    number = write("Gather", write.constant(form.values, "float32"), index)
    if form.infinite:
        infinite = write("Equal", code, write.constant(size, "int64"))
        number = write("Where", infinite, write.constant(np.inf, "float32"), number)
    if form.sign:
        limit = write.constant(form.sign, "int64")
        negative = write("GreaterOrEqual", write.cast(x, "int64"), limit)
        number = write("Where", negative, write("Neg", number), number)
    if form.nan >= 0:
        number = write("Where", _is_nan(write, x, form), _nan(write, number), number)
    return number


def _is_nan(write: Expression, x: str, form: _Format) -> str:
    """Return which bytes are NaN."""
    code = write.cast(x, "int64")
    if form.nan == form.sign:  # what would be -0
        return write("Equal", code, write.constant(form.nan, "int64"))
    if form.sign:
        code = write("BitwiseAnd", code, write.constant(form.sign - 1, "int64"))
    return write("GreaterOrEqual", code, write.constant(form.nan, "int64"))


def _nan(write: Expression, like: str) -> str:
    """Return NaN in the shape of `like`; a constant one would be taken for damage."""
    one = write.constant(-1, "float32")
    return write("Sqrt", write("Sub", one, write("Abs", like)))


def encoded(write: Expression, x: str, dtype: str) -> str:
    """Return the bytes of float32 numbers that are of a narrow type."""
    if dtype in _WHOLE:
        return write.cast(x, _WHOLE[dtype])
    form = _format(dtype)
    steps = form.values[1:]
    if form.infinite:
        steps = np.append(steps, np.inf)
    code = _reached(write, write("Abs", x), steps)
    if form.sign:
        below = _negative(write, x, form)
        bit = write("Where", below, write.constant(form.sign, "int64"), write.constant(0, "int64"))
        code = write("Add", code, bit)
    if form.nan >= 0:
        code = write("Where", write("IsNaN", x), write.constant(form.nan, "int64"), code)
    return write.cast(code, "uint8")


def _negative(write: Expression, x: str, form: _Format) -> str:
    """Return which numbers have a sign; -0 has one where the format has a -0."""
    zero = write.constant(0, "float32")
    below = write("Less", x, zero)
    if form.nan == form.sign:
        return below
    turned = write("Less", write("Div", write.constant(1, "float32"), x), zero)
    return write("Or", below, write("And", write("Equal", x, zero), turned))


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
    size, low = write("Abs", x), values[:-1]
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
    number = write("Gather", write.constant(values, "float32"), _reached(write, size, steps))
    if not saturate and over is not None and not dtype.startswith("float4"):
        beyond = write("GreaterOrEqual", size, write.constant(over, "float32"))
        infinity = write.constant(np.inf, "float32") if form.infinite else _nan(write, size)
        number = write("Where", beyond, infinity, number)
    if form.sign:
        number = write("Where", _negative(write, x, form), write("Neg", number), number)
    if form.nan == form.sign and form.sign:  # no -0
        zero = write.constant(0, "float32")
        number = write("Where", write("Equal", number, zero), zero, number)
    return write("Where", write("IsNaN", x), x, number)


def _wrapped(write: Expression, x: str, dtype: str) -> str:
    """Return the low bits of an integer, or of a float without its fraction."""
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    low = write("BitwiseAnd", write.cast(x, "int32"), write.constant((1 << bits) - 1, "int32"))
    if not dtype.startswith("u"):
        top = write.constant(1 << (bits - 1), "int32")
        low = write("Sub", write("BitwiseXor", low, top), top)
    return write.cast(low, "float32")
