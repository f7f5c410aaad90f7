"""TensorFlow Lite's builtin operators as ONNX nodes.

Images stay channels-last, as in the file: convolutions and pools are surrounded by transposes,
which passes later remove.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bnncc.errors import ModelError, ShapeError
from bnncc.frontend.tflite_moves import MOVES
from bnncc.frontend.tflite_names import CODES, NAMES
from bnncc.frontend.tflite_writer import (
    Rule,
    Writer,
    quantized,
)

EXACT = {
    "RESHAPE", "SQUEEZE", "EXPAND_DIMS", "TRANSPOSE", "MAX_POOL_2D", "CONCATENATION", "SPLIT",
    "SPLIT_V", "SLICE", "STRIDED_SLICE", "GATHER", "PACK", "UNPACK", "DEPTH_TO_SPACE",
    "SPACE_TO_DEPTH", "TILE", "PAD", "MAXIMUM", "MINIMUM", "REDUCE_MAX", "REDUCE_MIN",
}  # fmt: skip
"""Operators that are exact on quantized integers if all operands have the same quantization."""

# --------------------------------------------------------------------------------------- layers


def _window(writer: Writer, slots: tuple[int, int, int, int]) -> dict[str, Any]:
    """Return padding and strides; `slots` are those of the width and height of strides, dilations.

    SAME is ONNX's SAME_UPPER: the larger half of the padding is at the end.

    Raises
    ------
    ModelError
        If an option is invalid.
    """
    options = writer.options()
    padding = options.scalar(0, "int8")
    if padding not in (0, 1):
        raise ModelError(f"{writer.where}: `padding` is {padding}, expected SAME (0) or VALID (1)")
    values = [options.scalar(s, "int32", 1 if k > 1 else 0) for k, s in enumerate(slots)]
    if min(values) < 1:
        raise ModelError(f"{writer.where}: a stride or dilation is {min(values)}")
    return {
        "auto_pad": "VALID" if padding else "SAME_UPPER",
        "strides": [values[1], values[0]],
        "dilations": [values[3], values[2]],
    }


def _conv(writer: Writer, *, depthwise: bool = False) -> str:
    x, weight, bias = writer.operands(2, 3)
    attrs = _window(writer, (1, 2, 5, 6) if depthwise else (1, 2, 4, 5))
    if len(weight.shape) != 4:
        raise ShapeError(f"{writer.where}: filter of shape {list(weight.shape)}, expected 4 axes")
    depth, channels = weight.shape[3], writer.image(x)[3]
    known = isinstance(channels, int)
    if depthwise and not known:
        raise ShapeError(f"{writer.where}: the number of its channels is not known")
    if depthwise:
        group, order, activation = channels, [3, 0, 1, 2], 4
    else:
        whole = known and isinstance(depth, int) and depth and channels % depth == 0
        group, order, activation = channels // depth if whole else 1, [0, 3, 1, 2], 3
    filters = writer.turned(weight, order)
    inputs = [writer.first(writer.read(x)), filters]
    if bias is not None:
        inputs.append(writer.read(bias))
    made = writer.last(writer.node("Conv", *inputs, group=group, **attrs))
    return writer.activated(made, writer.option(activation, "int8"))


def _pool(kind: str, writer: Writer) -> str:
    (x,) = writer.operands(1)
    writer.image(x)
    options = writer.options()
    attrs = _window(writer, (1, 2, 1, 2))
    del attrs["dilations"]
    kernel = [options.scalar(4, "int32"), options.scalar(3, "int32")]
    if min(kernel) < 1:
        raise ModelError(f"{writer.where}: its window is {kernel}")
    made = writer.node(kind, writer.first(writer.read(x)), kernel_shape=kernel, **attrs)
    code = options.scalar(5, "int8")
    return writer.activated(writer.last(made), code)


def _dense(writer: Writer) -> str:
    x, weight, bias = writer.operands(2, 3)
    if writer.option(1, "int8"):
        raise writer.fail("its weights are shuffled for a CPU; convert the model without that")
    if len(weight.shape) != 2 or not isinstance(weight.shape[1], int):
        raise ShapeError(f"{writer.where}: weights of shape {list(weight.shape)}, expected 2")
    data, keep = writer.read(x), bool(writer.option(2, "bool", False))
    rank = writer.rank(x)
    if rank != 2 and not keep:
        data = writer.node("Reshape", data, writer.constant([-1, weight.shape[1]]))
    if rank == 2 or not keep:
        inputs = [data, writer.read(weight)] + ([] if bias is None else [writer.read(bias)])
        made = writer.node("Gemm", *inputs, transB=1)
    else:
        made = writer.node("MatMul", data, writer.turned(weight, [1, 0]))
        if bias is not None:
            made = writer.node("Add", made, writer.read(bias))
    return writer.activated(made, writer.option(0, "int8"))


def _batch_matmul(writer: Writer) -> str:
    x, y = writer.operands(2)
    names = []
    for k, tensor in enumerate((x, y)):
        name, rank = writer.read(tensor), writer.rank(tensor)
        if writer.option(k, "bool", False):
            if rank < 2:
                raise ShapeError(f"{writer.where}: `{tensor.name}` is not a matrix")
            perm = [*range(rank - 2), rank - 1, rank - 2]
            name = writer.node("Transpose", name, perm=perm)
        names.append(name)
    return writer.node("MatMul", *names)


# --------------------------------------------------------------------------------- elementwise


def _simple(
    op: str,
    writer: Writer,
    *,
    count: int = 1,
    activation: bool = False,
    **attrs: Any,
) -> str:
    """Write an operator that has an ONNX equivalent."""
    made = writer.node(op, *map(writer.read, writer.operands(count)), **attrs)
    code = writer.option(0, "int8") if activation else 0
    return writer.activated(made, code)


def _fused(code: int, writer: Writer) -> str:
    return writer.activated(writer.only(), code)


def _clip01(writer: Writer) -> str:
    return writer.node("Clip", writer.only(), writer.constant(0.0), writer.constant(1.0))


def _leaky(writer: Writer) -> str:
    alpha = float(writer.option(0, "float32", 0.0))
    return writer.node("LeakyRelu", writer.only(), alpha=alpha)


def _softmax(writer: Writer) -> str:
    name, beta = writer.only(), float(writer.option(0, "float32", 0.0))
    if beta != 1.0:
        name = writer.node("Mul", name, writer.constant(beta))
    return writer.node("Softmax", name, axis=-1)


def _composed(*steps: str) -> Rule:
    """Write an operator that is a sequence of unary operators."""

    def rule(writer: Writer) -> str:
        name = writer.only()
        for step in steps:
            name = writer.node(step, name)
        return name

    return rule


def _square(writer: Writer) -> str:
    (x,) = writer.operands(1)
    return writer.node("Mul", writer.read(x), writer.read(x))


def _squared_difference(writer: Writer) -> str:
    difference = writer.node("Sub", *map(writer.read, writer.operands(2)))
    return writer.node("Mul", difference, difference)


def _not_equal(writer: Writer) -> str:
    equal = writer.node("Equal", *map(writer.read, writer.operands(2)))
    return writer.node("Not", equal)


def _normalize(writer: Writer) -> str:
    (x,) = writer.operands(1)
    length = writer.node("ReduceL2", writer.read(x), writer.constant([-1]), keepdims=1)
    bounded = writer.node("Max", length, writer.constant(1e-6))
    made = writer.node("Div", writer.read(x), bounded)
    return writer.activated(made, writer.option(0, "int8"))


def _gelu(writer: Writer) -> str:
    form = "tanh" if writer.option(0, "bool", False) else "none"
    return writer.node("Gelu", writer.only(), approximate=form)


def _cast(writer: Writer) -> str:
    return writer.cast(writer.only(), writer.operator.outputs[0].dtype)


def _quantize(writer: Writer) -> str:
    (x,) = writer.operands(1)
    made = writer.operator.outputs[0]
    if x.dtype != "float32" or not quantized(made) or made.dtype == "int16":
        raise writer.fail(f"{x.dtype} to {made.dtype}: expected float32 to int8 or uint8")
    scale, zero = writer.quantization(made)
    value = writer.node("Div", writer.read(x), scale)
    return writer.rounded(value, made.dtype, zero)


def _dequantize(writer: Writer) -> str:
    (x,) = writer.operands(1)
    made = writer.operator.outputs[0]
    if made.dtype != "float32" or not (quantized(x) or x.dtype == "float16"):
        raise writer.fail(f"{x.dtype} to {made.dtype} is not supported")
    if x.dtype == "float16":
        return writer.node("Cast", writer.read(x), to=1)
    scale, zero = writer.quantization(x)
    value = writer.node("Sub", writer.read(x), zero)
    return writer.node("Mul", value, scale)


# ------------------------------------------------------------------------------------ reductions


def _reduce(op: str, writer: Writer) -> str:
    x, axes = writer.operands(2)
    listed = writer.constant(writer.ints(axes, "axes"))
    keep = int(writer.option(0, "bool", False))
    return writer.node(op, writer.read(x), listed, keepdims=keep)


def _arg(op: str, writer: Writer) -> str:
    x, axis = writer.operands(2)
    (number,) = writer.ints(axis, "axis")[:1] or [0]
    found = writer.node(op, writer.read(x), axis=number, keepdims=0)
    return writer.cast(found, writer.operator.outputs[0].dtype)


_OF_ONE = (
    *("Abs", "Ceil", "Cos", "Elu", "Exp", "Floor", "Log", "Neg", "Round"),
    *("Sign", "Sin", "Sqrt", "Tanh"),
)
"""Unary operators with the same name in ONNX."""

_RULES: dict[str, Rule] = {
    **MOVES,
    **{op.upper(): partial(_simple, op) for op in _OF_ONE},
    **{
        op.upper(): partial(_simple, op, count=2)
        for op in ("Equal", "Greater", "Less", "Pow", "PRelu")
    },
    **{
        op.upper(): partial(_simple, op, count=2, activation=True)
        for op in ("Add", "Div", "Mul", "Sub")
    },
    "ARG_MAX": partial(_arg, "ArgMax"),
    "ARG_MIN": partial(_arg, "ArgMin"),
    "AVERAGE_POOL_2D": partial(_pool, "AveragePool"),
    "BATCH_MATMUL": _batch_matmul,
    "CAST": _cast,
    "CONV_2D": _conv,
    "DEPTHWISE_CONV_2D": partial(_conv, depthwise=True),
    "DEQUANTIZE": _dequantize,
    "FULLY_CONNECTED": _dense,
    "GELU": _gelu,
    "GREATER_EQUAL": partial(_simple, "GreaterOrEqual", count=2),
    "HARD_SWISH": partial(_simple, "HardSwish"),
    "L2_NORMALIZATION": _normalize,
    "LEAKY_RELU": _leaky,
    "LESS_EQUAL": partial(_simple, "LessOrEqual", count=2),
    "LOGICAL_AND": partial(_simple, "And", count=2),
    "LOGICAL_NOT": partial(_simple, "Not"),
    "LOGICAL_OR": partial(_simple, "Or", count=2),
    "LOGISTIC": partial(_simple, "Sigmoid"),
    "LOG_SOFTMAX": partial(_simple, "LogSoftmax", axis=-1),
    "MAXIMUM": partial(_simple, "Max", count=2),
    "MAX_POOL_2D": partial(_pool, "MaxPool"),
    "MEAN": partial(_reduce, "ReduceMean"),
    "MINIMUM": partial(_simple, "Min", count=2),
    "NOT_EQUAL": _not_equal,
    "QUANTIZE": _quantize,
    "REDUCE_MAX": partial(_reduce, "ReduceMax"),
    "REDUCE_MIN": partial(_reduce, "ReduceMin"),
    "REDUCE_PROD": partial(_reduce, "ReduceProd"),
    "RELU": partial(_fused, 1),
    "RELU6": partial(_fused, 3),
    "RELU_0_TO_1": _clip01,
    "RELU_N1_TO_1": partial(_fused, 2),
    "RSQRT": _composed("Sqrt", "Reciprocal"),
    "SELECT": partial(_simple, "Where", count=3),
    "SELECT_V2": partial(_simple, "Where", count=3),
    "SOFTMAX": _softmax,
    "SQUARE": _square,
    "SQUARED_DIFFERENCE": _squared_difference,
    "SUM": partial(_reduce, "ReduceSum"),
}
OPERATORS = {CODES[name]: (name, rule) for name, rule in _RULES.items()}
"""Name and writer of each builtin operator, by code."""

__all__ = ["EXACT", "NAMES", "OPERATORS"]
