"""ONNX files become normalized, folded, typed graphs; broken ones are refused with a clear line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bnncc.errors import ModelError, ShapeError, UnsupportedOp, UsageError
from bnncc.frontend.onnx import load
from bnncc.ir.graph import Graph
from tests.collection import handmade

F32 = TensorProto.FLOAT


def model(
    nodes: list[onnx.NodeProto],
    *,
    x: object = ("N", 8, 6, 6),
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 17,
    imports: list[tuple[str, int]] | None = None,
    functions: list[onnx.FunctionProto] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", F32, x)],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid(d, v) for d, v in imports or [("", opset)]]
    made = helper.make_model(graph, opset_imports=opsets, functions=functions or [])
    made.ir_version = 9
    return made


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


def node(graph: Graph, op: str) -> object:
    return next(n for n in graph.nodes if n.op == op)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


W = np.ones((4, 8, 3, 3), np.float32)


def test_defaults_and_auto_pad_are_written_out() -> None:
    conv = helper.make_node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[2, 2])
    found = node(load(model([conv], weights={"w": W})), "Conv")
    assert found.attrs["pads"] == [0, 0, 1, 1]
    assert found.attrs["auto_pad"] == "NOTSET"
    assert found.attrs["dilations"] == [1, 1]
    assert found.attrs["kernel_shape"] == [3, 3]
    assert found.attrs["group"] == 1
    assert found.covers == (found.name,)


@pytest.mark.parametrize("opset", [9, 10, 11, 13, 18])
def test_pad_has_one_form(opset: int) -> None:
    if opset < 11:
        pad = helper.make_node("Pad", ["x"], ["y"], pads=[0, 0, 1, 1, 0, 0, 1, 1], value=-1.0)
        weights = {}
    elif opset < 18:
        pad = helper.make_node("Pad", ["x", "p", "v"], ["y"])
        weights = {"p": ints(0, 0, 1, 1, 0, 0, 1, 1), "v": np.float32(-1)}
    else:
        pad = helper.make_node("Pad", ["x", "p", "v", "a"], ["y"])
        weights = {"p": ints(1, 1, 1, 1), "v": np.float32(-1), "a": ints(2, -1)}
    graph = load(model([pad], weights=weights, opset=opset))
    found = node(graph, "Pad")
    assert graph.constants[found.inputs[1]].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert graph.constants[found.inputs[2]] == -1
    assert graph.types["y"].shape == ("N", 8, 8, 8)


def test_shape_chain_of_a_dynamic_batch_folds() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"], axis=0),
        helper.make_node("Unsqueeze", ["n", "axes"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["t"], axis=0),
        helper.make_node("Reshape", ["x", "t"], ["y"]),
    ]
    weights = {"zero": np.int64(0), "axes": ints(0), "rest": ints(-1)}
    graph = load(model(nodes, weights=weights))
    assert ops(graph) == ["Reshape"]
    assert graph.types["y"].shape == ("N", 288)
    assert graph.constants[graph.nodes[0].inputs[1]].tolist() == [0, 288]


def test_spread_out_constants_shrink() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("ConstantOfShape", ["s"], ["one"], value=_scalar(1.0)),
        helper.make_node("Neg", ["one"], ["minus"]),
        helper.make_node("Add", ["x", "full"], ["a"]),
        helper.make_node("GreaterOrEqual", ["a", "zero"], ["c"]),
        helper.make_node("Where", ["c", "one", "minus"], ["y"]),
    ]
    full = np.broadcast_to(np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1), (1, 8, 6, 6))
    graph = load(model(nodes, weights={"full": full.copy(), "zero": np.float32(0)}))
    assert ops(graph) == ["Add", "GreaterOrEqual", "Where"]
    where, add = node(graph, "Where"), node(graph, "Add")
    assert [graph.constants[i].tolist() for i in where.inputs[1:]] == [1.0, -1.0]
    assert graph.constants[add.inputs[1]].shape == (1, 8, 1, 1)


def _scalar(value: float) -> TensorProto:
    return numpy_helper.from_array(np.array([value], np.float32))


def test_weight_chain_folds() -> None:
    nodes = [
        helper.make_node("Sign", ["w"], ["s"]),
        helper.make_node("Abs", ["w"], ["a"]),
        helper.make_node("ReduceMean", ["a"], ["m"], axes=[1, 2, 3]),
        helper.make_node("Mul", ["s", "m"], ["q"]),
        helper.make_node("Conv", ["x", "q"], ["y"]),
    ]
    graph = load(model(nodes, weights={"w": W * np.float32(-0.5)}))
    assert ops(graph) == ["Conv"]
    assert (graph.constants["q"] == np.float32(-0.5)).all()


def test_functions_are_inlined_with_their_own_opset() -> None:
    body = [helper.make_node("Clip", ["a"], ["b"], min=-1.0, max=1.0)]
    made = helper.make_function("mine", "Limit", ["a"], ["b"], body, [helper.make_opsetid("", 9)])
    call = helper.make_node("Limit", ["x"], ["y"], "here", domain="mine")
    graph = load(model([call], imports=[("mine", 1), ("", 17)], functions=[made]))
    assert ops(graph) == ["Clip"]
    assert graph.constants[graph.nodes[0].inputs[2]] == 1


def test_dynamic_dimensions_and_input_shapes() -> None:
    conv = helper.make_node("Conv", ["x", "w"], ["y"])
    dynamic = model([conv], x=(None, 8, "H", "W"), weights={"w": W})
    with pytest.raises(ShapeError, match=r"--input-shape x:1x8x224x224"):
        load(dynamic)
    assert load(dynamic, input_shapes={"x": (2, 8, 5, 5)}).types["y"].shape == (2, 4, 3, 3)
    relu = model([helper.make_node("Relu", ["x"], ["y"])], x=(None, 3))
    assert load(relu).types["y"].shape == ("N", 3)
    with pytest.raises(UsageError, match="no input is called `z`"):
        load(relu, input_shapes={"z": (1, 3)})
    assert load(relu, input_shapes={"x": (1, 4)}).types["y"].shape == (1, 4)
    with pytest.raises(UsageError, match="--input-shape is 4, expected 2 dimensions"):
        load(relu, input_shapes={"x": (4,)})


def test_node_names_are_unique() -> None:
    nodes = [
        helper.make_node("Relu", [a], [b], n) for a, b, n in (("x", "a", "r"), ("a", "b", "r"))
    ]
    graph = load(model([*nodes, helper.make_node("Neg", ["b"], ["y"])]))
    assert [n.name for n in graph.nodes] == ["r", "r_2", "Neg_y"]


def test_external_data_lies_in_the_folder(tmp_path: Path) -> None:
    made = model([helper.make_node("Conv", ["x", "w"], ["y"])], weights={"w": W})
    onnx.save(
        made,
        tmp_path / "net.onnx",
        save_as_external_data=True,
        location="net.bin",
        size_threshold=0,
    )
    assert (load(tmp_path / "net.onnx").constants["w"] == 1).all()
    outside = tmp_path / "sub"
    outside.mkdir()
    (outside / "net.onnx").write_bytes((tmp_path / "net.onnx").read_bytes())
    with pytest.raises(ModelError, match=r"external data file `net.bin` is missing"):
        load(outside / "net.onnx")
    (outside / "net.bin").symlink_to(tmp_path / "net.bin")
    with pytest.raises(ModelError, match="by a link"):
        load(outside / "net.onnx")


CONV = helper.make_node("Conv", ["x", "w"], ["y"], "conv1")
HOSTILE = {
    "group": (
        [helper.make_node("Conv", ["x", "w"], ["y"], "conv1", group=3)],
        ShapeError,
        r"Conv `conv1`: `group` is 3 but 8 input channels are not a multiple of it",
    ),
    "channels": (
        [helper.make_node("Conv", ["x", "bad"], ["y"], "conv1")],
        ShapeError,
        r"input has 8 channels, expected 7 for weight \[4, 7, 3, 3\] and group 1",
    ),
    "no channels": (
        [helper.make_node("Conv", ["x", "none"], ["y"], "conv1")],
        ShapeError,
        r"weight has shape \[4, 0, 3, 3\], expected sizes of 1 or more",
    ),
    "nan": (
        [helper.make_node("Conv", ["x", "nan"], ["y"], "conv1")],
        ModelError,
        "Conv `conv1`: constant `nan` holds NaN",
    ),
    "cycle": (
        [helper.make_node("Add", ["x", "y"], ["a"]), helper.make_node("Relu", ["a"], ["y"])],
        ModelError,
        "cycle",
    ),
    "unknown": (
        [
            helper.make_node("Frobnicate", ["x"], ["a"], "f"),
            helper.make_node("Quant", ["a"], ["y"], "q", domain="other"),
        ],
        UnsupportedOp,
        "2 nodes have an operator that is not supported: Frobnicate `f`, other::Quant `q`",
    ),
    "long": (
        [helper.make_node("A" * 1000, ["x"], ["y"], "f")],
        UnsupportedOp,
        "^[^A]{0,80}A{250}$",
    ),
    "bomb": (
        [
            helper.make_node("ConstantOfShape", ["huge"], ["c"], "bomb"),
            helper.make_node("Add", ["x", "c"], ["y"]),
        ],
        ShapeError,
        "ConstantOfShape `bomb`: output: shape .* more than the limit",
    ),
    "ghost": (
        [helper.make_node("Relu", ["ghost"], ["y"])],
        ModelError,
        "`ghost` is defined nowhere",
    ),
    "attribute": (
        [helper.make_node("Conv", ["x", "w"], ["y"], "conv1", strides="two")],
        ModelError,
        "attribute `strides` is STRING, expected INTS",
    ),
    "kernel": (
        [helper.make_node("MaxPool", ["x"], ["y"], "pool", kernel_shape=[9, 9])],
        ShapeError,
        "kernel spans 9, larger than the padded input of 6",
    ),
    "ceil": (
        [
            helper.make_node(
                "MaxPool", ["x"], ["y"], "pool", kernel_shape=[8, 8], strides=[2, 2], ceil_mode=1
            )
        ],
        ShapeError,
        "kernel spans 8, larger than the padded input of 6",
    ),
    "index": (
        [
            helper.make_node("ConstantOfShape", ["one"], ["zero"]),  # of float32, if not told
            helper.make_node("Slice", ["x", "zero", "one"], ["y"], "s"),
        ],
        ModelError,
        "Slice `s`: `starts` has type float32, expected int64",
    ),
    "condition": (
        [helper.make_node("Where", ["x", "x", "x"], ["y"], "c")],
        ModelError,
        "Where `c`: `condition` has type float32, expected bool",
    ),
    "newer": (
        [helper.make_node("Gelu", ["x"], ["y"], "g")],
        UnsupportedOp,
        "is of opset 20, the file imports 17",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_broken_models_are_refused(name: str) -> None:
    nodes, kind, text = HOSTILE[name]
    weights = {
        "w": W,
        "bad": np.ones((4, 7, 3, 3), np.float32),
        "none": np.ones((4, 0, 3, 3), np.float32),
        "nan": W * np.float32("nan"),
        "huge": ints(1 << 40),
        "one": ints(1),
    }
    with pytest.raises(kind, match=text):
        load(model(nodes, x=(1, 8, 6, 6), weights=weights))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "empty"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"hello, world", "not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
    ],
)
def test_files_that_are_no_models(content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(ModelError, match=text):
        load(tmp_path / "net.onnx")
    with pytest.raises(ModelError, match="is a directory"):
        load(tmp_path)


def test_custom_domain_first_or_missing_loads() -> None:
    relu = helper.make_node("Relu", ["x"], ["y"])
    assert ops(load(model([relu], imports=[("qonnx.custom_op.general", 1), ("", 13)]))) == ["Relu"]


def test_deep_chain_does_not_recurse() -> None:
    nodes = [
        helper.make_node("Neg", [f"t{k}" if k else "x"], [f"t{k + 1}" if k < 2999 else "y"])
        for k in range(3000)
    ]
    assert len(load(model(nodes)).nodes) == 3000


@pytest.mark.parametrize("case", [c for c in handmade.cases() if c.quick], ids=lambda c: c.name)
def test_every_tensor_is_typed(case: handmade.Case) -> None:
    graph = load(case.model)
    named = {n for node in graph.nodes for n in (*node.inputs, *node.outputs) if n}
    assert named | set(graph.inputs) | set(graph.outputs) <= set(graph.types)
