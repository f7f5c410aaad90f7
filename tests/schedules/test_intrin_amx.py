"""Products of tiles: as loops, and as machine code in an emulator, against NumPy."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi

from bnncc.codegen.pipeline import tvm_target
from bnncc.schedules.intrin_amx import DOTS, TileProduct
from bnncc.targets import catalog
from bnncc.targets.spec import TargetSpec
from tests import amx_emulator

ROOT = Path(__file__).resolve().parents[2]
V4 = catalog.resolve("x86-64-v4")
AMX = dataclasses.replace(V4, name="amx", mattr=(*V4.mattr, "+amx-tile", "+amx-int8"))
SHAPES = [(1, 1), (7, 2), (14, 9), (16, 3)]
GARBAGE = np.int32(0x5A5A5A5A)
EXTREMES = {"int8": (-128, 127), "uint8": (0, 255)}


def compiled(pair: TileProduct, half: str, target: TargetSpec) -> tvm.runtime.Module:
    module = tvm.IRModule({"main": pair.function(half)})
    return tvm.compile(module, target=tvm_target(target))


def columns(whole: tvm.runtime.Tensor, count: int) -> tvm.runtime.Tensor:
    """Return the first columns, in the same memory: rows lie apart."""
    return tvm_ffi.from_dlpack(np.from_dlpack(whole)[:, :count])


def matrix(weight: np.ndarray) -> np.ndarray:
    """Return weights as rows of the depth, out of the order in which tiles take them."""
    return weight.reshape(-1, 16, 4).transpose(0, 2, 1).reshape(-1, 16)


@pytest.mark.parametrize("half", ["desc", "impl"])
@pytest.mark.parametrize(("rows", "steps"), SHAPES)
@pytest.mark.parametrize("types", DOTS)
def test_tiles_multiply_matrices(types: tuple[str, str], rows: int, steps: int, half: str) -> None:
    emulator = amx_emulator.load() if half == "impl" else None
    pair = TileProduct(types, rows, steps)
    library = compiled(pair, half, AMX if half == "impl" else catalog.native())
    rng = np.random.default_rng(0)
    before = emulator.amx_emulator_performed() if emulator else 0
    for apart, ends in ((0, False), (0, True), (3, False)):
        shapes = ((rows, (steps + apart) * 64), (steps, 16, 64))
        data, weight = (
            rng.choice(EXTREMES[one], shape).astype(one)
            if ends
            else rng.integers(*EXTREMES[one], shape, one, endpoint=True)
            for one, shape in zip(types, shapes, strict=True)
        )
        total = tvm.runtime.tensor(np.full((rows, 16 + 16 * apart), GARBAGE))
        rows_of_data = columns(tvm.runtime.tensor(data), steps * 64)
        library["main"](rows_of_data, tvm.runtime.tensor(weight), columns(total, 16))
        wanted = data[:, : steps * 64].astype("int64") @ matrix(weight).astype("int64")
        np.testing.assert_array_equal(total.numpy()[:, :16], wanted)
        assert (total.numpy()[:, 16:] == GARBAGE).all()
    if emulator:  # configure, zero, store and release; two loads and a product a step
        assert emulator.amx_emulator_performed() - before == 3 * (4 + 3 * steps)


def test_tile_instructions_are_what_llvm_writes() -> None:
    asm = compiled(TileProduct(("uint8", "int8"), 16, 2), "impl", AMX).mod.inspect_source("asm")
    for instruction in (
        "ldtilecfg",
        "tilezero",
        "tileloadd",
        "tdpbusd",
        "tilestored",
        "tilerelease",
    ):
        assert instruction in asm


EXECUTE = """
import ctypes, mmap, sys
from tests import amx_emulator
emulator = amx_emulator.load()
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes.fromhex(sys.argv[1]))
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
"""


@pytest.mark.parametrize(
    ("code", "ended", "said"),
    [
        ("0f0b c3", signal.SIGILL, ""),  # ud2
        ("c4e27b49d8 c3", signal.SIGABRT, "no tiles are configured"),  # tilezero tmm3
        ("c4e27849c0 c3", None, ""),  # tilerelease
    ],
)
def test_the_emulator_performs_nothing_that_a_processor_refuses(
    code: str, ended: signal.Signals | None, said: str
) -> None:
    if amx_emulator.load() is None:
        pytest.skip("this processor has AMX itself")
    command = [sys.executable, "-c", EXECUTE, code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == (-ended if ended else 0), done.stderr
    assert said in done.stderr
