"""Place of one output vector, the argument of every epilogue."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout
from bnncc.topi_binary.layout import LANES

Expr = Any


@dataclass(frozen=True)
class Place:
    """Place of one output vector.

    Attributes
    ----------
    n, h, w : Expr
        Image, row and column (`h` and `w` are not used if `rank` is 2).
    block : Expr
        Index of the block of `LANES` channels.
    channels : int
        Channels of the whole output.
    lanes : int
        Channels in this block: `LANES`, or fewer in the last block.
    rank : int, default 4
        2 for outputs ``[n, channels]``.
    """

    n: Expr
    h: Expr
    w: Expr
    block: Expr
    channels: int
    lanes: int = LANES
    rank: int = 4

    def index(self, channel: Expr, where: str = "NHWC") -> list[Expr]:
        """Return the index of `channel` (a scalar or a range) in a tensor of layout `where`."""
        if self.rank == 2:
            return [self.n, channel]
        if where == "NCHW":
            return [self.n, channel, self.h, self.w]
        return [self.n, self.h, self.w, channel]

    def channel(self, lane: Expr = 0) -> Expr:
        """Return the channel of `lane`, or a range of channels if `lane` is a range."""
        if isinstance(lane, tirx.Ramp):
            return self.vector
        return self.block * LANES + lane

    def neighbours(self, where: str) -> bool:
        """Return whether channels are contiguous in a tensor of layout `where`."""
        return self.rank == 2 or where == "NHWC"

    def of(self, image: Expr, lane: Expr) -> Expr:
        """Return the element of an NHWC tensor at this place and `lane`."""
        return image[self.n, self.h, self.w, self.channel(lane)]

    @property
    def vector(self) -> Expr:
        """The channels of the block, as the index of one vector access."""
        return T.Ramp(self.block * LANES, 1, LANES)

    @property
    def span(self) -> slice:
        """The existing channels of the block, as a region."""
        return slice(self.channel(), self.channel(self.lanes))

    @property
    def padded_span(self) -> slice:
        """The channels of the block, as a region of a vector padded by `layout.pad_lanes`."""
        return slice(self.channel(), self.channel(LANES))

    def repeated(self, period: int) -> Place:
        """Return the place of the vector in a tensor whose channels repeat every `period`."""
        if not period:
            return self
        if period == 1:
            return replace(self, block=0, channels=1, lanes=1)
        return replace(self, block=self.block % (period // LANES), channels=period)

    @property
    def ends_word(self) -> bool:
        """Whether, if this is the last block, an empty half word follows it."""
        alone = (layout.blocks(self.channels) - 1) % 2 == 0
        return alone and (self.lanes < LANES or self.channels % LANES == 0)

    def halves(self) -> slice:
        """Return the region of half words that hold the block's bits."""
        alone = self.ends_word and self.lanes < LANES
        return slice(self.block, self.block + (2 if alone else 1))
