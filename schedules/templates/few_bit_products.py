"""One product of a few-bit kernel: a broadcast word of data with a vector of weight words."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules import intrin_x86
from bnncc.schedules.intrin_portable import I32, fused_multiply_add, popcount
from bnncc.schedules.templates.kernel import Expr, splat

VNNI = "vnni"
"""A machine with AVX-512 VNNI: four products in each lane at once."""


PAIRS = {f"x86-{bits}": pairs for bits, pairs in intrin_x86.DOT_PAIRS.items()}
"""What multiplies pairs of int16, by the machine."""


def imported(method: str, machine: str) -> str:
    """Return LLVM code that `add` needs, if any."""
    return PAIRS[machine].source if method == "pairs" and machine in PAIRS else ""


def add(method: str, machine: str, total: Expr, data: Expr, weight: Expr, sign: int) -> Expr:
    """Return `total` plus (or, with `sign` -1, minus) the product of two vectors of words.

    Parameters
    ----------
    method : str
        One of `few_bit_data.METHODS`.
    machine : str
        `VNNI`, one of `PAIRS`, or anything else for code that runs everywhere.
    total, data, weight : Expr
        Vectors of `LANES` lanes.
    sign : int
        1 or -1; -1 only for planes.
    """
    if method in ("xor", "and"):
        bits = data ^ weight if method == "xor" else T.bitwise_and(data, weight)
        count = T.Cast(I32, popcount(bits))
        return total + count if sign > 0 else total - count
    if method == "floats":
        return fused_multiply_add(data, weight, total)
    if method == "bytes" and machine == VNNI:
        return intrin_x86.DOT_BYTES(total, data, weight)
    if method == "pairs" and machine in PAIRS:
        return PAIRS[machine](total, data, weight)
    return _numbers(total, data, weight, 8 if method == "bytes" else 16)


def _numbers(total: Expr, data: Expr, weight: Expr, bits: int) -> Expr:
    """Multiply the numbers of a word one after another."""
    whole, mask = T.Cast(I32, weight), tirx.IntImm("uint32", 2**bits - 1)
    for first in range(0, 32, bits):
        level = T.Cast(I32, T.bitwise_and(T.shift_right(data, _u32(first)), splat(mask)))
        left = whole if first + bits == 32 else T.shift_left(whole, _i32(32 - bits - first))
        total = total + level * T.shift_right(left, _i32(32 - bits))
    return total


def _u32(value: int) -> Any:
    return splat(tirx.IntImm("uint32", value))


def _i32(value: int) -> Any:
    return splat(tirx.IntImm("int32", value))
