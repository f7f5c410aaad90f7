"""Taps of a window: the pixel that a tap reads, and whether it is inside the image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, TypeVar

from tvm.tirx.script import builder as T

from bnncc.topi_binary import borders
from bnncc.topi_binary.definitions.blocks import Expr, int64
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d, taps_inside

Flat = TypeVar("Flat", bound=BinaryConv2d | Conv2d | FewBitConv2d)


def place(spec: Any, h: Expr, w: Expr, kh: Expr, kw: Expr) -> tuple[Expr, Expr]:
    """Return the row and column that a tap of the window at (h, w) reads."""
    row = h * spec.strides[0] + kh * spec.dilations[0] - spec.pads[0]
    column = w * spec.strides[1] + kw * spec.dilations[1] - spec.pads[1]
    return row, column


def inside(spec: Any, row: Expr, column: Expr) -> Expr:
    """Return whether a pixel is inside the image of `spec`."""
    rows = T.And(row >= 0, row < spec.height)
    return T.And(rows, T.And(column >= 0, column < spec.width))


def tap_bounds(spec: Any, axis: int, position: Expr) -> tuple[Expr, Expr]:
    """Return the range [first, last) of a window's taps that are inside the image, along `axis`.

    If no tap is inside, the first bound is not less than the second.
    """
    step, extent = spec.dilations[axis], (spec.height, spec.width)[axis]
    start = position * spec.strides[axis] - spec.pads[axis]
    low = T.max((step - 1 - start) // step, 0)
    return low, T.min((step - 1 + extent - start) // step, spec.kernel[axis])


def tests_inside(spec: Any, *i: Expr) -> list[Expr]:
    """Return the conditions under which a tap is inside the image, as bounds of the tap's index."""
    _, h, w, _, kh, kw, *_ = i
    return tests_of(spec, 0, h, kh) + tests_of(spec, 1, w, kw)


def tests_of(spec: Any, axis: int, position: Expr, tap: Expr) -> list[Expr]:
    """Return the conditions for the row (`axis` 0) or column (`axis` 1) of a tap only."""
    before, after = _leaves(spec, axis)
    low, high = tap_bounds(spec, axis, position)
    return [tap >= low] * before + [tap < high] * after


def _leaves(spec: Any, axis: int) -> tuple[bool, bool]:
    """Return whether the first window starts before the image, and the last ends after it."""
    first, last = (taps_inside(spec, axis, at) for at in (0, spec.window_hw[axis] - 1))
    return first.start > 0, last.stop < spec.kernel[axis]


def leaves_image(spec: Any, *axes: int) -> bool:
    """Return whether any tap of any window is outside the image, along `axes` if given."""
    return any(side for axis in axes or (0, 1) for side in _leaves(spec, axis))


def taps_outside(spec: Any, h: Expr, w: Expr) -> Expr:
    """Return the number of taps of the window at (h, w) that are outside the image."""
    counts = []
    for axis, position in enumerate((h, w)):
        low, high = tap_bounds(spec, axis, position)
        before, after = _leaves(spec, axis)
        low, high = low if before else int64(0), high if after else int64(spec.kernel[axis])
        counts.append(T.max(high - low, int64(0)))
    return T.Cast("int32", spec.window_size - counts[0] * counts[1])


def clamped(spec: Any, row: Expr, column: Expr) -> tuple[Expr, Expr]:
    """Return the pixel of the image nearest to (row, column)."""
    return within(row, spec.height), within(column, spec.width)


def within(position: Expr, extent: int) -> Expr:
    """Clamp an index to [0, extent)."""
    return T.max(int64(0), T.min(position, int64(extent - 1)))


def pixel(spec: Any, n: Expr, row: Expr, column: Expr, channel: Expr) -> Sequence[Expr]:
    """Return the index of a data element in a tensor of `spec`'s rank and data layout."""
    if spec.rank == 2:
        return n, channel
    if spec.data_layout == "NCHW":
        return n, channel, row, column
    return n, row, column, channel


def as_float32(spec: Any, datum: Expr) -> Expr:
    """Convert an element of the data of `spec` to float32."""
    return datum if spec.dtype == "float32" else T.Cast("float32", datum)


def as_number(spec: Conv2d, datum: Expr, channel: Expr) -> Expr:
    """Convert an element of the data to the float32 that it stands for: bytes have a zero point."""
    if not spec.zero_points:
        return as_float32(spec, datum)
    zero: Expr = T.int32(spec.zero_points[-1])
    for number, one in enumerate(spec.zero_points[:-1]):
        zero = T.if_then_else(channel == number, T.int32(one), zero)
    return T.Cast("float32", T.Cast("int32", datum) - zero)


def border_class(firsts: Sequence[int], position: Expr) -> Expr:
    """Return the border class of a row or column, given the first position of each class."""
    number: Expr = int64(0)
    for first in firsts[1:]:
        number = number + T.Cast("int64", position >= first)
    return number


def in_class(spec: Any, axis: int, number: Expr, tap: Expr) -> Expr:
    """Return whether a kernel row (`axis` 0) or column of a border class is inside the image."""
    taps = [taps_inside(spec, axis, first) for first in borders.classes(spec, axis)]
    low, high = (_by_class([getattr(t, end) for t in taps], number) for end in ("start", "stop"))
    return T.And(tap >= low, tap < high)


def _by_class(values: Sequence[int], number: Expr) -> Expr:
    """Return the value of a class, by arithmetic: TVM simplifies conditional choices slowly."""
    value: Expr = int64(values[0])
    for i, (before, after) in enumerate(pairwise(values), 1):
        value = value + T.Cast("int64", number >= i) * (after - before)
    return value


def flattened(spec: Flat, columns: int = 0) -> Flat:
    """Return `spec` with all pixels in one row if its kernel only reads one pixel per output.

    With `columns`, which must divide the number of pixels, they are in rows of so many. The images
    of a dense layer's batch become pixels too, so that several share a load of weights.
    Binary convolutions of images, NCHW tensors and fused pooling leave `spec` unchanged.
    """
    if spec.rank == 2:
        if not isinstance(spec.n, int) or any(step.op == "gate" for step in spec.steps):
            return spec
        steps = tuple(replace(step, layout="NHWC") for step in spec.steps)
        own = {field.name for field in fields(spec)} & {"data_layout"}
        layout: dict[str, str] = dict.fromkeys(own, "NHWC")
        wide = columns or spec.n
        shape: dict[str, Any] = {"n": 1, "height": spec.n // wide, "width": wide, "rank": 4}
        changed: dict[str, Any] = {"steps": steps, **layout}
        return replace(spec, **shape, **changed)
    if isinstance(spec, BinaryConv2d):
        return spec
    planar = spec.data_layout == "NCHW" or any(s.layout == "NCHW" for s in spec.steps)
    if not spec.pointwise or planar or getattr(spec, "pool", None) is not None:
        return spec
    wide = columns or spec.height * spec.width
    return replace(spec, height=spec.height * spec.width // wide, width=wide)
