"""Binary convolution, dense layers and products of activations: XOR or AND, and a count of bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout, sliced_data
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    accumulate,
    bit_of,
    buffer,
    int64,
)
from bnncc.topi_binary.definitions.epilogue import Below, Pixels, epilogue
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.definitions.taps import border_class, clamped, inside, pixel, place
from bnncc.topi_binary.definitions.weights import binary_word
from bnncc.topi_binary.layout import LANES, WORD_BITS
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.topi_binary.step import Step


def binary_conv2d(operator: Operator, spec: BinaryConv2d) -> None:
    """Write ``acc = sum of what a word counts``, see `BinaryConv2d`, and the epilogue."""
    params = iter(operator.inputs)
    data = next(params)
    zero = next(params) if spec.ternary else None
    weight = next(params)
    weight_zero = next(params) if spec.weight_zeros else None
    if spec.per_image and spec.mode == "and":
        next(params)  # start values: what kernels begin with
    sliced = spec.weight_order == sliced_data.ORDER
    limited = sliced_data.limited(spec)
    counted = replace(spec, mode="xor", pad_value=spec.pad_value or -1) if limited else spec
    per_group, per_out = spec.channels // spec.groups, spec.out_channels // spec.groups
    words = per_group if sliced else layout.words(per_group)
    pixels = Pixels((operator.n, *spec.output_hw, spec.out_channels), spec.rank)

    def of_data(plane: Buffer, n: Expr, row: Expr, column: Expr, o: Expr, c: Expr) -> Expr:
        if sliced:
            where = pixel(spec, n, row, column, int64(0))[:-1]
            return T.Cast("uint32", bit_of(plane, where, o // per_out * per_group + c))
        return plane[tuple(pixel(spec, n, row, column, o // per_out * words + c))]

    def of_weight(plane: Buffer, n: Expr, o: Expr, kh: Expr, kw: Expr, c: Expr) -> Expr:
        if sliced:
            turn = (c - o % per_group + per_group) % per_group
            row = (kh * spec.kernel[1] + kw) * per_group + turn
            total = layout.words(spec.channels)
            word = T.shift_right(plane[row * total + o // WORD_BITS], T.Cast("uint32", o % 32))
            return T.bitwise_and(word, T.uint32(1))
        if spec.per_image:
            return plane[n, (o // LANES * words + c) * LANES + o % LANES]
        return binary_word(spec, plane, o, kh, kw, c)

    def step(acc: Expr, *i: Expr) -> Expr:
        n, h, w, o, kh, kw, c = i
        there = place(spec, h, w, kh, kw)
        at = clamped(spec, *there)
        words_of = of_data(data, n, *at, o, c), of_weight(weight, n, o, kh, kw, c)
        zeros = [of_data(zero, n, *at, o, c)] if zero is not None else []
        if weight_zero is not None:
            zeros.append(of_weight(weight_zero, n, o, kh, kw, c))
        counts = _count(counted, *words_of, zeros)
        bits = int64(1) if sliced else T.min(int64(WORD_BITS), per_group - c * WORD_BITS)
        outside = _outside(counted, words_of[1], T.Cast("int32", bits), c)
        return acc + T.if_then_else(inside(spec, *there), counts, outside)

    acc = buffer("acc", pixels.extents, "int32")
    accumulate("acc", acc, pixels.extents, (*spec.kernel, words), T.int32(0), step)
    below = _below(spec) if limited else None
    epilogue(operator, spec.steps, list(params), pixels, acc=acc, below=below)


def _count(spec: BinaryConv2d, data: Expr, weight: Expr, zeros: list[Expr]) -> Expr:
    """Return what a word inside the image counts."""

    def ones(word: Expr) -> Expr:
        return T.Cast("int32", T.popcount(word))

    if spec.mode == "and":
        count = ones(data) - ones(T.bitwise_and(data, weight)) * 2
        return count + ones(T.bitwise_and(data, zeros[0])) if zeros else count
    differ = T.bitwise_xor(data, weight)
    if not spec.doubled:
        return ones(differ)
    none = zeros[0] if zeros else T.uint32(0)
    for one in zeros[1:]:
        none = T.bitwise_or(none, one)
    return ones(T.bitwise_and(differ, T.bitwise_not(none))) * 2 + ones(none)


def _outside(spec: BinaryConv2d, weight: Expr, bits: Expr, c: Expr) -> Expr:
    """Return what word `c` of a tap outside the image counts, `bits` channels."""
    ones, unit = T.Cast("int32", T.popcount(weight)), 1 + spec.doubled
    if spec.mode == "and":
        return bits - ones * 2 if spec.pad_value else T.int32(0)
    if spec.pad_value:
        return (bits - ones if spec.pad_value > 0 else ones) * unit
    if spec.doubled:
        return bits
    # Half of the channels of a tap, with its first word.
    return T.if_then_else(c == 0, T.int32(spec.channels // spec.groups // 2), T.int32(0))


def _below(spec: BinaryConv2d) -> Below:
    """Return what writes the thresholds of a spec whose limits are stored in slices of bits."""
    high, wide = sliced_data.classes(spec)

    def tests(step: Step, taken: Sequence[Buffer], at: Place, count: Buffer) -> list[Any]:
        kind = border_class(high, at.h) * len(wide) + border_class(wide, at.w)

        def less(limits: Buffer, lane: Expr) -> Expr:
            limit: Expr = T.int32(0)
            for plane in range(sliced_data.planes(spec)):
                one = T.Cast("int32", bit_of(limits, (kind, int64(plane)), at.channel(lane)))
                limit = limit + T.shift_left(one, T.int32(plane))
            return count[lane] < limit

        def neither(lane: Expr) -> Expr:
            return T.And(less(taken[0], lane), T.Not(less(taken[1], lane)))

        return [lambda lane: less(taken[0], lane), neither][: 1 + step.zero]

    return tests
