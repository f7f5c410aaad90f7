"""Every attribute of ONNX's schemas is implemented, and tested by some value, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import bnncc
from bnncc.errors import UnsupportedOp
from bnncc.frontend.attributes import IMPLEMENTED, NO_EFFECT, check_attributes
from bnncc.frontend.checks import CONTROL_FLOW, RANDOM
from bnncc.frontend.functions import has_body
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import OPSET, evaluate
from bnncc.ir.graph import Node
from bnncc.ir.schema import is_default
from tests import onnx_node_cases

ort = pytest.importorskip("onnxruntime")
RNG = np.random.default_rng(11)

OTHERWISE = {"Constant", "CastLike", "Dropout", "SequenceMap", "SplitToSequence", "Upsample"}
"""Operators that are read in ways of their own: constants, other operators, sequences."""


def real(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def small(dtype: str, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def scalar(value: float, dtype: str = "float32") -> np.ndarray:
    return np.array(value, dtype)


# ------------------------------------------------------------------ what no test of ONNX's looks at

X, W, R, B = real(4, 2, 5), real(1, 16, 5), real(1, 16, 4), real(1, 32)
IMAGE, WEIGHT = small("uint8", 1, 4, 7, 6), small("int8", 6, 4, 3, 3)
GROUPED = small("int8", 6, 2, 3, 3)
SCALES = [scalar(0.02), scalar(3, "uint8")]
AFTER = [scalar(0.7), scalar(-4, "int8")]
WINDOWS: list[dict[str, Any]] = [
    {"kernel_shape": [3, 3], "strides": [2, 1], "pads": [1, 0, 2, 1]},
    {"dilations": [2, 2], "auto_pad": "SAME_UPPER"},
]
# operator, opset, inputs, attributes, number of outputs; a str input is a constant of the model
Own = tuple[str, int, list[Any], dict[str, Any], int]
OWN: list[Own] = [
    *(("ConvInteger", 18, [IMAGE, ("w", WEIGHT), ("z", SCALES[1])], a, 1) for a in WINDOWS),
    ("ConvInteger", 18, [IMAGE, ("w", GROUPED)], {"group": 2}, 1),
    *(
        ("QLinearConv", 18, [IMAGE, *_, ("w", w), ("s", scale), ("zw", zero), *AFTER], a, 1)
        for _ in [[("sx", SCALES[0]), ("zx", SCALES[1])]]
        for w, scale, zero, a in [
            (WEIGHT, real(6) ** 2 / 50, np.zeros(6, np.int8), WINDOWS[0]),
            (WEIGHT, scalar(0.01), scalar(2, "int8"), WINDOWS[1]),
            (GROUPED, scalar(0.01), scalar(0, "int8"), {"group": 2}),
        ]
    ),
    ("Conv", 18, [real(1, 4, 9, 8), ("w", real(6, 4, 3, 3))], {"dilations": [2, 1]}, 1),
    (
        "RNN", 18, [X, ("w", real(1, 4, 5)), ("r", real(1, 4, 4))],
        {"hidden_size": 4, "activations": ["Affine"], "activation_alpha": [0.5],
         "activation_beta": [0.2], "clip": 0.4}, 2,
    ),
    (
        "RNN", 18, [X, ("w", real(2, 4, 5)), ("r", real(2, 4, 4))],
        {"hidden_size": 4, "direction": "bidirectional",
         "activations": ["LeakyRelu", "HardSigmoid"],
         "activation_alpha": [0.3, 0.25], "activation_beta": [0.1]}, 2,
    ),
    (
        "GRU", 18, [X, ("w", W[:, :12]), ("r", R[:, :12]), ("b", B[:, :24])],
        {"hidden_size": 4, "linear_before_reset": 1, "clip": 0.6}, 2,
    ),
    (
        "GRU", 18, [X, ("w", W[:, :12]), ("r", R[:, :12]), ("b", B[:, :24])],
        {"hidden_size": 4, "activations": ["HardSigmoid", "ScaledTanh"], "direction": "reverse",
         "activation_alpha": [0.3, 1.5], "activation_beta": [0.4, 0.7]}, 2,
    ),
    (
        "LSTM", 18,
        [X, ("w", W), ("r", R), ("b", B), np.array([4, 2], np.int32), real(1, 2, 4), real(1, 2, 4),
         ("p", real(1, 12))],
        {"hidden_size": 4, "input_forget": 1}, 3,
    ),
    (
        "LSTM", 18, [X, ("w", W), ("r", R), ("b", B)],
        {"hidden_size": 4, "activations": ["Sigmoid", "Elu", "Softsign"],
         "activation_alpha": [0.8], "clip": 0.9}, 3,
    ),
    (
        "LSTM", 18, [X, ("w", W), ("r", R)],
        {"hidden_size": 4, "activations": ["HardSigmoid", "Tanh", "Tanh"],
         "activation_alpha": [0.3], "activation_beta": [0.4], "direction": "reverse"}, 3,
    ),
    (
        "DeformConv", 19, [real(1, 4, 7, 6), ("w", real(6, 2, 3, 3)), real(1, 36, 4, 6)],
        {"group": 2, "offset_group": 2, "strides": [2, 1], "dilations": [1, 2],
         "pads": [1, 2, 1, 2]}, 1,
    ),
    ("GlobalLpPool", 18, [real(2, 3, 4, 5)], {"p": 1}, 1),
    (
        "LpPool", 18, [real(1, 3, 7, 6)],
        {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}, 1,
    ),
    (
        "RoiAlign", 18,
        [real(1, 3, 12, 12), ("roi", np.array([[2, 2, 9, 12]], np.float32)), ("at", ints(0))],
        {"output_height": 2, "output_width": 3, "spatial_scale": 0.5, "sampling_ratio": 2}, 1,
    ),
    (
        "MaxUnpool", 18, [real(1, 1, 2, 2), ("at", ints(0, 2, 5, 7).reshape(1, 1, 2, 2))],
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, 1,
    ),
    (
        "STFT", 18, [real(1, 40, 1), ("step", scalar(8, "int64")), ("w", real(16))],
        {"onesided": 0}, 1,
    ),
    (
        "TensorScatter", 24, [real(2, 4, 3), real(2, 4, 1), ("at", ints(1, 2))],
        {"axis": -1, "mode": "linear"}, 1,
    ),
    (
        "DequantizeLinear", 25, [small("int8", 4, 3), ("s", scalar(0.5, "float16"))],
        {"output_dtype": TensorProto.FLOAT}, 1,
    ),
    ("TopK", 18, [real(2, 9), ("k", ints(9))], {"sorted": 0}, 2),
    *(
        (f"Reduce{k}", 18, [np.abs(real(3, 4)) * s + 0.1, *axes],
         {"noop_with_empty_axes": 1, "keepdims": 0}, 1)
        for k, s in [
            *(("L1", 1), ("L2", 1), ("LogSum", 1), ("LogSumExp", 60), ("Max", 1), ("Mean", 1)),
            *(("Min", 1), ("Prod", 1), ("SumSquare", 1)),
        ]
        for axes in [[], [("axes", ints())]]
    ),
]  # fmt: skip
ELSEWHERE = {
    ("Cast", "round_mode"),  # ONNX's default is what its own test gives
    ("MelWeightMatrix", "output_datatype"),  # evaluated by onnx.reference
    ("QuantizeLinear", "saturate"),  # as Cast's
}


def one_node(own: Own) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    op, opset, inputs, attrs, count = own
    feeds: dict[str, np.ndarray] = {}
    fixed, names = [], []
    for k, value in enumerate(inputs):
        if isinstance(value, tuple):
            names.append(value[0])
            if value[0]:
                fixed.append(numpy_helper.from_array(value[1], value[0]))
        else:
            names.append(f"x{k}")
            feeds[f"x{k}"] = value
    outs = [f"y{k}" for k in range(count)]
    graph = helper.make_graph(
        [helper.make_node(op, names, outs, **attrs)], op,
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in feeds.items()
        ],
        [onnx.ValueInfoProto(name=o) for o in outs], fixed,
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


def expected(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return what ONNX Runtime computes, or onnx.reference where that does not know the node."""
    typed = onnx.shape_inference.infer_shapes(model)
    try:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        providers = ["CPUExecutionProvider"]
        session = ort.InferenceSession(typed.SerializeToString(), options, providers=providers)
        return list(session.run(None, feeds))
    except Exception:  # it has no common base of its errors
        return [np.asarray(v) for v in ReferenceEvaluator(model).run(None, feeds)]


@pytest.mark.parametrize("own", OWN, ids=[f"{o[0]}-{'-'.join(o[3])}-{len(o[2])}" for o in OWN])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attribute_is_what_another_runtime_says(own: Own, compiled: bool) -> None:
    model, feeds = one_node(own)
    run = bnncc.compile(model, threads=1).run if compiled else partial(evaluate, load(model))
    made = run(feeds)
    for k, want in enumerate(expected(model, feeds)):
        have = made[f"y{k}"]
        if own[0] == "TopK":  # in any order
            have, want = np.sort(have), np.sort(want)
        assert have.dtype == want.dtype
        assert have.shape == want.shape
        if want.dtype.kind == "f":
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(have, want)


# ---------------------------------------------------------------------------------------- the table


def schemas() -> Iterator[onnx.defs.OpSchema]:
    names = {s.name for s in onnx.defs.get_all_schemas() if s.domain == ""}
    for name in sorted(names - RANDOM - OTHERWISE - CONTROL_FLOW):
        yield onnx.defs.get_schema(name, OPSET, "")


def values_given() -> set[tuple[str, str]]:
    """Return operators and attributes that some test gives a value that is not the default."""
    found = {(op, key) for op, _, _, attrs, _ in OWN for key in attrs} | ELSEWHERE
    for name in onnx_node_cases.names():
        for node in onnx_node_cases.nodes(onnx_node_cases.collected()[name].model.graph):
            for attribute in node.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    continue
                value = helper.get_attribute_value(attribute)
                value = value.decode() if isinstance(value, bytes) else value
                if node.domain == "" and not is_default(node.op_type, attribute.name, value):
                    found.add((node.op_type, attribute.name))
    return found


def test_each_attribute_that_is_implemented_has_a_test() -> None:
    known = values_given()
    missing = [
        f"{op}.{key}" for op, keys in IMPLEMENTED.items() for key in keys if (op, key) not in known
    ]
    assert not missing


def test_implemented_attributes_exist() -> None:
    for op, keys in IMPLEMENTED.items():
        versions = [s for s in onnx.defs.get_all_schemas_with_history() if s.name == op]
        for key in keys:
            assert any(key in s.attributes for s in versions), f"{op}.{key}"


_OTHER = {
    AttributeProto.FLOAT: 0.123,
    AttributeProto.INT: 77,
    AttributeProto.STRING: "another",
    AttributeProto.INTS: [77],
    AttributeProto.FLOATS: [0.123],
    AttributeProto.STRINGS: ["another"],
}


def test_each_other_attribute_is_refused_by_name() -> None:
    refused = 0
    for schema in schemas():
        for key, attribute in schema.attributes.items():
            node = Node(schema.name, ["x"], ["y"], {}, "here")
            implemented = key in IMPLEMENTED.get(schema.name, ()) or has_body(node)
            value = _OTHER.get(attribute.type.value)
            if implemented or (schema.name, key) in NO_EFFECT or value is None:
                continue
            node.attrs[key] = value
            with pytest.raises(UnsupportedOp, match=rf"{schema.name} `here`: attribute `{key}`"):
                check_attributes(node)
            refused += 1
    assert refused > 10


def test_an_attribute_of_a_newer_opset_is_refused_before_it_is_ignored() -> None:
    """What IsInf and SpaceToDepth once did: an attribute that nothing looks at."""
    node = Node("Abs", ["x"], ["y"], {"rounding": "up"}, "here")
    with pytest.raises(UnsupportedOp, match="`rounding` = 'up' is not supported"):
        check_attributes(node)
