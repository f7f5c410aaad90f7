"""Products of integers: computed in float32 where that is exact, and as they are elsewhere."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from bnncc.driver import compile_model
from bnncc.frontend.onnx import load
from bnncc.options import CompileOptions
from bnncc.recognise.integer_sums import float_integer_products
from bnncc.transform.simplify import simplify
from tests.bitnet import data
from tests.collection.builder import Net
from tests.physical_networks import evaluated, passed

I8, U8, I32, I64 = TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64
CHAINS = {
    "int8": [I8, I32],
    "int64": [I8, I64],
    "directly": [I32],
    "a byte": [U8, I32],
    "three": [I8, TensorProto.INT16, I32],
}


def network(
    chain: list[int], *, low: int = -127, high: int = 127, moved: bool = False
) -> onnx.ModelProto:
    """Return BitNet's layer with a product of integers, and the scale behind it."""
    net = Net(18, seed=3)
    x = net.input("x", [2, 5, 40])
    largest = net.op("ReduceMax", net.op("Abs", x), net.ints([-1]), keepdims=1)
    scale = net.op("Div", net.const(127.0), net.op("Max", largest, net.const(1e-5)))
    q = net.clip(net.op("Round", net.op("Mul", x, scale)), low, high)
    for k, kind in enumerate(chain):
        q = net.op("Cast", q, to=kind)
        if moved and k == 0:
            q = net.op("Reshape", q, net.ints([10, 40]))
    store = np.int64 if chain[-1] == I64 else np.int32
    sums = net.op("MatMul", q, net.const(net.rng.integers(-1, 2, (40, 12)), store))
    y = net.op("Reshape", net.op("Cast", sums, to=TensorProto.FLOAT), net.ints([2, 5, 12]))
    net.output(net.op("Div", y, scale))
    return net.model()


def compared(model: onnx.ModelProto) -> str:
    """Compare with ONNX Runtime, number by number; return how the product is computed."""
    before, physical, (layer,) = passed(model, "x86-64-v3")
    x = data(np.random.default_rng(5), (2, 5, 40))
    made = evaluated(physical, before, {"x": x})[before.outputs[0]]
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_array_equal(made, wanted)
    return layer.kind


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
def test_integers_in_float32_are_exact(chain: str, moved: bool) -> None:
    low = 0 if chain == "a byte" else -127
    assert compared(network(CHAINS[chain], moved=moved, low=low)) == "few_bit"


@pytest.mark.parametrize(
    ("chain", "low", "high"),
    [([U8, I32], -127, 127), ([I8, I32], -128, 128), ([I8, U8, I32], -128, 127)],
    ids=["negative bytes", "128 as int8", "int8 as bytes"],
)
def test_what_wraps_around_is_not_skipped(chain: list[int], low: int, high: int) -> None:
    """Casts out of range are undefined from float, and modulo 256 between integers."""
    model = network(chain, low=low, high=high)
    graph = load(model)
    simplify(graph)
    casts = [n.op for n in graph.nodes].count("Cast")
    float_integer_products(graph)
    assert [n.op for n in graph.nodes].count("Cast") >= casts
    if chain[:2] == [I8, U8]:
        compared(model)


@pytest.mark.parametrize(("channels", "float32"), [(1040, True), (1041, False)])
def test_sums_that_float32_may_round_stay_integers(channels: int, float32: bool) -> None:
    """1,040 products of 127 and 127 are less than 2^24."""
    net = Net(18)
    net.input("x", [3, channels])
    q = net.clip(net.op("Round", "x"), -127, 127)
    weight = np.full((channels, 1), 127, np.int32)
    sums = net.op("MatMul", net.op("Cast", q, to=I32), net.const(weight, np.int32))
    net.output(sums)
    graph = load(net.model())
    float_integer_products(graph)
    (product,) = (n for n in graph.nodes if n.op == "MatMul")
    assert (graph.types[product.outputs[0]].dtype == "float32") == float32
    x = np.full((3, channels), 127, np.float32)
    artifact = compile_model(net.model(), CompileOptions(threads=1))
    (made,) = artifact.run({"x": x}).values()
    assert made.dtype == np.int32
    assert (made == 127 * 127 * channels).all()


def test_products_of_two_activations() -> None:
    net = Net(18)
    net.input("x", [2, 3, 8])
    q = net.op("Cast", net.clip(net.op("Round", "x"), -128, 127), to=I8)
    q = net.op("Cast", q, to=I32)
    net.output(net.op("MatMul", q, net.op("Transpose", q, perm=[0, 2, 1])))
    model = net.model()
    x = (90 * np.random.default_rng(0).standard_normal((2, 3, 8))).astype(np.float32)
    artifact = compile_model(model, CompileOptions(threads=1))
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_array_equal(next(iter(artifact.run({"x": x}).values())), wanted)
