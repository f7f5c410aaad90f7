"""Evaluate an ONNX file as DESIGN section 2 defines right: the oracle of the test collection.

The graph is evaluated node by node with NumPy. Conv, Gemm, MatMul, BatchNormalization and the pools are written
here (im2col, accumulation in float64, result rounded once to float32); when both operands of a product are
integer multiples of a scale (up to rounding noise, as straight-through estimators leave it), the accumulator is
an exact integer. Every other operator is `onnx.reference`. It shares no code with the compiler.

Beside each value runs `err`, a conservative ``sum|terms|`` of the rounded operations it came from: 0 for inputs,
constants, signs and exact integers. A sign, comparison or rounding whose distance to its threshold is at most
``8 * eps * err`` is a *tie*: two correct implementations may decide it differently. An exact zero with
``err == 0`` is not a tie: sign(0) is then a promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from numpy.lib.stride_tricks import sliding_window_view
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

EPS = float(np.finfo(np.float32).eps)
TIE = 8 * EPS
NOISE = 1e-5  # relative noise under which values still count as multiples of one scale
RELATIVE = 1e-4  # of the largest |wanted| element of the output


@dataclass(frozen=True)
class Tie:
    """Decisions of one node that rounding may turn either way."""

    node: str
    tensor: str
    count: int


@dataclass(frozen=True)
class Verdict:
    """Outcome of `compare`.

    `kind` is "right" (all outputs within tolerance), "tie" (they are not, but the oracle met ties, which may
    be the reason) or "wrong". `text` says what differs.
    """

    kind: str
    text: str = ""
    ties: tuple[Tie, ...] = ()

    @property
    def right(self) -> bool:
        """Tell whether all outputs agree."""
        return self.kind == "right"


@dataclass
class Value:
    """A tensor and the magnitude of the rounded terms behind each of its elements."""

    data: np.ndarray
    err: np.ndarray | float = 0.0


@dataclass
class Evaluation:
    """All tensors of one run, and the ties met."""

    values: dict[str, Value]
    ties: list[Tie] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------- exact multiples


def _multiples(x: np.ndarray, axis: int | None = None) -> tuple[np.ndarray, np.ndarray] | None:
    """Split `x` into integers and a scale (one, or one per index of `axis`), or return None."""
    if x.dtype.kind in "iub":
        return x.astype(np.float64), np.ones(1)
    x = x.astype(np.float64)
    if not np.isfinite(x).all() or x.size == 0:
        return None
    if (np.abs(x) < 2**20).all() and (x == np.rint(x)).all():
        return x, np.ones(1)
    rest = tuple(i for i in range(x.ndim) if i != axis) if axis is not None else None
    top = np.abs(x).max(axis=rest, keepdims=True)
    safe = np.where(top == 0, 1.0, top)
    ratio = x / safe
    for levels in (1, 2, 3, 7, 15):
        if levels > 1 and x.size < 64:
            break
        whole = np.rint(ratio * levels)
        if np.abs(ratio * levels - whole).max() <= NOISE:
            if levels == 1:  # the mean magnitude averages the noise out
                used = np.abs(whole)
                count = used.sum(axis=rest, keepdims=True)
                mean = (np.abs(x) * used).sum(axis=rest, keepdims=True) / np.where(
                    count == 0, 1, count
                )
                exact = (np.abs(x) == top * used).all()
                return whole, safe if exact else np.where(count == 0, 1.0, mean)
            return whole, safe / levels
    return None


# ---------------------------------------------------------------------------------------------------- kernels


def _attributes(node: onnx.NodeProto) -> dict:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _window_pads(
    attrs: dict, shape: tuple[int, ...], kernel: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return strides, dilations and explicit pads (begins then ends) of a Conv or pool."""
    rank = len(kernel)
    strides = list(attrs.get("strides", [1] * rank))
    dilations = list(attrs.get("dilations", [1] * rank))
    pads = list(attrs.get("pads", [0] * 2 * rank))
    auto = attrs.get("auto_pad", b"NOTSET")
    auto = auto.decode() if isinstance(auto, bytes) else auto
    if auto == "VALID":
        pads = [0] * 2 * rank
    elif auto.startswith("SAME"):
        pads = [0] * 2 * rank
        for i in range(rank):
            out = -(-shape[i] // strides[i])
            total = max(0, (out - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1 - shape[i])
            small, large = total // 2, total - total // 2
            pads[i], pads[i + rank] = (small, large) if auto == "SAME_UPPER" else (large, small)
    return strides, dilations, pads


def _windows(
    x: np.ndarray, kernel: list[int], strides: list[int], dilations: list[int]
) -> np.ndarray:
    """View (N, C, *out, *kernel) of an already padded (N, C, *spatial) array."""
    rank = len(kernel)
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    view = sliding_window_view(x, span, axis=tuple(range(2, 2 + rank)))
    outer = tuple(slice(None, None, s) for s in strides)
    inner = tuple(slice(None, None, d) for d in dilations)
    return view[(slice(None), slice(None), *outer, *inner)]


def _conv64(x: np.ndarray, w: np.ndarray, attrs: dict) -> np.ndarray:
    kernel = list(w.shape[2:])
    strides, dilations, pads = _window_pads(attrs, x.shape[2:], kernel)
    rank = len(kernel)
    group = attrs.get("group", 1)
    x = np.pad(x, [(0, 0), (0, 0)] + [(pads[i], pads[i + rank]) for i in range(rank)])
    cols = _windows(x, kernel, strides, dilations)
    batch, out = cols.shape[0], cols.shape[2 : 2 + rank]
    cols = np.moveaxis(cols, 1, 1 + rank)  # N, *out, C, *kernel
    step, units = w.shape[1], w.shape[0] // group
    parts = []
    for g in range(group):
        part = cols[(slice(None),) * (1 + rank) + (slice(g * step, (g + 1) * step),)]
        flat = part.reshape(batch * int(np.prod(out)), -1)
        parts.append(flat @ w[g * units : (g + 1) * units].reshape(units, -1).T)
    y = np.concatenate(parts, axis=1).reshape(batch, *out, w.shape[0])
    return np.moveaxis(y, -1, 1)


def _product(
    x: Value, w: Value, bias: Value | None, w_axis: int | None, mul: Callable, spread: Callable
) -> Value:
    """Multiply-accumulate by `mul`, exactly where both operands are integer multiples.

    `spread` shapes a weight scale (1 or one per output unit) so that it broadcasts against the result.
    """
    dtype = x.data.dtype
    xm, wm = _multiples(x.data), _multiples(w.data, w_axis)
    if xm is not None and wm is not None:
        acc = mul(xm[0], wm[0])
        scale = xm[1].reshape(-1)[0] * spread(wm[1])
        y = acc * scale
        err = np.where(y == y.astype(np.float32), 0.0, np.abs(y))
    else:
        y = mul(x.data.astype(np.float64), w.data.astype(np.float64))
        ax, aw = np.abs(x.data.astype(np.float64)), np.abs(w.data.astype(np.float64))
        err = mul(ax + x.err, aw) + (
            mul(ax, np.broadcast_to(w.err, aw.shape)) if np.any(w.err) else 0
        )
    if bias is not None:
        b = bias.data.astype(np.float64)
        total = y + b
        clean = (err == 0) & (total == total.astype(np.float32))
        err = np.where(clean, 0.0, err + np.abs(y) + np.abs(b)) + bias.err
        y = total
    return Value(y.astype(dtype), err)


def _conv(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    attrs = _attributes(node)
    x, w = ins[0], ins[1]
    shape = (1, -1) + (1,) * (x.data.ndim - 2)
    bias = ins[2] if len(ins) > 2 and ins[2] is not None else None
    if bias is not None:
        bias = Value(
            bias.data.reshape(shape), np.reshape(np.broadcast_to(bias.err, bias.data.shape), shape)
        )
    return [
        _product(
            x, w, bias, 0,
            lambda a, b: _conv64(a, b, attrs),
            lambda s: s.reshape(shape) if s.size > 1 else s.reshape(-1)[0],
        )
    ]  # fmt: skip


def _gemm(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    attrs = _attributes(node)
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    a, b = ins[0], ins[1]
    if attrs.get("transA"):
        a = Value(a.data.T, np.broadcast_to(a.err, a.data.shape).T)
    if attrs.get("transB"):
        b = Value(b.data.T, np.broadcast_to(b.err, b.data.shape).T)
    c = ins[2] if len(ins) > 2 else None
    if c is not None and beta != 1:
        c = _mul_values(c, Value(np.float32(beta)))
    y = _product(
        a,
        b,
        None,
        1,
        lambda p, q: p @ q,
        lambda s: s.reshape(1, -1) if s.size > 1 else s.reshape(-1)[0],
    )
    if alpha != 1:
        y = _mul_values(y, Value(np.float32(alpha)))
    return [y if c is None else _add_values(y, c)]


def _matmul(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    a, b = ins[0], ins[1]
    axis = b.data.ndim - 1 if b.data.ndim == 2 else None

    def spread(scale: np.ndarray) -> np.ndarray:
        return scale.reshape(-1) if scale.size > 1 else scale.reshape(-1)[0]

    return [_product(a, b, None, axis, np.matmul, spread)]


def _pool(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    attrs = _attributes(node)
    x = ins[0]
    kernel = list(attrs["kernel_shape"])
    rank = len(kernel)
    strides, dilations, pads = _window_pads(attrs, x.data.shape[2:], kernel)
    is_max = node.op_type == "MaxPool"
    extra = [0] * rank
    if attrs.get("ceil_mode"):
        for i in range(rank):
            span = (kernel[i] - 1) * dilations[i] + 1
            room = x.data.shape[2 + i] + pads[i] + pads[i + rank] - span
            out = -(-room // strides[i]) + 1
            if (out - 1) * strides[i] >= x.data.shape[2 + i] + pads[
                i
            ]:  # a window wholly in the end padding
                out -= 1
            extra[i] = max(0, (out - 1) * strides[i] - room)

    def views(a: np.ndarray, fill: float, fill_extra: float) -> np.ndarray:
        a = np.pad(
            a, [(0, 0)] * 2 + [(pads[i], pads[i + rank]) for i in range(rank)], constant_values=fill
        )
        a = np.pad(a, [(0, 0)] * 2 + [(0, e) for e in extra], constant_values=fill_extra)
        return _windows(a, kernel, strides, dilations)

    last = tuple(range(2 + rank, 2 + 2 * rank))
    err = np.broadcast_to(x.err, x.data.shape).astype(np.float64)
    data = x.data.astype(np.float64)
    if is_max:
        y = views(data, -np.inf, -np.inf).max(axis=last)
        return [Value(y.astype(x.data.dtype), views(err, 0, 0).max(axis=last))]
    padded = 1.0 if attrs.get("count_include_pad") else 0.0
    count = views(np.ones_like(data), padded, 0.0).sum(axis=last)
    exact = _multiples(x.data) is not None
    y = (views(data, 0, 0).sum(axis=last) / count).astype(x.data.dtype)
    terms = np.abs(y) if exact else views(np.abs(data), 0, 0).sum(axis=last) / count
    clean = exact & (y == 0)
    return [Value(y, np.where(clean, 0, terms) + views(err, 0, 0).sum(axis=last) / count)]


def _global_average(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    del node
    x = ins[0]
    axes = tuple(range(2, x.data.ndim))
    return [_mean(x, axes, True)]


def _mean(x: Value, axes: tuple[int, ...], keep: bool) -> Value:
    data = x.data.astype(np.float64)
    y = data.mean(axis=axes, keepdims=keep).astype(x.data.dtype)
    if _multiples(x.data) is not None:
        terms = np.abs(y).astype(np.float64)
    else:
        terms = np.abs(data).mean(axis=axes, keepdims=keep)
    return Value(y, terms + np.broadcast_to(x.err, data.shape).mean(axis=axes, keepdims=keep))


def _reduce_mean(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    attrs = _attributes(node)
    x = ins[0]
    axes = attrs.get("axes")
    if len(ins) > 1 and ins[1] is not None:
        axes = ins[1].data.tolist()
    if not axes:
        axes = [] if attrs.get("noop_with_empty_axes") else list(range(x.data.ndim))
    return [_mean(x, tuple(axes), bool(attrs.get("keepdims", 1)))] if axes else [x]


def _batch_norm(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    x = ins[0]
    shape = (1, -1) + (1,) * (x.data.ndim - 2)
    gamma, beta, mean, var = (v.data.reshape(shape).astype(np.float64) for v in ins[1:5])
    scale = gamma / np.sqrt(var + np.float64(np.float32(_attributes(node).get("epsilon", 1e-5))))
    data = x.data.astype(np.float64)
    y = scale * (data - mean) + beta
    err = np.abs(scale) * (np.abs(data) + np.abs(mean) + x.err) + np.abs(beta)
    flat = np.broadcast_to(gamma == 0, data.shape)  # beta alone, whatever the input: no rounding
    steps = (
        scale,
        scale * data,
        scale * mean,
        y,
    )  # no step rounds, in whatever order they are taken
    clean = np.logical_and.reduce(
        [np.broadcast_to(s == s.astype(np.float32), data.shape) for s in steps]
    )
    return [
        Value(y.astype(x.data.dtype), np.where(flat | clean & (np.asarray(x.err) == 0), 0.0, err))
    ]


def _exact(wide: np.ndarray, y: np.ndarray, a: Value, b: Value) -> np.ndarray:
    return (wide == y) & (np.asarray(a.err) == 0) & (np.asarray(b.err) == 0)


def _add_values(a: Value, b: Value, sign: int = 1) -> Value:
    p, q = a.data.astype(np.float64), sign * b.data.astype(np.float64)
    wide = p + q
    y = wide.astype(a.data.dtype)
    err = np.where(_exact(wide, y, a, b), 0.0, np.abs(p) + np.abs(q) + a.err + b.err)
    return Value(y, err)


def _mul_values(a: Value, b: Value) -> Value:
    p, q = a.data.astype(np.float64), b.data.astype(np.float64)
    wide = p * q
    y = wide.astype(a.data.dtype)
    err = np.abs(p) * b.err + np.abs(q) * a.err
    # one rounded product keeps its sign: what matters later is its size
    return Value(y, err + np.where(_exact(wide, y, a, b), 0.0, np.abs(wide)))


# ------------------------------------------------------------------------------------ error terms of other ops

_LAYOUT = {
    "Reshape", "Transpose", "Concat", "Split", "Slice", "Pad", "Gather", "Expand", "Flatten", "Squeeze",
    "Unsqueeze", "Identity", "Dropout", "Tile", "DepthToSpace", "SpaceToDepth",
}  # fmt: skip
_SAME = {"Neg", "Abs", "LeakyRelu", "HardSigmoid", "Elu"}
_DECIDE_ZERO = {"Sign"}
_COMPARE = {"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"}
_ROUND = {"Round": 0.5, "Floor": 0.0, "Ceil": 0.0}


def _log_softmax(node: onnx.NodeProto, ins: list[Value | None]) -> list[Value]:
    """Replace the reference's log(softmax(x)), which underflows to -inf."""
    x = ins[0].data.astype(np.float64)
    axis = _attributes(node).get("axis", -1)
    y = x - x.max(axis=axis, keepdims=True)
    y = (y - np.log(np.exp(y).sum(axis=axis, keepdims=True))).astype(ins[0].data.dtype)
    return [Value(y, np.abs(y) + np.abs(x).max(axis=axis, keepdims=True) + np.max(ins[0].err))]


_KERNELS: dict[str, Callable[[onnx.NodeProto, list], list[Value]]] = {
    "Conv": _conv,
    "LogSoftmax": _log_softmax,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "GlobalAveragePool": _global_average,
    "ReduceMean": _reduce_mean,
    "BatchNormalization": _batch_norm,
}


def _is_float(value: Value | None) -> bool:
    return value is not None and value.data.dtype.kind == "f"


def _full(value: Value) -> np.ndarray:
    return np.broadcast_to(np.asarray(value.err, dtype=np.float64), value.data.shape).astype(
        np.float32
    )


def _crop(arrays: list[np.ndarray | None]) -> list[np.ndarray | None]:
    """Do the negative amounts of a Pad, which `onnx.reference` lacks, and leave the others."""
    data, pads = arrays[0], arrays[1]
    axes = arrays[3].tolist() if len(arrays) > 3 and arrays[3] is not None else range(data.ndim)
    half = len(pads) // 2
    for i, axis in enumerate(axes):
        cut = slice(max(0, -pads[i]), data.shape[axis] - max(0, -pads[i + half]))
        data = data[(slice(None),) * (axis % data.ndim) + (cut,)]
    return [data, np.maximum(pads, 0), *arrays[2:]]


class _Node:
    """One node, ready to be evaluated on any number of inputs."""

    def __init__(self, node: onnx.NodeProto, model: onnx.ModelProto):
        self.node = node
        self.model = model
        self.fallback: ReferenceEvaluator | None = None

    def _reference(self, arrays: list[np.ndarray | None]) -> list[np.ndarray]:
        if self.node.op_type == "Pad" and len(arrays) > 1 and (arrays[1] < 0).any():
            arrays = _crop(arrays)
        names = [n for n in self.node.input if n]
        if self.fallback is None:
            infos = [onnx.ValueInfoProto(name=n) for n in dict.fromkeys(names)]
            outs = [onnx.ValueInfoProto(name=n) for n in self.node.output if n]
            graph = helper.make_graph([self.node], "one", infos, outs)
            self.fallback = self._evaluator(graph)
        given = {n: a for n, a in zip(self.node.input, arrays, strict=True) if n}
        results = iter(self.fallback.run(None, given))
        return [np.asarray(next(results)) if n else np.zeros(()) for n in self.node.output]

    def _evaluator(self, graph: onnx.GraphProto) -> ReferenceEvaluator:
        try:
            return ReferenceEvaluator(
                helper.make_model(graph, opset_imports=self.model.opset_import)
            )
        except (
            RuntimeError
        ):  # no implementation that old, and none differs for what the collection uses
            return ReferenceEvaluator(
                helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
            )

    def __call__(self, ins: list[Value | None], ties: list[Tie]) -> list[Value]:
        """Evaluate the node; append to `ties`."""
        kind = self.node.op_type
        if kind in _KERNELS and _is_float(ins[0]) and self.node.domain in ("", "ai.onnx"):
            return _KERNELS[kind](self.node, ins)
        arrays = [None if v is None else v.data for v in ins]
        results = self._reference(arrays)
        floats = [v for v in ins if _is_float(v)]
        if (
            not floats
            or all(r.dtype.kind != "f" for r in results)
            or kind in _ROUND
            or kind in _DECIDE_ZERO
        ):
            self._decide(kind, ins, floats, ties)
            return [Value(r) for r in results]
        return [
            Value(r, e)
            for r, e in zip(results, self._errors(kind, ins, floats, results), strict=True)
        ]

    def _decide(self, kind: str, ins: list, floats: list[Value], ties: list[Tie]) -> None:
        if not floats:
            return
        x = floats[0]
        if kind in _COMPARE and len(floats) == 2:
            distance = np.abs(floats[0].data.astype(np.float64) - floats[1].data)
            err = np.asarray(floats[0].err) + np.asarray(floats[1].err)
        elif kind in _ROUND or kind in ("Cast", "QuantizeLinear"):
            data = x.data.astype(np.float64)
            offset = _ROUND.get(kind, 0.0)
            err = np.asarray(x.err)
            if kind == "QuantizeLinear":
                scale = ins[1].data.astype(np.float64)
                data, offset, err = data / scale, 0.5, err / scale + np.abs(data / scale)
            near = data - offset - np.rint(data - offset)
            distance = np.abs(near)
            if kind == "Cast" and self._casts_to_bool():
                distance = np.abs(data)
        elif kind in _DECIDE_ZERO:
            distance, err = np.abs(x.data.astype(np.float64)), np.asarray(x.err)
        else:
            return
        count = int(np.sum((distance <= TIE * err) & (err > 0)))
        if count:
            ties.append(Tie(self.node.name or kind, self.node.output[0], count))

    def _casts_to_bool(self) -> bool:
        return _attributes(self.node).get("to") == onnx.TensorProto.BOOL

    def _errors(self, kind: str, ins: list, floats: list[Value], results: list[np.ndarray]) -> list:
        if kind in _LAYOUT:
            arrays = [None if v is None else (_full(v) if _is_float(v) else v.data) for v in ins]
            if kind == "Pad" and len(arrays) > 2 and arrays[2] is not None:
                arrays[2] = np.zeros_like(arrays[2])
            return [np.asarray(r, dtype=np.float64) for r in self._reference(arrays)]
        if kind in ("Add", "Sub"):
            return [_add_values(ins[0], ins[1], 1 if kind == "Add" else -1).err]
        if kind == "Mul":
            return [_mul_values(ins[0], ins[1]).err]
        if kind == "Div":
            d = np.abs(ins[1].data.astype(np.float64))
            with np.errstate(all="ignore"):
                err = (np.asarray(ins[0].err) + np.abs(results[0]) * ins[1].err) / d + np.abs(
                    results[0]
                )
            return [np.nan_to_num(err, posinf=0.0)]
        if kind in ("Relu", "Clip"):  # well inside a flat part the result is a constant
            err, moved = _full(ins[0]).astype(np.float64), np.abs(results[0] - ins[0].data)
            return [np.where(moved > TIE * err, 0.0, err)]
        if kind in _SAME:
            return [_full(ins[0]).astype(np.float64)]
        if kind == "PRelu":
            return [_full(ins[0]) * np.maximum(1.0, np.abs(ins[1].data)) + np.abs(results[0])]
        if kind == "Where":
            parts = [v.err if _is_float(v) else 0.0 for v in ins[1:]]
            return [np.broadcast_to(np.where(ins[0].data, *parts), results[0].shape)]
        if kind in ("Min", "Max"):  # only operands that may be the chosen one count
            err = np.zeros(results[0].shape)
            for v in floats:
                near = np.abs(results[0].astype(np.float64) - v.data) <= TIE * np.asarray(v.err)
                err = np.maximum(err, np.where(near, v.err, 0.0))
            return [err]
        if kind == "Cast":
            return [_full(ins[0]).astype(np.float64)]
        if kind in ("ConstantOfShape", "Shape", "Constant"):
            return [0.0 for _ in results]
        worst = max((float(np.max(v.err, initial=0.0)) for v in floats), default=0.0)
        return [np.abs(r.astype(np.float64)) + worst for r in results]


# --------------------------------------------------------------------------------------------------- the graph


def load(model: onnx.ModelProto | str | Path) -> onnx.ModelProto:
    """Load `model` when it is a path, and inline its local functions."""
    if not isinstance(model, onnx.ModelProto):
        model = onnx.load(str(model))
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def _ordered(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    return graph.node  # ONNX requires topological order


def evaluate(model: onnx.ModelProto | str | Path, feeds: Mapping[str, np.ndarray]) -> Evaluation:
    """Evaluate the graph and keep every tensor."""
    model = load(model)
    graph = model.graph
    done = Evaluation({t.name: Value(numpy_helper.to_array(t)) for t in graph.initializer})
    for sparse in graph.sparse_initializer:
        dense = np.zeros(list(sparse.dims), numpy_helper.to_array(sparse.values).dtype)
        dense.reshape(-1)[numpy_helper.to_array(sparse.indices)] = numpy_helper.to_array(
            sparse.values
        )
        done.values[sparse.values.name] = Value(dense)
    done.values.update({name: Value(np.asarray(array)) for name, array in feeds.items()})
    with np.errstate(all="ignore"):
        for node in _ordered(graph):
            ins = [done.values[n] if n else None for n in node.input]
            outs = _Node(node, model)(ins, done.ties)
            done.values.update({n: v for n, v in zip(node.output, outs, strict=True) if n})
    return done


def run(
    model: onnx.ModelProto | str | Path,
    feeds: Mapping[str, np.ndarray],
    keep: Iterable[str] | None = None,
) -> dict[str, np.ndarray]:
    """Return the graph's outputs and the tensors named in `keep`."""
    model = load(model)
    done = evaluate(model, feeds)
    names = [o.name for o in model.graph.output] + list(keep or [])
    return {name: done.values[name].data for name in names}


def ties(model: onnx.ModelProto | str | Path, feeds: Mapping[str, np.ndarray]) -> list[Tie]:
    """Return the ties that `feeds` meet in `model`."""
    return evaluate(model, feeds).ties


def compare(
    model: onnx.ModelProto | str | Path,
    feeds: Mapping[str, np.ndarray],
    got: Mapping[str, np.ndarray],
) -> Verdict:
    """Judge the outputs `got` of some implementation.

    Integer and bool outputs must be equal; float outputs must differ by at most `RELATIVE` times the largest
    magnitude of the wanted output. Shapes and dtypes must be equal, NaN where NaN is wanted.
    """
    model = load(model)
    done = evaluate(model, feeds)
    faults = []
    for info in model.graph.output:
        want = done.values[info.name].data
        if info.name not in got:
            return Verdict("wrong", f"output `{info.name}` is missing")
        have = np.asarray(got[info.name])
        if have.shape != want.shape or have.dtype != want.dtype:
            return Verdict(
                "wrong", f"`{info.name}`: {have.dtype}{have.shape}, wanted {want.dtype}{want.shape}"
            )
        if want.dtype.kind != "f":
            bad = have != want
            text = f"`{info.name}`: {int(bad.sum())} of {bad.size} elements differ"
        else:
            finite = np.isfinite(want)
            top = float(np.abs(want[finite]).max(initial=0.0))
            with np.errstate(invalid="ignore"):
                gap = np.abs(have.astype(np.float64) - want)
                bad = np.where(
                    finite,
                    ~(gap <= RELATIVE * top + 1e-30),
                    ~((have == want) | (have != have) & (want != want)),
                )
            worst = float(np.nanmax(np.where(finite, gap, 0), initial=0.0))
            text = f"`{info.name}`: {int(bad.sum())} of {bad.size} elements differ, by up to {worst:.3g} (largest {top:.3g})"
        if bad.any():
            faults.append(text)
    if not faults:
        return Verdict("right", ties=tuple(done.ties))
    return Verdict("tie" if done.ties else "wrong", "; ".join(faults), tuple(done.ties))


# ------------------------------------------------------------------------------------------------------- feeds


def _array(rng: np.random.Generator, shape: list[int], dtype: np.dtype, domain: str) -> np.ndarray:
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        high = 256 if dtype == np.uint8 else 4
        return rng.integers(0 if dtype.kind == "u" else -high, high, shape).astype(dtype)
    x = rng.standard_normal(shape)
    if domain == "zeros":  # a third exact zeros
        x = np.where(rng.random(shape) < 1 / 3, 0.0, x)
    elif domain == "relu":
        x = np.maximum(x, 0)
    elif domain == "grid":  # small integers: attainable thresholds and zeros
        x = rng.integers(-2, 3, shape)
    elif domain == "image":
        x = rng.integers(0, 256, shape) / 255
    return x.astype(dtype)


def make_feeds(
    model: onnx.ModelProto, *, domain: str = "normal", seed: int = 0, batch: int = 1
) -> dict[str, np.ndarray]:
    """Return random inputs; symbolic dimensions become `batch`."""
    rng = np.random.default_rng(seed)
    constants = {t.name for t in model.graph.initializer}
    feeds = {}
    for info in model.graph.input:
        if info.name in constants:
            continue
        kind = info.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else batch for d in kind.shape.dim]
        feeds[info.name] = _array(
            rng, shape, helper.tensor_dtype_to_np_dtype(kind.elem_type), domain
        )
    return feeds


def tie_free_feeds(
    model: onnx.ModelProto,
    *,
    domain: str = "normal",
    seed: int = 0,
    batch: int = 1,
    tries: int = 40,
) -> dict[str, np.ndarray]:
    """Return the inputs of the first seed from `seed` that meets no tie (the last one tried if all do)."""
    model = load(model)
    feeds: dict[str, np.ndarray] = {}
    for attempt in range(tries):
        feeds = make_feeds(model, domain=domain, seed=seed + 1000 * attempt, batch=batch)
        if not ties(model, feeds):
            break
    return feeds
