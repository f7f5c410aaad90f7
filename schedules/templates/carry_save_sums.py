"""Carry-save counting: the bits of three products at once, for AVX-512.

Three taps of a kernel's row are counted together where none is outside the image. With
``x_i = d_i ^ w_i``, their bits are ``popcount(s) + 2 * popcount(c)``, where s is the XOR of the
three and c their majority. s is linear: ``s = (d_0 ^ d_1 ^ d_2) ^ (w_0 ^ w_1 ^ w_2)``, so the XOR
of three data words is made once per row, and c follows from x_0, x_1 and s in one
instruction: 8 vector instructions for three products instead of 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules import intrin_x86
from bnncc.schedules.intrin_portable import I32, popcount
from bnncc.schedules.templates.border_start import Start
from bnncc.schedules.templates.taps import Kernel, Piece, Tap
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import BinaryConv2d

Buffer = Any
Expr = Any

_MAJORITY = intrin_x86.TERNARY[intrin_x86.CARRY, LANES]


def fits(spec: BinaryConv2d) -> bool:
    """Return whether `conv2d` can count `spec` in threes."""
    uniform = spec.groups == 1 or (spec.out_channels // spec.groups) % LANES == 0
    reach = 2 * spec.dilations[1]
    return spec.kernel[1] == 3 and uniform and spec.width > reach and spec.rank == 4


def flat(kernel: Kernel) -> Buffer:
    """Declare the data once more, the words of a row one after another."""
    n, height, width, words = kernel.data.shape
    return T.decl_buffer((n, height, width * words), "uint32", data=kernel.data.data)


def sums(kernel: Kernel, name: str, rows: Buffer) -> Buffer:
    """XOR each data word with its two neighbours under a row of the kernel (block ``sums_i``).

    The result has the shape (n, height, kernel height, words of a row): for each row of outputs
    the rows of data under it. Those outside the image hold anything; nothing reads them.
    """
    step = kernel.spec.dilations[1]
    n, height, width, words = kernel.data.shape
    extents = (n, kernel.height, kernel.spec.kernel[0], (width - 2 * step) * words)
    result = T.sblock_alloc_buffer(extents, "uint32")
    IRBuilder.name(f"sums_{name}", result)
    with T.grid(*extents) as loops, T.sblock(f"sums_{name}"):
        i, h, kh, x = T.axis.remap("SSSS", list(loops))
        row = _within(kernel.position(0, h, kh), height)
        T.reads(rows[i, row, x : x + 2 * step * words + 1])
        T.writes(result[i, h, kh, x])
        triple = [rows[i, row, x + k * step * words] for k in range(3)]
        T.buffer_store(result, triple[0] ^ triple[1] ^ triple[2], [i, h, kh, x])
    return result


def _within(place: Expr, extent: int) -> Expr:
    return T.max(T.int32(0), T.min(place, T.int32(extent - 1)))


def accumulate(kernel: Kernel, piece: Piece, name: str, start: Start, rows: Buffer) -> Buffer:
    """Write the block ``acc_i`` with carry-save counting, on vectors, after its sums of `rows`.

    The accumulator has one more axis: 0 counts the sums and single taps, 1 the carries.
    """
    xors = sums(kernel, name, rows)
    outer = (kernel.n, kernel.height, piece.columns, piece.blocks, 2)
    acc = T.sblock_alloc_buffer((*outer[:3], 2, piece.blocks * LANES), "int32")
    IRBuilder.name(f"acc_{name}", acc)
    rows, _, words = kernel.reduction
    data_words = kernel.data.shape[3]
    with T.grid(*outer, rows, words) as loops, T.sblock(f"acc_{name}"):
        n, h, w, o, part, kh, c = T.axis.remap("SSSSSRR", list(loops))
        column = w + piece.column
        taps = [Tap(kernel, piece, n, h, column, o, None, kh, kw, c) for kw in range(3)]
        reads = [region for tap in taps for region in tap.regions()]
        word = kernel.word(piece, o, 0, c)
        first = kernel.position(1, column, 0)
        at_left = _within(first, xors.shape[3] // data_words) * data_words
        reads.append(xors[n, h, kh, at_left + word])
        T.reads(*reads, *start.regions(o, slice(0, LANES)))
        T.writes(acc[n, h, w, part, o * LANES : o * LANES + LANES])
        here = (n, h, w, part, T.Ramp(o * LANES, 1, LANES))

        def add(count: Expr) -> None:
            T.buffer_store(acc, acc[here] + T.Cast(I32, count), here)

        def single(taps: Sequence[Tap]) -> None:
            with T.If(part == 0), T.Then():
                for tap in taps:
                    tap.visit(lambda t: add(popcount(t.differ(kernel.data[t.index]))), rows=False)

        def triple() -> None:
            weights = taps[0].weight ^ taps[1].weight ^ taps[2].weight
            total = T.Broadcast(xors[n, h, kh, first * data_words + word], LANES) ^ weights
            with T.If(part == 0):
                with T.Then():
                    add(popcount(total))
                with T.Else():
                    two = [tap.differ(kernel.data[tap.index]) for tap in taps[:2]]
                    add(popcount(_MAJORITY(two[0], two[1], total)))

        with T.init():
            initial: Expr = T.Broadcast(T.int32(0), LANES)
            first_part = start.value(h, column, o)
            with T.If(part == 0):
                with T.Then():
                    T.buffer_store(acc, first_part, here)
                with T.Else():
                    T.buffer_store(acc, initial, here)

        def row() -> None:
            tests = [kernel.inside(1, column, kw, piece) for kw in (0, 2)]
            tests = [test for test in tests if test is not None]
            if not tests:
                triple()
                return
            with T.If(T.And(*tests) if len(tests) == 2 else tests[0]):
                with T.Then():
                    triple()
                with T.Else():
                    single(taps)

        test = kernel.inside(0, h, kh, piece)
        if test is None:
            row()
        else:
            with T.If(test), T.Then():
                row()
    return acc


def region(acc: Buffer, loops: tuple[Expr, Expr, Expr, Expr]) -> Expr:
    """Return the region of both parts of one vector of accumulators."""
    n, h, w, o = loops
    return acc[n, h, w, 0:2, o * LANES : o * LANES + LANES]


def total(acc: Buffer, loops: tuple[Expr, Expr, Expr, Expr]) -> Expr:
    """Return one vector of accumulators: sums and twice the carries."""
    n, h, w, o = loops
    lanes = T.Ramp(o * LANES, 1, LANES)
    return acc[n, h, w, 0, lanes] + acc[n, h, w, 1, lanes] * T.Broadcast(T.int32(2), LANES)
