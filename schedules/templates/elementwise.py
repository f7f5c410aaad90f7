"""Elementwise kernels on NCHW tensors, whose channels are not neighbours: no schedule of lanes.

* Data and all tensors NCHW: lanes are pixels, a word is the OR of 32 masked compares; no value is
  moved between lanes (`nchw_elementwise`).
* Mixed: tiles of `LANES` pixels x `LANES` channels are transposed in registers
  (`transposed_elementwise`).
"""

from __future__ import annotations

import dataclasses

from tvm import tirx

from bnncc.schedules.templates.nchw_elementwise import write_nchw
from bnncc.schedules.templates.transposed_elementwise import write_transposed
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Elementwise
from bnncc.topi_binary.step import TENSORS

_LAID_OUT = ("store", *TENSORS)
"""Steps that touch a float tensor with a layout."""


def elementwise(spec: Elementwise, parallel: bool) -> tirx.PrimFunc:
    """Write the kernel of `spec`, perhaps with its pixels divided among threads."""
    flat = dataclasses.replace(spec, height=1, width=spec.height * spec.width)
    with Operator(spec) as kernel:
        kernel.reshape(flat)
        write = write_nchw if layouts(spec) == {"NCHW"} and not spec.packed else write_transposed
        write(kernel, flat, parallel)
    return kernel.func


def layouts(spec: Elementwise) -> set[str]:
    """Return the layouts of all tensors that have one; those of rows are all alike."""
    if spec.rank == 2:
        return {"NHWC"}
    found = {step.layout for step in spec.steps if step.op in _LAID_OUT}
    if any(step.op == "levels" for step in spec.steps):
        found.add("NHWC")
    return found if spec.packed else found | {spec.data_layout}
