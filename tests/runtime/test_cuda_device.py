"""On a machine with a GPU: every kernel against its oracle, and networks against their models.

``python -m tests.cuda_gpu`` can run this file too, on an emulated GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

import bnncc
from bnncc import schedules
from bnncc.agreement import verify
from bnncc.codegen import gpu, nvrtc, pipeline
from bnncc.runtime import cuda
from bnncc.targets import catalog, gpus
from bnncc.topi_binary.build import aliases, output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import Spec
from tests import cuda_cases
from tests.cuda_cases import Odd
from tests.devices import DIGITS

pytestmark = pytest.mark.cuda
HERE = [name for name, t in catalog.CATALOG.items() if t.gpus and not gpus.missing(t.gpus)]
PARTS = 8
MANY = 220
"""Layers of the operators' tests, of each engine, among the kernels that slow tests run."""


def built(odds: list[Odd], target: str) -> Any:
    """Compile one module with a kernel ``k0, k1, ...`` for each of `odds`."""
    chosen = catalog.resolve(target)
    functions = {
        f"k{i}": schedules.schedule(define(odd.spec), chosen, point=odd.point).with_attr(
            "global_symbol", f"k{i}"
        )
        for i, odd in enumerate(odds)
    }
    with gpu.compiling(chosen):
        return tvm.compile(tvm.IRModule(functions), target=pipeline.tvm_target(chosen))


def run(function: Any, spec: Spec, inputs: list[np.ndarray]) -> list[np.ndarray]:
    n, device = inputs[0].shape[0], tvm.cuda(0)
    moved = [tvm.runtime.tensor(np.ascontiguousarray(x), device) for x in inputs]
    outputs, fresh = [], []
    for (shape, dtype), over in zip(output_types(spec), aliases(spec), strict=True):
        if over >= 0:
            outputs.append(moved[over])
            continue
        extents = [n if isinstance(d, str) else d for d in shape]
        garbage = np.empty(extents, dtype)
        garbage.view("uint8")[...] = 0x5A
        fresh.append(tvm.runtime.tensor(garbage, device))
        outputs.append(fresh[-1])
    function(*moved, *fresh)
    return [out.numpy() for out in outputs]


@pytest.fixture(autouse=True)
def runtime() -> None:
    if not nvrtc.available():
        pytest.skip("needs NVRTC: pip install 'bnncc[cuda]'")
    cuda.load_runtime()


def check(odds: list[Odd], target: str) -> None:
    library = built(odds, target)
    wrong = []
    for number, odd in enumerate(odds):
        case = odd.case()
        got = run(library[f"k{number}"], odd.spec, case.inputs)
        if difference := case.difference(got, odd.tolerance):
            wrong.append(f"{odd}: {difference}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("part", range(PARTS))
def test_kernels(part: int, target: str) -> None:
    check(cuda_cases.odd(catalog.resolve(target))[part::PARTS], target)


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_kernels(part: int, target: str) -> None:
    found = cuda_cases.odd(catalog.resolve(target), drawn=MANY)
    check([odd for odd in found if odd.name.startswith("binary-")][part::PARTS], target)


@pytest.mark.slow
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("number", range(cuda_cases.NETWORKS))
def test_networks(number: int, target: str) -> None:
    model = cuda_cases.network(number)
    assert verify(model, bnncc.compile(model, target=target))["verdict"] == "pass"


@pytest.mark.parametrize("target", HERE)
def test_digits(target: str, tmp_path: Path) -> None:
    made = bnncc.compile(DIGITS / "digits.onnx", target=target)
    assert verify(DIGITS / "digits.onnx", made)["verdict"] == "pass"


def test_there_are_targets_for_this_gpu() -> None:
    assert HERE
