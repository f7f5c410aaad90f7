"""What taps left and right of the image count in `neon_conv2d`, whose data are 0 there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules import intrin_arm
from bnncc.schedules.intrin_arm import BYTES
from bnncc.schedules.intrin_portable import popcount
from bnncc.schedules.templates.lookup import whole
from bnncc.schedules.templates.taps import Piece
from bnncc.topi_binary import layout
from bnncc.topi_binary.layout import LANES, QUAD

Buffer = Any
Expr = Any


class Border:
    """What taps outside the image count too much: the bits of their weights less their share.

    In mode ``and`` it is the bits of all weights, which are always subtracted.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        kernel, spec = writer.kernel, writer.spec
        if spec.mode == "and":
            self._kinds = [tuple(range(spec.kernel[1]))]
        else:
            found = [self._outside(column) for column in kernel.border_classes(1)]
            self._kinds = [(), *dict.fromkeys(kind for kind in found if kind)]
        # The last row is the sum of the others.
        height = spec.kernel[0]
        shape = (height + 1, len(self._kinds), layout.blocks(spec.out_channels) * LANES)
        self.table = T.sblock_alloc_buffer(shape, "int32")
        IRBuilder.name("border", self.table)
        with T.sblock("border"):
            T.reads(whole(writer.weight))
            T.writes(whole(self.table))
            with T.serial(0, layout.blocks(spec.out_channels, QUAD)) as quad:
                for number, kind in enumerate(self._kinds):
                    lanes = T.Ramp(quad * QUAD, 1, QUAD)
                    place = [height, number, lanes]
                    T.buffer_store(self.table, T.Broadcast(T.int32(0), QUAD), place)
                    with T.serial(0, height) as kh:
                        total = T.Bind(self._count(quad, kh, kind))
                        T.buffer_store(self.table, total, [kh, number, lanes])
                        T.buffer_store(self.table, self.table[tuple(place)] + total, place)

    def _outside(self, column: int) -> tuple[int, ...]:
        """Return the taps of `column` that lie left or right of the image."""
        spec, kernel = self._writer.spec, self._writer.kernel
        places = [kernel.position(1, column, kw) for kw in range(spec.kernel[1])]
        return tuple(kw for kw, x in enumerate(places) if not 0 <= x < spec.width)

    def _count(self, quad: Expr, kh: Expr, kind: Sequence[int]) -> Expr:
        """Count the weights of the taps `kind` of one quad and kernel row."""
        writer, arch = self._writer, self._writer.tiling.arch
        sums = T.sblock_alloc_buffer((QUAD * 8,), "uint16")
        rows = [T.Ramp(i * 8, 1, 8) for i in range(QUAD)]
        for row in rows:
            T.buffer_store(sums, T.Broadcast(T.uint16(0), 8), [row])

        def add(run: int, vector: Expr, first: int = 0, last: int = BYTES) -> None:
            for i, row in enumerate(rows):
                place = writer.vector(quad, kh, run, vector) + i * BYTES
                weight = writer.weight[T.Ramp(place, 1, BYTES)]
                if last - first < BYTES:
                    weight = weight & intrin_arm.mask(first, last)
                count = intrin_arm.WIDENING_ADD_PAIRS[arch, 8](popcount(weight))
                T.buffer_store(sums, sums[row] + count, [row])

        size = writer.kernel.group_words * 4
        for kw in kind:
            if writer.halves:
                add(kw, T.int32(0), 0, 8)
                continue
            run, begin = (kw, 0) if writer.steps.runs > 1 else (0, kw * size)
            first, last = -(-begin // BYTES), (begin + size) // BYTES
            if first > last:  # inside one vector
                add(run, T.int32(last), begin % BYTES, (begin + size) % BYTES)
                continue
            if begin % BYTES:
                add(run, T.int32(first - 1), begin % BYTES)
            with T.serial(first, last) as vector:
                add(run, vector)
            if (begin + size) % BYTES:
                add(run, T.int32(last), 0, (begin + size) % BYTES)
        together = intrin_arm.together(arch, [sums[row] for row in rows], 16, 0)
        total = T.reinterpret("int32x4", intrin_arm.WIDENING_ADD_PAIRS[arch, 16](together))
        if writer.masked:
            total = total * T.Broadcast(T.int32(2), QUAD)
        share = 0 if writer.spec.mode == "and" else len(kind) * writer.share
        return total - T.Broadcast(T.int32(share), QUAD)

    def subtracted(
        self, raw: Expr, piece: Piece, at: tuple[Expr, Expr, Expr], inner: bool
    ) -> Expr:
        """Return `raw` less what is counted too much for a column of `piece`, row and block."""
        column, h, block = at
        number: Expr = T.int32(0)
        if self._writer.spec.mode != "and":
            places = range(piece.column, piece.column + piece.columns)
            numbers = [self._kinds.index(self._outside(x)) for x in places]
            if not any(numbers):
                return raw
            for x, one in zip(places, numbers, strict=True):
                number = T.Select(column == x, T.int32(one), number) if one else number
        channels, height = T.Ramp(block * LANES, 1, LANES), self._writer.spec.kernel[0]
        if inner:
            return raw - self.table[height, number, channels]
        left = T.sblock_alloc_buffer((LANES,), "int32")
        lanes = T.Ramp(0, 1, LANES)
        T.buffer_store(left, raw, [lanes])
        with T.serial(0, height) as kh:
            with T.If(self._writer.kernel.inside(0, h, kh, piece)), T.Then():
                less = left[lanes] - self.table[kh, number, channels]
                T.buffer_store(left, less, [lanes])
        return left[lanes]
