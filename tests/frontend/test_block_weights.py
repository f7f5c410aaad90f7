"""MatMulNBits of ONNX Runtime's own domain, against ONNX Runtime."""

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
from tests.collection.builder import Net

UNITS = 12
Array = np.ndarray[Any, Any]


def packed(codes: Array, bits: int) -> Array:
    """Return codes several to a byte, along the last axis."""
    per = 8 // bits
    wide = np.pad(codes, [*[(0, 0)] * (codes.ndim - 1), (0, -codes.shape[-1] % per)])
    parts = wide.reshape(*wide.shape[:-1], -1, per).astype(np.int64)
    return (parts << (bits * np.arange(per))).sum(-1).astype(np.uint8)


def weights(depth: int, bits: int, block: int, zeros: str) -> dict[str, Array]:
    rng = np.random.default_rng(depth)
    blocks = -(-depth // block)
    codes = rng.integers(0, 1 << bits, (UNITS, blocks, block))
    scales = rng.standard_normal((UNITS, blocks)).astype(np.float32)
    made = {"q": packed(codes, bits), "s": scales}
    if zeros == "integers":
        made["z"] = packed(rng.integers(0, 1 << bits, (UNITS, blocks)), bits)
    elif zeros == "floats":
        made["z"] = rng.standard_normal((UNITS, blocks)).astype(np.float32)
    return made


def model(
    constants: dict[str, Array],
    depth: int,
    bits: int,
    block: int,
    others: dict[str, int] | None = None,
) -> onnx.ModelProto:
    inputs = ["x", *(name if name in constants else "" for name in ("q", "s", "z", "g", "b"))]
    node = helper.make_node(
        "MatMulNBits", inputs, ["y"], "linear", domain="com.microsoft",
        **{"K": depth, "N": UNITS, "bits": bits, "block_size": block, **(others or {})},
    )  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, depth])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    held = [onnx.numpy_helper.from_array(v, n) for n, v in constants.items()]
    graph = helper.make_graph([node], "weights", [x], [y], held)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def wanted(proto: onnx.ModelProto, x: Array) -> Array:
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("depth", "block"), [(32, 32), (80, 32), (96, 16)])
@pytest.mark.parametrize("zeros", ["", "integers"])
def test_blocks(bits: int, depth: int, block: int, zeros: str) -> None:
    given = weights(depth, bits, block, zeros)
    x = np.random.default_rng(1).standard_normal((2, 3, depth)).astype(np.float32)
    for constants in (
        given,
        {n: v.reshape(-1) if n != "q" else v for n, v in given.items()},  # as older files have it
        {**given, "b": np.arange(UNITS, dtype=np.float32)},
    ):
        proto = model(constants, depth, bits, block)
        (y,) = evaluate(load(proto), {"x": x}).values()
        right = wanted(proto, x)
        np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-6 * np.abs(right).max())


@pytest.mark.parametrize("bits", [2, 4])
def test_zero_points_that_are_floats(bits: int) -> None:
    proto = model(weights(80, bits, 32, "floats"), 80, bits, 32)
    x = np.random.default_rng(1).standard_normal((2, 3, 80)).astype(np.float32)
    (y,) = evaluate(load(proto), {"x": x}).values()
    np.testing.assert_allclose(y, wanted(proto, x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4])
def test_ternary_weights_become_bits(bits: int) -> None:
    """One scale per output, in all of its blocks, behind activations of 8 bits."""
    depth, block, rng = 64, 32, np.random.default_rng(0)
    net = Net(17)
    net.domains["com.microsoft"] = 1
    x = net.input("x", [3, depth])
    most = net.op("ReduceMax", net.op("Abs", x), axes=[-1], keepdims=1)
    scale = net.op("Div", net.const(127), net.op("Clip", most, net.const(1e-5)))
    rounded = net.op("Round", net.op("Mul", x, scale))
    data = net.op("Clip", rounded, net.const(-128), net.const(127))
    codes = rng.integers(-1, 2, (UNITS, depth // block, block)) + (1 << (bits - 1))
    scales = np.repeat(rng.uniform(0.5, 2, (UNITS, 1)), depth // block, axis=1)
    stored = net.const(packed(codes, bits), np.uint8), net.const(scales)
    node = helper.make_node(
        "MatMulNBits", [data, *stored], ["product"], "linear", domain="com.microsoft", K=depth,
        N=UNITS, bits=bits, block_size=block,
    )  # fmt: skip
    net.nodes.append(node)
    net.output(net.op("Div", "product", scale))
    proto = net.model(check=False)
    artifact = bnncc.compile(proto, threads=1)
    (layer,) = artifact.report["layers"]
    assert (layer["kind"], layer["name"]) == ("few_bit", "linear")
    feed = rng.standard_normal((3, depth)).astype(np.float32)
    (y,) = artifact.run({"x": feed}).values()
    np.testing.assert_allclose(y, wanted(proto, feed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("attrs", "changed", "said"),
    [
        ({"bits": 3}, {}, "`bits` is 3, expected 2, 4 or 8"),
        ({"block_size": 24}, {}, "`block_size` is 24, expected a power of two from 16"),
        ({"weight_prepacked": 1}, {}, "`weight_prepacked` is 1, expected 0"),
        ({}, {"g": np.zeros(64, np.int32)}, "input `g_idx` is not supported"),
        ({"K": 65}, {}, r"its weights have shape \[12, 2, 16\], expected \[12, 3, 16\]"),
        ({"N": 0}, {}, r"its weights have shape \[12, 2, 16\], expected \[0, 2, 16\]"),
        ({}, {"s": np.ones((UNITS, 3), np.float32)}, r"its input 2 has shape \[12, 3\], expected"),
        ({}, {"q": np.zeros((12, 2, 16), np.int8)}, "its input 1 is int8, expected uint8"),
        ({}, {"z": np.zeros((12, 2), np.int8)}, "its input 3 is int8, expected uint8"),
        ({}, {"s": np.ones((12, 2), np.int32)}, "its input 2 is int32, expected floats"),
    ],
)
def test_what_is_not_supported(attrs: dict[str, int], changed: dict[str, Array], said: str) -> None:
    constants = {**weights(64, 4, 32, ""), **changed}
    with pytest.raises((UnsupportedOp, ShapeError), match=said):
        load(model(constants, 64, 4, 32, attrs))


def test_weights_that_are_computed() -> None:
    constants = weights(64, 4, 32, "")
    proto = model(constants, 64, 4, 32)
    codes = proto.graph.initializer[0]
    proto.graph.input.append(helper.make_tensor_value_info("q", TensorProto.UINT8, codes.dims))
    del proto.graph.initializer[0]
    with pytest.raises(UnsupportedOp, match="its input 1 is computed, expected a constant"):
        load(proto)
    del proto.graph.node[0].attribute[:]
    with pytest.raises(ModelError, match="required attribute `K` is missing"):
        load(proto)
