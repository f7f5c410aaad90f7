"""Binary weights in the orders that GPU kernels read: tiles of output channels, bits in quads.

A filter is one run of words, tap by tap. Four words of it are a *quad*, what one thread loads at a
time. Filters are cut into tiles of `width` output channels, the last tile filled up with zeros, as
is the run of words:

``strips``
    ``[tile][word][channel]``, tiles of 32 channels: threads that own 32 channels of a pixel.
``fragments-W``
    ``[tile][4 quads][8 columns][lane][word of the quad]``: the right operand of ``mma.sync``, two
    of k256 at a time. Lane ``4 * g + t`` holds quad ``t`` of column ``g``.
``cores-W``
    ``[tile][4 quads][half][2][column][quad]``: what ``wgmma`` reads from shared memory, core
    matrices of 8 columns x 16 bytes, without swizzling. Of each quad, half ``h`` holds words
    ``2 h`` and ``2 h + 1``, in matrices of their own: thread ``t`` of four has those of quad ``t``
    of the data in registers.

Columns of a tensor core's tile are not channels in order: thread ``t`` of four gets columns
``2 * t`` and ``2 * t + 1`` of every eight. Filters are placed so that those of two eights are the
channels from ``4 * t`` on of sixteen: the four threads together then read parameters and residuals,
and write results, as whole sectors of memory.

Behind the filters lies a table of int32, ``[class + 1][channel]``, that makes accumulators of what
kernels count. They see zeros outside the image, and count ``u = popcount(d) - 2 * popcount(d & w)``
(with a zero plane, the sum over the planes ``d & ~z`` and ``d | z``). With ``D`` = 2 if the
accumulator is doubled, ``acc = D * u + table[class of the pixel][channel]`` in every mode and for
every padding. The last row holds ``D * popcount(w)``: an engine that counts ``popcount(d ^ w)``
subtracts it, as ``u = popcount(d ^ w) - popcount(w)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from bnncc.topi_binary import borders, layout, sliced_data
from bnncc.topi_binary.spec import BinaryConv2d

QUAD = 4
"""Words that a thread loads at once: 128 bits."""

STRIP = 32
"""Output channels of a tile in the order ``strips``."""

WIDTHS = (128, 64, 32)
"""Output channels of a tile in the other orders."""

_QUADS = {"strips": 1, "fragments": 4, "cores": 4}
ORDERS = ("strips", *(f"{kind}-{width}" for kind in ("fragments", "cores") for width in WIDTHS))
"""Values of `BinaryConv2d.weight_order` that this module knows."""


@dataclass(frozen=True)
class Tiles:
    """How the filters of a layer are cut."""

    kind: str
    """``strips``, ``fragments`` or ``cores``."""
    width: int
    """Output channels of a tile."""
    count: int
    """Tiles."""
    run: int
    """Words of a filter."""
    steps: int
    """How many times a kernel loads quads: 1 or 4 quads at a time."""
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    """`rows`, `columns`: first output row and column of each border class."""

    @property
    def filled(self) -> int:
        """Words of a filter with zeros at the end."""
        return self.steps * _QUADS[self.kind] * QUAD

    @property
    def filter_words(self) -> int:
        """Words of all filters, where the table begins."""
        return self.count * self.width * self.filled

    @property
    def classes(self) -> int:
        """Border classes of pixels."""
        return len(self.rows) * len(self.columns)

    @property
    def words(self) -> int:
        """Words of filters and table."""
        return self.filter_words + (self.classes + 1) * self.count * self.width


def of(spec: BinaryConv2d) -> Tiles:
    """Return how the filters of `spec`, which has one of `ORDERS`, are cut."""
    kind, _, width = spec.weight_order.partition("-")
    size = int(width) if width else STRIP
    run = spec.kernel[0] * spec.kernel[1] * layout.words(spec.channels // spec.groups)
    rows, columns = (tuple(borders.classes(spec, axis)) for axis in (0, 1))
    return Tiles(
        kind, size, layout.blocks(spec.out_channels, size), run,
        layout.blocks(run, _QUADS[kind] * QUAD), rows, columns,
    )  # fmt: skip


def pack(spec: BinaryConv2d, bits: np.ndarray) -> np.ndarray:
    """Pack weights, as `layout.pack_conv_weight` takes them, in the order of `spec`."""
    if spec.weight_order == sliced_data.ORDER:
        return sliced_data.pack(spec, bits)
    if spec.weight_order not in ORDERS:
        return layout.pack_conv_weight(bits, spec.weight_order)
    tiles = of(spec)
    filters = np.zeros((tiles.count * tiles.width, tiles.filled), np.uint32)
    filters[: spec.out_channels, : tiles.run] = layout.pack_bits(bits).reshape(len(bits), -1)
    cut = filters.reshape(tiles.count, tiles.width, tiles.filled)
    if tiles.kind == "strips":
        ordered = cut.transpose(0, 2, 1)
    else:
        columns = cut[:, channel_of_column(tiles.width)]
        if tiles.kind == "fragments":
            eights = columns.reshape(tiles.count, -1, 8, tiles.steps, QUAD, QUAD)
            ordered = eights.transpose(0, 3, 1, 2, 4, 5)
        else:
            halves = columns.reshape(tiles.count, tiles.width, tiles.steps, QUAD, 2, 2)
            ordered = halves.transpose(0, 2, 4, 5, 1, 3)
    return np.concatenate([ordered.ravel(), _table(spec, tiles, bits).ravel().view(np.uint32)])


def channel_of_column(width: int) -> np.ndarray:
    """Return which channel of a tile each column of the tensor core's tile holds."""
    column = np.arange(width)
    eight, thread, side = column // 8, column % 8 // 2, column % 2
    return 16 * (eight // 2) + 4 * thread + 2 * (eight % 2) + side


def _table(spec: BinaryConv2d, tiles: Tiles, bits: np.ndarray) -> np.ndarray:
    """Return what each border class adds, and twice or once the bits of each filter."""
    depth, unit = bits.shape[3], 1 + spec.doubled
    ones = bits.sum(axis=3, dtype=np.int32)  # of each tap
    table = np.zeros((tiles.classes + 1, tiles.count * tiles.width), np.int32)
    outer = {  # what a tap outside adds, in units of the accumulator
        ("and", 0): 0 * ones,
        ("and", 1): depth - 2 * ones,
        ("xor", 0): np.full_like(ones, unit * depth // 2),
        ("xor", 1): unit * (depth - ones),
        ("xor", -1): unit * ones,
    }[spec.mode, spec.pad_value]
    inner = unit * ones if spec.mode == "xor" else 0 * ones
    for number, place in enumerate(product(tiles.rows, tiles.columns)):
        here = np.where(borders.inside(spec, *place), inner, outer)
        table[number, : spec.out_channels] = here.sum(axis=(1, 2))
    table[-1, : spec.out_channels] = unit * ones.sum(axis=(1, 2))
    return table
