"""Carry-save adders built from logic operations, for numbers in bit slices."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_x86 import CHOOSE, LESS, MAJORITY, SUM, TERNARY
from bnncc.schedules.templates.kernel import Expr, Register


class Logic:
    """Logic operations on vectors of `lanes` words.

    Parameters
    ----------
    lanes : int
        Words per vector.
    ternlog : bool
        Whether the target has AVX-512's instruction for arbitrary functions of three bits.
    """

    def __init__(self, lanes: int, ternlog: bool) -> None:
        self.lanes = lanes
        self._ternlog = ternlog and lanes in (4, 8, 16)

    def _three(self, table: int, a: Expr, b: Expr, c: Expr) -> Expr:
        return TERNARY[table, self.lanes](a, b, c)

    def choose(self, mask: Expr, ones: Expr, zeros: Expr) -> Expr:
        """Return the bits of `ones` where `mask` is set, and of `zeros` elsewhere."""
        if self._ternlog:
            return self._three(CHOOSE, mask, ones, zeros)
        return (mask & ones) | (T.bitwise_not(mask) & zeros)

    def sum(self, a: Expr, b: Expr, c: Expr) -> Expr:
        """Return the low bit of the sum of three bits."""
        if self._ternlog:
            return self._three(SUM, a, b, c)
        return T.bitwise_xor(T.bitwise_xor(a, b), c)

    def carry(self, a: Expr, b: Expr, c: Expr) -> Expr:
        """Return the high bit of the sum of three bits."""
        if self._ternlog:
            return self._three(MAJORITY, a, b, c)
        return self.choose(T.bitwise_xor(a, b), c, a)

    def less(self, a: Expr | None, b: Expr, lower: Expr | None) -> Expr:
        """Return where ``a < b``, for bits a and b.

        `a` defaults to 0. `lower` is the comparison of less significant bits, if there are any.
        """
        if a is None:
            return b if lower is None else b | lower
        if lower is None:
            return b & T.bitwise_not(a)
        if self._ternlog:
            return self._three(LESS, a, b, lower)
        return self.choose(T.bitwise_xor(a, b), b, lower)


class CarrySaveTree:
    """Adds bits of any significance, three of equal significance as soon as they are available.

    Pending bits are kept in registers that are reassigned: TVM substitutes bound expressions into
    each other, so their size would double with every bit.

    Parameters
    ----------
    logic : Logic
        Logic operations to use.
    most : int
        Bits of the sum; higher ones cannot be set.
    """

    def __init__(self, logic: Logic, most: int) -> None:
        self._logic = logic
        self._slots = [[Register("uint32", logic.lanes) for _ in range(3)] for _ in range(most)]
        self._held = [0] * most

    def add(self, weight: int, bit: Expr) -> None:
        """Add ``bit << weight``."""
        if weight >= len(self._slots):
            return
        slots = self._slots[weight]
        slots[self._held[weight]].set(bit)
        self._held[weight] += 1
        if self._held[weight] == 3:
            bits = [slot.value for slot in slots]
            self.add(weight + 1, self._logic.carry(*bits))
            slots[0].set(self._logic.sum(*bits))
            self._held[weight] = 1

    def total(self) -> list[Expr]:
        """Return the bits of the sum, least significant first, as far as they can be set."""
        for weight, slots in enumerate(self._slots):
            if self._held[weight] == 2:
                one, two = slots[0].value, slots[1].value
                self.add(weight + 1, one & two)
                slots[0].set(T.bitwise_xor(one, two))
        return [slots[0].value for slots, held in zip(self._slots, self._held, strict=True) if held]
