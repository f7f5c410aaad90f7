"""Binary convolution on NEON: vectors of input channels, four output channels at a time.

A *quad* is four output channels. Their weights and the data are read in vectors of 128 bits, and a
register tile of a few data vectors x one quad is counted and summed by `neon_sums`. There are two
ways to fill a vector with data:

* order ``vectors``: the words that a kernel row takes from one output column are one run of memory
  (or, with dilation, one run for each tap), cut into vectors; the last may be partly masked;
* order ``halves``, for layers of two words or less: the same tap of two neighbouring columns, with
  the weights of the tap in both halves.

The data are copied first where that makes them so: with a border of pixels outside the image, with
the words of a group side by side, with the columns of a stride side by side. Padding with +1 or -1
is such a border and costs nothing more. Padding with zeros skips the rows outside; columns outside
are words of 0, and what they count, the bits of their weights, is subtracted (`quad_border`).

With a plane z of exact zeros, ``2 * popcount((d ^ w) & ~z) + popcount(z)`` is ``popcount((d | z) ^
w) + popcount((d & ~z) ^ w)``: the same loops, over two planes of data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import I32
from bnncc.schedules.templates.lookup import padded, whole
from bnncc.schedules.templates.neon_border import Border, Rows
from bnncc.schedules.templates.neon_data import Data, mask
from bnncc.schedules.templates.neon_sums import BYTES, MAX_STEPS, Sums
from bnncc.schedules.templates.neon_tiling import Quads
from bnncc.schedules.templates.place import Place
from bnncc.schedules.templates.taps import Kernel, Piece
from bnncc.topi_binary import layout
from bnncc.topi_binary.layout import LANES, QUAD

Buffer = Any
Expr = Any
Finish = Callable[[Piece, "Place", Expr], None]

ALL_UNROLLED = 18
"""Vectors of all kernel rows that are code without loops."""


@dataclass(frozen=True)
class _Phase:
    """Vectors of a run that are counted before bytes are widened."""

    times: int
    first: int
    vectors: int
    tail: bool


class Writer:
    """Writes the loops of a kernel, as they are to run.

    Parameters
    ----------
    kernel : Kernel
        The function being written.
    tiling : Quads
        How to cut it.
    masked : bool
        Whether there is a plane of zeros that matters.
    finish : callable
        Writes the epilogue of one vector of accumulators.
    """

    def __init__(self, kernel: Kernel, tiling: Quads, masked: bool, finish: Finish) -> None:
        self.kernel = padded(kernel)
        self.tiling, self.machine, self.masked, self.finish = (
            tiling, tiling.machine, masked, finish,
        )  # fmt: skip
        spec = self.spec = self.kernel.spec
        self.halves = spec.weight_order == "halves"
        self.data = Data(kernel, self.kernel, self.halves, masked)
        words = self.kernel.group_words
        apart = spec.dilations[1] > 1 or self.halves
        self.runs = spec.kernel[1] if apart else 1
        self.full, self.tail = divmod(words * (1 if apart else spec.kernel[1]), 4)
        if self.halves:
            self.full, self.tail = 1, 0
        self.per_run = self.full + (self.tail > 0)
        # What a tap outside the image counts if padding is 0; halves are `Kernel.share`'s.
        channels = self.kernel.group_channels
        self.share = channels if masked else 0 if channels % 2 else channels // 2
        self.quads = layout.blocks(spec.out_channels, QUAD)
        # Rows of a kernel that are too many for bytes are widened one by one.
        self.rows_apart = self.runs * spec.kernel[0] > MAX_STEPS
        rows = self.runs * (1 if self.rows_apart else spec.kernel[0])
        self.phases = self._phases(rows)
        steps = rows * self.per_run
        single = len(self.phases) == 1 and self.phases[0].times == 1
        single = single and not self.rows_apart and not masked
        self.steps = steps if single else 0

    def _phases(self, rows: int) -> list[_Phase]:
        most = max(1, MAX_STEPS // rows)
        if self.machine.dot or self.per_run <= most:
            return [_Phase(1, 0, self.full, self.tail > 0)]
        size = next((s for s in range(most, most // 2, -1) if self.full % s == 0), most)
        times, rest = divmod(self.full, size)
        phases = [_Phase(times, 0, size, False)]
        if rest or self.tail:
            phases.append(_Phase(1, times * size, rest, self.tail > 0))
        return phases

    def write(self) -> None:
        """Write everything."""
        self.data.write()
        self._weights()
        self.border = Border(self) if self._outside() else None
        spec, kernel = self.spec, self.kernel
        full, rest = divmod(spec.out_channels, LANES)
        for first, count, quads in (
            (0, full, LANES // QUAD),
            (full, 1 if rest else 0, -(-rest // QUAD)),
        ):
            if not count:
                continue
            if self.tiling.parallel:
                rows = kernel.n * kernel.height
                with T.parallel(0, rows * count) as turn:
                    block = turn // rows + first if count > 1 else T.int32(first)
                    row = turn % rows
                    self._row(row // kernel.height, row % kernel.height, block, quads)
                continue
            with T.serial(0, count) as turn, T.grid(kernel.n, kernel.height) as (n, h):
                self._row(n, h, turn + first if count > 1 else T.int32(first), quads)

    def _outside(self) -> bool:
        if self.spec.mode == "and":
            return True
        return self.kernel.pads_zeros and any(self.kernel.leaves(1, self.kernel.whole))

    def _weights(self) -> None:
        """Look at the weights as bytes; with `halves`, copy them into both halves of a vector."""
        stored = self.kernel.weight
        size = int(stored.shape[0])
        if not self.halves:
            self.weight = T.decl_buffer((size * 4,), "uint8", data=stored.data)
            return
        taps = T.decl_buffer((size // 2,), "uint64", data=stored.data)
        made = T.sblock_alloc_buffer((size // 2 * 2,), "uint64")
        IRBuilder.name("twice", made)
        with T.sblock("twice"):
            T.reads(whole(stored))
            T.writes(whole(made))
            with T.serial(0, size // 2) as i:
                T.buffer_store(made, T.Broadcast(taps[i], 2), [T.Ramp(i * 2, 1, 2)])
        self.weight = T.decl_buffer((size * 8,), "uint8", data=made.data)

    def load_weight(self, quad: Expr, kh: Expr, run: Expr, vector: Expr, channel: int) -> Expr:
        """Return one vector of weights."""
        number = (quad * self.spec.kernel[0] + kh) * (self.runs * self.per_run)
        number = (number + run * self.per_run + vector) * QUAD + channel
        return self.weight[T.Ramp(number * BYTES, 1, BYTES)]

    def _row(self, n: Expr, h: Expr, block: Expr, quads: int) -> None:
        """Write one row: code of its own where all rows of the kernel are inside the image."""
        inner = self._inner_rows()
        if len(inner) == self.kernel.height:
            self._tiles(n, h, block, quads, True)
        elif not inner:
            self._tiles(n, h, block, quads, False)
        else:
            with T.If(T.And(h >= inner[0], h <= inner[-1])):
                with T.Then():
                    self._tiles(n, h, block, quads, True)
                with T.Else():
                    self._tiles(n, h, block, quads, False)

    def _inner_rows(self) -> range:
        spec, kernel = self.spec, self.kernel
        if spec.rank == 2:
            return range(kernel.height)
        rows = [
            h
            for h in range(kernel.height)
            if kernel.position(0, h, 0) >= 0
            and kernel.position(0, h, spec.kernel[0] - 1) < spec.height
        ]
        return range(rows[0], rows[-1] + 1) if rows else range(0)

    def _tiles(self, n: Expr, h: Expr, block: Expr, quads: int, inner: bool) -> None:
        rows = Rows(T.int32(0), T.int32(self.spec.kernel[0]), True)
        if not inner:
            rows = Rows(*self._rows(h), False)
        start = 0
        for extent, columns in self.tiling.columns:
            piece = Piece(start, extent, 0, 1, LANES)
            with T.serial(0, extent // columns) as w:
                column = w * columns + start if extent > columns else T.int32(start)
                self._tile(piece, (n, h, column, block), columns, quads, rows)
            start += extent

    def _rows(self, h: Expr) -> tuple[Expr, Expr]:
        """Return the first kernel row inside the image and the one after the last."""
        spec = self.spec
        step, size = spec.dilations[0], spec.kernel[0]
        first = h * spec.strides[0] - spec.pads[0]
        # A row of outputs may lie so far outside that even the last of its taps does.
        low = T.Bind(T.min(T.max(step - 1 - first, 0) // step, size))
        return low, T.Bind(T.min(T.max(spec.height - first + step - 1, 0) // step, size))

    def _tile(
        self, piece: Piece, at: tuple[Expr, Expr, Expr, Expr], columns: int, quads: int,
        rows: Rows,
    ) -> None:  # fmt: skip
        """Write one tile of columns x `LANES` channels: its counts, then its epilogue."""
        n, h, column, block = at
        vectors = -(-columns // 2) if self.halves else columns
        stride = vectors * (2 if self.halves else 1) * LANES
        with T.sblock("tile"):
            T.reads(whole(self.weight), whole(self.data.bytes))
            T.writes()
            counts = T.sblock_alloc_buffer((stride,), "uint32")
            IRBuilder.name("counts", counts)
            with T.serial(0, quads) as part:
                quad = T.Bind(block * (LANES // QUAD) + part)
                self._quad((n, h, column), quad, rows, counts, part, vectors)
            if quads * QUAD < LANES:
                rest = LANES - quads * QUAD
                for i in range(columns):
                    zero = T.Broadcast(T.uint32(0), rest)
                    place = T.Ramp(i * LANES + quads * QUAD, 1, rest)
                    T.buffer_store(counts, zero, [place])
            for c in range(columns):
                self._end(piece, (n, h, column + c, block), counts, c, columns, rows)

    def _quad(
        self, at: tuple[Expr, Expr, Expr], quad: Expr, rows: Rows, counts: Buffer, part: Expr,
        vectors: int,
    ) -> None:  # fmt: skip
        n, h, column = at
        with T.sblock("quad"):
            T.reads(whole(self.weight), whole(self.data.bytes))
            T.writes(whole(counts))
            sums = Sums.make(self.machine, vectors, self.steps, self.halves)
            group = T.int32(0)
            if self.spec.groups > 1:
                group = quad * QUAD // (self.spec.out_channels // self.spec.groups)

            def base(plane: Expr, kh: Expr) -> Expr:
                return T.Bind(self.data.place(plane, n, group, h, kh, column))

            def phases(plane: Expr, first: Expr, end: Expr) -> None:
                for phase in self.phases:
                    with T.serial(0, phase.times) as turn:
                        if rows.inner and not self.rows_apart and self._short(phase):
                            for kh in range(self.spec.kernel[0]):
                                line = base(plane, T.int32(kh))
                                self._kernel_row(sums, phase, turn, line, quad, kh, kh == 0)
                        else:
                            sums.clear()
                            with T.serial(first, end) as kh:
                                self._kernel_row(sums, phase, turn, base(plane, kh), quad, kh)
                        sums.widen()

            sums.start()
            with T.serial(0, 1 + self.masked) as plane:
                if self.rows_apart and not self.machine.dot:
                    with T.serial(rows.low, rows.high) as kh:
                        phases(plane, kh, kh + 1)
                else:
                    phases(plane, rows.low, rows.high)
            for v in range(vectors):
                for side, total in enumerate(sums.totals(v)):
                    c = v * 2 + side if self.halves else v
                    place = T.Ramp(part * QUAD + c * LANES, 1, QUAD)
                    T.buffer_store(counts, total, [place])

    def _short(self, phase: _Phase) -> bool:
        """Whether the counts of `phase` are code without loops."""
        vectors = phase.times * phase.vectors + phase.tail
        few = vectors * self.runs * self.spec.kernel[0] <= ALL_UNROLLED
        return self.tiling.flat and few and (self.steps > 0 or not self.machine.dot)

    def _kernel_row(
        self, sums: Sums, phase: _Phase, turn: Expr, base: Expr, quad: Expr, kh: Expr,
        first: bool = False,
    ) -> None:  # fmt: skip
        """Write the products of one kernel row (and phase); the `first` ones start the sums."""
        unroll = max(u for u in range(1, self.tiling.unroll + 1) if phase.vectors % u == 0)
        if first:
            unroll = max(1, phase.vectors)
        done = not first

        def products(run: Expr, vector: Expr, cut: bool) -> None:
            nonlocal done
            weights = [T.Bind(self.load_weight(quad, kh, run, vector, i)) for i in range(QUAD)]
            for v in range(sums.vectors):
                place = base + self.data.offset(v, run) + vector * BYTES
                data = self.data.bytes[T.Ramp(place, 1, BYTES)]
                if cut:
                    data = data & mask(0, self.tail * 4)
                sums.add(v, T.Bind(data), weights, not done)
            done = True

        def run_of(run: Expr) -> None:
            if phase.vectors:
                with T.serial(0, phase.vectors // unroll) as step:
                    for u in range(unroll):
                        vector = turn * phase.vectors + (phase.first + u) + step * unroll
                        products(run, vector, False)
            if phase.tail:
                products(run, T.int32(self.full), True)

        if self.halves or (first and self.runs > 1):
            for run in range(self.runs):
                run_of(run)
        elif self.runs > 1:
            with T.serial(0, self.runs) as run:
                run_of(run)
        else:
            run_of(T.int32(0))

    def _end(
        self, piece: Piece, at: tuple[Expr, Expr, Expr, Expr], counts: Buffer, number: int,
        columns: int, rows: Rows,
    ) -> None:  # fmt: skip
        """Write the epilogue of one column of a tile."""
        n, h, column, block = at
        spec, kernel = self.spec, self.kernel
        raw = T.reinterpret(I32, counts[T.Ramp(number * LANES, 1, LANES)])
        fixed = piece.columns == columns
        place = piece.column + number if fixed else piece.column
        outside = self.border.columns(place) if self.border is not None else None
        if self.border is not None and outside is not None:
            raw = raw - self.border.value(outside, block, rows)
        if not rows.inner:
            skipped = T.int32(spec.kernel[0]) - (rows.high - rows.low)
            raw = raw + T.Broadcast(skipped * (spec.kernel[1] * self.share), LANES)
        known = getattr(T.int32(0) + block, "value", None)
        lanes = LANES if known is None else min(LANES, spec.out_channels - int(known) * LANES)
        where = kernel.place(n, h, column, block, lanes)
        self.finish(piece, where, T.Bind(raw))
