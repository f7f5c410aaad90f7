"""Trained networks of QONNX's model zoo, from the folder that BNNCC_MODELS names."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

import bnncc
from bnncc.runtime.runner import random_inputs
from tests.qonnx_models import Executor

MODELS = os.environ.get("BNNCC_MODELS", "")
SAMPLES = 1000 if os.environ.get("BNNCC_TEST_ALL") else 30
NAMES = ("TFC_1W1A", "kwsmlp_w3a3", "unsw_nb15_mlp_w2a2")

pytestmark = pytest.mark.skipif(
    not MODELS, reason="BNNCC_MODELS names no folder of trained networks"
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("few_bit", ["auto", "bitplanes"])
@pytest.mark.parametrize("name", NAMES)
def test_trained_network(name: str, few_bit: str) -> None:
    pytest.importorskip("qonnx")
    path = Path(MODELS, f"{name}.onnx")
    artifact = bnncc.compile(path, few_bit=few_bit)
    assert "float" not in [layer["kind"] for layer in artifact.manifest["report"]["layers"]]
    executor = Executor(onnx.load(path))
    for seed in range(SAMPLES):
        feeds = random_inputs(artifact.inputs, seed=seed)
        wanted = executor(feeds)
        for name, value in artifact.run(feeds).items():
            top = float(np.abs(wanted[name]).max())
            np.testing.assert_allclose(value, wanted[name], 0, 1e-4 * top)
