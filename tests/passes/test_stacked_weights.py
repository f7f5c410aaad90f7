"""Products by several matrices of weights: one kernel each, and equal to ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from bnncc.driver import compile_model
from bnncc.options import CompileOptions
from tests.bitnet import data
from tests.collection.builder import Net
from tests.passes.test_row_scales import dynamic
from tests.physical_networks import evaluated, passed

CASES: dict[str, tuple[list[int | str], tuple[int, ...]]] = {
    "a matrix for each group": ([3, 5, 40], (3, 40, 12)),
    "groups of a batch": (["N", 3, 5, 40], (3, 40, 12)),
    "experts": ([2, 1, 5, 40], (3, 40, 12)),
    "experts, open batch": (["N", 1, 5, 40], (3, 40, 12)),
    "experts of rows": ([5, 40], (3, 40, 12)),
    "leading ones": ([3, 5, 40], (1, 1, 3, 40, 12)),
}
KINDS = ("scaled", "levels", "signs")


def network(name: str, kind: str) -> tuple[Net, tuple[int, ...]]:
    shape, size = CASES[name]
    net = Net(18, seed=name)
    x = net.input("x", shape)
    if kind == "signs":
        cut = net.op("GreaterOrEqual", x, net.const(0.0))
        real = net.op("Where", cut, net.const(1.0), net.const(-1.0))
    else:
        real = dynamic(net, x, [-1]) if kind == "scaled" else net.clip(net.op("Round", x), -8, 7)
    whole = net.rng.integers(-1, 2, size) if kind != "signs" else net.rng.choice([-1, 1], size)
    net.output(net.op("MatMul", real, net.const(whole * np.float32(0.3))))
    return net, tuple(2 if isinstance(d, str) else d for d in shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_layers_are_found_and_right(name: str, kind: str) -> None:
    net, shape = network(name, kind)
    before, physical, (layer,) = passed(net.model(), "x86-64-v3")
    assert layer.kind == ("binary" if kind == "signs" else "few_bit")
    assert layer.weight_shape == CASES[name][1]
    x = data(np.random.default_rng(3), shape)
    made = evaluated(physical, before, {"x": x})[before.outputs[0]]
    (wanted,) = ort.InferenceSession(net.model().SerializeToString()).run(None, {"x": x})
    assert made.shape == wanted.shape
    size = np.abs(wanted).max(axis=-1, keepdims=True)
    assert (np.abs(made - wanted) <= 1e-5 * size).all()


@pytest.mark.parametrize("name", ["groups of a batch", "experts, open batch"])
def test_compiled_layers_are_right(name: str) -> None:
    net, shape = network(name, "scaled")
    artifact = compile_model(net.model(), CompileOptions(threads=1))
    for batch in (1, 3):
        x = data(np.random.default_rng(batch), (batch, *shape[1:]))
        (wanted,) = ort.InferenceSession(net.model().SerializeToString()).run(None, {"x": x})
        (made,) = artifact.run({"x": x}).values()
        assert (np.abs(made - wanted) <= 1e-5 * np.abs(wanted).max(axis=-1, keepdims=True)).all()


def test_real_weights_stay_together() -> None:
    net = Net(18, seed=2)
    net.input("x", [3, 5, 40])
    real = net.clip(net.op("Round", "x"), -8, 7)
    net.output(net.op("MatMul", real, net.const(net.rng.standard_normal((3, 40, 12)))))
    physical, (layer,) = passed(net.model(), "x86-64-v3")[1:]
    assert layer.kind == "float"
    assert layer.reason == "its weights are 3 matrices"
    assert [n.op for n in physical.nodes].count("MatMul") == 1
