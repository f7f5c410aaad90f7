"""Networks that spell decisions in many ways, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bnncc.driver import compile_model, lowered
from bnncc.options import CompileOptions
from bnncc.report import Layer

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


def whole(g: Network, x: str) -> str:
    return g.cast(g("Clip", g("Round", x), -127.0, 127.0), TensorProto.INT8)


def two(g: Network) -> str:
    return g.cast(g.constant(2.0), TensorProto.INT8)


def integer_sign(g: Network, x: str) -> str:
    return g.cast(g("Sign", whole(g, x)))


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


def filled(g: Network, x: str) -> str:
    """``x[x >= 0] = 1; x[x < 0] = -1``."""
    y = g("Where", g("GreaterOrEqual", x, 0.0), 1.0, x)
    return g("Where", g("Less", y, 0.0), -1.0, y)


def filled_in_the_middle(g: Network, x: str) -> str:
    """Three ranges, decided on the data as they were, and behind a clip."""
    y = g("Clip", x, -0.9, 0.9)
    z = g("Where", g("Greater", y, 0.5), 0.75, y)
    z = g("Where", g("LessOrEqual", z, -0.5), -0.75, z)
    inside = g("And", g("LessOrEqual", y, 0.5), g("Greater", y, -0.5))
    return g("Where", g("Not", inside), z, 0.0)


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
    "remainder": (
        lambda g, x: g("Sub", g("Mul", g.cast(g("Mod", whole(g, x), two(g))), 2.0), 1.0), "binary",
    ),
    "remainder of either sign": (
        lambda g, x: g.cast(g("Sign", g("Mod", whole(g, x), two(g), fmod=1))), "few_bit",
    ),
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
    "never negative": (lambda g, x: where(g, g("Relu", x)), "binary"),
    "filled one after the other": (filled, "binary"),
    "filled in the middle": (filled_in_the_middle, "few_bit"),
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
    top = float(np.nanmax(np.abs(want)))
    np.testing.assert_allclose(made.astype(np.float64), want, rtol=0, atol=near * top)


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
