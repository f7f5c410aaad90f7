"""Elementwise operators and norms, where a form needs more than one operator that has a kernel."""

from __future__ import annotations

import numpy as np

from bnncc.errors import ModelError, UnsupportedOp
from bnncc.ir.pieces import Expression

_INTEGERS = ("int", "uint")


def _whole(dtype: str) -> bool:
    return dtype.startswith(_INTEGERS)


def _power(write: Expression) -> None:
    """Write Pow: of integers by squaring, of mixed types in the wider one."""
    (x, y), base, exponent = write.node.inputs, write.type(0).dtype, write.type(1).dtype
    if not _whole(base):
        if exponent != base:
            write.give(write.as_is("Pow", x, write.cast(y, base)), 0)
        return
    if not _whole(exponent):
        wide = write.as_is("Pow", write.cast(x, "float64"), write.cast(y, "float64"))
        write.give(write.cast(wide, base), 0)
        return
    signed = exponent.startswith("int")
    if base.startswith("u") or np.dtype(base).itemsize < 4:  # powers are rings: wrap at the end
        x = write.cast(x, "int64")
    dtype = "int64" if base != "int32" else "int32"
    one, zero = (write.constant(v, dtype) for v in (1, 0))
    y = write.cast(y, "int64")
    none, limit = write.constant(0, "int64"), write.constant(62, "int64")
    parity = write("BitwiseAnd", y, write.constant(1, "int64"))
    # 0, 1 and -1 have powers beyond; of theirs only whether the exponent is odd counts
    large = write("Greater", y, limit)
    rest = write("Where", large, write("Add", limit, parity), y)
    result, square = one, x
    bits = 6
    value = write.graph.constants.get(write.node.inputs[1])
    if value is not None and value.size:
        bits = min(6, max(1, int(value.max()).bit_length()))
    for k in range(bits):
        bit = write("BitwiseAnd", rest, write.constant(1 << k, "int64"))
        taken = write("Mul", result, square)
        result = write("Where", write("Greater", bit, none), taken, result)
        if k + 1 < bits:
            square = write("Mul", square, square)
    if signed and not (value is not None and value.size and int(value.min()) >= 0):
        unit = write("Equal", write("Abs", x), one)
        odd = write("Greater", parity, none)
        inverse = write("Where", unit, write("Where", odd, x, one), zero)
        result = write("Where", write("Less", y, none), inverse, result)
    write.give(write.cast(result, base), 0)


def _shift(write: Expression) -> None:
    """Write BitShift: by negative and large amounts, nothing but the sign is left."""
    (x, y), dtype = write.node.inputs, write.type().dtype
    bits = 8 * np.dtype(dtype).itemsize
    direction = write.node.attrs["direction"]
    if direction not in ("LEFT", "RIGHT"):
        raise ModelError(f"{write.where}: `direction` is {direction!r}, LEFT or RIGHT is wanted")
    amount = write.graph.constants.get(y)
    if amount is not None and ((amount >= 0) & (amount < bits)).all():
        return
    zero, width = write.constant(0, dtype), write.constant(bits, dtype)
    inside = write("And", write("GreaterOrEqual", y, zero), write("Less", y, width))
    shifted = write.as_is("BitShift", x, write("Where", inside, y, zero), direction=direction)
    rest = zero
    if direction == "RIGHT" and dtype.startswith("int"):
        rest = write("Where", write("Less", x, zero), write.constant(-1, dtype), zero)
    write.give(write("Where", inside, shifted, rest), 0)


def _modulo(write: Expression) -> None:
    """Write Mod of floats with the divisor's sign by the one with the dividend's."""
    (x, y), dtype = write.node.inputs, write.type().dtype
    if write.node.attrs.get("fmod") or _whole(dtype):
        return
    zero = write.constant(0, dtype)
    rest = write.as_is("Mod", x, y, fmod=1)
    negative = write("Less", y, zero)
    other = write("Xor", write("Less", rest, zero), negative)
    moved = write("Where", other, write("Add", rest, y), rest)
    nothing = write("Where", negative, write.constant(-0.0, dtype), zero)
    write.give(write("Where", write("Equal", rest, zero), nothing, moved), 0)


def _equal(write: Expression) -> None:
    """Write Equal of bools by Xor: TVM compares vectors of bits as if they were floats."""
    if write.type().dtype == "bool":
        write.give(write("Not", write("Xor", *write.node.inputs)), 0)


def _is_infinite(write: Expression) -> None:
    (x,), attrs, dtype = write.node.inputs, write.node.attrs, write.type().dtype
    positive, negative = (bool(attrs.get(f"detect_{k}", 1)) for k in ("positive", "negative"))
    if positive and negative:
        return
    if not positive and not negative:
        never = write.graph.constant(np.array(False), write.node.name)
        write.give(write("And", write.as_is("IsInf", x), never), 0)
        return
    write.give(write("Equal", x, write.constant(np.inf if positive else -np.inf, dtype)), 0)


def _mish(write: Expression) -> None:
    """Write Mish with ``tanh(log(1 + e)) = e * (e + 2) / (e * (e + 2) + 2)`` for ``e = exp(x)``."""
    x, dtype = write.node.inputs[0], write.type().dtype
    two, limit = write.constant(2, dtype), write.constant(4 if dtype == "float16" else 20, dtype)
    power = write("Exp", write("Min", x, limit))  # beyond, tanh is 1
    top = write("Mul", power, write("Add", power, two))
    write.give(write("Mul", x, write("Div", top, write("Add", top, two))), 0)


def _lp_normalization(write: Expression) -> None:
    x, attrs, dtype = write.node.inputs[0], write.node.attrs, write.type().dtype
    p, axes = int(attrs.get("p", 2)), write.ints(int(attrs.get("axis", -1)))
    if p not in (1, 2):
        raise UnsupportedOp(f"{write.where}: `p` is {p}, 1 or 2 is wanted")
    zero, one = write.constant(0, dtype), write.constant(1, dtype)
    norm = write(f"ReduceL{p}", x, axes, keepdims=1)
    divisor = write("Where", write("Equal", norm, zero), one, norm)
    write.give(write("Div", x, divisor), 0)


def _einsum(write: Expression) -> None:
    if write.type().dtype != "bfloat16":
        return
    wide = [write.cast(name, "float32") for name in write.node.inputs]
    write.give(write.cast(write("Einsum", *wide, **write.node.attrs), "bfloat16"), 0)


def _determinant(write: Expression) -> None:
    """Write Det of small matrices by expanding along the first row."""
    shape = write.shape()
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ModelError(f"{write.where}: a matrix of shape {shape[-2:]} is not square")
    size = shape[-1]
    if not 0 < size <= 4:
        raise UnsupportedOp(f"{write.where}: a matrix of {size} rows, 1 to 4 are wanted")
    x = write.node.inputs[0]
    rows = [write.at(x, r, -2) for r in range(size)]
    cells = [[write.at(row, c, -1) for c in range(size)] for row in rows]

    def minor(row: int, columns: tuple[int, ...]) -> str:
        if len(columns) == 1:
            return cells[row][columns[0]]
        total = ""
        for k, column in enumerate(columns):
            rest = minor(row + 1, columns[:k] + columns[k + 1 :])
            term = write("Mul", cells[row][column], rest)
            total = write("Sub" if k % 2 else "Add", total, term) if total else term
        return total

    write.give(minor(0, tuple(range(size))), 0)


def _elu(write: Expression) -> None:
    """Write Elu of half floats in float32: TVM's importer knows no other."""
    dtype = write.type().dtype
    if dtype != "float32":
        wide = write.as_is("Elu", write.cast(write.node.inputs[0], "float32"), **write.node.attrs)
        write.give(write.cast(wide, dtype), 0)


def _batch_norm(write: Expression) -> None:
    """Write BatchNormalization with parameters that are computed."""
    x, *parameters = write.node.inputs
    if all(name in write.graph.constants for name in parameters):
        return
    kinds = [write.graph.types[name] for name in parameters]
    rank, dtype = len(write.type().shape), write.type().dtype
    if rank < 2 or any(len(kind.shape) != 1 for kind in kinds):
        return  # the check of its shapes has the message

    def column(k: int) -> str:
        name = parameters[k] if kinds[k].dtype == dtype else write.cast(parameters[k], dtype)
        return write.reshape(name, 1, -1, *[1] * (rank - 2))

    scale, bias, mean, variance = (column(k) for k in range(4))
    epsilon = write.constant(write.node.attrs["epsilon"], dtype)
    root = write("Sqrt", write("Add", variance, epsilon))
    scaled = write("Mul", write("Sub", x, mean), write("Div", scale, root))
    write.give(write("Add", scaled, bias), 0)


EXPANSIONS = {
    "BatchNormalization": _batch_norm,
    "BitShift": _shift,
    "Det": _determinant,
    "Einsum": _einsum,
    "Elu": _elu,
    "Equal": _equal,
    "IsInf": _is_infinite,
    "LpNormalization": _lp_normalization,
    "Mish": _mish,
    "Mod": _modulo,
    "Pow": _power,
}
"""How each operator is written."""
