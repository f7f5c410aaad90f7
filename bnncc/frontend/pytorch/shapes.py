"""Operators that move elements, and the arithmetic of shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bnncc.frontend.pytorch.program import Ref
from bnncc.frontend.pytorch.site import MAX_PARAMETER, Name, Rule, Site, Value
from bnncc.ir.dims import is_static

_END = (1 << 63) - 1


def _view(site: Site) -> Name:
    x = site.value(site.first())
    if site.has("dtype"):
        raise site.refuse("views a tensor's bytes as another type")
    return site.reshape(x, site.get("size", site.get("shape")))


def _view_as(site: Site) -> Name:
    return site.emit("Reshape", [site.tensor("self"), site.shape_of(site.tensor("other"))])


def _flatten(site: Site) -> Name:
    x = site.tensor("self")
    start, end = site.axis("start_dim", x.rank), site.axis("end_dim", x.rank, -1)
    if start == 1 and end == x.rank - 1:
        return site.emit("Flatten", [x], axis=1)
    return site.reshape(x, [*[0] * start, -1, *_behind(site, x, end)])


def _behind(site: Site, x: Value, axis: int) -> list[int]:
    """Return the sizes of the axes after `axis`."""
    return site.sizes(x.shape[axis + 1 :], f"an axis behind axis {axis} is dynamic")


def _unflatten(site: Site) -> Name:
    x = site.tensor("self")
    axis = site.axis("dim", x.rank)
    return site.reshape(x, [*[0] * axis, *site.get("sizes"), *_behind(site, x, axis)])


def _unsqueeze(site: Site) -> Name:
    x = site.tensor("self")
    return site.emit("Unsqueeze", [x, site.ints_const([site.axis("dim", x.rank + 1)])])


def _squeeze(site: Site) -> Name:
    x = site.tensor("self")
    given = site.get("dim", list(range(x.rank)))
    axes = [d % max(1, x.rank) for d in (given if isinstance(given, list) else [given])]
    axes = [a for a in axes if x.rank and x.shape[a] == 1]
    return site.emit("Squeeze", [x, site.ints_const(axes)]) if axes else x


def _permute(site: Site) -> Name:
    x = site.tensor("self")
    return site.transpose(x, [d % x.rank for d in site.get("dims")])


def _swap(site: Site) -> Name:
    x = site.tensor("self")
    names = ("dim0", "dim1") if "dim0" in site.call.args else ("axis0", "axis1")
    a, b = (site.axis(k, x.rank) for k in names)
    return _swapped(site, x, a, b)


def _swapped(site: Site, x: Value, a: int, b: int) -> Name:
    perm = list(range(x.rank))
    perm[a], perm[b] = b, a
    return site.transpose(x, perm)


def _t(site: Site) -> Name:
    x = site.tensor("self")
    return _swapped(site, x, 0, 1) if x.rank == 2 else x


def _turned(site: Site, *, last: bool) -> Name:
    """Write ``x.mT``, which swaps the last two axes, or ``x.T``, which reverses all."""
    x = site.tensor("self")
    if last:
        return _swapped(site, x, x.rank - 2, x.rank - 1)
    return site.transpose(x, list(range(x.rank))[::-1])


def _movedim(site: Site) -> Name:
    x = site.tensor("self")
    sources, places = (
        [d % x.rank for d in (given if isinstance(given, list) else [given])]
        for given in (site.get("source"), site.get("destination"))
    )
    perm = [k for k in range(x.rank) if k not in sources]
    for place, source in sorted(zip(places, sources, strict=True)):
        perm.insert(place, source)
    return site.transpose(x, perm)


def _as_strided(site: Site) -> Name:
    x, size, stride = site.tensor("self"), site.get("size"), site.get("stride")
    start = site.get("storage_offset") or 0
    numbers = [*size, *stride, start, *x.shape]
    if not site.contiguous("self") or not is_static(numbers):
        raise site.refuse("of a view, or of what is dynamic")
    places = start + sum(
        (np.arange(n).reshape(-1, *[1] * (len(size) - k - 1)) * step)
        for k, (n, step) in enumerate(zip(size, stride, strict=True))
    )
    places = np.broadcast_to(places, size)
    return site.emit("Gather", [site.reshape(x, [-1]), site.const(places, "int64")], axis=0)


def _ravel(site: Site) -> Name:
    return site.reshape(site.tensor("self"), [-1])


def _made_of_numbers(make: Callable[[Site], Any], site: Site) -> Name:
    """Write a tensor that depends on numbers only."""
    value = make(site)
    if value.size > MAX_PARAMETER:
        raise site.refuse(f"has {value.size} elements, at most {MAX_PARAMETER} can be made")
    return site.const(value, site.out.dtype)


def _int(site: Site, key: str, default: int | None = None) -> int:
    value = site.get(key, default)
    if not isinstance(value, int):
        raise site.refuse(f"`{key}` is dynamic")
    if not -MAX_PARAMETER <= value <= MAX_PARAMETER:
        raise site.refuse(f"`{key}` is {value}")
    return value


def _eye(site: Site) -> Any:
    rows = _int(site, "n")
    columns = _int(site, "m", rows)
    if rows * columns > MAX_PARAMETER:
        raise site.refuse(f"has {rows} x {columns} elements")
    return np.eye(rows, columns)


def _linspace(site: Site) -> Any:
    start, end, steps = site.get("start"), site.get("end"), _int(site, "steps")
    if isinstance(start, Ref) or isinstance(end, Ref):
        raise site.refuse("its bounds are tensors")
    return np.linspace(start, end, steps)


def _triangle_places(site: Site, *, upper: bool) -> Any:
    rows, columns = _int(site, "row"), _int(site, "col")
    if rows * columns > MAX_PARAMETER:
        raise site.refuse(f"of {rows} x {columns} elements")
    mask = np.ones((rows, columns), bool)
    offset = _int(site, "offset", 0)
    return np.stack(np.nonzero(np.triu(mask, offset) if upper else np.tril(mask, offset)))


def _expand(site: Site) -> Name:
    sizes = [1 if d == -1 else d for d in site.get("size")]  # 1 keeps a size
    return site.emit("Expand", [site.tensor("self"), site.shape(sizes)])


def _expand_as(site: Site) -> Name:
    return site.expand(site.tensor("self"), site.tensor("other"))


def _repeat(site: Site) -> Name:
    x = site.tensor("self")
    counts = site.get("repeats", site.get("dims"))
    if len(counts) < x.rank:
        counts = [1] * (x.rank - len(counts)) + counts
    if len(counts) > x.rank:
        axes = list(range(len(counts) - x.rank))
        return site.emit(
            "Tile", [site.emit("Unsqueeze", [x, site.ints_const(axes)]), site.shape(counts)]
        )
    return site.emit("Tile", [x, site.shape(counts)])


def _cat(site: Site) -> Name:
    values = [site.value(r) for r in site.get("tensors")]
    values = [v for v in values if v.shape != (0,)] or values
    axis = site.axis("dim", values[0].rank)
    parts = [site.cast(v, site.out.dtype) for v in values]
    return parts[0] if len(parts) == 1 else site.emit("Concat", parts, axis=axis)


def _stack(site: Site) -> Name:
    values = [site.value(r) for r in site.get("tensors")]
    axis = site.axis("dim", values[0].rank + 1)
    at = site.ints_const([axis])
    parts = [site.emit("Unsqueeze", [site.cast(v, site.out.dtype), at]) for v in values]
    return site.emit("Concat", parts, axis=axis)


def _split(site: Site) -> list[Any]:
    """Write ``split``, ``split_with_sizes`` and ``chunk``, with the recorded sizes."""
    x = site.value(site.first())
    axis = site.axis("dim", x.rank)
    if len(site.outs()) == 1:
        return [x]
    given = [meta.shape[axis] for meta in site.outs()]
    sizes = site.ints_const(site.sizes(given, f"splits axis {axis}, which is dynamic"))
    return [*site.emit_many("Split", [x, sizes], len(given), axis=axis)]


def _unbind(site: Site) -> list[Any]:
    x = site.tensor("self")
    axis = site.axis("dim", x.rank)
    at = site.ints_const([axis])
    return [
        site.emit("Squeeze", [site.slice(x, axis, k, k + 1), at])
        for k in range(len(site.call.outputs))
    ]


def _select(site: Site) -> Name:
    x, index = site.tensor("self"), site.get("index")
    axis = site.axis("dim", x.rank)
    if isinstance(index, Ref):
        position: Name = site.reshape(site.value(index), [])
    else:
        position = site.const(index, "int64")
    return site.emit("Gather", [x, position], axis=axis)


def _slice(site: Site) -> Name:
    x = site.tensor("self")
    axis = site.axis("dim", x.rank)
    start, end, step = site.get("start"), site.get("end"), site.get("step", 1)
    start = 0 if start is None else start
    end = _END if end is None else end
    if start == 0 and end == _END and step == 1:
        return x
    bounds = [site.shape([n]) for n in (start, end)]
    return site.emit("Slice", [x, *bounds, site.ints_const([axis]), site.ints_const([step])])


def _narrow(site: Site) -> Name:
    x, start, length = site.tensor("self"), site.get("start"), site.get("length")
    axis = site.axis("dim", x.rank)
    if not isinstance(start, int) or not isinstance(length, int):
        raise site.refuse("its bounds are dynamic")
    start = start + int(x.shape[axis]) if start < 0 else start
    return site.slice(x, axis, start, start + length)


def _flip(site: Site) -> Name:
    x: Name = site.tensor("self")
    for dim in site.get("dims"):
        x = site.slice(x, dim % site.tensor("self").rank, -1, -_END, -1)
    return x


def _roll(site: Site) -> Name:
    x, dims, shifts = site.tensor("self"), site.get("dims"), site.get("shifts")
    value, shape = x, list(x.shape)
    if not dims:  # on the flattened tensor
        shape = [math.prod(site.known(n, k) for k, n in enumerate(x.shape))]
        dims, value = [0], Value(site.reshape(x, [-1]), x.dtype, tuple(shape))
    made: Name = value
    for shift, dim in zip(shifts, dims, strict=True):
        axis = dim % len(shape)
        size = site.known(shape[axis], axis)
        if size and shift % size:
            cut = size - shift % size
            parts = [site.slice(made, axis, cut, size), site.slice(made, axis, 0, cut)]
            made = site.emit("Concat", parts, axis=axis)
    return made if site.get("dims") else site.emit("Reshape", [made, site.shape_of(x)])


def _regrouped(site: Site, x: Value, parts: list[int], order: list[int], whole: list[int]) -> Name:
    """Split the last axes of `x` into parts, permute them, and merge them again."""
    lead = x.rank - len(whole)
    cut = site.reshape(x, [*[0] * lead, *parts])
    turned = site.transpose(cut, [*range(lead), *(lead + k for k in order)])
    return site.reshape(turned, [*[0] * lead, *whole])


def _pixel_shuffle(site: Site) -> Name:
    x, block = site.tensor("self"), site.get("upscale_factor")
    if x.rank == 4:
        return site.emit("DepthToSpace", [x], blocksize=block, mode="CRD")
    channels, height, width = (site.known(n, k - 3) for k, n in enumerate(x.shape[-3:]))
    parts = [channels // block**2, block, block, height, width]
    whole = [channels // block**2, height * block, width * block]
    return _regrouped(site, x, parts, [0, 3, 1, 4, 2], whole)


def _pixel_unshuffle(site: Site) -> Name:
    x, r = site.tensor("self"), site.get("downscale_factor")
    channels, height, width = (site.known(n, k - 3) for k, n in enumerate(x.shape[-3:]))
    parts = [channels, height // r, r, width // r, r]
    return _regrouped(site, x, parts, [0, 2, 4, 1, 3], [channels * r * r, height // r, width // r])


def _channel_shuffle(site: Site) -> Name:
    x, groups = site.tensor("self"), site.get("groups")
    channels, *rest = site.sizes(x.shape[1:], "its image is dynamic")
    order = [1, 0, *range(2, 2 + len(rest))]
    return _regrouped(site, x, [groups, channels // groups, *rest], order, [channels, *rest])


def _triangle(upper: int, site: Site) -> Name:
    k = site.const(site.get("diagonal", 0), "int64")
    return site.emit("Trilu", [site.tensor("self"), k], upper=upper)


# --------------------------------------------------------------------------------- shape arithmetic


def _size(site: Site) -> Name:
    x = site.value(site.first())
    axis = site.axis("dim", x.rank)
    return site.emit("Shape", [x], start=axis, end=axis + 1)


def _numel(site: Site) -> Name:
    return site.reshape(site.emit("Size", [site.value(site.first())]), [1])


def _number(op: str, site: Site) -> Name:
    """Write an operator on sizes."""
    operands = [
        site.value(a) if isinstance(a, Ref) else site.ints_const([a])
        for a in site.call.args.values()
    ]
    return site.emit(op, operands)


_NUMBERS = {
    **{"_operator.add": "Add", "_operator.sub": "Sub", "_operator.mul": "Mul"},
    **{"_operator.floordiv": "Div", "_operator.neg": "Neg", "torch.sym_max": "Max"},
    **{"torch.sym_min": "Min", "_operator.mod": "Mod"},
}

RULES: dict[str, Rule] = {
    **dict.fromkeys(("view.default", "reshape.default", "_unsafe_view.default"), _view),
    **dict.fromkeys(("view_copy.default", "_reshape_copy.default"), _view),
    **dict.fromkeys(("view_as.default", "reshape_as.default"), _view_as),
    **dict.fromkeys(("squeeze.default", "squeeze.dim", "squeeze.dims"), _squeeze),
    **dict.fromkeys(("squeeze_copy.dim", "squeeze_copy.dims"), _squeeze),
    **dict.fromkeys(("permute.default", "permute_copy.default"), _permute),
    **dict.fromkeys(("transpose.int", "swapaxes.default", "swapdims.default"), _swap),
    **dict.fromkeys(("transpose_copy.int",), _swap),
    **dict.fromkeys(("expand.default", "broadcast_to.default", "expand_copy.default"), _expand),
    **dict.fromkeys(("repeat.default", "tile.default"), _repeat),
    **dict.fromkeys(("cat.default", "concat.default", "concatenate.default"), _cat),
    **dict.fromkeys(("split.Tensor", "split_with_sizes.default", "chunk.default"), _split),
    **dict.fromkeys(("split_copy.Tensor", "split_with_sizes_copy.default", "split.sizes"), _split),
    **dict.fromkeys(("slice.Tensor", "slice_copy.Tensor"), _slice),
    **dict.fromkeys(("select.int", "select_copy.int"), _select),
    **dict.fromkeys(("unsqueeze.default", "unsqueeze_copy.default"), _unsqueeze),
    **dict.fromkeys(
        ("channel_shuffle.default", "native_channel_shuffle.default"), _channel_shuffle
    ),
    **{name: partial(_number, op) for name, op in _NUMBERS.items()},
    "expand_as.default": _expand_as,
    "flatten.using_ints": _flatten,
    "flip.default": _flip,
    "as_strided.default": _as_strided,
    **dict.fromkeys(("eye.default", "eye.m"), partial(_made_of_numbers, _eye)),
    "linspace.default": partial(_made_of_numbers, _linspace),
    "ravel.default": _ravel,
    "tril_indices.default": partial(_made_of_numbers, partial(_triangle_places, upper=False)),
    "triu_indices.default": partial(_made_of_numbers, partial(_triangle_places, upper=True)),
    "movedim.intlist": _movedim,
    "mT.default": partial(_turned, last=True),
    "movedim.int": _movedim,
    "narrow.default": _narrow,
    "numpy_T.default": partial(_turned, last=False),
    "pixel_shuffle.default": _pixel_shuffle,
    "pixel_unshuffle.default": _pixel_unshuffle,
    "roll.default": _roll,
    "stack.default": _stack,
    "sym_numel.default": _numel,
    "sym_size.int": _size,
    "t.default": _t,
    "tril.default": partial(_triangle, 0),
    "triu.default": partial(_triangle, 1),
    "unbind.int": _unbind,
    "unflatten.int": _unflatten,
}
