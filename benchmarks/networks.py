"""The networks of the benchmarks as plain ONNX, with random weights.

    python benchmarks/networks.py OUTDIR [NAME ...] [--sign where|sign|float] [--batch N]

Bi-Real-Net-18 (Liu et al., ECCV 2018) at 224x224, QuickNet (Bannink et al., MLSys 2021), VGG-small
for CIFAR (Hubara et al., NIPS 2016), binary AlexNet (Rastegari et al., ECCV 2016), ReActNet-18 and
ReActNet-A (Liu et al., ECCV 2020), the CIFAR network as Xu and Pedersoli (2019) time it, and the
vehicle network of Khan et al. (2018). Dense binary layers are convolutions as large as their image.
Paddings are explicit numbers. Spelled `float`, a network has
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
        self,
        name: str,
        channels: int,
        side: int,
        sign: str = "where",
        batch: int = 1,
        zero: int = 1,
    ) -> None:
        self.name, self.sign_spelling, self.batch, self.zero = name, sign, batch, zero
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
        compare = "GreaterOrEqual" if self.zero > 0 else "Greater"
        positive = self.op(compare, name, self.const(np.float32(0)))
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

    def shift(self, x):
        """Add one number per channel."""
        row = self.rng.normal(0, 0.3, (1, x[1], 1, 1)).astype(np.float32)
        return self.op("Add", x[0], self.const(row)), x[1], x[2]

    def rprelu(self, x):
        """Add ReActNet's activation: shift, PReLU, shift."""
        x = self.shift(x)
        slope = self.rng.uniform(0.05, 0.5, (x[1], 1, 1)).astype(np.float32)
        return self.shift((self.op("PRelu", x[0], self.const(slope)), x[1], x[2]))

    def hardtanh(self, x):
        """Clip to [-1, 1]."""
        low, high = self.const(np.float32(-1)), self.const(np.float32(1))
        return self.op("Clip", x[0], low, high), x[1], x[2]

    def concat(self, values):
        """Concatenate channels."""
        if len(values) == 1:
            return values[0]
        out = self.op("Concat", *(v[0] for v in values), axis=1)
        return out, sum(v[1] for v in values), values[0][2]

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
        return self.dense((self.op("GlobalAveragePool", x[0]), x[1], 1), units)

    def dense(self, x, units):
        """Add a dense layer over an image of one pixel; returns its name."""
        rows = self.op("Flatten", x[0])
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


def birealnet18(sign: str = "where", batch: int = 1) -> onnx.ModelProto:
    """Return Bi-Real-Net-18 at 224x224, zero padding."""
    return _resnet18(Builder("birealnet18", 3, 224, sign, batch))


def _resnet18(b: Builder, *, react: bool = False) -> onnx.ModelProto:
    """Return ResNet-18 with a residual around every binary convolution; `react`: as ReActNet."""
    x = b.max_pool(b.norm(b.conv(b.input, 64, 7, 2)), 3, 2)
    for width in (64, 128, 256, 512):
        for block in range(4):
            stride = 2 if block == 0 and width > 64 else 1
            short = x
            if stride == 2:
                short = b.norm(b.conv(b.average_pool(x), width, 1))
            fan = x[1] * 9
            y = b.binary_conv(b.shift(x) if react else x, width, 3, stride)
            x = b.add(b.norm(y, fan), short)
            x = b.rprelu(x) if react else x
    return b.model(b.head(x, 1000))


def quicknet(sign: str = "where", batch: int = 1) -> onnx.ModelProto:
    """Return QuickNet at 224x224, +1 padding."""
    b = Builder("quicknet", 3, 224, sign, batch)
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


def vgg_small(sign: str = "where", batch: int = 1, width: int = 128) -> onnx.ModelProto:
    """Return VGG-small at 32x32, +1 padding; its first layer has `width` channels."""
    b = Builder("vgg_small", 3, 32, sign, batch)
    x = b.norm(b.conv(b.input, width, 3, binary=True), 27)
    for factor, pool in ((1, True), (2, False), (2, True), (4, False), (4, True)):
        fan = x[1] * 9
        x = b.binary_conv(x, factor * width, 3, pad_value=1.0)
        x = b.norm(b.max_pool(x, 2, 2) if pool else x, fan)
    for units, kernel in ((8 * width, 4), (8 * width, 1), (10, 1)):
        fan = x[1] * kernel * kernel
        x = b.norm(b.binary_conv(x, units, kernel, pads=0), fan)
    return b.model(x[0])


def alexnet(sign: str = "where", batch: int = 1) -> onnx.ModelProto:
    """Return binary AlexNet at 224x224 in XNOR-Net's form, zero padding."""
    b = Builder("alexnet", 3, 224, sign, batch)
    x = b.unary("Relu", b.norm(b.conv(b.input, 96, 11, 4, pads=4)))
    x = b.norm(b.max_pool(x, 3, 2, same=False))
    for width, kernel, pool in ((256, 5, True), (384, 3, False), (384, 3, False), (256, 3, True)):
        fan = x[1] * kernel * kernel
        x = b.binary_conv(x, width, kernel)
        x = b.norm(b.max_pool(x, 3, 2, same=False) if pool else x, fan)
    for kernel in (6, 1):
        fan = x[1] * kernel * kernel
        x = b.norm(b.binary_conv(x, 4096, kernel, pads=0), fan)
    return b.model(b.dense(x, 1000))


def reactnet18(sign: str = "where", batch: int = 1) -> onnx.ModelProto:
    """Return ReActNet-18 at 224x224, zero padding."""
    return _resnet18(Builder("reactnet18", 3, 224, sign, batch), react=True)


def reactnet_a(sign: str = "where", batch: int = 1) -> onnx.ModelProto:
    """Return ReActNet-A at 224x224, zero padding."""
    b = Builder("reactnet_a", 3, 224, sign, batch)
    x = b.norm(b.conv(b.input, 32, 3, 2))
    for width, stride in (
        (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2),
        *[(512, 1)] * 5, (1024, 2), (1024, 1),
    ):  # fmt: skip
        channels = x[1]
        y = b.norm(b.binary_conv(b.shift(x), channels, 3, stride), channels * 9)
        x = b.rprelu(b.add(y, b.average_pool(x) if stride == 2 else x))
        signed = b.shift(x)
        halves = [
            b.add(b.norm(b.binary_conv(signed, channels, 1), channels), x)
            for _ in range(width // channels)
        ]
        x = b.rprelu(b.concat(halves))
    return b.model(b.head(x, 1000))


def cifar(sign: str = "where", batch: int = 1) -> onnx.ModelProto:
    """Return Hubara's CIFAR network at 32x32, as Xu and Pedersoli time it: zero padding."""
    b = Builder("cifar", 3, 32, sign, batch)
    x = b.hardtanh(b.norm(b.conv(b.input, 128, 3, binary=True), 27))
    for width, pool in ((128, True), (256, False), (256, True), (512, False), (512, True)):
        fan = x[1] * 9
        x = b.binary_conv(x, width, 3)
        x = b.hardtanh(b.norm(b.max_pool(x, 2, 2) if pool else x, fan))
    for units, kernel in ((1024, 4), (1024, 1), (10, 1)):
        fan = x[1] * kernel * kernel
        x = b.norm(b.binary_conv(x, units, kernel, pads=0), fan)
        x = x if units == 10 else b.hardtanh(x)
    return b.model(x[0])


def vehicle(
    sign: str = "where", batch: int = 1, binary_input: bool = True, side: int = 96
) -> onnx.ModelProto:
    """Return Khan's vehicle network at 96x96, zero padding, sign(0) = -1.

    The image is binarized by one threshold per channel, or taken as it is.
    """
    b = Builder("vehicle", 3, side, sign, batch, zero=-1)
    x = b.shift(b.input)
    for units, kernel, pool in (
        (32, 5, True), (32, 5, True), (100, side // 4, False), (100, 1, False), (4, 1, False),
    ):  # fmt: skip
        fan = x[1] * kernel * kernel
        pads = None if pool else 0
        if x[1] == 3 and not binary_input:
            x = b.conv(b.input, units, kernel, binary=True)
        else:
            x = b.binary_conv(x, units, kernel, pads=pads)
        x = b.norm(b.max_pool(x, 2, 2) if pool else x, fan)
    return b.model(x[0])


NETWORKS: dict[str, Callable[..., onnx.ModelProto]] = {
    "birealnet18": birealnet18,
    "quicknet": quicknet,
    "vgg_small": vgg_small,
    "alexnet": alexnet,
    "reactnet18": reactnet18,
    "reactnet_a": reactnet_a,
    "cifar": cifar,
    "vehicle": vehicle,
}


def main() -> None:
    """Write the networks asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--sign", choices=("where", "sign", "float"), default="where")
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        path = args.folder / f"{name}.{args.sign}.onnx"
        onnx.save(NETWORKS[name](args.sign, args.batch), path)
        print(path)


if __name__ == "__main__":
    main()
