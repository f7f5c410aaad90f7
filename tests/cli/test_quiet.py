"""Nothing but our own lines reaches the user's terminal: TVM's warnings are about its own code."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import bnncc
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Node
from tests.frontend.test_onnx_attributes import Own, expected, ints, one_node, real, scalar

CASES: dict[str, Own] = {
    "gather": ("Gather", 18, [real(3, 5), ("i", ints(0, -1, 2))], {"axis": 1}, 1),
    "gather rows": ("Gather", 18, [real(6, 5), ("i", np.array([[0, 5], [2, -6]]))], {"axis": 0}, 1),
    "gather one": ("Gather", 18, [real(6, 5, 2), ("i", np.array(-2))], {"axis": 1}, 1),
    "reflect": ("Pad", 18, [real(1, 2, 4, 4), ("p", ints(0, 0, 1, 2, 0, 0, 1, 0))],
                {"mode": "reflect"}, 1),
    "tile": ("Tile", 18, [real(2, 3), ("n", ints(2, 3))], {}, 1),
    "scatter": ("ScatterElements", 18, [real(2, 8), ("i", np.array([[1, 3], [0, 7]])),
                                        ("u", real(2, 2))], {"axis": 1}, 1),
    "scatter rows": ("ScatterND", 18, [real(4, 8), ("i", np.array([[1], [3]])),
                                       ("u", real(2, 8))], {}, 1),
    **{f"power {v}": ("Pow", 18, [real(2, 8), ("c", scalar(v))], {}, 1)
       for v in (3.0, 4.0, 5.0, 7.0, 3.5, 11.0)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_compiling_is_quiet(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, feeds = one_node(CASES[name])
    made = bnncc.compile(model, threads=1).run(feeds)
    assert capfd.readouterr().err == ""
    np.testing.assert_allclose(made["y0"], expected(model, feeds)[0], rtol=1e-5)


def test_indices_that_the_network_computes_are_quiet_and_checked(
    capfd: pytest.CaptureFixture[str],
) -> None:
    nodes = [helper.make_node("Gather", ["x", "i"], ["y"], axis=1)]
    info = [
        helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 5]),
        helper.make_tensor_value_info("i", onnx.TensorProto.INT64, [3]),
    ]
    graph = helper.make_graph(nodes, "net", info, [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    artifact = bnncc.compile(model, threads=1)
    assert capfd.readouterr().err == ""
    x, index = real(2, 5), np.array([4, -5, 0])
    (want,) = evaluate_node(Node("Gather", ["x", "i"], ["y"], {"axis": 1}, ""), [x, index])
    np.testing.assert_array_equal(artifact.run({"x": x, "i": index})["y"], want)
    with pytest.raises(bnncc.errors.InputError):
        artifact.run({"x": x, "i": np.array([0, 5, 0])})
