"""NCHW results: rows of pixels are transposed as soon as they are complete.

Lanes are output channels, while adjacent elements in NCHW are columns. So a kernel buffers a row of
results of one channel tile, pixel after pixel, which stays in the L1 cache, and then transposes it.
A separate kernel would have to read all results again, from a slower cache.

A run of `LONG` pixels is transposed at a time. The last run ends with the row: pixels that it
shares with the previous run are written twice, because scalar or masked stores would take longer.
Several rows may be transposed together if that takes fewer runs; rows of a plane are contiguous.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules import epilogue, ranges
from bnncc.schedules.expressions import of_kind
from bnncc.schedules.intrin_portable import QUAD, TRANSPOSE
from bnncc.schedules.templates.channel_tiles import Group
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.build import aliases, input_types
from bnncc.topi_binary.definitions.blocks import int64
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import Spec
from bnncc.topi_binary.step import output_kinds

UNALIGNED = 1.25
"""Relative cost of runs that cross a cache line."""

LONG = 2 * QUAD
"""Pixels transposed at a time: an AVX2 register. Wider registers gain nothing, because only half as
many can be shuffled and stored per cycle."""


def fits(spec: Spec, target: TargetSpec) -> bool:
    """Return whether convolution kernels on `target` may write NCHW themselves."""
    x86 = target.popcount in ("vector", "lookup")
    return x86 and spec.output_rank == 4 and spec.output_hw[1] >= QUAD


def results(spec: Spec) -> list[int]:
    """Return the indices of a kernel's parameters that are NCHW results."""
    if spec.output_rank == 2 or not spec.epilogue:
        return []
    made = [(step, kind) for step in spec.steps for kind in output_kinds(step)]
    own = [some for some, over in zip(made, aliases(spec), strict=True) if over < 0]
    return [
        number
        for number, (step, kind) in enumerate(own, len(input_types(spec)))
        if step.layout == "NCHW" and kind in ("store", "value", "table")
    ]


def rows_of(spec: Spec, target: TargetSpec, vectors: int) -> int:
    """Return the number of rows to buffer: the divisor of the height with the least cost per row.

    The cost counts runs; runs that start at a multiple of their size are cheaper. Of equal ones,
    the fewest rows are taken. 1 if there are no NCHW results.
    """
    height, width = spec.output_hw
    if not results(spec) or width < QUAD:
        return 1

    def cost(rows: int) -> float:
        pixels, all_aligned = rows * width, height * width % LONG == 0
        runs = sum(run.size * run.turns for run in _runs(pixels)) / rows
        return runs if all_aligned and pixels % LONG == 0 else runs * UNALIGNED

    room = target.l1_bytes // (vectors * LANES * 4 * width)
    fitting = (rows for rows in range(1, height + 1) if height % rows == 0)
    return min((rows for rows in fitting if rows <= max(1, room)), key=cost)


def held(func: tirx.PrimFunc, spec: Spec, count: int = 1) -> tirx.PrimFunc:
    """Return a definition that buffers NCHW results, and transposes them in separate blocks.

    Parameters
    ----------
    func : tirx.PrimFunc
        The definition of a convolution.
    spec : Spec
        Its spec.
    count : int, default 1
        Rows that are transposed together; divides the height.

    Returns
    -------
    tirx.PrimFunc
        `func` itself if it has no NCHW results, or rows are too short.
    """
    wanted = results(spec)
    if not wanted or spec.output_hw[1] < QUAD:
        return func
    params = {func.params[number]: func.params[number] for number in wanted}
    channels, width = layout.blocks(spec.output_channels) * LANES, spec.output_hw[1]
    views, rows, kept = {}, {}, []
    for stmt in ranges.statements(func.body.block.body):
        if isinstance(stmt, tirx.DeclBuffer):
            param = next((var for var in of_kind(stmt.data, tirx.Var) if var in params), None)
            if param is not None:
                n = stmt.buffer.shape[0]
                if param not in rows:
                    shape = n, int64(spec.output_hw[0] * width), channels
                    rows[param] = tirx.decl_buffer(shape, "float32", "rows")
                views[stmt.buffer] = rows[param]
                continue
        kept.append(stmt)

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        if node.buffer not in views:
            return node
        n, channel, row, column = node.indices
        where = [n, row * int64(width) + column, channel]
        return tirx.BufferStore(views[node.buffer], node.value, where)

    def region(old: tirx.BufferRegion) -> tirx.BufferRegion:
        if old.source not in views:
            return old
        n, channel, row, column = old.region  # of a single pixel
        pixel = tvm.ir.Range.from_min_extent(row.min * int64(width) + column.min, int64(1))
        return tirx.BufferRegion(views[old.source], [n, pixel, channel])

    def block(old: s_tir.SBlock) -> s_tir.SBlock:
        return ranges.changed_block(old, writes=[region(r) for r in old.writes])

    replaced = ((tirx.BufferStore, store), (s_tir.SBlock, block))
    body = [tvm_ffi.structural_map(stmt, replaced) for stmt in kept]
    for number, (param, row) in enumerate(rows.items()):
        body += _transposing(number, param, row, spec, count)
    tensors = [*func.body.block.alloc_buffers, *rows.values()]
    return func.with_body(ranges.rooted(func, tirx.SeqStmt(body), tensors))


class _Run(NamedTuple):
    """Equal runs of pixels, each transposed at once."""

    size: int
    first: int
    turns: int
    """Number of such runs."""


def _runs(pixels: int) -> list[_Run]:
    """Return the runs that cover `pixels` pixels.

    Examples
    --------
    >>> [tuple(run) for run in _runs(27)]
    [(8, 0, 3), (4, 23, 1)]
    """
    size = LONG if pixels >= LONG else QUAD
    count, rest = divmod(pixels, size)
    last = QUAD if rest <= QUAD else LONG
    return [_Run(size, 0, count)] + [_Run(last, pixels - last, 1)] * (rest > 0)


def _transposing(number: int, made: Any, rows: Any, spec: Spec, count: int) -> list[tirx.Stmt]:
    """Return loop nests that transpose rows: images, rows, channel vectors, runs of pixels."""
    pixels, channels = rows.shape[1], spec.output_channels
    images = int64(spec.n) if isinstance(spec.n, int) else made.shape[0]
    strips, strip = int64(spec.output_hw[0] // count), spec.output_hw[1] * count
    full, rest = divmod(channels, LANES)
    stmts: list[tirx.Stmt] = []
    vectors = (0, full, LANES), (full, 1, rest)
    for last, run in product((False, True), _runs(spec.output_hw[1] * count)):
        start, blocks, lanes = vectors[last]
        if not blocks or not lanes:
            continue
        name = _name(number, last, run)
        with IRBuilder() as builder, T.sblock("root"):
            out = T.decl_buffer([*made.shape[:2], pixels], made.dtype, data=made.data)
            extents = images, strips, int64(blocks), int64(run.turns)
            with T.grid(*extents) as loops, T.sblock(name):
                i, h, o, turn = T.axis.remap("SSSS", list(loops))
                channel = (o + start) * LANES
                pixel = h * strip + (turn * run.size + run.first)
                T.reads(rows[i, pixel : pixel + run.size, channel : channel + lanes])
                T.writes(out[i, channel : channel + lanes, pixel : pixel + run.size])
                inner = T.grid(int64(lanes), int64(run.size))
                with inner as moved, T.sblock(f"{name}_lanes"):
                    lane, w = T.axis.remap("SS", list(moved))
                    here, there = (i, pixel + w, channel + lane), (i, channel + lane, pixel + w)
                    T.reads(rows[here])
                    T.writes(out[there])
                    T.buffer_store(out, rows[here], [*there])
        stmts += ranges.statements(builder.get().block.body)
    return stmts


def _name(number: int, last: bool, run: _Run) -> str:
    return f"transpose_{number}_{run.first}{'_last' * last}"


def transposed(
    func: tirx.PrimFunc, spec: Spec, group: Group, order: str, divided: str = "", count: int = 1
) -> list[tirx.PrimFunc]:
    """Schedule the transposition of a range of channels; [] if there is none.

    Parameters
    ----------
    func : tirx.PrimFunc
        From `held`.
    spec : Spec
        Its spec.
    group : Group
        The channel vectors.
    order : str
        Outer loops, from the outside in: n and h, optionally o (channel tiles).
    divided : str, default ""
        Loops among these that threads share.
    count : int, default 1
        As for `held`; h then iterates over groups of so many rows.

    Returns
    -------
    list of tirx.PrimFunc
        Parts to be joined, on these loops, with the other parts of the range.
    """
    rest = group.lanes[-1] < LANES
    vectors = {False: len(group.lanes) - rest, True: int(rest)}
    made = []
    held_results = {int(name.split("_")[1]) for name in names(func)}
    for number, last, run in product(
        sorted(held_results), vectors, _runs(spec.output_hw[1] * count)
    ):
        if not vectors[last]:
            continue
        name, first = _name(number, last, run), 0 if last else group.first
        bounds = {name: {2: (first, group.count * vectors[last])}}
        sch = s_tir.Schedule(ranges.part(func, bounds, epilogue.BLOCKS))
        n, h, o, turn = sch.get_loops(name)
        outer, vector = sch.split(o, [group.count, vectors[last]])
        loops = {"n": n, "h": h, "o": outer}
        inside = [outer][: "o" not in order]
        sch.reorder(*(loops[axis] for axis in order), *inside, vector, turn)
        if (pair := TRANSPOSE.get((run.size, group.lanes[-1 if last else 0]))) is not None:
            sch.tensorize(sch.get_loops(f"{name}_lanes")[0], pair.register())
        if divided:
            sch.parallel(sch.fuse(*(loops[axis] for axis in divided)))
        made.append(sch.mod["main"])
    return made


def names(func: tirx.PrimFunc) -> list[str]:
    """Return the names of the transposing blocks of a definition from `held`."""
    every = [block.name_hint for block in ranges.blocks(func)]
    return [name for name in every if name.startswith("transpose_")]
