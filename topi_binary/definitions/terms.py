"""Scalar TensorIR for the algebra in which the steps of an epilogue are defined."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary.algebra import Algebra, swish_by_exp

_COMPARE = {
    "<=": operator.le, ">=": operator.ge, ">": operator.gt, "<": operator.lt, "==": operator.eq,
}  # fmt: skip


SWISH = "tirx.swish"
"""Operator of TensorIR: ``x / (1 + exp(-x))``. `schedules.float_functions` writes it on CPUs."""


def _register() -> None:
    """Add `SWISH` to TVM's operators: a pure function of each lane."""
    get = tvm_ffi.get_global_func
    get("ir.RegisterOp")(SWISH, "x / (1 + exp(-x))")
    pure = tirx.expr.CallEffectKind.Pure.value
    for attr, value in (("TVectorizable", True), ("TCallEffectKind", pure)):
        get("ir.RegisterOpAttr")(SWISH, attr, value, 10)
    tirx.op.register_intrin_lowering(SWISH, "default", f=_lowered)


def _lowered(call: Any) -> Any:
    """Return an expression for targets whose kernels are not written by `float_functions`."""
    return swish_by_exp(SCALAR, call.args[0], tirx.exp)


_register()


def swish(x: Any) -> Any:
    """Return a call of `SWISH`."""
    return tirx.call_intrin("float32", SWISH, x)


def _place(value: Any) -> Any:
    bits = T.reinterpret("int32", value)
    return T.Select(bits < 0, tirx.min_value("int32") - bits, bits)


SCALAR = Algebra(
    zero=T.float32(0),
    number=T.float32,
    count=T.float32,
    shared=lambda value: value,  # LLVM eliminates common subexpressions
    fma=T.fma,
    add=operator.add,
    sub=operator.sub,
    mul=operator.mul,
    div=operator.truediv,
    max=T.max,
    min=T.min,
    swish=swish,
    compare=lambda left, how, right: _COMPARE[how](left, right),
    both=T.And,
    # The sign bit alone: x86 selects by it without a comparison.
    not_negative=lambda value: T.reinterpret("int32", value) >= T.int32(0),
    select=T.Select,
    real=lambda value: T.Cast("float32", value),
    whole=lambda value: T.Cast("int32", value),
    place=_place,
    apart=lambda one, other: T.reinterpret("int32", one) - T.reinterpret("int32", other),
)


def bfloat16(half: Any) -> Any:
    """Return, as float32, the number whose bfloat16 bits are in a uint32."""
    return T.reinterpret("float32", T.shift_left(half, T.uint32(16)))


def to_bfloat16(datum: Any, flush: bool = False) -> Any:
    """Round to bfloat16, ties to even, and return the bits as uint32; `datum` must not be NaN.

    With `flush`, subnormal numbers become zero, as instructions for bfloat16 treat them.
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
    """Return the signed integer in `bits` bits from bit ``place * bits`` of a word, as int32."""
    whole = T.Cast("int32", value)
    left = T.shift_left(whole, T.int32(32 - bits - place * bits))
    return T.shift_right(left, T.int32(32 - bits))


def weight_of_code(word: Any, width: int, place: int, byte: Any, affine: tuple[int, int]) -> Any:
    """Decode a weight from a packed code in a byte of `word`, as int8.

    Parameters
    ----------
    word, width
        As for `dot_of_codes`.
    place : int
        Position of the code within the byte.
    byte : Expr or int
        Index of the byte.
    affine : tuple of int
        Step and first weight, from `few_bit_data.CODES`.
    """
    moved = T.shift_right(word, T.Cast("uint32", byte * 8 + width * place))
    code = T.Cast("int8", T.bitwise_and(moved, T.uint32((1 << width) - 1)))
    return code * T.int8(affine[0]) + T.int8(affine[1])


def byte_mask(width: int, first: int = 0) -> int:
    """Return the word in which each byte has `width` bits set, from bit `first` up."""
    return ((1 << width) - 1 << first) * 0x01010101


def dot_of_pair(
    total: Any, level: Callable[[Any], Any], code: Callable[[Any], Any], lane: Any
) -> Any:
    """Add products of two of four levels with two codes to a sum in 16 bits.

    Parameters
    ----------
    total : Expr of int16
        The sum so far.
    level : callable
        Takes the index of one of four levels.
    code : callable
        Takes the index of a code: those of a channel for four levels are adjacent.
    lane : Expr
        Number of the sum: two for each channel.
    """
    for number in range(2):
        pair = level(lane % 2 * 2 + number), code(lane * 2 + number)
        total = total + T.Cast("int16", pair[0]) * T.Cast("int16", pair[1])
    return total


def dot_of_codes(width: int, total: Any, datum: Callable[[int], Any], word: Any, part: int) -> Any:
    """Add products of levels with the packed codes at position `part` of each half byte to `total`.

    Parameters
    ----------
    width : int
        Bits per code.
    total : Expr of int32
        The sum so far, of products scaled by ``2**(width * part)``.
    datum : callable
        Takes the index of a level among those that a word of codes multiplies.
    word : Expr of uint32
        Packed codes, see `few_bit_data`.
    part : int
        Position of the code within half a byte.
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
