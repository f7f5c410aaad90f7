"""Binary convolution and dense layers on x86: a register tile of columns x channel vectors.

A tile of ``TW`` output columns and ``TO`` vectors of output channels keeps its accumulators in
registers over the whole reduction (kernel row, word, kernel column). Each weight vector is loaded
once per tile, each data word is broadcast from memory by the XOR that uses it. The width is cut
into tiles that differ by at most one column; tiles that touch the border are code of their own, in
which the tests for taps outside fold away, those between run as one loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import s_tir, tirx

from bnncc.schedules import arm, grain, x86_lookup
from bnncc.schedules.columns import cut
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout, threes
from bnncc.topi_binary.conv2d import conv2d, image, pieces
from bnncc.topi_binary.spec import BinaryConv2d, Spec
from bnncc.topi_binary.taps import Piece

SPARE_REGISTERS = 4
"""Besides the accumulators: a weight vector, a product, constants of the bit count."""

MAX_TILE = 14
"""Accumulators beyond this many hide no more latency and only lengthen the code."""

FLOAT_TILE = 10
"""The same for carry-save counting, of two accumulators each, before an epilogue of floats: with
more, the epilogue's constants push accumulators out of registers."""

LONG_REDUCTION = 8
"""Words of a pixel from which moving accumulators to memory and back once costs less than smaller
tiles do."""

DENSE_TILE = (5, 4)
"""Rows and vectors in a tile of a dense layer: where sums are long, neither its data nor its
weights stay in the first-level cache, and the squarer tile loads least."""

MAX_UNROLLED = 256
"""Products in one unrolled loop body."""


@dataclass(frozen=True)
class Tiling:
    """How one kernel is cut.

    Attributes
    ----------
    columns : tuple of tuple (width, tile)
        Pieces of the width, each a multiple of its tile.
    blocks : tuple of tuple (count, tile)
        Pieces of the full channel blocks, each a multiple of its tile.
    blocks_outside : bool
        Whether the loop over channel blocks is outermost, so that the weights of a tile stay in the
        first-level cache from row to row.
    carry_save : bool, default False
        Whether to count three products at once.
    """

    columns: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[int, int], ...]
    blocks_outside: bool
    carry_save: bool = False


def apply(
    func: tirx.PrimFunc, spec: Spec, target: TargetSpec, threads: int
) -> s_tir.Schedule | tirx.PrimFunc | None:
    """Schedule `func` if it is a binary convolution for an x86 processor."""
    if not isinstance(spec, BinaryConv2d) or target.kind != "llvm":
        return None
    if spec.weight_order == "nibbles":
        return x86_lookup.apply(spec, target, threads)
    if spec.weight_order != "words":
        return arm.apply(spec, target, threads)
    # 1 normalise: write the definition in pieces, borders apart from the rest
    threads = threads if grain.shared(spec, target, threads) else 1
    return grain.one_region(tiled(spec, choose(spec, target), threads).mod["main"])


def tiled(spec: BinaryConv2d, tiling: Tiling, threads: int = 1) -> s_tir.Schedule:
    """Schedule the kernel of `spec` as `tiling` says, divided among `threads` if more than 1."""
    columns = [width for width, _ in tiling.columns]
    blocks = [count for count, _ in tiling.blocks]
    sch = s_tir.Schedule(conv2d(spec, columns, blocks or None, tiling.carry_save))
    tiles = [
        (width_tile, block_tile)
        for block_tile in [t for _, t in tiling.blocks] + [1] * _has_tail(spec)
        for _, width_tile in tiling.columns
    ]
    divided = _divided(spec, threads)
    for i, (piece, tile) in enumerate(
        zip(pieces(spec, columns, blocks or None), tiles, strict=True)
    ):
        _piece(sch, spec, str(i), piece, tile, tiling, divided)
    for scope in ["ordinary", "with_zeros"][: 1 + spec.ternary]:
        for block in sch.get_child_blocks(sch.get_sblock(scope)):
            if sch.get(block).name_hint.startswith(("weights_", "taps_", "borders_")):
                _table(sch, block)
    if spec.ternary:
        for i in range(len(pieces(spec))):
            _compact(sch, f"zero_{i}", bool(divided))
    return sch


def _divided(spec: BinaryConv2d, threads: int) -> str:
    """Return what threads share: nothing, rows, or (where rows are few) also channel blocks."""
    if threads == 1:
        return ""
    n, height, _ = image(spec)
    rows = (n if isinstance(n, int) else 1) * height
    return "rows" if grain.balanced(rows, threads) else "blocks"


def choose(spec: BinaryConv2d, target: TargetSpec) -> Tiling:
    """Return the default tiling of `spec`, from the registers and caches of `target`."""
    _, _, width = image(spec)
    budget = accumulators(target)
    carry_save = target.popcount == "vector" and target.vector_bits == 512 and threes.fits(spec)
    words = layout.words(spec.channels // spec.groups)
    floats = any(step.op != "threshold" for step in spec.steps)
    if carry_save and floats and words < LONG_REDUCTION:
        budget = min(budget, FLOAT_TILE)
    full = spec.out_channels // layout.LANES
    dense = spec.rank == 2 and width > 1 and target.popcount == "vector" and full >= DENSE_TILE[1]
    if dense:
        budget = DENSE_TILE[0]
    count = -(-width // budget)
    sizes = [width // count + (i < width % count) for i in range(count)]
    columns = cut(spec, sizes)
    tile = DENSE_TILE[1] if dense else max(1, min(budget // sizes[0], 8, full))
    main, rest = divmod(full, tile)
    blocks = tuple(b for b in ((main * tile, tile), (rest, rest)) if b[0])
    per_block = spec.kernel[0] * spec.kernel[1] * words * 64
    weight_bytes = per_block * layout.blocks(spec.out_channels)
    return Tiling(columns, blocks, weight_bytes > target.l2_bytes // 2, carry_save)


def accumulators(target: TargetSpec) -> int:
    """Return how many accumulator vectors of `layout.LANES` fit in the registers of `target`."""
    per_vector = target.registers_per_vector(layout.LANES)
    if target.popcount == "vector":
        return max(1, min(MAX_TILE, (target.vector_registers - SPARE_REGISTERS) // per_vector))
    return max(1, min(MAX_TILE, (target.vector_registers - 2 * SPARE_REGISTERS) // per_vector))


def _has_tail(spec: BinaryConv2d) -> bool:
    return spec.out_channels % layout.LANES > 0


def _piece(
    sch: s_tir.Schedule,
    spec: BinaryConv2d,
    name: str,
    piece: Piece,
    tile: tuple[int, int],
    tiling: Tiling,
    divided: str,
) -> None:
    # 2 tile
    n, h, w, o = sch.get_loops(f"out_{name}")
    w1, w2 = sch.split(w, [piece.columns // tile[0], tile[0]])
    o1, o2 = sch.split(o, [piece.blocks // tile[1], tile[1]])
    outer, shared = [n, h, w1, o1], [n, h]
    if divided == "blocks":
        outer, shared = [n, h, o1, w1], [n, h, o1]
    if tiling.blocks_outside:
        outer = [o1, n, h, w1]
        shared = outer[:3] if divided == "blocks" else shared
    sch.reorder(*outer, w2, o2)
    acc = sch.get_sblock(f"acc_{name}")
    sch.compute_at(acc, outer[-1], preserve_unit_loops=True)
    if tiling.carry_save:
        # 3 cache: the sums of the rows under one row of outputs, made again for each
        sums = sch.get_sblock(f"sums_{name}")
        sch.compute_at(sums, shared[-1], preserve_unit_loops=True)
        sch.vectorize(sch.get_loops(sums)[-1])
    # 5 vectorize, unroll, parallel
    if divided:
        sch.parallel(sch.fuse(*shared))
    sch.unroll(w2)
    sch.unroll(o2)
    if tiling.carry_save:
        *_, w, o, part, kh, c = sch.get_loops(acc)
        sch.reorder(kh, c, w, o, part)
        init = sch.decompose_reduction(acc, kh)
        for loop in (w, o, part, *sch.get_loops(init)[-3:]):
            sch.unroll(loop)
        return
    *_, w, o, lane, kh, kw, c = sch.get_loops(acc)
    sch.reorder(kh, c, kw, w, o, lane)
    sch.unroll(w)
    sch.unroll(o)
    if spec.kernel[1] * tile[0] * tile[1] <= MAX_UNROLLED:
        sch.unroll(kw)
    sch.vectorize(lane)
    init = sch.decompose_reduction(acc, kh)
    *_, w, o, lane = sch.get_loops(init)
    sch.unroll(w)
    sch.unroll(o)
    sch.vectorize(lane)


def _compact(sch: s_tir.Schedule, name: str, parallel: bool) -> None:
    """Schedule the code for data with exact zeros: vectors, but rolled loops."""
    n, h, _, o = sch.get_loops(f"out_{name}")
    acc = sch.get_sblock(f"acc_{name}")
    sch.compute_at(acc, o, preserve_unit_loops=True)
    *_, lane, kh, kw, c = sch.get_loops(acc)
    sch.reorder(kh, kw, c, lane)
    if parallel:
        sch.parallel(sch.fuse(n, h))
    sch.vectorize(lane)
    init = sch.decompose_reduction(acc, kh)
    sch.vectorize(sch.get_loops(init)[-1])


def _table(sch: s_tir.Schedule, block: s_tir.schedule.SBlockRV) -> None:
    """Schedule a table of counts per channel that accumulators start from."""
    loops = sch.get_loops(block)
    axes = sch.get(block).iter_vars
    summed = [loop for loop, axis in zip(loops, axes, strict=True) if axis.iter_type == 2]
    lane = loops[len(loops) - len(summed) - 1]
    sch.reorder(*summed, lane)
    sch.vectorize(lane)
    init = sch.decompose_reduction(block, summed[0])
    sch.vectorize(sch.get_loops(init)[-1])
