"""DeformConv: a convolution whose taps are interpolated between four pixels."""

from __future__ import annotations

import math

import numpy as np

from bnncc.errors import ShapeError
from bnncc.ir.pieces import Expression


def _deform_conv(write: Expression) -> None:
    """Write DeformConv as gathers of each tap's four neighbours, and a matrix product."""
    x, weight, offset = write.shape(0), write.shape(1), write.shape(2)
    attrs, dtype = write.node.attrs, write.type().dtype
    if len(x) != 4 or len(weight) != 4 or len(offset) != 4:
        raise ShapeError(f"{write.where}: an image of {len(x)} axes, expected 4")
    (n, channels, height, width), (units, depth, *kernel) = x, weight
    group, parts = int(attrs.get("group", 1)), int(attrs.get("offset_group", 1))
    strides, dilations = (
        [int(v) for v in attrs.get(k) or (1, 1)] for k in ("strides", "dilations")
    )
    pads = [int(v) for v in attrs.get("pads") or (0, 0, 0, 0)]
    out, taps = offset[2:], math.prod(kernel)
    pixels = math.prod(out)
    if channels != depth * group or units % group or channels % parts:
        raise ShapeError(f"{write.where}: weight {weight} does not fit an input of shape {x}")
    if offset[:2] != [n, 2 * parts * taps]:
        raise ShapeError(
            f"{write.where}: offset has shape {offset}, expected [{n}, {2 * parts * taps}, ...]"
        )
    moves = write.reshape(write.node.inputs[2], n * parts, taps, 2, *out)
    grid = [np.arange(o) * s - p for o, s, p in zip(out, strides, pads[:2], strict=True)]
    where = []
    for axis in range(2):
        tap = np.arange(kernel[axis]) * dilations[axis]
        own = tap[:, None] if axis == 0 else tap[None, :]
        start = np.broadcast_to(own, kernel).reshape(taps, 1, 1) + (
            grid[0][:, None] if axis == 0 else grid[1][None, :]
        )
        start = np.broadcast_to(start, (taps, *out))
        where.append(write("Add", write.at(moves, axis, 2), write.constant(start, dtype)))
    flat = write.reshape(write.node.inputs[0], n * parts, channels // parts, height * width)
    total = ""
    floors = [write("Floor", p) for p in where]
    for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
        share, inside, index = "", "", ""
        for axis, (step, size) in enumerate(zip(corner, (height, width), strict=True)):
            at = floors[axis]
            if step:
                at = write("Add", at, write.constant(1, dtype))
            distance = write("Abs", write("Sub", where[axis], at))
            near = write("Sub", write.constant(1, dtype), distance)
            share = write("Mul", share, near) if share else near
            low, high = write.constant(0, dtype), write.constant(size - 1, dtype)
            fits = write("And", write("GreaterOrEqual", at, low), write("LessOrEqual", at, high))
            inside = write("And", inside, fits) if inside else fits
            position = write.cast(write("Clip", at, low, high), "int64")
            if axis:
                row = write("Mul", index, write.constant(width, "int64"))
                index = write("Add", row, position)
            else:
                index = position
        share = write("Where", inside, share, write.constant(0, dtype))
        index = write.reshape(index, n * parts, 1, taps * pixels)
        spread = write("Expand", index, write.ints(n * parts, channels // parts, taps * pixels))
        value = write("GatherElements", flat, spread, axis=2)
        part = write("Mul", value, write.reshape(share, n * parts, 1, taps * pixels))
        total = write("Add", total, part) if total else part
    if mask := write.input(4):
        factor = write.reshape(mask, n * parts, 1, taps * pixels)
        total = write("Mul", total, factor)
    columns = write.reshape(total, n, group, depth * taps, pixels)
    rows = write.reshape(write.node.inputs[1], 1, group, units // group, depth * taps)
    made = write.reshape(write("MatMul", rows, columns), n, units, *out)
    if bias := write.input(3):
        made = write("Add", made, write.reshape(bias, 1, units, 1, 1))
    write.give(made, 0)


EXPANSIONS = {"DeformConv": _deform_conv}
"""Rewrite rules, by operator."""
