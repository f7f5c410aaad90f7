"""Division of the width of a convolution into register tiles."""

from __future__ import annotations


def shares(width: int, tile: int) -> list[int]:
    """Return the widths of the fewest tiles of at most `tile` that cover `width`; equal within one.

    Examples
    --------
    >>> shares(13, 5)
    [5, 4, 4]
    """
    count = -(-width // tile)
    return [width // count + (i < width % count) for i in range(count)]
