"""The algebra of an epilogue's steps on one number at a time, as TensorIR."""

from __future__ import annotations

import operator
from collections.abc import Callable
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
    div=operator.truediv,
    max=T.max,
    min=T.min,
    compare=lambda left, how, right: _COMPARE[how](left, right),
    both=T.And,
    not_negative=lambda value: value >= T.float32(0),
    select=T.Select,
    real=lambda value: T.Cast("float32", value),
    whole=lambda value: T.Cast("int32", value),
    place=_place,
    apart=lambda one, other: T.reinterpret("int32", one) - T.reinterpret("int32", other),
)


def bfloat16(half: Any) -> Any:
    """Return the number whose upper half are the bits of a uint32, as float32."""
    return T.reinterpret("float32", T.shift_left(half, T.uint32(16)))


def to_bfloat16(datum: Any, flush: bool = False) -> Any:
    """Return the bits of the nearest bfloat16, ties to even, as uint32; `datum` is no NaN.

    With `flush`, a number without a normal exponent becomes zero, as instructions have it.
    """
    bits = T.reinterpret("uint32", datum)
    odd = T.bitwise_and(T.shift_right(bits, T.uint32(16)), T.uint32(1))
    rounded = T.shift_right(bits + T.uint32(0x7FFF) + odd, T.uint32(16))
    if not flush:
        return rounded
    sign = T.bitwise_and(T.shift_right(bits, T.uint32(16)), T.uint32(0x8000))
    return T.Select(T.bitwise_and(bits, T.uint32(0x7F800000)) == T.uint32(0), sign, rounded)


def half_of(word: Any, place: int) -> Any:
    """Return the bfloat16 in half `place` of a 32-bit word, as float32."""
    half = T.shift_right(word, T.uint32(16 * place))
    return bfloat16(T.bitwise_and(half, T.uint32(2**16 - 1)))


def signed(value: Any, bits: int, place: int) -> Any:
    """Return the signed number in bits ``place * bits`` and up of a 32-bit word, as int32."""
    whole = T.Cast("int32", value)
    left = T.shift_left(whole, T.int32(32 - bits - place * bits))
    return T.shift_right(left, T.int32(32 - bits))


def weight_of_code(word: Any, width: int, place: int, byte: Any, affine: tuple[int, int]) -> Any:
    """Return the weight whose code is in a byte of a word of packed codes, as int8.

    Parameters
    ----------
    word, width
        As for `dot_of_codes`.
    place : int
        Which code of the byte.
    byte : Expr or int
        Which byte.
    affine : tuple of int
        Step and first weight, of `few_bit_data.CODES`.
    """
    moved = T.shift_right(word, T.Cast("uint32", byte * 8 + width * place))
    code = T.Cast("int8", T.bitwise_and(moved, T.uint32((1 << width) - 1)))
    return code * T.int8(affine[0]) + T.int8(affine[1])


def byte_mask(width: int, first: int = 0) -> int:
    """Return the word in which every byte has `width` bits set, from bit `first` on."""
    return ((1 << width) - 1 << first) * 0x01010101


def dot_of_codes(width: int, total: Any, datum: Callable[[int], Any], word: Any, part: int) -> Any:
    """Add products of levels and packed codes, of one place in each half of a byte, to `total`.

    Parameters
    ----------
    width : int
        Bits of a code.
    total : Expr of int32
        The sum so far, of products that count ``2**(width * part)`` times.
    datum : callable
        Takes the number of a level among those that meet the word.
    word : Expr of uint32
        Packed codes, see `few_bit_data`.
    part : int
        Which place of half a byte.
    """
    places = 8 // width
    mask = T.uint32(((1 << width) - 1) << (width * part))
    for half in range(2):
        for byte in range(4):
            moved = T.shift_right(word, T.uint32(8 * byte + 4 * half))
            code = T.Cast("int32", T.bitwise_and(moved, mask))
            level = datum((half * (places // 2) + part) * 4 + byte)
            total = total + T.Cast("int32", level) * code
    return total
