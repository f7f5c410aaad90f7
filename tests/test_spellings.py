"""Decisions in the spellings that strangers use: layers behind them are found, and give the same.

Each is a network of two layers, compiled for this machine and compared with ONNX Runtime, and
evaluated for arm64 by the compiler itself. Inputs meet every threshold exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bnncc.driver import compile_model, lowered
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate, evaluate_node
from bnncc.ir.graph import Graph
from bnncc.options import CompileOptions
from bnncc.passes.few_values import read_again
from bnncc.passes.quantisers import recognise_quantisers
from bnncc.passes.ramps import recognise_ramps
from bnncc.passes.signs import recognise_signs
from bnncc.passes.simplify import simplify
from bnncc.report import Layer
from bnncc.verification.verify import verify

Array = np.ndarray
HALVES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
CUTS = np.array([0, -0.0, 0.5, -0.5, 0.25, -0.25, 0.3, 1, -1, 0.1, 2, 0.4, -0.3])


class Network:
    """Writes nodes of one float type; calling it adds one and returns its output."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = np.dtype(dtype)
        self.code = HALVES.get(dtype) or helper.np_dtype_to_tensor_dtype(self.dtype)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(3)

    def __call__(self, op: str, *inputs: Any, **attrs: Any) -> str:
        names = [i if isinstance(i, str) else self.constant(i) for i in inputs]
        out = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [out], name=out, **attrs))
        return out

    def constant(self, value: Any) -> str:
        value = np.asarray(value)
        integer = value.dtype.kind in "iu" and value.ndim
        value = value if integer else value.astype(self.dtype)
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def cast(self, x: str, code: int = 0) -> str:
        return self("Cast", x, to=code or self.code)

    def layer(self, x: str, weight: Array, pads: int = 0, **attrs: Any) -> str:
        return self("Conv", x, weight, kernel_shape=weight.shape[2:], pads=[pads] * 4, **attrs)

    def norm(self, x: str, channels: int = 16) -> str:
        r = self.rng
        return self(
            "BatchNormalization", x, r.normal(0, 1, channels), r.normal(0, 0.5, channels),
            r.normal(0, 2, channels), r.uniform(2, 9, channels),
        )  # fmt: skip

    def model(self, out: str, shape: tuple[int, ...], code: int = 0) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, "spelling",
            [helper.make_tensor_value_info("x", code or self.code, shape)],
            [helper.make_tensor_value_info(out, self.code, None)], self.constants,
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


Spelling = Callable[[Network, str], str]
SHAPE = (1, 16, 5, 5)


def signs(rng: np.random.Generator, *shape: int) -> Array:
    return np.where(rng.random(shape) < 0.5, -1.0, 1.0)


def where(g: Network, x: str) -> str:
    return g("Where", g("GreaterOrEqual", x, 0.0), 1.0, -1.0)


def above(g: Network, x: str, cut: float) -> str:
    return g.cast(g("Greater", x, cut))


def below(g: Network, x: str, cut: float) -> str:
    return g.cast(g("Less", x, cut))


def gathered(g: Network, x: str) -> str:
    return g("Gather", np.array([-1.0, 1.0]), g.cast(g("Greater", x, 0.0), TensorProto.INT64))


def gathered_three(g: Network, x: str) -> str:
    parts = [g.cast(g("Greater", x, cut), TensorProto.INT64) for cut in (-0.5, 0.5)]
    return g("Gather", np.array([-1.0, 0.0, 1.0]), g("Add", *parts))


def larger(g: Network, x: str) -> str:
    last = np.array([-1])
    pair = g("Concat", g("Unsqueeze", g("Neg", x), last), g("Unsqueeze", x, last), axis=-1)
    return g("Sub", g("Mul", g.cast(g("ArgMax", pair, axis=-1, keepdims=0)), 2.0), 1.0)


def pact(g: Network, x: str) -> str:
    inner = g("Sub", g("Abs", x), g("Abs", g("Sub", x, 2.0)))
    clipped = g("Mul", g("Add", inner, 2.0), 0.5)
    return g("Mul", g("Round", g("Mul", clipped, 1.5)), 2 / 3)


def rectified(g: Network, x: str) -> str:
    clipped = g("Sub", g("Relu", x), g("Relu", g("Sub", x, 1.0)))
    return g("Div", g("Round", g("Mul", clipped, 3.0)), 3.0)


def integer_sign(g: Network, x: str) -> str:
    whole = g.cast(g("Clip", g("Round", x), -127.0, 127.0), TensorProto.INT8)
    return g.cast(g("Sign", whole))


def shifted_sign(g: Network, x: str) -> str:
    return g("Add", g("Mul", g("Sign", g("Div", g("Sub", x, 0.3), 0.7)), 0.7), 0.3)


def halves(g: Network, x: str) -> tuple[str, str]:
    ends = [(np.array([a]), np.array([b]), np.array([1])) for a, b in ((0, 8), (8, 16))]
    first, second = (g("Slice", x, *some) for some in ends)
    return first, second


def joined(one: Spelling, other: Spelling) -> Spelling:
    def spelling(g: Network, x: str) -> str:
        first, second = halves(g, x)
        return g("Concat", one(g, first), other(g, second), axis=1)

    return spelling


def summed(g: Network, x: str) -> str:
    return g("Add", g("Add", where(g, g("Sub", x, 0.5)), where(g, x)), where(g, g("Add", x, 0.5)))


def two_sources(g: Network, x: str) -> str:
    turned = g("Transpose", x, perm=[0, 1, 3, 2])
    return g("Sub", above(g, x, 0.1), above(g, turned, 0.4))


SPELLINGS: dict[str, tuple[Spelling, str]] = {
    "where": (where, "binary"),
    "difference of comparisons": (
        lambda g, x: g("Sub", above(g, x, 0.5), below(g, x, -0.5)), "few_bit",
    ),
    "of unequal thresholds": (
        lambda g, x: g("Sub", above(g, x, 0.25), below(g, x, -1.0)), "few_bit",
    ),
    "of scaled data": (
        lambda g, x: g("Sub", above(g, g("Mul", x, 2.0), 1.0), below(g, g("Neg", x), 0.3)),
        "few_bit",
    ),
    "where in where": (
        lambda g, x: g("Where", g("Greater", x, 0.5), 1.0,
                       g("Where", g("Less", x, -0.5), -1.0, 0.0)), "few_bit",
    ),
    "table": (gathered, "binary"),
    "table of three": (gathered_three, "few_bit"),
    "x / |x|": (lambda g, x: g("Div", x, g("Abs", x)), "binary"),
    "|x| / x": (lambda g, x: g("Div", g("Abs", x), x), "binary"),
    "x / |x| where that is": (
        lambda g, x: g("Where", g("Equal", x, 0.0), 1.0, g("Div", x, g("Abs", x))), "binary",
    ),
    "argmax of two": (larger, "binary"),
    "PACT": (pact, "few_bit"),
    "difference of ReLUs": (rectified, "few_bit"),
    "sign of int8": (integer_sign, "few_bit"),
    "AdaBin": (shifted_sign, "binary"),
    "zeros and ones": (lambda g, x: above(g, x, 0.1), "binary"),
    "power of -1": (lambda g, x: g("Pow", -1.0, below(g, x, 0.0)), "binary"),
    "sum of signs": (summed, "few_bit"),
    "sum of steps": (
        lambda g, x: g("Sub", g("Add", above(g, x, -0.3), above(g, x, 0.4)), 0.5), "few_bit",
    ),
    "a level that does not occur": (
        lambda g, x: g("Sub", g("Add", above(g, x, -0.5), g("Mul", above(g, x, 0.5), 2.0)), 1.0),
        "few_bit",
    ),
    "falling levels": (
        lambda g, x: g("Add", below(g, x, -0.3), below(g, x, 0.4)), "few_bit",
    ),
    "two sources": (two_sources, "few_bit"),
    "signs and zeros and ones": (joined(where, lambda g, x: above(g, x, 0.1)), "few_bit"),
    "signs of two sizes": (
        joined(where, lambda g, x: g("Mul", where(g, x), 0.5)), "few_bit",
    ),
    "signs of both kinds": (joined(where, lambda g, x: g("Sign", x)), "binary"),
}  # fmt: skip


def network(spelling: Spelling, dtype: str = "float32") -> onnx.ModelProto:
    g = Network(dtype)
    first = g.norm(g.layer(spelling(g, "x"), signs(g.rng, 16, 16, 3, 3), pads=1))
    return g.model(g.layer(spelling(g, first), signs(g.rng, 8, 16, 3, 3) * 0.25), SHAPE)


def inputs(dtype: str = "float32", shape: tuple[int, ...] = SHAPE, zeros: bool = True) -> Array:
    rng = np.random.default_rng(5)
    x = np.where(rng.random(shape) < 0.5, rng.choice(CUTS, shape), rng.normal(0, 1, shape))
    return (x if zeros else np.where(x == 0, 0.7, x)).astype(np.dtype(dtype))


def runtime(model: onnx.ModelProto, x: Array) -> Array:
    """Return what ONNX Runtime computes, or onnx.reference: the first has no Conv of float64."""
    if model.graph.output[0].type.tensor_type.elem_type == TensorProto.DOUBLE:
        return np.asarray(ReferenceEvaluator(model).run(None, {"x": x})[0])
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"x": x})[0])


def found(model: onnx.ModelProto, target: str = "arm64") -> list[Layer]:
    """Return the layers, after every tensor was compared with the model's."""
    return list(lowered(model, CompileOptions(target=target)).layers)


def check(model: onnx.ModelProto, kinds: list[str], x: Array, near: float = 1e-5) -> None:
    layers = found(model)
    assert [layer.kind for layer in layers] == kinds, [layer.reason for layer in layers]
    made = next(iter(compile_model(model, CompileOptions(threads=1)).run({"x": x}).values()))
    want = runtime(model, x)
    assert made.dtype == want.dtype
    top = float(np.abs(want).max())
    np.testing.assert_allclose(made.astype(np.float64), want, rtol=0, atol=near * top)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_found_and_gives_the_same(name: str) -> None:
    spelling, kind = SPELLINGS[name]
    check(network(spelling), [kind] * 2, inputs(zeros=name not in ("x / |x|", "|x| / x")))


HALF = [
    "where", "difference of comparisons", "table", "x / |x|", "argmax of two", "PACT", "AdaBin",
    "sum of signs", "signs and zeros and ones",
]  # fmt: skip


@pytest.mark.parametrize("name", HALF)
def test_spellings_in_float16(name: str) -> None:
    spelling, kind = SPELLINGS[name]
    x = inputs("float16", zeros=name != "x / |x|")
    check(network(spelling, "float16"), [kind] * 2, x, near=2.0**-8)


@pytest.mark.parametrize("name", ["where", "difference of comparisons", "table"])
def test_spellings_in_bfloat16(name: str) -> None:
    """ONNX Runtime has no convolution of bfloat16: the definition of the operators stands in."""
    spelling, kind = SPELLINGS[name]
    model, x = network(spelling, "bfloat16"), inputs("bfloat16")
    assert [layer.kind for layer in found(model)] == [kind] * 2
    made = next(iter(compile_model(model, CompileOptions(threads=1)).run({"x": x}).values()))
    want = next(iter(evaluate(load(model), {"x": x}).values()))
    assert made.dtype == want.dtype
    wide = want.astype(np.float64)
    np.testing.assert_allclose(made.astype(np.float64), wide, atol=2.0**-5 * np.abs(wide).max())


def test_a_threshold_of_float16_is_that_of_its_own_arithmetic() -> None:
    """2304 + 0.75 is 2304 in float16, so that 0.5 is not reached, and more is in float32.

    ONNX Runtime computes such chains in float32, and rounds at their ends only: NumPy has the type.
    """
    g = Network("float16")
    sums = g.layer(where(g, "x"), np.ones((16, 16, 3, 3)))
    moved = g("Sub", g("Add", g("Add", g("Mul", sums, 16.0), 0.75), -2304.0), 0.5)
    model = g.model(g.layer(where(g, moved), np.ones((8, 16, 1, 1))), SHAPE)
    x = np.ones(SHAPE, np.float16)
    half = np.float16
    wanted = half(144) * half(16) + half(0.75) + half(-2304) - half(0.5)
    assert wanted < 0 < np.float32(144) * 16 + 0.75 - 2304 - 0.5
    assert [layer.kind for layer in found(model)] == ["binary"] * 2
    made = next(iter(compile_model(model, CompileOptions(threads=1)).run({"x": x}).values()))
    assert (made == -16).all()


DOUBLE = ["where", "difference of comparisons", "table", "argmax of two", "PACT", "sum of signs"]


@pytest.mark.parametrize("name", DOUBLE)
def test_spellings_in_float64(name: str) -> None:
    """Layers are as in float32, and results those of float64."""
    spelling, kind = SPELLINGS[name]
    check(network(spelling, "float64"), [kind] * 2, inputs("float64"), near=1e-12)


def test_a_threshold_of_float64_is_that_of_its_own_arithmetic() -> None:
    g = Network("float64")
    sums = g.layer(where(g, "x"), np.ones((16, 16, 3, 3)))
    moved = g("Sub", g("Add", g("Mul", sums, 2.0**20), 2.0**-20), 144 * 2.0**20 + 2.0**-20)
    model = g.model(g.layer(where(g, moved), np.ones((8, 16, 1, 1))), SHAPE)
    check(model, ["binary"] * 2, np.ones(SHAPE), near=0)


@pytest.mark.parametrize("pads", [0, 1])
def test_any_two_values_in_float64(pads: int) -> None:
    g = Network("float64")
    weight = WEIGHTS["two values of each filter"](g.rng)
    out = g("Conv", DATA["AdaBin"][0](g, "x"), weight, g.rng.normal(0, 1, 24),
            kernel_shape=[3, 3], pads=[pads] * 4)  # fmt: skip
    check(g.model(out, SHAPE), ["few_bit"], inputs("float64"), near=1e-12)


def test_a_float64_network_with_real_layers() -> None:
    g = Network("float64")
    stem = g.norm(g.layer("x", g.rng.normal(0, 0.2, (16, 3, 3, 3)), pads=1))
    pooled = g("MaxPool", where(g, stem), kernel_shape=[2, 2], strides=[2, 2])
    inner = g.norm(g.layer(pooled, signs(g.rng, 16, 16, 3, 3) * 0.05, pads=1))
    rows = g("Flatten", where(g, inner))
    dense = g("MatMul", rows, signs(g.rng, 16 * 36, 10) * 0.1)
    out = g("Gemm", dense, g.rng.normal(0, 0.3, (10, 10)), g.rng.normal(0, 1, 10))
    model = g.model(out, (1, 3, 12, 12))
    x = inputs("float64", (1, 3, 12, 12))
    check(model, ["float", "binary", "binary", "float"], x, near=1e-12)
    result = verify(model, compile_model(model, CompileOptions(threads=1)))
    assert result["right"], result


@pytest.mark.parametrize("spelling", [shifted_sign, pact])
def test_values_that_bfloat16_rounds_are_evenly_spaced_but_for_that(spelling: Spelling) -> None:
    g = Network("bfloat16")
    model = g.model(g.layer(spelling(g, "x"), signs(g.rng, 8, 16, 3, 3)), SHAPE)
    x = inputs("bfloat16")
    assert [layer.kind for layer in found(model)] != ["float"]
    made = next(iter(compile_model(model, CompileOptions(threads=1)).run({"x": x}).values()))
    want = next(iter(evaluate(load(model), {"x": x}).values())).astype(np.float64)
    np.testing.assert_allclose(made.astype(np.float64), want, atol=2.0**-4 * np.abs(want).max())


def test_straight_through_residues_of_float16_cancel() -> None:
    g = Network("float16")
    s = where(g, "x")
    clipped = g("Clip", "x", -1.0, 1.0)
    through = g("Add", g("Sub", s, clipped), clipped)
    model = g.model(g.layer(through, signs(g.rng, 8, 16, 3, 3)), SHAPE)
    assert [layer.kind for layer in found(model)] == ["binary"]


@pytest.mark.parametrize("output", ["float16", "float32"])
def test_a_float16_network_with_real_layers_is_within_its_type(output: str) -> None:
    g = Network("float16")
    stem = g.norm(g.layer("x", g.rng.normal(0, 0.2, (16, 3, 3, 3)), pads=1))
    pooled = g("MaxPool", stem, kernel_shape=[2, 2], strides=[2, 2])
    inner = g.norm(g.layer(where(g, pooled), signs(g.rng, 16, 16, 3, 3) * 0.05, pads=1))
    rows = g("Flatten", g("GlobalAveragePool", g("Add", inner, pooled)))
    out = g("Gemm", rows, g.rng.normal(0, 0.3, (16, 10)), g.rng.normal(0, 1, 10))
    code = g.code
    if output == "float32":
        out, g.code = g.cast(out, TensorProto.FLOAT), TensorProto.FLOAT
    model = g.model(out, (1, 3, 12, 12), code)
    check(model, ["float", "binary", "float"], inputs("float16", (1, 3, 12, 12)), near=2.0**-8)
    result = verify(model, compile_model(model, CompileOptions(threads=1)))
    assert result["right"], result


WEIGHTS: dict[str, Callable[[np.random.Generator], Array]] = {
    "signs": lambda r: signs(r, 24, 16, 3, 3) * 0.3,
    "two values of each filter": lambda r: (
        signs(r, 24, 16, 3, 3) * r.uniform(0.2, 1, (24, 1, 1, 1)) + r.normal(0, 0.3, (24, 1, 1, 1))
    ),
}
DATA: dict[str, tuple[Spelling, str]] = {
    "signs": (where, "binary"),
    "multiples": (
        lambda g, x: g("Add", g("Mul", g("Sign", g("Sub", x, 0.25)), 0.5), 0.25), "binary",
    ),
    "AdaBin": (shifted_sign, "binary"),
    "LSQ+": (
        lambda g, x: g("Add", g("Mul", g("Round", g("Clip", g("Div", g("Sub", x, 0.13), 0.37),
                                                     0.0, 3.0)), 0.37), 0.13), "few_bit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("pads", "stride", "fill"), [(0, 1, None), (1, 2, None), (0, 1, 0.4)])
def test_any_two_values(
    data: str, weights: str, pads: int, stride: int, fill: float | None
) -> None:
    g = Network()
    x = DATA[data][0](g, "x")
    if fill is not None:
        x = g("Pad", x, np.array([0, 0, 1, 1, 0, 0, 1, 0]), fill)
    weight = WEIGHTS[weights](g.rng)
    out = g("Conv", x, weight, g.rng.normal(0, 1, 24), kernel_shape=[3, 3], pads=[pads] * 4,
            strides=[stride] * 2)  # fmt: skip
    check(g.model(out, SHAPE), [DATA[data][1]], inputs())


def test_rows_of_two_values_times_columns_of_two_values() -> None:
    g = Network()
    weight = signs(g.rng, 40, 24) * g.rng.uniform(0.2, 1, 24) + g.rng.normal(0, 0.3, 24)
    model = g.model(g("MatMul", shifted_sign(g, "x"), weight), (3, 40))
    check(model, ["binary"], inputs(shape=(3, 40)))


def test_a_sum_of_multiples_that_is_zero_stays_zero_behind_any_padding() -> None:
    """-0.25 and 0.75, padded by 0: sums are multiples of 0.25, and a sign sees which are 0."""
    g = Network()
    x = g("Add", g("Mul", where(g, "x"), 0.5), 0.25)
    scale = g.rng.uniform(0.1, 1, (24, 1, 1, 1))
    sums = g.layer(x, signs(g.rng, 24, 16, 3, 3) * scale, pads=1)
    out = g("Sign", sums)
    model = g.model(out, SHAPE)
    data = inputs()
    made = next(iter(compile_model(model, CompileOptions(threads=1)).run({"x": data}).values()))
    want = next(iter(evaluate(load(model), {"x": data}).values()))
    assert (want == 0).any()
    np.testing.assert_array_equal(made, want)


def test_bool_inputs_are_bits() -> None:
    g = Network()
    x = g("Sub", g("Mul", g.cast("x"), 2.0), 1.0)
    model = g.model(g.layer(x, signs(g.rng, 8, 16, 3, 3), pads=1), SHAPE, TensorProto.BOOL)
    check(model, ["binary"], inputs() > 0)


def test_values_that_are_not_evenly_spaced_stay_float_and_are_right() -> None:
    g = Network()
    x = g("Gather", np.array([-1.0, 0.1, 1.0]), g("Add", *(
        g.cast(g("Greater", "x", cut), TensorProto.INT64) for cut in (-0.5, 0.5)
    )))  # fmt: skip
    model = g.model(g.layer(x, signs(g.rng, 8, 16, 3, 3)), SHAPE)
    check(model, ["float"], inputs())
    (layer,) = found(model)
    assert layer.reason == "its data take 3 values that are not evenly spaced"


def test_a_scale_for_each_channel_of_the_data_is_the_reason_to_stay_float() -> None:
    g = Network()
    x = g("Mul", where(g, "x"), g.rng.uniform(0.5, 1.5, (1, 16, 1, 1)))
    model = g.model(g.layer(x, signs(g.rng, 8, 16, 3, 3)), SHAPE)
    check(model, ["float"], inputs())
    (layer,) = found(model)
    assert "a scale of their own in each channel" in layer.reason
    assert "behind the layer" in layer.remedy


def test_a_scale_for_each_channel_of_a_depthwise_layer_is_its_own() -> None:
    g = Network()
    x = g("Mul", where(g, "x"), g.rng.uniform(0.5, 1.5, (1, 16, 1, 1)))
    model = g.model(g.layer(x, signs(g.rng, 16, 1, 3, 3), group=16), SHAPE)
    check(model, ["few_bit"], inputs())


def test_where_the_model_has_no_number_any_bit_will_do() -> None:
    """0 / 0 in front of a layer: the report says so, and the rest is right."""
    g = Network()
    model = g.model(g.layer(g("Div", "x", g("Abs", "x")), signs(g.rng, 8, 16, 3, 3)), SHAPE)
    made = compile_model(model, CompileOptions(threads=1))
    assert "divides 0 by 0" in str(made.manifest["report"])
    x = inputs(zeros=False)
    want = runtime(model, x)
    x[0, :, 4, 4] = 0
    got = made.run({"x": x})[model.graph.output[0].name]
    np.testing.assert_allclose(got[:, :, :2], want[:, :, :2], atol=1e-5)
    assert np.isfinite(got).all()


def test_near_signs_are_no_signs() -> None:
    """X / (|x| + eps) takes all values near 0, and a window of a step is no step."""
    for spelling in (
        lambda g, x: g("Div", x, g("Add", g("Abs", x), 0.1)),
        lambda g, x: g("Clip", g("Mul", x, 1e6), -1.0, 1.0),
    ):
        g = Network()
        model = g.model(g.layer(spelling(g, "x"), signs(g.rng, 8, 16, 3, 3)), SHAPE)
        check(model, ["float"], inputs())


def test_a_window_of_zeros_and_ones_is_read_again() -> None:
    g = Network()
    inside = g("Mul", above(g, "x", -0.5), below(g, "x", 0.5))
    check(g.model(g.layer(inside, signs(g.rng, 8, 16, 3, 3)), SHAPE), ["binary"], inputs())


def test_zero_of_a_shifted_sign_is_its_middle() -> None:
    g = Network()
    model = g.model(g.layer(shifted_sign(g, "x"), signs(g.rng, 8, 16, 3, 3), pads=1), SHAPE)
    check(model, ["binary"], np.full(SHAPE, 0.3, np.float32))


def _decision(g: Network, rng: np.random.Generator) -> str:
    """Return a random decision on ``x``, or on a rising or falling function of it, as a float."""
    x = "x"
    for _ in range(rng.integers(3)):
        op = rng.choice(["Mul", "Add", "Neg", "Clip", "Sub", "Div"])
        number = float(rng.choice([0.5, -2.0, 3.0, 0.1, -0.7]))
        x = {
            "Neg": lambda x=x: g("Neg", x),
            "Clip": lambda x=x: g("Clip", x, -0.5, 0.7),
            "Sub": lambda x=x, number=number: g("Sub", number, x),
        }.get(op, lambda x=x, op=op, number=number: g(op, x, number))()
    cut = float(rng.choice(CUTS))
    kind = rng.integers(7)
    if kind == 0:
        return g("Sign", x)
    if kind == 1:
        return g("Round", g("Clip", g("Mul", x, 2.0), -1.0, 2.0))
    names = ["Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"]
    made = g(names[kind - 2], x, cut)
    if rng.random() < 0.3:
        return g("Where", made, float(rng.choice(CUTS)), 0.25)
    if rng.random() < 0.2:
        return g("Gather", np.array([0.5, -1.0]), g.cast(made, TensorProto.INT64))
    return g.cast(g("Not", made) if rng.random() < 0.3 else made)


@pytest.mark.parametrize("seed", range(40))
def test_random_decisions_are_what_they_were_at_every_number(seed: int) -> None:
    """Passes alone, at all cuts and the numbers beside them: exactly the same, but for -0."""
    rng = np.random.default_rng(seed)
    g = Network()
    y = _decision(g, rng)
    for _ in range(rng.integers(1, 5)):
        op = str(rng.choice(["Add", "Sub", "Mul", "Max", "Min", "Where"]))
        other = _decision(g, rng)
        if op == "Where":
            y = g("Where", g("Greater", other, 0.5), y, float(rng.choice(CUTS)))
        else:
            y = g(op, y, other)
    out = g("MatMul", y, np.eye(400, dtype=np.float32))
    graph = load(g.model(out, (1, 400)))
    points = np.concatenate([CUTS, CUTS / 2, CUTS / 3, CUTS * 2, (0.7 - CUTS) / 3, [1e-45, 3e38]])
    near = np.float32(points)
    near = np.concatenate([near, np.nextafter(near, np.inf), np.nextafter(near, -np.inf)])
    x = np.concatenate([near, -near, rng.normal(0, 1, 400)])[:400].astype(np.float32)[None]
    want = evaluate(graph, {"x": x})[out]
    simplify(graph)
    recognise_ramps(graph)
    recognise_signs(graph)
    recognise_quantisers(graph)
    read_again(graph)
    np.testing.assert_array_equal(_evaluated(graph, x)[out], want)


def _evaluated(graph: Graph, x: Array) -> dict[str, Array]:
    values = {**graph.constants, "x": x}
    for node in graph.nodes:
        ins = [values[i] if i else None for i in node.inputs]
        if node.op == "bnncc.Sign":
            lo, hi, zero = (node.attrs[k] for k in ("lo", "hi", "zero"))
            at = {"ge": hi, "gt": lo, "mid": (lo + hi) / 2}[zero]
            made = [np.select([ins[0] < 0, ins[0] > 0], [lo, hi], at).astype(np.float32)]
        else:
            made = evaluate_node(node, ins)
        values.update(zip(node.outputs, made, strict=True))
    return values
