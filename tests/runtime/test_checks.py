"""How many checks a network has, and how much of large outputs they know."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import bnncc
from benchmarks.transformer_networks import Shape, bitnet
from bnncc.driver import compile_model, lowered
from bnncc.errors import VerificationError
from bnncc.frontend.onnx import load
from bnncc.ir.ties import rounded_otherwise, tied
from bnncc.options import CompileOptions
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.compare import agree, overflows
from bnncc.verification import checks, confirm, kernels
from tests.runtime.test_selfcheck import Wrong, compiled, parsed


def image_to_image(last: str) -> onnx.ModelProto:
    w = np.where(np.random.default_rng(0).random((16, 16, 3, 3)) < 0.5, -1, 1).astype("f4")
    return parsed(
        "(float[2, 16, 64, 64] x) => (float[N, C, H, W] y) "
        f"{{ s = Sign(x) c = Conv <pads = [1, 1, 1, 1]> (s, w) y = {last} }}",
        w=w, two=np.array(2),
    )  # fmt: skip


def test_parts_of_large_outputs_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_LARGE", 1e-3)
    model = image_to_image("Relu(c)")
    artifact = compiled(model)
    stored = artifact.selfchecks()
    assert len(stored) == 2
    session = ort.InferenceSession(model.SerializeToString())
    seen = []
    for check in stored:
        assert check.expected[0].where is not None
        right = session.run(None, check.inputs)[0]
        assert check.expected[0].shape == right.shape
        places = np.unravel_index(check.expected[0].where, right.shape)
        np.testing.assert_array_equal(right[places], check.expected[0].values)
        seen.append([int(p.max() + 1) for p in places] + [int(p.min()) for p in places])
    assert seen[0][4:] == [0, 0, 0, 0], "the first corner"
    assert seen[1][1:4] == [16, 64, 64], "the last one"
    assert all(result["passed"] for result in artifact.selfcheck())


def test_a_part_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_LARGE", 1e-3)
    model, options = image_to_image("Relu(c)"), CompileOptions(threads=1)
    artifact = compile_model(model, options)
    network = lowered(model, options)
    judge = confirm.Judge(network.module, network.checks, artifact)
    drawn = network.checks.checks
    assert confirm.confirmed(artifact, drawn, judge) == drawn

    def change(outputs: Any) -> Any:
        outputs["y"][0, 0, 0, 0] += 1
        return outputs

    with pytest.raises(VerificationError, match=r"1 of .* values of `y` are wrong"):
        confirm.confirmed(Wrong(artifact, change), drawn, judge)


def test_what_has_no_parts_is_evaluated_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_LARGE", 1e-3)
    graph = load(image_to_image("CumSum(c, two)"))
    assert all(check.places is None for check in checks.SelfCheck(graph, 0).checks)


def test_the_cost_is_that_of_the_graph() -> None:
    small = parsed("(float[1, 8] x) => (float[1, 8] y) { y = Tanh(x) }")
    w = np.ones((64, 64, 3, 3), np.float32)
    large = parsed(
        "(float[1, 64, 256, 256] x) => (float[1, 64, 254, 254] y) { y = Conv(x, w) }", w=w
    )
    assert checks.cost(load(small)) < 1e-3 < 0.2 < checks.cost(load(large)) < 2
    assert len(checks.SelfCheck(load(small), 0).checks) == 4


def test_code_that_decides_ties_otherwise_passes() -> None:
    """A quantizer of each token makes ties in each: none of the outputs is sure."""
    graph = load(bitnet(Shape(256, 4, 512, tokens=33), gate="silu"))
    found = checks.SelfCheck(graph, 0)
    (name,) = graph.outputs
    check = found.check(0)
    settled = found.settled(check)
    assert settled.sure is not None
    assert settled.sure[name].all()
    right, near = settled.outputs[name], settled.coarse[name]
    assert near < 0.05
    rounded: dict[str, np.ndarray] = {}
    tied(graph, check.inputs, rounded=rounded)
    made = [rounded_otherwise(graph, check.inputs, rounded, seed=n)[name] for n in range(20, 26)]
    assert not all(agree(one, right) for one in made)
    assert all(agree(one, right, relative=near) for one in made)
    assert not agree(np.roll(right, 1, axis=1), right, relative=near)
    # Where decisions change all, it compares what they have not changed.
    flat = replace(check, outputs={name: np.zeros_like(right)})
    kept = found.settled(flat).sure
    assert kept is not None
    assert not kept[name].any()


def test_some_calls_of_each_kernel_of_a_large_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_SPARE_SECONDS", 0)
    model, options = bitnet(Shape(256, 4, 512, layers=4, tokens=5)), CompileOptions(threads=1)
    artifact = compile_model(model, options)
    network = lowered(model, options)
    judge = confirm.Judge(network.module, network.checks, artifact)
    assert judge.spares == 0
    feeds, calls = network.checks.inputs(0), Counter(kernels.KernelWalk(network.module).calls())
    seen: Counter[str] = Counter()
    wrong, run = "", kernels.run

    def counted(session: Any, case: kernels.KernelCase) -> list[np.ndarray]:
        seen[case.name] += 1
        return [] if case.name == wrong else run(session, case)

    monkeypatch.setattr(kernels, "run", counted)
    assert judge.wrong_kernel(feeds) == ""
    assert all(seen[name] >= min(count, 2) for name, count in calls.items())
    assert seen.total() < 0.7 * calls.total()
    for wrong in calls:
        assert judge.wrong_kernel(feeds) == wrong


def test_integers_are_such_that_outputs_are_finite() -> None:
    """Of a mask, all but 0 and 1 make infinities."""
    graph = load(parsed(
        "(float[2, 5] x, int64[2, 5] mask) => (float[2, 5] y) { c = Cast <to = 1> (mask) "
        "d = Sub(one, c) e = Mul(d, least) s = Add(x, e) y = Softmax <axis = -1> (s) }",
        one=np.float32(1), least=np.finfo(np.float32).min,
    ))  # fmt: skip
    made = checks.SelfCheck(graph, 0).checks
    assert len(made) == 4
    assert all(np.isfinite(check.outputs["y"]).all() for check in made[:3])
    assert {*made[0].inputs["mask"].flat} == {0, 1}


def test_symbolic_dimensions_are_also_checked_at_other_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = checks.SelfCheck(load(parsed(
        "(float[N, 5, T] x, float[T, N] y) => (float[N, 5, N] z) { z = MatMul(x, y) }"
    )), 0).larger  # fmt: skip
    assert [{name: x.shape for name, x in one.inputs.items()} for one in made] == [
        {"x": (7, 5, 19), "y": (19, 7)}
    ]
    bounded = load(parsed("(float[N] x) => (float[N] y) { y = Neg(x) }"), max_dims={"N": 4})
    (one,) = checks.SelfCheck(bounded, 0).larger
    assert one.inputs["x"].shape == (4,)
    fixed = load(parsed("(float[3] x) => (float[3] y) { y = Neg(x) }"))
    assert checks.SelfCheck(fixed, 0).larger == []
    monkeypatch.setattr(checks, "_SECONDS", 0.0)
    assert checks.SelfCheck(bounded, 0).larger == []


def test_what_is_wrong_for_other_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts are compared with the model at sizes at which loops have a rest, too."""
    run = Artifact.run

    def changed(self: Artifact, inputs: Any, **options: Any) -> Any:
        made = run(self, inputs, **options)
        for value in made.values():
            value[6:] = 0
        return made

    model = parsed("(float[N, 4] x) => (float[N, 4] y) { y = Exp(x) }")
    bnncc.compile(model, target="native")
    monkeypatch.setattr(Artifact, "run", changed)
    with pytest.raises(VerificationError, match="4 of 28 values of `y` are wrong"):
        bnncc.compile(model, target="native")


def large_sums(factor: float) -> onnx.ModelProto:
    """Return a network whose sums have terms of up to 64 * `factor`, of both signs."""
    rng = np.random.default_rng(0)
    w = np.where(rng.random((64, 64)) < 0.5, -1, 1).astype("f4")
    return parsed(
        "(float[4, 64] x) => (float[4, 64] y) { s = Sign(x) a = MatMul(s, w) b = Mul(a, k) "
        "y = MatMul(b, v) }",
        w=w, k=np.float32(factor), v=rng.normal(size=(64, 64)).astype("f4"),
    )  # fmt: skip


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("factor", [2e36, 5e36, 1.5e37])
def test_sums_that_overflow_in_one_order_are_not_compared(factor: float) -> None:
    artifact = compile_model(large_sums(factor), CompileOptions(threads=1))
    assert all(one["passed"] for one in artifact.selfcheck())
    x = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    (y,) = artifact.run({"x": x}).values()
    assert np.isfinite(y).any() == (factor < 1e37)
    said = [line for line in artifact.report["warnings"] if "outputs overflow for all" in line]
    assert len(said) == (factor > 2e36)


def test_only_large_numbers_overflow() -> None:
    infinity, nan = np.float32(np.inf), np.float32(np.nan)
    large = np.array([1e38, 1e38, -1e35], np.float32)
    got = np.array([infinity, 0, nan], np.float32)
    assert overflows(got, large).tolist() == [True, False, True]
    assert not overflows(got, large / np.float32(1e6)).any()
    assert overflows(large, got).tolist() == [False, False, True]
    assert overflows(large, got[:1].repeat(3)).all()
    assert overflows(got.astype(np.float16), np.full(3, 60000, np.float16)).any()
    assert not overflows(np.array([1]), np.array([2])).any()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_network_that_overflows_compiles_without_a_word() -> None:
    rng = np.random.default_rng(0)
    w = np.where(rng.random((64, 64)) < 0.5, -1, 1).astype("f4") * np.float32(1e17)
    model = parsed(
        "(float[4, 64] x) => (float[4, 64] y) { s = Sign(x) a = MatMul(s, w) b = MatMul(a, v) "
        "c = Mul(b, b) d = Softmax<axis=-1>(c) e = MatMul(d, v) y = Mul(e, c) }",
        w=w, v=rng.normal(size=(64, 64)).astype("f4"),
    )  # fmt: skip
    x = rng.normal(size=(4, 64)).astype(np.float32)
    (y,) = compile_model(model, CompileOptions(threads=1)).run({"x": x}).values()
    assert not np.isfinite(y).all()
