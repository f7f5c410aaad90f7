"""Images as bytes: ``--input-uint8``, in both layouts, equal to doing the arithmetic outside."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bnncc
from bnncc.errors import UsageError
from bnncc.options import Uint8Input

pytestmark = pytest.mark.sampled(3)


def _model(batch: int | str) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((20, 3, 3, 3)).astype(np.float32),
        "v": np.where(rng.integers(0, 2, (5, 20, 3, 3)), 1, -1).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Sign", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "v"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 15, 11])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("batch", [1, "N"])
@pytest.mark.parametrize(
    ("mean", "scale"), [((127.5,), (1 / 64,)), ((123.0, 116.0, 103.0), (0.25, 0.5, 1.0))]
)
def test_bytes_give_what_floats_give(
    layout: str, batch: int | str, mean: tuple, scale: tuple
) -> None:
    model = _model(batch)
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (1 if batch == 1 else 3, 3, 15, 11)).astype(np.uint8)
    shape = (1, -1, 1, 1)
    floats = (pixels - np.float32(mean).reshape(shape)) * np.float32(scale).reshape(shape)
    wanted = bnncc.compile(model).run({"x": floats.astype(np.float32)})["y"]
    artifact = bnncc.compile(model, input_uint8=[Uint8Input("x", mean, scale, layout)])
    given = pixels if layout == "nchw" else np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
    assert artifact.inputs[0].dtype == "uint8"
    np.testing.assert_array_equal(artifact.run({"x": given})["y"], wanted)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (Uint8Input("z", (0.0,), (1.0,)), "`z` is not an input"),
        (Uint8Input("x", (0.0, 1.0), (1.0,)), "2 values of mean for the 3 channels"),
    ],
)
def test_what_does_not_fit_is_refused(image: Uint8Input, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bnncc.compile(_model(1), input_uint8=[image])


def test_layout_changes_at_the_ends_of_an_nhwc_graph_cost_no_kernel() -> None:
    model = _model(1)
    image = model.graph.input[0].type.tensor_type.shape.dim
    for dim, size in zip(image, (1, 15, 11, 3), strict=True):
        dim.dim_value = size
    model.graph.node.insert(0, helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]))
    model.graph.node[1].input[0] = "t"
    model.graph.node[-1].output[0] = "u"
    model.graph.node.append(helper.make_node("Transpose", ["u"], ["y"], perm=[0, 2, 3, 1]))
    artifact = bnncc.compile(model)
    assert [k["op"] for k in artifact.report["kernels"]] == ["conv2d", "binary_conv2d"]
