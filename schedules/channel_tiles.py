"""Scheduling convolutions whose lanes are output channels: `templates.channel_tiles`.

Accumulators of a tile of columns x vectors of channels stay in registers over the whole reduction.
Each vector of weights is loaded once for a tile, each datum is broadcast from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

from bnncc.schedules.intrin import TensorPair

_REDUCED = 2
"""Kind of an axis of a block that is reduced."""

_TAPS = "bnncc.taps"
"""Marks loops over the taps of a window, with which axis of a reduction they are."""

_LANES = "bnncc.lanes"
"""Marks loops over lanes."""


def outer(
    sch: s_tir.Schedule, names: Sequence[str], order: str, shared: int, parallel: bool
) -> None:
    """Order the loops over the tiles of some ranges, and go through them together.

    Parameters
    ----------
    sch : Schedule
        Of the function.
    names : sequence of str
        What the names of the ranges' blocks end with.
    order : str
        The loops from the outside in: n, h, o (tiles of channels) and w (tiles of columns).
    shared : int
        How many of them the ranges have in common.
    parallel : bool
        Whether threads share these.
    """
    inner = []
    for name in names:
        loops = dict(zip("nhow", sch.get_loops(f"out_{name}"), strict=True))
        if order != "nhow":
            sch.reorder(*(loops[axis] for axis in order))
        inner.append(loops[order[shared - 1]])
    if len(inner) > 1:
        sch.merge(*inner)
    if parallel:
        sch.parallel(sch.fuse(*sch.get_loops(f"out_{names[0]}")[:shared]))


def sums(
    sch: s_tir.Schedule, name: str, pair: TensorPair, kw_inside: bool = True,
    unroll: int = 1, under: bool = False, order: str = "kow", rolled: bool = False,
) -> None:  # fmt: skip
    """Schedule the sums of a tile.

    Parameters
    ----------
    sch : Schedule
        Of the function.
    name : str
        What the names of the blocks end with.
    pair : TensorPair
        What computes a product.
    kw_inside : bool, default True
        Whether the taps of a row are unrolled inside the loop over words, or outside.
    unroll : int, default 1
        Words in one turn of that loop.
    under : bool, default False
        Whether they are under the block that takes them further already, and have their start.
    order : str, default "kow"
        Of what is unrolled, from the outside in: k (taps of a row), o (vectors of channels) and w.
    rolled : bool, default False
        Whether the taps of a row are a loop.
    """
    acc = sch.get_sblock(f"acc_{name}")
    if not under:
        # 3 stage: sums under a tile
        sch.compute_at(acc, sch.get_loops(f"out_{name}")[-1], preserve_unit_loops=True)
    # 2 tile: accumulators inside of the reduction
    *_, w, o, kh, kw, c = sch.get_loops(acc)
    body = [{"k": kw, "o": o, "w": w}[axis] for axis in order]
    if unroll > 1:
        c, part = sch.split(c, [None, unroll])
        body = [part, *body]
    if not kw_inside:
        body.remove(kw)
    sch.reorder(*([kh, c] if kw_inside else [kh, kw, c]), *body)
    # 5 unroll
    for loop in body if kw_inside else [kw, *body]:
        if not (rolled and loop is kw):
            sch.unroll(loop)
    if rolled:
        sch.annotate(kw, "pragma_loop_partition_hint", 1)
    if not under:
        init = sch.decompose_reduction(acc, kh)
        for loop in sch.get_loops(init)[-3:-1]:
            sch.unroll(loop)
    mark(sch, kh, 0)
    # 4 tensorize
    if pair.lanes > 1:
        block = sch.get_sblock(f"product_{name}")
        sch.tensorize(sch.get_loops(block)[-1], pair.register())


def in_registers(sch: s_tir.Schedule, tile: Sequence[Any]) -> None:
    """Unroll loops, and make vectors of the last."""
    *unrolled, lane = tile
    for loop in unrolled:
        sch.unroll(loop)
    sch.vectorize(lane)


def mark(sch: s_tir.Schedule, loop: Any, axis: int, least: int = 0) -> None:
    """Have `bounded` leave out taps of a loop.

    Parameters
    ----------
    sch : Schedule
        Of the function.
    loop : LoopRV
        A loop over taps.
    axis : int
        Which of the axes that a block reduces it is.
    least : int, default 0
        How many taps every window has inside the image. LLVM writes code for tiles without
        any, unless it knows of one.
    """
    sch.annotate(loop, _TAPS, [axis, least])


def mark_lanes(sch: s_tir.Schedule, loop: Any) -> None:
    """Have `bounded` make a vector of a loop around a block that changes what it reads.

    The primitive refuses it, as it does not see that every turn has an element of its own.
    """
    sch.annotate(loop, _LANES, 1)


def bounded(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Leave out taps outside the image by the bounds of the loops over them.

    A test in such a loop makes LLVM move accumulators to memory, and loop partitioning, which does
    not find that the turns before and after are empty, makes the code three times as long.

    Parameters
    ----------
    func : tirx.PrimFunc
        With loops that were given to `mark`.

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
        realize, reduced = next((b, axes) for b in blocks if (axes := _reduced(b.block)))
        axis, least = map(int, loop.annotations[_TAPS])
        block, number = realize.block, reduced[axis]
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


def _replaced(old: Any, number: int, body: Any, block: Any) -> Any:
    if not block.same_as(old):
        return block
    # No reduction any more: TVM would allocate sums outside of all loops that its value depends on.
    iters = [*block.iter_vars]
    iters[number] = tirx.IterVar(iters[number].dom, iters[number].var, tirx.IterVar.DataPar)
    return s_tir.SBlock(
        iters, block.reads, block.writes, block.name_hint, body, block.init,
        block.alloc_buffers, block.match_buffers, block.annotations,
    )  # fmt: skip
