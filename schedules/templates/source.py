"""What an elementwise kernel starts from: floats, bytes or bits, as vectors of channels."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.templates.kernel import Expr, f32, load, splat, u32
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import Elementwise


def value_of(spec: Elementwise, data: list[Expr], at: Place) -> Expr:
    """Return the value that the steps start from, lanes being channels.

    Parameters
    ----------
    spec : Elementwise
        The kernel.
    data : list of Buffer
        Its data, planes of bits as half words.
    at : Place
        Where the vector lies.

    Returns
    -------
    Expr of float32x16
        Undefined in lanes beyond the last channel.
    """
    if spec.planes:
        level = f32(0.0)
        for number, plane in enumerate(data):
            ones = lanes_of(plane[tuple(at.index(at.block))])
            level = level + T.Select(ones, f32(2.0**number), f32(0.0))
        return level
    if not spec.from_bits:
        return to_float(load(data[0], at.index(at.channel()), at.lanes), spec.dtype)
    ones = lanes_of(data[0][tuple(at.index(at.block))])
    value = T.Select(ones, f32(1.0), f32(0.0 if spec.mode == "and" else -1.0))
    if spec.ternary:
        value = T.Select(lanes_of(data[1][tuple(at.index(at.block))]), f32(0.0), value)
    return value


def lanes_of(half: Expr) -> Expr:
    """Return bit i of a half word in lane i, as a condition."""
    bit = T.shift_left(u32(1), tirx.Ramp(tirx.IntImm("uint32", 0), tirx.IntImm("uint32", 1), LANES))
    return (splat(T.Cast("uint32", half)) & bit) != u32(0)


def to_float(vector: Expr, dtype: str) -> Expr:
    """Return a vector of floats or bytes as floats."""
    if dtype == "float32":
        return vector
    return T.Cast(f"float32x{LANES}", T.Cast(f"int32x{LANES}", vector))
