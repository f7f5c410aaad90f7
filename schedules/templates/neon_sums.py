"""Counts of differing bits in NEON registers, for four output channels at a time.

A vector of 16 bytes of data meets the same bytes of four channels' weights. ``cnt`` counts the bits
of each byte, and the counts are added in bytes, which hold `MAX_STEPS` of them; then pairs of bytes
are widened and added to sums of 16 bits. At the end the lanes of each register are added, two
registers to one, until the sums of four channels lie side by side.

With the dot product of Armv8.2, counts are added to sums of 32 bits at once.

Bounds: a count is at most 8, so 31 of them are at most 248. Lanes of the 16-bit sums hold no more
than all bits that differ, at most `MAX_PRODUCTS` (`neon_tiling.order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules import intrin_arm
from bnncc.schedules.intrin_portable import popcount
from bnncc.topi_binary.layout import QUAD

Buffer = Any
Expr = Any

BYTES = 16
"""Bytes of a vector."""

MAX_STEPS = 31
"""Counts of at most 8 that a byte can sum."""

MAX_PRODUCTS = 2**16 - 1
"""What a sum of 16 bits can count."""


@dataclass(frozen=True)
class Machine:
    """Which instructions there are.

    Attributes
    ----------
    arch : str, default "aarch64"
        Or ``arm``.
    dot : bool, default False
        Whether to sum with the dot product.
    """

    arch: str = "aarch64"
    dot: bool = False


def widened(machine: Machine, bits: int, value: Expr) -> Expr:
    """Add neighbouring lanes of `bits` bits into lanes twice as wide."""
    return intrin_arm.WIDENING_ADD_PAIRS[machine.arch, bits](value)


def pairs(machine: Machine, bits: int, one: Expr, other: Expr) -> Expr:
    """Add neighbouring lanes: those of `one` make the lower half, those of `other` the upper."""
    return intrin_arm.ADD_PAIRS[machine.arch, bits](one, other)


@dataclass(frozen=True)
class Sums:
    """Registers of `vectors` data vectors x `QUAD` channels.

    `steps` bounds the counts in a byte where they are not widened before the end, and is 0 where
    they are. `halves` says that the two halves of a vector belong to different columns.
    """

    machine: Machine
    vectors: int
    steps: int
    halves: bool
    acc: Buffer
    wide: Buffer

    @staticmethod
    def make(machine: Machine, vectors: int, steps: int = 0, halves: bool = False) -> Sums:
        """Allocate them."""
        count = vectors * QUAD
        acc = T.sblock_alloc_buffer((count * BYTES,), "uint8")
        wide = T.sblock_alloc_buffer((count * 8,), "uint16")
        if machine.dot:
            wide = T.sblock_alloc_buffer((count * 4,), "uint32")
        IRBuilder.name("acc", acc)
        IRBuilder.name("wide", wide)
        return Sums(machine, vectors, steps, halves, acc, wide)

    @property
    def _numbers(self) -> range:
        return range(self.vectors * QUAD)

    def _clear(self, buffer: Buffer, bits: int) -> None:
        lanes = 128 // bits
        zero = T.Broadcast(T.Cast(f"uint{bits}", T.int32(0)), lanes)
        for i in self._numbers:
            T.buffer_store(buffer, zero, [T.Ramp(i * lanes, 1, lanes)])

    def start(self) -> None:
        """Clear the sums."""
        if self.machine.dot:
            self._clear(self.wide, 32)
        elif not self.steps:
            self._clear(self.wide, 16)

    def clear(self) -> None:
        """Clear the bytes."""
        if not self.machine.dot:
            self._clear(self.acc, 8)

    def add(self, vector: int, data: Expr, weights: Sequence[Expr], first: bool = False) -> None:
        """Count the bits in which `data` and each of `weights` differ.

        In an order in which no instruction waits for the one before it. With `first`, what was in
        the registers is overwritten.
        """
        differ = [T.Bind(data ^ weight) for weight in weights]
        counts = [T.Bind(popcount(bits)) for bits in differ]
        for i, count in enumerate(counts):
            number = vector * QUAD + i
            if self.machine.dot:
                here = [T.Ramp(number * 4, 1, 4)]
                ones = T.Broadcast(T.uint8(1), BYTES)
                total = T.Broadcast(T.uint32(0), 4) if first else self.wide[tuple(here)]
                made = intrin_arm.dot(total, count, ones)
                T.buffer_store(self.wide, made, here)
            else:
                here = [T.Ramp(number * BYTES, 1, BYTES)]
                total = count if first else self.acc[tuple(here)] + count
                T.buffer_store(self.acc, total, here)

    def widen(self) -> None:
        """Add the bytes to the sums of 16 bits."""
        if self.machine.dot or self.steps:
            return
        for i in self._numbers:
            here = T.Ramp(i * 8, 1, 8)
            value = widened(self.machine, 8, self.acc[T.Ramp(i * BYTES, 1, BYTES)])
            T.buffer_store(self.wide, self.wide[here] + value, [here])

    def totals(self, vector: int) -> list[Expr]:
        """Return the counts of the channels, uint32x4: of one column or, with `halves`, of two."""
        machine, first = self.machine, vector * QUAD
        numbers = range(first, first + QUAD)
        if machine.dot:
            parts = [self.wide[T.Ramp(i * 4, 1, 4)] for i in numbers]
            low, high = (T.Bind(pairs(machine, 32, *parts[i : i + 2])) for i in (0, 2))
            if not self.halves:
                return [pairs(machine, 32, low, high)]
            return [
                T.Shuffle([low, high], [T.int32(i + side) for i in (0, 2, 4, 6)]) for side in (0, 1)
            ]
        if self.steps:
            sums = [self.acc[T.Ramp(i * BYTES, 1, BYTES)] for i in numbers]
            bits, largest = 8, 8 * self.steps
        else:
            sums = [self.wide[T.Ramp(i * 8, 1, 8)] for i in numbers]
            bits, largest = 16, 0
        return self._sides(_together(machine, sums, bits, largest))

    def _sides(self, sums: Expr) -> list[Expr]:
        """Return sums of 16 bits, two lanes for each channel, as lanes of 32 bits."""
        if not self.halves:
            return [widened(self.machine, 16, sums)]
        both = T.Bind(T.reinterpret("uint32x4", sums))
        low, high = (T.Broadcast(T.uint32(k), 4) for k in (0xFFFF, 16))
        return [both & low, both >> high]


def _together(machine: Machine, sums: Sequence[Expr], bits: int, largest: int) -> Expr:
    """Add lanes until those of all `sums` are one vector of 16-bit lanes, two for each of them."""
    sums = list(sums)
    while len(sums) > 1:
        if bits == 8 and 2 * largest > 255:
            sums, bits = [widened(machine, 8, value) for value in sums], 16
        sums = [pairs(machine, bits, *sums[i : i + 2]) for i in range(0, len(sums), 2)]
        largest *= 2
    return widened(machine, 8, sums[0]) if bits == 8 else sums[0]


def total_of(machine: Machine, counts: Sequence[Expr]) -> Expr:
    """Return the sums of the lanes of four vectors of 16-bit lanes, uint32x4."""
    return widened(machine, 16, _together(machine, counts, 16, 0))
