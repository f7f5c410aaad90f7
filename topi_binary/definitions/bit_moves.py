"""Moves of bits between packed tensors: concatenation, selection, padding, rows to weights.

Positions known at compile time become shifts and masks of whole words.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout
from bnncc.topi_binary.bits_table import needs_table, terms
from bnncc.topi_binary.definitions.blocks import Expr, accumulate, compute, int64
from bnncc.topi_binary.definitions.epilogue import Pixels
from bnncc.topi_binary.layout import LANES, WORD_BITS
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import ConcatBits, PadBits, SliceBits, WeightsOfRows

Source = tuple[int, int, int, int]
"""Index of the source tensor, word within a pixel, left shift in bits, and mask."""


def concat_bits(operator: Operator, spec: ConcatBits) -> None:
    """Concatenate the channels of packed tensors."""
    parts: list[list[Source]] = [[] for _ in range(layout.words(sum(spec.channels)))]
    first, every = 0, 2**WORD_BITS - 1
    for number, channels in enumerate(spec.channels):
        for word in range(layout.words(channels)):
            target, shift = divmod(first + word * WORD_BITS, WORD_BITS)
            parts[target].append((number, word, shift, every))
            # Tail bits are 0: nothing to carry over if the bits end in this word.
            if shift and shift + min(WORD_BITS, channels - word * WORD_BITS) > WORD_BITS:
                parts[target + 1].append((number, word, shift - WORD_BITS, every))
        first += channels
    _words("concat", operator, spec, parts)


def slice_bits(operator: Operator, spec: SliceBits) -> None:
    """Select channels by index; index -1 gives bit 0."""
    if not needs_table(spec):
        parts = [[(0, *source) for source in some] for some in terms(spec.index)]
        _words("slice", operator, spec, parts)
        return
    data, table = operator.inputs
    at = Pixels((operator.n, spec.height, spec.width, 0), spec.rank).at()

    def step(word: Expr, *i: Expr) -> Expr:
        *where, number, low = i
        channel = T.Cast("int64", table[number * WORD_BITS + low])
        some = T.max(channel, int64(0))
        one = data[tuple(at(*where, some // WORD_BITS))]
        one = T.bitwise_and(T.shift_right(one, T.Cast("uint32", some % WORD_BITS)), T.uint32(1))
        picked = T.Select(channel >= 0, one, T.uint32(0))
        return T.bitwise_or(word, T.shift_left(picked, T.Cast("uint32", low)))

    extents = (operator.n, spec.height, spec.width, layout.words(len(spec.index)))
    accumulate("slice", operator.outputs[0], extents, [WORD_BITS], T.uint32(0), step, at)


def _words(
    name: str, operator: Operator, spec: ConcatBits | SliceBits, parts: Sequence[Sequence[Source]]
) -> None:
    """Write all words of a pixel, each the OR of its shifted and masked parts."""
    extents = (operator.n, int64(spec.height), int64(spec.width))
    at = Pixels((*extents, 0), spec.rank).at()
    with T.grid(*extents) as loops, T.sblock(name):
        where = T.axis.remap("SSS", list(loops))
        for target, sources in enumerate(parts):
            value: Expr = None
            for number, word, shift, some in sources:
                moved = operator.inputs[number][tuple(at(*where, int64(word)))]
                if some != 2**WORD_BITS - 1:
                    moved = T.bitwise_and(moved, tirx.IntImm("uint32", some))
                if shift:
                    turn = T.shift_left if shift > 0 else T.shift_right
                    moved = turn(moved, T.uint32(abs(shift)))
                value = moved if value is None else T.bitwise_or(value, moved)
            value = T.uint32(0) if value is None else value
            T.buffer_store(operator.outputs[0], value, list(at(*where, int64(target))))


def pad_bits(operator: Operator, spec: PadBits) -> None:
    """Pad a packed tensor with a constant bit: rows above and below, columns on both sides."""
    data, out = operator.inputs[0], operator.outputs[0]
    words, rest, (height, width) = layout.words(spec.channels), spec.channels % 32, spec.output_hw
    top, left, _, right = spec.pads

    def fill(n: Expr, h: Expr, first: int, count: int) -> None:
        if not count:
            return
        with T.grid(int64(count), int64(words)) as (w, word):
            bits: Expr = tirx.IntImm("uint32", -spec.bit % 2**WORD_BITS)
            if spec.bit and rest:
                bits = T.Select(word == words - 1, T.uint32(2**rest - 1), bits)
            T.buffer_store(out, bits, [n, h, w + first, word])

    with T.grid(operator.n, int64(height)) as loops, T.sblock("pad"):
        n, h = T.axis.remap("SS", list(loops))
        row = h - top
        with T.If(T.And(row >= 0, row < spec.height)):
            with T.Then():
                fill(n, h, 0, left)
                with T.grid(int64(spec.width), int64(words)) as (w, word):
                    T.buffer_store(out, data[n, row, w, word], [n, h, w + left, word])
                fill(n, h, left + spec.width, right)
            with T.Else():
                fill(n, h, 0, width)


def weights_of_rows(operator: Operator, spec: WeightsOfRows) -> None:
    """Interleave rows in the order of constant weights; if `count`, write minus their popcounts."""
    words, rows = layout.words(spec.channels), layout.blocks(spec.rows) * LANES

    def word(n: Expr, row: Expr, c: Expr) -> Expr:
        if rows == spec.rows:
            return operator.inputs[0][n, row, c]
        value = operator.inputs[0][n, T.min(row, int64(spec.rows - 1)), c]
        return T.Select(row < spec.rows, value, T.uint32(0))

    def at(n: Expr, row: Expr, c: Expr) -> tuple[Expr, Expr]:
        return n, (row // LANES * words + c) * LANES + row % LANES

    compute("lanes", operator.outputs[0], (operator.n, rows, words), word, at)
    if spec.count:

        def step(total: Expr, n: Expr, row: Expr, c: Expr) -> Expr:
            return total - T.Cast("int32", T.popcount(operator.outputs[0][at(n, row, c)]))

        accumulate("count", operator.outputs[1], (operator.n, rows), (words,), T.int32(0), step)
