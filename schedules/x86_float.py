"""Float convolution, dense layers and pooling on x86: how many registers each tile takes.

The kernels are written as tiles already (`topi_binary.float_conv2d`, `topi_binary.pool`); a rule
here chooses the sizes from the registers and caches of the target and writes them again.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx

from bnncc.schedules import grain, x86_quantized
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import (
    filtered_conv2d,
    filtering,
    float_conv2d,
    layout,
    pool,
    quantized_conv2d,
)
from bnncc.topi_binary.build import output_hw
from bnncc.topi_binary.spec import BitwiseMaxPool, Conv2d, Pool2d, Spec

MAX_UNROLLED = 256
"""Products in the body of an innermost loop."""

DENSE_VECTORS = 7
"""Streams of weights that a dense layer reads at once."""

POOLED_VECTORS = 4
"""Vectors of channels in a tile of a pooling with few columns."""

STRIP = 4
"""Rows that a filtered convolution computes with weights too many for the second cache."""

UNROLLED_CHANNELS = 4
"""Input channels in the innermost loop of a filtered convolution."""

MIN_CHUNK = 4
"""Rows of the output that are worth transforming the rows around them again, for a thread."""


def conv2d(
    func: tirx.PrimFunc, spec: Spec, target: TargetSpec, threads: int
) -> tirx.PrimFunc | None:
    """Tile a float convolution or dense layer."""
    if not isinstance(spec, Conv2d) or target.kind != "llvm":
        return None
    threads = threads if grain.shared(spec, target, threads) else 1
    if spec.method != "direct":
        return filtered_conv2d.conv2d(spec, choose_filtered(spec, target, threads))
    if spec.operands != "float32":
        chunks = _chunks(spec, threads) if threads > 1 else 1
        tiled = replace(x86_quantized.choose(spec, target), chunks=chunks, parallel=threads > 1)
        return quantized_conv2d.conv2d(spec, tiled)
    tile = choose(spec.unpooled, target)
    if threads > 1:
        rows, chunks = _flat_rows(spec, tile, threads), _chunks(spec, threads)
        tile = replace(tile, parallel=True, flat_rows=rows, chunks=chunks)
    return grain.one_region(float_conv2d.conv2d(spec, tile))


def _budget(target: TargetSpec) -> int:
    """Return how many vectors of accumulators a tile may have."""
    per_vector = target.registers_per_vector(layout.LANES)
    # Besides accumulators: two weight vectors, a datum and a spare; 14 hide the latency anywhere.
    spare = 2 * per_vector + 2
    return max(2, min(14, (target.vector_registers - spare) // per_vector))


def choose_filtered(spec: Conv2d, target: TargetSpec, threads: int = 1) -> filtered_conv2d.Tile:
    """Return the default tile of a filtered `spec`."""
    budget = _budget(target)
    vertical, columns = filtering.axes(spec)
    height, width = output_hw(spec.unpooled)
    tiles = -(-width // columns.outputs)
    channels = layout.blocks(spec.out_channels)
    block_bytes = filtering.block_terms(spec) * layout.LANES * 4
    vectors = min(2 if budget >= 8 else 1, channels)
    if tiles < budget // 2:
        vectors = max(1, min(budget // tiles, channels))
    elif block_bytes <= target.l1_bytes < vectors * block_bytes:
        vectors = 1  # so that the first cache keeps the weights while a row goes by
    side = max(1, min(tiles, budget // vectors))
    # Weights that fit no cache come from memory once per strip of rows.
    weight_bytes = filtering.weight_size(spec) * 4
    steps = -(-height // (vertical.outputs if vertical else 1))
    rows = 1 if weight_bytes < target.l2_bytes // 4 else min(steps, STRIP)
    unroll = max(u for u in range(1, UNROLLED_CHANNELS + 1) if spec.channels % u == 0)
    chunks = _chunks(spec, threads)
    return filtered_conv2d.Tile(side, vectors, rows, unroll, chunks, threads > 1)


def _chunks(spec: Conv2d, threads: int) -> int:
    """Return into how many pieces to cut an image, if rows around a piece are computed again."""
    images = spec.n if isinstance(spec.n, int) else 1
    most = max(1, output_hw(spec)[0] // MIN_CHUNK)
    return next((c for c in range(1, most) if grain.balanced(images * c, threads)), most)


def _flat_rows(spec: Conv2d, tile: float_conv2d.Tile, threads: int) -> int:
    """Return into how many rows to lay the pixels of a pointwise layer, for equal shares."""
    flat = float_conv2d.flattened(spec)
    width = output_hw(flat)[1]
    if spec.rank == 2 or (flat.height, flat.width) == (spec.height, spec.width):
        return 1
    images = spec.n if isinstance(spec.n, int) else 1
    blocks = images * -(-spec.out_channels // (layout.LANES * tile.vectors))
    fitting = [r for r in range(1, width // tile.columns + 1) if width % r == 0]
    return next((r for r in fitting if grain.balanced(r * blocks, threads)), max([1, *fitting]))


def choose(spec: Conv2d, target: TargetSpec) -> float_conv2d.Tile:
    """Return the default tile of `spec`."""
    flat = float_conv2d.flattened(spec)
    width = output_hw(flat)[1]
    per_vector = target.registers_per_vector(layout.LANES)
    budget = _budget(target)
    vectors = min(2 if budget >= 8 else 1, layout.blocks(spec.out_channels))
    if spec.groups > 1 and spec.out_channels // spec.groups % layout.LANES:
        # Each lane has data of its own: nothing is shared between vectors, and collecting data that
        # are not neighbours in memory is most of the code.
        if spec.groups == spec.channels == spec.out_channels and spec.data_layout == "NHWC":
            vectors = 2 if budget >= 8 else 1
            columns = min(4 if vectors == 2 else 5, budget // vectors)
            return float_conv2d.Tile(columns, vectors, False, True)
        columns = min(7, budget) if spec.groups == spec.channels else 1
        return float_conv2d.Tile(columns, kw_inside=False)
    if width < budget // 2:
        vectors = max(1, min(budget // width, DENSE_VECTORS, layout.blocks(spec.out_channels)))
    columns = max(1, budget // vectors)
    # Weights of one tile should stay in the first cache while the rows go by.
    data_bytes = spec.channels * spec.height * spec.width * 4
    weight_bytes = spec.channels // spec.groups * spec.kernel[0] * spec.kernel[1] * 4
    weight_bytes *= spec.out_channels
    return float_conv2d.Tile(
        columns=columns,
        vectors=vectors,
        # Where registers are few, LLVM would keep data for several taps and spill accumulators.
        kw_inside=per_vector == 1 and spec.kernel[1] * columns * vectors <= MAX_UNROLLED,
        rows_outside=weight_bytes < min(data_bytes, target.l2_bytes // 2),
    )


def pool2d(
    func: tirx.PrimFunc, spec: Spec, target: TargetSpec, threads: int
) -> tirx.PrimFunc | None:
    """Tile a float pooling."""
    if not isinstance(spec, Pool2d) or target.kind != "llvm":
        return None
    per_vector = target.registers_per_vector(layout.LANES)
    budget = max(1, min(8, target.vector_registers // 2 // per_vector))
    columns = min(budget, output_hw(spec)[1])
    tile = pool.Tile(
        columns=columns,
        vectors=max(1, min(POOLED_VECTORS, budget // columns, layout.blocks(spec.channels))),
        parallel=grain.shared(spec, target, threads),
    )
    return pool.pool2d(spec, tile)


def bitwise_maxpool(
    func: tirx.PrimFunc, spec: Spec, target: TargetSpec, threads: int
) -> tirx.PrimFunc | None:
    """Tile a pooling of bits."""
    if not isinstance(spec, BitwiseMaxPool) or target.kind != "llvm":
        return None
    tile = pool.Tile(columns=4, parallel=grain.shared(spec, target, threads))
    return pool.bitwise_maxpool(spec, tile)
