"""Arithmetic on elements of shape vectors, which may be symbolic or unknown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bnncc.ir.dims import difference, product, quotient, symbols_of, total

Element = Any  # int, symbol (str), or None where unknown


def _multiply(a: Element, b: Element) -> Element:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if a is None or b is None or _negative(a) or _negative(b):
        return 0 if a == 0 or b == 0 else None
    return product((a, b))


def multiply_all(values: Sequence[Element]) -> Element:
    """Return the product of dimensions."""
    result: Element = 1
    for value in values:
        result = _multiply(result, value)
    return result


def _negative(a: Element) -> bool:
    return isinstance(a, int) and a < 0


def _add(a: Element, b: Element) -> Element:
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if a is None or b is None:
        return None
    for one, other in ((a, b), (b, a)):
        if _negative(one):
            return difference(other, -one)
    return total((a, b))


def _subtract(a: Element, b: Element) -> Element:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    if a is None or b is None or _negative(a):
        return None
    return total((a, -b)) if _negative(b) else difference(a, b)


def _divide(a: Element, b: Element) -> Element:
    if isinstance(a, int) and isinstance(b, int):
        return math.trunc(a / b) if b else None
    if a is None or b is None or _negative(a) or _negative(b):
        return None
    return a if b == 1 else quotient((a,), (b,))


def _equal(a: Element, b: Element) -> Element:
    if a is None or b is None:
        return None
    if isinstance(a, str) and isinstance(b, str):
        return True if a == b else None
    if isinstance(a, str) or isinstance(b, str):
        number = b if isinstance(a, str) else a
        return False if number <= 0 else None  # dimensions are positive
    return bool(a == b)


ARITHMETIC: dict[str, Callable[[Element, Element], Element]] = {
    "Add": _add,
    "Div": _divide,
    "Equal": _equal,
    "Mul": _multiply,
    "Sub": _subtract,
}
"""Result of each operator for two elements."""


def taken_as_positive(op: str, pairs: Iterable[tuple[Element, Element]]) -> set[str]:
    """Return the symbols that an operator of `ARITHMETIC` takes to be 1 or more."""
    found: set[str] = set()
    for a, b in pairs:
        if op == "Equal" and 0 in (a, b):
            found |= symbols_of(b if a == 0 else a)
        elif op == "Div" and isinstance(b, str):
            found |= symbols_of(b)
    return found
