"""Reductions along axes."""

from __future__ import annotations

import math
from typing import Any

from bnncc.frontend.pytorch.site import Name, Rule, Site


def _axes(site: Site, rank: int, key: str = "dim") -> list[int]:
    given = site.get(key)
    given = list(range(rank)) if given is None or given == [] else given
    return [d % max(1, rank) for d in (given if isinstance(given, list) else [given])]


def reduce(op: str) -> Rule:
    """Return the rule of a reduction along axes, by default along all."""

    def rule(site: Site) -> Name:
        x = site.tensor("self")
        return _reduced(site, op, site.cast(x, site.out.dtype), _axes(site, x.rank))

    return rule


def _reduced(site: Site, op: str, x: Name, axes: list[int], keep: bool | None = None) -> Name:
    if not axes:
        return x
    keep = bool(site.get("keepdim", False)) if keep is None else keep
    return site.emit(op, [x, site.ints_const(axes)], keepdims=int(keep))


def _extreme(op: str, place: str) -> Rule:
    """``max.dim`` and ``min.dim``: values and indices."""

    def rule(site: Site) -> list[Any]:
        x = site.tensor("self")
        axis = site.axis("dim", x.rank)
        keep = bool(site.get("keepdim", False))
        values = _reduced(site, op, x, [axis], keep)
        return [values, site.emit(place, [x], axis=axis, keepdims=int(keep))]

    return rule


def _place(op: str) -> Rule:
    def rule(site: Site) -> Name:
        x = site.tensor("self")
        if site.get("dim") is None:
            flat = site.reshape(x, [-1])
            return site.emit(op, [flat], axis=0, keepdims=0)
        axis = site.axis("dim", x.rank)
        return site.emit(op, [x], axis=axis, keepdims=int(site.get("keepdim", False)))

    return rule


def _variance(root: bool) -> Rule:
    def rule(site: Site) -> Name:
        x = site.tensor("self")
        axes = _axes(site, x.rank)
        correction = site.get("correction", 1)
        if "unbiased" in site.call.args:
            correction = int(site.get("unbiased"))
        correction = 1 if correction is None else correction
        sizes = [x.shape[a] for a in axes]
        if not all(isinstance(n, int) for n in sizes):
            raise site.refuse("along a dynamic axis")
        count = math.prod(n for n in sizes if isinstance(n, int))
        mean = _reduced(site, "ReduceMean", x, axes, keep=True)
        off = site.emit("Sub", [x, mean])
        total = _reduced(site, "ReduceSum", site.emit("Mul", [off, off]), axes)
        made = site.emit("Div", [total, site.const(max(count - correction, 0), x.dtype)])
        return site.emit("Sqrt", [made]) if root else made

    return rule


def _any(op: str) -> Rule:
    """Whether any value, or each, is not 0."""

    def rule(site: Site) -> Name:
        x = site.tensor("self")
        truth = site.cast(site.cast(x, "bool"), "int32", "bool")
        made = _reduced(site, op, truth, _axes(site, x.rank))
        return site.cast(made, "bool", "int32")

    return rule


def _norm(site: Site) -> Name:
    x = site.tensor("self")
    order = site.get("ord", site.get("p", 2))
    names = {1: "ReduceL1", 2: "ReduceL2"}
    axes = _axes(site, x.rank)
    if order in names:
        return _reduced(site, names[order], x, axes)
    if order in (math.inf, -math.inf):
        op = "ReduceMax" if order > 0 else "ReduceMin"
        return _reduced(site, op, site.emit("Abs", [x]), axes)
    raise site.refuse(f"of order {order}")


def _cumsum(site: Site) -> Name:
    x = site.tensor("self")
    axis = site.const(site.axis("dim", x.rank), "int64")
    return site.emit("CumSum", [site.cast(x, site.out.dtype), axis])


_REDUCTIONS = {
    **{"mean.default": "ReduceMean", "mean.dim": "ReduceMean", "sum.default": "ReduceSum"},
    **{"sum.dim_IntList": "ReduceSum", "amax.default": "ReduceMax", "amin.default": "ReduceMin"},
    **{"max.default": "ReduceMax", "min.default": "ReduceMin", "prod.default": "ReduceProd"},
    **{"prod.dim_int": "ReduceProd", "logsumexp.default": "ReduceLogSumExp"},
}

RULES: dict[str, Rule] = {
    **{name: reduce(op) for name, op in _REDUCTIONS.items()},
    **{f"var.{k}": _variance(root=False) for k in ("default", "dim", "correction")},
    **{f"std.{k}": _variance(root=True) for k in ("default", "dim", "correction")},
    **dict.fromkeys(("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar"), _norm),
    **{f"any.{k}": _any("ReduceMax") for k in ("default", "dim", "dims")},
    **{f"all.{k}": _any("ReduceMin") for k in ("default", "dim", "dims")},
    "argmax.default": _place("ArgMax"),
    "argmin.default": _place("ArgMin"),
    "cumsum.default": _cumsum,
    "max.dim": _extreme("ReduceMax", "ArgMax"),
    "min.dim": _extreme("ReduceMin", "ArgMin"),
}
