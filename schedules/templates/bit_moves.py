"""Moving bits between packed tensors: concatenation, selection, padding.

Everything that is known at compile time becomes shifts and masks of whole words.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.templates.kernel import Buffer, Expr, bind, const, loop, loops
from bnncc.topi_binary import layout
from bnncc.topi_binary.bits_table import needs_table, terms
from bnncc.topi_binary.layout import WORD_BITS
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import ConcatBits, PadBits, SliceBits


def concat_bits(spec: ConcatBits) -> tirx.PrimFunc:
    """Define the concatenation of planes along the channels.

    Parameters
    ----------
    spec : ConcatBits
        What it computes.

    Returns
    -------
    tirx.PrimFunc
        One input per entry of ``spec.channels``.
    """
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(layout.words(sum(spec.channels)))]
    first = 0
    for number, channels in enumerate(spec.channels):
        for word in range(layout.words(channels)):
            target, shift = divmod(first + word * WORD_BITS, WORD_BITS)
            parts[target].append((number, word, shift))
            # Tail bits are 0: nothing to carry over if the bits end in this word.
            if shift and shift + min(WORD_BITS, channels - word * WORD_BITS) > WORD_BITS:
                parts[target + 1].append((number, word, shift - WORD_BITS))
        first += channels
    with Operator(spec) as kernel, loops([kernel.n, spec.height, spec.width]) as at:
        where = _pixel(spec, at)
        for target, sources in enumerate(parts):
            value = None
            for number, word, shift in sources:
                moved = _shifted(at_word(kernel.inputs[number], where, const(word)), shift)
                value = moved if value is None else value | moved
            T.buffer_store(kernel.outputs[0], value, [*where, const(target)])
    return kernel.func


def slice_bits(spec: SliceBits) -> tirx.PrimFunc:
    """Define the selection of channels of a plane.

    Parameters
    ----------
    spec : SliceBits
        What it computes.

    Returns
    -------
    tirx.PrimFunc
        Takes `bits_table.slice_table` as a second input if `bits_table.needs_table`.
    """
    with Operator(spec) as kernel, loops([kernel.n, spec.height, spec.width]) as at:
        where = _pixel(spec, at)
        if needs_table(spec):
            _gather(kernel, where, layout.words(len(spec.index)))
        else:
            for target, sources in enumerate(terms(spec.index)):
                value: Expr = word_const(0)
                for word, shift, mask in sources:
                    data = at_word(kernel.inputs[0], where, const(word))
                    if mask != 2**WORD_BITS - 1:
                        data = data & word_const(mask)
                    value = value | _shifted(data, shift)
                T.buffer_store(kernel.outputs[0], value, [*where, const(target)])
    return kernel.func


def pad_bits(spec: PadBits) -> tirx.PrimFunc:
    """Define padding at the border of the image.

    Parameters
    ----------
    spec : PadBits
        What it computes.

    Returns
    -------
    tirx.PrimFunc
        Border pixels have the first `channels` bits equal to ``spec.bit``.
    """
    words, (height, width) = layout.words(spec.channels), spec.output_hw
    top, left, _, right = spec.pads
    with Operator(spec) as kernel:
        data, out = kernel.inputs[0], kernel.outputs[0]

        def fill(n: Expr, row: Expr, first: int, count: int) -> None:
            if not count:
                return
            with loop(count) as column, loop(words) as word:
                value: Expr = word_const(-spec.bit % 2**WORD_BITS)
                if spec.bit and spec.channels % WORD_BITS:
                    last = word_const(2 ** (spec.channels % WORD_BITS) - 1)
                    value = T.Select(word == words - 1, last, value)
                T.buffer_store(out, value, [n, row, column + first, word])

        with loops([kernel.n, height]) as (n, row):
            y = bind(row - top)
            with T.If(T.And(y >= 0, y < spec.height)):
                with T.Then():
                    fill(n, row, 0, left)
                    with loop(spec.width) as column, loop(words) as word:
                        T.buffer_store(out, data[n, y, column, word], [n, row, column + left, word])
                    fill(n, row, left + spec.width, right)
                with T.Else():
                    fill(n, row, 0, width)
    return kernel.func


def word_const(value: int) -> Expr:
    """Return a constant word."""
    return tirx.IntImm("uint32", value)


def at_word(plane: Buffer, where: list[Expr], word: Expr) -> Expr:
    """Load one word of a pixel."""
    return plane[tuple([*where, word])]


def _pixel(spec: ConcatBits | SliceBits, at: list[Expr]) -> list[Any]:
    return at[:1] if spec.rank == 2 else at


def _shifted(word: Expr, shift: int) -> Expr:
    """Return `word` moved by `shift` bits, to the left if positive."""
    if not shift:
        return word
    return word << word_const(shift) if shift > 0 else word >> word_const(-shift)


def _gather(kernel: Operator, where: list[Any], words: int) -> None:
    """Write words bit by bit, as the table says."""
    data, table = kernel.inputs
    value = T.sblock_alloc_buffer((1,), "uint32")
    with loop(words) as target:
        T.buffer_store(value, word_const(0), [const(0)])
        with loop(WORD_BITS) as bit:
            channel = T.Cast("int64", table[target * WORD_BITS + bit])
            some = T.max(channel, const(0))
            word = at_word(data, where, some // WORD_BITS)
            picked = word >> T.Cast("uint32", some % WORD_BITS) & word_const(1)
            picked = T.Select(channel >= 0, picked, word_const(0))
            moved = picked << T.Cast("uint32", bit)
            T.buffer_store(value, value[const(0)] | moved, [const(0)])
        T.buffer_store(kernel.outputs[0], value[const(0)], [*where, target])
