"""Hand-written cases: the blocks of the papers, as graphs (section 8)."""

from __future__ import annotations

import numpy as np

from tests.collection.builder import STEPS, Net, case
from tests.collection.cases_signs import _approx_sign, image


def stem(n: Net, units: int, size: int = 8, batch: int | str = 1) -> str:
    """Append a float 3x3 convolution of an RGB image and BN."""
    return n.bn(n.fconv(image(n, 3, size, batch), units), 1)


def bi_real(n: Net, x: str, units: int, how: str = "sign", scale: bool = True) -> str:
    """Append sign, a scaled binary convolution, BN and the shortcut."""
    alpha = n.rng.uniform(0.01, 0.2, units) if scale else 1.0
    y = n.sign(x, how) if how != "approx" else _approx_sign(n, x)
    return n.op("Add", n.bn(n.bconv(y, units, scale=alpha), 2), x)


for _how in ("sign", "where_ge", "approx", "larq"):

    def _bi_real(how: str = _how) -> None:
        @case(f"bi_real_{how}", "8 Bi-Real", 3, 3, batches=(1, 3))
        def _(n: Net) -> None:
            x = bi_real(n, stem(n, 32, batch="N"), 32, how)
            short = n.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
            short = n.bn(n.fconv(short, 64, 1))
            y = n.sign(x, how) if how != "approx" else _approx_sign(n, x)
            x = n.op("Add", n.bn(n.bconv(y, 64, strides=[2, 2], scale=0.05)), short)
            n.output(n.head(bi_real(n, x, 64, how)))

    _bi_real()


@case("xnor_net", "8 XNOR-Net with its K map", 1, 3)
def _(n: Net) -> None:
    x = stem(n, 24)
    k = n.reduce_mean(n.op("Abs", x), [1])
    k = n.conv(k, np.full((1, 1, 3, 3), 1 / 9, np.float32), pad=1)
    y = n.op("Mul", n.bconv(n.op("Sign", x), 33), n.const(n.rng.uniform(0.1, 1, (1, 33, 1, 1))))
    y = n.op("Mul", y, k)
    n.channels[y] = 33
    n.output(n.head(n.op("Relu", y)))


@case("xnor_net_bn_first", "8 XNOR-Net order: BN, sign, conv, ReLU, pool", 2, 2)
def _(n: Net) -> None:
    x = n.op("Relu", stem(n, 24, 12))
    for units in (40, 33):
        x = n.op("Relu", n.bconv(n.op("Sign", n.bn(x, 3)), units, scale=0.07))
        x = n.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    n.output(n.head(x))


def _react(n: Net, x: str, y: str) -> str:
    """Append +b1, PReLU, +b2 to the sum of a ReActNet branch and its shortcut."""
    c = n.channels[y]
    out = n.op("Add", y, x)
    out = n.op("Add", out, n.const(n.normal((1, c, 1, 1), 0.2)))
    out = n.op("PRelu", out, n.const(np.full((c, 1, 1), 0.25) + n.normal((c, 1, 1), 0.1)))
    return n.op("Add", out, n.const(n.normal((1, c, 1, 1), 0.2)))


def _rsign(n: Net, x: str) -> str:
    return n.op("Sign", n.op("Add", x, n.const(n.normal((1, n.channels[x], 1, 1), 0.2))))


@case("reactnet_a_block", "8 ReActNet-A: 3x3 then duplicated 1x1 with one sign", 3, 2)
def _(n: Net) -> None:
    x = stem(n, 32)
    pooled = n.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = _react(n, pooled, n.bn(n.bconv(_rsign(n, x), 32, strides=[2, 2], scale=0.05), 1))
    s = _rsign(n, x)
    branches = [_react(n, x, n.bn(n.bconv(s, 32, 1, scale=0.1), 1)) for _ in range(2)]
    n.output(n.head(n.concat(*branches)))


@case("reactnet_18_block", "8 ReActNet-18", 2, 2)
def _(n: Net) -> None:
    x = stem(n, 33)
    for _ in range(2):
        x = _react(n, x, n.bn(n.bconv(_rsign(n, x), 33, scale=0.05), 1))
    n.output(n.head(x))


@case("ir_net", "8 IR-Net: standardised weights, 2^k scales, Hardtanh", 2, 2)
def _(n: Net) -> None:
    x = stem(n, 24)
    for _ in range(2):
        scale = 2.0 ** n.rng.integers(-5, 0, 24)
        x = n.clip(n.op("Add", n.bn(n.bconv(n.op("Sign", x), 24, scale=scale), 1), x), -1, 1)
    n.output(n.head(x))


@case(
    "real_to_binary",
    "8 Real-to-Binary: gate per channel and sample",
    1,
    4,
    batches=(1, 3),
)
def _(n: Net) -> None:
    x = stem(n, 32, batch="N")
    gate = n.op("Flatten", n.op("GlobalAveragePool", x))
    gate = n.op(
        "Relu", n.op("Gemm", gate, n.const(n.normal((4, 32))), n.const(n.normal(4)), transB=1)
    )
    gate = n.op(
        "Sigmoid", n.op("Gemm", gate, n.const(n.normal((33, 4))), n.const(n.normal(33)), transB=1)
    )
    y = n.bconv(n.op("Sign", x), 33, scale=n.rng.uniform(0.05, 0.2, 33))
    y = n.op("Mul", y, n.unsqueeze(gate, [2, 3]))
    n.channels[y] = 33
    n.output(n.head(n.bn(y)))


@case("binary_densenet", "8 BinaryDenseNet: BN, sign, conv, Concat", 3, 2)
def _(n: Net) -> None:
    x = stem(n, 20)
    for _ in range(3):
        y = n.bconv(n.pad_hw(n.sign(n.bn(x, 1), "where_ge"), 1, -1.0), 12, pad=0)
        x = n.concat(x, n.bn(y, 5))
    n.output(n.head(x))


@case("meliusnet", "8 MeliusNet: dense block then improvement of the last channels", 4, 2)
def _(n: Net) -> None:
    x = stem(n, 20)
    for _ in range(2):
        x = n.concat(x, n.bconv(n.op("Sign", n.bn(x, 1)), 12))
        wide = n.channels[x]
        y = n.bconv(n.op("Sign", n.bn(x, 1)), 12, scale=0.1)
        old, last = n.slice(x, [0], [wide - 12], [1]), n.slice(x, [wide - 12], [wide], [1])
        n.channels[old], n.channels[last] = wide - 12, 12
        x = n.concat(old, n.op("Add", last, y))
    n.output(n.head(x))


@case("dorefa_1w2a", "8 DoReFa, 1-bit weights and 2-bit activations (few-bit or float)", 0, 4)
def _(n: Net) -> None:
    x = stem(n, 16)
    for _ in range(2):
        x = n.op("Div", n.op("Round", n.op("Mul", n.clip(x, 0, 1), n.const(3.0))), n.const(3.0))
        x = n.bn(n.bconv(x, 16, scale=0.07), 1)
    n.output(n.head(x))


@case("dorefa_1w1a", "8 DoReFa, 1-bit weights and {0,1} activations by rounding", 2, 2)
def _(n: Net) -> None:
    x = stem(n, 16)
    for _ in range(2):
        x = n.op("Round", n.clip(x, 0, 1))
        x = n.bn(n.bconv(x, 16, scale=0.07), 1)
    n.output(n.head(x))


@case("riptide_unipolar", "8 Riptide: {0,1} activations, power-of-two weights", 2, 2)
def _(n: Net) -> None:
    x = stem(n, 24)
    for _ in range(2):
        scale = 2.0 ** n.rng.integers(-6, -1, 24)
        x = n.bconv(STEPS["cast_gt"](n, x), 24, scale=scale)
        x = n.op("Add", n.op("Mul", x, n.const(0.5)), n.const(n.normal((1, 24, 1, 1), 0.1)))
    n.output(n.head(x))


@case("riptide_bipolar", "8 Riptide: padding with -1 through (x+1) - sum(w)", None, None)
def _(n: Net) -> None:
    x = n.op("Sign", stem(n, 24))
    w = n.signs((33, 24, 3, 3))
    y = n.conv(n.op("Add", x, n.const(1.0)), w, pad=1)
    y = n.op("Sub", y, n.const(w.sum(axis=(1, 2, 3)).reshape(1, 33, 1, 1)))
    n.channels[y] = 33
    n.output(n.head(n.bn(y, 12)))


@case(
    "khan_bincnn",
    "8 BinCNN: x + T[c] > 0, conv, BN, max pool, bit; packed dense",
    3,
    1,
    domain="image",
)
def _(n: Net) -> None:
    x = image(n, 3, 8)
    x = n.where(
        n.op(
            "Greater", n.op("Add", x, n.const(-n.rng.uniform(0.2, 0.8, (1, 3, 1, 1)))), n.const(0.0)
        ),
        1.0,
        -1.0,
    )
    n.channels[x] = 3
    for units in (32, 32):
        x = n.bn(n.bconv(x, units), 6)
        x = n.sign(n.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), "where_gt")
    x = n.op("Gemm", n.op("Flatten", x), n.const(n.signs((20, 128))), transB=1)
    x = n.sign(n.bn(x, 9, channels=20), "where_gt")
    n.output(n.op("Gemm", x, n.const(n.normal((10, 20))), n.const(n.normal(10)), transB=1))


@case("bnn_kernel", "8 BNN_Kernel: Hardtanh, sign, conv with bias, BN, float linear", 2, 2)
def _(n: Net) -> None:
    x = n.clip(stem(n, 24), -1, 1)
    for _ in range(2):
        y = n.conv(n.op("Sign", x), n.signs((24, 24, 3, 3)), n.normal(24), pad=1)
        x = n.clip(n.bn(y, 9), -1, 1)
    n.output(n.head(x))


@case(
    "bnn_courbariaux",
    "8 BNN: binary conv, pool, BN, Hardtanh, sign; binary dense; Softmax",
    4,
    1,
    batches=(1, 3),
)
def _(n: Net) -> None:
    x = n.op("Sign", n.clip(stem(n, 32, 8, "N"), -1, 1))
    x = n.bconv(x, 32)
    x = n.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = n.bconv(n.op("Sign", n.clip(n.bn(x, 9), -1, 1)), 48)
    x = n.op("Sign", n.clip(n.bn(x, 9), -1, 1))
    x = n.op(
        "Gemm", n.op("Flatten", x), n.const(n.signs((64, 768))), n.const(n.normal(64)), transB=1
    )
    x = n.op("Sign", n.clip(n.bn(x, 20, channels=64), -1, 1))
    x = n.op("Gemm", x, n.const(n.signs((10, 64))), n.const(n.normal(10)), transB=1)
    n.output(n.op("Softmax", n.bn(x, 8, channels=10), axis=1))


@case("lce_quicknet", "8 QuickNet: conv, ReLU, BN, Add; blur-free transition", 3, 3)
def _(n: Net) -> None:
    x = stem(n, 32)
    for _ in range(2):
        y = n.op("Relu", n.bconv(n.sign(x, "larq"), 32, pad=1))
        x = n.op("Add", n.bn(y, 6), x)
    x = n.op("MaxPool", n.op("Relu", x), kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1])
    x = n.bn(n.fconv(x, 64, 1), 2)
    y = n.op("Relu", n.bconv(n.pad_hw(n.sign(x, "larq"), 1, 1.0), 64, pad=0))
    n.output(n.head(n.op("Add", n.bn(y, 6), x)))


@case("magnitude_aware", "6 magnitude_aware_sign weights, ste_sign input", 2, 2)
def _(n: Net) -> None:
    x = stem(n, 20)
    for _ in range(2):
        w = n.normal((20, 20, 3, 3))
        w = np.sign(w) * np.abs(w).mean(axis=(1, 2, 3), keepdims=True)
        x = n.bn(n.conv(n.sign(x, "larq"), w.astype(np.float32), pad=1), 8)
        n.channels[x] = 20
    n.output(n.head(x))


@case("mobilenet_like", "8 binary depthwise and pointwise", 4, 2)
def _(n: Net) -> None:
    x = stem(n, 40)
    for _ in range(2):
        x = n.op("Add", n.bn(n.bconv(n.op("Sign", x), 40, group=40), 3), x)
        x = n.op("Add", n.bn(n.bconv(n.op("Sign", x), 40, 1), 6), x)
    n.output(n.head(x))


@case("birealnet_fully_binary_shortcut", "8 shortcut convolution binary too", 3, 2)
def _(n: Net) -> None:
    s = n.op("Sign", stem(n, 32))
    y = n.bconv(n.op("Sign", n.bn(n.bconv(s, 64, strides=[2, 2]), 9)), 64)
    short = n.bconv(s, 64, 1, strides=[2, 2])
    n.output(n.head(n.op("Add", n.bn(y, 12), n.bn(short, 5))))


@case(
    "binary_transformer_like",
    "8 sign, MatMul, Add, LayerNormalization",
    2,
    0,
    batches=(1, 3),
    opset=17,
)
def _(n: Net) -> None:
    x = n.input("x", ["N", 5, 36])
    y = n.op(
        "Add",
        n.op("MatMul", n.op("Sign", x), n.const(n.signs((36, 72)) * 0.1)),
        n.const(n.normal(72)),
    )
    y = n.op("MatMul", n.op("Sign", y), n.const(n.signs((72, 36)) * 0.1))
    x = n.op("Add", x, y)
    n.output(n.op("LayerNormalization", x, n.const(n.normal(36)), n.const(n.normal(36)), axis=-1))


@case("squeezed_channels_shuffle", "8 grouped conv, channel shuffle", 3, 0)
def _(n: Net) -> None:
    x = n.sign(image(n, 36), "where_ge")
    for _ in range(2):
        x = n.op("Sign", n.bn(n.bconv(x, 36, group=3), 6))
        x = n.op("Reshape", x, n.ints([1, 3, 12, 6, 6]))
        x = n.op("Reshape", n.op("Transpose", x, perm=[0, 2, 1, 3, 4]), n.ints([1, 36, 6, 6]))
    n.output(n.bconv(x, 9))
