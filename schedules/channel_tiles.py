"""Scheduling convolutions whose lanes are output channels: `templates.channel_tiles`.

Accumulators of a tile of columns x vectors of channels stay in registers over the whole reduction.
Each vector of weights is loaded once for a tile, each datum is broadcast from memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import s_tir

from bnncc.schedules.intrin import TensorPair


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
    sch: s_tir.Schedule, name: str, pair: TensorPair | None, kw_inside: bool = True,
    unroll: int = 1, under: bool = False, columns_first: bool = False, rolled: bool = False,
) -> None:  # fmt: skip
    """Schedule the sums of a tile.

    Parameters
    ----------
    sch : Schedule
        Of the function.
    name : str
        What the names of the blocks end with.
    pair : TensorPair or None
        What computes a product, where that is a loop over lanes.
    kw_inside : bool, default True
        Whether the taps of a row are unrolled inside the loop over words, or outside.
    unroll : int, default 1
        Words in one turn of that loop.
    under : bool, default False
        Whether they are under the block that takes them further already, and have their start.
    columns_first : bool, default False
        Whether a datum meets all vectors of weights in turn, or those meet all data of a tile.
    rolled : bool, default False
        Whether the taps of a row are a loop, for each column of a tile.
    """
    acc = sch.get_sblock(f"acc_{name}")
    if not under:
        # 3 stage: sums under a tile
        sch.compute_at(acc, sch.get_loops(f"out_{name}")[-1], preserve_unit_loops=True)
    # 2 tile: accumulators inside of the reduction
    *_, w, o, kh, kw, c = sch.get_loops(acc)
    body = [kw, *((w, o) if columns_first else (o, w))]
    if unroll > 1:
        c, part = sch.split(c, [None, unroll])
        body = [part, *body]
    reduced = [c, *body] if kw_inside else [kw, c, *(loop for loop in body if loop is not kw)]
    sch.reorder(kh, *reduced)
    if rolled:
        sch.reorder(w, kw, o)
        sch.annotate(kw, "pragma_loop_partition_hint", 1)
        body.remove(kw)
    # 5 unroll
    for loop in [*body, *([] if kw_inside else [kw])]:
        sch.unroll(loop)
    if not under:
        init = sch.decompose_reduction(acc, kh)
        for loop in sch.get_loops(init)[-3:-1]:
            sch.unroll(loop)
    # Rows outside the image are left out by the bounds of this loop. Tests in it make LLVM move
    # accumulators to memory.
    sch.annotate(kh, "pragma_loop_partition_hint", 1)
    # 4 tensorize
    if pair is not None:
        block = sch.get_sblock(f"product_{name}")
        sch.tensorize(sch.get_loops(block)[-1], pair.register())
