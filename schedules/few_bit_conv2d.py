"""Few-bit convolution and dense layer: a register tile of output columns times channel vectors.

A word of data, a plane of bits or several numbers, meets a vector of weight words of `LANES` output
channels, and what they count is added to a vector of sums, which an instruction does. Sums of one
pair of planes begin in the registers of the pair before, so every product costs what a binary one
does. Taps outside the image are skipped; what they count is among the start values.
"""

from __future__ import annotations

from tvm import s_tir, tirx

from bnncc.schedules import (
    byte_products,
    channel_tiles,
    code_instructions,
    epilogue,
    intrin_wasm,
    intrin_x86,
    multithreading,
    nchw,
    ranges,
    tile_choice,
)
from bnncc.schedules.intrin import TensorPair
from bnncc.schedules.intrin_portable import (
    AND_POPCOUNT,
    DOT_ADD,
    MULTIPLY_ADD,
    MULTIPLY_ADD_LANES,
    XOR_POPCOUNT,
)
from bnncc.schedules.space import Point, Space, tile_sizes, with_threads
from bnncc.schedules.templates.channel_tiles import Group, groups
from bnncc.schedules.templates.window import Segment, segments
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit_data, layout
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.definitions.few_bit_conv2d import NUMBERS, PANEL
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import FewBitConv2d

MAX_TILE = 14
"""Accumulators beyond this many hide no more latency and only lengthen the code."""

PLANE_TILES = {1: 8, 2: 8}
"""The same for planes, by the words of a pixel: where LLVM unrolls the loop over words, more
columns would move accumulators between registers and memory."""

PLANE_TILE = 10
"""For other numbers of words."""

MAX_VECTORS = 4
"""Vectors of output channels that share a datum."""

MAX_CODE_VECTORS = 8
"""The same of packed weights: few pixels have few sums."""

MIN_PANEL = 8
"""Pixels from which packed weights become bytes in memory before they are multiplied."""

SHARED = ("levels", "panel")
"""Blocks of packed layers whose tensors all tiles have in common."""


def space(spec: FewBitConv2d, target: TargetSpec, threads: int) -> Space:
    """Return what can be chosen for a few-bit convolution or dense layer."""
    if tile_choice.pays(spec, target):
        return byte_products.space(spec, target, threads)
    if spec.method == "packed":
        return _packed_space(spec, target, threads)
    return channel_tiles.space(spec, target, threads, MAX_VECTORS, choose(spec, target))


def _packed_space(spec: FewBitConv2d, target: TargetSpec, threads: int) -> Space:
    """Return the tiles of packed weights, with a panel of bytes and without."""
    registers = target.vector_registers // target.registers_per_vector(LANES)
    width = flattened(spec).output_hw[1]
    divided = multithreading.shared(spec, target, threads)
    choices = {
        "columns": tile_sizes(width, registers),
        "vectors": range(1, min(layout.blocks(spec.out_channels), MAX_CODE_VECTORS) + 1),
        "panel": (0, 1),
    }

    def fits(point: Point) -> bool:
        return _sums(spec, point["columns"], point["vectors"], point["panel"]) <= registers - 2

    default = _packed_tile(spec, target, width)
    return with_threads(choices, default, threads > 1, divided, fits)


def _sums(spec: FewBitConv2d, columns: int, vectors: int, panel: int) -> int:
    """Return how many vectors of sums a tile of packed weights has."""
    return columns * vectors * (1 if panel else 4 // spec.weight_bits)


def _packed_tile(spec: FewBitConv2d, target: TargetSpec, width: int) -> dict[str, int]:
    """Return the default tile of a row of `width` pixels."""
    panel = int(width >= MIN_PANEL)
    most = max(1, min(MAX_TILE, _room(target) // _sums(spec, 1, 1, panel)))
    columns = -(-width // -(-width // most))
    most //= columns
    vectors = max(1, min(most, MAX_CODE_VECTORS, layout.blocks(spec.out_channels)))
    return {"columns": columns, "vectors": vectors, "panel": panel}


def writes_nchw(spec: FewBitConv2d, target: TargetSpec) -> bool:
    """Return whether the kernel of `spec` writes results in NCHW."""
    return nchw.fits(spec, target)


def apply(
    func: tirx.PrimFunc, spec: FewBitConv2d, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Schedule a few-bit convolution or dense layer as `point` says."""
    if tile_choice.pays(spec, target):
        return byte_products.apply(func, spec, target, point)
    if spec.method == "packed":
        return _packed(func, spec, target, point)
    flat, vectors = flattened(spec), min(point["vectors"], layout.blocks(spec.out_channels))
    per_group = flat.out_channels // flat.groups // LANES
    while flat.groups > 1 and per_group and per_group % vectors:
        vectors -= 1
    divided, order = 3 * point.get("divide", 0), "nho" if point["rows_outside"] else "noh"
    nests, rows = [], 1 if divided else nchw.rows_of(flat, target, vectors)
    func = nchw.held(func, flat, rows)
    for group in groups(flat.out_channels, vectors):
        parts = [
            _tiles(func, flat, target, group, segment, order, rows, divided)
            for segment in segments(flat, point["columns"])
        ]
        parts += nchw.transposed(func, flat, group, order, order[:divided], rows)
        nests.append(ranges.joined(parts, 1 if divided else 3))
    return multithreading.one_region(ranges.joined(nests, 0))


def _packed(
    func: tirx.PrimFunc, spec: FewBitConv2d, target: TargetSpec, point: Point
) -> tirx.PrimFunc:
    """Schedule a layer of packed weights: sums of levels, then tiles of channels one by one."""
    flat, vectors = flattened(spec), min(point["vectors"], layout.blocks(spec.out_channels))
    panel = bool(point["panel"])
    if panel:
        func = ranges.with_parameters(define(spec, PANEL), func)
    divided, rows = bool(point.get("divide", 0)), nchw.rows_of(flat, target, vectors)
    rows = 1 if divided else rows
    func = nchw.held(func, flat, rows)
    nests = [ranges.part(func, {"levels": {}}, SHARED)]
    for group in groups(flat.out_channels, vectors):
        parts = [
            _tiles(func, flat, target, group, segment, "onh", rows)
            for segment in segments(flat, point["columns"])
        ]
        parts += nchw.transposed(func, flat, group, "onh", count=rows)
        nest = ranges.joined(parts, 3)
        if panel:
            nest = ranges.joined([_panel(func, group), nest], 1)
        nests.append(ranges.parallel(nest, 1) if divided else nest)
    return multithreading.one_region(ranges.joined(nests, 0))


def _panel(func: tirx.PrimFunc, group: Group) -> tirx.PrimFunc:
    """Schedule the bytes of the weights of a range of channels."""
    count = group.count * len(group.lanes)
    sch = s_tir.Schedule(ranges.part(func, {"panel": {0: (group.first, count)}}, SHARED))
    o, _, place, lane = sch.get_loops("panel")
    sch.split(o, [group.count, None])
    sch.unroll(place)
    sch.vectorize(lane)
    return sch.mod["main"]


def _tiles(
    func: tirx.PrimFunc, spec: FewBitConv2d, target: TargetSpec, group: Group, segment: Segment,
    order: str, rows: int, divided: int = 0,
) -> tirx.PrimFunc:  # fmt: skip
    """Schedule a range of columns and vectors of channels."""
    # 1 normalise
    columns, vectors = channel_tiles.axes(group, segment)
    axes = {b.name_hint: [i.iter_type for i in b.iter_vars] for b in ranges.blocks(func)}
    names = [name for name in axes if name.startswith(("sum", "count"))]
    first = {name: axes[name].count(0) - 2 for name in names}  # behind planes and parts
    cut = {name: {axis: columns, axis + 1: vectors} for name, axis in first.items()}
    cut["acc"] = {2: columns, 3: (vectors[0] * LANES, vectors[1] * LANES)}
    # 2 tile
    sch, tile = channel_tiles.tiles(func, cut, group, segment, f"{order}w", rows, SHARED)
    # 3 stage
    sch.compute_at("acc", tile[-1], preserve_unit_loops=True)
    *_, column, channel = sch.get_loops("acc")
    vector, lane = sch.split(channel, [None, LANES])
    channel_tiles.in_registers(sch, [column, vector, lane])
    # 5 parallel: only loops around whole reductions can be
    if divided:
        sch.parallel(sch.fuse(*tile[:3]))
    # 4 tensorize
    at, source = tile[-1], ""
    for name in reversed(names):
        if sch.get_child_blocks(sch.get_sblock(name)):
            pair = _pair(sch, name, spec, target, panel="panel" in axes)
            channel_tiles.sums(sch, name, pair, at)
            at, source = tile[-1], pair.source
            continue
        sch.compute_at(name, at, preserve_unit_loops=True)
        *_, column, vector, at = sch.get_loops(name)
        sch.reorder(at, vector, column)
        channel_tiles.unrolled(sch, [vector, column])
        channel_tiles.unrolled(sch, sch.get_loops(sch.decompose_reduction(name, at))[-2:])
    if source:
        sch.annotate(tile[-1], "pragma_import_llvm", source)
    for block in epilogue.blocks(sch):
        epilogue.vectorize(sch, block, spec.out_channels, target)
    return channel_tiles.bounded(sch.mod["main"])


def _pair(
    sch: s_tir.Schedule, name: str, spec: FewBitConv2d, target: TargetSpec, panel: bool
) -> TensorPair:
    """Return what adds the products of a block of sums, perhaps of a panel of bytes."""
    if spec.method == "packed":
        pairs = code_instructions.of(target)
        return pairs[code_instructions.BYTES if panel else spec.weight_bits]
    if spec.method in NUMBERS:
        dtype = NUMBERS[spec.method]
        return instructions(target).get(dtype, DOT_ADD[dtype])
    if spec.method == "floats":
        return MULTIPLY_ADD_LANES[LANES] if spec.depthwise else MULTIPLY_ADD
    (product,) = sch.get_child_blocks(sch.get_sblock(name))
    subtracted = isinstance(sch.get(product).body.value, tirx.Sub)
    return XOR_POPCOUNT if spec.method == "xor" else AND_POPCOUNT[-1 if subtracted else 1]


def instructions(target: TargetSpec) -> dict[str, TensorPair]:
    """Return what adds several products at once on `target`, by the type of the data."""
    return {
        dtype: pair
        for (dtype, bits), pair in [*intrin_x86.DOT_ADD.items(), *intrin_wasm.DOT_ADD.items()]
        if bits == target.vector_bits and pair.feature in target.features
    }


def _room(target: TargetSpec) -> int:
    """Return how many vectors of sums fit the registers beside two operands."""
    per_vector = target.registers_per_vector(LANES)
    return (target.vector_registers - 2 * per_vector - 2) // per_vector


def choose(spec: FewBitConv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default tile of `spec`, from the registers and caches of `target`."""
    flat = flattened(spec)
    width = flat.output_hw[1]
    most = MAX_TILE
    if spec.form == "planes":
        most = PLANE_TILES.get(few_bit_data.group_words(spec), PLANE_TILE)
    budget = max(1, min(most, _room(target)))
    count = -(-width // budget)
    columns = -(-width // count)
    vectors = max(1, min(budget // columns, MAX_VECTORS, layout.blocks(spec.out_channels)))
    (size,), _ = few_bit_data.constants(spec)[0]
    data = spec.height * spec.width * spec.channels // 8 * spec.data_bits
    outside = size * 4 < min(target.l2_bytes // 2, max(data, target.l1_bytes))
    return {"columns": columns, "vectors": vectors, "rows_outside": int(outside)}
