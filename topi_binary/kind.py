"""What every kind of kernel says of itself: one class a kind is the registry of operators.

The classes are those of `spec`. Where a kind differs from the others is written in its class, so
that nobody else asks what kind a spec is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bnncc.topi_binary import layout
from bnncc.topi_binary.step import Step

Dim = int | str
"""An extent, or the name of a symbolic one."""

Type = tuple[tuple[Dim, ...], str]
"""Shape and dtype of a kernel's tensor. The batch may be the name of a symbol."""


class Kind:
    """Base of all specs; what is said here holds for a kernel that moves one plane of bits.

    Attributes
    ----------
    operators : tuple of str
        Names of the Relax operators; `operator` says which.
    definition, oracle : str
        ``file:function`` in `definitions` and in `reference`.
    exact : bool
        Whether it adds integers, so that the order of a sum makes no difference.
    epilogue : bool
        Whether its results are those of `steps`.
    n : int or str
        Images; a symbol's name where the batch is open.
    height, width, channels : int
        Of the image that is read; `channels` is a tuple where tensors are joined.
    rank, data_layout, groups, steps, ternary, weight_zeros, weight_order
        What stands for these fields in kinds that lack them.
    """

    operators: ClassVar[tuple[str, ...]]
    definition: ClassVar[str]
    oracle: ClassVar[str]
    exact: ClassVar[bool] = False
    epilogue: ClassVar[bool] = False

    n: Dim
    height: int
    width: int
    channels: int | tuple[int, ...]
    rank: int = 4
    data_layout: str = "NHWC"
    groups: int = 1
    steps: tuple[Step, ...] = ()
    ternary: bool = False
    weight_zeros: bool = False
    weight_order: str = "words"

    @property
    def operator(self) -> str:
        """The name of the Relax operator."""
        return self.operators[0]

    @property
    def description(self) -> str:
        """What it is, for people."""
        text = f"{type(self).__name__} {'+'.join(map(str, self.parts))}"
        if self.rank == 4:
            return f"{text},{self.height}x{self.width}"
        return text + (f" x{self.n}" if self.n != 1 else "")

    @property
    def images(self) -> int:
        """The batch; one if it is open."""
        return self.n if isinstance(self.n, int) else 1

    @property
    def macs(self) -> int:
        """Products it computes; a symbolic batch counts as 1."""
        return 0

    @property
    def parts(self) -> tuple[int, ...]:
        """Channels of what is joined; one number if that is one tensor, or planes of one."""
        return (self.channels,) if isinstance(self.channels, int) else self.channels

    @property
    def read_channels(self) -> int:
        """Channels of all data."""
        return sum(self.parts)

    @property
    def output_channels(self) -> int:
        """Channels of its outputs."""
        return self.read_channels

    @property
    def output_hw(self) -> tuple[int, int]:
        """Height and width of its outputs."""
        return self.height, self.width

    @property
    def output_rank(self) -> int:
        """4, or 2 where outputs are ``[n, channels]``."""
        return self.rank

    @property
    def data_types(self) -> list[Type]:
        """Shape and dtype of the data, the first inputs of the kernel."""
        return [self.image(layout.words(self.read_channels), "uint32")]

    @property
    def data_tensors(self) -> int:
        """How many tensors the data are."""
        return len(self.data_types)

    @property
    def plane_types(self) -> list[Type]:
        """Shape and dtype of the outputs, where they are not those of `steps`."""
        return [self.made(layout.words(self.output_channels), "uint32")]

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """`steps`, and those inside of the anchor before them."""
        return self.steps

    def image(self, last: int, dtype: str) -> Type:
        """Return the type of data with so many words, or numbers, in a pixel."""
        where = "NHWC" if dtype == "uint32" else self.data_layout
        return shape(self.n, self.height, self.width, last, self.rank, where), dtype

    def made(self, last: int, dtype: str, where: str = "NHWC") -> Type:
        """Return the type of an output with so many words, or numbers, in a pixel."""
        return shape(self.n, *self.output_hw, last, self.output_rank, where), dtype


def shape(
    n: Dim, height: int, width: int, last: int, rank: int, where: str = "NHWC"
) -> tuple[Dim, ...]:
    """Return the shape of an image, or of rows if `rank` is 2."""
    if rank == 2:
        return (n, last)
    return (n, last, height, width) if where == "NCHW" else (n, height, width, last)


@dataclass(frozen=True)
class OfImage(Kind):
    """A kind that reads one image, or rows: its first fields."""

    n: Dim
    height: int
    width: int
    channels: int


class Windowed(OfImage):
    """A kind in which a window slides over the image.

    Attributes
    ----------
    kernel, strides, dilations : tuple of int
        Of the window, in rows and columns.
    pads : tuple of int
        Of the image: top, left, bottom, right.
    ceil_extra : tuple of int
        How far the last windows reach over the padded image.
    """

    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int, int, int]
    ceil_extra: tuple[int, int] = (0, 0)

    @property
    def description(self) -> str:
        """What it is, for people."""
        text = super().description + (f" -> {self.output_channels}" if self.macs else "")
        if self.rank == 4:
            text += f" {self.kernel[0]}x{self.kernel[1]}"
            text += f" s{self.strides[0]}" if self.strides[0] > 1 else ""
        return text

    @property
    def window_hw(self) -> tuple[int, int]:
        """How many places the window has."""
        height, width = (
            output_size(
                size, self.kernel[i], self.strides[i], self.dilations[i],
                self.pads[i] + self.pads[i + 2], self.ceil_extra[i],
            )
            for i, size in enumerate((self.height, self.width))
        )  # fmt: skip
        return height, width

    @property
    def output_hw(self) -> tuple[int, int]:
        """Height and width of its outputs."""
        return self.window_hw


@dataclass(frozen=True)
class Convolution(Windowed):
    """A kind that multiplies data by weights under a window; `rank` 2 is a matrix product."""

    epilogue = True

    out_channels: int
    """Filters."""
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    """top, left, bottom, right"""

    @property
    def operator(self) -> str:
        """The name of the Relax operator."""
        return self.operators[self.rank == 2]

    @property
    def taps(self) -> int:
        """K: products in one output, border taps included."""
        return self.kernel[0] * self.kernel[1] * self.read_channels // self.groups

    @property
    def macs(self) -> int:
        """Products it computes; a symbolic batch counts as 1."""
        height, width = self.window_hw
        return self.images * height * width * self.out_channels * self.taps

    @property
    def output_channels(self) -> int:
        """Channels of its outputs."""
        return self.out_channels

    @property
    def weight_position(self) -> int:
        """Which input of the kernel are the weights."""
        return self.data_tensors


def output_size(
    size: int, kernel: int, stride: int, dilation: int, pads: int, extra: int = 0
) -> int:
    """Return the output extent of a window sliding over `size` (`pads`: both sides together)."""
    return (size + pads + extra - dilation * (kernel - 1) - 1) // stride + 1
