"""Key/value caches that a network continues in the caller's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import bnncc
from bnncc.cli import main as cli
from bnncc.errors import BnnccError, InputError, UsageError
from bnncc.runtime.session import aligned_empty
from tests.collection.builder import Net
from tests.kernel_harness import HERE

pytestmark = pytest.mark.sampled(4)

HEADS, SHARED, DEPTH, ROOM = 4, 2, 16, 12
PAIRS = {"past_k": "present_k", "past_v": "present_v"}


def decoder(past: int | str = "P", tokens: int | str = 1) -> onnx.ModelProto:
    """Return attention with a cache, whose outputs are called as in `PAIRS`."""
    net = Net(17)
    x = net.input("x", [1, tokens, HEADS * DEPTH])
    olds = [net.input(name, [1, SHARED, past, DEPTH]) for name in PAIRS]

    def heads(count: int) -> str:
        wide = net.op("MatMul", x, net.const(net.normal((HEADS * DEPTH, count * DEPTH)) / 8))
        cut = net.op("Reshape", wide, net.const([1, -1, count, DEPTH], np.int64))
        return net.op("Transpose", cut, perm=[0, 2, 1, 3])

    def repeated(cache: str) -> str:
        length = net.op("Shape", cache, start=2, end=3)
        before, behind = (net.const(d, np.int64) for d in ([1, SHARED, HEADS // SHARED], [DEPTH]))
        wide = net.op("Unsqueeze", cache, net.const([2], np.int64))
        wide = net.op("Expand", wide, net.op("Concat", before, length, behind, axis=0))
        return net.op("Reshape", wide, net.const([1, HEADS, -1, DEPTH], np.int64))

    keys, data = (net.op("Concat", old, heads(SHARED), axis=2) for old in olds)
    turned = net.op("Transpose", repeated(keys), perm=[0, 1, 3, 2])
    scores = net.op("Softmax", net.op("MatMul", heads(HEADS), turned), axis=-1)
    made = net.op("Transpose", net.op("MatMul", scores, repeated(data)), perm=[0, 2, 1, 3])
    net.output(net.op("Reshape", made, net.const([1, -1, HEADS * DEPTH], np.int64)))
    for cache in (keys, data):
        net.output(cache)
    model = net.model()
    renamed = dict(zip([o.name for o in model.graph.output], ["y", *PAIRS.values()], strict=True))
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    for output in model.graph.output:
        output.name = renamed[output.name]
    return model


def buffers(rows: int = ROOM, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Return memory for caches, by input; rows that are not used are NaN."""
    made = {name: aligned_empty((1, SHARED, rows, DEPTH), dtype) for name in PAIRS}
    for array in made.values():
        array[...] = np.nan
    return made


def with_half_caches(model: onnx.ModelProto, kind: str) -> onnx.ModelProto:
    """Return a model in which only the caches, and what is appended to them, are of 16 bits."""
    graph, code = model.graph, onnx.TensorProto.DataType.Value(kind.upper())
    for info in [*graph.input, *graph.output]:
        if info.name in {*PAIRS, *PAIRS.values()}:
            info.type.tensor_type.elem_type = code
    nodes = []
    for node in graph.node:
        made = node.output[0]
        wide = [f"{name}.wide" if name in PAIRS.values() else name for name in node.input]
        node.input[:] = wide
        if made in PAIRS.values():
            old, new = node.input
            nodes.append(onnx.helper.make_node("Cast", [new], [f"{new}.half"], to=code))
            node.input[:] = [old, f"{new}.half"]
        nodes.append(node)
        if made in PAIRS.values():
            to = {"to": onnx.TensorProto.FLOAT}
            nodes.append(onnx.helper.make_node("Cast", [made], [f"{made}.wide"], **to))
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return model


def step(
    held: dict[str, np.ndarray], past: int, x: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return inputs and places of outputs that are views of `held`."""
    length = past + x.shape[1]
    feeds = {"x": x, **{name: array[:, :, :past] for name, array in held.items()}}
    out = {PAIRS[name]: array[:, :, :length] for name, array in held.items()}
    return feeds, {"y": aligned_empty(x.shape, "float32"), **out}


def contiguous(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(array) for name, array in feeds.items()}


def wanted(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what `onnx.reference` computes."""
    names = [output.name for output in model.graph.output]
    run = onnx.reference.ReferenceEvaluator(model).run(None, contiguous(feeds))
    return dict(zip(names, run, strict=True))


class Calls:
    """Notes which function of a session is called."""

    def __init__(self, artifact: bnncc.Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        session = artifact.session()
        run = session.run

        def noted(tensors: list[Any], function: Any = None) -> Any:
            known = {None: "main", session.main_into: "into", session.main_in_place: "in place"}
            self.names.append(known[function])
            return run(tensors, function)

        monkeypatch.setattr(session, "run", noted)


@pytest.fixture(scope="module")
def grown() -> bnncc.Artifact:
    return bnncc.compile(decoder(), threads=1, max_dims={"P": ROOM}, in_place=PAIRS)


def test_compilations_are_equal(grown: bnncc.Artifact) -> None:
    for _ in range(3):
        again = bnncc.compile(decoder(), threads=1, max_dims={"P": ROOM}, in_place=PAIRS)
        assert again.library == grown.library


@pytest.fixture
def calls(grown: bnncc.Artifact, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(grown, monkeypatch)


def inputs(tokens: int = 1, seed: int = 0) -> np.ndarray:
    made = aligned_empty((1, tokens, HEADS * DEPTH), "float32")
    made[...] = np.random.default_rng(seed).standard_normal(made.shape)
    return made


def filled(held: dict[str, np.ndarray], rows: int) -> None:
    for seed, array in enumerate(held.values()):
        values = np.random.default_rng(seed).standard_normal((1, SHARED, rows, DEPTH))
        array[:, :, :rows] = values


def test_tokens_are_appended_in_place(grown: bnncc.Artifact, calls: Calls) -> None:
    model, held = decoder(), buffers()
    filled(held, 3)
    for past in range(3, ROOM):
        feeds, out = step(held, past, inputs(seed=past))
        expected = wanted(model, feeds)
        before = {name: array[:, :, :past].copy() for name, array in held.items()}
        made = grown.run(feeds, out=out)
        for name, array in expected.items():
            np.testing.assert_allclose(made[name], array, rtol=1e-5, atol=1e-6)
        for name, array in held.items():
            assert np.array_equal(array[:, :, :past], before[name])
            assert np.isnan(array[:, :, past + 1 :]).all()
    assert set(calls.names) == {"in place"}


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("pairs", [{}, PAIRS])
@pytest.mark.parametrize("target", HERE)
def test_a_cache_starts_empty(target: str, pairs: dict[str, str], tokens: int) -> None:
    model, held = decoder(tokens=tokens), buffers()
    made = bnncc.compile(model, target=target, threads=1, max_dims={"P": ROOM}, in_place=pairs)
    for past in range(0, ROOM - tokens, tokens):
        feeds, out = step(held, past, inputs(tokens, past))
        expected = wanted(model, contiguous(feeds))
        if pairs:
            assert all(made.run(feeds, out=out)[name] is array for name, array in out.items())
        else:
            out = made.run(contiguous(feeds))
            for name, present in PAIRS.items():
                held[name][:, :, : past + tokens] = out[present]
        for name, array in expected.items():
            np.testing.assert_allclose(out[name], array, rtol=1e-5, atol=1e-6)
        assert all(np.isnan(array[:, :, past + tokens :]).all() for array in held.values())


def test_only_caches_may_be_empty() -> None:
    made = bnncc.compile(decoder(tokens="T"), threads=1, max_dims={"P": ROOM, "T": ROOM})
    feeds, _ = step(buffers(), 0, inputs())
    assert made.run(contiguous(feeds))["y"].shape == feeds["x"].shape
    with pytest.raises(InputError, match=r"`x` has shape \[1, 0, 64\], .* with `T` at least 1"):
        made.run({**contiguous(feeds), "x": feeds["x"][:, :0]})
    with pytest.raises(InputError, match=r"`past_k` has shape .*, expected \[1, 2, P, 16\]$"):
        made.run({**contiguous(feeds), "past_k": np.zeros((1, 2, 0, 15), np.float32)})


@pytest.mark.parametrize("reader", ["Slice", "Equal", "Range", "Concat of another axis", "output"])
def test_what_else_reads_a_cache(reader: str) -> None:
    """Where it could not be empty in the model, or is more than copied, it may not be here."""
    net = Net(17)
    x, past = net.input("x", [1, 2, 8]), net.input("past", [1, "P", 8])
    whole = net.op("Concat", past, x, axis=1)
    ends = [net.const([n], np.int64) for n in (-3, 2**40, 1)]
    length = net.op("Shape", past, start=1, end=2)
    if reader == "Slice":  # the last three, of which two are new
        net.output(net.op("Slice", whole, *ends))
    elif reader == "Equal":
        none = net.op("Equal", length, net.const([0], np.int64))
        net.output(net.op("Where", none, net.op("Shape", past), net.op("Shape", whole)))
        net.output(whole)
    elif reader == "Range":
        start, step = (net.const(n, np.int64) for n in (0, 1))
        net.output(net.op("Range", start, net.op("Squeeze", length), step))
        net.output(whole)
    elif reader == "output":
        net.output(net.op("Neg", past))
        net.output(whole)
    else:
        net.output(net.op("Concat", past, past, axis=2))
        net.output(whole)
    made = bnncc.compile(net.model(), threads=1, max_dims={"P": 8})
    feeds = {"x": np.ones((1, 2, 8), np.float32), "past": np.ones((1, 0, 8), np.float32)}
    with pytest.raises(InputError, match=r"`past` .* with `P` at least 1"):
        made.run(feeds)


def test_in_place_and_copied_results_are_equal(grown: bnncc.Artifact) -> None:
    held = buffers()
    filled(held, 5)
    feeds, out = step(held, 5, inputs())
    copied = grown.run(contiguous(feeds))
    strided = grown.run(feeds)
    made = grown.run(feeds, out=out)
    for name, array in copied.items():
        assert np.array_equal(array, strided[name])
        assert np.array_equal(array, made[name])


def test_the_front_of_the_buffer_is_not_copied(grown: bnncc.Artifact) -> None:
    # Given another `past`, the variant in place attends to what the buffer holds.
    import tvm_ffi

    held = buffers()
    filled(held, 5)
    feeds, out = step(held, 5, inputs())
    expected = wanted(decoder(), feeds)["y"]
    session = grown.session()
    tensors = session.tensors({n: a if n == "x" else a * 0 for n, a in contiguous(feeds).items()})
    places = [tvm_ffi.from_dlpack(out[info.name]) for info in grown.outputs]
    session.main_in_place(*tensors, *places)
    np.testing.assert_allclose(out["y"], expected, rtol=1e-5, atol=1e-6)


def test_other_memory_is_written_as_usual(grown: bnncc.Artifact, calls: Calls) -> None:
    model, x = decoder(), inputs()

    def check(feeds: dict[str, np.ndarray], out: dict[str, np.ndarray]) -> None:
        expected = wanted(model, feeds)
        made = grown.run(feeds, out=out)
        for name, array in expected.items():
            np.testing.assert_allclose(made[name], array, rtol=1e-5, atol=1e-6)

    held, others = buffers(), buffers()
    filled(held, 5)
    feeds, out = step(held, 5, x)
    _, elsewhere = step(others, 5, x)
    check(feeds, elsewhere)
    check(feeds, {**out, "present_k": elsewhere["present_k"]})  # one of two in place
    behind = {PAIRS[name]: array[:, :, 1:7] for name, array in held.items()}
    check(feeds, {**out, **behind})  # the same memory, but other rows
    filled(held, 5)
    crossed = {"present_k": out["present_v"], "present_v": out["present_k"]}
    check(feeds, {**out, **crossed})
    odd = {n: np.empty(a.size + 1, np.float32)[1:].reshape(a.shape) for n, a in held.items()}
    odd = {n: a if a.ctypes.data % 64 else a[:, :, 1:] for n, a in odd.items()}
    filled(odd, 5)
    feeds, out = step(odd, 5, x)
    check(feeds, out)  # where the network cannot write
    assert "in place" not in calls.names


def test_caches_that_lie_between_each_other(grown: bnncc.Artifact, calls: Calls) -> None:
    both = aligned_empty((1, SHARED, 2, ROOM, DEPTH), "float32")
    held = {name: both[:, :, k] for k, name in enumerate(PAIRS)}
    filled(held, 4)
    feeds, out = step(held, 4, inputs())
    expected = wanted(decoder(), feeds)
    made = grown.run(feeds, out=out)
    for name, array in expected.items():
        np.testing.assert_allclose(made[name], array, rtol=1e-5, atol=1e-6)


def test_several_tokens_and_fixed_sizes(tmp_path) -> None:
    for past, tokens in (("P", "T"), (4, 3)):
        model = decoder(past, tokens)
        artifact = bnncc.compile(model, threads=1, in_place=PAIRS)
        artifact.save(tmp_path / "decoder.bnncc")
        loaded = bnncc.Artifact.load(tmp_path / "decoder.bnncc", selfcheck=True)
        held = buffers()
        filled(held, 4)
        feeds, out = step(held, 4, inputs(3))
        expected = wanted(model, feeds)
        made = loaded.run(feeds, out=out)
        for name, array in expected.items():
            np.testing.assert_allclose(made[name], array, rtol=1e-5, atol=1e-6)
        assert all(made[PAIRS[name]].base is not None for name in held)
    assert bnncc.verify(model, artifact)["passed"]


def test_arrays_that_do_not_fit(grown: bnncc.Artifact) -> None:
    held = buffers()
    filled(held, 5)
    feeds, out = step(held, 5, inputs())
    turned = {name: a.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2) for name, a in out.items()
              if a.ndim == 4}  # fmt: skip
    with pytest.raises(InputError, match="`present_k` is not contiguous and writeable"):
        grown.run(feeds, out={**out, **turned})
    with pytest.raises(InputError, match=r"`present_k`: dimension `P.1` is 5, expected 6"):
        grown.run(feeds, out={**out, "present_k": held["past_k"][:, :, :5]})
    reversed_rows = {**feeds, "past_k": feeds["past_k"][:, :, ::-1]}
    expected = wanted(decoder(), reversed_rows)
    np.testing.assert_allclose(grown.run(reversed_rows)["y"], expected["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["native", "x86-64-v2"])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_caches_of_16_bits(
    kind: str, tokens: int, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read and written as they are; the rest of the network is float32."""
    if target not in (*HERE, "native"):
        pytest.skip(f"this machine does not run {target}")
    model = with_half_caches(decoder("P", tokens), kind)
    options: dict[str, Any] = {"target": target, "threads": 1, "max_dims": {"P": ROOM}}
    artifact = bnncc.compile(model, in_place=PAIRS, **options)
    calls, held = Calls(artifact, monkeypatch), buffers(dtype=kind)
    filled(held, 3)
    feeds, out = step(held, 3, inputs(tokens))
    expected = wanted(model, feeds)
    copied = artifact.run(contiguous(feeds))
    made = artifact.run(feeds, out=out)
    # Arrays of NumPy share no memory of bfloat16.
    assert calls.names[-1] == ("in place" if kind == "float16" else "main")
    for name, array in expected.items():
        assert made[name].dtype == array.dtype
        assert np.array_equal(made[name], copied[name])
        # A number next to a tie may become another one of 16 bits than in the model.
        limit = 2.0 ** (-10 if kind == "float16" else -7)
        found, right = (x.astype(np.float32) for x in (made[name], array))
        np.testing.assert_allclose(found, right, rtol=limit, atol=limit if name == "y" else 0)
    directly = any(name.startswith("matmul") for name in readers(artifact, kind))
    assert directly == (tokens == 1)  # otherwise they are converted once for all tokens
    assert bnncc.verify(model, artifact)["passed"]
    without = bnncc.compile(model, **options).run(contiguous(feeds))
    assert all(np.array_equal(without[name], copied[name]) for name in copied)


def readers(artifact: bnncc.Artifact, kind: str) -> set[str]:
    """Return the kernels that read tensors of a type."""
    every = artifact.report["kernels"]
    return {k["name"] for k in every if any(arg["dtype"] == kind for arg in k["args"][:-1])}


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"k": "present_k"}, "k=present_k: no input is called `k`; there are x, past_k, past_v"),
        ({"past_k": "k"}, "past_k=k: no output is called `k`; there are y, present_k, present_v"),
        ({"past_k": "present_v"}, "past_k=present_v: the output is not a Concat of the input and"),
        ({"past_k": "y"}, "past_k=y: the output is not a Concat of the input and one other tensor"),
    ],
)
def test_what_cannot_be_in_place(pairs: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        bnncc.compile(decoder(), threads=1, max_dims={"P": ROOM}, in_place=pairs)
    assert str(error.value).startswith(f"--in-place {message}")


def written(*, reduction: str = "none", grows: bool = False) -> onnx.ModelProto:
    """Return a cache of which rows at positions are written, perhaps after zeros are appended."""
    net = Net(18)
    past, rows = net.input("past", ["P", 2, 4]), net.input("rows", [2, 2, 4])
    at = net.input("at", [2, 1], onnx.TensorProto.INT64)
    base = net.op("Concat", past, net.const(np.zeros((2, 2, 4))), axis=0) if grows else past
    made = net.op("ScatterND", base, at, rows, reduction=reduction)
    net.output(made)
    net.output(net.op("Relu", made))
    return net.model()


@pytest.mark.parametrize("grows", [False, True])
def test_rows_are_written_in_place(grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = written(grows=grows)
    pairs = {"past": model.graph.output[0].name}
    artifact = bnncc.compile(model, threads=1, in_place=pairs)
    calls, held = Calls(artifact, monkeypatch), aligned_empty((9, 2, 4), "float32")
    held[...] = np.nan
    held[:7] = np.random.default_rng(0).standard_normal((7, 2, 4))
    past = held[:5] if grows else held[:7]
    feeds = {
        "past": past,
        "rows": inputs()[0, :1, :16].reshape(2, 2, 4),
        "at": np.array([[1], [-1]]),
    }
    expected = list(wanted(model, feeds).values())
    out = {info.name: aligned_empty((7, 2, 4), "float32") for info in artifact.outputs}
    made = artifact.run(feeds, out={**out, pairs["past"]: held[:7]})
    for array, right in zip(made.values(), expected, strict=True):
        np.testing.assert_array_equal(array, right)
    assert calls.names == ["in place"]
    assert np.isnan(held[7:]).all()
    before = held.copy()
    with pytest.raises(InputError, match="an index lies outside"):
        artifact.run({**feeds, "at": np.array([[1], [7]])}, out={**out, pairs["past"]: held[:7]})
    np.testing.assert_array_equal(held, before)
    copied = artifact.run(contiguous({**feeds, "past": past * 0}))
    assert np.count_nonzero(copied[pairs["past"]]) == 16


def test_rows_that_are_added_are_not_in_place() -> None:
    model = written(reduction="add")
    with pytest.raises(UsageError, match="nor a ScatterND into either"):
        bnncc.compile(model, threads=1, in_place={"past": model.graph.output[0].name})


def simple(reads: str) -> onnx.ModelProto:
    """Return a cache whose input, or whose output as one row, is read by something else."""
    net = Net(17)
    past, new = net.input("past", [1, 2, 4, 8]), net.input("new", [1, 2, 1, 8])
    made = net.op("Concat", past, new, axis=2)
    net.output(made)
    if reads == "past":
        net.output(net.op("Relu", past))
    else:
        row = net.op("Reshape", made, net.const([1, 80], np.int64))
        net.output(net.op("Softmax", row, axis=-1))
    return net.model()


def test_rows_that_are_read_by_instructions() -> None:
    net = Net(17)
    past, new = net.input("past", ["P", 8]), net.input("new", [1, 8])
    made = net.op("Concat", past, new, axis=0)
    net.output(made, net.op("Relu", made))
    model = net.model()
    with pytest.raises(UsageError, match="as one piece of memory"):
        bnncc.compile(model, threads=1, in_place={"past": model.graph.output[0].name})


@pytest.mark.parametrize(
    ("reads", "message"), [("past", "the input is also read by `n_4`"), ("row", "as one piece of")]
)
def test_caches_that_are_read_otherwise(reads: str, message: str) -> None:
    model = simple(reads)
    pairs = {"past": model.graph.output[0].name}
    with pytest.raises(UsageError, match=message):
        bnncc.compile(model, threads=1, in_place=pairs)


def test_the_option(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "decoder.onnx"
    onnx.save(decoder(4), path)
    asked = [f"--in-place={past}={present}" for past, present in PAIRS.items()]
    out = tmp_path / "decoder.bnncc"
    assert cli.main(["compile", str(path), "--threads", "1", "-o", str(out), *asked]) == 0
    assert bnncc.Artifact.load(out).manifest["semantics"]["in_place"] == PAIRS
    capsys.readouterr()
    for given, said in (("k", "`k` is not INPUT=OUTPUT"), ("=y", "`=y` is not INPUT=OUTPUT")):
        assert cli.main(["compile", str(path), "--in-place", given]) == 2
        assert said in capsys.readouterr().err
    for extra, said in (
        (["--format", "c"], "--in-place needs TVM's runtime, which C code lacks"),
        (["--target", "cuda-sm90a"], "--in-place needs a CPU target, and cuda-sm90a is not one"),
    ):
        assert cli.main(["compile", str(path), *asked, *extra]) == 2
        assert said in capsys.readouterr().err
    for pairs in ({"past_k": "y", "past_v": "y"}, {"past_k": 1}, ["past_k"]):
        with pytest.raises(BnnccError, match="in_place"):
            bnncc.compile(decoder(4), in_place=pairs)
