"""The passes, one by one: what they find, what they leave alone, and that values stay the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

from bnncc.frontend.onnx import load
from bnncc.ir.dims import product
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node
from bnncc.recognise.binarize import binarize
from bnncc.recognise.filters import binary_weight
from bnncc.recognise.lattice import lattices, sign_values
from bnncc.recognise.signs import recognise_signs
from bnncc.targets import catalog
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, Pool2d, Step
from bnncc.transform import thresholds as th
from bnncc.transform.commute import commute_pads, commute_pools
from bnncc.transform.fuse import fuse
from bnncc.transform.in_place import store_in_place
from bnncc.transform.physical import KERNEL
from bnncc.transform.rows import flatten_rows
from bnncc.transform.simplify import simplify
from tests.physical_networks import evaluated, passed

ONE = (
    "one = Constant<value_float=1.0>() minus = Constant<value_float=-1.0>() "
    "zero = Constant<value_float=0.0>()"
)


def graph_of(
    body: str, *, shape: str = "1,4,5,5", out: str = "1,4,5,5", weights: dict | None = None
) -> Graph:
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    net (float[{shape}] x) => (float[{out}] y) {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    for name, value in (weights or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    graph = load(model)
    simplify(graph)
    return graph


SPELLINGS = [
    ("y = Sign(x)", "mid", -1, 1),
    (f"{ONE} c = GreaterOrEqual(x, zero) y = Where(c, one, minus)", "ge", -1, 1),
    (f"{ONE} c = Greater(x, zero) y = Where(c, one, minus)", "gt", -1, 1),
    (f"{ONE} c = Less(x, zero) y = Where(c, minus, one)", "ge", -1, 1),
    (f"{ONE} c = LessOrEqual(x, zero) y = Where(c, minus, one)", "gt", -1, 1),
    (f"{ONE} c = Less(x, zero) d = Not(c) y = Where(d, one, minus)", "ge", -1, 1),
    (f"{ONE} c = GreaterOrEqual(zero, x) y = Where(c, minus, one)", "gt", -1, 1),
    (f"{ONE} c = Greater(x, zero) y = Cast<to=1>(c)", "gt", 0, 1),
    (
        f"{ONE} two = Constant<value_float=2.0>() c = Greater(x, zero) f = Cast<to=1>(c) "
        "m = Mul(f, two) y = Sub(m, one)", "gt", -1, 1,
    ),
    ("t = Constant<value_float=0.1>() s = Sign(x) a = Add(s, t) y = Sign(a)", "ge", -1, 1),
    (f"{ONE} s = Sign(x) e = Equal(s, zero) y = Where(e, one, s)", "ge", -1, 1),
    ("r = Relu(x) y = Sign(r)", "gt", 0, 1),
    (f"{ONE} h = Clip(x, minus, one) y = Sign(h)", "mid", -1, 1),
    ("h = Tanh(x) y = Sign(h)", "mid", -1, 1),
    (f"{ONE} s = Sign(x) y = Mul(s, minus)", "mid", 1, -1),
    (f"{ONE} c = Clip(x, zero, one) y = Round(c)", "gt", 0, 1),
]  # fmt: skip


@pytest.mark.parametrize(("body", "zero", "lo", "hi"), SPELLINGS)
def test_sign_spellings_become_one_node_with_the_same_values(
    body: str, zero: str, lo: float, hi: float
) -> None:
    graph = graph_of(body)
    x = np.array([-2, -1, -0.5, -1e-30, 0, -0.0, 1e-30, 0.5, 1, 3] * 10, np.float32).reshape(
        1, 4, 5, 5
    )
    before = evaluate(graph, {"x": x})["y"]
    recognise_signs(graph)
    signs = [n for n in graph.nodes if n.op == "bnncc.Sign"]
    assert [(s.attrs["zero"], s.attrs["lo"], s.attrs["hi"]) for s in signs] == [(zero, lo, hi)]
    value = evaluate({**_signs_as_onnx(graph)}["graph"], {"x": x})["y"]
    np.testing.assert_array_equal(value, before)


def _signs_as_onnx(graph: Graph) -> dict[str, Graph]:
    """Write `bnncc.Sign` out in ONNX operators, for the evaluator."""
    nodes = []
    for node in graph.nodes:
        if node.op != "bnncc.Sign":
            nodes.append(node)
            continue
        a = node.attrs
        lo, hi, zero = (graph.constant(np.float32(v)) for v in (a["lo"], a["hi"], 0.0))
        mid = graph.constant(
            np.float32({"ge": a["hi"], "gt": a["lo"], "mid": (a["lo"] + a["hi"]) / 2}[a["zero"]])
        )
        above, at, part = (graph.fresh("t") for _ in range(3))
        for name in (above, at, part):
            graph.types[name] = graph.types[node.outputs[0]]
        nodes += [
            Node("Greater", [node.inputs[0], zero], [above]),
            Node("Equal", [node.inputs[0], zero], [at]),
            Node("Where", [at, mid, lo], [part]),
            Node("Where", [above, hi, part], list(node.outputs)),
        ]
    graph.nodes = nodes
    return {"graph": graph}


@pytest.mark.parametrize(
    "body",
    [
        "y = Relu(x)",
        f"{ONE} c = Clip(x, minus, one) y = Round(c)",  # three values with two steps
        "w = Constant<value_float=0.5>() c = Greater(x, w) f = Cast<to=1>(c) y = Mul(f, x)",
    ],
)
def test_real_and_many_valued_tensors_are_no_signs(body: str) -> None:
    graph = graph_of(body)
    recognise_signs(graph)
    assert not any(n.op == "bnncc.Sign" and n.outputs == ["y"] for n in graph.nodes)


@pytest.mark.parametrize(("choice", "zero"), [("+1", "ge"), ("-1", "gt"), ("exact", "mid")])
def test_sign_zero_option(choice: str, zero: str) -> None:
    graph = graph_of("y = Sign(x)")
    recognise_signs(graph, sign_zero=choice)
    assert [n.attrs["zero"] for n in graph.nodes] == [zero]


def test_sign_zero_of_a_falling_sign_names_the_sign_not_the_bit() -> None:
    graph = graph_of(f"{ONE} s = Sign(x) y = Mul(s, minus)")
    recognise_signs(graph, sign_zero="+1")
    # y = -sign(x) has lo = 1 below zero; "+1" makes y = +1 at zero, the value below
    assert graph.nodes[-1].attrs["zero"] == "gt"


def test_binary_weight_takes_any_scale_and_ste_noise_but_not_half_a_percent() -> None:
    rng = np.random.default_rng(0)
    signs = np.where(rng.integers(0, 2, (5, 7)) == 1, 1.0, -1.0).astype(np.float32)
    scale = np.array([1, -0.3, 0, 1e-3, 7], np.float32)[:, None]
    found = binary_weight(signs * scale)
    assert found is not None
    bits, magnitude = found
    np.testing.assert_array_equal(magnitude, np.abs(scale[:, 0]).astype(np.float64))
    rebuilt = np.where(bits, 1, -1) * magnitude[:, None]
    np.testing.assert_array_equal(rebuilt, signs * scale)
    noisy = signs * (1 + rng.uniform(-4e-6, 4e-6, signs.shape)).astype(np.float32)
    assert binary_weight(noisy) is not None
    assert binary_weight(signs * (1 + rng.uniform(0, 5e-3, signs.shape)).astype(np.float32)) is None
    ternary = signs.copy()
    ternary[2, 3] = 0
    assert binary_weight(ternary) is None


def test_value_sets_follow_pools_pads_and_channel_moves_but_not_sums() -> None:
    graph = graph_of(
        """s = Sign(x) p = Constant<value_ints=[0,0,1,1,0,0,1,1]>() q = Pad(s, p)
        m = MaxPool<kernel_shape=[2,2]>(s) c = Concat<axis=1>(m, m) a = Add(s, x)
        r = ReduceMean<keepdims=0>(a) t = ReduceMean<keepdims=0>(c) u = ReduceMean<keepdims=0>(q)
        v = Add(r, t) y = Add(v, u)""",
        out="",
    )
    recognise_signs(graph, sign_zero="+1")
    values = lattices(graph)
    assert values["s"] == sign_values(-1, 1)
    assert values["m"] == values["c"] == sign_values(-1, 1)
    assert values["q"] == sign_values(-1, 1, zero=True)
    assert "a" not in values


@pytest.mark.parametrize("taps", [1, 2, 9, 27, 64])
@pytest.mark.parametrize("seed", range(5))
def test_thresholds_reproduce_the_float_expression_on_every_dot_product(
    taps: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    channels = 6
    gamma = np.array([1.5, -0.7, 0, 0, 1e-3, -2], np.float32)
    beta = np.array([0.1, 0.2, -1, 1, 0, 0], np.float32)
    mean = rng.integers(-taps, taps + 1, channels).astype(np.float32)
    weights = {
        "g": gamma,
        "b": beta,
        "m": mean,
        "v": rng.uniform(0.5, 2, channels).astype(np.float32),
    }
    graph = graph_of(
        "y = BatchNormalization(x, g, b, m, v)", shape="1,6,1,1", out="1,6,1,1", weights=weights
    )
    scale, bias = rng.uniform(0.1, 2, channels), rng.normal(0, 1, channels)
    dots = th.attainable_dots(taps, any_parity=False)
    planes = th.tabulate(graph, graph.nodes, scale, bias, dots, 4)
    direct = evaluate(
        graph, {"x": (dots[:, None] * scale + bias).astype(np.float32)[:, :, None, None]}
    )["y"]
    for plane, wanted in ((planes.ge, direct >= 0), (planes.gt, direct > 0)):
        wanted = wanted.reshape(len(dots), channels)
        np.testing.assert_array_equal(plane, wanted)
        way = th.direction(plane)
        assert way.single
        flip = way.down
        thr = th.thresholds(planes, plane, flip, (-2, taps)).astype(np.int64)
        signed = np.where(flip, -dots[:, None], dots[:, None])
        acc = (taps - signed) // 2
        np.testing.assert_array_equal(acc <= thr, wanted)


def _weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.where(rng.integers(0, 2, shape) == 1, 1.0, -1.0).astype(np.float32)


def test_pool_moves_behind_the_sign_with_falling_channels_flipped() -> None:
    rng = np.random.default_rng(1)
    weights = {
        "w": _weights(rng, 4, 4, 3, 3), "w2": _weights(rng, 4, 4, 1, 1),
        "g": np.array([1, -1, 0.5, -2], np.float32),
        "b": np.array([0.1, 0.2, 0.3, 0.4], np.float32),
        "m": np.zeros(4, np.float32), "v": np.ones(4, np.float32),
    }  # fmt: skip
    graph = graph_of(
        f"""{ONE} c = GreaterOrEqual(x, zero) s = Where(c, one, minus) k = Conv(s, w)
        p = MaxPool<kernel_shape=[2,2]>(k) n = BatchNormalization(p, g, b, m, v)
        d = GreaterOrEqual(n, zero) t = Where(d, one, minus) y = Conv(t, w2)""",
        out="1,4,2,2",
        weights=weights,
    )
    recognise_signs(graph)
    commute_pads(graph)
    layers = binarize(graph)
    commute_pools(graph)
    assert [layer.kind for layer in layers] == ["binary", "binary"]
    order = [n.op for n in graph.nodes]
    assert order.index("bnncc.BitPool") > order.index("BatchNormalization")
    pool = next(n for n in graph.nodes if n.op == "bnncc.BitPool")
    np.testing.assert_array_equal(pool.attrs["flip"], weights["g"] < 0)


def test_pad_in_front_of_a_sign_is_merged_into_the_binary_layer() -> None:
    weights = {"w": _weights(np.random.default_rng(0), 4, 4, 3, 3)}
    graph = graph_of(
        """p = Constant<value_ints=[0,0,1,1,0,0,1,1]>() v = Constant<value_float=-0.5>()
        q = Pad(x, p, v) s = Sign(q) y = Conv(s, w)""",
        weights=weights,
    )
    recognise_signs(graph, sign_zero="+1")
    commute_pads(graph)
    binarize(graph)
    layer = next(n for n in graph.nodes if n.op == "bnncc.BinaryConv")
    assert layer.attrs["pads"] == (1, 1, 1, 1)
    assert layer.attrs["pad_value"] == -1
    assert not any(n.op == "Pad" for n in graph.nodes)


def test_nothing_but_bits_is_stored_between_two_binary_layers() -> None:
    rng = np.random.default_rng(2)
    weights = {
        "w": _weights(rng, 8, 4, 3, 3), "w2": _weights(rng, 4, 8, 3, 3),
        "g": rng.normal(0, 1, 8).astype(np.float32), "b": rng.normal(0, 1, 8).astype(np.float32),
        "m": np.zeros(8, np.float32), "v": np.ones(8, np.float32),
    }  # fmt: skip
    graph = graph_of(
        """s = Sign(x) k = Conv<pads=[1,1,1,1]>(s, w) n = BatchNormalization(k, g, b, m, v)
        t = Sign(n) y = Conv<pads=[1,1,1,1]>(t, w2)""",
        weights=weights,
    )
    recognise_signs(graph)
    binarize(graph)
    physical = fuse(graph)
    kernels = [n for n in physical.nodes if n.op == KERNEL]
    layers = [n for n in kernels if isinstance(n.attrs["spec"], BinaryConv2d)]
    assert len(layers) == 2
    assert {physical.types[o].dtype for o in layers[0].outputs} == {"uint32"}
    assert len(kernels) == 4  # packing, two layers, and the output to NCHW


@pytest.mark.parametrize(
    ("name", "alone"), [("x86-64-v3", False), ("arm64", True), ("cuda-sm80", True)]
)
def test_a_layer_writes_an_output_itself_where_that_is_faster(name: str, alone: bool) -> None:
    weights = {"w": _weights(np.random.default_rng(2), 32, 4, 3, 3)}
    body, shapes = "s = Sign(x) y = Conv<pads=[1,1,1,1]>(s, w)", ("1,4,9,9", "1,32,9,9")
    graph = graph_of(body, weights=weights, shape=shapes[0], out=shapes[1])
    recognise_signs(graph)
    binarize(graph)
    physical = fuse(graph, target=catalog.resolve(name))
    specs = [n.attrs["spec"] for n in physical.nodes if n.op == KERNEL]
    layer = next(spec for spec in specs if isinstance(spec, BinaryConv2d))
    assert layer.steps[-1] == Step("store", layout="NHWC" if alone else "NCHW")
    assert len(specs) == 2 + alone


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("float_conv", ["direct", "filtered", "filtered-2d"])
def test_first_layer_with_norm_pool_and_sign_is_one_kernel(rising: bool, float_conv: str) -> None:
    rng = np.random.default_rng(4)
    gamma = rng.uniform(0.5, 2, 20) * (1 if rising else rng.choice([-1, 1], 20))
    weights = {
        "w": rng.normal(0, 1, (20, 3, 7, 7)).astype(np.float32), "g": gamma.astype(np.float32),
        "b": rng.normal(0, 1, 20).astype(np.float32), "m": rng.normal(0, 1, 20).astype(np.float32),
        "v": np.ones(20, np.float32), "w2": _weights(rng, 20, 20, 3, 3),
    }  # fmt: skip
    body = """k = Conv<pads=[3,3,3,3], strides=[2,2]>(x, w) n = BatchNormalization(k, g, b, m, v)
        p = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(n)
        s = Sign(p) d = Conv<pads=[1,1,1,1]>(s, w2) y = Add(d, p)"""
    shapes = {"shape": "1,3,48,44", "out": "1,20,12,11"}
    graph = graph_of(body, weights=weights, **shapes)
    recognise_signs(graph)
    binarize(graph)
    physical = fuse(graph, float_conv)
    first = next(n for n in physical.nodes if n.op == KERNEL)
    spec = first.attrs["spec"]
    assert isinstance(spec, Conv2d)
    assert spec.method == float_conv
    assert spec.pool is not None
    assert bool(spec.pool.before) != rising
    assert [step.op for step in spec.steps if step.op != "affine"] == ["bits", "store"]
    assert not any(isinstance(n.attrs.get("spec"), Pool2d) for n in physical.nodes)


def test_pool_that_is_not_alone_stays_a_kernel() -> None:
    weights = {"w": np.random.default_rng(0).normal(0, 1, (8, 4, 3, 3)).astype(np.float32)}
    body = """k = Conv<pads=[1,1,1,1]>(x, w) r = Relu(k)
        p = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(r) y = Add(p, r)"""
    physical = fuse(graph_of(body, weights=weights, shape="1,4,16,16", out="1,8,16,16"))
    specs = [n.attrs["spec"] for n in physical.nodes if n.op == KERNEL]
    assert any(isinstance(spec, Pool2d) for spec in specs)
    assert all(spec.pool is None for spec in specs if isinstance(spec, Conv2d))


@pytest.mark.parametrize(("groups", "pooled"), [(1, True), (4, False), (8, True)])
def test_rows_of_groups_are_pooled_if_each_channel_is_one(groups: int, pooled: bool) -> None:
    """A ring of rows of other groups took up to 36 times as long as two kernels."""
    shape = (8, 8 // groups, 3, 3)
    weights = {
        "v": np.ones((8, 8, 1, 1), np.float32),
        "w": np.random.default_rng(0).normal(0, 1, shape).astype(np.float32),
    }
    body = f"""c = Conv(x, v) k = Conv<group={groups}, pads=[1,1,1,1]>(c, w)
        y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(k)"""
    physical = fuse(graph_of(body, weights=weights, shape="1,8,16,16", out="1,8,8,8"))
    specs = [n.attrs["spec"] for n in physical.nodes if n.op == KERNEL]
    assert any(isinstance(s, Conv2d) and s.pool is not None for s in specs) == pooled
    assert any(isinstance(s, Pool2d) for s in specs) != pooled


def test_quantized_convolutions_are_not_filtered() -> None:
    rng = np.random.default_rng(0)
    weight = (0.1 * rng.integers(-3, 4, (16, 4, 3, 3))).astype(np.float32)
    for body, method in (("y = Conv(x, w)", "filtered"), ("r = Sign(x) y = Conv(r, w)", "direct")):
        graph = graph_of(body, weights={"w": weight}, shape="1,4,16,16", out="1,16,14,14")
        physical = fuse(graph)
        specs = [n.attrs["spec"] for n in physical.nodes if n.op == KERNEL]
        assert [spec.method for spec in specs if isinstance(spec, Conv2d)] == [method]


def test_rows() -> None:
    assert product((2, 3)) == 6
    assert product(("N", 3)) == "3*N"
    weights = {"w": _weights(np.random.default_rng(0), 6, 5)}
    graph = graph_of("s = Sign(x) y = MatMul(s, w)", shape="N,7,6", out="N,7,5", weights=weights)
    recognise_signs(graph)
    flatten_rows(graph)
    assert [layer.kind for layer in binarize(graph)] == ["binary"]


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 1, 5)], ids=str)
@pytest.mark.parametrize("expression", ["Mul(c, p)", "Sub(c, p)", "Div(p, c)"])
def test_rows_beside_constants(expression: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    weights = {"w": _weights(rng, 6, 5), "c": rng.uniform(1, 2, shape).astype(np.float32)}
    body = f"p = MatMul(x, w) y = {expression}"
    graph = graph_of(body, shape="2,7,6", out="2,7,5", weights=weights)
    feeds = {"x": rng.integers(-8, 8, (2, 7, 6)).astype(np.float32)}
    expected = evaluate(graph, feeds)["y"]
    flatten_rows(graph)
    assert [n.op for n in graph.nodes if n.op == "Reshape"] == ["Reshape", "Reshape"]
    np.testing.assert_array_equal(evaluate(graph, feeds)["y"], expected)


def test_report_says_what_becomes_of_zeros() -> None:
    weights = {"w": _weights(np.random.default_rng(0), 4, 4, 1, 1)}
    body = "s = Sign(x) k = Conv(s, w) t = Sign(k) y = Conv(t, w)"
    graph = graph_of(body, weights=weights)
    recognise_signs(graph)
    binarize(graph)
    assert len(fuse(graph).sign_zero) == 2
    graph = graph_of(body, weights=weights)
    recognise_signs(graph, sign_zero="-1")
    binarize(graph)
    assert set(fuse(graph).sign_zero.values()) == {"taken as -1, by option"}


def test_a_scaled_accumulator_of_zero_is_exactly_zero() -> None:
    """0.37 * dot must not come out as a rounding error of ``acc * -0.74 + K * 0.37``."""
    rng = np.random.default_rng(3)
    weights = {"w": _weights(rng, 6, 4, 1, 1) * np.float32(0.37)}
    body = "s = Sign(x) k = Conv(s, w) m = Mul(k, k) y = Sign(m)"
    graph = graph_of(body, out="1,6,5,5", weights=weights)
    recognise_signs(graph)
    binarize(graph)
    layer = next(n for n in fuse(graph).nodes if n.attrs.get("spec") and n.covers)
    assert [s.op for s in layer.attrs["spec"].steps[:2]] == ["affine", "scale"]


def test_a_residual_nobody_reads_later_is_overwritten() -> None:
    weights = {"w": _weights(np.random.default_rng(0), 4, 4, 3, 3)}
    body = """r = Relu(x) s = Sign(r) k = Conv<pads=[1,1,1,1]>(s, w) a = Add(k, r) t = Sign(a)
    l = Conv<pads=[1,1,1,1]>(t, w) y = Add(l, a)"""
    for read_later, expected in ((False, [True, True]), (True, [False, True])):
        text = body if not read_later else body.replace("y =", "v =") + " y = Mul(v, r)"
        graph = graph_of(text, weights=weights)
        recognise_signs(graph, sign_zero="+1")
        binarize(graph)
        physical = fuse(graph)
        store_in_place(physical)
        specs = [n.attrs["spec"] for n in physical.nodes if n.covers]
        assert [any(s.in_place for s in spec.steps) for spec in specs] == expected


@pytest.mark.parametrize(
    ("groups", "said"), [(1, ""), (2, ""), (4, "16 channels fill 50 %"), (64, "1 channels")]
)
def test_the_report_says_how_full_the_words_of_groups_are(groups: int, said: str) -> None:
    weight = np.ones((64, 64 // groups, 3, 3), np.float32)
    graph = graph_of(
        f"{ONE} c = GreaterOrEqual(x, zero) s = Where(c, one, minus) "
        f"y = Conv<group={groups}>(s, w)",
        shape="1,64,5,5", out="1,64,3,3", weights={"w": weight},
    )  # fmt: skip
    recognise_signs(graph)
    (layer,) = binarize(graph)
    assert layer.kind == "binary"
    assert said in layer.reason
    assert bool(said) == bool(layer.reason)


def test_a_sign_of_a_vector_has_no_pool_above() -> None:
    graph = graph_of("a = Neg(x) y = Sign(a)", shape="16", out="16")
    recognise_signs(graph)
    commute_pools(graph)
    assert [n.op for n in graph.nodes] == ["Neg", "bnncc.Sign"]


@pytest.mark.parametrize(
    ("body", "shape", "out", "weight"),
    [
        ("b = ReduceMean<keepdims=0>(x, a) y = Conv(s, w, b)", "1,4,5,5", "1,4,3,3", (4, 4, 3, 3)),
        ("b = ReduceMean<keepdims=0>(x, a) y = Conv(s, w, b)", "2,4,9,1", "2,4,9,1", (4, 4, 1, 1)),
        (
            "b = ReduceMean<keepdims=0>(x, a) y = ConvTranspose<strides=[2,2]>(s, w, b)",
            "1,4,5,5", "1,4,11,11", (4, 4, 3, 3),
        ),
        ("y = Gemm(s, w, x)", "3,8", "3,8", (8, 8)),
        ("y = Gemm<beta=0.5,transB=1>(s, w, x)", "3,8", "3,8", (8, 8)),
    ],
)  # fmt: skip
def test_a_bias_that_is_computed_is_added_behind_a_binary_layer(
    body: str, shape: str, out: str, weight: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(5)
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    net (float[{shape}] x) => (float[{out}] y) {{ s = Sign(x) {body} }}"""
    model = onnx.parser.parse_model(text)
    weights = {"w": np.sign(rng.standard_normal(weight)).astype(np.float32)}
    for name, value in {**weights, "a": np.array([0, 2, 3], np.int64)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    x = rng.standard_normal([int(d) for d in shape.split(",")]).astype(np.float32)
    _, physical, layers = passed(model)
    assert [layer.kind for layer in layers] == ["binary"]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    wanted = session.run(None, {"x": x})[0]
    made = evaluated(physical, load(model), {"x": x})["y"]
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)
