"""Features of a candidate for the cost model: its choices, and the sizes of its kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bnncc.records.workload import Workload, point_of_module
from bnncc.topi_binary import layout
from bnncc.topi_binary.spec import Spec

CHOICES = (
    "columns", "vectors", "order", "carry_save", "rolled", "unroll", "bytes", "tiles", "kw_inside",
    "rows_outside", "rows", "divide", "chunks", "flat", "folded",
)  # fmt: skip
"""All choices of any rule; those that a kernel lacks are 0."""

KINDS = ("BinaryConv2d", "Conv2d", "Pool2d", "Elementwise", "BitwiseMaxPool", "FewBitConv2d")


def of_kernel(spec: Spec) -> list[float]:
    """Return the features that all points of a kernel share; sizes are logarithms."""
    height, width = spec.output_hw
    taps = getattr(spec, "kernel", (1, 1))
    sizes = [
        spec.images,
        *(height, width, spec.read_channels, spec.output_channels, taps[0], taps[1]),
        getattr(spec, "strides", (1, 1))[1],
        spec.groups,
        max(1, spec.macs),
    ]
    flags = [
        *(type(spec).__name__ == kind for kind in KINDS),
        any(getattr(spec, "pads", ())),
        spec.ternary,
        spec.rank == 2,
        getattr(spec, "method", "direct") != "direct",
        any(step.op not in ("threshold", "bits", "store") for step in spec.steps),
        len(spec.steps),
    ]
    return [*(math.log2(size) for size in sizes), *map(float, flags)]


def of_point(spec: Spec, point: Mapping[str, int]) -> list[float]:
    """Return the features of a point: its values, and the remainders at the edges."""
    _, width = spec.output_hw
    blocks = layout.blocks(spec.output_channels)
    columns, vectors = point.get("columns", 1), point.get("vectors", 1)
    tiles = -(-width // columns)
    return [
        *(float(point.get(name, 0)) for name in CHOICES),
        float(columns * vectors),
        width / (tiles * columns),
        blocks / (-(-blocks // vectors) * vectors),
        1 / columns + 1 / vectors,
    ]


def extractor() -> Any:
    """Return MetaSchedule's form of this: a row of numbers for each candidate."""
    import tvm
    from tvm.ir.utils import derived_object
    from tvm.s_tir import meta_schedule as ms

    @derived_object
    class Extractor(ms.feature_extractor.PyFeatureExtractor):
        def extract_from(self, context: Any, candidates: list[Any]) -> list[Any]:
            spec = Workload(str(context.mod["main"].attrs["bnncc.spec"])).kernel
            fixed = of_kernel(spec)
            rows = [
                [*fixed, *of_point(spec, point_of_module(candidate.sch.mod))]
                for candidate in candidates
            ]
            return [tvm.runtime.tensor(np.array([row], np.float32)) for row in rows]

    return Extractor()
