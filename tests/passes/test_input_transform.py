"""Images binarized on the way in: equal to NumPy definitions, and binary from there on."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import bnncc
from bnncc.agreement import verify
from bnncc.cli import main as cli
from bnncc.errors import UsageError
from bnncc.input_transforms import InputTransform, parse_input_transform
from bnncc.ir.image_bits import bits_of
from bnncc.options import CompileOptions, Uint8Input
from bnncc.topi_binary.layout import pack_bits
from bnncc.topi_binary.spec import ImageBits
from tests.conftest import ALL
from tests.kernel_harness import HERE, TARGETS, run_kernel

pytestmark = pytest.mark.sampled(3)

Array = np.ndarray[Any, Any]
THRESHOLDS = (-120.5, -128.0, -99.25)


def _images(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def rgb_threshold(image: Array, thresholds: tuple[float, ...]) -> Array:
    return image.astype(np.float64) + np.array(thresholds) > 0


def grey(image: Array) -> Array:
    """Return greys in thousandths, exact."""
    x = image.astype(np.int64)
    return 299 * x[..., 0] + 587 * x[..., 1] + 114 * x[..., 2]


def patterns(image: Array) -> Array:
    """Compare neighbours 0, 3 and 6, clockwise from the top left, pixel by pixel."""
    clockwise = [(-1, -1), (-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1)]
    g = grey(image)
    n, height, width = g.shape
    bits = np.zeros((n, height, width, 3), bool)
    for k, (dy, dx) in enumerate(clockwise[number] for number in (0, 3, 6)):
        for y in range(height):
            for x in range(width):
                inside = 0 <= y + dy < height and 0 <= x + dx < width
                other = g[:, y + dy, x + dx] if inside else 0
                bits[:, y, x, k] = other > g[:, y, x]
    return bits


def test_the_definition_is_that_of_the_paper() -> None:
    image = _images((2, 9, 11, 3))
    image[0, 2:5] = 77  # equal greys are not larger
    rgb = InputTransform("rgb-threshold", THRESHOLDS).attributes(3)
    np.testing.assert_array_equal(
        bits_of(image, rgb["kind"], rgb["thresholds"]), rgb_threshold(image, THRESHOLDS)
    )
    np.testing.assert_array_equal(bits_of(image, "lbp"), patterns(image))
    for value in (-128.0, -127.5, -77.0, -0.5, 0.0, 3.0, -255.0, -254.999, -1000.0):
        a = InputTransform("gray-threshold", (value,)).attributes(1)
        made = bits_of(image, a["kind"], a["thresholds"], channels=1)[..., 0]
        np.testing.assert_array_equal(made, grey(image) + round(1000 * value) > 0)


@pytest.mark.parametrize(
    ("thresholds", "limits"),
    [
        ((-0.5, 0.5, -255.5), (1, 0, 256)),
        ((-255, 0, -254.0), (256, 1, 255)),
        ((-300, 9, -1), (256, 0, 2)),
    ],
)
def test_thresholds_of_bytes_are_exact(
    thresholds: tuple[float, ...], limits: tuple[int, ...]
) -> None:
    assert InputTransform("rgb-threshold", thresholds).attributes(3)["thresholds"] == limits


SHAPES = [(1, 1, 1), (2, 3, 5), (1, 4, 16), (2, 3, 48), (1, 1, 32), (1, 5, 150), (2, 9, 33)]
KINDS: list[tuple[str, tuple[int, ...], tuple[int, ...], int]] = [
    ("threshold", (100, 0, 256), (), 3),
    ("threshold", (256, 0, 50), (1, 1, 0), 3),
    ("grey", (128_001,), (), 3),
    ("grey", (0,), (), 1),
    ("grey", (255_001,), (), 1),
    ("lbp", (), (), 3),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("kind", "thresholds", "flip", "channels"), KINDS)
def test_kernels(
    target: str, layout: str, kind: str, thresholds: tuple, flip: tuple, channels: int
) -> None:
    for n, height, width in SHAPES if target == HERE[-1] or ALL in os.environ else SHAPES[-2:]:
        spec = ImageBits(n, height, width, 3, kind, thresholds, flip, layout, channels)
        image = _images((n, height, width, 3), height)
        image[:, :, : width // 2] //= 64  # many equal neighbours
        given = image if layout == "NHWC" else np.ascontiguousarray(image.transpose(0, 3, 1, 2))
        (made,) = run_kernel(spec, [given], target)
        wanted = pack_bits(bits_of(image, kind, thresholds, flip, channels))
        np.testing.assert_array_equal(made, wanted, err_msg=f"{spec}")


@pytest.mark.parametrize("channels", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_kernels_of_other_numbers_of_channels(channels: int, layout: str) -> None:
    limits = tuple(range(40, 40 + 20 * channels, 20))
    spec = ImageBits(1, 6, 13, channels, "threshold", limits, (), layout, channels)
    image = _images((1, 6, 13, channels))
    given = image if layout == "NHWC" else np.ascontiguousarray(image.transpose(0, 3, 1, 2))
    (made,) = run_kernel(spec, [given], TARGETS[0])
    np.testing.assert_array_equal(made, pack_bits(bits_of(image, "threshold", limits)))


# ---- networks ------------------------------------------------------------------------------------


def _signs(rng: np.random.Generator, *shape: int) -> Array:
    return np.where(rng.integers(0, 2, shape), 1, -1).astype(np.float32)


def vehicle(size: int = 96, channels: int = 3, batch: int | str = 1) -> onnx.ModelProto:
    """Return Khan et al.'s vehicle network, with random weights; data are bits as +1 and -1."""
    rng = np.random.default_rng(3)
    stored: dict[str, Array] = {"zero": np.float32(0), "one": np.float32(1), "low": np.float32(-1)}
    nodes, tip = [], "x"

    def layer(op: str, weight: Array, last: bool = False, **attrs: Any) -> None:
        nonlocal tip
        k, units = len(stored), len(weight)
        stored[f"w{k}"] = weight
        nodes.append(helper.make_node(op, [tip, f"w{k}"], [f"a{k}"], f"layer{k}", **attrs))
        if op == "Conv":
            nodes.append(helper.make_node("MaxPool", [f"a{k}"], [f"p{k}"], kernel_shape=[2, 2],
                                          strides=[2, 2]))  # fmt: skip
        names = [f"{v}{k}" for v in ("scale", "shift", "mean", "var")]
        for name in names:
            stored[name] = rng.normal(0, 2, units).astype(np.float32)
        stored[names[3]] = np.abs(stored[names[3]]) + np.float32(1)
        source = f"p{k}" if op == "Conv" else f"a{k}"
        nodes.append(helper.make_node("BatchNormalization", [source, *names], [f"b{k}"]))
        tip = f"b{k}"
        if not last:
            nodes.append(helper.make_node("Greater", [tip, "zero"], [f"c{k}"]))
            nodes.append(helper.make_node("Where", [f"c{k}", "one", "low"], [f"s{k}"]))
            tip = f"s{k}"

    layer("Conv", _signs(rng, 32, channels, 5, 5), pads=[2, 2, 2, 2])
    layer("Conv", _signs(rng, 32, 32, 5, 5), pads=[2, 2, 2, 2])
    nodes.append(helper.make_node("Flatten", [tip], ["flat"]))
    tip = "flat"
    layer("Gemm", _signs(rng, 100, 32 * (size // 4) ** 2), transB=1)
    layer("Gemm", _signs(rng, 100, 100), transB=1)
    layer("Gemm", _signs(rng, 4, 100), last=True, transB=1)
    graph = helper.make_graph(
        nodes, "vehicle",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, channels, size, size])],
        [helper.make_tensor_value_info(tip, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in stored.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@functools.cache
def _plain_vehicle(channels: int) -> bnncc.Artifact:
    return bnncc.compile(vehicle(channels=channels))


@pytest.mark.parametrize(
    ("transform", "channels"),
    [
        (InputTransform("rgb-threshold", THRESHOLDS), 3),
        (InputTransform("gray-threshold", (-128.0,), "nhwc"), 1),
        (InputTransform("gray-threshold", (-100.0,)), 3),
        (InputTransform("lbp", (), "nhwc"), 3),
    ],
)
def test_the_vehicle_network_is_binary_from_the_first_layer_on(
    transform: InputTransform, channels: int
) -> None:
    artifact = bnncc.compile(vehicle(channels=channels), input_transform=transform)
    assert [x["kind"] for x in artifact.report["layers"]] == ["binary"] * 5
    ops = [k["op"] for k in artifact.report["kernels"]]
    assert ops[:2] == ["image_bits", "binary_conv2d"]
    assert not {"elementwise", "bitpack", "conv2d", "pool2d"}.intersection(ops)
    image = _images((1, 96, 96, 3), 4)
    given = image if transform.layout == "nhwc" else image.transpose(0, 3, 1, 2)
    made = artifact.run({"x": np.ascontiguousarray(given)})
    bits = {
        "rgb-threshold": lambda: rgb_threshold(image, THRESHOLDS),
        "gray-threshold": lambda: np.repeat(
            (grey(image) + 1000 * transform.thresholds[0] > 0)[..., None], channels, axis=3
        ),
        "lbp": lambda: patterns(image),
    }[transform.kind]()
    seen = np.where(bits, np.float32(1), np.float32(-1)).transpose(0, 3, 1, 2)
    plain = _plain_vehicle(channels).run({"x": np.ascontiguousarray(seen)})
    for name, value in plain.items():
        np.testing.assert_array_equal(made[name], value)


def test_any_batch_and_verification() -> None:
    model = vehicle(16, batch="N")
    artifact = bnncc.compile(model, input_transform="lbp:nhwc")
    image = _images((3, 16, 16, 3))
    both = artifact.run({"x": image})
    for k in range(3):
        one = artifact.run({"x": image[k : k + 1]})
        for name, value in one.items():
            np.testing.assert_array_equal(both[name][k : k + 1], value)
    assert artifact.inputs[0].shape == ("N", 16, 16, 3)
    assert verify(model, artifact)["right"]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("sign", ["GreaterOrEqual", "Less", "Sign"])
def test_thresholds_in_the_graph_are_recognised(layout: str, sign: str) -> None:
    """Bytes that are normalized, shifted and signed in the graph are compared as bytes."""
    rng = np.random.default_rng(0)
    stored = {
        "w": _signs(rng, 16, 3, 3, 3),
        "t": np.float32([-1.1, 0.3, 0.21]).reshape(3, 1, 1),
        "slope": np.float32([2, -3, 0.5]).reshape(3, 1, 1),
        "zero": np.float32(0),
        "one": np.float32(1),
        "low": np.float32(-1),
    }
    nodes = [
        helper.make_node("Mul", ["x", "slope"], ["m"]),
        helper.make_node("Add", ["m", "t"], ["a"]),
    ]
    if sign == "Sign":
        nodes.append(helper.make_node("Sign", ["a"], ["s"]))
    else:
        nodes.append(helper.make_node(sign, ["a", "zero"], ["c"]))
        nodes.append(helper.make_node("Where", ["c", "one", "low"], ["s"]))
    nodes.append(helper.make_node("Conv", ["s", "w"], ["y"]))
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 10, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in stored.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    image = Uint8Input("x", (123.0, 116.0, 103.0), (0.25, 0.5, 1 / 255), layout)
    artifact = bnncc.compile(model, input_uint8=[image])
    ops = [k["op"] for k in artifact.report["kernels"]]
    assert ops[:2] == ["image_bits", "binary_conv2d"]
    pixels = _images((1, 3, 10, 12))
    column = (1, -1, 1, 1)
    x = (pixels - np.float32(image.mean).reshape(column)) * np.float32(image.scale).reshape(column)
    wanted = bnncc.compile(model).run({"x": x})["y"]
    given = pixels if layout == "nchw" else np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(artifact.run({"x": given})["y"], wanted)


# ---- the option ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        [-1, -2.5, 3],
        {"thresholds": [-1, -2.5, 3]},
        {"B": 3, "R": -1, "G": -2.5},
        {"a": -1, "b": -2.5, "c": 3},
    ],
)
def test_files_of_thresholds(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content))
    wanted = InputTransform("rgb-threshold", (-1.0, -2.5, 3.0), "nhwc", "x")
    assert parse_input_transform(f"x=rgb-threshold:{path}:nhwc") == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rgb", "is not rgb-threshold:FILE.json, gray-threshold:V or lbp"),
        ("lbp:3", "is not rgb-threshold"),
        ("gray-threshold", "is not rgb-threshold"),
        ("gray-threshold:many", "`many` is not a number"),
        ("gray-threshold:nan", "finite numbers"),
        ("gray-threshold:1e30", "finite numbers"),
        ("rgb-threshold:missing.json", "cannot be read"),
        ("rgb-threshold:{two}", "expected three numbers"),
        ("rgb-threshold:{text}", "is not JSON"),
        ("rgb-threshold:{long}", "too long"),
        ("rgb-threshold:{words}", "expected three numbers"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, text: str, said: str) -> None:
    files = {"two": "[1, 2]", "text": "one", "long": "[" * 20_000, "words": '["1", true, null]'}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=said):
        parse_input_transform(text.format(**{name: tmp_path / name for name in files}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_transform": "z=lbp"}, "`z` is not a float32 image"),
        ({"input_uint8": [Uint8Input("x", (0.0,), (1.0,))]}, "0 inputs are images"),
        ({"channels": 4}, r"shape \[1, 4, 16, 16\], expected 3 channels"),
        ({"channels": 4, "input_transform": "gray-threshold:-1"}, "1 or 3 channels"),
        ({"first_layer": "int8"}, "first_layer and input_transform cannot be combined"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    channels = change.pop("channels", 3)
    with pytest.raises(UsageError, match=said):
        bnncc.compile(vehicle(16, channels), **{"input_transform": "lbp", **change})


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(vehicle(16), "net.onnx")
    Path("t.json").write_text("[-1, -128, -255]")
    transform = ["--input-transform", "x=rgb-threshold:t.json:nhwc"]
    assert cli.main(["compile", "net.onnx", *transform, "-o", "net.bnncc"]) == 0
    assert cli.main(["verify", "net.onnx", "net.bnncc"]) == 0
    assert cli.main(["explain", "net.onnx", "--input-transform", "gray-threshold:x"]) == 2
    assert CompileOptions().input_transform is None
