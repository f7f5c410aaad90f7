"""Pooling of floats, of bits and of levels."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    accumulate,
    bit_of,
    buffer,
    compute,
    int64,
    pack,
)
from bnncc.topi_binary.definitions.epilogue import Pixels, epilogue
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.definitions.taps import clamped, inside, leaves, pixel, place, tap_bounds
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import BitwiseMaxPool, Pool2d


def pool2d(operator: Operator, spec: Pool2d) -> None:
    """Write the largest value or the mean of each window, and the epilogue."""
    extents = (operator.n, *spec.output_hw, spec.channels)
    params = operator.inputs[1:]
    write_pool(operator, spec, operator.inputs[0], extents, params)


def write_pool(
    operator: Operator, spec: Pool2d, data: Buffer, extents: tuple[Any, ...], params: list[Buffer]
) -> None:
    """Write a pooling of `data`, which has the data layout of `spec`."""
    largest = spec.kind == "max"
    start = T.min_value("float32") if largest else T.float32(0)

    def step(total: Expr, *i: Expr) -> Expr:
        n, h, w, c, kh, kw = i
        there = place(spec, h, w, kh, kw)
        datum = data[tuple(pixel(spec, n, *clamped(spec, *there), c))]
        datum = T.if_then_else(inside(spec, *there), datum, start)
        return T.max(total, datum) if largest else total + datum

    pooled = buffer("pooled", extents, "float32")
    accumulate("pooled", pooled, extents, spec.kernel, start, step)

    def value(at: Place, lane: Expr) -> Expr:
        found = at.of(pooled, lane)
        return found if largest else found / T.Cast("float32", _count(spec, at.h, at.w))

    epilogue(operator, spec.steps, params, Pixels(extents, spec.output_rank), value)


def _count(spec: Pool2d, h: Expr, w: Expr) -> Expr:
    """Return how many taps of a window are averaged."""
    count: Expr = int64(1)
    for axis, position in ((0, h), (1, w)):
        size = (spec.height, spec.width)[axis]
        first, last = -spec.pads[axis], size + spec.pads[axis + 2]
        if spec.kind == "avg":
            first, last = 0, size
        taps: Expr = int64(0)
        for tap in range(spec.kernel[axis]):
            at = position * spec.strides[axis] + (tap * spec.dilations[axis] - spec.pads[axis])
            here = T.And(at >= first, at < last)
            # What ceil_mode adds never counts.
            taps = taps + T.Cast("int64", here)
        count = count * taps
    return count


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
        with ExitStack() as stack:
            for test in [*_inside(spec, 0, h, kh), *_inside(spec, 1, w, kw)]:
                stack.enter_context(T.If(test))
                stack.enter_context(T.Then())
            row, column = place(spec, h, w, kh, kw)
            old = [plane[n, h, w, c] for plane in held]
            new = [plane[n, row, column, c] for plane in planes]
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


def _inside(spec: BitwiseMaxPool, axis: int, position: Expr, tap: Expr) -> list[Expr]:
    """Return the tests that a tap is in the image, as bounds of the tap."""
    before, after = leaves(spec, axis, 0, spec.output_hw[axis] - 1)
    low, high = tap_bounds(spec, axis, position)
    return [tap >= low] * before + [tap < high] * after


def _joined(spec: BitwiseMaxPool, old: list[Expr], new: list[Expr]) -> list[Expr]:
    """Return the words of the higher of two levels, given by their bits from the lowest on."""
    if spec.planes == 1:
        return [old[0] & new[0] if spec.minimum else old[0] | new[0]]
    larger: Expr = T.uint32(0)
    for held, word in zip(old, new, strict=True):  # the highest bit that differs decides
        differ = T.Bind(held ^ word)
        larger = T.Bind((differ & word) | (larger & ~differ))
    return [held ^ ((held ^ word) & larger) for held, word in zip(old, new, strict=True)]
