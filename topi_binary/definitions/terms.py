"""The algebra of an epilogue's steps on one number at a time, as TensorIR."""

from __future__ import annotations

import operator
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary.algebra import Algebra

_COMPARE = {
    "<=": operator.le, ">=": operator.ge, ">": operator.gt, "<": operator.lt, "==": operator.eq,
}  # fmt: skip


def _place(value: Any) -> Any:
    bits = T.reinterpret("int32", value)
    return T.Select(bits < 0, tirx.min_value("int32") - bits, bits)


SCALAR = Algebra(
    zero=T.float32(0),
    number=T.float32,
    count=T.float32,
    shared=lambda value: value,  # the code generator finds what is written twice
    fma=T.fma,
    add=operator.add,
    sub=operator.sub,
    mul=operator.mul,
    max=T.max,
    min=T.min,
    compare=lambda left, how, right: _COMPARE[how](left, right),
    both=T.And,
    not_negative=lambda value: value >= T.float32(0),
    select=T.Select,
    real=lambda value: T.Cast("float32", value),
    whole=lambda value: T.Cast("int32", value),
    place=_place,
)


def signed(value: Any, bits: int, place: int) -> Any:
    """Return the signed number in bits ``place * bits`` and up of a 32-bit word, as int32."""
    whole = T.Cast("int32", value)
    left = T.shift_left(whole, T.int32(32 - bits - place * bits))
    return T.shift_right(left, T.int32(32 - bits))
