"""Software pipelining of loops on AMX tiles: vector units work while the tile unit multiplies.

Both kinds of instructions run side by side only if they stand close together in the code. And a
tile load of bytes that vectors have just stored waits until the stores have left the core. So
`ahead` expands weights several steps before they are used, `alongside` makes the data of one line
during the line before, and `behind` computes the results of one iteration within the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from bnncc.schedules import ranges
from bnncc.schedules.expressions import of_kind
from bnncc.topi_binary.definitions.blocks import int64

STEP = "bnncc_step"
"""Annotation of a loop over steps; directly inside is another loop, over parts of a step."""

Kept = Literal["all", "group", "none"]
"""Which elements stay in memory, see `ahead`."""


def ahead(
    func: tirx.PrimFunc, numbers: range, distance: int, kept: Kept, vectors: int = 1
) -> list[tirx.PrimFunc]:
    """Return a scheduled function in which elements are computed `distance` steps ahead.

    Parameters
    ----------
    func : tirx.PrimFunc
        A single loop nest. The body of the two loops at `STEP` computes an element of a tensor, and
        then uses it. Some of the outer loops are over groups of elements; others repeat this.
    numbers : range
        Indices of the loops over groups, from the outside in.
    distance : int
        At most the number of all elements; less than those of a group, unless all are kept.
    kept : {"all", "group", "none"}
        Whether elements are computed in the first iteration of all loops that repeat it, of those
        inside the loops over groups, or each time. Unless all are kept, memory is a ring of
        elements.
    vectors : int, default 1
        Vectors of channels per element.

    Returns
    -------
    list of tirx.PrimFunc
        The first elements, and everything else.
    """
    root = func.body.block
    first: list[tirx.Stmt] = []
    counts: list[int] = []

    def moved(outer: Sequence[tirx.For], loop: tirx.For) -> tirx.Stmt:
        steps = loop, loop.body
        producer, *rest = ranges.statements(loop.body.body)
        grouped = outer[numbers.start : numbers.stop]
        around, inside = outer[: numbers.start], outer[numbers.stop :]
        inner = int(steps[1].extent)
        count = int(steps[0].extent) * inner
        counts.append(count)
        group, groups = _number_of(grouped)

        def element(which: Any, step: Any, names: Mapping[tirx.Var, Any]) -> tirx.Stmt:
            own = {steps[0].loop_var: step // inner, steps[1].loop_var: step % inner}
            for one, place in zip(grouped, _places(grouped, which), strict=True):
                own[one.loop_var] = place
            return ranges.with_own_variables(ranges.renamed(producer, {**names, **own}))

        start = {one.loop_var: int64(0) for one in (*around, *inside)}
        early = tirx.Var("early", loop.loop_var.ty)
        made = element(early // count, early % count, start)
        first.append(tirx.For(early, int64(0), int64(distance), tirx.ForKind.SERIAL, made))
        now = steps[0].loop_var * inner + steps[1].loop_var + distance
        if kept == "all":
            later = group + now // count
            exists = _all([*map(_first, (*around, *inside)), later < groups])
        else:
            over = _all([now >= count, *map(_last, inside)])
            following = tirx.Select(tirx.EQ(group, groups - 1), int64(0), group + 1)
            later = tirx.Select(over, following, group)
            exists = tirx.Not(_all([over, *map(_last, (*around, *grouped))]))
            if kept == "group":
                exists = _all([exists, tirx.Or(over, _all([now < count, *map(_first, inside)]))])
        made = element(later, now % count, start if kept == "all" else {})
        body = ranges.sequence(_between(made, exists, rest))
        return ranges.looped(loop, ranges.looped(loop.body, body), {STEP: int64(1)})

    steps = [_at_step(stmt, [], moved) for stmt in ranges.statements(root.body)]
    parts = [
        func.with_body(ranges.rooted(func, ranges.sequence(some), root.alloc_buffers))
        for some in (first, steps)
    ]
    if kept == "all":
        return parts
    (block,), (count,) = of_kind(first[0], s_tir.SBlock), counts
    sizes = [count] if kept == "group" else range(distance + 1, count + 1)
    turns = next(size for size in sizes if count % size == 0)
    return _in_ring(parts, block.writes[0].source, turns, vectors)


def _between(made: tirx.Stmt, exists: Any, stmts: Sequence[tirx.Stmt]) -> list[tirx.Stmt]:
    """Return statements with parts of a loop nest in each iteration of the last of them.

    The last statement is a loop over tiles: a product takes as long as a few rows of weights. The
    nest runs if `exists`.
    """
    *before, tiles = stmts
    loops, body = ranges.opened(made, _serial(made))
    total, parts = math.prod(int(loop.extent) for loop in loops), int(tiles.extent)
    each = -(-total // parts)
    own = tirx.Var("own", tiles.loop_var.ty)
    number = tiles.loop_var * each + own
    names = zip((loop.loop_var for loop in loops), _places(loops, number), strict=True)
    part: tirx.Stmt = ranges.with_own_variables(ranges.renamed(body, dict(names)))
    if each * parts > total:
        part = tirx.IfThenElse(number < total, part, None)
    part = tirx.For(own, int64(0), int64(each), tirx.ForKind.SERIAL, part)
    part = tirx.IfThenElse(exists, part, None)
    every = tirx.SeqStmt([part, *ranges.statements(tiles.body)])
    return [*before, ranges.looped(tiles, every, tiles.annotations)]


def _serial(stmt: tirx.Stmt) -> int:
    """Return the number of outer loops of a nest that are not vectorized."""
    loops, _ = ranges.opened(stmt)
    kinds = [loop.kind for loop in loops]
    vectorized = tirx.ForKind.VECTORIZED
    return kinds.index(vectorized) if vectorized in kinds else len(kinds)


def _at_step(
    stmt: tirx.Stmt,
    outer: Sequence[tirx.For],
    changed: Callable[[Sequence[tirx.For], tirx.For], tirx.Stmt],
) -> tirx.Stmt:
    """Return a loop nest in which the loop at `STEP`, inside `outer` ones, is changed."""
    if not any(STEP in loop.annotations for loop in of_kind(stmt, tirx.For)):
        return stmt
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_at_step(some, outer, changed) for some in stmt.seq])
    if STEP in stmt.annotations:
        return changed(outer, stmt)
    body = _at_step(stmt.body, [*outer, stmt], changed)
    return ranges.looped(stmt, body, stmt.annotations)


def _first(loop: tirx.For) -> Any:
    """Return whether this is the first iteration of a loop."""
    return tirx.EQ(loop.loop_var, int64(0))


def _last(loop: tirx.For) -> Any:
    """Return whether this is the last iteration of a loop."""
    return tirx.EQ(loop.loop_var, loop.extent - 1)


def _all(tests: Sequence[Any]) -> Any:
    made = tests[0]
    for test in tests[1:]:
        made = tirx.And(made, test)
    return made


def _in_ring(
    parts: Sequence[tirx.PrimFunc], tensor: Any, turns: int, vectors: int
) -> list[tirx.PrimFunc]:
    """Replace a tensor [vector, axes of elements, rows, columns] by a ring of `turns` elements."""
    _, *axes, rows, columns = tensor.shape
    shape = int64(turns), int64(vectors), rows, columns
    ring = tirx.decl_buffer(shape, tensor.dtype, "ring")

    def slot(indices: Sequence[Any]) -> list[Any]:
        vector, *element, row, column = indices
        place: Any = int64(0)
        for index, axis in zip(element, axes, strict=True):
            place = place * axis + index
        return [place % turns, vector % vectors, row, column]

    made = []
    for func in parts:
        root = func.body.block
        body = _replaced(root.body, tensor, ring, slot)
        tensors = [ring, *(one for one in root.alloc_buffers if not one.same_as(tensor))]
        made.append(func.with_body(ranges.rooted(func, body, tensors)))
    return made


def behind(
    parts: Sequence[tirx.PrimFunc], shared: int, windows: int, vectors: int = 1
) -> list[tirx.PrimFunc]:
    """Merge sums and their results; results are computed while the next sums are.

    Parameters
    ----------
    parts : sequence of tirx.PrimFunc
        Single loop nests with the same outer loops. The first one stores sums; inside is a loop
        with the annotation `STEP`, perhaps in one over runs. The second one, which has a loop over
        rows and one over columns inside, computes results from the sums. Others follow it.
    shared : int
        Number of outer loops.
    windows : int
        Windows per iteration of them.
    vectors : int, default 1
        Vectors of channels per iteration of them.

    Returns
    -------
    list of tirx.PrimFunc
        The merged nest, and the last results. Sums of two iterations are kept.
    """
    roots = [func.body.block for func in parts]
    stmts = [stmt for root in roots for stmt in ranges.statements(root.body)]
    nests = [stmt for stmt in stmts if isinstance(stmt, tirx.For)]
    views = [stmt for stmt in stmts if not isinstance(stmt, tirx.For)]
    outer, sums = ranges.opened(nests[0], shared)
    later = [ranges.opened(nest, shared) for nest in nests[1:]]
    tensor = _sums_of(sums, roots[0])
    *_, chunks, every, lanes = tensor.shape
    shape = int64(2), int64(vectors), chunks, int64(windows), lanes
    held = tirx.decl_buffer(shape, tensor.dtype, "held")
    number, total = _number_of(outer)

    def in_slot(stmt: tirx.Stmt, turn: Any) -> tirx.Stmt:
        def where(indices: Sequence[Any]) -> list[Any]:
            *_, vector, chunk, window, lane = indices
            own = window % windows if windows < int(every) else window
            return [turn % 2, vector % vectors, chunk, own, lane]

        return _replaced(stmt, tensor, held, where)

    def finished(which: int, at: Sequence[Any], turn: Any) -> tirx.Stmt:
        """Return the results of an iteration, or what follows them."""
        loops, stmt = later[which]
        names = {loop.loop_var: value for loop, value in zip(loops, at, strict=True)}
        return ranges.with_own_variables(in_slot(ranges.renamed(stmt, names), turn))

    before = [tirx.Var("before", loop.loop_var.ty) for loop in outer]
    results = finished(0, before, number + 1)
    (row,), _ = ranges.opened(results, 1)

    def begun(runs: Sequence[tirx.For], loop: tirx.For) -> tirx.Stmt:
        made = _share(results, int(row.extent), int64(0), [*runs, loop], [number > 0])
        return _begun(loop, made)

    body = in_slot(_at_step(sums, [], begun), number)
    earlier = _places(outer, tirx.max(number - 1, int64(0)))
    steps = [tirx.Bind(var, value) for var, value in zip(before, earlier, strict=True)]
    steps += ranges.statements(body)
    for which in range(1, len(later)):
        steps.append(tirx.IfThenElse(number > 0, finished(which, before, number + 1), None))
    merged = ranges.sequence(steps)
    for loop in reversed(outer):
        merged = ranges.looped(loop, merged, loop.annotations)
    last = [finished(which, _places(outer, total - 1), total + 1) for which in range(len(later))]
    tensors = [one for root in roots for one in root.alloc_buffers if not one.same_as(tensor)]
    tensors = [held, *dict.fromkeys(tensors)]
    return [
        parts[0].with_body(ranges.rooted(parts[0], ranges.sequence([*views, stmt]), tensors))
        for stmt in (merged, *last)
    ]


def alongside(
    func: tirx.PrimFunc, producer: tirx.PrimFunc, number: int, count: int, start: Any
) -> tirx.PrimFunc:
    """Return a nest of sums in which data for a line is made while the line before is multiplied.

    Parameters
    ----------
    func : tirx.PrimFunc
        A single loop nest. Inside its loop over lines are loops over steps, at `STEP`.
    producer : tirx.PrimFunc
        A loop nest that makes the data; its outer loops are over rows and columns.
    number : int
        Index of the loop over lines, from the outside in. Loops outside repeat it with the same
        data.
    count : int
        Rows of data that each line needs beyond those of the line before.
    start : int or expression
        The first of them for the second line; those before must be there already.

    Returns
    -------
    tirx.PrimFunc
    """
    root, other = func.body.block, producer.body.block
    views, (nest,) = ranges.nests(producer)

    def begun(outer: Sequence[tirx.For], loop: tirx.For) -> tirx.Stmt:
        lines, slots = outer[number], [*outer[number + 1 :], loop]
        begin = start + lines.loop_var * count
        tests = [tirx.EQ(one.loop_var, int64(0)) for one in outer[:number]]
        made = _share(nest, count, begin, slots, [*tests, lines.loop_var < lines.extent - 1])
        return _begun(loop, made)

    stmts = [_at_step(stmt, [], begun) for stmt in ranges.statements(root.body)]
    tensors = [*dict.fromkeys([*other.alloc_buffers, *root.alloc_buffers])]
    return func.with_body(ranges.rooted(func, ranges.sequence([*views, *stmts]), tensors))


def _begun(loop: tirx.For, first: tirx.Stmt) -> tirx.For:
    """Return a loop at `STEP` each of whose iterations begins with a statement."""
    return ranges.looped(
        loop, tirx.SeqStmt([first, *ranges.statements(loop.body)]), {STEP: int64(1)}
    )


def _share(
    nest: tirx.Stmt, rows: int, begin: Any, loops: Sequence[tirx.For], tests: Sequence[Any]
) -> tirx.Stmt:
    """Return what one iteration of `loops` does of a nest, if `tests` hold.

    All iterations together do `rows` iterations of its first loop, from `begin` on. Each does some
    iterations of its second loop, over columns.
    """
    (row, column), element = ranges.opened(nest, 2)
    columns, slots = int(column.extent), math.prod(int(loop.extent) for loop in loops)
    sizes = (size for size in range(1, columns) if columns % size == 0)
    size = next((k for k in sizes if rows * columns // k <= slots), columns)
    count, every = rows * columns // size, columns // size
    each = -(-count // slots)
    slot: Any = int64(0)
    for loop in loops:
        slot = slot * loop.extent + loop.loop_var
    turn, own = (tirx.Var(name, column.loop_var.ty) for name in ("turn", "piece"))
    piece = slot * each + own
    place = {row.loop_var: begin + piece // every, column.loop_var: piece % every * size + turn}
    made: tirx.Stmt = ranges.with_own_variables(ranges.renamed(element, place))
    made = tirx.For(turn, int64(0), int64(size), tirx.ForKind.SERIAL, made)
    made = tirx.IfThenElse(_all([*tests, piece < count]), made, None)
    return tirx.For(own, int64(0), int64(each), tirx.ForKind.SERIAL, made)


def _number_of(loops: Sequence[tirx.For]) -> tuple[Any, Any]:
    """Return the number of an iteration of loops, counted from 0, and that of all iterations."""
    number, total = int64(0), int64(1)
    for loop in loops:
        number, total = number * loop.extent + loop.loop_var, total * loop.extent
    return number, total


def _places(loops: Sequence[tirx.For], number: Any) -> list[Any]:
    """Return the values of loop variables in the iteration with this number."""
    made = []
    for loop in reversed(loops):
        made.append(number if loop is loops[0] else number % loop.extent)
        number = number // loop.extent
    return made[::-1]


def _sums_of(stmt: tirx.Stmt, root: s_tir.SBlock) -> Any:
    """Return the tensor in memory that sums are stored to."""
    made = (
        region.source
        for block in of_kind(stmt, s_tir.SBlock)
        if block.name_hint.startswith("sum")
        for region in block.writes
    )
    return next(one for one in made if one in root.alloc_buffers and one.scope() == "global")


def _replaced(
    stmt: tirx.Stmt, tensor: Any, other: Any, where: Callable[[Sequence[Any]], list[Any]]
) -> tirx.Stmt:
    """Return a statement that accesses another tensor; `where` maps indices, not extents."""

    def load(node: tvm.ir.TensorLoad) -> Any:
        if not node.source.same_as(tensor):
            return node
        return tirx.BufferLoad(other, where(node.indices))

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        if not node.buffer.same_as(tensor):
            return node
        return tirx.BufferStore(other, node.value, where(node.indices))

    def region(old: tirx.BufferRegion) -> tirx.BufferRegion:
        if not old.source.same_as(tensor):
            return old
        starts = where([one.min for one in old.region])
        extents = [one.extent for one in old.region][-len(starts) :]
        extents = [int64(1)] * (len(starts) - len(extents)) + extents
        made = zip(starts, extents, strict=True)
        return tirx.BufferRegion(other, [tvm.ir.Range.from_min_extent(*one) for one in made])

    def block(old: s_tir.SBlock) -> s_tir.SBlock:
        matched = [(one.buffer, region(one.source)) for one in old.match_buffers]
        return ranges.changed_block(
            old,
            reads=[region(one) for one in old.reads],
            writes=[region(one) for one in old.writes],
            match_buffers=[s_tir.MatchBufferRegion(*one) for one in matched],
        )

    callbacks = [(tvm.ir.TensorLoad, load), (tirx.BufferStore, store), (s_tir.SBlock, block)]
    return tvm_ffi.structural_map(stmt, callbacks)
