"""Cutting the width of a convolution into register tiles."""

from __future__ import annotations

from collections.abc import Sequence

from bnncc.topi_binary.spec import BinaryConv2d


def cut(spec: BinaryConv2d, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return pieces of the width as (width, tile): tiles at the border apart from those between.

    Parameters
    ----------
    sizes : sequence of int
        Widths of the tiles, from left to right.

    Returns
    -------
    tuple of tuple (width, tile)
        A piece with taps outside the image is one tile.
    """
    pieces: list[tuple[int, int]] = []
    start = 0
    inner = False  # whether the last piece may grow
    for size in sizes:
        inside = _inside(spec, start, size)
        if inner and inside and pieces[-1][1] == size:
            pieces[-1] = (pieces[-1][0] + size, size)
        else:
            pieces.append((size, size))
        inner = inside
        start += size
    return tuple(pieces)


def shares(width: int, tile: int) -> list[int]:
    """Return the widths of as few tiles up to `tile` as cover `width`, that differ by at most one.

    Examples
    --------
    >>> shares(13, 5)
    [5, 4, 4]
    """
    count = -(-width // tile)
    return [width // count + (i < width % count) for i in range(count)]


def _inside(spec: BinaryConv2d, start: int, size: int) -> bool:
    """Whether no tap of the output columns from `start` lies left or right of the image."""
    first = start * spec.strides[1] - spec.pads[1]
    last = (start + size - 1) * spec.strides[1] - spec.pads[1]
    last += (spec.kernel[1] - 1) * spec.dilations[1]
    return spec.rank == 2 or (first >= 0 and last < spec.width)
