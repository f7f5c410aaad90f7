"""Shape inference of reshaping operators, with symbolic dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.ir.dims import (
    Dim,
    difference,
    evaluated,
    is_static,
    product,
    quotient,
    symbols_of,
    total,
)
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.shaping import reshape_to

Partial = tuple["int | str | None", ...]
"""An integer vector, of which some elements may be symbolic or unknown."""

OPEN_END = (1 << 31) - 1
"""Smallest end of a Slice that means the end of the axis."""


def dynamic(graph: Graph, where: str) -> ModelError:
    """Return the error for a shape that depends on a dynamic dimension or on data."""
    first = ""
    for name in graph.inputs:
        shape = graph.types[name].shape
        if any(isinstance(d, str) for d in shape):
            first = first or name
        for axis, dim in enumerate(shape):
            if isinstance(dim, str) and axis:
                return ShapeError(
                    f"{where}: its shape depends on dimension {axis} (`{dim}`) of input `{name}`, "
                    f"which is not fixed; pass --input-shape {name}:{_example(shape)}"
                )
    if not first:
        return UnsupportedOp(f"{where}: the shape of its output depends on values at run time")
    return ShapeError(
        f"{where}: its shape cannot be found for a dynamic batch; pass --input-shape "
        f"{first}:{_example(graph.types[first].shape)}"
    )


def too_short(graph: Graph, count: int, size: Dim, where: str) -> ModelError:
    """Return the error for an operator that takes more elements than a symbolic axis may have."""
    name, shape = next(
        (name, graph.types[name].shape)
        for name in graph.inputs
        if any(symbols_of(dim) for dim in graph.types[name].shape)
    )
    enough = _example([count if dim == size else dim for dim in shape])
    return ShapeError(
        f"{where}: takes element {count} of an axis of {size}, which may have fewer",
        hint=f"fix the size: --input-shape {name}:{enough}",
    )


def _example(shape: Sequence[Dim]) -> str:
    sizes = {0: 1, 1: 3}
    return "x".join(
        str(d if isinstance(d, int) else sizes.get(i, 224)) for i, d in enumerate(shape)
    )


def broadcast(shapes: Sequence[Sequence[Dim]], where: str) -> tuple[Dim, ...]:
    """Return the shape to which several shapes broadcast.

    Raises
    ------
    ShapeError
        If they do not broadcast.
    """
    rank = max((len(s) for s in shapes), default=0)
    result: list[Dim] = []
    for axis in range(-rank, 0):
        dims = {s[axis] for s in shapes if len(s) >= -axis} - {1}
        if len(dims) > 1:
            listed = ", ".join(str(list(s)) for s in shapes)
            raise ShapeError(f"{where}: shapes {listed} do not fit together")
        result.append(dims.pop() if dims else 1)
    return tuple(result)


def vector(name: str, graph: Graph, partial: Mapping[str, Partial]) -> Partial | None:
    """Return the known elements of an integer vector, or None if its length is unknown."""
    if name in graph.constants:
        return tuple(int(v) for v in graph.constants[name].reshape(-1)[:64])
    if name in partial:
        return partial[name]
    shape = graph.types[name].shape
    if len(shape) == 1 and isinstance(shape[0], int) and shape[0] <= 64:
        return (None,) * shape[0]
    return None


def at_most(dim: Dim | None, limit: Dim, graph: Graph) -> bool:
    """Whether a dimension can never exceed another, given the bounds of symbols.

    Adds symbols that must be 1 or more for it to `Graph.positive`.
    """
    if dim is None:
        return False
    if isinstance(dim, int):
        if dim > evaluated(limit, lambda _: 0):
            graph.positive |= symbols_of(limit)
        return 0 <= dim <= evaluated(limit, lambda _: 1)  # symbols are at least 1
    if difference(limit, dim) is not None:
        return True
    if not isinstance(limit, int) or not symbols_of(dim) <= graph.bounds.keys():
        return False
    return evaluated(dim, graph.bounds.__getitem__) <= limit


def _reshape(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    x = graph.types[node.inputs[0]]
    wanted = vector(node.inputs[1], graph, partial)
    if wanted is None:
        raise dynamic(graph, where)
    allow = bool(node.attrs.get("allowzero"))
    if x.static and is_static(wanted):
        plain = [int(d) for d in wanted if isinstance(d, int)]
        if sum(d == -1 for d in plain) > 1 or any(d < -1 for d in plain):
            raise ShapeError(f"{where}: bad target shape {plain}")
        if not allow and any(d == 0 and i >= len(x.shape) for i, d in enumerate(plain)):
            raise ShapeError(f"{where}: target shape {plain} copies an axis the input lacks")
        full = reshape_to([int(d) for d in x.shape], plain, allow)
        if math.prod(full) != math.prod(int(d) for d in x.shape):
            raise ShapeError(f"{where}: cannot reshape {list(x.shape)} to {plain}")
        return TensorType(tuple(full), x.dtype)
    dims: list[Dim | None] = []
    for i, d in enumerate(wanted):
        if d == 0 and not allow and i < len(x.shape):
            dims.append(x.shape[i])
        else:
            dims.append(None if d == -1 else d)
    open_axes = [i for i, d in enumerate(dims) if d is None]
    rest = quotient(x.shape, [d for d in dims if d is not None])
    if rest is None or len(open_axes) > 1:
        raise dynamic(graph, where)
    if open_axes:
        dims[open_axes[0]] = rest
    elif rest != 1:
        raise ShapeError(f"{where}: cannot reshape {list(x.shape)} to {list(wanted)}")
    return TensorType(tuple(d for d in dims if d is not None), x.dtype)


def _expand(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    x = graph.types[node.inputs[0]]
    wanted = vector(node.inputs[1], graph, partial)
    if wanted is None or None in wanted:
        raise dynamic(graph, where)
    dims = [d for d in wanted if d is not None]
    return TensorType(broadcast([x.shape, dims], where), x.dtype)


def _constant_of_shape(
    node: Node, graph: Graph, partial: Mapping[str, Partial], where: str
) -> TensorType:
    wanted = vector(node.inputs[0], graph, partial)
    if wanted is None or None in wanted:
        raise dynamic(graph, where)
    value = node.attrs.get("value", np.zeros(1, np.float32))
    return TensorType(tuple(d for d in wanted if d is not None), value.dtype.name)


def _flatten(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    x = graph.types[node.inputs[0]]
    axis = node.attrs.get("axis", 1)
    if not 0 <= axis <= len(x.shape):
        raise ShapeError(f"{where}: axis {axis} of a tensor with {len(x.shape)} axes")
    return TensorType((product(x.shape[:axis]), product(x.shape[axis:])), x.dtype)


def _concat(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    types = [graph.types[i] for i in node.inputs]
    shape = list(types[0].shape)
    axis = int(node.attrs["axis"])
    if len({t.dtype for t in types}) > 1:
        raise ModelError(f"{where}: operands have types {', '.join(t.dtype for t in types)}")
    if not -len(shape) <= axis < len(shape):
        raise ShapeError(f"{where}: axis {axis} of a tensor with {len(shape)} axes")
    axis %= len(shape)
    others = {tuple(d for k, d in enumerate(t.shape) if k != axis) for t in types}
    if len({len(t.shape) for t in types} | {len(shape)}) > 1 or len(others) > 1:
        listed = ", ".join(str(list(t.shape)) for t in types)
        raise ShapeError(f"{where}: shapes {listed} do not fit together on axis {axis}")
    shape[axis] = total(t.shape[axis] for t in types)
    return TensorType(tuple(shape), types[0].dtype)


def _tile(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    x = graph.types[node.inputs[0]]
    times = vector(node.inputs[1], graph, partial)
    if times is None or len(times) != len(x.shape):
        raise dynamic(graph, where)
    dims: list[Dim] = []
    for d, t in zip(x.shape, times, strict=True):
        if isinstance(t, int) and (t == 1 or isinstance(d, int)):
            dims.append(d if t == 1 else int(d) * t)
        elif d == 1 and t is not None:
            dims.append(t)
        else:
            raise dynamic(graph, where)
    return TensorType(tuple(dims), x.dtype)


def _range(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    values = [graph.constants.get(i) for i in node.inputs]
    if any(i in partial for i in node.inputs):
        first, end, by = ((vector(i, graph, partial) or (None,))[0] for i in node.inputs)
        between = None if first is None or end is None else difference(end, first)
        if between is None or by != 1:
            raise dynamic(graph, where)
        return TensorType((between,), graph.types[node.inputs[0]].dtype)
    if any(v is None or v.size != 1 for v in values):
        raise dynamic(graph, where)
    start, limit, step = (float(v.reshape(-1)[0]) for v in values if v is not None)
    if not step or not all(math.isfinite(v) for v in (start, limit, step)):
        raise ShapeError(f"{where}: bad range from {start} to {limit} in steps of {step}")
    count = max(0, math.ceil((limit - start) / step))
    return TensorType((count,), graph.types[node.inputs[0]].dtype)


def _pad(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    x = graph.types[node.inputs[0]]
    pads = vector(node.inputs[1], graph, partial)
    rank = len(x.shape)
    axes: Any = range(rank)
    if node.input(3):
        axes = vector(node.inputs[3], graph, partial)
    if pads is None or axes is None or None in pads or None in axes:
        raise dynamic(graph, where)
    if len(pads) != 2 * len(axes) or any(not -rank <= a < rank for a in axes):
        raise ShapeError(f"{where}: {len(pads)} pads for {len(axes)} of {rank} axes")
    dims = list(x.shape)
    for k, axis in enumerate(axes):
        begin, end = pads[k], pads[k + len(axes)]
        if not (begin == 0 and end == 0):
            size = dims[axis]
            if not isinstance(size, int) or isinstance(begin, str) or isinstance(end, str):
                raise dynamic(graph, where)
            dims[axis] = size + int(begin or 0) + int(end or 0)
    return TensorType(tuple(dims), x.dtype)


def _slice(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    x = graph.types[node.inputs[0]]
    given = [vector(i, graph, partial) if i else None for i in node.inputs[1:]]
    if any(i and (v is None or None in v) for i, v in zip(node.inputs[1:], given, strict=True)):
        raise dynamic(graph, where)
    starts, ends, axes, steps = [*given, None, None][:4]
    starts, ends = starts or (), ends or ()
    axes = axes if axes is not None else tuple(range(len(starts)))
    steps = steps if steps is not None else (1,) * len(starts)
    rank, dims = len(x.shape), list(x.shape)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise ShapeError(f"{where}: starts {starts}, ends {ends}, axes {axes}, steps {steps}")
    for axis, low, high, step in zip(axes, starts, ends, steps, strict=True):
        if not isinstance(axis, int) or not -rank <= axis < rank:
            raise ShapeError(f"{where}: axis {axis} of a tensor with {rank} axes")
        size = dims[axis]
        if isinstance(high, int) and high >= OPEN_END:
            high = size if isinstance(size, str) else high
        elif isinstance(high, int) and high < 0 and isinstance(size, str):
            high = difference(size, -high)
        if low == 0 and step == 1 and high == size:
            continue
        if isinstance(size, str) or isinstance(low, str) or isinstance(high, str):
            if isinstance(low, int) and low < 0 and high == size:  # the last `-low` elements
                length: Dim | None = -low if at_most(-low, size, graph) else None
            else:
                length = None if low is None or high is None else difference(high, low)
            if length is not None and step == 1 and not at_most(high, size, graph):
                if isinstance(high, int):
                    known = isinstance(size, int)  # then the start is what is not known
                    raise dynamic(graph, where) if known else too_short(graph, high, size, where)
                free = ", ".join(f"`{s}`" for s in sorted(symbols_of(high or 0)))
                raise ShapeError(
                    f"{where}: takes {high} of {size} elements, and the greatest size of {free} "
                    "is not known",
                    hint="bound it: --max-dim NAME=SIZE",
                )
            if length is None or step != 1:
                raise dynamic(graph, where)
            dims[axis] = length
            continue
        if not all(isinstance(v, int) for v in (size, low, high, step)):
            raise dynamic(graph, where)
        bounds = slice(low, high, step).indices(int(size))
        dims[axis] = len(range(*bounds))
    return TensorType(tuple(dims), x.dtype)


def _resize(node: Node, graph: Graph, partial: Mapping[str, Partial], where: str) -> TensorType:
    """Apply sizes, or scales of known sizes; a symbolic axis must keep its size."""
    kind = graph.types[node.inputs[0]]
    rank = len(kind.shape)
    axes = [int(a) % rank for a in node.attrs.get("axes") or range(rank)]
    if (resized := resized_to(node, graph, partial)) is not None:
        dims = list(kind.shape)
        for axis, size in resized.items():
            dims[axis] = size
        return TensorType(tuple(dims), kind.dtype)
    given = [graph.constants.get(n) if n else None for n in node.inputs[2:4]]
    values = next((v for v in given[::-1] if v is not None and v.size), None)
    if values is None or values.size != len(axes):
        raise dynamic(graph, where)
    shape = list(kind.shape)
    policy = node.attrs.get("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch" and values.dtype.kind in "iu":
        sizes = [shape[axis] for axis in axes]
        known = [size for size in sizes if isinstance(size, int) and size > 0]
        if len(known) < len(sizes):
            raise dynamic(graph, where)
        factors = [v / size for v, size in zip(values.reshape(-1).tolist(), known, strict=True)]
        same = (min if policy == "not_larger" else max)(factors)
        for axis, size in zip(axes, known, strict=True):
            shape[axis] = math.floor(same * size + 0.5)
        return TensorType(tuple(shape), kind.dtype)
    for axis, value in zip(axes, values.reshape(-1).tolist(), strict=True):
        have = shape[axis]
        if values.dtype.kind in "iu":
            shape[axis] = int(value)
        elif isinstance(have, int):
            shape[axis] = math.floor(np.float32(have) * np.float32(value))  # as in onnx
        elif value != 1:
            raise dynamic(graph, where)
    return TensorType(tuple(shape), kind.dtype)


def resized_to(node: Node, graph: Graph, partial: Mapping[str, Partial]) -> dict[int, int] | None:
    """Return the new sizes of a `Resize` whose other axes are symbolic and keep their size.

    Parameters
    ----------
    node : Node
        Its sizes may be computed, as ``Concat(Shape(x)[:2], [12, 12])`` is where the batch is
        symbolic.
    graph : Graph
        Has the type of its data.
    partial : mapping of str to tuple
        Known elements of integer vectors that are not constant.

    Returns
    -------
    dict of int to int, or None
        By axis. None if its sizes are constant or not known, or have an effect on other axes.
    """
    shape = graph.types[node.inputs[0]].shape
    axes = [int(a) % len(shape) for a in node.attrs.get("axes") or range(len(shape))]
    sizes = partial.get(node.input(3))
    if sizes is None or len(sizes) != len(axes):
        return None
    if node.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    if node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return None  # has a region for each axis
    fixed = {a: size for a, size in zip(axes, sizes, strict=True) if isinstance(size, int)}
    kept = all(shape[a] == size for a, size in zip(axes, sizes, strict=True) if a not in fixed)
    return fixed if kept else None


RULES = {
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Flatten": _flatten,
    "Pad": _pad,
    "Range": _range,
    "Resize": _resize,
    "Reshape": _reshape,
    "Slice": _slice,
    "Tile": _tile,
}
"""Shape rule of each operator."""
