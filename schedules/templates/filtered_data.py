"""Transformed data of a filtered convolution.

Lanes are channels if the data are NHWC with at least `MIN_CHANNELS` of them. Otherwise lanes are
tiles: the transforms of a row, side by side. For that, columns are first deinterleaved by their
offset from the start of a tile (`_Planar`), so that all loads are contiguous.

If only rows are filtered, each image row is transformed once and kept in a ring buffer until no
kernel row needs it. If both directions are filtered, the rows of a strip are transformed
vertically, then horizontally. Part of the template `filtered_conv2d`; the definition is
`definitions.conv2d`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import groupby
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import rounded_to_bfloat16
from bnncc.schedules.templates.kernel import (
    Expr,
    bind,
    const,
    f32,
    first_lanes,
    load,
    loop,
    splat,
    store,
)
from bnncc.schedules.templates.line_buffer import Strip, keep, ring_size, within_height
from bnncc.schedules.templates.transforms import combine, deinterleave
from bnncc.topi_binary import filtering
from bnncc.topi_binary.definitions.terms import bfloat16, to_bfloat16
from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.spec import Conv2d

MIN_CHANNELS = 8
"""With fewer channels, too many lanes of a vector would be empty."""


def make(spec: Conv2d, data: Any, rows: int) -> Filtered:
    """Allocate scratch memory for strips of `rows` rows (of tiles) of `spec`."""
    lanes_are_channels = spec.data_layout == "NHWC" and spec.channels >= MIN_CHANNELS
    return (_Channels if lanes_are_channels else _Planar)(spec, data, rows)


class Filtered(ABC):
    """Transformed data of one strip.

    Parameters
    ----------
    spec : Conv2d
        Spec of the convolution.
    data : Buffer
        Its input.
    rows : int
        Output rows, or rows of tiles, per strip.

    Attributes
    ----------
    tiles : int
        Transforms per row.
    """

    def __init__(self, spec: Conv2d, data: Any, rows: int) -> None:
        self.spec, self.data, self.rows = spec, data, rows
        self.vertical, self.axis = filtering.axes(spec)
        self.tiles = -(-spec.unpooled.output_hw[1] // self.axis.outputs)
        if self.vertical is None:
            self.slots = ring_size(spec.kernel[0] + (rows - 1) * spec.strides[0])
            outer = [self.slots, self.axis.points, len(self.axis.parts)]
        else:
            parts = len(self.vertical.parts) * len(self.axis.parts)
            outer = [rows, self.axis.points, self.vertical.points, parts]
            last = max(part[0] for part in self.vertical.parts)
            # Image rows under one row of tiles.
            self.reach = last + (self.vertical.points - 1) * self.vertical.stride + 1
        self.made = T.sblock_alloc_buffer((*outer, *self._plane()), "float32")
        self._scratch()

    def slot(self, row: Expr) -> Expr:
        """Return the position of an image row in the ring buffer."""
        return bind(T.bitwise_and(row, const(self.slots - 1)))

    def begin(self) -> None:
        """Write the code before the first strip."""
        keep(self.made)

    def fill(self, strip: Strip) -> None:
        """Transform the data that `strip` needs and earlier strips have not transformed."""
        spec = self.spec
        top = strip.row * spec.strides[0] - spec.pads[0]
        if self.vertical is not None:
            height = self.vertical.outputs
            with loop((strip.rows + (height - 1)) // height) as turn:
                first = T.And(turn == 0, strip.row == strip.first)
                step = height * spec.strides[0]
                self._both_ways(strip.n, turn, bind(top + turn * step), first)
            return
        old = top + (spec.kernel[0] - spec.strides[0])
        new = top + (strip.rows - 1) * spec.strides[0] + spec.kernel[0]
        low = within_height(spec, T.Select(strip.row == strip.first, top, old))
        with loop(bind(within_height(spec, new) - low)) as number:
            row = bind(low + number)
            self._along_rows(strip.n, row, self.slot(row))

    def _pixel(self, n: Expr, y: Expr, x: Expr, channel: Expr) -> list[Expr]:
        return [n, channel, y, x] if self.spec.data_layout == "NCHW" else [n, y, x, channel]

    def _datum(self, where: list[Expr], valid: int) -> Expr:
        """Return a vector of data with `valid` existing lanes, rounded as they are multiplied."""
        loaded = load(self.data, where, valid)
        return loaded if self.spec.operands == "float32" else rounded_to_bfloat16(loaded)

    @abstractmethod
    def at(self, place: tuple[Any, ...], tile: Expr, channel: Expr) -> Expr:
        """Return a transformed element; `place` is the index before that within a plane."""

    @abstractmethod
    def _plane(self) -> tuple[int, int]: ...

    @abstractmethod
    def _scratch(self) -> None: ...

    @abstractmethod
    def _along_rows(self, n: Expr, row: Expr, slot: Expr) -> None: ...

    @abstractmethod
    def _both_ways(self, n: Expr, turn: Expr, top: Expr, first: Expr) -> None:
        """Transform image rows from `top` on, for the first strip of this thread or a later one."""


class _Channels(Filtered):
    """Transformed data whose lanes are channels."""

    def _plane(self) -> tuple[int, int]:
        return self.tiles, blocks(self.spec.channels) * LANES

    def at(self, place: tuple[Any, ...], tile: Expr, channel: Expr) -> Expr:
        return self.made[tuple([*place, tile, channel])]

    def _scratch(self) -> None:
        if self.vertical is not None:
            parts, points = len(self.vertical.parts), self.vertical.points
            shape = (parts, points, self.spec.width, self._plane()[1])
            self.columns = T.sblock_alloc_buffer(shape, "float32")

    def _along_rows(self, n: Expr, row: Expr, slot: Expr) -> None:
        for count, first, valid in self._vectors():
            with loop(count) as number:
                channel = bind((number + first) * LANES)
                self._across(
                    channel,
                    lambda x, c=channel, v=valid: self._datum([n, row, x, c], v),
                    lambda q, part: [slot, q, part],
                )

    def _both_ways(self, n: Expr, turn: Expr, top: Expr, first: Expr) -> None:
        assert self.vertical is not None
        spec, vertical = self.spec, self.vertical
        for count, start, valid in self._vectors():
            with loop(count) as number:
                channel = bind((number + start) * LANES)
                with loop(spec.width) as x:
                    for i, taps in enumerate(vertical.parts):
                        values = []
                        for k in range(vertical.points):
                            y = bind(top + (taps[0] + k * vertical.stride))
                            inside = bind(T.min(T.max(y, const(0)), const(spec.height - 1)))
                            value = self._datum([n, inside, x, channel], valid)
                            values.append(T.Select(splat(y == inside), value, f32(0.0)))
                        for p, value in enumerate(combine(vertical.transform.forward, values)):
                            store(self.columns, [i, p, x, channel], value)
                for i in range(len(vertical.parts)):
                    with loop(vertical.points) as p:
                        first_part = i * len(self.axis.parts)
                        self._across(
                            channel,
                            lambda x, c=channel, i=i, p=p: load(self.columns, [i, p, x, c]),
                            lambda q, part, p=p, f=first_part: [turn, q, p, f + part],
                        )

    def _vectors(self) -> list[tuple[int, int, int]]:
        """Return ranges of channel vectors: count, first vector, valid lanes."""
        full, tail = divmod(self.spec.channels, LANES)
        return [(full, 0, LANES)] * bool(full) + [(1, full, tail)] * bool(tail)

    def _across(self, channel: Expr, source: Any, place: Any) -> None:
        """Transform a row of vectors: `source` loads column x, `place` locates the results."""
        axis, width = self.axis, self.spec.width

        def columns(tile: int) -> list[list[int]]:
            start = tile * axis.step - self.spec.pads[1]
            return [
                [start + p[0] + i * axis.stride for i in range(axis.points)] for p in axis.parts
            ]

        def inside(tile: int) -> int:
            """Return -1 for a tile with all columns inside the image: such tiles are alike."""
            return -1 if all(0 <= x < width for p in columns(tile) for x in p) else tile

        for kind, group in groupby(range(self.tiles), inside):
            first, *rest = group
            with loop(1 + len(rest)) as number:
                tile = bind(number + first)
                shift = number * axis.step
                for part, places in enumerate(columns(first)):
                    values = [
                        source(x + shift) if kind < 0 or 0 <= x < width else f32(0.0)
                        for x in places
                    ]
                    for q, value in enumerate(combine(axis.transform.forward, values)):
                        store(self.made, [*place(q, part), tile, channel], value)


class _Planar(Filtered):
    """Transformed data whose lanes are tiles."""

    def _plane(self) -> tuple[int, int]:
        return self.spec.channels, blocks(self.tiles) * LANES

    def at(self, place: tuple[Any, ...], tile: Expr, channel: Expr) -> Expr:
        return self.made[tuple([*place, channel, tile])]

    def _scratch(self) -> None:
        axis = self.axis
        ends = [
            (part[0] + i * axis.stride - self.spec.pads[1]) // axis.step
            for part in axis.parts for i in range(axis.points)
        ]  # fmt: skip
        # Column x is stored in row x % step, at position x // step - low.
        self.low = min(ends)
        self.columns_read = min(self.spec.width, (self.tiles + max(ends)) * axis.step)
        self.used = self.tiles + max(ends) - self.low
        stored = blocks(-(-self.columns_read // axis.step)) * LANES - self.low
        # Vectors of tiles are always loaded whole.
        self.places = blocks(max(self._plane()[1] + max(ends) - self.low, stored)) * LANES
        rows = 1 if self.vertical is None else ring_size(self.reach)
        shape = (self.spec.channels, rows, axis.step, self.places)
        self.apart = T.sblock_alloc_buffer(shape, "float32")
        if self.vertical is not None:
            parts, points = len(self.vertical.parts), self.vertical.points
            shape = (self.spec.channels, parts * points, axis.step, self.places)
            self.columns = T.sblock_alloc_buffer(shape, "float32")

    def begin(self) -> None:
        """Set everything outside the image to 0, once."""
        super().begin()
        self._clear([const(0)] * 4, self.apart.shape)

    def _clear(self, start: list[Expr], extents: Any) -> None:
        channels, rows, steps, places = extents
        with loop(channels) as c, loop(rows) as y, loop(steps) as r, loop(places) as x:
            where = [a + b for a, b in zip(start, (c, y, r, x), strict=True)]
            T.buffer_store(self.apart, T.float32(0), where)

    def _separate(self, n: Expr, y: Expr, channel: Expr, to: Expr) -> None:
        """Deinterleave the columns of one row."""
        step, columns = self.axis.step, self.columns_read
        if self.spec.data_layout == "NCHW" and step & (step - 1) == 0:
            self._separate_vectors(n, y, channel, to)
            return
        whole, rest = divmod(columns, step)
        for count, first, residues in ((whole, 0, step), (1, whole, rest)):
            if count and residues:
                with loop(count) as number:
                    tile = number + first
                    for r in range(residues):
                        value = self.data[tuple(self._pixel(n, y, tile * step + r, channel))]
                        if self.spec.operands != "float32":
                            value = bfloat16(to_bfloat16(value))
                        T.buffer_store(self.apart, value, [channel, to, r, tile - self.low])

    def _separate_vectors(self, n: Expr, y: Expr, channel: Expr, to: Expr) -> None:
        """Deinterleave columns that are contiguous in memory, a vector of tiles at a time."""
        step = self.axis.step
        whole, rest = divmod(self.columns_read, step * LANES)
        for count, first, size in ((whole, 0, step * LANES), (1, whole, rest)):
            if not (count and size):
                continue
            with loop(count) as number:
                turn = number + first
                vectors = []
                for i in range(step):
                    valid = min(LANES, size - i * LANES)
                    value = f32(0.0)
                    if valid > 0:
                        column = (turn * step + i) * LANES
                        value = self._datum(self._pixel(n, y, column, channel), valid)
                    if 0 < valid < LANES:  # the other lanes may have been loaded too
                        value = T.Select(first_lanes(valid), value, f32(0.0))
                    vectors.append(value)
                for r, value in enumerate(deinterleave(vectors)):
                    place = turn * LANES - self.low
                    store(self.apart, [channel, to, r, place], value)

    def _along_rows(self, n: Expr, row: Expr, slot: Expr) -> None:
        with loop(self.spec.channels) as channel:
            self._separate(n, row, channel, const(0))
        with loop(self.spec.channels) as channel:
            self._across(channel, self.apart, const(0), lambda q, part: [slot, q, part])

    def _both_ways(self, n: Expr, turn: Expr, top: Expr, first: Expr) -> None:
        assert self.vertical is not None
        spec, vertical = self.spec, self.vertical
        channels, slots, steps, places = self.apart.shape
        height = vertical.step
        # Image rows above the last `height` are already there, from the previous row of tiles.
        fresh = bind(T.Select(first, const(self.reach), const(min(height, self.reach))))
        with loop(channels) as channel:
            with loop(fresh) as number:
                y = bind(top + (self.reach - fresh) + number)
                slot = bind(T.bitwise_and(y, slots - 1))
                with T.If(T.And(y >= 0, y < spec.height)):
                    with T.Then():
                        self._separate(n, y, channel, slot)
                    with T.Else():
                        self._clear([channel, slot, const(0), const(0)], [1, 1, steps, places])
            with loop(steps) as r, loop(blocks(self.used)) as vector:
                last = vector * LANES
                for i, taps in enumerate(vertical.parts):
                    rows = [taps[0] + k * vertical.stride for k in range(vertical.points)]
                    slot_of = [T.bitwise_and(top + y, slots - 1) for y in rows]
                    values = [load(self.apart, [channel, slot, r, last]) for slot in slot_of]
                    for p, value in enumerate(combine(vertical.transform.forward, values)):
                        store(self.columns, [channel, i * vertical.points + p, r, last], value)
            for i in range(len(vertical.parts)):
                with loop(vertical.points) as p:
                    before = i * len(self.axis.parts)
                    self._across(
                        channel, self.columns, p + i * vertical.points,
                        lambda q, part, p=p, b=before: [turn, q, p, b + part],
                    )  # fmt: skip

    def _across(self, channel: Expr, source: Any, row: Expr, place: Any) -> None:
        axis = self.axis
        with loop(self._plane()[1] // LANES) as vector:
            for part, taps in enumerate(axis.parts):
                values = []
                for i in range(axis.points):
                    distance = taps[0] + i * axis.stride - self.spec.pads[1]
                    tile, residue = distance // axis.step - self.low, distance % axis.step
                    values.append(load(source, [channel, row, residue, vector * LANES + tile]))
                for q, value in enumerate(combine(axis.transform.forward, values)):
                    store(self.made, [*place(q, part), channel, vector * LANES], value)
