"""DeformConv: a convolution whose taps are interpolated between four pixels."""

from __future__ import annotations

import itertools
import math

import numpy as np

from bnncc.errors import ShapeError
from bnncc.ir.pieces import Expression


def _deform_conv(write: Expression) -> None:
    """Write DeformConv as gathers of each tap's four neighbours, and a matrix product."""
    x, weight, offset = write.shape(0), write.shape(1), write.shape(2)
    attrs = write.node.attrs
    if len(x) != 4 or len(weight) != 4 or len(offset) != 4:
        raise ShapeError(f"{write.where}: an image of {len(x)} axes, expected 4")
    (n, channels, height, width), (units, depth, *kernel) = x, weight
    group, parts = int(attrs.get("group", 1)), int(attrs.get("offset_group", 1))
    taps, pixels = math.prod(kernel), math.prod(offset[2:])
    if channels != depth * group or units % group or channels % parts:
        raise ShapeError(f"{write.where}: weight {weight} does not fit an input of shape {x}")
    if offset[:2] != [n, 2 * parts * taps]:
        raise ShapeError(
            f"{write.where}: offset has shape {offset}, expected [{n}, {2 * parts * taps}, ...]"
        )
    moves = write.reshape(write.node.inputs[2], n * parts, taps, 2, *offset[2:])
    places = _places(write, moves, kernel, offset[2:])
    rows = write.reshape(write.node.inputs[0], n * parts, channels // parts, height * width)
    sizes = n * parts, channels // parts, taps * pixels
    sampled = _interpolated(write, rows, places, (height, width), sizes)
    if mask := write.input(4):
        factor = write.reshape(mask, n * parts, 1, taps * pixels)
        sampled = write("Mul", sampled, factor)
    columns = write.reshape(sampled, n, group, depth * taps, pixels)
    filters = write.reshape(write.node.inputs[1], 1, group, units // group, depth * taps)
    made = write.reshape(write("MatMul", filters, columns), n, units, *offset[2:])
    if bias := write.input(3):
        made = write("Add", made, write.reshape(bias, 1, units, 1, 1))
    write.give(made, 0)


def _places(write: Expression, moves: str, kernel: list[int], out: list[int]) -> list[str]:
    """Write the rows, and the columns, at which each tap reads for each output pixel.

    Parameters
    ----------
    write : Expression
        Of a DeformConv.
    moves : str
        Its offsets, of shape (batches and offset groups, taps, 2, *out).
    kernel, out : list of int
        Height and width of the kernel and of the output.
    """
    attrs, dtype = write.node.attrs, write.type().dtype
    strides, dilations = (
        [int(v) for v in attrs.get(k) or (1, 1)] for k in ("strides", "dilations")
    )
    pads = [int(v) for v in attrs.get("pads") or (0, 0, 0, 0)]
    found = []
    for axis in range(2):
        tap = np.indices(kernel)[axis].reshape(-1, 1, 1) * dilations[axis]
        start = np.indices(out)[axis] * strides[axis] - pads[axis] + tap
        found.append(write("Add", write.at(moves, axis, 2), write.constant(start, dtype)))
    return found


def _interpolated(
    write: Expression, rows: str, places: list[str], image: tuple[int, int],
    sizes: tuple[int, int, int],
) -> str:  # fmt: skip
    """Write values between the pixels of images, which are 0 outside.

    Parameters
    ----------
    write : Expression
        Of the operator.
    rows : str
        The images with their pixels in a row.
    places : list of str
        Rows and columns to read at, in each image.
    image, sizes : tuple of int
        Height and width; images, channels, and places in each image.
    """
    images, channels, points = sizes
    total, floors = "", [write("Floor", place) for place in places]
    for corner in itertools.product((0, 1), repeat=2):
        (row, height, has_row), (column, width, has_column) = (
            _neighbour(write, *one) for one in zip(places, floors, corner, image, strict=True)
        )
        zero = write.constant(0, write.type().dtype)
        area = write("Mul", height, width)
        share = write("Where", write("And", has_row, has_column), area, zero)
        index = write("Add", write("Mul", row, write.constant(image[1], "int64")), column)
        index = write.reshape(index, images, 1, points)
        spread = write("Expand", index, write.ints(images, channels, points))
        value = write("GatherElements", rows, spread, axis=2)
        part = write("Mul", value, write.reshape(share, images, 1, points))
        total = write("Add", total, part) if total else part
    return total


def _neighbour(
    write: Expression, place: str, floor: str, step: int, size: int
) -> tuple[str, str, str]:
    """Write the index of the pixel before or after a place, its share, and if there is one."""
    dtype = write.type().dtype
    at = write("Add", floor, write.constant(1, dtype)) if step else floor
    share = write("Sub", write.constant(1, dtype), write("Abs", write("Sub", place, at)))
    low, high = write.constant(0, dtype), write.constant(size - 1, dtype)
    inside = write("And", write("GreaterOrEqual", at, low), write("LessOrEqual", at, high))
    return write.cast(write("Clip", at, low, high), "int64"), share, inside


EXPANSIONS = {"DeformConv": _deform_conv}
"""Rewrite rules, by operator."""
