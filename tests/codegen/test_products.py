"""Products of computed tensors read through transpositions, reshapes and repeated heads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import bnncc
from tests.collection.builder import Net

HEADS, SHARED, DEPTH = 4, 2, 24


def attention(rows: int, seen: int, *, masked: bool) -> onnx.ModelProto:
    """Return attention of `HEADS` heads, of which some have keys and values in common."""
    net = Net(17)
    q = net.input("q", [1, rows, HEADS * DEPTH])
    k, v = (net.input(name, [1, seen, SHARED * DEPTH]) for name in "kv")

    def shaped(x: str, *shape: int) -> str:
        return net.op("Reshape", x, net.const(shape, np.int64))

    def heads(x: str, count: int, length: int) -> str:
        return net.op("Transpose", shaped(x, 1, length, count, DEPTH), perm=[0, 2, 1, 3])

    def repeated(x: str) -> str:
        wide = net.op("Unsqueeze", heads(x, SHARED, seen), net.const([2], np.int64))
        shape = net.const([1, SHARED, HEADS // SHARED, seen, DEPTH], np.int64)
        return shaped(net.op("Expand", wide, shape), 1, HEADS, seen, DEPTH)

    keys = net.op("Transpose", repeated(k), perm=[0, 1, 3, 2])
    scores = net.op("MatMul", heads(q, HEADS, rows), keys)
    scores = net.op("Div", scores, net.const(np.float32(DEPTH**0.5)))
    if masked:
        scores = net.op("Add", scores, net.const(mask(rows, seen)))
    made = net.op("MatMul", net.op("Softmax", scores, axis=-1), repeated(v))
    joined = net.op("Transpose", made, perm=[0, 2, 1, 3])
    net.output(shaped(joined, 1, rows, HEADS * DEPTH))
    return net.model()


def mask(rows: int, seen: int) -> np.ndarray:
    return np.triu(np.full((1, 1, rows, seen), -np.inf, np.float32), 1)


@pytest.mark.parametrize(
    ("rows", "seen", "masked"), [(16, 16, True), (9, 20, False), (1, 33, False), (3, 5, True)]
)
def test_attention_of_shared_heads(rows: int, seen: int, masked: bool) -> None:
    artifact = bnncc.compile(attention(rows, seen, masked=masked), target="native")
    rng = np.random.default_rng(rows)
    shapes = {info.name: [int(d) for d in info.shape] for info in artifact.inputs}
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    q, k, v = (
        feeds[name][0].reshape(length, -1, DEPTH).transpose(1, 0, 2).astype(np.float64)
        for name, length in (("q", rows), ("k", seen), ("v", seen))
    )
    k, v = (np.repeat(x, HEADS // SHARED, 0) for x in (k, v))
    scores = q @ k.transpose(0, 2, 1) / DEPTH**0.5 + (mask(rows, seen)[0] if masked else 0)
    power = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = (power / power.sum(-1, keepdims=True)) @ v
    found = next(iter(artifact.run(feeds).values()))
    wanted = wanted.transpose(1, 0, 2).reshape(found.shape)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)
    copies = [k["name"] for k in artifact.report["kernels"] if "broadcast" in k["name"]]
    assert len(copies) == (rows >= 8)  # of the keys, turned, where many rows read them


def test_reshapes_between_kernels_copy_nothing() -> None:
    net = Net(17)
    x = net.input("x", ["N", 6, 8])
    y = net.op("MatMul", x, net.const(net.normal((8, 12))))
    y = net.op("Reshape", y, net.const([-1, 3, 24], np.int64))
    y = net.op("Softmax", y, axis=-1)
    y = net.op("Reshape", y, net.const([-1, 12, 6], np.int64))
    net.output(net.op("MatMul", y, net.const(net.normal((6, 5)))))
    model = net.model()
    artifact = bnncc.compile(model, threads=1)
    *between, _ = artifact.report["kernels"]  # the last one writes the network's output
    assert not [k["name"] for k in between if "reshape" in k["name"]]
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((3, 6, 8)).astype(np.float32)}
    assert bnncc.verify(model, artifact, feeds)["passed"]
    (first,) = artifact.run(feeds).values()
    place = np.empty_like(first)
    artifact.run(feeds, out={artifact.outputs[0].name: place})
    np.testing.assert_array_equal(place, first)
