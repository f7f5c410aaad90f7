"""Offsets of tensors in one block of memory that they share over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bnncc.codegen.c_text import ALIGNMENT


@dataclass(frozen=True)
class Span:
    """Memory that is in use from call `first` to call `last`."""

    size: int
    first: int
    last: int


def aligned(size: int) -> int:
    """Round `size` up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def live(spans: Sequence[Span], calls: int) -> list[int]:
    """Return the bytes in use during each call."""
    change = [0] * (calls + 1)
    for span in spans:
        if span.first < calls:
            change[span.first] += aligned(span.size)
            change[min(span.last + 1, calls)] -= aligned(span.size)
    total, found = 0, []
    for one in change[:-1]:
        total += one
        found.append(total)
    return found


def offsets(spans: Sequence[Span]) -> tuple[list[int], int]:
    """Place spans such that those in use at the same time do not overlap.

    Each goes to the lowest free place; of several orders, the one with the smallest total is taken.

    Returns
    -------
    offsets : list of int
        In bytes, multiples of `ALIGNMENT`.
    total : int
        Size of the memory in bytes.
    """
    orders: list[Callable[[Span], tuple[int, ...]]] = [
        lambda span: (-span.size, span.first),
        lambda span: (-span.size * (span.last - span.first + 1), span.first),
        lambda span: (span.first, -span.size),
    ]
    return min((_placed(spans, order) for order in orders), key=lambda found: found[1])


def _placed(
    spans: Sequence[Span], order: Callable[[Span], tuple[int, ...]]
) -> tuple[list[int], int]:
    found, total = [0] * len(spans), 0
    there: list[tuple[int, Span]] = []
    for number in sorted(range(len(spans)), key=lambda number: order(spans[number])):
        span, start = spans[number], 0
        together = [o for o in there if o[1].first <= span.last and span.first <= o[1].last]
        for offset, other in sorted(together, key=lambda one: one[0]):
            if start + aligned(span.size) <= offset:
                break
            start = max(start, offset + aligned(other.size))
        there.append((start, span))
        found[number], total = start, max(total, start + aligned(span.size))
    return found, total
