"""Schedule of functions that TVM legalized: everything that is not a kernel of ours.

Chains of elementwise blocks are inlined; each remaining block is scheduled separately. Elementwise
blocks are vectorized along their last axis, transpositions in strips of it; if vectors do not fill
the axis, a shorter one follows. A reduction keeps a tile of accumulators in registers if adjacent
outputs read adjacent inputs (matrix products, channels-last pooling). If the reduced axis is
contiguous, it is split into as many partial sums as a vector has lanes; they stay in a register,
and are added in pairs. A step that TVM refuses is skipped, so there is always a result, and it
computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.sym import Analyzer

from bnncc.schedules import multithreading, ranges
from bnncc.schedules.expressions import depends, of_kind, small_when_inlined
from bnncc.schedules.intrin_portable import TRANSPOSE
from bnncc.schedules.space import Point
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import Spec

Block = Any
Expr = Any
Loop = Any
Nest = tuple[list[Loop], list[Loop]]
"""Loops over results, and reduction loops."""

MIN_LANES = 4
"""Minimum vector length; narrower loops are left to LLVM."""

ROWS, VECTORS = 6, 4
"""Rows and vectors of accumulators in the tile of a matrix product, at most."""

ALONE = 8
"""Vectors of accumulators in the tile of a single row: a multiply-add takes four cycles, and two
start in each. Rows that run together have as many in all, or twice as many of 32 registers."""

AVX512_LANES = 16

TOGETHER = 8
"""Most steps of an axis that read the same elements of an input and run together."""

TURNED = 16, 8
"""Columns and rows that are transposed in registers: a cache line of each row that is read."""

SHORT = 192
"""Longest rows that are written a tile of each at a time: of longer ones, too many lines share a
set of the L1 cache. What is read, keys of attention, is often rows of 4 KB, with the same
problem."""

LINES = 8
"""Cache lines from which a transposed block reads at once: the associativity of the L1 cache,
because lines whose addresses differ by a power of two share a set."""

_SPATIAL, _REDUCE = 0, 2


@dataclass(frozen=True)
class _Vectors:
    """Vectors that loops become."""

    lanes: int
    tile: int
    """Vectors in a row of accumulators."""
    sizes: list[Expr]
    """Of loops that `ranges.divided` divides."""

    @classmethod
    def of(cls, target: TargetSpec) -> _Vectors:
        # Registers hold a tile, a row of the second operand, a number of the first and a product.
        fit = (target.vector_registers - 2) // (ROWS + 1)
        return cls(target.vector_bits // 32, max(1, min(VECTORS, fit)), [])


def schedule(func: tirx.PrimFunc, target: TargetSpec, threads: int = 1) -> tirx.PrimFunc:
    """Schedule any PrimFunc.

    Parameters
    ----------
    func : tirx.PrimFunc
        From ``LegalizeOps``, ``FuseOps`` and ``FuseTIR``.
    threads : int, default 1
        Threads that it may use.

    Returns
    -------
    tirx.PrimFunc
        Same name, parameters and results (float sums may be in another order); `func` itself if
        nothing could be scheduled.
    """
    if target.kind == "cuda":
        return _for_gpu(func, target)
    vectors = _Vectors.of(target)
    done = []
    for part in _parts(func, vectors):
        made = _scheduled(part, vectors, threads)
        if made is None:
            return func
        done.append(made)
    result = ranges.followed(done) if len(done) > 1 else done[0]
    for key, value in (func.attrs or {}).items():
        result = result.with_attr(key, value)
    return result.with_attr("tirx.is_scheduled", True)


def _scheduled(func: tirx.PrimFunc, vectors: _Vectors, threads: int) -> tirx.PrimFunc | None:
    """Schedule a function block by block, unless it has none that can be scheduled."""
    try:
        sch = s_tir.Schedule(func)
        root = sch.get_sblock("root")
        names = [sch.get(block).name_hint for block in sch.get_child_blocks(root)]
    except Exception:  # no blocks, or none that can be scheduled: TVM raises several types
        return None
    if len(set(names)) < len(names):
        return None
    # 1 normalize
    for name in names:
        if _only_elementwise_consumers(sch, name) and small_when_inlined(sch, sch.get_sblock(name)):
            sch = attempt(sch, _inline, name)
    left = [sch.get(block).name_hint for block in sch.get_child_blocks(sch.get_sblock("root"))]
    # 2 to 5, block by block
    for name in left:
        sch = attempt(sch, _block, name, vectors, threads)
    return ranges.divided(sch.mod["main"], vectors.sizes)


def _parts(func: tirx.PrimFunc, vectors: _Vectors) -> list[tirx.PrimFunc]:
    """Cut a reduction into ranges of rows and columns that `_tile` covers with whole vectors.

    Ranges of columns overlap if their number is not a multiple of `lanes`: that a few results are
    computed twice costs less than vectors that are not full.
    """
    try:
        statement, *rest = ranges.blocks(func)
        if statement.init is None or vectors.lanes < MIN_LANES:
            return [func]
        sch = s_tir.Schedule(func)
        block = sch.get_sblock(statement.name_hint)
        loops, kinds = sch.get_loops(block), _kinds(sch, block)
        spatial = [k for k, kind in enumerate(kinds) if kind == _SPATIAL]
        *others, column = _rows_last(sch, block, spatial)
        if len(loops) != len(kinds) or not _contiguous(sch, block, loops[column]):
            return [func]
    except Exception:  # no blocks, or another form
        return [func]
    size = _size(sch, loops[column])
    count = _size(sch, loops[others[-1]]) if others else 0
    if isinstance(size, int) and size < vectors.lanes and not _lanes_of(size, vectors.lanes):
        return [func]
    columns = _columns(size, vectors)
    whole = count // ROWS * ROWS
    cuts = [cut for cut in ((0, whole), (whole, count - whole)) if not _is(cut[1], 0)]
    cuts = cuts or [(0, count)]
    if len(columns) * len(cuts) == 1 or str(sch.get(loops[column]).loop_var.ty) != "int64":
        return [func]
    along = [{others[-1]: cut} if len(cuts) > 1 else {} for cut in cuts]
    name, shared = statement.name_hint, [statement.name_hint] if rest else []
    return [
        *(ranges.part(func, {name: {**row, column: c}}, shared) for row in along for c in columns),
        *([ranges.part(func, {one.name_hint: {} for one in rest}, shared)] if rest else []),
    ]


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number


def _columns(size: Any, vectors: _Vectors) -> list[tuple[Any, Any]]:
    """Return the first column and the number of columns of ranges; each is whole vectors.

    If the size is symbolic, the last one is not: the columns of a tensor that fill no vector.
    """
    lanes, tile = vectors.lanes, vectors.lanes * vectors.tile
    if not isinstance(size, int):
        tiles, single = size // tile * tile, size // lanes * lanes
        over = tirx.min(size // lanes, tirx.min(size % lanes, 1))  # one vector over the last ones
        few = size * (1 - tirx.min(size // lanes, 1))
        return [(0, tiles), (tiles, single - tiles), (size - lanes, over * lanes), (0, few)]
    if size % lanes == 0 or size < lanes:
        return [(0, size)]
    whole = size // tile * tile
    width = -(-(size - whole) // lanes) * lanes
    if width > size:
        whole, width = size // lanes * lanes, lanes
    return [cut for cut in ((0, whole), (size - width, width)) if cut[1]]


def as_defined(
    func: tirx.PrimFunc, spec: Spec, target: TargetSpec, threads: int, point: Point
) -> tirx.PrimFunc:
    """Schedule a definition block by block; used for kinds without a rule of their own."""
    return schedule(func, target, threads)


def _for_gpu(func: tirx.PrimFunc, target: TargetSpec) -> tirx.PrimFunc:
    """Apply the first of TVM's GPU rules that can be lowered.

    They are for matrix products, reductions, and one thread per result. Some share a reduction
    among threads that lowering refuses, e.g. a maximum that starts from infinity.
    """
    from tvm.s_tir import dlight

    device = tvm.target.Target({"kind": "cuda", "arch": target.gpus[0]}, host="llvm")
    rules = (dlight.gpu.Matmul(), dlight.gpu.GEMV(), dlight.gpu.Reduction())
    with device:
        for rule in (*rules, dlight.gpu.GeneralReduction(), dlight.gpu.Fallback()):
            try:
                made = dlight.ApplyDefaultSchedule(rule)(tvm.IRModule({"main": func}))
                s_tir.transform.LowerCrossThreadReduction()(made)
            except Exception:  # ScheduleError, e.g. for products with a tensor of rank 0
                continue
            done = made["main"]
            if done.attrs is not None and done.attrs.get("tirx.is_scheduled"):
                return done
    return func


def attempt(sch: s_tir.Schedule, change: Callable[..., None], *args: Any) -> s_tir.Schedule:
    """Return `sch` with a change, or unchanged if TVM refuses it."""
    attempt = sch.copy()
    try:
        change(attempt, *args)
    except Exception:  # ScheduleError, and internal errors for unexpected shapes
        return sch
    return attempt


def _inline(sch: s_tir.Schedule, name: str) -> None:
    sch.compute_inline(sch.get_sblock(name))


def _kinds(sch: s_tir.Schedule, block: Block) -> list[int]:
    return [int(var.iter_type) for var in sch.get(block).iter_vars]


def _only_elementwise_consumers(sch: s_tir.Schedule, name: str) -> bool:
    block = sch.get_sblock(name)
    if _REDUCE in _kinds(sch, block):
        return False
    consumers = sch.get_consumers(block)
    return bool(consumers) and all(_REDUCE not in _kinds(sch, c) for c in consumers)


def _extent(sch: s_tir.Schedule, loop: Loop) -> int:
    """Return the extent of `loop`, or 0 if it is not constant."""
    extent = sch.get(loop).extent
    return int(extent.value) if isinstance(extent, tirx.IntImm) else 0


def _block(sch: s_tir.Schedule, name: str, vectors: _Vectors, threads: int) -> None:
    block = sch.get_sblock(name)
    loops, kinds = sch.get_loops(block), _kinds(sch, block)
    if len(loops) != len(kinds) or not loops:
        return
    steps = 1
    for loop in loops:
        steps *= _extent(sch, loop)
    parallel = multithreading.steps_shared(steps, threads)
    across = _across(sch, block)
    if _REDUCE not in kinds and across is not None:
        if _is_transposition(sch, block, across):
            _in_registers(sch, loops, parallel)
        else:
            _transposed(sch, loops, across, vectors, parallel)
    elif _REDUCE not in kinds:
        _elementwise(sch, loops, _regular(sch, block), vectors, parallel)
    elif sch.get(block).init is not None:
        axes = [k for k, kind in enumerate(kinds) if kind == _SPATIAL]
        spatial = [loops[k] for k in axes]
        reduced = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == _REDUCE]
        if len(spatial) + len(reduced) < len(loops):
            return
        if spatial and _contiguous(sch, block, spatial[-1]):
            spatial = [loops[k] for k in _rows_last(sch, block, axes)]
            _tile(sch, block, (spatial, reduced), vectors, parallel)
        elif _contiguous(sch, block, reduced[-1]):
            _partial_sums(sch, block, (spatial, reduced), vectors, parallel)
        elif parallel and spatial:
            sch.parallel(spatial[0])


def _elementwise(
    sch: s_tir.Schedule,
    loops: list[Loop],
    regular: Expr,
    vectors: _Vectors,
    parallel: bool,
) -> None:
    """Vectorize the last axis, in pieces of `regular` values."""
    *outer, last = loops
    width, inner = _width(regular, vectors.lanes), None
    if width:
        if isinstance(regular, int) and regular < _extent(sch, last):
            piece, last = sch.split(last, [None, regular])
            outer = [*outer, piece]
        last, inner = _in_vectors(sch, last, regular, width, vectors)
    if parallel and outer:
        sch.parallel(sch.fuse(*outer) if len(outer) > 1 else outer[0])
    elif parallel:
        sch.parallel(last)
    if inner is not None:
        sch.vectorize(inner)


def _transposed(
    sch: s_tir.Schedule, loops: list[Loop], across: int, vectors: _Vectors, parallel: bool
) -> None:
    """Write short vectors, and next read what is adjacent to their elements, while it is cached."""
    *outer, last = loops
    size = _size(sch, last)
    width = _width(size, LINES)
    if not width:
        return
    beside = outer.pop(across)
    last, inner = _in_vectors(sch, last, size, width, vectors)
    sch.reorder(*outer, last, beside, inner)
    if parallel:
        sch.parallel(sch.fuse(*outer) if len(outer) > 1 else (outer or [last])[0])
    sch.vectorize(inner)


def _is_transposition(sch: s_tir.Schedule, block: Block, across: int) -> bool:
    """Return whether a block exchanges the last two axes of float32 matrices, in whole tiles."""
    statement = sch.get(block)
    *_, row, column = (axis.var for axis in statement.iter_vars)
    stored = statement.body
    if not isinstance(stored, tirx.BufferStore) or across != len(statement.iter_vars) - 2:
        return False
    if not isinstance(stored.value, tvm.ir.TensorLoad):
        return False
    moved = str(stored.buffer.dtype) == str(stored.value.source.dtype) == "float32"
    last = [*stored.value.indices][-2:]
    exchanged = len(last) == 2 and last[0].same_as(column) and last[1].same_as(row)
    extents = [_known(axis.dom.extent) for axis in statement.iter_vars[-2:]]
    return moved and exchanged and all(map(_multiple, extents, TURNED))


def _known(size: Expr) -> Expr:
    return int(size) if isinstance(size, tirx.IntImm) else size


def _in_registers(sch: s_tir.Schedule, loops: list[Loop], parallel: bool) -> None:
    """Transpose tiles in registers."""
    *outer, row, column = loops
    lanes, places = TURNED
    size = _extent(sch, column)
    row, lane = sch.split(row, [None, lanes])
    column, place = sch.split(column, [None, places])
    first, *inside = [row, column]
    if 0 < size <= SHORT and size % (2 * places) == 0:
        # Rows are read from start to end, and two tiles fill a cache line of each that is written.
        column, half = sch.split(column, [None, 2])
        first, *inside = [column, row, half]
    sch.reorder(*outer, first, *inside, lane, place)
    sch.tensorize(lane, TRANSPOSE[places, lanes].register())
    if parallel:
        sch.parallel(sch.fuse(*outer, first) if outer else first)


def _size(sch: s_tir.Schedule, loop: Loop) -> Expr:
    """Return the extent of `loop`: an int if it is constant."""
    return _extent(sch, loop) or sch.get(loop).extent


def _multiple(size: Expr, number: int) -> bool:
    """Whether a size is known to be a multiple of a number, and not 0."""
    if isinstance(size, int):
        return size > 0 and size % number == 0
    return bool(Analyzer().can_prove_equal(size % number, 0))


def _width(size: Expr, lanes: int) -> int:
    """Return the lanes of vectors for a loop of `size` iterations, or 0."""
    width = min(size, lanes) if isinstance(size, int) else lanes
    return width if width >= MIN_LANES else 0


def _in_vectors(
    sch: s_tir.Schedule, loop: Loop, size: Expr, width: int, vectors: _Vectors
) -> list[Loop]:
    """Split a loop of `size` iterations into vectors and a rest."""
    outer, inner = sch.split(loop, [None, width])
    _divide(sch, outer, size, width, vectors)
    return [outer, inner]


def _divide(sch: s_tir.Schedule, loop: Loop, size: Expr, width: int, vectors: _Vectors) -> None:
    """Have `ranges.divided` separate the last, incomplete vector of a loop over vectors."""
    if not isinstance(size, int) or size % width:
        sch.annotate(loop, ranges.SIZE, len(vectors.sizes))
        vectors.sizes.append(size)


def _across(sch: s_tir.Schedule, block: Block) -> int | None:
    """Return the index of the axis along which reads are contiguous, or None for the last axis."""
    statement = sch.get(block)
    *others, last = (axis.var for axis in statement.iter_vars)
    for region in _loads(statement):
        if not region or depends(region[-1], last):
            continue
        for number, var in enumerate(others):
            moves = [depends(index, var) for index in region]
            one = moves[-1] and not any(moves[:-1]) and _moves_by_one(region[-1], var)
            if one and any(depends(index, last) for index in region):
                return number
    return None


def _lanes_of(extent: int, lanes: int) -> int:
    """Return the longest vector length that divides `extent`, or 0."""
    while lanes >= MIN_LANES:
        if extent and extent % lanes == 0:
            return lanes
        lanes //= 2
    return 0


def _regular(sch: s_tir.Schedule, block: Block) -> Expr:
    """Return the length of pieces of the last axis in which all indices move by 1 or 0; else 0."""
    statement = sch.get(block)
    var, extent = statement.iter_vars[-1].var, statement.iter_vars[-1].dom.extent
    loads = _loads(statement)
    if statement.reads and not loads:
        return 0
    indices = [index for load in loads for index in load]
    if not isinstance(extent, tirx.IntImm):
        return extent if all(_moves_by_one(i, var) for i in indices if depends(i, var)) else 0
    period = gcd(int(extent), *_divisors([index for index in indices if depends(index, var)]))
    piece, lane = (tirx.Var(name, var.ty) for name in ("piece", "lane"))
    known = Analyzer()
    for axis in statement.iter_vars[:-1]:
        known.bind(axis.var, axis.dom)
    known.bind(piece, tvm.ir.Range(0, int(extent) // period))
    known.bind(lane, tvm.ir.Range(0, period))
    split = (tirx.Var, lambda one: piece * period + lane if one.same_as(var) else one)
    moved = [known.simplify(tvm_ffi.structural_map(index, split)) for index in indices]
    return period if all(_moves_by_one(i, lane) for i in moved if depends(i, lane)) else 0


def _ranges(statement: s_tir.SBlock) -> Analyzer:
    """Return an analyzer that knows the axis ranges of a block, which simplifies reshapes."""
    known = Analyzer()
    for axis in statement.iter_vars:
        known.bind(axis.var, axis.dom)
    return known


def _indices(statement: s_tir.SBlock) -> list[list[Any]]:
    """Return the start indices of the region that is read of each input."""
    known = _ranges(statement)
    return [[known.simplify(axis.min) for axis in region.region] for region in statement.reads]


def _loads(statement: s_tir.SBlock) -> list[list[Any]]:
    """Return the index of each element that is read; [] if any is data-dependent."""
    known, found = _ranges(statement), of_kind(statement.body, tvm.ir.TensorLoad)
    if any(of_kind(index, tvm.ir.TensorLoad) for load in found for index in load.indices):
        return []
    return [[known.simplify(index) for index in load.indices] for load in found]


def _divisors(indices: list[Any]) -> list[int]:
    """Return the divisors in index expressions."""
    kinds = (tirx.FloorDiv, tirx.FloorMod)
    found = [node.b for index in indices for node in of_kind(index, kinds)]
    return [int(number) for number in found if isinstance(number, tirx.IntImm)]


def _contiguous(sch: s_tir.Schedule, block: Block, loop: Loop) -> bool:
    """Whether some input is read with stride 1 along `loop`, and none with a larger stride."""
    statement = sch.get(block)
    loops = sch.get_loops(block)
    name = sch.get(loop).loop_var
    number = next(i for i, other in enumerate(loops) if sch.get(other).loop_var.same_as(name))
    var = statement.iter_vars[number].var
    found = False
    for region in _indices(statement):
        for axis, index in enumerate(region):
            uses = depends(index, var)
            last = axis == len(region) - 1
            if uses and not last:
                return False
            if uses and not _moves_by_one(index, var):
                return False
            found = found or uses
    return found


def _rows_last(sch: s_tir.Schedule, block: Block, spatial: list[int]) -> list[int]:
    """Return the spatial axes of a matrix product in the order heads, rows, columns.

    Along rows, the same vectors of columns are read. They may be outside the heads.

    Parameters
    ----------
    spatial : list of int
        Axes of the block; the last one is that of columns.
    """
    statement = sch.get(block)
    *others, column = spatial
    variables = [axis.var for axis in statement.iter_vars]
    wide = [r for r in _indices(statement) if any(depends(i, variables[column]) for i in r)]
    found = None
    for axis in others:
        shared = not any(depends(index, variables[axis]) for region in wide for index in region)
        if shared and _extent(sch, sch.get_loops(block)[axis]) != 1:
            found = axis
    return spatial if found is None else [*(k for k in others if k != found), found, column]


def _together(sch: s_tir.Schedule, block: Block, spatial: list[Loop]) -> tuple[list[Loop], Any]:
    """Split off steps of an axis that read the same elements of an input; last of the results.

    Attention's heads with keys and values in common read these once, one after another. Returns
    the loops, with None if there is no such axis, and the loop over those steps.
    """
    statement = sch.get(block)
    for number in range(len(spatial) - 1):
        var = statement.iter_vars[number].var
        for region in _indices(statement):
            found = [index for index in region if depends(index, var)]
            if len(found) != 1 or not isinstance(found[0], tirx.FloorDiv):
                continue
            count = int(found[0].b) if isinstance(found[0].b, tirx.IntImm) else 0
            same = found[0].a.same_as(var) and 1 < count <= TOGETHER
            if same and _extent(sch, spatial[number]) % count == 0:
                loop, steps = sch.split(spatial[number], [None, count])
                return [*spatial[:number], loop, *spatial[number + 1 :]], steps
    return spatial, None


def _moves_by_one(expr: Any, var: tirx.Var) -> bool:
    return not depends(Analyzer().simplify(expr - var), var)


def _tile(sch: s_tir.Schedule, block: Block, nest: Nest, vectors: _Vectors, parallel: bool) -> None:
    """Keep a tile of rows x vectors of accumulators in registers during the reduction."""
    (*outer, last), reduced = nest
    columns, lanes, most = _size(sch, last), vectors.lanes, vectors.tile
    count = _size(sch, outer[-1]) if outer else 0
    if not isinstance(count, int) or not 0 < count < ROWS:
        count = ROWS if outer and _multiple(count, ROWS) else 1
    steps = None
    if count == 1 and lanes >= MIN_LANES:
        (*outer, last), steps = _together(sch, block, [*outer, last])
        count = 1 if steps is None else _extent(sch, steps)
    if count != ROWS:
        sums = 2 * ALONE if lanes == AVX512_LANES else ALONE
        most = min(ALONE, -(-sums // count))
    filled = (k * lanes for k in range(most, 0, -1) if _multiple(columns, k * lanes))
    size = next(filled, 0) if lanes >= MIN_LANES else 0
    size = size or _lanes_of(_extent(sch, last), lanes)
    if not size:
        sch.reorder(*outer, *reduced, last)
        if parallel and outer:
            sch.parallel(outer[0])
        sch.decompose_reduction(block, reduced[0])
        return
    # 2 tile
    column, inner = sch.split(last, [None, size])
    rows = [] if steps is None else [steps]
    if steps is None and count > 1:
        row, part = sch.split(outer[-1], [None, count])
        outer, rows = [*outer[:-1], row], [part]
    vector = []
    if size > lanes:
        inner, lane = sch.split(inner, [None, lanes])
        vector = [lane]
    sch.reorder(*outer, column, *reduced, *rows, inner, *vector)
    # 3 stage
    cache = sch.cache_write(block, 0, "global")
    sch.reverse_compute_at(cache, column)
    # 5 vectorize, unroll, parallel
    if parallel:
        sch.parallel(sch.fuse(*outer) if len(outer) > 1 else (outer or [column])[0])
    sch.vectorize(vector[0] if vector else inner)
    for loop in [*rows, *([inner] if vector else [])]:
        sch.unroll(loop)
    sch.decompose_reduction(block, reduced[0])


def _partial_sums(
    sch: s_tir.Schedule,
    block: Block,
    nest: Nest,
    vectors: _Vectors,
    parallel: bool,
) -> None:
    """Reduce into a vector of partial sums for each result, and fold that in halves."""
    spatial, reduced = nest
    whole, size = _size(sch, reduced[-1]), vectors.lanes
    while isinstance(whole, int) and size > whole // 2:
        size //= 2
    width = size
    if width < MIN_LANES:
        if parallel and spatial:
            sch.parallel(spatial[0])
        return
    # 2 tile
    axis = len(spatial)
    if spatial:
        spatial, together = _together(sch, block, spatial)
        if together is not None:
            spatial = [*spatial, together]
            sch.reorder(*spatial)
    _, lane = sch.split(reduced[-1], [None, width])
    parts = [sch.rfactor(lane, axis)]
    while size > 2:
        size //= 2
        _, lane = sch.split(sch.get_loops(block)[-1], [2, size])
        parts.append(sch.rfactor(lane, axis))
    # 3 stage
    for part in reversed(parts) if spatial else ():
        sch.compute_at(part, sch.get_loops(block)[len(spatial) - 1])
    # 5 vectorize, unroll, parallel
    if parallel and spatial:
        sch.parallel(sch.get_loops(block)[0])
    for number, part in enumerate(parts):
        *steps, lane = sch.get_loops(part)[len(spatial) :]
        if spatial:  # `compute_at` put the lanes first
            steps, lane = [*steps[1:], lane], steps[0]
            sch.reorder(*steps, lane)
        sch.vectorize(lane)
        if number:
            sch.unroll(steps[0])
        else:  # `compute_at` loses predicates and annotations
            _divide(sch, steps[-1], whole, width, vectors)
        sch.decompose_reduction(part, steps[0])
    sch.unroll(sch.get_loops(block)[-1])
