"""Carry-save popcount: the bits of three adjacent taps of a kernel row are counted together.

With ``x_i = d_i ^ w_i``, the popcount of three products is ``popcount(s) + 2 * popcount(c)``, where
s is the XOR and c the majority of the three. s is linear: ``s = (d_0 ^ d_1 ^ d_2) ^ (w_0 ^ w_1 ^
w_2)``, so the XOR of three data words is computed once for all channels. If one of the three taps
is outside the image, the others are counted one by one.

Exact zeros in the data are ignored: a kernel uses this form only after a scan found no zeros.
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
"""Form of `binary_conv2d`."""


def fits(spec: BinaryConv2d) -> bool:
    """Return whether kernel rows have three taps and all lanes read the same data words."""
    uniform = spec.groups == 1 or (spec.out_channels // spec.groups) % LANES == 0
    wide = spec.width > 2 * spec.dilations[1]
    return spec.kernel[1] == 3 and uniform and wide and spec.rank == 4 and not spec.per_image


def summed(met: Operands, n: Expr, start: Callable[..., Expr]) -> Callable[..., Expr]:
    """Write the sums, followed by the carries, of each vector; return a reader of the total."""
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
    """XOR each data word with those of the next two pixels under a kernel row.

    The result has the shape (n, output height, kernel height, words of a row): the data rows under
    each output row. Rows outside the image are undefined and are not read.
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


def _sum(
    met: Operands, name: str, extents: tuple[Expr, ...], first: int, start: Callable[..., Expr],
    xors: Buffer, sums: Buffer,
) -> None:  # fmt: skip
    """Write the sums of some vectors of channels.

    The lanes of three taps are a block, which becomes an instruction. Those of single taps are not:
    with a second block that writes the sums, TVM would not recognise a reduction.
    """
    spec, data, weight = met.spec, met.data, met.rows(first, extents[3])
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
                own = [weight[zero, o - first, kh, tap, c, lane] for tap in range(3)]
                x, y, z = (data[tuple([*row, column + i * reach, word])] ^ own[i] for i in range(3))
                xor = xors[n, h, kh, within(column, last) * words + word]
                count(lane, xor ^ (own[0] ^ own[1] ^ own[2]))
                count(lane + LANES, (x & y) | ((x | y) & z))
            with T.Else():
                for tap in range(3):
                    with under(*tests_of(spec, 1, w, int64(tap))), T.vectorized(LANES) as lane:
                        datum = data[tuple([*row, column + tap * reach, word])]
                        count(lane, datum ^ weight[zero, o - first, kh, tap, c, lane])
