"""Binary products of two activations, as binary transformers have them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import bnncc
from tests.collection import oracle
from tests.collection.builder import Net


def heads(net: Net, x: str, count: int, size: int) -> str:
    """Cut [N, T, count * size] into heads [N, count, T, size]."""
    cut = net.op("Reshape", x, net.ints([0, 0, count, size]))
    return net.op("Transpose", cut, perm=[0, 2, 1, 3])


def linear(net: Net, x: str, depth: int, units: int) -> str:
    y = net.op("MatMul", net.sign(x), net.const(net.signs((depth, units)) * 0.1))
    return net.op("Add", y, net.const(net.normal(units)))


def threshold(net: Net, x: str, at: float) -> str:
    """Return x > at as 0 and 1."""
    return net.cast(net.compare("Greater", x, net.const(np.float32(at))))


def attention(net: Net, *, batch: int | str = 2, tokens: int = 13, count: int = 3, size: int = 20,
              how: str = "where_ge") -> None:  # fmt: skip
    """Attend as BiT does: signs times signs, softmax, zeros and ones times signs."""
    width = count * size
    x = net.input("x", [batch, tokens, width])
    q, k, v = (net.sign(heads(net, linear(net, x, width, width), count, size), how)
               for _ in range(3))  # fmt: skip
    scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = net.op("Div", scores, net.const(np.float32(size**0.5)))
    weights = threshold(net, net.op("Softmax", scores, axis=-1), 1 / tokens)
    weights = net.op("Mul", weights, net.const(np.float32(0.125)))
    y = net.op("Transpose", net.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    y = net.op("Reshape", y, net.ints([0, 0, width]))
    net.output(net.op("Add", linear(net, y, width, width), x))


def dynamic(net: Net) -> None:
    attention(net, batch="N", tokens=17, count=2, size=32)


def with_zeros(net: Net) -> None:
    """Use ONNX's Sign, which may give 0, on inputs that are."""
    attention(net, tokens=16, count=2, size=33, how="sign")


def inputs(net: Net, how: str, rows: int = 5, depth: int = 40, columns: int = 21) -> None:
    a = net.sign(net.input("x", [3, rows, depth]), how)
    b = net.sign(net.input("y", [3, depth, columns]), how)
    net.output(net.op("MatMul", net.op("Mul", a, net.const(np.float32(-2))), b))


def of_inputs(net: Net) -> None:
    inputs(net, "where_gt")


def of_inputs_with_zeros(net: Net) -> None:
    inputs(net, "sign", 18, 70, 16)


def squares(net: Net) -> None:
    """Multiply a matrix without other axes with its own transpose, and take signs."""
    x = net.sign(net.input("x", [9, 50]))
    y = net.op("MatMul", x, net.op("Transpose", x, perm=[1, 0]))
    y = net.sign(net.op("Sub", y, net.const(np.float32(3))))
    net.output(net.op("MatMul", y, net.sign(net.input("y", [9, 7]))), y)


CASES = {
    attention: 6,
    dynamic: 6,
    with_zeros: 6,
    of_inputs: 1,
    of_inputs_with_zeros: 1,
    squares: 2,
}


def built(case: Callable[..., None]) -> onnx.ModelProto:
    net = Net(opset=17, seed=case.__name__)
    case(net)
    return net.model()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_products_are_binary_and_right(case: Callable[..., None]) -> None:
    model = built(case)
    artifact = bnncc.compile(model)
    layers = [x for x in artifact.report["layers"] if x["kind"] == "binary"]
    assert len(layers) == CASES[case] == len(artifact.report["layers"])
    rng = np.random.default_rng(1)
    for values in (rng.standard_normal, lambda shape: rng.integers(-1, 2, shape)):
        feeds = {
            i.name: values([3 if d == "N" else d for d in i.shape]).astype(np.float32)
            for i in artifact.inputs
        }
        verdict = oracle.compare(model, feeds, artifact.run(feeds))
        assert verdict.right or verdict.kind == "tie", verdict.text
        assert case in (attention, dynamic, with_zeros) or verdict.right


def refused(case: Callable[[Net], str]) -> str:
    net = Net(opset=17)
    net.output(case(net))
    (layer,) = bnncc.compile(net.model()).report["layers"]
    assert layer["kind"] == "float"
    return str(layer["reason"])


def test_explain_says_why_a_product_is_not_binary() -> None:
    def real(net: Net) -> str:
        a = net.sign(net.input("x", [2, 3, 4]))
        return net.op("MatMul", a, net.op("Softmax", net.input("y", [2, 4, 5])))

    def repeated(net: Net) -> str:
        a, b = net.sign(net.input("x", [2, 3, 4])), net.sign(net.input("y", [1, 4, 5]))
        return net.op("MatMul", a, b)

    def right_of_zeros_and_ones(net: Net) -> str:
        a, b = net.input("x", [2, 3, 4]), net.input("y", [2, 4, 5])
        return net.op("MatMul", net.sign(a), threshold(net, b, 0.5))

    def weights_on_the_left(net: Net) -> str:
        return net.op("MatMul", net.const(net.signs((5, 4))), net.input("x", [2, 4, 3]))

    assert "real-valued (from Softmax" in refused(real)
    assert "repeated" in refused(repeated)
    assert "left operand" in refused(weights_on_the_left)
    assert "neither" in refused(right_of_zeros_and_ones)


def test_several_leading_axes_may_be_dynamic() -> None:
    net = Net(seed=0)
    a, b = net.input("x", ["N", "H", 5, 40]), net.input("z", ["N", "H", 40, 6])
    net.output(net.op("MatMul", net.op("Sign", a), net.op("Sign", b)))
    artifact = bnncc.compile(net.model(), threads=1)
    rng = np.random.default_rng(0)
    x, z = (rng.standard_normal((2, 3, *s)).astype(np.float32) for s in ((5, 40), (40, 6)))
    (made,) = artifact.run({"x": x, "z": z}).values()
    np.testing.assert_array_equal(made, np.sign(x) @ np.sign(z))
    assert [layer["kind"] for layer in artifact.report["layers"]] == ["binary"]
