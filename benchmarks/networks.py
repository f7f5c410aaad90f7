"""The networks of the benchmarks as plain ONNX, with random weights.

    python benchmarks/networks.py OUTDIR [NAME ...] [--sign where|sign]

Bi-Real-Net-18 (Liu et al., ECCV 2018) at 224x224, QuickNet (Bannink et al., MLSys 2021), VGG-small
for CIFAR (Hubara et al., NIPS 2016). Paddings are explicit numbers. Spelled `float`, a network has
ReLU for every sign, and zero padding: the ordinary network of the same shape, for peers in float32
and int8.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17


class Builder:
    """Writes nodes one by one; every tensor is (name, channels, side)."""

    def __init__(
        self, name: str, channels: int, side: int, sign: str = "where", batch: int = 1
    ) -> None:
        self.name, self.sign_spelling, self.batch = name, sign, batch
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.nodes: list[onnx.NodeProto] = []
        self.inits: list[onnx.TensorProto] = []
        self.input = ("x", channels, side)
        self.count = 0

    def const(self, value: np.ndarray) -> str:
        """Add an initializer."""
        self.count += 1
        self.inits.append(numpy_helper.from_array(np.asarray(value), f"c{self.count}"))
        return f"c{self.count}"

    def op(self, kind: str, *inputs: str, **attrs: object) -> str:
        """Add a node with one output."""
        self.count += 1
        out = f"{kind.lower()}_{self.count}"
        self.nodes.append(helper.make_node(kind, list(inputs), [out], name=out, **attrs))
        return out

    def signs(self, *shape: int) -> np.ndarray:
        """Return random +-1 weights."""
        return np.where(self.rng.integers(0, 2, shape) == 1, 1.0, -1.0).astype(np.float32)

    def floats(self, *shape: int) -> np.ndarray:
        """Return random weights of unit output variance."""
        return (self.rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    def conv(self, x, out, kernel, stride=1, groups=1, binary=False, pads=None, weight=None):
        """Add a convolution that keeps the image size (over the stride)."""
        name, channels, side = x
        if weight is None:
            shape = (out, channels // groups, kernel, kernel)
            weight = self.signs(*shape) if binary else self.floats(*shape)
        size = -(-side // stride)
        total = max((size - 1) * stride + kernel - side, 0) if pads is None else pads
        before = total // 2
        made = self.op(
            "Conv", name, self.const(weight), kernel_shape=[kernel, kernel],
            strides=[stride, stride], pads=[before, before, total - before, total - before],
            group=groups,
        )  # fmt: skip
        return made, out, size if pads is None else (side + pads - kernel) // stride + 1

    def sign(self, x):
        """Add a sign in the spelling asked for, or in a float network ReLU."""
        name, channels, side = x
        if self.sign_spelling == "float":
            return self.op("Relu", name), channels, side
        if self.sign_spelling == "sign":
            return self.op("Sign", name), channels, side
        positive = self.op("GreaterOrEqual", name, self.const(np.float32(0)))
        one, minus = self.const(np.float32(1)), self.const(np.float32(-1))
        return self.op("Where", positive, one, minus), channels, side

    def pad(self, x, before, after, value):
        """Pad the image by `value`."""
        name, channels, side = x
        pads = self.const(np.array([0, 0, before, before, 0, 0, after, after], np.int64))
        return (
            self.op("Pad", name, pads, self.const(np.float32(value))),
            channels,
            side + before + after,
        )

    def binary_conv(self, x, out, kernel, stride=1, pad_value=0.0, pads=None):
        """Add sign, padding and a convolution with binary weights; or their float counterparts."""
        signed = self.sign(x)
        if self.sign_spelling == "float":
            # On the scale of a sum of signs, for the BatchNormalization that follows.
            weight = self.signs(out, x[1], kernel, kernel)
            return self.conv(signed, out, kernel, stride, pads=pads, weight=weight)
        if pad_value and pads is None:
            side = x[2]
            total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            signed = self.pad(signed, total // 2, total - total // 2, pad_value)
            pads = 0
        return self.conv(signed, out, kernel, stride, binary=True, pads=pads)

    def norm(self, x, fan=1):
        """Add a BatchNormalization for values of standard deviation sqrt(fan)."""
        name, channels, side = x
        gamma = self.rng.uniform(0.5, 1.5, channels)
        beta = self.rng.normal(0, 0.2, channels)
        mean = self.rng.normal(0, 0.2, channels) * np.sqrt(fan)
        var = self.rng.uniform(0.5, 1.5, channels) * fan
        params = [self.const(v.astype(np.float32)) for v in (gamma, beta, mean, var)]
        return self.op("BatchNormalization", name, *params, epsilon=1e-5), channels, side

    def unary(self, kind, x, **attrs):
        """Add an elementwise node."""
        return self.op(kind, x[0], **attrs), x[1], x[2]

    def add(self, x, y):
        """Add two tensors."""
        return self.op("Add", x[0], y[0]), x[1], x[2]

    def max_pool(self, x, kernel, stride, same=True):
        """Add a max-pool."""
        name, channels, side = x
        size = -(-side // stride) if same else (side - kernel) // stride + 1
        total = max((size - 1) * stride + kernel - side, 0) if same else 0
        before, after = total // 2, total - total // 2
        made = self.op(
            "MaxPool", name, kernel_shape=[kernel, kernel], strides=[stride, stride],
            pads=[before, before, after, after],
        )  # fmt: skip
        return made, channels, size

    def average_pool(self, x):
        """Add a 2x2 average pool."""
        made = self.op("AveragePool", x[0], kernel_shape=[2, 2], strides=[2, 2])
        return made, x[1], x[2] // 2

    def head(self, x, units):
        """Add global average pooling and a classifier."""
        rows = self.op("Flatten", self.op("GlobalAveragePool", x[0]))
        weight, bias = self.const(self.floats(units, x[1])), self.const(np.zeros(units, np.float32))
        return self.op("Gemm", rows, weight, bias, transB=1)

    def model(self, out: str) -> onnx.ModelProto:
        """Return the finished model."""
        channels, side = self.input[1:]
        graph = helper.make_graph(
            self.nodes,
            self.name,
            [
                helper.make_tensor_value_info(
                    "x", TensorProto.FLOAT, [self.batch, channels, side, side]
                )
            ],
            [helper.make_tensor_value_info(out, TensorProto.FLOAT, None)],
            self.inits,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        model.ir_version = 9
        return onnx.shape_inference.infer_shapes(model)


def birealnet18(sign: str = "where") -> onnx.ModelProto:
    """Return Bi-Real-Net-18 at 224x224, zero padding."""
    b = Builder("birealnet18", 3, 224, sign)
    x = b.max_pool(b.norm(b.conv(b.input, 64, 7, 2)), 3, 2)
    for width in (64, 128, 256, 512):
        for block in range(4):
            stride = 2 if block == 0 and width > 64 else 1
            short = x
            if stride == 2:
                short = b.norm(b.conv(b.average_pool(x), width, 1))
            fan = x[1] * 9
            x = b.add(b.norm(b.binary_conv(x, width, 3, stride), fan), short)
    return b.model(b.head(x, 1000))


def quicknet(sign: str = "where") -> onnx.ModelProto:
    """Return QuickNet at 224x224, +1 padding."""
    b = Builder("quicknet", 3, 224, sign)
    x = b.unary("Relu", b.norm(b.conv(b.input, 16, 3, 2)))
    x = b.norm(b.conv(x, 16, 3, 2, groups=16))
    x = b.norm(b.conv(x, 64, 1))
    for width in (64, 128, 256, 512):
        for _ in range(4):
            if x[1] != width:
                x = b.max_pool(b.unary("Relu", x), 2, 1, same=False)
                x = b.norm(b.conv(b.conv(x, x[1], 3, 2, groups=x[1]), width, 1))
            y = b.unary("Relu", b.binary_conv(x, width, 3, pad_value=1.0))
            x = b.add(b.norm(y, width * 9), x)
    return b.model(b.head(b.unary("Relu", x), 1000))


def vgg_small(sign: str = "where") -> onnx.ModelProto:
    """Return VGG-small at 32x32, +1 padding."""
    b = Builder("vgg_small", 3, 32, sign)
    x = b.norm(b.conv(b.input, 128, 3, binary=True), 27)
    for width, pool in ((128, True), (256, False), (256, True), (512, False), (512, True)):
        fan = x[1] * 9
        x = b.binary_conv(x, width, 3, pad_value=1.0)
        x = b.norm(b.max_pool(x, 2, 2) if pool else x, fan)
    for units, kernel in ((1024, 4), (1024, 1), (10, 1)):
        fan = x[1] * kernel * kernel
        x = b.norm(b.binary_conv(x, units, kernel, pads=0), fan)
    return b.model(x[0])


NETWORKS: dict[str, Callable[[str], onnx.ModelProto]] = {
    "birealnet18": birealnet18,
    "quicknet": quicknet,
    "vgg_small": vgg_small,
}


def main() -> None:
    """Write the networks asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--sign", choices=("where", "sign"), default="where")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        path = args.folder / f"{name}.{args.sign}.onnx"
        onnx.save(NETWORKS[name](args.sign), path)
        print(path)


if __name__ == "__main__":
    main()
