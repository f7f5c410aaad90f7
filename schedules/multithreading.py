"""Which kernels run on several threads: the one rule for all kinds, and one region per kernel.

Handing work to TVM's pool and waiting for it takes 1 to 3 us where the other processors are free,
and tens of them where they are not; with one thread, 0.04 us. So a kernel is divided if it would
take long enough alone, which `microseconds` estimates from what it multiplies and what it moves, a
guess within a factor of two.
"""

from __future__ import annotations

import math
from itertools import groupby

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from bnncc.schedules import code_instructions, float_functions, tile_choice
from bnncc.schedules.registry import function, row
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit_data, layout
from bnncc.topi_binary.build import input_types, output_types
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d, Spec

MIN_US = 15.0
"""Shorter kernels run on one thread: divided in two they would gain less than 5 us."""

BALANCED = 0.9
"""Part of the threads' time that work cut in equal pieces should use."""

_BITS = {
    "vector": 1.2e6, "lookup": 1.0e6, "bytes": 0.3e6, "neon": 0.7e6, "neon-dot": 0.7e6,
    "tiles": 1.8e6,
}  # fmt: skip
"""Products of bits in a microsecond with vectors of 512 bits, by how they are counted."""

_PLANES = {**_BITS, "vector": 2.7e6, "lookup": 0.55e6, "bytes": 0.55e6}
_NUMBERS = {"bytes": 0.55e6, "pairs": 0.23e6, "floats": 0.125e6}
"""The same for pairs of planes of levels, and products of levels that are numbers, by method.

Rates are those of the nine layers of ``benchmarks/few_bit.py``; with them, W bits times A bits as
planes cost W * A products of bits, so that 3 x 8 bits lose to bytes."""

_FLOATS = 6e4
"""Float products in a microsecond with vectors of 512 bits."""

_BYTES = 1e4
"""Bytes moved in a microsecond, between the second-level cache and memory."""

_CACHED = 9e4
"""The same where a kernel runs again and again, as in `bnncc bench`: all is in the caches."""

_STEPS = 5e3
"""Innermost iterations in a microsecond of what TVM legalized."""

_FILTERED = 0.6
"""Part of a float convolution's products that minimal filtering leaves."""

_FUNCTIONS = {
    **{f"tirx.{name}": 250.0 for name in ("log2", "pow", "sin", "cos")},
    **{f"tirx.{name}": 1200.0 for name in float_functions.FUNCTIONS},
}
"""Values in a microsecond of functions: those of C's library are called one by one."""

_REGION = "pragma_parallel_launch_point"


def shared(spec: Spec, target: TargetSpec, threads: int) -> bool:
    """Return whether the kernel of `spec` should be divided among threads."""
    return threads > 1 and microseconds(spec, target) >= MIN_US


def steps_shared(steps: int, threads: int) -> bool:
    """Return whether a block of so many innermost iterations should be divided among threads."""
    return threads > 1 and steps >= _STEPS * MIN_US


def microseconds(spec: Spec, target: TargetSpec, bytes_per_us: float = _BYTES) -> float:
    """Estimate how long one thread takes for the kernel of `spec` (a symbolic batch counts as 1).

    Parameters
    ----------
    bytes_per_us : float
        How fast its tensors are moved.

    Returns
    -------
    float
        The longer of the times for its products and for its tensors.
    """
    moved = 0
    for shape, dtype in (*input_types(spec), *output_types(spec)):
        extents = [extent if isinstance(extent, int) else 1 for extent in shape]
        moved += math.prod(extents) * (1 if dtype == "uint8" else 4)
    return max(multiplying(spec, target), moved / bytes_per_us)


def multiplying(spec: Spec, target: TargetSpec) -> float:
    """Estimate how many microseconds one thread takes for the products of `spec`."""
    if not spec.macs:
        return 0.0
    rate: float = function(row(spec).rate)(spec, target)
    return spec.macs / (rate * target.vector_bits / 512)


def estimated(func: tirx.PrimFunc, spec: Spec | None, target: TargetSpec) -> float | None:
    """Estimate how many microseconds one thread takes for a kernel, for people to read.

    Parameters
    ----------
    func : tirx.PrimFunc
        Its definition, as legalized.
    spec : Spec or None
        What it computes; None for TVM's own operators. Of those, blocks that only move or add are
        mostly inlined into the largest of them.

    Returns
    -------
    float or None
        None on GPUs, whose rates are not known.
    """
    if target.kind != "llvm":
        return None
    if spec is not None:
        return microseconds(spec, target, _CACHED)
    plain, calling = [0.0], [0.0]
    called: list[str] = []

    def name(call: tvm.ir.Call) -> None:
        called.append(str(getattr(call.op, "name", "")))

    def visit(block: s_tir.SBlock) -> None:
        extents = [axis.dom.extent for axis in block.iter_vars]
        steps = math.prod(int(e) if isinstance(e, tirx.IntImm) else 1 for e in extents)
        called.clear()
        tvm_ffi.structural_walk(block.body, (tvm.ir.Call, name))
        rates = [_FUNCTIONS[one] for one in called if one in _FUNCTIONS]
        if rates:
            calling.append(steps / min(rates))
        elif extents:
            plain.append(steps)

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, visit))
    return max(plain) / _STEPS + sum(calling)


def bits(spec: BinaryConv2d, target: TargetSpec) -> float:
    """Return how many products of bits vectors of 512 bits make in a microsecond."""
    if spec.weight_order == tile_choice.ORDER:
        return _BITS["tiles"]
    lookup = "lookup" if spec.weight_order == "nibbles" else "bytes"
    return _BITS[lookup if target.popcount == "lookup" else target.popcount]


def levels(spec: FewBitConv2d, target: TargetSpec) -> float:
    """Return how many products of levels vectors of 512 bits make in a microsecond.

    Work is counted as it is done: words and vectors filled up, and a product of bits for every pair
    of planes.
    """
    taps = spec.kernel[0] * spec.kernel[1]
    depth = few_bit_data.group_words(spec) * few_bit_data.per_word(spec) * taps
    done = layout.blocks(spec.out_channels) * layout.LANES * depth
    done *= few_bit_data.weight_planes(spec) * spec.data_tensors
    rate = _NUMBERS[spec.method] if spec.method in _NUMBERS else _PLANES[target.popcount]
    if spec.method == "packed":
        rate = code_instructions.rate(target)
    if tile_choice.pays(spec, target):
        rate = _BITS["tiles"] * (1.01 if spec.method == "packed" else 1)  # and fewer bytes
    return rate * spec.out_channels * spec.taps / done


def floats(spec: Conv2d, target: TargetSpec) -> float:
    """Return how many products of floats vectors of 512 bits make in a microsecond."""
    return _FLOATS * (spec.packed if spec.method == "direct" else 1 / _FILTERED)


def balanced(pieces: int, threads: int) -> bool:
    """Return whether so many equal pieces keep the threads busy: each takes neighbouring ones."""
    return pieces >= BALANCED * threads * -(-pieces // threads)


def one_region(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Start threads once for all parallel loops of `func` that follow one another.

    Each thread then goes through its part of the first loop, of the second, and so on, without
    waiting for the others in between; so only for loops that do not read each other's results.

    Parameters
    ----------
    func : tirx.PrimFunc
        Scheduled.
    """
    return func.with_body(_joined(func.body))


def _joined(stmt: tirx.Stmt) -> tirx.Stmt:
    if isinstance(stmt, tirx.SeqStmt):
        parts: list[tirx.Stmt] = []
        for parallel, group in groupby(stmt.seq, lambda p: _is_loop(p) and divided(p)):
            run = list(group)
            parts += [region(run)] if parallel else [_joined(part) for part in run]
        return tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]
    if _is_loop(stmt) and divided(stmt):
        return region([stmt])
    if isinstance(stmt, s_tir.SBlockRealize):
        old = stmt.block
        block = s_tir.SBlock(
            old.iter_vars, old.reads, old.writes, old.name_hint, _joined(old.body), old.init,
            old.alloc_buffers, old.match_buffers, old.annotations,
        )  # fmt: skip
        return s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, block)
    if isinstance(stmt, tirx.IfThenElse):
        other = None if stmt.else_case is None else _joined(stmt.else_case)
        return tirx.IfThenElse(stmt.condition, _joined(stmt.then_case), other)
    return stmt


def _is_loop(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.For)


def region(loops: list[tirx.Stmt]) -> tirx.Stmt:
    """Return statements that each thread executes, of parallel loops its part."""
    first = loops[0]
    if len(loops) == 1 and isinstance(first, tirx.For) and first.kind == tirx.ForKind.PARALLEL:
        return first
    body = tirx.SeqStmt(loops) if len(loops) > 1 else first
    return tirx.AttrStmt(tirx.IntImm("int32", 0), _REGION, tirx.IntImm("int32", 1), body)


def divided(stmt: tirx.Stmt) -> bool:
    """Whether there is work for several threads in `stmt`."""
    found = []

    def visit(loop: tirx.For) -> None:
        single = isinstance(loop.extent, tirx.IntImm) and loop.extent.value == 1  # is not kept
        found.append(loop.kind == tirx.ForKind.PARALLEL and not single)

    tvm_ffi.structural_walk(stmt, (tirx.For, visit), order="post")
    return any(found)
