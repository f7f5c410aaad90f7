"""Enlarging by the nearest pixel: signs and levels stay what they are."""

from __future__ import annotations

import itertools

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import bnncc
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.recognise.transposed import repeats
from tests.collection.builder import Net
from tests.qonnx_models import Builder

pytestmark = pytest.mark.sampled(2)

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("places", ["asymmetric", "half_pixel", "align_corners"])
def test_repeats_are_found_by_what_is_computed(places: str) -> None:
    found = set()
    roundings = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    for rounding, (a, b) in itertools.product(roundings, [(2, 2), (3, 1), (4, 5), (1.5, 2)]):
        node = helper.make_node(
            "Resize", ["x", "", "s"], ["y"], mode="nearest", nearest_mode=rounding,
            coordinate_transformation_mode=places,
        )  # fmt: skip
        x, y = (
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in (("x", [1, 1, 4, 3]), ("y", None))
        )
        scales = numpy_helper.from_array(np.float32([1, 1, a, b]), "s")
        graph = helper.make_graph([node], "resize", [x], [y], [scales])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        loaded, data = load(model), np.arange(12, dtype=np.float32).reshape(1, 1, 4, 3)
        factors = repeats(loaded.nodes[0], loaded)
        if factors is not None:
            wanted = data.repeat(factors[0], 2).repeat(factors[1], 3)
            session = ort.InferenceSession(model.SerializeToString())
            np.testing.assert_array_equal(session.run(None, {"x": data})[0], wanted)
            found.add((rounding, a, b))
    assert bool(found) == (places != "align_corners")
    assert not any(isinstance(a, float) for _, a, _ in found)


@pytest.mark.parametrize("whole", [True, False])
def test_signs_on_both_sides(whole: bool) -> None:
    net = Net(opset=17)
    x = net.sign(net.input("x", [2, 21, 4, 3]), "sign")
    scales = net.const(np.float32([1, 1, 2, 3] if whole else [1, 1, 1.5, 2]))
    places = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
    y = net.op("Resize", x, "", scales, nearest_mode="floor", **places)
    net.channels[y] = 21
    y = net.op("Resize", net.bconv(y, 33, 3), "", scales, nearest_mode="floor", **places)
    y = net.op("BatchNormalization", y, *[net.const(a) for a in net.bn_arrays(33, 3.0)])
    z = net.sign(y, "where_ge")
    net.channels[z] = 33
    net.output(net.bconv(z, 9, 3), y)
    model = net.model()
    artifact = bnncc.compile(model)
    assert [layer["kind"] for layer in artifact.report["layers"]] == ["binary"] * 2
    data = {"x": RNG.integers(-1, 2, (2, 21, 4, 3)).astype(np.float32)}
    wanted, found = evaluate(load(model), data), artifact.run(data)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("few_bit", ["auto", "bitplanes"])
@pytest.mark.parametrize("factor", [2, 1.5])
def test_levels_on_both_sides(factor: float, few_bit: str) -> None:
    make = Builder()
    scales = make.constant([1, 1, factor, 2])
    places = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
    y = make.quant("x", 0.5, 2, signed=0)
    y = make.add("Resize", y, "", scales, nearest_mode="floor", **places)
    weight = make.quant(RNG.standard_normal((16, 8, 3, 3)), 0.5, 2, narrow=1)
    y = make.add("Conv", y, weight, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    y = make.add("Resize", y, "", scales, nearest_mode="floor", **places)
    y = make.quant(y, 2.0, 3)
    weight = make.quant(RNG.standard_normal((5, 16, 3, 3)), 0.5, 2, narrow=1)
    y = make.add("Conv", y, weight, kernel_shape=[3, 3])
    model = make.model((1, 8, 4, 6), y, 4)
    artifact = bnncc.compile(model, few_bit=few_bit)
    assert [x["kind"] for x in artifact.report["layers"]] == ["few_bit"] * 2
    data = {"x": RNG.standard_normal((1, 8, 4, 6)).astype(np.float32)}
    np.testing.assert_array_equal(artifact.run(data)[y], evaluate(load(model), data)[y])
