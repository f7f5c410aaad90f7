"""Networks of float16, bfloat16 and float64: layers are as in float32, and their type is kept."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from bnncc.driver import compile_model
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.options import CompileOptions
from bnncc.verify import verify
from tests.spellings import (
    SHAPE,
    SPELLINGS,
    Network,
    Spelling,
    check,
    found,
    inputs,
    network,
    pact,
    shifted_sign,
    signs,
    where,
)

HALF = ["where", "difference of comparisons", "table", "PACT", "AdaBin", "sum of signs"]


@pytest.mark.parametrize("name", HALF)
def test_spellings_in_float16(name: str) -> None:
    spelling, kind = SPELLINGS[name]
    x = inputs("float16")
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


DOUBLE = ["where", "difference of comparisons", "argmax of two", "PACT"]


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_transpose_moves_behind_what_is_rounded(dtype: str) -> None:
    """Half precision says what is rounded by nodes of its own, which are moved like others."""
    g = Network(dtype)
    turned = g("Transpose", "x", perm=[0, 2, 3, 1])
    scaled = g("Mul", turned, 0.3)
    model = g.model(g("Transpose", g("Sqrt", g("Abs", scaled)), perm=[0, 3, 1, 2]), SHAPE)
    x = inputs(dtype)
    made = next(iter(compile_model(model, CompileOptions(threads=1)).run({"x": x}).values()))
    want = next(iter(evaluate(load(model), {"x": x}).values()))
    assert made.dtype == want.dtype
    np.testing.assert_allclose(made.astype("f"), want.astype("f"), rtol=2.0**-6)
