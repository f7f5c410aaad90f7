"""How a selection of bits is cut into runs, and the table for selections that are too irregular."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bnncc.topi_binary import layout
from bnncc.topi_binary.spec import SliceBits

MAX_RUNS = 256
"""More runs than this are read from a table at run time, so that code stays compact."""


class Run(NamedTuple):
    """Consecutive channels of one input word that go to consecutive bits of one output word."""

    word: int
    """Input word."""
    low: int
    """First input bit."""
    to: int
    """First output bit."""
    size: int


def runs(index: tuple[int, ...]) -> list[list[Run]]:
    """Cut `index` into runs.

    Parameters
    ----------
    index : tuple of int
        Input channel of each output channel; -1 for a bit left 0.

    Returns
    -------
    list of list of Run
        For each output word, its runs in the order of output bits.

    Examples
    --------
    >>> runs((30, 31, 32, -1, 5))
    [[Run(word=0, low=30, to=0, size=2), Run(word=1, low=0, to=2, size=1),
      Run(word=0, low=5, to=4, size=1)]]
    """
    bits = layout.WORD_BITS
    out: list[list[Run]] = [[] for _ in range(layout.words(len(index)))]
    for position, channel in enumerate(index):
        here, to = out[position // bits], position % bits
        if channel < 0:
            continue
        word, low = divmod(channel, bits)
        last = here[-1] if here else None
        if last and (word, low, to) == (last.word, last.low + last.size, last.to + last.size):
            here[-1] = last._replace(size=last.size + 1)
        else:
            here.append(Run(word, low, to, 1))
    return out


def needs_table(spec: SliceBits) -> bool:
    """Return whether the kernel of `spec` takes `slice_table` as its second input."""
    return sum(len(word) for word in runs(spec.index)) > MAX_RUNS


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
