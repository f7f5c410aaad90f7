"""Convolution and dense layers on bits, in named blocks that rules schedule.

`definitions.binary_conv2d` says the same plainly, word by word, and is what tests compare. This is
what these rules start from: sums that begin at what taps outside count, and code for data without
zeros apart from that for all data, neither of which primitives make of the definition.

Lanes are output channels: the accumulators of `layout.LANES` channels of one pixel are one vector,
and each data word is compared with one vector of weight words. The definition can be written in
several *pieces* (ranges of columns and of channel blocks) of the same sum, so that a schedule can
treat borders and tails apart from the rest. Piece ``i`` has the blocks ``acc_i`` (accumulators) and
``out_i`` (epilogue).

Padding costs nothing: taps outside the image are skipped, and the accumulator starts at what they
count (`border_start`). For zeros that is ``channels_per_group / 2`` each, which is what makes
``dot = K - 2 * acc`` hold. If that has a half (`BinaryConv2d.doubled`), it is added when the
accumulator is read, twice as large.

Mode ``and`` is reduced to XOR: for data d in {0, 1} and weight bits w, ``popcount(d) - 2 *
popcount(d & w) = popcount(d ^ w) - popcount(w)``, so the accumulator starts at minus the bits in
all weights, and a pixel outside is words of zeros.

With `carry_save`, three taps are counted at once, see `carry_save_sums`.

With planes of exact zeros (`ternary`, `weight_zeros`) those are scanned first. If all are 0, the
ordinary pieces run; otherwise the pieces ``acc_zero_i``, ``out_zero_i``, which mask each product.

Where weights are stored in the order ``nibbles``, the blocks are those of `lookup`; in the orders
``vectors`` and ``halves`` those of `neon_conv2d`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import popcount
from bnncc.schedules.templates import carry_save_sums, epilogue, lookup, neon_conv2d
from bnncc.schedules.templates.border_start import Start, Tables
from bnncc.schedules.templates.taps import Kernel, Piece, Tap
from bnncc.schedules.zeros import scan
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.layout import LANES, NIBBLE_LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import BinaryConv2d, Dim

Buffer = Any
Expr = Any


def image(spec: BinaryConv2d) -> tuple[Dim, int, int]:
    """Return the extents of the loops over output pixels: images, rows, columns.

    Rows of a dense layer are columns of one image, so that schedules tile them alike.
    """
    if spec.rank == 2 and isinstance(spec.n, int):
        return 1, 1, spec.n
    return (spec.n, *spec.output_hw)


def channel_blocks(spec: BinaryConv2d) -> list[tuple[int, int, int]]:
    """Return ranges of channel blocks as (first, count, lanes): the full ones, the last one."""
    full, rest = divmod(spec.out_channels, LANES)
    return [r for r in ((0, full, LANES), (full, 1, rest)) if r[1] and r[2]]


def conv2d(
    spec: BinaryConv2d,
    columns: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
    carry_save: bool = False,
    tiling: lookup.Lookup | neon_conv2d.Quads | None = None,
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
    carry_save : bool, default False
        Whether to count three taps at once, in instructions of AVX-512; see `carry_save_sums.fits`.
    tiling : Lookup or Quads, optional
        For weights in another order than ``words``: how the kernel is cut, instead of the other
        options.

    Returns
    -------
    tirx.PrimFunc
        Not scheduled, named ``main``.
    """
    with Operator(spec) as operator, T.sblock("root"):
        T.reads()
        T.writes()
        kernel = _kernel(spec, operator)
        if spec.weight_order != "words":
            _written(kernel, tiling)
        else:
            _body(kernel, pieces(spec, columns, blocks), carry_save)
    return operator.func


def pieces(
    spec: BinaryConv2d,
    columns: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
) -> list[Piece]:
    """Return the pieces of `conv2d` in the order of their numbers: columns change first."""
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


def _kernel(spec: BinaryConv2d, operator: Operator) -> Kernel:
    n, height, width = image(spec)
    data, *others = operator.inputs
    rest = iter(others)
    return Kernel(
        spec=spec,
        n=operator.n if isinstance(n, str) else n,
        height=height,
        width=width,
        data=data,
        zero=next(rest) if spec.ternary else None,
        weight=next(rest),
        weight_zero=next(rest) if spec.weight_zeros else None,
        starts=next(rest) if spec.per_image and spec.mode == "and" else None,
        params=list(rest),
        outputs=operator.outputs,
    )


def _body(kernel: Kernel, parts: Sequence[Piece], carry_save: bool) -> None:
    spec = kernel.spec
    views = epilogue.views(spec.steps, kernel.outputs, spec.out_channels)

    def ordinary() -> None:
        with _scope(kernel, views, "ordinary"):
            tables: dict[int, Tables] = {}
            # Before the pieces: nothing may come between loops that threads go through at once.
            declared = carry_save_sums.views(kernel, parts) if carry_save else None
            for i, piece in enumerate(parts):
                _piece(kernel, piece, str(i), views, tables, declared=declared)

    planes = [plane for plane in (kernel.zero, kernel.weight_zero) if plane is not None]
    if not planes:
        ordinary()
        return
    seen = scan(planes)
    with T.If(seen[0] == T.uint32(0)):
        with T.Then():
            ordinary()
        with T.Else(), _scope(kernel, views, "with_zeros"):
            for i, piece in enumerate(pieces(spec)):
                _piece(kernel, piece, f"zero_{i}", views, {}, masked=True)


def _written(kernel: Kernel, tiling: lookup.Lookup | neon_conv2d.Quads | None) -> None:
    """Write a kernel whose weights have an order of their own."""
    spec = kernel.spec
    views = epilogue.views(spec.steps, kernel.outputs, spec.out_channels)

    def write(masked: bool) -> None:
        def finish(piece: Piece, at: Place, raw: Expr, outputs: Sequence[Buffer] = views) -> None:
            _finish(kernel, piece, outputs, at, raw, masked)

        with _scope(kernel, views, "with_zeros" if masked else "ordinary"):
            _writer(kernel, tiling, masked, views, finish).write()

    if kernel.zero is None:
        write(False)
        return
    seen = scan([kernel.zero])
    with T.If(seen[0] == T.uint32(0)):
        with T.Then():
            write(False)
        with T.Else():
            write(True)


def _writer(
    kernel: Kernel,
    tiling: lookup.Lookup | neon_conv2d.Quads | None,
    masked: bool,
    views: Sequence[Buffer],
    finish: Callable[..., None],
) -> lookup.Writer | neon_conv2d.Writer:
    """Return what writes `kernel`; code for data with zeros, which is rare, in small tiles."""
    if kernel.spec.weight_order == "nibbles":
        assert not isinstance(tiling, neon_conv2d.Quads)
        tiling = tiling or lookup.Lookup(NIBBLE_LANES, ((kernel.width, kernel.width),), 1)
        cut = lookup.narrowed(kernel.spec, tiling, kernel.width) if masked else tiling
        return lookup.Writer(kernel, cut, masked, views, finish)
    assert not isinstance(tiling, lookup.Lookup)
    chosen = tiling or neon_conv2d.Quads(())
    if masked or tiling is None:
        chosen = lookup.narrowed(kernel.spec, chosen, kernel.width)
    return neon_conv2d.Writer(kernel, chosen, masked, views, finish)


@contextmanager
def _scope(kernel: Kernel, views: Sequence[Buffer], name: str) -> Iterator[None]:
    """Open a block around pieces that are scheduled together."""

    def everything(buffers: Sequence[Buffer | None]) -> list[Expr]:
        return [b[tuple(slice(0, extent) for extent in b.shape)] for b in buffers if b is not None]

    with T.sblock(name):
        weights = kernel.weight, kernel.weight_zero, kernel.starts
        T.reads(*everything([kernel.data, kernel.zero, *weights, *kernel.params]))
        T.writes(*everything(views))
        yield


def _piece(
    kernel: Kernel,
    piece: Piece,
    name: str,
    views: Sequence[Buffer],
    tables: dict[int, Tables],
    masked: bool = False,
    declared: carry_save_sums.Views | None = None,
) -> None:
    if piece.block not in tables:
        tables[piece.block] = Tables(kernel, piece, f"of_{name}")
    start = Start(kernel, piece, tables[piece.block], masked)
    if declared is None:
        acc = _accumulate(kernel, piece, name, start, masked)
    else:
        acc = carry_save_sums.accumulate(kernel, piece, name, start, declared)
    extents = (kernel.n, kernel.height, piece.columns, piece.blocks)
    with T.grid(*extents) as loops, T.sblock(f"out_{name}"):
        n, h, w, o = T.axis.remap("SSSS", list(loops))
        _write(kernel, piece, views, acc, (n, h, w, o), masked, declared is not None)


def _accumulate(kernel: Kernel, piece: Piece, name: str, start: Start, masked: bool) -> Buffer:
    """Write the block ``acc_i``: a data word, and a loop over lanes.

    If all lanes count the same word, and no zeros, that loop is the block ``product_i``, to be
    tensorized; else it is vectorized here.
    """
    plain = kernel.uniform and not masked
    extents = (kernel.n, kernel.height, piece.columns, piece.blocks)
    acc = T.sblock_alloc_buffer((*extents[:3], piece.blocks * LANES), "int32")
    IRBuilder.name(f"acc_{name}", acc)
    with T.grid(*extents, *kernel.reduction) as loops, T.sblock(f"acc_{name}"):
        n, h, w, o, kh, kw, c = T.axis.remap("SSSSRRR", list(loops))
        column = w + piece.column
        tap = Tap(kernel, piece, n, h, column, o, None, kh, kw, c)
        T.reads(*tap.regions(), *start.regions(o, slice(0, LANES), n))
        T.writes(acc[n, h, w, o * LANES : o * LANES + LANES])
        with T.init(), T.vectorized(0, LANES) as lane:
            initial = start.value(h, column, o, lane, n)
            T.buffer_store(acc, initial, [n, h, w, o * LANES + lane])

        def update(tap: Tap, lane: Expr) -> None:
            here = (n, h, w, o * LANES + lane)
            count = _counted(replace(tap, lane=lane), masked)
            T.buffer_store(acc, acc[here] + count, list(here))

        def add(tap: Tap) -> None:
            if not plain:
                with T.vectorized(0, LANES) as lane:
                    update(tap, lane)
                return
            with T.serial(0, LANES) as loop, T.sblock(f"product_{name}"):
                update(tap, T.axis.spatial(LANES, loop))

        tap.visit(add)
    return acc


def _counted(tap: Tap, masked: bool) -> Expr:
    """Return what one word and one lane count; `masked` if planes of zeros are looked at."""
    spec, data = tap.kernel.spec, tap.kernel.data[tap.index]
    bits = tap.differ(data)
    if not masked:
        return T.Cast("int32", popcount(bits))
    zero = T.uint32(0) if tap.kernel.zero is None else tap.kernel.zero[tap.index]
    if spec.weight_zeros:
        zero = (data & tap.weight_zero) if spec.mode == "and" else zero | tap.weight_zero
    if spec.mode == "and":
        return T.Cast("int32", popcount(bits)) + T.Cast("int32", popcount(zero))
    return T.Cast("int32", popcount(bits & ~zero)) * 2 + T.Cast("int32", popcount(zero))


def _write(
    kernel: Kernel,
    piece: Piece,
    views: Sequence[Buffer],
    acc: Buffer,
    loops: tuple[Expr, Expr, Expr, Expr],
    masked: bool,
    threed: bool,
) -> None:
    """Write the block ``out_i``: the epilogue on one vector of accumulators."""
    spec = kernel.spec
    n, h, w, o = loops
    column = w + piece.column
    at = kernel.place(n, h, column, o + piece.block, piece.lanes)
    reads, writes = epilogue.regions(spec.steps, kernel.params, views, at)
    T.writes(*writes)
    if threed:
        T.reads(carry_save_sums.region(acc, loops), *reads)
        raw = carry_save_sums.total(acc, loops)
    else:
        T.reads(acc[n, h, w, o * LANES : o * LANES + LANES], *reads)
        raw = acc[n, h, w, T.Ramp(o * LANES, 1, LANES)]
    _finish(kernel, piece, views, at, raw, masked)


def _finish(
    kernel: Kernel,
    piece: Piece,
    views: Sequence[Buffer],
    at: Place,
    raw: Expr,
    masked: bool,
) -> None:
    """Write the epilogue of one vector of accumulators."""
    spec = kernel.spec
    halved = spec.doubled and not masked
    if halved and kernel.group_channels % 2:
        raw = raw * T.Broadcast(T.int32(2), LANES)
        missing = kernel.missing(at.h, at.w, piece) * kernel.group_channels
        raw = raw + T.Broadcast(missing, LANES)
        halved = False
    epilogue.emit(spec.steps, None, kernel.params, views, at, acc=raw, halved=halved)
