"""The algebra of an epilogue's steps on one number at a time, as TensorIR."""

from __future__ import annotations

import operator
from typing import Any

from tvm.tirx.script import builder as T

Expr = Any

_COMPARE = {"<=": operator.le, ">=": operator.ge, ">": operator.gt, "==": operator.eq}


class Scalar:
    """See `bnncc.topi_binary.algebra`, for each operation."""

    def __init__(self) -> None:
        self.fma, self.max, self.min = T.fma, T.max, T.min
        self.add, self.sub, self.mul = operator.add, operator.sub, operator.mul
        self.select, self.both = T.Select, T.And

    @property
    def zero(self) -> Expr:
        """0."""
        return self.number(0.0)

    def number(self, value: float) -> Expr:
        """Return a float."""
        return T.float32(value)

    def count(self, value: int) -> Expr:
        """Return a whole number as a float."""
        return self.number(value)

    def shared(self, value: Expr) -> Expr:
        """Return `value`: the code generator finds what is written twice."""
        return value

    def compare(self, left: Expr, how: str, right: Expr) -> Expr:
        """Return a condition."""
        return _COMPARE[how](left, right)

    def not_negative(self, value: Expr) -> Expr:
        """Return whether `value` is at least 0."""
        return value >= self.zero

    def real(self, value: Expr) -> Expr:
        """Return an int32 as a float."""
        return T.Cast("float32", value)

    def whole(self, value: Expr) -> Expr:
        """Return a float as an int32."""
        return T.Cast("int32", value)


SCALAR = Scalar()
