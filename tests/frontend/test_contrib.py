"""Operators of ONNX Runtime's own domain, against ONNX Runtime."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from bnncc.errors import ModelError, UnsupportedOp
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from tests.physical_networks import passed

F32, I64 = TensorProto.FLOAT, TensorProto.INT64
Array = np.ndarray[Any, Any]


def model(
    node: onnx.NodeProto, feeds: dict[str, Array], constants: dict[str, Array]
) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
        )
        for name, value in feeds.items()
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.INT32 if name == "mask" else F32, None)
        for name in node.output
        if name
    ]
    held = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph([node], "contrib", inputs, outputs, held)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def agrees(node: onnx.NodeProto, feeds: dict[str, Array], **constants: Array) -> None:
    """Compare our graph with what ONNX Runtime computes, output by output."""
    made = model(node, feeds, constants)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    graph = load(made)
    found = evaluate(graph, feeds)
    for info, wanted in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        np.testing.assert_allclose(found[info.name], wanted, rtol=2e-5, atol=2e-6)
        assert graph.types[info.name].shape == wanted.shape


def numbers(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("attrs", [{}, {"axis": -1, "epsilon": 0.25, "stash_type": 1}])
def test_simplified_layer_normalization(attrs: dict[str, Any]) -> None:
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"], **attrs)
    feeds, scale = {"x": numbers(2, 3, 20)}, numbers(20)
    agrees(node, feeds, g=scale)
    node.domain = "com.microsoft"  # where ONNX Runtime lacks it, but converters write it
    (y,) = evaluate(load(model(node, feeds, {"g": scale})), feeds).values()
    root = np.sqrt((feeds["x"] ** 2).mean(-1, keepdims=True) + attrs.get("epsilon", 1e-5))
    np.testing.assert_allclose(y, feeds["x"] / root * scale, rtol=2e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [["y"], ["y", "", "", "sum"]])
@pytest.mark.parametrize("epsilon", [{}, {"epsilon": 0.25}])
def test_norms_of_residuals(bias: bool, outputs: list[str], epsilon: dict[str, float]) -> None:
    feeds = {"x": numbers(2, 3, 24), "s": numbers(2, 3, 24)[::-1].copy()}
    constants = {"g": numbers(24), "b": numbers(24) + 1, "c": numbers(24) - 1}
    node = helper.make_node(
        "SkipSimplifiedLayerNormalization", ["x", "s", "g", *["c"] * bias], outputs,
        domain="com.microsoft", **epsilon,
    )  # fmt: skip
    agrees(node, feeds, g=constants["g"], c=constants["c"])
    node = helper.make_node(
        "SkipLayerNormalization", ["x", "s", "g", "b", *["c"] * bias], outputs,
        domain="com.microsoft", **epsilon,
    )  # fmt: skip
    agrees(node, feeds, **constants)


@pytest.mark.parametrize("shape", [(2, 5, 48), (2, 3, 5, 16)])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("places", ["first", "each"])
def test_rotary_embedding(shape: tuple[int, ...], interleaved: int, places: str) -> None:
    angles = numbers(40, 8)
    at = np.array([7]) if places == "first" else np.array([[3, 4, 5, 6, 7], [0, 9, 9, 39, 1]])
    node = helper.make_node(
        "RotaryEmbedding", ["x", "p", "cos", "sin"], ["y"], domain="com.microsoft",
        interleaved=interleaved,
    )  # fmt: skip
    feeds = {"x": numbers(*shape), "p": at}
    agrees(node, feeds, cos=np.cos(angles), sin=np.sin(angles))
    if places == "each":  # any number of tokens
        made = model(node, feeds, {"cos": np.cos(angles), "sin": np.sin(angles)})
        load(made, input_shapes={"x": (2, *shape[1:-2], "t", shape[-1]), "p": (2, "t")})


def test_part_of_each_head_is_rotated() -> None:
    angles = numbers(40, 4)
    node = helper.make_node(
        "RotaryEmbedding", ["x", "p", "cos", "sin"], ["y"], domain="com.microsoft",
        num_heads=3, rotary_embedding_dim=8,
    )  # fmt: skip
    feeds = {"x": numbers(1, 5, 48), "p": np.array([2])}
    agrees(node, feeds, cos=np.cos(angles), sin=np.sin(angles))


@pytest.mark.parametrize(
    ("op", "bias", "attrs"),
    [("Gelu", 0, {}), ("BiasGelu", 1, {}), ("FastGelu", 0, {}), ("FastGelu", 1, {}),
     ("QuickGelu", 0, {}), ("QuickGelu", 0, {"alpha": 0.5})],
)  # fmt: skip
def test_gelu(op: str, bias: int, attrs: dict[str, float]) -> None:
    node = helper.make_node(op, ["x", *["b"] * bias], ["y"], domain="com.microsoft", **attrs)
    agrees(node, {"x": 2 * numbers(2, 3, 24)}, b=numbers(24))


def test_what_is_not_supported() -> None:
    feeds, constants = {"x": numbers(2, 8), "s": numbers(2, 8)}, {"g": numbers(8)}
    node = helper.make_node(
        "SkipSimplifiedLayerNormalization", ["x", "s", "g"], ["y", "", "inverse"],
        domain="com.microsoft",
    )  # fmt: skip
    with pytest.raises(UnsupportedOp, match=r"its output 2 \(`inverse`\) is for training"):
        load(model(node, feeds, constants))
    node.output[:] = ["y"]
    node.input[:] = ["x", "", "g"]
    with pytest.raises(ModelError, match="has 2 inputs, expected 3 or 4"):
        load(model(node, feeds, constants))


Feeds = dict[str, Array]
SEQUENCE = {"q": numbers(2, 5, 24), "k": numbers(2, 7, 24) + 1, "v": numbers(2, 7, 36)}
ALIKE = {"v": numbers(2, 7, 24) - 1}
CACHE = {**ALIKE, "pk": numbers(2, 3, 4, 8), "pv": numbers(2, 3, 4, 8)[::-1].copy()}
APART = {"k": numbers(2, 3, 7, 8), "v": numbers(2, 3, 7, 8)[::-1].copy()}
KEPT = np.array([[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1, 1]], np.int32)


@pytest.mark.parametrize(
    ("names", "extra", "attrs"),
    [
        ("q k v", {}, {}),
        ("q k v", {}, {"scale": 0.25}),
        ("q k v b", {"b": numbers(84)}, {}),
        ("q k v '' m", {"m": KEPT}, {}),
        ("q k v '' m a", {"m": KEPT, "a": numbers(1, 3, 5, 7)}, {"mask_filter_value": -3.0}),
        ("q k v '' '' a", {"a": numbers(2, 1, 5, 7)}, {}),
        ("q k v '' '' '' pk pv", CACHE, {}),
        ("q k v '' '' a pk pv", {**CACHE, "a": numbers(1, 3, 5, 11)}, {}),
        ("q k v '' m", {**APART, "m": KEPT}, {}),
        ("q q q", {}, {"unidirectional": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_multi_head_attention(names: str, extra: Feeds, attrs: dict[str, Any]) -> None:
    inputs = [name.strip("'") for name in names.split()]
    given = {**SEQUENCE, **extra}
    node = multi_head(inputs, ["y", *["nk", "nv"] * ("pk" in inputs)], **attrs)
    agrees(node, {name: given[name] for name in inputs if name})


def multi_head(inputs: list[str], outputs: list[str], **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(
        "MultiHeadAttention", inputs, outputs, domain="com.microsoft", num_heads=3, **attrs
    )


@pytest.mark.parametrize("bias", [False, True])
def test_packed_heads(bias: bool) -> None:
    """ONNX Runtime has these on GPUs only: they equal what is not packed."""
    feeds = {"p": numbers(2, 5, 3, 3, 8), "kv": numbers(2, 7, 3, 2, 8), **SEQUENCE, **ALIKE}
    constants = {"b": numbers(72)} if bias else {}

    def made(*names: str) -> Array:
        named = [*names, *[""] * (3 - len(names)), *constants]
        given = {name: value for name, value in feeds.items() if name in names}
        graph = load(model(multi_head(named, ["y"]), given, constants))
        (found,) = evaluate(graph, given).values()
        return found

    together = made("q", "kv")
    feeds |= {"k": feeds["kv"][..., 0, :].reshape(2, 7, 24)}
    feeds |= {"v": feeds["kv"][..., 1, :].reshape(2, 7, 24)}
    np.testing.assert_array_equal(together, made("q", "k", "v"))
    together = made("p")
    feeds |= {n: feeds["p"][..., i, :].reshape(2, 5, 24) for i, n in enumerate("qkv")}
    np.testing.assert_array_equal(together, made("q", "k", "v"))


@pytest.mark.parametrize(
    ("names", "extra", "attrs", "said"),
    [
        ("q k v '' '' '' pk pv", CACHE, {"unidirectional": 1}, "`unidirectional` with a cache"),
        ("q k v '' m", {"m": np.array([3, 7], np.int32)}, {}, "a mask of 1 axes"),
        ("q", {}, {}, "keys and values are missing"),
        ("q k v b", {**APART, "b": numbers(72)}, {},
         "a bias with keys of another sequence"),
    ],
)  # fmt: skip
def test_attention_that_is_not_supported(
    names: str, extra: Feeds, attrs: dict[str, Any], said: str
) -> None:
    inputs = [name.strip("'") for name in names.split()]
    given = {**SEQUENCE, **extra}
    node = multi_head(inputs, ["y"], **attrs)
    with pytest.raises(UnsupportedOp, match=said):
        load(model(node, {name: given[name] for name in inputs if name}, {}))


WIDE = {"x": numbers(2, 5, 20), "w": numbers(20, 72) / 4}
LENGTHS = np.array([3, 5], np.int32)
MASKS = {"one": LENGTHS, "two": (np.arange(5) < LENGTHS[:, None]).astype(np.int32)}
PAST = {"p": numbers(2, 2, 3, 4, 8)}


@pytest.mark.parametrize(
    ("names", "extra", "attrs"),
    [
        ("x w b", {}, {}),
        ("x w", {}, {"unidirectional": 1}),
        ("x w b m", {"m": MASKS["one"]}, {"mask_filter_value": -3.0}),
        ("x w b m", {"m": MASKS["two"]}, {"scale": 0.25}),
        ("x w b m", {"m": MASKS["two"][:, None].repeat(5, 1)}, {}),
        ("x w b '' p", PAST, {}),
        ("x w b m '' a", {"m": MASKS["two"], "a": numbers(1, 3, 5, 5)}, {}),
        ("x v b", {"v": numbers(20, 60) / 4}, {"qkv_hidden_sizes": [24, 24, 12]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_packed_attention(names: str, extra: Feeds, attrs: dict[str, Any]) -> None:
    inputs = [name.strip("'") for name in names.split()]
    outputs = ["y", *["present"] * ("p" in inputs)]
    node = helper.make_node(
        "Attention", inputs, outputs, domain="com.microsoft", num_heads=3, **attrs
    )
    given = {**WIDE, **extra}
    width = given[inputs[1]].shape[1]
    held = {name: given[name] for name in inputs[1:2]} | {"b": numbers(width)}
    feeds = {name: given[name] for name in inputs if name and name not in held}
    agrees(node, feeds, **{name: held[name] for name in inputs if name in held})


def test_packed_attention_that_is_not_supported() -> None:
    def read(names: str, feeds: Feeds, **attrs: Any) -> None:
        node = fused("Attention", names.split(), num_heads=3, **attrs)
        load(model(node, {"x": WIDE["x"], **feeds}, {"w": WIDE["w"]}))

    with pytest.raises(UnsupportedOp, match="rotary embedding and shared buffers"):
        read("x w", {}, do_rotary=1)
    node = fused("Attention", ["x", "w", "", "", "p"], num_heads=3, unidirectional=1)
    with pytest.raises(UnsupportedOp, match="`unidirectional` with a cache"):
        load(model(node, {"x": WIDE["x"], **PAST}, {"w": WIDE["w"]}))
    node = fused("Attention", ["x", "w", "", "m"], num_heads=3)
    with pytest.raises(UnsupportedOp, match="a mask of 1 axes"):
        load(model(node, {"x": WIDE["x"], "m": LENGTHS.repeat(2)}, {"w": WIDE["w"]}))


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ("i s w p t g b", "y mask"),
        ("i s w p t g b m", "y mask total"),
        ("i '' w p '' g b", "y mask"),
        ("i '' w p '' g b '' o", "y mask"),
    ],
)
def test_embeddings(inputs: str, outputs: str) -> None:
    rng = np.random.default_rng(2)
    tokens, kinds, places = (rng.integers(0, n, (2, 5)).astype(np.int32) for n in (11, 2, 7))
    feeds = {"i": tokens, "s": kinds, "m": MASKS["two"], "o": places}
    held = {"w": numbers(11, 16), "p": numbers(7, 16), "t": numbers(2, 16), "g": numbers(16)}
    held["b"] = numbers(17)[1:]
    names = [name.strip("'") for name in inputs.split()]
    made = [name if name != "mask" or "m" in names else "" for name in outputs.split()]
    node = helper.make_node(
        "EmbedLayerNormalization", names, made, domain="com.microsoft", epsilon=1e-6
    )
    agrees(
        node, {k: v for k, v in feeds.items() if k in names},
        **{k: v for k, v in held.items() if k in names},
    )  # fmt: skip


WHOLE = np.random.default_rng(4).integers(-1, 2, (20, 7))
SCALES = np.linspace(0.1, 0.4, 7, dtype=np.float32)
ZERO = {"int8": np.int8(1), "uint8": np.uint8(2)}


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("inputs", ["x w t", "x w t z", "x w t z c", "x w t  c", "x w u z"])
def test_dynamically_quantized_products(inputs: str, kind: str) -> None:
    """The weights have one scale, or one for each output; zero point and bias may be missing."""
    node = helper.make_node("DynamicQuantizeMatMul", inputs.split(" "), ["y"])
    node.domain = "com.microsoft"
    held = {"w": (WHOLE + ZERO[kind]).astype(kind), "z": ZERO[kind], "c": SCALES - 1}
    held |= {"t": np.float32(0.3), "u": SCALES}
    agrees(node, {"x": numbers(2, 3, 20)}, **{k: v for k, v in held.items() if k in inputs})


@pytest.mark.parametrize(
    "inputs", ["a w s t", "a w s u v", "a w s u v z c", "a w s t  z", "a w s t   c"]
)
def test_integer_products_with_scales(inputs: str) -> None:
    node = helper.make_node("MatMulIntegerToFloat", inputs.split(" "), ["y"])
    node.domain = "com.microsoft"
    held = {"w": WHOLE.astype(np.int8), "s": np.float32(0.02), "t": np.float32(0.3), "u": SCALES}
    held |= {"v": np.uint8(117), "z": np.int8(2), "c": SCALES - 1}
    feeds = {"a": np.random.default_rng(5).integers(0, 256, (3, 20), dtype=np.uint8)}
    agrees(node, feeds, **{k: v for k, v in held.items() if k in inputs})


def test_dynamically_quantized_products_are_of_few_bits() -> None:
    node = helper.make_node("DynamicQuantizeMatMul", ["x", "w", "t"], ["y"], domain="com.microsoft")
    held = {"w": WHOLE.astype(np.int8), "t": np.float32(0.3)}
    (layer,) = passed(model(node, {"x": numbers(3, 20)}, held))[2]
    assert layer.kind == "few_bit"


def fused(op: str, inputs: list[str], **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, ["y"], domain="com.microsoft", **attrs)


@pytest.mark.parametrize("op", ["FusedMatMul", "TransposeMatMul"])
@pytest.mark.parametrize("trans", list(itertools.product((0, 1), repeat=2)))
@pytest.mark.parametrize("alpha", [{}, {"alpha": 0.25}])
def test_products_of_transposed_operands(
    op: str, trans: tuple[int, int], alpha: dict[str, float]
) -> None:
    for batch in ((), (3,), (2, 3)):
        shapes = [(*batch, 4, 5), (*batch, 5, 6)]
        one, two = (
            numbers(*shape).swapaxes(-1, -2) if turned else numbers(*shape)
            for shape, turned in zip(shapes, trans, strict=True)
        )
        node = fused(op, ["x", "z"], transA=trans[0], transB=trans[1], **alpha)
        agrees(node, {"x": np.ascontiguousarray(one)}, z=np.ascontiguousarray(two))


@pytest.mark.parametrize("trans", list(itertools.product((0, 1), repeat=4)))
def test_products_of_operands_whose_batch_is_inside(trans: tuple[int, ...]) -> None:
    trans_a, trans_b, batch_a, batch_b = trans
    shapes = []
    for turned, inside, (rows, columns) in ((trans_a, batch_a, (4, 5)), (trans_b, batch_b, (5, 6))):
        outer, last = (columns, rows) if turned else (rows, columns)
        shapes.append((outer, 2, 3, last) if inside else (2, 3, outer, last))
    node = fused(
        "FusedMatMul", ["x", "z"], transA=trans_a, transB=trans_b, transBatchA=batch_a,
        transBatchB=batch_b,
    )  # fmt: skip
    agrees(node, {"x": numbers(*shapes[0])}, z=numbers(*shapes[1]))


@pytest.mark.parametrize(
    ("name", "params"),
    [("Relu", []), ("Sigmoid", []), ("Tanh", []), ("LeakyRelu", [0.25]), ("Clip", [-0.5, 1.0]),
     ("HardSigmoid", [0.5, 0.25])],
)  # fmt: skip
@pytest.mark.parametrize("inputs", ["x w", "x w b", "x w b z", "x w  z"])
def test_activations_of_convolutions(name: str, params: list[float], inputs: str) -> None:
    node = fused(
        "FusedConv", inputs.split(" "), kernel_shape=[3, 3], pads=[1, 0, 1, 0], strides=[2, 1],
        activation=name, **({"activation_params": params} if params else {}),
    )  # fmt: skip
    feeds = {"x": numbers(1, 4, 7, 6)}
    constants = {"w": numbers(5, 4, 3, 3), "b": numbers(5), "z": numbers(1, 5, 4, 4)}
    agrees(node, feeds, **{k: v for k, v in constants.items() if k in inputs})


@pytest.mark.parametrize(
    ("name", "params"),
    [("Relu", {}), ("Tanh", {}), ("LeakyRelu", {"activation_alpha": 0.125}),
     ("Elu", {"activation_alpha": 0.5})],
)  # fmt: skip
@pytest.mark.parametrize("bias", [0, 1])
def test_activations_of_dense_layers(name: str, params: dict[str, float], bias: int) -> None:
    node = fused(
        "FusedGemm", ["x", "w", *["b"] * bias], transB=1, alpha=0.5, beta=2.0, activation=name,
        **params,
    )  # fmt: skip
    agrees(node, {"x": numbers(3, 8)}, w=numbers(5, 8), **({"b": numbers(5)} if bias else {}))


def test_activations_that_are_not_supported() -> None:
    feeds, constants = {"x": numbers(1, 4, 7, 6)}, {"w": numbers(5, 4, 3, 3)}
    node = fused("FusedConv", ["x", "w"], activation="Mish")
    with pytest.raises(UnsupportedOp, match="its activation `Mish` is not supported"):
        load(model(node, feeds, constants))
    node = fused("FusedConv", ["x", "w"], activation="LeakyRelu")
    with pytest.raises(UnsupportedOp, match="`LeakyRelu` with 0 parameters is not supported"):
        load(model(node, feeds, constants))
