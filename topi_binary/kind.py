"""What every kind of kernel says of itself: one class a kind is the registry of operators.

The classes are those of `spec`. Where a kind differs from the others is written in its class, so
that nobody else asks what kind a spec is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncc.topi_binary import layout

if TYPE_CHECKING:
    from bnncc.topi_binary.step import Step

Dim = int | str
"""An extent, or the name of a symbolic one."""

Type = tuple[tuple[Dim, ...], str]
"""Shape and dtype of a kernel's tensor. The batch may be the name of a symbol."""


@dataclass(frozen=True)
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
    """

    operators: ClassVar[tuple[str, ...]]
    definition: ClassVar[str]
    oracle: ClassVar[str]
    exact: ClassVar[bool] = False
    epilogue: ClassVar[bool] = False

    n: Dim

    if TYPE_CHECKING:  # fields of some kinds, or what stands for them in the others

        @property
        def height(self) -> int:
            """Rows of the image that is read."""

        @property
        def width(self) -> int:
            """Columns of it."""

        @property
        def channels(self) -> int | tuple[int, ...]:
            """Of the data; one number for each tensor that is joined."""

        @property
        def rank(self) -> int:
            """2 for rows of channels without an image."""

        @property
        def data_layout(self) -> str:
            """``NHWC`` or ``NCHW``, of data that are no bits."""

        @property
        def steps(self) -> tuple[Step, ...]:
            """The epilogue."""

        @property
        def ternary(self) -> bool:
            """Whether a plane of zeros follows the plane of signs."""

        @property
        def weight_zeros(self) -> bool:
            """Whether a plane of zeros follows the weights."""

        @property
        def groups(self) -> int:
            """Of channels."""

        @property
        def weight_order(self) -> str:
            """How binary weights lie."""
    else:
        rank, data_layout, steps = 4, "NHWC", ()
        ternary, weight_zeros, groups, weight_order = False, False, 1, "words"

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
class Windowed(Kind):
    """A kind in which a window slides over the image."""

    if TYPE_CHECKING:

        @property
        def kernel(self) -> tuple[int, int]:
            """Extents of the window."""

        @property
        def strides(self) -> tuple[int, int]:
            """Of the window."""

        @property
        def dilations(self) -> tuple[int, int]:
            """Of the window."""

        @property
        def pads(self) -> tuple[int, int, int, int]:
            """Of the image: top, left, bottom, right."""

        @property
        def ceil_extra(self) -> tuple[int, int]:
            """How far the last window reaches over the padded image."""
    else:
        ceil_extra = (0, 0)

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

    epilogue: ClassVar[bool] = True

    if TYPE_CHECKING:

        @property
        def out_channels(self) -> int:
            """Filters."""

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
