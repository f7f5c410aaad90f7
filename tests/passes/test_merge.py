"""Sibling convolutions become one kernel, and every value stays the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import bnncc
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.recognise.binarize import binarize
from bnncc.recognise.signs import recognise_signs
from bnncc.transform.merge import ADD_REPEATED, merge_siblings
from bnncc.transform.simplify import simplify

NORM = "n# = BatchNormalization(c#, g#, b#, m#, v#)\n"
RESIDUAL = NORM + "z# = Add(n#, x)"


def model(channels: int, tail: str, parts: int = 2, head: str = "s# = Sign(x)") -> onnx.ModelProto:
    """Return convolutions of one sign, each with a tail, concatenated; signs and a sum behind."""
    rng = np.random.default_rng(channels)
    weights = {"t": rng.standard_normal((1, channels * parts, 1, 1))}
    body = []
    for i in range(parts):
        weights[f"w{i}"] = np.sign(rng.standard_normal((channels, channels, 1, 1)))
        weights |= {f"{k}{i}": rng.standard_normal(channels) for k in "gbm"}
        weights[f"v{i}"] = rng.uniform(0.5, 2, channels)
        weights[f"k{i}"] = rng.standard_normal((channels, 1, 1))
        body.append(head.replace("#", str(i)))
        body.append(f"c{i} = Conv<pads=[0, 0, 0, 0]>(s{i}, w{i})")
        body.append(tail.replace("#", str(i)))
    parts_text = ", ".join(f"z{i}" for i in range(parts))
    body += [f"q = Concat<axis=1>({parts_text})", "r = Add(q, t)", "f = Sign(r)", "y = Add(r, f)"]
    out = f"1,{channels * parts},5,6"
    made = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 17]>
        net (float[1,{channels},5,6] x) => (float[{out}] y) {{ {" ".join(body)} }}"""
    )
    for name, value in weights.items():
        array = onnx.numpy_helper.from_array(value.astype(np.float32), name)
        made.graph.initializer.append(array)
    return onnx.shape_inference.infer_shapes(made)


def merged(proto: onnx.ModelProto) -> list[str]:
    """Return the operators after the pass; layers keep their names."""
    graph = load(proto)
    simplify(graph)
    recognise_signs(graph)
    layers = binarize(graph)
    merge_siblings(graph)
    covers = [c for n in graph.nodes for c in n.covers]
    assert sorted(covers) == sorted(layer.name for layer in layers)
    return [n.op for n in graph.nodes]


@pytest.mark.parametrize(
    ("channels", "tail", "parts"),
    [
        (16, RESIDUAL, 2),
        (48, RESIDUAL.replace("Add(n#, x)", "Add(x, n#)"), 3),
        (13, NORM + "z# = Relu(n#)", 2),
        (5, "n# = Add(c#, k#) p# = PRelu(n#, k#) z# = Relu(p#)", 3),
    ],
)
def test_siblings_become_one_kernel(channels: int, tail: str, parts: int) -> None:
    proto = model(channels, tail, parts)
    ops = merged(proto)
    assert ops.count("bnncc.BinaryConv") == 1
    assert "Concat" not in ops
    assert (ADD_REPEATED in ops) == ("x)" in tail or "(x" in tail)
    artifact = bnncc.compile(proto)
    assert artifact.report["summary"]["binary"] == parts
    x = np.random.default_rng(1).standard_normal((1, channels, 5, 6)).astype(np.float32)
    wanted = evaluate(load(proto), {"x": x})["y"]
    np.testing.assert_allclose(artifact.run({"x": x})["y"], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("channels", "tail", "head"),
    [
        (12, RESIDUAL, "s# = Sign(x)"),  # the residual would not repeat by whole vectors
        (16, NORM + "z# = Add(n#, n#)", "s# = Sign(x)"),
        (16, NORM + "z# = Sigmoid(n#)", "s# = Sign(x)"),
        (16, NORM + "o# = Relu(n#) z# = Add(o#, n#)", "s# = Sign(x)"),
        (16, RESIDUAL, "h# = Add(x, k#) s# = Sign(h#)"),  # signs of two tensors
    ],
)
def test_others_are_left_alone(channels: int, tail: str, head: str) -> None:
    ops = merged(model(channels, tail, head=head))
    assert ops.count("bnncc.BinaryConv") == 2
    assert "Concat" in ops


def test_a_part_that_others_read_is_left_alone() -> None:
    proto = model(16, RESIDUAL)
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z0", 1, [1, 16, 5, 6]))
    assert "Concat" in merged(proto)
