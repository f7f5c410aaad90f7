"""QuantizeLinear and DequantizeLinear of every integer type, and Brevitas' QCDQ with Clip."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import bnncc
from bnncc.errors import ModelError
from bnncc.frontend.linear import INTEGERS
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate

pytestmark = pytest.mark.sampled(3)

RNG = np.random.default_rng(0)
OPSETS = {"int8": 13, "uint8": 13, "int4": 21, "uint4": 21, "int2": 25, "uint2": 25, "int16": 21,
          "uint16": 21}  # fmt: skip


def dtype_of(name: str) -> np.dtype:
    return np.dtype(helper.tensor_dtype_to_np_dtype(getattr(TensorProto, name.upper())))


def model(
    nodes: list[onnx.NodeProto],
    constants: dict[str, Any],
    shape: tuple[int, ...],
    opset: int = 25,
    output: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", output, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def same(proto: onnx.ModelProto, x: np.ndarray) -> None:
    """Compare with onnx.reference, which knows Q and DQ from opset 19 on."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    copy.opset_import[0].version = max(21, proto.opset_import[0].version)
    wanted = ReferenceEvaluator(copy).run(None, {"x": x})[0]
    found = evaluate(load(proto), {"x": x})["y"]
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, 1e-6, 1e-5)
    np.testing.assert_allclose(bnncc.compile(proto).run({"x": x})["y"], wanted, 1e-6, 1e-5)


@pytest.mark.parametrize("name", OPSETS)
@pytest.mark.parametrize("zero", [0, 1])
def test_there_and_back(name: str, zero: int) -> None:
    low, high = INTEGERS[name]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    constants = {"s": np.float32(0.25), "z": np.array(zero, dtype_of(name))}
    middle = np.arange(-60, 61) / 16
    ends = np.concatenate([low / 4 + middle, high / 4 + middle])
    x = np.float32([*middle, *ends]).reshape(1, -1)
    same(model(nodes, constants, x.shape, OPSETS[name]), x)


@pytest.mark.parametrize("name", ["int8", "int4", "uint4", "int2"])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_stored_weights(name: str, axis: int | None) -> None:
    low, high = INTEGERS[name]
    weight = RNG.integers(low, high + 1, (12, 7)).astype(dtype_of(name))
    size = () if axis is None else (weight.shape[axis],)
    constants = {"w": weight, "s": np.float32(RNG.random(size) + 0.5)}
    attrs = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], **attrs),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    same(model(nodes, constants, (3, 12), OPSETS[name]), RNG.random((3, 12)).astype(np.float32))


def test_scales_of_blocks() -> None:
    weight = RNG.integers(-8, 8, (12, 7)).astype(dtype_of("int4"))
    constants = {"w": weight, "s": np.float32(RNG.random((3, 7)))}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0, block_size=4),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    same(model(nodes, constants, (3, 12)), RNG.random((3, 12)).astype(np.float32))


@pytest.mark.parametrize("narrow", [(-1, 1), (-7, 7), (0, 3)])
def test_clip_between(narrow: tuple[int, int]) -> None:
    """Integers are clipped, moved and pooled before they become floats again."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=1),
        helper.make_node("Clip", ["q", "low", "high"], ["c"]),
        helper.make_node("MaxPool", ["c"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Transpose", ["p"], ["t"], perm=[0, 2, 3, 1]),
        helper.make_node("DequantizeLinear", ["t", "s", "z"], ["y"], axis=3),
    ]
    dtype = np.int8 if narrow[0] < 0 else np.uint8
    constants = {
        "s": np.float32([0.5, 0.3, 1.0]), "z": np.zeros(3, dtype),
        "low": np.array(narrow[0], dtype), "high": np.array(narrow[1], dtype),
    }  # fmt: skip
    x = RNG.standard_normal((1, 3, 4, 6)).astype(np.float32) * 3
    same(model(nodes, constants, x.shape, 13), x)


def test_integers_as_output() -> None:
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])]
    constants = {"s": np.float32(0.1), "z": np.int8(3)}
    x = RNG.standard_normal((2, 9)).astype(np.float32) * 20
    same(model(nodes, constants, x.shape, 13, TensorProto.INT8), x)


@pytest.mark.parametrize("attrs", [{"axis": 5}, {"axis": 0}, {"axis": 0, "block_size": 5}])
def test_scales_that_do_not_fit(attrs: dict[str, int]) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], **attrs),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    constants = {"w": np.ones((12, 7), np.int8), "s": np.ones(5, np.float32)}
    with pytest.raises(ModelError, match=r"^linear: DequantizeLinear `.*`: "):
        load(model(nodes, constants, (3, 12), 21))


@pytest.mark.parametrize("name", ["int4", "uint2", "float8e4m3fn"])
def test_types_without_numpy_are_bytes_at_the_edge(name: str) -> None:
    code = getattr(TensorProto, name.upper())
    proto = model([helper.make_node("Cast", ["x"], ["y"], to=code)], {}, (2, 3), output=code)
    x = np.float32([[-8, 3.6, 2.4], [1.25, -1, 0.3]])
    kind = dtype_of(name)
    wanted = x.astype(kind) if name.startswith("float") else np.trunc(x).astype(int).astype(kind)
    made = evaluate(load(proto), {"x": x})["y"]
    carrier = np.dtype("uint8" if name != "int4" else "int8")
    assert made.dtype == carrier
    bits = wanted.view(np.uint8) if name.startswith("float") else wanted.astype(carrier)
    np.testing.assert_array_equal(made, bits)

    back = model([helper.make_node("Cast", ["x"], ["y"], to=1)], {}, (2, 3))
    back.graph.input[0].type.tensor_type.elem_type = code
    graph = load(back)
    assert graph.types["x"].dtype == carrier.name
    np.testing.assert_array_equal(evaluate(graph, {"x": made})["y"], wanted.astype(np.float32))


def test_weights_of_four_bits_with_float16_scales() -> None:
    weight = RNG.integers(-8, 8, (12, 7)).astype(dtype_of("int4"))
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0, block_size=4),
        helper.make_node("Cast", ["d"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "c"], ["y"]),
    ]
    proto = model(nodes, {"w": weight, "s": RNG.random((3, 7)).astype(np.float16)}, (3, 12))
    x = RNG.random((3, 12)).astype(np.float32)
    wanted = ReferenceEvaluator(proto).run(None, {"x": x})[0]
    np.testing.assert_allclose(evaluate(load(proto), {"x": x})["y"], wanted, 1e-5, 1e-4)


BETWEEN = {
    "nothing": ("", "a", (16, 16, 3, 3)),
    "pool": ("p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(a)", "p", (16, 16, 3, 3)),
    "flatten": ("p = Flatten(a)", "p", (16 * 36, 8)),
    "reshape": ("p = Reshape(a, flat)", "p", (16 * 36, 8)),
    "pool, flatten": ("m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(a) p = Flatten(m)", "p",
                      (16 * 9, 8)),
    "concat": ("p = Concat<axis=1>(a, q)", "p", (16, 24, 3, 3)),
    "pad": ("p = Pad(a, pads, zero)", "p", (16, 16, 3, 3)),
    "split": ("p, o = Split<axis=1, num_outputs=2>(a)", "p", (16, 8, 3, 3)),
    "transpose": ("p = Transpose<perm=[0,1,3,2]>(a)", "p", (16, 16, 3, 3)),
    "to depth": ("p = SpaceToDepth<blocksize=2>(a)", "p", (16, 64, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("between", BETWEEN)
def test_moves_of_integers_between_layers(between: str, kind: str) -> None:
    """What pools and moves integers in a file of QLinear operators moves levels here."""
    moves, name, shape = BETWEEN[between]
    op = "QLinearConv" if len(shape) == 4 else "QLinearMatMul"
    body = (
        "q = QuantizeLinear(x, s, zero) "
        "a = QLinearConv<pads=[1,1,1,1]>(q, s, zero, w, t, wz, u, zero) "
        f"{moves} c = {op}({name}, u, zero, v, t, wz, u, zero) y = DequantizeLinear(c, u, zero)"
    )
    header = '<ir_version: 9, opset_import: ["" : 21]>'
    out = "a,b,c,d" if len(shape) == 4 else "a,b"
    proto = onnx.parser.parse_model(
        f"{header} net (float[1,8,6,6] x) => (float[{out}] y) {{{body}}}"
    )
    constants = {
        "s": np.float32(0.5), "t": np.float32(0.01234), "u": np.float32(1.25),
        "zero": np.array(3, kind), "wz": np.int8(0),
        "w": RNG.integers(-100, 100, (16, 8, 3, 3)).astype("i1"),
        "v": RNG.integers(-100, 100, shape).astype("i1"),
        "flat": np.array([1, -1]), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    }  # fmt: skip
    words = set(body.replace(",", " ").replace("(", " ").replace(")", " ").split())
    for key, value in constants.items():
        if key in words:
            proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), key))
    artifact = bnncc.compile(proto, target="x86-64-v2")
    assert [x["kind"] for x in artifact.report["layers"]] == ["few_bit"] * 2
    x = (RNG.standard_normal((1, 8, 6, 6)) * 20).astype("f")
    wanted = ReferenceEvaluator(proto).run(None, {"x": x})[0]
    found = artifact.run({"x": x})["y"]
    off = np.abs(found - wanted) / 1.25  # a sum near half a step may round either way
    assert off.max() <= 1.001
    assert (off > 0.001).sum() <= max(1, off.size // 100)
    assert bnncc.verify(proto, artifact)["right"]


def test_casts_that_wrap_are_no_levels() -> None:
    """A Cast of numbers that its type may not hold is what it was."""
    body = "r = Round(x) c = Clip(r, lo, hi) i = Cast<to=2>(c) f = Cast<to=1>(i) y = Mul(f, two)"
    header = '<ir_version: 9, opset_import: ["" : 18]>'
    for high, kept in ((255, False), (300, True)):
        proto = onnx.parser.parse_model(f"{header} net (float[8] x) => (float[8] y) {{{body}}}")
        for key, value in {"lo": 0, "hi": high, "two": 2}.items():
            proto.graph.initializer.append(numpy_helper.from_array(np.float32(value), key))
        graph = load(proto)
        readers = [n.op for n in graph.nodes if "i" in n.inputs]
        assert readers == ["Cast"] * kept
        x = np.array([-3, 0, 0.5, 1.5, 100, 254.5, 255, 290], "f")
        if high == 255:
            wanted = 2 * np.clip(np.rint(x), 0, 255)
            np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], wanted)
