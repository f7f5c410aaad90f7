"""Which elements depend on a tie: all that do, and no others where the graph tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.spread import spread
from bnncc.ir.ties import TIE, tied

SHAPE = (1, 3, 6, 6)
WEIGHT = np.array([0.1, 0.2, -0.3], np.float32).reshape(1, 3, 1, 1)


def parsed(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return model


def masks(body: str, x: np.ndarray, outputs: str = "float y", **constants: Any) -> dict[str, Any]:
    """Return masks of a graph behind `s`, the sign of a product that is tied where x is 1."""
    text = (
        f'<ir_version: 9, opset_import: ["" : 17]> net (float[1, 3, 6, 6] x) => ({outputs}) '
        "{ c = Conv(x, w) g = GreaterOrEqual(c, zero) s = Where(g, one, minus) " + body + " }"
    )
    model = parsed(text)
    constants = {"w": WEIGHT, "zero": 0.0, "one": 1.0, "minus": -1.0, **constants}
    for name, value in constants.items():
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return tied(load(model), {"x": x})


@pytest.fixture
def x() -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    values[:, :, 2, 3] = 1
    return values


def only(shape: tuple[int, ...], *where: Any) -> np.ndarray:
    mask = np.zeros(shape, bool)
    mask[where] = True
    return mask


def test_where_a_tie_spreads(x: np.ndarray) -> None:
    one = only((1, 1, 6, 6), 0, 0, 2, 3)
    np.testing.assert_array_equal(masks("y = Identity(s)", x)["y"], one)
    np.testing.assert_array_equal(masks("y = Mul(s, x)", x)["y"], np.repeat(one, 3, 1))
    ones = np.ones((2, 1, 3, 3))
    around = only((1, 2, 6, 6), 0, slice(None), slice(1, 4), slice(2, 5))
    made = masks("y = Conv <pads = [1, 1, 1, 1]> (s, k)", x, k=ones)["y"]
    np.testing.assert_array_equal(made, around)
    made = masks("y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (s)", x)["y"]
    np.testing.assert_array_equal(made, only((1, 1, 3, 3), 0, 0, 1, 1))
    made = masks("t = Transpose <perm = [0, 1, 3, 2]> (s) y = Concat <axis = 1> (x, t)", x)["y"]
    np.testing.assert_array_equal(made, only((1, 4, 6, 6), 0, 3, 3, 2))
    made = masks("y = Pad(s, p)", x, p=np.array([0, 0, 1, 2, 0, 0, 0, 0]))["y"]
    np.testing.assert_array_equal(made, only((1, 1, 7, 8), 0, 0, 3, 5))
    assert masks("y = GlobalAveragePool(s)", x)["y"].all()
    assert masks("f = Flatten(s) y = MatMul(f, k)", x, k=np.ones((36, 2)))["y"].all()
    assert masks("y = LpNormalization <axis = 1> (s)", x)["y"].all()  # nothing is known of it


def test_what_does_not_depend_on_it(x: np.ndarray) -> None:
    made = masks("y = Abs(x) z = Add(s, zero)", x, "float y, float z")
    assert not made["y"].any()
    assert made["z"].sum() == 1
    x[:, :, 2, 3] = np.float32([1, 1, 1.001])
    assert not masks("y = Identity(s)", x)["y"].any()


def test_a_contest_of_near_values(x: np.ndarray) -> None:
    body = "d = Mul(c, near) m = Concat <axis = 1> (c, d) y = ArgMax <axis = 1, keepdims = 0> (m)"
    close = masks(body, x, "int64 y", near=np.float32(1) + np.finfo(np.float32).eps)["y"]
    assert close.all()
    apart = masks(body, x, "int64 y", near=2.0)["y"]
    assert apart.sum() == 1  # where both are 0 but for rounding


def test_rounding_and_quantizing(x: np.ndarray) -> None:
    made = masks("a = Add(c, half) y = Round(a)", x, half=0.5)["y"]
    np.testing.assert_array_equal(made, only((1, 1, 6, 6), 0, 0, 2, 3))
    made = masks("a = Add(c, half) y = Cast <to = 6> (a)", x, "int32 y", half=3.0)["y"]
    np.testing.assert_array_equal(made, only((1, 1, 6, 6), 0, 0, 2, 3))


def test_all_that_changes_is_masked(x: np.ndarray) -> None:
    """Whatever a tie falls to, nothing changes where the mask is clear."""
    rng = np.random.default_rng(1)
    text = (
        '<ir_version: 9, opset_import: ["" : 17]> net (float[1, 4, 6, 6] t) => (float y, int64 z) '
        "{ a = Conv <pads = [1, 1, 1, 1]> (t, k) b = Sign(a) "
        "p = MaxPool <kernel_shape = [2, 2]> (b) c = Conv(p, l)"
        " y = Relu(c) z = ArgMax <axis = 1> (b) }"
    )
    model = parsed(text)
    weights = {"k": (5, 4, 3, 3), "l": (3, 5, 2, 2)}
    for name, shape in weights.items():
        value = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    graph = load(model)
    data = rng.standard_normal((1, 4, 6, 6)).astype(np.float32)
    made = tied(graph, {"t": data}, near=0.02)  # as if rounding were coarse
    assert 0 < made["y"].sum() < made["y"].size
    plain = evaluate(graph, {"t": data}, ["a"])
    for seed in range(20):
        moved = plain["a"] * np.random.default_rng(seed).uniform(0.999, 1.001, plain["a"].shape)
        other = evaluate(graph, {"t": data, "a": moved.astype(np.float32)})
        for name in ("y", "z"):
            assert not ((other[name] != plain[name]) & ~made[name]).any()


PRODUCTS = {
    "MatMul": ("MatMul(a, b)", (2, 3, 4), (4, 5)),
    "vectors": ("MatMul(a, b)", (4,), (4,)),
    "batches": ("MatMul(a, b)", (2, 1, 3, 4), (3, 4, 2)),
    "Gemm": ("Gemm <transA = 1, transB = 1, alpha = -0.5> (a, b)", (4, 3), (5, 4)),
    "Conv": ("Conv <group = 2, pads = [1, 0, 1, 0], strides = [2, 1]> (a, b)",
             (2, 6, 5, 4), (4, 3, 3, 2)),
    "ConvTranspose": ("ConvTranspose <group = 2, strides = [2, 2]> (a, b)",
                      (1, 4, 3, 3), (4, 3, 2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_sums_with_a_tie_among_their_terms(name: str, operand: str) -> None:
    """The sums that change if an operand of ones does."""
    text, *shapes = PRODUCTS[name]
    first, second = (", ".join(map(str, shape)) for shape in shapes)
    graph = load(parsed(
        f'<ir_version: 9, opset_import: ["" : 17]> net (float[{first}] c, float[{second}] d) '
        f"=> (float y) {{ a = Sign(c) b = Sign(d) y = {text} }}"
    ))  # fmt: skip
    feeds = {name: np.ones(shape, np.float32) for name, shape in zip("cd", shapes, strict=True)}
    plain = evaluate(graph, feeds)["y"]
    data = "c" if operand == "a" else "d"
    for place in range(feeds[data].size):
        moved = feeds[data].copy()
        moved.flat[place] = 1e-9  # its sign is decided by the rounding of inputs below
        sizes = {data: (moved != 1).astype(np.float64)}
        made = tied(graph, {**feeds, data: moved}, sizes=sizes)["y"]
        other = evaluate(graph, {**feeds, data: np.where(moved == 1, moved, -1)})["y"]
        np.testing.assert_array_equal(made, other != plain)


def test_what_onnx_leaves_open_and_what_chance_decides() -> None:
    numbers = np.array([1.5, np.nan, 1e20, -np.inf, 127.9, -128.9, 128], np.float32)
    text = (
        '<ir_version: 9, opset_import: ["" : 17]> net (float[7] x) => (y) { y = Cast <to = 3> (x) }'
    )
    found = tied(load(parsed(text)), {"x": numbers})["y"]
    np.testing.assert_array_equal(found, [False, True, True, True, False, False, True])
    text = (
        '<ir_version: 9, opset_import: ["" : 17]> net (float[2, 4] x, float[4, 1] w) => (y) '
        "{ s = MatMul(x, w) y = Tanh(s) }"
    )
    large = np.array([[1e6, -1e6, 0.3, 0], [0.1, 0.2, -0.3, 0.5]], np.float32)
    found = tied(load(parsed(text)), {"x": large, "w": np.ones((4, 1), np.float32)})["y"]
    np.testing.assert_array_equal(found, [[True], [False]])


@pytest.mark.parametrize(
    "jump",
    ["Shrink <lambd = 0.5> (a)", "ThresholdedRelu <alpha = 0.5> (a)", "Mod <fmod = 1> (a, half)"],
)
def test_what_jumps_and_follows_its_data_besides(x: np.ndarray, jump: str) -> None:
    made = masks(f"a = Add(c, half) y = {jump}", x, half=0.5)["y"]
    np.testing.assert_array_equal(made, only((1, 1, 6, 6), 0, 0, 2, 3))


def test_what_half_precision_has_no_number_for() -> None:
    text = (
        '<ir_version: 9, opset_import: ["" : 17]> net (float[4] x) => (float16 y) '
        "<float c = {0.00001}> "
        "{ a = Cast <to = 10> (x) d = Cast <to = 10> (c) m = Mul(a, d) y = Sign(m) }"
    )
    numbers = np.array([1e-3, 1, -1e-4, 0.5], np.float32)
    found = tied(load(parsed(text)), {"x": numbers})["y"]
    np.testing.assert_array_equal(found, [True, False, True, False])


def test_what_a_cast_alone_rounds_is_known() -> None:
    """Code rounds as the model does, so a Sign behind it is no tie: 1e-9 is 0 in float16."""
    text = (
        '<ir_version: 9, opset_import: ["" : 17]> net (float[4] x) => (float16 y) '
        "{ a = Cast <to = 10> (x) y = Sign(a) }"
    )
    numbers = np.array([1e-8, 1e-6, -1e-9, 0.5], np.float32)
    assert not tied(load(parsed(text)), {"x": numbers})["y"].any()


def test_the_square_of_what_cancels(x: np.ndarray) -> None:
    x[0, :, 2, 3] = 2, -1, 0
    made = masks("m = Mul(c, c) h = Greater(m, zero) y = Where(h, one, minus)", x)["y"]
    np.testing.assert_array_equal(made, only((1, 1, 6, 6), 0, 0, 2, 3))


def test_numbers_that_are_not_normal_are_rounded_as_far_as_normal_ones() -> None:
    """1e-39 is near a multiple of 1e-45, 1e-50 near 0; what is 0, or is normal, is not."""
    model = parsed(
        '<ir_version: 9, opset_import: ["" : 17]> net (float[4] x) => (bool y) '
        "<float c = {1e-20}, float d = {0}> { m = Mul(x, c) y = Greater(m, d) }"
    )
    graph, feeds = load(model), {"x": np.float32([1e-19, 1e-30, 0, 1])}
    assert tied(graph, feeds)["y"].tolist() == [True, True, False, False]
    found = spread(graph, feeds, "m", near=TIE)
    low, value, high = (np.asarray(v, np.float64) for v in (found.low, found.value, found.high))
    least = float(np.finfo(np.float32).smallest_subnormal)
    assert (high - value >= least).tolist() == [True, True, False, True]
    assert (value - low <= np.maximum(8 * least, TIE * value)).all()


def test_constants_are_merged_behind_a_straight_through_estimator() -> None:
    """A kernel's constant for all taps is larger than the sum where most taps are padding."""
    channels, rng = 208, np.random.default_rng(3)
    weight = np.where(rng.random((channels, channels, 3, 3)) < 0.5, -1, 1).astype(np.float32)
    scale, shift = rng.uniform(1, 4, channels), rng.uniform(-1, 1, channels)
    norm = [np.float32(v) for v in (scale, shift, 0 * scale, 1 + 0 * scale)]
    model = parsed(
        '<ir_version: 9, opset_import: ["" : 17]> net (float[1, 208, 1, 1] x) => (float y) '
        "{ s = Sign(x) t = Mul(x, x) d = Sub(s, t) q = Add(d, t) "
        "c = Conv <pads = [1, 1, 1, 1]> (q, w) "
        "y = BatchNormalization <epsilon = 0.0> (c, g, b, m, v) }"
    )
    for name, value in zip("wgbmv", (weight, *norm), strict=True):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    x = np.zeros((1, channels, 1, 1), np.float32)
    x[0, 7, 0, 0] = 0.3
    graph = load(model)
    known = {"x": x, "s": np.sign(x)}
    sums = weight[:, :, 1, 1] @ np.sign(x).ravel()
    taps = np.float32(9 * channels)
    merged = (taps * norm[0] + norm[1]) - norm[0] * (taps - sums)
    found = spread(graph, known, "y", near=TIE, whole=1.0)
    assert (merged != found.value.ravel()).any()
    assert (merged >= found.low.ravel()).all()
    assert (merged <= found.high.ravel()).all()
    # A sum that is wrong by one is still seen.
    assert (found.high - found.low < norm[0].reshape(1, -1, 1, 1) / 8).all()
