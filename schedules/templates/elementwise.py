"""Elementwise kernels on NCHW tensors, whose channels are not neighbours: no schedule of lanes.

* Data and all tensors NCHW: lanes are pixels, a word is the OR of 32 masked compares (`planar`); no
  value is moved between lanes.
* Mixed: squares of `LANES` pixels x `LANES` channels are transposed in registers (`square`).
"""

from __future__ import annotations

import dataclasses

from tvm import tirx

from bnncc.schedules.templates.planar import write_planar
from bnncc.schedules.templates.square import write_squares
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
        write = write_planar if layouts(spec) == {"NCHW"} and not spec.packed else write_squares
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
