"""Elementwise kernels and moves of bits."""

from __future__ import annotations

from tvm import s_tir, tirx

from bnncc.schedules import channel_tiles, epilogue, multithreading, ranges
from bnncc.schedules.space import Point, Space, powers, tile_sizes, with_threads
from bnncc.schedules.templates import elementwise as template
from bnncc.schedules.templates.image_bits import image_bits as make_image_bits
from bnncc.schedules.templates.window import segments
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.bits_table import needs_table
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import (
    BitwiseMaxPool,
    Elementwise,
    ImageBits,
    SliceBits,
    Spec,
    WeightsOfRows,
)

VECTORS = 4
"""Vectors of channels in one turn of the loop over pixels."""

MAX_VECTORS = 16
"""The most that are tried."""

COLUMNS, MAX_COLUMNS = 4, 14
"""Windows in a tile of a pooling of bits, and the most that are tried."""

MAX_PLANES = 2
"""Planes of levels up to which the columns of a tile are pooled together: they stay in registers.
"""

UNROLLED_TAPS = 8
"""Windows of more columns are loops."""


def elementwise_space(spec: Elementwise, target: TargetSpec, threads: int) -> Space:
    """Return what can be chosen for an elementwise kernel."""
    blocks = layout.blocks(spec.channels)
    return with_threads(
        {"vectors": powers(min(MAX_VECTORS, blocks)) if _lanes_are_channels(spec) else ()},
        {"vectors": min(VECTORS, blocks)},
        threads > 1,
        multithreading.shared(spec, target, threads),
    )


def elementwise(
    func: tirx.PrimFunc, spec: Elementwise, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc | None:
    """Schedule a kernel whose lanes are channels, a few vectors in one turn of a loop."""
    if not _lanes_are_channels(spec):
        return None
    sch = s_tir.Schedule(func)
    found = epilogue.blocks(sch)
    pixels = []
    for block in found:
        # 2 tile
        *outer, o = sch.get_loops(block)
        pixels.append(outer[-1])
        unrolled = _unrolled(int(sch.get(o).extent), point["vectors"])
        if unrolled > 1:
            sch.unroll(sch.split(o, [None, unrolled])[1])
        # 4 tensorize, 5 vectorize
        epilogue.vectorize(sch, block, spec.channels, target)
    if len(found) > 1:
        sch.merge(*pixels)
    if point.get("divide", 0):
        sch.parallel(sch.fuse(*sch.get_loops(found[0])[:3]))
    return sch.mod["main"]


def elementwise_planes(
    spec: Elementwise, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Write a kernel whose lanes are pixels, at least where it reads or writes."""
    return multithreading.one_region(template.elementwise(spec, bool(point.get("divide", 0))))


def _lanes_are_channels(spec: Elementwise) -> bool:
    return template.layouts(spec) <= {"NHWC"}


def _unrolled(count: int, vectors: int) -> int:
    """Return how many of `count` turns, nearly `vectors`, are one turn of a loop without a rest."""
    if count < 2 * vectors:
        return count
    fitting = [size for size in range(1, 2 * vectors) if count % size == 0]
    return min(fitting, key=lambda size: (abs(size - vectors), size))


def bitwise_maxpool_space(spec: BitwiseMaxPool, target: TargetSpec, threads: int) -> Space:
    """Return what can be chosen for a pooling of bits."""
    return with_threads(
        {"columns": tile_sizes(spec.output_hw[1], MAX_COLUMNS)},
        {"columns": COLUMNS},
        threads > 1,
        multithreading.shared(spec, target, threads),
    )


def bitwise_maxpool(
    func: tirx.PrimFunc, spec: BitwiseMaxPool, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Schedule a pooling of bits: a tile of columns after the other, all words of each."""
    parallel = bool(point.get("divide", 0))
    rolled = spec.kernel[1] > UNROLLED_TAPS
    parts = []
    for first, count, lanes in _word_vectors(layout.words(spec.channels)):
        for segment in segments(spec, point["columns"]):
            columns = segment.start, segment.width * segment.tiles
            # 1 normalise
            sch = s_tir.Schedule(ranges.part(func, {2: columns, 3: (first, count * lanes)}))
            # 2 tile
            n, h, w, c = sch.get_loops("out")
            tile, column = sch.split(w, [segment.tiles, segment.width])
            vector, lane = sch.split(c, [count, lanes])
            sch.reorder(tile, vector, column, lane)
            sch.unroll(column)
            sch.vectorize(lane)
            # 3 stage
            sch.compute_at("held", vector, preserve_unit_loops=True)
            *_, column, lane, kh, kw = sch.get_loops("held")
            together = spec.planes <= MAX_PLANES
            sch.reorder(*((kh, column) if together else (column, kh)), kw, lane)
            # 5 vectorize, unroll, parallel
            for loop in (column, *([] if rolled else [kw])):
                sch.unroll(loop)
            sch.vectorize(lane)
            *_, column, lane = sch.get_loops(sch.decompose_reduction("held", kh))
            sch.unroll(column)
            sch.vectorize(lane)
            for number, loop in enumerate((kh, *([kw] if rolled else []))):
                channel_tiles.mark(sch, loop, number)
            if parallel:
                sch.parallel(sch.fuse(n, h))
            parts.append(channel_tiles.bounded(sch.mod["main"]))
    return ranges.joined(parts, 1 if parallel else 2)


def _word_vectors(words: int) -> list[tuple[int, int, int]]:
    """Cut `words` into vectors of fewer and fewer lanes: the first word, how many, lanes."""
    found, first = [], 0
    for lanes in (16, 8, 4, 2, 1):
        count = (words - first) // lanes
        if count:
            found.append((first, count, lanes))
            first += count * lanes
    return found


def image_bits(spec: ImageBits, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
    """Write the bits of an image with the products that `target` has."""
    return make_image_bits(spec, "x86-512" if target.vector_bits == 512 else "")


def moved(
    func: tirx.PrimFunc, spec: Spec, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Leave a definition as it is: it moves whole words, in the order in which they lie."""
    return func


def slice_bits(
    func: tirx.PrimFunc, spec: SliceBits, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Keep a word that is collected bit by bit in a register."""
    if not needs_table(spec):
        return func
    sch = s_tir.Schedule(func)
    *_, word, bit = sch.get_loops("slice")
    kept = sch.cache_write("slice", 0, "global")
    sch.reverse_compute_at(kept, word)
    sch.decompose_reduction("slice", bit)
    return sch.mod["main"]


def weights_of_rows(
    func: tirx.PrimFunc, spec: WeightsOfRows, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Keep the rows of a vector together, each word of them being moved once."""
    sch = s_tir.Schedule(func)
    outer = []
    for name in ("lanes", "count")[: 1 + spec.count]:
        _, row, word = sch.get_loops(name)
        block, lane = sch.split(row, [None, LANES])
        sch.reorder(word, lane)
        outer.append(block)
        if name == "count":
            sch.decompose_reduction(name, word)
    if spec.count and target.vector_bits <= 128:
        sch.merge(*outer)  # SSE and NEON gain nothing from counting apart, and lose the cache
    return sch.mod["main"]
