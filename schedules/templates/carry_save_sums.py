"""Carry-save counting: the bits of three products at once, for AVX-512.

Three taps of a kernel's row are counted together where none is outside the image. With
``x_i = d_i ^ w_i``, their bits are ``popcount(s) + 2 * popcount(c)``, where s is the XOR of the
three and c their majority. s is linear: ``s = (d_0 ^ d_1 ^ d_2) ^ (w_0 ^ w_1 ^ w_2)``, so the XOR
of three data words is made once per row, and c follows from x_0, x_1 and s in one
instruction: 8 vector instructions for three products instead of 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import popcount
from bnncc.schedules.intrin_x86 import CARRY_SAVE
from bnncc.schedules.templates.border_start import Start
from bnncc.schedules.templates.taps import Kernel, Piece
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import BinaryConv2d

Buffer = Any
Expr = Any


def fits(spec: BinaryConv2d) -> bool:
    """Return whether `conv2d` can count `spec` in threes."""
    uniform = spec.groups == 1 or (spec.out_channels // spec.groups) % LANES == 0
    apart = spec.dilations[1]
    wide = apart in CARRY_SAVE and spec.width > 2 * apart
    return spec.kernel[1] == 3 and uniform and wide and spec.rank == 4


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


class Views(NamedTuple):
    """Tensors that are declared once more, before all pieces.

    Attributes
    ----------
    rows : Buffer
        The data, see `flat`.
    weights : dict of int to Buffer
        The weights from a block of channels on, see `weights`.
    """

    rows: Buffer
    weights: dict[int, Buffer]


def views(kernel: Kernel, pieces: Sequence[Piece]) -> Views:
    """Declare what `accumulate` reads."""
    return Views(flat(kernel), {piece.block: weights(kernel, piece) for piece in pieces})


def weights(kernel: Kernel, piece: Piece) -> Buffer:
    """Declare the weights of a piece once more: block, kernel row, kernel column, word, lane.

    Lanes of a last block of fewer channels reach into the word behind; what they count is dropped.
    """
    rows, columns, words = kernel.reduction
    step, per_block = piece.lanes, rows * columns * words
    strides = [per_block * LANES, columns * words * step, words * step, step, 1]
    return T.decl_buffer(
        (piece.blocks, rows, columns, words, LANES), "uint32", data=kernel.weight.data,
        strides=strides, elem_offset=piece.block * per_block * LANES,
    )  # fmt: skip


def accumulate(kernel: Kernel, piece: Piece, name: str, start: Start, declared: Views) -> Buffer:
    """Write the block ``acc_i`` with carry-save counting, after its sums of three words.

    Three taps are the block ``triple_i``, to be tensorized. Where one of them is outside the image,
    the others are vectorized here: a second block that writes the accumulator would keep TVM from
    seeing a reduction. The accumulator's last axis holds the sums of a block of channels, then its
    carries; single taps are counted with the sums.
    """
    xors, weight = sums(kernel, name, declared.rows), declared.weights[piece.block]
    outer = (kernel.n, kernel.height, piece.columns, piece.blocks)
    acc = T.sblock_alloc_buffer((*outer[:3], piece.blocks * 2 * LANES), "int32")
    IRBuilder.name(f"acc_{name}", acc)
    height, _, words = kernel.reduction
    data, reach = kernel.data, kernel.spec.dilations[1]
    with T.grid(*outer, height, words) as loops, T.sblock(f"acc_{name}"):
        n, h, w, o, kh, c = T.axis.remap("SSSSRR", list(loops))
        column = w + piece.column
        word = kernel.word(piece, o, 0, c)
        row, first = kernel.position(0, h, kh), kernel.position(1, column, 0)
        base = o * (2 * LANES)
        three = [
            data[n, row, first : first + 2 * reach + 1, word],
            weight[o, kh, 0:3, c, 0:LANES],
        ]
        at_left = _within(first, xors.shape[3] // data.shape[3]) * data.shape[3]
        T.reads(xors[n, h, kh, at_left + word], *three, *start.regions(o, slice(0, LANES)))
        T.writes(acc[n, h, w, base : base + 2 * LANES])
        with T.init():
            with T.vectorized(0, LANES) as lane:
                initial = start.value(h, column, o, lane)
                T.buffer_store(acc, initial, [n, h, w, base + lane])
            with T.vectorized(0, LANES) as lane:
                T.buffer_store(acc, T.int32(0), [n, h, w, base + (lane + LANES)])

        def update(bits: Expr, here: Expr) -> None:
            where = (n, h, w, base + here)
            T.buffer_store(acc, acc[where] + T.Cast("int32", popcount(bits)), list(where))

        def single(tap: int) -> None:
            place = (n, row, kernel.position(1, column, tap), word)
            with T.vectorized(0, LANES) as lane:
                update(data[place] ^ weight[o, kh, tap, c, lane], lane)

        def triple() -> None:
            with T.serial(0, LANES) as loop, T.sblock(f"triple_{name}"):
                lane = T.axis.spatial(LANES, loop)
                own = [weight[o, kh, tap, c, lane] for tap in range(3)]
                x, y, z = (data[n, row, first + i * reach, word] ^ own[i] for i in range(3))
                total = xors[n, h, kh, first * data.shape[3] + word] ^ (own[0] ^ own[1] ^ own[2])
                update(total, lane)
                update((x & y) | ((x | y) & z), lane + LANES)

        def along() -> None:
            tests = [kernel.inside(1, column, tap, piece) for tap in range(3)]
            ends = [test for test in (tests[0], tests[2]) if test is not None]
            if not ends:
                triple()
                return
            with T.If(T.And(*ends) if len(ends) == 2 else ends[0]):
                with T.Then():
                    triple()
                with T.Else():
                    for tap, test in enumerate(tests):
                        if test is None:
                            single(tap)
                            continue
                        with T.If(test), T.Then():
                            single(tap)

        test = kernel.inside(0, h, kh, piece)
        if test is None:
            along()
        else:
            with T.If(test), T.Then():
                along()
    return acc


def region(acc: Buffer, loops: tuple[Expr, Expr, Expr, Expr]) -> Expr:
    """Return the region of both parts of one vector of accumulators."""
    n, h, w, o = loops
    return acc[n, h, w, o * (2 * LANES) : o * (2 * LANES) + 2 * LANES]


def total(acc: Buffer, loops: tuple[Expr, Expr, Expr, Expr]) -> Expr:
    """Return one vector of accumulators: sums and twice the carries."""
    n, h, w, o = loops
    sums, carries = (acc[n, h, w, T.Ramp(o * (2 * LANES) + i * LANES, 1, LANES)] for i in (0, 1))
    return sums + carries * T.Broadcast(T.int32(2), LANES)
