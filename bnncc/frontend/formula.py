"""Formulas: Python operators that write ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bnncc.ir.pieces import Expression


def _operator(op: str, *, turned: bool = False) -> Callable[[Number, Any], Number]:
    """Return the method for an operator; if `turned`, the other operand comes first."""

    def method(self: Number, other: Any) -> Number:
        return self._made(op, other, self) if turned else self._made(op, self, other)

    return method


def _comparison(op: str) -> Callable[[Number, Any], Number]:
    def method(self: Number, other: Any) -> Number:
        return Number(self.emit, self.constant, self._made(op, self, other).name, "bool")

    return method


@dataclass(frozen=True, eq=False)
class Number:
    """A tensor in a formula; other operands are of the same type, or Python numbers.

    Examples
    --------
    >>> def emit(op, inputs, **attrs):
    ...     return f"{op}({', '.join(inputs)})"
    >>> x = Number(emit, lambda value, dtype: str(value), "x", "float32")
    >>> (1 - x * x("Sigmoid")).name
    'Sub(1, Mul(x, Sigmoid(x)))'
    >>> x.choose(x < 0, -x, 1).name
    'Where(Less(x, 0), Neg(x), 1)'
    """

    emit: Callable[..., str]
    """Writes a node: takes operator, inputs and attributes; returns the result's name."""
    constant: Callable[[Any, str], str]
    """Takes a number and a dtype; returns the name of a constant."""
    name: Any
    """Name of the tensor, as `emit` takes it."""
    dtype: str
    """Its dtype."""

    def __call__(self, op: str, *others: Any, **attrs: Any) -> Number:
        """Apply an ONNX operator to the tensor and others."""
        return self._made(op, self, *others, **attrs)

    def of(self, given: Any) -> Number:
        """Convert a Python number to a tensor of the same type; return a tensor unchanged."""
        if isinstance(given, Number):
            return given
        name = self.constant(given, self.dtype)
        return Number(self.emit, self.constant, name, self.dtype)

    def choose(self, where: Number, yes: Any, no: Any) -> Number:
        """Select between two values of its own type."""
        names = [where.name, self.of(yes).name, self.of(no).name]
        return Number(self.emit, self.constant, self.emit("Where", names), self.dtype)

    def _made(self, op: str, *operands: Any, **attrs: Any) -> Number:
        names = [self.of(one).name for one in operands]
        return Number(self.emit, self.constant, self.emit(op, names, **attrs), self.dtype)

    __add__, __radd__ = _operator("Add"), _operator("Add", turned=True)
    __sub__, __rsub__ = _operator("Sub"), _operator("Sub", turned=True)
    __mul__, __rmul__ = _operator("Mul"), _operator("Mul", turned=True)
    __truediv__, __rtruediv__ = _operator("Div"), _operator("Div", turned=True)
    __lt__, __le__ = _comparison("Less"), _comparison("LessOrEqual")
    __gt__, __ge__ = _comparison("Greater"), _comparison("GreaterOrEqual")
    equals = _comparison("Equal")
    """Elementwise equality."""
    __and__, __or__, __xor__ = _operator("And"), _operator("Or"), _operator("Xor")

    def __neg__(self) -> Number:
        return self("Neg")

    def __abs__(self) -> Number:
        return self("Abs")

    def __invert__(self) -> Number:
        return self("Not")


def number(write: Expression, name: str, dtype: str) -> Number:
    """Return a tensor of the decomposition of a node as an operand of formulas."""
    return Number(
        lambda op, inputs, **attrs: write(op, *inputs, **attrs), write.constant, name, dtype
    )
