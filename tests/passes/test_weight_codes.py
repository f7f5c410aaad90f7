"""Float layers whose weights are few-valued: which are stored as codes, and what they compute."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bnncc
from bnncc import report
from bnncc.driver import compile_c
from bnncc.options import CompileOptions
from bnncc.recognise.weight_codes import weight_codes
from bnncc.report.html import TIMES, page
from bnncc.schedules import reads_codes
from bnncc.targets import catalog
from bnncc.topi_binary.spec import Conv2d, Step
from tests import c_programs
from tests.kernel_harness import FLOATS_HERE

RNG = np.random.default_rng(0)


def weights(kind: str, units: int, depth: int, block: int = 0) -> np.ndarray:
    """Return float32 weights (units, depth), with a scale for each block."""
    shape = (units, depth // (block or depth), block or depth)
    scale = RNG.uniform(0.01, 2, (*shape[:2], 1)).astype(np.float32)
    if kind == "signs":
        made = RNG.choice([-1, 1], shape).astype(np.float32) * scale
    elif kind == "two values":
        other = RNG.uniform(-2, 0, scale.shape).astype(np.float32)
        made = np.where(RNG.integers(0, 2, shape), scale, other)
    elif kind == "ternary":
        made = RNG.integers(-1, 2, shape).astype(np.float32) * scale
    else:
        bits = int(kind.split()[0])
        zero = RNG.integers(0, 1 << bits, scale.shape) if "zeros" in kind else 1 << (bits - 1)
        made = (RNG.integers(0, 1 << bits, shape) - zero).astype(np.float32) * scale
    return np.ascontiguousarray(made.reshape(units, depth))


BITS = {
    "signs": 1, "two values": 1, "ternary": 2, "2 bits": 2, "4 bits": 4, "8 bits": 8,
    "2 bits, zeros": 2, "4 bits, zeros": 4,
}  # fmt: skip


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("block", [0, 16, 32, 128])
def test_codes_give_the_same_floats(kind: str, block: int) -> None:
    rows = weights(kind, 100, 384, block)
    found = weight_codes(rows)
    assert found is not None
    assert found.bits == BITS[kind]
    assert found.block == (block or 384)
    assert found.zeros == ("zeros" in kind)
    assert np.array_equal(found.values, rows)


def test_odd_multiples() -> None:
    """As four evenly spaced values around 0 are, whose zero lies between two codes."""
    scale = RNG.uniform(0.01, 2, (40, 1)).astype(np.float32)
    rows = (RNG.integers(0, 4, (40, 64)) * 2 - 3).astype(np.float32) * scale
    found = weight_codes(rows)
    assert found is not None
    assert found.bits == 2
    assert np.array_equal(found.values, rows)


def test_edges() -> None:
    rows = weights("ternary", 6, 32)
    rows[0], rows[1], rows[2] = 0, 0.7, -0.7
    rows[3, 1:] = 0
    rows[4] = -0.0
    for some in (rows, rows[:1], rows[:, :1], rows[2:4]):
        found = weight_codes(np.ascontiguousarray(some))
        assert found is not None
        assert np.array_equal(found.values, some)
    for one in (np.nan, np.float32(0.1)):
        spoilt = rows.copy()
        spoilt[5, 7] = one
        assert weight_codes(spoilt) is None
    assert weight_codes(RNG.standard_normal((5, 64)).astype(np.float32)) is None
    assert weight_codes(np.zeros((3, 0), np.float32)) is None


def test_one_ulp_is_not_the_same() -> None:
    """Weights that are multiples only approximately stay floats."""
    rows = weights("4 bits", 100, 384)
    rows[50, 100] = np.nextafter(rows[50, 100], np.float32(9))
    assert weight_codes(rows) is None


def network(
    kind: str, batch: int | str, block: int = 0, widths: tuple[int, ...] = (96, 64, 10)
) -> onnx.ModelProto:
    """Return dense layers with a ReLU between them."""
    nodes, given, x = [], [], "x"
    for k, (depth, units) in enumerate(itertools.pairwise(widths)):
        rows = weights(kind, units, depth, block) if kind else RNG.standard_normal((units, depth))
        given.append(numpy_helper.from_array(rows.astype(np.float32).T.copy(), f"w{k}"))
        bias = RNG.standard_normal(units).astype(np.float32)
        given.append(numpy_helper.from_array(bias, f"b{k}"))
        nodes.append(helper.make_node("Gemm", [x, f"w{k}", f"b{k}"], [f"g{k}"], name=f"fc{k}"))
        x = f"g{k}"
        if k < len(widths) - 2:
            nodes.append(helper.make_node("Relu", [x], [f"r{k}"]))
            x = f"r{k}"
    graph = helper.make_graph(
        nodes, "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, widths[0]])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, [batch, widths[-1]])], given,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def computed(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Evaluate a network in float64."""
    named = {
        one.name: numpy_helper.to_array(one).astype(np.float64) for one in proto.graph.initializer
    }
    made = x.astype(np.float64)
    for node in proto.graph.node:
        if node.op_type == "Gemm":
            made = made @ named[node.input[1]] + named[node.input[2]]
        else:
            made = np.maximum(made, 0)
    return made


WIDE = (320, 160, 192, 10)
LARGE = (320, 1120, 1024, 1024, 10)


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make codes pay in small networks, too."""
    monkeypatch.setattr("bnncc.transform.weight_codes.CACHES", {128: (0.1, 0.1)})


@pytest.mark.usefixtures("small_caches")
@pytest.mark.parametrize("target", FLOATS_HERE)
@pytest.mark.parametrize(
    ("kind", "block", "batch"),
    [("signs", 0, 1), ("two values", 0, "n"), ("ternary", 0, 5), ("4 bits, zeros", 32, 1)],
)
def test_networks(kind: str, block: int, batch: int | str, target: str) -> None:
    proto = network(kind, batch, block, WIDE)
    artifact = bnncc.compile(proto, target=target, threads=2)
    layers = artifact.report["layers"]
    assert [layer["bits"] for layer in layers] == [[32, BITS[kind]]] * 2 + [[32, 32]]
    for rows in (1, 3, 40) if batch == "n" else (batch,):
        check(artifact, proto, rows)
    size, numbers = artifact.report["bytes"], 2 * 32 / block if block else 0.4
    count = sum(depth * units for depth, units in pairwise(WIDE[:-1]))
    assert size["binary"] + size["float"] < 1.05 * count * (BITS[kind] + numbers) / 8 + 4 * 1930


def check(artifact: bnncc.Artifact, proto: onnx.ModelProto, rows: int) -> None:
    """Compare a network with NumPy on normally distributed inputs."""
    x = RNG.standard_normal((rows, artifact.inputs[0].shape[1])).astype(np.float32)
    want = computed(proto, x)
    (got,) = artifact.run({"x": x}).values()
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.usefixtures("small_caches")
def test_a_report_says_so() -> None:
    made = bnncc.compile(network("ternary", 1, 0, WIDE))
    told = report.text(made.report)
    assert "floatx2" in told
    assert "weights are stored in 2 bits" in " ".join(told.split())
    assert f"float{TIMES}2 bit" in page(made.report)


@pytest.mark.parametrize(
    ("target", "kind", "widths", "bits"),
    [
        ("x86-64-v4", "signs", WIDE, 32),  # its weights stay in the caches
        ("x86-64-v4", "", LARGE, 32),
        ("x86-64-v4", "signs", LARGE, 1),
        ("x86-64-v4", "ternary", LARGE, 32),  # the last-level cache is as fast
        ("x86-64-v4", "ternary", (320, 2048, 2048, 10), 2),
        ("x86-64-v3", "signs", LARGE, 1),
        ("x86-64-v3", "ternary", LARGE, 32),
        ("x86-64-v2", "signs", LARGE, 32),
        ("arm64", "signs", LARGE, 1),
    ],
)
def test_where_codes_pay(target: str, kind: str, widths: tuple[int, ...], bits: int) -> None:
    made = bnncc.compile(network(kind, 1, 0, widths), target=target)
    assert {layer["bits"][1] for layer in made.report["layers"][:-1]} == {bits}


def test_kernels_that_read_floats() -> None:
    spec = Conv2d(1, 5, 7, 64, 64, (1, 1), steps=(Step("store"),))
    cpu = catalog.resolve("x86-64-v3")
    assert reads_codes(spec, cpu)
    assert not reads_codes(spec, catalog.resolve("cuda-sm90a"))
    assert not reads_codes(spec, None)
    for other in ({"groups": 2}, {"kernel": (3, 3)}, {"data_layout": "NCHW"}, {"strides": (2, 2)},
                  {"operands": "bfloat16"}):  # fmt: skip
        assert not reads_codes(replace(spec, **other), cpu)


@pytest.mark.usefixtures("small_caches")
def test_pointwise_convolution() -> None:
    rows = weights("ternary", 140, 230)
    named = {"w": rows.reshape(140, 230, 1, 1), "b": RNG.standard_normal(140).astype(np.float32)}
    proto = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> net (float[1,230,3,5] x) => (float[a,b,c,d] y) '
        "{ a = Relu(x) r = Conv(a, w, b) y = Relu(r) }"
    )
    proto.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in named.items())
    made = bnncc.compile(proto, target="x86-64-v3")
    assert made.report["layers"][0]["bits"] == [32, 2]
    x = RNG.standard_normal((1, 230, 3, 5)).astype(np.float32)
    data = np.maximum(x, 0).astype(np.float64)
    want = np.einsum("nihw,oi->nohw", data, rows) + named["b"].reshape(1, -1, 1, 1)
    assert np.abs(made.run({"x": x})["y"] - np.maximum(want, 0)).max() < 1e-4 * np.abs(want).max()


SMALL = (96, 64, 48, 10)


@pytest.mark.usefixtures("small_caches")
@pytest.mark.parametrize("kind", ["signs", "4 bits, zeros"])
@pytest.mark.parametrize(
    ("machine", "rows", "widths"),
    [
        ("gcc", 2, SMALL),
        ("c99-cortex-m4", 1, SMALL),
        ("riscv64gcv", 16, WIDE),
        ("wasm32-simd128", 3, WIDE),
        ("wasm32-simd128", 16, WIDE),
    ],
)
def test_without_a_runtime(machine: str, rows: int, widths: tuple[int, ...], kind: str) -> None:
    """C has codes in small layers, too: microcontrollers lack memory for floats."""
    if missing := c_programs.MACHINES[machine].missing:
        pytest.skip(f"needs {missing}")
    proto = network(kind, rows, 16, widths)
    form = "wasm" if machine.startswith("wasm") else "c"
    options = CompileOptions(target=c_programs.MACHINES[machine].target)
    made = compile_c(proto, options, form=form)
    bits = [layer["bits"][1] for layer in made.report["layers"]]
    assert bits[0] == BITS[kind]
    assert bits[-1] == 32
    x = RNG.standard_normal((rows, widths[0])).astype(np.float32)
    want = computed(proto, x)
    (got,) = c_programs.outputs(
        c_programs.MACHINES[machine],
        made,
        {"x": x},
        {proto.graph.output[0].name: want.astype("f4")},
    ).values()
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
