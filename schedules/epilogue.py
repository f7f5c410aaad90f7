"""Vectorization of an epilogue: its steps become operations on vectors of lanes.

A definition writes an epilogue as blocks over the lanes of one channel vector, inside an outer
block (`topi_binary.definitions.epilogue`). Their tensors of `LANES` values become registers.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import s_tir

from bnncc.schedules.expressions import depends, small_when_inlined
from bnncc.schedules.intrin_portable import LOAD_FIRST, PACK
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.layout import LANES

BLOCKS = ("out", "out_last")
"""Outer blocks of an epilogue; the second exists if the last channels do not fill a vector."""


def blocks(sch: s_tir.Schedule) -> list[Any]:
    """Return the outer blocks of a definition's epilogue."""
    named = [(sch.get(b).name_hint, b) for b in sch.get_child_blocks(sch.get_sblock("root"))]
    return [block for name, block in named if name in BLOCKS]


def vectorize(sch: s_tir.Schedule, block: Any, channels: int, target: TargetSpec) -> None:
    """Vectorize the steps in `block`.

    Parameters
    ----------
    sch : s_tir.Schedule
        Schedule of the kernel.
    block : SBlockRV
        An outer block from `blocks`.
    channels : int
        Channels of the whole output.
    """
    _inline(sch, block)
    existing = channels % LANES if sch.get(block).name_hint == BLOCKS[1] else 0
    for step in sch.get_child_blocks(block):
        body = sch.get(step)
        if not body.iter_vars:
            continue
        lane = sch.get_loops(step)[-1]
        if body.name_hint.endswith("_pack"):
            sch.decompose_reduction(step, lane)
            sch.tensorize(lane, PACK.register())
        elif existing and _loads_floats(body) and _neighbours(body):
            sch.tensorize(lane, LOAD_FIRST[existing, "avx" in target.features].register())
        elif target.scalar:
            continue  # lanes stay a loop: unrolled, they would be long code
        elif _chosen(body) or not _neighbours(body):
            sch.unroll(lane)
        else:
            sch.vectorize(lane)


def _inline(sch: s_tir.Schedule, block: Any) -> None:
    """Inline a step that only one other step reads: TVM and LLVM remove buffers slowly.

    Both must be vectorized.
    """
    steps = [(step, sch.get(step)) for step in sch.get_child_blocks(block)]
    whole = {
        id(body) for _, body in steps
        if body.iter_vars and body.init is None and _neighbours(body) and not _chosen(body)
    }  # fmt: skip
    for step, body in steps:
        made = body.writes[0].source
        readers = [b for _, b in steps if any(read.source.same_as(made) for read in b.reads)]
        inlinable = len(readers) == 1 and {id(body), id(readers[0])} <= whole
        if inlinable and small_when_inlined(sch, step):
            sch.compute_inline(step)


def _neighbours(step: Any) -> bool:
    """Whether the lanes of a step are contiguous in all tensors that it reads and writes."""
    lane = step.iter_vars[-1].var
    outer = [a for r in (*step.reads, *step.writes) for a in list(r.region)[:-1]]
    return not any(depends(axis.min, lane) for axis in outer)


def _chosen(step: Any) -> bool:
    """Whether a step loads only the existing lanes, as scalars."""
    value = step.body.value
    return isinstance(value, tvm.ir.Call) and value.op.name == "prim.if_then_else"


def _loads_floats(step: Any) -> bool:
    """Whether a step only loads such lanes, of floats."""
    if not _chosen(step):
        return False
    loaded = step.body.value.args[1]
    return isinstance(loaded, tvm.ir.TensorLoad) and loaded.source.dtype == "float32"
