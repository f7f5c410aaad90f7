"""Products of tiles: as loops, and as machine code in an emulator, against NumPy."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.codegen.pipeline import tvm_target
from bnncc.schedules import intrin_amx, ranges
from bnncc.schedules.intrin_amx import DOTS, LOCAL, SUMS, TILE_BYTES, Tile
from bnncc.targets import catalog
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.definitions.terms import bfloat16
from tests import amx_emulator

ROOT = Path(__file__).resolve().parents[2]
AMX = catalog.resolve("x86-64-v4-amx")
SHAPES = [(2, 1), (7, 2), (14, 9), (16, 3)]
BLOCKS = 2
GARBAGE = np.int32(0x5A5A5A5A)
EXTREMES = {"int8": (-128, 127), "uint8": (0, 255), "uint16": (-64, 64)}
"""Of bfloat16, integers of which float32 sums are exact."""


def compiled(func: tirx.PrimFunc, target: TargetSpec) -> tvm.runtime.Module:
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    return tvm.compile(module, target=tvm_target(target))


def matrix(weight: np.ndarray) -> np.ndarray:
    """Return weights as rows of the depth, out of the order in which tiles take them."""
    together = weight.shape[-1] // 16
    return weight.reshape(-1, 16, together).transpose(0, 2, 1).reshape(-1, 16)


def stored(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Return integers as a tile holds them."""
    if dtype == "uint16":
        return numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    return numbers.astype(dtype)


def product_of(types: tuple[str, str], rows: int, steps: int, apart: int) -> s_tir.Schedule:
    """Write a product of matrices, in `BLOCKS` blocks of columns, as plain loops.

    Rows of the data have `apart` tiles more than the product reads.
    """
    tile = Tile("dot", rows, types)
    depth = 16 * tile.together
    data = te.placeholder((rows, (steps + apart) * depth), types[0], "data")
    weight = te.placeholder((BLOCKS, steps, 16, depth), types[1], "weight")
    window = te.compute((steps, rows, depth), lambda s, i, k: data[i, s * depth + k], "window")
    return summed(window, weight, tile, [data, weight])


def summed(
    window: te.Tensor, weight: te.Tensor, tile: Tile, inputs: list[te.Tensor]
) -> s_tir.Schedule:
    steps, rows, depth = window.shape
    step, k = te.reduce_axis((0, steps), "step"), te.reduce_axis((0, depth), "k")
    every = tile.together

    def dot(o: tirx.Var, i: tirx.Var, j: tirx.Var) -> te.Tensor:
        one, other = window[step, i, k], weight[o, step, k // every, j * every + k % every]
        if tile.types[0] == "uint16":
            first, second = (bfloat16(x.astype("uint32")) for x in (one, other))
        else:
            first, second = (x.astype("int32") for x in (one, other))
        return te.sum(first * second, axis=[step, k])

    sums = te.compute((BLOCKS, rows, 16), dot, "sums")
    total = te.compute((rows, BLOCKS * 16), lambda i, j: sums[j // 16, i, j % 16], "total")
    return s_tir.Schedule(te.create_prim_func([*inputs, total]))


def overlapping(tile: Tile) -> s_tir.Schedule:
    """Write a product whose rows of data overlap, or have gaps between them, as plain loops."""
    (pixels, step), depth = tile.window, tile.words * tile.together
    each = depth // pixels
    data = te.placeholder((2, (tile.rows - 1) * step + pixels, each), tile.types[0], "data")
    weight = te.placeholder((BLOCKS, 2, tile.words, 16 * tile.together), tile.types[1], "weight")
    window = te.compute(
        (2, tile.rows, depth), lambda s, i, k: data[s, i * step + k // each, k % each], "window"
    )
    return summed(window, weight, tile, [data, weight])


def on_tiles(sch: s_tir.Schedule, tile: Tile, shared: bool = False) -> tirx.PrimFunc:
    """Schedule it: every loop over a tile becomes an instruction; blocks may share data tiles."""
    o, row, column, step, k = sch.get_loops("sums")
    sch.reorder(*((step, o) if shared else (o, step)), row, column, k)
    data, weight = sch.get_sblock("window"), sch.cache_read("sums", 1, LOCAL)
    for block in (data, weight):
        sch.compute_at(block, step)
    for block in (data, sch.get_sblock("sums")):
        sch.set_scope(block, 0, LOCAL)
    i, j = sch.get_loops("total")
    outer, _ = sch.split(j, [BLOCKS, 16])
    sch.reorder(outer, i)
    sch.unroll(outer)
    sch.unroll(o)
    *_, first, cleared, _ = sch.get_loops(sch.decompose_reduction("sums", step))
    if shared:
        sch.unroll(first)
        sch.unroll(sch.get_loops(weight)[-3])
    loops = {
        "zero": cleared, "load": sch.get_loops(data)[-2],
        "load_weight": sch.get_loops(weight)[-2], "dot": row, "store": i,
    }  # fmt: skip
    for operation, loop in loops.items():
        sch.tensorize(loop, replace(tile, operation=operation).register())
    func = sch.mod["main"]
    root = func.body.block
    with IRBuilder() as builder, T.sblock("configured"):
        T.reads()
        T.writes()
        config = T.sblock_alloc_buffer((8,), "uint64")
        sums, data = (tile.rows, TILE_BYTES), (tile.rows, tile.words * 4)
        shapes = [*[sums] * SUMS, data, *[(tile.words, TILE_BYTES)] * 2]
        intrin_amx.configure(config, shapes)
    with IRBuilder() as ended, T.sblock("released"):
        T.reads()
        T.writes()
        intrin_amx.release()
    body = tirx.SeqStmt([builder.get(), *ranges.statements(root.body), ended.get()])
    return func.with_body(ranges.rooted(func, body, root.alloc_buffers))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("half", ["desc", "impl", "shared data"])
@pytest.mark.parametrize(("rows", "steps"), SHAPES)
@pytest.mark.parametrize("types", DOTS)
def test_tiles_multiply_matrices(types: tuple[str, str], rows: int, steps: int, half: str) -> None:
    real, shared = half != "desc", half == "shared data"
    emulator = amx_emulator.load() if real else None
    rng = np.random.default_rng(0)
    libraries = {}
    for apart in (0, 3):
        sch = product_of(types, rows, steps, apart)
        tile = Tile("dot", rows, types, streamed=shared)
        func = on_tiles(sch, tile, shared) if real else sch.mod["main"]
        libraries[apart] = compiled(func, AMX if real else catalog.native())
    for apart, ends in ((0, False), (0, True), (3, False)):
        library, tile = libraries[apart], Tile("dot", rows, types)
        depth = 16 * tile.together
        shapes = ((rows, (steps + apart) * depth), (BLOCKS, steps, 16, depth))
        data, weight = (
            rng.choice(EXTREMES[one], shape)
            if ends
            else rng.integers(*EXTREMES[one], shape, endpoint=True)
            for one, shape in zip(types, shapes, strict=True)
        )
        total = tvm.runtime.tensor(np.full((rows, BLOCKS * 16), GARBAGE).view(tile.total))
        before = emulator.amx_emulator_performed() if emulator else 0
        given = (stored(x, one) for x, one in zip((data, weight), types, strict=True))
        library["main"](*map(tvm.runtime.tensor, given), total)
        columns = np.concatenate([matrix(block) for block in weight], axis=1).astype("int64")
        wanted = data[:, : steps * depth].astype("int64") @ columns
        np.testing.assert_array_equal(total.numpy(), wanted)
        if emulator:  # configure and release; for each block zero and store; loads and products
            performed = emulator.amx_emulator_performed() - before
            loaded = steps * (1 if shared else BLOCKS)
            assert performed == 2 + BLOCKS * (2 + 2 * steps) + loaded


@pytest.mark.parametrize("half", ["desc", "impl"])
@pytest.mark.parametrize(
    ("rows", "words", "window"),
    [(16, 14, (7, 2)), (16, 6, (3, 1)), (7, 16, (4, 3)), (2, 4, (2, 5)), (3, 2, (1, 1))],
)
@pytest.mark.parametrize("types", [("uint8", "int8"), ("uint16", "uint16")])
def test_rows_of_tiles_overlap(
    types: tuple[str, str], rows: int, words: int, window: tuple[int, int], half: str
) -> None:
    tile, rng = Tile("dot", rows, types, words, window), np.random.default_rng(0)
    if half == "impl":
        amx_emulator.load()
    sch = overlapping(tile)
    func = on_tiles(sch, tile) if half == "impl" else sch.mod["main"]
    library = compiled(func, AMX if half == "impl" else catalog.native())
    (pixels, step), depth = window, words * tile.together
    shapes = (
        (2, (rows - 1) * step + pixels, depth // pixels),
        (BLOCKS, 2, words, 16 * tile.together),
    )
    data, weight = (
        rng.integers(*EXTREMES[one], shape, endpoint=True)
        for one, shape in zip(types, shapes, strict=True)
    )
    total = tvm.runtime.tensor(np.full((rows, BLOCKS * 16), GARBAGE).view(tile.total))
    given = (stored(x, one) for x, one in zip((data, weight), types, strict=True))
    library["main"](*map(tvm.runtime.tensor, given), total)
    read = [data[:, i * step : i * step + pixels].reshape(2 * depth) for i in range(rows)]
    columns = np.concatenate([matrix(block) for block in weight], axis=1).astype("int64")
    np.testing.assert_array_equal(total.numpy(), np.array(read, "int64") @ columns)


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
                intrin_amx.configure(config, [(16, TILE_BYTES)] * 3 + [(0, 0)] * 5)
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
    types = ("uint8", "int8")
    func = on_tiles(product_of(types, 16, 2, 0), Tile("dot", 16, types))
    asm = compiled(func, AMX).mod.inspect_source("asm")
    assert "tileloaddt1" not in asm
    streamed = on_tiles(product_of(types, 16, 2, 0), Tile("dot", 16, types, streamed=True))
    assert "tileloaddt1" in compiled(streamed, AMX).mod.inspect_source("asm")
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
from bnncc.topi_binary.definitions.terms import bfloat16
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
