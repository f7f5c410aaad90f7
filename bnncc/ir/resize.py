"""Resize as weighted gathers along each axis, for evaluation and code generation.

Every output position along an axis is a sum over a few input positions, ``sum(weight * x[index])``.
The tables are computed once sizes are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnncc.errors import ModelError, UnsupportedOp

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Taps:
    """Resampling of one axis."""

    axis: int
    """Axis of the tensor."""
    index: Array
    """int64, shape (outputs, taps): input positions."""
    weight: Array
    """float64, shape (outputs, taps): weights."""
    outside: Array
    """bool, shape (outputs,): where the extrapolation value is used instead."""

    @property
    def plain(self) -> bool:
        """Whether each output is a copy of one element."""
        return self.index.shape[1] == 1 and bool((self.weight == 1).all())


def taps(
    attrs: dict[str, Any], ins: Sequence[Array | None], shape: Sequence[int], where: str = "Resize"
) -> list[Taps]:
    """Return the tables of all axes that change.

    Parameters
    ----------
    attrs : dict
        Attributes of a Resize of the newest opset.
    ins : sequence of ndarray or None
        Its inputs; the first one is ignored.
    shape : sequence of int
        Shape of the first input.
    where : str
        Description of the node for messages.

    Raises
    ------
    ModelError
        If inputs or attributes are inconsistent.
    UnsupportedOp
        If a mode is not supported.
    """
    roi, scales, sizes = ([*ins[1:], None, None, None])[:3]
    rank = len(shape)
    axes = [int(a) % rank for a in attrs.get("axes") or range(rank)]
    if (scales is None) == (sizes is None):
        raise ModelError(f"{where}: expected either scales or sizes")
    given = scales if scales is not None else sizes
    assert given is not None
    if given.size != len(axes):
        raise ModelError(f"{where}: {given.size} scales or sizes for {len(axes)} axes")
    mode = attrs.get("coordinate_transformation_mode", "half_pixel")
    if mode not in _COORDINATES:
        raise UnsupportedOp(
            f"{where}: `coordinate_transformation_mode` = {mode!r} is not supported"
        )
    policy = attrs.get("keep_aspect_ratio_policy", "stretch")
    factors: list[Any] = []
    outs: list[int] = []
    for k, axis in enumerate(axes):
        if scales is not None:
            factor = np.float32(scales.reshape(-1)[k])
            factors.append(factor)
            outs.append(int(np.floor(factor * np.float32(shape[axis]))))
        else:
            outs.append(int(given.reshape(-1)[k]))
            factors.append(outs[-1] / shape[axis])
    if sizes is not None and policy != "stretch":
        if policy not in ("not_larger", "not_smaller"):
            raise UnsupportedOp(
                f"{where}: `keep_aspect_ratio_policy` = {policy!r} is not supported"
            )
        same = (min if policy == "not_larger" else max)(factors)
        outs = [int(np.floor(same * shape[a] + 0.5)) for a in axes]
        factors = [same] * len(axes)
    region = [] if roi is None else [float(v) for v in roi.reshape(-1)]
    if mode == "tf_crop_and_resize" and len(region) != 2 * len(axes):
        raise ModelError(f"{where}: expected `roi` of {2 * len(axes)} numbers")
    found = []
    for k, axis in enumerate(axes):
        ends = (region[k], region[k + len(axes)]) if mode == "tf_crop_and_resize" else (0.0, 1.0)
        if outs[k] == shape[axis] and factors[k] == 1 and ends == (0.0, 1.0):
            continue
        found.append(_axis(attrs, axis, shape[axis], outs[k], factors[k], ends, where))
    return found


def _axis(
    attrs: dict[str, Any], axis: int, size: int, out: int, scale: Any, roi: tuple[float, float],
    where: str,
) -> Taps:  # fmt: skip
    coordinate = _COORDINATES[attrs.get("coordinate_transformation_mode", "half_pixel")]
    position = np.arange(out).astype(np.float32 if isinstance(scale, np.float32) else np.float64)
    x = np.broadcast_to(coordinate(position, scale, size, out, roi), (out,)).astype(np.float64)
    base = np.ceil(x) - 1
    ratio = x - base  # in (0, 1]
    offsets, weight = _weights(attrs, ratio, float(scale), where)
    index = base[:, None].astype(np.int64) + offsets
    inside = (index >= 0) & (index < size)
    if attrs.get("exclude_outside") and attrs.get("mode", "nearest") != "nearest":
        weight = np.where(inside, weight, 0)
        weight = weight / weight.sum(axis=1, keepdims=True)
    outside = np.zeros(out, bool)
    if attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        outside = (x < 0) | (x > size - 1)
    used = (weight != 0).any(axis=0)
    index = np.clip(index, 0, size - 1)[:, used]
    weight = weight[:, used]
    if attrs.get("mode", "nearest") == "nearest" and index.shape[1] > 1:
        chosen = weight.argmax(axis=1)[:, None]
        index, weight = np.take_along_axis(index, chosen, 1), np.ones((out, 1))
    return Taps(axis, index, weight, outside)


def _weights(attrs: dict[str, Any], ratio: Array, scale: float, where: str) -> tuple[Array, Array]:
    """Return offsets of the taps from the position below, and weights of shape (outputs, taps)."""
    mode = attrs.get("mode", "nearest")
    narrow = min(scale, 1.0) if attrs.get("antialias") else 1.0
    column = ratio[:, None]
    if mode == "nearest":
        rule = attrs.get("nearest_mode", "round_prefer_floor")
        if rule not in _NEAREST:
            raise UnsupportedOp(f"{where}: `nearest_mode` = {rule!r} is not supported")
        low = (_NEAREST[rule](ratio) & (ratio != 1))[:, None]
        return np.arange(2), np.concatenate([low, ~low], axis=1).astype(np.float64)
    if mode not in ("linear", "cubic"):
        raise UnsupportedOp(f"{where}: `mode` = {mode!r} is not supported")
    reach = 1 if mode == "linear" else 2
    first = int(np.floor(-reach / narrow)) + 1
    offsets = np.arange(first, 2 - first)
    distance = np.abs(offsets - column) * narrow
    if mode == "linear":
        weight = np.clip(1 - distance, 0, 1)
    else:
        a = float(attrs.get("cubic_coeff_a", -0.75))
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = a * (((distance - 5) * distance + 8) * distance - 4)
        weight = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
    if narrow != 1:
        weight = weight / weight.sum(axis=1, keepdims=True)
    return offsets, weight


def _half_pixel(x: Array, scale: Any, size: int, out: int, roi: tuple[float, float]) -> Array:
    return np.asarray((x + x.dtype.type(0.5)) / scale - x.dtype.type(0.5))


def _symmetric(x: Array, scale: Any, size: int, out: int, roi: tuple[float, float]) -> Array:
    adjustment = out / (float(scale) * size)
    return size / 2 * (1 - adjustment) + _half_pixel(x, scale, size, out, roi)


def _align(x: Array, scale: Any, size: int, out: int, roi: tuple[float, float]) -> Array:
    full = float(scale) * size
    return x * 0.0 if full == 1 else x.astype(np.float64) * (size - 1) / (full - 1)


def _crop(x: Array, scale: Any, size: int, out: int, roi: tuple[float, float]) -> Array:
    full, (start, end) = float(scale) * size, roi
    if full == 1:
        return x * 0.0 + (end + start) * (size - 1) / 2
    return start * (size - 1) + x.astype(np.float64) * (end - start) * (size - 1) / (full - 1)


_COORDINATES = {
    "align_corners": _align,
    "asymmetric": lambda x, scale, size, out, roi: np.asarray(x / scale),
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _symmetric,
    "pytorch_half_pixel": lambda x, scale, size, out, roi: (
        x * 0.0 if out == 1 else _half_pixel(x, scale, size, out, roi)
    ),
    "tf_crop_and_resize": _crop,
}
_NEAREST = {
    "ceil": lambda ratio: np.zeros(ratio.shape, bool),
    "floor": lambda ratio: np.ones(ratio.shape, bool),
    "round_prefer_ceil": lambda ratio: ratio < 0.5,
    "round_prefer_floor": lambda ratio: ratio <= 0.5,
}
"""By mode: whether the position below is the nearest, given the distance from it."""


def resize(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate Resize with sums in float64, rounded once."""
    x = ins[0]
    tables = taps(attrs, ins, x.shape)
    exact = all(t.plain for t in tables)
    y = x if exact else x.astype(np.float64)
    outside = np.zeros((1,) * x.ndim, bool)
    for table in tables:
        column = [1] * x.ndim
        column[table.axis] = -1
        if table.plain:
            y = np.take(y, table.index[:, 0], table.axis)
        else:
            y = sum(
                np.take(y, table.index[:, k], table.axis) * table.weight[:, k].reshape(column)
                for k in range(table.index.shape[1])
            )
        outside = outside | table.outside.reshape(column)
    if outside.any():
        y = np.where(outside, attrs.get("extrapolation_value", 0.0), y)
    return [np.asarray(y).astype(x.dtype)]
