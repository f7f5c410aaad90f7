"""Border classes: ranges of output rows (or columns) with the same taps inside the image."""

from __future__ import annotations

import numpy as np

from bnncc.topi_binary.spec import BinaryConv2d, FewBitConv2d, taps_inside


def inside(spec: BinaryConv2d | FewBitConv2d, row: int, column: int) -> np.ndarray:
    """Return, for each tap of the window at an output pixel, whether it is inside the image."""
    rows, columns = taps_inside(spec, 0, row), taps_inside(spec, 1, column)
    taps = np.zeros(spec.kernel, bool)
    taps[rows.start : rows.stop, columns.start : columns.stop] = True
    return taps


def classes(spec: BinaryConv2d | FewBitConv2d, axis: int) -> list[int]:
    """Return the first output row (`axis` 0) or column (1) of each class, in ascending order.

    Examples
    --------
    >>> spec = BinaryConv2d(1, 8, 8, 32, 32, (3, 3), pads=(1, 1, 1, 1))
    >>> classes(spec, 0)
    [0, 1, 7]
    """
    taps = [taps_inside(spec, axis, place) for place in range(spec.window_hw[axis])]
    return [i for i, inside in enumerate(taps) if i == 0 or inside != taps[i - 1]]


def inner_class(spec: BinaryConv2d | FewBitConv2d, axis: int) -> int | None:
    """Return the class of rows (or columns) with all taps inside the image, or None."""
    inside = (taps_inside(spec, axis, first) for first in classes(spec, axis))
    return next((i for i, taps in enumerate(inside) if len(taps) == spec.kernel[axis]), None)
