"""Networks whose code LLVM's vectorizer of scalar code (SLP) breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

import bnncc
from bnncc.codegen import pipeline
from bnncc.driver import compile_c
from bnncc.options import CompileOptions
from bnncc.targets.catalog import resolve
from tests.kernel_harness import HERE
from tests.spellings import Network

TARGET = "x86-64-v3"


def attention() -> Any:
    """Return the softmax of a transformer with 4 heads and 3 tokens, as Canine has one."""
    g = Network()
    return g.model(g("Softmax", "x", axis=-1), [1, 4, 3, 3])


def test_a_network_is_compiled_without_it() -> None:
    made = bnncc.compile(attention(), target=TARGET, threads=1)
    if TARGET not in HERE:
        return
    x = np.random.default_rng(0).normal(size=(1, 4, 3, 3)).astype(np.float32)
    (y,) = made.run({"x": x}).values()
    power = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(y, power / power.sum(-1, keepdims=True), rtol=1e-6)


def test_so_is_one_in_c() -> None:
    assert compile_c(attention(), CompileOptions(target=resolve(TARGET), threads=1)).files


def test_other_errors_pass() -> None:
    tried = []

    def build(machine: tvm.target.Target, message: str) -> list[Any]:
        tried.append(list(machine.attrs.get("cl-opt", [])))
        if len(tried) == 1:
            raise tvm.error.InternalError(message)
        return tried

    broken = "LLVM module verification failed with the following errors"
    target = resolve(TARGET)
    assert pipeline.compiled(target, lambda machine: build(machine, broken)) == [
        [],
        pipeline.NO_SLP["cl-opt"],
    ]
    tried.clear()
    with pytest.raises(tvm.error.InternalError, match="no register"):
        pipeline.compiled(target, lambda machine: build(machine, "no register"))
