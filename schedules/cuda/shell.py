"""The kernel that TVM launches: parameters, grid, and a call of the device function."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as script
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from bnncc.schedules.cuda.text import Kernel
from bnncc.topi_binary.signature import declare
from bnncc.topi_binary.spec import Spec

MOST = 2**32
"""Limit of the pixels or threads that a kernel counts in 32 bits."""


def prim_func(spec: Spec, kernel: Kernel) -> tirx.PrimFunc:
    """Return the function that launches `kernel`, with the parameters of `spec`.

    It fails if the batch is so large that the kernel's counters would overflow.
    """
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            n, buffers = declare(spec)
            if isinstance(n, int):
                blocks = kernel.blocks(n)
            else:
                blocks = (n * kernel.units + kernel.per_block - 1) // kernel.per_block
                blocks = tirx.min(blocks, kernel.most) if kernel.most else blocks
            units = (tirx.IntImm("int64", n) if isinstance(n, int) else n) * kernel.units
            with (
                T.Assert(units < MOST - kernel.per_block, "the batch is too large for a GPU"),
                T.thread_binding(blocks, thread="blockIdx.x"),
                T.thread_binding(kernel.tiles, thread="blockIdx.y"),
                T.thread_binding(kernel.threads, thread="threadIdx.x"),
            ):
                _call(kernel, n, buffers)
        return builder.get()


def _call(kernel: Kernel, n: Any, buffers: list[Any]) -> None:
    images = tirx.IntImm("int32", n) if isinstance(n, int) else T.Cast("int32", n)
    shared = T.reinterpret("handle", T.uint64(0))
    if kernel.shared:
        room = T.sblock_alloc_buffer((kernel.shared // 4,), "int32", scope="shared.dyn")
        IRBuilder.name("shared", room)
        shared = room.access_ptr("rw")
    pointers = [b.access_ptr("w" if b.name.startswith("out") else "r") for b in buffers]
    T.evaluate(
        script.cuda.func_call(kernel.name, *pointers, images, shared, source_code=kernel.source)
    )
