"""Cutting the width of a convolution into register tiles."""

from __future__ import annotations


def shares(width: int, tile: int) -> list[int]:
    """Return the widths of as few tiles up to `tile` as cover `width`, that differ by at most one.

    Examples
    --------
    >>> shares(13, 5)
    [5, 4, 4]
    """
    count = -(-width // tile)
    return [width // count + (i < width % count) for i in range(count)]
