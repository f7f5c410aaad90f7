"""Software pipelining: what a step of a loop reads is computed several steps earlier.

Between vector stores and a tile load of the same bytes there is no forwarding, so the load waits
until the stores have left the core. If the vectors are stored some steps ahead, they also fill the
time in which the tile unit multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from bnncc.schedules import ranges
from bnncc.schedules.expressions import of_kind
from bnncc.topi_binary.definitions.blocks import int64

STEP = "bnncc_step"
"""Annotation of the outer one of the two loops over the elements of a part."""


def ahead(func: tirx.PrimFunc, part: int, distance: int, kept: bool) -> list[tirx.PrimFunc]:
    """Return a scheduled function in which elements are computed `distance` steps ahead.

    Parameters
    ----------
    func : tirx.PrimFunc
        A single loop nest. A loop with the annotation `STEP` contains another one, whose body
        computes an element of a tensor and then uses it. One of the outer loops is over the parts
        of this tensor; the others repeat this.
    part : int
        Index of the loop over parts, from the outside in.
    distance : int
        At most the number of all elements; without `kept`, less than those of a part.
    kept : bool
        Whether the tensor is computed in the first iteration of the loops that repeat it, and kept
        for the others. Otherwise, it is computed each time, and memory is a ring of elements; the
        loop over parts must be the outermost one.

    Returns
    -------
    list of tirx.PrimFunc
        Two parts, in execution order.
    """
    root, first = func.body.block, list[tirx.Stmt]()
    how = part, distance, kept
    steps = [_shifted(stmt, [], how, first) for stmt in ranges.statements(root.body)]
    tensor = _block(first[0]).writes[0].source
    parts = [
        func.with_body(ranges.rooted(func, ranges.sequence(some), root.alloc_buffers))
        for some in (first, steps)
    ]
    return parts if kept else _in_ring(parts, tensor, distance)


def _shifted(
    stmt: tirx.Stmt, outer: list[tirx.For], how: tuple[int, int, bool], first: list[tirx.Stmt]
) -> tirx.Stmt:
    """Return a loop nest with the producer moved ahead; `first` gets what runs before the nest."""
    if not any(STEP in loop.annotations for loop in of_kind(stmt, tirx.For)):
        return stmt
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_shifted(some, outer, how, first) for some in stmt.seq])
    if STEP not in stmt.annotations:
        body = _shifted(stmt.body, [*outer, stmt], how, first)
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body)
    number, distance, kept = how
    steps = [stmt, stmt.body]
    producer, *rest = ranges.statements(stmt.body.body)
    part, others = outer[number], outer[:number] + outer[number + 1 :]
    inner = int(steps[1].extent)
    count = int(steps[0].extent) * inner

    def at(part_: Any, step: Any) -> tirx.Stmt:
        """Return the producer for an element."""
        places = {loop.loop_var: int64(0) for loop in others} if kept else {}
        places |= {part.loop_var: part_, steps[0].loop_var: step // inner}
        return ranges.with_own_variables(
            ranges.renamed(producer, {**places, steps[1].loop_var: step % inner})
        )

    early = tirx.Var("early", steps[0].loop_var.ty)
    zeros = {loop.loop_var: int64(0) for loop in others}
    start = ranges.renamed(at(early // count, early % count), zeros)
    first.append(tirx.For(early, int64(0), int64(distance), tirx.ForKind.SERIAL, start))
    now = steps[0].loop_var * inner + steps[1].loop_var + distance
    if kept:
        tests = [tirx.EQ(loop.loop_var, int64(0)) for loop in others]
        later, wanted = part.loop_var + now // count, part.loop_var + now // count < part.extent
        wanted = _all([*tests, wanted])
    else:
        over = _all([now >= count, *(tirx.EQ(one.loop_var, one.extent - 1) for one in others)])
        later = part.loop_var + tirx.Select(over, int64(1), int64(0))
        wanted = tirx.Not(tirx.And(over, tirx.EQ(part.loop_var, part.extent - 1)))
    body: tirx.Stmt = tirx.SeqStmt([tirx.IfThenElse(wanted, at(later, now % count), None), *rest])
    for loop in reversed(steps):
        marks = {STEP: int64(1)} if loop is stmt else None
        kind = loop.kind
        body = tirx.For(loop.loop_var, loop.min, loop.extent, kind, body, annotations=marks)
    return body


def behind(parts: Sequence[tirx.PrimFunc], shared: int) -> list[tirx.PrimFunc]:
    """Merge sums and their results; results are computed while the next sums are.

    Parameters
    ----------
    parts : sequence of tirx.PrimFunc
        Single loop nests with the same outer loops. The first one stores sums; inside is a loop
        over runs, and in that a loop with the annotation `STEP`. The second one, which has a loop
        over rows and one over columns inside, computes results from the sums. Others follow it.
    shared : int
        Number of outer loops.

    Returns
    -------
    list of tirx.PrimFunc
        The merged nest, and the last results. Sums are kept of two iterations of the outer loops.
    """
    roots = [func.body.block for func in parts]
    nests, views = [], []
    for root in roots:
        for stmt in ranges.statements(root.body):
            (nests if isinstance(stmt, tirx.For) else views).append(stmt)
    outer, body = ranges.opened(nests[0], shared)
    later = [ranges.opened(nest, shared) for nest in nests[1:]]
    (row, column), result = ranges.opened(later[0][1], 2)
    number, total = int64(0), int64(1)
    for loop in outer:
        number, total = number * loop.extent + loop.loop_var, total * loop.extent

    tensor = next(
        region.source for found in of_kind(body, s_tir.SBlock) for region in found.writes
        if found.name_hint.startswith("sum") and region.source in roots[0].alloc_buffers
        and region.source.scope() == "global"
    )  # fmt: skip
    held = tirx.decl_buffer((int64(2), *tensor.shape[-2:]), tensor.dtype, "held")

    def values(number: Any) -> list[Any]:
        """Return the values of the outer loops in the iteration with this number."""
        made = []
        for loop in reversed(outer):
            made.append(number if loop is outer[0] else number % loop.extent)
            number = number // loop.extent
        return made[::-1]

    def finished(stmt: tirx.Stmt, which: int, at: Sequence[Any], slot: Any, more: Any) -> tirx.Stmt:
        """Return a part of the results of an iteration."""
        loops, _ = later[which]
        named = {loop.loop_var: value for loop, value in zip(loops, at, strict=True)} | more
        made = _in_slot(ranges.renamed(stmt, named), tensor, held, slot)
        return ranges.with_own_variables(made)

    before = [tirx.Var("before", loop.loop_var.ty) for loop in outer]
    runs = next(loop for loop in of_kind(body, tirx.For) if _stepped(loop.body))
    rows, columns = int(row.extent), int(column.extent)

    def step(loop: tirx.For) -> tirx.For:
        """Insert the results that a step computes: some columns of a row."""
        if STEP not in loop.annotations:
            return loop
        slots = int(runs.extent) * int(loop.extent)
        sizes = [size for size in range(1, columns + 1) if columns % size == 0]
        size = next((k for k in sizes if rows * columns // k <= slots), columns)
        units, every = rows * columns // size, columns // size
        each = -(-units // slots)
        turn, own = (tirx.Var(name, loop.loop_var.ty) for name in ("turn", "unit"))
        unit = (runs.loop_var * loop.extent + loop.loop_var) * each + own
        place = {row.loop_var: unit // every, column.loop_var: unit % every * size + turn}
        made = finished(result, 0, before, (number + 1) % 2, place)
        made = tirx.For(turn, int64(0), int64(size), tirx.ForKind.SERIAL, made)
        made = tirx.IfThenElse(_all([number > 0, unit < units]), made, None)
        made = tirx.For(own, int64(0), int64(each), tirx.ForKind.SERIAL, made)
        body = tirx.SeqStmt([made, *ranges.statements(loop.body)])
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body)

    body = _in_slot(body, tensor, held, number % 2)
    body = tvm_ffi.structural_map(body, (tirx.For, step))
    earlier = values(tirx.max(number - 1, int64(0)))
    steps = [tirx.Bind(var, value) for var, value in zip(before, earlier, strict=True)]
    steps += ranges.statements(body)
    for which, (_, stmt) in enumerate(later[1:], 1):
        rest = finished(stmt, which, before, (number + 1) % 2, {})
        steps.append(tirx.IfThenElse(number > 0, rest, None))
    merged: tirx.Stmt = tirx.SeqStmt(steps)
    for loop in reversed(outer):
        merged = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, merged)
    last = [
        finished(stmt, which, values(total - 1), (total + 1) % 2, {})
        for which, (_, stmt) in enumerate(later)
    ]
    tensors = [one for root in roots for one in root.alloc_buffers if not one.same_as(tensor)]
    tensors = [held, *dict.fromkeys(tensors)]
    return [
        parts[0].with_body(ranges.rooted(parts[0], ranges.sequence([*views, step]), tensors))
        for step in (merged, *last)
    ]


def _stepped(stmt: tirx.Stmt) -> bool:
    """Return whether a loop with the annotation `STEP` is one of the statements."""
    return any(
        isinstance(some, tirx.For) and STEP in some.annotations for some in ranges.statements(stmt)
    )


def _in_slot(stmt: tirx.Stmt, tensor: Any, held: Any, slot: Any) -> tirx.Stmt:
    """Return a statement that accesses sums [.., window, lane] in `held`."""

    def load(node: tvm.ir.TensorLoad) -> Any:
        if not node.source.same_as(tensor):
            return node
        return tirx.BufferLoad(held, [slot, *node.indices[-2:]])

    def region(old: tirx.BufferRegion) -> tirx.BufferRegion:
        if not old.source.same_as(tensor):
            return old
        where = [tvm.ir.Range.from_min_extent(slot, int64(1)), *old.region[-2:]]
        return tirx.BufferRegion(held, where)

    def block(old: s_tir.SBlock) -> s_tir.SBlock:
        return _with_regions(old, region)

    return tvm_ffi.structural_map(stmt, ((tvm.ir.TensorLoad, load), (s_tir.SBlock, block)))


def _with_regions(old: s_tir.SBlock, region: Callable[..., tirx.BufferRegion]) -> s_tir.SBlock:
    matched = [(one.buffer, region(one.source)) for one in old.match_buffers]
    return ranges.changed_block(
        old,
        reads=[region(one) for one in old.reads],
        writes=[region(one) for one in old.writes],
        match_buffers=[s_tir.MatchBufferRegion(*one) for one in matched],
    )


def _all(tests: Sequence[Any]) -> Any:
    made = tests[0]
    for test in tests[1:]:
        made = tirx.And(made, test)
    return made


def _block(stmt: tirx.Stmt) -> s_tir.SBlock:
    while isinstance(stmt, tirx.For):
        stmt = stmt.body
    return stmt.block


def _in_ring(parts: list[tirx.PrimFunc], tensor: Any, distance: int) -> list[tirx.PrimFunc]:
    """Replace a tensor [part, element axes, rows, columns] by a ring of elements."""
    _, *axes, rows, columns = tensor.shape
    count = math.prod(map(int, axes))
    turns = next(size for size in range(distance + 1, count + 1) if count % size == 0)
    ring = tirx.decl_buffer((int64(turns), rows, columns), tensor.dtype, "ring")

    def slot(indices: Any) -> Any:
        place: Any = int64(0)
        for index, axis in zip(indices, axes, strict=True):
            place = place * axis + index
        return place % turns

    def region(old: tirx.BufferRegion) -> tirx.BufferRegion:
        if not old.source.same_as(tensor):
            return old
        where = slot([one.min for one in old.region[1:-2]])
        element = tvm.ir.Range.from_min_extent(where, int64(1))
        return tirx.BufferRegion(ring, [element, *old.region[-2:]])

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        if not node.buffer.same_as(tensor):
            return node
        where = [slot(node.indices[1:-2]), *node.indices[-2:]]
        return tirx.BufferStore(ring, node.value, where)

    def block(old: s_tir.SBlock) -> s_tir.SBlock:
        return _with_regions(old, region)

    replaced = ((tirx.BufferStore, store), (s_tir.SBlock, block))
    made = []
    for func in parts:
        root = func.body.block
        body = tvm_ffi.structural_map(root.body, replaced)
        tensors = [ring, *(one for one in root.alloc_buffers if not one.same_as(tensor))]
        made.append(func.with_body(ranges.rooted(func, body, tensors)))
    return made
