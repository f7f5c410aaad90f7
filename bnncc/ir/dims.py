"""Arithmetic on dimensions: numbers, symbols, and polynomials of both, as text.

``N`` is the batch, ``16*N*T`` a number of matrix rows, ``P+T`` the length of a cache that has
grown. The text is canonical: equal dimensions are equal strings.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Dim = int | str
"""A dimension: a number, or a polynomial of symbols with natural coefficients as text."""
Number = TypeVar("Number")

MAX_DIM = "bnncc.max_dim."
"""Key in a model's metadata of a symbol's maximum; the symbol follows."""
_DIM = r" *\w+( *[+*] *\w+)* *"


def is_static(dims: Iterable[Dim | None]) -> bool:
    """Whether every dimension is a number."""
    return all(isinstance(d, int) for d in dims)


def channel_shape(rank: int) -> tuple[int, ...]:
    """Return the shape in which a vector broadcasts along axis 1, the channels, of `rank` axes."""
    return (1, -1) + (1,) * (rank - 2)


def _terms(dim: Dim) -> Counter[tuple[str, ...]]:
    """Return the coefficient of each product of symbols."""
    if isinstance(dim, int):
        return Counter({(): dim})
    found: Counter[tuple[str, ...]] = Counter()
    for term in dim.split("+"):
        factors = term.split("*")
        number = math.prod(int(f) for f in factors if f.isdigit())
        found[tuple(sorted(f for f in factors if not f.isdigit()))] += number
    return found


def _text(terms: Mapping[tuple[str, ...], int]) -> Dim:
    parts = [
        "*".join([str(number)] * (number != 1 or not symbols) + list(symbols))
        for symbols, number in sorted(terms.items(), key=lambda t: (not t[0], t[0]))
        if number
    ]
    return int(parts[0]) if parts and parts[0].isdigit() else "+".join(parts) if parts else 0


def product(dims: Iterable[Dim]) -> Dim:
    """Return the product of dimensions.

    Examples
    --------
    >>> product((2, 3)), product(("N", 3)), product(("3*N", 4)), product(()), product(("P+T", "N"))
    (6, '3*N', '12*N', 1, 'N*P+N*T')
    """
    result: Counter[tuple[str, ...]] = Counter({(): 1})
    for dim in dims:
        made: Counter[tuple[str, ...]] = Counter()
        for a, m in result.items():
            for b, n in _terms(dim).items():
                made[tuple(sorted(a + b))] += m * n
        result = made
    return _text(result)


def total(dims: Iterable[Dim]) -> Dim:
    """Return the sum of dimensions.

    Examples
    --------
    >>> total((2, 3)), total(("P", "T")), total(("T", 1)), total(("N", "N"))
    (5, 'P+T', 'T+1', '2*N')
    """
    result: Counter[tuple[str, ...]] = Counter()
    for dim in dims:
        result.update(_terms(dim))
    return _text(result)


def difference(whole: Dim, part: Dim) -> Dim | None:
    """Return ``whole - part``, or None if that may be negative.

    Examples
    --------
    >>> difference("P+T", "P"), difference("T+1", 1), difference("T", "P"), difference(7, 7)
    ('T', 'T', None, 0)
    """
    left = _terms(whole)
    left.subtract(_terms(part))
    return None if any(n < 0 for n in left.values()) else _text(left)


def quotient(whole: Iterable[Dim], part: Iterable[Dim]) -> Dim | None:
    """Return the quotient of two products of dimensions, or None if it is not a dimension.

    Examples
    --------
    >>> quotient(("N", 4, "P+T"), ("N", 2)), quotient(("P+T",), ("P+T",)), quotient((6,), ("N",))
    ('2*P+2*T', 1, None)
    """
    over, under = Counter(whole), Counter(part)
    over, under = over - under, under - over
    ((symbols, number), *rest) = _terms(product(under.elements())).items()
    if rest or not number:
        return None
    result: dict[tuple[str, ...], int] = {}
    for factors, count in _terms(product(over.elements())).items():
        left = Counter(factors)
        left.subtract(symbols)
        if count % number or any(n < 0 for n in left.values()):
            return None
        result[tuple(sorted(left.elements()))] = count // number
    return _text(result)


def symbols_of(dim: Dim) -> set[str]:
    """Return the symbols in a dimension."""
    return {symbol for term in _terms(dim) for symbol in term}


def readable(text: str) -> Dim | None:
    """Parse a dimension from a file or an option; return None if it is not valid.

    Examples
    --------
    >>> readable("past + tokens"), readable("N"), readable("7"), readable("T-1")
    ('past+tokens', 'N', 7, None)
    """
    return total([text.replace(" ", "")]) if re.fullmatch(_DIM, text) else None


def at_one(shape: Iterable[Dim]) -> tuple[int, ...]:
    """Return a shape with 1 for each symbol.

    Examples
    --------
    >>> at_one(("N", 3, "P+T"))
    (1, 3, 2)
    """
    return tuple(evaluated(dim, lambda _: 1) for dim in shape)


def evaluated(dim: Dim, value: Callable[[str], Number]) -> int | Number:
    """Evaluate a dimension to a number, or to an expression.

    Parameters
    ----------
    dim : int or str
        The dimension.
    value : function
        Returns the value of a symbol.

    Examples
    --------
    >>> evaluated("16*N*T+N", {"N": 2, "T": 3}.__getitem__)
    98
    """
    result: int | Number | None = None
    for symbols, number in _terms(dim).items():
        part: int | Number | None = None if number == 1 and symbols else number
        for symbol in symbols:
            part = value(symbol) if part is None else part * value(symbol)  # type: ignore[operator]
        result = part if result is None else result + part  # type: ignore[operator]
    return 0 if result is None else result
