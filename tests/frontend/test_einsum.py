"""Einsum of two operands becomes a product of matrices; others stay as they are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import bnncc
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate

SIZES = {"b": 2, "t": 5, "s": 4, "h": 3, "d": 8, "e": 7, "u": 6, "i": 1}


def model(equation: str, weight: np.ndarray | None = None, symbols: str = "") -> onnx.ModelProto:
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    names = ["x", "w", "v"][: len(terms)]
    given = [
        helper.make_tensor_value_info(
            n, TensorProto.FLOAT, [x if x in symbols else SIZES[x] for x in t.replace("...", "bt")]
        )
        for n, t in zip(names, terms, strict=True)
        if n != "w" or weight is None
    ]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [helper.make_node("Einsum", names, ["y"], equation=equation)]
    if weight is not None:
        nodes.insert(0, helper.make_node("Sign", ["x"], ["s"]))
        nodes[1].input[0] = "s"
    held = [] if weight is None else [numpy_helper.from_array(weight, "w")]
    graph = helper.make_graph(nodes, "einsum", given, [out], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize(
    "equation",
    ["btd,ud->btu", "btd,du->btu", "bthd,bshd->bhts", "bhts,bshd->bthd", "btd,dhe->bthe",
     "bthd,hdu->btu", "bht,bhtd->bhd", "bhtd,bhd->bth", "d,du->u", "td,d->t", "td,td->",
     "td, du", "...d,du->...u", "btd,eud->beut", "bthd,bths->btsd", "bthde,bhdu->bhute"],
)  # fmt: skip
def test_products_of_two(equation: str) -> None:
    made = model(equation)
    graph = load(made)
    assert "Einsum" not in {node.op for node in graph.nodes}
    rng = np.random.default_rng(0)
    feeds = {
        i.name: rng.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim]).astype(
            "f4"
        )
        for i in made.graph.input
    }
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, feeds)
    found = evaluate(graph, feeds)["y"]
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equation", ["td,u->tdu", "tt->t", "td,du,ue->te", "td,du->u"])
def test_what_stays(equation: str) -> None:
    assert "Einsum" in {node.op for node in load(model(equation)).nodes}


@pytest.mark.parametrize("equation", ["btd,ud->btu", "btd,ud->ubt"])
def test_signs_are_found_with_any_number_of_rows(equation: str) -> None:
    weight = np.where(np.random.default_rng(1).random((6, 8)) < 0.5, -1, 1).astype(np.float32)
    artifact = bnncc.compile(model(equation, weight, "bt"), threads=1)
    assert Counter(layer["kind"] for layer in artifact.report["layers"]) == {"binary": 1}
    x = np.random.default_rng(2).standard_normal((3, 9, 8)).astype(np.float32)
    wanted = np.einsum(equation, np.sign(x), weight)
    np.testing.assert_array_equal(artifact.run({"x": x})["y"], wanted)
