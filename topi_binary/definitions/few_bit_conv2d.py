"""Few-bit convolution: sums of products of levels with small integers.

Sums are computed for `LANES` output channels at a time, in the order of the packed weights; the
innermost loop, over those lanes, is a separate block. With bit planes, the pairs of a data plane
and a weight plane are processed from the highest significance to the lowest. Each sum continues
from the previous one, doubled when the significance drops (Horner's rule). If there are many pairs,
each pair is counted separately instead and its count multiplied by its significance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import borders, few_bit_data
from bnncc.topi_binary.definitions import byte_products
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    Window,
    accumulate,
    axes,
    buffer,
    compute,
    extent,
    int64,
    under,
)
from bnncc.topi_binary.definitions.epilogue import Pixels, Start, epilogue, stored
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.definitions.taps import (
    border_class,
    flattened,
    pixel,
    place,
    tests_inside,
)
from bnncc.topi_binary.definitions.terms import dot_of_codes, dot_of_pair, signed
from bnncc.topi_binary.definitions.weights import packed_vector
from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.signature import Operator, aliased
from bnncc.topi_binary.spec import FewBitConv2d

CHAINED_PAIRS, CHAINED_TAPS = 4, 15
"""Sums are chained (Horner's rule) up to this number of pairs of planes, or up to this number of
taps per kernel row over all pairs: for short sums, multiplying the counts costs too much."""

NUMBERS = {"bytes": "uint8", "packed": "uint8", "pairs": "int16"}
"""Type of a level, in methods with several levels per word."""

SHORT = "int16"
"""Form in which products of ``packed`` weights are added in 16 bits first."""

PAIRS, BYTES = 2 * LANES, 4 * LANES
"""Sums in 16 bits, and codes, per vector of channels."""

Product = Callable[..., Expr]
"""Takes a sum, a function from the index of a level in a data word to the level, and a word of
weights; returns the new sum."""


def few_bit_conv2d(operator: Operator, spec: FewBitConv2d, form: str = "") -> None:
    """Write ``acc = start + sum(k * q)``, see `FewBitConv2d`, followed by the epilogue.

    In the form `byte_products.FORM`, sums are matrix products of bytes. In the form `SHORT`, sums
    of packed weights begin in 16 bits.
    """
    if (flat := flattened(spec, byte_products.columns_of(form))) is not spec:
        operator.reshape(spec := flat)
    count = spec.data_tensors
    data, (weight, *params) = operator.inputs[:count], operator.inputs[count:]
    start = params.pop(0) if spec.starts else None
    tiles = (operator.n, *spec.output_hw, blocks(spec.out_channels))
    extents = (*tiles[:3], tiles[3] * LANES)
    firsts = [borders.classes(spec, axis) for axis in (0, 1)]
    pixels = Pixels((*extents[:3], spec.out_channels), spec.rank)

    def started(total: Expr, h: Expr, w: Expr, o: Expr) -> Expr:
        if spec.method == "floats":
            total = T.Cast("int32", total)
        if spec.doubled:
            total = total + total
        if start is None:
            return total
        kind = border_class(firsts[0], h) * len(firsts[1]) + border_class(firsts[1], w)
        begin = start[kind * extents[3] + o]
        return begin - total if spec.method == "xor" else begin + total

    def whole(sums: byte_products.Sums, at: Place, lane: Expr) -> Expr:
        total = sums.dot(at.n, at.h, at.w, at.block, lane)
        return started(total, at.h, at.w, at.block * LANES + lane)

    acc: list[Start]
    if form.startswith(byte_products.FORM):
        sums = byte_products.summed(byte_products.of_levels(spec, data[0], weight), tiles[0], form)
        acc = [partial(whole, one) for one in sums]
    else:
        if spec.method == "packed":
            read = _packed(spec, data, weight, tiles, form == SHORT)
        else:
            write = _planes if spec.form == "planes" else _numbers
            read = write(spec, data, weight, tiles).__getitem__
        made = buffer("acc", extents, "int32")
        acc = [stored(compute("acc", made, extents, lambda *i: started(read(i), *i[1:])))]
    epilogue(operator, spec.steps, params, pixels, acc=acc, padded=True)


def _numbers(
    spec: FewBitConv2d, data: Sequence[Buffer], weight: Buffer, tiles: tuple[Any, ...]
) -> Buffer:
    """Write sums of products of integer levels, one or several per word."""
    (numbers,), per_word = data, few_bit_data.per_word(spec)
    if spec.method == "floats":
        return _sum(
            spec, "sum", tiles, numbers, weight, 0, lambda total, datum, word:
            total + datum(0) * word, dtype="float32",
        )  # fmt: skip
    *outer, words = numbers.shape
    numbers = aliased(numbers, [*outer, words * per_word], NUMBERS[spec.method])
    return _sum(spec, "sum", tiles, numbers, weight, 0, partial(_products, per_word))


def _products(per_word: int, total: Expr, datum: Callable[[int], Expr], word: Expr) -> Expr:
    for number in range(per_word):
        level = T.Cast("int32", datum(number))
        total = total + level * signed(word, 32 // per_word, number)
    return total


def _packed(
    spec: FewBitConv2d, data: Sequence[Buffer], weight: Buffer, tiles: tuple[Any, ...], short: bool
) -> Callable[[tuple[Expr, ...]], Expr]:
    """Write sums of products of levels and packed codes (see `few_bit_data`), and sums of levels.

    Codes are multiplied in place, without shifting them to the low bits of their bytes. Each
    position in half a byte has a sum of its own, which is scaled by the position's weight. If sums
    are `short` first, there is one of them, and codes are shifted.
    """
    width, parts = spec.weight_bits, few_bit_data.sums_of_word(spec)
    *outer, held = data[0].shape
    levels = aliased(data[0], [*outer, held * 4], NUMBERS[spec.method])
    total = accumulate(
        "levels", buffer("levels", tiles[:3], "int32"), tiles[:3], [spec.channels], T.int32(0),
        lambda total, n, h, w, c: total + T.Cast("int32", levels[tuple(pixel(spec, n, h, w, c))]),
    )  # fmt: skip
    weight = aliased(weight, [tiles[3] * few_bit_data.group_words(spec), LANES])
    step, first = few_bit_data.CODES[width]
    if short:
        whole = _short_sums(spec, levels, weight, tiles)
        return lambda i: whole[i] * step + total[i[:3]] * first
    product = partial(dot_of_codes, width)
    sums = _sum(spec, "sum", tiles, levels, weight, 0, product, parts=parts)

    def read(i: tuple[Expr, ...]) -> Expr:
        made: Expr = T.int32(0)
        for part in range(parts):
            at = (*i[:3], part, i[3])
            made = made + T.shift_right(sums[at], T.int32(width * part))
        return made * step + total[i[:3]] * first

    return read


def _short_sums(
    spec: FewBitConv2d, levels: Buffer, weight: Buffer, tiles: tuple[Any, ...]
) -> Buffer:
    """Write sums of products of levels and codes: in 16 bits over a few words, then in 32 bits."""
    words, each = few_bit_data.group_words(spec), few_bit_data.short_words(spec)
    turns, places = blocks(words, each), 8 // spec.weight_bits
    codes = _codes(spec, weight, tiles[3])
    tile = dict(zip("nhwo", tiles, strict=True))
    made = buffer("short", (turns, *tiles[:3], tiles[3] * PAIRS), "int16")
    with axes("short", {"turn": turns, **tile}, {"c": each, "place": places}) as i:
        at, word, test = (i["turn"], i["n"], i["h"], i["w"]), i["turn"] * each + i["c"], None
        if turns * each > words:
            word, test = T.min(word, int64(words - 1)), word < words
        here = Window(made, at, i["o"] * PAIRS, PAIRS)
        channel, begin = (word * places + i["place"]) * 4, i["place"] * BYTES
        *pixel_, channel = pixel(spec, i["n"], i["h"], i["w"], channel)

        def four(first: Expr, end: Expr | None = None) -> Expr:
            part = channel + first if end is None else slice(channel + first, channel + end)
            return levels[tuple([*pixel_, part])]

        def code(first: Expr, end: Expr | None = None) -> Expr:
            part = begin + first if end is None else slice(begin + first, begin + end)
            return codes[i["o"], word, part]

        T.reads(four(0, 4), code(0, BYTES))
        T.writes(here.region)
        here.clear(PAIRS)
        with under(test), T.grid(int64(PAIRS)) as loop, T.sblock("short_add"):
            lane = T.axis.spatial(int64(PAIRS), loop)
            where, start = (*at, i["o"] * PAIRS + lane), lane % 2 * 2
            T.reads(made[where], four(start, start + 2), code(lane * 2, lane * 2 + 2))
            T.writes(made[where])
            T.buffer_store(made, dot_of_pair(made[where], four, code, lane), list(where))
    return _long_sums(made, tile, turns)


def _codes(spec: FewBitConv2d, weight: Buffer, vectors: Any) -> Buffer:
    """Write the codes of each word, one position within its bytes after the other, as bytes."""
    words, width = few_bit_data.group_words(spec), spec.weight_bits
    places = 8 // width
    weight = aliased(weight, [vectors * words, BYTES], "uint8")
    codes = buffer("codes", (vectors, words, places * BYTES), "uint8")
    with axes("codes", {"o": vectors, "c": words, "place": places}, {}) as i:
        packed, first = packed_vector(spec, i["o"], i["c"]), i["place"] * BYTES
        T.reads(weight[packed, 0:BYTES])
        T.writes(codes[i["o"], i["c"], first : first + BYTES])
        with T.vectorized(int64(BYTES)) as lane:
            moved = T.shift_right(weight[packed, lane], T.Cast("uint8", i["place"] * width))
            code = T.bitwise_and(moved, T.uint8(2**width - 1))
            T.buffer_store(codes, code, [i["o"], i["c"], first + lane])
    return codes


def _long_sums(short: Buffer, tile: dict[str, Any], turns: int) -> Buffer:
    """Write sums in 32 bits of pairs of sums in 16 bits."""
    *outer, vectors = tile.values()
    sums = buffer("sum", (*outer, vectors * LANES), "int32")
    with axes("sum", tile, {"turn": turns}) as i:
        at, first = (i["n"], i["h"], i["w"]), i["o"] * LANES
        here = Window(sums, at, first, LANES)
        T.reads(short[tuple([i["turn"], *at, slice(first * 2, first * 2 + PAIRS)])])
        T.writes(here.region)
        here.clear(LANES)
        with T.grid(int64(LANES)) as loop, T.sblock("sum_add"):
            lane = T.axis.spatial(int64(LANES), loop)
            where = (*at, first + lane)
            pair = [short[tuple([i["turn"], *at, (first + lane) * 2 + k])] for k in range(2)]
            added = sums[where] + (T.Cast("int32", pair[0]) + T.Cast("int32", pair[1]))
            T.buffer_store(sums, added, list(where))
    return sums


def _planes(
    spec: FewBitConv2d, data: Sequence[Buffer], weight: Buffer, tiles: tuple[Any, ...]
) -> Buffer:
    """Write the sums over all pairs of planes, chained by Horner's rule."""
    planes, count = spec.weight_bits, len(data)
    many = planes * count > CHAINED_PAIRS
    if many and planes * count * spec.kernel[1] > CHAINED_TAPS:
        return _counts(spec, data, weight, tiles)
    pairs = sorted(((i + j, j) for i in range(planes) for j in range(count)), reverse=True)
    sums, above = None, 0
    for number, (significance, j) in enumerate(pairs):
        plane = significance - j
        negative = spec.method == "and" and plane == planes - 1
        product = partial(_counted, spec, -1 if negative else 1)
        begin = None if sums is None else partial(_times, sums, 1 + (significance < above))
        sums = _sum(spec, f"sum_{number}", tiles, data[j], weight, plane, product, begin)
        above = significance
    return sums


def _times(sums: Buffer, factor: int, *i: Expr) -> Expr:
    return sums[i] + sums[i] if factor == 2 else sums[i]


def _counts(
    spec: FewBitConv2d, data: Sequence[Buffer], weight: Buffer, tiles: tuple[Any, ...]
) -> Buffer:
    """Write a separate count for each pair of planes, and the weighted sum of the counts."""
    planes, sums = spec.weight_bits, None
    for number, plane in enumerate(data):
        product = partial(_counted, spec, 1)
        counts = _sum(spec, f"count_{number}", tiles, plane, weight, None, product)
        before, sums = sums, buffer(f"sum_{number}", (*tiles[:3], tiles[3] * LANES), "int32")
        with T.grid(*map(extent, (*tiles, planes))) as loops, T.sblock(f"sum_{number}"):
            *vector, i = T.axis.remap("SSSSR", list(loops))
            with T.init(), _each(vector) as at:
                T.buffer_store(sums, T.int32(0) if before is None else before[at], at)
            worth = T.shift_left(T.int32(1), T.Cast("int32", i + number))
            if spec.method == "and":
                worth = T.Select(i == planes - 1, -worth, worth)
            with _each(vector) as at:
                counted = counts[tuple([i, *at])]
                T.buffer_store(sums, sums[at] + counted * worth, at)
    return sums


def _counted(
    spec: FewBitConv2d, sign: int, total: Expr, datum: Callable[[int], Expr], word: Expr
) -> Expr:
    met = datum(0) ^ word if spec.method == "xor" else T.bitwise_and(datum(0), word)
    counted = T.Cast("int32", T.popcount(met))
    return total + counted if sign > 0 else total - counted


def _sum(
    spec: FewBitConv2d, name: str, tiles: tuple[Any, ...], data: Buffer, weight: Buffer,
    plane: int | None, product: Product, begin: Callable[..., Expr] | None = None,
    dtype: str = "int32", parts: int = 0,
) -> Buffer:  # fmt: skip
    """Write sums over the taps inside the image, of one plane of weights or of each plane.

    If weights are packed, each product contributes to `parts` sums, and `product` takes the number
    of the part as its last argument.
    """
    words, planes = few_bit_data.group_words(spec), few_bit_data.weight_planes(spec)
    each = (planes,) if plane is None else (1,) * (parts > 0)
    shape = (*tiles[:3], tiles[3] * LANES)
    shape = (*shape[:3], parts, shape[3]) if parts else (*each, *shape)
    sums = buffer(name, shape, dtype)
    extents = (*each, *tiles, *spec.kernel, words)
    with T.grid(*map(extent, extents)) as loops, T.sblock(name):
        *vector, kh, kw, c = T.axis.remap("S" * (len(each) + 4) + "RRR", list(loops))
        *_, n, h, w, o = vector
        # Schedules expect an axis for the parts, although its extent is 1.
        numbers = [[vector[0] * parts + part] for part in range(parts)] if parts else [[]]
        vector = vector[1:] if parts else vector
        with T.init():
            for number in numbers:
                with _each(vector, *number) as at:
                    T.buffer_store(sums, begin(*at) if begin else tirx.const(0, dtype), at)
        there = place(spec, h, w, kh, kw)
        row = (o * planes + (vector[0] if plane is None else plane)) * spec.kernel[0] + kh
        first = ((row * spec.kernel[1] + kw) * words + c) * LANES
        group = o * LANES // (spec.out_channels // spec.groups) * words if spec.groups > 1 else 0
        channel = (group + c) * (1 if spec.form == "planes" else few_bit_data.per_word(spec))
        channel = o * LANES if spec.depthwise else channel
        loop = T.serial(int64(LANES))
        with under(*tests_inside(spec, n, h, w, o, kh, kw)), loop as i, T.sblock(f"product_{name}"):
            lane = T.axis.spatial(int64(LANES), i)

            def datum(number: Expr) -> Expr:
                one = channel + (lane if spec.depthwise else number)
                return data[tuple(pixel(spec, n, *there, one))]

            word = weight[packed_vector(spec, o, c), lane] if parts else weight[first + lane]
            for part, number in enumerate(numbers):
                at = (*vector[:-1], *number, o * LANES + lane)
                made = product(sums[at], datum, word, *[part] * len(number))
                T.buffer_store(sums, made, list(at))
    return sums


@contextmanager
def _each(vector: Sequence[Expr], *part: Expr) -> Iterator[tuple[Expr, ...]]:
    """Iterate over the lanes of a vector, or of one part of it."""
    *outer, o = vector
    with T.vectorized(int64(LANES)) as lane:
        yield (*outer, *part, o * LANES + lane)
