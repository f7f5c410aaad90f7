"""Kernels with C's calling convention, in an emulated processor and in Node, by the oracle."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bnncc import schedules
from bnncc.codegen import bare, c_folder
from bnncc.codegen.link import link
from bnncc.codegen.pipeline import tvm_target
from bnncc.records.workload import Workload
from bnncc.targets import catalog
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import reference
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, BitwiseMaxPool, Conv2d, Elementwise, Spec, Step
from bnncc.tuning.cases import make
from tests import binary_cases, definition_cases, node
from tests.c_programs import skip_if_emulator_failed
from tests.kernel_harness import (
    EMULATED,
    IN_NODE,
    clear_tails,
    same,
    small_integers,
    with_outputs,
)
from tests.schedules import test_bits_kernels, test_float_kernels

pytestmark = pytest.mark.sampled(6)

EXAMPLES = 50 if os.environ.get("BNNCC_TEST_ALL") else 3


HERE = Path(__file__).resolve().parent
COMMAND, EMULATOR = c_folder.compiler(catalog.CATALOG["riscv64gcv"])
COMPILER = COMMAND.split()[0]
RISCV = pytest.param(
    "riscv64gcv",
    marks=pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR.split()[0])),
        reason=f"needs {COMPILER} and qemu-riscv64 (packages gcc-riscv64-linux-gnu, "
        "libc6-dev-riscv64-cross, qemu-user)",
    ),
)


@pytest.fixture(params=[EMULATED[-1], RISCV, *IN_NODE])
def target(request: pytest.FixtureRequest) -> TargetSpec:
    return catalog.CATALOG[request.param]


generated = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def fixed(spec: Any) -> Any:
    """Return `spec` with 2 for a symbolic batch, as there is no shape at run time."""
    return spec if isinstance(spec.n, int) else dataclasses.replace(spec, n=2)


def run(spec: Spec, inputs: list[np.ndarray], target: TargetSpec) -> list[np.ndarray]:
    """Compile, link and call a kernel; its outputs start as garbage."""
    functions = {"kernel": schedules.schedule(define(spec), target, 1)}
    return with_outputs(spec, inputs, lambda arrays, _: _called(functions, arrays, target))


def _called(functions: dict[str, Any], arrays: list[np.ndarray], target: TargetSpec) -> None:
    if target.arch == "wasm32":
        with node.Module(functions, target) as module:
            module.call("kernel", arrays)
        return
    content, scratch, *_ = bare.build(functions, tvm_target(target))
    room = np.zeros(max(64, scratch["kernel"]), np.uint8)
    if target.arch == "riscv64":
        _as_program(content, [*arrays, room])
        return
    from bnncc.codegen.emulator import Library

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernels.o").write_bytes(content)
        link(Path(folder), ["kernels.o"], "kernels.so", triple=target.triple)
        library = Library(Path(folder, "kernels.so").read_bytes())
    library.call_bare("kernel", [*arrays, room])


def _as_program(content: bytes, arrays: list[np.ndarray]) -> None:
    """Call a kernel in a program of its own, in an emulator."""
    sizes = np.array([len(arrays), *(array.nbytes for array in arrays)], np.uint32)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernels.o").write_bytes(content)
        place = Path(folder, "tensors.bin")
        place.write_bytes(b"".join(a.tobytes() for a in (sizes, *arrays)))
        sources = (str(HERE / "bare_main.c"), "kernels.o", "-lm", "-o", "run")
        subprocess.run([COMPILER, "-static", *sources], cwd=folder, check=True, timeout=300)
        command = [*EMULATOR.split(), "./run", "tensors.bin"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        skip_if_emulator_failed(done.stderr)
        assert done.returncode == 0, done.stderr
        made = place.read_bytes()[sizes.nbytes :]
    for array in arrays:
        array[...] = np.frombuffer(made, array.dtype, array.size).reshape(array.shape)
        made = made[array.nbytes :]


def check_binary(spec: BinaryConv2d, target: TargetSpec) -> None:
    spec = schedules.with_weight_order(fixed(spec), target)
    inputs = binary_cases.make_inputs(spec, np.random.default_rng(0))
    same(run(spec, inputs, target), reference.binary_conv2d(spec, inputs))


@generated
@given(large=st.booleans(), ragged=st.booleans(), data=st.data())
def test_binary_convolution(
    target: TargetSpec, large: bool, ragged: bool, data: st.DataObject
) -> None:
    check_binary(data.draw(binary_cases.specs(large, ragged)), target)


@generated
@given(large=st.booleans(), ragged=st.booleans(), data=st.data())
def test_binary_dense(target: TargetSpec, large: bool, ragged: bool, data: st.DataObject) -> None:
    spec = data.draw(binary_cases.dense(large, ragged))
    check_binary(dataclasses.replace(spec, steps=data.draw(binary_cases.epilogues())), target)


@generated
@given(spec=test_bits_kernels.pools(), seed=st.integers(0, 99))
def test_bitwise_pool(target: TargetSpec, spec: BitwiseMaxPool, seed: int) -> None:
    spec = fixed(spec)
    arrays = small_integers(spec, np.random.default_rng(seed))
    inputs = [clear_tails(x, spec.channels) for x in arrays]
    same(run(spec, inputs, target), reference.bitwise_maxpool(spec, inputs))


@generated
@given(spec=test_float_kernels.elementwises(), zero=st.booleans(), seed=st.integers(0, 99))
def test_bitpack(target: TargetSpec, spec: Elementwise, zero: bool, seed: int) -> None:
    spec = dataclasses.replace(
        fixed(spec), from_bits=False, ternary=False, mode="xor", steps=(Step("bits", zero=zero),)
    )
    inputs = small_integers(spec, np.random.default_rng(seed))
    same(run(spec, inputs, target), reference.elementwise(spec, inputs))


@generated
@given(spec=test_float_kernels.convs(), seed=st.integers(0, 99))
def test_float_convolution(target: TargetSpec, spec: Conv2d, seed: int) -> None:
    spec = fixed(spec)
    inputs = small_integers(spec, np.random.default_rng(seed))
    with np.errstate(all="ignore"):
        wanted = reference.conv2d(spec, inputs)
    same(run(spec, inputs, target), wanted)


CASES = [
    spec
    for spec in (*definition_cases.SPECS, *definition_cases.LONG)
    if not (isinstance(spec, Conv2d) and spec.packed > 1)  # for instructions of x86
]
SAMPLE = {type(spec): spec for spec in CASES[: -len(definition_cases.LONG)]}
"""One case of each kind."""


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=[] if spec in SAMPLE.values() else pytest.mark.slow)
        for spec in CASES
    ],
    ids=lambda spec: Workload.of(spec).name,
)
def test_every_case(spec: Spec, target: TargetSpec) -> None:
    spec = fixed(spec)
    if isinstance(spec, BinaryConv2d):
        spec = schedules.with_weight_order(spec, target)
    case = make(spec)
    try:
        made = run(spec, case.inputs, target)
    except RuntimeError as error:
        if str(error) == "it called nearbyintf":
            pytest.skip(f"{target.name} rounds by C's library, which is not emulated")
        raise
    assert case.difference(made) == ""
