"""What weights take in an artifact: one bit each, padded to the word per tap, and nothing twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bnncc

pytestmark = pytest.mark.sampled(5)


def _network(channels: int, out: int) -> tuple[onnx.ModelProto, int]:
    """Return sign -> conv -> sign -> conv with 3x3 filters, and the number of its filters' taps."""
    rng = np.random.default_rng(0)
    first = np.where(rng.integers(0, 2, (out, channels, 3, 3)), 1, -1).astype(np.float32)
    second = np.where(rng.integers(0, 2, (channels, out, 3, 3)), 1, -1).astype(np.float32)
    nodes = [
        helper.make_node("Sign", ["x"], ["a"]),
        helper.make_node("Conv", ["a", "w"], ["b"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Sign", ["b"], ["c"]),
        helper.make_node("Conv", ["c", "v"], ["y"], name="second", pads=[1, 1, 1, 1]),
    ]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels, 6, 6])
    graph = helper.make_graph(
        nodes,
        "g",
        [image],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, channels, 6, 6])],
        [numpy_helper.from_array(first, "w"), numpy_helper.from_array(second, "v")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), 9


# Kernels that count bits leave words behind ragged blocks only; those that look nibbles up fill the
# block of output channels that they look up together.
@pytest.mark.parametrize(
    ("target", "block"), [("x86-64-v4-vpopcntdq", None), ("x86-64-v2", 64), ("x86-64-v3", 64)]
)
@pytest.mark.parametrize(("channels", "out"), [(32, 64), (64, 32), (128, 96), (40, 33), (1, 16)])
def test_binary_weights_take_one_bit_each_padded_to_the_word(
    channels: int, out: int, target: str, block: int | None
) -> None:
    model, taps = _network(channels, out)
    report = bnncc.compile(model, target=target).report
    assert report["summary"]["binary"] == 2
    words = out * taps * -(-channels // 32) + channels * taps * -(-out // 32)
    exact = 2 * out * channels * taps / 8
    have = report["bytes"]["binary"]
    if channels % 32 == 0 and out % 32 == 0:
        assert have <= 1.02 * exact
    if block is None:
        spare = 16 * ((out % 16 != 0) + (channels % 16 != 0))
    else:
        filled = (-out % block) * -(-channels // 32) + (-channels % block) * -(-out // 32)
        spare = taps * filled
    assert 4 * words <= have <= 4 * (words + spare)


def test_sizes_sum_to_the_file(tmp_path: object) -> None:
    model, _ = _network(64, 32)
    artifact = bnncc.compile(model)
    path = f"{tmp_path}/m.bnncc"
    size = artifact.save(path)
    sizes = dict(artifact.report["bytes"])
    assert sizes.pop("total") == size == sum(sizes.values())


def test_shared_weights_are_stored_once() -> None:
    rng = np.random.default_rng(0)
    weight = np.where(rng.integers(0, 2, (32, 32, 3, 3)), 1, -1).astype(np.float32)
    nodes = [
        helper.make_node("Sign", ["x"], ["a"]),
        helper.make_node("Conv", ["a", "w"], ["b"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["a", "w"], ["c"], pads=[2, 2, 2, 2], dilations=[2, 2]),
        helper.make_node("Add", ["b", "c"], ["y"]),
    ]
    shape = [1, 32, 6, 6]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    assert bnncc.compile(model).report["bytes"]["binary"] == weight.size // 8


def test_memory_of_a_dynamic_batch_is_counted_for_one_image() -> None:
    path = Path(__file__).parents[2] / "examples" / "digits" / "digits.onnx"
    fixed = bnncc.compile(path, input_shapes={"images": (1, 1, 8, 8)}).report["memory"]
    open_batch = bnncc.compile(path).report["memory"]
    assert fixed["arena_bytes"] <= open_batch["arena_bytes"] <= 4 * fixed["arena_bytes"]
    assert fixed["arena_bytes"] >= 8 * 8 * 32 * 4  # the residual, in float
