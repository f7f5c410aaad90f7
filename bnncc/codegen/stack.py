"""Align the stack of x86 kernels to their vectors.

The x86-64 ABI aligns the stack to 16 bytes. LLVM aligns it further for spilled vectors only if it
knows before it allocates registers that something on the stack needs it. Otherwise, three of four
64-byte spills cross a cache line, or none: this depends on where the stack begins in a process.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.target import codegen

from bnncc.schedules import prefetch

ABI_BITS = 128
"""The alignment that functions can rely on."""

VECTORS = {"avx512f": 512, "avx": 256}
"""Bits of a vector by feature, widest first."""

_COMPUTE = "compute_scope"


def aligned(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Put a vector on the stack of each machine function that `func` becomes.

    TVM makes one of the computation and one of each parallel loop. A prefetch keeps the vector,
    which holds nothing, from being removed.

    Parameters
    ----------
    func : tirx.PrimFunc
        A packed function, before its computation is made a function of its own.
    """
    bits = _vector_bits(func.attrs["target"])
    if bits <= ABI_BITS or _widest(func.body) <= ABI_BITS:
        return func

    def loop(node: tirx.For) -> Any:
        if node.kind != tirx.ForKind.PARALLEL:
            return node
        body = _with_vector(node.body, bits)
        bounds = node.loop_var, node.min, node.extent
        return tirx.For(*bounds, node.kind, body, node.thread_binding, node.annotations)

    def scope(node: tirx.AttrStmt) -> Any:
        if node.attr_key != _COMPUTE:
            return node
        body = _with_vector(node.body, bits)
        return tirx.AttrStmt(node.node, node.attr_key, node.value, body)

    callbacks = [(tirx.For, loop), (tirx.AttrStmt, scope)]
    return func.with_body(tvm_ffi.structural_map(func.body, callbacks))


def _vector_bits(target: tvm.target.Target) -> int:
    """Return the size of the vectors that are spilled, 0 where the ABI aligns the stack to them."""
    if target.kind.name != "llvm" or not str(target.attrs["mtriple"]).startswith("x86_64"):
        return 0
    found = (bits for name, bits in VECTORS.items() if codegen.target_has_features(name, target))
    return next(found, 0)


def _widest(body: tirx.Stmt) -> int:
    """Return the bits of the widest vector stored."""
    widest = 0

    def stored(node: tirx.BufferStore) -> None:
        nonlocal widest
        kind = tvm.DataType(str(node.value.ty))
        widest = max(widest, kind.bits * kind.lanes)

    tvm_ffi.structural_walk(body, (tirx.BufferStore, stored), order="pre")
    return widest


def _with_vector(body: tirx.Stmt, bits: int) -> tirx.Stmt:
    vector = tirx.decl_buffer((1,), f"uint32x{bits // 32}", "aligned")
    address = tirx.address_of(vector[0])
    return tirx.SeqStmt([tirx.AllocBuffer(vector), prefetch.hint(address), body])
