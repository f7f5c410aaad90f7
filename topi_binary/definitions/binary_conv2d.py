"""Binary convolution, dense layers and products of activations: XOR or AND, and a count of bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import borders, layout, sliced_data
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    accumulate,
    accumulate_lanes,
    bit_of,
    buffer,
    compute,
    int64,
)
from bnncc.topi_binary.definitions.epilogue import Below, Pixels, epilogue
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.definitions.taps import (
    border_class,
    class_start,
    flattened,
    leaves_image,
    pixel,
    place,
    taps_outside,
    tests_inside,
)
from bnncc.topi_binary.definitions.weights import binary_word
from bnncc.topi_binary.layout import LANES, WORD_BITS
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.topi_binary.step import Step


def binary_conv2d(operator: Operator, spec: BinaryConv2d) -> None:
    """Write ``acc = start + sum of what words count``, see `BinaryConv2d`, and the epilogue.

    Sums start at what taps outside the image count, and go over those inside.
    """
    if (flat := flattened(spec)) is not spec:
        operator.reshape(spec := flat)
    limited = sliced_data.limited(spec)
    counted = replace(spec, mode="xor", pad_value=spec.pad_value or -1) if limited else spec
    met, params = _operands(operator, counted)
    start = _outside(met, params.pop(0) if spec.per_image and spec.mode == "and" else None)
    acc = _whole(met, operator.n, _summed("sum", met, operator.n, start, _Operands.count))
    extents = (operator.n, *spec.output_hw, spec.out_channels)
    epilogue(
        operator, spec.steps, params, Pixels(extents, spec.rank), acc=acc,
        below=_below(spec) if limited else None, padded=True,
    )  # fmt: skip


@dataclass(frozen=True)
class _Operands:
    """Words of data that meet words of weights, and what is zero in them.

    `width` is how many lanes exist.
    """

    spec: BinaryConv2d
    data: Buffer
    zero: Buffer | None
    weight: Buffer
    weight_zero: Buffer | None
    width: int = LANES

    @property
    def sliced(self) -> bool:
        """Whether a word is one bit."""
        return self.spec.weight_order == sliced_data.ORDER

    @property
    def depth(self) -> int:
        """Channels of a group."""
        return self.spec.channels // self.spec.groups

    @property
    def words(self) -> int:
        """Words of a group."""
        return self.depth if self.sliced else layout.words(self.depth)

    def channel(self, o: Expr, lane: Expr) -> Expr:
        """Return the output channel in a lane; the last one, where there is none."""
        channel, last = o * LANES + lane, int64(self.spec.out_channels - 1)
        return T.min(channel, last) if self.spec.out_channels % LANES else channel

    def word(self, plane: Buffer, *i: Expr) -> Expr:
        """Return the word of data under a tap, of the group that a channel reads."""
        n, h, w, o, kh, kw, c, lane = i
        spec, group = self.spec, int64(0)
        if spec.groups > 1:
            per_out = spec.out_channels // spec.groups
            group = (self.channel(o, lane) if per_out % LANES else o * LANES) // per_out
        where = pixel(spec, n, *place(spec, h, w, kh, kw), group * self.words + c)
        if self.sliced:
            return T.Cast("uint32", bit_of(plane, where[:-1], where[-1]))
        return plane[tuple(where)]

    def weigh(self, plane: Buffer, *i: Expr) -> Expr:
        """Return the word of weights that meets it."""
        spec, (n, _, _, o, kh, kw, c, lane) = self.spec, i
        number = (kh * spec.kernel[1] + kw) * self.words + c
        if spec.per_image:
            return plane[n, (o * self.words + c) * LANES + lane]
        if spec.weight_order == "words":  # the last vector has just the lanes that exist
            run = spec.kernel[0] * spec.kernel[1] * self.words
            return plane[o * (LANES * run) + number * self.width + lane]
        channel = self.channel(o, lane)
        if not self.sliced:
            return binary_word(spec, plane, channel, kh, kw, c)
        turn = (c - channel % self.depth + self.depth) % self.depth
        row = (number - c + turn) * layout.words(spec.channels)
        return T.Cast("uint32", bit_of(plane, (), row * WORD_BITS + channel))

    def count(self, *i: Expr) -> Expr:
        """Return how many bits differ where nothing is zero."""
        differ = T.bitwise_xor(self.word(self.data, *i), self.weigh(self.weight, *i))
        if self.spec.mode == "xor" and (self.zero is not None or self.weight_zero is not None):
            differ = T.bitwise_and(differ, T.bitwise_not(self._zero(*i)))
        return _ones(differ)

    def zeros(self, *i: Expr) -> Expr:
        """Return how many bits meet a zero; in mode ``and``, those that are 1."""
        zero = self._zero(*i)
        if self.spec.mode == "and":
            zero = T.bitwise_and(self.word(self.data, *i), zero)
        return _ones(zero)

    def _zero(self, *i: Expr) -> Expr:
        planes = [self.word(self.zero, *i)] if self.zero is not None else []
        if self.weight_zero is not None:
            planes.append(self.weigh(self.weight_zero, *i))
        return reduce(T.bitwise_or, planes)


def _operands(operator: Operator, spec: BinaryConv2d) -> tuple[_Operands, list[Buffer]]:
    """Return the operands, and the inputs behind them."""
    data, *params = operator.inputs
    zero = params.pop(0) if spec.ternary else None
    weight = params.pop(0)
    weight_zero = params.pop(0) if spec.weight_zeros else None
    return _Operands(spec, data, zero, weight, weight_zero), params


def _ones(word: Expr) -> Expr:
    return T.Cast("int32", T.popcount(word))


def _vectors(met: _Operands) -> list[tuple[str, int, int, _Operands]]:
    """Return ranges of vectors of channels: how their blocks' names end, the first, how many."""
    full, rest = divmod(met.spec.out_channels, LANES)
    ranges = ("", 0, full, met), ("_last", full, int(rest > 0), replace(met, width=rest))
    return [one for one in ranges if one[2]]


def _summed(
    name: str, met: _Operands, n: Expr, start: Callable[..., Expr], term: Callable[..., Expr]
) -> Buffer:
    """Write sums over the taps inside the image, of vectors of channels."""
    image = (n, *met.spec.output_hw)
    sums = buffer(name, (*image, layout.blocks(met.spec.out_channels) * LANES), "int32")
    taps, inside = (*met.spec.kernel, met.words), partial(tests_inside, met.spec)
    for end, first, count, part in _vectors(met):
        accumulate_lanes(
            f"{name}{end}", sums, (*image, count), taps, start, partial(term, part), inside, first
        )
    return sums


def _outside(met: _Operands, given: Buffer | None) -> Callable[..., Expr]:
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
    ones = buffer("ones", (*spec.kernel, *lanes), "int32")
    for end, first, count, part in _vectors(met):
        accumulate(
            f"ones{end}", ones, (*spec.kernel, count, LANES), (met.words,), T.int32(0),
            lambda total, kh, kw, o, lane, c, part=part, first=first: total
            + _ones(part.weigh(part.weight, zero, zero, zero, o + first, kh, kw, c, lane)),
            lambda kh, kw, o, lane, first=first: (kh, kw, o + first, lane),
        )  # fmt: skip
    firsts = [borders.classes(spec, axis) for axis in (0, 1)]
    classes = (*map(len, firsts), *lanes)
    starts = buffer("starts", classes, "int32")

    def tap(total: Expr, row: Expr, column: Expr, o: Expr, lane: Expr, *at: Expr) -> Expr:
        bits = ones[(*at, o, lane)]
        differ = depth - bits if spec.pad_value > 0 else bits
        first = class_start(firsts[0], row), class_start(firsts[1], column)
        inside = reduce(T.And, tests_inside(spec, zero, *first, o, *at), tirx.const(True))
        counted = T.Select(inside, T.int32(0), differ)
        return total + (counted - bits if spec.mode == "and" else counted)

    accumulate("starts", starts, classes, spec.kernel, T.int32(0), tap)
    return lambda n, h, w, o, lane: starts[
        border_class(firsts[0], h), border_class(firsts[1], w), o, lane
    ]


def _whole(met: _Operands, n: Expr, sums: Buffer) -> Buffer:
    """Write the accumulator, where it is more than the sums: in halves, or with zeros."""
    spec = met.spec
    seen = met.zero is not None or met.weight_zero is not None
    if not (seen or spec.doubled):
        return sums
    odd = met.depth * (met.depth % 2) * (spec.mode == "xor" and spec.pad_value == 0)
    zeros = _summed("zeros", met, n, lambda *_: T.int32(0), _Operands.zeros) if seen else None

    def whole(n: Expr, h: Expr, w: Expr, o: Expr) -> Expr:
        total = sums[n, h, w, o] * (1 + spec.doubled)
        total = total + taps_outside(spec, h, w) * odd if odd else total
        return total if zeros is None else total + zeros[n, h, w, o]

    extents = (n, *spec.output_hw, layout.blocks(spec.out_channels) * LANES)
    return compute("acc", buffer("acc", extents, "int32"), extents, whole)


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
