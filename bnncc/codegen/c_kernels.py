"""Kernels as portable C99: loops over words, for any compiler and processor.

A scheduled kernel is lowered by TVM's passes, without vectors and without TVM's runtime, and
printed as C. The code has no implicit conversions, and the caller provides scratch memory. Words
that are accessed in parts have types that may alias.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx import transform as tir

from bnncc.codegen import bare, nesting
from bnncc.codegen.c_helpers import CHOICES, HELPERS
from bnncc.codegen.c_text import C_ALIGNMENT, C_TYPES, Kernels, identifier, is_reserved
from bnncc.errors import TargetError
from bnncc.schedules import float_functions

STACK_BYTES = 1024
"""Tensors of more bytes are in scratch memory, not on the stack."""

Expr = Any


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
    helpers += [_own(name) for name in _OWN if name in used]
    text = "\n".join([*helpers, *(one.text for one in made)])
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
        tvm.transform.module_pass(_with_sigmoids, opt_level=0),
        tir.LowerIntrin(),
    ]


def _with_sigmoids(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Keep sigmoids, which TVM would write as ``1 / (1 + exp(-x))``: inaccurate below 0."""

    def kept(call: Any) -> Any:
        if str(getattr(call.op, "name", "")) != "tirx.sigmoid" or _dtype(call) != "float32":
            return call
        return tirx.call_pure_extern("float32", "sigmoidf", call.args[0])

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


MAX_NAME = 40
"""Characters of a variable's name. A C compiler need not tell names apart that differ later than in
the 63rd character; TVM's grow with each operator of a chain."""

MAX_REPEATED = 60
"""Characters of operands up to which a minimum or maximum repeats them. Nested ones would otherwise
double in length each time."""

_HALVES = ("float16", "bfloat16")

_NARROW = ("int8", "uint8", "int16", "uint16")
"""Types that C promotes to int."""

_BINARY = {
    tirx.Add: "+", tirx.Sub: "-", tirx.Mul: "*", tirx.Div: "/", tirx.Mod: "%", tirx.LT: "<",
    tirx.LE: "<=", tirx.GT: ">", tirx.GE: ">=", tirx.EQ: "==", tirx.NE: "!=", tirx.And: "&&",
    tirx.Or: "||", tirx.BitwiseAnd: "&", tirx.BitwiseOr: "|", tirx.BitwiseXor: "^",
    tirx.LShift: "<<", tirx.RShift: ">>",
}  # fmt: skip
_COMPARED = ("<", "<=", ">", ">=", "==", "!=")
_INSIDE = {
    "+": ("+", "-", "*"), "-": ("+", "-", "*"), "*": ("*",), "/": ("*",),
    **dict.fromkeys(_COMPARED, ("+", "-", "*")), **dict.fromkeys(("&&", "||"), _COMPARED),
    "&": ("&",), "|": ("|",), "^": ("^",),
}  # fmt: skip
"""By operator: operators that need no parentheses as its left operand."""
_RIGHT = {"+": ("*",), "-": ("*",), **{k: _INSIDE[k] for k in (*_COMPARED, "&&", "||")}}
"""The same for the right operand."""

_FUNCTIONS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign", "cos", "cosh",
    "erf", "exp", "exp2", "fabs", "floor", "fmod", "hypot", "log", "log10", "log1p", "log2",
    "nearbyint", "nextafter", "pow", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Calls that map to a C library function of the same name."""

_RENAMED = {"round": "nearbyint"}

_OWN = {f"float_{name}": name for name in float_functions.FUNCTIONS}
"""Float32 functions that a C compiler can vectorize, by their names in C."""


class _Expressions:
    """Prints expressions of one function."""

    def __init__(self, name: str) -> None:
        self.name, self.helpers = name, set[str]()
        self._names: dict[Any, str] = {}
        functions = *_FUNCTIONS, *(f"{name}f" for name in _FUNCTIONS)
        parts = (f"part_{kind}" for kind in C_TYPES.values())
        self._taken = {"scratch", *functions, *HELPERS, *_OWN, *parts}
        self._kinds: dict[str, str] = {}  # types of pointers and arrays, by name
        self._scalars: set[str] = set()
        self._views: Mapping[Any, Any] = {}
        self._written: Collection[Any] = ()

    def name_of(self, var: Any) -> str:
        """Return the name of a variable, assigning one if necessary."""
        return self._named(var, var.name)

    def printed(self, expr: Expr) -> str:
        """Return an expression as C."""
        return self._top(expr)

    def _named(self, var: Any, wanted: str) -> str:
        if var not in self._names:
            base = identifier(wanted)[:MAX_NAME]
            base = f"{base.lower()}_1" if is_reserved(base) else base
            name, number = base, 1
            while name in self._taken:
                number, name = number + 1, f"{base}_{number + 1}"
            self._taken.add(name)
            self._names[var] = name
        return self._names[var]

    def _top(self, expr: Expr) -> str:
        return self._text(expr, 0)

    def _text(self, expr: Expr, bound: int) -> str:
        """Return an expression as C, in parentheses if it is an operation and `bound` is not 0."""
        if expr in self._names:
            return self._names[expr]
        kind = type(expr)
        if kind in (*_BINARY, tirx.Min, tirx.Max) and _dtype(expr.a) in _HALVES:
            wide = kind(expr.a.astype("float32"), expr.b.astype("float32"))
            return self._text(wide if _dtype(expr) == "bool" else wide.astype(_dtype(expr)), bound)
        if kind in _BINARY:
            text = self._binary(expr, _BINARY[kind])
        elif kind in (tirx.Min, tirx.Max):
            text = self._chosen("<" if kind is tirx.Min else ">", expr)
        elif kind is tirx.Select:
            text = self._select(expr.condition, expr.true_value, expr.false_value, _dtype(expr))
        elif isinstance(expr, tvm.ir.Call) and expr.op.name == "prim.if_then_else":
            text = self._select(expr.args[0], expr.args[1], expr.args[2], _dtype(expr))
        else:
            return self._atom(expr)
        return f"({text})" if bound else text

    def _atom(self, expr: Expr) -> str:
        if isinstance(expr, tirx.IntImm):
            return _integer(int(expr.value), _dtype(expr))
        if isinstance(expr, tirx.FloatImm) and _dtype(expr) in _HALVES:
            return self._cast(expr.astype("float32"), _dtype(expr))
        if isinstance(expr, tirx.FloatImm):
            return _float(float(expr.value), _dtype(expr))
        if isinstance(expr, tvm.ir.TensorLoad):
            return self._element(expr.source, expr.indices)
        if isinstance(expr, tirx.Cast):
            return self._cast(expr.value, _dtype(expr))
        if isinstance(expr, tirx.Not):
            return f"!{self._text(expr.a, 1)}"
        if isinstance(expr, tirx.BitwiseNot):
            text, dtype = self._text(expr.a, 1), _dtype(expr)
            if dtype == "uint32":  # compilers warn about `~` of a comparison
                return f"({text} ^ 0xffffffffu)"
            return f"({C_TYPES[dtype]})(~{text})" if dtype in _NARROW else f"~{text}"
        if isinstance(expr, tvm.ir.Call):
            return self._call(expr)
        if isinstance(expr, tirx.Let):
            raise TargetError(f"kernel `{self.name}`: no C for Let")
        if isinstance(expr, tirx.Var) and expr.name.endswith("elem_offset"):
            return "0"  # start of a parameter
        raise TargetError(f"kernel `{self.name}`: no C for {type(expr).__name__}")

    def _binary(self, expr: Expr, symbol: str) -> str:
        dtype = _dtype(expr.a)
        if symbol == "%" and "float" in dtype:
            return f"{_function('fmod', dtype)}({self._top(expr.a)}, {self._top(expr.b)})"
        left, right = self._operand(expr.a, symbol, True), self._operand(expr.b, symbol, False)
        if dtype.startswith("u") and (known := _known(symbol, expr)):
            return known
        if symbol == "<<" and dtype.startswith("int"):  # undefined for negative numbers
            left = f"(u{C_TYPES[dtype]}){self._text(expr.a, 1)}"
            return f"({C_TYPES[dtype]})({left} << {right})"
        text = f"{left} {symbol} {right}"
        if dtype in _NARROW and symbol not in (*_COMPARED, "&&", "||"):
            return f"({C_TYPES[dtype]})({text})"
        return text

    def _operand(self, expr: Expr, symbol: str, left: bool) -> str:
        inner = _BINARY.get(type(expr), "")
        narrow = _dtype(expr) in _NARROW and inner not in _COMPARED
        if narrow and inner:
            return self._top(expr)  # the operand is a cast
        fits = inner in (_INSIDE if left else _RIGHT).get(symbol, ())
        fits |= left and inner == symbol and symbol in ("&&", "||")
        return self._text(expr, 0 if fits else 1)

    def _chosen(self, symbol: str, expr: Expr) -> str:
        a, b, dtype = self._text(expr.a, 1), self._text(expr.b, 1), _dtype(expr)
        if len(a) + len(b) > MAX_REPEATED:
            name = f"{CHOICES[symbol]}_{dtype}"
            self.helpers.add(name)
            return f"{name}({self._top(expr.a)}, {self._top(expr.b)})"
        return self._narrowed(f"{a} {symbol} {b} ? {a} : {b}", dtype)

    def _select(self, condition: Expr, yes: Expr, no: Expr, dtype: str) -> str:
        text = f"{self._text(condition, 1)} ? {self._text(yes, 1)} : {self._text(no, 1)}"
        return self._narrowed(text, dtype)

    def _narrowed(self, text: str, dtype: str) -> str:
        return f"({C_TYPES[dtype]})({text})" if dtype in _NARROW else text

    def _cast(self, value: Expr, dtype: str) -> str:
        have = _dtype(value)
        if dtype == "bool":
            return f"({self._text(value, 1)} != 0)"
        if have == dtype:
            return self._text(value, 1)
        if have in _HALVES:
            self.helpers.add(f"{have}_value")
            text = f"{have}_value({self._top(value)})"
            return text if dtype == "float32" else f"({C_TYPES[dtype]}){text}"
        if dtype in _HALVES:
            self.helpers.add(f"{dtype}_of")
            return f"{dtype}_of({self._as('float32', value)})"
        return f"({C_TYPES[dtype]}){self._text(value, 1)}"

    def _element(self, buffer: Any, indices: Sequence[Expr]) -> str:
        base, dtype = self._views.get(buffer, buffer), str(buffer.dtype)
        name = self._names[base]
        if name in self._scalars:
            return name
        index = self._top(indices[0]) if len(indices) else "0"
        if self._kinds[name] == dtype:
            return f"{name}[{index}]"
        const = "" if base in self._written else "const "
        return f"(({const}part_{C_TYPES[dtype]} *){name})[{index}]"

    def _call(self, call: Any) -> str:
        op, args, dtype = str(call.op.name).rpartition(".")[2], list(call.args), _dtype(call)
        if op == "call_pure_extern":
            op = str(args.pop(0).value).removesuffix("f" if dtype == "float32" else "")
        if op in _RENAMED:
            op = _RENAMED[op]
        if f"float_{op}" in _OWN and dtype == "float32":
            self.helpers |= {f"float_{op}", "bits_of", "float_of"}
            return f"float_{op}({self._top(args[0])})"
        if op in _FUNCTIONS:
            return f"{_function(op, dtype)}({', '.join(map(self._top, args))})"
        write = getattr(self, f"_call_{op}", None)
        if op.endswith("packed"):
            raise TargetError(bare.NEEDS_RUNTIME.format(self.name))
        if write is None:
            raise TargetError(
                f"kernel `{self.name}` calls `{call.op.name}`, for which there is no portable C"
            )
        return str(write(args, dtype))

    def _call_fma(self, args: list[Expr], dtype: str) -> str:
        a, b, c = (self._text(arg, 1) for arg in args)
        return f"({a} * {b} + {c})"

    def _call_popcount(self, args: list[Expr], dtype: str) -> str:
        self.helpers.add("popcount32")
        text = f"popcount32({self._as('uint32', args[0])})"
        return text if dtype == "uint32" else f"({C_TYPES[dtype]}){text}"

    def _as(self, dtype: str, value: Expr) -> str:
        return self._top(value) if _dtype(value) == dtype else self._cast(value, dtype)

    def _call_reinterpret(self, args: list[Expr], dtype: str) -> str:
        have = _dtype(args[0])
        if {have, dtype} <= {"int32", "uint32"}:
            return self._cast(args[0], dtype)
        if {have, dtype} <= {"int16", "uint16", *_HALVES}:
            return f"({C_TYPES[dtype]}){self._text(args[0], 1)}"
        if not {have, dtype} <= {"int32", "uint32", "float32"}:
            raise TargetError(f"kernel `{self.name}`: no C for bits of {have} as {dtype}")
        if dtype == "float32":
            self.helpers.add("float_of")
            return f"float_of({self._as('uint32', args[0])})"
        self.helpers.add("bits_of")
        text = f"bits_of({self._top(args[0])})"
        return text if dtype == "uint32" else f"({C_TYPES[dtype]}){text}"

    def _call_isnan(self, args: list[Expr], dtype: str) -> str:
        return f"isnan({self._top(args[0])})"

    def _call_isfinite(self, args: list[Expr], dtype: str) -> str:
        return f"isfinite({self._top(args[0])})"

    def _call_isinf(self, args: list[Expr], dtype: str) -> str:
        return f"isinf({self._top(args[0])})"

    def _call_likely(self, args: list[Expr], dtype: str) -> str:
        return self._text(args[0], 1)

    def _call_ret(self, args: list[Expr], dtype: str) -> str:
        return f"return {self._top(args[0])}"


class _Function(_Expressions):
    """Prints one kernel."""

    def __init__(self, name: str, func: tirx.PrimFunc) -> None:
        super().__init__(name)
        self.scratch = self._offset = 0
        self._lines: list[str] = []
        self._written, read = written, read = _accessed(func)
        self.parameters: list[str] = []
        for param in func.params:
            own = self._named(param, param.name)
            self._kinds[own] = str(param.dtype)
            const = "" if param in written else "const "
            self.parameters.append(f"{const}{C_TYPES[str(param.dtype)]} *restrict {own}")
        self._views, self._unused = _views(func), _unused(func.body)
        self._statement(func.body, 1)
        unused = [self._names[p] for p in func.params if p not in written | read]
        unused += [] if self.scratch else ["scratch"]
        head = [f"  (void){name};" for name in unused]
        own = f"int32_t {name}({', '.join(self.parameters)}, void *scratch) {{"
        self.text = "\n".join([own, *head, *self._lines, "  return 0;", "}", ""])

    def _add(self, depth: int, text: str) -> None:
        self._lines.append("  " * depth + text)

    def _compute_first(self, depth: int, *exprs: Expr) -> None:
        """Define variables for parts of expressions that are nested too deeply."""
        for part, when in (found for expr in exprs for found in nesting.parts(expr)):
            dtype = _dtype(part)
            text = self._text(part, 1)
            if when is not None:
                zero = literal(0, _STORED.get(dtype, dtype))
                text = f"{self._text(when, 1)} ? {text} : {zero}"
            cast = dtype == "bool" or (when is not None and dtype in _NARROW)
            text = f"({C_TYPES[dtype]})({text})" if cast else text
            self._add(depth, f"const {C_TYPES[dtype]} {self._named(part, 'part')} = {text};")

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
        own, ctype = self._named(buffer, buffer.name), C_TYPES[dtype]
        self._kinds[own] = dtype
        nbytes = size * np.dtype("bool" if dtype == "bool" else _STORED.get(dtype, dtype)).itemsize
        if size == 1 and buffer not in self._views.values():
            self._scalars.add(own)
            # Compilers warn where a loop's first turn initializes it, as for sums of whole tensors.
            self._add(depth, f"{ctype} {own} = {literal(0, _STORED.get(dtype, dtype))};")
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
        name = next(n for n in (*_LOOPS, "turn") if n not in self._taken or n == "turn")
        var = self._named(stmt.loop_var, name)
        kind = C_TYPES[str(stmt.loop_var.ty.dtype)]
        first, extent = stmt.min, stmt.extent
        self._compute_first(depth, first, extent)
        end = self._top(extent) if _is(first, 0) else self._top(first + extent)
        self._add(depth, f"for ({kind} {var} = {self._top(first)}; {var} < {end}; ++{var}) {{")
        self._statement(stmt.body, depth + 1)
        self._add(depth, "}")
        self._taken.discard(self._names.pop(stmt.loop_var))

    def _of_while(self, stmt: Any, depth: int) -> None:
        self._add(depth, f"while ({self._top(stmt.condition)}) {{")
        self._statement(stmt.body, depth + 1)
        self._add(depth, "}")

    def _of_ifthenelse(self, stmt: Any, depth: int) -> None:
        test = stmt.condition
        while stmt.else_case is None and _plain_if(stmt.then_case):
            stmt = stmt.then_case
            test = tirx.And(test, stmt.condition)
        self._compute_first(depth, test)
        self._add(depth, f"if ({self._top(test)}) {{")
        self._statement(stmt.then_case, depth + 1)
        if stmt.else_case is not None:
            self._add(depth, "} else {")
            self._statement(stmt.else_case, depth + 1)
        self._add(depth, "}")

    def _of_bufferstore(self, stmt: Any, depth: int) -> None:
        self._compute_first(depth, *stmt.indices, stmt.value)
        target = self._element(stmt.buffer, stmt.indices)
        dtype, value = str(stmt.buffer.dtype), stmt.value
        whole = dtype not in (*_NARROW, *_HALVES)
        for one, symbol in ((tirx.Add, "+="), (tirx.BitwiseOr, "|=")):
            if whole and type(value) is one and isinstance(value.a, tvm.ir.TensorLoad):
                same = self._element(value.a.source, value.a.indices)
                if same == target:
                    self._add(depth, f"{target} {symbol} {self._top(value.b)};")
                    return
        cast = "(uint8_t)" if dtype == "bool" else ""
        text = self._text(value, 99) if cast else self._top(value)
        self._add(depth, f"{target} = {cast}{text};")

    def _of_bind(self, stmt: Any, depth: int) -> None:
        if stmt.var in self._unused:
            return
        self._compute_first(depth, stmt.value)
        name = self._named(stmt.var, stmt.var.name)
        kind = C_TYPES[_dtype(stmt.value)]
        cast = "(uint8_t)" if _dtype(stmt.value) == "bool" else ""
        text = self._text(stmt.value, 99) if cast else self._top(stmt.value)
        self._add(depth, f"const {kind} {name} = {cast}{text};")

    def _of_evaluate(self, stmt: Any, depth: int) -> None:
        value = stmt.value
        if isinstance(value, tvm.ir.Call):
            self._compute_first(depth, value)
            self._add(depth, f"{self._top(value)};")

    def _of_assertstmt(self, stmt: Any, depth: int) -> None:
        self._compute_first(depth, stmt.condition)
        self._add(depth, f"if (!({self._top(stmt.condition)})) return -1;")

    def _of_attrstmt(self, stmt: Any, depth: int) -> None:
        self._statement(stmt.body, depth)


def _own(name: str) -> str:
    """Return the text of a helper function."""
    terms, x = _Expressions(name), tirx.Var("x", "float32")
    names, body = float_functions.written(_OWN[name], x, 1, lambda a, b, c: a * b + c)
    lines = [f"static inline float {name}(float {terms.name_of(x)}) {{"]
    for var, value in names:
        text = terms.printed(value)
        lines.append(f"  const {C_TYPES[_dtype(value)]} {terms.name_of(var)} = {text};")
    return "\n".join([*lines, f"  return {terms.printed(body)};", "}", ""])


_LOOPS = "ijkmnpqrstuvw"
"""Names of loop variables, from the outside in."""

_STORED = dict.fromkeys(_HALVES, "uint16")


def _dtype(expr: Expr) -> str:
    return str(expr.ty.dtype)


def _known(symbol: str, expr: Expr) -> str:
    """Return the constant value of a comparison of an unsigned number with 0, or ""."""
    if (symbol == "<=" and _is(expr.a, 0)) or (symbol == ">=" and _is(expr.b, 0)):
        return "1"
    return "0" * ((symbol == ">" and _is(expr.a, 0)) or (symbol == "<" and _is(expr.b, 0)))


def _plain_if(stmt: Any) -> bool:
    return isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None


def _is(expr: Expr, value: int) -> bool:
    return isinstance(expr, tirx.IntImm) and int(expr.value) == value


def _function(name: str, dtype: str) -> str:
    return name + ("f" if dtype == "float32" else "")


def literal(value: Any, dtype: str) -> str:
    """Return a number as a C literal."""
    return _float(value, dtype) if "float" in dtype else _integer(int(value), dtype)


def _integer(value: int, dtype: str) -> str:
    if dtype == "bool":
        return str(int(value))
    if dtype == "uint32":
        return f"{value}u" if value < 1 << 16 else f"{value:#x}u"
    if dtype == "uint64":
        return f"UINT64_C({value})"
    if dtype == "int64":
        return f"INT64_C({value})" if value > -(2**63) else "INT64_MIN"
    if dtype == "int32" and value == -(2**31):
        return "INT32_MIN"
    if dtype in _NARROW and dtype.startswith("u"):
        return f"({C_TYPES[dtype]}){value}"
    return str(value)


def _float(value: float, dtype: str) -> str:
    if math.isnan(value):
        text = "NAN"
    elif math.isinf(value):
        text = "INFINITY"
    else:
        shortest = np.float32(abs(value)) if dtype == "float32" else np.float64(abs(value))
        text = np.format_float_scientific(shortest, trim="0", unique=True)
        plain = np.format_float_positional(shortest, trim="0", unique=True)
        text = plain if len(plain) <= len(text) else text
        text += "f" if dtype == "float32" else ""
    if math.isnan(value) or math.isinf(value):
        text = text if dtype == "float32" else f"(double){text}"
    return f"-{text}" if math.copysign(1, value) < 0 and not math.isnan(value) else text


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
    """Return the parameters that are written, and those that are read."""
    views, written, read = _views(func), set[Any](), set[Any]()

    def stored(stmt: Any) -> None:
        written.add(views.get(stmt.buffer, stmt.buffer))

    def loaded(expr: Any) -> None:
        read.add(views.get(expr.source, expr.source))

    pairs: list[tuple[Any, Callable[[Any], None]]]
    pairs = [(tirx.BufferStore, stored), (tvm.ir.TensorLoad, loaded)]
    tvm_ffi.structural_walk(func.body, pairs, order="pre")
    return written, read
