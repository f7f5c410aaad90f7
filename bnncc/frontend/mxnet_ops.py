"""MXNet's operators as ONNX nodes: a table from names to writers.

Each function takes the builder, the node and the names of its input tensors, and returns the names
of its outputs, the first of which is MXNet's ``NAME_output``. The caller rejects attributes that
were not read, so that none is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from bnncc.errors import UnsupportedOp
from bnncc.frontend import bmxnet
from bnncc.frontend import mxnet_layers as layers
from bnncc.frontend.mxnet_build import Builder
from bnncc.frontend.mxnet_layers import axes_of, output_of
from bnncc.frontend.mxnet_symbol import SymbolNode

Convert = Callable[[Builder, SymbolNode, Sequence[str]], list[str]]


def _identity(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    for key in ("p", "mode", "axes", "threshold", "sparseness_target", "penalty", "valid_thresh",
                "normalization"):  # fmt: skip
        node.attrs.text(key, "")  # for training only
    return [b.add("Identity", x[:1], output_of(node))]


def _plain(
    op: str, b: Builder, node: SymbolNode, x: Sequence[str], *, reads: int | None = None
) -> list[str]:
    """Write a node as one ONNX operator on its first inputs."""
    node.attrs.text("num_args", "")
    return [b.add(op, x[:reads], output_of(node), name=node.name)]


def _scalar(
    op: str,
    b: Builder,
    node: SymbolNode,
    x: Sequence[str],
    *,
    reverse: bool = False,
    number: bool = False,
) -> list[str]:
    """Write an operator with a scalar; with `number`, comparisons give 0 and 1."""
    node.attrs.text("is_int", "")
    value = b.constant(node.attrs.number("scalar"), f"{node.name}.scalar")
    operands = [value, x[0]] if reverse else [x[0], value]
    if not number:
        return [b.add(op, operands, output_of(node), name=node.name)]
    truth = b.add(op, operands, f"{node.name}.truth")
    return [b.add("Cast", [truth], output_of(node), to=1)]


def _compared(op: str, b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    truth = b.add(op, x, f"{node.name}.truth")
    return [b.add("Cast", [truth], output_of(node), to=1)]


def _flatten(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    return [b.add("Flatten", x, output_of(node), axis=1, rank=2)]


def _reshape(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    shape = node.attrs.integers("shape")
    reverse = node.attrs.flag("reverse", False)
    if any(d < -1 for d in shape) or (reverse and any(d < 1 for d in shape)):
        raise UnsupportedOp(f"{node.where}: `shape` is {shape}, sizes, 0 and -1 are supported")
    sizes = b.constant(shape, f"{node.name}.shape", np.int64)
    return [b.add("Reshape", [x[0], sizes], output_of(node), rank=len(shape))]


def _transpose(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    axes = node.attrs.integers("axes", tuple(range(b.rank(x[0])))[::-1])
    return [b.add("Transpose", x, output_of(node), perm=axes)]


def _expand_dims(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    axes = axes_of(b, node, [node.attrs.integer("axis")])
    return [b.add("Unsqueeze", [x[0], axes], output_of(node), rank=b.rank(x[0]) + 1)]


def _concat(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    node.attrs.text("num_args", "")
    return [b.add("Concat", x, output_of(node), axis=node.attrs.integer("dim", 1))]


def _split(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    a = node.attrs
    count, axis = a.integer("num_outputs", least=1), a.integer("axis", 1)
    if count > 4096:
        raise UnsupportedOp(f"{node.where}: `num_outputs` is {count}, at most 4096 are supported")
    stem = f"{node.name}.part" if a.flag("squeeze_axis", False) else output_of(node)
    b.add("Split", x, stem, outputs=count, axis=axis, num_outputs=count)
    parts = [stem] if count == 1 else [f"{stem}{k}" for k in range(count)]
    if stem == output_of(node):
        return parts
    axes, rank = axes_of(b, node, [axis]), b.rank(x[0]) - 1
    ends = [output_of(node) if count == 1 else f"{output_of(node)}{k}" for k in range(count)]
    return [b.add("Squeeze", [p, axes], end, rank=rank) for p, end in zip(parts, ends, strict=True)]


def _slice_axis(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    a = node.attrs
    end = a.optional("end")
    axis, begin = a.integer("axis"), a.optional("begin") or 0
    ends = {"starts": begin, "ends": 2**31 - 1 if end is None else end, "axes": axis}
    inputs = [b.constant([v], f"{node.name}.{k}", np.int64) for k, v in ends.items()]
    return [b.add("Slice", [x[0], *inputs], output_of(node), rank=b.rank(x[0]))]


def _clip(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    ends = [b.constant(node.attrs.number(k), f"{node.name}.{k}") for k in ("a_min", "a_max")]
    return [b.add("Clip", [x[0], *ends], output_of(node), name=node.name)]


def _pad(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    a = node.attrs
    mode = a.text("mode", "constant", ("constant", "edge", "reflect"))
    widths, value = a.integers("pad_width"), a.number("constant_value", 0.0)
    sizes = b.constant([*widths[::2], *widths[1::2]], f"{node.name}.pads", np.int64)
    fill = [b.constant(value, f"{node.name}.value")] if mode == "constant" else []
    return [b.add("Pad", [x[0], sizes, *fill], output_of(node), name=node.name, mode=mode)]


def _reduce(op: str, b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    a, rank = node.attrs, b.rank(x[0])
    axes, keep = a.integers("axis", ()), a.flag("keepdims", False)
    if a.flag("exclude", False):
        given = {axis % rank for axis in axes}
        axes = tuple(axis for axis in range(rank) if axis not in given)
    inputs = [x[0], axes_of(b, node, axes)] if axes else list(x[:1])
    left = rank if keep else rank - len(axes) if axes else 0
    return [b.add(op, inputs, output_of(node), name=node.name, keepdims=int(keep), rank=left)]


def _softmax_axis(op: str, b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    a = node.attrs
    axis, heat = a.integer("axis", -1), a.number("temperature", 1.0)
    if a.flag("use_length", False):
        raise UnsupportedOp(f"{node.where}: `use_length`")
    tip = x[0]
    if heat != 1:
        tip = b.add("Div", [tip, b.constant(heat, f"{node.name}.heat")], f"{node.name}.cooled")
    return [b.add(op, [tip], output_of(node), name=node.name, axis=axis)]


def _det_sign(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    return [bmxnet.sign(b, x[0], output_of(node))]


def _round(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    """Round halves away from 0."""
    size = b.add("Abs", x, f"{node.name}.size")
    away = bmxnet.round_away(b, size, f"{node.name}.rounded")
    return [b.add("Mul", [away, b.add("Sign", x, f"{node.name}.sign")], output_of(node))]


def _square(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    return [b.add("Mul", [x[0], x[0]], output_of(node), name=node.name)]


_COMPARISONS = {
    **{"Greater": "greater", "GreaterOrEqual": "greater_equal"},
    **{"Less": "lesser", "LessOrEqual": "lesser_equal"},
}
_NAMES: dict[Convert, str] = {
    layers.activation: "Activation",
    layers.batch_norm: "BatchNorm BatchNorm_v1 CuDNNBatchNorm",
    _clip: "clip",
    _concat: "Concat concat",
    layers.convolution: "Convolution Convolution_v1 Deconvolution",
    _det_sign: "det_sign approx_sign",
    _expand_dims: "expand_dims",
    _flatten: "Flatten flatten",
    layers.fully_connected: "FullyConnected",
    _identity: "Dropout identity _copy BlockGrad stop_gradient MakeLoss make_loss "
    "IdentityAttachKLSparseReg LinearRegressionOutput MAERegressionOutput _contrib_gradcancel "
    "_CrossDeviceCopy",
    layers.leaky_relu: "LeakyReLU",
    layers.local_norm: "LRN",
    _pad: "Pad pad",
    layers.pooling: "Pooling Pooling_v1",
    _reshape: "Reshape reshape",
    _round: "round round_ste",
    _slice_axis: "slice_axis",
    layers.softmax: "SoftmaxOutput Softmax",
    layers.softmax_activation: "SoftmaxActivation",
    _split: "SliceChannel split",
    _square: "square",
    _transpose: "transpose",
    layers.upsampling: "UpSampling",
    bmxnet.activation: "QActivation",
    bmxnet.convolution: "QConvolution QConvolution_v1",
    bmxnet.fully_connected: "QFullyConnected",
    partial(_plain, "Add"): "elemwise_add broadcast_add broadcast_plus _plus _add _Plus _grad_add",
    partial(_plain, "Sub"): "elemwise_sub broadcast_sub broadcast_minus _minus _sub _Minus",
    partial(_plain, "Mul"): "elemwise_mul broadcast_mul _mul _Mul",
    partial(_plain, "Div"): "elemwise_div broadcast_div _div _Div",
    partial(_plain, "Sum"): "add_n ElementWiseSum",
    partial(_plain, "Max"): "broadcast_maximum _maximum _Maximum",
    partial(_plain, "Min"): "broadcast_minimum _minimum _Minimum",
    partial(_plain, "Neg"): "negative",
    partial(_plain, "Sigmoid", reads=1): "sigmoid LogisticRegressionOutput",
    **{
        partial(_plain, op): op.lower()
        for op in (
            "Abs",
            "Ceil",
            "Erf",
            "Exp",
            "Floor",
            "Log",
            "Reciprocal",
            "Relu",
            "Sign",
            "Softsign",
            "Sqrt",
            "Tanh",
        )
    },
    partial(_scalar, "Add"): "_plus_scalar _PlusScalar",
    partial(_scalar, "Sub"): "_minus_scalar _MinusScalar",
    partial(_scalar, "Sub", reverse=True): "_rminus_scalar _RMinusScalar",
    partial(_scalar, "Mul"): "_mul_scalar _MulScalar",
    partial(_scalar, "Div"): "_div_scalar _DivScalar",
    partial(_scalar, "Div", reverse=True): "_rdiv_scalar _RDivScalar",
    partial(_scalar, "Max"): "_maximum_scalar _MaximumScalar",
    partial(_scalar, "Min"): "_minimum_scalar _MinimumScalar",
    partial(_scalar, "Pow"): "_power_scalar _PowerScalar",
    **{partial(_scalar, op, number=True): f"_{name}_scalar" for op, name in _COMPARISONS.items()},
    **{partial(_compared, op): f"broadcast_{name} _{name}" for op, name in _COMPARISONS.items()},
    partial(_reduce, "ReduceMax"): "max",
    partial(_reduce, "ReduceMean"): "mean",
    partial(_reduce, "ReduceMin"): "min",
    partial(_reduce, "ReduceSum"): "sum",
    partial(_softmax_axis, "LogSoftmax"): "log_softmax",
    partial(_softmax_axis, "Softmax"): "softmax",
}

OPERATORS: dict[str, Convert] = {
    name: convert for convert, names in _NAMES.items() for name in names.split()
}
"""Writers by MXNet's operator names, including those of old files."""
