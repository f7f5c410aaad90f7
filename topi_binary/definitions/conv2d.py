"""Float convolution: direct, with rounded operands, or by minimal filtering (Winograd)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.topi_binary import filtering, layout, quantization
from bnncc.topi_binary.algebra import changed
from bnncc.topi_binary.definitions import byte_products
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    accumulate,
    buffer,
    compute,
    extent,
    int64,
    under,
)
from bnncc.topi_binary.definitions.epilogue import Pixels, epilogue
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.definitions.pooling import write_pool
from bnncc.topi_binary.definitions.taps import (
    as_float32,
    as_number,
    clamped,
    flattened,
    inside,
    pixel,
    place,
    tests_inside,
)
from bnncc.topi_binary.definitions.terms import SCALAR, bfloat16, half_of, to_bfloat16
from bnncc.topi_binary.definitions.weights import coded, lane_major
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Conv2d
from bnncc.topi_binary.step import Step, step_inputs

CODED = "weight"
"""Name of the block that looks up weights that are codes."""


def conv2d(operator: Operator, spec: Conv2d, form: str = "") -> None:
    """Write the convolution, its pooling if there is one, and the epilogue.

    In the form `byte_products.FORM`, sums are matrix products of bfloat16 elements.
    """
    apart = spec.apart and spec.method == "direct"
    direct = spec.method == "direct" and (spec.operands == "float32" or apart)
    columns = byte_products.columns_of(form)
    if direct and (flat := flattened(spec, columns)) is not spec:
        operator.reshape(spec := flat)
    data, weight, *params = operator.inputs
    numbers = params.pop(0) if spec.code_bits else None
    extents = (operator.n, *spec.window_hw, spec.out_channels)
    before = []
    for step in spec.pool.before if spec.pool is not None else ():
        before.append((step, [params.pop(0) for _ in range(step_inputs(step))]))
    if form:
        met = byte_products.of_floats(spec, data, weight)
        read: Callable[..., Expr] = _whole
        if spec.pool is not None:
            read = partial(_pooled, before)
        starts = [partial(read, one) for one in byte_products.summed(met, operator.n, form)]
        pixels = Pixels((operator.n, *spec.output_hw, spec.out_channels), spec.rank)
        epilogue(operator, spec.steps, params, pixels, starts, padded=True)
        return
    if apart:
        value = _of_words(spec, data, weight, extents)
    elif direct:
        value = _direct(spec, data, weight, numbers, extents)
    elif spec.method == "direct":
        value = _quantized(operator, spec, data, weight, extents)
    else:
        value = _filtered(operator, spec, data, weight, extents)
    pixels = Pixels(extents, spec.rank)
    if spec.pool is None:
        padded = direct and spec.shared
        epilogue(
            operator, spec.steps, params, pixels, lambda at, lane: at.of(value, lane),
            padded=padded,
        )  # fmt: skip
        return
    for number, (step, taken) in enumerate(before):
        source, value = value, buffer(f"before_{number}", extents, "float32")

        def after(*i: Expr, step: Any = step, source: Buffer = source, taken: Any = taken) -> Expr:
            return changed(SCALAR, step, source[i], [param[i[3]] for param in taken])

        compute(f"before_{number}", value, extents, after)
    pool = spec.pooling
    write_pool(operator, pool, value, (operator.n, *spec.output_hw, spec.out_channels), params)


def _direct(
    spec: Conv2d, data: Buffer, weight: Buffer, numbers: Buffer | None, extents: tuple[Any, ...]
) -> Buffer:
    depth, per_out = spec.channels_per_group, spec.out_channels // spec.groups
    run = spec.window_size * depth
    # Lanes beyond the last channel have weights too; their sums are not used.
    extents = (*extents[:3], layout.blocks(spec.out_channels) * LANES) if spec.shared else extents

    def datum(*i: Expr) -> Expr:
        n, h, w, o, kh, kw, c = i
        there = place(spec, h, w, kh, kw)
        if spec.collected:  # a block without conditions: read the nearest pixel of the image
            there = clamped(spec, *there)
        channel = c if spec.groups == 1 else o // per_out * depth + c
        return as_float32(spec, data[tuple(pixel(spec, n, *there, channel))])

    held: Any = None
    if numbers is not None:
        every = (run, extents[3])
        held = buffer(CODED, every, "float32")
        compute(CODED, held, every, partial(coded, spec, weight, numbers))
    operand: Any = None
    if spec.collected:
        every = (*extents, *spec.kernel, depth)
        operand = compute("operand", buffer("operand", every, "float32"), every, datum)

    def step(total: Expr, *i: Expr) -> Expr:
        *_, o, kh, kw, c = i
        number = (kh * spec.kernel[1] + kw) * depth + c
        one = datum(*i) if operand is None else operand[i]
        if held is not None:
            return total + one * held[number, o]
        return total + one * weight[lane_major(spec.out_channels, run, o, number)]

    value, tests = buffer("sum", extents, "float32"), partial(tests_inside, spec)
    return accumulate("sum", value, extents, (*spec.kernel, depth), T.float32(0), step, tests=tests)


def _quantized(
    operator: Operator, spec: Conv2d, data: Buffer, weight: Buffer, extents: tuple[Any, ...]
) -> Buffer:
    """Write sums of products of operands that are rounded as `quantization` defines."""
    image = (operator.n, spec.height, spec.width, spec.channels)
    unit = _unit(operator, spec, data) if _scaled(spec) else None

    def rounded(n: Expr, h: Expr, w: Expr, c: Expr) -> Expr:
        datum = data[tuple(pixel(spec, n, h, w, c))]
        if spec.zero_points:
            return as_number(spec, datum, c)
        if unit is not None:
            return T.nearbyint(datum * (T.float32(quantization.LEVELS) / unit[n]))
        if spec.operands == "float16":
            half = datum if spec.dtype == "float16" else T.Cast("float16", datum)
            return T.Cast("float32", half)
        return bfloat16(to_bfloat16(datum))

    operand = buffer("operand", image, "float32")
    compute("operand", operand, image, rounded)

    def step(total: Expr, *i: Expr) -> Expr:
        n, h, w, o, kh, kw, c = i
        there = place(spec, h, w, kh, kw)
        number = (kh * spec.kernel[1] + kw) * spec.channels + c
        row, column = clamped(spec, *there)
        product = operand[n, row, column, c] * _operand_of_weight(spec, weight, o, number)
        return total + T.if_then_else(inside(spec, *there), product, T.float32(0))

    value = buffer("sum", extents, "float32")
    accumulate("sum", value, extents, (*spec.kernel, spec.channels), T.float32(0), step)
    if unit is None:
        return value
    scaled = buffer("scaled", extents, "float32")
    worth = T.float32(quantization.LEVELS)
    return compute("scaled", scaled, extents, lambda *i: value[i] * (unit[i[0]] / worth))


def _whole(sums: byte_products.Sums, at: Place, lane: Expr) -> Expr:
    return sums.dot(at.n, at.h, at.w, at.block, lane)


def _pooled(
    before: Sequence[tuple[Step, Sequence[Buffer]]], sums: byte_products.Sums, at: Place, lane: Expr
) -> Expr:
    """Return the maximum of a window, after the steps before the pooling with what they read."""

    def value(total: Expr) -> Expr:
        for step, taken in before:
            total = changed(SCALAR, step, total, [param[at.channel(lane)] for param in taken])
        return total

    return sums.largest(value, at.n, at.h, at.w, at.block, lane)


def _of_words(spec: Conv2d, data: Buffer, weight: Buffer, extents: tuple[Any, ...]) -> Buffer:
    """Write sums of products of words; a word holds adjacent channels of a pixel.

    As in `few_bit_conv2d`, the lanes of a vector of output channels are a separate block.
    """
    words, packed = quantization.words_of_pixel(spec), spec.packed == 2
    depth, taps = words * spec.packed, spec.window_size

    def rounded(n: Expr, y: Expr, x: Expr, c: Expr) -> Expr:
        there = c if depth == spec.channels else T.min(c, int64(spec.channels - 1))
        datum = as_number(spec, data[tuple(pixel(spec, n, y, x, there))], c)
        half = to_bfloat16(datum, flush=packed)
        if depth > spec.channels:
            half = T.if_then_else(c < spec.channels, half, T.uint32(0))
        return T.Cast("uint16", half) if packed else bfloat16(half)

    image = (extents[0], spec.height, spec.width, depth)
    operand = buffer("operand", image, "uint16" if packed else "float32")
    compute("operand", operand, image, rounded)
    tiles = (*extents[:3], layout.blocks(spec.out_channels))
    sums = buffer("sum", (*tiles[:3], tiles[3] * LANES), "float32")
    with T.grid(*map(extent, (*tiles, *spec.kernel, words))) as loops, T.sblock("sum"):
        n, h, w, o, kh, kw, c = T.axis.remap("SSSSRRR", list(loops))
        with T.init(), T.vectorized(int64(LANES)) as lane:
            T.buffer_store(sums, T.float32(0), [n, h, w, o * LANES + lane])
        row, column = place(spec, h, w, kh, kw)
        first = ((o * taps + (kh * spec.kernel[1] + kw)) * words + c) * LANES
        loop = T.serial(int64(LANES))
        with under(*tests_inside(spec, n, h, w, o, kh, kw)), loop as i, T.sblock("product"):
            lane = T.axis.spatial(int64(LANES), i)
            at, word = (n, h, w, o * LANES + lane), weight[first + lane]
            total: Expr = sums[at]
            for number in reversed(range(spec.packed)):
                datum = operand[n, row, column, c * spec.packed + number]
                if packed:
                    datum, other = bfloat16(T.Cast("uint32", datum)), half_of(word, number)
                else:
                    other = word
                total = total + datum * other
            T.buffer_store(sums, total, list(at))
    return sums


def _scaled(spec: Conv2d) -> bool:
    """Return whether each image is quantized with a scale of its own."""
    return spec.operands == "int8" and not spec.zero_points


def _unit(operator: Operator, spec: Conv2d, data: Buffer) -> Buffer:
    """Write the largest magnitude in each image."""

    def step(top: Expr, n: Expr, *i: Expr) -> Expr:
        return T.max(top, T.fabs(data[tuple(pixel(spec, n, *i))]))

    unit = buffer("largest", (operator.n,), "float32")
    reduced = (spec.height, spec.width, spec.channels)
    least = T.float32(quantization.SMALLEST)
    return accumulate("largest", unit, (operator.n,), reduced, least, step)


def _operand_of_weight(spec: Conv2d, weight: Buffer, o: Expr, number: Expr) -> Expr:
    """Return one weight from its packed form, see `quantization.pack_weight`."""
    rows = quantization.rows_of_weight(spec)
    row = number // spec.packed + (rows - quantization.words(spec))
    word = weight[(o // LANES * rows + row) * LANES + o % LANES]
    if spec.packed == 1:
        return word
    bits = 32 // spec.packed
    first = T.Cast("uint32", number % spec.packed * bits)
    low = T.shift_left(T.shift_right(word, first), T.uint32(32 - bits))
    if spec.operands == "float16":
        half = T.Cast("uint16", T.shift_right(word, first))
        return T.Cast("float32", T.reinterpret("float16", half))
    if spec.packed == quantization.PACKED["bfloat16"]:
        return T.reinterpret("float32", low)
    return T.Cast("float32", T.shift_right(T.Cast("int32", low), T.int32(32 - bits)))


def _filtered(
    operator: Operator, spec: Conv2d, data: Buffer, weight: Buffer, extents: tuple[Any, ...]
) -> Buffer:
    """Write Cook-Toom convolution: transformed data times stored weights, transformed back."""
    rows, columns = filtering.axes(spec)
    high, wide = rows.outputs if rows else 1, columns.outputs
    tiles = (operator.n, -(-extents[1] // high), -(-extents[2] // wide))
    forward = _forward(operator, spec, data, tiles)
    block, first = filtering.block_terms(spec), 0
    products = []
    for point, terms in filtering.places(spec):
        made = buffer(f"point_{point[0]}_{point[1]}", (*tiles, spec.out_channels), "float32")
        seen = [forward[part, point[0], other, point[1]] for part, other in terms]

        def step(total: Expr, *i: Expr) -> Expr:
            n, y, x, o, c = i
            for number, datum in enumerate(seen):  # noqa: B023
                where = o // LANES * block + (first + number * spec.channels) + c  # noqa: B023
                total = total + datum[n, y, x, c] * weight[where * LANES + o % LANES]
            return total

        shape = (*tiles, spec.out_channels)
        accumulate("products", made, shape, (spec.channels,), T.float32(0), step)
        products.append((point, made))
        first += len(terms) * spec.channels

    def back(n: Expr, h: Expr, w: Expr, o: Expr) -> Expr:
        total: Expr = T.float32(0)
        for (p, q), made in products:
            down = _entry(rows.transform.inverse, h % high, p) if rows else T.float32(1)
            along = _entry(columns.transform.inverse, w % wide, q)
            total = total + made[n, h // high, w // wide, o] * (down * along)
        return total

    return compute("sum", buffer("sum", extents, "float32"), extents, back)


def _forward(
    operator: Operator, spec: Conv2d, data: Buffer, tiles: tuple[Any, ...]
) -> dict[tuple[int, int, int, int], Buffer]:
    """Write the transformed data, by row part, row point, column part and column point."""
    rows, columns = filtering.axes(spec)
    top, left = spec.pads[:2]
    step = rows.step if rows else spec.strides[0]
    # All rows that any tile reads, including padding.
    lines = (tiles[1] - 1) * step + (rows.points * rows.stride if rows else 0)
    lines += spec.kernel[0] + spec.strides[0]
    along = {}
    for part, taps in enumerate(columns.parts):
        for point, factors in enumerate(columns.transform.forward):

            def line(n: Expr, y: Expr, x: Expr, c: Expr) -> Expr:
                total: Expr = T.float32(0)
                for k, factor in enumerate(factors):  # noqa: B023
                    there = y - top, x * columns.step + (taps[0] + k * columns.stride - left)  # noqa: B023
                    datum = data[tuple(pixel(spec, n, *clamped(spec, *there), c))]
                    if spec.operands != "float32":
                        datum = bfloat16(to_bfloat16(datum))
                    datum = T.if_then_else(inside(spec, *there), datum, T.float32(0))
                    total = total + datum * T.float32(float(factor))
                return total

            shape = (operator.n, lines, tiles[2], spec.channels)
            name = f"columns_{part}_{point}"
            along[part, point] = compute(name, buffer(name, shape, "float32"), shape, line)
    made = {}
    for (other, q), plane in along.items():
        parts = [part[0] for part in rows.parts] if rows else list(range(spec.kernel[0]))
        matrix: Any = rows.transform.forward if rows else ((1,),)
        for part, tap in enumerate(parts):
            for p, factors in enumerate(matrix):

                def cell(n: Expr, y: Expr, x: Expr, c: Expr) -> Expr:
                    total: Expr = T.float32(0)
                    for k, factor in enumerate(factors):  # noqa: B023
                        row = y * step + (tap + k * spec.strides[0])  # noqa: B023
                        total = total + plane[n, row, x, c] * T.float32(float(factor))  # noqa: B023
                    return total

                shape = (*tiles, spec.channels)
                name = f"rows_{part}_{p}_{other}_{q}"
                made[part, p, other, q] = compute(name, buffer(name, shape, "float32"), shape, cell)
    return made


def _entry(matrix: filtering.Matrix, row: Expr, column: int) -> Expr:
    """Return an entry of a constant matrix; the row is a run-time index."""
    value: Expr = T.float32(float(matrix[-1][column]))
    for number, line in enumerate(matrix[:-1]):
        value = T.if_then_else(row == number, T.float32(float(line[column])), value)
    return value
