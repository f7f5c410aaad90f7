"""Moving bits between packed tensors: concatenation, selection, padding, rows as weights."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions.blocks import Expr, accumulate, bit_of, compute, int64, pack
from bnncc.topi_binary.definitions.epilogue import Pixels
from bnncc.topi_binary.definitions.taps import clamped, inside, pixel
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import ConcatBits, PadBits, SliceBits, WeightsOfRows


def concat_bits(operator: Operator, spec: ConcatBits) -> None:
    """Write the channels of one plane behind those of another."""

    def condition(*i: Expr) -> Expr:
        *where, channel = i
        found: Expr = T.bool(False)
        first = 0
        for plane, channels in zip(operator.inputs, spec.channels, strict=True):
            own = T.max(int64(0), T.min(channel - first, int64(channels - 1)))
            one = bit_of(plane, pixel(spec, where[0], where[1], where[2], own)[:-1], own)
            here = T.And(channel >= first, channel < first + channels)
            found = T.Or(found, T.And(here, one))
            first += channels
        return found

    at = Pixels((operator.n, spec.height, spec.width, 0), spec.rank).at()
    extents = (operator.n, spec.height, spec.width)
    pack("concat", operator.outputs[0], extents, sum(spec.channels), condition, at)


def slice_bits(operator: Operator, spec: SliceBits) -> None:
    """Write the channels that the index names, 0 where it is -1."""

    def condition(*i: Expr) -> Expr:
        *where, channel = i
        if len(operator.inputs) > 1:
            source: Expr = T.Cast("int64", operator.inputs[1][channel])
        else:
            source = int64(spec.index[-1])
            for number, chosen in enumerate(spec.index[:-1]):
                source = T.if_then_else(channel == number, int64(chosen), source)
        own = T.max(int64(0), source)
        one = bit_of(operator.inputs[0], pixel(spec, where[0], where[1], where[2], own)[:-1], own)
        return T.And(source >= 0, one)

    at = Pixels((operator.n, spec.height, spec.width, 0), spec.rank).at()
    extents = (operator.n, spec.height, spec.width)
    pack("slice", operator.outputs[0], extents, len(spec.index), condition, at)


def pad_bits(operator: Operator, spec: PadBits) -> None:
    """Write a plane with a border of one bit."""
    top, left, bottom, right = spec.pads

    def condition(n: Expr, h: Expr, w: Expr, channel: Expr) -> Expr:
        there = h - top, w - left
        one = bit_of(operator.inputs[0], (n, *clamped(spec, *there)), channel)
        return T.if_then_else(inside(spec, *there), one, T.bool(bool(spec.bit)))

    extents = (operator.n, spec.height + top + bottom, spec.width + left + right)
    pack("pad", operator.outputs[0], extents, spec.channels, condition)


def weights_of_rows(operator: Operator, spec: WeightsOfRows) -> None:
    """Write rows as lanes, and minus the bits of each."""
    words, rows = layout.words(spec.channels), layout.blocks(spec.rows) * LANES

    def word(n: Expr, row: Expr, c: Expr) -> Expr:
        value = operator.inputs[0][n, T.min(row, int64(spec.rows - 1)), c]
        return T.if_then_else(row < spec.rows, value, T.uint32(0))

    def at(n: Expr, row: Expr, c: Expr) -> tuple[Expr, Expr]:
        return n, (row // LANES * words + c) * LANES + row % LANES

    compute("lanes", operator.outputs[0], (operator.n, rows, words), word, at)
    if spec.count:

        def step(total: Expr, n: Expr, row: Expr, c: Expr) -> Expr:
            return total - T.Cast("int32", T.popcount(word(n, row, c)))

        accumulate("count", operator.outputs[1], (operator.n, rows), (words,), T.int32(0), step)
