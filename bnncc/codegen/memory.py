"""Memory for activations: the static plan by kernel, and the scratch memory of each kernel.

TVM's plan assigns every tensor between kernels to one of a few storages, which is in use from the
first kernel that writes it to the last that reads it. Scratch memory is requested from the runtime
while a kernel runs: transformed rows, ring buffers, tables. It is derived from the lowered code, in
which each allocation is a call, and counts once per thread if threads allocate it. Allocations of
less than 1024 bytes are registers or stack, and are not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.tirx import compilation_pipeline

from bnncc.codegen.arguments import without_checks
from bnncc.codegen.binds import limit_binds
from bnncc.codegen.registers import split_tiles
from bnncc.codegen.short_functions import in_short_functions
from bnncc.codegen.stack import aligned
from bnncc.schedules.float_functions import expanded

PIPELINE = "bnncc"
"""Name of our variant of TVM's lowering, with our last passes; records scratch memory."""

_OPTIONS = {"tirx.disable_cse_tir": True}
"""TVM's common-subexpression elimination is disabled, because it fails on repeated vector
comparisons. LLVM does the same anyway."""

ALLOCATE, FREE = "tirx.TVMBackendAllocWorkspace", "tirx.TVMBackendFreeWorkspace"
"""Call that requests scratch memory in lowered code."""

_REGION = "pragma_parallel_launch_point"
_noted = threading.local()


@dataclass(frozen=True)
class Scratch:
    """Scratch memory of one kernel."""

    shared: int = 0
    """Bytes allocated once."""
    per_thread: int = 0
    """Bytes that each thread allocates."""

    def total(self, threads: int) -> int:
        """Return the bytes for a number of threads."""
        return self.shared + self.per_thread * threads


@dataclass(frozen=True)
class Call:
    """Memory of one kernel call, in bytes, with symbolic dimensions as 1."""

    name: str
    """Name of the kernel."""
    inputs: int
    outputs: int
    """`inputs`, `outputs`: sizes of its tensors, without constants; an output stored in place of an
    input does not count."""
    live: int
    """Size of all storages in use while it runs, without the network's inputs."""


@dataclass(frozen=True)
class Plan:
    """The static memory plan of a network."""

    calls: tuple[Call, ...]
    """In call order."""
    arena: int
    """Size of all storages."""


def plan(module: tvm.IRModule) -> Plan:
    """Derive the memory plan of a network.

    Parameters
    ----------
    module : tvm.IRModule
        After TVM's ``StaticPlanBlockMemory``.
    """
    trace, main = _Trace(), module["main"].body
    for block in main.blocks:
        for binding in block.bindings:
            trace.binding(binding.var, binding.value)
    trace.used(main.body, len(trace.calls) - 1)
    spans = [(trace.sizes[storage], at[0], at[-1]) for storage, at in trace.uses.items()]
    calls = tuple(
        Call(name, reads, writes, sum(size for size, first, last in spans if first <= i <= last))
        for i, (name, reads, writes) in enumerate(trace.calls)
    )
    return Plan(calls, sum(trace.sizes))


class _Trace:
    """The storages of a network, and the calls that use them.

    Attributes
    ----------
    sizes : list of int
        Of the storages, in bytes.
    uses : dict of int to list of int
        By storage: the numbers of the calls that use it, in order.
    calls : list of (str, int, int)
        Kernels, with the sizes of the tensors that they read and write.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.uses: dict[int, list[int]] = {}
        self.calls: list[tuple[str, int, int]] = []
        self._storages: dict[Any, int] = {}  # by variable
        self._places: list[int] = []  # storage of each tensor
        self._tensors: dict[Any, frozenset[int]] = {}  # by variable
        self._fields: dict[Any, Any] = {}  # of tuples, by variable
        self._written: set[int] = set()

    def binding(self, var: Any, value: Any) -> None:
        """Read one binding."""
        name = getattr(getattr(value, "op", None), "name", "")
        if name == "relax.memory.alloc_storage":
            self._storages[var] = len(self.sizes)
            self.sizes.append(product(value.args[0].values))
        elif name == "relax.memory.alloc_tensor":
            self._tensors[var] = self._allocate(self._storages[value.args[0]])
        elif name == "relax.builtin.alloc_tensor":
            self.sizes.append(tensor_bytes(value.ty))
            self._tensors[var] = self._allocate(len(self.sizes) - 1)
        elif isinstance(value, relax.TupleGetItem):
            whole = self._fields.get(value.tuple_value)
            self._tensors[var] = self._held(whole[value.index] if whole else value.tuple_value)
        elif isinstance(value, relax.Call):
            held = frozenset[int]().union(*map(self._held, value.args))
            self._tensors[var] = held  # a view, if anything
            if isinstance(value.op, tvm.ir.GlobalVar):
                self._call(value)
        else:
            self._tensors[var] = self._held(value)
            if isinstance(value, relax.Tuple):
                self._fields[var] = value.fields

    def used(self, expr: Any, call: int) -> None:
        """Note that a call uses the tensors of an expression."""
        for tensor in self._held(expr):
            self.uses.setdefault(self._places[tensor], []).append(call)

    def _held(self, expr: Any) -> frozenset[int]:
        if isinstance(expr, relax.Tuple):
            return frozenset[int]().union(*map(self._held, expr.fields))
        return self._tensors.get(expr, frozenset())

    def _allocate(self, storage: int) -> frozenset[int]:
        self._places.append(storage)
        return frozenset([len(self._places) - 1])

    def _call(self, value: Any) -> None:
        reads = writes = 0
        for arg in value.args:
            if isinstance(arg, relax.Var) and isinstance(arg.ty, relax.TensorType):
                fresh = bool(self._held(arg) - self._written)
                writes += tensor_bytes(arg.ty) * fresh
                reads += tensor_bytes(arg.ty) * (not fresh)
            self.used(arg, len(self.calls))
        self._written.update(*map(self._held, value.args))
        self.calls.append((value.op.name_hint, reads, writes))


def lowering(**options: Any) -> tvm.transform.PassContext:
    """Return the context in which TVM lowers all code.

    Parameters
    ----------
    **options
        More options of TVM's passes.
    """
    return tvm.transform.PassContext(config={**_OPTIONS, **options})


@contextmanager
def recorded() -> Iterator[dict[str, Scratch]]:
    """Collect the scratch memory of every kernel that `PIPELINE` lowers in this thread."""
    found: dict[str, Scratch] = {}
    _noted.kernels = found
    try:
        yield found
    finally:
        _noted.kernels = None


def at_one(value: Any, symbols: Mapping[str, int] | None = None) -> int:
    """Evaluate a size that consists of sums and products of symbols and numbers.

    Parameters
    ----------
    value : Expr
        The size.
    symbols : mapping of str to int, optional
        Values of symbols; default: 1.
    """
    if isinstance(value, tirx.Cast):
        return at_one(value.value, symbols)
    if isinstance(value, tirx.Mul):
        return at_one(value.a, symbols) * at_one(value.b, symbols)
    if isinstance(value, tirx.Add):
        return at_one(value.a, symbols) + at_one(value.b, symbols)
    if isinstance(value, tirx.Sub):
        return at_one(value.a, symbols) - at_one(value.b, symbols)
    if getattr(getattr(value, "op", None), "name", "") == "tirx.shift_left":
        return at_one(value.args[0], symbols) << at_one(value.args[1], symbols)
    if isinstance(value, tirx.Var):
        return (symbols or {}).get(value.name, 1)
    return int(value) if isinstance(value, tirx.IntImm) else 1


def product(dims: Any) -> int:
    """Return the product of dimensions, with symbols as 1."""
    result = 1
    for d in dims:
        result *= at_one(d)
    return result


def tensor_bytes(kind: Any) -> int:
    """Return the size of a tensor of type `kind` in bytes, with symbols as 1."""
    return product(kind.shape.values) * ((tvm.DataType(str(kind.dtype)).bits + 7) // 8)


def _lowering() -> tuple[Any, Any, Any]:
    pipeline, host, device = compilation_pipeline.PIPELINE_MAP["s_tir"]()
    short = tvm.transform.module_pass(in_short_functions, opt_level=0)
    pipeline = tvm.transform.Sequential([short, pipeline])
    prepared = tvm.transform.module_pass(_prepared, opt_level=0)
    note = tvm.transform.module_pass(_note, opt_level=0)
    return pipeline, lambda: tvm.transform.Sequential([prepared, host(), note]), device


def _prepared(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    for var, func in module.functions_items():
        made = expanded(limit_binds(split_tiles(without_checks(func))))
        module[var] = aligned(made)
    return module


def _note(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    kernels = getattr(_noted, "kernels", None)
    if kernels is not None:
        for var, func in module.functions_items():
            kernels[var.name_hint.removeprefix("__tvm_ffi_")] = _scratch(func)
    return module


def _scratch(func: tirx.PrimFunc) -> Scratch:
    total, private = [_allocated(func.body)], []

    def loop(node: tirx.For) -> None:
        if node.kind == tirx.ForKind.PARALLEL:
            private.append(_allocated(node.body))

    def region(node: tirx.AttrStmt) -> None:
        if node.attr_key == _REGION:
            inner = []

            def inside(part: tirx.For) -> None:
                if part.kind == tirx.ForKind.PARALLEL:
                    inner.append(_allocated(part.body))

            tvm_ffi.structural_walk(node.body, (tirx.For, inside), order="post")
            private.append(_allocated(node.body) - sum(inner))

    tvm_ffi.structural_walk(func.body, (tirx.For, loop), order="post")
    tvm_ffi.structural_walk(func.body, (tirx.AttrStmt, region), order="post")
    return Scratch(total[0] - sum(private), sum(private))


def _allocated(stmt: tirx.Stmt) -> int:
    sizes = []

    def visit(call: Any) -> None:
        if getattr(call.op, "name", "") == ALLOCATE:
            sizes.append(at_one(call.args[2]))

    tvm_ffi.structural_walk(stmt, (tvm.ir.Call, visit), order="post")
    return sum(sizes)


compilation_pipeline.PIPELINE_MAP[PIPELINE] = _lowering
