"""Schedule of convolutions on AMX tiles: windows times vectors of sixteen output channels.

Bits are first expanded to bytes, and floats rounded to bfloat16, see `definitions.byte_products`. A
line of windows, which consists of whole output rows, is split into runs of a few tiles
(`tile_cuts`). The tiles of a run share each weight tile; where tiles of data overlap in memory,
which takes longer to load, or come from the L2 cache, two vectors of channels share each tile of
data, too. Other instructions take no time beside products if there are few enough of them
(`software_pipeline`): weights are expanded a few products ahead, data a line ahead, and sums of a
line are stored to memory and pass through the same epilogue as in other kernels while the next line
is multiplied; in pointwise and dense layers, those of a run during the next run. Exact zeros in the
data need no separate code; products of tiles that hold only padding are left out.

`tile_choice` says which layers use this kernel, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import tvm_ffi
from tvm import s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules import (
    channel_tiles,
    epilogue,
    intrin_amx,
    multithreading,
    nchw,
    prefetch,
    ranges,
    software_pipeline,
    tile_cuts,
)
from bnncc.schedules.intrin_amx import LOCAL, SUMS, TILE_BYTES, TILE_ROWS, Tile
from bnncc.schedules.intrin_levels import WEIGHTS_OF_CODES
from bnncc.schedules.intrin_x86 import SIGNS, SPREAD, WEIGHTS_OF_CODES_GFNI, Interleave
from bnncc.schedules.space import Point, Space, with_threads
from bnncc.schedules.templates.channel_tiles import Group
from bnncc.schedules.tile_cuts import Cut
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import quantization
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.definitions.blocks import int64
from bnncc.topi_binary.definitions.byte_products import (
    WORDS,
    Layer,
    folds,
    in_tiles,
)
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d

AHEAD, SHORT, SHORT_AHEAD = 3, 18, 2
"""Steps that weights are expanded ahead of use; up to so many steps per vector or chunk, fewer, as
the data of few channels leaves less of the L1 cache to the ring of weights."""

FEW_STEPS = 4
"""Steps per vector up to which all weights are expanded once, ahead of use, and kept."""

ORDER = "nho"
"""Outer loops of sums and results: images, lines, vectors of channels."""

OF_TILES, PRODUCTS = "bnncc_tiles", "bnncc_products"
"""Annotations of loops over the tiles of a run; the second one of the loop that multiplies."""

SHARED = "data", "inside", "panel", "panel_last", "sum", "sum_last"
"""Blocks whose tensors several loop nests share."""


def space(spec: Layer, target: TargetSpec, threads: int) -> Space:
    """Return the search space of a layer on tiles."""
    divided = multithreading.shared(spec, target, threads)
    chosen = tile_cuts.cut(spec, target)
    choices: dict[str, Sequence[int]] = {"tiles": range(1, SUMS + 1)}
    default = {"tiles": chosen.tiles}
    if tile_cuts.shares(spec):
        choices["vectors"], default["vectors"] = (1, 2), chosen.vectors

    def fits(point: Point) -> bool:
        return point["tiles"] * point.get("vectors", 1) <= SUMS

    return with_threads(choices, default, threads > 1, divided, fits)


@dataclass(frozen=True)
class Share:
    """A part of an outer loop that one thread executes.

    Attributes
    ----------
    axis : str
        The loop, one of `ORDER`.
    count : int
        Number of parts.
    var : tirx.Var
        Number of this part.
    """

    axis: str
    count: int
    var: tirx.Var


def _share(spec: Layer, chosen: Cut, threads: int) -> Share:
    """Return how threads share a layer: equal parts, or as many as there are iterations."""
    extents = {
        "n": spec.n if isinstance(spec.n, int) else 1,
        "h": chosen.lines.count,
        "o": spec.out_channels // LANES // chosen.vectors,
    }
    equal = (axis for axis, extent in extents.items() if extent > 0 and extent % threads == 0)
    axis = next(equal, "")
    count = threads if axis else max(extents.values())
    axis = axis or max(extents, key=lambda one: extents[one])
    return Share(axis, count, tirx.Var("share", "int64"))


def apply(
    func: tirx.PrimFunc, spec: Layer, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Schedule a layer on tiles.

    Each thread executes the whole pipeline for its share. The first rows of data are expanded
    before, or, for several images or shares of channels, all data.
    """
    chosen = tile_cuts.cut(spec, target, point["tiles"], point.get("vectors", 1))
    lines = chosen.lines
    flat = lines.layer
    dense = spec.rank == 2
    whole = ranges.with_parameters(define(spec, lines.form), func)
    whole = nchw.held(whole, flat, lines.rows)
    share = _share(flat, chosen, threads) if point.get("divide", 0) else None
    in_lines = share is not None and share.axis == "h"
    own, data = lines.count // (share.count if share is not None and in_lines else 1), None
    before = [_nest(whole, name) for name in ("inside", "margin") if folds(flat)]
    if flat.n == 1 and (share is None or in_lines):
        first = lines.plane[0] - (lines.count - 1) * lines.step
        start = share.var * (own * lines.step) if share is not None else int64(0)
        parts = [_bytes(whole, flat, dense, rows=(start, first))]
        data = (_bytes(whole, flat, dense, in_rows=True), start + first) if own > 1 else None
    else:
        parts, every = [], _bytes(whole, flat, dense)
        before.append(every if share is None else ranges.parallel(every, 4))
    full, rest = divmod(flat.out_channels, LANES)
    for end in [""] * (full > 0) + ["_last"] * (rest > 0):
        shared = share if not end or share is None or share.axis != "o" else None
        own_cut = replace(chosen, vectors=1) if end else chosen
        made = _channels(whole, flat, dense, target, own_cut, end, shared, data)
        (parts if shared == share else before).extend(made)
        data = None
    if share is not None:
        parts = [_in_parallel(parts, share)]
    made = ranges.joined([*before, *parts], 0)
    made = prefetch.next_rows(prefetch.weights(made, spec, target), spec, target)
    return _configured(made, chosen)


def _nest(func: tirx.PrimFunc, name: str) -> tirx.PrimFunc:
    """Schedule a block whose innermost loop is vectorized."""
    sch = s_tir.Schedule(ranges.part(func, {name: {}}, SHARED))
    *_, last = sch.get_loops(name)
    sch.vectorize(last)
    return sch.mod["main"]


def _moved(
    func: tirx.PrimFunc, number: int, parts: int, start: Callable[[int], Any]
) -> tirx.PrimFunc:
    """Return nests in which a loop makes fewer iterations, or starts elsewhere.

    A schedule allows no free variables, so this comes after it.

    Parameters
    ----------
    func : tirx.PrimFunc
        A scheduled function.
    number : int
        Index of the loop, from the outside in.
    parts : int
        The loop executes one of so many parts of its iterations.
    start : callable
        Takes the number of iterations, and returns the first.
    """
    root, made = func.body.block, []
    for stmt in ranges.statements(root.body):
        loops, body = ranges.opened(stmt, number + 1)
        if len(loops) > number:
            loop = loops.pop()
            extent, var = loop.extent // parts, tirx.Var(loop.loop_var.name, loop.loop_var.ty)
            body = ranges.renamed(body, {loop.loop_var: start(extent) + var})
            body = tirx.For(var, loop.min, extent, loop.kind, body)
        for loop in reversed(loops):
            body = ranges.looped(loop, body)
        made.append(body)
    return func.with_body(ranges.rooted(func, ranges.sequence(made), root.alloc_buffers))


def _in_parallel(parts: Sequence[tirx.PrimFunc], share: Share) -> tirx.PrimFunc:
    """Return a parallel loop over shares, each of which executes `parts`."""
    whole = ranges.followed(parts)
    root, (views, nests) = whole.body.block, ranges.nests(whole)
    body = ranges.sequence(nests)
    kind = tirx.ForKind.PARALLEL
    loop = tirx.For(share.var, tirx.const(0, "int64"), int64(share.count), kind, body)
    return whole.with_body(
        ranges.rooted(whole, ranges.sequence([*views, loop]), root.alloc_buffers)
    )


def _bytes(
    func: tirx.PrimFunc, spec: Layer, dense: bool, in_rows: bool = False,
    rows: tuple[Any, int] | None = None,
) -> tirx.PrimFunc:  # fmt: skip
    """Schedule the expansion of data to bytes, a word at a time; loops over terms are unrolled.

    Loops over rows and columns are outermost if `in_rows`. `rows` are the first row and the number
    of rows, if not all are expanded. Bytes of a `dense` layer are written in the order of memory.
    """
    start, count = rows or (int64(0), 0)
    words = [block.name_hint for block in ranges.blocks(func) if block.name_hint in WORDS]
    bounds: ranges.Bounds = {3: (0, count)} if count else {}
    sch = s_tir.Schedule(ranges.part(func, dict.fromkeys((*words, "data"), bounds), SHARED))
    n, high, wide, row, column, part, which, lane = sch.get_loops("data")
    number = 3
    if in_rows:
        sch.reorder(row, column, n, high, wide, part, which, lane)
    elif dense and not words:  # a block of channels is contiguous
        sch.reorder(part, which, row, column, lane)
        number = 5
    for word in words:
        sch.compute_at(word, which)
    if folds(spec) and spec.width >= LANES:
        sch.tensorize(which, Interleave(cast("Conv2d", spec)).register())
    elif words:
        lanes = int(sch.get(lane).extent)
        sch.tensorize(lane, SPREAD[lanes, len(words) > 1].register())
    else:
        sch.vectorize(lane)
    if getattr(spec, "operands", "") == "bfloat16x3":
        sch.unroll(part)
    made = sch.mod["main"]
    return made if rows is None else _moved(made, number, 1, lambda _: start)


def _channels(
    func: tirx.PrimFunc, spec: Layer, dense: bool, target: TargetSpec, chosen: Cut, end: str,
    share: Share | None, data: tuple[tirx.PrimFunc, Any] | None,
) -> list[tirx.PrimFunc]:  # fmt: skip
    """Schedule the vectors of channels, all complete ones or the last, and `data` of later lines.

    Each line expands all weights again, which takes no time beside the products, and so reads few
    bytes: its data and some weights stay in the L1 cache.
    """
    names = ("data", "window", f"panel{end}", f"sum{end}", f"out{end}")
    own = ranges.part(func, {name: {} for name in (*names, *nchw.names(func))}, SHARED[:1])
    (tensor,) = (b.writes[0].source for b in ranges.blocks(own) if b.name_hint == f"panel{end}")
    count, *elements, _, _ = map(int, tensor.shape)
    each = math.prod(elements)
    count //= share.count if share is not None and share.axis == "o" else 1
    early = not in_tiles(spec) and count * each > FEW_STEPS
    sums = _sums(own, spec, target, chosen, end, early, dense)
    expanded = [] if early or in_tiles(spec) else [_panel(own, spec, target, end)]
    full, rest = divmod(spec.out_channels, LANES)
    vectors = chosen.vectors
    group = Group(1, full, (rest,)) if end else Group(full // vectors, 0, (LANES,) * vectors)
    after = nchw.transposed(own, spec, group, ORDER, count=chosen.lines.rows)
    by_run = not after and tile_cuts.by_run(chosen)
    parts = [sums, _results(own, spec, target, chosen, end, by_run), *after]
    if share is not None:
        number, var = ORDER.index(share.axis), share.var
        parts = [_moved(part, number, share.count, lambda extent: var * extent) for part in parts]
    if early:
        number, own = ORDER.index("o"), each // chosen.lines.chunks
        distance = min(SHORT_AHEAD if own <= SHORT else AHEAD, own - 1)
        kept: software_pipeline.Kept = "none"
        if vectors == 1 and each <= FEW_STEPS:
            kept, distance = "all", FEW_STEPS
        elif vectors > 1 and each <= tile_cuts.KEPT:
            kept = "group"
        numbers = range(number, number + 2)
        first, parts[0] = software_pipeline.ahead(parts[0], numbers, distance, kept, vectors)
        expanded = [first]
    if data is not None:
        later, start = data
        number, rows = ORDER.index("h"), chosen.lines.step
        parts[0] = software_pipeline.alongside(parts[0], later, number, rows, start)
    windows = chosen.windows if by_run else chosen.lines.places
    shared = len(ORDER) + 2 * by_run
    return [*expanded, *software_pipeline.behind(parts, shared, windows, vectors)]


def _panel(func: tirx.PrimFunc, spec: Layer, target: TargetSpec, end: str) -> tirx.PrimFunc:
    """Schedule the expansion of weights to bytes."""
    sch = s_tir.Schedule(ranges.part(func, {f"panel{end}": {}}, SHARED))
    _expand(sch, spec, target, f"panel{end}")
    return sch.mod["main"]


def _expand(sch: s_tir.Schedule, spec: Layer, target: TargetSpec, panel: str) -> None:
    """Apply the instructions that expand weights."""
    last = sch.get_loops(panel)[-1]
    if isinstance(spec, BinaryConv2d):
        sch.tensorize(last, SIGNS.register())
    elif getattr(spec, "method", "") == "packed":
        pairs = WEIGHTS_OF_CODES_GFNI if "gfni" in target.features else WEIGHTS_OF_CODES
        sch.tensorize(last, pairs[cast("FewBitConv2d", spec).weight_bits].register())
    else:
        sch.vectorize(last)


def _sums(
    func: tirx.PrimFunc, spec: Layer, target: TargetSpec, chosen: Cut, end: str, early: bool,
    dense: bool,
) -> tirx.PrimFunc:  # fmt: skip
    """Schedule the tile products; `early`: each step also expands weights, for a later one."""
    name, panel, stored = f"sum{end}", f"panel{end}", in_tiles(spec)
    whole = ("window", name, *[panel] * (stored or early))
    kept: dict[str, ranges.Bounds] = {block: {} for block in whole}
    shared = [block for block in SHARED if block != panel or not early]
    sch = s_tir.Schedule(ranges.part(func, kept, shared))
    # 2 tile
    n, line, o, chunk, place, lane, kh, kw, c, k = sch.get_loops(name)
    run, tile, row = sch.split(place, [None, chosen.tiles, chosen.rows])
    o, vector = sch.split(o, [None, chosen.vectors])
    sch.reorder(n, line, o, chunk, run, kh, kw, c, tile, vector, row, lane, k)
    step, inner = sch.fuse(kh, kw), c
    if int(sch.get(step).extent) == 1:
        sch.reorder(c, step)
        step, inner = c, step
    elif int(sch.get(step).extent) <= tile_cuts.TAPS:
        sch.unroll(step)
    # 3 stage: contents of the tiles
    data = sch.get_sblock("window")
    sch.set_scope(data, 0, LOCAL)
    if stored:
        weight = sch.get_sblock(panel)
        sch.set_scope(weight, 0, LOCAL)
    else:
        weight = sch.cache_read(name, 1, LOCAL)
    total = sch.cache_write(name, 0, LOCAL)
    sch.compute_at(data, tile)
    sch.compute_at(weight, inner)
    sch.annotate(step, software_pipeline.STEP, 1)
    if early:
        sch.compute_at(panel, inner)
        _expand(sch, spec, target, panel)
    sch.reverse_compute_at(total, run)
    *_, other, places, _ = sch.get_loops(total)
    again, stored = sch.split(places, [chosen.tiles, chosen.rows])
    *_, first, each, cleared, _ = sch.get_loops(sch.decompose_reduction(name, step))
    vectors = [sch.get_loops(weight)[-3]] * (chosen.vectors > 1)
    # 4 tensorize
    loops = {
        "zero": cleared, "load": sch.get_loops(data)[-2],
        "load_weight": sch.get_loops(weight)[-2], "dot": row, "store": stored,
    }  # fmt: skip
    kinds = tuple(str(sch.get(block).writes[0].source.dtype) for block in (data, weight))
    for operation, loop in loops.items():
        streamed = operation == "load" and tile_cuts.streams(chosen, target)
        pair = Tile(operation, chosen.rows, (kinds[0], kinds[1]), *_shape(spec), streamed)
        sch.tensorize(loop, pair.register())
    # 5 unroll: instructions take tile numbers as immediates
    channel_tiles.unrolled(sch, (first, tile, again))
    if chosen.vectors > 1:
        channel_tiles.unrolled(sch, (each, vector, other, *vectors))
    sch.annotate(tile, PRODUCTS, 1)
    if chosen.runs > 1 and dense:
        sch.annotate(run, prefetch.REPEATED, 1)
    if chosen.filled < chosen.runs * chosen.tiles and chosen.runs <= tile_cuts.UNEVEN:
        sch.unroll(run)
        for loop in (first, tile, again):
            sch.annotate(loop, OF_TILES, 1)
    return _without_zeros(_without_empty(sch.mod["main"], chosen), chosen)


def _shape(spec: Layer) -> tuple[int, tuple[int, int]]:
    """Return `Tile.words` and `Tile.window`."""
    if not folds(spec):
        return TILE_ROWS, (1, 1)
    words = quantization.words_of_pixel(cast("Conv2d", spec))
    return spec.kernel[1] * words, (spec.kernel[1], spec.strides[1])


def _without_empty(func: tirx.PrimFunc, chosen: Cut) -> tirx.PrimFunc:
    """Leave out the tiles of the last run that have no output."""
    *_, run = _outer_loops(func)

    def visit(loop: tirx.For) -> tirx.For:
        number = run.loop_var * chosen.tiles + loop.loop_var
        return _only_if(loop, number < chosen.filled) if OF_TILES in loop.annotations else loop

    return _with_loops(func, visit)


def _without_zeros(func: tirx.PrimFunc, chosen: Cut) -> tirx.PrimFunc:
    """Leave out products of tiles whose windows all read rows of zeros beside the image."""
    lines, kernel = chosen.lines, chosen.lines.spec.kernel
    if not tile_cuts.zeros(lines, min(chosen.tiles, chosen.filled)):
        return func
    _, line, *_, run = _outer_loops(func)

    def some(tap: tirx.For, tile: tirx.For) -> Any:
        """Return a test of which unrolled loops leave at most one of the lines."""
        found: Any = tirx.const(True)
        for number, kh, at in product(range(chosen.filled), range(kernel[0]), range(lines.count)):
            if not tile_cuts.reads(lines, at, kh, tile_cuts.rows_of(chosen, number)):
                here = tirx.EQ(run.loop_var * chosen.tiles + tile.loop_var, int64(number))
                now = tirx.EQ(tap.loop_var // kernel[1], int64(kh))
                both = tirx.And(tirx.And(here, now), tirx.EQ(line.loop_var, int64(at)))
                found = tirx.And(found, tirx.Not(both))
        return found

    def step(tap: tirx.For) -> tirx.For:
        def visit(tile: tirx.For) -> tirx.For:
            return _only_if(tile, some(tap, tile)) if PRODUCTS in tile.annotations else tile

        if software_pipeline.STEP not in tap.annotations:
            return tap
        return tvm_ffi.structural_map(tap, (tirx.For, visit))

    return _with_loops(func, step)


def _outer_loops(func: tirx.PrimFunc) -> list[tirx.For]:
    """Return the loops over images, lines, vectors, chunks and runs."""
    _, (nest,) = ranges.nests(func)
    return ranges.opened(nest, len(ORDER) + 2)[0]


def _only_if(loop: tirx.For, test: Any) -> tirx.For:
    return ranges.looped(loop, tirx.IfThenElse(test, loop.body, None), loop.annotations)


def _with_loops(func: tirx.PrimFunc, visit: Callable[[tirx.For], tirx.For]) -> tirx.PrimFunc:
    root = func.body.block
    body = tvm_ffi.structural_map(root.body, (tirx.For, visit))
    return func.with_body(ranges.rooted(func, body, root.alloc_buffers))


def _results(
    func: tirx.PrimFunc, spec: Layer, target: TargetSpec, chosen: Cut, end: str, by_run: bool
) -> tirx.PrimFunc:
    """Schedule the epilogue: loops over images, lines, vectors of channels, rows and columns.

    If `by_run`, columns are split into the runs, whose sums have one chunk.
    """
    out, lines = f"out{end}", chosen.lines
    sch = s_tir.Schedule(ranges.part(func, {out: {}}, (*SHARED, *epilogue.BLOCKS)))
    n, h, w, o = sch.get_loops(out)
    line, row = sch.split(h, [lines.count, lines.rows])
    o, vector = sch.split(o, [None, chosen.vectors])
    if folds(spec):
        sch.reorder(n, line, o, vector, row, w)
        sch.fuse(vector, row)
    elif by_run:
        run, w = sch.split(w, [chosen.runs, chosen.windows])
        sch.reorder(n, line, o, run, row, w, vector)
        sch.add_unit_loop(run)
    else:  # a row of results is written at once
        sch.reorder(n, line, o, row, w, vector)
    epilogue.vectorize(sch, sch.get_sblock(out), spec.out_channels, target)
    return sch.mod["main"]


def _configured(func: tirx.PrimFunc, chosen: Cut) -> tirx.PrimFunc:
    """Configure tiles before the loops that use them, in each thread, and release them after."""
    made: list[tirx.Stmt] = []
    for stmt in ranges.statements(func.body.block.body):
        made += _with_tiles(stmt, chosen) if _uses_tiles(stmt) else [stmt]
    return func.with_body(ranges.rooted(func, tirx.SeqStmt(made), func.body.block.alloc_buffers))


def _uses_tiles(stmt: tirx.Stmt) -> bool:
    found: list[bool] = []

    def visit(block: s_tir.SBlock) -> None:
        found.append(block.name_hint.startswith("sum_"))

    tvm_ffi.structural_walk(stmt, (s_tir.SBlock, visit), order="post")
    return any(found)


def _with_tiles(loop: tirx.For, chosen: Cut) -> list[tirx.Stmt]:
    words, _ = _shape(chosen.lines.layer)
    shapes = [(chosen.rows, TILE_BYTES)] * SUMS
    shapes += [(chosen.rows, words * 4), *[(words, TILE_BYTES)] * 2]
    with IRBuilder() as builder, T.sblock("configured"):
        T.reads()
        T.writes()
        intrin_amx.configure(T.sblock_alloc_buffer((8,), "uint64"), shapes)
    first = builder.get()
    with IRBuilder() as builder, T.sblock("released"):
        T.reads()
        T.writes()
        intrin_amx.release()
    stmts = [first, loop, builder.get()]
    return [multithreading.region(stmts)] if multithreading.divided(loop) else stmts
