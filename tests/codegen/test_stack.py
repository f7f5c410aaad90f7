"""Where kernels put spilled vectors, read from their machine code."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import tvm

from bnncc.codegen import memory
from bnncc.codegen.pipeline import tvm_target
from bnncc.schedules import schedule
from bnncc.targets import catalog
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d, RowPool, Spec, Step

STEPS = tuple(Step(op) for op in ("affine", "add", "prelu", "store"))


def _assembly(spec: Spec, name: str, threads: int = 1) -> str:
    target = catalog.resolve(name)
    func = schedule(define(spec), target, threads).with_attr("global_symbol", "main")
    machine = tvm_target(target)
    made = tvm.compile(tvm.IRModule({"main": func}), machine, tir_pipeline=memory.PIPELINE)
    return made.mod.inspect_source("asm")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "register", "size"),
    [("x86-64-v2", "xmm", 16), ("x86-64-v3", "ymm", 32), ("x86-64-v4", "zmm", 64)],
)
def test_spilled_vectors_are_aligned(name: str, register: str, size: int, threads: int) -> None:
    # A prime number of words, which are counted one by one in larger tiles.
    spec = BinaryConv2d(1, 28, 28, 544, 256, (3, 3), pads=(1, 1, 1, 1), steps=STEPS)
    code = _assembly(spec, name, threads)
    stored = re.findall(rf"v?(mov\w+)\s+%{register}\d+, \d*\(%rsp\)", code)
    aligned = [instruction for instruction in stored if re.match("mova|movdqa", instruction)]
    assert len(aligned) > 5
    assert len(stored) - len(aligned) <= len(aligned)  # those of arguments are not
    functions = 0 if size == 16 else threads  # the ABI aligns to 16; a loop of threads is another
    assert len(re.findall(rf"andq\s+\$-{size}, %rsp", code)) == functions


WINDOWS = {
    7: {"kernel": (7, 7), "strides": (2, 2), "pads": (3, 3, 3, 3)},
    11: {"kernel": (11, 11), "strides": (4, 4), "pads": (2, 2, 2, 2)},
}
POOL = RowPool((3, 3), (2, 2))


def _first_layers(side: int) -> Iterator[Spec]:
    for layout in ("NCHW", "NHWC"):
        for pool in (None, POOL):
            yield Conv2d(
                1, 224, 224, 3, 64, **WINDOWS[side], data_layout=layout, pool=pool,
                steps=(Step("store"),),
            )  # fmt: skip
    for method in ("bytes", "floats"):
        yield FewBitConv2d(
            1, 224, 224, 3, 64, **WINDOWS[side], data_bits=8, weight_bits=8, method=method,
            steps=(Step("store"),),
        )  # fmt: skip


@pytest.mark.parametrize("side", WINDOWS)
def test_data_of_first_layers_stay_in_registers(side: int) -> None:
    # With the taps in order, AVX-512 had an access to the stack for every second to fifth product.
    for spec in _first_layers(side):
        code = _assembly(spec, "x86-64-v4-amx")
        products = len(re.findall(r"vfmadd\w+|vpdpbusd", code))
        accesses = len(re.findall(r"zmm.*\(%rsp\)|\(%rsp\).*zmm", code))
        assert products > 200
        assert accesses * 40 < products


@pytest.mark.parametrize("side", WINDOWS)
def test_sums_of_pooled_first_layers_stay_in_registers(side: int) -> None:
    # Without padding: only tiles with all taps have a loop over them.
    window = {**WINDOWS[side], "pads": (0, 0, 0, 0)}
    spec = Conv2d(1, 65, 65, 3, 32, **window, pool=POOL, steps=(Step("store"),))
    code = _assembly(spec, "x86-64-v3")
    assert "vfmadd" in code
    assert len(re.findall(r"vmov\S+\s+%ymm\d+, -?\d*\(%rsp", code)) < 5
