"""Convolution and dense layers on bits: what is computed, in named blocks, not yet scheduled.

Lanes are output channels: the accumulators of `layout.LANES` channels of one pixel are one vector,
and each data word is compared with one vector of weight words. The definition can be written in
several *pieces* (ranges of columns and of channel blocks) of the same sum, so that a schedule can
treat borders and tails apart from the rest. Piece ``i`` has the blocks ``acc_i`` (accumulators) and
``out_i`` (epilogue).

Padding costs nothing where it is 0: taps outside the image are skipped, and the accumulator starts
at their share, ``channels_per_group / 2`` each, which is what makes ``dot = K - 2 * acc`` hold. If
that share has a half (`BinaryConv2d.doubled`), it is added when the accumulator is read, twice as
large. Padding with +1 or -1 puts the words of such a pixel in the place of the data.

Mode ``and`` is reduced to XOR: for data d in {0, 1} and weight bits w, ``popcount(d) - 2 *
popcount(d & w) = popcount(d ^ w) - popcount(w)``, so the accumulator starts at minus the bits in all
weights, and a pixel outside is a word of zeros.

With a plane of exact zeros (`ternary`) that plane is scanned first. If it is all 0, the ordinary
pieces run; otherwise the pieces ``acc_zero_i``, ``out_zero_i``, which mask each product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.topi_binary import epilogue, layout
from bnncc.topi_binary.build import input_types, output_hw, output_types
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import BinaryConv2d, Dim, to_json

Buffer = Any
Expr = Any


@dataclass(frozen=True)
class Piece:
    """A range of columns and of channel blocks."""

    column: int
    columns: int
    block: int
    blocks: int
    lanes: int
    """Channels per block: `LANES`, or fewer in the last block."""


@dataclass(frozen=True)
class _Kernel:
    """The buffers of the function being written, and the extents of its loops."""

    spec: BinaryConv2d
    n: Dim | tirx.Var
    height: int
    width: int
    data: Buffer
    zero: Buffer | None
    weight: Buffer
    params: list[Buffer]
    outputs: list[Buffer]

    @property
    def group_channels(self) -> int:
        return self.spec.channels // self.spec.groups

    @property
    def skips(self) -> bool:
        """Whether taps outside the image are left out."""
        return self.spec.mode == "xor" and self.spec.pad_value == 0


def image(spec: BinaryConv2d) -> tuple[Dim, int, int]:
    """Return the extents of the loops over output pixels: images, rows, columns.

    Rows of a dense layer are columns of one image, so that schedules tile them alike.
    """
    if spec.rank == 2 and isinstance(spec.n, int):
        return 1, 1, spec.n
    return (spec.n, *output_hw(spec))


def channel_blocks(spec: BinaryConv2d) -> list[tuple[int, int, int]]:
    """Return ranges of channel blocks as (first, count, lanes): the full ones, the last one."""
    full, rest = divmod(spec.out_channels, LANES)
    return [r for r in ((0, full, LANES), (full, 1, rest)) if r[1] and r[2]]


def conv2d(
    spec: BinaryConv2d,
    columns: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
) -> tirx.PrimFunc:
    """Define the kernel of `spec`.

    Parameters
    ----------
    spec : BinaryConv2d
        What to compute.
    columns : sequence of int, optional
        Widths of the pieces, in order; one piece by default.
    blocks : sequence of int, optional
        How many of the full channel blocks each piece takes, in order; one piece by default.

    Returns
    -------
    tirx.PrimFunc
        Not scheduled, named ``main``.
    """
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            T.func_attr({"tirx.noalias": True, "bnncc.spec": to_json(spec)})
            kernel = _declare(spec)
            with T.sblock("root"):
                T.reads()
                T.writes()
                _body(kernel, pieces(spec, columns, blocks))
        return builder.get()


def pieces(
    spec: BinaryConv2d,
    columns: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
) -> list[Piece]:
    """Return the pieces of `conv2d` in the order of their numbers: blocks outside, columns inside."""
    columns = columns or [image(spec)[2]]
    ranges = []
    for first, count, lanes in channel_blocks(spec):
        for size in (blocks or [count]) if lanes == LANES else [count]:
            ranges.append((first, size, lanes))
            first += size
    return [
        Piece(sum(columns[:i]), width, first, count, lanes)
        for first, count, lanes in ranges
        for i, width in enumerate(columns)
    ]


def _declare(spec: BinaryConv2d) -> _Kernel:
    batch = spec.n if isinstance(spec.n, int) else tirx.Var(spec.n, "int64")
    buffers = []
    count = len(input_types(spec))
    for i, (shape, dtype) in enumerate(input_types(spec) + output_types(spec)):
        extents = [batch if isinstance(extent, str) else extent for extent in shape]
        name = f"input_{i}" if i < count else f"output_{i - count}"
        buffers.append(T.arg(name, T.buffer(extents, dtype)))
    inputs, outputs = buffers[:count], buffers[count:]
    n, height, width = image(spec)
    return _Kernel(
        spec=spec,
        n=batch if isinstance(n, str) else n,
        height=height,
        width=width,
        data=inputs[0],
        zero=inputs[1] if spec.ternary else None,
        weight=inputs[1 + spec.ternary],
        params=inputs[2 + spec.ternary :],
        outputs=outputs,
    )


def _body(kernel: _Kernel, parts: Sequence[Piece]) -> None:
    spec = kernel.spec
    views = epilogue.views(spec.steps, kernel.outputs, spec.out_channels)
    if kernel.zero is None:
        for i, piece in enumerate(parts):
            _piece(kernel, piece, str(i), views)
        return
    seen = _scan(kernel.zero)
    with T.If(seen[0] == T.uint32(0)):
        with T.Then(), _scope(kernel, views, "ordinary"):
            for i, piece in enumerate(parts):
                _piece(kernel, piece, str(i), views)
        with T.Else(), _scope(kernel, views, "with_zeros"):
            for i, piece in enumerate(pieces(spec)):
                _piece(kernel, piece, f"zero_{i}", views, masked=True)


@contextmanager
def _scope(kernel: _Kernel, views: Sequence[Buffer], name: str) -> Iterator[None]:
    """Open a block around one of two alternatives; schedules treat them apart."""

    def everything(buffers: Sequence[Buffer | None]) -> list[Expr]:
        return [b[tuple(slice(0, extent) for extent in b.shape)] for b in buffers if b is not None]

    with T.sblock(name):
        T.reads(*everything([kernel.data, kernel.zero, kernel.weight, *kernel.params]))
        T.writes(*everything(views))
        yield


def _scan(plane: Buffer) -> Buffer:
    """Collect all bits of `plane` in one word (block ``scan``)."""
    size = 1
    for extent in plane.shape:
        size = size * extent
    flat = T.decl_buffer([size], "uint32", data=plane.data)
    seen = T.sblock_alloc_buffer((1,), "uint32")
    with T.sblock("scan"):
        T.reads(flat[0:size])
        T.writes(seen[0])
        T.buffer_store(seen, T.uint32(0), [0])
        with T.serial(0, size) as i:
            T.buffer_store(seen, seen[0] | flat[i], [0])
    return seen


def _piece(
    kernel: _Kernel, piece: Piece, name: str, views: Sequence[Buffer], masked: bool = False
) -> None:
    spec = kernel.spec
    start = _weight_bits(kernel, piece, name) if spec.mode == "and" else None
    acc = T.sblock_alloc_buffer(
        (kernel.n, kernel.height, piece.columns, piece.blocks, LANES), "int32"
    )
    IRBuilder.name(f"acc_{name}", acc)
    extents = (kernel.n, kernel.height, piece.columns, piece.blocks, LANES)
    taps = (*spec.kernel, layout.words(kernel.group_channels))
    with T.grid(*extents, *taps) as loops, T.sblock(f"acc_{name}"):
        n, h, w, o, lane, kh, kw, c = T.axis.remap("SSSSSRRR", list(loops))
        tap = _Tap(kernel, piece, n, h, w + piece.column, o, lane, kh, kw, c)
        here = [n, h, w, o, lane]
        T.reads(*tap.regions(), *([start[o, lane]] if start is not None else []))
        T.writes(acc[tuple(here)])
        with T.init():
            initial: Expr = T.int32(0)
            if start is not None:
                initial = -start[o, lane]
            elif masked or not spec.doubled:
                share = kernel.group_channels if masked else kernel.group_channels // 2
                initial = _missing(kernel, h, w + piece.column) * share
            T.buffer_store(acc, initial, here)

        def add(data: Expr, zero: Expr) -> None:
            bits = T.Cast(
                "int32", T.popcount(tap.masked(data, zero) if masked else data ^ tap.weight)
            )
            if masked:
                bits = bits * 2 + T.Cast("int32", T.popcount(zero))
            T.buffer_store(acc, acc[tuple(here)] + bits, here)

        tap.visit(add)
    with T.grid(*extents[:4]) as loops, T.sblock(f"out_{name}"):
        n, h, w, o = T.axis.remap("SSSS", list(loops))
        _write(kernel, piece, views, acc, (n, h, w, o), masked)


def _write(
    kernel: _Kernel,
    piece: Piece,
    views: Sequence[Buffer],
    acc: Buffer,
    loops: tuple[Expr, Expr, Expr, Expr],
    masked: bool,
) -> None:
    spec = kernel.spec
    n, h, w, o = loops
    image_index = w if spec.rank == 2 and isinstance(spec.n, int) else n
    at = epilogue.Place(
        n=image_index,
        h=h,
        w=w + piece.column,
        block=o + piece.block,
        channels=spec.out_channels,
        lanes=piece.lanes,
        rank=spec.rank,
    )
    if spec.rank == 2 and isinstance(spec.n, int):
        at = epilogue.Place(w + piece.column, h, w, at.block, at.channels, at.lanes, 2)
    reads, writes = epilogue.regions(spec.steps, kernel.params, views, at)
    T.reads(acc[n, h, w, o, 0:LANES], *reads)
    T.writes(*writes)
    raw = acc[n, h, w, o, T.Ramp(0, 1, LANES)]
    if spec.doubled and not masked:
        raw = raw * T.Broadcast(T.int32(2), LANES)
        if kernel.skips and any(spec.pads):
            missing = _missing(kernel, h, w + piece.column) * kernel.group_channels
            raw = raw + T.Broadcast(missing, LANES)
    value = T.Cast(epilogue.F32, raw)
    epilogue.emit(spec.steps, value, kernel.params, views, at, acc=raw)


def _weight_bits(kernel: _Kernel, piece: Piece, name: str) -> Buffer:
    """Count the bits of the weights of each channel (block ``weight_bits_i``)."""
    bits = T.sblock_alloc_buffer((piece.blocks, LANES), "int32")
    taps = (*kernel.spec.kernel, layout.words(kernel.group_channels))
    with T.grid(piece.blocks, LANES, *taps) as loops, T.sblock(f"weight_bits_{name}"):
        o, lane, kh, kw, c = T.axis.remap("SSRRR", list(loops))
        word = kernel.weight[_weight_index(kernel, piece, o, lane, kh, kw, c)]
        T.reads(word)
        T.writes(bits[o, lane])
        with T.init():
            T.buffer_store(bits, T.int32(0), [o, lane])
        T.buffer_store(bits, bits[o, lane] + T.Cast("int32", T.popcount(word)), [o, lane])
    return bits


def _weight_index(
    kernel: _Kernel, piece: Piece, o: Expr, lane: Expr, kh: Expr, kw: Expr, c: Expr
) -> Expr:
    height, width = kernel.spec.kernel
    words = layout.words(kernel.group_channels)
    row = (kh * width + kw) * words + c
    per_block = height * width * words
    if piece.lanes == LANES:
        return ((o + piece.block) * per_block + row) * LANES + lane
    return piece.block * per_block * LANES + row * piece.lanes + lane


def _inside(position: Expr, extent: int, first: int, last: int) -> Expr | None:
    """Return the test that a tap at `position` is inside; None if it always is.

    `first` and `last` bound the position.
    """
    tests = []
    if first < 0:
        tests.append(position >= 0)
    if last >= extent:
        tests.append(position < extent)
    return T.And(*tests) if len(tests) == 2 else tests[0] if tests else None


def _axis_test(kernel: _Kernel, axis: int, position: Expr) -> Expr | None:
    spec = kernel.spec
    size = (kernel.height, kernel.width)[axis]
    if spec.rank == 2:
        return None
    last = (size - 1) * spec.strides[axis] - spec.pads[axis]
    last += (spec.kernel[axis] - 1) * spec.dilations[axis]
    extent = (spec.height, spec.width)[axis]
    return _inside(position, extent, -spec.pads[axis], last)


def _missing(kernel: _Kernel, h: Expr, w: Expr) -> Expr:
    """Return how many taps of an output pixel lie outside the image, if those are skipped."""
    spec = kernel.spec
    if not kernel.skips:
        return T.int32(0)
    counts = []
    for axis, place in enumerate((h, w)):
        count: Expr = T.int32(0)
        for k in range(spec.kernel[axis]):
            position = place * spec.strides[axis] + k * spec.dilations[axis] - spec.pads[axis]
            test = _axis_test(kernel, axis, position)
            count = count + (T.int32(1) if test is None else T.Cast("int32", test))
        counts.append(count)
    return spec.kernel[0] * spec.kernel[1] - counts[0] * counts[1]


@dataclass(frozen=True)
class _Tap:
    """One product: a data word (or what stands for it outside the image) and a weight word."""

    kernel: _Kernel
    piece: Piece
    n: Expr
    h: Expr
    w: Expr
    o: Expr
    lane: Expr
    kh: Expr
    kw: Expr
    c: Expr

    @property
    def weight(self) -> Expr:
        k = self.kernel
        index = _weight_index(k, self.piece, self.o, self.lane, self.kh, self.kw, self.c)
        return k.weight[index]

    def masked(self, data: Expr, zero: Expr) -> Expr:
        return (data ^ self.weight) & ~zero

    @property
    def place(self) -> tuple[Expr, Expr]:
        s = self.kernel.spec
        row = self.h * s.strides[0] + self.kh * s.dilations[0] - s.pads[0]
        column = self.w * s.strides[1] + self.kw * s.dilations[1] - s.pads[1]
        return row, column

    @property
    def index(self) -> tuple[Expr, ...]:
        """Index of the data word, with the first word of the channel's group."""
        s = self.kernel.spec
        word = self.c
        if s.groups > 1:
            per_group = s.out_channels // s.groups
            channel = (self.o + self.piece.block) * LANES
            if per_group % LANES:
                channel = T.min(channel + self.lane, s.out_channels - 1)
            word = word + channel // per_group * layout.words(self.kernel.group_channels)
        if s.rank == 2:
            return (self.w if isinstance(s.n, int) else self.n), word
        return self.n, *self.place, word

    def regions(self) -> list[Expr]:
        index = _weight_index(self.kernel, self.piece, self.o, self.lane, self.kh, self.kw, self.c)
        planes = [self.kernel.data, *([self.kernel.zero] if self.kernel.zero is not None else [])]
        return [*(plane[self.index] for plane in planes), self.kernel.weight[index]]

    def pad_word(self) -> Expr:
        channels = self.kernel.group_channels
        if self.kernel.spec.pad_value != 1:
            return T.uint32(0)
        ones = T.uint32(2**layout.WORD_BITS - 1)
        if channels % layout.WORD_BITS == 0:
            return ones
        tail = T.uint32((1 << channels % layout.WORD_BITS) - 1)
        return T.Select(self.c == layout.words(channels) - 1, tail, ones)

    def visit(self, add: Any) -> None:
        """Call `add` with the data word and zero word, under the tests that this tap needs."""
        kernel = self.kernel
        zero = T.uint32(0) if kernel.zero is None else kernel.zero[self.index]
        tests = [_axis_test(kernel, axis, place) for axis, place in enumerate(self.place)]
        self._nest([test for test in tests if test is not None], zero, add)

    def _nest(self, tests: list[Expr], zero: Expr, add: Any) -> None:
        if not tests:
            add(self.kernel.data[self.index], zero)
            return
        with ExitStack() as stack:
            stack.enter_context(T.If(tests[0]))
            with T.Then():
                self._nest(tests[1:], zero, add)
            if not self.kernel.skips:
                with T.Else():
                    add(self.pad_word(), T.uint32(0))
