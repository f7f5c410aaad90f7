"""Kernels of binary convolutions that templates write: which taps are inside the image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.templates.epilogue import Expr
from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions.blocks import under as under
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.spec import BinaryConv2d, Dim

Buffer = Any


@dataclass(frozen=True)
class Piece:
    """A range of columns: the first, and how many."""

    column: int
    columns: int


@dataclass(frozen=True)
class Kernel:
    """The buffers of the function being written, and the extents of its loops over pixels."""

    spec: BinaryConv2d
    n: Dim | tirx.Var
    height: int
    width: int
    data: Buffer
    zero: Buffer | None
    weight: Buffer
    params: list[Buffer]
    outputs: list[Buffer]

    @property
    def group_channels(self) -> int:
        """Input channels of one group."""
        return self.spec.channels // self.spec.groups

    @property
    def group_words(self) -> int:
        """Words of one group and pixel."""
        return layout.words(self.group_channels)

    @property
    def reduction(self) -> tuple[int, int, int]:
        """Extents of the loops over taps: kernel row, kernel column, word."""
        return (*self.spec.kernel, self.group_words)

    @property
    def pads_zeros(self) -> bool:
        """Whether taps outside the image count as zeros, not as values."""
        return self.spec.mode == "xor" and self.spec.pad_value == 0

    @property
    def rows_are_columns(self) -> bool:
        """Whether the columns of the loops are the rows of a dense layer."""
        return self.spec.rank == 2 and isinstance(self.spec.n, int)

    def place(self, n: Expr, h: Expr, w: Expr, block: Expr, lanes: int) -> Place:
        """Return where the results of `lanes` channels from block `block` on of a pixel lie."""
        return Place(
            n=w if self.rows_are_columns else n,
            h=h,
            w=w,
            block=block,
            channels=self.spec.out_channels,
            lanes=lanes,
            rank=self.spec.rank,
        )

    def position(self, axis: int, place: Expr, tap: Expr) -> Expr:
        """Return the input row (`axis` 0) or column (1) of a tap of output `place`."""
        spec = self.spec
        return place * spec.strides[axis] + tap * spec.dilations[axis] - spec.pads[axis]

    def leaves(self, axis: int, piece: Piece) -> tuple[bool, bool]:
        """Return whether taps of `piece` lie before the image, and whether they lie after it."""
        spec = self.spec
        if spec.rank == 2:
            return False, False
        first, last = 0, self.height - 1
        if axis == 1:
            first, last = piece.column, piece.column + piece.columns - 1
        after = self.position(axis, last, spec.kernel[axis] - 1) >= (spec.height, spec.width)[axis]
        return self.position(axis, first, 0) < 0, after

    def inside(self, axis: int, place: Expr, tap: Expr, piece: Piece) -> Expr | None:
        """Return the test that a tap is inside the image; None if it always is, in this piece."""
        spec = self.spec
        position = self.position(axis, place, tap)
        before, after = self.leaves(axis, piece)
        tests = [position >= 0] if before else []
        if after:
            tests.append(position < (spec.height, spec.width)[axis])
        return T.And(*tests) if len(tests) == 2 else tests[0] if tests else None

    def missing(self, h: Expr, w: Expr, piece: Piece) -> Expr:
        """Return how many taps of an output pixel lie outside the image, if those are skipped."""
        taps = self.spec.kernel[0] * self.spec.kernel[1]
        if not self.pads_zeros:
            return T.int32(0)
        counts: list[Expr] = []
        for axis, place in enumerate((h, w)):
            tests = [self.inside(axis, place, k, piece) for k in range(self.spec.kernel[axis])]
            if all(test is None for test in tests):
                counts.append(T.int32(self.spec.kernel[axis]))
                continue
            counts.append(sum((T.Cast("int32", test) for test in tests), T.int32(0)))
        return taps - counts[0] * counts[1]

    def share(self, h: Expr, w: Expr, piece: Piece, masked: bool = False) -> Expr:
        """Return what taps outside the image count at the start of the accumulator.

        `masked` accumulators are `BinaryConv2d.doubled`.
        """
        if masked:
            return self.missing(h, w, piece) * self.group_channels
        if self.group_channels % 2:
            return T.int32(0)  # added when it is read, with all of them doubled
        return self.missing(h, w, piece) * (self.group_channels // 2)

    def first_word(self, channel: Expr) -> Expr:
        """Return the first word of a pixel in the group that an output channel reads."""
        spec = self.spec
        if spec.groups == 1:
            return 0
        return channel // (spec.out_channels // spec.groups) * self.group_words

    def pad_word(self, c: Expr) -> Expr:
        """Return word `c` of a group of a pixel outside the image."""
        channels = self.group_channels
        if self.spec.pad_value != 1:
            return T.uint32(0)
        ones = T.uint32(2**layout.WORD_BITS - 1)
        if channels % layout.WORD_BITS == 0:
            return ones
        tail = T.uint32((1 << channels % layout.WORD_BITS) - 1)
        return T.Select(c == self.group_words - 1, tail, ones)
