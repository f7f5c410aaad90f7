"""Few-bit layers in networks: found in all spellings, exact, whichever way they are computed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnncc.agreement import verify
from bnncc.driver import compile_model
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.quantizers import LEVELS
from bnncc.options import CompileOptions
from bnncc.recognise.binarize import binarize
from bnncc.recognise.filters import few_bit_weights
from bnncc.recognise.lattice import even
from bnncc.recognise.quantizers import recognise_quantizers
from bnncc.recognise.signs import recognise_signs
from bnncc.topi_binary.spec import FewBitConv2d
from bnncc.transform.physical import KERNEL
from bnncc.transform.simplify import simplify
from bnncc.verification.confirm_passes import compare_passes
from tests.kernel_harness import HERE
from tests.physical_networks import passed
from tests.tiny import BASELINE

pytestmark = pytest.mark.sampled(4)

RNG = np.random.default_rng(3)


def model_of(body: str, x: str, y: dict[str, str], constants: dict) -> onnx.ModelProto:
    outputs = ", ".join(f"float[{shape}] {name}" for name, shape in y.items())
    text = f'<ir_version: 9, opset_import: ["" : 21]> net (float[{x}] x) => ({outputs}) {{{body}}}'
    model = onnx.parser.parse_model(text)
    for name, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return model


def weights(bits: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return weights of so many bits, two's complement (1: signs), times powers of two."""
    top = 2**bits
    whole = (
        2 * RNG.integers(0, 2, shape) - 1 if bits == 1 else RNG.integers(-top // 2, top // 2, shape)
    )
    return (whole * 0.5 ** RNG.integers(1, 4, (shape[0], *[1] * (len(shape) - 1)))).astype(
        np.float32
    )


def run(
    model: onnx.ModelProto, x: np.ndarray, target: str = "native", few_bit: str = "auto"
) -> dict:
    options = CompileOptions(target=target, threads=1, few_bit=few_bit)
    artifact = compile_model(model, options)
    return {"report": artifact.report, **artifact.run({"x": x})}


@pytest.mark.slow
@pytest.mark.parametrize("few_bit", ["bitplanes", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_every_pair_of_bits_is_exact(bits: int, few_bit: str) -> None:
    """Scales are powers of two, so float32 holds every value and any difference shows."""
    body, outputs, constants = "", {}, {"zero": np.float32(0)}
    for data in (1, 2, 3, 4, 8):
        top = 2**data - 1
        constants |= {
            f"top{data}": np.float32(top), f"w{data}": weights(bits, (9, 35, 2, 2)),
            f"v{data}": weights(bits, (5, 35 * 4)),
        }  # fmt: skip
        body += f"""
        r{data} = Round(x) l{data} = Clip(r{data}, zero, top{data})
        c{data} = Conv<pads=[1,0,0,1]>(l{data}, w{data})
        f{data} = Flatten(l{data}) d{data} = Gemm<transB=1>(f{data}, v{data})"""
        outputs |= {f"c{data}": "1,9,2,2", f"d{data}": "1,5"}
    model = model_of(body, "1,35,2,2", outputs, constants)
    x = (RNG.standard_normal((1, 35, 2, 2)) * 12 + 6).astype(np.float32)
    want, got = evaluate(load(model), {"x": x}), run(model, x, few_bit=few_bit)
    for name in outputs:
        np.testing.assert_array_equal(got[name], want[name])
    found = [(layer["kind"], tuple(layer["bits"])) for layer in got["report"]["layers"]]
    binary = [f for f in found if f == ("binary", (1, 1))]
    few = [f for f in found if f[0] == "few_bit"]
    assert len(binary) + len(few) == 10
    assert len(binary) == (2 if bits == 1 else 0)


def test_depthwise_layers_multiply_levels_as_floats() -> None:
    body = """
    r = Round(x) l = Clip(r, zero, top)
    y = Conv<pads=[1,1,1,1], group=24>(l, w)
    """
    constants = {"zero": np.float32(-2), "top": np.float32(5), "w": weights(4, (24, 1, 3, 3))}
    model = model_of(body, "1,24,5,6", {"y": "1,24,5,6"}, constants)
    x = (RNG.standard_normal((1, 24, 5, 6)) * 4).astype(np.float32)
    got = run(model, x, few_bit="bitplanes")
    np.testing.assert_array_equal(got["y"], evaluate(load(model), {"x": x})["y"])
    (layer,) = got["report"]["layers"]
    assert (layer["kind"], layer["bits"]) == ("few_bit", [3, 4])


NETWORK = """
q0 = Round(x)                      l0 = Clip(q0, low, high)
c1 = Conv<pads=[1,1,1,1]>(l0, w1)  b1 = BatchNormalization(c1, gamma, beta, mean, var)
a1 = Relu(b1)
n1 = QuantizeLinear(a1, s1, z1)    l1 = DequantizeLinear(n1, s1, z1)
p1 = MaxPool<kernel_shape=[2,2], strides=[2,2]>(l1)
c2 = Conv<pads=[1,1,1,1]>(p1, w2)  b2 = BatchNormalization(c2, gamma, beta, mean, var)
r2 = Add(b2, p1)
t2 = Tanh(r2) m2 = Mul(t2, three) q2 = Round(m2) l2 = Div(q2, three)
c3 = Conv<strides=[2,2]>(l2, w3)   g3 = GreaterOrEqual(c3, zero) s3 = Where(g3, one, minus)
c4 = Conv<pads=[1,1,1,1]>(s3, w4)  k4 = Concat<axis=1>(l2, l2)
c5 = Conv<pads=[0,1,1,0]>(k4, w5)
d4 = Clip(c4, zero, one) e4 = Mul(d4, three) o4 = Floor(e4) h4 = Div(o4, three)
f4 = Flatten(h4) y = Gemm<transB=1>(f4, w6, bias)
"""
C = 20


def _network() -> onnx.ModelProto:
    return model_of(
        NETWORK,
        f"1,{C},8,8",
        {"y": "1,7", "c5": "1,6,4,4", "l1": f"1,{C},8,8"},
        {
            "low": np.float32(-2), "high": np.float32(1), "zero": np.float32(0),
            "one": np.float32(1), "minus": np.float32(-1), "three": np.float32(3),
            "s1": np.float32(0.37), "z1": np.int8(-128),
            "gamma": RNG.uniform(-1, 1, C).astype(np.float32),
            "beta": RNG.uniform(-1, 2, C).astype(np.float32),
            "mean": RNG.standard_normal(C).astype(np.float32),
            "var": RNG.uniform(5, 90, C).astype(np.float32),
            "w1": weights(1, (C, C, 3, 3)), "w2": weights(2, (C, C, 3, 3)) * np.float32(0.01),
            "w3": weights(3, (C, C, 1, 1)), "w4": np.sign(weights(3, (8, C, 3, 3))),
            "w5": weights(4, (6, 2 * C, 2, 2)), "w6": weights(8, (7, 32)),
            "bias": RNG.standard_normal(7).astype(np.float32),
        },
    )  # fmt: skip


@pytest.mark.parametrize("few_bit", ["bitplanes", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_network_is_right_layer_by_layer(few_bit: str) -> None:
    model = _network()
    artifact = compile_model(model, CompileOptions(threads=1, few_bit=few_bit))
    kinds = [(layer["kind"], tuple(layer["bits"])) for layer in artifact.report["layers"]]
    assert kinds == [("few_bit", b) for b in ((2, 1), (8, 2), (3, 3), (1, 2), (3, 4), (2, 8))]
    pools = {k["op"] for k in artifact.report["kernels"]} & {"bitwise_maxpool", "pool2d"}
    assert pools == {"bitwise_maxpool"}
    result = verify(model, artifact, seed=1)
    assert result["passed"], result["verdict"]


def test_weights_of_one_and_two_bits_stay_packed() -> None:
    """Linear layers of one row and of several, with weights of all kinds that have so few bits."""
    kinds = {"signs": (-1, 1), "low": (-1, 0), "high": (0, 1), "ternary": (-1, 0, 1),
             "two": (-2, -1, 0, 1)}  # fmt: skip
    constants: dict = {"zero": np.float32(0), "top": np.float32(255)}
    for name, values in kinds.items():
        weight = RNG.choice(values, (64, 21)).astype(np.float32)
        weight[: len(values)] = np.reshape(values, (-1, 1))  # all of them in each column
        constants[name] = weight / 2
    body = "c = Clip(x, zero, top) q = Round(c)"
    body += "".join(f" y_{name} = MatMul(q, {name})" for name in kinds)
    for rows in (1, 11):
        outputs = {f"y_{name}": f"{rows},21" for name in kinds}
        model = model_of(body, f"{rows},64", outputs, constants)
        x = (RNG.standard_normal((rows, 64)) * 200).astype(np.float32)
        want, got = evaluate(load(model), {"x": x}), run(model, x, BASELINE)
        for name in outputs:
            np.testing.assert_array_equal(got[name], want[name])
        for layer in got["report"]["layers"]:
            bits = 1 if "signs" in layer["name"] else 2
            assert f"int8 from {bits} bit" in layer["reason"], layer


@pytest.mark.parametrize(
    "target", ["native", *(pytest.param(t, marks=pytest.mark.slow) for t in HERE)]
)
def test_all_choices_agree_exactly(target: str) -> None:
    model = _network()
    x = (RNG.standard_normal((1, C, 8, 8)) * 2).astype(np.float32)
    planes, best = (run(model, x, target, few_bit) for few_bit in ("bitplanes", "auto"))
    for name in ("y", "c5", "l1"):
        np.testing.assert_array_equal(planes[name], best[name])


def _levels(body: str, constants: dict) -> tuple[list, np.ndarray, np.ndarray]:
    graph = load(model_of(body, "1,2,5,5", {"y": "1,2,5,5"}, constants))
    x = (RNG.standard_normal((1, 2, 5, 5)) * 3).astype(np.float32)
    x.reshape(-1)[:12] = [0, 0.5, -0.5, 1.5, 2.5, 0.25, 0.125, 1, 2, -0.0, 1 / 6, 100]
    before = evaluate(graph, {"x": x})["y"]
    simplify(graph)
    recognise_signs(graph)
    recognise_quantizers(graph)
    found = [n for n in graph.nodes if n.op == LEVELS]
    return found, before, evaluate(graph, {"x": x})["y"] if found else before


SPELLINGS = {
    "DoReFa": ("c = Clip(x, zero, one) m = Mul(c, seven) r = Round(m) y = Div(r, seven)", 7),
    "half away": (
        "c = Clip(x, zero, one) m = Mul(c, seven) a = Add(m, half) r = Floor(a) "
        "y = Div(r, seven)", 7
    ),
    "QDQ": ("q = QuantizeLinear(x, half, z) y = DequantizeLinear(q, half, z)", 255),
    "QCDQ": (
        "q = QuantizeLinear(x, half, z) c = Clip(q, il, ih) y = DequantizeLinear(c, half, z)", 3
    ),
    "falling": ("n = Neg(x) c = Clip(n, zero, seven) y = Ceil(c)", 7),
    "tanh": ("t = Tanh(x) m = Mul(t, seven) r = Round(m) y = Div(r, seven)", 14),
    "min and max": ("a = Max(x, zero) b = Min(seven, a) y = Round(b)", 7),
    "behind": ("c = Clip(x, zero, seven) r = Round(c) s = Sub(r, half) y = Mul(s, half)", 7),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_quantizer_spellings_become_one_node_with_the_same_values(name: str) -> None:
    body, count = SPELLINGS[name]
    constants = {
        "zero": np.float32(0), "one": np.float32(1), "seven": np.float32(7),
        "half": np.float32(0.5), "z": np.int8(3), "il": np.int8(-1), "ih": np.int8(2),
    }  # fmt: skip
    found, before, after = _levels(body, constants)
    assert [len(n.attrs["thresholds"]) for n in found] == [count]
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(
    "body",
    [
        "c = Clip(x, zero, big) y = Round(c)",  # 1000 levels
        "c = Clip(x, zero, seven) r = Round(c) y = Exp(r)",  # unevenly spaced behind Exp
        "y = Round(x)",  # no end
    ],
)
def test_other_roundings_stay(body: str) -> None:
    constants = {"zero": np.float32(0), "seven": np.float32(7), "big": np.float32(999)}
    found, *_ = _levels(body, constants)
    assert all(n.outputs[0] != "y" for n in found)


@pytest.mark.parametrize("bits", range(2, 9))
def test_weights_of_every_width_are_found(bits: int) -> None:
    whole = RNG.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (6, 40))
    whole[:, 0], whole[:, 1] = -(2 ** (bits - 1)), 1
    scale = RNG.uniform(0.01, 2, (6, 1))
    found = few_bit_weights((whole * scale).astype(np.float32))
    assert found is not None
    assert found.bits == bits
    np.testing.assert_allclose(found.whole * found.scale[:, None], whole * scale, rtol=1e-6)


def test_odd_weights_are_sums_of_signs_and_ternary_ones_two_planes() -> None:
    odd = few_bit_weights((2 * RNG.integers(0, 4, (3, 50)) - 3).astype(np.float32) / 3)
    assert odd is not None
    assert (odd.odd, odd.bits) == (True, 2)
    ternary = few_bit_weights(RNG.integers(-1, 2, (3, 50)).astype(np.float32) * 0.3)
    assert ternary is not None
    assert (ternary.odd, ternary.bits) == (False, 2)
    assert few_bit_weights(RNG.standard_normal((3, 50)).astype(np.float32)) is None


def test_lattices_are_evenly_spaced() -> None:
    held = even(np.arange(256, dtype=np.float32) / np.float32(255))
    assert held is not None
    assert (held.bits, held.level_of(0.0), held.level_of(0.5)) == (8, 0, 127.5)
    assert even(np.array([0, 1, 2, 4], np.float32)) is None


def test_the_report_says_which_side_is_real() -> None:
    constants = {"w": weights(3, (4, 20)), "v": RNG.standard_normal((4, 4)).astype(np.float32)}
    body = "y = Gemm<transB = 1>(x, w)  z = Gemm<transB = 1>(y, v)"
    graph = load(model_of(body, "2,20", {"z": "2,4"}, constants))
    simplify(graph)
    first, second = binarize(graph)
    assert "`x` is real-valued (a graph input), while its weights have 3 bits" in first.reason
    assert second.reason == "its data (from Gemm) and its weights are float"
    assert "the last layer usually stays float" in second.remedy


DECISIONS = {
    "rounded": "m = Mul(x, two) c = Clip(m, zero, three) q = Round(c)",
    "compared": """a = Greater(x, half) b = Greater(x, less) f = Cast<to=1>(a) g = Cast<to=1>(b)
                   q = Add(f, g)""",
    "few values": """t = Mul(x, two) i = Cast<to=6>(t) j = Mod(i, whole) k = Cast<to=1>(j)
                     q = Add(k, half)""",
    "signs": "q = Sign(x)",
}


@pytest.mark.parametrize("shape", [(5, 48), (2, 5, 48), (2, 3, 5, 48), (2, 1, 3, 5, 48)], ids=len)
@pytest.mark.parametrize("spelling", DECISIONS)
def test_products_with_weights_take_data_of_any_rank(spelling: str, shape: tuple[int, ...]) -> None:
    """Rows are what counts: decisions, too, are made row by row, and packed once."""
    constants = {
        "two": np.float32(2), "zero": np.float32(0), "three": np.float32(3),
        "half": np.float32(0.5), "less": np.float32(-0.5), "whole": np.int32(3),
        "w": weights(3, (48, 7)), "v": weights(2, (48, 9)),
    }  # fmt: skip
    body = f"{DECISIONS[spelling]} y = MatMul(q, w) z = MatMul(q, v)"
    dims = [",".join(map(str, (*shape[:-1], last))) for last in (48, 7, 9)]
    model = model_of(body, dims[0], {"y": dims[1], "z": dims[2]}, constants)
    before, physical, layers = passed(model, "x86-64-v4-vpopcntdq")
    assert [layer.kind for layer in layers] == ["few_bit", "few_bit"]
    x = RNG.standard_normal(shape).astype(np.float32)
    assert not compare_passes(physical, before, {"x": x})
    specs = [n.attrs["spec"] for n in physical.nodes if n.op == KERNEL]
    assert sum(isinstance(spec, FewBitConv2d) for spec in specs) == 2
    if spelling != "few values":  # there numbers are made first
        assert len(specs) == 3 + (spelling == "signs")  # planes of 0 and 1 are made of two


@pytest.mark.parametrize("kind", ["few_bit", "binary", "float"])
@pytest.mark.parametrize("dims", ["N,5", "N,T", "N,3,T"])
def test_rows_of_any_number_are_compiled(dims: str, kind: str) -> None:
    constants = {
        "three": np.float32(3), "zero": np.float32(0), "w": weights(2, (40, 7)),
        "v": np.sign(weights(1, (40, 7))), "u": np.ones((40, 7), np.float32) / 7,
    }  # fmt: skip
    body = {
        "few_bit": "c = Clip(x, zero, three) q = Round(c) y = MatMul(q, w)",
        "binary": "q = Sign(x) y = MatMul(q, v)",
        "float": "y = MatMul(x, u)",
    }[kind]
    model = model_of(body, f"{dims},40", {"y": f"{dims},7"}, constants)
    shape = [int(d) if d.isdigit() else 2 for d in dims.split(",")]
    x = RNG.standard_normal((*shape, 40)).astype(np.float32) * 3
    got = run(model, x)
    np.testing.assert_allclose(got["y"], evaluate(load(model), {"x": x})["y"], rtol=1e-5, atol=1e-5)
    assert [layer["kind"] for layer in got["report"]["layers"]] == [kind]


@pytest.mark.parametrize(
    ("move", "shape"),
    [
        ("m = DepthToSpace<blocksize=2>(q)", "1,8,10,10"),
        ('m = Pad<mode="reflect">(q, pads)', "1,32,7,7"),
        ("m = Concat<axis=1>(q, more)", "1,36,5,5"),
    ],
    ids=["pixels", "reflected", "beside constants"],
)
def test_levels_survive_what_signs_do(move: str, shape: str) -> None:
    channels, size = (int(d) for d in shape.split(",")[1:3])
    constants = {
        "three": np.float32(3), "zero": np.float32(0), "w": weights(2, (6, channels, 3, 3)),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "more": np.full((1, 4, 5, 5), 2, np.float32),
    }  # fmt: skip
    body = f"c = Clip(x, zero, three) q = Round(c) {move} y = Conv(m, w)"
    model = model_of(body, "1,32,5,5", {"y": f"1,6,{size - 2},{size - 2}"}, constants)
    before, physical, layers = passed(model, "x86-64-v4-vpopcntdq")
    assert [layer.kind for layer in layers] == ["few_bit"]
    x = RNG.standard_normal((1, 32, 5, 5)).astype(np.float32) * 3
    assert not compare_passes(physical, before, {"x": x})


NEAR_ZERO = {
    "dense": ("y = MatMul(l, w)", (4000, 3)),
    "padded": ("y = Conv<pads=[1,1,1,1]>(l, w)", (18, 300, 3, 3)),
    "padded between levels": ("p = Pad(l, pads, between) y = Conv(p, w)", (18, 300, 3, 3)),
    "grouped": ("y = Conv<group=2, pads=[1,0,0,1]>(l, w)", (32, 300, 3, 3)),
    "few bits": ("y = MatMul(l, few)", (4000, 3)),
}


@pytest.mark.parametrize("least", [-128, -127, -5])
@pytest.mark.parametrize("target", [*HERE[-1:], BASELINE])
@pytest.mark.parametrize("kind", NEAR_ZERO)
def test_large_sums_of_levels_cancel_exactly(kind: str, target: str, least: int) -> None:
    """Data near 0 are levels near 128: their sums pass 2^24, and small results are what is left."""
    body, shape = NEAR_ZERO[kind]
    rows = shape[1] * 2 if kind == "grouped" else shape[1]
    given = (2, shape[0]) if len(shape) == 2 else (1, rows, 4, 5)
    weight = RNG.integers(0, 128, shape).astype("f")
    constants = {
        "w": weight, "few": np.minimum(weight, 7), "lo": np.float32(least), "hi": np.float32(127),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "between": np.float32(0.5),
    }  # fmt: skip
    out = f"2,{shape[1]}" if len(shape) == 2 else "a,b,c,d"
    model = model_of(
        f"r = Round(x) l = Clip(r, lo, hi) {body}", ",".join(map(str, given)), {"y": out}, constants
    )
    x = np.where(RNG.random(given) < 0.02, RNG.integers(-2, 3, given), 0).astype("f")
    got = run(model, x, target)
    assert got["report"]["layers"][0]["kind"] == "few_bit"
    want = evaluate(load(model), {"x": x})["y"]
    np.testing.assert_array_equal(got["y"], want)


def test_sums_that_no_integer_holds_stay_float() -> None:
    weight = RNG.integers(0, 128, (70000, 2)).astype(np.float32)
    weight[0] = 127
    constants = {"w": weight, "lo": np.float32(-128), "hi": np.float32(127)}
    body = "r = Round(x) l = Clip(r, lo, hi) y = MatMul(l, w)"
    model = model_of(body, "1,70000", {"y": "1,2"}, constants)
    x = RNG.integers(-1, 2, (1, 70000)).astype("f")
    got = run(model, x, BASELINE)
    (layer,) = got["report"]["layers"]
    assert (layer["kind"], layer["remedy"]) == (
        "float", "data or weights of fewer bits have smaller sums",
    )  # fmt: skip
    most = 2 * 256 * int(weight.sum(0).max())
    assert f"its sums may reach {most}, beyond the {2**30}" in layer["reason"]
    np.testing.assert_array_equal(got["y"], x @ weight)
