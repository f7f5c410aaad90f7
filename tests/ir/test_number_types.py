"""Networks of float16, bfloat16 and float64: layers are as in float32, and their type is kept."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from bnncc.agreement import verify
from bnncc.driver import compile_model
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.options import CompileOptions
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
from tests.tiny import BASELINE

pytestmark = pytest.mark.sampled(3)

HALF = ["where", "difference of comparisons", "table", "PACT", "AdaBin", "sum of signs"]


@pytest.mark.sampled(2)
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


@pytest.mark.sampled(2)
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


EDGES = np.array([
    0, 1e-9, 2.9e-8, 2.0**-25, 3 * 2.0**-25, 2.0**-24, 5.97e-8, 6.1e-5, 2.0**-14, 0.1, 1 / 3, 1,
    1 + 2.0**-11, 1 + 3 * 2.0**-11, 1.0001, 2049, 2051, 65504, 65519.99, 65520, 70000, 3.4028235e38,
    1e-40, 2.0**-134, 3 * 2.0**-134, 1.17549435e-38, np.inf,
], np.float32)  # fmt: skip
"""Numbers beside what types of half precision round at, tell from 0, and hold at most."""


def there_and_back(body: str, dtype: str, shape: tuple[int, ...] | None = None) -> onnx.ModelProto:
    """Return a float32 network of `x`, and of `n`: `x` cast to `dtype` and back."""
    code = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}[dtype]
    given = ",".join(map(str, shape or (2 * EDGES.size,)))
    return onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> g (float[{given}] x) => ({body.split(":")[0]}) '
        f"{{ h = Cast<to = {code}>(x) n = Cast<to = 1>(h) {body.split(':')[1]} }}"
    )


BOTH = np.concatenate([EDGES, -EDGES])
TARGETS = ["native", BASELINE]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_cast_to_half_precision_and_back_rounds(dtype: str, target: str) -> None:
    """Exactly: with infinities, denormal numbers, and signs that see what became 0."""
    body = "float[N] n, float[N] s, bool[N] g: s = Sign(n) c = Constant<value_float = 0.1>() "
    model = there_and_back(body + "g = Greater(n, c)", dtype)
    made = compile_model(model, CompileOptions(threads=1, target=target)).run({"x": BOTH})
    with np.errstate(over="ignore"):
        want = BOTH.astype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16).astype("f")
    assert np.array_equal(made["n"].view(np.uint32), want.view(np.uint32))
    assert np.array_equal(made["s"], np.sign(want))
    assert np.array_equal(made["g"], want > np.float32(0.1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_residue_of_rounding_does_not_cancel(dtype: str) -> None:
    model = there_and_back("float[N] y, float[N] z: y = Sub(x, n) z = Sub(n, x)", dtype)
    x = np.linspace(0.1, 7.3, BOTH.size, dtype=np.float32)
    made = compile_model(model, CompileOptions(threads=1)).run({"x": x})
    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    assert np.array_equal(made["y"], x - x.astype(kind).astype("f"))
    assert np.array_equal(made["z"], -made["y"])


def test_what_a_binary_layer_gives_is_rounded_before_a_sign() -> None:
    """Of sums that are multiples of 2**-26, all that float16 has 0 for are 0."""
    g = Network()
    sums = g("Mul", g.layer(where(g, "x"), signs(g.rng, 8, 16, 1, 1)), 2.0**-26)
    back = g.cast(g.cast(sums, TensorProto.FLOAT16))
    model = g.model(g.layer(g("Sign", back), np.ones((8, 8, 1, 1))), SHAPE)
    x = inputs("float32")
    check(model, ["binary"] * 2, x, near=0)
    value = next(iter(evaluate(load(model), {"x": x}).values()))
    assert (value % 2 != 0).any()  # of eight signs, some of them 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_levels_that_a_cast_rounds_are_what_they_became(dtype: str) -> None:
    """Thirds are evenly spaced, and are not once they are rounded: no sums of integers."""
    g = Network()
    levels = g("Div", g("Round", g("Clip", g("Mul", "x", 3.0), 0.0, 3.0)), 3.0)
    code = TensorProto.FLOAT16 if dtype == "float16" else TensorProto.BFLOAT16
    back = g.cast(g.cast(levels, code))
    model = g.model(g.layer(back, signs(g.rng, 8, 16, 3, 3)), SHAPE)
    check(model, ["float"], inputs("float32"), near=1e-6)


def test_moves_between_the_casts_keep_what_was_rounded() -> None:
    body = "float[54,1] z: t = Unsqueeze(h, a) u = Neg(t) z = Cast<to = 1>(u)"
    model = there_and_back(body.replace("t =", "a = Constant<value_ints = [1]>() t ="), "float16")
    made = next(iter(compile_model(model, CompileOptions(threads=1)).run({"x": BOTH}).values()))
    with np.errstate(over="ignore"):
        assert np.array_equal(made[:, 0], -BOTH.astype(np.float16).astype("f"))


def test_half_precision_that_computes_is_as_near_as_its_type_says() -> None:
    """The sum is float16's, so all of it is compared as float16 is: nothing rounds one Cast."""
    model = there_and_back("float[N] y: d = Add(h, h) y = Cast<to = 1>(d)", "float16")
    graph = load(model)
    assert "bnncc.Narrow" not in {node.op for node in graph.nodes}
    assert "bnncc.Round" in {node.op for node in graph.nodes}


@pytest.mark.parametrize(("there", "back"), [("FLOAT", "DOUBLE"), ("DOUBLE", "FLOAT")])
def test_casts_between_single_and_double(there: str, back: str) -> None:
    """To float32 and back rounds a float64; to float64 and back is nothing."""
    codes = {"FLOAT": ("float", 1, "f4"), "DOUBLE": ("double", 11, "f8")}
    text, code, kind = codes[back]
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> '
        f"g ({text}[54] x) => ({text}[54] y, {text}[54] s) "
        f"{{ h = Cast<to = {codes[there][1]}>(x) y = Cast<to = {code}>(h) s = Sign(y) }}"
    )
    x = (BOTH.astype("f8") / 3).astype(kind) if back == "DOUBLE" else BOTH
    made = compile_model(model, CompileOptions(threads=1)).run({"x": x})
    want = x.astype(codes[there][2]).astype(kind)
    assert np.array_equal(made["y"], want)
    assert np.array_equal(made["s"], np.sign(want))
