"""``--float-type float16``: which tensors between kernels become float16, and what is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import bnncc
from bnncc import driver
from bnncc.errors import TargetError, UsageError
from bnncc.ir.graph import Graph, Node
from bnncc.options import CompileOptions
from bnncc.transform.physical import KERNEL
from bnncc.verification.evaluator import evaluate_physical
from tests.cuda_emulator import COMPILER
from tests.cuda_tools import on_emulated_gpu

pytestmark = pytest.mark.sampled(3)

RNG = np.random.default_rng(3)
NET = (
    "a = Conv<strides=[2,2], pads=[3,3,3,3]>(x, w) b = Relu(a) "
    "p = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(b) "
    "s = Sign(p) c = Conv<pads=[1,1,1,1]>(s, v) "
    "n = BatchNormalization(c, gamma, beta, mu, var) r = Add(n, p) "
    "t = Sign(r) d = Conv<pads=[1,1,1,1]>(t, v) "
    "m = BatchNormalization(d, gamma, beta, mu, var) q = Add(m, r) "
)
TAIL = (
    "g = AveragePool<kernel_shape=[2,2], strides=[2,2]>(q) e = Conv(g, u) y = GlobalAveragePool(e)"
)


def model(body: str = NET + TAIL, side: int = 16, kind: str = "float") -> onnx.ModelProto:
    header = '<ir_version: 9, opset_import: ["" : 18]>'
    given, made = f"{kind}[1,3,{side},{side}] x", f"{kind}[a,b,c,d] y"
    proto = onnx.parser.parse_model(f"{header} net ({given}) => ({made}) {{{body}}}")
    weights = {
        "w": RNG.standard_normal((32, 3, 7, 7)) / 8,
        "v": np.where(RNG.integers(0, 2, (32, 32, 3, 3)), 1, -1),
        "u": RNG.standard_normal((40, 32, 1, 1)) / 4,
        "beta": RNG.standard_normal(32),
        "mu": RNG.standard_normal(32) * 9,
        "gamma": RNG.uniform(0.5, 2, 32),
        "var": RNG.uniform(200, 400, 32),
    }
    dtype = np.float16 if kind == "float16" else np.float32
    for name, value in weights.items():
        tensor = onnx.numpy_helper.from_array(value.astype(dtype), name)
        proto.graph.initializer.append(tensor)
    return proto


def lowered(proto: onnx.ModelProto, target: str = "cuda-sm90a", **options: str) -> driver.Lowered:
    return driver.lowered(proto, CompileOptions(target=target, **options))


def kinds(physical: Graph) -> dict[str, list[str]]:
    """Return the types of the results of each kernel, by what it covers."""
    return {
        "+".join(node.covers) or node.name: [physical.types[o].dtype for o in node.outputs]
        for node in physical.nodes
        if node.op == KERNEL
    }


def kernel(physical: Graph, position: int) -> Node:
    return [node for node in physical.nodes if node.op == KERNEL][position]


def test_tensors_between_kernels_become_float16() -> None:
    network = lowered(model(), float_type="float16")
    made = list(kinds(network.physical).values())
    assert made[0] == ["float16"]  # of the first convolution
    assert sorted(made[1]) == sorted(made[2]) == ["float16", "uint32", "uint32"]
    assert made[3] == ["float16"]
    assert made[-1] == ["float32"]
    assert network.inputs[0].dtype == network.outputs[0].dtype == "float32"
    assert network.compared.passes == "whole"  # with the model, which says what is rounded
    spec = kernel(network.physical, 5).attrs["spec"]
    assert (spec.dtype, spec.out_channels) == ("float16", 40)


def test_nothing_changes_unless_asked() -> None:
    types = {t for made in kinds(lowered(model()).physical).values() for t in made}
    assert types == {"float32", "uint32"}


def test_a_network_of_float16_has_such_tensors_anyway() -> None:
    made = kinds(lowered(model(kind="float16")).physical)
    assert any("float16" in kind for kind in made.values())
    on_a_cpu = kinds(lowered(model(kind="float16"), "x86-64-v3").physical)
    assert not any("float16" in kind for kind in on_a_cpu.values())


def test_what_others_read_stays_float32() -> None:
    # Softmax is TVM's, which reads a float32 tensor; so does whoever reads the network's output.
    body = f"{NET} h = Softmax<axis=1>(r) y = Add(q, h)"
    physical = lowered(model(body), float_type="float16").physical
    read = {i for node in physical.nodes if node.op != KERNEL for i in node.inputs}
    assert read
    assert all(physical.types[name].dtype != "float16" for name in read)
    assert all(physical.types[name].dtype == "float32" for name in physical.outputs)


def test_a_residual_stays_in_place() -> None:
    physical = lowered(model(), float_type="float16").physical
    spec = kernel(physical, 2).attrs["spec"]
    (add,) = (step for step in spec.steps if step.op == "add")
    stores = [step for step in spec.steps if step.op == "store"]
    assert add.dtype == "float16"
    assert all(step.dtype == add.dtype for step in stores)


def test_numbers_are_those_of_float16() -> None:
    proto = model()
    exact, rounded = lowered(proto), lowered(proto, float_type="float16", first_layer="float16")
    feeds = {"x": RNG.standard_normal((1, 3, 16, 16)).astype(np.float32)}
    (wanted,) = evaluate_physical(exact.physical, feeds).values()
    (got,) = evaluate_physical(rounded.physical, feeds).values()
    off = np.abs(got - wanted).max() / np.abs(wanted).max()
    assert 1e-6 < off < 0.1  # a sign may turn


def scaled(proto: onnx.ModelProto, name: str, factor: float) -> onnx.ModelProto:
    for stored in proto.graph.initializer:
        if stored.name == name:
            value = onnx.numpy_helper.to_array(stored) * np.float32(factor)
            stored.CopyFrom(onnx.numpy_helper.from_array(value, stored.name))
    return proto


def test_weights_beyond_float16_stay_float32() -> None:
    small = "a = Conv<strides=[2,2], pads=[3,3,3,3]>(z, w)"
    body = NET.replace("a = Conv<strides=[2,2], pads=[3,3,3,3]>(x, w)", small)
    tail = TAIL.replace("e = Conv(g, u)", "h = Mul(g, gamma_small) e = Conv(h, u)")
    proto = scaled(scaled(model(body + tail), "u", 1e6), "w", 1e6)
    proto.graph.input[0].name = "z"
    small_numbers = np.full((1, 32, 1, 1), 1e-7, np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(small_numbers, "gamma_small"))
    network = lowered(proto, first_layer="float16")
    assert any("beyond the numbers of float16" in line for line in network.warnings)
    network = lowered(scaled(proto, "w", 1e-6), float_type="float16", first_layer="float16")
    operands = [
        node.attrs["spec"].operands
        for node in network.physical.nodes
        if node.op == KERNEL and hasattr(node.attrs["spec"], "operands")
    ]
    assert operands == ["float16", "float32"]


@pytest.mark.parametrize(("name", "tensor"), [("w", "a"), ("u", "e")])
def test_numbers_beyond_float16_are_refused(name: str, tensor: str) -> None:
    proto = scaled(model(), name, 1e6)
    with pytest.raises(UsageError, match=rf"`{tensor}` has numbers above 65504"):
        lowered(proto, float_type="float16")


@pytest.mark.parametrize(
    ("option", "instead"),
    [("float_type", "--float-precision bfloat16"), ("first_layer", "--first-layer takes bfloat16")],
)
def test_only_gpus_have_it(option: str, instead: str) -> None:
    said = "float16 needs a GPU target, and x86-64-v3 is not one"
    with pytest.raises(UsageError, match=said) as caught:
        bnncc.compile(model(), target="x86-64-v3", **{option: "float16"})  # type: ignore[arg-type]
    assert instead in str(caught.value.hint)


@pytest.mark.parametrize("target", ["cuda-sm75", "cuda"])
def test_turing_is_refused_in_one_line(target: str) -> None:
    with pytest.raises(TargetError, match="--first-layer float16 is not available on this GPU"):
        bnncc.compile(model(), target=target, first_layer="float16")


RUN = """
import bnncc
from bnncc.cli.main import main
# Compiling runs the artifact on the emulated GPU and compares it with the model.
made = bnncc.compile({model!r}, target="cuda-sm80", float_type={kind!r}, first_layer={first!r})
made.save({file!r})
assert made.manifest["semantics"]["float_type"] == {kind!r}
assert main(["verify", {model!r}, {file!r}]) == 0
"""


@pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")
@pytest.mark.parametrize(
    ("kind", "first", "tensors"),
    [
        ("float16", "float16", "float"),
        pytest.param("float16", "float32", "float", marks=pytest.mark.slow),
        ("float32", "float32", "float16"),
    ],
)
def test_it_runs_on_an_emulated_gpu(kind: str, first: str, tensors: str, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model(kind=tensors), path)
    file = str(tmp_path / "net.bnncc")
    script = RUN.format(model=str(path), kind=kind, first=first, file=file)
    done = on_emulated_gpu(script, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PASS" in done.stdout


CASTS = """
import ml_dtypes, numpy, onnx.parser
import bnncc
from tests.ir.test_number_types import BOTH, there_and_back
for dtype in ("float16", "bfloat16"):
    made = bnncc.compile(there_and_back("float[N] n: ", dtype), target="cuda-sm80")
    want = BOTH.astype(getattr(ml_dtypes, dtype, "f2")).astype("f")
    got = made.run({"x": BOTH})["n"]
    assert numpy.array_equal(got.view("u4"), want.view("u4")), (got, want)
"""


@pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")
def test_casts_to_half_precision_round_on_an_emulated_gpu(tmp_path: Path) -> None:
    done = on_emulated_gpu(CASTS, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_network_that_casts_there_and_back_keeps_its_tensors() -> None:
    body = "h = Cast<to = 10>(x) f = Cast<to = 1>(h) " + NET.replace("(x, w)", "(f, w)")
    types = {t for made in kinds(lowered(model(body + TAIL)).physical).values() for t in made}
    assert types == {"float32", "uint32"}
