"""Partition of a definition into ranges of its output that are scheduled separately.

Border pixels, and channels that do not fill a vector, get code of their own; in a range of equal
tiles, TVM then proves all conditions. TVM's own loop partitioning runs too late for this: after it,
there are no blocks to schedule, and it cannot duplicate the buffers of sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.sym import Analyzer

from bnncc.schedules.expressions import of_kind
from bnncc.topi_binary.definitions.blocks import int64

Bounds = Mapping[int, tuple[Any, Any]]
"""By index of a loop: first iteration and number of iterations, as int or int64 expressions."""

SIZE = "bnncc_size"
"""Annotation of a loop over vectors: the index of its size in what is passed to `divided`."""

WHERE_ANY = "bnncc_where_any"
"""Annotation of a loop that prepares what other loops use, see `unless_empty`."""

REST_LANES = 4
"""Vectors of a rest whose size is symbolic."""


def part(
    func: tirx.PrimFunc, bounds: Mapping[str, Bounds], shared: Sequence[str] = ()
) -> tirx.PrimFunc:
    """Return a definition for a range of the output.

    Parameters
    ----------
    func : tirx.PrimFunc
        Loop nests around one block each.
    bounds : mapping of str to Bounds
        By name of each block that is kept.
    shared : sequence of str, optional
        Blocks whose tensors all parts share (besides results); one part allocates these.

    Returns
    -------
    tirx.PrimFunc
        With the parameters of `func`, and new loop variables and intermediate tensors.
    """
    root = func.body.block
    common = [*func.params]
    for block in blocks(func):
        if block.name_hint in shared:
            made = (region.source for region in block.writes)
            common += [tensor for tensor in made if tensor in root.alloc_buffers]
    kept = []
    for stmt in statements(root.body):
        loops, realize = opened(stmt)
        name = realize.block.name_hint if loops else ""
        if not loops or name in bounds:
            kept.append(_cut(loops, realize, bounds[name]) if loops else stmt)
    body = rooted(func, sequence(kept), root.alloc_buffers)
    return func.with_body(with_own_variables(body, common))


def with_parameters(func: tirx.PrimFunc, other: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return `func` with the parameters of another function that has the same ones."""
    same = dict(zip(func.params, other.params, strict=True))
    for old, new in zip(func.params, other.params, strict=True):
        same |= {
            extent: given
            for extent, given in zip(old.shape, new.shape, strict=True)
            if isinstance(extent, tirx.Var)
        }
    body = tvm_ffi.structural_map(func.body, (tirx.Var, partial(_found, same)))
    return other.with_body(body)


def blocks(func: tirx.PrimFunc) -> list[s_tir.SBlock]:
    """Return the blocks of a definition, each the body of a loop nest."""
    found = (opened(stmt) for stmt in statements(func.body.block.body))
    return [realize.block for loops, realize in found if loops]


def views(func: tirx.PrimFunc, params: Iterable[Any]) -> set[Any]:
    """Return parameters and all buffers declared as other views of them."""
    found = {*params}
    for stmt in of_kind(func.body, tirx.DeclBuffer):
        if found & {*of_kind(stmt.data, tirx.Var)}:
            found.add(stmt.buffer)
    return found


def _cut(loops: Sequence[tirx.For], realize: s_tir.SBlockRealize, bounds: Bounds) -> tirx.Stmt:
    first = {loops[i].loop_var: loops[i].loop_var + _int64(bounds[i][0]) for i in bounds}
    values = [first.get(value, value) for value in realize.iter_values]
    made: tirx.Stmt = s_tir.SBlockRealize(values, realize.predicate, realize.block)
    for number, loop in reversed([*enumerate(loops)]):
        extent = _int64(bounds[number][1]) if number in bounds else loop.extent
        made = tirx.For(loop.loop_var, loop.min, extent, loop.kind, made)
    return made


def exchanged(func: tirx.PrimFunc, axes: Mapping[str, tuple[int, int]]) -> tirx.PrimFunc:
    """Return a definition in which two axes of blocks, and their loops, have changed places.

    Parameters
    ----------
    func : tirx.PrimFunc
        Loop nests around one block each, with one loop for each axis.
    axes : mapping of str to (int, int)
        By name of a block; others stay as they are.
    """
    root, done = func.body.block, []
    for stmt in statements(root.body):
        loops, realize = opened(stmt)
        if not loops or realize.block.name_hint not in axes:
            done.append(stmt)
            continue
        order = list(range(len(loops)))
        a, b = axes[realize.block.name_hint]
        order[a], order[b] = b, a
        values, iters = realize.iter_values, realize.block.iter_vars
        block = changed_block(realize.block, iter_vars=[iters[i] for i in order])
        made: tirx.Stmt = s_tir.SBlockRealize([values[i] for i in order], realize.predicate, block)
        for i in reversed(order):
            loop = loops[i]
            made = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, made)
        done.append(made)
    return func.with_body(rooted(func, sequence(done), root.alloc_buffers))


def _int64(value: Any) -> Any:
    return int64(value) if isinstance(value, int) else value


def ends(func: tirx.PrimFunc, number: int, count: int) -> tirx.PrimFunc:
    """Return a scheduled function in which the first and last iterations of a loop are a new loop.

    Parameters
    ----------
    func : tirx.PrimFunc
        A single loop nest.
    number : int
        Index of the loop, from the outside in.
    count : int
        Iterations at each end.

    Returns
    -------
    tirx.PrimFunc
        With two loops instead of the one: over the two ends, and over the iterations of each.
    """

    def replaced(loops: list[tirx.For], body: tirx.Stmt) -> tirx.Stmt:
        *outer, turn = loops
        side, own = (tirx.Var(name, turn.loop_var.ty) for name in ("side", "turn"))
        body = renamed(body, {turn.loop_var: side * (turn.extent - count) + own})
        for var, extent in ((own, count), (side, 2)):
            body = tirx.For(var, turn.min, int64(extent), turn.kind, body)
        for loop in reversed(outer):
            body = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body)
        return body

    return _with_loops(func, number + 1, replaced)


def unless_empty(func: tirx.PrimFunc, count: Any) -> tirx.PrimFunc:
    """Return a scheduled function in which loops with `WHERE_ANY` do not run if `count` is 0."""

    def loop(node: tirx.For) -> tirx.For:
        if WHERE_ANY not in node.annotations:
            return node
        extent = node.extent
        if not isinstance(count, int):
            extent = extent * tirx.Cast(str(extent.ty), count > 0)
        return tirx.For(node.loop_var, node.min, extent, node.kind, node.body)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, loop)))


def divided(func: tirx.PrimFunc, sizes: Sequence[Any]) -> tirx.PrimFunc:
    """Return a scheduled function in which loops over vectors have only complete ones.

    Parameters
    ----------
    func : tirx.PrimFunc
        Each loop with the annotation `SIZE` contains one vectorized loop. If it has been split from
        ``size`` iterations into vectors of ``lanes``, it runs ``ceil(size / lanes)`` times.
    sizes : sequence of int or Expr
        Those that annotations refer to.

    Returns
    -------
    tirx.PrimFunc
        The rest is one shorter vector behind the loop, without any condition. If its size is
        symbolic, it is loops over vectors of `REST_LANES` and over single elements.
    """

    def loop(node: tirx.For) -> tirx.Stmt:
        number = node.annotations.get(SIZE)
        return node if number is None else _divided(node, sizes[int(number)])

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, loop)))


def _divided(loop: tirx.For, size: Any) -> tirx.Stmt:
    loops = of_kind(loop.body, tirx.For)
    (vector,) = (inner for inner in loops if inner.kind == tirx.ForKind.VECTORIZED)
    lanes, kind, known = int(vector.extent), loop.loop_var.ty, Analyzer()

    def number(value: int) -> Any:
        return tirx.const(value, str(kind))

    def piece(turn: Any, first: Any, count: int) -> tirx.Stmt:
        own = tirx.Var("lane", kind)
        place = known.simplify(first + (number(0) if count == 1 else own))

        def lane(node: tirx.For) -> tirx.Stmt:
            if not node.loop_var.same_as(vector.loop_var):
                return node
            body = renamed(node.body, {vector.loop_var: place})
            return body if count == 1 else tirx.For(own, number(0), number(count), node.kind, body)

        def always(node: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
            return s_tir.SBlockRealize(node.iter_values, tirx.const(True), node.block)

        callbacks = [(tirx.For, lane), (s_tir.SBlockRealize, always)]
        body = tvm_ffi.structural_map(loop.body, callbacks)
        return with_own_variables(renamed(body, {loop.loop_var: turn}))

    def turns(count: Any, how: Any, body: Callable[[tirx.Var], tirx.Stmt]) -> tirx.Stmt:
        var = tirx.Var("turn", kind)
        return tirx.For(var, number(0), count, how, body(var))

    if isinstance(size, int):
        whole, rest = number(size // lanes), size % lanes
        steps = [piece(whole, number(0), rest)] if rest else []
    else:
        whole, rest = tirx.floordiv(size, lanes), tirx.floormod(size, lanes)
        done, steps, serial = number(0), [], tirx.ForKind.SERIAL
        if lanes > REST_LANES:
            short = tirx.floordiv(rest, REST_LANES)
            done, rest = short * REST_LANES, tirx.floormod(rest, REST_LANES)
            steps = [turns(short, serial, lambda k: piece(whole, k * REST_LANES, REST_LANES))]
        steps.append(turns(rest, serial, lambda k: piece(whole, done + k, 1)))
    main = turns(whole, loop.kind, lambda k: piece(k, number(0), lanes))
    return sequence([main, *steps])


def with_own_variables(stmt: tirx.Stmt, common: Sequence[tirx.Var] = ()) -> tirx.Stmt:
    """Return a copy of a statement with new variables, except free ones and those in `common`."""
    own = {var: var for var in (*common, *tirx.analysis.undefined_vars(stmt, []))}

    def fresh(var: tirx.Var) -> tirx.Var:
        if var not in own:
            own[var] = tirx.Var(var.name, var.ty)
        return own[var]

    return tvm_ffi.structural_map(stmt, (tirx.Var, fresh))


def parallel(func: tirx.PrimFunc, count: int) -> tirx.PrimFunc:
    """Return a scheduled function whose outermost loops are one parallel loop.

    Parameters
    ----------
    func : tirx.PrimFunc
        A single loop nest.
    count : int
        Number of loops that are fused.

    Returns
    -------
    tirx.PrimFunc
    """

    def replaced(loops: list[tirx.For], body: tirx.Stmt) -> tirx.Stmt:
        fused = tirx.Var("fused", loops[0].loop_var.ty)
        rest, total, places = fused, int64(1), {}
        turning = [loop for loop in loops if not _single(loop)]
        for loop in reversed(loops):
            if _single(loop):
                places[loop.loop_var] = int64(0)
                continue
            # TVM cannot prove that a remainder by a symbol is below that symbol.
            places[loop.loop_var] = rest if loop is turning[0] else rest % loop.extent
            rest, total = rest // loop.extent, total * loop.extent
        return tirx.For(fused, int64(0), total, tirx.ForKind.PARALLEL, renamed(body, places))

    return _with_loops(func, count, replaced)


def _single(loop: tirx.For) -> bool:
    return isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 1


def _with_loops(
    func: tirx.PrimFunc, count: int, replaced: Callable[[list[tirx.For], tirx.Stmt], tirx.Stmt]
) -> tirx.PrimFunc:
    """Return a function whose `count` outermost loops, with their body, are replaced."""
    root = func.body.block
    steps = statements(root.body)
    (nest,) = (stmt for stmt in steps if isinstance(stmt, tirx.For))
    body = replaced(*opened(nest, count))
    done = sequence([body if stmt is nest else stmt for stmt in steps])
    return func.with_body(rooted(func, done, root.alloc_buffers))


def renamed(stmt: tirx.Stmt, names: Mapping[tirx.Var, Any]) -> Any:
    """Return a statement with expressions in place of variables."""
    return tvm_ffi.structural_map(stmt, (tirx.Var, lambda var: names.get(var, var)))


def joined(parts: Sequence[tirx.PrimFunc], shared: int) -> tirx.PrimFunc:
    """Merge the scheduled parts of a function into one loop nest.

    Parameters
    ----------
    parts : sequence of tirx.PrimFunc
        In execution order; each is a single loop nest.
    shared : int
        Number of outer loops that they share.

    Returns
    -------
    tirx.PrimFunc
    """
    roots = [func.body.block for func in parts]
    views: list[tirx.Stmt] = []
    bodies: list[tirx.Stmt] = []
    common: list[tirx.For] = []
    for root in roots:
        steps = statements(root.body)
        (nest,) = (stmt for stmt in steps if isinstance(stmt, tirx.For))
        views += [stmt for stmt in steps if stmt is not nest]
        loops, body = opened(nest, shared)
        common = common or loops
        same = {old.loop_var: new.loop_var for old, new in zip(loops, common, strict=True)}
        renamed = partial(_found, same)
        bodies.append(tvm_ffi.structural_map(body, (tirx.Var, renamed)))
    made = sequence(bodies)
    for loop in reversed(common):
        made = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, made)
    tensors = list(dict.fromkeys(tensor for root in roots for tensor in root.alloc_buffers))
    return parts[0].with_body(rooted(parts[0], sequence([*views, made]), tensors))


def followed(parts: Sequence[tirx.PrimFunc]) -> tirx.PrimFunc:
    """Concatenate the scheduled parts of a function."""
    roots = [func.body.block for func in parts]
    body = sequence([stmt for root in roots for stmt in statements(root.body)])
    tensors = list(dict.fromkeys(tensor for root in roots for tensor in root.alloc_buffers))
    return parts[0].with_body(rooted(parts[0], body, tensors))


def _found(same: Mapping[tirx.Var, tirx.Var], var: tirx.Var) -> tirx.Var:
    return same.get(var, var)


def sequence(stmts: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """Return the only statement, or a sequence of all."""
    return tirx.SeqStmt(stmts) if len(stmts) > 1 else stmts[0]


def statements(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """Return the statements of a sequence."""
    return list(stmt.seq) if isinstance(stmt, tirx.SeqStmt) else [stmt]


def nests(func: tirx.PrimFunc) -> tuple[list[tirx.Stmt], list[tirx.For]]:
    """Return the declarations of a function, and its loop nests."""
    stmts = statements(func.body.block.body)
    views = [stmt for stmt in stmts if not isinstance(stmt, tirx.For)]
    return views, [stmt for stmt in stmts if isinstance(stmt, tirx.For)]


def opened(stmt: tirx.Stmt, most: int = sys.maxsize) -> tuple[list[tirx.For], tirx.Stmt]:
    """Return the outermost loops of a nest, `most` at most, and their body."""
    loops: list[tirx.For] = []
    while isinstance(stmt, tirx.For) and len(loops) < most:
        loops.append(stmt)
        stmt = stmt.body
    return loops, stmt


def looped(
    loop: tirx.For, body: tirx.Stmt, annotations: Mapping[str, Any] | None = None
) -> tirx.For:
    """Return a loop with another body, and other annotations."""
    extent, kind = loop.extent, loop.kind
    return tirx.For(loop.loop_var, loop.min, extent, kind, body, annotations=annotations)


def rooted(func: tirx.PrimFunc, body: tirx.Stmt, tensors: Sequence[Any]) -> tirx.Stmt:
    """Return a body for `func` that allocates `tensors`."""
    old = func.body.block
    block = s_tir.SBlock([], old.reads, old.writes, old.name_hint, body, None, tensors)
    return s_tir.SBlockRealize([], tirx.const(True), block)


def changed_block(block: s_tir.SBlock, **changes: Any) -> s_tir.SBlock:
    """Return a block with other values of some fields."""
    names = (
        "iter_vars", "reads", "writes", "name_hint", "body", "init", "alloc_buffers",
        "match_buffers", "annotations",
    )  # fmt: skip
    return s_tir.SBlock(*({name: getattr(block, name) for name in names} | changes).values())
