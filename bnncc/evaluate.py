"""Evaluate graph nodes with NumPy: what "right" means.

Conv, Gemm, MatMul, BatchNormalization, means and average pools accumulate in float64 and round
once; where both operands of a product are integer multiples of a scale the accumulator is an exact
integer. All else is float32 as ONNX defines it. Operators without a function here go through
`onnx.reference` on a model of one node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from bnncc import numeric
from bnncc.errors import InputError, UnsupportedOp
from bnncc.graph import Graph, Node, TensorType

Array = np.ndarray[Any, Any]
Inputs = Sequence[Array | None]
Function = Callable[[dict[str, Any], list[Any], int], list[Array]]

OPSET = onnx.defs.onnx_opset_version()
"""Version of the default domain whose semantics graph nodes have."""


def evaluate_node(
    node: Node, inputs: Inputs, types: Mapping[str, TensorType] | None = None
) -> list[Array]:
    """Evaluate one node.

    Parameters
    ----------
    node : Node
        In the normalised form that `bnncc.frontend.onnx.load` produces.
    inputs : sequence of ndarray or None
        One per input of the node; None where the input is absent. Elementwise operators broadcast,
        so that an axis of trial values may be put in front.
    types : mapping of str to TensorType, optional
        Not needed by ONNX operators.

    Returns
    -------
    list of ndarray
        One per output of the node.

    Raises
    ------
    UnsupportedOp
        If neither this module nor `onnx.reference` knows the operator.
    """
    del types
    function = FUNCTIONS.get(node.op)
    with np.errstate(all="ignore"):
        if function is None:
            return _reference(node, inputs)
        results = function(node.attrs, list(inputs), len(node.outputs))
    return [np.asarray(r) for r in results]


def evaluate(
    graph: Graph, feeds: Mapping[str, Array], keep: Iterable[str] = ()
) -> dict[str, Array]:
    """Evaluate a graph.

    Parameters
    ----------
    graph : Graph
        Nodes in topological order.
    feeds : mapping of str to ndarray
        One array per graph input; feeds of other tensors override their producers.
    keep : iterable of str, optional
        Tensors to return besides the outputs; the others are freed after their last reader.

    Returns
    -------
    dict of str to ndarray
        The graph's outputs and the tensors of `keep`.

    Raises
    ------
    InputError
        If a graph input is not fed.
    """
    for name in graph.inputs:
        if name not in feeds:
            raise InputError(f"input `{name}` is missing")
    wanted = {*graph.outputs, *keep}
    left: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.inputs:
            left[name] = left.get(name, 0) + 1
    values: dict[str, Array] = {k: np.asarray(v) for k, v in feeds.items()}
    for node in graph.nodes:
        if not all(o in feeds for o in node.outputs if o):
            ins = [
                None if not i else values[i] if i in values else graph.constants[i]
                for i in node.inputs
            ]
            outs = evaluate_node(node, ins, graph.types)
            for name, value in zip(node.outputs, outs, strict=False):
                if name and name not in feeds:
                    values[name] = value
        for name in node.inputs:
            left[name] -= 1
            if not left[name] and name not in wanted:
                values.pop(name, None)
        for name in node.outputs:
            if name not in wanted and not left.get(name):
                values.pop(name, None)
    return {k: values[k] if k in values else graph.constants[k] for k in wanted}


def _reference(node: Node, inputs: Inputs) -> list[Array]:
    """Run one node of the default domain through onnx.reference."""
    from onnx.reference import ReferenceEvaluator

    if "::" in node.op or node.op.startswith("bnncc."):
        raise UnsupportedOp(f"{node.op} `{node.name}`: cannot be evaluated")
    names = [f"i{k}" if v is not None else "" for k, v in enumerate(inputs)]
    outs = [f"o{k}" if name else "" for k, name in enumerate(node.outputs)]
    proto = helper.make_node(node.op, names, outs)
    proto.attribute.extend(make_attribute(k, v) for k, v in node.attrs.items())
    given = {n: np.asarray(v) for n, v in zip(names, inputs, strict=True) if n}
    model = helper.make_model(
        helper.make_graph(
            [proto],
            "node",
            [
                helper.make_tensor_value_info(
                    n, helper.np_dtype_to_tensor_dtype(v.dtype), list(v.shape)
                )
                for n, v in given.items()
            ],
            [onnx.ValueInfoProto(name=o) for o in outs if o],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=10,
    )
    try:
        results = iter(ReferenceEvaluator(model).run(None, given))
    except Exception as error:
        raise UnsupportedOp(
            f"{node.op} `{node.name}`: cannot be evaluated ({error or type(error).__name__})"
        ) from error
    return [np.asarray(next(results)) if o else np.zeros(0) for o in outs]


def make_attribute(name: str, value: Any) -> onnx.AttributeProto:
    """Make ONNX's attribute of a graph node's attribute."""
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, onnx.numpy_helper.from_array(value))
    if isinstance(value, (list, tuple)) and not value:
        return helper.make_attribute(name, [], attr_type=onnx.AttributeProto.INTS)
    return helper.make_attribute(name, value)


# ------------------------------------------------------------------------------------ elementwise


def _unary(function: Callable[[Array], Array]) -> Function:
    return lambda attrs, ins, _: [np.asarray(function(ins[0])).astype(ins[0].dtype, copy=False)]


def _binary(function: Callable[[Array, Array], Array]) -> Function:
    return lambda attrs, ins, _: [np.asarray(function(ins[0], ins[1]))]


def _variadic(function: Callable[[Array, Array], Array]) -> Function:
    def run(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
        total = ins[0]
        for other in ins[1:]:
            total = function(total, other)
        return [np.asarray(total)]

    return run


def _like(x: Array, value: float) -> Any:
    return x.dtype.type(value)


def _sigmoid(x: Array) -> Array:
    wide = x.astype(np.float64)
    return (1 / (1 + np.exp(-wide))).astype(x.dtype)


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return a / b
    quotient = np.abs(a) // np.abs(b)  # ONNX truncates
    return (quotient * np.sign(a) * np.sign(b)).astype(a.dtype)


def _power(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    return [np.power(ins[0], ins[1].astype(ins[0].dtype)).astype(ins[0].dtype)]


def _modulo(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    return [np.fmod(*ins) if attrs.get("fmod") else np.mod(*ins)]


def _mean_of(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    total = sum(ins[1:], ins[0])
    return [np.asarray(total / _like(total, len(ins)))]


def _clip(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x = ins[0]
    if len(ins) > 1 and ins[1] is not None:
        x = np.maximum(x, ins[1])
    if len(ins) > 2 and ins[2] is not None:
        x = np.minimum(x, ins[2])
    return [x]


def _cast_to(x: Array, dtype: Any) -> Array:
    if np.dtype(dtype).kind in "iu" and x.dtype.kind == "f":
        return np.trunc(x).astype(np.int64).astype(dtype)
    return x.astype(dtype)


def _cast(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    return [_cast_to(ins[0], helper.tensor_dtype_to_np_dtype(attrs["to"]))]


def _leaky(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x = ins[0]
    return [np.where(x < 0, x * _like(x, attrs.get("alpha", 0.01)), x)]


def _elu(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x = ins[0]
    return [np.where(x < 0, _like(x, attrs.get("alpha", 1.0)) * np.expm1(x), x)]


def _hard_sigmoid(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x = ins[0]
    y = x * _like(x, attrs.get("alpha", 0.2)) + _like(x, attrs.get("beta", 0.5))
    return [np.clip(y, _like(x, 0), _like(x, 1))]


def _hard_swish(x: Array) -> Array:
    return x * np.clip(x * _like(x, 1 / 6) + _like(x, 0.5), _like(x, 0), _like(x, 1))


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype) if x.size else x


def _where(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    return [np.where(ins[0], ins[1], ins[2])]


def _softmax(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x = ins[0].astype(np.float64)
    axis = attrs.get("axis", -1)
    power = np.exp(x - x.max(axis=axis, keepdims=True))
    return [(power / power.sum(axis=axis, keepdims=True)).astype(ins[0].dtype)]


def _log_softmax(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x = ins[0].astype(np.float64)
    axis = attrs.get("axis", -1)
    x = x - x.max(axis=axis, keepdims=True)
    return [(x - np.log(np.exp(x).sum(axis=axis, keepdims=True))).astype(ins[0].dtype)]


# ----------------------------------------------------------------------------------------- shapes


def reshape_to(shape: Sequence[int], wanted: Sequence[int], allowzero: bool = False) -> list[int]:
    """Resolve 0 and -1 of a Reshape's target for an input of `shape`."""
    dims = [
        shape[i] if d == 0 and not allowzero and i < len(shape) else int(d)
        for i, d in enumerate(wanted)
    ]
    if -1 in dims:
        known = math.prod(d for d in dims if d != -1)
        dims[dims.index(-1)] = math.prod(shape) // known if known else 0
    return dims


def _reshape(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x = ins[0]
    return [x.reshape(reshape_to(x.shape, ins[1].tolist(), bool(attrs.get("allowzero"))))]


def _transpose(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    return [np.transpose(ins[0], attrs.get("perm"))]


def _flatten(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x = ins[0]
    axis = attrs.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return [x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))]


def _squeeze(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    axes = tuple(ins[1].tolist()) if len(ins) > 1 and ins[1] is not None else None
    return [np.squeeze(ins[0], axes)]


def _unsqueeze(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    return [np.expand_dims(ins[0], tuple(np.atleast_1d(ins[1]).tolist()))]


def _split(attrs: dict[str, Any], ins: list[Any], count: int) -> list[Array]:
    x, axis = ins[0], attrs.get("axis", 0)
    if len(ins) > 1 and ins[1] is not None:
        sizes = ins[1].tolist()
    else:
        step = -(-x.shape[axis] // count)
        sizes = [min(step, x.shape[axis] - step * k) for k in range(count)]
    return list(np.split(x, np.cumsum(sizes)[:-1].tolist(), axis))


def _slice(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
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


def _pad(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
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


def _shape(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    return [np.array(ins[0].shape[attrs.get("start", 0) : attrs.get("end")], np.int64)]


def _constant_of_shape(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    value = attrs.get("value", np.zeros(1, np.float32))
    return [np.full(ins[0].tolist(), value.reshape(-1)[0], value.dtype)]


def _expand(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    shape = np.broadcast_shapes(ins[0].shape, tuple(ins[1].tolist()))
    return [np.broadcast_to(ins[0], shape)]


def _gather(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    return [np.take(ins[0], ins[1].astype(np.int64), axis=attrs.get("axis", 0))]


def _depth_to_space(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x, b = ins[0], attrs["blocksize"]
    n, c, h, w = x.shape
    if attrs.get("mode", "DCR") == "DCR":
        y = x.reshape(n, b, b, c // b // b, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // b // b, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return [y.reshape(n, c // b // b, h * b, w * b)]


def _space_to_depth(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x, b = ins[0], attrs["blocksize"]
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4)
    return [y.reshape(n, c * b * b, h // b, w // b)]


# ------------------------------------------------------------------------- reductions and products


def _reduce(function: Callable[..., Any]) -> Function:
    def run(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
        x = ins[0]
        axes = ins[1].tolist() if len(ins) > 1 and ins[1] is not None else []
        if not axes and attrs.get("noop_with_empty_axes"):
            return [x]
        keep = bool(attrs.get("keepdims", 1))
        result = function(x, tuple(axes) if axes else None, keep)
        return [np.asarray(result).astype(x.dtype)]

    return run


def _wide(x: Array) -> Array:
    return x.astype(np.float64) if x.dtype.kind == "f" else x


def _arg(function: Callable[..., Any]) -> Function:
    def run(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
        x, axis = ins[0], attrs.get("axis", 0)
        if attrs.get("select_last_index"):
            result = x.shape[axis] - 1 - function(np.flip(x, axis), axis)
        else:
            result = function(x, axis)
        return [np.expand_dims(result, axis) if attrs.get("keepdims", 1) else result]

    return run


def _conv(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    return [numeric.conv(ins[0], ins[1], ins[2] if len(ins) > 2 else None, attrs)]


def _gemm(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    return [numeric.gemm(ins[0], ins[1], ins[2] if len(ins) > 2 else None, attrs)]


def _matmul(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    return [np.asarray(numeric.matmul(ins[0], ins[1])).astype(ins[0].dtype)]


def _max_pool(attrs: dict[str, Any], ins: list[Any], count: int) -> list[Array]:
    if count > 1:
        raise UnsupportedOp("MaxPool: the `Indices` output is not supported")
    return [numeric.max_pool(ins[0], attrs)]


def _spatial(x: Array) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _instance_norm(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x = ins[0].astype(np.float64)
    column = (1, -1) + (1,) * (x.ndim - 2)
    mean, var = x.mean(_spatial(x), keepdims=True), x.var(_spatial(x), keepdims=True)
    y = (x - mean) / np.sqrt(var + attrs.get("epsilon", 1e-5))
    return [(y * ins[1].reshape(column) + ins[2].reshape(column)).astype(ins[0].dtype)]


def _layer_norm(attrs: dict[str, Any], ins: list[Any], count: int) -> list[Array]:
    x = ins[0].astype(np.float64)
    axes = tuple(range(attrs.get("axis", -1) % x.ndim, x.ndim))
    mean = x.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(x.var(axes, keepdims=True) + attrs.get("epsilon", 1e-5))
    y = (x - mean) * inverse * ins[1]
    y = y + ins[2] if len(ins) > 2 and ins[2] is not None else y
    kind = ins[0].dtype
    return [y.astype(kind), mean.astype(np.float32), inverse.astype(np.float32)][:count]


FUNCTIONS: dict[str, Function] = {
    **{
        op: _unary(f)
        for op, f in {
            "Abs": np.abs,
            "Atan": np.arctan,
            "Ceil": np.ceil,
            "Cos": np.cos,
            "Erf": _erf,
            "Exp": np.exp,
            "Floor": np.floor,
            "HardSwish": _hard_swish,
            "Identity": lambda x: x,
            "Log": np.log,
            "Neg": np.negative,
            "Not": np.logical_not,
            "Reciprocal": lambda x: _like(x, 1) / x,
            "Relu": lambda x: np.maximum(x, _like(x, 0)),
            "Round": np.rint,
            "Sigmoid": _sigmoid,
            "Sign": np.sign,
            "Sin": np.sin,
            "Softplus": lambda x: np.logaddexp(x, _like(x, 0)),
            "Softsign": lambda x: x / (1 + np.abs(x)),
            "Sqrt": np.sqrt,
            "Tanh": np.tanh,
        }.items()
    },
    **{
        op: _binary(f)
        for op, f in {
            "Add": np.add,
            "And": np.logical_and,
            "Div": _divide,
            "Equal": np.equal,
            "Greater": np.greater,
            "GreaterOrEqual": np.greater_equal,
            "Less": np.less,
            "LessOrEqual": np.less_equal,
            "Mul": np.multiply,
            "Or": np.logical_or,
            "PRelu": lambda x, s: np.where(x < 0, x * s, x),
            "Sub": np.subtract,
            "Xor": np.logical_xor,
        }.items()
    },
    **{
        f"Reduce{op}": _reduce(f)
        for op, f in {
            "L1": lambda x, axes, keep: np.sum(np.abs(_wide(x)), axes, keepdims=keep),
            "L2": lambda x, axes, keep: np.sqrt(np.sum(_wide(x) ** 2, axes, keepdims=keep)),
            "Max": lambda x, axes, keep: np.max(x, axes, keepdims=keep),
            "Mean": numeric.mean,
            "Min": lambda x, axes, keep: np.min(x, axes, keepdims=keep),
            "Prod": lambda x, axes, keep: np.prod(_wide(x), axes, keepdims=keep),
            "Sum": lambda x, axes, keep: np.sum(_wide(x), axes, keepdims=keep),
            "SumSquare": lambda x, axes, keep: np.sum(_wide(x) ** 2, axes, keepdims=keep),
        }.items()
    },
    "ArgMax": _arg(np.argmax),
    "ArgMin": _arg(np.argmin),
    "AveragePool": lambda attrs, ins, _: [numeric.average_pool(ins[0], attrs)],
    "BatchNormalization": lambda attrs, ins, _: [numeric.batch_norm(ins, attrs)],
    "Cast": _cast,
    "CastLike": lambda attrs, ins, _: [_cast_to(ins[0], ins[1].dtype)],
    "Clip": _clip,
    "Concat": lambda attrs, ins, _: [np.concatenate(ins, attrs["axis"])],
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "DepthToSpace": _depth_to_space,
    "Einsum": lambda attrs, ins, _: [np.einsum(attrs["equation"], *ins).astype(ins[0].dtype)],
    "Elu": _elu,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda attrs, ins, _: [numeric.mean(ins[0], _spatial(ins[0]), True)],
    "GlobalMaxPool": lambda attrs, ins, _: [ins[0].max(_spatial(ins[0]), keepdims=True)],
    "HardSigmoid": _hard_sigmoid,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": _leaky,
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "Max": _variadic(np.maximum),
    "MaxPool": _max_pool,
    "Mean": _mean_of,
    "Min": _variadic(np.minimum),
    "Mod": _modulo,
    "Pad": _pad,
    "Pow": _power,
    "Range": lambda attrs, ins, _: [np.arange(ins[0], ins[1], ins[2], dtype=ins[0].dtype)],
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": lambda attrs, ins, _: [np.array(ins[0].size, np.int64)],
    "Slice": _slice,
    "Softmax": _softmax,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Squeeze": _squeeze,
    "Sum": _variadic(np.add),
    "Tile": lambda attrs, ins, _: [np.tile(ins[0], ins[1].tolist())],
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
"""Evaluator of each operator, called with attributes, inputs and the number of outputs."""
