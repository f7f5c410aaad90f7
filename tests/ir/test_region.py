"""A part of a graph is that part of the whole, number for number."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bnncc.errors import ModelError
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph
from bnncc.ir.region import Box, region, slices, whole
from tests.random_models import Maker


def graph_of(body: str, shape: tuple[int, ...], kind: str = "float", **constants: Any) -> Graph:
    dims = ",".join(map(str, shape))
    text = (
        f'<ir_version: 9, opset_import: ["" : 18]> g ({kind}[{dims}] x) => (float y) {{ {body} }}'
    )
    model = onnx.parser.parse_model(text)
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    model.graph.output[0].CopyFrom(onnx.ValueInfoProto(name="y"))
    return load(model)


def a_box(rng: np.random.Generator, shape: tuple[int, ...]) -> Box:
    lows = [int(rng.integers(0, d)) for d in shape]
    return tuple(
        (low, int(rng.integers(low + 1, d + 1))) for low, d in zip(lows, shape, strict=True)
    )


def elements(graph: Graph) -> int:
    """Return how many numbers are computed."""
    return sum(int(np.prod(graph.types[o].shape)) for n in graph.nodes for o in n.outputs if o)


def agrees(graph: Graph, rng: np.random.Generator, turns: int = 6) -> list[Graph]:
    """Compare parts of a graph with the whole; return them."""
    feeds = {
        i: rng.integers(-9, 10, graph.types[i].shape).astype(graph.types[i].dtype)
        for i in graph.inputs
    }
    right = evaluate(graph, feeds)
    parts = []
    for _ in range(turns):
        wanted = {o: a_box(rng, right[o].shape) for o in graph.outputs}
        part = region(graph, wanted)
        made = evaluate(part.graph, part.of(feeds))
        for name, value in made.items():
            box = part.boxes[name]
            assert all(a <= c and d <= b for (a, b), (c, d) in zip(box, wanted[name], strict=True))
            assert value.dtype == right[name].dtype
            near = 1e-6 * np.abs(right[name]).max() if value.dtype.kind == "f" else 0
            np.testing.assert_allclose(value, right[name][slices(box)], rtol=0, atol=near)
        for name, kind in part.graph.types.items():
            if name in made:
                assert kind.shape == made[name].shape
        parts.append(part.graph)
    return parts


IMAGE = (3, 4, 11, 9)
W = np.random.default_rng(0).integers(-3, 4, (6, 4, 3, 3)).astype(np.float32)
LOCAL = {
    "conv": "y = Conv <pads=[1,1,1,1]> (x, w)",
    "conv strided": "y = Conv <strides=[2,3], pads=[2,0,1,2]> (x, w)",
    "conv dilated": "y = Conv <dilations=[2,1], auto_pad=\"SAME_LOWER\", strides=[1,2]> (x, w)",
    "depthwise": "y = Conv <group=4, pads=[1,1,1,1]> (x, d)",
    "transposed": "y = ConvTranspose <strides=[2,2], pads=[1,0,0,1], output_padding=[1,1]> (x, t)",
    "transposed by": "y = ConvTranspose <strides=[3,2], dilations=[2,1]> (x, t)",
    "max": "y = MaxPool <kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,1]> (x)",
    "max ceil": "y = MaxPool <kernel_shape=[2,2], strides=[2,2], ceil_mode=1> (x)",
    "mean": "y = AveragePool <kernel_shape=[3,3], strides=[2,1], pads=[1,1,1,1]> (x)",
    "full mean": "y = AveragePool <kernel_shape=[3,3], count_include_pad=1, pads=[1,1,1,1]> (x)",
    "last": "a = Transpose <perm=[0,2,3,1]> (x) b = Mul(a, row) y = Relu(b)",
    "residual": "a = Conv <pads=[1,1,1,1]> (x, u) b = Add(a, x) s = Sign(b) "
    "y = Concat <axis=1> (s, x)",
    "split": "a, b = Split <axis=1, num_outputs=2> (x) y = Sub(b, a)",
    "slice": "y = Slice(x, one, two, one)",
    "pad": "y = Pad(x, pads, half)",
    "pad some": "y = Pad(x, ones, half, both)",
    "blocks": "a = DepthToSpace <blocksize=2> (x) y = Abs(a)",
    "repeat": "y = Resize <mode=\"nearest\", coordinate_transformation_mode=\"asymmetric\", "
    "nearest_mode=\"floor\"> (x, empty, scales)",
    "norm": "y = BatchNormalization (x, four, four, four, four)",
    "compare": "g = Greater(x, plane) y = Where(g, half, x)",
    "quantize": "q = QuantizeLinear(x, four, zeros) y = DequantizeLinear(q, four, zeros)",
    "best": "a = ArgMax <axis=1, keepdims=0> (x) y = Cast <to=1> (a)",
    "sums": "y = ReduceSum <keepdims=1> (x, one)",
    "softmax": "y = Softmax <axis=1> (x)",
}  # fmt: skip
CONSTANTS = {
    "w": W, "d": W[:4, :1], "t": W[:4], "u": W[:4], "row": np.arange(1, 5, dtype=np.float32),
    "one": np.array([1]), "two": np.array([3]), "pads": np.array([0, 0, 2, 1, 0, 0, 1, 3]),
    "ones": np.array([1, 2, 3, 1]), "both": np.array([2, -1]), "half": np.float32(0.5),
    "scales": np.array([1, 1, 2, 3], np.float32), "empty": np.zeros(0, np.float32),
    "four": np.array([1, 2, 3, 4], np.float32), "zeros": np.zeros(4, np.int8),
    "plane": np.random.default_rng(1).integers(-3, 4, (1, 1, 11, 9)).astype(np.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", LOCAL)
def test_what_is_near(name: str) -> None:
    used = {k: v for k, v in CONSTANTS.items() if f" {k}" in LOCAL[name].replace("(", "( ")}
    graph = graph_of(LOCAL[name], IMAGE, **used)
    parts = agrees(graph, np.random.default_rng(3), turns=12)
    assert min(map(elements, parts)) < elements(graph) / 4


ROWS = {
    "flatten": "a = Flatten(x) b = MatMul(a, m) y = Relu(b)",
    "reshape": "a = Reshape(x, rows) y = Gemm <transB=1, alpha=0.5> (a, n, bias)",
    "global": "a = GlobalAveragePool(x) b = Squeeze(a, both) y = Softmax(b)",
    "products": "a = Reshape(x, squares) b = Transpose <perm=[0,2,1]> (a) y = MatMul(a, b)",
    "norm": "a = InstanceNormalization(x, four, four) y = Flatten(a)",
}


@pytest.mark.parametrize("name", ROWS)
def test_images_of_a_batch(name: str) -> None:
    given = {
        **CONSTANTS,
        "m": W.reshape(-1)[:176].reshape(16, 11), "n": W.reshape(-1)[:176].reshape(11, 16),
        "rows": np.array([5, 16]), "squares": np.array([0, 4, -1]), "both": np.array([2, 3]),
        "bias": np.arange(11, dtype=np.float32),
    }  # fmt: skip
    used = {k: v for k, v in given.items() if f" {k}" in ROWS[name].replace("(", "( ")}
    graph = graph_of(ROWS[name], (5, 4, 2, 2), **used)
    parts = agrees(graph, np.random.default_rng(4), turns=12)
    assert min(map(elements, parts)) < elements(graph) / 2


def test_an_operator_that_is_not_known_reads_all() -> None:
    graph = graph_of("a = CumSum(x, one) y = Relu(a)", IMAGE, one=np.array(1))
    assert all(p.types["x"].shape == IMAGE for p in agrees(graph, np.random.default_rng(5)))


def test_the_whole_is_a_part() -> None:
    graph = graph_of(LOCAL["residual"], IMAGE, u=CONSTANTS["u"])
    part = region(graph, {"y": whole(graph.types["y"].shape)}).graph
    assert [n.op for n in part.nodes] == [n.op for n in graph.nodes]


@pytest.mark.parametrize("seed", range(40))
def test_random_networks(seed: int) -> None:
    model = Maker(seed).build()
    try:
        graph = load(model)
        shapes = {
            i: tuple(d if isinstance(d, int) else 3 for d in graph.types[i].shape)
            for i in graph.inputs
        }
        graph = load(model, input_shapes=shapes)
    except ModelError:
        pytest.skip("not a model")
    agrees(graph, np.random.default_rng(seed), turns=3)
