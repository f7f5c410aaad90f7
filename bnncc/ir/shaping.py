"""NumPy implementations of ONNX operators that move elements without computing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def reshape_to(shape: Sequence[int], wanted: Sequence[int], allowzero: bool = False) -> list[int]:
    """Resolve 0 and -1 in the target of a Reshape of an input with `shape`."""
    dims = [
        shape[i] if d == 0 and not allowzero and i < len(shape) else int(d)
        for i, d in enumerate(wanted)
    ]
    if -1 in dims:
        known = math.prod(d for d in dims if d != -1)
        dims[dims.index(-1)] = math.prod(shape) // known if known else 0
    return dims


def reshape(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate Reshape."""
    x = ins[0]
    return [x.reshape(reshape_to(x.shape, ins[1].tolist(), bool(attrs.get("allowzero"))))]


def transpose(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate Transpose."""
    return [np.transpose(ins[0], attrs.get("perm"))]


def flatten(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate Flatten."""
    x = ins[0]
    axis = attrs.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return [x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))]


def squeeze(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate Squeeze."""
    axes = tuple(ins[1].tolist()) if len(ins) > 1 and ins[1] is not None else None
    return [np.squeeze(ins[0], axes)]


def unsqueeze(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate Unsqueeze."""
    return [np.expand_dims(ins[0], tuple(np.atleast_1d(ins[1]).tolist()))]


def split(attrs: dict[str, Any], ins: list[Any], count: int) -> list[Array]:
    """Evaluate Split."""
    x, axis = ins[0], attrs.get("axis", 0)
    if len(ins) > 1 and ins[1] is not None:
        sizes = ins[1].tolist()
    else:
        step = -(-x.shape[axis] // count)
        sizes = [min(step, x.shape[axis] - step * k) for k in range(count)]
    return list(np.split(x, np.cumsum(sizes)[:-1].tolist(), axis))


def slice_(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate Slice."""
    x = ins[0]
    starts, ends = ins[1].tolist(), ins[2].tolist()
    axes = ins[3].tolist() if len(ins) > 3 and ins[3] is not None else range(len(starts))
    steps = ins[4].tolist() if len(ins) > 4 and ins[4] is not None else [1] * len(starts)
    cut = [slice(None)] * x.ndim
    for axis, lo, hi, step in zip(axes, starts, ends, steps, strict=True):
        size = x.shape[axis]
        lo, hi = lo + size if lo < 0 else lo, hi + size if hi < 0 else hi
        if step > 0:
            cut[axis] = slice(min(max(lo, 0), size), min(max(hi, 0), size), step)
        else:
            stop = min(max(hi, -1), size - 1)
            cut[axis] = slice(min(max(lo, 0), size - 1), None if stop < 0 else stop, step)
    return [x[tuple(cut)]]


def pad(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate Pad; negative pads crop."""
    x, pads = ins[0], ins[1].tolist()
    value = ins[2] if len(ins) > 2 and ins[2] is not None else np.zeros((), x.dtype)
    axes = ins[3].tolist() if len(ins) > 3 and ins[3] is not None else range(x.ndim)
    pairs = [(0, 0)] * x.ndim
    for k, axis in enumerate(axes):
        pairs[axis] = (pads[k], pads[k + len(pads) // 2])
    cut = tuple(slice(max(0, -b), n - max(0, -e)) for (b, e), n in zip(pairs, x.shape, strict=True))
    x = x[cut]
    pairs = [(max(0, b), max(0, e)) for b, e in pairs]
    mode = attrs.get("mode", "constant")
    if mode == "constant":
        return [np.pad(x, pairs, constant_values=np.asarray(value).reshape(-1)[0])]
    return [np.pad(x, pairs, mode=mode)]  # reflect, edge, wrap: the names agree


def shape(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate Shape."""
    return [np.array(ins[0].shape[attrs.get("start", 0) : attrs.get("end")], np.int64)]


def constant_of_shape(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate ConstantOfShape."""
    value = attrs.get("value", np.zeros(1, np.float32))
    return [np.full(ins[0].tolist(), value.reshape(-1)[0], value.dtype)]


def expand(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate Expand."""
    shape = np.broadcast_shapes(ins[0].shape, tuple(ins[1].tolist()))
    return [np.broadcast_to(ins[0], shape)]


def gather(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate Gather."""
    return [np.take(ins[0], ins[1].astype(np.int64), axis=attrs.get("axis", 0))]


def _elements(indices: Array, axis: int, size: int) -> tuple[Array, ...]:
    """Return NumPy indexes of the elements that the indices select."""
    places: list[Array] = [*np.indices(indices.shape, sparse=True)]
    whole = indices.astype(np.int64)
    places[axis] = np.where(whole < 0, whole + size, whole)
    return tuple(places)


def gather_elements(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate GatherElements; onnx.reference fails for axes longer than 63."""
    x, indices = ins
    axis = int(attrs.get("axis", 0)) % x.ndim
    return [np.asarray(x[_elements(indices, axis, x.shape[axis])])]


def scatter_elements(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate ScatterElements in index order; onnx.reference loops in Python."""
    x, indices, updates = ins
    axis = int(attrs.get("axis", 0)) % x.ndim
    made, places = x.copy(), _elements(indices, axis, x.shape[axis])
    reduction = attrs.get("reduction", "none")
    if reduction == "none":
        made[places] = updates
    else:
        _REDUCTIONS[reduction].at(made, places, updates)
    return [made]


_REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def depth_to_space(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate DepthToSpace."""
    x, b = ins[0], attrs["blocksize"]
    n, c, h, w = x.shape
    if attrs.get("mode", "DCR") == "DCR":
        y = x.reshape(n, b, b, c // b // b, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // b // b, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return [y.reshape(n, c // b // b, h * b, w * b)]


def space_to_depth(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate SpaceToDepth."""
    x, b = ins[0], attrs["blocksize"]
    n, c, h, w = x.shape
    order = (0, 3, 5, 1, 2, 4) if attrs.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    y = x.reshape(n, c, h // b, b, w // b, b).transpose(order)
    return [y.reshape(n, c * b * b, h // b, w // b)]
