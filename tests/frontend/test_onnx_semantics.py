"""Forms of ONNX's operators that once were wrong, crashed or were refused for no reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import bnncc
from bnncc.errors import ModelError, UnsupportedOp
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from tests.frontend.test_onnx_attributes import Own, expected, ints, one_node, real, scalar, small

pytestmark = pytest.mark.sampled(4)

F32 = TensorProto.FLOAT
SIGNS = np.float32([[np.inf, -np.inf, 0.0], [1.5, -2.0, np.inf]])
RESIZED = real(1, 2, 5, 6)


def resize(scales: list[float] | None = None, sizes: list[int] | None = None, **attrs: Any) -> Own:
    given = [("", None), ("s", np.float32(scales))] if scales else [("", None), ("", None)]
    if sizes:
        given.append(("n", ints(*sizes)))
    return ("Resize", 19, [RESIZED, *given], attrs, 1)


CASES: list[Own] = [
    ("IsInf", 20, [SIGNS], {"detect_negative": 0}, 1),
    ("IsInf", 20, [SIGNS], {"detect_positive": 0}, 1),
    ("IsInf", 20, [SIGNS], {"detect_positive": 0, "detect_negative": 0}, 1),
    ("SpaceToDepth", 28, [real(1, 3, 4, 6)], {"blocksize": 2, "mode": "CRD"}, 1),
    ("ReduceSum", 18, [real(3, 4), ("a", ints())], {"noop_with_empty_axes": 1}, 1),
    ("ReduceSum", 18, [real(3, 4), ("a", ints())], {"noop_with_empty_axes": 0}, 1),
    ("ReduceMax", 20, [real(3, 4) > 0, ("a", ints(1))], {}, 1),
    ("ReduceMean", 18, [small("int8", 3, 5).astype(np.int32), ("a", ints(1))], {"keepdims": 0}, 1),
    ("ReduceMax", 18, [np.where(real(2, 3) > 9, 0, -np.inf).astype("f"), ("a", ints(1))], {}, 1),
    ("Pow", 18, [small("int8", 2, 5).astype(np.int64) % 7 - 3, ints(0, 1, 2, 3, 9)], {}, 1),
    ("Pow", 18, [ints(0, 1, -1, 2, -3), ("e", ints(3))], {}, 1),
    ("LayerNormalization", 17, [real(2, 6), ("s", real(6)), ("b", real(6))], {}, 3),
    ("Mod", 13, [real(2, 5) * 9, real(5)], {"fmod": 1}, 1),
    ("Pad", 19, [real(2, 5), ("p", ints(1, 3, 0, 2))], {"mode": "wrap"}, 1),
    ("Pad", 19, [real(2, 5), ("p", ints(1, 2, 0, 1)), scalar(0.5)], {"mode": "constant"}, 1),
    ("Shape", 19, [real(2, 3, 4)], {"start": 1}, 1),
    ("Size", 19, [real(2, 3, 4)], {}, 1),
    ("Tile", 13, [real(2, 3, 4, 5), ("r", ints(7, 6, 4, 2))], {}, 1),
    ("BatchNormalization", 15, [real(2, 3, 4), *(real(3) ** 2 + 0.5 for _ in range(4))], {}, 1),
    ("CumProd", 26, [real(3, 4), ("axis", scalar(1, "int32"))], {"exclusive": 1}, 1),
    ("ReverseSequence", 10, [real(4, 3, 2), ints(4, 2, 0)], {}, 1),
    ("DFT", 20, [real(2, 12, 1), ("n", ints(16)[0]), ("axis", ints(1)[0])], {"onesided": 1}, 1),
    ("ConvInteger", 18, [np.full((1, 256, 5, 5), 255, "uint8"),
                         ("w", np.full((16, 256, 3, 3), 127, "int8"))], {"pads": [1] * 4}, 1),
    # ONNX Runtime saturates pairs of larger products on CPUs without VNNI.
    ("MatMulInteger", 18, [small("uint8", 3, 300), small("int8", 300, 7) // 2], {}, 1),
    ("ConvTranspose", 18, [real(1, 1, 3, 3), ("w", real(1, 2, 3, 3))],
     {"strides": [3, 2], "output_shape": [9, 7]}, 1),
    # The first window already extends beyond the end.
    *((op, 18, [real(1, 3, 2, 5)],
       {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, **more}, 1)
      for op in ("MaxPool", "AveragePool", "LpPool")
      for more in [{}, *[{"count_include_pad": 1}] * (op == "AveragePool")]),
    resize([1, 1, 1.7, 2.3], mode="linear"),
    resize([1, 1, 0.6, 0.55], mode="cubic", antialias=1),
    resize([1, 1, 0.6, 0.55], mode="linear", antialias=1),
    resize(sizes=[1, 2, 9, 11], mode="linear",
           coordinate_transformation_mode="half_pixel_symmetric"),
    resize(sizes=[1, 2, 3, 4], mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5),
    resize([1, 1, 1.3, 2.1], mode="nearest", nearest_mode="ceil",
           coordinate_transformation_mode="asymmetric"),
]  # fmt: skip


@pytest.mark.parametrize("own", CASES, ids=[f"{k}-{o[0]}" for k, o in enumerate(CASES)])
def test_form_is_what_another_runtime_says(own: Own) -> None:
    model, feeds = one_node(own)
    made = bnncc.compile(model, threads=1).run(feeds)
    for k, want in enumerate(expected(model, feeds)):
        have = made[f"y{k}"]
        assert have.dtype == want.dtype
        assert have.shape == want.shape
        if want.dtype.kind == "f":
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(have, want)


def network(nodes: list[onnx.NodeProto], shapes: dict[str, list[int]], out: str) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info(n, F32, s) for n, s in shapes.items()]
    graph = helper.make_graph(nodes, "net", inputs, [onnx.ValueInfoProto(name=out)])
    imports = [helper.make_opsetid("", 19)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def branch(op: str, *inputs: str) -> onnx.GraphProto:
    node = helper.make_node(op, list(inputs), ["out"])
    return helper.make_graph([node], op, [], [onnx.ValueInfoProto(name="out")])


def agrees(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    made = bnncc.compile(model, threads=1).run(feeds)
    for info, want in zip(model.graph.output, expected(model, feeds), strict=True):
        np.testing.assert_allclose(made[info.name], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["Sinh", "Cosh"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hyperbolic_functions_of_whole_vectors(op: str, dtype: type) -> None:
    """Near 0, where exponentials cancel; and where they overflow before the result does."""
    x = np.concatenate([np.linspace(-89, 89, 200), np.linspace(-1.1, 1.1, 198), [1e-8, 95]])
    x = x.astype(dtype)
    node = helper.make_node(op, ["x"], ["y"])
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    info = [helper.make_tensor_value_info(n, kind, x.shape) for n in "xy"]
    graph = helper.make_graph([node], "net", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    with np.errstate(over="ignore"):
        want = {"Sinh": np.sinh, "Cosh": np.cosh}[op](x.astype(np.float64)).astype(dtype)
    made = bnncc.compile(model, threads=1).run({"x": x})["y"]
    np.testing.assert_allclose(made, want, rtol=3e-7 if dtype is np.float32 else 1e-15)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_mean_variance_normalization_of_every_type(dtype: str) -> None:
    """ONNX defines it with constants of float32 only; one channel does not vary."""
    x = real(2, 4, 3, 3).astype(np.float64)
    x[:, 1] = 0.25
    node = helper.make_node("MeanVarianceNormalization", ["x"], ["y"])
    data = x.astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(data.dtype)
    info = [helper.make_tensor_value_info(n, kind, x.shape) for n in "xy"]
    graph = helper.make_graph([node], "net", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10)
    made = bnncc.compile(model, threads=1).run({"x": data})["y"]
    assert made.dtype == data.dtype
    wide = data.astype(np.float64)
    axes = (0, 2, 3)
    deviation = np.maximum(wide.std(axes, keepdims=True), 1e-9)
    want = (wide - wide.mean(axes, keepdims=True)) / deviation
    near = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-4, "float64": 1e-6}[dtype]
    np.testing.assert_allclose(made.astype(np.float64), want, rtol=near, atol=near)


def test_if_takes_the_branch_of_a_constant() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Constant", [], ["two"], value_ints=[2, 3]),
        helper.make_node("Equal", ["shape", "two"], ["same"]),
        helper.make_node("Cast", ["same"], ["whole"], to=TensorProto.INT32),
        helper.make_node("ReduceMin", ["whole"], ["all"], keepdims=0),
        helper.make_node("Cast", ["all"], ["flag"], to=TensorProto.BOOL),
        helper.make_node(
            "If", ["flag"], ["y"], then_branch=branch("Neg", "x"), else_branch=branch("Exp", "x")
        ),
    ]
    model = network(nodes, {"x": [2, 3]}, "y")
    assert {n.op for n in load(model).nodes} <= {"Neg", "Identity"}
    agrees(model, {"x": real(2, 3)})


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_if_of_data_computes_both_branches(sign: float) -> None:
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Constant", [], ["zero"], value_float=0.0),
        helper.make_node("Greater", ["total", "zero"], ["flag"]),
        helper.make_node(
            "If", ["flag"], ["y"], then_branch=branch("Neg", "x"), else_branch=branch("Exp", "x")
        ),
    ]
    agrees(network(nodes, {"x": [2, 3]}, "y"), {"x": np.full((2, 3), sign, np.float32)})


def loop(count: int) -> onnx.ModelProto:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Cast", ["k"], ["step"], to=F32),
            helper.make_node("Add", ["v", "step"], ["moved"]),
            helper.make_node("Mul", ["moved", "x"], ["next"]),
            helper.make_node("Neg", ["moved"], ["seen"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("k", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", F32, [3]),
        ],
        [onnx.ValueInfoProto(name=n) for n in ("on", "next", "seen")],
    )
    nodes = [
        helper.make_node("Constant", [], ["count"], value_int=count),
        helper.make_node("Loop", ["count", "", "x"], ["y", "all"], body=body),
    ]
    model = network(nodes, {"x": [3]}, "y")
    model.graph.output.append(onnx.ValueInfoProto(name="all"))
    return model


def test_loop_is_unrolled() -> None:
    agrees(loop(4), {"x": real(3)})


def test_loop_that_never_seems_to_end_is_refused() -> None:
    """And at once: what its body would become is not built as far as that is allowed."""
    model = loop(1 << 40)
    (seen,) = (n for n in model.graph.node if n.op_type == "Loop")
    seen.attribute[0].g.node[1].op_type = "NoOperator"  # of the first iteration
    with pytest.raises(UnsupportedOp, match="loops, recurrences and functions unfold to more"):
        load(model)


@pytest.mark.parametrize("opset", [7, 8])
def test_old_opsets(opset: int) -> None:
    nodes = [
        helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["n"]),
        helper.make_node("Upsample", ["n"], ["u"], mode="nearest", scales=[1.0, 1.0, 2.0, 2.0]),
        helper.make_node("Clip", ["u"], ["y"], min=-0.5, max=0.75),
    ]
    model = network(nodes, {"x": [1, 2, 3, 4]}, "y")
    values = {"s": real(2), "b": real(2), "m": real(2), "v": real(2) ** 2}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in values.items())
    model.opset_import[0].version = opset
    x = real(1, 2, 3, 4)
    scale = values["s"] / np.sqrt(values["v"] + 1e-5)
    normal = (x - values["m"].reshape(-1, 1, 1)) * scale.reshape(-1, 1, 1)
    wanted = np.clip(normal + values["b"].reshape(-1, 1, 1), -0.5, 0.75).repeat(2, 2).repeat(2, 3)
    np.testing.assert_allclose(evaluate(load(model), {"x": x})["y"], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "kind"), [("SequenceConstruct", "sequence"), ("Optional", "optional")]
)
def test_values_that_are_no_tensors_are_refused(op: str, kind: str) -> None:
    model = network([helper.make_node(op, ["x"], ["y"])], {"x": [2]}, "y")
    with pytest.raises(UnsupportedOp, match=f"is of type {kind}, expected a tensor"):
        load(model)


def test_older_forms_are_refused_by_operator_and_opset() -> None:
    node = helper.make_node("Add", ["x", "x"], ["y"], broadcast=1)
    model = network([node], {"x": [2]}, "y")
    model.opset_import[0].version = 6
    with pytest.raises(UnsupportedOp, match=r"Add `Add_y`: its form of opset 6 is not supported"):
        load(model)


def test_constants_keep_their_types() -> None:
    """TVM would make float64 constants float32, and int64 ones int32."""
    node = helper.make_node("Add", ["x", "c"], ["y"])
    for dtype, value in ((np.float64, 1 + 2.0**-40), (np.int64, (1 << 40) + 1)):
        model = network([node], {"x": [2]}, "y")
        code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        model.graph.input[0].type.tensor_type.elem_type = code
        array = np.array(value, dtype)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, "c"))
        made = bnncc.compile(model, threads=1).run({"x": np.array([0, 5], dtype)})["y"]
        np.testing.assert_array_equal(made, np.array([0, 5], dtype) + array)


def test_an_output_without_elements_is_a_constant() -> None:
    """Split, that other things are read of; but TVM cannot store constants of every such shape."""
    split = helper.make_node("Split", ["x", "a"], ["y", "z"], axis=0)
    model = network([split], {"x": [3, 2]}, "y")
    model.graph.output.append(helper.make_tensor_value_info("z", F32, [3, 2]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(ints(0, 3), "a"))
    x = np.float32([[1, 2], [3, 4], [5, 6]])
    made = bnncc.compile(model, threads=1).run({"x": x})
    np.testing.assert_array_equal(made["z"], x)
    assert made["y"].shape == (0, 2)
    node = helper.make_node("Slice", ["x", "a", "a", "b"], ["y"])
    model = network([node], {"x": [2, 4]}, "y")
    for name, value in (("a", 1), ("b", 1)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(ints(value), name))
    with pytest.raises(ModelError, match=r"`y`: has no elements, its shape is \[2, 0\]; only"):
        load(model)


CONSTANT = np.float32([1, np.nan, 2, 3])


def with_constant(body: str, value: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 20]>
        net (float[1,4,3,3] x, float[4,4,1,1] w) => (y) {{ {body} }}"""
    )
    del model.graph.input[1]
    weight = np.where(real(4, 4, 1, 1) > 0, 1, -1).astype(np.float32)
    for name, array in (("w", weight), ("c", value.reshape(4, 1, 1))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


BEHIND = "b = Sign(x) v = Conv(b, w)"


@pytest.mark.parametrize(
    ("body", "odd"),
    [
        (f"{BEHIND} y = Mul(v, c)", np.nan),
        (f"{BEHIND} y = Mul(v, c)", np.inf),
        (f"{BEHIND} y = Add(v, c)", -np.inf),
        (f"{BEHIND} a = Add(v, c) t = Mul(a, c) y = Sub(t, v)", -np.inf),
        ("a = Add(x, c) n = IsNaN(a) y = Cast<to=1>(n)", np.nan),
    ],
)
@pytest.mark.filterwarnings("error")
def test_arithmetic_carries_constants_that_are_not_finite(body: str, odd: float) -> None:
    """They stay out of epilogues, whose constants are composed."""
    model = with_constant(body, np.float32([1, odd, 2, 3]))
    x = real(1, 4, 3, 3)
    x[0, 1, 0, 0] = 0
    with np.errstate(all="ignore"):
        want = evaluate(load(model), {"x": x})["y"]
    assert "IsNaN" in body or not np.isfinite(want).all()
    made = bnncc.compile(model, threads=1).run({"x": x})["y"]
    np.testing.assert_allclose(made, want, rtol=1e-4)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("a = Mul(x, c) y = Sign(a)", "Sign `Sign_y`: constant `c` holds NaN, which reaches it"),
        ("a = Mul(x, c) y = Conv(a, w)", "Conv `Conv_y`: constant `c` holds NaN, which reaches it"),
        ("a = Conv(x, w) y = Max(a, c)", "Max `Max_y`: constant `c` holds NaN, expected finite"),
        # A sum is cancelled where it is numbers.
        ("a = Mul(x, c) b = Sub(x, a) y = Add(b, a)", "Add `Add_y`: constant `c` holds NaN, which"),
    ],
)
def test_no_decision_is_made_of_constants_that_are_not_finite(body: str, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        load(with_constant(body, CONSTANT))


def test_attributes_are_finite_numbers() -> None:
    model = network([helper.make_node("LeakyRelu", ["x"], ["y"], alpha=np.inf)], {"x": [2]}, "y")
    with pytest.raises(ModelError, match="`alpha` is inf, expected a finite number"):
        load(model)


def test_tensors_that_reading_adds_have_names_of_their_own() -> None:
    """Tensors may be called `x`, `x.1`, `x.2`, as TorchScript does, and nodes like tensors."""
    nodes = [helper.make_node("Einsum", ["x", "w"], ["n"], name="n", equation="bi,oij->boj")]
    for k in range(1, 40):
        nodes.append(helper.make_node("Neg", ["n" if k == 1 else f"n.{k - 1}"], [f"n.{k}"]))
    shapes, feeds = {"x": [2, 4], "w": [3, 4, 5]}, {"x": real(2, 4), "w": real(3, 4, 5)}
    agrees(network(nodes, shapes, "n.39"), feeds)
    body = helper.make_graph(nodes, "body", [], [onnx.ValueInfoProto(name="n.39")])
    chosen = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    inside = network([chosen], shapes, "y")
    inside.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "c"))
    agrees(inside, feeds)


def test_bools_are_compared_as_bools() -> None:
    node = helper.make_node("Equal", ["a", "b"], ["y"])
    greater = [helper.make_node("Greater", [n, "z"], [k]) for n, k in (("x", "a"), ("w", "b"))]
    model = network([*greater, node], {"x": [2, 16], "w": [16]}, "y")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0), "z"))
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(s).astype(np.float32) for s in ((2, 16), 16))
    made = bnncc.compile(model, threads=1).run({"x": x, "w": w})["y"]
    np.testing.assert_array_equal(made, (x > 0) == (w > 0))


def test_elements_along_long_axes() -> None:
    """onnx.reference gathers from at most 63 elements."""
    random = np.random.default_rng(0)
    x, places = random.standard_normal((3, 200)).astype(np.float32), np.argsort(-np.arange(200))
    indices = np.tile(places, (2, 1))
    gather = helper.make_node("GatherElements", ["x", "i"], ["y"], axis=1)
    model = network([gather], {"x": [3, 200]}, "y")
    model.graph.initializer.append(onnx.numpy_helper.from_array(indices, "i"))
    made = evaluate(load(model), {"x": x})["y"]
    np.testing.assert_array_equal(made, x[:2, ::-1])


def test_states_of_another_size_are_refused() -> None:
    node = helper.make_node("RNN", ["x", "w", "r", "", "", "h"], ["", "y"], hidden_size=4)
    model = network([node], {"x": [5, 2, 3]}, "y")
    for name, shape in (("w", (1, 4, 3)), ("r", (1, 4, 4)), ("h", (1, 2, 7))):
        value = np.ones(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    with pytest.raises(ModelError, match=r"input 5 has shape \[1, 2, 7\], expected \[1, 2, 4\]"):
        load(model)
