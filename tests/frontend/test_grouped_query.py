"""GroupQueryAttention of ONNX Runtime's own domain, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import bnncc
from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph
from bnncc.runtime.session import aligned_empty
from tests.collection.builder import Net
from tests.runtime.test_in_place import Calls

pytestmark = pytest.mark.sampled(6)

Array = np.ndarray[Any, Any]
HEADS, SHARED, SIZE, ROWS = 4, 2, 16, 24
INPUTS = ["q", "k", "v", "pk", "pv", "lengths", "total", "cos", "sin", "places", "bias"]
ANGLES = np.random.default_rng(0).standard_normal((ROWS, SIZE // 2)).astype(np.float32)


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((*shape, seed)).standard_normal(shape).astype(np.float32)


def feeds_of(
    lengths: list[int], tokens: int, past: int, whole: int, *, packed: bool = False
) -> dict[str, Array]:
    """Return inputs for sequences of `lengths` with the new tokens."""
    batch = len(lengths)
    wide = {"q": HEADS, "k": SHARED, "v": SHARED}
    if packed:
        wide = {"q": HEADS + 2 * SHARED}
    feeds = {n: numbers(batch, tokens, w * SIZE, seed=s) for s, (n, w) in enumerate(wide.items())}
    if past:
        feeds |= {n: numbers(batch, SHARED, past, SIZE, seed=s) for s, n in enumerate(("pk", "pv"))}
    ends = np.array(lengths, np.int32) - 1
    return {**feeds, "lengths": ends, "total": np.array(whole, np.int32)}


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def attention(
    feeds: dict[str, Array], constants: dict[str, Array], **attrs: Any
) -> onnx.ModelProto:
    """Return a model of one node with those of `INPUTS` that are given."""
    names = [name if name in {**feeds, **constants} else "" for name in INPUTS]
    outputs = ["y", "nk", "nv"]
    node = helper.make_node(
        "GroupQueryAttention", names, outputs, "attention", domain="com.microsoft",
        **{"num_heads": HEADS, "kv_num_heads": SHARED, **attrs},
    )  # fmt: skip
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in feeds.items()
    ]
    held = [onnx.numpy_helper.from_array(v, n) for n, v in constants.items()]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node], "attention", given, made, held)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def agrees(
    feeds: dict[str, Array], *, constant: tuple[str, ...] = ("total",), **attrs: Any
) -> None:
    """Compare the rows that are not padding, of the output and of the caches."""
    fixed = {name: feeds[name] for name in constant}
    if attrs.get("do_rotary"):
        fixed |= {"cos": np.cos(ANGLES), "sin": np.sin(ANGLES)}
    given = {n: v for n, v in feeds.items() if n not in fixed}
    model = attention(given, fixed, **attrs)
    wanted = session(model).run(None, given)
    graph = load(model)
    results = evaluate(graph, given)
    found = [results[name] for name in graph.outputs]
    tokens = feeds["q"].shape[1]
    for b, length in enumerate(feeds["lengths"].reshape(-1) + 1):
        rows = min(tokens, length)
        np.testing.assert_allclose(found[0][b, :rows], wanted[0][b, :rows], rtol=2e-5, atol=2e-6)
        for mine, theirs in zip(found[1:], wanted[1:], strict=True):
            assert mine.shape == theirs.shape
            np.testing.assert_allclose(
                mine[b, :, :length], theirs[b, :, :length], rtol=2e-5, atol=2e-6
            )


STEPS = {
    "prompt": ([7, 7], 7, 0, 7),
    "padded prompt": ([7, 4], 7, 0, 7),
    "prompt into a buffer": ([7, 4], 7, 12, 7),
    "token": ([8, 8], 1, 7, 8),
    "token of shorter sequences": ([8, 5], 1, 7, 8),
    "token into a buffer": ([8, 5], 1, 12, 8),
    "token into a full buffer": ([12, 5], 1, 12, 12),
    "several tokens": ([10], 3, 7, 10),
    "several tokens into a buffer": ([10], 3, 12, 10),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"do_rotary": 1, "local_window_size": 3},
        {"do_rotary": 1, "rotary_interleaved": 1, "scale": 0.7, "softcap": 1.5},
    ],
    ids=["", "rotary", "interleaved"],
)
def test_steps(step: str, packed: bool, attrs: dict[str, Any]) -> None:
    agrees(feeds_of(*STEPS[step], packed=packed), **attrs)


@pytest.mark.parametrize("step", STEPS)
def test_bias_and_positions(step: str) -> None:
    lengths, tokens, past, whole = STEPS[step]
    feeds = feeds_of(lengths, tokens, past, whole)
    bias = numbers(1, HEADS, tokens, whole)
    agrees({**feeds, "bias": bias}, softcap=1.5)
    agrees({**feeds, "bias": bias[:, :1]})
    places = np.arange(2, 2 + tokens) + np.zeros((len(lengths), 1), np.int64)
    agrees({**feeds, "places": places}, do_rotary=1)


def test_lengths_of_two_axes() -> None:
    feeds = feeds_of(*STEPS["token of shorter sequences"])
    agrees({**feeds, "lengths": feeds["lengths"].reshape(-1, 1)})


def test_part_of_each_head_is_rotated() -> None:
    """Heads of 32, of which tables of 8 columns rotate 16."""
    agrees(feeds_of(*STEPS["padded prompt"]), do_rotary=1, num_heads=2, kv_num_heads=1)


@pytest.mark.parametrize("step", ["token", "several tokens", "token of shorter sequences"])
def test_caches_without_padding_are_appended_to(step: str) -> None:
    """Lengths that are constants tell whether a sequence is padded."""
    feeds = feeds_of(*STEPS[step])
    agrees(feeds, constant=("total", "lengths"), do_rotary=1)
    fixed = {name: feeds.pop(name) for name in ("total", "lengths")}
    ops = [node.op for node in load(attention(feeds, fixed))]
    padded = step == "token of shorter sequences"
    assert ops.count("ScatterND") == 2 * padded


HIDDEN = HEADS * SIZE
PAIRS = {"past_key": "present_key", "past_value": "present_value"}


def block(
    *,
    past: int | str,
    whole: int | str,
    batch: int | str = 2,
    tokens: int | str = 1,
    masked: bool = True,
    dtype: str = "float32",
) -> onnx.ModelProto:
    """Return attention with a residual between ternary linear layers.

    If it is not `masked`, all sequences are as long as `mask`. Attention computes in `dtype`.
    """
    kind = TensorProto.DataType.Value(dtype.replace("32", "").upper())
    net = Net(17, seed=1)
    net.domains["com.microsoft"] = 1
    x = net.input("x", [batch, tokens, HIDDEN])
    olds = [net.input(name, [batch, SHARED, past, SIZE], kind) for name in PAIRS]
    mask = net.input("mask", [batch, whole], TensorProto.INT64)

    def linear(x: str, units: int) -> str:
        most = net.op("ReduceMax", net.op("Abs", x), axes=[-1], keepdims=1)
        scale = net.op("Div", net.const(127), net.op("Clip", most, net.const(1e-5)))
        rounded = net.op("Round", net.op("Mul", x, scale))
        data = net.op("Clip", rounded, net.const(-128), net.const(127))
        made = net.op("MatMul", data, net.const(net.rng.integers(-1, 2, (HIDDEN, units))))
        return net.op("Mul", net.op("Div", made, scale), net.const((1.5 * HIDDEN) ** -0.5))

    one = net.const(1, np.int64)
    longest = net.op("Gather", net.op("Shape", mask), one)
    if masked:
        ends = net.op("Sub", net.op("ReduceSum", mask, net.ints([1]), keepdims=0), one)
    else:
        rows = net.op("Shape", x, start=0, end=1)
        ends = net.op("Expand", net.op("Sub", longest, one), rows)
    ends, longest = (net.op("Cast", n, to=TensorProto.INT32) for n in (ends, longest))
    operands = [net.op("Cast", linear(x, n * SIZE), to=kind) for n in (HEADS, SHARED, SHARED)]
    tables = [net.const(f(ANGLES), np.dtype(dtype).type) for f in (np.cos, np.sin)]
    node = helper.make_node(
        "GroupQueryAttention", [*operands, *olds, ends, longest, *tables],
        ["attended", *PAIRS.values()], "gqa", domain="com.microsoft", num_heads=HEADS,
        kv_num_heads=SHARED, do_rotary=1,
    )  # fmt: skip
    net.nodes.append(node)
    made = linear(net.op("Cast", "attended", to=TensorProto.FLOAT), HIDDEN)
    net.output(net.op("Add", x, made), *PAIRS.values())
    model = net.model(check=False)
    for value, one in zip(model.graph.output, (TensorProto.FLOAT, kind, kind), strict=True):
        value.CopyFrom(helper.make_tensor_value_info(value.name, one, None))
    return model


ROOM = 12
"""Positions of the buffers that hold caches."""


def decoded(model: onnx.ModelProto, artifact: bnncc.Artifact, lengths: list[int]) -> None:
    """Compare three steps with ONNX Runtime; caches are written to the memory that they are in."""
    batch, longest, rng = len(lengths), max(lengths), np.random.default_rng(0)
    held = buffers(batch, artifact.inputs[1].dtype)
    for array in held.values():
        array[...] = np.nan
        array[:, :, :longest] = rng.standard_normal((batch, SHARED, longest, SIZE))
    for past in range(longest, longest + 3):
        olds = {name: array[:, :, :past] for name, array in held.items()}
        places = {PAIRS[name]: array[:, :, : past + 1] for name, array in held.items()}
        lengths = [length + 1 for length in lengths]
        mask = np.arange(past + 1) < np.array(lengths)[:, None]
        step(model, artifact, {**olds, "mask": mask.astype(np.int64)}, places, lengths)


def buffers(batch: int, dtype: str = "float32") -> dict[str, Array]:
    return {name: aligned_empty((batch, SHARED, ROOM, SIZE), dtype) for name in PAIRS}


def step(
    model: onnx.ModelProto,
    artifact: bnncc.Artifact,
    feeds: dict[str, Array],
    places: dict[str, Array],
    lengths: list[int],
    tokens: int = 1,
) -> None:
    """Compare a step with ONNX Runtime, copied and in place."""
    x, y = (aligned_empty((len(lengths), tokens, HIDDEN), "float32") for _ in range(2))
    x[...] = np.random.default_rng(lengths).standard_normal(x.shape)
    feeds = {"x": x, **feeds}
    copies = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
    wanted, copied = session(model).run(None, copies), artifact.run(copies)
    artifact.run(feeds, out={next(iter(copied)): y, **places})
    for made in (list(copied.values()), [y, *places.values()]):
        assert [array.shape for array in made] == [array.shape for array in wanted]
        for b, length in enumerate(lengths):
            mine, theirs = ([a[0][b, :length], *(c[b, :, :length] for c in a[1:])]
                            for a in (made, wanted))  # fmt: skip
            for array, right in zip(mine, theirs, strict=True):
                limit = 1e-5 if feeds["past_key"].dtype == np.float32 else 2e-2
                np.testing.assert_allclose(array, right, rtol=limit, atol=limit)


HALF = {"past": "past", "whole": "past+1", "batch": "batch", "dtype": "float16"}


@pytest.mark.parametrize(
    ("sizes", "bounds", "batches"),
    [
        (HALF, {}, [[5, 3], [4]]),
        ({**HALF, "batch": 1, "masked": False}, {"past": ROOM}, [[5]]),
        ({"past": "past", "whole": "past+1", "batch": "batch"}, {}, [[5, 3], [4]]),
        ({"past": "past", "whole": "past+1", "batch": 1, "masked": False}, {"past": ROOM}, [[5]]),
    ],
    ids=["padded float16", "not padded float16", "padded", "not padded"],
)
def test_a_block_with_caches_that_grow(
    sizes: dict[str, Any],
    bounds: dict[str, int],
    batches: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = block(**sizes)
    artifact = bnncc.compile(model, threads=1, max_dims=bounds, in_place=PAIRS)
    kinds = [layer["kind"] for layer in artifact.report["layers"]]
    assert kinds == ["few_bit"] * 3 + ["float"] * 2 + ["few_bit"]
    calls = Calls(artifact, monkeypatch)
    for lengths in batches:
        decoded(model, artifact, lengths)
    assert calls.names == ["main", "in place"] * 3 * len(batches)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [1, "tokens"])
def test_a_cache_that_grows_starts_empty(tokens: int | str, masked: bool) -> None:
    whole = "past+1" if tokens == 1 else "past+tokens"
    model = block(past="past", whole=whole, tokens=tokens, batch=1, masked=masked)
    artifact = bnncc.compile(model, threads=1, max_dims={"past": ROOM})
    held = {name: np.zeros((1, SHARED, 0, SIZE), np.float32) for name in PAIRS}
    for number, new in enumerate((1, 1) if tokens == 1 else (5, 1, 2)):
        x = numbers(1, new, HIDDEN, seed=number)
        mask = np.ones((1, held["past_key"].shape[2] + new), np.int64)
        feeds = {"x": x, **held, "mask": mask}
        made, wanted = artifact.run(feeds), session(model).run(None, feeds)
        for array, right in zip(made.values(), wanted, strict=True):
            np.testing.assert_allclose(array, right, rtol=1e-5, atol=1e-5)
        held = {name: made[present] for name, present in PAIRS.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_block_with_a_buffer(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a prompt, padded for one sequence, and single tokens."""
    model = block(past=ROOM, whole="whole", tokens="tokens", dtype=dtype)
    artifact = bnncc.compile(model, threads=1, max_dims={"whole": ROOM}, in_place=PAIRS)
    calls, held = Calls(artifact, monkeypatch), buffers(2, dtype)
    for array in held.values():
        array[...] = 0
    lengths = [6, 4]
    for tokens, whole in ((6, 6), (1, 7), (1, 8)):
        mask = np.arange(whole) < np.array(lengths)[:, None]
        places = {PAIRS[name]: array for name, array in held.items()}
        step(model, artifact, {**held, "mask": mask.astype(np.int64)}, places, lengths, tokens)
        lengths = [length + 1 for length in lengths]
    assert calls.names == ["main", "in place"] * 3


@pytest.mark.parametrize(
    ("attrs", "said"),
    [
        ({"smooth_softmax": 1}, "`smooth_softmax` is 1, expected 0"),
        ({"causal": 0}, "`causal` is 0, expected 1"),
        ({"k_quant_type": "PER_TENSOR"}, "`k_quant_type` is PER_TENSOR, expected NONE"),
        ({"num_heads": 3}, "`num_heads` is 3 and `kv_num_heads` is 2, expected a multiple"),
        ({"do_rotary": 1}, "`do_rotary` is 1, but cos_cache is missing"),
    ],
)
def test_attributes_that_are_not_supported(attrs: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedOp, match=said):
        load(attention(feeds_of(*STEPS["token"]), {}, **attrs))


def test_inputs_that_are_not_supported() -> None:
    feeds = feeds_of(*STEPS["token"])
    total = {"total": feeds.pop("total")}
    said = {
        "past_key has 6 positions and past_value 7": (feeds | {"pk": feeds["pk"][:, :, 1:]}, total),
        "the cache is float16, expected float32": (
            feeds | {n: feeds[n].astype(np.float16) for n in ("pk", "pv")}, total
        ),
        "found one of key and value, expected both": (
            {n: v for n, v in feeds.items() if n != "v"}, total
        ),
        r"its input 1 has shape \[2, 1, 64\], expected \[2, 1, 32\]": (
            feeds | {"k": feeds["q"]}, total
        ),
        r"total_sequence_length \(`total`\) depends on data": (feeds | total, {}),
        "is 9, but there is no past_key and the query 1 tokens; expected 1": (
            {n: v for n, v in feeds.items() if n[0] != "p"}, {"total": np.array(9, np.int32)}
        ),
    }  # fmt: skip
    for text, (given, fixed) in said.items():
        with pytest.raises((UnsupportedOp, ShapeError), match=text):
            load(attention(given, fixed))
    model = attention(feeds, total)
    model.graph.node[0].input.extend(["sink"])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(HEADS, np.float32), "sink"))
    with pytest.raises(UnsupportedOp, match="input `head_sink` is not supported"):
        load(model)
    del model.graph.node[0].attribute[:]
    with pytest.raises(ModelError, match="required attribute `kv_num_heads` is missing"):
        load(model)


def loaded(**shapes: tuple[int | str, ...]) -> Graph:
    return load(block(past="past", whole="whole", batch="batch"), input_shapes=shapes)


@pytest.mark.parametrize(
    ("shapes", "said", "hint"),
    [
        ({}, "is whole, but past_key has past positions and the query 1 tokens; expected their sum",
         "--input-shape mask:batch,past+1, or give caches a fixed SIZE and bound it: "
         "--max-dim whole=SIZE"),
        ({name: ("batch", SHARED, 12, SIZE) for name in PAIRS},
         "is whole, but past_key has 12 positions",
         "--input-shape mask:batch,13, or bound it: --max-dim whole=12"),
        ({"mask": ("other", "past+1")}, r"seqlens_k has shape \['other'\], expected \[batch\]",
         "name the batch of each input alike"),
        ({"past_key": ("batch", SHARED, "more", SIZE)},
         "past_key has more positions and past_value past, expected equal numbers",
         "name sizes alike"),
        ({"past_key": ("batch", HEADS, "past", SIZE)}, "a cache has shape", "name the batch"),
    ],
)  # fmt: skip
def test_sizes_that_are_not_known(
    shapes: dict[str, tuple[int | str, ...]], said: str, hint: str
) -> None:
    with pytest.raises((UnsupportedOp, ShapeError), match=said) as error:
        loaded(**shapes)
    assert str(error.value.hint).startswith(hint)
