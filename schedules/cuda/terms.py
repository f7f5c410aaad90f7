"""Scalar CUDA C++ for the algebra of epilogue steps, written so that compilers do not fuse it."""

from __future__ import annotations

from bnncc.schedules.cuda.text import number
from bnncc.topi_binary.algebra import Algebra, swish_by_exp


def _swish(x: str) -> str:
    return str(swish_by_exp(TEXT, x, "expf({})".format))


TEXT = Algebra(
    zero="0.0f",
    number=number,
    count="{}.0f".format,
    shared=str,  # already a variable
    fma="__fmaf_rn({}, {}, {})".format,
    add="__fadd_rn({}, {})".format,
    sub="__fsub_rn({}, {})".format,
    mul="__fmul_rn({}, {})".format,
    div="__fdiv_rn({}, {})".format,
    max="fmaxf({}, {})".format,
    min="fminf({}, {})".format,
    swish=_swish,
    compare="{} {} {}".format,
    both="{} && {}".format,
    not_negative="{} >= 0.0f".format,
    select="{} ? {} : {}".format,
    real="(float){}".format,
    whole="(int){}".format,
    place="bnncc::place_of({})".format,
    apart="__float_as_int({}) - __float_as_int({})".format,
)
