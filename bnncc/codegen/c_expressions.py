"""Expressions of kernels as C, without implicit conversions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from bnncc.codegen import bare
from bnncc.codegen.c_helpers import CHOICES, HELPERS
from bnncc.codegen.c_text import C_TYPES, identifier, is_reserved
from bnncc.errors import TargetError
from bnncc.schedules import float_functions

Expr = Any

MAX_NAME = 40
"""Characters of a variable's name. A C compiler need not tell names apart that differ later than in
the 63rd character; TVM's grow with each operator of a chain."""

MAX_REPEATED = 60
"""Characters of operands up to which a minimum or maximum repeats them. Nested ones would otherwise
double in length each time."""

HALVES = ("float16", "bfloat16")

NARROW = ("int8", "uint8", "int16", "uint16")
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

OWN = {f"float_{name}": name for name in float_functions.FUNCTIONS}
"""Float32 functions that a C compiler can vectorize, by their names in C."""


class Expressions:
    """Writes the expressions of one function.

    Parameters
    ----------
    name : str
        The function.
    """

    def __init__(self, name: str) -> None:
        self.name, self.helpers = name, set[str]()
        self.names: dict[Any, str] = {}
        functions = *_FUNCTIONS, *(f"{name}f" for name in _FUNCTIONS)
        parts = (f"part_{kind}" for kind in C_TYPES.values())
        self.taken = {"scratch", *functions, *HELPERS, *OWN, *parts}
        self.types: dict[str, str] = {}  # of the elements of tensors, by name in C
        self.scalars: set[str] = set()  # tensors of one element that are variables in C
        self.views: Mapping[Any, Any] = {}  # tensors that have no name, and of which they are views
        self.written: Collection[Any] = ()  # tensors that are not only read

    def named(self, var: Any, wanted: str) -> str:
        """Return the name of a variable or value; if it has none, make one like `wanted`."""
        if var not in self.names:
            base = identifier(wanted)[:MAX_NAME]
            base = f"{base.lower()}_1" if is_reserved(base) else base
            name, number = base, 1
            while name in self.taken:
                number, name = number + 1, f"{base}_{number + 1}"
            self.taken.add(name)
            self.names[var] = name
        return self.names[var]

    def text(self, expr: Expr) -> str:
        """Return an expression as C."""
        return self._text(expr, enclosed=False)

    def operand(self, expr: Expr) -> str:
        """Return an expression as C, in parentheses if it is an operation."""
        return self._text(expr, enclosed=True)

    def _text(self, expr: Expr, *, enclosed: bool) -> str:
        if expr in self.names:
            return self.names[expr]
        kind = type(expr)
        if kind in (*_BINARY, tirx.Min, tirx.Max) and dtype_of(expr.a) in HALVES:
            wide = kind(expr.a.astype("float32"), expr.b.astype("float32"))
            wide = wide if dtype_of(expr) == "bool" else wide.astype(dtype_of(expr))
            return self._text(wide, enclosed=enclosed)
        if kind in _BINARY:
            text = self._binary(expr, _BINARY[kind])
        elif kind in (tirx.Min, tirx.Max):
            text = self._chosen("<" if kind is tirx.Min else ">", expr)
        elif kind is tirx.Select:
            text = self._select(expr.condition, expr.true_value, expr.false_value, dtype_of(expr))
        elif isinstance(expr, tvm.ir.Call) and expr.op.name == "prim.if_then_else":
            text = self._select(expr.args[0], expr.args[1], expr.args[2], dtype_of(expr))
        else:
            return self._atom(expr)
        return f"({text})" if enclosed else text

    def _atom(self, expr: Expr) -> str:
        if isinstance(expr, tirx.IntImm):
            return _integer(int(expr.value), dtype_of(expr))
        if isinstance(expr, tirx.FloatImm) and dtype_of(expr) in HALVES:
            return self._cast(expr.astype("float32"), dtype_of(expr))
        if isinstance(expr, tirx.FloatImm):
            return _float(float(expr.value), dtype_of(expr))
        if isinstance(expr, tvm.ir.TensorLoad):
            return self.element(expr.source, expr.indices)
        if isinstance(expr, tirx.Cast):
            return self._cast(expr.value, dtype_of(expr))
        if isinstance(expr, tirx.Not):
            return f"!{self.operand(expr.a)}"
        if isinstance(expr, tirx.BitwiseNot):
            text, dtype = self.operand(expr.a), dtype_of(expr)
            if dtype == "uint32":  # compilers warn about `~` of a comparison
                return f"({text} ^ 0xffffffffu)"
            return f"({C_TYPES[dtype]})(~{text})" if dtype in NARROW else f"~{text}"
        if isinstance(expr, tvm.ir.Call):
            return self._call(expr)
        if isinstance(expr, tirx.Let):
            raise TargetError(f"kernel `{self.name}`: no C for Let")
        if isinstance(expr, tirx.Var) and expr.name.endswith("elem_offset"):
            return "0"  # start of a parameter
        raise TargetError(f"kernel `{self.name}`: no C for {type(expr).__name__}")

    def _binary(self, expr: Expr, symbol: str) -> str:
        dtype = dtype_of(expr.a)
        if symbol == "%" and "float" in dtype:
            return f"{_function('fmod', dtype)}({self.text(expr.a)}, {self.text(expr.b)})"
        left, right = self._side(expr.a, symbol, True), self._side(expr.b, symbol, False)
        if dtype.startswith("u") and (known := _known(symbol, expr)):
            return known
        if symbol == "<<" and dtype.startswith("int"):  # undefined for negative numbers
            left = f"(u{C_TYPES[dtype]}){self.operand(expr.a)}"
            return f"({C_TYPES[dtype]})({left} << {right})"
        text = f"{left} {symbol} {right}"
        if dtype in NARROW and symbol not in (*_COMPARED, "&&", "||"):
            return f"({C_TYPES[dtype]})({text})"
        return text

    def _side(self, expr: Expr, symbol: str, left: bool) -> str:
        """Return an operand of an operation, in parentheses if C needs them."""
        inner = _BINARY.get(type(expr), "")
        narrow = dtype_of(expr) in NARROW and inner not in _COMPARED
        if narrow and inner:
            return self.text(expr)  # the operand is a cast
        fits = inner in (_INSIDE if left else _RIGHT).get(symbol, ())
        fits |= left and inner == symbol and symbol in ("&&", "||")
        return self.text(expr) if fits else self.operand(expr)

    def _chosen(self, symbol: str, expr: Expr) -> str:
        a, b, dtype = self.operand(expr.a), self.operand(expr.b), dtype_of(expr)
        if len(a) + len(b) > MAX_REPEATED:
            name = f"{CHOICES[symbol]}_{dtype}"
            self.helpers.add(name)
            return f"{name}({self.text(expr.a)}, {self.text(expr.b)})"
        return self._narrowed(f"{a} {symbol} {b} ? {a} : {b}", dtype)

    def _select(self, condition: Expr, yes: Expr, no: Expr, dtype: str) -> str:
        text = f"{self.operand(condition)} ? {self.operand(yes)} : {self.operand(no)}"
        return self._narrowed(text, dtype)

    def _narrowed(self, text: str, dtype: str) -> str:
        return f"({C_TYPES[dtype]})({text})" if dtype in NARROW else text

    def _cast(self, value: Expr, dtype: str) -> str:
        have = dtype_of(value)
        if dtype == "bool":
            return f"({self.operand(value)} != 0)"
        if have == dtype:
            return self.operand(value)
        if have in HALVES:
            self.helpers.add(f"{have}_value")
            text = f"{have}_value({self.text(value)})"
            return text if dtype == "float32" else f"({C_TYPES[dtype]}){text}"
        if dtype in HALVES:
            self.helpers.add(f"{dtype}_of")
            return f"{dtype}_of({self._as('float32', value)})"
        return f"({C_TYPES[dtype]}){self.operand(value)}"

    def element(self, buffer: Any, indices: Sequence[Expr]) -> str:
        """Return an element of a tensor."""
        base, dtype = self.views.get(buffer, buffer), str(buffer.dtype)
        name = self.names[base]
        if name in self.scalars:
            return name
        index = self.text(indices[0]) if len(indices) else "0"
        if self.types[name] == dtype:
            return f"{name}[{index}]"
        const = "" if base in self.written else "const "
        return f"(({const}part_{C_TYPES[dtype]} *){name})[{index}]"

    def _call(self, call: Any) -> str:
        op, args, dtype = str(call.op.name).rpartition(".")[2], list(call.args), dtype_of(call)
        if op == "call_pure_extern":
            op = str(args.pop(0).value).removesuffix("f" if dtype == "float32" else "")
        if op in _RENAMED:
            op = _RENAMED[op]
        if f"float_{op}" in OWN and dtype == "float32":
            self.helpers |= {f"float_{op}", "bits_of", "float_of"}
            return f"float_{op}({self.text(args[0])})"
        if op in _FUNCTIONS:
            return f"{_function(op, dtype)}({', '.join(map(self.text, args))})"
        write = getattr(self, f"_call_{op}", None)
        if op.endswith("packed"):
            raise TargetError(bare.NEEDS_RUNTIME.format(self.name))
        if write is None:
            raise TargetError(
                f"kernel `{self.name}` calls `{call.op.name}`, for which there is no portable C"
            )
        return str(write(args, dtype))

    def _call_fma(self, args: list[Expr], dtype: str) -> str:
        a, b, c = (self.operand(arg) for arg in args)
        return f"({a} * {b} + {c})"

    def _call_popcount(self, args: list[Expr], dtype: str) -> str:
        self.helpers.add("popcount32")
        text = f"popcount32({self._as('uint32', args[0])})"
        return text if dtype == "uint32" else f"({C_TYPES[dtype]}){text}"

    def _as(self, dtype: str, value: Expr) -> str:
        return self.text(value) if dtype_of(value) == dtype else self._cast(value, dtype)

    def _call_reinterpret(self, args: list[Expr], dtype: str) -> str:
        have = dtype_of(args[0])
        if {have, dtype} <= {"int32", "uint32"}:
            return self._cast(args[0], dtype)
        if {have, dtype} <= {"int16", "uint16", *HALVES}:
            return f"({C_TYPES[dtype]}){self.operand(args[0])}"
        if not {have, dtype} <= {"int32", "uint32", "float32"}:
            raise TargetError(f"kernel `{self.name}`: no C for bits of {have} as {dtype}")
        if dtype == "float32":
            self.helpers.add("float_of")
            return f"float_of({self._as('uint32', args[0])})"
        self.helpers.add("bits_of")
        text = f"bits_of({self.text(args[0])})"
        return text if dtype == "uint32" else f"({C_TYPES[dtype]}){text}"

    def _call_isnan(self, args: list[Expr], dtype: str) -> str:
        return f"isnan({self.text(args[0])})"

    def _call_isfinite(self, args: list[Expr], dtype: str) -> str:
        return f"isfinite({self.text(args[0])})"

    def _call_isinf(self, args: list[Expr], dtype: str) -> str:
        return f"isinf({self.text(args[0])})"

    def _call_likely(self, args: list[Expr], dtype: str) -> str:
        return self.operand(args[0])

    def _call_ret(self, args: list[Expr], dtype: str) -> str:
        return f"return {self.text(args[0])}"


def own_function(name: str) -> str:
    """Return the text of one of `OWN`."""
    terms, x = Expressions(name), tirx.Var("x", "float32")
    names, body = float_functions.written(OWN[name], x, 1, lambda a, b, c: a * b + c)
    lines = [f"static inline float {name}(float {terms.named(x, 'x')}) {{"]
    for var, value in names:
        text = terms.text(value)
        lines.append(f"  const {C_TYPES[dtype_of(value)]} {terms.named(var, var.name)} = {text};")
    return "\n".join([*lines, f"  return {terms.text(body)};", "}", ""])


def dtype_of(expr: Expr) -> str:
    """Return the type of an expression."""
    return str(expr.ty.dtype)


def _known(symbol: str, expr: Expr) -> str:
    """Return the constant value of a comparison of an unsigned number with 0, or ""."""
    left, right = is_constant(expr.a, 0), is_constant(expr.b, 0)
    if (symbol == "<=" and left) or (symbol == ">=" and right):
        return "1"
    return "0" if (symbol == ">" and left) or (symbol == "<" and right) else ""


def is_constant(expr: Expr, value: int) -> bool:
    """Return whether an expression is an integer constant with this value."""
    return isinstance(expr, tirx.IntImm) and int(expr.value) == value


def _function(name: str, dtype: str) -> str:
    return name + ("f" if dtype == "float32" else "")


def literal(value: Any, dtype: str) -> str:
    """Return a number as a C literal."""
    return _float(value, dtype) if "float" in dtype else _integer(int(value), dtype)


def zero(dtype: str) -> str:
    """Return 0 as a C literal of the type in which numbers of `dtype` are stored."""
    return literal(0, "uint16" if dtype in HALVES else dtype)


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
    if dtype in NARROW and dtype.startswith("u"):
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
