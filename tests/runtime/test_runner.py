"""Timing networks and kernels."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bnncc.errors import UsageError
from bnncc.runtime import runner
from bnncc.runtime.manifest import TensorInfo
from bnncc.runtime.session import ALIGNMENT
from tests.tiny import tiny


def test_bench() -> None:
    artifact = tiny()
    result = runner.bench(artifact, repeat=20)
    network = result["network"]
    assert 0 < network["min_us"] <= network["p10_us"] <= network["p50_us"]
    assert network["p50_us"] == network["median_us"] <= network["p90_us"] <= network["p99_us"]
    assert network["macs"] == 64
    matmul, add = result["kernels"]
    assert (matmul["name"], matmul["layers"], matmul["macs"]) == ("matmul", ["mm"], 64)
    assert 0 < matmul["min_us"] <= matmul["median_us"] < 1000
    rate = 64 / (matmul["median_us"] * 1e-6)
    assert matmul["macs_per_second"] == pytest.approx(rate, rel=0.1)
    assert (add["macs"], add["macs_per_second"], add["layers"]) == (0, 0.0, [])
    assert json.loads(json.dumps(result)) == result
    lines = runner.bench_text(result).splitlines()
    heads = " ".join(lines[0].split())
    assert heads == "kernel min us median us MMAC GMAC/s layers or nodes"
    assert lines[2].endswith("  bias +1")
    assert lines[1].startswith("matmul")


def test_threads_are_those_that_kernels_use() -> None:
    artifact = tiny()
    artifact.manifest["options"]["threads"] = None
    assert runner.bench(artifact, repeat=1)["threads"] == artifact.session().use_threads()
    artifact.manifest["options"]["threads"] = 1
    assert runner.bench(artifact, repeat=1)["threads"] == 1


def test_bench_refuses_nonsense() -> None:
    with pytest.raises(UsageError, match="repeat is 0"):
        runner.bench(tiny(), repeat=0)
    with pytest.raises(UsageError, match="threads is 0"):
        runner.bench(tiny(), threads=0)


def test_random_inputs() -> None:
    infos = [
        TensorInfo("f", ("n", 1000), "float32"),
        TensorInfo("b", (4,), "bool"),
        TensorInfo("u", (5000,), "uint8"),
        TensorInfo("s", (5000,), "int8"),
        TensorInfo("i", (5000,), "int64"),
        TensorInfo("h", (2,), "float16"),
    ]
    made = runner.random_inputs(infos, sizes={"n": 2})
    for info in infos:
        assert made[info.name].dtype == info.dtype
        assert made[info.name].ctypes.data % ALIGNMENT == 0
    assert made["f"].shape == (2, 1000)
    assert 0.9 < made["f"].std() < 1.1
    assert made["u"].min() == 0
    assert made["u"].max() == 255
    assert made["s"].min() == -128
    assert made["s"].max() == 127
    again = runner.random_inputs(infos, sizes={"n": 2})
    assert all(np.array_equal(made[k], again[k]) for k in made)
    other = runner.random_inputs(infos, sizes={"n": 2}, seed=1)
    assert not np.array_equal(made["f"], other["f"])
