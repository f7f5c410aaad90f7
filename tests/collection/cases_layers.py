"""Hand-written cases: padding, convolution shapes, dense layers, pools."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, numpy_helper

from tests.collection.builder import Net, case
from tests.collection.cases_signs import image

# ----------------------------------------------------------------------------- padding (section 2)


def _pads(
    name: str,
    function,
    *,
    binary: int | None = 1,
    opset: int = 17,
    how: str = "where_ge",
    batch=1,
):
    """Register a case: `function(net, signs)` pads and convolves 13 channels of 6x7 signs to 9."""

    @case(
        f"pad_{name}",
        "2 padding",
        binary,
        None if binary is None else 1 - binary,
        opset=opset,
        domain="zeros",
        batches=(1,) if batch == 1 else (1, 3),
    )
    def _(n: Net) -> None:
        x = n.input("x", [batch, 13, 6, 7])
        y = function(n, n.sign(x, how))
        n.channels[y] = 9
        n.output(n.bn(y))


def _both(name: str, function, **rest) -> None:
    """Register with the attribute form of Pad and with its input forms."""
    for opset in (9, 11, 18, 21):
        _pads(f"{name}_opset{opset}", function, opset=opset, **rest)


_pads("conv_zero", lambda n, s: n.bconv(s, 9, pad=1))
_pads("conv_zero_sign", lambda n, s: n.bconv(s, 9, pad=1), how="sign")
_pads("conv_wide", lambda n, s: n.bconv(s, 9, pad=3))
_pads("conv_asymmetric", lambda n, s: n.bconv(s, 9, pad=(0, 1, 2, 0)))
_pads(
    "conv_asymmetric_5x5_s2",
    lambda n, s: n.bconv(s, 9, 5, pad=(1, 2, 2, 1), strides=[2, 2]),
)
for _auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
    _pads(f"auto_{_auto}", lambda n, s, a=_auto: n.bconv(s, 9, auto_pad=a))
    _pads(
        f"auto_{_auto}_even_s2", lambda n, s, a=_auto: n.bconv(s, 9, 4, auto_pad=a, strides=[2, 2])
    )
_pads(
    "auto_SAME_UPPER_dilated", lambda n, s: n.bconv(s, 9, auto_pad="SAME_UPPER", dilations=[2, 2])
)
_both("minus_one", lambda n, s: n.bconv(n.pad_hw(s, 1, -1.0), 9, pad=0))
_both("plus_one", lambda n, s: n.bconv(n.pad_hw(s, 1, 1.0), 9, pad=0))
_both("zero_node", lambda n, s: n.bconv(n.pad_hw(s, 1, 0.0), 9, pad=0))
_pads("no_value_input", lambda n, s: n.bconv(n.pad_hw(s, 1, None), 9, pad=0))
_pads("minus_one_asymmetric", lambda n, s: n.bconv(n.pad_hw(s, (2, 0, 1, 3), -1.0), 9, pad=0))
_pads("stacked", lambda n, s: n.bconv(n.pad_hw(n.pad_hw(s, 1, 1.0), 1, -1.0), 9, pad=1))
_pads(
    "stacked_asymmetric",
    lambda n, s: n.bconv(
        n.pad_hw(n.pad_hw(s, (1, 0, 0, 2), -1.0), (0, 1, 1, 0), 1.0), 9, pad=(1, 0, 0, 1)
    ),
)
_pads("minus_one_then_conv_zero", lambda n, s: n.bconv(n.pad_hw(s, 1, -1.0), 9, 5, pad=1))
_pads("crop", lambda n, s: n.bconv(n.pad_hw(s, (-1, 0, 0, -2)), 9, pad=1))
_pads("minus_half", lambda n, s: n.bconv(n.pad_hw(s, 1, -0.5), 9, pad=0))
_pads(
    "reflect",
    lambda n, s: n.bconv(n.pad(s, [0, 0, 1, 1, 0, 0, 1, 1], None, mode="reflect"), 9, pad=0),
    binary=None,
)
_pads(
    "edge",
    lambda n, s: n.bconv(n.pad(s, [0, 0, 1, 1, 0, 0, 1, 1], None, mode="edge"), 9, pad=0),
    binary=None,
)
_pads(
    "axes_input",
    lambda n, s: n.bconv(
        n.op("Pad", s, n.ints([1, 2, 1, 0]), n.const(-1.0), n.ints([2, 3])), 9, pad=0
    ),
    opset=18,
)
_pads(
    "negative_axes_input",
    lambda n, s: n.bconv(
        n.op("Pad", s, n.ints([1, 1, 1, 1]), n.const(1.0), n.ints([-2, -1])), 9, pad=0
    ),
    opset=19,
)
_pads(
    "axes_no_value",
    lambda n, s: n.bconv(n.op("Pad", s, n.ints([1, 1, 1, 1]), "", n.ints([2, 3])), 9, pad=0),
    opset=18,
)
_pads(
    "by_concat",
    lambda n, s: n.bconv(n.op("Concat", s, n.const(-np.ones((1, 13, 1, 7))), axis=2), 9, pad=0),
)


def _legacy_pads(n: Net) -> str:
    """Write the pads as torch's legacy exporter does: reversed pairs through a shape chain."""
    given = n.ints([1, 1, 1, 1])  # last axis first
    length = n.op("Size", given) if n.opset >= 9 else n.ints([4])
    missing = n.op("Sub", n.const(8, np.int64), length)
    zeros = n.op(
        "ConstantOfShape",
        n.unsqueeze(missing, [0]),
        value=numpy_helper.from_array(np.zeros(1, np.int64)),
    )
    rows = n.op("Reshape", n.op("Concat", given, zeros, axis=0), n.ints([-1, 2]))
    flipped = n.op(
        "Slice", rows, n.ints([-1]), n.ints([np.iinfo(np.int64).min]), n.ints([0]), n.ints([-1])
    )
    flat = n.op("Reshape", n.op("Transpose", flipped, perm=[1, 0]), n.ints([-1]))
    return n.cast(flat, TensorProto.INT64)


for _opset in (11, 17):
    _pads(
        f"legacy_chain_opset{_opset}",
        lambda n, s: n.bconv(
            n.op("Pad", s, _legacy_pads(n), n.const(-1.0), mode="constant"), 9, pad=0
        ),
        opset=_opset,
        batch="N",
    )


def _before_sign(value: float, how: str) -> None:
    @case(f"pad_{value:g}_before_{how}", "2 Pad before sign", 1, 0, domain="zeros")
    def _(n: Net) -> None:
        n.output(n.bn(n.bconv(n.sign(n.pad_hw(image(n), 1, value), how), 9, pad=0)))


for _value in (0.0, 1.0, -2.0):
    for _how in ("sign", "where_ge", "where_gt", "larq"):
        _before_sign(_value, _how)


@case(
    "pad_batchnorm_before_sign",
    "2 zero Pad, then BN, then sign: the padding becomes sign(beta')",
    1,
    0,
)
def _(n: Net) -> None:
    n.output(n.bconv(n.op("Sign", n.bn(n.pad_hw(image(n), 1))), 9, pad=0))


@case("pad_bmxnet_v2", "7 sign, Pad(-1), Conv, +K, /2", 2, 0, domain="zeros")
def _(n: Net) -> None:
    x = image(n)
    for units in (24, 9):
        x = n.bconv(n.pad_hw(n.sign(x, "where_ge"), 1, -1.0), units, pad=0)
        x = n.op("Div", n.op("Add", x, n.const(float(9 * 13))), n.const(2.0))
        x = n.bn(x, 40)
    n.output(x)


@case("pad_shared", "2 one padded sign read by two convolutions", 2, 0)
def _(n: Net) -> None:
    p = n.pad_hw(n.op("Sign", image(n)), 1, -1.0)
    n.output(n.op("Add", n.bconv(p, 9, pad=0), n.bconv(p, 9, pad=0)))


@case("pad_dabnn_bi_real", "3 daBNN with the Sign present: sign, Pad(-1), Conv, BN, Add", 2, 1)
def _(n: Net) -> None:
    x = n.bn(n.fconv(image(n, 3), 64))
    for _ in range(2):
        x = n.op("Add", n.bn(n.bconv(n.pad_hw(n.op("Sign", x), 1, -1.0), 64, pad=0), 12), x)
    n.output(x)


# ----------------------------------------------------------------------------- convolution shapes


def _conv(
    name: str,
    channels: int,
    units: int,
    *,
    size=(7, 9),
    hidden: bool = True,
    **rest,
) -> None:
    """Register sign -> conv -> BN -> sign -> 3x3 conv."""

    @case(f"conv_{name}", "0 convolution shapes", 2 if hidden else 1, 0, domain="zeros")
    def _(n: Net) -> None:
        x = n.input("x", [1, channels, *size])
        x = n.bconv(n.sign(x, "where_ge"), units, **rest)
        if hidden:
            x = n.bconv(n.op("Sign", n.bn(x, 10)), 8)
        n.output(x)


for _c in (1, 2, 3, 8, 16, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129):
    _conv(f"c{_c}", _c, 130 - _c)
_conv("1x1", 64, 33, k=1)
_conv("1x3", 20, 33, k=(1, 3), pad=(0, 1, 0, 1))
_conv("3x1", 20, 33, k=(3, 1), pad=(1, 0, 1, 0))
_conv("2x2", 20, 33, k=2, pad=0)
_conv("5x5", 20, 33, k=5)
_conv("7x7_s2", 20, 33, k=7, strides=[2, 2])
_conv("1x1_s2", 64, 33, k=1, strides=[2, 2])
_conv("3x3_s2", 33, 64, strides=[2, 2])
_conv("3x3_s3_2", 33, 40, strides=[3, 2])
_conv("dilated", 33, 40, pad=2, dilations=[2, 2])
_conv("dilated_mixed", 33, 40, pad=(1, 3, 1, 3), dilations=[1, 3], strides=[1, 2])
_conv("whole_image", 20, 33, k=(7, 9), pad=0, hidden=False)
_conv("one_pixel", 65, 33, size=(1, 1), k=1)
_conv("one_row", 33, 33, size=(1, 17), k=(1, 3), pad=(0, 1, 0, 1))
_conv("wide", 32, 16, size=(3, 40))
_conv("one_unit", 33, 1, hidden=False)
for _c, _g in ((64, 2), (66, 2), (96, 3), (64, 32), (20, 4)):
    _conv(f"group{_g}_c{_c}", _c, _c, group=_g)
_conv("group_more_units", 32, 64, group=2)
_conv("depthwise", 33, 33, group=33)
_conv("depthwise_s2", 64, 64, group=64, strides=[2, 2])
_conv("depthwise_multiplier", 16, 48, group=16)
_conv("depthwise_5x5_dilated", 40, 40, k=5, group=40, pad=4, dilations=[2, 2])


@case("conv_bias", "0 convolution with bias", 2, 0, domain="zeros")
def _(n: Net) -> None:
    x = n.sign(image(n), "where_ge")
    y = n.conv(x, n.signs((24, 13, 3, 3)), n.normal(24, 5), pad=1)
    n.output(n.conv(n.op("Sign", y), n.signs((9, 24, 1, 1)), n.normal(9)))


@case("conv_no_kernel_shape", "0 optional attributes left out", 1, 0, domain="zeros")
def _(n: Net) -> None:
    n.output(n.op("Conv", n.sign(image(n), "where_ge"), n.const(n.signs((9, 13, 3, 3)))))


@case("conv_empty_bias_name", "optional input given as an empty name", 1, 0, domain="zeros")
def _(n: Net) -> None:
    n.output(n.op("Conv", n.sign(image(n), "where_ge"), n.const(n.signs((9, 13, 3, 3))), ""))


@case("conv_1d", "0 one-dimensional convolution", None, None, domain="zeros")
def _(n: Net) -> None:
    x = n.sign(n.input("x", [1, 13, 20]), "where_ge")
    n.output(n.op("Conv", x, n.const(n.signs((9, 13, 3))), pads=[1, 1]))


@case("conv_3d", "0 three-dimensional convolution", None, None, domain="zeros")
def _(n: Net) -> None:
    x = n.sign(n.input("x", [1, 5, 4, 5, 6]), "where_ge")
    n.output(n.op("Conv", x, n.const(n.signs((9, 5, 3, 3, 3))), pads=[1] * 6))


# ----------------------------------------------------------------------------- dense


def _dense(
    name: str,
    function,
    *,
    binary: int = 1,
    batch=1,
    opset: int = 17,
    shape=(70,),
) -> None:
    @case(
        f"dense_{name}",
        "0 Gemm and MatMul",
        binary,
        1 - binary,
        opset=opset,
        domain="zeros",
        batches=(1,) if batch == 1 else (1, 3),
    )
    def _(n: Net) -> None:
        n.output(function(n, n.sign(n.input("x", [batch, *shape]), "where_ge")))


_dense("matmul", lambda n, s: n.op("MatMul", s, n.const(n.signs((70, 20)))))
_dense(
    "matmul_add",
    lambda n, s: n.op("Add", n.op("MatMul", s, n.const(n.signs((70, 20)))), n.const(n.normal(20))),
    batch="N",
)
_dense(
    "matmul_add_left",
    lambda n, s: n.op("Add", n.const(n.normal(20)), n.op("MatMul", s, n.const(n.signs((70, 20))))),
)
_dense("matmul_scaled", lambda n, s: n.op("MatMul", s, n.const(n.signs((70, 20)) * n.normal(20))))
_dense(
    "matmul_input_scaled",
    lambda n, s: n.op("MatMul", s, n.const(n.signs((70, 20)) * n.normal((70, 1)))),
    binary=0,
)
_dense(
    "matmul_transposed_weight",
    lambda n, s: n.op(
        "MatMul", s, n.op("Transpose", n.op("Sign", n.const(n.normal((20, 70)))), perm=[1, 0])
    ),
)
_dense("matmul_3d", lambda n, s: n.op("MatMul", s, n.const(n.signs((70, 20)))), shape=(5, 70))
_dense(
    "matmul_3d_dynamic",
    lambda n, s: n.op("MatMul", s, n.const(n.signs((70, 20)))),
    shape=(5, 70),
    batch="N",
)
_dense(
    "gemm_transb",
    lambda n, s: n.op("Gemm", s, n.const(n.signs((20, 70))), n.const(n.normal(20)), transB=1),
    batch="N",
)
_dense("gemm", lambda n, s: n.op("Gemm", s, n.const(n.signs((70, 20))), n.const(n.normal(20))))
_dense("gemm_no_c", lambda n, s: n.op("Gemm", s, n.const(n.signs((20, 70))), transB=1), opset=13)
_dense(
    "gemm_empty_c", lambda n, s: n.op("Gemm", s, n.const(n.signs((20, 70))), "", transB=1), opset=13
)
_dense(
    "gemm_opset9",
    lambda n, s: n.op("Gemm", s, n.const(n.signs((20, 70))), n.const(n.normal(20)), transB=1),
    opset=9,
)
_dense(
    "gemm_alpha_beta",
    lambda n, s: n.op(
        "Gemm",
        s,
        n.const(n.signs((20, 70))),
        n.const(n.normal(20)),
        transB=1,
        alpha=0.25,
        beta=-3.0,
    ),
)
_dense(
    "gemm_alpha_zero",
    lambda n, s: n.op(
        "Gemm", s, n.const(n.signs((20, 70))), n.const(n.normal(20)), transB=1, alpha=-1.0, beta=0.0
    ),
)
_dense(
    "gemm_scalar_c",
    lambda n, s: n.op("Gemm", s, n.const(n.signs((20, 70))), n.const(0.5), transB=1),
)
_dense(
    "gemm_column_c",
    lambda n, s: n.op("Gemm", s, n.const(n.signs((20, 70))), n.const([[0.5]]), transB=1),
)
_dense(
    "gemm_transa",
    lambda n, s: n.op("Gemm", s, n.const(n.signs((3, 20))), transA=1),
    shape=(70,),
    batch=3,
)
_dense(
    "gemm_channel_scales",
    lambda n, s: n.op(
        "Gemm",
        s,
        n.const(n.signs((20, 70)) * (n.rng.integers(-1, 2, (20, 1)) * 0.3)),
        n.const(n.normal(20)),
        transB=1,
    ),
)
_dense("one_unit", lambda n, s: n.op("Gemm", s, n.const(n.signs((1, 70))), transB=1))
_dense(
    "ternary_weight",
    lambda n, s: n.op("MatMul", s, n.const(n.rng.integers(-1, 2, (70, 20)))),
    binary=0,
)


@case("dense_two_layers_bn", "0 BN of dense layers, dynamic batch", 3, 1, batches=(1, 3))
def _(n: Net) -> None:
    x = n.input("x", ["N", 28])
    x = n.op("Gemm", x, n.const(n.normal((100, 28))), n.const(n.normal(100)), transB=1)
    for wide, units in ((100, 65), (65, 33), (33, 10)):
        x = n.op("Gemm", n.op("Sign", x), n.const(n.signs((units, wide))), transB=1)
        x = n.bn(x, 6, channels=units)
    n.output(x)


@case(
    "dense_after_flatten",
    "0 CHW flatten of packed signs before a binary dense layer",
    3,
    1,
    batches=(1, 3),
)
def _(n: Net) -> None:
    x = n.op("Sign", n.bn(n.fconv(image(n, 3, 6, "N"), 33)))
    x = n.sign(
        n.bn(n.op("MaxPool", n.bconv(x, 20), kernel_shape=[2, 2], strides=[2, 2])), "where_ge"
    )
    x = n.op(
        "Gemm", n.op("Flatten", x), n.const(n.signs((40, 180))), n.const(n.normal(40)), transB=1
    )
    n.output(n.op("MatMul", n.op("Sign", x), n.const(n.signs((40, 10)))))


@case("dense_after_reshape", "0 Reshape(-1, 180) instead of Flatten, sign after it", 2, 0)
def _(n: Net) -> None:
    x = n.bn(n.bconv(n.op("Sign", image(n, 13, 3)), 20))
    x = n.op("Reshape", x, n.ints([-1, 180]))
    n.output(n.op("MatMul", n.op("Sign", x), n.const(n.signs((180, 10)))))


@case(
    "dense_shape_chain",
    "0.2 Shape, Gather, Unsqueeze, Concat, Reshape with dynamic batch",
    2,
    0,
    batches=(1, 3),
)
def _(n: Net) -> None:
    x = n.op("Sign", n.bn(n.bconv(n.op("Sign", image(n, 13, 3, "N")), 20)))
    size = n.op("Gather", n.op("Shape", x), n.const(0, np.int64), axis=0)
    shape = n.op("Concat", n.unsqueeze(size, [0]), n.ints([-1]), axis=0)
    n.output(n.op("MatMul", n.op("Reshape", x, shape), n.const(n.signs((180, 10)))))


@case("matmul_of_activations", "0 product of two sign activations", None, None)
def _(n: Net) -> None:
    a, b = n.input("a", [1, 4, 6, 33]), n.input("b", [1, 4, 33, 6])
    n.output(n.op("MatMul", n.op("Sign", a), n.op("Sign", b)))


# ----------------------------------------------------------------------------- pools


def _pool(name: str, function, *, binary: int = 2, how: str = "where_ge") -> None:
    """Register sign -> conv -> `function` -> conv; it goes from accumulators to signs."""

    @case(f"pool_{name}", "8 pools", binary, 2 - binary, domain="zeros")
    def _(n: Net) -> None:
        x = n.bconv(n.sign(image(n, 20, 9), how), 33)
        n.output(n.bconv(function(n, x), 8))


def _max(n: Net, x: str, k: int = 2, s: int = 2, **rest) -> str:
    return n.op("MaxPool", x, kernel_shape=[k, k], strides=[s, s], **rest)


_pool("before_sign", lambda n, x: n.sign(n.bn(_max(n, x), 9, gamma="positive")))
_pool("before_bn_negative", lambda n, x: n.sign(n.bn(_max(n, x), 9, gamma="negative")))
_pool("before_bn_mixed", lambda n, x: n.op("Sign", n.bn(_max(n, x), 9)))
_pool("after_bn_mixed", lambda n, x: n.op("Sign", _max(n, n.bn(x, 9))))
_pool("after_sign", lambda n, x: _max(n, n.sign(n.bn(x, 9))))
_pool("after_sign_three_valued", lambda n, x: _max(n, n.op("Sign", n.bn(x, 9, gamma="zeros"))))
_pool(
    "after_sign_padded",
    lambda n, x: _max(n, n.sign(n.bn(x, 9)), 3, 2, pads=[1, 1, 1, 1]),
)
_pool(
    "after_sign_padded_asymmetric",
    lambda n, x: _max(n, n.sign(n.bn(x, 9)), 3, 2, pads=[0, 0, 1, 1]),
)
_pool("after_sign_overlapping", lambda n, x: _max(n, n.sign(n.bn(x, 9)), 3, 1, pads=[1, 1, 1, 1]))
_pool("after_sign_ceil", lambda n, x: _max(n, n.sign(n.bn(x, 9)), 2, 2, ceil_mode=1))
_pool("after_sign_dilated", lambda n, x: _max(n, n.sign(n.bn(x, 9)), 2, 1, dilations=[2, 2]))
_pool(
    "after_sign_same_upper", lambda n, x: _max(n, n.sign(n.bn(x, 9)), 2, 2, auto_pad="SAME_UPPER")
)
_pool("after_sign_twice", lambda n, x: _max(n, _max(n, n.sign(n.bn(x, 9))), 2, 1))
_pool("before_sign_padded", lambda n, x: n.op("Sign", n.bn(_max(n, x, 3, 2, pads=[1, 1, 1, 1]), 9)))
_pool("sign_then_pad", lambda n, x: n.pad_hw(_max(n, n.sign(n.bn(x, 9))), 1, -1.0))
_pool("global_max", lambda n, x: n.op("Sign", n.op("GlobalMaxPool", n.bn(x, 9))))
_pool("min_pool", lambda n, x: n.op("Neg", _max(n, n.op("Neg", n.sign(n.bn(x, 9))))))
_pool(
    "average_then_sign",
    lambda n, x: n.op("Sign", n.op("AveragePool", n.bn(x, 9), kernel_shape=[2, 2], strides=[2, 2])),
)
_pool(
    "average_of_signs_is_not_binary",
    lambda n, x: n.op("AveragePool", n.sign(n.bn(x, 9)), kernel_shape=[2, 2], strides=[2, 2]),
    binary=1,
)


def _average(name: str, function, binary: int = 1) -> None:
    @case(f"average_{name}", "8 average pools of signs are integers", binary, 1, domain="zeros")
    def _(n: Net) -> None:
        x = n.op("Sign", n.bn(n.bconv(n.sign(image(n, 20, 7), "where_ge"), 33), 9))
        x = n.op("Flatten", function(n, x))
        wide = {
            "global": 33,
            "mean": 33,
            "mean_no_keep": 33,
            "padded": 33 * 16,
            "padded_excluded": 33 * 16,
        }[name]
        n.output(n.op("Gemm", x, n.const(n.normal((10, wide))), n.const(n.normal(10)), transB=1))


_average("global", lambda n, x: n.op("GlobalAveragePool", x))
_average("mean", lambda n, x: n.reduce_mean(x, [2, 3]))
_average("mean_no_keep", lambda n, x: n.reduce_mean(x, [-1, -2], keep=0))
_average(
    "padded",
    lambda n, x: n.op(
        "AveragePool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4, count_include_pad=1
    ),
)
_average(
    "padded_excluded",
    lambda n, x: n.op("AveragePool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
)


@case("average_shortcut", "8 Bi-Real shortcut: AveragePool, 1x1 float, BN", 2, 2)
def _(n: Net) -> None:
    x = n.bn(n.fconv(image(n, 3, 8), 16))
    short = n.bn(n.fconv(n.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2]), 32, 1))
    x = n.op("Add", n.bn(n.bconv(n.op("Sign", x), 32, strides=[2, 2])), short)
    n.output(n.op("Add", n.bn(n.bconv(n.op("Sign", x), 32)), x))
