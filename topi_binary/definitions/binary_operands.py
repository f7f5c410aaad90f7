"""Operands of a binary convolution: words of data under a tap, and the words of its weights."""

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
    """Words of data and of weights, and their zero planes if either may hold exact zeros.

    `width` is the number of lanes that hold output channels.
    """

    spec: BinaryConv2d
    data: Buffer
    zero: Buffer | None
    weight: Buffer
    weight_zero: Buffer | None
    width: int = LANES

    @property
    def sliced(self) -> bool:
        """Whether channels are single bits (weights stored in bit slices) rather than words."""
        return self.spec.weight_order == sliced_data.ORDER

    @property
    def depth(self) -> int:
        """Channels per group."""
        return self.spec.channels // self.spec.groups

    @property
    def words(self) -> int:
        """Words (or bits, if `sliced`) per group."""
        return self.depth if self.sliced else layout.words(self.depth)

    def channel(self, o: Expr, lane: Expr) -> Expr:
        """Return the output channel of a lane, or the last channel for lanes beyond it."""
        channel, last = o * LANES + lane, int64(self.spec.out_channels - 1)
        return T.min(channel, last) if self.spec.out_channels % LANES else channel

    def index(self, *i: Expr) -> Sequence[Expr]:
        """Return the index of the data word under a tap, in the group that the channel reads."""
        n, h, w, o, kh, kw, c, lane = i
        spec, group = self.spec, int64(0)
        if spec.groups > 1:
            per_out = spec.out_channels // spec.groups
            group = (self.channel(o, lane) if per_out % LANES else o * LANES) // per_out
        return pixel(spec, n, *place(spec, h, w, kh, kw), group * self.words + c)

    def word(self, plane: Buffer, *i: Expr) -> Expr:
        """Return the data word under a tap."""
        where = self.index(*i)
        if self.sliced:
            return T.Cast("uint32", bit_of(plane, where[:-1], where[-1]))
        return plane[tuple(where)]

    def weigh(self, plane: Buffer, *i: Expr) -> Expr:
        """Return the weight word of a tap."""
        spec, (n, _, _, o, kh, kw, c, lane) = self.spec, i
        number = (kh * spec.kernel[1] + kw) * self.words + c
        if spec.per_image:
            return plane[n, (o * self.words + c) * LANES + lane]
        if spec.weight_order == "words":  # the last vector holds only the existing channels
            run = spec.window_size * self.words
            return plane[o * (LANES * run) + number * self.width + lane]
        channel = self.channel(o, lane)
        if not self.sliced:
            return binary_word(spec, plane, channel, kh, kw, c)
        turn = (c - channel % self.depth + self.depth) % self.depth
        row = (number - c + turn) * layout.words(spec.channels)
        return T.Cast("uint32", bit_of(plane, (), row * WORD_BITS + channel))

    def rows(self, first: int, count: int) -> Buffer:
        """View weights as [image, channel vector, kernel row, kernel column, word, lane].

        There is one image, unless each has weights of its own. Lanes without a channel read into
        the following word; their sums are not used.
        """
        images, lanes = 1, self.width
        if self.spec.per_image:  # the last vector is padded
            images, lanes = self.weight.shape[0], LANES
        (high, wide), words = self.spec.kernel, self.words
        run = high * wide * words
        return T.decl_buffer(
            (images, count, high, wide, words, LANES), "uint32", data=self.weight.data,
            strides=[
                self.weight.shape[-1], run * LANES, wide * words * lanes, words * lanes, lanes, 1,
            ],
            elem_offset=first * run * LANES,
        )  # fmt: skip

    def count(self, *i: Expr) -> Expr:
        """Return the popcount of the XOR, without the positions where an operand is zero."""
        differ = T.bitwise_xor(self.word(self.data, *i), self.weigh(self.weight, *i))
        if self.spec.mode == "xor" and (self.zero is not None or self.weight_zero is not None):
            differ = T.bitwise_and(differ, T.bitwise_not(self._zero(*i)))
        return ones(differ)

    def zeros(self, *i: Expr) -> Expr:
        """Count positions where an operand is zero; in mode ``and``, only those with data bit 1."""
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
    """Writes the blocks that sum bits, in one form of `binary_conv2d`.

    Parameters
    ----------
    met : Operands
        Data and weights.
    n : Expr
        Batch size.
    form : str
        The form of the definition.
    """

    count_columns_outside = False
    """Whether the sums include columns outside the image."""

    def __init__(self, met: Operands, n: Expr, form: str) -> None:
        self.spec, self._met, self._n, self._form = met.spec, met, n, form

    @abstractmethod
    def weight_bits(self) -> Buffer:
        """Write the popcount of each tap's weights, by kernel row, kernel column and channel."""

    @abstractmethod
    def summed(self) -> Callable[..., Expr]:
        """Write the sums; return a reader that takes a pixel, a channel vector and a lane."""


def operands(operator: Operator, spec: BinaryConv2d) -> tuple[Operands, list[Buffer]]:
    """Return the operands, and the remaining inputs."""
    data, *params = operator.inputs
    zero = params.pop(0) if spec.ternary else None
    weight = params.pop(0)
    weight_zero = params.pop(0) if spec.weight_zeros else None
    return Operands(spec, data, zero, weight, weight_zero), params


def ones(word: Expr) -> Expr:
    """Return the popcount of a word."""
    return T.Cast("int32", T.popcount(word))


def vectors(met: Operands) -> list[tuple[str, int, int, Operands]]:
    """Return ranges of channel vectors: block name suffix, first vector, count, operands."""
    full, rest = divmod(met.spec.out_channels, LANES)
    ranges = ("", 0, full, met), ("_last", full, int(rest > 0), replace(met, width=rest))
    return [one for one in ranges if one[2]]
