"""Elementwise kernels that read or write NCHW tensors; lanes are pixels.

If all tensors are NCHW, a word of bits is built without moving data between lanes: comparisons of
32 channels are masked to one bit each and ORed. This loop order, with pixels innermost and the
channels of a word around them, is why this is a template: in a definition's epilogue, lanes are
channels, and no schedule primitive exchanges them. With those lanes, signs of 64 channels of 56 x
56 pixels take 3.1 times as long with AVX2, and 3.5 times with AVX-512.

If NHWC tensors are involved, a tile of `LANES` pixels x `LANES` channels is held in registers with
either channels or pixels as lanes. It is transposed by four rounds of two-register shuffles
whenever a step needs the other orientation. Scheduled from the definition, with loads of single
lanes, 64 channels of 56 x 56 pixels take 1.6 to 1.8 times as long with AVX-512. Both variants are
tested against `definitions.elementwise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.templates.epilogue import emit, half_view, views
from bnncc.schedules.templates.kernel import (
    Buffer,
    Expr,
    Register,
    bind,
    const,
    f32,
    lane,
    lanes_of,
    load,
    loop,
    loops,
    splat,
    store,
    to_float,
    u32,
)
from bnncc.schedules.templates.vector_algebra import VECTOR
from bnncc.topi_binary import layout
from bnncc.topi_binary.algebra import changed, conditions
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.layout import LANES, WORD_BITS
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import Elementwise
from bnncc.topi_binary.step import TENSORS, Step, with_tensors, writers


def _parts(extent: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield groups of equal parts: how many, the index of the first, and their length."""
    full, rest = divmod(extent, size)
    if full:
        yield full, 0, size
    if rest:
        yield 1, full, rest


def _each(
    kernel: Operator,
    spec: Elementwise,
    size: int,
    parallel: bool,
    write: Callable[[Expr, Expr, int, Expr, int], None],
) -> None:
    """Write loops over vectors of pixels and over groups of `size` channels.

    `write` takes an image, the first pixel, the number of pixels, the index of the group, and its
    number of channels.
    """
    for turns, first, pixels in _parts(spec.width, LANES):
        with loops([kernel.n, turns], parallel=parallel) as (n, turn):
            pixel = bind((turn + first) * LANES)
            for count, start, channels in _parts(spec.channels, size):
                with loop(count) as number:
                    write(n, pixel, pixels, bind(number + start), channels)


def write_nchw(kernel: Operator, spec: Elementwise, parallel: bool) -> None:
    """Write the kernel of a flattened `spec` (height 1) whose tensors are all NCHW."""
    _each(kernel, spec, WORD_BITS, parallel, partial(_word, kernel, spec))


def _word(
    kernel: Operator, spec: Elementwise, n: Expr, pixel: Expr, valid: int, word: Expr, channels: int
) -> None:
    data, *params = kernel.inputs
    made = zip(kernel.outputs, writers(spec.steps), strict=True)
    planes = [buffer for buffer, step in made if step.op == "bits"]
    packed = [Register("uint32") for _ in planes]
    for register in packed:
        register.set(u32(0))
    if not packed:
        with loop(channels) as number:
            channel = bind(word * WORD_BITS + number)
            _channel(kernel, spec.steps, data, params, [], (n, channel, pixel, 0), valid)
        return
    for bit in range(channels):
        channel = bind(word * WORD_BITS + bit)
        _channel(kernel, spec.steps, data, params, packed, (n, channel, pixel, bit), valid)
    for plane, register in zip(planes, packed, strict=True):
        if layout.words(spec.channels) == 1:
            row = T.decl_buffer((kernel.n, const(spec.width)), "uint32", data=plane.data)
            store(row, [n, pixel], register.value, valid)
            continue
        value = T.Bind(register.value)
        for number in range(valid):
            T.buffer_store(plane, lane(value, number), [n, const(0), pixel + number, word])


def _channel(
    kernel: Operator,
    steps: Sequence[Step],
    data: Buffer,
    params: Sequence[Buffer],
    packed: Sequence[Register],
    at: tuple[Any, Any, Any, int],
    valid: int,
) -> None:
    """Write all steps for one channel of a vector of pixels."""
    n, channel, pixel, bit = at
    where = [n, channel, const(0), pixel]
    value = to_float(load(data, where, valid), str(data.dtype))
    words = iter(packed)
    for step, taken, made in with_tensors(steps, params, kernel.outputs):
        if step.op in ("store", "bits"):
            value = T.Bind(value)
        if step.op == "store":
            store(made[0], where, value, valid)
        elif step.op == "bits":
            for condition in conditions(VECTOR, step, value, ()):
                word = next(words)
                word.set(word.value | T.Select(condition, u32(1 << bit), u32(0)))
        elif step.op in TENSORS:
            value = changed(VECTOR, step, value, [load(taken[0], where, valid)])
        else:
            place = [n, channel] if step.op == "gate" else [channel]
            params = [splat(buffer[tuple(place)]) for buffer in taken]
            value = changed(VECTOR, step, value, params)


def write_transposed(kernel: Operator, spec: Elementwise, parallel: bool) -> None:
    """Write the kernel of a flattened `spec` (height 1) in tiles that are transposed as needed."""
    outputs = views(spec.steps, kernel.outputs, spec.channels)
    _each(kernel, spec, LANES, parallel, lambda *at: _Tile(kernel, spec, outputs, *at).write())


def _value_of(spec: Elementwise, data: list[Expr], at: Place) -> Expr:
    """Return the initial value of the steps, with channels as lanes.

    Planes of bits are given as half words. Lanes beyond the last channel are undefined.
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
    """A tile of values in registers."""

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
        """Load the tile, apply all steps, and store."""
        count = self.spec.data_tensors
        self._load(self.kernel.inputs[:count])
        params = self.kernel.inputs[count:]
        for step, taken, made in with_tensors(self.spec.steps, params, self.outputs):
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
        """Number of vectors in use: channels or pixels."""
        return self.lanes if self.by_channel else self.pixels

    @property
    def _valid(self) -> int:
        """Number of lanes in use."""
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
        """Transpose the tile if `step` needs the other orientation."""
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
    """Transpose a tile of `LANES` vectors."""
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
