"""Bands: some rows of a kernel's outputs, computed by a kernel of their own from some rows of data.

The spec of a band is that of the whole kernel with fewer rows. It has padding only where the band
touches the border of the image, so that a chain of kernels can be computed band by band with
results that are the same bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from bnncc.topi_binary import borders, layout
from bnncc.topi_binary.build import input_types, output_types
from bnncc.topi_binary.kind import Windowed
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    Pool2d,
    SliceBits,
    Spec,
)
from bnncc.topi_binary.step import TENSORS, step_inputs

DATA, OUTPUT, CLASSES = "data", "output", "classes"
"""How an input follows the rows of the outputs: its rows are those in the windows; those of the
outputs; or it starts at the border class of the first row."""

_KINDS = (
    BinaryConv2d, BitwiseMaxPool, ConcatBits, Conv2d, Elementwise, FewBitConv2d, Pool2d, SliceBits,
)  # fmt: skip
"""Kinds whose outputs depend on rows of data near them."""


def has_bands(spec: Spec) -> bool:
    """Return whether some rows of the outputs of `spec` can be computed alone, as rows in NHWC."""
    if not isinstance(spec, _KINDS) or spec.n != 1 or (spec.rank, spec.output_rank) != (4, 4):
        return False
    if isinstance(spec, Conv2d):
        if spec.method == "filtered-2d":  # sums depend on the tile of rows
            return False
        if spec.operands == "int8" and not spec.zero_points:  # in units of the image's maximum
            return False
    written = [s.layout for s in spec.all_steps if s.op in (*TENSORS, "store") or s.forms]
    return spec.weight_order in layout.WEIGHT_ORDERS and set(written) <= {"NHWC"}


def inputs_by_rows(spec: Spec) -> list[str]:
    """Return `DATA`, `OUTPUT`, `CLASSES` or "" for each kernel input: "" is not by rows."""
    found = [DATA] * spec.data_tensors
    steps: list[str] = []
    for step in spec.all_steps:
        steps += [OUTPUT] if step.op in TENSORS else [""] * step_inputs(step)
    constants = [""] * (len(input_types(spec)) - len(found) - len(steps))
    if isinstance(spec, FewBitConv2d) and spec.starts:
        constants[-1] = CLASSES
    return found + constants + steps


class Window(NamedTuple):
    """The windows of a kernel, or of a part of it, along the rows of its data."""

    height: int
    """Rows of the data."""
    stride: int
    above: int
    """Rows of padding above the data."""
    reach: int
    """Rows from the first to the last of a window."""

    def read(self, rows: range) -> tuple[range, int, int]:
        """Return the rows of data that some rows of the outputs read.

        Then how many rows of padding they read above the data and below.
        """
        first = rows.start * self.stride - self.above
        last = (rows.stop - 1) * self.stride - self.above + self.reach if rows else first
        inside = range(max(0, first), max(0, min(self.height, last)))
        return inside, max(0, -first), max(0, last - self.height)


def windows(spec: Spec) -> tuple[Window, ...]:
    """Return the windows from the outputs to the data; none if each row depends on that row.

    Examples
    --------
    >>> (window,) = windows(BinaryConv2d(1, 8, 8, 32, 32, (3, 3), pads=(1, 1, 1, 1)))
    >>> window.read(range(0, 2))
    (range(0, 3), 1, 0)
    """
    return tuple(
        Window(
            stage.height, stage.strides[0], stage.pads[0],
            stage.dilations[0] * (stage.kernel[0] - 1) + 1,
        )
        for stage in _stages(spec)
    )  # fmt: skip


def padded_by_zeros(spec: Spec) -> bool:
    """Return whether rows of zeros around the data have the effect of padding.

    Weights are finite, and a sum of float products that starts at 0 is never -0: so adding their
    products with 0 changes nothing.
    """
    return isinstance(spec, Conv2d) and not spec.zero_points and bool(spec.pads[0] + spec.pads[2])


def band(spec: Spec, rows: range, padded: bool = False) -> Spec | None:
    """Return the spec of a kernel for some rows of the outputs of `spec`; None if there is none.

    If `padded`, the data are given with their padding above and below.
    """
    if rows == range(spec.output_hw[0]) and not padded:
        return spec
    made, pads = rows, []
    for stage, window in zip(_stages(spec), windows(spec), strict=True):
        made, above, below = window.read(made)
        if not made:
            return None  # only padding
        own = min(below, stage.pads[2])
        pads.append(((above, stage.pads[1], own, stage.pads[3]), below - own))
    changes: dict[str, Any] = {"height": len(made)}
    if isinstance(spec, Windowed):
        changes["pads"], extra = pads[-1]
        if isinstance(spec, Pool2d | BitwiseMaxPool):
            changes["ceil_extra"] = extra, spec.ceil_extra[1]
        elif padded:
            (above, left, below, right), _ = pads[-1]
            changes |= {"height": above + len(made) + below, "pads": (0, left, 0, right)}
    if isinstance(spec, Conv2d) and spec.pool is not None:
        around, extra = pads[0]
        after = extra, spec.pool.ceil_extra[1]
        changes["pool"] = replace(spec.pool, pads=around, ceil_extra=after)
    part = replace(spec, **changes)
    return part if _same_constants(spec, part) and part.output_hw[0] == len(rows) else None


def class_of(spec: Spec, row: int) -> int:
    """Return the index of the first initial values for output row `row`: an offset in elements."""
    assert isinstance(spec, FewBitConv2d)
    firsts = borders.classes(spec, 0)
    lanes = layout.blocks(spec.out_channels) * layout.LANES
    kind = sum(first <= row for first in firsts) - 1
    return kind * len(borders.classes(spec, 1)) * lanes


def tensor_types(spec: Spec) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and dtype of all tensors of a kernel with static shapes, outputs last."""
    return [
        (tuple(int(d) for d in shape), dtype)
        for shape, dtype in (*input_types(spec), *output_types(spec))
    ]


def _stages(spec: Spec) -> list[Windowed]:
    """Return the parts of a kernel with a window each, from the outputs to the data."""
    if isinstance(spec, Conv2d) and spec.pool is not None:
        return [spec.pooling, spec.unpooled]
    return [spec] if isinstance(spec, Windowed) else []


def _same_constants(spec: Spec, part: Spec) -> bool:
    """Return whether a band has the weights, initial values and accumulators of the whole."""
    if getattr(spec, "doubled", False) != getattr(part, "doubled", False):
        return False
    both = zip(inputs_by_rows(spec), input_types(spec), input_types(part), strict=True)
    return all(own == its for kind, own, its in both if not kind)
