"""Keep accumulators in registers: a separate allocation for each vector of a register tile.

TVM requests memory of 1024 bytes or more from the runtime, but LLVM promotes only stack allocations
to registers. A tile of 16 vectors or more would be loaded and stored around every reduction. Memory
that TVM shares between a tile and another buffer remains as it is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

STACK_BITS = 8 * 1024
"""TVM's limit in bits, from which allocations are calls of the runtime."""


def split_tiles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Split large allocations whose accesses are all single vectors at constant offsets.

    Parameters
    ----------
    func : tirx.PrimFunc
        With unrolled loops and flat buffers, before allocations are lowered to calls.
    """
    roots = _tiles(func.body)
    if not roots:
        return func
    parts: dict[Any, list[Any]] = {}
    for root in set(roots.values()):
        count, dtype = int(root.shape[0]), str(root.dtype)
        parts[root] = [tirx.decl_buffer((1,), dtype, f"{root.name}_{i}") for i in range(count)]

    def part(buffer: Any, indices: Any) -> Any:
        return parts[roots[buffer]][int(indices[0])]

    def load(node: Any) -> Any:
        if node.source not in roots:
            return node
        return tirx.BufferLoad(part(node.source, node.indices), [0])

    def store(node: Any) -> Any:
        if node.buffer not in roots:
            return node
        return tirx.BufferStore(part(node.buffer, node.indices), node.value, [0])

    def sequence(node: Any) -> Any:
        kept: list[Any] = []
        for stmt in node.seq:
            if isinstance(stmt, tirx.AllocBuffer) and stmt.buffer in parts:
                kept += [tirx.AllocBuffer(buffer) for buffer in parts[stmt.buffer]]
            elif not (isinstance(stmt, tirx.DeclBuffer) and stmt.buffer in roots):
                kept.append(stmt)
        return tirx.SeqStmt(kept) if len(kept) > 1 else kept[0]

    callbacks = [
        (tvm.ir.TensorLoad, load),
        (tirx.BufferStore, store),
        (tirx.SeqStmt, sequence),
    ]
    return func.with_body(tvm_ffi.structural_map(func.body, callbacks))


def _tiles(body: tirx.Stmt) -> dict[Any, Any]:
    """Return the allocations to split, by all buffers that alias them."""
    roots: dict[Any, Any] = {}
    names: Counter[Any] = Counter()  # number of declarations
    uses: Counter[Any] = Counter()  # number of uses of the address
    wrong: set[Any] = set()

    def allocated(node: Any) -> None:
        buffer = node.buffer
        kind = tvm.DataType(str(buffer.dtype))
        if kind.lanes == 1 or len(buffer.shape) != 1:
            return
        count = buffer.shape[0]
        if isinstance(count, tirx.IntImm) and int(count) * kind.bits * kind.lanes >= STACK_BITS:
            roots[buffer] = buffer

    def declared(node: Any) -> None:
        root = _owner(node.data)
        if root in roots:
            roots[node.buffer] = root
            names[root] += 1
            if node.buffer.dtype != root.dtype:
                wrong.add(root)

    def called(node: Any) -> None:
        if _owner(node) in roots:
            uses[_owner(node)] += 1

    def access(buffer: Any, indices: Any) -> None:
        if buffer in roots and not (len(indices) == 1 and isinstance(indices[0], tirx.IntImm)):
            wrong.add(roots[buffer])

    tvm_ffi.structural_walk(body, (tirx.AllocBuffer, allocated), order="pre")
    if roots:
        accesses = [
            (tirx.DeclBuffer, declared),
            (tvm.ir.Call, called),
            (tvm.ir.TensorLoad, lambda node: access(node.source, node.indices)),
            (tirx.BufferStore, lambda node: access(node.buffer, node.indices)),
        ]
        tvm_ffi.structural_walk(body, accesses, order="pre")
    wrong.update(root for root, count in uses.items() if count != names[root])
    return {name: root for name, root in roots.items() if root not in wrong}


def _owner(expr: Any) -> Any:
    """Return the buffer whose address `expr` is, or None."""
    args = list(getattr(expr, "args", []))
    return args[0] if len(args) == 1 and isinstance(args[0], tvm.ir.Var) else None
