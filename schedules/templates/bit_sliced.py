"""Grouped binary convolutions in bit slices: each lane is a single bit.

`sliced_data` defines the storage of the operands. Rows of data are copied to a ring buffer, with
padding around them, once per rotation within groups, and with the columns of each stride phase
contiguous. So each tap is a load of contiguous words, across pixels if those are shorter than a
vector. Differing bits are counted by carry-save adders built from logic operations: three bits of
equal weight become one bit of that weight and a carry of the next. The sum consists of bit planes
too. These are compared with thresholds in bit slices, 32 channels per word; for other epilogues,
the planes of a row are converted to numbers afterwards, `LANES` channels at once. Ring buffer and
adders cannot be derived from `definitions.binary_conv2d`, against which the kernels are tested.

Zero planes are rotated and padded like data, and are always counted: a differing bit that is not
zero counts two, a zero counts one.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.templates.bit_sliced_rows import ONES, Cut, Ring, get, put, splat_word
from bnncc.schedules.templates.carry_save_adders import CarrySaveTree, Logic
from bnncc.schedules.templates.epilogue import emit, views
from bnncc.schedules.templates.kernel import Expr, bind, const, flat, lanes_of, load, loop, loops
from bnncc.topi_binary import sliced_data
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import BinaryConv2d

Buffer = Any

MAX_UNROLLED = 160
"""Maximum number of products without a loop; kernels with more have a loop over their rows."""


@dataclass(frozen=True)
class Tile:
    """Parameters of the kernel.

    Attributes
    ----------
    lanes : int, default 4
        Maximum number of words per vector.
    bands : int, default 1
        Parts of an image divided among threads, each with a ring buffer of its own.
    parallel : bool, default False
        Whether there are several threads.
    ternlog : bool, default False
        Whether the target has AVX-512's ternary logic.
    """

    lanes: int = 4
    bands: int = 1
    parallel: bool = False
    ternlog: bool = False


def conv2d(spec: BinaryConv2d, tile: Tile | None = None) -> tirx.PrimFunc:
    """Write a grouped convolution whose weights are in the order ``sliced``.

    Parameters
    ----------
    spec : BinaryConv2d
        Spec of the kernel.
    tile : Tile, optional
        Its parameters.

    Returns
    -------
    tirx.PrimFunc
        The kernel; it needs no schedule.
    """
    with Operator(spec) as kernel:
        _Conv(kernel, spec, tile or Tile()).write()
    return kernel.func


class _Conv:
    """Writes a convolution into an open kernel."""

    def __init__(self, kernel: Operator, spec: BinaryConv2d, tile: Tile) -> None:
        self.kernel, self.spec, self.tile = kernel, spec, tile
        inputs = list(kernel.inputs)
        self.data = [inputs.pop(0) for _ in range(1 + spec.ternary)]
        self.weight, self.params = inputs.pop(0), inputs
        self.results = [flat(output) for output in kernel.outputs]
        self.cut = Cut(spec, tile.lanes)
        self.lanes, self.words, self.across = self.cut.lanes, self.cut.words, self.cut.across
        self.classes = sliced_data.classes(spec)
        self.compared = sliced_data.compared(spec)
        self.logic = Logic(self.lanes, tile.ternlog)

    # ---- loops ------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the tables, and the loops over images and rows."""
        self._tables()
        cut, stride = self.cut, self.spec.strides[0]
        bands = min(self.tile.bands, cut.height) if self.tile.parallel else 1
        size = -(-cut.height // bands)
        extents = [self.kernel.n, -(-cut.height // size)]
        outside = ONES if self.spec.pad_value == 1 else 0
        with loops(extents, parallel=self.tile.parallel) as (n, band):
            rings = [
                Ring(cut, self.logic, data, fill, self._mask)
                for data, fill in zip(self.data, (outside, 0), strict=False)
            ]
            top = bind(band * size)
            for ring in rings if cut.reach > cut.fresh else ():
                with loop(cut.reach - cut.fresh) as turn:
                    ring.fill(n, bind(top * stride + turn))
            with loop(size) as turn, ExitStack() as stack:
                row = bind(top + turn)
                if cut.height % size:
                    stack.enter_context(T.If(row < cut.height))
                    stack.enter_context(T.Then())
                for ring in rings:
                    with loop(cut.fresh) as late:
                        ring.fill(n, bind(row * stride + (cut.reach - cut.fresh) + late))
                self._row(rings, n, row)

    def _mask(self, number: int, word: Expr) -> Expr:
        """Return a vector from a row of masks."""
        row = sliced_data.rows(self.spec) + number
        return get(self.rows, [word + row * self.pitch], self.lanes)

    # ---- tables, where vectors reach across pixels ------------------------------------------

    def _tables(self) -> None:
        """Repeat per-channel data, so that vectors may start at any word of a pixel."""
        self.rows, self.pitch = self.weight, self.words
        self.limits = list(self.params) if self.compared else []
        if not self.across:
            return
        self.pitch = self.words + self.lanes
        count = sliced_data.rows(self.spec) + sliced_data.masks(self.spec)
        self.rows = T.sblock_alloc_buffer([count * self.pitch], "uint32")
        with loop(count) as row, loop(self.pitch) as place:
            word = self.weight[row * self.words + place % self.words]
            T.buffer_store(self.rows, word, [row * self.pitch + place])
        self.limits = [self._of_columns(limit) for limit in self.limits]

    def _of_columns(self, limit: Buffer) -> Buffer:
        """Arrange thresholds as [border class of the row, plane, word within a row]."""
        high, wide = self.classes
        planes = sliced_data.planes(self.spec)
        table = T.sblock_alloc_buffer([len(high), planes, self.cut.run + self.lanes], "uint32")
        wheel = T.sblock_alloc_buffer([self.pitch], "uint32")
        with loop(len(high)) as above, loop(planes) as plane:
            for number, (first, end) in enumerate(
                zip(wide, [*wide[1:], self.cut.width], strict=True)
            ):
                with loop(self.pitch) as place:
                    word = limit[above * len(wide) + number, plane, place % self.words]
                    T.buffer_store(wheel, word, [place])
                # Words written past the end are overwritten by the next class.
                with loop(-(-(end - first) * self.words // self.lanes)) as turn:
                    begin = turn * self.lanes % self.words
                    to = turn * self.lanes + first * self.words
                    put(table, [above, plane, to], get(wheel, [begin], self.lanes), self.lanes)
        return table

    # ---- sums -------------------------------------------------------------------------------

    def _row(self, rings: list[Ring], n: Expr, row: Expr) -> None:
        spec = self.spec
        starts = [
            rings[0].slot(bind(row * spec.strides[0] + k * spec.dilations[0]))
            for k in range(spec.kernel[0])
        ]
        above = self._class(0, row)
        counts: list[Buffer] = []
        planes = sliced_data.planes(spec)
        if not self.compared:
            counts.append(
                T.sblock_alloc_buffer([planes, 2 * (self.cut.run + self.lanes)], "uint16")
            )
            whole = T.decl_buffer(
                [planes, self.cut.run + self.lanes], "uint32", data=counts[0].data
            )
        line = bind((n * self.cut.height + row) * self.cut.run)

        def write(place: Expr, pixel: Expr, word: Expr) -> None:
            sums = self._sums(rings, starts, row, place, word)
            if not self.compared:
                zero = splat_word(0, self.lanes)
                for number in range(planes):
                    one = sums[number] if number < len(sums) else zero
                    put(whole, [number, place], one, self.lanes)
                return
            below = self._below(sums, above, place, pixel, word)
            outputs = iter(self.results)
            for one in spec.steps:
                reached = next(below)
                to = [bind(line + place)]
                put(next(outputs), to, reached, self.lanes)
                if one.zero:
                    less = next(below)
                    both = reached & T.bitwise_not(less)
                    put(next(outputs), to, both, self.lanes)

        self.cut.vectors(self.cut.width, write)
        if not self.compared:
            self._finish(counts[0], n, row, above)

    def _class(self, axis: int, place: Expr) -> Expr:
        number: Expr = const(0)
        for first in self.classes[axis][1:]:
            number = number + T.Cast("int64", place >= first)
        return bind(number)

    def _below(self, sums: list[Expr], above: Expr, place: Expr, pixel: Expr, word: Expr) -> Any:
        """Yield, for each vector of thresholds, the bits of the sums that are below them."""
        left = None if self.across else self._class(1, pixel)
        for limit in self.limits:
            less: Expr | None = None
            for plane in range(sliced_data.planes(self.spec)):
                if left is None:
                    bits = get(limit, [above, plane, place], self.lanes)
                else:
                    number = bind(above * len(self.classes[1]) + left)
                    bits = get(limit, [number, plane, word], self.lanes)
                bits = T.Bind(bits)
                less = T.Bind(
                    self.logic.less(sums[plane] if plane < len(sums) else None, bits, less)
                )
            yield less

    def _sums(
        self, rings: list[Ring], starts: list[Expr], row: Expr, place: Expr, word: Expr
    ) -> list[Expr]:
        """Return the bit planes of the count, least significant first."""
        spec = self.spec
        tall, wide = spec.kernel

        def products(tree: CarrySaveTree, start: Expr, first: Expr) -> None:
            """Add the products of one kernel row."""
            begin = bind(start + place)
            for k in range(wide):
                for turn in range(self.cut.turns):
                    at = first + (k * self.cut.turns + turn) * self.pitch
                    weight = get(self.rows, [at], self.lanes)
                    differ = T.bitwise_xor(rings[0].load(begin, k, turn), weight)
                    if spec.ternary:
                        zero = T.Bind(rings[1].load(begin, k, turn))
                        tree.add(1, differ & T.bitwise_not(zero))
                        tree.add(0, zero)
                    else:
                        tree.add(0, differ)

        per_row, count = wide * self.cut.turns * self.pitch, sliced_data.planes(spec)
        if sliced_data.rows(spec) * (1 + spec.ternary) <= MAX_UNROLLED:
            tree = CarrySaveTree(self.logic, count)
            for k in range(tall):
                products(tree, starts[k], word + k * per_row)
            return tree.total()
        state = T.sblock_alloc_buffer([count, self.lanes], "uint32")
        for plane in range(count):
            put(state, [plane, 0], splat_word(0, self.lanes), self.lanes)
        with loop(tall) as turn:
            tree = CarrySaveTree(self.logic, count)
            for plane in range(count):
                tree.add(plane, T.Bind(get(state, [plane, 0], self.lanes)))
            start = rings[0].slot(bind(row * spec.strides[0] + turn * spec.dilations[0]))
            products(tree, start, bind(word + turn * per_row))
            for plane, value in enumerate(tree.total()):
                put(state, [plane, 0], value, self.lanes)
        return [T.Bind(get(state, [plane, 0], self.lanes)) for plane in range(count)]

    # ---- numbers ----------------------------------------------------------------------------

    def _finish(self, counts: Buffer, n: Expr, row: Expr, above: Expr) -> None:
        """Convert the planes of a row to numbers, `LANES` channels of a pixel at a time."""
        spec = self.spec
        outputs = views(spec.steps, self.kernel.outputs, spec.channels)
        full, tail = divmod(spec.channels, LANES)
        offset = (sliced_data.rows(spec) + sliced_data.masks(spec)) * self.words
        with loop(self.cut.width) as column:
            left = self._class(1, column)
            for count, first, valid in ((full, 0, LANES), (1, full, tail)):
                if not count or not valid:
                    continue
                with loop(count) as turn:
                    block = bind(turn + first)
                    acc: Expr = tirx.Broadcast(tirx.IntImm("int32", 0), LANES)
                    half = bind(column * (2 * self.words) + block)
                    for plane in range(sliced_data.planes(spec)):
                        one = sliced_data.step(spec) << plane
                        ones = lanes_of(counts[plane, half])
                        acc = acc + T.Select(ones, _whole(one), _whole(0))
                    if sliced_data.has_offsets(spec):
                        number = above * len(self.classes[1]) + left
                        where = (number * blocks(spec.channels) + block) * LANES + offset
                        acc = acc + T.Cast(f"int32x{LANES}", load(self.weight, [bind(where)]))
                    at = Place(n, row, column, block, spec.channels, valid)
                    emit(spec.steps, None, self.params, outputs, at, acc=T.Bind(acc))


def _whole(value: int) -> Expr:
    return tirx.Broadcast(tirx.IntImm("int32", value), LANES)
