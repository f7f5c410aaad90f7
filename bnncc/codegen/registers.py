"""Keep accumulators in registers: a separate allocation for each vector of a register tile.

TVM requests memory of 1024 bytes or more from the runtime, but LLVM promotes only stack allocations
to registers. A tile of 16 vectors or more would be loaded and stored around every reduction. Two
tiles may share their memory, if their vectors have one type. An epilogue may load parts of vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

STACK_BITS = 8 * 1024
"""TVM's limit in bits, from which allocations are calls of the runtime."""


def split_tiles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Split large allocations whose accesses are single vectors at constant offsets, or parts.

    Parameters
    ----------
    func : tirx.PrimFunc
        With unrolled loops and flat buffers, before allocations are lowered to calls.
    """
    roots, lanes = _tiles(func.body)
    if not roots:
        return func
    parts: dict[Any, list[Any]] = {}
    for root in set(roots.values()):
        count, dtype = _size(root) // lanes[root], f"{_scalar(root)}x{lanes[root]}"
        parts[root] = [tirx.decl_buffer((1,), dtype, f"{root.name}_{i}") for i in range(count)]

    def part(buffer: Any, indices: Any) -> tuple[Any, range]:
        start, width = _vector(buffer, indices) or (0, 1)
        number, first = divmod(start, lanes[roots[buffer]])
        return parts[roots[buffer]][number], range(first, first + width)

    def load(node: Any) -> Any:
        if node.source not in roots:
            return node
        buffer, read = part(node.source, node.indices)
        whole = tirx.BufferLoad(buffer, [0])
        if len(read) == lanes[roots[node.source]]:
            return whole
        return tirx.Shuffle([whole], [tirx.IntImm("int32", lane) for lane in read])

    def store(node: Any) -> Any:
        if node.buffer not in roots:
            return node
        return tirx.BufferStore(part(node.buffer, node.indices)[0], node.value, [0])

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


def _tiles(body: tirx.Stmt) -> tuple[dict[Any, Any], dict[Any, int]]:
    """Return the allocations to split, by all buffers that alias them, and their lanes."""
    roots: dict[Any, Any] = {}
    names: Counter[Any] = Counter()  # number of declarations
    uses: Counter[Any] = Counter()  # number of uses of the address
    lanes: dict[Any, int] = {}
    loads: list[tuple[Any, int]] = []  # with their lanes
    wrong: set[Any] = set()

    def allocated(node: Any) -> None:
        buffer = node.buffer
        if len(buffer.shape) != 1 or not isinstance(buffer.shape[0], tirx.IntImm):
            return
        if _size(buffer) * tvm.DataType(_scalar(buffer)).bits >= STACK_BITS:
            roots[buffer] = buffer

    def declared(node: Any) -> None:
        root = _owner(node.data)
        if root in roots:
            roots[node.buffer] = root
            names[root] += 1
            if node.buffer.dtype != root.dtype or not _is(node.buffer.elem_offset, 0):
                wrong.add(root)

    def called(node: Any) -> None:
        if _owner(node) in roots:
            uses[_owner(node)] += 1

    def access(node: Any) -> None:
        stores = isinstance(node, tirx.BufferStore)
        root = roots.get(node.buffer if stores else node.source)
        if root is None:
            return
        place = _vector(node.buffer if stores else node.source, node.indices)
        if place is None or place[0] % place[1]:
            wrong.add(root)
        elif not stores:
            loads.append((root, place[1]))
        elif lanes.setdefault(root, place[1]) != place[1]:
            wrong.add(root)

    tvm_ffi.structural_walk(body, (tirx.AllocBuffer, allocated), order="pre")
    if roots:
        accesses = [
            (tirx.DeclBuffer, declared),
            (tvm.ir.Call, called),
            (tvm.ir.TensorLoad, access),
            (tirx.BufferStore, access),
        ]
        tvm_ffi.structural_walk(body, accesses, order="pre")
    wrong.update(root for root, count in uses.items() if count != names[root])
    wrong.update(root for root in roots.values() if root not in lanes)
    wrong.update(root for root, width in loads if lanes.get(root, 0) % width)
    return {name: root for name, root in roots.items() if root not in wrong}, lanes


def _size(buffer: Any) -> int:
    """Return the number of elements, counting those of vectors."""
    return int(buffer.shape[0]) * tvm.DataType(str(buffer.dtype)).lanes


def _scalar(buffer: Any) -> str:
    """Return the type of the elements of vectors."""
    return str(buffer.dtype).partition("x")[0]


def _vector(buffer: Any, indices: Sequence[Any]) -> tuple[int, int] | None:
    """Return (first element, lanes) of an access of one vector at a constant offset."""
    lanes, index = tvm.DataType(str(buffer.dtype)).lanes, indices[0]
    if len(indices) != 1:
        return None
    if lanes > 1:
        return (int(index) * lanes, lanes) if isinstance(index, tirx.IntImm) else None
    if not isinstance(index, tirx.Ramp) or int(index.lanes) < 2:
        return None
    constant = isinstance(index.base, tirx.IntImm) and _is(index.stride, 1)
    return (int(index.base), int(index.lanes)) if constant else None


def _is(value: Any, number: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == number


def _owner(expr: Any) -> Any:
    """Return the buffer whose address `expr` is, or None."""
    args = list(getattr(expr, "args", []))
    return args[0] if len(args) == 1 and isinstance(args[0], tvm.ir.Var) else None
