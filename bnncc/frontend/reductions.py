"""Reductions in all their forms: empty axes, no reduction, bools, integers.

axes empty                   ->  all axes
axes empty, a no-op          ->  what is done to each element (SumSquare: x * x)
Max, Min of bool             ->  of uint8
Mean, L2, LogSum of integers ->  in wider types
LogSumExp                    ->  the maximum is subtracted first, to avoid overflow
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from bnncc.ir.numeric import pooled_sizes, window, window_spans
from bnncc.ir.pieces import Expression

_LARGEST = {"float16": 65504.0, "float64": float(np.finfo(np.float64).max)}


def _axes(write: Expression) -> list[int] | None:
    """Return the axes, or None for all."""
    name = write.input(1)
    if name and write.type(1).shape == (0,):
        return None
    value = write.fixed(1)
    return None if value is None or not value.size else [int(a) for a in value.reshape(-1)]


def _elementwise(write: Expression) -> str:
    """Return the elementwise part of a reduction over no axes."""
    x = write.node.inputs[0]
    op = write.node.op.removeprefix("Reduce")
    if op in ("L1", "L2"):
        return write("Abs", x)
    if op == "SumSquare":
        return write("Mul", x, x)
    if op == "LogSum":
        whole = write.type().dtype.startswith(("int", "uint"))
        logarithm = write("Log", write.cast(x, "float64") if whole else x)
        return write.cast(logarithm, write.type().dtype) if whole else logarithm
    return x


def _reduce(write: Expression) -> None:
    node = write.node
    noop = bool(node.attrs.get("noop_with_empty_axes"))
    name = write.input(1)
    computed = bool(name) and name not in write.graph.constants and write.type(1).shape != (0,)
    if computed and not noop:
        return  # its shape inference reports the error
    axes = _axes(write)
    if axes is None and noop:
        write.give(_elementwise(write), 0)
        return
    keep = {"keepdims": int(node.attrs.get("keepdims", 1))}
    inputs = [node.inputs[0], *([] if axes is None else [node.inputs[1]])]
    special = _SPECIAL.get(node.op)
    if special is not None and (made := special(write, inputs, keep)):
        write.give(made, 0)
    elif inputs != node.inputs or "noop_with_empty_axes" in node.attrs:
        write.give(write.as_is(node.op, *inputs, **keep), 0)


def _of_bool(write: Expression, inputs: list[str], keep: dict[str, int]) -> str:
    if write.type().dtype != "bool":
        return ""
    number = write.cast(inputs[0], "uint8")
    return write.cast(write.as_is(write.node.op, number, *inputs[1:], **keep), "bool")


def _wider(wide: str, write: Expression, inputs: list[str], keep: dict[str, int]) -> str:
    dtype = write.type().dtype
    if not dtype.startswith(("int", "uint")):
        return ""
    number = write.cast(inputs[0], wide)
    return write.cast(write(write.node.op, number, *inputs[1:], **keep), dtype)


def _mean(write: Expression, inputs: list[str], keep: dict[str, int]) -> str:
    kind = write.type()
    if not kind.dtype.startswith(("int", "uint")):
        return ""
    shape, axes = write.shape(), _axes(write)
    count = math.prod(shape if axes is None else [shape[a] for a in axes])
    total = write("ReduceSum", write.cast(inputs[0], "int64"), *inputs[1:], **keep)
    return write.cast(write("Div", total, write.constant(count, "int64")), kind.dtype)


def _log_sum_exp(write: Expression, inputs: list[str], keep: dict[str, int]) -> str:
    dtype = write.type().dtype
    if dtype.startswith(("int", "uint")):
        return _wider("float64", write, inputs, keep)
    limit = _LARGEST.get(dtype, float(np.finfo(np.float32).max) * 0.99)
    bounds = (write.constant(v, dtype) for v in (-limit, limit))
    top = write("ReduceMax", *inputs, keepdims=1)
    top = write("Clip", top, *bounds)  # infinities would give NaN
    total = write("ReduceSum", write("Exp", write("Sub", inputs[0], top)), *inputs[1:], **keep)
    if not keep["keepdims"]:
        top = write("Squeeze", top, inputs[1]) if len(inputs) > 1 else write.scalar(top)
    return write("Add", write("Log", total), top)


def _lp_pool(write: Expression) -> None:
    """Write LpPool as the mean over windows of a padded image, times their size."""
    node, shape, dtype = write.node, write.shape(), write.type().dtype
    attrs, rank = node.attrs, len(shape) - 2
    kernel = [int(k) for k in attrs["kernel_shape"]]
    strides, dilations, pads = window(attrs, shape[2:], kernel)
    spans = window_spans(kernel, dilations)
    outs = pooled_sizes(shape[2:], spans, strides, pads, bool(attrs.get("ceil_mode")))
    ends = [
        max(0, (o - 1) * s + span - n - low)
        for o, s, span, n, low in zip(outs, strides, spans, shape[2:], pads[:rank], strict=True)
    ]
    x = _powers(write, write.node.inputs[0], dtype)
    if any((*pads[:rank], *ends)):
        sides = write.ints(0, 0, *pads[:rank], 0, 0, *ends)
        x = write("Pad", x, sides, write.constant(0, dtype), mode="constant")
    mean = write("AveragePool", x, kernel_shape=kernel, strides=strides, dilations=dilations)
    total = write("Mul", mean, write.constant(math.prod(kernel), dtype))
    write.give(_root(write, total, dtype), 0)


def _global_lp_pool(write: Expression) -> None:
    x, dtype = write.node.inputs[0], write.type().dtype
    axes = write.ints(*range(2, len(write.type().shape)))
    total = write("ReduceSum", _powers(write, x, dtype), axes, keepdims=1)
    write.give(_root(write, total, dtype), 0)


def _powers(write: Expression, x: str, dtype: str) -> str:
    """Return ``|x| ** p``."""
    p = int(write.node.attrs.get("p", 2))
    if p == 2:
        return write("Mul", x, x)
    size = write("Abs", x)
    return size if p == 1 else write("Pow", size, write.constant(p, dtype))


def _root(write: Expression, total: str, dtype: str) -> str:
    """Return the root that inverts `_powers`."""
    p = int(write.node.attrs.get("p", 2))
    if p == 2:
        return write("Sqrt", total)
    return total if p == 1 else write("Pow", total, write.constant(1 / p, dtype))


_SPECIAL: dict[str, Callable[[Expression, list[str], dict[str, int]], str]] = {
    "ReduceL2": partial(_wider, "float64"),
    "ReduceLogSum": partial(_wider, "float64"),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _of_bool,
    "ReduceMean": _mean,
    "ReduceMin": _of_bool,
}
EXPANSIONS = {
    "GlobalLpPool": _global_lp_pool,
    "LpPool": _lp_pool,
    **{
        f"Reduce{k}": _reduce
        for k in (
            *("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"),
        )
    },
}
"""Rewrite rules, by operator."""
