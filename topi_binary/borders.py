"""Border classes: output rows (or columns) whose taps lie inside the image alike."""

from __future__ import annotations

from bnncc.topi_binary.spec import BinaryConv2d


def inside(spec: BinaryConv2d, axis: int, place: int) -> tuple[bool, ...]:
    """Return for each tap of output row (`axis` 0) or column `place` if it is in the image."""
    extent, first = (spec.height, spec.width)[axis], place * spec.strides[axis] - spec.pads[axis]
    return tuple(
        0 <= first + tap * spec.dilations[axis] < extent for tap in range(spec.kernel[axis])
    )


def classes(spec: BinaryConv2d, axis: int) -> list[int]:
    """Return the first output row (`axis` 0) or column (1) of each class; they follow each other.

    Examples
    --------
    >>> spec = BinaryConv2d(1, 8, 8, 32, 32, (3, 3), pads=(1, 1, 1, 1))
    >>> classes(spec, 0)
    [0, 1, 7]
    """
    patterns = [inside(spec, axis, place) for place in range(spec.window_hw[axis])]
    return [i for i, pattern in enumerate(patterns) if i == 0 or pattern != patterns[i - 1]]
