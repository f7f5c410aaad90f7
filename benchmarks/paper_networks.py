"""Networks of the papers that `networks.py` has not: plain binary VGG, ResNet-18 and LeNet."""

from __future__ import annotations

import onnx
from networks import Builder


def vgg16(sign: str = "where") -> onnx.ModelProto:
    """Return VGG-16 at 224x224; the first convolution and the last dense layer are float."""
    return _vgg("vgg16", 224, (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M",
                               512, 512, 512, "M"), (4096, 4096, 1000), sign)  # fmt: skip


def vgg_cifar(sign: str = "where") -> onnx.ModelProto:
    """Return the VGG of CIFAR-10; the first convolution and the last dense layer are float."""
    widths = (128, 128, "M", 256, 256, "M", 512, 512, "M")
    return _vgg("vgg_cifar", 32, widths, (1024, 1024, 10), sign)


def _vgg(name: str, side: int, widths, units: tuple[int, ...], sign: str) -> onnx.ModelProto:
    """Return 3x3 convolutions, max-pools where `widths` says M, and dense layers."""
    b = Builder(name, 3, side, sign)
    x, fan = b.conv(b.input, widths[0], 3), 1
    for width in widths[1:]:
        if width == "M":
            x = b.max_pool(x, 2, 2)
            continue
        x, fan = b.binary_conv(b.norm(x, fan), width, 3), x[1] * 9
    kernel = x[2]
    for width in units[:-1]:
        x, fan = b.binary_conv(b.norm(x, fan), width, kernel, pads=0), x[1] * kernel**2
        kernel = 1
    return b.model(_dense(b, b.unary("Relu", b.norm(x, fan)), units[-1]))


def _dense(b: Builder, x, units: int) -> str:
    weight = b.const(b.floats(units, x[1]))
    return b.op("Gemm", b.op("Flatten", x[0]), weight, transB=1)


def resnet18(
    sign: str = "where", *, classes: int = 1000, side: int = 224, float_stages: tuple[int, ...] = ()
) -> onnx.ModelProto:
    """Return ResNet-18 with pre-activation, as BMXNet binarizes it.

    Parameters
    ----------
    sign : str
        Spelling of the sign.
    classes, side : int
        1000 at 224, or 10 at 32 (a first convolution of 3x3, no pooling).
    float_stages : tuple of int
        Which of the stages 1 to 4 stay float.

    Returns
    -------
    onnx.ModelProto
    """
    b = Builder("resnet18", 3, side, sign)
    if side > 64:
        x = b.max_pool(b.unary("Relu", b.norm(b.conv(b.input, 64, 7, 2))), 3, 2)
    else:
        x = b.conv(b.input, 64, 3)
    for stage, width in enumerate((64, 128, 256, 512), 1):

        def conv(x, kernel: int, stride: int = 1, stage: int = stage, width: int = width):
            if stage in float_stages:
                return b.conv(b.unary("Relu", x), width, kernel, stride)
            return b.binary_conv(x, width, kernel, stride)

        for block in range(2):
            stride = 2 if block == 0 and width > 64 else 1
            fan = 1 if stage in float_stages else x[1] * 9
            normed = b.norm(x)
            short = conv(normed, 1, stride) if x[1] != width else x
            inner = b.norm(conv(normed, 3, stride), fan)
            x = b.add(conv(inner, 3), short)
    return b.model(b.head(b.unary("Relu", b.norm(x, x[1] * 9)), classes))


def lenet(sign: str = "where") -> onnx.ModelProto:
    """Return BMXNet's LeNet for MNIST; the first and last layers are float."""
    b = Builder("lenet", 1, 28, sign)
    x = b.norm(b.max_pool(b.unary("Tanh", b.conv(b.input, 64, 5, pads=0)), 2, 2))
    x = b.max_pool(b.norm(b.binary_conv(x, 64, 5, pads=0), 1600), 2, 2)
    x = b.unary("Tanh", b.norm(b.binary_conv(x, 1000, 4, pads=0), 1024))
    return b.model(_dense(b, x, 10))
