"""Hand-written cases: types, names, inputs and outputs as networks on devices have them."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tests.collection.builder import CASES, Net, case

_FIRST = len(CASES)

F16, F64, U8, I64 = (
    TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.UINT8, TensorProto.INT64
)  # fmt: skip


def renamed(n: Net, names: dict[str, str]) -> None:
    """Give tensors other names, in the whole graph."""
    for node in n.nodes:
        for tensors in (node.input, node.output):
            tensors[:] = [names.get(name, name) for name in tensors]
    for info in (*n.inputs, *n.initializers):
        info.name = names.get(info.name, info.name)
    n.outputs = [names.get(name, name) for name in n.outputs]


@case("paddings_side_by_side", "2 every padding of one sign", 7, 0, domain="zeros")
def _(n: Net) -> None:
    s = n.op("Sign", n.input("x", [1, 19, 7, 6]))
    n.output(
        n.bconv(s, 9, pad=0),
        n.bconv(s, 9, pad=(0, 1, 2, 0), strides=[2, 1]),
        n.bconv(s, 33, 4, auto_pad="SAME_UPPER", strides=[2, 2]),
        n.bconv(s, 5, 2, auto_pad="SAME_LOWER"),
        n.bconv(n.pad_hw(s, (1, 0, 2, 1), -1.0), 9, pad=0),
        n.bconv(n.pad_hw(s, 1, 1.0), 9, pad=(1, 0, 0, 1)),
        n.bconv(s, 8, 3, pad=2, dilations=[2, 2], strides=[3, 3]),
    )


@case("groups_side_by_side", "0 grouped, depthwise, dilated, stride 3", 4, 0)
def _(n: Net) -> None:
    s = n.sign(n.input("x", [1, 48, 9, 9]))
    grouped = n.bn(n.bconv(s, 96, 3, group=3, pad=1, strides=[3, 3]), 9)
    depthwise = n.bn(n.bconv(s, 48, 5, group=48, pad=2, strides=[3, 3]), 5)
    multiplied = n.bconv(s, 96, 3, group=48, pad=2, dilations=[2, 2])
    t = n.sign(n.concat(grouped, depthwise))
    n.channels[t] = 144
    n.output(n.bconv(t, 12, 1, group=4), multiplied)


@case("signals_1d", "0 one axis: stride, dilation, pool, dense", 4, 0, batches=(1,))
def _(n: Net) -> None:
    x = n.input("signal", [1, 6, 90])
    s = n.op("Sign", n.op("Sub", x, n.const(n.normal((6, 1), 0.3))))
    for units, k, more in ((40, 5, {"strides": [3]}), (33, 3, {"dilations": [2]}), (64, 4, {})):
        weight = n.signs((units, 6 if units == 40 else n.channels[s], k))
        y = n.op("Conv", s, n.const(weight), pads=[k // 2, k - 1 - k // 2], **more)
        n.channels[y] = units
        if units == 33:
            y = n.op("MaxPool", y, kernel_shape=[3], strides=[2])
            n.channels[y] = units
        s = n.sign(n.bn(y, k * 3))
        n.channels[s] = units
    flat = n.op("Flatten", s)
    n.output(n.op("MatMul", flat, n.const(n.signs((64 * 13, 10)))))


@case("dense_chain_softmax", "4 dense layers in a row, classes and their probabilities", 5, 0)
def _(n: Net) -> None:
    x = n.input("x", [1, 70])
    for units in (129, 65, 256, 31, 10):
        s = n.sign(x, "larq") if units == 129 else n.sign(x)
        inner = n.channels[x]
        x = n.op("Gemm", s, n.const(n.signs((units, inner)) * 0.125),
                 n.const(n.rng.integers(-8, 8, units) + 0.3), transB=1)  # fmt: skip
        n.channels[x] = units
    scores = n.op("Softmax", x, axis=1)
    n.output(scores, n.op("ArgMax", x, axis=1, keepdims=0))


@case("half_precision_everywhere", "0 float16 inputs, weights and outputs", 2, 0)
def _(n: Net) -> None:
    x = n.input("x", [1, 24, 6, 6], F16)
    s = n.op("Sign", n.op("Add", x, n.const(n.normal((1, 24, 1, 1), 0.5), np.float16)))
    y = n.op("Conv", s, n.const(n.signs((40, 24, 3, 3)), np.float16), pads=[1, 1, 1, 1])
    y = n.op("Mul", y, n.const(n.rng.uniform(0.01, 0.1, (1, 40, 1, 1)), np.float16))
    t = n.op("Sign", n.op("Add", y, n.const(n.normal((1, 40, 1, 1), 0.1), np.float16)))
    z = n.op("Conv", t, n.const(n.signs((8, 40, 1, 1)), np.float16))
    n.output(y, z, n.op("Tanh", n.op("Mul", z, n.const(0.03, np.float16))))


@case("half_precision_at_the_ends", "0 float16 in and out, float32 between", 1, 1)
def _(n: Net) -> None:
    x = n.cast(n.input("x", [2, 3, 8, 8], F16))
    n.channels[x] = 3
    s = n.sign(n.bn(n.fconv(x, 36), 1))
    n.channels[s] = 36
    y = n.bn(n.bconv(s, 20, scale=0.07), 1)
    n.output(n.cast(y, F16), n.cast(n.op("GlobalAveragePool", n.op("Relu", y)), F16))


@case("camera_bytes", "0 NHWC image of bytes, bytes as result", 2, 0)
def _(n: Net) -> None:
    x = n.op("Transpose", n.cast(n.input("frame", [1, 10, 12, 3], U8)), perm=[0, 3, 1, 2])
    n.channels[x] = 3
    s = n.op("Sign", n.op("Sub", n.op("Div", x, n.const(255.0)), n.const(0.4)))
    n.channels[s] = 3
    y = n.op("MaxPool", n.bn(n.bconv(s, 40), 5), kernel_shape=[2, 2], strides=[2, 2])
    n.channels[y] = 40
    z = n.bconv(n.sign(y), 6, 3, pad=1)
    mask = n.op("Transpose", n.op("Greater", z, n.const(0.5)), perm=[0, 2, 3, 1])
    levels = n.op("Clip", n.op("Add", z, n.const(128.0)), n.const(0.0), n.const(255.0))
    n.output(mask, n.cast(mask, U8), n.cast(levels, U8))


@case("inputs_of_every_type", "0 several inputs: float, index, mask, double, bytes", 1, None)
def _(n: Net) -> None:
    x = n.input("x", [2, 33])
    rows = n.input("rows", [3], I64)
    mask = n.input("mask", [2, 33], TensorProto.BOOL)
    wide = n.input("wide", [2, 33], F64)
    small = n.input("small", [2, 33], TensorProto.INT8)
    table = n.op("Gather", n.const(n.normal((8, 33))), rows, axis=0)
    chosen = n.op("Where", mask, x, n.cast(small))
    y = n.op("MatMul", n.op("Sign", n.op("Add", chosen, n.const(0.31))), n.const(n.signs((33, 12))))
    n.output(y, table, n.op("Mul", wide, n.const(3.0, np.float64)),
             n.op("Not", mask), n.op("Neg", small), n.cast(y, TensorProto.INT32))  # fmt: skip


@case("outputs_read_again", "0 outputs read inside, inputs passed on, scalars", 2, None)
def _(n: Net) -> None:
    x = n.input("x", [1, 32, 5, 5])
    s = n.op("Sign", x)
    y = n.bconv(s, 32)
    z = n.bconv(n.sign(n.bn(y, 9)), 16, 1)
    whole = n.op("ReduceMean", z, keepdims=0)
    n.output(y, s, n.op("Identity", x), z, whole, n.op("Identity", whole),
             n.op("Add", z, whole), n.op("Identity", n.const(2.5)))  # fmt: skip
    n.nodes[-1].output[0] = "constant"
    n.outputs[-1] = "constant"


@case("a_batch_of_three", "0 a static batch above 1", 3, 0)
def _(n: Net) -> None:
    x = n.input("x", [3, 33, 6, 5])
    y = n.bn(n.bconv(n.op("Sign", x), 64), 9)
    s = n.sign(n.op("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2]))
    n.channels[s] = 64
    y = n.op("Flatten", n.bn(n.bconv(s, 20, pad=0, k=2), 9))
    n.output(n.op("Gemm", n.sign(y), n.const(n.signs((20 * 2, 7))), n.const(n.normal(7))))


_NAMES = {
    "c": ("int", "class", "restrict", "x.1", "x/1", "1", "10", "2", "__proto__"),
    "javascript": ("constructor", "function", "toString", "await", "10", "2", "a-b", "é", "new"),
    "python": ("lambda", "None", "self", "def", "in", "yield", "print", "x y", 'a"b\\'),
}  # fmt: skip

for _language, _words in _NAMES.items():

    @case(f"names_of_{_language}", "0 names that languages reserve", 1, None)
    def _(n: Net, words: tuple[str, ...] = _words) -> None:
        given = [n.input(f"g{i}", [1, 4 + i]) for i in range(4)]
        n.channels.clear()
        s = n.op("Sign", n.op("Concat", *given, axis=1))
        y = n.op("MatMul", s, n.const(n.signs((22, 5))))
        n.output(y, n.op("Exp", given[0]), n.op("Neg", given[1]), s)
        renamed(n, dict(zip([*given, *n.outputs], words, strict=False)))


@case("floats_without_bits", "0 resize, pools, sigmoid, hard functions", 0, 2)
def _(n: Net) -> None:
    x = n.input("x", [1, 5, 7, 6])
    y = n.op("Sigmoid", n.fconv(x, 8, strides=[2, 2]))
    y = n.op("AveragePool", y, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1])
    sizes = ("", "", n.ints([1, 8, 9, 7]))
    near = n.op("Resize", y, *sizes, mode="nearest", coordinate_transformation_mode="asymmetric",
                nearest_mode="floor")  # fmt: skip
    line = n.op("Resize", y, *sizes, mode="linear", coordinate_transformation_mode="half_pixel")
    up = n.op("ConvTranspose", y, n.const(n.normal((8, 3, 3, 3), 0.2)), strides=[2, 2])
    n.output(n.op("HardSwish", near), n.op("Erf", line), up,
             n.op("Pad", x, n.ints([0, 0, 1, 2, 0, 0, 2, 1]), mode="reflect"))  # fmt: skip


@case("normalized_floats", "0 layer norm, softmax, gelu, instance norm", 0, None)
def _(n: Net) -> None:
    x = n.input("x", [2, 6, 20])
    y = n.op("LayerNormalization", x, n.const(n.normal(20)), n.const(n.normal(20)), axis=-1)
    half = n.op("Mul", y, n.const(0.5))
    wide = n.op("Erf", n.op("Div", y, n.const(np.sqrt(2.0))))
    gelu = n.op("Mul", half, n.op("Add", wide, n.const(1.0)))
    product = n.op("MatMul", gelu, n.op("Transpose", y, perm=[0, 2, 1]))
    normed = n.op("InstanceNormalization", x, n.const(n.normal(6)), n.const(n.normal(6)))
    power = n.op("Pow", n.op("Abs", x), n.const(1.7))
    n.output(n.op("Softmax", product), normed, n.op("Sqrt", power), n.op("LogSoftmax", x))


@case("few_bits", "8 DoReFa: weights of 2 and 3 bits, activations of 2 and 4, ternary", 0, 4)
def _(n: Net) -> None:
    def levels(x: str, count: int) -> str:
        made = n.op("Round", n.op("Mul", n.clip(x, 0, 1), n.const(float(count))))
        made = n.op("Div", made, n.const(float(count)))
        n.channels[made] = n.channels[x]
        return made

    x = n.input("x", [1, 33, 7, 6])
    y = n.conv(levels(x, 3), n.rng.integers(-1, 3, (40, 33, 3, 3)) * np.float32(0.05), pad=1)
    y = n.conv(levels(n.bn(y, 1), 15), n.rng.integers(-3, 4, (36, 40, 1, 1)) / np.float32(3))
    y = n.conv(levels(n.bn(y, 1), 15), n.rng.integers(-1, 2, (36, 1, 3, 3)) * np.float32(0.5),
               pad=1, group=36)  # fmt: skip
    flat = n.op("Flatten", levels(n.bn(y, 1), 3))
    n.output(n.op("MatMul", flat, n.const(n.rng.integers(-1, 2, (36 * 42, 11)))), y)


@case("quantized_ends", "5 QDQ: bytes at the first layer, bits after it", 1, None)
def _(n: Net) -> None:
    def rounded(x: str, scale: float, zero: int, kind: type) -> str:
        given = n.const(scale), n.const(zero, kind)
        return n.op("DequantizeLinear", n.op("QuantizeLinear", x, *given), *given)

    x = rounded(n.input("x", [1, 3, 8, 8]), 0.02, 128, np.uint8)
    w = n.const(n.rng.integers(-127, 128, (32, 3, 3, 3)), np.int8)
    w = n.op("DequantizeLinear", w, n.const(0.01), n.const(0, np.int8))
    y = n.op("Conv", x, w, pads=[1, 1, 1, 1])
    n.channels[y] = 32
    s = n.sign(n.bn(y, 1))
    n.channels[s] = 32
    z = n.bn(n.bconv(s, 16, strides=[2, 2], scale=0.03), 1)
    scale = n.const(0.05), n.const(3, np.int8)
    n.output(n.op("QuantizeLinear", z, *scale), rounded(z, 0.1, 0, np.int8))


@case("moved_bits", "0 concat, split, slice, transpose, shuffle of bits and of sums", 3, 0)
def _(n: Net) -> None:
    s = n.op("Sign", n.input("x", [1, 40, 6, 6]))
    first, second = n.split(s, [13, 27])
    turned = n.op("Transpose", n.concat(second, first), perm=[0, 1, 3, 2])
    n.channels[turned] = 40
    y = n.bconv(turned, 34)
    cut = n.slice(y, [1, 2], [33, 6], [1, 3])
    n.channels[cut] = 32
    t = n.sign(n.bn(cut, 9))
    parts = n.op("Reshape", t, n.ints([1, 4, 8, 6, 4]))
    mixed = n.op("Reshape", n.op("Transpose", parts, perm=[0, 2, 1, 3, 4]), n.ints([1, 32, 6, 4]))
    n.channels[mixed] = 32
    z = n.bconv(mixed, 32, 1)
    back = n.op("Slice", z, n.ints([-1]), n.ints([-100]), n.ints([1]), n.ints([-2]))
    n.channels[back] = 16
    n.output(n.bconv(n.sign(back), 5, 3), n.op("Concat", z, cut, axis=1))


@case("residuals_of_reactnet", "8 PReLU, shifted signs, shortcuts that shrink", 3, 0)
def _(n: Net) -> None:
    x = n.input("x", [1, 32, 8, 8])
    for units, stride in ((32, 1), (64, 2)):
        s = n.op("Sign", n.op("Add", x, n.const(n.normal((1, n.channels[x], 1, 1), 0.3))))
        y = n.bn(n.bconv(s, units, strides=[stride] * 2, scale=n.rng.uniform(0.01, 0.1, units)), 1)
        if stride > 1:
            pooled = n.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
            x = n.concat(pooled, pooled)
        y = n.op("Add", y, x)
        x = n.op("PRelu", y, n.const(n.rng.uniform(0.1, 0.4, (units, 1, 1))))
        n.channels[x] = units
    n.output(n.bconv(n.sign(x), 3, 1), x)


@case("attention_of_bits", "0 products of two activations, with softmax between", None, None)
def _(n: Net) -> None:
    x = n.input("x", [1, 9, 64])
    n.channels.clear()

    def heads() -> str:
        y = n.op("MatMul", n.op("Sign", x), n.const(n.signs((64, 64))))
        return n.op("Transpose", n.op("Reshape", y, n.ints([1, 9, 2, 32])), perm=[0, 2, 1, 3])

    q, k, v = heads(), heads(), heads()
    shifted = [n.op("Sign", n.op("Add", t, n.const(0.5))) for t in (q, k)]
    scores = n.op("MatMul", shifted[0], n.op("Transpose", shifted[1], perm=[0, 1, 3, 2]))
    weights = n.op("Softmax", n.op("Mul", scores, n.const(0.2)), axis=-1)
    n.output(n.op("MatMul", weights, v), scores)


@case("a_gate_over_time", "0 GRU and LSTM over bits", None, None)
def _(n: Net) -> None:
    x = n.input("x", [5, 1, 12])
    n.channels.clear()
    bits = n.op("MatMul", n.op("Sign", x), n.const(n.signs((12, 16))))
    scaled = n.op("Mul", bits, n.const(0.1))

    def weights(gates: int) -> tuple[str, str]:
        return n.const(n.normal((1, gates * 6, 16), 0.3)), n.const(n.normal((1, gates * 6, 6), 0.3))

    gru = n.op("GRU", scaled, *weights(3), n=2, hidden_size=6)
    n.output(*gru, *n.op("LSTM", scaled, *weights(4), n=3, hidden_size=6))


@case("whole_numbers", "0 division, remainder, shifts and casts of integers", 1, None)
def _(n: Net) -> None:
    x = n.input("x", [1, 40])
    n.channels.clear()
    y = n.op("MatMul", n.sign(x), n.const(n.signs((40, 24))))
    i = n.cast(y, TensorProto.INT32)
    seven = n.const(7, np.int32)
    j = n.op("Mod", i, seven)
    u = n.cast(n.op("Add", j, n.const(3, np.int32)), TensorProto.UINT32)
    n.output(n.op("Div", i, seven), j, n.op("Mod", i, n.const(5, np.int32), fmod=1),
             n.op("BitShift", u, n.const(2, np.uint32), direction="LEFT"),
             n.cast(i, TensorProto.INT8), n.cast(i, I64),
             n.op("ReduceMax", i, keepdims=0))  # fmt: skip


@case("arithmetic_of_all_types", "0 wide integers, doubles, small integers, halves", 0, None)
def _(n: Net) -> None:
    k, d = n.input("k", [3, 11], I64), n.input("d", [3, 11], F64)
    b, h = n.input("b", [3, 11], U8), n.input("h", [3, 11], F16)
    n.channels.clear()
    large = n.op("Mul", k, n.const(3_000_000_007, np.int64))
    positive = n.op("Add", n.op("Abs", d), n.const(0.5, np.float64))
    wide = n.op("Floor", n.op("Mul", d, n.const(1e10, np.float64)))
    small = n.op("Abs", h)
    n.output(
        n.op("Div", large, n.const(1_000_003, np.int64)),
        n.op("Mod", large, n.const(97, np.int64)),
        n.op("Max", large, k),
        n.op("Exp", d),
        n.op("Sqrt", positive),
        n.op("Div", d, positive),
        n.cast(large, F64),
        n.cast(wide, I64),
        n.op("Add", b, b),
        n.op("Div", b, n.const(7, np.uint8)),
        n.cast(b, F16),
        n.op("Sqrt", small),
        n.op("Div", h, n.op("Add", small, n.const(1, np.float16))),
        n.op("ReduceSum", k, keepdims=0),
        n.op("Greater", d, n.const(0.25, np.float64)),
    )


NAMES = tuple(one.name for one in CASES[_FIRST:])
"""The cases of this module."""
