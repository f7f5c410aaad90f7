"""Folded taps: those of a kernel row share words, where one has few channels.

A word holds as many taps as fit whole. A copy of the data has the words of each output column, so
that the kernel has one column and no padding beside the image: taps outside are zeros, whose counts
the initial value corrects (see `binary_conv2d`). Rows outside are skipped. The weights are folded
in the same way, once per call.

Exact zeros in the data are ignored: a kernel uses this form only after a scan found no zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions.binary_operands import Operands, vectors
from bnncc.topi_binary.definitions.blocks import Buffer, Expr, buffer, compute, int64
from bnncc.topi_binary.definitions.taps import place, tests_of, within
from bnncc.topi_binary.layout import LANES, WORD_BITS
from bnncc.topi_binary.spec import BinaryConv2d

FORM = "folded-"
"""Form of `binary_conv2d`, followed by the number of words that are counted together."""

DATA, WEIGHT = "folded", "folded_weight"
"""Blocks of the copy of the data, and of the weights."""


def fits(spec: BinaryConv2d) -> bool:
    """Return whether a word holds several taps of a kernel row."""
    plain = spec.rank == 4 and spec.groups == 1 and not spec.per_image and not spec.weight_zeros
    return plain and _words(spec) < spec.kernel[1]


def of_columns(spec: BinaryConv2d) -> BinaryConv2d:
    """Return `spec` for folded data: a kernel of one column, on words that are filled."""
    top, _, bottom, _ = spec.pads
    return replace(
        spec, width=spec.output_hw[1], channels=_words(spec) * WORD_BITS,
        kernel=(spec.kernel[0], 1), strides=(spec.strides[0], 1), pads=(top, 0, bottom, 0),
        dilations=(spec.dilations[0], 1), ternary=False,
    )  # fmt: skip


def operands(met: Operands, n: Expr) -> Operands:
    """Write the folded data and weights; return them as operands of `of_columns`."""
    return Operands(of_columns(met.spec), _data(met, n), None, _weights(met), None)


def _words(spec: BinaryConv2d) -> int:
    """Return the words of a kernel row."""
    return layout.blocks(spec.kernel[1], max(1, WORD_BITS // spec.channels))


def _joined(spec: BinaryConv2d, number: Expr, tap: Callable[[Expr], Expr]) -> Expr:
    """Return word `number` of a kernel row, from a function that returns the bits of a tap."""
    (_, taps), words, bits = spec.kernel, _words(spec), []
    together = layout.blocks(taps, words)
    for i in range(together):
        kw = number * together + i
        one = T.shift_left(tap(kw), T.uint32(i * spec.channels))
        if (words - 1) * together + i >= taps:  # not in the last word
            one = T.if_then_else(kw < taps, one, T.uint32(0))
        bits.append(one)
    return reduce(T.bitwise_or, bits)


def _data(met: Operands, n: Expr) -> Buffer:
    """Write the words of each output column and kernel row."""
    spec, zero = met.spec, int64(0)
    shape = n, spec.height, spec.output_hw[1], _words(spec)

    def word(n: Expr, h: Expr, w: Expr, number: Expr) -> Expr:
        def tap(kw: Expr) -> Expr:
            column = place(spec, zero, w, zero, kw)[1]
            bits: Expr = met.data[n, h, within(column, spec.width), zero]
            for test in tests_of(spec, 1, w, kw):
                bits = T.if_then_else(test, bits, T.uint32(0))
            return bits

        return _joined(spec, number, tap)

    return compute(DATA, buffer(DATA, shape, "uint32"), shape, word)


def _weights(met: Operands) -> Buffer:
    """Write the words of each output channel and kernel row, in the order of packed weights."""
    spec, zero, words = met.spec, int64(0), _words(met.spec)
    run = spec.kernel[0] * words
    made = buffer(WEIGHT, (layout.blocks(spec.out_channels) * LANES * run,), "uint32")

    def word(part: Operands, o: Expr, kh: Expr, number: Expr, lane: Expr) -> Expr:
        def tap(kw: Expr) -> Expr:
            kw = T.min(kw, int64(spec.kernel[1] - 1))
            return part.weigh(part.weight, zero, zero, zero, o, kh, kw, zero, lane)

        return _joined(spec, number, tap)

    for end, first, count, part in vectors(met):
        extents = count, spec.kernel[0], words, part.width
        compute(
            f"{WEIGHT}{end}", made, extents,
            lambda o, *i, first=first, part=part: word(part, o + first, *i),
            lambda o, kh, number, lane, first=first, width=part.width: (
                (o + first) * (LANES * run) + (kh * words + number) * width + lane,
            ),
        )  # fmt: skip
    return made
