"""Hand-written cases: structure, NHWC, constants and names, functions, float networks.

It is over 700 lines because it is a table, one entry per model.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.collection.builder import F32, Net, case
from tests.collection.cases_blocks import stem
from tests.collection.cases_signs import image

# ----------------------------------------------------------------------------- structure


@case(
    "residual_of_signs",
    "0.6 sign read by a conv and by a residual Add",
    2,
    0,
    domain="zeros",
)
def _(n: Net) -> None:
    s = n.op("Sign", image(n, 16))
    y = n.op("Add", n.bn(n.bconv(s, 16)), s)
    n.output(n.bconv(n.op("Sign", y), 9))


@case("sign_is_output", "0.6 sign is also a graph output", 1, 0, domain="zeros")
def _(n: Net) -> None:
    s = n.op("Sign", image(n))
    n.output(n.bconv(s, 9), s)


@case("sign_is_only_output", "0.6 network that ends in bits", 1, 0, domain="zeros")
def _(n: Net) -> None:
    n.output(n.sign(n.bn(n.bconv(n.sign(image(n), "where_ge"), 33)), "where_gt"))


@case("bool_output", "0.6 network that ends in a comparison", 1, 0, domain="zeros")
def _(n: Net):
    n.output(n.op("Greater", n.bn(n.bconv(n.sign(image(n), "where_ge"), 33)), n.const(0.0)))
    return n.model()


@case("sign_read_by_float_conv", "0.6 sign read by a binary and a float convolution", 1, 1)
def _(n: Net) -> None:
    s = n.op("Sign", image(n))
    n.output(n.op("Add", n.bconv(s, 9), n.fconv(s, 9)))


@case("accumulator_read_twice", "0.6 accumulator read by sign and by a float branch", 2, 0)
def _(n: Net) -> None:
    a = n.bconv(n.sign(image(n), "where_ge"), 33)
    b = n.bn(a, 9)
    n.output(n.bconv(n.op("Sign", b), 33), n.op("Relu", a), b)


@case("shared_sign", "0 one sign, three convolutions", 3, 0)
def _(n: Net) -> None:
    s = n.op("Sign", image(n, 20))
    n.output(n.concat(n.bconv(s, 8, 1), n.bconv(s, 9, 3), n.bconv(s, 10, 5)))


@case("two_signs_of_one_tensor", "1 one tensor under two spellings of sign", 2, 0, domain="zeros")
def _(n: Net) -> None:
    x = image(n)
    n.output(n.op("Add", n.bconv(n.op("Sign", x), 9), n.bconv(n.sign(x, "where_ge"), 9)))


@case("concat_of_signs", "0 Concat of packed tensors, ragged channels", 3, 0)
def _(n: Net) -> None:
    s = n.sign(image(n, 20), "where_ge")
    a, b = (n.op("Sign", n.bn(n.bconv(s, c), 6)) for c in (13, 40))
    n.output(n.bconv(n.concat(a, b, s), 9))


@case("concat_scales_differ", "0.1 Concat of signs with different scales is not binary", 0, 1)
def _(n: Net) -> None:
    x = image(n)
    a, b = n.op("Mul", n.op("Sign", x), n.const(0.5)), n.op("Sign", n.op("Neg", x))
    n.output(n.bconv(n.concat(a, b), 9))


@case("concat_sign_and_real", "0.1 Concat of a sign and a real tensor is not binary", 0, 1)
def _(n: Net) -> None:
    x = image(n)
    n.output(n.bconv(n.concat(x, n.op("Sign", x)), 9))


@case("concat_spatial", "0 Concat along height", 1, 0)
def _(n: Net) -> None:
    x = image(n)
    n.output(n.bconv(n.concat(n.op("Sign", x), n.op("Sign", n.op("Neg", x)), axis=2), 9))


@case("split_of_signs", "0 Split of a packed tensor off word borders", 3, 0)
def _(n: Net) -> None:
    s = n.op("Sign", n.bn(n.bconv(n.sign(image(n), "where_ge"), 50), 6))
    a, b = n.split(s, [17, 33])
    n.output(n.bconv(a, 9), n.bconv(b, 9))


@case("split_old", "0 Split by attribute at opset 11, no sizes", 2, 0, opset=11)
def _(n: Net) -> None:
    a, b = n.op("Split", n.op("Sign", image(n, 24)), n=2, axis=1)
    n.channels[a] = n.channels[b] = 12
    n.output(n.op("Add", n.bconv(a, 9), n.bconv(b, 9)))


@case("split_num_outputs", "0 Split by num_outputs at opset 18, uneven", 2, 0, opset=18)
def _(n: Net) -> None:
    a, b = n.op("Split", n.op("Sign", image(n, 25)), n=2, axis=1, num_outputs=2)
    n.channels[a], n.channels[b] = 13, 12
    n.output(n.op("Add", n.bconv(a, 9), n.bconv(b, 9)))


def _slice(opset: int) -> None:
    @case(f"slice_of_signs_opset{opset}", "0 Slice of channels and of the image", 2, 0, opset=opset)
    def _(n: Net) -> None:
        s = n.op("Sign", n.bn(n.bconv(n.sign(image(n), "where_ge"), 50), 6))
        t = n.slice(s, [5, 1], [-4, 6], [1, 3])
        n.channels[t] = 41
        n.output(n.bconv(t, 9))


for _opset in (9, 10, 13):
    _slice(_opset)


@case("slice_with_steps", "0 Slice with steps 2 and -1 (torch x[:, :, ::2])", 1, 0)
def _(n: Net) -> None:
    s = n.op(
        "Slice",
        n.op("Sign", image(n)),
        n.ints([0, -1]),
        n.ints([6, -100]),
        n.ints([2, 3]),
        n.ints([2, -1]),
    )
    n.output(n.bconv(s, 9))


@case("slice_to_the_end", "4 torch x[:, -8:]: the end is the largest int64", 3, 0)
def _(n: Net) -> None:
    s = n.op("Sign", image(n, 20))
    last, first = n.slice(s, [-8], [2**63 - 1], [1]), n.slice(s, [-(2**62)], [-8], [1])
    n.channels[last], n.channels[first] = 8, 12
    x = n.bn(n.concat(first, n.op("Add", n.bconv(last, 8), last)))
    tail = n.slice(x, [-7], [2**31 - 1], [1])
    n.channels[tail] = 7
    n.output(n.bconv(n.op("Sign", x), 9), n.bconv(n.op("Sign", tail), 9))


@case("gather_channels", "0.1 Gather of channels", 1, 0)
def _(n: Net) -> None:
    s = n.op("Gather", n.op("Sign", image(n)), n.ints([3, 3, 0, 12, 7]), axis=1)
    n.channels[s] = 5
    n.output(n.bconv(s, 9))


@case("depth_to_space", "0.1 DepthToSpace and SpaceToDepth of signs", 2, 0)
def _(n: Net) -> None:
    s = n.op("SpaceToDepth", n.op("Sign", image(n, 8)), blocksize=2)
    n.channels[s] = 32
    t = n.op("DepthToSpace", n.op("Sign", n.bn(n.bconv(s, 36), 6)), blocksize=2)
    n.channels[t] = 9
    n.output(n.bconv(t, 5))


@case("upsampled_signs", "0.1 nearest Resize of signs", None, None, opset=13)
def _(n: Net) -> None:
    s = n.op(
        "Resize", n.op("Sign", image(n)), "", n.const([1, 1, 2, 2]), mode="nearest",
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    n.output(n.bconv(s, 9))


@case("scale_between", "0 scale after sign factors out through pool and pad", 1, 0)
def _(n: Net) -> None:
    s = n.op("Mul", n.op("Sign", image(n)), n.const(0.125))
    n.output(n.bconv(n.op("MaxPool", s, kernel_shape=[2, 2]), 9))


@case("negative_scale", "0 negative scale after sign, then MaxPool", 1, 0)
def _(n: Net) -> None:
    s = n.op("Mul", n.op("Sign", image(n)), n.const(-0.3))
    n.output(n.bconv(n.op("MaxPool", s, kernel_shape=[2, 2]), 9))


@case("long_residual_chain", "8 ten residual blocks", 10, 2)
def _(n: Net) -> None:
    x = stem(n, 32, 5)
    for _ in range(10):
        x = n.op("Add", n.bn(n.bconv(n.op("Sign", x), 32), 6), x)
    n.output(n.head(x))


@case("deep_packed_chain", "8 twelve layers with bits between", 12, 0, domain="zeros")
def _(n: Net) -> None:
    x = n.sign(image(n, 32, 5), "where_ge")
    for _ in range(11):
        x = n.sign(n.bn(n.bconv(x, 32), 9), "where_ge")
    n.output(n.bconv(x, 9))


@case("two_inputs", "0 two inputs, two outputs", 2, 1)
def _(n: Net) -> None:
    a, b = n.input("image:0", [1, 13, 6, 6]), n.input("state", [1, 9])
    y = n.bn(n.bconv(n.op("Sign", a), 9))
    pooled = n.op("Flatten", n.op("GlobalAveragePool", y))
    z = n.op("Gemm", n.op("Sign", n.op("Add", pooled, b)), n.const(n.signs((33, 9))), transB=1)
    n.output(n.head(y), z)


@case("input_read_twice", "0 input binarized and kept", 1, 1)
def _(n: Net) -> None:
    x = image(n)
    n.output(n.op("Add", n.bconv(n.op("Sign", x), 9), n.fconv(x, 9, 1)))


@case("input_is_output", "a graph output that is an input behind an Identity", 1, 0)
def _(n: Net) -> None:
    x = image(n)
    n.output(n.bconv(n.op("Sign", x), 9), n.op("Identity", x))


@case("constant_output", "an output that depends on no input", 1, 0)
def _(n: Net) -> None:
    n.output(n.bconv(n.op("Sign", image(n)), 9), n.op("Sign", n.const(n.normal(5))))


@case("dead_nodes", "4 nodes nobody reads", 1, 0)
def _(n: Net) -> None:
    x = image(n)
    s = n.op("Sign", x)
    n.op("Where", n.op("Greater", x, n.const(0.0)), n.const(1.0), n.const(-1.0))
    n.op("Relu", s)
    n.output(n.bconv(s, 9))


@case("dynamic_batch", "0 dynamic batch through every layer", 3, 2, batches=(1, 3, 4))
def _(n: Net) -> None:
    x = stem(n, 33, batch="batch_size")
    x = n.op("Add", n.bn(n.bconv(n.op("Sign", x), 33)), x)
    x = n.op("MaxPool", n.op("Sign", n.bn(x, 2)), kernel_shape=[2, 2], strides=[2, 2])
    x = n.op("Sign", n.bn(n.bconv(x, 40), 6))
    n.output(n.head(n.bconv(x, 20, 1)))


@case("static_batch", "0 a batch of three", 2, 1)
def _(n: Net) -> None:
    x = n.sign(image(n, 13, 6, 3), "where_ge")
    n.output(n.head(n.bconv(n.op("Sign", n.bn(n.bconv(x, 33))), 9)))


@case(
    "flatten_dynamic_gemm",
    "0.2 Shape, Slice, Concat reshape chain, dynamic batch",
    1,
    1,
    batches=(1, 3),
)
def _(n: Net) -> None:
    x = n.bconv(n.op("Sign", image(n, 13, 3, "N")), 20)
    first = n.slice(n.op("Shape", x), [0], [1], [0])
    n.channels.pop(first, None)
    x = n.op("Reshape", x, n.op("Concat", first, n.ints([180]), axis=0))
    n.output(n.op("Gemm", x, n.const(n.normal((10, 180))), n.const(n.normal(10)), transB=1))


@case("zero_copy_reshape", "0.2 Reshape with 0 and -1", 1, 1, batches=(1, 3))
def _(n: Net) -> None:
    x = n.bconv(n.op("Sign", image(n, 13, 3, "N")), 20)
    x = n.op("Reshape", x, n.ints([0, -1]))
    n.output(n.op("MatMul", x, n.const(n.normal((180, 10)))))


# ----------------------------------------------------------------------------- NHWC (section 6)

TO_NCHW, TO_NHWC = [0, 3, 1, 2], [0, 2, 3, 1]


def _nhwc_conv(n: Net, x: str, weight: np.ndarray, bias: np.ndarray | None = None, **attrs) -> str:
    """Append Transpose, Conv, Transpose as tf2onnx does."""
    y = n.op("Transpose", x, perm=TO_NCHW)
    y = n.conv(y, weight, bias, **attrs)
    return n.op("Transpose", y, perm=TO_NHWC)


def _larq(n: Net, x: str) -> str:
    return n.sign(x, "larq")


def _nhwc_affine(n: Net, x: str, channels: int) -> str:
    y = n.op("Mul", x, n.const(n.normal(channels)))
    return n.op("Add", y, n.const(n.normal(channels, 3)))


@case("nhwc_two_convs", "6 Transpose in and out of each conv", 2, 1, batches=(1, 3))
def _(n: Net) -> None:
    x = n.input("input_1:0", ["N", 7, 7, 3])
    x = _nhwc_conv(n, x, n.normal((32, 3, 3, 3), 0.3), n.normal(32), pad=1)
    for i in range(2):
        x = _nhwc_conv(
            n,
            _larq(n, x),
            n.signs((32, 32, 3, 3)) * n.normal((32, 1, 1, 1), 0.1),
            n.normal(32),
            pad=(0, 0, 1, 1),
            strides=[2, 2] if i else None,
        )
    n.output(x)


@case("nhwc_pad_before_transpose", "2,6 Pad(+1) in NHWC", 2, 0, domain="zeros")
def _(n: Net) -> None:
    x = n.input("x", [1, 7, 7, 13])
    for wide, units in ((13, 33), (33, 8)):
        s = n.pad(_larq(n, x), [0, 1, 1, 0, 0, 1, 1, 0], 1.0)
        x = _nhwc_affine(n, _nhwc_conv(n, s, n.signs((units, wide, 3, 3))), units)
    n.output(x)


@case("nhwc_dense_hwc_order", "6 Reshape of an NHWC tensor before a binary Dense", 2, 1)
def _(n: Net) -> None:
    x = n.input("x", [1, 6, 6, 13])
    x = _larq(
        n,
        _nhwc_affine(
            n,
            _nhwc_conv(n, _larq(n, x), n.signs((33, 13, 3, 3)), strides=[2, 2], pad=(0, 0, 1, 1)),
            33,
        ),
    )
    x = n.op("Reshape", x, n.ints([-1, 297]))
    x = n.op("MatMul", x, n.const(n.signs((297, 20))))
    n.output(
        n.op(
            "Add",
            n.op("MatMul", _nhwc_affine(n, x, 20), n.const(n.normal((20, 10)))),
            n.const(n.normal(10)),
        )
    )


@case("nhwc_pushed_transposes", "6 Transposes pushed through BN, Relu, Min, Max", 2, 0)
def _(n: Net) -> None:
    x = n.input("x", [1, 6, 6, 13])
    x = n.op("Transpose", _larq(n, x), perm=TO_NCHW)
    n.channels[x] = 13
    x = n.bn(n.bconv(x, 33), 9)
    x = n.op("Relu", x)
    x = n.op("Max", n.op("Min", x, n.const(2.0)), n.const(0.5))
    x = n.op("Sub", n.op("Transpose", x, perm=TO_NHWC), n.const(1.0))
    n.output(_nhwc_conv(n, _larq(n, x), n.signs((8, 33, 3, 3)), pad=1))


@case(
    "nhwc_dorefa_round",
    "6 DoReFa activations by tf2onnx: Min, Max, Mul, Round, Mul with Transposes",
    0,
    2,
)
def _(n: Net) -> None:
    x = n.input("x", [1, 6, 6, 13])
    for wide, units in ((13, 33), (33, 8)):
        y = n.op("Max", n.op("Min", x, n.const(1.0)), n.const(0.0))
        y = n.op("Transpose", n.op("Mul", y, n.const(3.0)), perm=TO_NCHW)
        y = n.op("Mul", n.op("Round", y), n.const(np.float32(1 / 3)))
        x = n.op(
            "Transpose",
            n.conv(y, n.signs((units, wide, 3, 3)) * 0.1, n.normal(units), pad=1),
            perm=TO_NHWC,
        )
    n.output(x)


@case("nhwc_maxpool", "6 pool between conv and BN keeps BN", 2, 0)
def _(n: Net) -> None:
    x = n.input("x", [1, 8, 8, 13])
    y = n.op("Transpose", _larq(n, x), perm=TO_NCHW)
    n.channels[y] = 13
    y = n.op("MaxPool", n.bconv(y, 33), kernel_shape=[2, 2], strides=[2, 2])
    y = n.op("Transpose", n.bn(y, 9), perm=TO_NHWC)
    n.output(_nhwc_conv(n, _larq(n, y), n.signs((8, 33, 3, 3)), pad=1))


@case("nhwc_residual_concat", "6 Add and Concat(axis 3) in NHWC", 3, 0)
def _(n: Net) -> None:
    x = n.input("x", [1, 6, 6, 20])
    y = n.op(
        "Add", _nhwc_affine(n, _nhwc_conv(n, _larq(n, x), n.signs((20, 20, 3, 3)), pad=1), 20), x
    )
    z = _nhwc_affine(n, _nhwc_conv(n, _larq(n, y), n.signs((13, 20, 3, 3)), pad=1), 13)
    y = n.op("Concat", y, z, axis=3)
    n.output(_nhwc_conv(n, _larq(n, y), n.signs((8, 33, 1, 1))))


@case("nhwc_depthwise", "6 depthwise as group C", 2, 0)
def _(n: Net) -> None:
    x = n.input("x", [1, 6, 6, 33])
    x = _nhwc_affine(n, _nhwc_conv(n, _larq(n, x), n.signs((33, 1, 3, 3)), pad=1, group=33), 33)
    n.output(_nhwc_conv(n, _larq(n, x), n.signs((8, 33, 1, 1))))


@case("nhwc_global_pool_dense", "6 ReduceMean over H, W in NHWC", 1, 1)
def _(n: Net) -> None:
    x = n.input("x", [1, 6, 6, 20])
    x = _larq(n, _nhwc_affine(n, _nhwc_conv(n, _larq(n, x), n.signs((33, 20, 3, 3)), pad=1), 33))
    x = n.reduce_mean(x, [1, 2], keep=0)
    n.output(n.op("MatMul", x, n.const(n.normal((33, 10)))))


@case("nhwc_heaviside", "6 ste_heaviside", 2, 0)
def _(n: Net) -> None:
    x = n.input("x", [1, 6, 6, 13])
    for wide, units in ((13, 33), (33, 8)):
        s = n.op("Sign", n.op("Relu", x))
        x = _nhwc_affine(n, _nhwc_conv(n, s, n.signs((units, wide, 3, 3)), pad=1), units)
    n.output(x)


@case("transposed_input_only", "6 NHWC input, NCHW network", 2, 0)
def _(n: Net) -> None:
    x = n.op("Transpose", n.input("x", [1, 6, 7, 13]), perm=TO_NCHW)
    n.channels[x] = 13
    n.output(n.bconv(n.op("Sign", n.bn(n.bconv(n.op("Sign", x), 33))), 9))


@case("odd_transpose", "0.1 Transpose of H and W between binary layers", 2, 0)
def _(n: Net) -> None:
    x = n.op("Sign", n.bn(n.bconv(n.op("Sign", image(n)), 33)))
    n.output(n.bconv(n.op("Transpose", x, perm=[0, 1, 3, 2]), 9, (1, 3), pad=(0, 1, 0, 1)))


# ---------------------------------------------------------------------- constants, names, functions


def _small(n: Net) -> None:
    """Append stem, residual block and head."""
    x = stem(n, 16, 6)
    x = n.op("Add", n.bn(n.bconv(n.pad_hw(n.op("Sign", x), 1, -1.0), 16, pad=0)), x)
    n.output(n.head(x))


@case("constants_as_nodes", "4 every constant is a Constant node", 1, 2, constants="node")
def _(n: Net) -> None:
    _small(n)


@case(
    "constants_as_nodes_opset9",
    "4 every constant is a Constant node, attributes",
    1,
    2,
    constants="node",
    opset=9,
)
def _(n: Net) -> None:
    _small(n)


@case(
    "initializers_as_inputs",
    "IR 3: initializers are also inputs",
    1,
    2,
    constants="input",
    opset=9,
)
def _(n: Net) -> None:
    _small(n)


@case(
    "initializers_as_inputs_new_ir",
    "IR 8: initializers are also inputs (overridable defaults)",
    1,
    2,
    constants="input",
    opset=13,
)
def _(n: Net):
    _small(n)
    return n.model(ir=8)


@case("constant_forms", "Constant by value_float, value_floats, value_ints", 1, 0, domain="zeros")
def _(n: Net) -> None:
    x = image(n)
    s = n.op(
        "Where",
        n.op("Greater", x, n.op("Constant", value_float=0.0)),
        n.op("Constant", value_floats=[1.0]),
        n.op("Constant", value_float=-1.0),
    )
    p = n.op(
        "Pad",
        s,
        n.op("Constant", value_ints=[0, 0, 1, 1, 0, 0, 1, 1]),
        n.op("Constant", value_float=-1.0),
    )
    n.channels[p] = 13
    n.output(n.bconv(p, 9, pad=0))


def _renamed(name: str, rename) -> None:
    @case(f"names_{name}", "6 odd names", 1, 2)
    def _(n: Net):
        _small(n)
        model = n.model()
        for i, node in enumerate(model.graph.node):
            node.name = rename(i)
        return model


_renamed("empty", lambda i: "")
_renamed("equal", lambda i: "node")
_renamed("slashes", lambda i: f"/model/layer.{i}/Conv:0")
_renamed("unicode", lambda i: f"слой {i} % {{}} \"'\n\\")


@case("names_of_tensors", "6 tensors named with slashes, colons, spaces, digits", 1, 2)
def _(n: Net):
    _small(n)
    model = n.model()
    table = {o: f"/net/{i}:0 {o}" for i, node in enumerate(model.graph.node) for o in node.output}
    table |= {t.name: f"{i}" for i, t in enumerate(model.graph.initializer)}
    table["x"] = "x:0"
    for node in model.graph.node:
        node.input[:] = [table.get(i, i) for i in node.input]
        node.output[:] = [table[o] for o in node.output]
    for holder in (
        *model.graph.initializer,
        *model.graph.input,
        *model.graph.output,
        *model.graph.value_info,
    ):
        holder.name = table.get(holder.name, holder.name)
    return model


@case("names_clash_after_cleaning", "6 names that differ in punctuation only", 2, 0)
def _(n: Net):
    n.output(n.bconv(n.op("Sign", n.bn(n.bconv(n.op("Sign", image(n)), 20))), 9))
    model = n.model()
    for i, node in enumerate(model.graph.node):
        old, new = node.output[0], "a" + "./:-_"[i]
        for other in model.graph.node:
            other.input[:] = [new if v == old else v for v in other.input]
        node.output[0] = new
    model.graph.output[0].name = model.graph.node[-1].output[0]
    return model


def _function_model(n: Net, nested: bool) -> onnx.ModelProto:
    """Wrap sign+conv in a local function with an attribute, as torch modules are exported."""
    n.domains["local"] = 1
    body = [
        helper.make_node("Sign", ["x"], ["s"]),
        helper.make_node("Conv", ["s", "w"], ["y"]),
    ]
    pads = body[1].attribute.add()
    pads.name, pads.ref_attr_name, pads.type = "pads", "amount", onnx.AttributeProto.INTS
    opsets = [helper.make_opsetid("", n.opset)]
    n.functions.append(
        helper.make_function("local", "BinConv", ["x", "w"], ["y"], body, opsets, ["amount"])
    )
    if nested:
        block = [
            helper.make_node("BinConv", ["x", "w"], ["c"], domain="local", amount=[1, 1, 1, 1]),
            helper.make_node("Add", ["c", "x"], ["y"]),
        ]
        both = [*opsets, helper.make_opsetid("local", 1)]
        n.functions.append(helper.make_function("local", "Block", ["x", "w"], ["y"], block, both))
    x = image(n)
    for _ in range(2):
        w = n.const(n.signs((13, 13, 3, 3)))
        if nested:
            x = n.op("Block", x, w, domain="local")
        else:
            x = n.op("BinConv", x, w, domain="local", amount=[1, 1, 1, 1])
        x = n.bn(x, channels=13)
    n.output(x)
    return n.model()


@case("function", "local function with an attribute reference", 2, 0)
def _(n: Net):
    return _function_model(n, False)


@case("function_nested", "local function calling a local function", 2, 0)
def _(n: Net):
    return _function_model(n, True)


@case("value_info_lies_absent", "no value_info, outputs without shape", 1, 2)
def _(n: Net):
    _small(n)
    model = n.model()
    del model.graph.value_info[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@case("extra_opset_imports", "6 ai.onnx.ml and an unused private domain in opset_import", 1, 2)
def _(n: Net):
    _small(n)
    model = n.model()
    model.opset_import.insert(0, helper.make_opsetid("ai.onnx.ml", 2))
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    return model


@case("metadata", "doc strings and metadata of some length", 1, 2)
def _(n: Net):
    _small(n)
    model = n.model()
    model.doc_string = model.graph.doc_string = "text " * 1000
    helper.set_model_props(model, {"author": "nobody", "stack": 'File "a.py", line 1'})
    for node in model.graph.node:
        node.doc_string = "a\nb"
    return model


@case("float_data_fields", "tensors in float_data instead of raw_data", 1, 2)
def _(n: Net):
    _small(n)
    for i, t in enumerate(n.initializers):
        array = numpy_helper.to_array(t)
        n.initializers[i] = helper.make_tensor(t.name, t.data_type, array.shape, array.ravel())
    return n.model()


@case("dim_params_everywhere", "symbolic batch named like a tensor", 1, 0, batches=(1, 2))
def _(n: Net) -> None:
    x = n.input("x", ["x", 13, 6, 6])
    n.output(n.bconv(n.op("Sign", x), 9))


# ----------------------------------------------------------------------------- float networks


@case("float_resnet", "0 nothing binary: residual network", 0, 4, batches=(1, 3))
def _(n: Net) -> None:
    x = n.op("Relu", stem(n, 16, batch="N"))
    for _ in range(2):
        x = n.op("Relu", n.op("Add", n.bn(n.fconv(x, 16)), x))
    n.output(n.op("Softmax", n.head(x), axis=1))


@case("float_many_ops", "0 nothing binary: many kinds of operator", 0, 2)
def _(n: Net) -> None:
    x = n.fconv(image(n, 3, 8), 16, 5, strides=[2, 2])
    for kind in (
        "Sigmoid",
        "Tanh",
        "Relu",
        "LeakyRelu",
        "Elu",
        "HardSigmoid",
        "Softplus",
        "Exp",
        "Neg",
        "Abs",
    ):
        x = n.op(kind, x)
    x = n.op("Sqrt", n.op("Add", n.op("Pow", x, n.const(2.0)), n.const(1.0)))
    x = n.op("Max", n.op("Min", x, n.const(3.0)), n.op("Erf", x))
    x = n.op("Concat", x, n.op("Floor", x), n.op("Ceil", x), axis=1)
    n.channels[x] = 48
    x = n.op("Div", x, n.op("Add", n.op("ReduceMax", x, axes=[1]), n.const(1.0)))
    x = n.op("LRN", x, size=3)
    n.output(n.head(x))


@case("float_conv_transpose", "0 ConvTranspose and Resize around a binary conv", 1, 1)
def _(n: Net) -> None:
    x = n.bconv(n.op("Sign", image(n)), 12)
    n.output(n.op("ConvTranspose", x, n.const(n.normal((12, 5, 2, 2))), strides=[2, 2]))


@case("float_attention", "0 float MatMuls of activations, Softmax", 1, 4)
def _(n: Net) -> None:
    x = n.input("x", [1, 6, 16])
    q, k = (n.op("MatMul", x, n.const(n.normal((16, 16), 0.3))) for _ in range(2))
    v = n.op("MatMul", n.op("Sign", x), n.const(n.signs((16, 16))))
    scores = n.op("Softmax", n.op("MatMul", q, n.op("Transpose", k, perm=[0, 2, 1])), axis=-1)
    n.output(n.op("MatMul", scores, v))


@case("float_no_convolution", "0 no Conv, Gemm or MatMul at all", 0, 0)
def _(n: Net) -> None:
    x = image(n)
    n.output(n.op("Relu", n.op("Add", x, n.op("Sign", x))))


@case("float_mnist_mlp", "0 nothing binary: MLP", 0, 2, batches=(1, 3))
def _(n: Net) -> None:
    x = n.op("Flatten", n.input("x", ["N", 1, 7, 7]))
    x = n.op("Relu", n.op("Gemm", x, n.const(n.normal((32, 49))), n.const(n.normal(32)), transB=1))
    n.output(
        n.op(
            "LogSoftmax",
            n.op("Gemm", x, n.const(n.normal((10, 32))), n.const(n.normal(10)), transB=1),
            axis=1,
        )
    )


@case("sign_without_conv", "0 signs that feed no convolution", 0, 1)
def _(n: Net) -> None:
    x = image(n)
    n.output(n.op("Mul", n.op("Sign", x), n.op("Sigmoid", n.fconv(x, 13))))


@case("ternary_activations", "1 activations {-1,0,1} by two comparisons around a band", None, None)
def _(n: Net) -> None:
    x = image(n)
    s = n.op(
        "Sub", n.cast(n.op("Greater", x, n.const(0.5))), n.cast(n.op("Less", x, n.const(-0.5)))
    )
    n.output(n.bconv(s, 9))


@case("uint8_image", "0 uint8 input, Cast, scale, stem", 1, 2)
def _(n: Net) -> None:
    x = n.input("x", [1, 3, 8, 8], TensorProto.UINT8)
    x = n.op(
        "Div", n.op("Sub", n.cast(x, F32), n.const(n.normal((1, 3, 1, 1), 20) + 120)), n.const(60.0)
    )
    n.channels[x] = 3
    x = n.bn(n.fconv(x, 20))
    n.output(n.head(n.bconv(n.op("Sign", x), 33)))


@case("deep_chain_3000", "9 three thousand nodes in a row: valid, must not recurse", 1, 0)
def _(n: Net):
    x = n.bconv(n.op("Sign", image(n)), 9)
    for i in range(3000):
        x = n.op("Relu" if i % 2 else "Neg", x)
    n.output(x)
    return n.model()


@case("many_layers_small", "9 sixty binary convolutions", 60, 0)
def _(n: Net) -> None:
    x = n.sign(image(n, 8, 5), "where_ge")
    for _ in range(59):
        x = n.sign(n.bn(n.bconv(x, 8), 4), "where_ge")
    n.output(n.bconv(x, 9))
