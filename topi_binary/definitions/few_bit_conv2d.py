"""Few-bit convolution: sums of products of levels with small integers.

A sum is taken for `LANES` output channels at a time, as their weights lie: its last loop, over
those lanes, is a block of its own. Pairs of a plane of data and one of weights take turns from the
highest significance down, and each sum begins with the one before, twice where the significance is
lower (Horner's rule). Of many pairs, each is a count of its own that is multiplied by its worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.topi_binary import few_bit_data
from bnncc.topi_binary.definitions.blocks import Buffer, Expr, buffer, compute, int64, under
from bnncc.topi_binary.definitions.epilogue import Pixels, epilogue
from bnncc.topi_binary.definitions.taps import (
    border_class,
    flattened,
    pixel,
    place,
    tests_inside,
)
from bnncc.topi_binary.definitions.terms import signed
from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.signature import Operator, aliased
from bnncc.topi_binary.spec import FewBitConv2d

CHAINED_PAIRS = 4
"""Pairs of planes up to which one sum begins with another."""

NUMBERS = {"bytes": "uint8", "pairs": "int16"}
"""Type of a level, in methods with several in a word."""

Product = Callable[[Expr, Callable[[Expr], Expr], Expr], Expr]
"""Takes a sum, the numbers of a word of data by their place, and a word of weights; returns the new
sum."""


def few_bit_conv2d(operator: Operator, spec: FewBitConv2d) -> None:
    """Write ``acc = start + sum(k * q)``, see `FewBitConv2d`, and the epilogue."""
    if (flat := flattened(spec)) is not spec:
        operator.reshape(spec := flat)
    count = spec.data_tensors
    data, (weight, *params) = operator.inputs[:count], operator.inputs[count:]
    start = params.pop(0) if spec.starts else None
    tiles = (operator.n, *spec.output_hw, blocks(spec.out_channels))
    sums = (_planes if spec.form == "planes" else _numbers)(spec, data, weight, tiles)
    extents = (*tiles[:3], tiles[3] * LANES)
    firsts = [[first for first, _ in few_bit_data.classes(spec, axis)] for axis in (0, 1)]

    def started(n: Expr, h: Expr, w: Expr, o: Expr) -> Expr:
        total = sums[n, h, w, o]
        if spec.method == "floats":
            total = T.Cast("int32", total)
        if spec.doubled:
            total = total + total
        if start is None:
            return total
        kind = border_class(firsts[0], h) * len(firsts[1]) + border_class(firsts[1], w)
        begin = start[kind * extents[3] + o]
        return begin - total if spec.method == "xor" else begin + total

    acc = compute("acc", buffer("acc", extents, "int32"), extents, started)
    pixels = Pixels((*extents[:3], spec.out_channels), spec.rank)
    epilogue(operator, spec.steps, params, pixels, acc=acc, padded=True)


def _numbers(
    spec: FewBitConv2d, data: Sequence[Buffer], weight: Buffer, tiles: tuple[Any, ...]
) -> Buffer:
    """Write the sums of products of levels that are numbers, perhaps several in a word."""
    (numbers,), per_word = data, few_bit_data.PER_WORD[spec.form]
    if spec.method == "floats":
        sums = buffer("sum", (*tiles[:3], tiles[3] * LANES), "float32")
        return _sum(spec, "sum", sums, tiles, numbers, weight, 0, lambda total, datum, word:
                    total + datum(0) * word)  # fmt: skip
    *outer, words = numbers.shape
    numbers = aliased(numbers, [*outer, words * per_word], NUMBERS[spec.method])

    def product(total: Expr, datum: Callable[[int], Expr], word: Expr) -> Expr:
        for number in range(per_word):
            level = T.Cast("int32", datum(number))
            total = total + level * signed(word, 32 // per_word, number)
        return total

    sums = buffer("sum", (*tiles[:3], tiles[3] * LANES), "int32")
    return _sum(spec, "sum", sums, tiles, numbers, weight, 0, product)


def _planes(
    spec: FewBitConv2d, data: Sequence[Buffer], weight: Buffer, tiles: tuple[Any, ...]
) -> Buffer:
    """Write the sums over all pairs of planes."""
    planes, count = spec.weight_bits, len(data)
    if planes * count > CHAINED_PAIRS:
        return _counts(spec, data, weight, tiles)
    extents = (*tiles[:3], tiles[3] * LANES)
    pairs = sorted(((i + j, -j) for i in range(planes) for j in range(count)), reverse=True)
    sums, above = None, 0
    for number, (significance, place_) in enumerate(pairs):
        plane = significance + place_
        negative = spec.method == "and" and plane == planes - 1
        before, sums = sums, buffer(f"sum_{number}", extents, "int32")
        doubled, above = significance < above, significance

        def begin(*i: Expr, before: Buffer = before, doubled: bool = doubled) -> Expr:
            if before is None:
                return T.int32(0)
            return before[i] + before[i] if doubled else before[i]

        product = partial(_counted, spec, -1 if negative else 1)
        _sum(spec, f"sum_{number}", sums, tiles, data[-place_], weight, plane, product, begin)
    return sums


def _counts(
    spec: FewBitConv2d, data: Sequence[Buffer], weight: Buffer, tiles: tuple[Any, ...]
) -> Buffer:
    """Write a count for each pair of planes, and their sum."""
    planes, extents, sums = spec.weight_bits, (*tiles[:3], tiles[3] * LANES), None
    for number, plane in enumerate(data):
        counts = buffer(f"count_{number}", (planes, *extents), "int32")
        product = partial(_counted, spec, 1)
        _sum(spec, f"count_{number}", counts, tiles, plane, weight, None, product)
        before, sums = sums, buffer(f"sum_{number}", extents, "int32")
        with T.grid(*_indices(tiles), int64(planes)) as loops, T.sblock(f"sum_{number}"):
            n, h, w, o, i = T.axis.remap("SSSSR", list(loops))
            with T.init(), T.vectorized(int64(LANES)) as lane:
                at = [n, h, w, o * LANES + lane]
                T.buffer_store(sums, T.int32(0) if before is None else before[tuple(at)], at)
            worth = T.shift_left(T.int32(1), T.Cast("int32", i + number))
            if spec.method == "and":
                worth = T.Select(i == planes - 1, -worth, worth)
            with T.vectorized(int64(LANES)) as lane:
                at = [n, h, w, o * LANES + lane]
                T.buffer_store(sums, sums[tuple(at)] + counts[tuple([i, *at])] * worth, at)
    return sums


def _counted(
    spec: FewBitConv2d, sign: int, total: Expr, datum: Callable[[int], Expr], word: Expr
) -> Expr:
    met = datum(0) ^ word if spec.method == "xor" else T.bitwise_and(datum(0), word)
    counted = T.Cast("int32", T.popcount(met))
    return total + counted if sign > 0 else total - counted


def _sum(
    spec: FewBitConv2d, name: str, sums: Buffer, tiles: tuple[Any, ...], data: Buffer,
    weight: Buffer, plane: int | None, product: Product,
    begin: Callable[..., Expr] | None = None,
) -> Buffer:  # fmt: skip
    """Write the sums over the taps inside the image, of one plane of weights or of each."""
    words, planes = few_bit_data.group_words(spec), few_bit_data.weight_planes(spec)
    each = () if plane is not None else (planes,)
    zero = T.float32(0) if spec.method == "floats" else T.int32(0)
    reduced = (*spec.kernel, words)
    with T.grid(*_indices((*each, *tiles, *reduced))) as loops, T.sblock(name):
        axes = list(T.axis.remap("S" * (len(each) + 4) + "RRR", list(loops)))
        own, (n, h, w, o, kh, kw, c) = axes[: len(each)], axes[len(each) :]
        with T.init(), T.vectorized(int64(LANES)) as lane:
            at = [*own, n, h, w, o * LANES + lane]
            T.buffer_store(sums, begin(*at) if begin else zero, at)
        there = place(spec, h, w, kh, kw)
        row = (o * planes + (own[0] if own else plane)) * spec.kernel[0] + kh
        first = (row * spec.kernel[1] + kw) * words + c
        if spec.depthwise:
            channel = o * LANES
        else:
            per_out = spec.out_channels // spec.groups
            group = o * LANES // per_out * words if spec.groups > 1 else 0
            channel = (group + c) * (few_bit_data.PER_WORD.get(spec.form, 1))
        with under(*tests_inside(spec, n, h, w, o, kh, kw)):
            with T.serial(int64(LANES)) as loop, T.sblock(f"product_{name}"):
                lane = T.axis.spatial(int64(LANES), loop)
                at = [*own, n, h, w, o * LANES + lane]

                def datum(number: Expr) -> Expr:
                    one = channel + (lane if spec.depthwise else number)
                    return data[tuple(pixel(spec, n, *there, one))]

                word = weight[first * LANES + lane]
                T.buffer_store(sums, product(sums[tuple(at)], datum, word), at)
    return sums


def _indices(extents: Sequence[Any]) -> list[Any]:
    return [int64(e) if isinstance(e, int) else e for e in extents]
