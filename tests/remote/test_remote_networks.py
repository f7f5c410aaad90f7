"""A deep network on a device: Bi-Real-18 on an image, binary layers and float ones of full size."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from benchmarks import networks
from tests import devices
from tests.devices import Server, succeeds
from tests.transformer_blocks import BLOCKS


@pytest.mark.slow
def test_bireal18(
    machine: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, artifact = tmp_path / "birealnet18.onnx", tmp_path / "birealnet18.bnncc"
    onnx.save(networks.birealnet18(), model)
    succeeds(capsys, "compile", model, "--target", devices.TARGETS[machine], "-o", artifact)
    where = ("--rpc", server.address, "--timeout", 300)
    result = json.loads(succeeds(capsys, "deploy", artifact, *where, "--repeat", 1, "--json"))
    assert result["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_transformers(
    name: str, machine: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, artifact = tmp_path / "block.onnx", tmp_path / "block.bnncc"
    onnx.save(BLOCKS[name](), model)
    succeeds(capsys, "compile", model, "--target", devices.TARGETS[machine], "-o", artifact)
    where = ("--rpc", server.address, "--timeout", 300)
    result = json.loads(succeeds(capsys, "verify", model, artifact, *where, "--json"))
    assert result["passed"]
