"""Nothing but an epilogue on a tensor: bit packing, unpacking, glue between layers, layout changes.

Three ways, by where the values lie in memory:

* data and all tensors NHWC (or 2-d): lanes are channels, bits are compares of a vector;
* data and all tensors NCHW: lanes are pixels, a word is the OR of 32 masked compares
  (`planar`); no value is moved between lanes;
* mixed: squares of `LANES` pixels x `LANES` channels are transposed in registers (`square`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tvm import tirx

from bnncc.schedules.templates.epilogue import emit, half_view, views
from bnncc.schedules.templates.kernel import bind, const, loop, loops
from bnncc.schedules.templates.place import Place
from bnncc.schedules.templates.planar import write_planar
from bnncc.schedules.templates.source import value_of
from bnncc.schedules.templates.square import write_squares
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Elementwise
from bnncc.topi_binary.step import TENSORS

_LAID_OUT = ("store", *TENSORS)
"""Steps that touch a float tensor with a layout."""


@dataclass(frozen=True)
class Tile:
    """How an elementwise kernel is cut.

    Attributes
    ----------
    vectors : int, default 1
        Vectors of channels in one turn of the loop.
    parallel : bool, default False
        Whether pixels are divided among threads.
    """

    vectors: int = 1
    parallel: bool = False


def elementwise(spec: Elementwise, tile: Tile | None = None) -> tirx.PrimFunc:
    """Define an epilogue without an anchor.

    Parameters
    ----------
    spec : Elementwise
        What it computes.
    tile : Tile, optional
        How it is cut.

    Returns
    -------
    tirx.PrimFunc
        ``out[n, y, x, c] = epilogue(data[n, y, x, c])``.
    """
    tile = tile or Tile()
    flat = _flattened(spec)
    layouts = _layouts(spec)
    with Operator(spec) as kernel:
        kernel.reshape(flat)
        if in_vectors(spec):
            _write_rows(kernel, flat, tile)
        elif layouts == {"NCHW"} and not spec.packed:
            write_planar(kernel, flat, tile.parallel)
        else:
            write_squares(kernel, flat, tile.parallel)
    return kernel.func


def in_vectors(spec: Elementwise) -> bool:
    """Return whether lanes are channels, several vectors of which can be in one turn of a loop."""
    return spec.rank == 2 or _layouts(spec) <= {"NHWC"}


def _layouts(spec: Elementwise) -> set[str]:
    layouts = {step.layout for step in spec.steps if step.op in _LAID_OUT}
    if any(step.op == "levels" for step in spec.steps):
        layouts.add("NHWC")
    return layouts if spec.packed else layouts | {spec.data_layout}


def _flattened(spec: Elementwise) -> Elementwise:
    """Return `spec` with all rows of an image laid end to end."""
    if spec.rank == 2:
        return spec
    return dataclasses.replace(spec, height=1, width=spec.height * spec.width)


def _write_rows(kernel: Operator, spec: Elementwise, tile: Tile) -> None:
    count = spec.data_tensors
    outputs = views(spec.steps, kernel.outputs, spec.channels)
    params = kernel.inputs[count:]
    data = kernel.inputs[:count]
    if spec.packed:
        data = [half_view(plane, spec.channels) for plane in data]
    full, tail = divmod(spec.channels, LANES)
    whole, rest = divmod(full, tile.vectors)
    groups = [(whole, 0, [LANES] * tile.vectors)] if whole else []
    if rest or tail:
        groups.append((1, whole * tile.vectors, [LANES] * rest + [tail] * bool(tail)))
    with loops([kernel.n, spec.width], parallel=tile.parallel) as (n, w):
        for number, first, lanes in groups:
            with loop(number) as group:
                for vector, valid in enumerate(lanes):
                    block = bind(group * len(lanes) + (first + vector))
                    at = Place(n, const(0), w, block, spec.channels, valid, spec.rank)
                    emit(spec.steps, value_of(spec, data, at), params, outputs, at)
