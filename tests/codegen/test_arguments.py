"""Kernels check what comes from outside, and trust what the network has made."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm.runtime.vm import VirtualMachine

import bnncc
from tests.collection.builder import Net


@pytest.fixture(scope="module")
def artifact() -> bnncc.Artifact:
    net = Net(seed="arguments")
    one, minus, zero = net.const(1.0), net.const(-1.0), net.const(0.0)
    value = net.input("x", [1, 32, 8, 8])
    for _ in range(4):
        signs = net.op("Where", net.op("GreaterOrEqual", value, zero), one, minus)
        weight = net.const(net.rng.choice([-1.0, 1.0], (32, 32, 3, 3)))
        value = net.op("Conv", signs, weight, pads=[1, 1, 1, 1])
    net.outputs.append(value)
    return bnncc.compile(net.model(), threads=1)


def _checked(library: bytes) -> set[str]:
    """Return the kernels whose signature is in the library: TVM's messages of checks show it."""
    return {name.decode() for name in re.findall(rb"(\w+)\(in0: Tensor\(", library)}


def test_only_the_first_and_the_last_kernel_check(artifact: bnncc.Artifact) -> None:
    calls = [kernel["name"] for kernel in artifact.report["kernels"]]
    assert len(set(calls)) > 2
    assert _checked(artifact.library) == {calls[0], calls[-1]}


@pytest.mark.parametrize("entry", ["main", "main_into"])
def test_tensors_from_outside(artifact: bnncc.Artifact, tmp_path: Path, entry: str) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(artifact.library)
    machine = VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
    image = np.random.default_rng(0).normal(size=(1, 32, 8, 8)).astype(np.float32)
    more = [np.empty_like(image)] if entry == "main_into" else []
    arrays = [image, *more]
    machine[entry](*map(tvm.runtime.tensor, arrays))
    for position, array in enumerate(arrays):
        for wrong in (array.astype(np.float64), array[:, :, :7]):
            given = [tvm.runtime.tensor(a) for a in arrays]
            given[position] = tvm.runtime.tensor(wrong)
            with pytest.raises(Exception, match=r"(?i)mismatch|shape|expect"):
                machine[entry](*given)
