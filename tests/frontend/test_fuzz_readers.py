"""A short run of `tests.fuzz_readers` for each reader, on small files made here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests import pytorch_files
from tests.conftest import ALL, ROOT
from tests.fuzz_readers import READERS, fuzz
from tests.mxnet_files import Net, small
from tests.qonnx_models import Builder

MUTATIONS, PARTS = (500, 20) if os.environ.get(ALL) else (60, 1)


def _onnx(folder: Path) -> list[list[Path]]:
    rng = np.random.default_rng(0)
    make = Builder()
    data = make.quant("x", 0.5, 4, signed=0, zero=1.0)
    weight = make.quant(rng.standard_normal((6, 3, 3, 3)), rng.random((6, 1, 1, 1)), 2, narrow=1)
    y = make.add("Conv", data, weight, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    y = make.custom("MultiThreshold", y, rng.random((6, 3)), data_layout="NCHW", out_dtype="UINT2")
    y = make.custom("Trunc", make.add("GlobalAveragePool", y), 1.0, 0.0, 8.0, 4.0)
    path = folder / "qonnx.onnx"
    path.write_bytes(make.model((1, 3, 8, 8), y, 4, annotation="UINT4").SerializeToString())
    linear = folder / "linear.onnx"
    weight = rng.integers(-8, 8, (6, 4)).astype(helper.tensor_dtype_to_np_dtype(TensorProto.INT4))
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "t"], ["v"], axis=0, block_size=2),
        helper.make_node("MatMul", ["d", "v"], ["y"]),
    ]
    constants = {"s": np.float32(0.1), "z": np.int8(1), "w": weight}
    constants["t"] = np.ones((3, 4), np.float32)
    stored = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in (("x", [2, 6]), ("y", None))
    ]
    opsets = [helper.make_opsetid("", 21)]
    graph = helper.make_graph(nodes, "linear", *ends, stored)
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    linear.write_bytes(proto.SerializeToString())
    return [[path], [linear], [ROOT / "examples" / "digits" / "digits.onnx"]]


def _mxnet(folder: Path) -> list[list[Path]]:
    nets = {word: small(word) for word in (32, 64)}
    nets["few-bit"] = Net(key="attrs")
    nets["few-bit"].layer(
        "QConvolution", "q", {"weight": np.ones((4, 2, 3, 3), np.float32)}, act_bit=2,
        weight_bit=3, kernel=(3, 3), num_filter=4, pad=(1, 1),
    )  # fmt: skip
    for net in nets.values():
        net.nodes[0][net.key] = {"__shape__": "(1, 2, 10, 10)"}
    releases = ("0.9", "0.11", "1.0")
    return [
        list(net.write(folder, f"net{name}", release))
        for (name, net), release in zip(nets.items(), releases, strict=True)
    ]


def _tflite(folder: Path) -> list[list[Path]]:
    files = ROOT / "tests" / "data" / "larq"
    return [[files / f"{name}.tflite"] for name in ("one_relu6", "pool_same", "mnist", "options")]


def _pytorch(folder: Path) -> list[list[Path]]:
    return [[pytorch_files.write(name, folder)] for name in ("perceptron", "lines", "react")]


SEEDS: dict[str, Callable[[Path], list[list[Path]]]] = {
    "mxnet": _mxnet,
    "onnx": _onnx,
    "pytorch": _pytorch,
    "tflite": _tflite,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", SEEDS)
def test_reader_stays_calm(name: str, part: int, tmp_path: Path) -> None:
    seeds = SEEDS[name](tmp_path)
    for files in seeds:
        READERS[name].load(files[0])
    outcome = fuzz(READERS[name], seeds, mutations=MUTATIONS, seed=part, compile_every=25)
    assert not outcome.bad
    assert outcome.read
    assert outcome.refused


def test_every_reader_is_tried() -> None:
    assert set(SEEDS) == set(READERS)
