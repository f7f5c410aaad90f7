"""Products of tiles: as loops, and as machine code in an emulator, against NumPy."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.codegen.pipeline import tvm_target
from bnncc.schedules import intrin_amx
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


def test_each_thread_has_tiles_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    amx_emulator.load()
    monkeypatch.setenv("TVM_NUM_THREADS", "2")
    batch, steps, types = 64, 5, ("int8", "int8")
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            data = T.arg("data", T.buffer((batch, 16, steps * 64), "int8"))
            weight = T.arg("weight", T.buffer((steps, 16, 64), "int8"))
            total = T.arg("total", T.buffer((batch, 16, 16), "int32"))
            with T.parallel(batch) as i, T.sblock("product"):
                at = T.axis.spatial(batch, i)
                T.reads(data[at, 0:16, 0 : steps * 64], weight[0:steps, 0:16, 0:64])
                T.writes(total[at, 0:16, 0:16])
                config = T.sblock_alloc_buffer((8,), "uint64")
                intrin_amx.configure(config, (16, 16, 16, 0, 0, 0, 0, 0))
                intrin_amx.zero(0)
                with T.serial(steps) as step:
                    intrin_amx.load(1, data[at, 0, step * 64], T.int64(steps * 64))
                    intrin_amx.load(2, weight[step, 0, 0], T.int64(64))
                    intrin_amx.dot(0, 1, 2, types=types)
                intrin_amx.store(0, total[at, 0, 0], T.int64(64))
                intrin_amx.release()
        library = tvm.compile(tvm.IRModule({"main": builder.get()}), target=tvm_target(AMX))
    rng = np.random.default_rng(0)
    left, right = (
        rng.integers(-128, 128, shape, "int8")
        for shape in ((batch, 16, steps * 64), (steps, 16, 64))
    )
    made = tvm.runtime.tensor(np.full((batch, 16, 16), GARBAGE))

    def run() -> int:
        tvm.get_global_func("runtime.config_threadpool")(1, 2)
        library["main"](tvm.runtime.tensor(left), tvm.runtime.tensor(right), made)
        return int(tvm.get_global_func("runtime.NumThreads")())

    with ThreadPoolExecutor(1) as alone:  # whose thread has a pool of its own
        assert alone.submit(run).result() == 2
    wanted = left.astype("int64") @ matrix(right).astype("int64")
    np.testing.assert_array_equal(made.numpy(), wanted)


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
