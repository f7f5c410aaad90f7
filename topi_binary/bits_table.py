"""Decomposition of a selection of bits into masked shifts, and a table for irregular selections."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bnncc.topi_binary import layout
from bnncc.topi_binary.spec import SliceBits

MAX_TERMS = 256
"""Selections with more terms are read from a table at run time, which keeps the code small."""


class Term(NamedTuple):
    """Bits of an input word that move by the same distance to an output word."""

    word: int
    """Input word."""
    shift: int
    """Distance in bits, to the left if positive."""
    mask: int
    """Mask of the input word."""


def terms(index: tuple[int, ...]) -> list[list[Term]]:
    """Decompose `index` into shifts of masked words.

    Parameters
    ----------
    index : tuple of int
        Input channel of each output channel; -1 for a bit left 0.

    Returns
    -------
    list of list of Term
        For each output word, the terms whose OR it is.

    Examples
    --------
    >>> terms((30, 31, 32, -1, 5))
    [[Term(word=0, shift=-30, mask=3221225472), Term(word=1, shift=2, mask=1),
      Term(word=0, shift=-1, mask=32)]]
    """
    bits = layout.WORD_BITS
    masks: list[dict[tuple[int, int], int]] = [{} for _ in range(layout.words(len(index)))]
    for position, channel in enumerate(index):
        if channel >= 0:
            word, low = divmod(channel, bits)
            here, key = masks[position // bits], (word, position % bits - low)
            here[key] = here.get(key, 0) | 1 << low
    return [[Term(*key, mask) for key, mask in here.items()] for here in masks]


def needs_table(spec: SliceBits) -> bool:
    """Return whether the kernel of `spec` takes `slice_table` as its second input."""
    return sum(len(word) for word in terms(spec.index)) > MAX_TERMS


def slice_table(spec: SliceBits) -> np.ndarray:
    """Return the second kernel input of a `spec` that `needs_table`.

    Returns
    -------
    ndarray of int32, shape (words(len(index)) * WORD_BITS,)
        Input channel of each output bit, -1 for 0 bits.
    """
    size = layout.words(len(spec.index)) * layout.WORD_BITS
    table = np.full(size, -1, np.int32)
    table[: len(spec.index)] = spec.index
    return table
