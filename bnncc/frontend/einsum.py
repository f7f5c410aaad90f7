"""Read Einsum of two operands as a product of matrices, which may be one of bits.

Einsum("btd,ud->btu", x, w)      ->  MatMul(x, Transpose(w))
Einsum("bqhd,bkhd->bhqk", q, k)  ->  MatMul(Transpose(q), Transpose(k))
Einsum("btd,dhe->bthe", x, w)    ->  Reshape(MatMul(x, Reshape(w)))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bnncc.ir.dims import Dim
from bnncc.ir.pieces import Expression

_FLOATS = frozenset(("float16", "float32", "float64"))
_ELLIPSIS = "..."


def einsum(write: Expression) -> None:
    """Write Einsum; what is not a product of two matrices stays as it is."""
    if write.type().dtype == "bfloat16":
        wide = [write.cast(name, "float32") for name in write.node.inputs]
        write.give(write.cast(write("Einsum", *wide, **write.node.attrs), "bfloat16"), 0)
        return
    product = _Product.of(write)
    if product is not None:
        write.give(product.written(write), 0)


@dataclass(frozen=True)
class _Product:
    """A sum of products as matrices: each group of letters becomes one axis, `batch` several."""

    operands: tuple[tuple[str, str], ...]
    """Names of two tensors, each with a letter for each axis."""
    out: str
    """Letters of the result."""
    sizes: dict[str, Dim]
    """By letter."""
    batch: str
    left: str
    inner: str
    right: str

    @classmethod
    def of(cls, write: Expression) -> _Product | None:
        """Return the product that a node is, or None."""
        shapes = [write.graph.types[name].shape for name in write.node.inputs]
        found = _letters(str(write.node.attrs["equation"]), shapes)
        if len(shapes) != 2 or write.type().dtype not in _FLOATS or found is None:
            return None
        *terms, out = found
        sizes: dict[str, Dim] = {}
        for term, shape in zip(terms, shapes, strict=True):
            for letter, size in zip(term, shape, strict=True):
                if sizes.setdefault(letter, size) != size:
                    return None
        operands = list(zip(write.node.inputs, terms, strict=True))
        if operands[0][0] in write.graph.constants:  # weights come second
            operands.reverse()
        a, b = (letters for _, letters in operands)
        inner = "".join(x for x in a if x in b and x not in out)
        batch = "".join(x for x in out if x in a and x in b)
        left, right = ("".join(x for x in out if x in one and x not in batch) for one in (a, b))
        if not inner or {*batch, *left, *inner} != {*a} or {*batch, *inner, *right} != {*b}:
            return None
        made = cls(tuple(operands), out, sizes, batch, left, inner, right)
        merged = [g for g in (left, inner, right) if len(g) != 1 and (batch or g != left)]
        return made if all(isinstance(sizes[x], int) for g in merged for x in g) else None

    def _size(self, group: str) -> int:
        """Return the size of an axis made of a group, -1 if it is a symbol."""
        size = math.prod(self.sizes[x] for x in group) if len(group) != 1 else self.sizes[group]
        return size if isinstance(size, int) else -1

    def written(self, write: Expression) -> str:
        """Write it, and return its result."""
        keep = [0] * len(self.batch)
        rows = [0] * len(self.left)
        (x, axes), (w, others) = self.operands
        x = _turned(write, x, axes, self.batch + self.left + self.inner)
        if self.batch and (len(self.left) != 1 or len(self.inner) != 1):
            x = write.reshape(x, *keep, self._size(self.left), self._size(self.inner))
        elif len(self.inner) != 1:
            x = write.reshape(x, *rows, self._size(self.inner))
        w = _turned(write, w, others, self.batch + self.inner + self.right)
        if len(self.inner) != 1 or len(self.right) != 1:
            w = write.reshape(w, *keep, self._size(self.inner), self._size(self.right))
        made = write("MatMul", x, w)
        ends = [self._size(letter) for letter in self.right]
        if self.batch and (len(self.left) != 1 or len(ends) != 1):
            made = write.reshape(made, *keep, *(self._size(letter) for letter in self.left), *ends)
        elif len(ends) != 1:
            made = write.reshape(made, *rows, *ends)
        return _turned(write, made, self.batch + self.left + self.right, self.out)


def _turned(write: Expression, name: str, letters: str, wanted: str) -> str:
    if letters == wanted:
        return name
    return write("Transpose", name, perm=[letters.index(letter) for letter in wanted])


def _letters(equation: str, shapes: Sequence[Sequence[Dim]]) -> list[str] | None:
    """Return a letter for each axis of each operand and the result; None if letters repeat."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        return None
    if not arrow:
        once = sorted(x for x in {*left} - {",", "."} if left.count(x) == 1)
        out = _ELLIPSIS * (_ELLIPSIS in left) + "".join(once)
    more = {
        len(shape) - len(term) + len(_ELLIPSIS)
        for term, shape in zip(terms, shapes, strict=True)
        if _ELLIPSIS in term
    }
    if len(more) > 1:  # they broadcast
        return None
    fresh = [chr(code) for code in range(0x3B1, 0x3B1 + max(more, default=0))]
    found = [term.replace(_ELLIPSIS, "".join(fresh)) for term in (*terms, out)]
    return None if any(len({*term}) != len(term) for term in found) else found
