"""Schedule for portable C and scalar processors: sums are computed where they are used.

A definition computes the sums of a whole layer before the steps that follow. Here the sums of one
pixel and channel vector become local variables of the loop that uses them, unless that would
compute anything twice. Lanes are the innermost loops: a data element is loaded once for all of
them, and a C compiler can vectorize them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import mul

from tvm import s_tir, tirx

from bnncc.schedules import ranges
from bnncc.schedules.epilogue import BLOCKS
from bnncc.schedules.expressions import small_when_inlined
from bnncc.schedules.generic import attempt
from bnncc.topi_binary.definitions.conv2d import CODED

_SPATIAL, _REDUCED = 0, 2


def schedule(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Schedule a definition, or a function that TVM legalized.

    Parameters
    ----------
    func : tirx.PrimFunc
        With static shapes.

    Returns
    -------
    tirx.PrimFunc
        Same name, parameters and results.
    """
    if CODED in _outermost(sch := s_tir.Schedule(func)):
        sch.compute_inline(CODED)
        func = sch.mod["main"]
    names = _outermost(s_tir.Schedule(func))
    outs = [name for name in names if name in BLOCKS]
    made = _in_parts(func, names) if outs[1:] else _scheduled(func, outs).mod["main"]
    for key, value in (func.attrs or {}).items():
        made = made.with_attr(key, value)
    return made


def _in_parts(func: tirx.PrimFunc, names: Sequence[str]) -> tirx.PrimFunc:
    """Schedule the channels that fill vectors and the last channels separately."""
    kept = [
        [n for n in names if not n.endswith("_last")],
        [n for n in names if n.endswith("_last") or f"{n}_last" not in names],
    ]
    # Blocks that stay outside all loops are computed once.
    _, left = _gathered(ranges.part(func, {n: {} for n in kept[0]}), BLOCKS[0])
    both = [n for n in names if n.removesuffix("_last") in left]
    parts = [_scheduled(ranges.part(func, {n: {}}, both), ()) for n in both]
    for out, blocks in zip(BLOCKS, kept, strict=True):
        some: dict[str, ranges.Bounds] = {n: {} for n in blocks if n not in both}
        parts.append(_scheduled(ranges.part(func, some, both), (out,)))
    return ranges.followed([part.mod["main"] for part in parts])


def _scheduled(func: tirx.PrimFunc, outs: Sequence[str]) -> s_tir.Schedule:
    sch = s_tir.Schedule(func)
    names = _outermost(sch)
    for out in outs:
        sch, _ = _gathered(func, out)
    for name in names:
        sch = attempt(sch, _reordered, name)
    for name in outs:
        for step in [
            sch.get(step).name_hint for step in sch.get_child_blocks(sch.get_sblock(name))
        ]:
            sch = attempt(sch, _inlined, name, step)
    return sch


def _gathered(func: tirx.PrimFunc, out: str) -> tuple[s_tir.Schedule, list[str]]:
    """Move blocks into the loops of `out`; return the names of those that remain outside."""
    sch, left = s_tir.Schedule(func), []
    names = _outermost(sch)
    for name in reversed(names[: names.index(out)]):
        moved = attempt(sch, _near, name, out)
        left += [name] if moved is sch else []
        sch = moved
    return sch, left


def _outermost(sch: s_tir.Schedule) -> list[str]:
    """Return the names of the blocks that are not inside another block."""
    return [sch.get(block).name_hint for block in sch.get_child_blocks(sch.get_sblock("root"))]


def _near(sch: s_tir.Schedule, name: str, out: str) -> None:
    """Compute a block inside the loops of another one.

    Raises
    ------
    ValueError
        If it would compute something twice.
    """
    before = _turns(sch, name)
    sch.compute_at(name, sch.get_loops(out)[-1], preserve_unit_loops=True)
    if _turns(sch, name) > before:
        raise ValueError


def _turns(sch: s_tir.Schedule, name: str) -> int:
    return reduce(mul, (int(sch.get(loop).extent) for loop in sch.get_loops(name)), 1)


def _reordered(sch: s_tir.Schedule, name: str) -> None:
    """Move reduction loops outside the lanes, and the initialization before both."""
    kinds = [int(var.iter_type) for var in sch.get(sch.get_sblock(name)).iter_vars]
    loops = sch.get_loops(name)[-len(kinds) :]
    reduced = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == _REDUCED]
    if not reduced:
        return
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == _SPATIAL]
    sch.reorder(*spatial[:-1], *reduced, spatial[-1])
    sch.decompose_reduction(name, reduced[0])


def _inlined(sch: s_tir.Schedule, name: str, step: str) -> None:
    """Inline a step into its only reader, if that stays small; initialize words before the loop."""
    body = sch.get(sch.get_sblock(step))
    if body.init is not None:
        sch.decompose_reduction(step, sch.get_loops(step)[-1])
        return
    made = body.writes[0].source
    blocks = [sch.get(b) for b in sch.get_child_blocks(sch.get_sblock(name))]
    readers = [b for b in blocks if any(read.source.same_as(made) for read in b.reads)]
    inlinable = len(readers) == 1 and isinstance(body.body, tirx.BufferStore)
    if inlinable and small_when_inlined(sch, sch.get_sblock(step)):
        sch.compute_inline(step)


__all__ = ["schedule"]
