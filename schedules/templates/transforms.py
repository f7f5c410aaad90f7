"""Operations on vectors in registers: products by constant matrices, and deinterleaving."""

from __future__ import annotations

from fractions import Fraction

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import fused_multiply_add
from bnncc.schedules.templates.kernel import Expr, f32
from bnncc.topi_binary.filtering import Matrix
from bnncc.topi_binary.layout import LANES

Row = tuple[Fraction, ...]


def combine(matrix: Matrix, values: list[Expr]) -> list[Expr]:
    """Write ``matrix @ values``, each value a vector.

    Columns that are equal up to signs are added and subtracted first, and rows that are equal up to
    signs share their sums: points p and -p give such pairs.

    Parameters
    ----------
    matrix : Matrix, shape (rows, columns)
        Constant entries.
    values : list of Expr
        One per column.

    Returns
    -------
    list of Expr
        One per row, bound to names.
    """
    values = [T.Bind(value) for value in values]
    folded, sources = _fold_columns(matrix, values)
    out: dict[int, Expr] = {}
    for i, row in enumerate(folded):
        if i in out:
            continue
        twin = next((k for k in range(i + 1, len(folded)) if _twins(row, folded[k])), None)
        if twin is None or twin in out:
            out[i] = T.Bind(_sum(row, sources))
            continue
        other = folded[twin]
        same = tuple(a if a == b else Fraction(0) for a, b in zip(row, other, strict=True))
        unlike = tuple(a if a == -b else Fraction(0) for a, b in zip(row, other, strict=True))
        even, odd = T.Bind(_sum(same, sources)), T.Bind(_sum(unlike, sources))
        out[i], out[twin] = T.Bind(even + odd), T.Bind(even - odd)
    return [out[i] for i in range(len(folded))]


def _twins(one: Row, two: Row) -> bool:
    """Whether rows are equal up to some signs, and worth splitting."""
    pairs = [(a, b) for a, b in zip(one, two, strict=True) if a or b]
    like = sum(a == b for a, b in pairs)
    return all(abs(a) == abs(b) for a, b in pairs) and 0 < like < len(pairs) and len(pairs) > 2


def _fold_columns(matrix: Matrix, values: list[Expr]) -> tuple[list[Row], list[Expr]]:
    columns = list(zip(*matrix, strict=True))
    sources, kept = [], []
    done: set[int] = set()
    for i, column in enumerate(columns):
        if i in done:
            continue
        twin = next(
            (k for k in range(i + 1, len(columns)) if k not in done and _twins(column, columns[k])),
            None,
        )
        if twin is None:
            sources.append(values[i])
            kept.append(column)
            continue
        done.add(twin)
        other = columns[twin]
        sources += [T.Bind(values[i] + values[twin]), T.Bind(values[i] - values[twin])]
        pairs = list(zip(column, other, strict=True))
        kept.append(tuple(a if a == b else Fraction(0) for a, b in pairs))
        kept.append(tuple(a if a == -b else Fraction(0) for a, b in pairs))
    return list(zip(*kept, strict=True)), sources


def _sum(row: Row, values: list[Expr]) -> Expr:
    terms = sorted(
        ((c, v) for c, v in zip(row, values, strict=True) if c), key=lambda term: term[0] != 1
    )
    total: Expr = None
    for factor, value in terms:
        if total is None:
            total = value if factor == 1 else value * f32(float(factor))
        elif abs(factor) == 1:
            total = total + value if factor == 1 else total - value
        else:
            total = fused_multiply_add(value, f32(float(factor)), total)
    return f32(0.0) if total is None else total


def deinterleave(values: list[Expr]) -> list[Expr]:
    """Deinterleave vectors: repeatedly take even and odd lanes of two registers.

    Parameters
    ----------
    values : list of Expr
        Vectors of consecutive numbers; their count is a power of two.

    Returns
    -------
    list of Expr
        Vector r holds the numbers at ``r, r + len(values), ...``.
    """
    if len(values) == 1:
        return values
    values = [T.Bind(value) for value in values]
    halves = []
    for odd in (0, 1):
        lanes = [tirx.IntImm("int32", i) for i in range(odd, 2 * LANES, 2)]
        pairs = zip(values[::2], values[1::2], strict=True)
        halves.append(deinterleave([tirx.Shuffle(list(pair), lanes) for pair in pairs]))
    return [value for both in zip(*halves, strict=True) for value in both]
