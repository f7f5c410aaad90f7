"""What meets in a binary convolution: words of data under a tap, and words of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout, sliced_data
from bnncc.topi_binary.definitions.blocks import Buffer, Expr, bit_of, int64
from bnncc.topi_binary.definitions.taps import pixel, place
from bnncc.topi_binary.definitions.weights import binary_word
from bnncc.topi_binary.layout import LANES, WORD_BITS
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import BinaryConv2d


@dataclass(frozen=True)
class Operands:
    """Words of data that meet words of weights, and what is zero in them.

    `width` is how many lanes exist.
    """

    spec: BinaryConv2d
    data: Buffer
    zero: Buffer | None
    weight: Buffer
    weight_zero: Buffer | None
    width: int = LANES

    @property
    def sliced(self) -> bool:
        """Whether a word is one bit."""
        return self.spec.weight_order == sliced_data.ORDER

    @property
    def depth(self) -> int:
        """Channels of a group."""
        return self.spec.channels // self.spec.groups

    @property
    def words(self) -> int:
        """Words of a group."""
        return self.depth if self.sliced else layout.words(self.depth)

    def channel(self, o: Expr, lane: Expr) -> Expr:
        """Return the output channel in a lane; the last one, where there is none."""
        channel, last = o * LANES + lane, int64(self.spec.out_channels - 1)
        return T.min(channel, last) if self.spec.out_channels % LANES else channel

    def index(self, *i: Expr) -> Sequence[Expr]:
        """Return where the word under a tap is, of the group that a channel reads."""
        n, h, w, o, kh, kw, c, lane = i
        spec, group = self.spec, int64(0)
        if spec.groups > 1:
            per_out = spec.out_channels // spec.groups
            group = (self.channel(o, lane) if per_out % LANES else o * LANES) // per_out
        return pixel(spec, n, *place(spec, h, w, kh, kw), group * self.words + c)

    def word(self, plane: Buffer, *i: Expr) -> Expr:
        """Return that word."""
        where = self.index(*i)
        if self.sliced:
            return T.Cast("uint32", bit_of(plane, where[:-1], where[-1]))
        return plane[tuple(where)]

    def weigh(self, plane: Buffer, *i: Expr) -> Expr:
        """Return the word of weights that meets it."""
        spec, (n, _, _, o, kh, kw, c, lane) = self.spec, i
        number = (kh * spec.kernel[1] + kw) * self.words + c
        if spec.per_image:
            return plane[n, (o * self.words + c) * LANES + lane]
        if spec.weight_order == "words":  # the last vector has just the lanes that exist
            run = spec.kernel[0] * spec.kernel[1] * self.words
            return plane[o * (LANES * run) + number * self.width + lane]
        channel = self.channel(o, lane)
        if not self.sliced:
            return binary_word(spec, plane, channel, kh, kw, c)
        turn = (c - channel % self.depth + self.depth) % self.depth
        row = (number - c + turn) * layout.words(spec.channels)
        return T.Cast("uint32", bit_of(plane, (), row * WORD_BITS + channel))

    def count(self, *i: Expr) -> Expr:
        """Return how many bits differ where nothing is zero."""
        differ = T.bitwise_xor(self.word(self.data, *i), self.weigh(self.weight, *i))
        if self.spec.mode == "xor" and (self.zero is not None or self.weight_zero is not None):
            differ = T.bitwise_and(differ, T.bitwise_not(self._zero(*i)))
        return ones(differ)

    def zeros(self, *i: Expr) -> Expr:
        """Return how many bits meet a zero; in mode ``and``, those that are 1."""
        zero = self._zero(*i)
        if self.spec.mode == "and":
            zero = T.bitwise_and(self.word(self.data, *i), zero)
        return ones(zero)

    def _zero(self, *i: Expr) -> Expr:
        planes = [self.word(self.zero, *i)] if self.zero is not None else []
        if self.weight_zero is not None:
            planes.append(self.weigh(self.weight_zero, *i))
        return reduce(T.bitwise_or, planes)


class Sums(ABC):
    """Writes the blocks of sums in a form of `binary_conv2d`.

    Parameters
    ----------
    met : Operands
        What meets.
    n : Expr
        Images.
    form : str
        Which form.
    """

    count_columns_outside = False
    """Whether sums count columns outside the image."""

    def __init__(self, met: Operands, n: Expr, form: str) -> None:
        self.spec, self._met, self._n, self._form = met.spec, met, n, form

    @abstractmethod
    def weight_bits(self) -> Buffer:
        """Write how many bits of the weights of a tap are 1: kernel row, column, channel."""

    @abstractmethod
    def summed(self) -> Callable[..., Expr]:
        """Write the sums; return them: of a pixel, a vector of channels and a lane."""


def operands(operator: Operator, spec: BinaryConv2d) -> tuple[Operands, list[Buffer]]:
    """Return the operands, and the inputs behind them."""
    data, *params = operator.inputs
    zero = params.pop(0) if spec.ternary else None
    weight = params.pop(0)
    weight_zero = params.pop(0) if spec.weight_zeros else None
    return Operands(spec, data, zero, weight, weight_zero), params


def ones(word: Expr) -> Expr:
    """Return how many bits of a word are 1."""
    return T.Cast("int32", T.popcount(word))


def vectors(met: Operands) -> list[tuple[str, int, int, Operands]]:
    """Return ranges of vectors of channels: how their blocks' names end, the first, how many."""
    full, rest = divmod(met.spec.out_channels, LANES)
    ranges = ("", 0, full, met), ("_last", full, int(rest > 0), replace(met, width=rest))
    return [one for one in ranges if one[2]]
