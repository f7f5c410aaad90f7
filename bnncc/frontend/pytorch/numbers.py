"""Constant tensors, selections, casts, and operators without effect in inference."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bnncc.frontend.pytorch.program import Ref
from bnncc.frontend.pytorch.site import MAX_PARAMETER, Name, Rule, Site


def same(site: Site) -> Name:
    """Return the first argument, for copies and hints."""
    return site.value(site.first())


def _to(site: Site) -> Name:
    return site.cast(site.value(site.first()), site.out.dtype)


def _dropout(site: Site) -> Name:
    site.refuse_training("train", "training")
    return same(site)


def _full(number: Any, site: Site) -> Name:
    """Write a tensor filled with `number`, or with the argument of that name."""
    given = site.get(number) if isinstance(number, str) else number
    first = site.first()
    if isinstance(first, Ref) and site.call.target.partition(".")[0].endswith("_like"):
        shape = site.shape_of(site.value(first))
    else:
        shape = site.shape(site.get("size", []))
    dtype = site.out.dtype
    if isinstance(given, Ref):
        return site.emit("Expand", [site.operand(given, dtype), shape])
    return site.filled(shape, given, dtype)


def _fill(site: Site) -> Name:
    x = site.tensor("self")
    number = site.get("value", 0)
    if isinstance(number, Ref):
        return site.expand(site.cast(site.value(number), x.dtype), x)
    return site.filled(site.shape_of(x), number, x.dtype)


def _copy(site: Site) -> Name:
    x, source = site.tensor("self"), site.tensor("src")
    value = site.cast(source, x.dtype)
    return value if source.shape == x.shape else site.expand(value, x)


def _where(site: Site) -> Name:
    dtype = site.out.dtype
    yes, no = (site.operand(site.get(k), dtype) for k in ("self", "other"))
    condition = site.cast(site.tensor("condition"), "bool")
    return site.emit("Where", [condition, yes, no])


def _masked_fill(site: Site) -> Name:
    value = site.operand(site.get("value"), site.out.dtype)
    return site.emit("Where", [site.tensor("mask"), value, site.tensor("self")])


def _scalar_tensor(site: Site) -> Name:
    return site.operand(site.first(), site.out.dtype)


def _arange(site: Site) -> Name:
    start, step = site.get("start", 0), site.get("step", 1)
    dtype, end = site.out.dtype, site.get("end")
    if all(isinstance(n, int) for n in (start, end, step)) and step:
        count = len(range(start, end, step))
        if count <= MAX_PARAMETER:
            return site.const(start + step * np.arange(count), dtype)
    ends = [site.operand(n, dtype) for n in (start, end, step)]
    return site.emit("Range", [site.reshape(n, []) for n in ends])


def _item(site: Site) -> Name:
    return site.reshape(site.tensor("self"), [])


_FULL = {
    **{"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value"},
    **{"ones": 1, "ones_like": 1, "new_ones": 1, "zeros": 0, "zeros_like": 0, "new_zeros": 0},
    **{"empty": 0, "empty_like": 0, "new_empty": 0},
}
_SAME = (
    *("alias", "detach", "clone", "contiguous", "lift_fresh_copy", "lift_fresh", "detach_"),
    *("alias_copy", "detach_copy", "resolve_conj", "resolve_neg"),
)
_TO = ("to.dtype", "to.dtype_layout", "to.device", "to.other", "to.prim_Device", "type_as.default")
_WHERE = ("where.self", "where.Scalar", "where.ScalarSelf", "where.ScalarOther")

RULES: dict[str, Rule] = {
    **{f"{name}.default": partial(_full, number) for name, number in _FULL.items()},
    "empty.memory_format": partial(_full, 0),
    **{f"{name}.default": same for name in _SAME},
    **dict.fromkeys(_TO, _to),
    "_to_copy.default": _to,
    **dict.fromkeys(("fill.Scalar", "fill.Tensor", "zero.default"), _fill),
    **dict.fromkeys(("arange.default", "arange.start", "arange.start_step"), _arange),
    "copy.default": _copy,
    "dropout.default": _dropout,
    **{f"{k}dropout.default": _dropout for k in ("feature_", "alpha_", "feature_alpha_")},
    **dict.fromkeys(("item.default", "_local_scalar_dense.default"), _item),
    "scalar_tensor.default": _scalar_tensor,
    **dict.fromkeys(_WHERE, _where),
    **dict.fromkeys(("masked_fill.Scalar", "masked_fill.Tensor"), _masked_fill),
}
