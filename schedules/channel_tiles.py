"""Schedule primitives for convolutions whose lanes are output channels.

The accumulators of a tile of columns x channel vectors stay in registers over the whole reduction.
Each weight vector is loaded once per tile, and each data element is broadcast from memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

from bnncc.schedules import epilogue, multithreading, nchw, ranges
from bnncc.schedules.intrin import TensorPair
from bnncc.schedules.space import Point, Space, tile_sizes, with_threads
from bnncc.schedules.templates.channel_tiles import Group, groups
from bnncc.schedules.templates.window import Segment, segments
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.kind import Convolution
from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d

_REDUCED = 2
"""Kind of a reduction axis of a block."""

_TAPS = "bnncc.taps"
"""Annotation of loops over the taps of a window; its value is the reduction axis."""

_LANES = "bnncc.lanes"
"""Annotation of loops over lanes."""


MOST_ROWS = 4
"""Rows in a tile if their number is symbolic: those of a rest run one by one."""


def space(
    spec: Conv2d | FewBitConv2d, target: TargetSpec, threads: int, most: int, default: Point,
    sums: int = 1,
) -> Space:  # fmt: skip
    """Return the tiles of columns and up to `most` channel vectors whose sums fit the registers.

    There are `sums` vectors of accumulators for each vector of outputs.
    """
    registers = target.vector_registers // (target.registers_per_vector(LANES) * sums)
    return with_threads(
        {
            "columns": tile_sizes(width_of(flattened(spec), registers), registers),
            "vectors": range(1, min(blocks(spec.out_channels), most) + 1),
            "rows_outside": (0, 1),
        },
        default,
        threads > 1,
        multithreading.shared(spec, target, threads),
        lambda point: (point["columns"] + 1) * point["vectors"] <= max(3, registers - 2),
    )


def any_rows(spec: BinaryConv2d | Conv2d | FewBitConv2d) -> bool:
    """Whether a flattened spec is of a dense layer whose number of rows is symbolic.

    It has not become an image of one row; `rows_as_columns` has its rows tiled nevertheless.
    """
    return spec.rank == 2 and not isinstance(spec.n, int)


def rows_as_columns(func: tirx.PrimFunc, fixed: Sequence[str]) -> tirx.PrimFunc:
    """Exchange the axes of images and of columns, but for the blocks `fixed`."""
    axes = {}
    for block in ranges.blocks(func):
        spatial = [axis.iter_type for axis in block.iter_vars].count(0)
        if block.name_hint not in fixed:
            axes[block.name_hint] = (spatial - 4, spatial - 2)
    return ranges.exchanged(func, axes)


def row_segments(func: tirx.PrimFunc, columns: int) -> list[Segment]:
    """Return the ranges of rows: whole tiles, and those of a rest one by one."""
    out = next(block for block in ranges.blocks(func) if block.name_hint in epilogue.BLOCKS)
    count, tap = out.iter_vars[2].dom.extent, (range(1),)
    if columns == 1:
        return [Segment(0, 1, count, tap)]
    whole, done = count // columns, count // columns * columns
    return [Segment(0, columns, whole, tap * columns), Segment(done, 1, count - done, tap)]


def width_of(spec: BinaryConv2d | Conv2d | FewBitConv2d, most: int) -> int:
    """Return the number of columns of a flattened spec, or `most` if rows take their place."""
    return most if any_rows(spec) else spec.output_hw[1]


def ranged(
    func: tirx.PrimFunc, spec: Conv2d | FewBitConv2d, target: TargetSpec, point: Point,
    rule: Callable[..., tirx.PrimFunc], vectors: int, divided: int, apart: bool = False,
    before: Sequence[str] = (), single: int = 0, fixed: Sequence[str] = (),
) -> tirx.PrimFunc:  # fmt: skip
    """Schedule a convolution: channel tiles, and in each of them ranges of columns.

    If the number of rows of a dense layer is symbolic, they take the place of columns.

    Parameters
    ----------
    func : tirx.PrimFunc
        The definition.
    spec : Conv2d or FewBitConv2d
        Flattened spec of the kernel.
    target : TargetSpec
        The target.
    point : Point
        A point of `space`.
    rule : callable
        Schedules a range: takes the definition, a group of channel tiles, a segment of columns,
        and the number of rows that are buffered before they are transposed.
    vectors : int
        Channel vectors per tile.
    divided : int
        Number of loops that threads share: 0, 3, or 4 including the one over column tiles.
    apart : bool, default False
        Whether channels that do not fill a vector form a tile of their own.
    before : sequence of str, optional
        Blocks that run before all tiles, on one thread.
    single : int, optional
        Channel vectors per tile of a single row, if their number is symbolic.
    fixed : sequence of str, optional
        Blocks that have no axis of images or columns.

    Returns
    -------
    tirx.PrimFunc
    """
    rows = 1 if divided else nchw.rows_of(spec, target, vectors)
    func, order = nchw.held(func, spec, rows), _order(point)
    nests = [ranges.part(func, {name: {}}, before) for name in before]
    if any_rows(spec):
        func = rows_as_columns(func, (*before, *fixed))
        for segment in row_segments(func, point["columns"]):
            wide = vectors if segment.width > 1 else max(single, vectors)
            nests += [
                rule(func, group, segment, rows)
                for group in groups(spec.out_channels, wide, apart=apart)
            ]
        return multithreading.one_region(ranges.joined(nests, 0))
    for group in groups(spec.out_channels, vectors, apart=apart):
        parts = [rule(func, group, segment, rows) for segment in segments(spec, point["columns"])]
        parts += nchw.transposed(func, spec, group, order, order[:divided], rows)
        # Loops that threads share must be single loops; columns of two widths have separate loops.
        nests += parts if divided == 4 else [ranges.joined(parts, 1 if divided else 3)]
    return multithreading.one_region(ranges.joined(nests, 0))


def _order(point: Point) -> str:
    """Return the order of the loops over images, rows and channel tiles, from the outside in."""
    return "nho" if point["rows_outside"] else "noh"


def axes(group: Group, segment: Segment) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (first, count) of the columns and of the channel vectors of a range."""
    vectors = group.first, group.count * len(group.lanes)
    return segment.columns, vectors


def tiles(
    func: tirx.PrimFunc, cut: Mapping[str, ranges.Bounds], group: Group, segment: Segment,
    point: Point, rows: int = 1, shared: Sequence[str] = (),
) -> tuple[s_tir.Schedule, list[Any]]:  # fmt: skip
    """Create the loops over the tiles of a range.

    Parameters
    ----------
    func : tirx.PrimFunc
        A definition with an epilogue.
    cut : mapping of str to Bounds
        The parts of the blocks before the epilogue, see `ranges.part`.
    group, segment : Group, Segment
        The channel vectors and the columns.
    point : Point
        ``rows_outside`` determines the loop order.
    rows : int, default 1
        Rows buffered before they are transposed; adds a loop around that over w.
    shared : sequence of str, optional
        Blocks, besides those of the epilogue, whose tensors all ranges share.

    Returns
    -------
    sch : Schedule
        Schedule of the range; loops over columns and vectors of a tile are unrolled.
    loops : list
        The loops over tiles, from the outside in.
    """
    columns, _ = axes(group, segment)
    rest = group.lanes[-1] < LANES
    out: dict[str, ranges.Bounds] = {}
    if full := len(group.lanes) - rest:
        out[epilogue.BLOCKS[0]] = {2: columns, 3: (group.first, group.count * full)}
    if rest:
        out[epilogue.BLOCKS[1]] = {2: columns}
    sch = s_tir.Schedule(ranges.part(func, {**cut, **out}, (*epilogue.BLOCKS, *shared)))
    merged = []
    for name in out:
        n, h, w, o = sch.get_loops(name)
        tile, column = sch.split(w, [None, segment.width])
        outer, vector = sch.split(o, [group.count, None])
        outside = {"n": n, "h": h, "o": outer, "w": tile}
        if rows > 1:
            outside["h"], outside["r"] = sch.split(h, [None, rows])
        nest = _order(point) + ("rw" if rows > 1 else "w")
        sch.reorder(*(outside[axis] for axis in nest), vector, column)
        unrolled(sch, [vector, column])
        merged.append(tile)
    if len(merged) > 1:
        sch.merge(*merged)
    return sch, sch.get_loops(next(iter(out)))[: len(nest)]


def sums(
    sch: s_tir.Schedule, name: str, pair: TensorPair, at: Any, kw_inside: bool = True,
    unroll: int = 1, order: str = "kow", rolled: bool = False, spec: Convolution | None = None,
) -> None:  # fmt: skip
    """Schedule the sums of a tile.

    Parameters
    ----------
    sch : Schedule
        Schedule of the kernel.
    name : str
        Block of the sums; an inner block, over lanes, computes a product.
    pair : TensorPair
        Instruction for the inner block.
    at : LoopRV
        The loop over tiles under which the sums are computed.
    kw_inside : bool, default True
        Whether the taps of a kernel row are unrolled inside the loop over words, or outside it.
    unroll : int, default 1
        Words per iteration of that loop.
    order : str, default "kow"
        Order of the unrolled loops, from the outside in: k (taps of a row), o (vectors) and w.
    rolled : bool, default False
        Whether the taps of a kernel row remain a loop.
    spec : Convolution, optional
        Spec whose taps inside the loop over words are ordered by `by_phase`.
    """
    # 3 stage: sums under a tile
    block = sch.get_sblock(name)
    sch.compute_at(block, at, preserve_unit_loops=True)
    # 2 tile: accumulators innermost in the reduction
    *_, w, o, kh, kw, c = sch.get_loops(block)
    taps, inside = [kw], []
    if kw_inside:
        taps, inside = [], [kw] if spec is None else by_phase(sch, kw, spec)
    loops = {"k": inside, "o": [o], "w": [w]}
    body = [loop for axis in order for loop in loops[axis]]
    if unroll > 1:
        c, part = sch.split(c, [None, unroll])
        body = [part, *body]
    sch.reorder(kh, *taps, c, *body)
    # 5 unroll
    unrolled(sch, [loop for loop in (*taps, *body) if not (rolled and loop is kw)])
    if rolled:
        sch.annotate(kw, "pragma_loop_partition_hint", 1)
    init = sch.decompose_reduction(block, kh)
    unrolled(sch, sch.get_loops(init)[-2:])
    mark(sch, kh, 0)
    # 4 tensorize
    for product in sch.get_child_blocks(block):
        sch.tensorize(sch.get_loops(product)[-1], pair.register())


def by_phase(sch: s_tir.Schedule, kw: Any, spec: Convolution) -> list[Any]:
    """Split the loop over the taps of a kernel row, so that those a stride apart are neighbours.

    These read the same data for neighbouring columns. LLVM keeps data that several taps read in
    registers: with taps in order, most of the data of a tile, for which it spills accumulators.
    """
    stride, dilation = spec.strides[1], spec.dilations[1]
    period = min(stride // math.gcd(stride, dilation), spec.kernel[1])
    if period == 1:
        return [kw]
    step, phase = sch.split(kw, [None, period])
    return [phase, step]


def table(sch: s_tir.Schedule, name: str) -> None:
    """Vectorize a table of per-channel initial values of the accumulators."""
    loops = sch.get_loops(name)
    axes = sch.get(sch.get_sblock(name)).iter_vars
    summed = [loop for loop, axis in zip(loops, axes, strict=True) if axis.iter_type == 2]
    lane = loops[len(loops) - len(summed) - 1]
    sch.reorder(*summed, lane)
    sch.vectorize(lane)
    init = sch.decompose_reduction(name, summed[0])
    sch.vectorize(sch.get_loops(init)[-1])


def unrolled(sch: s_tir.Schedule, loops: Iterable[Any]) -> None:
    """Unroll loops."""
    for loop in loops:
        sch.unroll(loop)


def in_registers(sch: s_tir.Schedule, tile: Sequence[Any]) -> None:
    """Unroll loops, and vectorize the last one."""
    *columns, lane = tile
    unrolled(sch, columns)
    sch.vectorize(lane)


def mark(sch: s_tir.Schedule, loop: Any, axis: int, least: int = 0) -> None:
    """Mark a loop over taps, so that `bounded` restricts it to the taps inside the image.

    Parameters
    ----------
    sch : Schedule
        Schedule of the kernel.
    loop : LoopRV
        A loop over taps.
    axis : int
        Index of the loop's axis among the reduction axes of the block.
    least : int, default 0
        Minimum number of taps inside the image. If LLVM cannot rule out 0, it generates extra
        code for tiles without any.
    """
    sch.annotate(loop, _TAPS, [axis, least])


def mark_lanes(sch: s_tir.Schedule, loop: Any) -> None:
    """Mark a loop over lanes for vectorization by `bounded`.

    The primitive `vectorize` refuses blocks that update what they read, because it cannot see that
    each iteration updates its own element.
    """
    sch.annotate(loop, _LANES, 1)


def finished(sch: s_tir.Schedule, channels: int, target: TargetSpec) -> tirx.PrimFunc:
    """Vectorize the epilogue of `channels` channels; return the function, `bounded`."""
    for block in epilogue.blocks(sch):
        epilogue.vectorize(sch, block, channels, target)
    return bounded(sch.mod["main"])


def bounded(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Restrict marked loops over taps to the taps inside the image.

    With a condition inside such a loop, LLVM spills accumulators. Loop partitioning does not detect
    that the parts before and after are empty, and makes the code three times as long.

    Parameters
    ----------
    func : tirx.PrimFunc
        A function with loops marked by `mark`.

    Returns
    -------
    tirx.PrimFunc
    """

    def bounds(loop: tirx.For) -> tirx.For:
        if _LANES in loop.annotations:
            kind = tirx.ForKind.VECTORIZED
            return tirx.For(loop.loop_var, loop.min, loop.extent, kind, loop.body)
        if _TAPS not in loop.annotations:
            return loop
        blocks: list[Any] = []
        tvm_ffi.structural_walk(loop.body, (s_tir.SBlockRealize, blocks.append), order="pre")
        axis, least = map(int, loop.annotations[_TAPS])
        reducing = [(b, axes[axis]) for b in blocks if len(axes := _reduced(b.block)) > axis]
        tested = (one for one in reducing if _tests(one[0].block, one[1]))
        realize, number = next(tested, reducing[0])
        block = realize.block
        tap, test = block.iter_vars[number].var, block.body
        values = {
            iterated.var: value
            for iterated, value in zip(block.iter_vars, realize.iter_values, strict=True)
        }
        low, high, body = tirx.const(0, loop.extent.ty), loop.extent, loop.body
        while isinstance(test, tirx.IfThenElse) and test.condition.a.same_as(tap):
            bound = tvm_ffi.structural_map(
                test.condition.b, (tirx.Var, lambda var: values.get(var, var))
            )
            low, high = (bound, high) if isinstance(test.condition, tirx.GE) else (low, bound)
            test = test.then_case
        extent = high - low
        if not test.same_as(block.body):
            extent = tirx.max(extent, tirx.const(least, extent.ty)) if least else extent
            tap = loop.loop_var

            def moved(var: tirx.Var) -> Any:
                return var + low if var.same_as(tap) else var

            replaced = partial(_replaced, block, number, test)
            body = tvm_ffi.structural_map(body, (s_tir.SBlock, replaced))
            body = tvm_ffi.structural_map(body, (tirx.Var, moved))
        return tirx.For(loop.loop_var, loop.min, extent, loop.kind, body)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, bounds)))


def _reduced(block: Any) -> list[int]:
    return [i for i, axis in enumerate(block.iter_vars) if axis.iter_type == _REDUCED]


def _tests(block: Any, number: int) -> bool:
    """Whether the body of a block is a condition on one of its axes."""
    test = block.body
    var = block.iter_vars[number].var
    return isinstance(test, tirx.IfThenElse) and bool(test.condition.a.same_as(var))


def _replaced(old: Any, number: int, body: Any, block: Any) -> Any:
    if not block.same_as(old):
        return block
    # No longer a reduction block: TVM would allocate its buffer outside of all loops.
    iters = [*block.iter_vars]
    iters[number] = tirx.IterVar(iters[number].dom, iters[number].var, tirx.IterVar.DataPar)
    return ranges.changed_block(block, iter_vars=iters, body=body)
