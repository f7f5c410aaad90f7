"""Products with weights on the left, and with weights of a batch of one: layers like others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import bnncc
from bnncc.verification.confirm_passes import compare_passes
from tests.collection import oracle
from tests.collection.builder import Net
from tests.physical_networks import evaluated, passed

Shape = list[int | str]


def levels(net: Net, x: str) -> str:
    three = net.const(3.0)
    clipped = net.op("Clip", x, net.const(0.0), net.const(1.0))
    return net.op("Div", net.op("Round", net.op("Mul", clipped, three)), three)


def left(*shape: int) -> Callable[[Net, str], str]:
    def case(net: Net, x: str) -> str:
        return net.op("MatMul", net.const(net.signs(shape) * 0.5), net.sign(x))

    return case


def right(*shape: int) -> Callable[[Net, str], str]:
    def case(net: Net, x: str) -> str:
        return net.op("MatMul", net.op("Sign", x), net.const(net.signs(shape)))

    return case


def chain(net: Net, x: str) -> str:
    """Mix tokens twice, with a bias of each of them, and the numbers kept beside the signs."""
    for _ in range(2):
        made = net.op("MatMul", net.const(net.signs((6, 6))), net.op("Sign", x))
        x = net.op("Add", net.op("Add", made, net.const(np.rint(8 * net.normal((6, 1))) / 8)), x)
    return x


def few_bits(net: Net, x: str) -> str:
    weight = net.rng.integers(-3, 4, (5, 6)).astype(np.float32) * 0.25
    return net.op("MatMul", net.const(weight), levels(net, x))


def rows_of_columns(net: Net, x: str) -> str:
    turned = net.sign(net.op("Transpose", x, perm=[1, 0]))
    made = net.op("MatMul", net.const(net.signs((5, 8))), turned)
    return net.op("Transpose", made, perm=[1, 0])


def read_twice(net: Net, x: str) -> str:
    signs = net.sign(x)
    return net.op("Add", net.op("MatMul", net.const(net.signs((6, 6))), signs), signs)


@pytest.mark.parametrize(
    ("case", "shape", "kinds"),
    [
        (left(5, 6), [6, 8], ["binary"]),
        (left(5, 6), [2, 6, 8], ["binary"]),
        (left(5, 6), [2, 3, 6, 8], ["binary"]),
        (left(1, 5, 6), [6, 8], ["binary"]),
        (left(1, 5, 6), [2, 6, 8], ["binary"]),
        (left(1, 1, 5, 6), [2, 6, 8], ["binary"]),
        (left(5, 6), ["N", 6, 8], ["binary"]),
        (left(5, 6), [6, 1], ["binary"]),
        (left(2, 5, 6), [2, 6, 8], ["float"]),
        (right(1, 8, 5), [6, 8], ["binary"]),
        (right(1, 8, 5), [2, 6, 8], ["binary"]),
        (right(1, 1, 8, 5), ["N", 6, 8], ["binary"]),
        (right(2, 8, 5), [2, 6, 8], ["binary"]),
        (chain, [6, 8], ["binary", "binary"]),
        (chain, [2, 6, 8], ["binary", "binary"]),
        (few_bits, [6, 8], ["few_bit"]),
        (rows_of_columns, ["N", 8], ["binary"]),
        (read_twice, [2, 6, 8], ["binary"]),
    ],
)
def test_products_are_layers_and_right(
    case: Callable[[Net, str], str], shape: Shape, kinds: list[str]
) -> None:
    net = Net(seed=9)
    net.output(case(net, net.input("x", shape)))
    model = net.model()
    rng = np.random.default_rng(1)
    size = [3 if d == "N" else d for d in shape]
    for target in ("native", "cuda-sm80"):
        before, physical, layers = passed(model, target)
        assert [layer.kind for layer in layers] == kinds
        for x in (rng.standard_normal(size), rng.integers(-1, 2, size)):
            feeds = {"x": x.astype(np.float32)}
            assert not compare_passes(physical, before, feeds)
            verdict = oracle.compare(model, feeds, evaluated(physical, before, feeds))
            assert verdict.right, verdict.text


def test_rows_of_columns_are_packed_as_they_are() -> None:
    """Both transposes vanish."""
    net = Net(seed=9)
    net.output(rows_of_columns(net, net.input("x", ["N", 8])))
    _, physical, _ = passed(net.model())
    assert not [node for node in physical.nodes if node.op == "Transpose"]


def test_what_is_compiled_is_right() -> None:
    net = Net(seed=10)
    net.output(chain(net, net.input("x", [2, 6, 8])))
    artifact = bnncc.compile(net.model())
    (first, _) = artifact.report["layers"]
    assert (first["output_shape"], first["weight_shape"]) == ([2, 6, 8], [6, 6])
    feeds = {"x": np.random.default_rng(2).standard_normal((2, 6, 8)).astype(np.float32)}
    verdict = oracle.compare(net.model(), feeds, artifact.run(feeds))
    assert verdict.right, verdict.text
