"""Binary convolution, dense layers and products of activations: XOR or AND, and a count of bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import borders, layout, sliced_data
from bnncc.topi_binary.definitions import carry_save
from bnncc.topi_binary.definitions.binary_operands import Operands, ones, operands, vectors
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    accumulate,
    accumulate_lanes,
    bit_of,
    buffer,
    compute_lanes,
    int64,
)
from bnncc.topi_binary.definitions.epilogue import Below, Pixels, epilogue
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.definitions.taps import (
    border_class,
    class_start,
    flattened,
    leaves_image,
    taps_outside,
    tests_inside,
)
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.topi_binary.step import Step


def binary_conv2d(operator: Operator, spec: BinaryConv2d, form: str = "") -> None:
    """Write ``acc = start + sum of what words count``, see `BinaryConv2d`, and the epilogue.

    Sums start at what taps outside the image count, and go over those inside; in the form
    `carry_save.FORM`, over three of them at a time.
    """
    if (flat := flattened(spec)) is not spec:
        operator.reshape(spec := flat)
    limited = sliced_data.limited(spec)
    counted = replace(spec, mode="xor", pad_value=spec.pad_value or -1) if limited else spec
    met, params = operands(operator, counted)
    start = _outside(met, params.pop(0) if spec.per_image and spec.mode == "and" else None)
    if form == carry_save.FORM:
        acc = _whole(met, operator.n, None, carry_save.summed(met, operator.n, start))
    else:
        sums = _summed("sum", met, operator.n, start, Operands.count)
        acc = _whole(
            met, operator.n, sums, lambda n, h, w, o, lane: sums[n, h, w, o * LANES + lane]
        )
    extents = (operator.n, *spec.output_hw, spec.out_channels)
    epilogue(
        operator, spec.steps, params, Pixels(extents, spec.rank), acc=acc,
        below=_below(spec) if limited else None, padded=True,
    )  # fmt: skip


def _summed(
    name: str, met: Operands, n: Expr, start: Callable[..., Expr], term: Callable[..., Expr]
) -> Buffer:
    """Write sums over the taps inside the image, of vectors of channels."""
    image = (n, *met.spec.output_hw)
    sums = buffer(name, (*image, layout.blocks(met.spec.out_channels) * LANES), "int32")
    taps, inside = (*met.spec.kernel, met.words), partial(tests_inside, met.spec)
    for end, first, count, part in vectors(met):
        accumulate_lanes(
            f"{name}{end}", sums, (*image, count), taps, start, partial(term, part), inside, first
        )
    return sums


def _outside(met: Operands, given: Buffer | None) -> Callable[..., Expr]:
    """Return where sums start: at what the taps of a pixel count that are outside the image.

    In mode ``and``, ``popcount(d) - 2 * popcount(d & w)`` is ``popcount(d ^ w) - popcount(w)``: the
    bits of all weights are taken from the start, and a pixel outside is words of zeros. Zeros count
    half of their channels; if those are odd, they are added in the end, see `_whole`.
    """
    spec, depth = met.spec, met.depth
    if given is not None:
        return lambda n, h, w, o, lane: given[n, o * LANES + lane]
    if spec.mode == "xor" and (spec.pad_value == 0 or not leaves_image(spec)):
        half = 0 if depth % 2 else depth // 2
        return lambda n, h, w, *_: taps_outside(spec, h, w) * half
    lanes, zero = (layout.blocks(spec.out_channels), LANES), int64(0)
    bits_of = buffer("ones", (*spec.kernel, *lanes), "int32")
    for end, first, count, part in vectors(met):
        accumulate(
            f"ones{end}", bits_of, (*spec.kernel, count, LANES), (met.words,), T.int32(0),
            lambda total, kh, kw, o, lane, c, part=part, first=first: total
            + ones(part.weigh(part.weight, zero, zero, zero, o + first, kh, kw, c, lane)),
            lambda kh, kw, o, lane, first=first: (kh, kw, o + first, lane),
        )  # fmt: skip
    firsts = [borders.classes(spec, axis) for axis in (0, 1)]
    classes = (*map(len, firsts), *lanes)
    starts = buffer("starts", classes, "int32")

    def tap(total: Expr, row: Expr, column: Expr, o: Expr, lane: Expr, *at: Expr) -> Expr:
        bits = bits_of[tuple([*at, o, lane])]
        differ = depth - bits if spec.pad_value > 0 else bits
        first = class_start(firsts[0], row), class_start(firsts[1], column)
        inside = reduce(T.And, tests_inside(spec, zero, *first, o, *at), tirx.const(True))
        counted = T.Select(inside, T.int32(0), differ)
        return total + (counted - bits if spec.mode == "and" else counted)

    accumulate("starts", starts, classes, spec.kernel, T.int32(0), tap)
    return lambda n, h, w, o, lane: starts[
        border_class(firsts[0], h), border_class(firsts[1], w), o, lane
    ]


def _whole(met: Operands, n: Expr, sums: Buffer | None, summed: Callable[..., Expr]) -> Buffer:
    """Write the accumulator, where it is more than `sums`: in halves, or with zeros."""
    spec = met.spec
    seen = met.zero is not None or met.weight_zero is not None
    if sums is not None and not (seen or spec.doubled):
        return sums
    odd = met.depth * (met.depth % 2) * (spec.mode == "xor" and spec.pad_value == 0)
    zeros = _summed("zeros", met, n, lambda *_: T.int32(0), Operands.zeros) if seen else None

    def whole(n: Expr, h: Expr, w: Expr, o: Expr, lane: Expr) -> Expr:
        total = summed(n, h, w, o, lane) * (1 + spec.doubled)
        total = total + taps_outside(spec, h, w) * odd if odd else total
        return total if zeros is None else total + zeros[n, h, w, o * LANES + lane]

    extents = (n, *spec.output_hw, layout.blocks(spec.out_channels))
    acc = buffer("acc", (*extents[:3], extents[3] * LANES), "int32")
    return compute_lanes("acc", acc, extents, whole)


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
