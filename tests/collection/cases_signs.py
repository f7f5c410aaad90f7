"""Hand-written cases: sign, straight-through residues, weights, batch normalization."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from tests.collection.builder import SIGNS, STEPS, Net, case

OPSETS = (9, 10, 11, 12, 13, 15, 18, 20, 21, 22, 23, 24, 25, 26, 27, 28)


def image(n: Net, channels: int = 13, size: int = 6, batch: int | str = 1) -> str:
    return n.input("x", [batch, channels, size, size])


# ---------------------------------------------------------------- spellings of sign (sections 1, 4)


def _one_sign(how: str, opset: int = 17) -> None:
    @case(
        f"sign_{how}",
        "1 sign spelling",
        1,
        0,
        domain="zeros",
        opset=opset,
    )
    def _(n: Net) -> None:
        n.output(n.bn(n.bconv(n.sign(image(n), how), 7)))


for _how in SIGNS:
    _one_sign(_how)


def _all_signs(opset: int) -> None:
    @case(
        f"signs_opset{opset}",
        "1 sign spellings per opset",
        len(SIGNS),
        0,
        domain="zeros",
        opset=opset,
    )
    def _(n: Net) -> None:
        x = image(n, 8, 5)
        n.output(*[n.bconv(n.sign(x, how), 4) for how in SIGNS])


for _opset in OPSETS:
    _all_signs(_opset)


@case("sign_where_full_static", "4 Where with full-size constants", 1, 0, domain="zeros")
def _(n: Net) -> None:
    x = image(n)
    ones = np.ones((1, 13, 6, 6), np.float32)
    n.output(
        n.bconv(
            n.where(n.op("GreaterOrEqual", x, n.const(0 * ones)), n.const(ones), n.const(-ones)), 7
        )
    )


@case("sign_per_channel_thresholds", "8 RSign bias per channel, full-size bias", 2, 0)
def _(n: Net) -> None:
    x = image(n)
    full = np.broadcast_to(n.normal((1, 13, 1, 1)), (1, 13, 6, 6)).copy()
    a = n.bconv(n.op("Sign", n.op("Add", x, n.const(full))), 7)
    b = n.bconv(n.where(n.op("Greater", x, n.const(n.normal((13, 1, 1)))), 1.0, -1.0), 7)
    n.output(n.op("Add", a, b))


@case("sign_expand_bias", "4 RSign through Shape, Expand", 1, 0, batches=(1, 3), opset=11)
def _(n: Net) -> None:
    x = image(n, batch="N")
    bias = n.op("Expand", n.const(n.normal((1, 13, 1, 1))), n.op("Shape", x))
    n.output(n.bn(n.bconv(n.op("Sign", n.op("Add", x, bias)), 7)))


@case(
    "sign_per_channel_scale", "0.4 activation scales along the input channel are not binary", 0, 1
)
def _(n: Net) -> None:
    s = n.op("Mul", n.op("Sign", image(n)), n.const(n.rng.uniform(0.5, 1.5, (1, 13, 1, 1))))
    n.output(n.bconv(s, 7))


@case("sign_double_cast", "1 sign of a Cast integer image", 1, 0)
def _(n: Net) -> None:
    x = n.input("x", [1, 5, 6, 6], TensorProto.UINT8)
    n.channels["x"] = 5
    y = n.op("Sub", n.cast(x), n.const(n.rng.integers(90, 160, (1, 5, 1, 1))))
    n.channels[y] = 5
    n.output(n.bn(n.bconv(n.op("Sign", y), 9)))


@case("sign_two_valued_offset", "0.1 two values that are not symmetric", None, None)
def _(n: Net) -> None:
    n.output(n.bconv(n.where(n.op("Greater", image(n), n.const(0.0)), 3.0, -1.0), 7))


@case("sign_in_function_domain_alias", "0 ai.onnx spelled out as a domain", 1, 0, domain="zeros")
def _(n: Net):
    n.output(n.bconv(n.op("Sign", image(n)), 7))
    model = n.model()
    model.opset_import[0].domain = "ai.onnx"
    return model


def _step(how: str) -> None:
    @case(f"step_{how}", "1 activations in {0,1}", 2, 1, domain="zeros")
    def _(n: Net) -> None:
        x = image(n, 16)
        x = n.bconv(STEPS[how](n, x), 33)
        x = n.bconv(STEPS[how](n, n.bn(x)), 9, 1)
        n.output(n.head(n.bn(x)))


for _how in STEPS:
    _step(_how)


@case("step_pad_one", "2 {0,1} activations padded with 1", 1, 0, domain="zeros")
def _(n: Net) -> None:
    n.output(n.bconv(n.pad_hw(STEPS["cast_gt"](n, image(n)), 1, 1.0), 7, pad=0))


# ------------------------------------------------------------------ straight-through residues (0.3)


def _approx_sign(n: Net, x: str) -> str:
    square, twice = n.op("Mul", x, x), n.op("Mul", x, n.const(2.0))
    m1, m2, m3 = (n.cast(n.op("Less", x, n.const(v))) for v in (-1.0, 0.0, 1.0))

    def rest(m: str) -> str:
        return n.op("Sub", n.const(1.0), m)

    out = n.op(
        "Add", n.op("Mul", n.const(-1.0), m1), n.op("Mul", n.op("Add", square, twice), rest(m1))
    )
    inner = n.op("Add", n.op("Neg", square), twice)
    out = n.op("Add", n.op("Mul", out, m2), n.op("Mul", inner, rest(m2)))
    out = n.op("Add", n.op("Mul", out, m3), n.op("Mul", n.const(1.0), rest(m3)))
    return n.op("Add", n.op("Sub", n.op("Sign", x), out), out)


RESIDUES = {
    "a_b_b": lambda n, s, c, x: n.op("Add", n.op("Sub", s, c), c),
    "b_a_b": lambda n, s, c, x: n.op("Add", c, n.op("Sub", s, c)),
    "ab_b": lambda n, s, c, x: n.op("Sub", n.op("Add", s, c), c),
    "ba_b": lambda n, s, c, x: n.op("Sub", n.op("Add", c, s), c),
    "b_minus_b_a": lambda n, s, c, x: n.op("Sub", c, n.op("Sub", c, s)),
    "neg": lambda n, s, c, x: n.op("Add", n.op("Add", n.op("Neg", c), s), c),
    "copies": lambda n, s, c, x: n.op("Add", n.op("Sub", s, c), n.clip(x, -1, 1)),
    "identities": lambda n, s, c, x: n.op(
        "Add",
        n.op("Identity", n.op("Sub", n.op("Identity", s), n.op("Identity", c))),
        n.op("Identity", c),
    ),
    "tanh": lambda n, s, c, x: n.op("Add", n.op("Sub", s, n.op("Tanh", x)), n.op("Tanh", x)),
    "itself": lambda n, s, c, x: n.op("Add", n.op("Sub", s, x), x),
    "times_one": lambda n, s, c, x: n.op("Add", n.op("Sub", s, c), n.op("Mul", c, n.const(1.0))),
    "approx_sign": lambda n, s, c, x: _approx_sign(n, x),
}


def _residue(how: str, opset: int) -> None:
    @case(
        f"ste_{how}_opset{opset}",
        "0.3 straight-through residue",
        2,
        1,
        opset=opset,
    )
    def _(n: Net) -> None:
        x = n.bn(n.fconv(image(n, 3), 17))
        for units in (33, 8):
            s, c = n.sign(x, "sign" if units == 8 else "where_ge"), n.clip(x, -1, 1)
            x = n.bn(n.bconv(RESIDUES[how](n, s, c, x), units))
        n.output(x)


for _how in RESIDUES:
    for _opset in (9, 18):
        _residue(_how, _opset)


@case("ste_not_cancelling", "0.3 a - b + c stays float", 0, 1)
def _(n: Net) -> None:
    x = image(n)
    s = n.op("Add", n.op("Sub", n.op("Sign", x), n.clip(x, -1, 1)), n.clip(x, -2, 2))
    n.output(n.bconv(s, 7))


@case("ste_zero_input", "0.3 residue over exact zeros", 1, 0, domain="zeros")
def _(n: Net) -> None:
    x = image(n)
    n.output(n.bconv(RESIDUES["a_b_b"](n, n.op("Sign", x), n.clip(x, -1, 1), x), 7))


# ---------------------------------------------------------------------------- weights (0.2, 0.4, 8)


def _weight(name: str, binary: int | None = 1, opset: int = 17):
    """Register a case whose function turns a real weight tensor into the convolution's weight."""

    def register(make):
        @case(
            f"weight_{name}",
            "0.4 weights",
            binary,
            None if binary is None else 1 - binary,
            opset=opset,
            domain="zeros",
        )
        def _(n: Net) -> None:
            x = n.sign(image(n, 21), "where_ge")
            w = n.normal((10, 21, 3, 3), 0.3)
            y = n.conv(x, make(n, w), pad=1)
            n.channels[y] = 10
            n.output(n.bn(y))

        return make

    return register


def _alpha(n: Net, w: str) -> str:
    a = n.op("Abs", w)
    for axis in (3, 2, 1):
        a = n.reduce_mean(a, [axis])
    return a


_weight("sign")(lambda n, w: n.op("Sign", n.const(w)))
_weight("where")(lambda n, w: n.where(n.op("GreaterOrEqual", n.const(w), n.const(0.0)), 1.0, -1.0))
_weight("alpha_sign")(
    lambda n, w: (lambda c: n.op("Mul", _alpha(n, c), n.op("Sign", c)))(n.const(w))
)
_weight("alpha_sign_opset11", opset=11)(
    lambda n, w: (lambda c: n.op("Mul", _alpha(n, c), n.op("Sign", c)))(n.const(w))
)
_weight("ste_clip")(
    lambda n, w: (
        lambda c: n.op(
            "Add",
            n.op("Sub", n.op("Mul", _alpha(n, c), n.op("Sign", c)), n.clip(c, -1, 1)),
            n.clip(c, -1, 1),
        )
    )(n.const(w))
)
# Folded residues leave 6e-8 |w| of noise: 6e-6 of an alpha of 1e-2, but 6e-5 of 1e-3.
_weight("ste_folded_small_alpha")(lambda n, w: (np.sign(w) * np.float32(1e-2) - w) + w)
_weight("ste_folded_tiny_alpha", None)(lambda n, w: (np.sign(w) * np.float32(1e-3) - w) + w)
_weight("noise_1e-7")(lambda n, w: (np.sign(w) * (1 + 1e-7 * n.normal(w.shape))).astype(np.float32))
_weight("noise_5e-3", 0)(
    lambda n, w: (np.sign(w) * (1 + 5e-3 * n.normal(w.shape))).astype(np.float32)
)
_weight("one_outlier", 0)(
    lambda n, w: np.where(np.arange(w.size).reshape(w.shape) == 5, 1.01, np.sign(w)).astype(
        np.float32
    )
)
_weight("channel_scales")(lambda n, w: np.sign(w) * n.normal((10, 1, 1, 1)))
_weight("channel_scales_zero")(
    lambda n, w: (
        np.sign(w)
        * np.where(np.arange(10) % 3, n.rng.uniform(-2, 2, 10), 0)
        .astype(np.float32)
        .reshape(-1, 1, 1, 1)
    )
)
_weight("channel_scales_wide_range")(
    lambda n, w: (
        np.sign(w) * np.float32(10.0) ** np.arange(-5, 5).reshape(-1, 1, 1, 1).astype(np.float32)
    )
)
_weight("input_channel_scales", 0)(
    lambda n, w: np.sign(w) * n.rng.uniform(0.5, 2, (1, 21, 1, 1)).astype(np.float32)
)
_weight("spatial_scales", 0)(
    lambda n, w: np.sign(w) * n.rng.uniform(0.5, 2, (1, 1, 3, 3)).astype(np.float32)
)
_weight("ternary", 0)(lambda n, w: np.where(np.abs(w) < 0.15, 0, np.sign(w)).astype(np.float32))
_weight("sign_of_zero", 0)(lambda n, w: n.op("Sign", n.const(np.where(np.abs(w) < 0.05, 0, w))))
_weight("unipolar", None)(lambda n, w: (w > 0).astype(np.float32))
_weight("real", 0)(lambda n, w: w)
_weight("all_plus_one")(lambda n, w: np.ones_like(w))
_weight("identity_chain")(lambda n, w: n.op("Identity", n.op("Identity", n.const(np.sign(w)))))
_weight("hwio_transposed")(
    lambda n, w: n.op("Transpose", n.const(np.sign(w).transpose(2, 3, 1, 0)), perm=[3, 2, 0, 1])
)
_weight("reshaped")(
    lambda n, w: n.op("Reshape", n.const(np.sign(w).reshape(10, -1)), n.ints([10, 21, 3, 3]))
)
_weight("int8")(lambda n, w: n.cast(n.const(np.sign(w), np.int8)))
_weight("bool")(
    lambda n, w: n.op(
        "Sub", n.op("Mul", n.cast(n.const(w > 0, np.bool_)), n.const(2.0)), n.const(1.0)
    )
)
_weight("float16")(lambda n, w: n.cast(n.const(np.sign(w), np.float16)))
_weight("dequantized")(
    lambda n, w: n.op(
        "DequantizeLinear",
        n.const(np.sign(w), np.int8),
        n.const(n.rng.uniform(0.1, 1, 10)),
        n.const(np.zeros(10), np.int8),
        axis=0,
    )
)
_weight("constant_node")(
    lambda n, w: n.op("Constant", value=helper.make_tensor("v", 1, w.shape, np.sign(w).ravel()))
)
_weight("ap2")(
    lambda n, w: (
        lambda c: n.op(
            "Mul",
            n.op(
                "Pow",
                n.const(2.0),
                n.op("Round", n.op("Div", n.op("Log", _alpha(n, c)), n.const(np.log(2)))),
            ),
            n.op("Sign", c),
        )
    )(n.const(w))
)
_weight("ir_net")(lambda n, w: _ir_net(n, w))
_weight("dorefa_1bit")(
    lambda n, w: (
        lambda c: n.op("Mul", n.op("ReduceMean", n.op("Abs", c), keepdims=0), n.op("Sign", c))
    )(n.const(w))
)
_weight("dorefa_2bit", 0)(lambda n, w: _dorefa(n, w, 3))
_weight("dorefa_formula_1bit")(lambda n, w: _dorefa(n, w, 1))
_weight("larq_tern", 0)(
    lambda n, w: (
        lambda c: n.op(
            "Sign",
            n.op(
                "Add",
                n.op("Sign", n.op("Add", c, n.const(0.2))),
                n.op("Sign", n.op("Sub", c, n.const(0.2))),
            ),
        )
    )(n.const(w))
)


def _ir_net(n: Net, w: np.ndarray) -> str:
    c = n.const(w.reshape(10, -1))
    centred = n.op("Sub", c, n.reduce_mean(c, [1]))
    spread = n.op("Sqrt", n.reduce_mean(n.op("Mul", centred, centred), [1]))
    standard = n.op("Div", centred, spread)
    log2 = n.op("Div", n.op("Log", n.reduce_mean(n.op("Abs", standard), [1])), n.const(np.log(2)))
    out = n.op("Mul", n.op("Sign", standard), n.op("Pow", n.const(2.0), n.op("Round", log2)))
    return n.op("Reshape", out, n.ints([10, 21, 3, 3]))


def _dorefa(n: Net, w: np.ndarray, steps: int) -> str:
    t = n.op("Tanh", n.const(w))
    top = n.op("ReduceMax", n.op("Abs", t), keepdims=0)
    unit = n.op("Add", n.op("Div", t, n.op("Mul", n.const(2.0), top)), n.const(0.5))
    level = n.op(
        "Div", n.op("Round", n.op("Mul", unit, n.const(float(steps)))), n.const(float(steps))
    )
    return n.op("Sub", n.op("Mul", n.const(2.0), level), n.const(1.0))


@case("weight_shared", "0 one weight in two convolutions", 2, 0, domain="zeros")
def _(n: Net) -> None:
    x, w = image(n, 16), n.const(n.signs((16, 16, 3, 3)))
    y = n.bn(n.conv(n.op("Sign", x), w, pad=1), channels=16)
    n.output(n.conv(n.op("Sign", y), w, pad=1, strides=[2, 2]))


@case("weight_shared_with_float", "0.6 a binary weight also read by a float convolution", 1, 1)
def _(n: Net) -> None:
    x, w = image(n, 16), n.const(n.signs((16, 16, 3, 3)))
    n.output(n.op("Add", n.conv(n.op("Sign", x), w, pad=1), n.conv(x, w, pad=1)))


@case("weight_binary_input_real", "0.1 binary weights on real data are float", 0, 1)
def _(n: Net) -> None:
    n.output(n.bconv(image(n), 7))


@case("weight_real_input_binary", "0.1 real weights on signs are float", 0, 1)
def _(n: Net) -> None:
    n.output(n.fconv(n.op("Sign", image(n)), 7))


# ------------------------------------------------------------------ batch normalization and affines


def _after(
    name: str,
    affine,
    *,
    how: str = "where_ge",
    binary: int = 2,
    pattern: str = "1 BN before sign",
) -> None:
    @case(f"bn_{name}", pattern, binary, 0, domain="zeros")
    def _(n: Net) -> None:
        x = n.bconv(n.sign(image(n, 33), "where_ge"), 24)
        n.output(n.bconv(n.sign(affine(n, x), how), 9))


for _gamma in ("positive", "negative", "mixed", "zeros"):
    for _how in ("sign", "where_ge", "where_gt"):
        _after(
            f"{_gamma}_{_how}",
            lambda n, x, g=_gamma: n.bn(x, 12, gamma=g),
            how=_how,
        )
_after("none_odd", lambda n, x: x, how="sign")
_after(
    "mul_add",
    lambda n, x: n.op(
        "Add", n.op("Mul", x, n.const(n.normal((1, 24, 1, 1)))), n.const(n.normal((1, 24, 1, 1), 9))
    ),
)
_after(
    "sub_div",
    lambda n, x: n.op(
        "Div",
        n.op("Sub", x, n.const(n.normal((24, 1, 1), 9))),
        n.const(n.rng.uniform(1, 9, (24, 1, 1))),
    ),
)
_after("add_only", lambda n, x: n.op("Add", n.const(n.normal((1, 24, 1, 1), 9)), x))
_after("twice", lambda n, x: n.bn(n.bn(x, 12)))
_after("relu", lambda n, x: n.op("Relu", n.bn(x, 12)), how="where_gt")
_after(
    "relu_sign",
    lambda n, x: n.op("Relu", n.bn(x, 12)),
    how="sign",
    pattern="1 Sign of a ReLU output: zeros are common",
)
_after("hardtanh", lambda n, x: n.clip(n.bn(x, 12), -1, 1), how="sign")
_after("prelu", lambda n, x: n.op("PRelu", n.bn(x, 12), n.const(n.normal((24, 1, 1), 0.4))))
_after(
    "rprelu",
    lambda n, x: n.op(
        "Add",
        n.op(
            "PRelu",
            n.op("Add", n.bn(x, 12), n.const(n.normal((1, 24, 1, 1)))),
            n.const(np.full((24, 1, 1), 0.25)),
        ),
        n.const(n.normal((1, 24, 1, 1))),
    ),
)
_after("leaky", lambda n, x: n.op("Sub", n.op("LeakyRelu", n.bn(x, 12), alpha=0.1), n.const(0.3)))
_after("abs", lambda n, x: n.op("Sub", n.op("Abs", n.bn(x, 12)), n.const(0.5)))
_after(
    "instance_norm",
    lambda n, x: n.op("InstanceNormalization", x, n.const(n.normal(24)), n.const(n.normal(24))),
    how="sign",
)
_after("global_scale", lambda n, x: n.op("Mul", n.const(-0.031), x), how="sign")


@case("bn_dropout_identity", "4 eval-mode Dropout and Identity between", 2, 0, domain="zeros")
def _(n: Net) -> None:
    x = n.bconv(n.sign(image(n)), 12)
    n.output(
        n.bconv(n.sign(n.op("Identity", n.op("Dropout", n.op("Identity", n.bn(x)))), "sign"), 9)
    )


@case("bn_old_opset", "BatchNormalization at opset 9", 2, 0, opset=9, domain="zeros")
def _(n: Net) -> None:
    n.output(n.bconv(n.sign(n.bn(n.bconv(n.sign(image(n), "sign"), 12)), "sign"), 9))


def _folded(name: str, scales, opset: int = 18) -> None:
    @case(
        f"folded_{name}",
        "4 BatchNormalization folded into the convolution",
        3,
        1,
        opset=opset,
    )
    def _(n: Net) -> None:
        x = n.op("Sign", n.fconv(image(n, 3), 20))
        for units in (40, 33, 12):
            s = scales(n, units).astype(np.float32)
            weight = n.signs((units, n.channels[x], 3, 3)) * s.reshape(-1, 1, 1, 1)
            x = n.conv(x, weight, (n.normal(units) * 0.3).astype(np.float32), pad=1)
            if units != 12:
                x = n.op("Sign", x)
        n.output(x)


_folded("mixed", lambda n, u: n.rng.uniform(0.02, 0.1, u) * np.where(np.arange(u) % 3, 1, -1))
_folded("zeros", lambda n, u: n.rng.uniform(0.02, 0.1, u) * (np.arange(u) % 4 - 1))
_folded("negative", lambda n, u: -n.rng.uniform(0.02, 0.1, u))
_folded("tiny", lambda n, u: n.rng.uniform(1e-8, 1e-6, u))


@case("even_k_zeros", "1b even K without BN: attainable zeros", 3, 0, domain="zeros")
def _(n: Net) -> None:
    x = n.bconv(n.sign(image(n, 16)), 32, 2, pad=0)
    x = n.bconv(n.op("Sign", x), 16, 3, pad=0)
    n.output(n.bconv(n.op("Sign", x), 8, 1))


@case("even_k_padded", "1a,1b odd K with zero padding: zeros at the border", 2, 0, domain="zeros")
def _(n: Net) -> None:
    x = n.bconv(n.sign(image(n, 15)), 32, 3)
    n.output(n.bconv(n.op("Sign", x), 16, 3))


@case(
    "threshold_on_attainable",
    "2 BN whose threshold is exactly attainable",
    2,
    0,
    domain="zeros",
)
def _(n: Net) -> None:
    x = n.bconv(n.sign(image(n, 16)), 24, 3, pad=0)
    mean = n.rng.integers(-6, 7, 24) * 2  # K = 144: accumulators are even
    gamma = np.where(np.arange(24) % 2, 1.0, -0.5)
    arrays = [gamma, np.zeros(24), mean, np.ones(24)]
    x = n.op("BatchNormalization", x, *[n.const(a) for a in arrays], epsilon=1e-30)
    n.output(n.bconv(n.op("Sign", x), 9, 3))
