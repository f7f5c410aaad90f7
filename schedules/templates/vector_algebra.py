"""Vector TensorIR (`layout.LANES` values) for the algebra of epilogue steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import F32, I32, fused_multiply_add
from bnncc.topi_binary.definitions.terms import SCALAR
from bnncc.topi_binary.layout import LANES

Expr = Any


def _every(value: float) -> Expr:
    return T.Broadcast(T.float32(value), LANES)


def _place(value: Expr) -> Expr:
    bits = T.reinterpret(I32, value)
    low, zero = (T.Broadcast(number, LANES) for number in (tirx.min_value("int32"), T.int32(0)))
    return T.Select(bits < zero, low - bits, bits)


VECTOR = replace(
    SCALAR,
    zero=_every(0.0),
    number=_every,
    count=_every,
    shared=lambda value: value if isinstance(value, tirx.Var) else T.Bind(value),
    fma=fused_multiply_add,
    not_negative=lambda value: T.reinterpret(I32, value) >= T.Broadcast(T.int32(0), LANES),
    real=lambda value: T.Cast(F32, value),
    whole=lambda value: T.Cast(I32, value),
    place=_place,
    apart=lambda one, other: T.reinterpret(I32, one) - T.reinterpret(I32, other),
)
