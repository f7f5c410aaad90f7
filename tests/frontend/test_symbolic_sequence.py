"""A symbolic number of tokens, and caches that grow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import bnncc
from benchmarks.transformer_networks import bitnet, blocks
from bnncc.cli import main as cli
from bnncc.errors import InputError, ShapeError, UsageError
from bnncc.frontend.onnx import load
from bnncc.runtime.artifact import Artifact
from tests.collection import oracle
from tests.collection.builder import Net
from tests.runtime.test_selfcheck import parsed
from tests.transformer_blocks import SHAPE, SHARED

pytestmark = pytest.mark.sampled(2)

SIZES = ({"N": 1, "T": 1, "P": 1}, {"N": 2, "T": 7, "P": 3}, {"N": 3, "T": 33, "P": 20})


def agrees(model: onnx.ModelProto, artifact: Artifact, sizes: dict[str, int]) -> None:
    rng = np.random.default_rng(sizes["T"])
    feeds = {}
    for info in artifact.inputs:
        shape = [eval(d, {}, sizes) if isinstance(d, str) else d for d in info.shape]
        values = rng.standard_normal(shape) if info.dtype == "float32" else np.arange(shape[-1])
        feeds[info.name] = np.broadcast_to(values, shape).astype(info.dtype)
    verdict = oracle.compare(model, feeds, artifact.run(feeds))
    assert verdict.right or verdict.kind == "tie", verdict.text


def moves() -> onnx.ModelProto:
    """Slices, ranges and products of shapes, as causal masks and caches have them."""
    net = Net(seed=0)
    past, x = net.input("past", ["N", 2, "P", 4]), net.input("x", ["N", 2, "T", 4])
    mask = net.input("mask", ["N", 1, "T", "P + T"])
    whole = net.concat(past, x, axis=2)
    last = net.slice(whole, [-1], [np.iinfo(np.int64).max], [2])
    shifted = net.slice(net.concat(last, x, axis=2), [0], [-1], [2])
    shape = net.op("Shape", whole)
    n, tokens = (net.op("Gather", shape, net.ints([k])) for k in (0, 2))
    places = net.op("Range", *(net.const(v, np.int64) for v in (0,)),
                    net.op("Squeeze", tokens), net.const(1, np.int64))  # fmt: skip
    wide = net.op("Concat", n, net.ints([2, 3]), tokens, net.ints([4]), axis=0)
    spread = net.op("Expand", net.unsqueeze(whole, [2]), wide)
    heads = net.op("Reshape", spread, net.ints([0, 6, -1, 4]))
    ends = net.op("Sub", heads, net.unsqueeze(net.op("Cast", places, to=TensorProto.FLOAT), [1]))
    table = net.const(net.normal((9, 4)))
    first = net.op("Squeeze", net.slice(net.op("Shape", x), [2], [3], [0]))
    cut = net.op("Slice", table, net.ints([0]), net.unsqueeze(first, [0]), net.ints([0]))
    scores = net.op("MatMul", x, net.op("Transpose", whole, perm=[0, 1, 3, 2]))
    net.output(ends, net.op("Add", net.op("Add", shifted, x), cut), net.op("Add", scores, mask))
    return net.model(check=False)


def test_shapes_are_found_and_results_right(tmp_path: Path) -> None:
    artifact = bnncc.compile(moves(), threads=1, max_dims={"T": 9, "N": 3})
    assert [t.shape for t in artifact.inputs][2] == ("N", 1, "T", "P+T")
    shapes = [t.shape for t in artifact.outputs]
    assert shapes == [("N", 6, "P+T", 4), ("N", 2, "T", 4), ("N", 2, "T", "P+T")]
    for sizes in ({"N": 1, "T": 1, "P": 1}, {"N": 2, "T": 7, "P": 3}, {"N": 3, "T": 9, "P": 20}):
        agrees(moves(), artifact, sizes)
    artifact.save(tmp_path / "moves.bnncc")
    loaded = Artifact.load(tmp_path / "moves.bnncc")
    arrays = {
        "past": np.zeros((1, 2, 5, 4), np.float32), "x": np.zeros((1, 2, 10, 4), np.float32),
        "mask": np.zeros((1, 1, 10, 15), np.float32),
    }  # fmt: skip
    with pytest.raises(InputError, match="`T` is 10, the network was compiled for at most 9"):
        loaded.run(arrays)
    arrays["x"] = arrays["x"][:, :, :9]
    with pytest.raises(InputError, match=r"`mask`: dimension `T` is 10, but 9"):
        loaded.run(arrays)
    arrays["mask"] = arrays["mask"][:, :, :9]
    with pytest.raises(InputError, match=r"`mask`: dimension `P\+T` is 15, expected 14"):
        loaded.run(arrays)
    arrays["mask"] = arrays["mask"][..., :14]
    made = loaded.run(arrays)
    places = {name: np.empty_like(value) for name, value in made.items()}
    loaded.run(arrays, out=places)
    for name, value in made.items():
        np.testing.assert_array_equal(places[name], value)


def test_kernels_get_their_sizes_in_one_order() -> None:
    artifact = bnncc.compile(moves(), threads=1, max_dims={"T": 9})
    sizes = [symbol for k in artifact.report["kernels"] for _, symbol in k["sizes"]]
    assert {"P", "T"} <= set(sizes)
    for kernel in artifact.report["kernels"]:
        symbols = [symbol for _, symbol in kernel["sizes"]]
        assert symbols == sorted(symbols)
    checked = bnncc.verify(moves(), artifact)
    assert checked["passed"]
    assert len(checked["kernels"]) == len(artifact.report["kernels"])
    timed = bnncc.bench(artifact, repeat=1, batch=3)
    assert len(timed["kernels"]) == len(checked["kernels"])
    assert bnncc.compile(moves(), threads=1, max_dims={"T": 9}).library == artifact.library


def test_an_index_into_a_cache_is_checked() -> None:
    net = Net(seed=0)
    past, x = net.input("past", ["P", 4]), net.input("x", ["T", 4])
    at = net.op("Abs", net.input("at", ["M"], TensorProto.INT64))
    net.output(net.op("Gather", net.op("Relu", past), at, axis=0))
    net.output(net.op("Gather", net.concat(past, x, axis=0), at, axis=0))
    artifact = bnncc.compile(net.model(check=False), threads=1)
    rng = np.random.default_rng(1)
    feeds = {n: rng.standard_normal((k, 4)).astype(np.float32) for n, k in (("past", 5), ("x", 2))}
    first, second = artifact.run({**feeds, "at": np.array([-4, 1])}).values()
    np.testing.assert_array_equal(first, np.maximum(feeds["past"], 0)[[4, 1]])
    np.testing.assert_array_equal(second, feeds["past"][[4, 1]])
    assert bnncc.verify(net.model(), artifact, {**feeds, "at": np.array([-4, 1])})["kernels"]
    with pytest.raises(InputError, match=r"an index lies outside -P \.\. P - 1"):
        artifact.run({**feeds, "at": np.array([5])})


def test_a_table_is_cut_only_where_it_is_known_to_be_long_enough() -> None:
    with pytest.raises(ShapeError, match="takes T of 9 elements") as error:
        load(moves())
    assert error.value.hint == "bound it: --max-dim NAME=SIZE"
    with pytest.raises(ShapeError, match="takes T of 9 elements"):
        load(moves(), max_dims={"T": 10})


@pytest.mark.parametrize(
    "graph",
    [
        "(float[N, 3] x) => (float[2, 3] y) { y = Gather(x, places) }",
        "(float[N, 3] x) => (float[1, 3] y) { y = Slice(x, low, high) }",
    ],
)
def test_an_element_that_a_symbolic_axis_may_lack_is_refused(graph: str) -> None:
    given = {"places": [0, -12], "low": [11], "high": [12]}
    model = parsed(graph, **{name: np.array(v) for name, v in given.items() if name in graph})
    with pytest.raises(ShapeError, match="takes element 12 of an axis of N, which") as error:
        load(model)
    assert error.value.hint == "fix the size: --input-shape x:12x3"
    load(model, input_shapes={"x": (12, 3)})


def test_a_symbolic_start_of_a_slice_is_refused() -> None:
    graph = "(float[N, 3] x) => (float[K] y) { n = Shape <end = 1> (x) y = Slice(t, n, last) }"
    model = parsed(graph, t=np.ones(5, np.float32), last=np.array([2**40]))
    with pytest.raises(ShapeError, match=r"`Slice_y`: its shape .* pass --input-shape x:1x3"):
        load(model)


def test_max_dim_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="no dimension is called `S`; there are `N`, `P`, `T`"):
        load(moves(), max_dims={"S": 9})
    onnx.save(moves(), tmp_path / "moves.onnx")
    for text in ("T", "T=0", "T=x", "=5"):
        assert cli.main(["compile", str(tmp_path / "moves.onnx"), "--max-dim", text]) == 2
        assert "is not NAME=SIZE" in capsys.readouterr().err
    with pytest.raises(UsageError, match="max_dims"):
        bnncc.compile(moves(), max_dims={"T": 0})


def test_bits_of_bit_with_any_number_of_tokens() -> None:
    model = blocks("bit", replace(SHAPE, tokens="T", batch="N"))
    artifact = bnncc.compile(model, threads=1)
    for sizes in SIZES:
        agrees(model, artifact, sizes)
    kinds = [layer["kind"] for layer in artifact.report["layers"]]
    assert (kinds.count("binary"), kinds.count("float")) == (6, 2)  # attention is not in bits


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, "T"])
def test_a_cache_grows(tokens: int | str) -> None:
    model = bitnet(replace(SHARED, tokens=tokens, past="P", batch="N"), gate="silu")
    artifact = bnncc.compile(model, threads=1)
    for sizes in SIZES:
        agrees(model, artifact, sizes)


def scattered(operator: str) -> onnx.ModelProto:
    """Write new keys into a cache at positions that are an input."""
    net = Net(opset=18, seed=0)
    past, x = net.input("past", ["N", 2, 9, 4]), net.input("x", ["N", 2, "T", 4])
    at = net.input("at", ["T"], TensorProto.INT64)
    if operator == "ScatterElements":
        whole = net.op("Expand", net.op("Reshape", at, net.ints([1, 1, -1, 1])), net.op("Shape", x))
        net.output(net.op("ScatterElements", past, whole, x, axis=2))
    else:
        turned = (net.op("Transpose", y, perm=[2, 0, 1, 3]) for y in (past, x))
        rows, new = turned
        made = net.op("ScatterND", rows, net.unsqueeze(at, [1]), new)
        net.output(net.op("Transpose", made, perm=[1, 2, 0, 3]))
    return net.model(check=False)


@pytest.mark.parametrize("operator", ["ScatterElements", "ScatterND"])
def test_a_cache_is_written_at_positions(operator: str) -> None:
    artifact = bnncc.compile(scattered(operator), threads=1)
    rng = np.random.default_rng(2)
    for n, tokens, first in ((1, 1, 0), (2, 3, 6), (3, 9, 0)):
        past = rng.standard_normal((n, 2, 9, 4)).astype(np.float32)
        x = rng.standard_normal((n, 2, tokens, 4)).astype(np.float32)
        (got,) = artifact.run({"past": past, "x": x, "at": np.arange(tokens) + first}).values()
        past[:, :, first : first + tokens] = x
        np.testing.assert_array_equal(got, past)
    with pytest.raises(InputError, match="`at` holds 9"):
        artifact.run({"past": past[:1], "x": x[:1, :, :1], "at": np.array([9])})


def test_causal_masks_of_any_size() -> None:
    """The upper triangle of a full matrix, and positions that are compared."""
    net = Net(seed=0)
    x = net.input("x", ["N", "T", 8])
    tokens = net.op("Shape", x, start=1, end=2)
    least = onnx.helper.make_tensor("least", TensorProto.FLOAT, [1], [np.finfo(np.float32).min])
    full = net.op("ConstantOfShape", net.op("Concat", tokens, tokens, axis=0), value=least)
    later = net.op("Trilu", full, net.const(1, np.int64), upper=1)
    zero, one, three = (net.const(value, np.int64) for value in (0, 1, 3))
    at = net.op("Range", zero, net.op("Squeeze", tokens), one)
    first = net.op("Sub", net.unsqueeze(at, [1]), three)
    near = net.op("Greater", net.unsqueeze(at, [0]), first)
    scores = net.op("MatMul", x, net.op("Transpose", x, perm=[0, 2, 1]))
    scores = net.where(near, net.op("Add", scores, later), -np.inf)
    net.output(net.op("MatMul", net.op("Softmax", scores, axis=-1), x))
    model = net.model(check=False)
    artifact = bnncc.compile(model, threads=1, max_dims={"T": 40})
    for sizes in SIZES:
        agrees(model, artifact, sizes)


def test_a_size_that_is_added_to_positions() -> None:
    """TVM does not fuse the kernel that makes a tensor of a size."""
    net = Net(seed=0)
    past, x = net.input("past", ["P", 8]), net.input("x", ["T", 8])
    whole = net.op("Concat", past, x, axis=0)
    zero, one = net.const(0, np.int64), net.const(1, np.int64)
    before, tokens, length = (net.op("Gather", net.op("Shape", y), zero) for y in (past, x, whole))
    at = net.op("Add", before, net.unsqueeze(net.op("Range", zero, tokens, one), [0]))
    near = net.op("LessOrEqual", net.op("Range", zero, length, one),
                  net.op("Reshape", at, net.ints([-1, 1])))  # fmt: skip
    scores = net.op("MatMul", x, net.op("Transpose", whole, perm=[1, 0]))
    net.output(net.op("Add", scores, net.op("Cast", near, to=TensorProto.FLOAT)))
    model = net.model(check=False)
    artifact = bnncc.compile(model, threads=1)
    for sizes in SIZES:
        agrees(model, artifact, sizes)


def test_a_row_is_written_into_a_cache_of_any_size() -> None:
    net = Net(seed=0)
    cache, row = net.input("cache", ["P", 4]), net.input("row", [2, 4])
    at = net.input("at", [2, 1], TensorProto.INT64)
    net.output(net.op("ScatterND", cache, at, row))
    model = net.model(check=False)
    artifact = bnncc.compile(model, threads=1)
    rng = np.random.default_rng(0)
    feeds = {
        "cache": rng.standard_normal((9, 4)).astype(np.float32), "at": np.array([[2], [-1]]),
        "row": rng.standard_normal((2, 4)).astype(np.float32),
    }  # fmt: skip
    wanted = feeds["cache"].copy()
    wanted[[2, -1]] = feeds["row"]
    (found,) = artifact.run(feeds).values()
    np.testing.assert_array_equal(found, wanted)
    assert bnncc.verify(model, artifact, feeds)["passed"]
