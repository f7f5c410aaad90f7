"""Compile one kernel and run it on NumPy arrays."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tvm

from bnncc import schedules
from bnncc.codegen import memory
from bnncc.codegen.pipeline import tvm_target
from bnncc.targets import catalog
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.build import aliases, input_types, output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import Conv2d, FewBitConv2d, Spec
from bnncc.tuning.level_cases import operands
from bnncc.verification.confirm import runs_here
from tests import amx_emulator, node

ALL = bool(os.environ.get("BNNCC_TEST_ALL"))
HERE = [
    t.name
    for t in catalog.CATALOG.values()
    if t.kind == "llvm" and runs_here(t) and (ALL or "amx_tile" not in t.features)
]
"""Targets that this machine runs; tiles, which others share all other code with, are `TILES`."""

CAN_EMULATE = (
    all(importlib.util.find_spec(name) for name in ("unicorn", "elftools"))
    and (shutil.which("ld.lld") or importlib.util.find_spec("ziglang")) is not None
)
EMULATED = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not CAN_EMULATE, reason="needs unicorn, pyelftools and ld.lld or ziglang"
        ),
    )
    for name in ("arm64", "arm64-dotprod", "armv7")
    if name not in HERE
]
"""Targets whose kernels run in an emulated processor."""

IN_NODE = [pytest.param(name, marks=node.needs_node) for name in ("wasm32", "wasm32-simd128")]
"""Targets whose kernels run in Node."""

TILES = ["x86-64-v4-amx"] if "x86-64-v4-vpopcntdq" in HERE else []
"""Targets whose tile instructions `build` emulates, where the processor has none."""

TARGETS = [*HERE, *EMULATED[:1]]
"""Targets that every operator is tested on."""

FLOATS_HERE = [t for t in HERE if t != "x86-64-v4" or "x86-64-v4-vpopcntdq" not in HERE]
"""Those of `HERE` that differ for float kernels: VPOPCNTDQ only counts bits."""

FLOAT_TARGETS = [*FLOATS_HERE, *EMULATED[:1]]
"""Targets that float operators are tested on."""


def with_two_threads(function: Callable[[], object]) -> None:
    """Call a function whose kernels two threads share; TVM takes one on some machines with two."""

    def configured() -> object:
        tvm.get_global_func("runtime.config_threadpool")(1, 2)
        assert tvm.get_global_func("runtime.NumThreads")() == 2
        return function()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as alone:
        patch.setenv("TVM_NUM_THREADS", "2")
        alone.submit(configured).result()  # its thread has a pool of its own


def build(functions: dict[str, Any], target: TargetSpec) -> Any:
    """Compile scheduled functions: to be called by name, here or in an emulated processor."""
    if "amx_int8" in target.features:
        amx_emulator.load()
    elif target.arch == "wasm32":
        return node.Module(functions, target)
    elif not runs_here(target):
        from bnncc.codegen.emulator import Module

        return Module(functions, target)
    named = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    with memory.lowering():
        return tvm.compile(
            tvm.IRModule(named), target=tvm_target(target), tir_pipeline=memory.PIPELINE
        )


@functools.lru_cache(maxsize=256)
def compiled(spec: Spec, target: str, threads: int) -> Any:
    chosen = catalog.resolve(target)
    func = schedules.schedule(define(spec), chosen, threads)
    return build({"main": func}, chosen)


def run_kernel(
    spec: Spec, inputs: list[np.ndarray], target: str, batch: int = 1, threads: int = 1
) -> list[np.ndarray]:
    """Return the outputs; they start as garbage, so that what is not written shows."""
    library = compiled(spec, target, threads)
    outputs = []
    for shape, dtype in output_types(spec):
        extents = [batch if isinstance(d, str) else d for d in shape]
        outputs.append(tvm.runtime.tensor(np.full(extents, 0x5A5A5A5A, "uint32").view(dtype)))
    library["main"](*[tvm.runtime.tensor(np.ascontiguousarray(x)) for x in inputs], *outputs)
    return [out.numpy() for out in outputs]


def with_outputs(
    spec: Spec, inputs: Sequence[np.ndarray], call: Callable[[list[np.ndarray], int], None]
) -> list[np.ndarray]:
    """Call a kernel on copies; outputs start as garbage, so that what is not written shows."""
    given = [np.array(x, order="C") for x in inputs]
    batch = given[0].shape[0]
    outputs, fresh = [], []
    for (shape, dtype), over in zip(output_types(spec), aliases(spec), strict=True):
        if over >= 0:
            outputs.append(given[over])
            continue
        extents = [batch if isinstance(d, str) else d for d in shape]
        outputs.append(np.full(extents, 0x5A5A5A5A, "uint32").view(dtype))
        fresh.append(outputs[-1])
    call([*given, *fresh], batch)
    return outputs


def small_integers(spec: Spec, rng: np.random.Generator, batch: int = 1) -> list[np.ndarray]:
    """Return inputs so small that float32 sums of products of them are exact in any order.

    Levels and weights have the bits that `spec` says.
    """
    arrays: list[np.ndarray] = []
    if isinstance(spec, FewBitConv2d):
        arrays += operands(spec, batch if isinstance(spec.n, str) else spec.n, rng)
    for number, (shape, dtype) in enumerate(input_types(spec)[len(arrays) :]):
        extents = [batch if isinstance(d, str) else d for d in shape]
        if dtype == "uint32":
            arrays.append(rng.integers(0, 2**32, extents, dtype=np.uint32))
        elif dtype == "uint8":
            arrays.append(rng.integers(0, 256, extents, dtype=np.uint8))
        elif isinstance(spec, Conv2d) and number == 1:
            depth = spec.channels // spec.groups
            weight = rng.integers(-3, 4, (spec.out_channels, *spec.kernel, depth))
            arrays.append(layout.pack_float_weight(weight.astype(np.float32)))
        else:
            arrays.append(rng.integers(-3, 4, extents).astype(dtype))
    return arrays


def clear_tails(words: np.ndarray, channels: int) -> np.ndarray:
    """Clear the bits beyond the last channel."""
    return layout.pack_bits(layout.unpack_bits(words, channels))


def same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    """Check that outputs are equal bit for bit, but for the sign of zero."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
