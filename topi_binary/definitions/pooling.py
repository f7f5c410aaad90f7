"""Pooling of floats, bits and levels."""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    accumulate,
    buffer,
    compute,
    int64,
    under,
)
from bnncc.topi_binary.definitions.epilogue import Pixels, epilogue
from bnncc.topi_binary.definitions.taps import (
    as_float32,
    pixel,
    place,
    tap_bounds,
    tests_inside,
)
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import BitwiseMaxPool, Pool2d


def pool2d(operator: Operator, spec: Pool2d) -> None:
    """Write the maximum or mean of each window, followed by the epilogue."""
    extents = (operator.n, *spec.output_hw, spec.channels)
    params = operator.inputs[1:]
    write_pool(operator, spec, operator.inputs[0], extents, params)


def write_pool(
    operator: Operator, spec: Pool2d, data: Buffer, extents: tuple[Any, ...], params: list[Buffer]
) -> None:
    """Write a pooling of `data`, which has the data layout of `spec`."""
    largest = spec.kind == "max"
    start = T.float32(float("-inf") if largest else 0.0)

    def step(total: Expr, *i: Expr) -> Expr:
        n, h, w, c, kh, kw = i
        datum = as_float32(spec, data[tuple(pixel(spec, n, *place(spec, h, w, kh, kw), c))])
        return T.max(total, datum) if largest else total + datum

    value = buffer("pooled", extents, "float32")
    inside = partial(tests_inside, spec)
    accumulate("pooled", value, extents, spec.kernel, start, step, tests=inside)
    if not largest:
        total, value = value, buffer("mean", extents, "float32")
        compute("mean", value, extents, lambda *i: total[i] / _count(spec, i[1], i[2]))
    pixels = Pixels(extents, spec.output_rank)
    epilogue(operator, spec.steps, params, pixels, lambda at, lane: at.of(value, lane))


def _count(spec: Pool2d, h: Expr, w: Expr) -> Expr:
    """Return the number of taps in the mean; taps added by ceil_mode are not counted."""
    count: Expr = int64(1)
    for axis, position in ((0, h), (1, w)):
        low, high = int64(0), int64(spec.kernel[axis])
        if spec.kind == "avg":
            low, high = tap_bounds(spec, axis, position)
        elif spec.ceil_extra != (0, 0):
            step, size = spec.dilations[axis], (spec.height, spec.width)[axis]
            room = size + spec.pads[axis] + spec.pads[axis + 2] - position * spec.strides[axis]
            high = T.min((room + step - 1) // step, high)
        count = count * T.max(high - low, 0)
    return T.Cast("float32", T.Cast("int32", count))  # 32-bit targets cannot convert int64


def bitwise_max_pool(operator: Operator, spec: BitwiseMaxPool) -> None:
    """Write the OR (or AND) of each window's words, or the words of its highest level."""
    extents = (operator.n, *spec.output_hw, layout.words(spec.channels))
    planes = operator.inputs[: spec.planes]
    least = T.uint32(2**layout.WORD_BITS - 1 if spec.minimum else 0)
    held = [buffer(f"held_{number}", extents, "uint32") for number in range(spec.planes)]
    grid = map(int64, (*extents[1:], *spec.kernel))
    with T.grid(operator.n, *grid) as loops, T.sblock("held"):
        n, h, w, c, kh, kw = T.axis.remap("SSSSRR", list(loops))
        with T.init():
            for plane in held:
                T.buffer_store(plane, least, [n, h, w, c])
        with under(*tests_inside(spec, n, h, w, c, kh, kw)):
            row, column = place(spec, h, w, kh, kw)
            old = [T.Bind(plane[n, h, w, c]) for plane in held]
            new = [T.Bind(plane[n, row, column, c]) for plane in planes]
            for plane, word in zip(held, _joined(spec, old, new), strict=True):
                T.buffer_store(plane, word, [n, h, w, c])
    with T.grid(operator.n, *map(int64, extents[1:])) as loops, T.sblock("out"):
        n, h, w, c = T.axis.remap("SSSS", list(loops))
        for plane, out in zip(held, operator.outputs, strict=True):
            word = plane[n, h, w, c]
            if spec.minimum:
                for axis, position in ((0, h), (1, w)):
                    low, high = tap_bounds(spec, axis, position)
                    word = T.Select(low < high, word, T.uint32(0))
            if spec.flip:
                word = T.bitwise_xor(word, operator.inputs[-1][c])
            T.buffer_store(out, word, [n, h, w, c])


def _joined(spec: BitwiseMaxPool, old: list[Expr], new: list[Expr]) -> list[Expr]:
    """Return the words of the elementwise higher level; words are given from the lowest bit up."""
    if spec.planes == 1:
        return [old[0] & new[0] if spec.minimum else old[0] | new[0]]
    larger: Expr = T.uint32(0)
    for held, word in zip(old, new, strict=True):  # the highest differing bit decides
        differ = T.Bind(held ^ word)
        larger = T.Bind((differ & word) | (larger & ~differ))
    return [held ^ ((held ^ word) & larger) for held, word in zip(old, new, strict=True)]
