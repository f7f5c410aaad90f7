"""Ranges of a definition's output, each scheduled alone: borders and rests apart from the others.

What a window skips outside the image, and vectors that the last channels do not fill, are code of
their own: in a range of equal tiles TVM finds that the tests in it always hold. TVM's own
partitioning of loops comes too late for this: it knows no blocks, and copies no tensor of sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

from bnncc.topi_binary.definitions.blocks import int64


def part(func: tirx.PrimFunc, bounds: Mapping[int, tuple[int, int]]) -> tirx.PrimFunc:
    """Return a definition for a range of its output.

    Parameters
    ----------
    func : tirx.PrimFunc
        Nests of loops that begin with the same axes, those of the output.
    bounds : mapping of int to (int, int)
        By the number of an axis: where it begins, and how many turns it has.

    Returns
    -------
    tirx.PrimFunc
        With the parameters of `func`, and loops and tensors of its own.
    """
    root = func.body.block
    kept = {var: var for var in tirx.analysis.undefined_vars(func.body, [])}
    kept |= {var: var for var in func.params}

    def fresh(var: tirx.Var) -> tirx.Var:
        if var not in kept:
            kept[var] = tirx.Var(var.name, var.ty)
        return kept[var]

    def cut(stmt: tirx.Stmt, axis: int, first: dict[tirx.Var, Any]) -> tirx.Stmt:
        if isinstance(stmt, tirx.For):
            start, extent = bounds.get(axis, (0, stmt.extent))
            if axis in bounds:
                first[stmt.loop_var] = stmt.loop_var + int64(start)
                extent = int64(extent)
            return tirx.For(
                stmt.loop_var, stmt.min, extent, stmt.kind, cut(stmt.body, axis + 1, first)
            )
        values = [first.get(value, value) for value in stmt.iter_values]
        return s_tir.SBlockRealize(values, stmt.predicate, stmt.block)

    nests = root.body.seq if isinstance(root.body, tirx.SeqStmt) else [root.body]
    body = _root(root, tirx.SeqStmt([cut(nest, 0, {}) for nest in nests]), root.alloc_buffers)
    return func.with_body(tvm_ffi.structural_map(body, (tirx.Var, fresh)))


def joined(parts: Sequence[tirx.PrimFunc], shared: int) -> tirx.PrimFunc:
    """Return the scheduled parts of a function as one.

    Parameters
    ----------
    parts : sequence of tirx.PrimFunc
        In the order in which they run.
    shared : int
        How many loops they have in common.

    Returns
    -------
    tirx.PrimFunc
    """
    first, *others = (_opened(func.body.block.body, shared) for func in parts)
    bodies = [first[1]]
    for loops, body in others:
        same = {old.loop_var: new.loop_var for old, new in zip(loops, first[0], strict=True)}
        bodies.append(tvm_ffi.structural_map(body, (tirx.Var, lambda var: same.get(var, var))))
    made: tirx.Stmt = tirx.SeqStmt(bodies) if others else bodies[0]
    for loop in reversed(first[0]):
        made = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, made)
    tensors = [tensor for func in parts for tensor in func.body.block.alloc_buffers]
    return parts[0].with_body(_root(parts[0].body.block, made, tensors))


def _opened(stmt: tirx.Stmt, shared: int) -> tuple[list[tirx.For], tirx.Stmt]:
    loops = []
    for _ in range(shared):
        loops.append(stmt)
        stmt = stmt.body
    return loops, stmt


def _root(old: s_tir.SBlock, body: tirx.Stmt, tensors: Sequence[Any]) -> tirx.Stmt:
    block = s_tir.SBlock([], old.reads, old.writes, old.name_hint, body, None, tensors)
    return s_tir.SBlockRealize([], tirx.const(True), block)
