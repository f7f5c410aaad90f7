"""Pooling of floats, of bits and of levels."""

from __future__ import annotations

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
from bnncc.topi_binary.definitions.taps import as_float32, clamped, inside, pixel, place
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
        datum = T.if_then_else(inside(spec, *there), as_float32(spec, datum), start)
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
    """Write the OR (or AND) of each window's bits, or its highest level."""
    extents = (operator.n, *spec.output_hw, spec.channels)
    planes = operator.inputs[: spec.planes]
    start = T.int32(1 if spec.minimum else -1)

    def step(found: Expr, *i: Expr) -> Expr:
        n, h, w, c, kh, kw = i
        there = place(spec, h, w, kh, kw)
        at = (n, *clamped(spec, *there))
        level: Expr = T.int32(0)
        for number, plane in enumerate(planes):
            level = level + T.Cast("int32", bit_of(plane, at, c)) * 2**number
        level = T.if_then_else(inside(spec, *there), level, start)
        return T.min(found, level) if spec.minimum else T.max(found, level)

    levels = buffer("levels", extents, "int32")
    accumulate("levels", levels, extents, spec.kernel, start, step)

    def bit(number: int) -> Any:
        def condition(*i: Expr) -> Expr:
            # A window wholly outside gives 0 bits.
            level = T.max(levels[i], T.int32(0))
            if spec.minimum:
                level = T.if_then_else(_empty(spec, i[1], i[2]), T.int32(0), level)
            return T.bitwise_and(T.shift_right(level, T.int32(number)), T.int32(1)) == T.int32(1)

        return condition

    for number, out in enumerate(operator.outputs):
        plane = buffer("plane", out.shape, "uint32") if spec.flip else out
        pack(f"bits_{number}", plane, extents[:3], spec.channels, bit(number))
        if spec.flip:
            mask = operator.inputs[-1]
            shape = (*extents[:3], layout.words(spec.channels))
            compute("flip", out, shape, lambda *i: T.bitwise_xor(plane[i], mask[i[3]]))  # noqa: B023


def _empty(spec: BitwiseMaxPool, h: Expr, w: Expr) -> Expr:
    """Return whether a window has no tap inside the image."""
    none: Expr = T.bool(False)
    for axis, position in ((0, h), (1, w)):
        size = (spec.height, spec.width)[axis]
        some: Expr = T.bool(False)
        for tap in range(spec.kernel[axis]):
            at = position * spec.strides[axis] + (tap * spec.dilations[axis] - spec.pads[axis])
            some = T.Or(some, T.And(at >= 0, at < size))
        none = T.Or(none, T.Not(some))
    return none
