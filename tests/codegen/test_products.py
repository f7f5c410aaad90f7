"""Products of computed tensors read through transpositions, reshapes and repeated heads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import bnncc
from tests.collection.builder import Net

HEADS, SHARED, DEPTH = 4, 2, 24


def attention(rows: int | str, seen: int | str, *, masked: bool) -> onnx.ModelProto:
    """Return attention of `HEADS` heads, of which some have keys and values in common.

    Sizes that are names are symbolic.
    """
    net = Net(17)
    q = net.input("q", [1, rows, HEADS * DEPTH])
    k, v = (net.input(name, [1, seen, SHARED * DEPTH]) for name in "kv")

    def shaped(x: str, *shape: int) -> str:
        return net.op("Reshape", x, net.const(shape, np.int64))

    def heads(x: str, count: int) -> str:
        return net.op("Transpose", shaped(x, 1, 0, count, DEPTH), perm=[0, 2, 1, 3])

    def repeated(x: str) -> str:
        wide = net.op("Unsqueeze", heads(x, SHARED), net.const([2], np.int64))
        before, behind = (net.const(d, np.int64) for d in ([1, SHARED, HEADS // SHARED], [DEPTH]))
        shape = net.op("Concat", before, net.op("Shape", x, start=1, end=2), behind, axis=0)
        return shaped(net.op("Expand", wide, shape), 1, HEADS, -1, DEPTH)

    keys = net.op("Transpose", repeated(k), perm=[0, 1, 3, 2])
    scores = net.op("MatMul", heads(q, HEADS), keys)
    scores = net.op("Div", scores, net.const(np.float32(DEPTH**0.5)))
    if masked and isinstance(rows, int) and isinstance(seen, int):
        scores = net.op("Add", scores, net.const(mask(rows, seen)))
    made = net.op("MatMul", net.op("Softmax", scores, axis=-1), repeated(v))
    joined = net.op("Transpose", made, perm=[0, 2, 1, 3])
    net.output(shaped(joined, 1, -1, HEADS * DEPTH))
    return net.model()


def mask(rows: int, seen: int) -> np.ndarray:
    return np.triu(np.full((1, 1, rows, seen), -np.inf, np.float32), 1)


def check(artifact: bnncc.Artifact, rows: int, seen: int, masked: bool) -> None:
    """Compare the artifact of `attention` with NumPy."""
    rng = np.random.default_rng(rows)
    feeds = {"q": rng.normal(size=(1, rows, HEADS * DEPTH)).astype(np.float32)}
    for name in "kv":
        feeds[name] = rng.normal(size=(1, seen, SHARED * DEPTH)).astype(np.float32)
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


def copies(artifact: bnncc.Artifact) -> list[str]:
    """Return the kernels that repeat keys or values."""
    return [k["name"] for k in artifact.report["kernels"] if "broadcast" in k["name"]]


def turned(artifact: bnncc.Artifact) -> list[str]:
    """Return the kernels that transpose: keys that many rows read, once for all heads.

    Products of many rows are written in the order in which they are read.
    """
    return [k["name"] for k in artifact.report["kernels"] if "transpose" in k["name"]]


@pytest.mark.parametrize(
    ("rows", "seen", "masked"), [(16, 16, True), (9, 20, False), (1, 33, False), (3, 5, True)]
)
def test_attention_of_shared_heads(rows: int, seen: int, masked: bool) -> None:
    artifact = bnncc.compile(attention(rows, seen, masked=masked), target="native")
    check(artifact, rows, seen, masked)
    assert not copies(artifact)
    assert len(turned(artifact)) == (rows > 1)  # the keys, or the result of few rows


def test_one_row_reads_any_number_of_keys_in_place() -> None:
    artifact = bnncc.compile(attention(1, "S", masked=False), threads=1)
    for seen in (1, 2, 15, 33):
        check(artifact, 1, seen, masked=False)
    assert not copies(artifact)


def test_any_number_of_rows_and_keys() -> None:
    artifact = bnncc.compile(attention("R", "S", masked=False), threads=1)
    # Rows in groups of 6, columns in vectors of 4 to 16 and in groups of 64.
    for rows, seen in ((1, 1), (7, 16), (17, 3), (6, 64), (12, 79), (13, 130), (5, 17), (8, 15)):
        check(artifact, rows, seen, masked=False)
    assert not copies(artifact)
    assert len(turned(artifact)) == 1


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


def test_one_shared_head_and_a_symbolic_batch() -> None:
    net = Net(17)
    q = net.input("q", ["N", HEADS, 9, DEPTH])
    k = net.input("k", ["N", 9, DEPTH])
    alone = net.op("Reshape", k, net.const([0, 0, 1, DEPTH], np.int64))
    wide = net.op("Unsqueeze", net.op("Transpose", alone, perm=[0, 2, 1, 3]), net.ints([2]))
    wide = net.op("Expand", wide, net.const([1, 1, HEADS, 1, 1], np.int64))
    keys = net.op("Reshape", wide, net.const([-1, HEADS, 9, DEPTH], np.int64))
    net.output(net.op("MatMul", q, net.op("Transpose", keys, perm=[0, 1, 3, 2])))
    artifact = bnncc.compile(net.model(), threads=1)
    rng = np.random.default_rng(0)
    for n in (1, 3):
        given, held = rng.normal(size=(n, HEADS, 9, DEPTH)), rng.normal(size=(n, 9, DEPTH))
        feeds = {"q": given.astype(np.float32), "k": held.astype(np.float32)}
        (found,) = artifact.run(feeds).values()
        wanted = given @ held[:, None].transpose(0, 1, 3, 2)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_one_head_of_keys_in_a_cache_that_grows() -> None:
    """TVM cannot tell whether transposing P + 17 keys is a reshape."""
    net = Net(17)
    q, k = (net.input(name, [2, 1, 17, 8]) for name in "qk")
    whole = net.concat(net.input("past", [2, 1, "P", 8]), k, axis=2)
    net.output(net.op("MatMul", q, net.op("Transpose", whole, perm=[0, 1, 3, 2])))
    artifact = bnncc.compile(net.model(check=False), threads=1)
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=(2, 1, 17, 8)).astype(np.float32) for name in "qk"}
    for past in (1, 5):
        feeds["past"] = rng.normal(size=(2, 1, past, 8)).astype(np.float32)
        (found,) = artifact.run(feeds).values()
        keys = np.concatenate([feeds["past"], feeds["k"]], axis=2)
        np.testing.assert_allclose(found, feeds["q"] @ keys.swapaxes(2, 3), rtol=1e-4, atol=1e-5)
