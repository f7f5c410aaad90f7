"""Carry-save counting: the bits of three taps of a kernel's row at once.

With ``x_i = d_i ^ w_i``, the bits of three products are ``popcount(s) + 2 * popcount(c)``, where s
is the XOR of the three and c their majority. s is linear: ``s = (d_0 ^ d_1 ^ d_2) ^ (w_0 ^ w_1 ^
w_2)``, so the XOR of three data words is made once for all channels. Where a tap of the three is
outside the image, the others are counted one by one.

Data that may hold exact zeros are counted as if they held none: a kernel takes this form only after
it has looked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions.binary_operands import Operands, ones, vectors
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    buffer,
    compute,
    extent,
    int64,
    lane_of,
    under,
)
from bnncc.topi_binary.definitions.taps import place, tests_of, within
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import BinaryConv2d

FORM = "carry_save"
"""The form of `binary_conv2d`."""


def fits(spec: BinaryConv2d) -> bool:
    """Return whether rows of the kernel are of three taps, and all lanes meet the same words."""
    uniform = spec.groups == 1 or (spec.out_channels // spec.groups) % LANES == 0
    wide = spec.width > 2 * spec.dilations[1]
    return spec.kernel[1] == 3 and uniform and wide and spec.rank == 4 and not spec.per_image


def summed(met: Operands, n: Expr, start: Callable[..., Expr]) -> Callable[..., Expr]:
    """Write the sums, and the carries behind those of a vector; return what they are together."""
    image = (n, *met.spec.output_hw)
    both = layout.blocks(met.spec.out_channels) * 2 * LANES
    xors, sums = _xors(met, n), buffer("sum", (*image, both), "int32")
    for end, first, count, part in vectors(met):
        _sum(part, f"sum{end}", (*image, count), first, start, xors, sums)

    def total(n: Expr, h: Expr, w: Expr, o: Expr, lane: Expr) -> Expr:
        here = o * (2 * LANES) + lane
        return sums[n, h, w, here] + sums[n, h, w, here + LANES] * 2

    return total


def _xors(met: Operands, n: Expr) -> Buffer:
    """XOR each data word with its two neighbours under a row of the kernel.

    The result has the shape (n, output height, kernel height, words of a row): for each row of
    outputs the rows of data under it. Those outside the image hold anything; nothing reads them.
    """
    spec, (_, height, width, words) = met.spec, met.data.shape
    reach, zero = spec.dilations[1] * words, int64(0)
    rows = T.decl_buffer((n, height, width * words), "uint32", data=met.data.data)
    extents = (n, spec.output_hw[0], spec.kernel[0], int(width * words - 2 * reach))

    def xor(n: Expr, h: Expr, kh: Expr, x: Expr) -> Expr:
        row = within(place(spec, h, zero, kh, zero)[0], int(height))
        one, two, three = (rows[n, row, x + i * reach] for i in range(3))
        return T.bitwise_xor(T.bitwise_xor(one, two), three)

    return compute("xors", buffer("xors", extents, "uint32"), extents, xor)


def _rows(met: Operands, first: int, count: int) -> Buffer:
    """Declare weights once more: vector of channels, kernel row, kernel column, word, lane.

    Lanes without a channel reach into the word behind; nobody takes what they count.
    """
    (high, wide), words, lanes = met.spec.kernel, met.words, met.width
    run = high * wide * words
    return T.decl_buffer(
        (count, high, wide, words, LANES), "uint32", data=met.weight.data,
        strides=[run * LANES, wide * words * lanes, words * lanes, lanes, 1],
        elem_offset=first * run * LANES,
    )  # fmt: skip


def _sum(
    met: Operands, name: str, extents: tuple[Expr, ...], first: int, start: Callable[..., Expr],
    xors: Buffer, sums: Buffer,
) -> None:  # fmt: skip
    """Write the sums of some vectors of channels.

    Lanes of three taps are a block, which becomes an instruction. Those of single taps are not: a
    second block that writes the sums would keep TVM from seeing a reduction.
    """
    spec, data, weight = met.spec, met.data, _rows(met, first, extents[3])
    reach, zero = spec.dilations[1], int64(0)
    words, last = int(data.shape[3]), int(data.shape[2]) - 2 * reach
    every = (*extents, spec.kernel[0], met.words)
    with T.grid(*map(extent, every)) as loops, T.sblock(name):
        *outer, block, kh, c = loops
        n, h, w = T.axis.remap("SSS", outer)
        o = T.axis.spatial(int64(first + extents[3]), block + first)
        kh, c = T.axis.remap("RR", [kh, c])
        base = o * (2 * LANES)

        def count(here: Expr, bits: Expr) -> None:
            T.buffer_store(sums, sums[n, h, w, base + here] + ones(bits), [n, h, w, base + here])

        with T.init(), lane_of(f"{name}_start") as lane:
            T.buffer_store(sums, start(n, h, w, o, lane), [n, h, w, base + lane])
            T.buffer_store(sums, T.int32(0), [n, h, w, base + (lane + LANES)])
        *row, column, word = met.index(n, h, w, o, kh, zero, c, zero)
        ends = [*tests_of(spec, 1, w, zero), *tests_of(spec, 1, w, int64(2))]
        with under(*tests_of(spec, 0, h, kh)), T.If(reduce(T.And, ends, tirx.const(True))):
            with T.Then(), lane_of(f"{name}_add") as lane:
                own = [weight[o - first, kh, tap, c, lane] for tap in range(3)]
                x, y, z = (data[tuple([*row, column + i * reach, word])] ^ own[i] for i in range(3))
                xor = xors[n, h, kh, within(column, last) * words + word]
                count(lane, xor ^ (own[0] ^ own[1] ^ own[2]))
                count(lane + LANES, (x & y) | ((x | y) & z))
            with T.Else():
                for tap in range(3):
                    with under(*tests_of(spec, 1, w, int64(tap))), T.vectorized(LANES) as lane:
                        datum = data[tuple([*row, column + tap * reach, word])]
                        count(lane, datum ^ weight[o - first, kh, tap, c, lane])
