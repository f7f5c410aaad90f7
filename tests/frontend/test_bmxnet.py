"""MXNet's and BMXNet's files: networks equal the NumPy oracle, and damage is one clear line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bnncc
from bnncc.cli import main as cli
from bnncc.errors import ShapeError, UsageError
from bnncc.frontend.formats import as_onnx
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.options import CompileOptions
from bnncc.targets.catalog import resolve
from bnncc.transform.pipeline import Compilation, to_physical
from tests import bmxnet_oracle
from tests.mxnet_files import DATA, FORMS, Net, packed, small

pytestmark = pytest.mark.sampled(2)

Array = np.ndarray[Any, Any]
MODELS = os.environ.get("BNNCC_MODELS")
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "test_images.npz"


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _imported(net: Net, folder: Path, data: Array, form: str = "0.9") -> tuple[Array, Array]:
    """Return what the imported network computes, and the oracle."""
    symbol, params = net.write(folder, form=form)
    graph = load(as_onnx(symbol, input_shapes={"data": data.shape}))
    made = evaluate(graph, {"data": data})[graph.outputs[0]]
    return made, bmxnet_oracle.run(symbol, params, data=data)[0]


def _close(made: Array, wanted: Array) -> None:
    assert made.shape == wanted.shape
    np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("bits", [32, 64])
def test_packed_files_compile_and_equal_the_oracle(bits: int) -> None:
    symbol = DATA / f"packed{bits}-symbol.json"
    artifact = bnncc.compile(symbol, input_shapes={"data": (2, 2, 10, 10)})
    data = _normal(bits, 2, 2, 10, 10)
    wanted, _ = bmxnet_oracle.run(symbol, DATA / f"packed{bits}-0000.params", data=data)
    _close(artifact.run({"data": data})["softmax_output"], wanted)
    kinds = {x["name"]: x["kind"] for x in artifact.report["layers"]}
    assert kinds == {"conv0": "float", "qconv": "binary", "qfc": "binary", "fc": "float"}
    kernels = [k["op"] for k in artifact.report["kernels"]]
    assert "bitwise_maxpool" in kernels  # nothing float between the binary layers
    assert "pool2d" not in kernels


def test_committed_files_are_what_the_writer_writes(tmp_path: Path) -> None:
    for bits in (32, 64):
        for made in small(bits).write(tmp_path, f"packed{bits}"):
            assert made.read_bytes() == (DATA / made.name).read_bytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", ["param", "attr", "attrs"])
def test_files_of_every_release_are_read(tmp_path: Path, form: str, key: str) -> None:
    net = Net(key=key)
    net.layer("QConvolution", "q", {"weight": _normal(0, 4, 8, 3, 3)}, kernel=(3, 3), num_filter=4)
    made, wanted = _imported(net, tmp_path, _normal(1, 1, 8, 5, 6), form)
    np.testing.assert_array_equal(made, wanted)


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"pad": (1, 1)},
        {"pad": (2, 0), "stride": (2, 1), "dilate": (1, 2)},
        {"num_group": 2},
        {"scaling_mode": "forward"},
        {"scaling_mode": "backward"},
        {"no_bias": False},
        {"no_bias": False, "scaling_mode": "forward", "pad": (1, 1)},
        {"gradient_update_mode": "ff", "workspace": 256, "cudnn_tune": "None"},
        {"act_bit": 2},
        {"act_bit": 3, "weight_bit": 2, "pad": (1, 1)},
        {"act_bit": 1, "weight_bit": 4, "pad": (1, 1)},
        {"act_bit": 32, "weight_bit": 1, "pad": (1, 1)},
        {"act_bit": 32, "weight_bit": 32, "no_bias": False},
        {"act_bit": 8, "weight_bit": 8},
    ],
)
def test_every_option_of_qconvolution(tmp_path: Path, attrs: dict[str, Any]) -> None:
    net = Net()
    weights = {"weight": _normal(0, 6, 8 // attrs.get("num_group", 1), 3, 3)}
    if not attrs.get("no_bias", True):
        weights["bias"] = _normal(1, 6)
    net.layer("QConvolution", "q", weights, kernel=(3, 3), num_filter=6, **attrs)
    data = _normal(2, 2, 8, 7, 9)
    data[0, :, 0] = 0  # sign(0) is +1, and so is the sign of the padding
    _close(*_imported(net, tmp_path, data))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_convolutions_with_stride_padding_and_dilation(
    tmp_path: Path, bits: int, bias: bool
) -> None:
    net = Net()
    weights = {"weight": packed(_normal(0, 5, 2 * bits, 3, 3), bits)}
    if bias:
        weights["bias"] = _normal(1, 5)
    net.layer("QConvolution", "q", weights, kernel=(3, 3), num_filter=5, stride=(2, 2),
              dilate=(2, 1), pad=(1, 2), no_bias=not bias, binarized_weights_only=True)  # fmt: skip
    _close(*_imported(net, tmp_path, _normal(2, 1, 2 * bits, 9, 8)))


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"no_bias": False},
        {"act_bit": 2, "weight_bit": 3, "no_bias": False},
        {"act_bit": 32, "weight_bit": 1},
    ],
)
def test_every_option_of_qfullyconnected(tmp_path: Path, attrs: dict[str, Any]) -> None:
    net = Net()
    weights = {"weight": _normal(0, 6, 40)}
    if not attrs.get("no_bias", True):
        weights["bias"] = _normal(1, 6)
    net.layer("QFullyConnected", "q", weights, num_hidden=6, **attrs)
    _close(*_imported(net, tmp_path, _normal(2, 3, 10, 2, 2)))


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("backward_only", [False, True])
def test_qactivation_rounds_halves_away_from_zero(
    tmp_path: Path, bits: int, backward_only: bool
) -> None:
    steps = 2**bits - 1
    halves = (np.arange(steps) + 0.5) / steps  # all of them ties
    near = np.nextafter(np.float32(0.5), np.float32(0)) / np.float32(steps)
    values = np.float32([*halves, *-halves, near, -1, 0, 1, 2]).reshape(1, -1, 1, 1)
    net = Net()
    net.layer("QActivation", "q", act_bit=bits, backward_only=backward_only)
    made, wanted = _imported(net, tmp_path, values)
    np.testing.assert_array_equal(made, np.float32(wanted))


def test_a_few_bit_network_compiles_exactly(tmp_path: Path) -> None:
    net = Net()
    net.layer("QConvolution", "q", {"weight": _normal(0, 20, 9, 3, 3)}, kernel=(3, 3), act_bit=2,
              weight_bit=2, num_filter=20, pad=(1, 1))  # fmt: skip
    net.batch_norm("bn", 20, 3)
    net.layer("QConvolution", "r", {"weight": _normal(1, 7, 20, 1, 1)}, kernel=(1, 1), act_bit=3,
              weight_bit=1, num_filter=7)  # fmt: skip
    symbol, params = net.write(tmp_path)
    data = _normal(5, 2, 9, 6, 6)
    wanted, _ = bmxnet_oracle.run(symbol, params, data=data)
    artifact = bnncc.compile(symbol, input_shapes={"data": data.shape})
    _close(artifact.run({"data": data})["r_output"], wanted)
    found = {x["name"]: (x["kind"], tuple(x["bits"])) for x in artifact.report["layers"]}
    assert found == {"q": ("few_bit", (2, 2)), "r": ("few_bit", (3, 1))}


@pytest.mark.parametrize(
    "attrs",
    [
        {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 0)},
        {"kernel": (3, 3), "stride": (2, 2), "pooling_convention": "full"},
        {"kernel": (2, 2), "pool_type": "avg", "stride": (2, 2), "pad": (1, 1)},
        {"kernel": (3, 3), "pool_type": "sum"},
        {"kernel": (7, 7), "pool_type": "avg", "global_pool": True},
        {"kernel": (1, 1), "pool_type": "sum", "global_pool": True},
        {"kernel": (1, 1), "pool_type": "max", "global_pool": True},
    ],
)
def test_poolings(tmp_path: Path, attrs: dict[str, Any]) -> None:
    net = Net()
    net.layer("Pooling", "p", **attrs)
    _close(*_imported(net, tmp_path, _normal(0, 2, 3, 8, 10)))


_ELEMENTWISE: list[tuple[str, dict[str, Any], Callable[[Array], Array]]] = [
    ("Activation", {"act_type": "softrelu"}, lambda x: np.log1p(np.exp(x))),
    ("Activation", {"act_type": "sigmoid"}, lambda x: 1 / (1 + np.exp(-x))),
    ("LeakyReLU", {}, lambda x: np.where(x > 0, x, 0.25 * x)),
    ("LeakyReLU", {"act_type": "elu", "slope": 0.5}, lambda x: np.where(x > 0, x, np.expm1(x) / 2)),
    ("_plus_scalar", {"scalar": 2}, lambda x: x + 2),
    ("_rminus_scalar", {"scalar": 2}, lambda x: 2 - x),
    ("_div_scalar", {"scalar": 4.0}, lambda x: x / 4),
    ("_rdiv_scalar", {"scalar": 4.0}, lambda x: 4 / x),
    ("_maximum_scalar", {"scalar": 0.1}, lambda x: np.maximum(x, 0.1)),
    ("_greater_scalar", {"scalar": 0.1}, lambda x: x > 0.1),
    ("clip", {"a_min": -0.5, "a_max": 1}, lambda x: np.clip(x, -0.5, 1)),
    ("round", {}, lambda x: np.trunc(x + np.copysign(0.5, x))),
    ("det_sign", {}, lambda x: np.where(x < 0, -1, 1)),
    ("_contrib_gradcancel", {"threshold": 1.0}, lambda x: x),
    ("Dropout", {"p": 0.5}, lambda x: x),
    ("square", {}, lambda x: x * x),
    ("transpose", {"axes": (0, 2, 3, 1)}, lambda x: x.transpose(0, 2, 3, 1)),
    ("Reshape", {"shape": (0, -1)}, lambda x: x.reshape(len(x), -1)),
    ("Pad", {"mode": "constant", "pad_width": (0, 0, 0, 0, 1, 2, 0, 1), "constant_value": -1},
     lambda x: np.pad(x, ((0, 0), (0, 0), (1, 2), (0, 1)), constant_values=-1)),
    ("mean", {"axis": (2, 3)}, lambda x: x.mean(axis=(2, 3))),
    ("sum", {"axis": 1, "exclude": True, "keepdims": True},
     lambda x: x.sum(axis=(0, 2, 3), keepdims=True)),
    ("slice_axis", {"axis": 1, "begin": 1, "end": "None"}, lambda x: x[:, 1:]),
    ("expand_dims", {"axis": 1}, lambda x: x[:, None]),
    ("softmax", {"axis": 1}, lambda x: np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)),
    ("UpSampling", {"scale": 2, "sample_type": "nearest", "num_args": 1},
     lambda x: x.repeat(2, 2).repeat(2, 3)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "attrs", "function"),
    _ELEMENTWISE,
    ids=[f"{k}-{op}" for k, (op, *_) in enumerate(_ELEMENTWISE)],
)
def test_ordinary_operators(
    tmp_path: Path, op: str, attrs: dict[str, Any], function: Callable[[Array], Array]
) -> None:
    net = Net(key="attrs")
    net.layer(op, "x", **attrs)
    symbol, _ = net.write(tmp_path)
    data = _normal(0, 2, 3, 4, 5)
    data[0, 0, 0] = [-1.5, -0.5, 0.5, 1.5, 2.5]
    graph = load(as_onnx(symbol, input_shapes={"data": data.shape}))
    made = evaluate(graph, {"data": data})[graph.outputs[0]]
    _close(made, np.asarray(function(data), np.float32))


def test_operators_with_parameters_and_several_outputs(tmp_path: Path) -> None:
    net, data = Net(), _normal(0, 2, 6, 3, 3)
    slope, weight, bias = _normal(1, 6), _normal(2, 6, 3, 2, 2), _normal(3, 3)
    net.layer("LeakyReLU", "p", {"gamma": slope}, act_type="prelu")
    parts = net.layer("SliceChannel", "s", num_outputs=2)
    net.layer("Concat", "c", inputs=[parts, net.tip], dim=1, num_args=2)
    net.nodes[-1]["inputs"] = [[parts, 1, 0], [parts, 0, 0]]
    net.layer("Deconvolution", "d", {"weight": weight, "bias": bias}, kernel=(2, 2), num_filter=3,
              stride=(2, 2), no_bias=False)  # fmt: skip
    symbol, _ = net.write(tmp_path)
    graph = load(as_onnx(symbol, input_shapes={"data": data.shape}))
    made = evaluate(graph, {"data": data})[graph.outputs[0]]
    x = np.where(data > 0, data, data * slope.reshape(-1, 1, 1))
    x = np.concatenate([x[:, 3:], x[:, :3]], axis=1)
    wanted = np.einsum("nchw,cokl->nohkwl", x, weight).reshape(2, 3, 6, 6)
    _close(made, wanted + bias.reshape(-1, 1, 1))


def test_gluon_networks_of_bmxnet_2_are_binary(tmp_path: Path) -> None:
    """Signs of data and weights, padding by -1, and an offset written as plain operators."""
    net = Net(key="attrs")
    net.nodes[0]["attrs"] = {"__shape__": "(1, 5, 7, 7)", "__dtype__": "0"}
    net.layer("_contrib_gradcancel", "cancel", threshold=1.0)
    net.layer("det_sign", "sign")
    net.layer("Pad", "pad", mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 1, 1), constant_value=-1)
    data = net.tip
    net.params["q_weight"] = _normal(0, 4, 5, 3, 3)
    weight = net.layer("det_sign", "wsign", inputs=[net.variable("q_weight")])
    net.layer("Convolution", "fwd", inputs=[data, weight], kernel=(3, 3), num_filter=4,
              no_bias=True, layout="NCHW", num_group=1)  # fmt: skip
    net.layer("_plus_scalar", "plus", scalar=45)
    net.layer("_div_scalar", "div", scalar=2)
    symbol, _ = net.write(tmp_path, form="1.0")
    artifact = bnncc.compile(symbol)
    assert [x["kind"] for x in artifact.report["layers"]] == ["binary"]
    x = _normal(1, 1, 5, 7, 7)
    padded = np.pad(np.where(x < 0, -1, 1), ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-1)
    signs = np.where(net.params["q_weight"] < 0, -1, 1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    wanted = (np.einsum("nchwkl,ockl->nohw", windows, signs) + 45) / 2
    np.testing.assert_array_equal(artifact.run({"data": x})["div_output"], np.float32(wanted))


def test_the_command_line_finds_parameters_and_names_the_artifact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    symbol, params = small(32).write(tmp_path, "lenet")
    monkeypatch.chdir(tmp_path)
    shape = ["--input-shape", "data:1x2x10x10"]
    assert cli.main(["compile", str(symbol), *shape, "--threads", "1"]) == 0
    artifact = tmp_path / "lenet.native.bnncc"
    assert cli.main(["verify", str(symbol), str(artifact)]) == 0
    moved = params.rename(tmp_path / "elsewhere.params")
    assert cli.main(["verify", str(symbol), str(artifact)]) == 2
    assert "no lenet-0000.params" in capsys.readouterr().err
    assert cli.main(["verify", str(symbol), str(artifact), "--params", str(moved)]) == 0
    for name in ("lenet-0001.params", "lenet-0002.params"):
        (tmp_path / name).write_bytes(moved.read_bytes())
    assert cli.main(["compile", str(symbol), *shape]) == 2
    assert "2 parameter files lie beside it, lenet-0001.params" in capsys.readouterr().err


def test_shapes_follow_from_weights_or_are_asked_for(tmp_path: Path) -> None:
    net = Net()
    net.layer("Activation", "a", act_type="relu")
    net.layer("QFullyConnected", "q", {"weight": packed(_normal(0, 4, 64), 32, by_word=True)},
              num_hidden=4, binarized_weights_only=True)  # fmt: skip
    graph = load(as_onnx(net.write(tmp_path)[0]))
    assert graph.types["data"].shape == ("N", 64)
    symbol, _ = small(64).write(tmp_path)
    with pytest.raises(ShapeError, match="input `data`: its height and width") as caught:
        as_onnx(symbol)
    assert "--input-shape data:1x2xHxW" in str(caught.value.hint)
    with pytest.raises(UsageError, match="no input is called `image`; the model has `data`"):
        as_onnx(symbol, input_shapes={"image": (1, 2, 10, 10)})


# ---- BMXNet's own trained networks ---------------------------------------------------------------

_TRAINED = [
    ("binarized_mnist_64bit", "0001", (1, 28, 28), 1, 206_511),
    ("binarized_cifar10-resnet18-64bit", "0000", (3, 32, 32), 255, 1_490_426),
]


@pytest.mark.skipif(not MODELS, reason="BNNCC_MODELS names no folder of trained networks")
@pytest.mark.parametrize(("name", "epoch", "image", "top", "size"), _TRAINED)
def test_trained_networks(
    name: str, epoch: str, image: tuple[int, ...], top: int, size: int
) -> None:
    symbol = Path(str(MODELS)) / f"{name}-symbol.json"
    artifact = bnncc.compile(symbol, input_shapes={"data": (1, *image)})
    stored = artifact.report["bytes"]
    assert stored["binary"] + stored["float"] <= size
    floats = [x["name"] for x in artifact.report["layers"] if x["kind"] != "binary"]
    assert len(floats) == 2  # the first and the last
    params = Path(str(MODELS)) / f"{name}-{epoch}.params"
    for seed in range(3 if image[0] == 1 else 1):
        data = (np.random.default_rng(seed).random((1, *image)) * top).astype(np.float32)
        wanted, _ = bmxnet_oracle.run(symbol, params, data=data)
        made = artifact.run({"data": data})["softmax_output"]
        np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-6)
    if image[0] == 1:
        assert _share_of_digits_read(artifact) > 0.5  # scans of 8x8 pixels, enlarged


@pytest.mark.skipif(not MODELS, reason="BNNCC_MODELS names no folder of trained networks")
@pytest.mark.parametrize("target", ["x86-64-v3", "arm64"])
@pytest.mark.parametrize(("name", "epoch", "image", "top", "size"), _TRAINED)
def test_constants_of_other_targets_take_no_more_than_the_file(
    name: str, epoch: str, image: tuple[int, ...], top: int, size: int, target: str
) -> None:
    symbol = Path(str(MODELS)) / f"{name}-symbol.json"
    graph = load(as_onnx(symbol, input_shapes={"data": (1, *image)}))
    options = CompileOptions(target=target)
    physical = to_physical(graph, Compilation(options, resolve(target)))
    assert sum(value.nbytes for value in physical.constants.values()) <= size


def _share_of_digits_read(artifact: bnncc.Artifact) -> float:
    held = np.load(DIGITS)
    images, labels = held["images"][:100, 0], held["labels"][:100]
    at = np.clip((np.arange(20) + 0.5) * 8 / 20 - 0.5, 0, 7)
    low = np.minimum(at.astype(int), 6)
    weights = np.zeros((20, 8), np.float32)
    weights[np.arange(20), low], weights[np.arange(20), low + 1] = low + 1 - at, at - low
    large = np.pad(weights @ images @ weights.T, ((0, 0), (4, 4), (4, 4)))[:, None, None]
    made = [artifact.run({"data": x})["softmax_output"].argmax() for x in large]
    return float(np.mean(made == labels))
