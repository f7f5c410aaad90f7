"""The oracle of the collection: it agrees with ONNX Runtime, sees ties, and sees mistakes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.collection import files, handmade, oracle
from tests.collection.builder import Case, Net

# ONNX Runtime 1.31: no opset 27 or 28, no dilation with SAME padding, no two nodes of one name.
REFUSED = ("signs_opset27", "signs_opset28", "pad_auto_SAME_UPPER_dilated", "names_equal")


def _cases() -> list:
    return [
        pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.slow)
        for case in [*handmade.cases(), *files.cases()]
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", _cases())
def test_agrees_with_onnxruntime(case: Case) -> None:
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if case.name in REFUSED:
        pytest.skip("not supported by ONNX Runtime")
    session = ort.InferenceSession(
        case.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [o.name for o in session.get_outputs()]
    for feeds in case.feeds:
        assert not oracle.ties(case.model, feeds), "no feed free of ties was found"
        verdict = oracle.compare(
            case.model, feeds, dict(zip(names, session.run(None, feeds), strict=True))
        )
        assert verdict.right, verdict.text


def test_near_zero_sum_is_a_tie() -> None:
    net = Net()
    total = net.op("Add", net.op("Add", net.input("x", [2]), net.const(0.3)), net.const(-0.2))
    net.output(net.op("Sign", total))
    model = net.model()
    feeds = {"x": np.array([-0.1, 1.0], np.float32)}
    assert [t.count for t in oracle.ties(model, feeds)] == [1]
    assert (
        oracle.compare(
            model, feeds, {model.graph.output[0].name: np.array([-9, 1], np.float32)}
        ).kind
        == "tie"
    )


def test_exact_zero_of_an_accumulator_is_no_tie() -> None:
    net = Net()
    s = net.sign(net.input("x", [1, 2, 1, 1]), "where_ge")
    net.output(
        net.op("Sign", net.conv(s, np.array([[1, 1]], np.float32).reshape(1, 2, 1, 1) * 0.3))
    )
    model = net.model()
    feeds = {"x": np.array([1, -1], np.float32).reshape(1, 2, 1, 1)}
    assert not oracle.ties(model, feeds)
    (got,) = oracle.run(model, feeds).values()
    assert got.item() == 0


def test_noise_of_straight_through_weights_is_taken_out() -> None:
    net = Net()
    s = net.sign(net.input("x", [1, 2, 1, 1]), "where_ge")
    net.output(net.conv(s, np.array([1 + 1e-7, 1], np.float32).reshape(1, 2, 1, 1)))
    (got,) = oracle.run(
        net.model(), {"x": np.array([1, -1], np.float32).reshape(1, 2, 1, 1)}
    ).values()
    assert got.item() == 0


@pytest.mark.parametrize(
    "name",
    ["sign_sign", "pad_conv_zero", "even_k_zeros", "bi_real_sign", "pool_before_bn_negative"],
)
def test_sees_one_wrong_element(name: str) -> None:
    case = next(c for c in handmade.cases() if c.name == name)
    feeds = case.feeds[0]
    right = oracle.run(case.model, feeds)
    assert oracle.compare(case.model, feeds, right).right
    for output, array in right.items():
        wrong = array.copy()
        wrong.flat[array.size // 2] += 1e-3 * np.abs(array).max()
        assert oracle.compare(case.model, feeds, {**right, output: wrong}).kind == "wrong"


def test_keeps_intermediate_tensors() -> None:
    case = next(c for c in handmade.cases() if c.name == "sign_sign")
    node = case.model.graph.node[0]
    kept = oracle.run(case.model, case.feeds[0], keep=node.output)
    assert set(np.unique(kept[node.output[0]])) == {-1.0, 0.0, 1.0}
