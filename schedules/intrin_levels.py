"""Tensor intrinsics for products of levels with integer weights, several numbers per word.

Pairs for any machine, and functions that make pairs from the instructions of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import Operand, TensorPair
from bnncc.schedules.intrin_portable import picked
from bnncc.topi_binary.definitions.terms import (
    bfloat16,
    byte_mask,
    dot_of_codes,
    half_of,
    signed,
    weight_of_code,
)
from bnncc.topi_binary.few_bit_data import CODES
from bnncc.topi_binary.layout import LANES

Expr = Any

I32 = f"int32x{LANES}"


def _numbers(bits: int, total: Expr, data: Expr, weight: Expr) -> Expr:
    """Multiply the numbers in a word one after the other."""
    whole, mask = T.Cast(I32, weight), T.Broadcast(tirx.IntImm("uint32", 2**bits - 1), LANES)
    for first in range(0, 32, bits):
        moved = T.shift_right(data, T.Broadcast(T.uint32(first), LANES))
        left = T.shift_left(whole, T.Broadcast(T.int32(32 - bits - first), LANES))
        number = T.shift_right(left, T.Broadcast(T.int32(32 - bits), LANES))
        total = total + T.Cast(I32, T.bitwise_and(moved, mask)) * number
    return total


def dot_add(
    dtype: str, dot: Callable[[Expr, Expr, Expr], Expr], feature: str = "", source: str = "",
    data_bits: int = 0,
) -> TensorPair:  # fmt: skip
    """Return the pair that adds the products of the numbers in one data word.

    Parameters
    ----------
    dtype : {"uint8", "int16", "bfloat16"}
        Type of the data. Weights are signed, of the same width, adjacent in words.
    dot : callable
        Takes vectors of sums, data words and weight words; returns the new sums.
    feature : str, default ""
        Feature of a `TargetSpec` that it requires.
    source : str, default ""
        LLVM IR that `dot` calls.
    data_bits : int, default 0
        Bits of the largest datum, if fewer than those of `dtype`.
    """
    bits = int("".join(filter(str.isdigit, dtype)))
    count, floats = 32 // bits, dtype == "bfloat16"

    def term(word: Expr, datum: Expr, place: int) -> Expr:
        if not floats:
            return T.Cast("int32", datum) * signed(word, bits, place)
        return bfloat16(T.Cast("uint32", datum)) * half_of(word, place)

    def desc(lane: Expr, data: Any, weight: Any, total: Any) -> list[tuple[Expr, Expr]]:
        made = total[lane]
        for place in reversed(range(count)) if floats else range(count):  # as instructions do
            made = made + term(weight[lane], data[place], place)
        return [(lane, made)]

    def impl(data: Any, weight: Any, total: Any) -> list[tuple[Expr, Expr]]:
        every = T.Ramp(0, 1, LANES)
        word = T.Broadcast(T.reinterpret("uint32", data[T.Ramp(0, 1, count)]), LANES)
        return [(every, dot(total[every], word, weight[every]))]

    held = data_bits or bits
    end = f"{count}x{LANES}_{'bf16' if floats else f'{dtype[0]}{held}'.replace('i', 's')}"
    bounds = (0, 2**held - 1) if held < bits else _LEVELS.get(dtype)
    return TensorPair(
        f"{feature}_dot_add_{end}".lstrip("_"),
        feature,
        (
            Operand((count,), "uint16" if floats else dtype, bounds=bounds),
            Operand((LANES,), "uint32"),
            Operand((LANES,), "float32" if floats else "int32"),
        ),
        LANES,
        desc,
        impl,
        source=source,
    )


_LEVELS = {"int16": (0, 2**15 - 1)}

DOT_ADD = {
    "uint8": dot_add("uint8", partial(_numbers, 8)),
    "int16": dot_add("int16", partial(_numbers, 16)),
}
"""By data type (levels are not negative): for targets without an instruction that adds several
products."""


Dot = Callable[[Expr, Sequence[Expr], Sequence[Expr]], Expr]
"""Takes vectors of sums, words of levels and words of codes (bytes of at most 15), one or two of
each; returns the new sums."""


def dot_bytes(dot: Dot, feature: str, data_bits: int = 8) -> TensorPair:
    """Return the pair that adds products of bytes, from a function of lists of words."""
    return dot_add(
        "uint8",
        lambda total, data, weight: dot(total, [data], [weight]),
        feature,
        data_bits=data_bits,
    )


def in_pieces(
    count: int, dot: Dot, total: Expr, levels: Sequence[Expr], codes: Sequence[Expr]
) -> Expr:
    """Apply a function on vectors of `count` lanes to vectors of `LANES`, piece by piece."""
    if count == LANES:
        return dot(total, levels, codes)
    total, made = T.Bind(total), []
    for first in range(0, LANES, count):
        lanes = range(first, first + count)
        words = [[picked([word], lanes) for word in side] for side in (levels, codes)]
        made.append(T.Bind(dot(picked([total], lanes), *words)))
    return picked(made, range(LANES))


def one_by_one(dot: Callable[[Expr, Expr, Expr], Expr]) -> Dot:
    """Extend a function of single words to several words."""

    def every(total: Expr, levels: Sequence[Expr], codes: Sequence[Expr]) -> Expr:
        for level, code in zip(levels, codes, strict=True):
            total = dot(total, level, code)
        return total

    return every


def code_pairs(dot: Dot, feature: str = "", prefix: str = "") -> dict[int, TensorPair]:
    """Return, by bits per code, the pairs that add products of packed codes."""
    return {width: _dot_add_codes(width, dot, feature, prefix or feature) for width in CODES}


def _dot_add_codes(width: int, dot: Dot, feature: str, prefix: str) -> TensorPair:
    """Return the pair that multiplies a word of packed codes by the levels of a pixel.

    Codes are masked in place, so each position in half a byte has a sum of its own, of products
    scaled by ``2**(width * position)``.
    """
    parts, count = 4 // width, 32 // width
    every = T.Ramp(0, 1, LANES)

    def desc(lane: Expr, data: Any, weight: Any, total: Any) -> Any:
        return [
            (
                (part, lane),
                dot_of_codes(width, total[part, lane], data.__getitem__, weight[lane], part),
            )
            for part in range(parts)
        ]

    def impl(data: Any, weight: Any, total: Any) -> Any:
        whole = T.bind(weight[every])
        halves = [whole, T.bind(T.shift_right(whole, T.Broadcast(T.uint32(4), LANES)))]
        made = []
        for part in range(parts):
            mask = T.Broadcast(tirx.IntImm("uint32", byte_mask(width, width * part)), LANES)
            firsts = [(half * parts + part) * 4 for half in range(2)]
            levels = [T.reinterpret("uint32", data[T.Ramp(first, 1, 4)]) for first in firsts]
            codes = [T.Bind(T.bitwise_and(word, mask)) for word in halves]
            words = [T.Bind(T.Broadcast(level, LANES)) for level in levels]
            made.append(((part, every), dot(total[part, every], words, codes)))
        return made

    return TensorPair(
        f"{prefix}_dot_add_codes_{count}x{LANES}_u{width}".lstrip("_"),
        feature,
        (
            Operand((count,), "uint8"),
            Operand((LANES,), "uint32"),
            Operand((parts, LANES), "int32", strided=True),
        ),
        LANES,
        desc,
        impl,
    )


DOT_ADD_CODES = code_pairs(one_by_one(partial(_numbers, 8)))
"""By bits per code: for targets without an instruction that adds several products."""


def _weights_of_codes(width: int, affine: tuple[int, int]) -> TensorPair:
    places, size = 8 // width, 4 * LANES

    def desc(lane: Expr, word: Any, made: Any) -> Any:
        return [
            ((place, lane), weight_of_code(word[lane // 4], width, place, lane % 4, affine))
            for place in range(places)
        ]

    def impl(word: Any, made: Any) -> Any:
        whole, rows = T.Bind(word[T.Ramp(0, 1, LANES)]), []
        mask = T.Broadcast(tirx.IntImm("uint32", byte_mask(width)), LANES)
        step, first = (T.Broadcast(T.int8(value), size) for value in affine)
        for place in range(places):
            moved = T.shift_right(whole, T.Broadcast(T.uint32(width * place), LANES))
            code = T.reinterpret(f"int8x{size}", T.bitwise_and(moved, mask))
            rows.append(((place, T.Ramp(0, 1, size)), code * step + first))
        return rows

    return TensorPair(
        f"weights_of_codes_{places}x{size}_u{width}",
        "",
        (Operand((LANES,), "uint32"), Operand((places, size), "int8", strided=True)),
        size,
        desc,
        impl,
        fresh=True,
    )


WEIGHTS_OF_CODES = {width: _weights_of_codes(width, affine) for width, affine in CODES.items()}
"""By bits per code: words of packed codes become rows of weights, one per position in a byte."""
