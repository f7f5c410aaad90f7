"""Data that may hold exact zeros: the function for those without any, and the choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm_ffi
from tvm import ir, s_tir, tirx

from bnncc.schedules import schedule, zeros
from bnncc.schedules.binary_words import ZEROS
from bnncc.targets import catalog
from bnncc.topi_binary import reference
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Step, zero_planes
from bnncc.tuning.cases import make, run_time_weights
from tests import definition_cases, kernel_harness
from tests.kernel_harness import HERE
from tests.topi_binary.test_definitions import call

pytestmark = pytest.mark.sampled(3)

TERNARY = replace(definition_cases.WORDS, ternary=True)
DENSE = BinaryConv2d(5, 1, 1, 70, 37, (1, 1), rank=2, ternary=True, steps=(Step("store"),))
BOTH = replace(definition_cases.MATRIX, ternary=True, weight_zeros=True)
AND = replace(definition_cases.MATRIX, mode="and", weight_zeros=True)
SPECS = [TERNARY, replace(TERNARY, channels=33, pad_value=1), DENSE, BOTH, AND]


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_left_of_planes_without_zeros(spec: BinaryConv2d) -> None:
    planes, func = zero_planes(spec), define(spec)
    for made, expected in ((func, True), (zeros.without(func, planes, ZEROS), False)):
        loads: list[ir.TensorLoad] = []
        sums = [b for b in _blocks(made) if b.name_hint.endswith("_add") and "sum" in b.name_hint]
        for block in sums:
            tvm_ffi.structural_walk(block.body, (ir.TensorLoad, loads.append), order="post")
            assert len(block.reads) == (3 + len(planes) * (spec.mode == "xor") if expected else 3)
        assert len(loads) == len(sums) * len(sums[0].reads)


def _blocks(func: tirx.PrimFunc) -> list[s_tir.SBlock]:
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, found.append), order="post")
    return found


def _inputs(spec: BinaryConv2d, seen: bool) -> list[np.ndarray]:
    """Return inputs with some zeros, or none."""
    inputs, rng = make(spec).inputs, np.random.default_rng(0)
    if spec.ternary:  # the lowest bit of a word is always one of a channel
        inputs[1] = rng.integers(0, 2, inputs[1].shape, dtype=np.uint32) * seen
    if spec.weight_zeros:
        shape = (spec.n, spec.out_channels, spec.channels)
        none = (rng.random(shape) < 0.2) & seen
        inputs[1 + spec.ternary :] = [
            *run_time_weights(spec, none | (rng.random(shape) < 0.5), none),
            *inputs[3 + spec.ternary + (spec.mode == "and") :],
        ]
    return inputs


@pytest.mark.parametrize("target", sorted({"native", "x86-64-v4"} & {*HERE, "native"}))
@pytest.mark.parametrize("threads", [1, 2])
def test_data_with_zeros_and_without_count_alike(target: str, threads: int) -> None:
    chosen = catalog.resolve(target)
    made = {f"k{i}": schedule(define(spec), chosen, threads) for i, spec in enumerate(SPECS)}
    library = kernel_harness.build(made, chosen)
    for name, spec in zip(made, SPECS, strict=True):
        for seen in (False, True):
            inputs = _inputs(spec, seen)
            wanted = reference.binary_conv2d(spec, inputs)
            for found, expected in zip(call(library[name], spec, inputs), wanted, strict=True):
                assert (found == expected).all(), (spec, seen)
