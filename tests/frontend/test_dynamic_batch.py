"""Sizes and counts that exporters compute from the shape of the data, with a symbolic batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest

import bnncc
from bnncc.errors import ShapeError
from bnncc.frontend.onnx import load
from tests.collection.builder import Net


def batch_and(net: Net, x: str, *sizes: int) -> str:
    """Return the shape that `F.interpolate(x, size=sizes)` and others compute."""
    return net.op("Concat", net.slice(net.op("Shape", x), [0], [1], [0]), net.ints(sizes), axis=0)


def resized(net: Net, x: str, how: str) -> str:
    attrs = {"mode": how, "coordinate_transformation_mode": "half_pixel"}
    sizes = batch_and(net, x, 8, *((12, 3) if how == "linear" else (12, 12)))
    return net.op("Resize", x, "", "", sizes, **attrs)


def same_size(net: Net, x: str) -> str:
    return net.op("Resize", x, "", "", net.op("Shape", x), mode="linear")


def token(net: Net, x: str) -> str:
    """Append a learnt row: ``torch.cat([token.repeat(len(x), 1, 1, 1), x], 2)``."""
    row = net.const(net.normal((1, 8, 1, 6)))
    return net.concat(net.op("Tile", row, batch_and(net, x, 1, 1, 1)), x, axis=2)


CASES: dict[str, Callable[[Net, str], str]] = {
    "nearest": lambda net, x: resized(net, x, "nearest"),
    "linear": lambda net, x: resized(net, x, "linear"),
    "same size": same_size,
    "token": token,
}


@pytest.mark.parametrize("name", CASES)
def test_a_symbolic_batch_is_kept(name: str) -> None:
    net = Net(seed=0)
    x = net.input("x", ["N", 8, 6, 6])
    y = CASES[name](net, net.bconv(net.sign(x, "where_ge"), 8))
    net.output(net.bconv(net.sign(y, "where_ge"), 5))
    model = net.model()
    artifact = bnncc.compile(model, threads=1)
    assert artifact.outputs[0].shape[0] == "N"
    assert [layer["kind"] for layer in artifact.report["layers"]] == ["binary"] * 2
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        data = np.random.default_rng(batch).normal(0, 1, (batch, 8, 6, 6)).astype(np.float32)
        wanted = session.run(None, {"x": data})[0]
        np.testing.assert_array_equal(artifact.run({"x": data})[artifact.outputs[0].name], wanted)


def test_a_batch_that_is_resized_is_refused() -> None:
    net = Net(seed=0)
    x = net.input("x", ["N", 8, 6, 6])
    turned = net.op("Transpose", x, perm=[1, 0, 2, 3])
    net.output(net.op("Resize", turned, "", "", batch_and(net, x, 8, 12, 12), mode="nearest"))
    with pytest.raises(ShapeError, match="pass --input-shape x:1x8x6x6"):
        load(net.model(check=False))
