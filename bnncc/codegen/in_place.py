"""Caches that grow in place: a buffer of the caller is both an input and an output.

    main:           present = append(past, new)        copies `past` to other memory
    main_in_place:  present = append_new(past, new)    `past` already is the front of `present`

`new` is what follows `past`, or rows at positions that are data, or both.

With the option ``in_place``, kernels read and write `past` and `present` with any strides, so
both can be parts of a buffer with room for more. Only ``main_in_place`` relies on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.codegen.ops import OPAQUE
from bnncc.codegen.outputs import INTO, origin, values
from bnncc.codegen.sizes import renamed, symbols_of
from bnncc.errors import UsageError

IN_PLACE = "main_in_place"
"""Name of the variant of ``main_into`` that writes only new rows of caches."""

PAIRS = "bnncc.in_place"
"""Attribute of ``main``: position of an input, then of the output that continues it, and so on."""

_APPENDS, _APPEND = "bnncc.appends", "append"


def append(
    bb: relax.BlockBuilder,
    parts: Sequence[relax.Expr],
    made: relax.TensorType,
    axis: int,
    written: Sequence[relax.Expr] = (),
) -> relax.Expr:
    """Return a cache that continues another one, as one kernel.

    Parameters
    ----------
    bb : relax.BlockBuilder
        Inside a dataflow block.
    parts : sequence of relax.Expr
        The cache before, and what follows it along an axis, if anything.
    made : relax.TensorType
        Type of the result.
    axis : int
        The axis.
    written : sequence of relax.Expr
        Indices and rows of a ScatterND into the `parts`, or nothing. Negative indices count from
        the end; all are inside.

    Returns
    -------
    relax.Var
        The cache after.
    """
    args = [*parts, *written]
    kinds = [*(arg.ty for arg in args), made]
    sizes = [size for kind in kinds for size in kind.shape.values]
    bound = {str(size) for size in sizes if isinstance(size, tirx.Var)}
    free = [size for size in symbols_of(sizes) if str(size) not in bound]
    kernel = _kernel(kinds, len(parts), axis, [size.name for size in free])
    called = bb.add_func(kernel, _APPEND)
    return bb.emit(relax.call_tir(called, relax.Tuple([*args, *free]), out_ty=made))


def may_have_strides(expr: relax.Expr, bb: relax.BlockBuilder) -> bool:
    """Return whether a variable may be a cache, of which views as one piece are refused."""
    made = bb.lookup_binding(expr) if isinstance(expr, relax.Var) else None
    if not isinstance(made, relax.Call):
        return made is None  # an input
    return any(str(getattr(arg, "name_hint", "")).startswith(_APPEND) for arg in made.args)


def _kernel(kinds: list[Any], parts: int, axis: int, free: list[str]) -> tirx.PrimFunc:
    """Return a function with a nest of loops for each part, and one for written rows."""
    sizes = [size for kind in kinds for size in kind.shape.values]
    named = {size.name: tirx.Var(size.name, "int64") for size in symbols_of(sizes)}
    shapes = [[renamed(size, named) for size in kind.shape.values] for kind in kinds]
    names = [*("past", "new")[:parts], *("at", "rows")[: len(kinds) - 1 - parts]]
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_attr({"op_pattern": OPAQUE, "tirx.is_scheduled": True, _APPENDS: True})
            given = [
                T.arg(name, T.buffer(shape, str(kind.dtype)))
                for name, shape, kind in zip(names, shapes, kinds, strict=False)
            ]
            for name in free:
                T.arg(name, named[name])
            present = T.arg("present", T.buffer(shapes[-1], str(kinds[-1].dtype)))
            with T.sblock(_APPEND):
                wholes = [tuple(slice(0, size) for size in shape) for shape in shapes]
                T.reads(*(buffer[at] for buffer, at in zip(given, wholes, strict=False)))
                T.writes(present[wholes[-1]])
                first: Any = 0
                for source, shape in zip(given[:parts], shapes, strict=False):
                    with _nest(shape) as loops:
                        to = [k + first * (n == axis) for n, k in enumerate(loops)]
                        T.buffer_store(present, source[tuple(loops)], to)
                    first = first + shape[axis]
                if given[parts:]:
                    at, rows = given[parts:]
                    _write_rows(present, at, rows, shapes[parts], shapes[-1])
        return builder.get()


@contextmanager
def _nest(shape: list[Any]) -> Iterator[list[Any]]:
    """Open one loop for each axis."""
    with T.grid(*shape) if shape else nullcontext([]) as loops:
        yield [loops] if isinstance(loops, tirx.Var) else list(loops)


def _write_rows(present: Any, at: Any, rows: Any, places: list[Any], shape: list[Any]) -> None:
    """Write ``present[at[i]] = rows[i]``, as ScatterND does, for `at` of the shape `places`."""
    width = int(places[-1])
    with _nest([*places[:-1], *shape[width:]]) as loops:
        row, inside = loops[: len(places) - 1], loops[len(places) - 1 :]
        found = [at[tuple([*row, k])] for k in range(width)]
        to = [tirx.Select(k < 0, k + size, k) for k, size in zip(found, shape, strict=False)]
        T.buffer_store(present, rows[tuple(loops)], [*to, *inside])


def check(module: tvm.IRModule) -> None:
    """Refuse a network whose caches cannot be in place.

    Parameters
    ----------
    module : tvm.IRModule
        As for `with_in_place`, in which TVM would not report the error as it is.

    Raises
    ------
    UsageError
        If it reads a cache as one piece of memory, or returns a tensor that it does not compute.
    """
    if not any(var.name_hint == INTO for var in module.get_global_vars()):
        raise UsageError("--in-place: the network does not compute each of its outputs once")
    for op, at in _readers(module).items():
        kernel = module[op] if isinstance(op, tvm.ir.GlobalVar) else None
        if not isinstance(kernel, tirx.PrimFunc) or not _by_index(kernel, at):
            name = getattr(op, "name_hint", getattr(op, "name", "a view"))
            raise UsageError(
                f"--in-place: `{name}` reads a cache as one piece of memory",
                hint="compile without it, or read caches by MatMul in the shape that they have",
            )


def _pairs(module: tvm.IRModule) -> list[int]:
    """Return what `PAIRS` says; [] for a network without it."""
    attrs = module["main"].attrs or {}
    return [int(k) for k in attrs[PAIRS]] if PAIRS in attrs else []


def with_in_place(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Add `IN_PLACE` to a network with the attribute `PAIRS`, and strides to its kernels.

    Parameters
    ----------
    module : tvm.IRModule
        From `outputs.with_outputs`.
    """
    if not _pairs(module):
        return module
    strided = {var: _with_strides(module[var], at) for var, at in _readers(module).items()}
    bb = relax.BlockBuilder(tvm.IRModule({**dict(module.functions_items()), **strided}))
    last = (tirx.SeqStmt, _behind_first)
    new_only = {}
    for var, func in strided.items():
        if _APPENDS in (func.attrs or {}):
            twin = func.with_body(tvm_ffi.structural_map(func.body, last))
            new_only[var] = bb.add_func(twin, f"{var.name_hint}_new")
    module = bb.get().with_attrs(module.attrs) if module.attrs else bb.get()

    def swapped(value: Any) -> Any:
        ours = isinstance(value, relax.Call) and value.op in new_only
        return relax.Call(new_only[value.op], value.args) if ours else value

    into = module[INTO]
    blocks = [
        relax.BindingBlock([relax.VarBinding(b.var, swapped(b.value)) for b in block.bindings])
        for block in into.body.blocks
    ]
    body = relax.SeqExpr(blocks, into.body.body)
    made = relax.Function(into.params, body, into.ret_ty, into.is_pure, into.attrs)
    module[IN_PLACE] = relax.utils.copy_with_new_vars(made.with_attr("global_symbol", IN_PLACE))
    return module


def _behind_first(nests: tirx.SeqStmt) -> tirx.Stmt:
    """Return nests of loops without the first, which copies the cache."""
    rest = list(nests.seq[1:])
    return tirx.SeqStmt(rest) if rest[1:] else rest[0]


def _readers(module: tvm.IRModule) -> dict[Any, set[int]]:
    """Return what reads or writes caches, each with the positions of these among its arguments."""
    main, pairs = module["main"], _pairs(module)
    bound = values(main)
    result = origin(main.body.body, bound)
    fields = result.fields if isinstance(result, relax.Tuple) else [result]
    caches = {main.params[k] for k in pairs[::2]}
    caches |= {origin(fields[k], bound) for k in pairs[1::2]}
    found: dict[Any, set[int]] = {}
    for value in bound.values():
        args = value.args if isinstance(value, relax.Call) else ()
        if at := {k for k, arg in enumerate(args) if origin(arg, bound) in caches}:
            found.setdefault(value.op, set()).update(at)
    return found


def _by_index(func: tirx.PrimFunc, at: set[int]) -> bool:
    """Whether a kernel reads and writes some tensors only by elements, not by their address."""
    given = {func.params[k] for k in at}
    found: list[Any] = []
    passed = (tvm.ir.Call, lambda call: found.extend(call.args))
    loaded = (
        s_tir.SBlock,
        lambda block: found.extend(m.source.source for m in block.match_buffers),
    )
    tvm_ffi.structural_walk(func.body, [passed, loaded])
    return not any(arg in given for arg in found if isinstance(arg, tvm.ir.Var))


def _with_strides(func: tirx.PrimFunc, at: set[int]) -> tirx.PrimFunc:
    """Let some tensors of a kernel have strides; rows are contiguous."""
    params, others = list(func.params), {}
    for k in at:
        kind, name = params[k].ty, params[k].name
        strides = [tirx.Var(f"{name}_stride{n}", "int64") for n in range(len(kind.shape) - 1)]
        one = tirx.IntImm("int64", 1)
        buffer = tirx.decl_buffer(
            kind.shape, kind.dtype, name, strides=[*strides, one], layout=None
        )
        others[params[k]] = params[k] = buffer
    body = tvm_ffi.structural_map(func.body, (tirx.Var, lambda var: others.get(var, var)))
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs)
