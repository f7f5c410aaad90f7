"""Schedule of binary convolutions and dense layers on words: register tile of columns x vectors.

A tile of ``TW`` output columns and ``TO`` vectors of output channels keeps its accumulators in
registers over the whole reduction (kernel row, word, kernel column). Each weight vector is loaded
once per tile; each data word is broadcast from memory by the XOR that uses it. The width is split
into tiles that differ by at most one column. Tiles that touch the border have code of their own, in
which the tests for taps outside the image fold away; those between run as one loop.

The rule schedules the definition that it is given or another form of it: to count three taps at
once, words that hold several taps of few channels, or to add the popcounts of several words as
bytes where bits are counted in bytes. Data that may hold exact zeros are scanned first; if there
are none, a copy without zero planes runs, otherwise compact code that handles them.

Without vector instructions there is no tile: loops over lanes (`portable`) are smaller and as fast.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm import s_tir, tirx

from bnncc.schedules import (
    binary_lookup,
    binary_neon,
    binary_sliced,
    byte_products,
    channel_tiles,
    epilogue,
    multithreading,
    nchw,
    portable,
    prefetch,
    ranges,
    tile_choice,
    zeros,
)
from bnncc.schedules.columns import shares
from bnncc.schedules.intrin_portable import MOST_WORDS, XOR_POPCOUNT, XOR_POPCOUNT_WORDS
from bnncc.schedules.intrin_x86 import CARRY_SAVE
from bnncc.schedules.ranges import Bounds
from bnncc.schedules.space import Point, Space, no_choice, powers, tile_sizes
from bnncc.schedules.space import space as make
from bnncc.schedules.templates.channel_tiles import Group, groups
from bnncc.schedules.templates.window import Segment, image, segments, taps_inside
from bnncc.schedules.weight_order import weight_orders
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout, sliced_data
from bnncc.topi_binary.definitions import carry_save, define, folded
from bnncc.topi_binary.definitions.binary_conv2d import WORDS, counts_words
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.spec import BinaryConv2d, zero_planes

SPARE_REGISTERS = 4
"""Registers besides the accumulators: a weight vector, a product, constants of the popcount."""

MAX_TILE = 14
"""Maximum number of accumulators; more hide no more latency and only lengthen the code."""

FLOAT_TILE = 10
"""The same for carry-save counting, which has two accumulators per sum, before a float epilogue:
with more, the epilogue's constants force accumulators out of registers."""

CARRY_SAVE_TILE = 10
"""Maximum number of accumulators of a carry-save tile with several vectors; with more, its time
depends on the memory addresses of the tensors."""

LONG_REDUCTION = 8
"""Words per pixel from which spilling accumulators once costs less than smaller tiles do."""

DENSE_TILE = (4, 4)
"""Rows and vectors per tile of a dense layer: for long sums, neither data nor weights stay in the
L1 cache, and the tile closest to a square loads least."""

POINTWISE_TILE = (4, 2)
"""Columns and vectors per tile of a 1x1 convolution: with few words per output, setup and epilogue
take most of the time, and they are faster on contiguous memory."""

FEW_WORDS = 16
"""Words per pixel up to which `POINTWISE_TILE` applies."""

MAX_UNROLLED = 256
"""Products per unrolled loop body."""

MAX_VECTORS = 8
"""Maximum number of channel vectors per tile."""

MAX_UNROLL = 4
"""Maximum number of words of a pixel per loop body, where each is counted by itself."""

DIVIDED = ("", "rows", "blocks")
"""What threads may share; "blocks" includes rows."""


ZEROS = "zeros", "zeros_last"
"""Blocks of a definition that count zeros."""

TABLES = "ones", "ones_last", "starts", folded.WEIGHT, f"{folded.WEIGHT}_last"
"""Blocks of a definition that are computed before all others."""

SHARED = (*TABLES, folded.DATA, *epilogue.BLOCKS)
"""Blocks whose tensors all ranges share."""

ORDERS = "nhwo", "nhow", "onhw"
"""Loop orders over images, rows, column tiles and channel tiles. With the last, the weights of a
tile stay in the L1 cache from row to row."""


def space(spec: BinaryConv2d, target: TargetSpec, threads: int) -> Space:
    """Return the search space for `spec`, in whatever order its weights are."""
    if spec.weight_order == sliced_data.ORDER:
        return binary_sliced.space(spec, target, threads)
    if spec.weight_order == "nibbles":
        return binary_lookup.space(spec, target, threads)
    if spec.weight_order == tile_choice.ORDER:
        return byte_products.space(spec, target, threads)
    if spec.weight_order != "words":
        return binary_neon.space(spec, target, threads)
    if target.scalar:
        return no_choice(spec, target, threads)
    width = MAX_TILE if channel_tiles.any_rows(spec) else image(spec)[2]
    full = max(1, spec.out_channels // layout.LANES)
    threed = _counts_threes(spec, target)
    choices: dict[str, Iterable[int]] = {
        "columns": tile_sizes(width, MAX_TILE),
        "vectors": range(1, min(full, MAX_VECTORS) + 1),
        "order": range(len(ORDERS)) if full > 1 else (0,),
        "carry_save": (0, 1) if threed else (0,),
        "folded": (0, 1) if folded.fits(spec) else (0,),
        "rolled": (0, 1) if spec.kernel[1] > 1 else (0,),
        "unroll": _unrolled(spec, target),
    }
    default = choose(spec, target)
    if threads > 1:
        choices["divide"] = range(len(DIVIDED))
        default["divide"] = DIVIDED.index(_divided(spec, target, threads))
    per_vector = target.registers_per_vector(layout.LANES)
    registers = max(2, (target.vector_registers - SPARE_REGISTERS) // per_vector)

    def fits(point: Point) -> bool:
        tile = point["columns"] * point["vectors"]
        single = point["rolled"] or point["folded"]
        body = tile * point["unroll"] * (1 if single else spec.kernel[1])
        if point["carry_save"] and (point["rolled"] or point["unroll"] > 1):
            return False
        if point["folded"] and (point["rolled"] or point["carry_save"] or point["unroll"] > 1):
            return False
        return tile * (1 + point["carry_save"]) <= registers and body <= MAX_UNROLLED

    return make(choices, default, fits)


def writes_nchw(spec: BinaryConv2d, target: TargetSpec) -> bool:
    """Return whether the kernel of `spec` writes results in NCHW."""
    ordered = weight_orders(spec, target)[0] in ("words", "nibbles", tile_choice.ORDER)
    return ordered and not spec.per_image and nchw.fits(spec, target)


def template(spec: BinaryConv2d, target: TargetSpec, threads: int, point: Point) -> tirx.PrimFunc:
    """Write and schedule a kernel for weights in bit slices."""
    return binary_sliced.apply(spec, target, threads, point)


def apply(
    func: tirx.PrimFunc, spec: BinaryConv2d, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc | None:
    """Schedule a binary convolution; None for weights in bit slices, which use a template."""
    if spec.weight_order == "nibbles":
        return prefetch.weights(binary_lookup.apply(func, spec, target, point), spec, target)
    if spec.weight_order in ("vectors", "halves"):
        return binary_neon.apply(func, spec, target, point)
    if spec.weight_order == tile_choice.ORDER:
        return byte_products.apply(func, spec, target, threads, point)
    if spec.weight_order != "words":
        return None
    if target.scalar:
        return portable.schedule(func)
    planes, flat = zero_planes(spec), flattened(spec)
    counted = func
    if point["carry_save"]:
        counted = ranges.with_parameters(define(spec, carry_save.FORM), func)
    elif point["folded"]:
        counted = ranges.with_parameters(define(spec, folded.FORM), func)
    elif (words := _together(spec, target, point)) > 1:
        counted = ranges.with_parameters(define(spec, f"{WORDS}{words}"), func)
    counted = nchw.held(counted, flat, _rows(flat, target, point))
    if planes:
        counted = zeros.without(counted, planes, ZEROS)
    made = _ordinary(counted, flat, target, point)
    if planes:
        rest = [
            _compact(func, flat, target, last, bool(point.get("divide", 0)))
            for last in (False, True)
            if (flat.out_channels % layout.LANES if last else flat.out_channels >= layout.LANES)
        ]
        made = zeros.either(func, planes, made, ranges.joined([*_tables(func), *rest], 0))
    made = multithreading.one_region(made, before="xors")
    return prefetch.weights(made, spec, target)


def _ordinary(
    func: tirx.PrimFunc, flat: BinaryConv2d, target: TargetSpec, point: Point
) -> tirx.PrimFunc:
    """Schedule the kernel for data without exact zeros."""
    parts, (order, divided) = _tables(func), _loops(point)
    if channel_tiles.any_rows(flat):
        func = channel_tiles.rows_as_columns(func, TABLES)
        single = 1
        if _together(flat, target, point) == 1:
            single = _tile(flat, target, *_budgets(flat, target), 1)[1]
        for segment in channel_tiles.row_segments(func, point["columns"]):
            vectors = point["vectors"] if segment.width > 1 else max(single, point["vectors"])
            parts += [
                _tiles(func, flat, target, group, segment, point)
                for group in groups(flat.out_channels, vectors, apart=True)
            ]
        return ranges.joined(parts, 0)
    if point["carry_save"] and order[0] == "o":
        parts.append(_xors(func, divided))
    if point["folded"]:
        parts += _folded(func, flat)
    rows = _rows(flat, target, point)
    row = order[: 1 + max(order.index(axis) for axis in divided or "nh")]
    for group in groups(flat.out_channels, point["vectors"], apart=True):
        tiles = [
            _tiles(func, flat, target, group, segment, point)
            for segment in segments(flat, point["columns"])
        ]
        if transposed := nchw.transposed(func, flat, group, row, divided, rows):
            common = len(row) - max(0, len(divided) - 1)
            tiles = [ranges.joined([*tiles, *transposed], common)]
        parts += tiles
    return ranges.joined(parts, 0)


def _xors(func: tirx.PrimFunc, divided: str) -> tirx.PrimFunc:
    """Schedule the XORs of adjacent data words (carry-save) before all channel tiles."""
    sch = s_tir.Schedule(ranges.part(func, {"xors": {}}, ("xors",)))
    n, h, _, lane = sch.get_loops("xors")
    sch.vectorize(lane)
    if divided:
        sch.parallel(sch.fuse(n, h))
    return sch.mod["main"]


def _folded(func: tirx.PrimFunc, spec: BinaryConv2d) -> list[tirx.PrimFunc]:
    """Schedule the words of each output column: vectors of columns with the same taps inside."""
    made = []
    for segment in segments(spec, 1):
        sch = s_tir.Schedule(ranges.part(func, {folded.DATA: {2: segment.columns}}, SHARED))
        *_, w, word = sch.get_loops(folded.DATA)
        sch.reorder(word, w)
        sch.unroll(word)
        made.append(sch.mod["main"])
    return made


def _rows(spec: BinaryConv2d, target: TargetSpec, point: Point) -> int:
    """Return the number of rows to buffer for results in NCHW."""
    order, divided = _loops(point)
    alone = not divided and order[0] == "o"
    return nchw.rows_of(spec, target, point["vectors"]) if alone else 1


def _loops(point: Point) -> tuple[str, str]:
    """Return the loop order over tiles, and which loops threads share."""
    order, divided = ORDERS[point["order"]], DIVIDED[point.get("divide", 0)]
    if divided == "blocks" and order[2] == "w":
        order = ORDERS[1]
    return order, {"": "", "rows": "nh", "blocks": order[:3]}[divided]


def _tiles(
    func: tirx.PrimFunc, spec: BinaryConv2d, target: TargetSpec, group: Group, segment: Segment,
    point: Point,
) -> tirx.PrimFunc:  # fmt: skip
    """Schedule a range of columns and channel vectors."""
    vectors, last = len(group.lanes), group.lanes[-1] < layout.LANES
    out, sums = epilogue.BLOCKS[last], "sum" + "_last" * last
    # 1 normalize
    columns, count = segment.columns, group.count * vectors
    cut: dict[str, Bounds] = {
        "xors": {},
        sums: {2: columns, 3: (0 if last else group.first, count)},
        "acc": {2: columns, 3: (group.first, count)},
        out: {2: columns, 3: (0 if last else group.first, count)},
    }
    order, divided = _loops(point)
    before = order[0] == "o"  # XORs are computed once, before all tiles
    if before:
        del cut["xors"]
    sch = s_tir.Schedule(ranges.part(func, cut, (*SHARED, *["xors"] * before)))
    # 2 tile
    n, h, w, o = sch.get_loops(out)
    tile, column = sch.split(w, [None, segment.width])
    outer, vector = sch.split(o, [group.count, vectors])
    if (rows := _rows(spec, target, point)) > 1:
        h, row = sch.split(h, [None, rows])
    named = {"n": n, "h": h, "w": tile, "o": outer}
    outside = [named[axis] for axis in order]
    if rows > 1:
        outside.insert(-1, row)
    sch.reorder(*outside, column, vector)
    # 3 stage
    if "acc" in (block.name_hint for block in ranges.blocks(func)):
        sch.compute_at("acc", vector, preserve_unit_loops=True)
        sch.vectorize(sch.get_loops("acc_lane")[-1])
    sch.compute_at(sums, outside[-1], preserve_unit_loops=True)
    shared = [named[axis] for axis in divided or "nh"]
    if point["carry_save"] and not before:  # XORs are recomputed for each output row
        sch.compute_at("xors", shared[-1], preserve_unit_loops=True)
        sch.vectorize(sch.get_loops("xors")[-1])
    # 5 vectorize, unroll, parallel
    if divided:
        sch.parallel(sch.fuse(*shared))
    for loop in (column, vector):
        sch.unroll(loop)
    _sums(sch, sums, folded.of_columns(spec) if point["folded"] else spec, target, point)
    epilogue.vectorize(sch, sch.get_sblock(out), spec.out_channels, target)
    return channel_tiles.bounded(sch.mod["main"])


def _sums(
    sch: s_tir.Schedule, name: str, spec: BinaryConv2d, target: TargetSpec, point: Point
) -> None:
    """Schedule the sums of a tile, unrolled inside the reduction."""
    together = _together(spec, target, point)
    pair = XOR_POPCOUNT_WORDS[together] if together > 1 else XOR_POPCOUNT
    if point["carry_save"]:
        pair = CARRY_SAVE[spec.dilations[1]]
        *_, column, vector, kh, c = sch.get_loops(name)
        kw, body = None, [column, vector]
    else:
        *_, column, vector, kh, kw, c = sch.get_loops(name)
        body = [kw, column, vector]
    if point["unroll"] > together:
        c, part = sch.split(c, [None, point["unroll"]])
        body = [part, *body]
    sch.reorder(kh, c, *body)
    for loop in body:
        if not point["rolled"] or loop is not kw:
            sch.unroll(loop)
    start = sch.decompose_reduction(name, kh)
    for loop in sch.get_loops(start)[-2:]:
        sch.unroll(loop)
    # Sums and carries, or vectors of four registers, leave no registers for bounds of rows.
    if not point["carry_save"] and target.vector_bits > 128:
        rows = range(spec.output_hw[0])
        channel_tiles.mark(sch, kh, 0, min(len(taps_inside(spec, 0, row)) for row in rows))
    sch.vectorize(sch.get_loops(f"{name}_start")[-1])
    # 4 tensorize
    lane = sch.get_loops(f"{name}_add")[-2 if pair.terms else -1]
    if spec.shared:
        sch.tensorize(lane, pair.register())
    else:  # each lane loads its own data word
        channel_tiles.mark_lanes(sch, lane)


def _compact(
    func: tirx.PrimFunc, spec: BinaryConv2d, target: TargetSpec, last: bool, divided: bool
) -> tirx.PrimFunc:
    """Schedule the kernel for data with exact zeros, which are rare: vectors without unrolling."""
    end, full = "_last" * last, spec.out_channels // layout.LANES
    channels = (full, 1) if last else (0, full)
    sums, out = [f"{name}{end}" for name in ("sum", "zeros")], epilogue.BLOCKS[last]
    cut: dict[str, Bounds] = {**{name: {} for name in (*sums, out)}, "acc": {3: channels}}
    sch = s_tir.Schedule(ranges.part(func, cut, SHARED))
    n, h, _, o = sch.get_loops(out)
    for name in ("acc", *sums):
        sch.compute_at(name, o, preserve_unit_loops=True)
    sch.vectorize(sch.get_loops("acc_lane")[-1])
    if divided:
        sch.parallel(sch.fuse(n, h))
    for name in sums:
        sch.decompose_reduction(name, sch.get_loops(name)[-3])
        sch.vectorize(sch.get_loops(f"{name}_start")[-1])
        channel_tiles.mark_lanes(sch, sch.get_loops(f"{name}_add")[-1])
    epilogue.vectorize(sch, sch.get_sblock(out), spec.out_channels, target)
    return channel_tiles.bounded(sch.mod["main"])


def _tables(func: tirx.PrimFunc) -> list[tirx.PrimFunc]:
    """Schedule the tables of initial values: their lanes as vectors."""
    made = []
    for block in ranges.blocks(func):
        name = block.name_hint
        if name not in TABLES:
            continue
        sch = s_tir.Schedule(ranges.part(func, {name: {}}, SHARED))
        if name.startswith(folded.WEIGHT):
            sch.vectorize(sch.get_loops(name)[-1])
        else:
            channel_tiles.table(sch, name)
        made.append(sch.mod["main"])
    return made


def _divided(spec: BinaryConv2d, target: TargetSpec, threads: int) -> str:
    """Return what threads share: nothing, rows, or also channel blocks if rows are few."""
    if not multithreading.shared(spec, target, threads):
        return ""
    n, height, _ = image(spec)
    rows = (n if isinstance(n, int) else 1) * height
    return "rows" if multithreading.balanced(rows, threads) else "blocks"


def choose(spec: BinaryConv2d, target: TargetSpec) -> dict[str, int]:
    """Return the default point for one thread, from the registers and caches of `target`."""
    carry_save = _pays_carry_save(spec, target)
    width = channel_tiles.MOST_ROWS if channel_tiles.any_rows(spec) else image(spec)[2]
    columns, vectors = _tile(spec, target, *_budgets(spec, target), width)
    weight_bytes = _weight_bytes(spec)
    folds = folded.fits(spec)
    rolled = not (carry_save or folds) and spec.kernel[1] * columns * vectors > MAX_UNROLLED
    unroll = max(_unrolled(spec, target)) if _counts_bytes(spec, target) else 1
    if unroll > 1:  # words to count are enough to do, so a larger tile only takes registers
        columns, vectors, rolled = 1, 1, spec.kernel[1] > 1
    return {
        "columns": columns,
        "vectors": vectors,
        "order": 2 if weight_bytes > target.l2_bytes // 2 or nchw.results(spec) else 0,
        "carry_save": int(carry_save),
        "folded": int(folds),
        "rolled": int(rolled),
        "unroll": unroll,
    }


def _counts_bytes(spec: BinaryConv2d, target: TargetSpec) -> bool:
    """Return whether bits are counted in bytes, and those of several words can be added first."""
    return target.popcount == "lookup" and counts_words(spec)


def _together(spec: BinaryConv2d, target: TargetSpec, point: Point) -> int:
    """Return how many words are counted together: those of a loop body, or each by itself."""
    return point["unroll"] if _counts_bytes(spec, target) else 1


def _unrolled(spec: BinaryConv2d, target: TargetSpec) -> list[int]:
    """Return the numbers of words per loop body from which a tile may choose."""
    some = range(1, MOST_WORDS + 1) if _counts_bytes(spec, target) else powers(MAX_UNROLL)
    words = layout.words(spec.channels_per_group)
    return [count for count in some if words % count == 0]


def _pays_carry_save(spec: BinaryConv2d, target: TargetSpec) -> bool:
    """Whether three taps are counted at once; one word does not repay the XORs."""
    return layout.words(spec.channels_per_group) > 1 and _counts_threes(spec, target)


def _budgets(spec: BinaryConv2d, target: TargetSpec) -> tuple[int, int]:
    """Return the maximum numbers of accumulators in tiles of one vector and of several."""
    budget = accumulators(target)
    if not _pays_carry_save(spec, target):
        return budget, budget
    floats = any(step.op != "threshold" for step in spec.steps)
    if floats and layout.words(spec.channels_per_group) < LONG_REDUCTION:
        budget = min(budget, FLOAT_TILE)
    return budget, CARRY_SAVE_TILE


def _tile(
    spec: BinaryConv2d, target: TargetSpec, budget: int, several: int, width: int
) -> tuple[int, int]:
    """Return columns and vectors per tile of an image of a width, for up to `budget` accumulators.

    The budget is `several` if a tile has several vectors.
    """
    height = image(spec)[1]
    full = spec.out_channels // layout.LANES
    weight_bytes = _weight_bytes(spec)
    if height == width == 1 and weight_bytes >= target.l2_bytes // 4 and target.vector_bits > 128:
        return 1, 1  # weights are read once, from memory: as one stream they are prefetched
    if target.popcount == "vector":
        if spec.rank == 2 and width > 1 and full >= DENSE_TILE[1]:
            return shares(width, DENSE_TILE[0])[0], DENSE_TILE[1]
        pointwise = spec.kernel == (1, 1) and _steps(spec) <= FEW_WORDS
        if pointwise and full >= POINTWISE_TILE[1] and weight_bytes <= target.l1_bytes // 2:
            return shares(width, POINTWISE_TILE[0])[0], POINTWISE_TILE[1]
    columns = shares(width, budget)[0]
    return columns, max(1, min(several // columns, MAX_VECTORS, full))


def _steps(spec: BinaryConv2d) -> int:
    """Return the number of words counted per output."""
    return spec.window_size * layout.words(spec.channels_per_group)


def _weight_bytes(spec: BinaryConv2d) -> int:
    return _steps(spec) * layout.blocks(spec.out_channels) * layout.LANES * 4


def _counts_threes(spec: BinaryConv2d, target: TargetSpec) -> bool:
    instruction = target.popcount == "vector" and target.vector_bits == 512
    return instruction and spec.dilations[1] in CARRY_SAVE and carry_save.fits(spec)


def accumulators(target: TargetSpec) -> int:
    """Return the number of accumulators of `layout.LANES` that fit in `target`'s registers."""
    per_vector = target.registers_per_vector(layout.LANES)
    if target.popcount == "vector":
        return max(1, min(MAX_TILE, (target.vector_registers - SPARE_REGISTERS) // per_vector))
    return max(1, min(MAX_TILE, (target.vector_registers - 2 * SPARE_REGISTERS) // per_vector))
