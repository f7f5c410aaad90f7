"""Elementwise operators and norms, decomposed where one operator with a kernel does not suffice."""

from __future__ import annotations

import numpy as np

from bnncc.errors import ModelError, UnsupportedOp
from bnncc.frontend.einsum import einsum
from bnncc.frontend.formula import Number, number
from bnncc.ir.pieces import Expression

_INTEGERS = ("int", "uint")


def _whole(dtype: str) -> bool:
    return dtype.startswith(_INTEGERS)


def _power(write: Expression) -> None:
    """Write Pow: of integers by squaring, of mixed types in the wider one."""
    (first, second), base, exponent = write.node.inputs, write.type(0).dtype, write.type(1).dtype
    if not _whole(base):
        if exponent != base:
            write.give(write.as_is("Pow", first, write.cast(second, base)), 0)
        return
    if not _whole(exponent):
        wide = write.as_is("Pow", *(write.cast(name, "float64") for name in write.node.inputs))
        write.give(write.cast(wide, base), 0)
        return
    # exponentiation is exact modulo 2**n, so narrow and unsigned types wrap at the end
    wide = base if base in ("int32", "int64") else "int64"
    x = number(write, first if wide == base else write.cast(first, wide), wide)
    y = number(write, write.cast(second, "int64"), "int64")
    parity = y("BitwiseAnd", 1)
    # larger exponents matter for 0, 1 and -1 only, where parity decides
    rest = y.choose(y > 62, parity + 62, y)
    result, square, bits = x.of(1), x, 6
    value = write.graph.constants.get(write.node.inputs[1])
    if value is not None and value.size:
        bits = min(6, max(1, int(value.max()).bit_length()))
    for k in range(bits):
        result = result.choose(rest("BitwiseAnd", 1 << k) > 0, result * square, result)
        if k + 1 < bits:
            square = square * square
    signed = exponent.startswith("int")
    if signed and not (value is not None and value.size and int(value.min()) >= 0):
        inverse = x.choose(abs(x).equals(1), x.choose(parity > 0, x, 1), 0)
        result = x.choose(y < 0, inverse, result)
    write.give(write.cast(result.name, base), 0)


def _shift(write: Expression) -> None:
    """Write BitShift; negative and large amounts leave only the sign."""
    dtype = write.type().dtype
    bits = 8 * np.dtype(dtype).itemsize
    direction = write.node.attrs["direction"]
    if direction not in ("LEFT", "RIGHT"):
        raise ModelError(f"{write.where}: `direction` is {direction!r}, expected LEFT or RIGHT")
    amount = write.graph.constants.get(write.node.inputs[1])
    if amount is not None and ((amount >= 0) & (amount < bits)).all():
        return
    x, y = (number(write, name, dtype) for name in write.node.inputs)
    inside = (y >= 0) & (y < bits)
    given = y.choose(inside, y, 0)
    shifted = write.as_is("BitShift", x.name, given.name, direction=direction)
    falls = direction == "RIGHT" and dtype.startswith("int")
    rest = x.choose(x < 0, -1, 0) if falls else x.of(0)
    write.give(write("Where", inside.name, shifted, rest.name), 0)


def _modulo(write: Expression) -> None:
    """Write Mod of floats, whose result has the divisor's sign, by one with the dividend's sign."""
    dtype = write.type().dtype
    if write.node.attrs.get("fmod") or _whole(dtype):
        return
    y = number(write, write.node.inputs[1], dtype)
    rest = number(write, write.as_is("Mod", *write.node.inputs, fmod=1), dtype)
    negative = y < 0
    moved = rest.choose((rest < 0) ^ negative, rest + y, rest)
    write.give(rest.choose(rest.equals(0), y.choose(negative, -0.0, 0), moved).name, 0)


def _equal(write: Expression) -> None:
    """Write Equal of bools by Xor, because TVM compares vectors of bits as if they were floats."""
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
    dtype = write.type().dtype
    x = number(write, write.node.inputs[0], dtype)
    power = x("Min", 4 if dtype == "float16" else 20)("Exp")  # beyond, tanh is 1
    top = power * (power + 2)
    write.give((x * (top / (top + 2))).name, 0)


def _lp_normalization(write: Expression) -> None:
    x, attrs, dtype = write.node.inputs[0], write.node.attrs, write.type().dtype
    p, axes = int(attrs.get("p", 2)), write.ints(int(attrs.get("axis", -1)))
    if p not in (1, 2):
        raise UnsupportedOp(f"{write.where}: `p` is {p}, expected 1 or 2")
    norm = number(write, write(f"ReduceL{p}", x, axes, keepdims=1), dtype)
    write.give((number(write, x, dtype) / norm.choose(norm.equals(0), 1, norm)).name, 0)


def _constant_of_shape(write: Expression) -> None:
    """Write ConstantOfShape with symbolic sizes as Expand."""
    shape = write.node.inputs[0]
    if shape not in write.graph.constants:
        value = np.asarray(write.node.attrs.get("value", np.zeros(1, np.float32))).reshape(-1)[0]
        write.give(write("Expand", write.constant(value, value.dtype.name), shape), 0)


def _determinant(write: Expression) -> None:
    """Write Det of small matrices by expanding along the first row."""
    shape = write.shape()
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ModelError(f"{write.where}: a matrix of shape {shape[-2:]} is not square")
    size = shape[-1]
    if not 0 < size <= 4:
        raise UnsupportedOp(f"{write.where}: a matrix of {size} rows, expected 1 to 4")
    x = write.node.inputs[0]
    rows = [write.at(x, r, -2) for r in range(size)]
    dtype = write.type().dtype
    cells = [[number(write, write.at(row, c, -1), dtype) for c in range(size)] for row in rows]

    def minor(row: int, columns: tuple[int, ...]) -> Number:
        total, *terms = (
            cells[row][column] * minor(row + 1, columns[:k] + columns[k + 1 :])
            if len(columns) > 1
            else cells[row][column]
            for k, column in enumerate(columns)
        )
        for k, term in enumerate(terms, 1):
            total = total - term if k % 2 else total + term
        return total

    write.give(minor(0, tuple(range(size))).name, 0)


def _elu(write: Expression) -> None:
    """Write Elu of half-precision floats in float32; TVM's importer supports no other type."""
    dtype = write.type().dtype
    if dtype != "float32":
        wide = write.as_is("Elu", write.cast(write.node.inputs[0], "float32"), **write.node.attrs)
        write.give(write.cast(wide, dtype), 0)


def _batch_norm(write: Expression) -> None:
    """Write BatchNormalization with computed parameters."""
    x, *parameters = write.node.inputs
    if all(name in write.graph.constants for name in parameters):
        return
    kinds = [write.graph.types[name] for name in parameters]
    rank, dtype = len(write.type().shape), write.type().dtype
    if rank < 2 or any(len(kind.shape) != 1 for kind in kinds):
        return  # its shape check reports the error

    def column(k: int) -> Number:
        name = parameters[k] if kinds[k].dtype == dtype else write.cast(parameters[k], dtype)
        return number(write, write.reshape(name, 1, -1, *[1] * (rank - 2)), dtype)

    scale, bias, mean, variance = (column(k) for k in range(4))
    root = (variance + write.node.attrs["epsilon"])("Sqrt")
    write.give(((number(write, x, dtype) - mean) * (scale / root) + bias).name, 0)


EXPANSIONS = {
    "BatchNormalization": _batch_norm,
    "BitShift": _shift,
    "ConstantOfShape": _constant_of_shape,
    "Det": _determinant,
    "Einsum": einsum,
    "Elu": _elu,
    "Equal": _equal,
    "IsInf": _is_infinite,
    "LpNormalization": _lp_normalization,
    "Mish": _mish,
    "Mod": _modulo,
    "Pow": _power,
}
"""Rewrite rules, by operator."""
