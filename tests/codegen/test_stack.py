"""Where kernels put spilled vectors, read from their machine code."""

from __future__ import annotations

import re

import pytest
import tvm

from bnncc.codegen import memory
from bnncc.codegen.pipeline import tvm_target
from bnncc.schedules import schedule
from bnncc.targets import catalog
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Step

STEPS = tuple(Step(op) for op in ("affine", "add", "prelu", "store"))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "register", "size"),
    [("x86-64-v2", "xmm", 16), ("x86-64-v3", "ymm", 32), ("x86-64-v4", "zmm", 64)],
)
def test_spilled_vectors_are_aligned(name: str, register: str, size: int, threads: int) -> None:
    # A prime number of words, which are counted one by one in larger tiles.
    spec = BinaryConv2d(1, 28, 28, 544, 256, (3, 3), pads=(1, 1, 1, 1), steps=STEPS)
    target = catalog.resolve(name)
    func = schedule(define(spec), target, threads).with_attr("global_symbol", "main")
    machine = tvm_target(target)
    made = tvm.compile(tvm.IRModule({"main": func}), machine, tir_pipeline=memory.PIPELINE)
    code = made.mod.inspect_source("asm")
    stored = re.findall(rf"v?(mov\w+)\s+%{register}\d+, \d*\(%rsp\)", code)
    aligned = [instruction for instruction in stored if re.match("mova|movdqa", instruction)]
    assert len(aligned) > 5
    assert len(stored) - len(aligned) <= len(aligned)  # those of arguments are not
    functions = 0 if size == 16 else threads  # the ABI aligns to 16; a loop of threads is another
    assert len(re.findall(rf"andq\s+\$-{size}, %rsp", code)) == functions
