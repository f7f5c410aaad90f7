"""Base classes of the specs: one class per kind of kernel, which form the operator registry.

The classes themselves are in `spec`. Properties in which a kind differs from others are defined in
its class, so that no other code needs to test the kind of a spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bnncc.topi_binary import layout
from bnncc.topi_binary.step import Step

Dim = int | str
"""An extent, or the name of a symbolic one."""

Type = tuple[tuple[Dim, ...], str]
"""Shape and dtype of a tensor of a kernel. The batch may be symbolic."""


class Kind:
    """Base of all specs; the defaults describe a kernel that moves one plane of bits.

    Attributes
    ----------
    operators : tuple of str
        Names of the kind's Relax operators; `operator` selects one.
    definition, oracle : str
        Their functions, as ``file:function``, in `definitions` and in `reference`.
    exact : bool
        Whether it sums integers, so that the order of summation does not matter.
    epilogue : bool
        Whether its outputs are those of `steps`.
    n : int or str
        Batch size; the name of a symbol if the batch is dynamic.
    height, width, channels : int
        Of the input image; `channels` is a tuple if several tensors are concatenated.
    rank, data_layout, groups, steps, ternary, weight_zeros, weight_order, code_bits
        Defaults for kinds without these fields.
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
    code_bits: int = 0

    @property
    def operator(self) -> str:
        """The name of the Relax operator."""
        return self.operators[0]

    @property
    def description(self) -> str:
        """A description for reports."""
        text = f"{type(self).__name__} {'+'.join(map(str, self.parts))}"
        if self.rank == 4:
            return f"{text},{self.height}x{self.width}"
        return text + (f" x{self.n}" if self.n != 1 else "")

    @property
    def images(self) -> int:
        """Batch size; 1 if it is symbolic."""
        return self.n if isinstance(self.n, int) else 1

    @property
    def macs(self) -> int:
        """Number of multiply-accumulates; a symbolic batch counts as 1."""
        return 0

    @property
    def parts(self) -> tuple[int, ...]:
        """Channels of each tensor that is concatenated; a single number for other kinds."""
        return (self.channels,) if isinstance(self.channels, int) else self.channels

    @property
    def read_channels(self) -> int:
        """Channels of all data together."""
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
        """4, or 2 if outputs are ``[n, channels]``."""
        return self.rank

    @property
    def data_types(self) -> list[Type]:
        """Shapes and dtypes of the data, which are the first inputs of the kernel."""
        return [self.image(layout.words(self.read_channels), "uint32")]

    @property
    def data_tensors(self) -> int:
        """Number of data tensors."""
        return len(self.data_types)

    @property
    def plane_types(self) -> list[Type]:
        """Shapes and dtypes of the outputs, for kinds whose outputs are not those of `steps`."""
        return [self.made(layout.words(self.output_channels), "uint32")]

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """`steps`, preceded by those inside the anchor."""
        return self.steps

    def image(self, last: int, dtype: str) -> Type:
        """Return the type of data with `last` words or numbers per pixel."""
        where = "NHWC" if dtype == "uint32" else self.data_layout
        return shape(self.n, self.height, self.width, last, self.rank, where), dtype

    def made(self, last: int, dtype: str, where: str = "NHWC") -> Type:
        """Return the type of an output with `last` words or numbers per pixel."""
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
    """A kind that reads one image, or rows; declares the first fields."""

    n: Dim
    height: int
    width: int
    channels: int


class Windowed(OfImage):
    """A kind with a sliding window.

    Attributes
    ----------
    kernel, strides, dilations : tuple of int
        Of the window: rows, columns.
    pads : tuple of int
        Of the image: top, left, bottom, right.
    ceil_extra : tuple of int
        How far the last windows extend beyond the padded image.
    """

    kernel: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int, int, int]
    ceil_extra: tuple[int, int] = (0, 0)

    @property
    def description(self) -> str:
        """A description for reports."""
        text = super().description + (f" -> {self.output_channels}" if self.macs else "")
        if self.rank == 4:
            text += f" {self.kernel[0]}x{self.kernel[1]}"
            text += f" s{self.strides[0]}" if self.strides[0] > 1 else ""
        return text

    @property
    def window_size(self) -> int:
        """Number of elements of a window, per channel."""
        return self.kernel[0] * self.kernel[1]

    @property
    def pointwise(self) -> bool:
        """Whether each output pixel is computed from the same pixel of the data only."""
        return self.kernel == (1, 1) and self.strides == (1, 1) and not any(self.pads)

    @property
    def window_hw(self) -> tuple[int, int]:
        """Number of window positions: rows, columns."""
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
    """A kind that multiplies data in a window by weights; with `rank` 2, a matrix product."""

    epilogue = True

    out_channels: int
    """Number of filters."""
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    """In the order top, left, bottom, right."""

    @property
    def operator(self) -> str:
        """The name of the Relax operator."""
        return self.operators[self.rank == 2]

    @property
    def taps(self) -> int:
        """K: products per output, including those of taps outside the image."""
        return self.window_size * self.read_channels // self.groups

    @property
    def shared(self) -> bool:
        """Whether all lanes of a vector of output channels read the same data element."""
        return self.groups == 1 or self.out_channels // self.groups % layout.LANES == 0

    @property
    def channels_per_group(self) -> int:
        """Number of input channels of each output channel."""
        return self.channels // self.groups

    @property
    def macs(self) -> int:
        """Number of multiply-accumulates; a symbolic batch counts as 1."""
        height, width = self.window_hw
        return self.images * height * width * self.out_channels * self.taps

    @property
    def output_channels(self) -> int:
        """Channels of its outputs."""
        return self.out_channels

    @property
    def weight_position(self) -> int:
        """Index of the weights among the kernel's inputs."""
        return self.data_tensors


def output_size(
    size: int, kernel: int, stride: int, dilation: int, pads: int, extra: int = 0
) -> int:
    """Return the output size of a window sliding over `size`; `pads` is the sum of both sides."""
    return (size + pads + extra - dilation * (kernel - 1) - 1) // stride + 1
