"""Sums of table lookups in bytes, for one register tile.

Bounds: a lookup is at most 4, so a byte takes 63 of them (`MAX_LOOKUPS`: 63 * 4 = 252). Then bytes
are added to two sums of 16 bits for each pair: the pair as it is, ``even + 256 * odd``, modulo
2**16, and the odd one alone. So the sum of evens is ``pairs - 256 * odds`` modulo 2**16, exact
because `lookup.fits` admits no more than 2**16 - 1 products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules import intrin_x86
from bnncc.schedules.intrin_portable import I32
from bnncc.topi_binary.layout import LANES

Buffer = Any
Expr = Any

MAX_LOOKUPS = 63
"""Lookups of at most 4 that a byte can sum."""

MAX_PRODUCTS = 2**16 - 1
"""What a sum of 16 bits can count."""


@dataclass(frozen=True)
class Sums:
    """Registers and sums of `columns` x `vectors` accumulators."""

    size: int
    columns: int
    vectors: int
    acc: Buffer
    pairs: Buffer
    odds: Buffer

    @staticmethod
    def make(size: int, columns: int, vectors: int) -> Sums:
        """Allocate them; `size` is the bytes of a vector."""
        count = columns * vectors * size
        acc = T.sblock_alloc_buffer((count,), "uint8")
        sums = [T.sblock_alloc_buffer((count // 2,), "uint16") for _ in range(2)]
        for name, buffer in zip(("acc", "pairs", "odds"), (acc, *sums), strict=True):
            IRBuilder.name(name, buffer)
        return Sums(size, columns, vectors, acc, *sums)

    def _numbers(self) -> range:
        return range(self.columns * self.vectors)

    def start(self) -> None:
        """Clear the sums."""
        half = self.size // 2
        for buffer in (self.pairs, self.odds):
            for i in self._numbers():
                zero = T.Broadcast(T.uint16(0), half)
                T.buffer_store(buffer, zero, [T.Ramp(i * half, 1, half)])

    def clear(self) -> None:
        """Clear the bytes."""
        for i in self._numbers():
            zero = T.Broadcast(T.uint8(0), self.size)
            T.buffer_store(self.acc, zero, [T.Ramp(i * self.size, 1, self.size)])

    def add(self, column: int, vector: int, row: Expr, weight: Expr) -> None:
        """Look up `weight` in `row` and add to one vector of bytes."""
        here = [T.Ramp((column * self.vectors + vector) * self.size, 1, self.size)]
        found = intrin_x86.LOOKUP[self.size](row, weight)
        T.buffer_store(self.acc, self.acc[tuple(here)] + found, here)

    def widen(self) -> None:
        """Add the bytes to the sums."""
        half = self.size // 2
        for i in self._numbers():
            here = T.Ramp(i * half, 1, half)
            bytes_ = self.acc[T.Ramp(i * self.size, 1, self.size)]
            value = T.Bind(T.reinterpret(f"uint16x{half}", bytes_))
            T.buffer_store(self.pairs, self.pairs[here] + value, [here])
            odd = value >> T.Broadcast(T.uint16(8), half)
            T.buffer_store(self.odds, self.odds[here] + odd, [here])

    def total(self, column: int, block: int) -> Expr:
        """Return the counts of one block of `LANES` channels.

        `NIBBLE_LANES` bytes hold two blocks, one in the even bytes, the other in the odd ones.
        """
        first = column * self.vectors * self.size // 2 + block // 2 * LANES
        here = T.Ramp(first, 1, LANES)
        count = self.odds[here]
        if block % 2 == 0:
            count = self.pairs[here] - (count << T.Broadcast(T.uint16(8), LANES))
        return T.Cast(I32, count)
