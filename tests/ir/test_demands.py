"""Indices and divisors of integers: right where they are allowed, else one line, never a signal."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from bnncc.codegen import bare
from bnncc.codegen.link import link
from bnncc.codegen.pipeline import tvm_target
from bnncc.driver import _scheduled, compile_c, compile_model
from bnncc.errors import BnnccError, InputError, ShapeError, UnsupportedOp
from bnncc.frontend.onnx import load
from bnncc.ir.demands import demands, integer_ranges, limits_of_inputs, met
from bnncc.ir.evaluate import evaluate
from bnncc.options import CompileOptions
from bnncc.runtime import runner
from bnncc.targets.catalog import resolve
from bnncc.trace import Trace
from tests.devices import Server
from tests.tiny import BASELINE

pytestmark = pytest.mark.sampled(2)

TABLE = np.arange(20, dtype=np.float32).reshape(5, 4)
Arrays = dict[str, np.ndarray]


def model(
    nodes: list[Any], inputs: Mapping[str, tuple[str, list[Any]]], out: str = "y", **constants: Any
) -> onnx.ModelProto:
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.dtype(t)), shape)
        for n, (t, shape) in inputs.items()
    ]
    graph = helper.make_graph(
        nodes, "net", infos, [onnx.ValueInfoProto(name=out)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def one(op: str, order: list[str], inputs: Any, constants: Any = None, **attrs: Any) -> Any:
    return model([helper.make_node(op, order, ["y"], name="it", **attrs)], inputs,
                 **(constants or {}))  # fmt: skip


def compiled(proto: onnx.ModelProto, **options: Any) -> Any:
    return compile_model(proto, CompileOptions(threads=1, **options))


INDEXED = [
    ("Gather", {"table": TABLE}, {"i": ("int64", [3])}, [0, -5, 4], [[0, 5, 1], [-6, 0, 0]]),
    ("Gather", {"table": TABLE}, {"i": ("int32", [3])}, [0, -5, 4], [[0, 2**31 - 1, 1]]),
    ("GatherElements", {}, {"table": ("float32", [5, 4]), "i": ("int64", [1, 4])},
     [[0, -5, 4, 1]], [[[0, 5, 0, 0]], [[0, 0, 0, -6]]]),
    ("GatherND", {}, {"table": ("float32", [5, 4]), "i": ("int64", [2, 2])},
     [[-5, 3], [4, -4]], [[[4, 4], [0, 0]], [[5, 0], [0, 0]], [[0, 0], [0, -5]]]),
    ("ScatterElements", {}, {"table": ("float32", [5, 4]), "i": ("int64", [1, 4]),
     "u": ("float32", [1, 4])}, [[0, -1, 4, 1]], [[[0, 5, 0, 0]], [[-6, 0, 0, 0]]]),
    ("ScatterND", {}, {"table": ("float32", [5, 4]), "i": ("int64", [1, 1]),
     "u": ("float32", [1, 4])}, [[-1]], [[[5]], [[-6]]]),
]  # fmt: skip


@pytest.mark.parametrize(("op", "constants", "inputs", "good", "bad"), INDEXED)
def test_indices(op: str, constants: Any, inputs: Any, good: Any, bad: Any) -> None:
    order = ["table", "i", *(["u"] if "u" in inputs else [])]
    proto = one(op, order, inputs, constants)
    artifact = compiled(proto)
    kind = inputs["i"][0]
    feeds = {"table": TABLE, "i": np.array(good, kind), "u": TABLE[4:] + 100}
    feeds = {name: feeds[name] for name in inputs}
    (wanted,) = ort.InferenceSession(proto.SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(artifact.run(feeds)["y"], wanted)
    for indices in bad:
        with pytest.raises(InputError, match=r"index"):
            artifact.run({**feeds, "i": np.array(indices, kind)})
    assert np.array_equal(artifact.run(feeds)["y"], wanted)  # as before


def test_an_index_that_is_computed_is_checked_in_code() -> None:
    nodes = [
        helper.make_node("Add", ["i", "one"], ["j"]),
        helper.make_node("Gather", ["table", "j"], ["y"], name="take", axis=1),
    ]
    artifact = compiled(model(nodes, {"i": ("int64", [2])}, table=TABLE, one=np.array(1)))
    np.testing.assert_array_equal(artifact.run({"i": np.array([2, -5])})["y"], TABLE[:, [3, -4]])
    for bad in ([3, 0], [0, -6]):
        with pytest.raises(InputError, match=r"^Gather `take`: an index lies outside -4 \.\. 3$"):
            artifact.run({"i": np.array(bad)})


def test_a_symbolic_axis() -> None:
    inputs = {"table": ("float32", ["N", 4]), "i": ("int64", ["N"])}
    artifact = compiled(one("Gather", ["table", "i"], inputs))
    feeds = {"table": TABLE, "i": np.array([4, -5, 0, 1, 1])}
    np.testing.assert_array_equal(artifact.run(feeds)["y"], TABLE[[4, 0, 0, 1, 1]])
    with pytest.raises(InputError, match=r"Gather `it`: an index lies outside -N \.\. N - 1"):
        artifact.run({**feeds, "i": np.array([4, -5, 5, 1, 1])})


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint32"])
@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_divisors(op: str, dtype: str) -> None:
    proto = one(op, ["a", "c"], {"a": (dtype, [35]), "c": (dtype, [35])})  # vectors and a rest
    artifact = compiled(proto)
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    signed = least < 0
    a = np.tile(np.array([least, least, 7, 100, most, most, 5]).astype(dtype), 5)
    c = np.tile(np.array([2, 3, -2 if signed else 2, 7, most, 1, most]).astype(dtype), 5)
    (wanted,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"a": a, "c": c})
    np.testing.assert_array_equal(artifact.run({"a": a, "c": c})["y"], wanted)
    np.testing.assert_array_equal(evaluate(load(proto), {"a": a, "c": c})["y"], wanted)
    with pytest.raises(InputError, match=r"`c` holds 0 at \[1\] .*, expected not 0"):
        artifact.run({"a": a, "c": np.tile([1, 0, 1, 1, 0, 1, 1], 5).astype(dtype)})
    if signed:  # what processors trap at, too; the quotient wraps
        minus = np.full(35, -1).astype(dtype)
        made = artifact.run({"a": a, "c": minus})["y"]
        assert made.tolist() == (np.negative(a) if op == "Div" else 0 * a).tolist()


def test_a_divisor_that_is_computed() -> None:
    nodes = [
        helper.make_node("Sub", ["a", "two"], ["b"]),
        helper.make_node("Mod", ["a", "b"], ["y"], name="rest"),
    ]
    artifact = compiled(model(nodes, {"a": ("int32", [2])}, two=np.array(2, np.int32)))
    assert artifact.run({"a": np.array([7, 9], np.int32)})["y"].tolist() == [2, 2]
    with pytest.raises(InputError, match=r"^Mod `rest`: integer division by 0$"):
        artifact.run({"a": np.array([7, 2], np.int32)})


def test_constants_are_refused_when_compiling() -> None:
    inputs: Any = {"table": ("float32", [5, 4])}
    with pytest.raises(ShapeError, match="index"):
        compiled(one("Gather", ["table", "i"], inputs, {"i": np.array([2, 7])}))
    inputs = {"a": ("int32", [2])}
    with pytest.raises(BnnccError, match=r"division by 0|divisor"):
        compiled(one("Div", ["a", "c"], inputs, {"c": np.array([2, 0], np.int32)}))
    nodes = [
        helper.make_node("Mod", ["c", "d"], ["e"], name="folded"),
        helper.make_node("Add", ["a", "e"], ["y"]),
    ]
    two = np.array([2, 5], np.int32)
    folded = model(nodes, inputs, c=two, d=two * np.array([1, 0], np.int32))
    with pytest.raises(BnnccError, match=r"division by 0|divisor"):
        compiled(folded)


def test_what_the_graph_proves_is_not_checked() -> None:
    nodes = [
        helper.make_node("ArgMax", ["x"], ["best"], axis=1, keepdims=0),
        helper.make_node("Gather", ["table", "best"], ["y"]),
    ]
    proto = model(nodes, {"x": ("float32", [3, 5])}, table=TABLE)
    artifact = compiled(proto)
    assert not any(k["name"].startswith("check") for k in artifact.report["kernels"])
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    np.testing.assert_array_equal(artifact.run({"x": x})["y"], TABLE[x.argmax(1)])
    graph = load(model(nodes, {"x": ("float32", [3, 6])}, table=TABLE))
    (demand,) = [d for d in (demands(n, graph.types) for n in graph.nodes) if d is not None]
    assert not met(demand, integer_ranges(graph))  # a sixth class, and five rows


def test_limits_are_part_of_an_input() -> None:
    artifact = compiled(one("Gather", ["table", "i"], {"i": ("int64", [300])}, {"table": TABLE}))
    (info,) = artifact.inputs
    assert (info.limits.low, info.limits.high) == (-5, 4)
    assert artifact.manifest["inputs"][0]["limits"] == [-5, 4]
    for seed in range(3):
        values = runner.random_inputs(artifact.inputs, seed=seed)["i"]
        assert {int(v) for v in values} <= set(range(-5, 5))
        assert len(set(values.tolist())) > 5
    assert runner.bench(artifact, repeat=2)["kernels"]  # alone, each reads what it may
    # Where only part of an input are indices, the rest may be anything.
    nodes = [
        helper.make_node("Split", ["i", "parts"], ["first", "second"], axis=0),
        helper.make_node("Gather", ["table", "first"], ["a"]),
        helper.make_node("Cast", ["second"], ["b"], to=1),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    proto = model(nodes, {"i": ("int64", [8])}, table=TABLE[:, 0], parts=np.array([4, 4]))
    assert not limits_of_inputs(load(proto))
    made = compiled(proto).run({"i": np.array([0, 1, 2, 3, 900, 901, 902, 903])})["y"]
    assert made.tolist() == [900, 905, 910, 915]


def test_gpus_check_inputs_and_refuse_what_is_computed(capfd: pytest.CaptureFixture[str]) -> None:
    from bnncc.codegen.lower import to_relax

    given = one("Gather", ["table", "i"], {"i": ("int64", [3])}, {"table": TABLE})
    assert "check_index" not in str(to_relax(load(given), checks=False))
    nodes = [
        helper.make_node("Add", ["i", "one"], ["j"]),
        helper.make_node("Gather", ["table", "j"], ["y"], name="take"),
    ]
    proto = model(nodes, {"i": ("int64", [2])}, table=TABLE, one=np.array(1))
    with pytest.raises(UnsupportedOp, match="`take`: the values of `j` are computed, and code"):
        to_relax(load(proto), checks=False)
    assert not capfd.readouterr().err  # TVM would warn of what is unfinished


def test_over_rpc(host: Server) -> None:
    from bnncc import remote

    nodes = [
        helper.make_node("Add", ["i", "one"], ["j"]),
        helper.make_node("Gather", ["table", "j"], ["y"], name="take"),
    ]
    artifact = compiled(model(nodes, {"i": ("int64", [2])}, table=TABLE, one=np.array(1)))
    with remote.connect(host.address) as device:
        there = artifact.on_device(device)
        with pytest.raises(InputError, match=r"^Gather `take`: an index lies outside -5 \.\. 4$"):
            there.run({"i": np.array([1, 4])})
        np.testing.assert_array_equal(there.run({"i": np.array([1, 3])})["y"], TABLE[[2, 4]])


def test_c_functions_return_a_code(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["i", "one"], ["j"]),
        helper.make_node("Gather", ["table", "j"], ["y"], name="take"),
    ]
    proto = model(nodes, {"i": ("int64", [2])}, table=TABLE, one=np.array(1))
    files = compile_c(proto, CompileOptions(target="armv7")).files
    headers = b"".join(data for name, data in files.items() if name.endswith(".h")).decode()
    assert "BAD_VALUE (-1) /* an index outside its tensor" in headers
    assert re.search(
        r"_check_index\(const int64_t \*\w+, int64_t \*\w+, void \*scratch\);", headers
    )
    # The same functions for this machine.
    target = resolve(BASELINE)
    module = _scheduled(proto, CompileOptions(threads=1), target, Trace(), fixed=True).module
    functions = {v.name_hint: f for v, f in module.functions_items() if "check" in v.name_hint}
    (tmp_path / "kernels.o").write_bytes(bare.build(functions, tvm_target(target))[0])
    link(tmp_path, ["kernels.o"], "kernels.so", triple="")
    check = ctypes.CDLL(str(tmp_path / "kernels.so")).check_index
    for indices, code, wanted in (
        ([4, -5], 0, [4, 0]),
        ([5, 0], bare.FAILED, [9, 9]),
        ([0, -6], bare.FAILED, [0, 9]),
    ):
        given, made = np.array(indices), np.full(2, 9)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (given, made)]
        assert check(*pointers, None) == code
        assert made.tolist() == wanted


def test_evaluation_refuses_too() -> None:
    graph = load(one("GatherND", ["t", "i"], {"t": ("float32", [5, 4]), "i": ("int64", [1, 2])}))
    with pytest.raises(InputError, match=r"`it`: an index lies outside -5 \.\. 4, -4 \.\. 3"):
        evaluate(graph, {"t": TABLE, "i": np.array([[0, 4]])})


def test_constants_are_looked_at_one_by_one() -> None:
    """Each index counts for its own axis; divisors of both signs need not be 0."""
    table = {"t": ("float32", [5, 4])}
    places = np.array([[4, 3], [-5, 0]])
    made = compiled(one("GatherND", ["t", "i"], table, {"i": places})).run({"t": TABLE})
    np.testing.assert_array_equal(made["y"], [19, 0])
    data = {"x": ("int32", [3])}
    divided = compiled(one("Div", ["x", "d"], data, {"d": np.array([-2, 1, 3], np.int32)}))
    made = divided.run({"x": np.array([7, 8, -9], np.int32)})
    np.testing.assert_array_equal(made["y"], [-3, 8, -3])
    with pytest.raises(BnnccError, match="an index lies outside"):
        compiled(one("GatherND", ["t", "i"], table, {"i": np.array([[4, 4]])}))
