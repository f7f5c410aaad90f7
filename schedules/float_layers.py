"""Tile sizes of float convolutions and dense layers.

They are chosen from the registers and caches of the target. `float_conv2d` schedules definitions;
kernels with a ring buffer of rows are written tile by tile (`templates`) and scheduled here.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from bnncc.schedules import bfloat16_conv2d, channel_tiles, multithreading
from bnncc.schedules.intrin import TensorPair
from bnncc.schedules.intrin_portable import MAX
from bnncc.schedules.intrin_x86 import TO_BFLOAT16, VNNI
from bnncc.schedules.pooling import FAR_BLOCKS, UNROLLED_TAPS
from bnncc.schedules.space import Point, Space, powers, space, tile_sizes
from bnncc.schedules.templates import filtered_conv2d, float_conv2d, quantized_conv2d
from bnncc.schedules.templates.line_buffer import Rows
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import filtering, layout, quantization, weight_codes
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.spec import Conv2d

L1_EXCESS = 1.25
"""Weights of a filtered tile relative to the L1 cache, up to which two vectors of channels per tile
are at least as fast as one: 0.92 of the time on Zen 5, 1.01 on Zen 4, for a 7x7 first layer."""

MAX_UNROLLED = 256
"""Products in the body of an innermost loop."""

DENSE_VECTORS = 7
"""Number of weight streams that a dense layer reads concurrently."""

STRIP = 4
"""Rows per strip of a filtered convolution whose weights exceed the L2 cache."""

UNROLLED_CHANNELS = 4
"""Input channels in the innermost loop of a filtered convolution."""

MIN_CHUNK = 4
"""Minimum number of output rows per thread that repays transforming the rows around them again."""

MAX_COLUMNS, MAX_VECTORS, MAX_STRIP = 28, 7, 8
"""Largest values in the search space: columns, vectors and rows per strip."""

MAX_GATHERED = 16
"""Products in the body of a loop in which each product loads non-contiguous data."""

LOOPED_DEPTH = 16
"""Up to this many channels, LLVM unrolls the loop over channels. With AVX2, if the taps of a row
are unrolled too, it then keeps data that several taps read in registers and spills accumulators.
For pooled rows that takes 1.7 to 2.8 times as long as a loop. Other vector sizes gain nothing."""

MAX_SHARES = 4
"""Pieces of the images per thread."""


PAIRS = {quantization.PACKED["int8"]: VNNI}
"""By operands per lane: the multiply-add instruction, unless it follows from the number."""

INSTRUCTION = {"bfloat16": "avx512_bf16", "int8": "avx512_vnni"}
"""Target feature of the instruction that multiplies several operands per lane."""

SHARING_VECTORS = 4
"""Maximum number of channel vectors that share a data element with narrow operands."""


def conv2d_space(spec: Conv2d, target: TargetSpec, threads: int) -> Space:
    """Return the search space of a float convolution or dense layer."""
    if spec.method == "direct" and spec.apart:
        return bfloat16_conv2d.space(spec, target, threads)
    made = _one_thread(spec, target)
    if threads == 1:
        return made
    divided = multithreading.shared(spec, target, threads)
    images = spec.images
    chunked = spec.method != "direct" or spec.operands != "float32" or spec.pool is not None
    chunks = _chunks(spec, threads) if chunked else 1
    most = max(1, spec.output_hw[0] // MIN_CHUNK)
    fitting = [c for c in range(1, most + 1) if chunked and images * c <= MAX_SHARES * threads]
    return space(
        {**made.choices, "divide": (0, 1), "chunks": fitting},
        {
            **made.default,
            "divide": int(divided),
            "chunks": chunks,
        },
        made.fits,
    )


def conv2d(spec: Conv2d, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
    """Write and schedule a float convolution with a ring buffer of rows."""
    parallel = bool(point.get("divide", 0))
    chunks = point.get("chunks", 1) if parallel else 1
    columns, vectors = point["columns"], point["vectors"]
    if spec.method != "direct":
        filtered = filtered_conv2d.Tile(
            columns, vectors, point["rows"], point["unroll"], chunks, parallel
        )
        func, rows = filtered_conv2d.conv2d(spec, filtered)
        if spec.pool is None:
            return func
        sch = s_tir.Schedule(func)
        _pooled(sch, rows)
        return channel_tiles.bounded(sch.mod["main"])
    if spec.operands != "float32":
        quantized = quantized_conv2d.Kernel(spec, columns, vectors, chunks, parallel)
        sch = s_tir.Schedule(quantized.func)
        pair = PAIRS.get(spec.packed, quantized_conv2d.PAIRS[spec.packed])
        for _, ranges in quantized.ranges:
            for name, _ in ranges:
                _sums(sch, name, pair, order="kwo")
        _pooled(sch, quantized.rows)
        source = pair.source + TO_BFLOAT16.source if pair.source else ""
        if source:
            sch.annotate(sch.get_loops("out_0_0")[0], "pragma_import_llvm", source)
        return channel_tiles.bounded(sch.mod["main"])
    written = float_conv2d.Kernel(spec, columns, vectors, chunks, parallel)
    sch = s_tir.Schedule(written.func)
    unroll = point["unroll"] if written.depth % point["unroll"] == 0 else 1
    inside, every = bool(point["kw_inside"]), range(spec.kernel[1])
    looped = not inside and written.depth < LOOPED_DEPTH
    looped = looped and target.registers_per_vector(layout.LANES) == 2
    for group, ranges in written.ranges:
        for name, segment in ranges:
            rolled = looped and all(taps == every for taps in segment.taps)
            pair = written.pair(group)
            _sums(sch, name, pair, kw_inside=inside, unroll=unroll, rolled=rolled, spec=spec)
    _pooled(sch, written.rows)
    return channel_tiles.bounded(sch.mod["main"])


def _pooled(sch: s_tir.Schedule, rows: Rows) -> None:
    """Schedule the pooling of a convolution's rows, one tile of columns after the other."""
    if rows.ring_spec is None:
        return
    rolled = rows.ring_spec.kernel[1] > UNROLLED_TAPS
    for _, ranges in rows.pooled:
        for name, _ in ranges:
            tiles, columns = sch.get_loops(f"out_{name}")
            sch.reorder(columns, tiles)
            _sums(sch, name, MAX, order="wko", rolled=rolled)


def _sums(sch: s_tir.Schedule, name: str, pair: TensorPair, **order: Any) -> None:
    """Schedule the sums of a range of a template under the tiles that use them."""
    channel_tiles.sums(sch, f"acc_{name}", pair, sch.get_loops(f"out_{name}")[-1], **order)


def _one_thread(spec: Conv2d, target: TargetSpec) -> Space:
    """Return the search space of a tile."""
    per_vector = target.registers_per_vector(layout.LANES)
    registers = target.vector_registers // per_vector
    blocks = layout.blocks(spec.out_channels)

    def held(point: Point) -> bool:
        """Whether accumulators, a weight vector each, a data element and a spare fit."""
        return (point["columns"] + 1) * point["vectors"] <= max(3, registers - 2)

    if spec.operands != "float32" and spec.method == "direct":
        default = choose_quantized(spec, target)
        most = spec.unpooled.output_hw[1]
        sizes = tile_sizes(most, min(registers, MAX_COLUMNS))
        vectors = range(1, min(blocks, SHARING_VECTORS) + 1)
        return space({"columns": sizes, "vectors": vectors}, default, held)
    if spec.method != "direct":
        _, across = filtering.axes(spec)
        tiles = -(-spec.unpooled.output_hw[1] // across.outputs)
        return space(
            {
                "columns": tile_sizes(tiles, MAX_COLUMNS),
                "vectors": range(1, min(blocks, MAX_VECTORS) + 1),
                "rows": powers(MAX_STRIP),
                "unroll": [u for u in range(1, UNROLLED_CHANNELS + 1) if spec.channels % u == 0],
            },
            choose_filtered(spec, target),
            held,
        )
    depth = spec.channels_per_group
    flat, gathered = flattened(spec.unpooled), not spec.shared
    width = channel_tiles.width_of(flat, MAX_COLUMNS)

    def fits(point: Point) -> bool:
        body = point["columns"] * point["vectors"] * point["unroll"]
        body *= spec.kernel[1] if point["kw_inside"] else 1
        fewest = gathered and body > MAX_GATHERED
        return held(point) and body <= MAX_UNROLLED and not fewest

    return space(
        {
            "columns": tile_sizes(width, MAX_COLUMNS),
            "vectors": range(1, max(2, min(blocks, MAX_VECTORS)) + 1),  # old records have 2 of 1
            "kw_inside": (0, 1) if spec.kernel[1] > 1 else (),
            "rows_outside": (0, 1),
            "unroll": [u for u in powers(UNROLLED_CHANNELS) if depth % u == 0],
        },
        choose(spec.unpooled, target),
        fits,
    )


def _budget(target: TargetSpec) -> int:
    """Return the maximum number of accumulators in a tile."""
    per_vector = target.registers_per_vector(layout.LANES)
    # Besides accumulators: two weight vectors, a data element and a spare; 14 hide the latency.
    spare = 2 * per_vector + 2
    return max(2, min(14, (target.vector_registers - spare) // per_vector))


def choose_filtered(spec: Conv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default tile of a filtered `spec`, for one thread."""
    budget = _budget(target)
    vertical, columns = filtering.axes(spec)
    height, width = spec.unpooled.output_hw
    tiles = -(-width // columns.outputs)
    channels = layout.blocks(spec.out_channels)
    block_bytes = filtering.block_terms(spec) * layout.LANES * 4
    vectors = min(2 if budget >= 8 else 1, channels)
    if tiles < budget // 2:
        vectors = max(1, min(budget // tiles, channels))
    elif block_bytes <= target.l1_bytes * L1_EXCESS < vectors * block_bytes:
        vectors = 1  # so that the L1 cache holds most of the weights during a row
    side = max(1, min(tiles, budget // vectors))
    # Weights that exceed the caches are read from memory once per strip of rows.
    weight_bytes = filtering.weight_size(spec) * 4
    steps = -(-height // (vertical.outputs if vertical else 1))
    rows = 1 if weight_bytes < target.l2_bytes // 4 else min(steps, STRIP)
    unroll = max(u for u in range(1, UNROLLED_CHANNELS + 1) if spec.channels % u == 0)
    return {"columns": side, "vectors": vectors, "rows": rows, "unroll": unroll}


def _chunks(spec: Conv2d, threads: int) -> int:
    """Return into how many pieces to divide an image, if rows around each are recomputed."""
    images = spec.images
    most = max(1, spec.output_hw[0] // MIN_CHUNK)
    return next((c for c in range(1, most) if multithreading.balanced(images * c, threads)), most)


def choose(spec: Conv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default tile of `spec`, for one thread."""
    flat = flattened(spec)
    width = flat.output_hw[1]
    per_vector = target.registers_per_vector(layout.LANES)
    budget = _budget(target)
    vectors = min(2 if budget >= 8 else 1, layout.blocks(spec.out_channels))
    if not spec.shared:
        # Each lane has its own data: vectors share nothing, and loading non-contiguous data is most
        # of the code.
        if spec.depthwise:
            vectors = 2 if budget >= 8 and layout.blocks(spec.channels) >= FAR_BLOCKS else 1
            return _tile(min(4, budget // vectors), vectors, rows_outside=True)
        if spec.groups == spec.channels:
            return _tile(min(7, budget), 1)
        return _tile(2, 1, kw_inside=2 * spec.kernel[1] <= MAX_GATHERED)
    if channel_tiles.any_rows(flat):
        rows = min(budget, channel_tiles.MOST_ROWS)
        vectors = max(1, min(budget // rows, layout.blocks(spec.out_channels)))
    elif width < budget // 2:
        vectors = single_vectors(spec, target, width)
    columns = 1 if target.scalar else max(1, budget // vectors)
    if spec.code_bits and not target.scalar:
        columns, vectors = _with_codes(spec, target, columns, vectors)
    # The weights of one tile should stay in the L1 cache during the loop over rows.
    data_bytes = spec.channels * spec.height * spec.width * 4
    weight_bytes = spec.channels_per_group * spec.window_size * 4
    weight_bytes *= spec.out_channels
    return _tile(
        columns,
        vectors,
        # With few registers, LLVM would keep data for several taps and spill accumulators.
        kw_inside=per_vector == 1 and spec.kernel[1] * columns * vectors <= MAX_UNROLLED,
        rows_outside=weight_bytes < min(data_bytes, target.l2_bytes // 2),
        # Ten products of AVX2 per iteration take 1 to 4 % longer on Zen 5 than twenty do.
        unroll=2 if columns > 1 and per_vector == 2 and spec.channels_per_group % 2 == 0 else 1,
    )


def _with_codes(spec: Conv2d, target: TargetSpec, columns: int, vectors: int) -> tuple[int, int]:
    """Adapt a tile to weights that are codes, which become floats once for tiles of equal width."""
    width = flattened(spec).output_hw[1]
    if width > columns and spec.taps * vectors * layout.LANES * 4 > target.l2_bytes // 2:
        vectors = 1
    room = target.vector_registers // target.registers_per_vector(layout.LANES) // vectors
    sizes = range(max(2, columns - 1), min(columns + 1, room - 2) + 1)
    return max((size for size in sizes if width % size == 0), default=columns), vectors


def single_vectors(spec: Conv2d, target: TargetSpec, columns: int = 1) -> int:
    """Return the number of channel vectors in a tile of a few columns, such as a single row."""
    blocks, most = layout.blocks(spec.out_channels), _budget(target) // columns
    if spec.code_bits:  # numbers take registers, too
        registers = (target.vector_registers - 2) // target.registers_per_vector(layout.LANES)
        most = min(most, registers // (columns + weight_codes.numbers_of(spec)))
    return max(1, min(most, DENSE_VECTORS, blocks))


def _tile(
    columns: int, vectors: int, kw_inside: bool = False, rows_outside: bool = False, unroll: int = 1
) -> dict[str, int]:
    order = {"kw_inside": int(kw_inside), "rows_outside": int(rows_outside)}
    return {"columns": columns, "vectors": vectors, **order, "unroll": unroll}


def packed(operands: str, target: TargetSpec) -> int:
    """Return the number of operands per word on `target`."""
    if target.kind == "cuda":  # tensor cores multiply pairs; Turing's have another tile shape
        paired = operands in ("bfloat16", "float16") and "sm_75" not in target.gpus
        return quantization.PACKED[operands] if paired else 1
    has = target.vector_bits == 512 and INSTRUCTION.get(operands) in target.features
    return quantization.PACKED[operands] if has else 1


def limits(spec: Conv2d, target: TargetSpec) -> tuple[int, int]:
    """Return the maximum number of vectors per tile, and the number of 16-lane registers."""
    per_vector = target.registers_per_vector(layout.LANES)
    registers = target.vector_registers // per_vector
    return min(
        SHARING_VECTORS if registers >= 32 else 1, layout.blocks(spec.out_channels)
    ), registers


def choose_quantized(spec: Conv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default tile of `spec`, for one thread."""
    vectors, registers = limits(spec, target)
    # Besides accumulators: a weight vector each, a data element and a spare.
    return {"columns": max(1, (registers - vectors - 2) // vectors), "vectors": vectors}
