"""Formulas: operators of Python that write nodes of ONNX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Number:
    """A tensor in a formula; what it is combined with is of its type, or a number.

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
    """Writes a node: takes an operator, its inputs and attributes, returns the result."""
    constant: Callable[[Any, str], str]
    """Returns the name of a constant: takes a number and a type."""
    name: Any
    """Of the tensor, as `emit` takes it."""
    dtype: str
    """Its type."""

    def __call__(self, op: str, *others: Any, **attrs: Any) -> Number:
        """Return what an operator makes of it and others."""
        return self._made(op, self, *others, **attrs)

    def of(self, given: Any) -> Number:
        """Return a number as a tensor of the same type; a tensor as it is."""
        if isinstance(given, Number):
            return given
        name = self.constant(given, self.dtype)
        return Number(self.emit, self.constant, name, self.dtype)

    def choose(self, where: Number, yes: Any, no: Any) -> Number:
        """Return one of two of its own type."""
        names = [where.name, self.of(yes).name, self.of(no).name]
        return Number(self.emit, self.constant, self.emit("Where", names), self.dtype)

    def equals(self, other: Any) -> Number:
        """Return where both are the same."""
        return self._compared("Equal", self, other)

    def _made(self, op: str, *operands: Any, **attrs: Any) -> Number:
        names = [self.of(one).name for one in operands]
        return Number(self.emit, self.constant, self.emit(op, names, **attrs), self.dtype)

    def _compared(self, op: str, *operands: Any) -> Number:
        return Number(self.emit, self.constant, self._made(op, *operands).name, "bool")

    def __add__(self, other: Any) -> Number:
        return self._made("Add", self, other)

    def __radd__(self, other: Any) -> Number:
        return self._made("Add", other, self)

    def __sub__(self, other: Any) -> Number:
        return self._made("Sub", self, other)

    def __rsub__(self, other: Any) -> Number:
        return self._made("Sub", other, self)

    def __mul__(self, other: Any) -> Number:
        return self._made("Mul", self, other)

    def __rmul__(self, other: Any) -> Number:
        return self._made("Mul", other, self)

    def __truediv__(self, other: Any) -> Number:
        return self._made("Div", self, other)

    def __rtruediv__(self, other: Any) -> Number:
        return self._made("Div", other, self)

    def __neg__(self) -> Number:
        return self._made("Neg", self)

    def __abs__(self) -> Number:
        return self._made("Abs", self)

    def __lt__(self, other: Any) -> Number:
        return self._compared("Less", self, other)

    def __le__(self, other: Any) -> Number:
        return self._compared("LessOrEqual", self, other)

    def __gt__(self, other: Any) -> Number:
        return self._compared("Greater", self, other)

    def __ge__(self, other: Any) -> Number:
        return self._compared("GreaterOrEqual", self, other)

    def __and__(self, other: Number) -> Number:
        return self._made("And", self, other)

    def __or__(self, other: Number) -> Number:
        return self._made("Or", self, other)

    def __xor__(self, other: Number) -> Number:
        return self._made("Xor", self, other)

    def __invert__(self) -> Number:
        return self._made("Not", self)
