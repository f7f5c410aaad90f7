"""The evaluator agrees with ONNX Runtime operator by operator, and is exact where it promises."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from bnncc.errors import InputError
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate, evaluate_node
from bnncc.ir.graph import Node
from bnncc.ir.numeric import multiples

ort = pytest.importorskip("onnxruntime")
RNG = np.random.default_rng(7)


def real(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


X = real(2, 6, 7, 8)
CASES: list[tuple[str, list[np.ndarray | None], dict]] = [
    *((op, [X], {}) for op in ("Abs", "Neg", "Sign", "Exp", "Relu", "Sigmoid", "Tanh", "Floor")),
    *((op, [X], {}) for op in ("Ceil", "Round", "Reciprocal", "Erf", "Softplus", "Softsign")),
    *((op, [np.abs(X)], {}) for op in ("Sqrt", "Log")),
    *((op, [X], {}) for op in ("LeakyRelu", "Elu", "HardSigmoid", "HardSwish", "Identity")),
    *((op, [X, real(6, 1, 1)], {}) for op in ("Add", "Sub", "Mul", "Div", "Min", "Max")),
    *((op, [X, real(6, 1, 1)], {}) for op in ("Less", "Greater", "GreaterOrEqual", "Equal")),
    ("PRelu", [X, real(6, 1, 1)], {}),
    ("Pow", [np.abs(X), np.float32(2)], {}),
    ("Div", [ints(-7, 7, -8), ints(2, -2, 3)], {}),
    ("Mod", [ints(-7, 7, -8), ints(3, -3, 3)], {}),
    ("Where", [X > 0, X, np.float32(-1)], {}),
    ("Not", [X > 0], {}),
    ("Clip", [X, np.float32(-1), np.float32(0.5)], {}),
    ("Cast", [X], {"to": onnx.TensorProto.INT32}),
    ("Sum", [X, X, X], {}),
    ("Mean", [X, X * 2], {}),
    ("Reshape", [X, ints(0, -1, 4)], {}),
    ("Transpose", [X], {"perm": [0, 2, 3, 1]}),
    ("Flatten", [X], {"axis": 2}),
    ("Squeeze", [real(2, 1, 3, 1), ints(1, -1)], {}),
    ("Unsqueeze", [X, ints(0, -1)], {}),
    ("Concat", [X, X * 2], {"axis": 1}),
    ("Slice", [X, ints(1, -1), ints(5, -9), ints(1, 3), ints(2, -2)], {}),
    ("Gather", [X, np.array([[0, -1]], np.int64)], {"axis": 1}),
    ("Expand", [real(6, 1, 1), ints(2, 1, 7, 8)], {}),
    ("Tile", [X, ints(1, 2, 1, 3)], {}),
    ("Pad", [X, ints(0, 0, 1, -1, 0, 0, 2, 1), np.float32(-1)], {"mode": "constant"}),
    ("Pad", [X, ints(0, 0, 1, 1, 0, 0, 2, 1)], {"mode": "reflect"}),
    ("Shape", [X], {"start": 1}),
    ("DepthToSpace", [real(1, 8, 3, 3)], {"blocksize": 2}),
    ("DepthToSpace", [real(1, 8, 3, 3)], {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", [real(1, 2, 4, 6)], {"blocksize": 2}),
    *((f"Reduce{k}", [X, ints(1, -1)], {"keepdims": 0}) for k in ("Mean", "Sum", "Max", "Min")),
    *((f"Reduce{k}", [X, ints(2)], {}) for k in ("L1", "L2", "Prod", "SumSquare")),
    ("ArgMax", [X], {"axis": 1, "keepdims": 0}),
    ("Softmax", [X], {"axis": 1}),
    ("LogSoftmax", [X], {"axis": -1}),
    ("BatchNormalization", [X, real(6), real(6), real(6), np.abs(real(6))], {"epsilon": 1e-3}),
    ("InstanceNormalization", [X, real(6), real(6)], {}),
    ("LayerNormalization", [X, real(8), real(8)], {}),
    ("LRN", [X], {"size": 3}),
    ("Conv", [X, real(4, 6, 3, 3), real(4)], {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
    ("Conv", [X, real(4, 3, 3, 3)], {"group": 2, "dilations": [2, 2]}),
    ("Conv", [X, real(6, 1, 3, 3)], {"group": 6, "auto_pad": "SAME_LOWER"}),
    ("Conv", [real(2, 3, 9), real(5, 3, 4)], {}),
    ("Conv", [real(1, 2, 4, 5, 6), real(3, 2, 2, 2, 2)], {"pads": [1] * 6}),
    ("ConvTranspose", [X, real(6, 2, 3, 3)], {"strides": [2, 2]}),
    ("ConvTranspose", [X, real(6, 2, 3, 2), real(2)], {"strides": [2, 3], "pads": [1, 0, 2, 1]}),
    ("ConvTranspose", [X, real(6, 2, 3, 3)], {"dilations": [2, 1], "output_padding": [0, 0]}),
    ("Gemm", [real(3, 5), real(4, 5), real(4)], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("MatMul", [real(2, 3, 5), real(5, 4)], {}),
    ("Einsum", [real(2, 3), real(3, 4)], {"equation": "ij,jk->ik"}),
    ("MaxPool", [X], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxPool", [X], {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", [X], {"kernel_shape": [3, 2], "pads": [1, 1, 1, 0], "strides": [2, 2]}),
    ("AveragePool", [X], {"kernel_shape": [3, 3], "pads": [1] * 4, "count_include_pad": 1}),
    ("GlobalAveragePool", [X], {}),
    ("GlobalMaxPool", [X], {}),
]


def runtime(op: str, ins: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    names = [f"i{k}" for k in range(len(ins))]
    infos = [
        helper.make_tensor_value_info(
            n, helper.np_dtype_to_tensor_dtype(np.asarray(v).dtype), np.asarray(v).shape
        )
        for n, v in zip(names, ins, strict=True)
    ]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], **attrs)], "one", infos, [onnx.ValueInfoProto(name="y")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    model = onnx.shape_inference.infer_shapes(model)
    session = ort.InferenceSession(model.SerializeToString())
    return session.run(None, dict(zip(names, map(np.asarray, ins), strict=True)))


@pytest.mark.parametrize(
    ("op", "ins", "attrs"), CASES, ids=[f"{k}-{c[0]}" for k, c in enumerate(CASES)]
)
def test_operator(op: str, ins: list[np.ndarray | None], attrs: dict) -> None:
    node = Node(op, [f"i{k}" for k in range(len(ins))], ["y"], attrs, op)
    found = evaluate_node(node, [np.asarray(v) for v in ins])[0]
    wanted = runtime(op, ins, attrs)[0]
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


UNARY = [
    *("Abs", "Acos", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Cos", "Cosh", "Elu", "Erf"),
    *("Exp", "Floor", "Gelu", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish"),
    *("Hardmax", "LeakyRelu", "Log", "LogSoftmax", "Mish", "Neg", "Reciprocal", "ReduceL1"),
    *("ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceProd", "ReduceSum", "Relu"),
    *("Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softmax", "Softplus"),
    *("Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("op", UNARY)
def test_a_result_has_the_type_of_its_data(op: str, dtype: str) -> None:
    data = np.linspace(0.1, 0.9, 16).reshape(1, 4, 2, 2).astype(dtype)
    assert evaluate_node(Node(op, ["x"], ["y"], {}, op), [data])[0].dtype == data.dtype


def test_scaled_signs_accumulate_exactly() -> None:
    x = np.sign(real(1, 64, 8, 8)) * np.float32(0.3)
    w = np.sign(real(8, 64, 3, 3)) * np.float32(0.07)
    w *= 1 + 1e-7 * real(8, 64, 3, 3)  # what straight-through estimators leave
    found = evaluate_node(Node("Conv", ["x", "w"], ["y"], {}), [x, w])[0]
    whole = evaluate_node(Node("Conv", ["x", "w"], ["y"], {}), [np.sign(x), np.sign(w)])[0]
    np.testing.assert_array_equal(found == 0, whole == 0)
    assert np.unique(found[0, 0]).size == np.unique(whole[0, 0]).size
    np.testing.assert_allclose(found, whole * 0.021, rtol=1e-5)


def test_multiples() -> None:
    whole, scale = multiples(np.float32([0.5, -0.5, 0]))
    assert whole.tolist() == [1, -1, 0]
    assert scale == 0.5
    assert multiples(real(100)) is None
    whole, scale = multiples(np.float32([[2.5, -2.5], [0, 0], [-0.5, 0.5]]), 0)
    assert whole.tolist() == [[1, -1], [0, 0], [-1, 1]]
    assert scale.reshape(-1).tolist() == [2.5, 1, 0.5]


def test_trial_axis_broadcasts() -> None:
    trials = np.arange(-4, 5, dtype=np.float32).reshape(-1, 1) * np.ones((1, 6), np.float32)
    params = [real(6), real(6), real(6), np.abs(real(6))]
    node = Node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], {"epsilon": 1e-5})
    assert evaluate_node(node, [trials, *params])[0].shape == (9, 6)


def test_evaluate_keeps_and_overrides() -> None:
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["a"]), helper.make_node("Abs", ["a"], ["y"])],
        "two",
        [helper.make_tensor_value_info("x", 1, ["N", 2])],
        [helper.make_tensor_value_info("y", 1, ["N", 2])],
    )
    made = load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    x = real(3, 2)
    found = evaluate(made, {"x": x}, keep=["a"])
    assert set(found) == {"a", "y"}
    np.testing.assert_array_equal(found["a"], -x)
    assert (evaluate(made, {"x": x, "a": x * 0 + 5})["y"] == 5).all()
    with pytest.raises(InputError, match="`x` is missing"):
        evaluate(made, {})


@pytest.mark.parametrize("form", ["data first", "data second", "batches", "pixels", "images"])
def test_small_rows_beside_large_ones_are_not_lost(form: str) -> None:
    """Beside 1e33 all other numbers are multiples of something: 0 of it."""
    rng = np.random.default_rng(0)
    whole = rng.integers(-1, 2, (20, 4)).astype(np.float32)
    x = rng.standard_normal((2, 6, 20)).astype(np.float32)
    x[0, 3, 5] = 1e33
    node, ins = "MatMul", [x, whole]
    if form == "data second":
        ins = [whole.T, x[0].T]
    elif form == "batches":
        ins = [whole.T, x.transpose(0, 2, 1)]
    elif form in ("pixels", "images"):
        node = "Conv"
        ins = [x.transpose(0, 2, 1)[..., None], whole.T[:, :, None, None]]
        if form == "images":
            ins = [x.reshape(12, 20, 1, 1), ins[1]]
    (wanted,) = runtime(node, list(ins), {})
    attrs = {"pads": [0] * 4, "strides": [1, 1]} if node == "Conv" else {}
    (made,) = evaluate_node(Node(node, ["a", "b"], ["y"], attrs), list(ins))
    axis = -1 if form == "data first" else 0 if form == "data second" else 1
    size = np.abs(wanted).max(axis=axis, keepdims=True)
    assert (np.abs(made - wanted) <= 1e-5 * size).all()
