"""Prefetch of memory that is not in the caches when a dense layer reads or writes it.

A network reads each weight of a dense layer once per run, and its other layers have taken the place
of these weights in the caches since. So they come from the last-level cache or from memory, where a
hardware prefetcher follows a stream, but not far enough ahead if several instructions are executed
per cache line. It does not follow results at all: a tile writes a few channels of each row, and the
next row is thousands of bytes away. Pointwise layers with many channels write pixels likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import s_tir, tirx

from bnncc.schedules import epilogue, ranges
from bnncc.schedules.expressions import of_kind
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.build import first_step_input
from bnncc.topi_binary.definitions.blocks import int64
from bnncc.topi_binary.definitions.byte_products import Layer
from bnncc.topi_binary.spec import BinaryConv2d, FewBitConv2d

AHEAD = 4096
"""Bytes between what is read and what is prefetched: on Emerald Rapids, 1,024 are too few, and
8,192 are no better."""

REPEATED = "bnncc_repeated"
"""Annotation of a loop each of whose iterations reads the same weights."""

_READ, _ALL_LEVELS, _DATA = 0, 3, 1  # of `llvm.prefetch`


def hint(address: Any) -> tirx.Stmt:
    """Return a statement that prefetches the cache line of an address into all levels."""
    call = tirx.call_intrin("void", "tirx.prefetch", address, _READ, _ALL_LEVELS, _DATA)
    return tirx.Evaluate(call)


_HELD_UP: dict[type, Callable[[Any, TargetSpec], bool]] = {
    BinaryConv2d: lambda _, target: target.popcount != "vector",
    FewBitConv2d: lambda spec, _: spec.method == "packed",
}
"""By kind of layer: whether several instructions are executed per cache line of weights. Otherwise
the hardware prefetcher keeps up."""


def pays(spec: Layer, target: TargetSpec) -> bool:
    """Return whether the weights of `spec` should be prefetched.

    Those of a convolution are read again for each tile of pixels.
    """
    held_up = _HELD_UP.get(type(spec))
    dense = target.arch == "x86_64" and spec.rank == 2
    return held_up is not None and dense and held_up(spec, target)


def weights(func: tirx.PrimFunc, spec: Layer, target: TargetSpec) -> tirx.PrimFunc:
    """Prefetch weights `AHEAD` of where they are read, if that pays.

    Parameters
    ----------
    func : tirx.PrimFunc
        A scheduled kernel; its innermost blocks read at most a cache line of the weights each.
    spec : Layer
        Spec of the kernel.
    target : TargetSpec
        The target.

    Returns
    -------
    tirx.PrimFunc
    """
    if not pays(spec, target):
        return func
    views = ranges.views(func, [func.params[spec.weight_position]])

    def hinted(stmt: tirx.Stmt, test: Any = None) -> tirx.Stmt:
        def visit(block: s_tir.SBlock) -> s_tir.SBlock:
            read = next((region for region in block.reads if region.source in views), None)
            if read is None or of_kind(block.body, s_tir.SBlock):
                return block
            return _with_hints(block, [_beyond(read, -1, AHEAD // _item_bytes(read))], test)

        return tvm_ffi.structural_map(stmt, (s_tir.SBlock, visit))

    def once(loop: tirx.For) -> tirx.For:
        if REPEATED not in loop.annotations:
            return loop
        return ranges.looped(loop, hinted(loop.body, tirx.EQ(loop.loop_var, int64(0))))

    if any(REPEATED in loop.annotations for loop in of_kind(func.body, tirx.For)):
        return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, once)))
    return func.with_body(hinted(func.body))


def next_rows(func: tirx.PrimFunc, spec: Layer, target: TargetSpec) -> tirx.PrimFunc:
    """Prefetch the next row, or pixel, of what the epilogue of a layer on tiles reads and writes.

    If the layer is dense, or pointwise with results that leave no room for data in the L2 cache.
    """
    size = 4 * math.prod((*spec.output_hw, spec.out_channels))
    if spec.rank != 2 and not (spec.pointwise and size > target.l2_bytes // 2):
        return func
    views = ranges.views(func, func.params[first_step_input(spec) :])

    def visit(block: s_tir.SBlock) -> s_tir.SBlock:
        if block.name_hint not in epilogue.BLOCKS:
            return block
        rows = [
            region for region in (*block.writes, *block.reads)
            if region.source in views and len(region.region) > 1 and _wide(region)
        ]  # fmt: skip
        return _with_hints(block, [_beyond(row, -2, 1) for row in rows])

    return func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlock, visit)))


def _wide(region: tirx.BufferRegion) -> bool:
    """Whether a region has one 32-bit number per channel."""
    several = int(region.region[-1].extent) > 1
    return several and _item_bytes(region) == 4


def _item_bytes(region: tirx.BufferRegion) -> int:
    return np.dtype(str(region.source.dtype)).itemsize


def _beyond(region: tirx.BufferRegion, axis: int, count: int) -> Any:
    """Return the address of what lies `count` elements beyond a region along an axis."""
    where = [extent.min for extent in region.region]
    where[axis] += count
    return tirx.address_of(region.source[tuple(where)])


def _with_hints(block: s_tir.SBlock, addresses: Sequence[Any], test: Any = None) -> s_tir.SBlock:
    """Add hints to a block, which are executed if `test` holds."""
    hints = [hint(address) for address in addresses]
    if test is not None:
        hints = [tirx.IfThenElse(test, one, None) for one in hints]
    body = ranges.sequence([*hints, block.body])
    return ranges.changed_block(block, body=body)
