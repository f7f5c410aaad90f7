"""The decision whether a kernel runs on several threads, and its single parallel region.

Starting TVM's thread pool and waiting for it takes 1 to 3 us if the other processors are idle, and
tens of us if not; with one thread, 0.04 us. So a kernel is parallel if it would take long enough on
one thread. `microseconds` estimates that time from its products and memory traffic, within a factor
of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import prim

from bnncc.schedules import float_functions, level_instructions, ranges, tile_choice
from bnncc.schedules.registry import function, row
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import few_bit_data, layout, quantization
from bnncc.topi_binary.build import input_types, output_types
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d, Spec

MIN_US = 15.0
"""Kernels with a shorter estimate run on one thread: two threads would save less than 5 us."""

BALANCED = 0.9
"""Minimum utilization of the threads when work is divided into equal pieces."""

_BITS = {
    "vector": 1.2e6, "lookup": 1.3e6, "bytes": 0.3e6, "neon": 0.7e6, "neon-dot": 0.7e6,
    "tiles": 1.8e6,
}  # fmt: skip
"""Bit products per microsecond with 512-bit vectors, by method of counting."""

_FLOATS = 6e4
"""Float products per microsecond with 512-bit vectors."""

_CODES = (5e4, 2.2e4)
"""Weights per microsecond that kernels get from codes: of one bit, and of more."""

MEMORY = 1e4
"""Bytes per microsecond between the L2 cache and memory."""

_CACHED = 9e4
"""The same if a kernel runs repeatedly, as in `bnncc bench`: all tensors are in the caches."""

_STEPS = 5e3
"""Innermost iterations per microsecond of functions that TVM legalized."""

_FILTERED = 0.6
"""Fraction of a float convolution's products that remains with minimal filtering."""

_FUNCTIONS = {
    **{f"tirx.{name}": 250.0 for name in ("log2", "pow", "sin", "cos")},
    **{f"tirx.{name}": 1200.0 for name in float_functions.FUNCTIONS},
}
"""Values per microsecond of functions; those of the C library are called for one at a time."""

_REGION = "pragma_parallel_launch_point"


def shared(spec: Spec, target: TargetSpec, threads: int) -> bool:
    """Return whether the kernel of `spec` should be divided among threads."""
    return threads > 1 and microseconds(spec, target) >= MIN_US


def steps_shared(steps: int, threads: int) -> bool:
    """Return whether a block of `steps` innermost iterations should be divided among threads."""
    return threads > 1 and steps >= _STEPS * MIN_US


def microseconds(spec: Spec, target: TargetSpec, bytes_per_us: float = MEMORY) -> float:
    """Estimate the time of the kernel of `spec` on one thread (a symbolic batch counts as 1).

    Parameters
    ----------
    bytes_per_us : float
        Rate at which its tensors are moved.

    Returns
    -------
    float
        The larger of the times for its products and for its tensors, and that for functions.
    """
    moved = 0
    for shape, dtype in (*input_types(spec), *output_types(spec)):
        moved += _count(shape) * (1 if dtype == "uint8" else 4)
    functions = sum(step.op == "swish" for step in spec.all_steps)
    called = functions * max((_count(shape) for shape, _ in output_types(spec)), default=0)
    calling = called / _FUNCTIONS["tirx.sigmoid"]
    return max(multiplying(spec, target), moved / bytes_per_us) + calling


def _count(shape: Sequence[Any]) -> int:
    return math.prod(extent if isinstance(extent, int) else 1 for extent in shape)


def multiplying(spec: Spec, target: TargetSpec) -> float:
    """Estimate the time in microseconds of the products of `spec` on one thread."""
    if not spec.macs:
        return 0.0
    rate: float = function(row(spec).rate)(spec, target)
    return spec.macs / (rate * target.vector_bits / 512)


def estimated(func: tirx.PrimFunc, spec: Spec | None, target: TargetSpec) -> float | None:
    """Estimate the time of a kernel on one thread in microseconds, for the report.

    Parameters
    ----------
    func : tirx.PrimFunc
        Its definition, as legalized.
    spec : Spec or None
        Its spec, or None for TVM's own operators. Blocks of these that only move or add are
        usually inlined into the largest one.

    Returns
    -------
    float or None
        None for targets whose rates are unknown: all but 64-bit x86 and Arm.
    """
    if not target.has_runtime or target.gpus:
        return None
    if spec is not None:
        return microseconds(spec, target, _CACHED)
    plain, products, calling = [0.0], [0.0], [0.0]
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
        elif _sums_products(block):
            products.append(steps / (_FLOATS * target.vector_bits / 512))
        elif extents:
            plain.append(steps)

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, visit))
    return max(plain) / _STEPS + sum(products) + sum(calling)


def _sums_products(block: s_tir.SBlock) -> bool:
    """Whether a block is a matrix product: it adds products of elements of two tensors."""
    stored = block.body
    if not isinstance(stored, tirx.BufferStore) or not isinstance(stored.value, prim.Add):
        return False
    factors = stored.value.b
    return (
        any(axis.iter_type == tirx.IterVar.CommReduce for axis in block.iter_vars)
        and isinstance(factors, prim.Mul)
        and all(isinstance(one, tvm.ir.TensorLoad) for one in (factors.a, factors.b))
    )


def bits(spec: BinaryConv2d, target: TargetSpec) -> float:
    """Return the bit products per microsecond with 512-bit vectors."""
    if spec.weight_order == tile_choice.ORDER:
        return _BITS["tiles"]
    lookup = "lookup" if spec.weight_order == "nibbles" else "bytes"
    return _BITS[lookup if target.popcount == "lookup" else target.popcount]


def levels(spec: FewBitConv2d, target: TargetSpec) -> float:
    """Return the products of levels per microsecond with 512-bit vectors.

    Work is counted as executed: words and vectors are filled up, and each pair of planes counts.
    """
    taps = spec.window_size
    depth = few_bit_data.group_words(spec) * few_bit_data.per_word(spec) * taps
    done = layout.blocks(spec.out_channels) * layout.LANES * depth
    done *= few_bit_data.weight_planes(spec) * spec.data_tensors
    rate = level_instructions.rate(spec, target)
    if tile_choice.pays(spec, target):
        rate = _BITS["tiles"] * (1.01 if spec.method == "packed" else 1)  # and fewer bytes
    return rate * spec.out_channels * spec.taps / done


def floats(spec: Conv2d, target: TargetSpec) -> float:
    """Return the float products per microsecond with 512-bit vectors."""
    if tile_choice.pays(spec, target):
        terms = len(quantization.PRODUCTS) if spec.operands == "bfloat16x3" else 1
        taken = terms * 2 * tile_choice.float_words(spec)
        return _BITS["tiles"] / 2 * spec.window_size * spec.channels_per_group / taken
    if spec.code_bits:
        each = 1 / _FLOATS + 1 / (_CODES[spec.code_bits > 1] * spec.images)
        return 1 / each
    return _FLOATS * (spec.packed if spec.method == "direct" else 1 / _FILTERED)


def balanced(pieces: int, threads: int) -> bool:
    """Return whether `pieces` equal pieces, divided in contiguous runs, keep the threads busy."""
    return pieces >= BALANCED * threads * -(-pieces // threads)


def one_region(func: tirx.PrimFunc, before: str = "") -> tirx.PrimFunc:
    """Merge consecutive parallel loops of `func` into one parallel region.

    Each thread runs its part of the first loop, then of the second, and so on, without a barrier.
    So no loop may read results of another, but for those of `before`.

    Parameters
    ----------
    func : tirx.PrimFunc
        A scheduled function.
    before : str, optional
        Name of a block whose loop all threads finish before the next one begins.
    """
    return func.with_body(_joined(func.body, before))


def _joined(stmt: tirx.Stmt, before: str) -> tirx.Stmt:
    def kind(part: tirx.Stmt) -> tuple[bool, bool]:
        return _is_loop(part) and divided(part), _makes(part, before)

    if isinstance(stmt, tirx.SeqStmt):
        parts: list[tirx.Stmt] = []
        for (parallel, _), group in groupby(stmt.seq, kind):
            run = list(group)
            parts += [region(run)] if parallel else [_joined(part, before) for part in run]
        return tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]
    if _is_loop(stmt) and divided(stmt):
        return region([stmt])
    if isinstance(stmt, s_tir.SBlockRealize):
        block = ranges.changed_block(stmt.block, body=_joined(stmt.block.body, before))
        return s_tir.SBlockRealize(stmt.iter_values, stmt.predicate, block)
    if isinstance(stmt, tirx.IfThenElse):
        other = None if stmt.else_case is None else _joined(stmt.else_case, before)
        return tirx.IfThenElse(stmt.condition, _joined(stmt.then_case, before), other)
    return stmt


def _makes(stmt: tirx.Stmt, name: str) -> bool:
    """Whether `stmt` is a loop nest around a block of this name."""
    _, body = ranges.opened(stmt)
    return isinstance(body, s_tir.SBlockRealize) and body.block.name_hint == name


def _is_loop(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.For)


def region(loops: list[tirx.Stmt]) -> tirx.Stmt:
    """Return statements that each thread executes; of parallel loops, it executes its part."""
    first = loops[0]
    if len(loops) == 1 and isinstance(first, tirx.For) and first.kind == tirx.ForKind.PARALLEL:
        return first
    body = tirx.SeqStmt(loops) if len(loops) > 1 else first
    return tirx.AttrStmt(tirx.IntImm("int32", 0), _REGION, tirx.IntImm("int32", 1), body)


def divided(stmt: tirx.Stmt) -> bool:
    """Whether `stmt` contains a parallel loop with more than one iteration."""
    found = []

    def visit(loop: tirx.For) -> None:
        single = isinstance(loop.extent, tirx.IntImm) and loop.extent.value == 1  # removed later
        found.append(loop.kind == tirx.ForKind.PARALLEL and not single)

    tvm_ffi.structural_walk(stmt, (tirx.For, visit), order="post")
    return any(found)
