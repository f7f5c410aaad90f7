"""MXNet's layers as ONNX nodes: convolutions, dense layers, normalization, pooling, outputs.

Each function takes the builder, the node and the names of its input tensors, and returns the names
of its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bnncc.errors import ModelError, UnsupportedOp
from bnncc.frontend.mxnet_build import Builder
from bnncc.frontend.mxnet_symbol import SymbolNode

_ANY_LAYOUT = ("None", "NCHW", "NCW")
_ACTIVATIONS = {
    "relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "softrelu": "Softplus",
    "softsign": "Softsign",
}  # fmt: skip


def output_of(node: SymbolNode) -> str:
    """Return MXNet's name for a node's output."""
    return f"{node.name}_output"


def axes_of(b: Builder, node: SymbolNode, axes: Sequence[int]) -> str:
    """Store axes as a constant; return its name."""
    return b.constant(list(axes), f"{node.name}.axes", np.int64)


def convolution(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    """Write a Convolution or a Deconvolution."""
    a = node.attrs
    kernel = a.integers("kernel")
    rank = len(kernel)
    pad = a.integers("pad", (0,) * rank)
    a.text("layout", "None", _ANY_LAYOUT)
    a.integer("num_filter", least=1)  # checked only: the weight's shape determines it
    attrs: dict[str, Any] = {
        "kernel_shape": kernel,
        "strides": a.integers("stride", (1,) * rank),
        "dilations": a.integers("dilate", (1,) * rank),
        "pads": (*pad, *pad),
        "group": a.integer("num_group", 1, 1),
    }
    transposed = node.op == "Deconvolution"
    if transposed:
        attrs["output_padding"] = a.integers("adj", (0,) * rank)
        if a.integers("target_shape", ()):
            raise UnsupportedOp(f"{node.where}: `target_shape`; give `pad` and `adj`")
    inputs = _layer_inputs(b, node, x, a.flag("no_bias", transposed))
    op = "ConvTranspose" if transposed else "Conv"
    return [b.add(op, inputs, output_of(node), name=node.name, rank=rank + 2, **attrs)]


def fully_connected(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    """Write a FullyConnected."""
    node.attrs.integer("num_hidden", least=1)
    inputs = _layer_inputs(b, node, x, node.attrs.flag("no_bias", False))
    if node.attrs.flag("flatten", True):
        inputs[0] = b.add("Flatten", inputs[:1], f"{node.name}.rows", axis=1, rank=2)
        return [b.add("Gemm", inputs, output_of(node), name=node.name, transB=1, rank=2)]
    turned = b.add("Transpose", inputs[1:2], f"{node.name}.turned", perm=[1, 0])
    tip = f"{node.name}.product" if len(inputs) > 2 else output_of(node)
    tip = b.add("MatMul", [inputs[0], turned], tip, name=node.name)
    return [b.add("Add", [tip, inputs[2]], output_of(node)) if len(inputs) > 2 else tip]


def _layer_inputs(b: Builder, node: SymbolNode, x: Sequence[str], no_bias: bool) -> list[str]:
    wanted = 2 if no_bias else 3
    if len(x) < wanted:
        raise ModelError(f"{node.where}: reads {len(x)} tensors, expected {wanted}")
    return [x[0], *(b.weight(i, node.where) for i in x[1:wanted])]


def batch_norm(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    """Write a BatchNorm, which uses its moving averages."""
    a = node.attrs
    epsilon, fixed = a.number("eps", 1e-3), a.flag("fix_gamma", True)
    axis = a.integer("axis", 1)
    if axis != 1 and axis + b.rank(x[0]) != 1:
        raise UnsupportedOp(f"{node.where}: `axis` is {axis}, expected 1")
    if a.flag("output_mean_var", False):
        raise UnsupportedOp(f"{node.where}: `output_mean_var`, which is for training")
    if len(x) != 5:
        raise ModelError(f"{node.where}: reads {len(x)} tensors, expected 5")
    beta, mean, variance = (b.weight(i, node.where) for i in x[2:])
    gamma = x[1]
    if fixed:  # ignore the stored values
        gamma = b.constant(np.ones(b.param(beta, node.where).shape), f"{node.name}.ones")
    inputs = [x[0], b.weight(gamma, node.where), beta, mean, variance]
    return [
        b.add("BatchNormalization", inputs, output_of(node), name=node.name, rank=b.rank(x[0]),
              epsilon=epsilon)
    ]  # fmt: skip


def leaky_relu(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    """Write a LeakyReLU of any kind; random slopes are replaced by their mean."""
    a = node.attrs
    kind = a.text("act_type", "leaky", ("leaky", "elu", "prelu", "rrelu"))
    slope = a.number("slope", 0.25)
    low, high = a.number("lower_bound", 0.125), a.number("upper_bound", 0.334)
    if kind == "prelu":
        if len(x) != 2:
            raise ModelError(f"{node.where}: reads {len(x)} tensors, expected 2")
        gamma = b.param(x[1], node.where).reshape(-1)
        spread = (1,) * max(0, b.rank(x[0]) - 2)
        slopes = b.constant(gamma.reshape(-1, *spread), f"{node.name}.slope")
        return [b.add("PRelu", [x[0], slopes], output_of(node), name=node.name, rank=b.rank(x[0]))]
    alpha = (low + high) / 2 if kind == "rrelu" else slope
    op = "Elu" if kind == "elu" else "LeakyRelu"
    return [b.add(op, x[:1], output_of(node), name=node.name, alpha=alpha)]


def pooling(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    """Write a Pooling."""
    a = node.attrs
    kind = a.text("pool_type", "max", ("max", "avg", "sum"))
    whole = a.flag("global_pool", False)
    kernel = a.integers("kernel", (1,) * (b.rank(x[0]) - 2) if whole else None)
    rank = len(kernel)
    strides, pad = a.integers("stride", (1,) * rank), a.integers("pad", (0,) * rank)
    full = a.text("pooling_convention", "valid", ("valid", "full")) == "full"
    include = a.flag("count_include_pad", True)
    a.text("layout", "None", _ANY_LAYOUT)
    if whole:
        if kind == "sum":
            return [b.add("ReduceSum", [x[0], axes_of(b, node, [2, 3][:rank])], output_of(node))]
        op = "GlobalMaxPool" if kind == "max" else "GlobalAveragePool"
        return [b.add(op, x, output_of(node), name=node.name)]
    if len(strides) != rank or len(pad) != rank:
        raise ModelError(f"{node.where}: `kernel`, `stride` and `pad` have different lengths")
    if full and any(p + s > k for p, s, k in zip(pad, strides, kernel, strict=True)):
        raise UnsupportedOp(
            f"{node.where}: `pooling_convention` is full and windows may lie outside the image"
        )
    attrs: dict[str, Any] = {
        "kernel_shape": kernel, "strides": strides, "pads": (*pad, *pad), "ceil_mode": int(full),
    }  # fmt: skip
    if kind == "max":
        return [b.add("MaxPool", x, output_of(node), name=node.name, **attrs)]
    attrs["count_include_pad"] = int(include or kind == "sum")
    if kind == "avg":
        return [b.add("AveragePool", x, output_of(node), name=node.name, **attrs)]
    if full:
        raise UnsupportedOp(f"{node.where}: sums with `pooling_convention` full")
    mean = b.add("AveragePool", x, f"{node.name}.mean", name=node.name, **attrs)
    area = b.constant(int(np.prod(kernel)), f"{node.name}.area")
    return [b.add("Mul", [mean, area], output_of(node))]


def local_norm(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    """Write an LRN."""
    a = node.attrs
    attrs: dict[str, Any] = {
        "alpha": a.number("alpha", 1e-4), "beta": a.number("beta", 0.75),
        "bias": a.number("knorm", 2.0), "size": a.integer("nsize", least=1),
    }  # fmt: skip
    return [b.add("LRN", x, output_of(node), name=node.name, **attrs)]


def upsampling(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    """Write an UpSampling of nearest pixels."""
    a = node.attrs
    scale = a.integer("scale", least=1)
    a.text("sample_type", choices=("nearest",))
    for key in ("num_args", "num_filter", "multi_input_mode"):
        a.text(key, "")
    if len(x) != 1:
        raise UnsupportedOp(f"{node.where}: upsampling of {len(x)} tensors at once")
    scales = b.constant([1, 1, scale, scale], f"{node.name}.scales")
    return [
        b.add("Resize", [x[0], "", scales], output_of(node), name=node.name, mode="nearest",
              coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    ]  # fmt: skip


def softmax(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    """Write an output layer; its loss is for training only."""
    a = node.attrs
    for key in ("use_ignore", "ignore_label", "normalization", "out_grad", "smooth_alpha"):
        a.text(key, "")
    axis = 1 if a.flag("multi_output", False) else -1
    if axis == -1 and b.rank(x[0]) != 2 and not a.flag("preserve_shape", False):
        raise UnsupportedOp(f"{node.where}: softmax over several axes; flatten its input before")
    a.flag("preserve_shape", False)
    return [b.add("Softmax", x[:1], output_of(node), name=node.name, axis=axis)]


def softmax_activation(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    """Write a SoftmaxActivation."""
    channel = node.attrs.text("mode", "instance", ("instance", "channel")) == "channel"
    if not channel and b.rank(x[0]) != 2:
        raise UnsupportedOp(f"{node.where}: softmax over several axes; flatten its input before")
    return [b.add("Softmax", x[:1], output_of(node), name=node.name, axis=1)]


def activation(b: Builder, node: SymbolNode, x: Sequence[str]) -> list[str]:
    """Write an Activation."""
    kind = node.attrs.text("act_type", choices=tuple(_ACTIVATIONS))
    return [b.add(_ACTIVATIONS[kind], x, output_of(node), name=node.name)]
