"""Sliding windows in NumPy: positions, and the data that each tap reads."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from bnncc.topi_binary.kind import Convolution, Windowed

Array = Any


def size(spec: Windowed) -> tuple[int, int]:
    """Return the number of window positions: rows, columns."""
    height, width = (
        (extent + spec.pads[i] + spec.pads[i + 2] + spec.ceil_extra[i]
         - (spec.kernel[i] - 1) * spec.dilations[i] - 1) // spec.strides[i] + 1
        for i, extent in enumerate((spec.height, spec.width))
    )  # fmt: skip
    return height, width


def pad(spec: Windowed, data: Array, value: float = 0) -> Array:
    """Return NHWC data extended by everything that windows read outside the image."""
    rows, columns = (
        (spec.pads[axis], spec.pads[axis + 2] + spec.ceil_extra[axis]) for axis in (0, 1)
    )
    return np.pad(data, ((0, 0), rows, columns, (0, 0)), constant_values=value)


def taps(spec: Windowed, padded: Array) -> Iterator[tuple[int, int, Array]]:
    """Yield kernel row, kernel column, and the padded data that the tap reads in all windows."""
    height, width = size(spec)
    for i, j in np.ndindex(*spec.kernel):
        rows = slice(i * spec.dilations[0], None, spec.strides[0])
        columns = slice(j * spec.dilations[1], None, spec.strides[1])
        yield i, j, padded[:, rows, columns][:, :height, :width]


@np.errstate(all="ignore")  # networks may overflow
def products(spec: Convolution, padded: Array, weight: Array) -> Array:
    """Return sums of products of padded data and OHWI weights, in the type of the weights."""
    depth, per_group = weight.shape[3], spec.out_channels // spec.groups
    out = np.zeros((len(padded), *size(spec), spec.out_channels), weight.dtype)
    for i, j, seen in taps(spec, padded):
        for g in range(spec.groups):
            made = slice(g * per_group, (g + 1) * per_group)
            part = seen[..., g * depth : (g + 1) * depth].reshape(-1, depth)
            out[..., made] += (part @ weight[made, i, j].T).reshape(*out.shape[:3], per_group)
    return out


def classes(spec: Windowed, axis: int) -> Array:
    """Return the class of each row (`axis` 0) or column: it changes if the taps inside change."""
    first = np.arange(size(spec)[axis]) * spec.strides[axis] - spec.pads[axis]
    places = first[:, None] + np.arange(spec.kernel[axis]) * spec.dilations[axis]
    inside = (places >= 0) & (places < (spec.height, spec.width)[axis])
    return np.cumsum([False, *(inside[1:] != inside[:-1]).any(axis=1)])


def unblocked(packed: Array, channels: int, shape: tuple[int, ...]) -> Array:
    """Read weights stored in blocks of 16 output channels, the last one of fewer."""
    size = prod(shape)
    out = np.zeros((channels, size), packed.dtype)
    for first in range(0, channels, 16):
        lanes = min(16, channels - first)
        block = packed[first * size : first * size + lanes * size]
        out[first : first + lanes] = block.reshape(size, lanes).T
    return out.reshape(channels, *shape)
