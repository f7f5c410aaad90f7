"""On a machine with a GPU: every kernel against its oracle, and a network against its model.

``python -m tests.cuda_gpu`` can run this file too, on an emulated GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

import bnncc
from bnncc import schedules
from bnncc.codegen import gpu, nvrtc, pipeline
from bnncc.runtime import cuda
from bnncc.schedules.cuda import binary
from bnncc.targets import catalog, gpus
from bnncc.topi_binary import reference
from bnncc.topi_binary.build import aliases, output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import Spec
from bnncc.verify import verify
from tests.binary_cases import make_inputs
from tests.devices import DIGITS
from tests.kernel_harness import same, small_integers
from tests.schedules.test_cuda_kernels import FEW, ORACLE, PLAIN, _fill_bits, generated, seed

pytestmark = pytest.mark.cuda
HERE = [name for name, t in catalog.CATALOG.items() if t.gpus and not gpus.missing(t.gpus)]
ENGINES = ("simt", "mma", "wgmma")


def built(specs: list[Spec], target: str) -> Any:
    """Compile one module with a kernel ``k0, k1, ...`` for each spec."""
    chosen = catalog.resolve(target)
    functions = {
        f"k{i}": schedules.schedule(define(spec), chosen).with_attr("global_symbol", f"k{i}")
        for i, spec in enumerate(specs)
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
        garbage = np.full(extents, 0x5A5A5A5A, "uint32").view(dtype)
        fresh.append(tvm.runtime.tensor(garbage, device))
        outputs.append(fresh[-1])
    function(*moved, *fresh)
    return [out.numpy() for out in outputs]


@pytest.fixture(autouse=True)
def runtime() -> None:
    if not nvrtc.available():
        pytest.skip("needs NVRTC: pip install 'bnncc[cuda]'")
    cuda.load_runtime()


@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("part", ["few", pytest.param("many", marks=pytest.mark.slow)])
def test_binary_layers(part: str, engine: str, target: str) -> None:
    if engine == "wgmma" and catalog.resolve(target).engine != "wgmma":
        pytest.skip(f"{target} has no wgmma")
    specs = list(FEW) if part == "few" else generated(220)
    orders = [binary.weight_order(spec, engine) for spec in specs]
    pairs = zip(specs, orders, strict=True)
    specs = [dataclasses.replace(spec, weight_order=order) for spec, order in pairs]
    library = built(list(specs), target)
    for number, spec in enumerate(specs):
        inputs = make_inputs(spec, seed(number))
        wanted = reference.binary_conv2d(spec, inputs)
        for mine, other in zip(run(library[f"k{number}"], spec, inputs), wanted, strict=True):
            np.testing.assert_array_equal(mine, other, err_msg=f"{spec}")


@pytest.mark.parametrize("target", HERE)
def test_other_kernels(target: str) -> None:
    library = built(list(PLAIN), target)
    for number, spec in enumerate(PLAIN):
        inputs = small_integers(spec, seed(number), batch=2)
        _fill_bits(spec, inputs)
        wanted = ORACLE[type(spec)](spec, inputs)
        same(run(library[f"k{number}"], spec, inputs), wanted)


@pytest.mark.parametrize("target", HERE)
def test_digits(target: str, tmp_path: Path) -> None:
    made = bnncc.compile(DIGITS / "digits.onnx", target=target)
    assert verify(DIGITS / "digits.onnx", made)["verdict"] == "right"


def test_there_are_targets_for_this_gpu() -> None:
    assert HERE
