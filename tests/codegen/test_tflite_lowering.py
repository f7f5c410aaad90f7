"""What TensorFlow Lite's operators ask of lowering: slices that go backwards, narrow casts."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import bnncc
from bnncc.frontend.tflite_file import Network
from bnncc.frontend.tflite_writer import Writer


def compiled(nodes: list, kinds: tuple[int, int], **constants: np.ndarray) -> bnncc.Artifact:
    """Compile a graph from `x`, (1, 6, 5), to `y`."""
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", kinds[0], [1, 6, 5])],
        [helper.make_tensor_value_info("y", kinds[1], None)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return bnncc.compile(model)


@pytest.mark.parametrize(
    ("start", "end", "step"), [(-1, -(2**63) + 1, -2), (4, 1, -1), (2**63 - 1, -3, -1), (-9, 9, 2)]
)
def test_slice(start: int, end: int, step: int) -> None:
    bounds = {
        k: np.array([v], np.int64) for k, v in zip("sead", (start, end, 1, step), strict=True)
    }
    artifact = compiled(
        [helper.make_node("Slice", ["x", *bounds], ["y"])], (TensorProto.FLOAT,) * 2, **bounds
    )
    x = np.arange(30, dtype=np.float32).reshape(1, 6, 5)
    np.testing.assert_array_equal(artifact.run({"x": x})["y"], x[:, start:end:step])


def test_narrow_cast() -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT8)
    artifact = compiled([node], (TensorProto.FLOAT, TensorProto.INT8))
    x = np.linspace(-128, 127.9, 30).astype(np.float32).reshape(1, 6, 5)
    np.testing.assert_array_equal(artifact.run({"x": x})["y"], np.trunc(x).astype(np.int8))


def test_scalars_stay_scalars() -> None:
    writer = Writer(Network((), (), (), 0))
    writer.constant(np.array(3, np.int32))
    writer.constant(0.5)
    kept = writer.model("net").graph.initializer
    assert [list(tensor.dims) for tensor in kept] == [[], []]
