"""The algebra of an epilogue's steps on a vector of `layout.LANES` values, as TensorIR."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import F32, I32, fused_multiply_add
from bnncc.topi_binary.definitions.terms import Scalar
from bnncc.topi_binary.layout import LANES

Expr = Any


class Lanes(Scalar):
    """See `bnncc.topi_binary.algebra`, for each operation; what it takes and gives are vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.fma = fused_multiply_add

    def number(self, value: float) -> Expr:
        """Return a float in every lane."""
        return T.Broadcast(T.float32(value), LANES)

    def shared(self, value: Expr) -> Expr:
        """Return `value` under a name."""
        return value if isinstance(value, tirx.Var) else T.Bind(value)

    def not_negative(self, value: Expr) -> Expr:
        """Return whether lanes are at least 0.

        Not `value >= 0`: TVM cannot share a vector of booleans with the ``bits`` of this value.
        """
        return self.zero <= value

    def real(self, value: Expr) -> Expr:
        """Return int32 lanes as floats."""
        return T.Cast(F32, value)

    def whole(self, value: Expr) -> Expr:
        """Return float lanes as int32."""
        return T.Cast(I32, value)


VECTOR = Lanes()
