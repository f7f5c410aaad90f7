"""Reductions along axes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from bnncc.frontend.pytorch.site import Name, Rule, Site, Value

_END = (1 << 63) - 1


def _axes(site: Site, rank: int, key: str = "dim") -> list[int]:
    given = site.get(key)
    given = list(range(rank)) if given is None or given == [] else given
    return [d % max(1, rank) for d in (given if isinstance(given, list) else [given])]


def reduce(op: str, site: Site) -> Name:
    """Write a reduction along axes; default: all axes."""
    x = site.tensor("self")
    return _reduced(site, op, site.cast(x, site.out.dtype), _axes(site, x.rank))


def _reduced(site: Site, op: str, x: Name, axes: list[int], keep: bool | None = None) -> Name:
    if not axes:
        return x
    keep = bool(site.get("keepdim", False)) if keep is None else keep
    return site.emit(op, [x, site.ints_const(axes)], keepdims=int(keep))


def _extreme(op: str, place: str, site: Site) -> list[Any]:
    """``max.dim`` and ``min.dim``: values and indices."""
    x = site.tensor("self")
    axis = site.axis("dim", x.rank)
    keep = bool(site.get("keepdim", False))
    values = _reduced(site, op, x, [axis], keep)
    return [values, site.emit(place, [x], axis=axis, keepdims=int(keep))]


def _place(op: str, site: Site) -> Name:
    x = site.tensor("self")
    if site.get("dim") is None:
        flat = site.reshape(x, [-1])
        return site.emit(op, [flat], axis=0, keepdims=0)
    axis = site.axis("dim", x.rank)
    return site.emit(op, [x], axis=axis, keepdims=int(site.get("keepdim", False)))


def _variance(site: Site, *, root: bool) -> Name | list[Any]:
    """Write a variance or standard deviation, optionally with the mean."""
    x = site.tensor("self")
    axes = _axes(site, x.rank)
    correction = site.get("correction", 1)
    if "unbiased" in site.call.args:
        correction = int(site.get("unbiased"))
    correction = 1 if correction is None else correction
    count = math.prod(site.sizes([x.shape[a] for a in axes], "along a dynamic axis"))
    mean = _reduced(site, "ReduceMean", x, axes, keep=True)
    off = site.emit("Sub", [x, mean])
    total = _reduced(site, "ReduceSum", site.emit("Mul", [off, off]), axes)
    made = site.emit("Div", [total, site.const(max(count - correction, 0), x.dtype)])
    made = site.emit("Sqrt", [made]) if root else made
    if len(site.call.outputs) < 2:
        return made
    keep = bool(site.get("keepdim", False))
    return [made, mean if keep else site.emit("Squeeze", [mean, site.ints_const(axes)])]


def _any(op: str, site: Site) -> Name:
    """Return whether any, or every, value is not 0."""
    x = site.tensor("self")
    truth = site.cast(site.cast(x, "bool"), "int32", "bool")
    made = _reduced(site, op, truth, _axes(site, x.rank))
    return site.cast(made, "bool", "int32")


def norm(site: Site, x: Value, order: Any, axes: list[int], keep: bool) -> Name:
    """Write the norm of order `order` along axes."""
    reduced = partial(_reduced, site, axes=axes, keep=keep)
    names = {1: "ReduceL1", 2: "ReduceL2"}
    if order in names:
        return reduced(names[order], x)
    if order in (math.inf, -math.inf):
        return reduced("ReduceMax" if order > 0 else "ReduceMin", site.emit("Abs", [x]))
    if order == 0:
        some = site.emit("Not", [site.emit("Equal", [x, site.const(0, x.dtype)])])
        return reduced("ReduceSum", site.cast(some, x.dtype, "bool"))
    if not isinstance(order, int | float):
        raise site.refuse(f"of order {order}")
    power = site.emit("Pow", [site.emit("Abs", [x]), site.const(order, x.dtype)])
    return site.emit("Pow", [reduced("ReduceSum", power), site.const(1 / order, x.dtype)])


def _norm(site: Site) -> Name:
    x = site.typed(site.tensor("self"), site.out.dtype)
    order = site.get("ord", site.get("p", 2))
    return norm(site, x, order, _axes(site, x.rank), bool(site.get("keepdim", False)))


def _cumsum(site: Site) -> Name:
    x = site.tensor("self")
    axis = site.const(site.axis("dim", x.rank), "int64")
    return site.emit("CumSum", [site.cast(x, site.out.dtype), axis])


def _diff(site: Site) -> Name:
    """Write differences of adjacent elements, `n` times."""
    given, dtype = site.tensor("self"), site.out.dtype
    if dtype == "bool":
        raise site.refuse("of bools", hint="use torch.logical_xor of two slices")
    axis = site.axis("dim", given.rank, -1)
    parts = [site.tensor(key) for key in ("prepend", "self", "append") if site.has(key)]
    made: Name = site.emit("Concat", parts, axis=axis) if len(parts) > 1 else given
    for _ in range(int(site.get("n", 1))):
        later, earlier = site.slice(made, axis, 1, _END), site.slice(made, axis, 0, -1)
        made = site.emit("Sub", [later, earlier])
    return made


def _without_nan(op: str, site: Site) -> Name:
    """Write ``nansum`` and ``nanmean``."""
    x, dtype = site.tensor("self"), site.out.dtype
    data, axes = site.cast(x, dtype), _axes(site, x.rank)
    none = site.emit("IsNaN", [data])
    kept = site.emit("Where", [none, site.const(0, dtype), data])
    total = _reduced(site, "ReduceSum", kept, axes)
    if op == "sum":
        return total
    some = site.cast(site.emit("Not", [none]), dtype, "bool")
    return site.emit("Div", [total, _reduced(site, "ReduceSum", some, axes)])


def _count_nonzero(site: Site) -> Name:
    x = site.tensor("self")
    some = site.cast(site.cast(x, "bool"), "int64", "bool")
    return _reduced(site, "ReduceSum", some, _axes(site, x.rank), keep=False)


def _both_extremes(site: Site) -> list[Any]:
    x = site.tensor("self")
    axes = _axes(site, x.rank)
    return [_reduced(site, op, x, axes) for op in ("ReduceMin", "ReduceMax")]


def _trace(site: Site) -> Name:
    x = site.tensor("self")
    rows, columns = site.sizes(x.shape, "of a dynamic matrix")
    places = [k * (columns + 1) for k in range(min(rows, columns))]
    flat = site.reshape(x, [-1])
    picked = site.emit("Gather", [flat, site.ints_const(places)], axis=0)
    made = site.cast(picked, site.out.dtype, x.dtype)
    return site.emit("ReduceSum", [made, site.ints_const([0])], keepdims=0)


_REDUCTIONS = {
    **{"mean.default": "ReduceMean", "mean.dim": "ReduceMean", "sum.default": "ReduceSum"},
    **{"sum.dim_IntList": "ReduceSum", "amax.default": "ReduceMax", "amin.default": "ReduceMin"},
    **{"max.default": "ReduceMax", "min.default": "ReduceMin", "prod.default": "ReduceProd"},
    **{"prod.dim_int": "ReduceProd", "logsumexp.default": "ReduceLogSumExp"},
}

RULES: dict[str, Rule] = {
    **{name: partial(reduce, op) for name, op in _REDUCTIONS.items()},
    **{f"var.{k}": partial(_variance, root=False) for k in ("default", "dim", "correction")},
    **{f"std.{k}": partial(_variance, root=True) for k in ("default", "dim", "correction")},
    **dict.fromkeys(("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar"), _norm),
    **{f"any.{k}": partial(_any, "ReduceMax") for k in ("default", "dim", "dims")},
    **{f"all.{k}": partial(_any, "ReduceMin") for k in ("default", "dim", "dims")},
    **{f"var_mean.{k}": partial(_variance, root=False) for k in ("default", "dim", "correction")},
    **{f"std_mean.{k}": partial(_variance, root=True) for k in ("default", "dim", "correction")},
    **{f"count_nonzero.{k}": _count_nonzero for k in ("default", "dim_IntList")},
    "aminmax.default": _both_extremes,
    "nanmean.default": partial(_without_nan, "mean"),
    "nansum.default": partial(_without_nan, "sum"),
    "trace.default": _trace,
    "argmax.default": partial(_place, "ArgMax"),
    "argmin.default": partial(_place, "ArgMin"),
    "cumsum.default": _cumsum,
    "diff.default": _diff,
    "max.dim": partial(_extreme, "ReduceMax", "ArgMax"),
    "min.dim": partial(_extreme, "ReduceMin", "ArgMin"),
}
