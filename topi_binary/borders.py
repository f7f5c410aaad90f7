"""Border classes: output rows (or columns) whose taps lie inside the image alike."""

from __future__ import annotations

from bnncc.topi_binary.spec import BinaryConv2d, output_size


def extents(spec: BinaryConv2d) -> tuple[int, int]:
    """Return the output rows and columns of `spec`."""
    pads = spec.pads[0] + spec.pads[2], spec.pads[1] + spec.pads[3]
    height, width = (
        output_size(size, spec.kernel[i], spec.strides[i], spec.dilations[i], pads[i])
        for i, size in enumerate((spec.height, spec.width))
    )
    return height, width


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
    patterns = [inside(spec, axis, place) for place in range(extents(spec)[axis])]
    return [i for i, pattern in enumerate(patterns) if i == 0 or pattern != patterns[i - 1]]
