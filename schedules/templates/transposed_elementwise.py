"""Elementwise kernels that mix NHWC and NCHW: tiles of values, transposed in registers.

A tile is `LANES` pixels x `LANES` channels. It is held with channels in the lanes, or with pixels
in the lanes, and is transposed by four rounds of two-register shuffles whenever a step needs it the
other way. When to transpose is the algorithm; with loads of single lanes, which scheduling
`definitions.elementwise` gives, 64 channels of 56 x 56 pixels take 1.6 to 1.8 times as long with
AVX-512. It is tested against that definition.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.templates.epilogue import emit, half_view, views
from bnncc.schedules.templates.kernel import (
    Expr,
    bind,
    const,
    f32,
    lanes_of,
    load,
    loop,
    loops,
    splat,
    store,
    to_float,
)
from bnncc.schedules.templates.vector_algebra import VECTOR
from bnncc.topi_binary.algebra import changed
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Elementwise
from bnncc.topi_binary.step import TENSORS, Step, step_inputs, step_outputs


def write_transposed(kernel: Operator, spec: Elementwise, parallel: bool) -> None:
    """Write the kernel of `spec`, whose height is 1.

    Parameters
    ----------
    kernel : Operator
        Where to.
    spec : Elementwise
        The kernel, flattened.
    parallel : bool
        Whether tiles are divided among threads.
    """
    outputs = views(spec.steps, kernel.outputs, spec.channels)
    rows, last_row = divmod(spec.width, LANES)
    blocks, last_block = divmod(spec.channels, LANES)
    for count, first, pixels in ((rows, 0, LANES), (1 if last_row else 0, rows, last_row)):
        if not count:
            continue
        with loops([kernel.n, count], parallel=parallel) as (n, turn):
            pixel = bind((turn + first) * LANES)
            for number, start, lanes in (
                (blocks, 0, LANES),
                (1 if last_block else 0, blocks, last_block),
            ):
                if number:
                    with loop(number) as group:
                        block = bind(group + start)
                        _Tile(kernel, spec, outputs, n, pixel, pixels, block, lanes).write()


def _value_of(spec: Elementwise, data: list[Expr], at: Place) -> Expr:
    """Return the value that the steps start from, lanes being channels.

    Parameters
    ----------
    spec : Elementwise
        The kernel.
    data : list of Buffer
        Its data, planes of bits as half words.
    at : Place
        Where the vector lies.

    Returns
    -------
    Expr of float32x16
        Undefined in lanes beyond the last channel.
    """
    if spec.planes:
        level = f32(0.0)
        for number, plane in enumerate(data):
            ones = lanes_of(plane[tuple(at.index(at.block))])
            level = level + T.Select(ones, f32(2.0**number), f32(0.0))
        return level
    if not spec.from_bits:
        return to_float(load(data[0], at.index(at.channel()), at.lanes), spec.dtype)
    ones = lanes_of(data[0][tuple(at.index(at.block))])
    value = T.Select(ones, f32(1.0), f32(0.0 if spec.mode == "and" else -1.0))
    if spec.ternary:
        value = T.Select(lanes_of(data[1][tuple(at.index(at.block))]), f32(0.0), value)
    return value


class _Tile:
    """One tile of values."""

    def __init__(
        self, kernel: Operator, spec: Elementwise, outputs: list[Any], n: Expr, pixel: Expr,
        pixels: int, block: Expr, lanes: int,
    ) -> None:  # fmt: skip
        self.kernel, self.spec, self.outputs = kernel, spec, outputs
        self.n, self.pixel, self.pixels = n, pixel, pixels
        self.block, self.lanes = block, lanes
        self.by_channel = False
        self.values: list[Expr] = []

    def write(self) -> None:
        """Load, apply all steps, store."""
        count = self.spec.data_tensors
        self._load(self.kernel.inputs[:count])
        inputs, results = iter(self.kernel.inputs[count:]), iter(self.outputs)
        for step in self.spec.steps:
            taken = [next(inputs) for _ in range(step_inputs(step))]
            made = [next(results) for _ in range(step_outputs(step))]
            self._turn(step)
            self.values = [T.Bind(value) for value in self.values]
            if step.op == "store":
                for number, value in enumerate(self.values):
                    store(made[0], self._at(number), value, self._valid)
            elif step.op in ("bits", "levels"):
                for number, value in enumerate(self.values):
                    emit([step], value, taken, made, self._place(number))
            else:
                self.values = [
                    changed(VECTOR, step, value, self._params(step, taken, number))
                    for number, value in enumerate(self.values)
                ]

    def _load(self, data: list[Any]) -> None:
        self.by_channel = not self.spec.packed and self.spec.data_layout == "NCHW"
        if self.spec.packed:
            data = [half_view(plane, self.spec.channels) for plane in data]
        for number in range(self._count):
            if self.by_channel:
                value = to_float(load(data[0], self._at(number), self._valid), self.spec.dtype)
            else:
                value = _value_of(self.spec, data, self._place(number))
            self.values.append(T.Bind(value))

    @property
    def _count(self) -> int:
        """Vectors that hold something: channels or pixels."""
        return self.lanes if self.by_channel else self.pixels

    @property
    def _valid(self) -> int:
        """Lanes that hold something."""
        return self.pixels if self.by_channel else self.lanes

    def _at(self, number: int) -> list[Expr]:
        """Return the index of vector `number` in a tensor of the current layout."""
        channel = self.block * LANES
        if self.by_channel:
            return [self.n, channel + number, const(0), self.pixel]
        return [self.n, const(0), self.pixel + number, channel]

    def _place(self, number: int) -> Place:
        where = bind(self.pixel + number)
        return Place(self.n, const(0), where, self.block, self.spec.channels, self.lanes)

    def _params(self, step: Step, taken: list[Any], number: int) -> list[Expr]:
        if step.op in TENSORS:
            return [load(taken[0], self._at(number), self._valid)]
        channel = self.block * LANES
        outer = [self.n] if step.op == "gate" else []
        if self.by_channel:
            return [splat(buffer[tuple([*outer, channel + number])]) for buffer in taken]
        valid = self.lanes if step.op == "gate" else LANES
        return [load(buffer, [*outer, channel], valid) for buffer in taken]

    def _turn(self, step: Step) -> None:
        """Transpose the tile if `step` needs it the other way."""
        wanted = self.by_channel
        if step.op in ("bits", "levels"):
            wanted = False
        elif step.op in ("store", *TENSORS):
            wanted = step.layout == "NCHW"
        if wanted == self.by_channel:
            return
        spare = [f32(0.0)] * (LANES - len(self.values))
        self.values = transpose(self.values + spare)
        self.by_channel = wanted
        self.values = self.values[: self._count]


def transpose(rows: list[Expr]) -> list[Expr]:
    """Return the columns of a tile of `LANES` vectors as vectors."""
    distance = 1
    while distance < LANES:
        turned = list(rows)
        for i in range(LANES):
            if i & distance:
                continue
            low, high = rows[i], rows[i + distance]
            first, second = [], []
            for position in range(LANES):
                upper = bool(position & distance)
                first.append(position - distance + LANES if upper else position)
                second.append(position + LANES if upper else position + distance)
            turned[i] = T.Bind(_shuffle(low, high, first))
            turned[i + distance] = T.Bind(_shuffle(low, high, second))
        rows = turned
        distance *= 2
    return rows


def _shuffle(low: Expr, high: Expr, lanes: list[int]) -> Expr:
    return tirx.Shuffle([low, high], [tirx.IntImm("int32", lane) for lane in lanes])
