"""Indexing, scattering, sorting, searching and prefix operators."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from bnncc.frontend.pytorch.program import Ref
from bnncc.frontend.pytorch.site import FLOATS, Name, Rule, Site, Value
from bnncc.ir.moves import inverse

_PREFIXES = 1024
"""Maximum length of an axis whose prefixes are computed one by one."""


# ------------------------------------------------------------------------------------------ picking


def _embedding(site: Site) -> Name:
    return site.emit("Gather", [site.tensor("weight"), site.tensor("indices")], axis=0)


def _embedding_bag(site: Site) -> list[Any]:
    """Emit bags of equal size, given by two-dimensional indices."""
    weight, indices = site.tensor("weight"), site.tensor("indices")
    offsets = site.held(site.tensor("offsets"))
    count = indices.shape[0]
    if offsets is None or not isinstance(count, int) or (site.get("padding_idx") or -1) >= 0:
        raise site.refuse(
            "bags of a size that depends on data, or with padding",
            hint="use torch.nn.Embedding, and a sum or mean of its result",
        )
    ends = offsets[1:] if site.get("include_last_offset") else np.append(offsets[1:], count)
    starts = offsets[: len(ends)]
    size = int(ends[0] - starts[0])
    if size < 1 or (ends - starts != size).any() or starts[0] != 0:
        raise site.refuse("bags of several sizes")
    bags = site.reshape(indices, [len(ends), size])
    made = site.emit("Gather", [weight, bags], axis=0)
    if site.has("per_sample_weights"):
        factors = site.reshape(site.tensor("per_sample_weights"), [len(ends), size, 1])
        made = site.emit("Mul", [made, factors])
    op = ("ReduceSum", "ReduceMean", "ReduceMax")[site.get("mode", 0)]
    return [site.emit(op, [made, site.ints_const([1])], keepdims=0)]


def _gather(op: str, site: Site) -> Name:
    x = site.tensor("self")
    return site.emit(op, [x, site.tensor("index")], axis=site.axis("dim", x.rank))


def _take(site: Site) -> Name:
    return site.emit("Gather", [site.reshape(site.tensor("self"), [-1]), site.tensor("index")])


def _indices(site: Site, x: Value) -> tuple[list[int], list[Value]]:
    """Return the indexed axes and their indices; a stored mask is converted to indices."""
    axes: list[int] = []
    found: list[Value] = []
    axis = 0
    for given in site.get("indices"):
        if given is None:
            axis += 1
            continue
        value = site.value(given)
        if value.dtype in ("bool", "uint8"):
            mask = site.held(value)
            if mask is None:
                raise site.refuse(
                    "the result's shape depends on data", hint="use torch.where instead"
                )
            for place in np.nonzero(mask):
                name = site.const(place, "int64")
                axes.append(axis)
                found.append(Value(name, "int64", place.shape))
                axis += 1
            continue
        found.append(site.typed(value, "int64"))
        axes.append(axis)
        axis += 1
    if axis > x.rank:
        raise site.refuse(f"{axis} indices for {x.rank} axes")
    return axes, found


def _together(site: Site, indices: list[Value]) -> tuple[Name, int]:
    """Return broadcast indices stacked along a last axis, and the number of axes before it."""
    rank = max(i.rank for i in indices)
    alike = len({i.shape for i in indices}) == 1
    total: Name = indices[0]
    if not alike:
        for more in indices[1:]:
            total = site.emit("Add", [total, more])
        zero = site.emit("Sub", [total, total])
        names: list[Name] = [site.emit("Add", [i, zero]) for i in indices]
    else:
        names = [*indices]
    last = site.ints_const([rank])
    parts = [site.emit("Unsqueeze", [n, last]) for n in names]
    return (parts[0] if len(parts) == 1 else site.emit("Concat", parts, axis=rank)), rank


def _fronted(axes: list[int], rank: int) -> list[int]:
    """Return the permutation that moves the axes to the front."""
    return [*axes, *(k for k in range(rank) if k not in axes)]


def _places(axes: list[int], rank: int, width: int) -> list[int]:
    """Return the positions of indexed axes, which are in front, in torch's result.

    They stay in front unless they are adjacent: then they take the place of the first.
    """
    total = rank - len(axes) + width
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    before = axes[0] if together else 0
    return [*range(width, width + before), *range(width), *range(width + before, total)]


def _index(site: Site) -> Name:
    """``x[:, rows, columns]``."""
    x = site.tensor("self")
    axes, indices = _indices(site, x)
    if not axes:
        return x
    if len(axes) == 1:
        return site.emit("Gather", [x, indices[0]], axis=axes[0])
    together, width = _together(site, indices)
    perm = _fronted(axes, x.rank)
    data = _ordered(site, x, perm)
    made = site.emit("GatherND", [data, together])
    order = _places(axes, x.rank, width)
    return _ordered(site, made, order)


def _index_put(site: Site) -> Name:
    """``x[mask] = number``, or ``x[:, rows, columns] = values``."""
    x, values = site.tensor("self"), site.tensor("values")
    given = [i for i in site.get("indices") if i is not None]
    accumulate = bool(site.get("accumulate"))
    first = site.value(given[0]) if given else None
    if first is None:
        return site.expand(site.cast(values, x.dtype), x)
    if len(given) == 1 and first.dtype == "bool" and site.held(first) is None:
        return _masked(site, x, first, values, accumulate)
    axes, indices = _indices(site, x)
    together, width = _together(site, indices)
    perm = _fronted(axes, x.rank)
    data = _ordered(site, x, perm)
    order = _places(axes, x.rank, width)
    # Values have the shape of x[indices], or one that broadcasts to it.
    shape = site.emit("Shape", [_index(site)])
    spread: Name = site.emit("Expand", [site.cast(values, x.dtype), shape])
    spread = _ordered(site, spread, inverse(order))
    made = site.emit("ScatterND", [data, together, spread], reduction="add" if accumulate else None)
    return _ordered(site, made, inverse(perm))


def _masked(site: Site, x: Value, mask: Value, values: Value, accumulate: bool) -> Name:
    before = next(k for k, i in enumerate(site.get("indices")) if i is not None)
    single = math.prod(d if isinstance(d, int) else 2 for d in values.shape) == 1
    if not single or before + mask.rank > x.rank:
        raise site.refuse(
            "values for what a mask selects: their number depends on data",
            hint="use torch.where instead",
        )
    name: Name = mask
    if behind := list(range(mask.rank, x.rank - before)):
        name = site.emit("Unsqueeze", [mask, site.ints_const(behind)])
    number: Name = site.reshape(site.cast(values, x.dtype), [])
    if accumulate:
        number = site.emit("Add", [x, number])
    return site.emit("Where", [name, number, x])


def _masked_scatter(site: Site) -> Name:
    """Copy consecutive elements of a tensor to the positions where a mask is set."""
    x, mask = site.tensor("self"), site.tensor("mask")
    wide = mask if mask.shape == x.shape else site.expand(mask, x)
    flat = site.cast(site.reshape(wide, [-1]), "int64", "bool")
    count = site.emit("CumSum", [flat, site.const(0, "int64")])
    place = site.emit("Sub", [count, site.const(1, "int64")])
    place = site.emit("Max", [place, site.const(0, "int64")])
    source = site.reshape(site.cast(site.tensor("source"), x.dtype), [-1])
    picked = site.emit("Gather", [source, place], axis=0)
    shaped = site.emit("Reshape", [picked, site.shape_of(x)])
    return site.emit("Where", [wide, shaped, x])


# --------------------------------------------------------------------------------------- scattering

_REDUCE = {
    **{"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max"},
    **{"amin": "min"},
}


def _neutral(kind: str, dtype: str) -> Any:
    if kind in ("add", "mul"):
        return 0 if kind == "add" else 1
    if dtype in FLOATS:
        limits = ml_dtypes.finfo(dtype)
        return float(limits.min if kind == "max" else limits.max)
    if dtype == "bool":
        return kind == "min"
    info = np.iinfo(dtype)
    return info.min if kind == "max" else info.max


def _scatter(site: Site, *, reduce: str | None = None) -> Name:
    """Write ``scatter`` and its variants, elementwise along an axis."""
    x, index = site.tensor("self"), site.tensor("index")
    axis = site.axis("dim", x.rank)
    how = site.get("reduce", reduce)
    if how is not None and how not in (*_REDUCE, "mean"):
        raise site.refuse(f"`reduce` is {str(how)[:20]}")
    source = site.get("src", site.get("value"))
    updates = _updates(site, source, index, x.dtype)
    if x.rank == 0:
        return site.reshape(updates, [])
    data: Name = x
    if not site.get("include_self", True):
        kind = "add" if how == "mean" else _REDUCE[str(how)]
        start = site.filled(site.shape_of(index), _neutral(kind, x.dtype), x.dtype)
        data = site.emit("ScatterElements", [data, index, start], axis=axis)
    if how != "mean":
        reduction = _REDUCE[how] if how else None
        inputs = [data, index, updates]
        return site.emit("ScatterElements", inputs, axis=axis, reduction=reduction)
    if x.dtype not in FLOATS:
        raise site.refuse("the mean of integers")
    total = site.emit("ScatterElements", [data, index, updates], axis=axis, reduction="add")
    ones = site.filled(site.shape_of(index), 1, x.dtype)
    whole = site.filled(site.shape_of(x), int(site.get("include_self", True)), x.dtype)
    count = site.emit("ScatterElements", [whole, index, ones], axis=axis, reduction="add")
    return site.emit("Div", [total, site.emit("Max", [count, site.const(1, x.dtype)])])


def _updates(site: Site, source: Any, index: Value, dtype: str) -> Name:
    """Return the values to scatter, in the shape of the indices."""
    if not isinstance(source, Ref):
        return site.filled(site.shape_of(index), source, dtype)
    value = site.value(source)
    name: Name = site.cast(value, dtype)
    if value.rank == 0 and index.rank:
        return site.expand(name, index)
    for axis, (have, want) in enumerate(zip(value.shape, index.shape, strict=True)):
        if have != want:
            name = site.slice(name, axis, 0, site.known(want, axis))
    return name


def _index_along(op: str, site: Site) -> Name:
    """Write ``index_add``, ``index_copy`` and ``index_fill``."""
    x, index = site.tensor("self"), site.tensor("index")
    axis = site.axis("dim", x.rank)
    if x.rank == 0:
        raise site.refuse("a tensor without axes")
    place: Name = site.cast(index, "int64")
    column = site.reshape(place, [-1, *[1] * (x.rank - 1 - axis)])
    if op == "fill":
        picked = site.emit("Gather", [x, site.reshape(place, [-1])], axis=axis)
        shape = site.emit("Shape", [picked])
        value = site.reshape(site.operand(site.get("value"), x.dtype), [])
        source: Name = site.emit("Expand", [value, shape])
    else:
        given = site.tensor("source")
        source = site.cast(given, x.dtype)
        shape = site.shape_of(given)
        if site.get("alpha", 1) != 1:
            source = site.emit("Mul", [source, site.operand(site.get("alpha"), x.dtype)])
    wide = site.emit("Expand", [column, shape])
    reduction = "add" if op == "add" else None
    return site.emit("ScatterElements", [x, wide, source], axis=axis, reduction=reduction)


def _scatter_part(site: Site) -> Name:
    """Copy a tensor, replacing a part along one axis; the part may be strided."""
    x, source = site.tensor("self"), site.tensor("src")
    axis = site.axis("dim", x.rank)
    size = site.known(x.shape[axis], axis)
    part: Name = site.cast(source, x.dtype)
    if site.call.target.startswith("select"):
        start = site.get("index") % size
        places = [start]
        part = site.emit("Unsqueeze", [source, site.ints_const([axis])])
    else:
        bounds = slice(site.get("start"), site.get("end"), site.get("step", 1))
        if not all(isinstance(n, int | None) for n in (bounds.start, bounds.stop, bounds.step)):
            raise site.refuse("its bounds are dynamic")
        places = list(range(*bounds.indices(size)))
    return placed(site, x, part, axis, places)


def placed(site: Site, x: Value, part: Name, axis: int, places: list[int]) -> Name:
    """Return `x` with `part` at given positions along an axis."""
    size = site.known(x.shape[axis], axis)
    if not places:
        return x
    if places == list(range(places[0], places[0] + len(places))):
        parts: list[Name] = [part]
        if places[0] > 0:
            parts.insert(0, site.slice(x, axis, 0, places[0]))
        if places[-1] + 1 < size:
            parts.append(site.slice(x, axis, places[-1] + 1, size))
        return part if len(parts) == 1 else site.emit("Concat", parts, axis=axis)
    both = site.emit("Concat", [x, part], axis=axis)
    order = np.arange(size)
    order[places] = size + np.arange(len(places))
    return site.emit("Gather", [both, site.ints_const(order.tolist())], axis=axis)


# ---------------------------------------------------------------------------------------- diagonals


def diagonal_places(site: Site, x: Value) -> tuple[list[int], np.ndarray, list[int]]:
    """Return the axis order with the axes of a diagonal last, its positions, and their sizes."""
    one, two = site.axis("dim1", x.rank, 0), site.axis("dim2", x.rank, 1)
    offset = site.get("offset", 0)
    rows, columns = (site.known(x.shape[a], a) for a in (one, two))
    perm = [*(k for k in range(x.rank) if k not in (one, two)), one, two]
    return perm, _on_diagonal(rows, columns, offset), [rows, columns]


def _on_diagonal(rows: int, columns: int, offset: int) -> np.ndarray:
    first, second = max(0, -offset), max(0, offset)
    count = max(0, min(rows - first, columns - second))
    return (first + np.arange(count)) * columns + second + np.arange(count)


def _diagonal(site: Site) -> Name:
    x = site.tensor("self")
    perm, places, _ = diagonal_places(site, x)
    flat = site.reshape(_ordered(site, x, perm), [*[0] * (x.rank - 2), -1])
    return site.emit("Gather", [flat, site.ints_const(places.tolist())], axis=x.rank - 2)


def _ordered(site: Site, x: Name, perm: list[int]) -> Name:
    return x if perm == sorted(perm) else site.transpose(x, perm)


def put_diagonal(site: Site, x: Value, source: Name) -> Name:
    """Return `x` with its diagonal replaced."""
    perm, places, sizes = diagonal_places(site, x)
    lead = [0] * (x.rank - 2)
    flat = site.reshape(_ordered(site, x, perm), [*lead, -1])
    area = math.prod(sizes)
    both = site.emit("Concat", [flat, source], axis=x.rank - 2)
    order = np.arange(area)
    order[places] = area + np.arange(len(places))
    made = site.emit("Gather", [both, site.ints_const(order.tolist())], axis=x.rank - 2)
    made = site.reshape(made, [*lead, *sizes])
    return site.transpose(made, inverse(perm))


def _diagonal_scatter(site: Site) -> Name:
    x = site.tensor("self")
    return put_diagonal(site, x, site.cast(site.tensor("src"), x.dtype))


def _diag(site: Site) -> Name:
    """Return a matrix's diagonal, or the matrix of a diagonal."""
    x, offset = site.tensor("self"), site.get("diagonal", 0)
    if x.rank == 1:
        return _embedded(site, x, offset, 0, 1)
    rows, columns = (site.known(x.shape[a], a) for a in (0, 1))
    places = _on_diagonal(rows, columns, offset)
    return site.emit("Gather", [site.reshape(x, [-1]), site.ints_const(places.tolist())], axis=0)


def _diag_embed(site: Site) -> Name:
    x = site.tensor("self")
    one, two = site.axis("dim1", x.rank + 1, -2), site.axis("dim2", x.rank + 1, -1)
    return _embedded(site, x, site.get("offset", 0), one, two)


def _embedded(site: Site, x: Value, offset: int, one: int, two: int) -> Name:
    count = site.known(x.shape[-1], x.rank - 1)
    size = count + abs(offset)
    pads = np.zeros((2, x.rank), np.int64)
    pads[1, -1] = 1  # append a zero
    longer = site.emit("Pad", [x, site.ints_const(pads.reshape(-1).tolist())])
    places = np.full((size, size), count)
    rows = max(0, -offset) + np.arange(count)
    places[rows, rows + offset] = np.arange(count)
    made = site.emit("Gather", [longer, site.const(places, "int64")], axis=x.rank - 1)
    rest = iter(range(x.rank - 1))
    perm = [
        x.rank - 1 if k == one else x.rank if k == two else next(rest) for k in range(x.rank + 1)
    ]
    return _ordered(site, made, perm)


# ---------------------------------------------------------------------------- sorting and searching


def _ordered_by(site: Site, x: Value, count: Any, axis: int, largest: bool) -> list[Any]:
    if x.rank == 0:
        return [x, site.const(0, "int64")]
    size = site.ints_const([count]) if isinstance(count, int) else count
    data: Name = site.cast(x, "int32") if x.dtype == "bool" else x
    made = site.emit_many("TopK", [data, size], 2, axis=axis, largest=int(largest), sorted=1)
    return [site.cast(made[0], "bool", "int32"), made[1]] if x.dtype == "bool" else [*made]


def _top_k(site: Site) -> list[Any]:
    x = site.tensor("self")
    count = site.get("k")
    size = site.shape([count]) if isinstance(count, Ref) else count
    axis = site.axis("dim", x.rank, -1)
    return _ordered_by(site, x, size, axis, site.get("largest", True))


def _sorted(site: Site, x: Value, axis: int, descending: bool) -> list[Any]:
    size = x.shape[axis] if x.rank else 1
    if not isinstance(size, int):
        size = site.emit("Shape", [x], start=axis, end=axis + 1)
    return _ordered_by(site, x, size, axis, descending)


def _sort(part: int | None, site: Site) -> Name | list[Any]:
    """Write sorting; `part` selects values (0) or indices (1) only."""
    x = site.tensor("self")
    default = 0 if site.call.target.startswith("msort") else -1
    axis = site.axis("dim", x.rank, default)
    made = _sorted(site, x, axis, bool(site.get("descending", False)))
    return made if part is None else made[part]


def _ranked(site: Site, x: Value, axis: int, rank: int, keep: bool) -> list[Any]:
    """Return the value with a given rank, counted from the smallest, and its index."""
    made = _sorted(site, x, axis, descending=False)
    if x.rank == 0:
        return made
    if keep:
        return [site.slice(m, axis, rank, rank + 1) for m in made]
    return [site.emit("Gather", [m, site.const(rank, "int64")], axis=axis) for m in made]


def _kth(site: Site) -> list[Any]:
    x = site.tensor("self")
    axis = site.axis("dim", x.rank, -1)
    return _ranked(site, x, axis, site.get("k") - 1, bool(site.get("keepdim", False)))


def _median(site: Site) -> Name | list[Any]:
    x = site.tensor("self")
    if "dim" in site.call.args:
        axis = site.axis("dim", x.rank)
        size = site.known(x.shape[axis], axis) if x.rank else 1
        return _ranked(site, x, axis, (size - 1) // 2, bool(site.get("keepdim", False)))
    count = math.prod(site.known(d, k) for k, d in enumerate(x.shape))
    flat = Value(site.reshape(x, [-1]), x.dtype, (count,))
    return _ranked(site, flat, 0, (count - 1) // 2, keep=False)[0]


def _buckets(site: Site) -> Name:
    """Write ``searchsorted`` and ``bucketize``: the number of boundaries below."""
    edges = site.tensor("boundaries" if site.has("boundaries") else "sorted_sequence")
    given = site.get("self")
    if site.has("sorter"):
        raise site.refuse("with a sorter")
    right = bool(site.get("right", False)) or site.get("side") == "right"
    if isinstance(given, Ref):
        x = site.value(given)
        value: Name = site.emit("Unsqueeze", [x, site.ints_const([x.rank])])
        dtype = x.dtype
    else:
        value, dtype = site.const(given, edges.dtype), edges.dtype
    limits: Name = edges
    if edges.rank > 1:
        limits = site.emit("Unsqueeze", [edges, site.ints_const([edges.rank - 1])])
    if dtype != edges.dtype:
        raise site.refuse(f"values of {dtype} among boundaries of {edges.dtype}")
    below = site.emit("GreaterOrEqual" if right else "Greater", [value, limits])
    counted = site.cast(below, "int64", "bool")
    made = site.emit("ReduceSum", [counted, site.ints_const([-1])], keepdims=0)
    return site.cast(made, site.out.dtype, "int64")


def _one_hot(site: Site) -> Name:
    x, count = site.tensor("self"), site.get("num_classes", -1)
    if not isinstance(count, int) or count < 1:
        raise site.refuse("the number of classes depends on data", hint="pass num_classes")
    column = site.emit("Unsqueeze", [x, site.ints_const([x.rank])])
    classes = site.const(np.arange(count), x.dtype)
    return site.cast(site.emit("Equal", [column, classes]), "int64", "bool")


# ---------------------------------------------------------------------------------------- prefixes


def _prefixes(site: Site, x: Value, axis: int, outside: Any) -> tuple[Name, int]:
    """Return, for each position along an axis, all values, with `outside` after it."""
    size = site.known(x.shape[axis], axis) if x.rank else 1
    if size > _PREFIXES:
        raise site.refuse(f"along an axis of {size}, at most {_PREFIXES} can be")
    rows = site.emit("Unsqueeze", [x, site.ints_const([axis])])
    mask = np.tril(np.ones((size, size), bool)).reshape(size, size, *[1] * (x.rank - axis - 1))
    return site.emit(
        "Where", [site.const(mask, "bool"), rows, site.const(outside, x.dtype)]
    ), axis + 1


def _cumulated(op: str, outside: Any, site: Site) -> Name:
    x = site.tensor("self")
    if x.rank == 0:
        return x
    x = site.typed(x, site.out.dtype)
    rows, axis = _prefixes(site, x, site.axis("dim", x.rank), outside)
    return site.emit(op, [rows, site.ints_const([axis])], keepdims=0)


def _cumulated_extreme(op: str, place: str, site: Site) -> list[Any]:
    """Write ``cummax`` and ``cummin``; of equal values, the last index is returned."""
    x = site.tensor("self")
    if x.rank == 0:
        return [x, site.const(0, "int64")]
    kind = "max" if op == "ReduceMax" else "min"
    rows, axis = _prefixes(site, x, site.axis("dim", x.rank), _neutral(kind, x.dtype))
    values = site.emit(op, [rows, site.ints_const([axis])], keepdims=0)
    if x.dtype not in FLOATS:
        raise site.refuse("of integers, of which none is beyond all others")
    return [values, site.emit(place, [rows], axis=axis, keepdims=0, select_last_index=1)]


def _repeated(site: Site) -> Name:
    """Write ``repeat_interleave``: repeat each element, or each slice along an axis."""
    x = site.tensor("self")
    axis = 0 if site.get("dim") is None else site.axis("dim", x.rank)
    if site.get("dim") is None:
        count = math.prod(site.known(d, k) for k, d in enumerate(x.shape))
        x = Value(site.reshape(x, [-1]), x.dtype, (count,))
    times = site.get("repeats")
    if isinstance(times, Ref):
        held = site.held(site.value(times))
        if held is None:
            raise site.refuse("the result's shape depends on data")
        times = held
    size = site.known(x.shape[axis], axis)
    places = np.repeat(np.arange(size), times)
    return site.emit("Gather", [x, site.ints_const(places.tolist())], axis=axis)


RULES: dict[str, Rule] = {
    **{f"scatter.{k}": _scatter for k in ("src", "value", "reduce", "value_reduce")},
    **{f"sort.{k}": partial(_sort, None) for k in ("default", "stable")},
    **{f"argsort.{k}": partial(_sort, 1) for k in ("default", "stable")},
    **{f"median.{k}": _median for k in ("default", "dim")},
    **{f"bucketize.{k}": _buckets for k in ("Tensor", "Scalar")},
    **{f"searchsorted.{k}": _buckets for k in ("Tensor", "Scalar")},
    **{f"index_fill.int_{k}": partial(_index_along, "fill") for k in ("Scalar", "Tensor")},
    **{f"repeat_interleave.{k}": _repeated for k in ("self_int", "self_Tensor")},
    **{f"{k}_scatter.default": _scatter_part for k in ("select", "slice")},
    **dict.fromkeys(("diagonal.default", "diagonal_copy.default"), _diagonal),
    **dict.fromkeys(("index.Tensor", "_unsafe_index.Tensor"), _index),
    **dict.fromkeys(("index_put.default", "_unsafe_index_put.default"), _index_put),
    "cummax.default": partial(_cumulated_extreme, "ReduceMax", "ArgMax"),
    "cummin.default": partial(_cumulated_extreme, "ReduceMin", "ArgMin"),
    "cumprod.default": partial(_cumulated, "ReduceProd", 1),
    "diag.default": _diag,
    "diag_embed.default": _diag_embed,
    "diagonal_scatter.default": _diagonal_scatter,
    **dict.fromkeys(("embedding_bag.default", "_embedding_bag.default"), _embedding_bag),
    "embedding_bag.padding_idx": _embedding_bag,
    "embedding.default": _embedding,
    "gather.default": partial(_gather, "GatherElements"),
    "index_add.default": partial(_index_along, "add"),
    "index_copy.default": partial(_index_along, "copy"),
    "index_select.default": partial(_gather, "Gather"),
    "kthvalue.default": _kth,
    "logcumsumexp.default": partial(_cumulated, "ReduceLogSumExp", -math.inf),
    "masked_scatter.default": _masked_scatter,
    "msort.default": partial(_sort, 0),
    "one_hot.default": _one_hot,
    "scatter_add.default": partial(_scatter, reduce="add"),
    "scatter_reduce.two": _scatter,
    "take.default": _take,
    "topk.default": _top_k,
}
"""Rules, by operator."""
