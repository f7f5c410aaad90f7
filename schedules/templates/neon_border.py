"""What taps left and right of the image count in `neon_conv2d`, whose data are 0 there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import popcount
from bnncc.schedules.templates.lookup import whole
from bnncc.schedules.templates.neon_data import mask
from bnncc.schedules.templates.neon_sums import BYTES, total_of, widened
from bnncc.topi_binary import layout
from bnncc.topi_binary.layout import LANES, QUAD

Buffer = Any
Expr = Any


class Writer(Protocol):
    """What a border needs of `neon_conv2d.Writer`, which has one."""

    kernel: Any
    spec: Any
    machine: Any
    weight: Buffer
    quads: int
    runs: int
    share: int
    masked: bool
    halves: bool

    def load_weight(self, quad: Expr, kh: Expr, run: Expr, vector: Expr, lane: int) -> Expr:
        """Return a vector of weights."""


@dataclass(frozen=True)
class Rows:
    """Kernel rows inside the image; `inner` if that is known to be all of them."""

    low: Expr
    high: Expr
    inner: bool


class Border:
    """What taps outside the image count too much: the bits of their weights less their share.

    In mode ``and`` it is the bits of all weights, which are always subtracted.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        kernel, spec = writer.kernel, writer.spec
        taps = range(spec.kernel[1])
        self._kinds: list[tuple[int, ...]] = []
        if spec.mode == "and":
            self._kinds = [tuple(taps)]
        else:
            self._firsts = kernel.border_classes(1)
            for column in self._firsts:
                kind = self._taps(column)
                if kind and kind not in self._kinds:
                    self._kinds.append(kind)
        # The last row is the sum of the others.
        shape = (spec.kernel[0] + 1, len(self._kinds), layout.blocks(spec.out_channels) * LANES)
        self._table = T.sblock_alloc_buffer(shape, "int32")
        IRBuilder.name("border", self._table)
        with T.sblock("border"):
            T.reads(whole(writer.weight))
            T.writes(whole(self._table))
            with T.serial(0, writer.quads) as quad:
                for number, kind in enumerate(self._kinds):
                    place = [spec.kernel[0], number, T.Ramp(quad * QUAD, 1, QUAD)]
                    T.buffer_store(self._table, T.Broadcast(T.int32(0), QUAD), place)
                    with T.serial(0, spec.kernel[0]) as kh:
                        self._count(quad, kh, number, kind)

    def _taps(self, column: int) -> tuple[int, ...]:
        spec, kernel = self._writer.spec, self._writer.kernel
        places = [kernel.position(1, column, kw) for kw in range(spec.kernel[1])]
        return tuple(kw for kw, x in enumerate(places) if not 0 <= x < spec.width)

    def columns(self, column: int) -> int | None:
        """Return the number of the taps that `column` leaves out; None if it leaves out none."""
        if self._writer.spec.mode == "and":
            return 0
        kind = self._taps(column)
        return self._kinds.index(kind) if kind else None

    def _count(self, quad: Expr, kh: Expr, number: int, kind: Sequence[int]) -> None:
        """Count the weights of the taps `kind` of one quad and kernel row."""
        writer = self._writer
        with T.sblock("count"):
            T.reads(whole(writer.weight))
            T.writes(whole(self._table))
            sums = T.sblock_alloc_buffer((QUAD * 8,), "uint16")
            for i in range(QUAD):
                zero = T.Broadcast(T.uint16(0), 8)
                T.buffer_store(sums, zero, [T.Ramp(i * 8, 1, 8)])

            def add(run: Expr, vector: Expr, part: tuple[int, int] | None) -> None:
                for i in range(QUAD):
                    here = T.Ramp(i * 8, 1, 8)
                    weight = writer.load_weight(quad, kh, run, vector, i)
                    if part is not None:
                        weight = weight & mask(*part)
                    count = widened(writer.machine, 8, popcount(weight))
                    T.buffer_store(sums, sums[here] + count, [here])

            for kw in kind:
                self._tap(kw, add)
            parts = [sums[T.Ramp(i * 8, 1, 8)] for i in range(QUAD)]
            total = T.reinterpret("int32x4", total_of(writer.machine, parts))
            if writer.masked:
                total = total * T.Broadcast(T.int32(2), QUAD)
            if writer.spec.mode != "and":
                total = total - T.Broadcast(T.int32(len(kind) * writer.share), QUAD)
            total, lanes = T.Bind(total), T.Ramp(quad * QUAD, 1, QUAD)
            T.buffer_store(self._table, total, [kh, number, lanes])
            last = (writer.spec.kernel[0], number, lanes)
            T.buffer_store(self._table, self._table[last] + total, list(last))

    def _tap(self, kw: int, add: Callable[[Expr, Expr, tuple[int, int] | None], None]) -> None:
        """Write the counts of the vectors of one tap."""
        writer = self._writer
        size = writer.kernel.group_words * 4
        if writer.halves:
            add(kw, 0, (0, 8))
            return
        run, first = (kw, 0) if writer.runs > 1 else (0, kw * size)
        last = first + size
        start, end = -(-first // BYTES), last // BYTES
        if start > end:  # inside one vector
            add(run, end, (first % BYTES, last % BYTES))
            return
        if first % BYTES:
            add(run, start - 1, (first % BYTES, BYTES))
        if end > start:
            with T.serial(start, end) as vector:
                add(run, vector, None)
        if last % BYTES:
            add(run, end, (0, last % BYTES))

    def value(self, number: int, block: Expr, rows: Rows) -> Expr:
        """Return what one block of channels counts too much in the kernel `rows`."""
        channels = T.Ramp(block * LANES, 1, LANES)
        if rows.inner:
            return self._table[self._writer.spec.kernel[0], number, channels]
        total = T.sblock_alloc_buffer((LANES,), "int32")
        lanes = T.Ramp(0, 1, LANES)
        T.buffer_store(total, T.Broadcast(T.int32(0), LANES), [lanes])
        with T.serial(rows.low, rows.high) as kh:
            more = self._table[kh, number, channels]
            T.buffer_store(total, total[lanes] + more, [lanes])
        return total[lanes]
