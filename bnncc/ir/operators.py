"""NumPy implementations of common ONNX operators, in the form of the newest opset."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from onnx import helper

from bnncc.errors import UnsupportedOp
from bnncc.ir import numeric, shaping
from bnncc.ir.dims import channel_shape
from bnncc.ir.halves import NARROW, ROUND, round_to
from bnncc.ir.image_bits import IMAGE_BITS, image_bits
from bnncc.ir.quantizers import (
    LEVELS,
    MULTI_THRESHOLD,
    QUANT,
    QUANTIZED_CONV,
    dequantize_linear,
    levels,
    multi_threshold,
    quant,
    quantize_linear,
    quantized_conv,
)
from bnncc.ir.resize import resize
from bnncc.ir.rows import ROTARY, ROW_NORM, ROW_SOFTMAX, SWISH, rotary, row_norm, row_softmax

Array = np.ndarray[Any, Any]
Function = Callable[[dict[str, Any], list[Any], int], list[Array]]


# ------------------------------------------------------------------------------------ elementwise


def _unary(function: Callable[[Array], Array]) -> Function:
    return lambda attrs, ins, _: [np.asarray(function(ins[0])).astype(ins[0].dtype, copy=False)]


def _binary(function: Callable[[Array, Array], Array]) -> Function:
    return lambda attrs, ins, _: [np.asarray(function(ins[0], ins[1]))]


def _variadic(
    function: Callable[[Array, Array], Array], attrs: dict[str, Any], ins: list[Any], _: int
) -> list[Array]:
    total = ins[0]
    for other in ins[1:]:
        total = function(total, other)
    return [np.asarray(total)]


def _like(x: Array, value: float) -> Any:
    return x.dtype.type(value)


def _sigmoid(x: Array) -> Array:
    wide = x.astype(np.float64)
    return (1 / (1 + np.exp(-wide))).astype(x.dtype)


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return a / b
    quotient, rest = a // b, np.mod(a, b)
    return (quotient + ((rest != 0) & ((a < 0) != (b < 0)))).astype(a.dtype)  # ONNX truncates


def _power(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    base, exponent = ins
    if base.dtype.kind == "f" or exponent.dtype.kind in "iub":
        exponent = exponent.astype(base.dtype)
    return [np.power(base, exponent).astype(base.dtype)]


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
    return [np.clip(y, _like(x, 0), _like(x, 1)).astype(x.dtype)]  # NumPy widens bfloat16


def _hard_swish(x: Array) -> Array:
    return x * np.clip(x * _like(x, 1 / 6) + _like(x, 0.5), _like(x, 0), _like(x, 1))


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype) if x.size else x


def _range(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    start, limit, delta = (x.reshape(-1)[0] for x in ins)
    return [np.arange(start, limit, delta, dtype=ins[0].dtype)]


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


# ------------------------------------------------------------------------- reductions and products


def _reduce(
    function: Callable[..., Any], attrs: dict[str, Any], ins: list[Any], _: int
) -> list[Array]:
    x = ins[0]
    axes = ins[1].tolist() if len(ins) > 1 and ins[1] is not None else []
    keep = bool(attrs.get("keepdims", 1))
    every = None if not attrs.get("noop_with_empty_axes") else ()  # no axes: apply the map only
    result = function(x, tuple(axes) if axes else every, keep)
    return [np.asarray(result).astype(x.dtype)]


def _wide(x: Array) -> Array:
    return x.astype(np.float64) if x.dtype.kind == "f" else x


def _extreme(
    function: Callable[..., Any], x: Array, axes: tuple[int, ...] | None, keep: bool
) -> Any:
    """Return maxima or minima; those of an empty set are the type's lowest or highest value."""
    if x.size:
        return function(x, axes, keepdims=keep)
    sign = -1.0 if function is np.max else 1.0
    if x.dtype.kind in "iu":
        bounds = np.iinfo(x.dtype)
        return function(x, axes, keepdims=keep, initial=bounds.min if sign < 0 else bounds.max)
    initial = sign > 0 if x.dtype.kind == "b" else sign * np.inf
    return function(x, axes, keepdims=keep, initial=initial)


def _arg(
    function: Callable[..., Any], attrs: dict[str, Any], ins: list[Any], _: int
) -> list[Array]:
    x, axis = ins[0], attrs.get("axis", 0)
    if attrs.get("select_last_index"):
        result = x.shape[axis] - 1 - function(np.flip(x, axis), axis)
    else:
        result = function(x, axis)
    return [np.expand_dims(result, axis) if attrs.get("keepdims", 1) else result]


def _biased(function: Callable[..., Array]) -> Function:
    """Return the evaluator of a product whose third input, the bias, is optional."""
    return lambda attrs, ins, _: [function(*ins[:2], ins[2] if len(ins) > 2 else None, attrs)]


def _matmul(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    made = numeric.matmul(ins[0], ins[1], attrs.get(numeric.FLOAT_SUM))
    return [np.asarray(made).astype(ins[0].dtype)]


def _max_pool(attrs: dict[str, Any], ins: list[Any], count: int) -> list[Array]:
    if count > 1:
        raise UnsupportedOp("MaxPool: the `Indices` output is not supported")
    return [numeric.max_pool(ins[0], attrs)]


def _spatial(x: Array) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _instance_norm(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x = ins[0].astype(np.float64)
    column = channel_shape(x.ndim)
    mean, var = x.mean(_spatial(x), keepdims=True), x.var(_spatial(x), keepdims=True)
    y = (x - mean) / np.sqrt(var + attrs.get("epsilon", 1e-5))
    return [(y * ins[1].reshape(column) + ins[2].reshape(column)).astype(ins[0].dtype)]


def _lrn(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    x = ins[0].astype(np.float64)
    size, channels = attrs["size"], x.shape[1]
    before = (size - 1) // 2
    pads = [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)]
    squares = np.pad(x * x, pads)
    total = sum(squares[:, k : k + channels] for k in range(size))
    base = attrs.get("bias", 1.0) + attrs.get("alpha", 1e-4) / size * total
    return [(x / base ** attrs.get("beta", 0.75)).astype(ins[0].dtype)]


def _layer_norm(attrs: dict[str, Any], ins: list[Any], count: int) -> list[Array]:
    x = ins[0].astype(np.float64)
    axes = tuple(range(attrs.get("axis", -1) % x.ndim, x.ndim))
    mean = x.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(x.var(axes, keepdims=True) + attrs.get("epsilon", 1e-5))
    y = (x - mean) * inverse * ins[1]
    y = y + ins[2] if len(ins) > 2 and ins[2] is not None else y
    kind = ins[0].dtype
    return [y.astype(kind), mean.astype(np.float32), inverse.astype(np.float32)][:count]


_UNARY: dict[str, Callable[[Array], Array]] = {
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
}
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
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
}

ELEMENTWISE = frozenset((
    *_UNARY, *_BINARY, "Cast", "CastLike", "Celu", "Clip", "Dropout", "Elu", "Gelu", "HardSigmoid",
    "IsInf", "IsNaN", "LeakyRelu", "Max", "Mean", "Min", "Mish", "Mod", "Pow", "Selu", "Sum",
    "ThresholdedRelu", "Where",
))  # fmt: skip
"""Operators whose results each depend on one element of each broadcast input."""

FUNCTIONS: dict[str, Function] = {
    **{op: _unary(f) for op, f in _UNARY.items()},
    **{op: _binary(f) for op, f in _BINARY.items()},
    ROTARY: rotary,
    ROW_NORM: row_norm,
    ROW_SOFTMAX: row_softmax,
    SWISH: _unary(lambda x: x * _sigmoid(x)),
    **{
        f"Reduce{op}": partial(_reduce, f)
        for op, f in {
            "L1": lambda x, axes, keep: np.sum(np.abs(_wide(x)), axes, keepdims=keep),
            "L2": lambda x, axes, keep: np.sqrt(np.sum(_wide(x) ** 2, axes, keepdims=keep)),
            "Max": lambda x, axes, keep: _extreme(np.max, x, axes, keep),
            "Mean": numeric.mean,
            "Min": lambda x, axes, keep: _extreme(np.min, x, axes, keep),
            "Prod": lambda x, axes, keep: np.prod(_wide(x), axes, keepdims=keep),
            "Sum": lambda x, axes, keep: np.sum(_wide(x), axes, keepdims=keep),
            "SumSquare": lambda x, axes, keep: np.sum(_wide(x) ** 2, axes, keepdims=keep),
        }.items()
    },
    "ArgMax": partial(_arg, np.argmax),
    "ArgMin": partial(_arg, np.argmin),
    "AveragePool": lambda attrs, ins, _: [numeric.average_pool(ins[0], attrs)],
    "BatchNormalization": lambda attrs, ins, _: [numeric.batch_norm(ins, attrs)],
    "Cast": _cast,
    "CastLike": lambda attrs, ins, _: [_cast_to(ins[0], ins[1].dtype)],
    "Clip": _clip,
    "Concat": lambda attrs, ins, _: [np.concatenate(ins, attrs["axis"])],
    "ConstantOfShape": shaping.constant_of_shape,
    "Conv": _biased(numeric.conv),
    "ConvTranspose": _biased(numeric.conv_transpose),
    "DepthToSpace": shaping.depth_to_space,
    "Einsum": lambda attrs, ins, _: [np.einsum(attrs["equation"], *ins).astype(ins[0].dtype)],
    "Elu": _elu,
    "Expand": shaping.expand,
    "Flatten": shaping.flatten,
    "Gather": shaping.gather,
    "GatherElements": shaping.gather_elements,
    "Gemm": _biased(numeric.gemm),
    "GlobalAveragePool": lambda attrs, ins, _: [numeric.mean(ins[0], _spatial(ins[0]), True)],
    "GlobalMaxPool": lambda attrs, ins, _: [ins[0].max(_spatial(ins[0]), keepdims=True)],
    "HardSigmoid": _hard_sigmoid,
    "InstanceNormalization": _instance_norm,
    "LRN": _lrn,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": _leaky,
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "Max": partial(_variadic, np.maximum),
    "MaxPool": _max_pool,
    "Mean": _mean_of,
    "Min": partial(_variadic, np.minimum),
    "Mod": _modulo,
    "Pad": shaping.pad,
    "Pow": _power,
    "Range": _range,
    "Reshape": shaping.reshape,
    "Resize": resize,
    "Shape": shaping.shape,
    "Size": lambda attrs, ins, _: [np.array(ins[0].size, np.int64)],
    "ScatterElements": shaping.scatter_elements,
    "Slice": shaping.slice_,
    "Softmax": _softmax,
    "SpaceToDepth": shaping.space_to_depth,
    "Split": shaping.split,
    "Squeeze": shaping.squeeze,
    "Sum": partial(_variadic, np.add),
    "Tile": lambda attrs, ins, _: [np.tile(ins[0], ins[1].tolist())],
    "Transpose": shaping.transpose,
    "Unsqueeze": shaping.unsqueeze,
    "Where": _where,
    IMAGE_BITS: image_bits,
    QUANTIZED_CONV: quantized_conv,
    ROUND: round_to,
    NARROW: round_to,
    QUANT: quant,
    MULTI_THRESHOLD: multi_threshold,
    LEVELS: levels,
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
}
"""Evaluators of operators, called with attributes, inputs and the number of outputs."""
