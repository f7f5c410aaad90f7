"""Every named instruction alone: what it is said to compute, and what it computes."""

from __future__ import annotations

import ast
import importlib
import os
import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm

from bnncc.schedules.intrin import PAIRS, TENSOR_PAIRS, Intrinsic, TensorPair, lanes, stored
from bnncc.schedules.intrin_x86 import Interleave
from bnncc.targets import catalog
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import Conv2d
from tests.kernel_harness import EMULATED, HERE, IN_NODE, build

pytestmark = pytest.mark.sampled(4)

ROOT = Path(__file__).resolve().parents[2]
ALL = bool(os.environ.get("BNNCC_TEST_ALL"))
BATCHES = 20 if ALL else 6
HALVES = ("desc", "impl")
for path in (ROOT / "schedules").glob("intrin_*.py"):
    importlib.import_module(f"bnncc.schedules.{path.stem}")  # each enters its own in the tables


def inputs(intrinsic: Intrinsic, rng: np.random.Generator) -> list[np.ndarray]:
    """Return operands; numbers of floats are such that no order of sums rounds them."""
    made = []
    for number, kind in enumerate(intrinsic.operands):
        size, dtype = lanes(kind), stored(kind)
        low, high = intrinsic.bounds.get(number, (0, 0))
        if kind.startswith("bool"):
            values = rng.integers(0, 2, size)
        elif intrinsic.name.endswith("bf16") and dtype == "uint32":
            halves = rng.integers(-9, 10, (size, 2)).astype(np.float32)
            words = halves.view(np.uint32) >> 16
            values = words[:, 0] | words[:, 1] << 16
        elif dtype == "float32":
            low, high = (low, high) if high else (-1000, 1000)
            values = rng.integers(2 * low, 2 * high + 1, size) / 2
        elif high:
            values = rng.integers(low, high + 1, size)
        else:
            info = np.iinfo(dtype)
            values = rng.integers(info.min, int(info.max) + 1, size, dtype=dtype)
            values[:2] = info.min, info.max
        made.append(np.ascontiguousarray(values.astype(dtype)))
    return made


def taken(name: str, target: str) -> bool:
    """Return whether a pair of a family with one for each number of lanes is tested on a target."""
    lanes = re.search(r"(?:multiply_add_|transpose_\dx|load_)(\d+)_", name)
    every = ALL or target in ("native", "arm64", "wasm32")
    return every or lanes is None or int(lanes[1]) in (1, 4, 5, 15, 16)


def has(target: TargetSpec, intrinsic: Intrinsic | TensorPair) -> bool:
    if intrinsic.feature == "gfni" and target.vector_bits < 512:
        return False  # those here are the instructions of AVX-512
    if intrinsic.name.startswith("round_to_even") and target.arch.startswith("arm"):
        return False  # ARMv7 calls the C library, which the emulated processor does not have
    if intrinsic.feature == "dsp":
        return target.arch.startswith("armv7")  # which has these instructions, too
    if intrinsic.feature == "avx_vnni":
        return not {"avx_vnni", "avx512_vnni"}.isdisjoint(target.features)
    return not intrinsic.feature or intrinsic.feature in target.features


@pytest.mark.parametrize("name", [*dict.fromkeys([*HERE, "native"]), *EMULATED, *IN_NODE])
def test_instructions_compute_what_is_said_of_them(name: str) -> None:
    target = catalog.resolve(name)
    tried = [intrinsic for intrinsic in PAIRS.values() if has(target, intrinsic)]
    assert tried
    functions = {
        f"{half}_{i}": intrinsic.function(half)
        for i, intrinsic in enumerate(tried)
        for half in ("desc", "impl")
    }
    library = build(functions, target)
    rng = np.random.default_rng(0)
    for i, intrinsic in enumerate(tried):
        for _ in range(BATCHES):
            arrays = inputs(intrinsic, rng)
            results = []
            for half in ("desc", "impl"):
                empty = np.full(lanes(intrinsic.result), 0x5A, stored(intrinsic.result))
                result = tvm.runtime.tensor(empty)
                library[f"{half}_{i}"](*[tvm.runtime.tensor(x) for x in arrays], result)
                results.append(result.numpy())
            np.testing.assert_array_equal(*results, err_msg=f"{intrinsic.name} of {arrays}")


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("zeros", [(), (0, 128, 255, 7, 99, 1, 2, 254)])
def test_channels_of_pixels_are_interleaved(
    channels: int, layout: str, zeros: tuple[int, ...]
) -> None:
    target, rng = catalog.resolve("native"), np.random.default_rng(0)
    spec = Conv2d(1, 9, 40, channels, 1, (3, 3), data_layout=layout, zero_points=zeros[:channels])
    pair = Interleave(replace(spec, operands="bfloat16", packed=2))
    halves = [half for half in HALVES if half == "desc" or pair.feature in target.features]
    library = build({half: pair.function(half) for half in halves}, target)
    data, *_, made = pair.tensors
    for mask in (0xFFFF, 0):
        if zeros:
            given = rng.integers(0, 256, data.shape).astype(np.uint8)
            values = given.astype(np.int64)
        else:
            given = (10 * rng.standard_normal(data.shape)).astype(np.float32)
            values = given
        pixels = values[:, 0].T if layout == "NCHW" else values
        wanted = (pixels - np.array(zeros[:channels] or [0])).astype(ml_dtypes.bfloat16)
        wanted = np.pad(wanted.view(np.uint16), [(0, 0), (0, channels % 2)]) & mask
        for half in halves:
            found = tvm.runtime.tensor(np.full(made.shape, 0x5A5A, np.uint16))
            row = tvm.runtime.tensor(np.array([mask], np.uint16))
            library[half](tvm.runtime.tensor(given), row, found)
            np.testing.assert_array_equal(found.numpy(), wanted, err_msg=half)


@pytest.mark.parametrize("name", [*dict.fromkeys([*HERE, "native"]), *EMULATED, *IN_NODE])
def test_tensorized_instructions_do_what_the_loop_does(name: str) -> None:
    target = catalog.resolve(name)
    tried = [p for p in TENSOR_PAIRS.values() if has(target, p) and taken(p.name, name)]
    assert tried
    rng = np.random.default_rng(0)
    functions = {f"{half}_{i}": p.function(half) for i, p in enumerate(tried) for half in HALVES}
    library = build(functions, target)
    for i, pair in enumerate(tried):
        changed = False
        for _ in range(BATCHES):
            arrays = []
            for operand in pair.operands:
                if operand.dtype == "bool":
                    arrays.append(rng.random(operand.shape) < 0.5)
                    continue
                if operand.dtype == "float32":  # halves: no sum is rounded
                    low, high = operand.bounds or (-1000, 1000)
                    values = rng.integers(2 * low, 2 * high, operand.shape) / 2
                    arrays.append(values.astype(np.float32))
                    continue
                info = np.iinfo(operand.dtype)
                low, high = operand.bounds or (max(info.min, -1000), info.max)
                high = 1000 if operand.dtype == "int32" else high
                arrays.append(rng.integers(low, high, operand.shape, operand.dtype, endpoint=True))
            if pair.name.endswith("bf16"):
                for number, size in enumerate((2, 32)):  # halves of words
                    halves = rng.integers(1, 10, size).astype(np.float32).view(np.uint32) >> 16
                    arrays[number] = halves.astype("<u2").view(arrays[number].dtype)
            if pair.name.startswith("avx512vpopcntdq_carry_save"):
                apart = (len(arrays[2]) - 1) // 2  # the first operand is the XOR of the data
                arrays[0][0] = np.bitwise_xor.reduce(arrays[2][::apart, 0])
            results = []
            for half in HALVES:
                operands = [tvm.runtime.tensor(x) for x in arrays]
                library[f"{half}_{i}"](*operands)
                results.append(operands[-1].numpy())
            changed = changed or bool((results[0] != arrays[-1]).any())
            np.testing.assert_array_equal(*results, err_msg=pair.name)
        assert changed, pair.name


def test_every_instruction_is_in_some_target() -> None:
    features = {f for target in catalog.CATALOG.values() for f in target.features}
    features |= {"avx512_vnni", "avx512_bf16", ""}  # of `native` alone
    assert {intrinsic.feature for intrinsic in PAIRS.values()} <= features


def test_a_wrong_description_is_noticed() -> None:
    right = PAIRS["mask_16"]
    wrong = Intrinsic(
        "wrong", "", right.operands, right.result, right.desc, lambda x: right.impl(x) + 1
    )
    del PAIRS["wrong"]
    target = catalog.native()
    library = build({"desc": wrong.function("desc"), "impl": wrong.function("impl")}, target)
    operands = [tvm.runtime.tensor(x) for x in inputs(wrong, np.random.default_rng(0))]
    results = [tvm.runtime.tensor(np.zeros(1, "uint16")) for _ in range(2)]
    for half, result in zip(("desc", "impl"), results, strict=True):
        library[half](*operands, result)
    assert results[0].numpy() != results[1].numpy()


def calls(path: Path) -> list[str]:
    """Return the names of functions by which a source writes instructions of LLVM."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith(("call_llvm", "call_pure_ext")):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}")
        if isinstance(node, ast.Constant) and str(node.value).startswith("llvm."):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}")
    return found


def test_instructions_are_named_in_one_place() -> None:
    found, named = [], []
    for folder in ("schedules", "topi_binary"):
        for path in (ROOT / folder).rglob("*.py"):
            (named if path.name.startswith("intrin") else found).extend(calls(path))
    assert not found
    assert named
