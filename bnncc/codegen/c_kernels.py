"""Kernels as portable C99, for any compiler and processor.

A scheduled kernel is lowered by TVM's passes, without vectors and without TVM's runtime, and
printed as C. The code has no implicit conversions, and the caller provides scratch memory. Words
that are accessed in parts have types that may alias.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx import transform as tir

from bnncc.codegen import bare, nesting
from bnncc.codegen.c_expressions import (
    HALVES,
    NARROW,
    OWN,
    Expr,
    Expressions,
    dtype_of,
    is_constant,
    own_function,
    zero,
)
from bnncc.codegen.c_helpers import HELPERS
from bnncc.codegen.c_text import C_ALIGNMENT, C_TYPES, Kernels, itemsize
from bnncc.errors import TargetError

STACK_BYTES = 1024
"""Tensors of more bytes are in scratch memory, not on the stack."""


def build(functions: Mapping[str, tirx.PrimFunc], target: tvm.target.Target) -> Kernels:
    """Generate C for kernels.

    Parameters
    ----------
    functions : mapping of str to PrimFunc
        Scheduled by `bnncc.schedules.portable`, with static shapes, by symbol name.
    target : tvm.target.Target
        From `pipeline.tvm_target`.

    Returns
    -------
    Kernels
        C text that must be preceded by `c_helpers.PRELUDE`.

    Raises
    ------
    TargetError
        If a kernel needs TVM's runtime.
    """
    lowered = bare.lowered_by(_passes(), functions, target)
    made = [_Function(name, lowered[name]) for name in functions]
    used = set[str]().union(*(one.helpers for one in made))
    if used & {"float16_value", "float16_of", "bfloat16_value", "bfloat16_of"}:
        used |= {"bits_of", "float_of"}
    helpers = [text for name, text in HELPERS.items() if name in used]
    helpers += [own_function(name) for name in OWN if name in used]
    text = "\n".join([*helpers, *(one.code for one in made)])
    return Kernels(
        text.encode(),
        {one.name: one.scratch for one in made},
        {one.name: one.parameters for one in made},
        {},
        {},
    )


def _passes() -> list[tvm.transform.Pass]:
    """Return TVM's lowering for CPUs as far as C needs it, without vectors."""
    return [
        *bare.without_blocks(),
        s_tir.transform.LowerOpaqueBlock(),
        tir.FlattenBuffer(),
        tir.BF16ComputeLegalize(),
        tir.NarrowDataType(32),
        tir.VectorizeLoop(False),
        s_tir.transform.HoistIfThenElse(),
        tir.UnrollLoop(),
        tir.StmtSimplify(),
        tvm.transform.module_pass(_without_unread, opt_level=0),
        tir.RemoveNoOp(),
        tvm.transform.module_pass(_with_functions, opt_level=0),
        tir.LowerIntrin(),
    ]


def _with_functions(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Keep functions which TVM would write by ``1 / (1 + exp(-x))``: inaccurate below 0."""

    def kept(call: Any) -> Any:
        name = str(getattr(call.op, "name", "")).removeprefix("tirx.")
        if name not in ("sigmoid", "swish") or dtype_of(call) != "float32":
            return call
        return tirx.call_pure_extern("float32", f"{name}f", call.args[0])

    for var, func in module.functions_items():
        module[var] = func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, kept)))
    return module


def _without_unread(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Remove tensors that are never read, because compilers warn about them."""

    def kept(func: tirx.PrimFunc) -> tirx.PrimFunc:
        views, (written, read) = _views(func), _accessed(func)
        left = read | set(func.params)

        def without(stmt: Any) -> Any:
            needed = views.get(stmt.buffer, stmt.buffer) in left
            return stmt if needed else tirx.Evaluate(tirx.const(0, "int32"))

        stores = ((tirx.BufferStore, tirx.AllocBuffer), without)
        made = func.with_body(tvm_ffi.structural_map(func.body, [stores]))
        return made if written <= left else kept(made)  # what those stores read, too

    return tvm.IRModule({var: kept(func) for var, func in module.functions_items()})


class _Function(Expressions):
    """Prints one kernel."""

    def __init__(self, name: str, func: tirx.PrimFunc) -> None:
        super().__init__(name)
        self.scratch = self._offset = 0
        self._lines: list[str] = []
        written, read = _accessed(func)
        self.views, self.written = _views(func), written
        self._unused = _unused(func.body)
        self.parameters: list[str] = []
        for param in func.params:
            own, dtype = self.named(param, param.name), str(param.dtype)
            self.types[own] = dtype
            const = "" if param in written else "const "
            self.parameters.append(f"{const}{C_TYPES[dtype]} *restrict {own}")
        self._statement(func.body, 1)
        unused = [self.names[p] for p in func.params if p not in written | read]
        unused += [] if self.scratch else ["scratch"]
        head = [f"  (void){name};" for name in unused]
        opening = f"int32_t {name}({', '.join(self.parameters)}, void *scratch) {{"
        self.code = "\n".join([opening, *head, *self._lines, "  return 0;", "}", ""])

    def _add(self, depth: int, text: str) -> None:
        self._lines.append("  " * depth + text)

    def _compute_first(self, depth: int, *exprs: Expr) -> None:
        """Define variables for parts of expressions that are nested too deeply."""
        for part, when in (found for expr in exprs for found in nesting.parts(expr)):
            dtype = dtype_of(part)
            text = self.operand(part)
            if when is not None:
                text = f"{self.operand(when)} ? {text} : {zero(dtype)}"
            cast = dtype == "bool" or (when is not None and dtype in NARROW)
            text = f"({C_TYPES[dtype]})({text})" if cast else text
            self._add(depth, f"const {C_TYPES[dtype]} {self.named(part, 'part')} = {text};")

    # Statements

    def _statement(self, stmt: Any, depth: int) -> None:
        kind = type(stmt).__name__
        write = getattr(self, f"_of_{kind.lower()}", None)
        if write is None:
            raise TargetError(f"kernel `{self.name}`: no C for {kind}")
        write(stmt, depth)

    def _of_seqstmt(self, stmt: Any, depth: int) -> None:
        offset = self._offset
        for one in stmt.seq:
            self._statement(one, depth)
        self._offset = offset

    def _of_declbuffer(self, stmt: Any, depth: int) -> None:
        pass  # handled by `_views`

    def _of_allocbuffer(self, stmt: Any, depth: int) -> None:
        buffer = stmt.buffer
        dtype, size = str(buffer.dtype), math.prod(int(d) for d in buffer.shape)
        own, ctype = self.named(buffer, buffer.name), C_TYPES[dtype]
        self.types[own] = dtype
        nbytes = size * itemsize(dtype)
        if size == 1 and buffer not in self.views.values():
            self.scalars.add(own)
            # Compilers warn where a loop's first turn initializes it, as for sums of whole tensors.
            self._add(depth, f"{ctype} {own} = {zero(dtype)};")
            return
        if nbytes <= STACK_BYTES:
            self._add(depth, f"{ctype} {own}[{size}];")
            return
        start = self._offset
        self._offset += -(-nbytes // C_ALIGNMENT) * C_ALIGNMENT
        self.scratch = max(self.scratch, self._offset)
        self._add(
            depth, f"{ctype} *{own} = ({ctype} *)(void *)((unsigned char *)scratch + {start});"
        )

    def _of_for(self, stmt: Any, depth: int) -> None:
        name = next(n for n in (*_LOOPS, "turn") if n not in self.taken or n == "turn")
        var = self.named(stmt.loop_var, name)
        kind = C_TYPES[str(stmt.loop_var.ty.dtype)]
        first, extent = stmt.min, stmt.extent
        self._compute_first(depth, first, extent)
        end = self.text(extent) if is_constant(first, 0) else self.text(first + extent)
        self._add(depth, f"for ({kind} {var} = {self.text(first)}; {var} < {end}; ++{var}) {{")
        self._statement(stmt.body, depth + 1)
        self._add(depth, "}")
        self.taken.discard(self.names.pop(stmt.loop_var))

    def _of_while(self, stmt: Any, depth: int) -> None:
        self._add(depth, f"while ({self.text(stmt.condition)}) {{")
        self._statement(stmt.body, depth + 1)
        self._add(depth, "}")

    def _of_ifthenelse(self, stmt: Any, depth: int) -> None:
        test = stmt.condition
        while stmt.else_case is None and _plain_if(stmt.then_case):
            stmt = stmt.then_case
            test = tirx.And(test, stmt.condition)
        self._compute_first(depth, test)
        self._add(depth, f"if ({self.text(test)}) {{")
        self._statement(stmt.then_case, depth + 1)
        if stmt.else_case is not None:
            self._add(depth, "} else {")
            self._statement(stmt.else_case, depth + 1)
        self._add(depth, "}")

    def _of_bufferstore(self, stmt: Any, depth: int) -> None:
        self._compute_first(depth, *stmt.indices, stmt.value)
        target = self.element(stmt.buffer, stmt.indices)
        dtype, value = str(stmt.buffer.dtype), stmt.value
        whole = dtype not in (*NARROW, *HALVES)
        for one, symbol in ((tirx.Add, "+="), (tirx.BitwiseOr, "|=")):
            if whole and type(value) is one and isinstance(value.a, tvm.ir.TensorLoad):
                same = self.element(value.a.source, value.a.indices)
                if same == target:
                    self._add(depth, f"{target} {symbol} {self.text(value.b)};")
                    return
        cast = "(uint8_t)" if dtype == "bool" else ""
        text = self.operand(value) if cast else self.text(value)
        self._add(depth, f"{target} = {cast}{text};")

    def _of_bind(self, stmt: Any, depth: int) -> None:
        if stmt.var in self._unused:
            return
        self._compute_first(depth, stmt.value)
        name = self.named(stmt.var, stmt.var.name)
        kind = C_TYPES[dtype_of(stmt.value)]
        cast = "(uint8_t)" if dtype_of(stmt.value) == "bool" else ""
        text = self.operand(stmt.value) if cast else self.text(stmt.value)
        self._add(depth, f"const {kind} {name} = {cast}{text};")

    def _of_evaluate(self, stmt: Any, depth: int) -> None:
        value = stmt.value
        if isinstance(value, tvm.ir.Call):
            self._compute_first(depth, value)
            self._add(depth, f"{self.text(value)};")

    def _of_assertstmt(self, stmt: Any, depth: int) -> None:
        self._compute_first(depth, stmt.condition)
        self._add(depth, f"if (!({self.text(stmt.condition)})) return -1;")

    def _of_attrstmt(self, stmt: Any, depth: int) -> None:
        self._statement(stmt.body, depth)


_LOOPS = "ijkmnpqrstuvw"
"""Names of loop variables, from the outside in."""


def _plain_if(stmt: Any) -> bool:
    return isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None


def _views(func: tirx.PrimFunc) -> dict[Any, Any]:
    """Return, for each declared view, the tensor that it aliases."""
    found: dict[Any, Any] = {}

    def declared(stmt: Any) -> None:
        data = stmt.data
        if isinstance(data, tvm.ir.Call) and str(data.op.name).endswith("buffer_data"):
            base = data.args[0]
            found[stmt.buffer] = found.get(base, base)

    tvm_ffi.structural_walk(func.body, (tirx.DeclBuffer, declared), order="pre")
    return found


def _unused(body: Any) -> set[Any]:
    """Return the variables that are never read, except by other such variables."""
    binds: list[Any] = []
    tvm_ffi.structural_walk(body, (tirx.Bind, binds.append), order="pre")
    count = Counter[Any]()
    tvm_ffi.structural_walk(body, (tirx.Var, lambda var: count.update([var])))
    unused = set[Any]()
    for bind in reversed(binds):
        if count[bind.var] == 1:  # only its definition
            unused.add(bind.var)
            tvm_ffi.structural_walk(bind.value, (tirx.Var, lambda var: count.subtract([var])))
    return unused


def _accessed(func: tirx.PrimFunc) -> tuple[set[Any], set[Any]]:
    """Return the tensors that are written, and those that are read; a view is its tensor."""
    views, written, read = _views(func), set[Any](), set[Any]()

    def stored(stmt: Any) -> None:
        written.add(views.get(stmt.buffer, stmt.buffer))

    def loaded(expr: Any) -> None:
        read.add(views.get(expr.source, expr.source))

    pairs: list[tuple[Any, Callable[[Any], None]]]
    pairs = [(tirx.BufferStore, stored), (tvm.ir.TensorLoad, loaded)]
    tvm_ffi.structural_walk(func.body, pairs, order="pre")
    return written, read
