"""Codes of weights that multiply real-valued data: 1, 2, 4 or 8 bits instead of a float32.

A code of one bit selects one of two values. Others are signed integers, in two's complement, that
stand for ``code * scale``, or ``(code - zero) * scale``, computed in float32. These numbers belong
to an output channel, or to a block of consecutive weights of one. Kernels multiply data by the
values, so sums are those of a layer with float weights.

This module does not import TVM: passes pack weights with it, and kernels read the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bnncc.topi_binary.kind import Type
from bnncc.topi_binary.layout import LANES, WORD_BITS, blocks, pad_lanes
from bnncc.topi_binary.spec import Conv2d

BITS = (1, 2, 4, 8)
"""Possible bits per code."""


def words(spec: Conv2d) -> int:
    """Return the number of words of codes per output channel."""
    return -(-spec.taps * spec.code_bits // WORD_BITS)


def numbers_of(spec: Conv2d) -> int:
    """Return how many numbers codes of a block have: two values, a scale, or zero and scale."""
    return 2 if spec.code_bits == 1 or spec.code_zeros else 1


def constants(spec: Conv2d) -> list[Type]:
    """Return shape and dtype of codes and of numbers."""
    lanes = blocks(spec.out_channels) * LANES
    count = numbers_of(spec) * (spec.taps // spec.code_block)
    return [((lanes * words(spec),), "uint32"), ((lanes * count,), "float32")]


@dataclass(frozen=True)
class Codes:
    """Weights as codes."""

    codes: np.ndarray
    """int16, shape (out_channels, K): 0 or 1, or signed integers of `bits` bits."""
    numbers: np.ndarray
    """float32, shape (out_channels, blocks, 1 or 2): the values of the codes 0 and 1, a scale, or
    zero and scale."""
    bits: int
    """Bits per code."""

    @property
    def block(self) -> int:
        """Consecutive weights whose codes have the same numbers."""
        return self.codes.shape[1] // self.numbers.shape[1]

    @property
    def zeros(self) -> bool:
        """Whether codes of several bits have a zero point."""
        return self.bits > 1 and self.numbers.shape[2] == 2

    @property
    def values(self) -> np.ndarray:
        """The weights, float32, of the shape of `codes`.

        Examples
        --------
        >>> Codes(np.array([[-1, 0, 1]]), np.array([[[0.5]]], np.float32), 2).values.tolist()
        [[-0.5, 0.0, 0.5]]
        """
        cut = self.codes.reshape(*self.numbers.shape[:2], self.block)
        first, last = self.numbers[..., :1], self.numbers[..., -1:]
        if self.bits == 1:
            made = np.where(cut, last, first)
        else:
            whole = cut.astype(np.float32)
            made = (whole - first if self.zeros else whole) * last
        return made.reshape(self.codes.shape)

    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        """Pack codes and numbers in the order in which kernels read them.

        Returns
        -------
        ndarray of uint32, one-dimensional
            Blocks of `LANES` output channels, the last one padded with zeros, in the order (word,
            lane). Codes of a word are in its bits from the lowest up.
        ndarray of float32, one-dimensional
            The same blocks, in the order (block of weights, number, lane).
        """
        rows, count = len(self.codes), WORD_BITS // self.bits
        filled = np.zeros((rows, -(-self.codes.shape[1] // count), count), np.uint32)
        unsigned = self.codes & ((1 << self.bits) - 1)
        filled.reshape(rows, -1)[:, : self.codes.shape[1]] = unsigned
        moved = filled << (np.arange(count, dtype=np.uint32) * self.bits)
        return _lanes(np.bitwise_or.reduce(moved, axis=2)), _lanes(self.numbers.reshape(rows, -1))


def _lanes(rows: np.ndarray) -> np.ndarray:
    cut = pad_lanes(rows).reshape(-1, LANES, rows.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(cut).reshape(-1)
