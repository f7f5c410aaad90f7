"""Binary weights in the orders that GPU kernels read: tiles of output channels, words in quads.

A filter is a sequence of words, tap by tap. Four words are a *quad*, which a thread loads at once.
Filters are divided into tiles of `width` output channels. The last tile, and the sequence of words,
are padded with zeros:

``strips``
    ``[tile][word][channel]``, tiles of 32 channels: a thread computes 32 channels of a pixel.
``fragments-W``
    ``[tile][4 quads][8 columns][lane][word of the quad]``: the right operand of ``mma.sync``, two
    of k256 at a time. Lane ``4 * g + t`` holds quad ``t`` of column ``g``.
``cores-W``
    ``[tile][4 quads][half][2][column][quad]``: the operand that ``wgmma`` reads from shared
    memory, core matrices of 8 columns x 16 bytes, without swizzling. Half ``h`` holds words ``2 h``
    and ``2 h + 1`` of each quad, in matrices of their own: of four threads, thread ``t`` has those
    words of quad ``t`` of the data in registers.

Columns of a tensor core tile are not channels in order. Thread ``t`` of four gets columns ``2 * t``
and ``2 * t + 1`` of every eight. Filters are placed so that those of two groups of eight columns
are four consecutive channels, from ``4 * t`` on of sixteen. So the four threads together read
parameters and residuals, and write results, in whole sectors of memory.

After the filters follows an int32 table, ``[class + 1][channel]``, that converts counts to
accumulators. Kernels read zeros outside the image, and count ``u = popcount(d) - 2 * popcount(d &
w)``. With ``D`` = 2 if the accumulator is doubled and 1 otherwise, ``acc = D * u + table[class of
the pixel][channel]`` in every mode and for every padding. With a zero plane, ``D * u`` is the sum
of ``u`` over the planes ``d & ~z`` and ``d | z``. The last row holds ``D * popcount(w)``: an engine
that counts ``popcount(d ^ w)`` subtracts it, because ``u = popcount(d ^ w) - popcount(w)``.
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
"""Output channels per tile in the order ``strips``."""

WIDTHS = (128, 64, 32)
"""Output channels per tile in the other orders."""

_QUADS = {"strips": 1, "fragments": 4, "cores": 4}
ORDERS = ("strips", *(f"{kind}-{width}" for kind in ("fragments", "cores") for width in WIDTHS))
"""Values of `BinaryConv2d.weight_order` that are defined here."""


@dataclass(frozen=True)
class Tiles:
    """Division of a layer's filters into tiles."""

    kind: str
    """``strips``, ``fragments`` or ``cores``."""
    width: int
    """Output channels per tile."""
    count: int
    """Number of tiles."""
    run: int
    """Words per filter."""
    steps: int
    """Number of loads per filter, of 1 or 4 quads each."""
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    """`rows`, `columns`: first output row and column of each border class."""

    @property
    def filled(self) -> int:
        """Words per filter, including the zeros at the end."""
        return self.steps * _QUADS[self.kind] * QUAD

    @property
    def filter_words(self) -> int:
        """Words of all filters; the table follows."""
        return self.count * self.width * self.filled

    @property
    def classes(self) -> int:
        """Number of border classes of pixels."""
        return len(self.rows) * len(self.columns)

    @property
    def words(self) -> int:
        """Words of filters and table."""
        return self.filter_words + (self.classes + 1) * self.count * self.width


def of(spec: BinaryConv2d) -> Tiles:
    """Return the tiles of the filters of `spec`, whose order is in `ORDERS`."""
    kind, _, width = spec.weight_order.partition("-")
    size = int(width) if width else STRIP
    run = spec.window_size * layout.words(spec.channels_per_group)
    rows, columns = (tuple(borders.classes(spec, axis)) for axis in (0, 1))
    return Tiles(
        kind, size, layout.blocks(spec.out_channels, size), run,
        layout.blocks(run, _QUADS[kind] * QUAD), rows, columns,
    )  # fmt: skip


def pack(spec: BinaryConv2d, bits: np.ndarray) -> np.ndarray:
    """Pack weights, as for `layout.pack_conv_weight`, in the order of `spec`."""
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
    """Return the channel within a tile that each column of the tensor core's tile holds."""
    column = np.arange(width)
    eight, thread, side = column // 8, column % 8 // 2, column % 2
    return 16 * (eight // 2) + 4 * thread + 2 * (eight % 2) + side


def _table(spec: BinaryConv2d, tiles: Tiles, bits: np.ndarray) -> np.ndarray:
    """Return the table: the correction of each border class, and D times each filter's popcount."""
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
