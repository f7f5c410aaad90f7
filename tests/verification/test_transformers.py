"""Blocks of binary and ternary transformers: their layers are found, and right on each target."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import bnncc
from benchmarks.transformer_networks import bitnet
from bnncc.codegen.c_network import archive
from bnncc.driver import compile_c
from bnncc.options import CompileOptions
from tests.codegen.test_c_network import unpacked
from tests.collection import oracle
from tests.portable_c import STRICT, needs_gcc
from tests.transformer_blocks import BLOCKS, KINDS, SHARED

pytestmark = pytest.mark.sampled(2)

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in BLOCKS]
SOME = [
    name if name in ("bit", "bitnet with a cache") else pytest.param(name, marks=pytest.mark.slow)
    for name in BLOCKS
]


@pytest.mark.parametrize("name", SOME)
def test_layers_are_found_and_right(name: str) -> None:
    model = BLOCKS[name]()
    artifact = bnncc.compile(model, threads=1)
    assert Counter(layer["kind"] for layer in artifact.report["layers"]) == KINDS[name]
    rng = np.random.default_rng(3)
    feeds = {
        i.name: np.full(i.shape, 9, i.dtype)
        if i.dtype == "int64"
        else rng.standard_normal(i.shape).astype(i.dtype)
        for i in artifact.inputs
    }
    verdict = oracle.compare(model, feeds, artifact.run(feeds))
    assert verdict.right or verdict.kind == "tie", verdict.text
    assert bnncc.verify(model, artifact)["passed"]


def test_heads_of_many_tokens_are_moved_by_no_kernel_but_that_of_keys() -> None:
    """Queries and results of attention are read and written where they are, also in batches."""
    model = bitnet(replace(SHARED, tokens=19), decoder=False)
    artifact = bnncc.compile(model, threads=1)
    names = [kernel["name"] for kernel in artifact.report["kernels"]]
    assert [name for name in names if "transpose" in name] == ["transpose"]
    assert sum("rotary" in name for name in names) == 2
    rng = np.random.default_rng(3)
    feeds = {i.name: rng.standard_normal(i.shape).astype(i.dtype) for i in artifact.inputs}
    verdict = oracle.compare(model, feeds, artifact.run(feeds))
    assert verdict.right or verdict.kind == "tie", verdict.text
    assert bnncc.verify(model, artifact)["passed"]


def test_a_gate_is_one_kernel() -> None:
    """Between linear layers, ``x * sigmoid(x)`` times another tensor is computed in one pass."""
    kernels = bnncc.compile(BLOCKS["bitnet encoder"](), threads=1).report["kernels"]
    (gate,) = (k for k in kernels if any(node.startswith("sigmoid") for node in k["nodes"]))
    assert gate["op"] == "elementwise"


@needs_gcc
@pytest.mark.parametrize("name", SLOW)
def test_portable_c_is_right(name: str, tmp_path: Path) -> None:
    made = compile_c(BLOCKS[name](), CompileOptions(target="c99"))
    folder = unpacked(archive(made.files), tmp_path)
    sources = sorted(path.name for path in folder.glob("*.c"))
    command = [str(shutil.which("gcc")), *STRICT, "-O2", *sources, "-lm", "-o", "check"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    done = subprocess.run(["./check"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert " 0 of " in done.stdout
