"""Data of a quantized convolution: rows in the format of the operands, with taps contiguous.

Each image row is converted once, into a ring buffer of padded rows with channels last. For each
output row, the taps of each pixel are then copied next to each other. So products run over whole
words, whatever the width of the kernel, and no tap is outside the image. Part of the template
`quantized_conv2d`; the definition is `definitions.conv2d`.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import round_to_even, rounded_to_bfloat16
from bnncc.schedules.intrin_x86 import TO_BFLOAT16
from bnncc.schedules.templates.kernel import (
    Expr,
    Register,
    bind,
    const,
    f32,
    first_lanes,
    flat,
    load,
    loop,
    splat,
    store,
)
from bnncc.schedules.templates.line_buffer import Strip, ring_size, within_height
from bnncc.topi_binary import quantization
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import Conv2d

ELEMENT = {1: "float32", 2: "uint16", 4: "uint8"}
"""Storage type of an operand, by operands per word."""

LONGEST_MOVE = {1: 16, 2: 16, 4: 32}
"""Operands copied at once."""

MAXIMA = 4
"""Number of independent maxima, so that none waits for the previous operation."""


class Taps:
    """The data of one convolution.

    Parameters
    ----------
    spec : Conv2d
        Spec of the convolution.
    data : Buffer
        Its input.

    Attributes
    ----------
    scale : Expr or None
        Value of one unit of an int8 sum, if the image is scaled at run time.
    """

    def __init__(self, spec: Conv2d, data: Any) -> None:
        self.spec, self.data = spec, data
        self.element = ELEMENT[spec.packed]
        self.width = spec.unpooled.output_hw[1]
        self.run = spec.kernel[1] * spec.channels
        self.move = 8
        while self.move < min(self.run, LONGEST_MOVE[spec.packed]):
            self.move *= 2
        self.moves = -(-self.run // self.move)
        self.pixel = quantization.words(spec) * spec.packed
        self.group = LANES * spec.channels
        read = (self.width - 1) * spec.strides[1] * spec.channels + self.moves * self.move
        written = spec.pads[1] * spec.channels + -(-spec.width // LANES) * self.group
        length = -(-max(read, written) // self.group) * self.group
        self.slots = ring_size(spec.kernel[0])
        # One additional row stands for all rows outside the image.
        self.ring = T.sblock_alloc_buffer((self.slots + 1, length), self.element)
        spare = self.move * self.moves + LANES
        size = -(-(self.width * self.pixel + spare) // LANES) * LANES
        self.line = T.sblock_alloc_buffer((size,), self.element)
        self.dynamic = spec.operands == "int8" and not spec.zero_points
        self.scale: Expr = None
        self.inverse: Expr = None

    def begin(self, n: Expr) -> None:
        """Write the code before the rows of image `n`: its scale, and the padding."""
        slots, length = (int(extent) for extent in self.ring.shape)
        with loop(slots) as slot, loop(length // self.group) as group:
            for j in range(self.spec.channels):
                store(self.ring, [slot, group * self.group + j * LANES], self._zeros(j))
        with loop(int(self.line.shape[0]) // LANES) as vector:
            store(self.line, [vector * LANES], _constant([0] * LANES, self.element))
        if self.dynamic:
            self._measure(n)

    def fill(self, strip: Strip) -> None:
        """Convert the rows that `strip` needs and earlier strips have not, then copy its taps."""
        spec = self.spec
        top = strip.row * spec.strides[0] - spec.pads[0]
        reach = top + spec.kernel[0]
        old = T.max(top, reach - spec.strides[0])
        low = within_height(spec, T.Select(strip.row == strip.first, top, old))
        with loop(bind(T.max(within_height(spec, reach) - low, const(0)))) as number:
            row = bind(low + number)
            self._convert(strip.n, row, bind(T.bitwise_and(row, const(self.slots - 1))))
        places = []
        for kh in range(spec.kernel[0]):
            y = bind(top + kh)
            inside = T.And(y >= 0, y < spec.height)
            slot = T.Select(inside, T.bitwise_and(y, const(self.slots - 1)), const(self.slots))
            places.append(bind(slot))
        # Copies extend beyond the taps of a row, so the order of the stores matters.
        with loop(self.width) as x:
            start = bind(x * (spec.strides[1] * spec.channels))
            for kh, slot in enumerate(places):
                to = x * self.pixel + kh * self.run
                for i in range(self.moves):
                    at, lanes = i * self.move, self.move
                    store(self.line, [to + at], load(self.ring, [slot, start + at], lanes, lanes),
                          lanes, lanes)  # fmt: skip

    def place(self, x: Expr, number: Expr) -> Expr:
        """Return the index in `line` of word `number` of output column `x`."""
        return x * self.pixel + number * self.spec.packed

    def _measure(self, n: Expr) -> None:
        """Bind the scale of image `n` and its reciprocal."""
        spec, memory = self.spec, flat(self.data)
        size = spec.channels * spec.height * spec.width
        tops = [Register() for _ in range(MAXIMA)]
        for top in tops:
            top.set(f32(0.0))
        step = MAXIMA * LANES
        with loop(size // step) as turn:
            for i, top in enumerate(tops):
                at = n * size + turn * step + i * LANES
                top.set(T.max(top.value, _magnitude(load(memory, [at]))))
        most = T.sblock_alloc_buffer((LANES,), "float32")
        value = tops[0].value
        for top in tops[1:]:
            value = T.max(value, top.value)
        store(most, [0], value)

        def compare(other: Expr) -> None:
            T.buffer_store(most, T.max(most[0], other), [const(0)])

        with loop(size % step) as number:
            compare(_magnitude(memory[n * size + (size - size % step) + number], 1))
        with loop(LANES - 1) as lane:
            compare(most[lane + 1])
        top_value = bind(T.max(most[0], T.float32(quantization.SMALLEST)))
        self.inverse = bind(T.float32(quantization.LEVELS) / top_value)
        self.scale = bind(top_value / T.float32(quantization.LEVELS))

    def _convert(self, n: Expr, row: Expr, slot: Expr) -> None:
        """Convert one image row into its slot."""
        full, tail = divmod(self.spec.width, LANES)
        if full:
            with loop(full) as number:
                self._pixels(n, row, slot, bind(number * LANES), LANES)
        if tail:
            self._pixels(n, row, slot, const(full * LANES), tail)

    def _pixels(self, n: Expr, row: Expr, slot: Expr, x: Expr, valid: int) -> None:
        """Convert `LANES` pixels, of which the first `valid` are inside the image."""
        channels = self.spec.channels
        if self.spec.data_layout == "NCHW":
            apart = [self._operand(load(self.data, [n, c, row, x], valid)) for c in range(channels)]
            vectors = [_interleaved(apart, j) for j in range(channels)]
        else:
            memory = flat(self.data)
            at = ((n * self.spec.height + row) * self.spec.width + x) * channels
            vectors = []
            for j in range(channels):
                count = min(max(valid * channels - j * LANES, 0), LANES)
                if count:
                    vectors.append(self._operand(load(memory, [at + j * LANES], count)))
        for j, vector in enumerate(vectors):
            count = min(max(valid * channels - j * LANES, 0), LANES)
            if self.spec.zero_points and self.spec.packed < quantization.PACKED["int8"]:
                vector = vector - _constant(self._repeated(j), "float32")
                vector = self._bfloat16(vector) if self.spec.packed > 1 else vector
            if 0 < count < LANES:
                vector = T.Select(first_lanes(count), vector, self._zeros(j))
            if count:
                place = (x + self.spec.pads[1]) * channels + j * LANES
                store(self.ring, [slot, place], vector)

    def _operand(self, value: Expr) -> Expr:
        """Convert a vector of data to the format of the operands."""
        packed = self.spec.packed
        if self.spec.zero_points:
            if packed == quantization.PACKED["int8"]:
                return value
            return T.Cast(f"float32x{LANES}", T.Cast(f"int32x{LANES}", value))
        if self.dynamic:
            scaled = value * splat(self.inverse)
            whole = round_to_even(scaled)
            if packed == 1:
                return whole
            middle = splat(tirx.IntImm("int32", quantization.MIDDLE))
            return T.Cast(f"uint8x{LANES}", T.Cast(f"int32x{LANES}", whole) + middle)
        return self._bfloat16(value)

    def _bfloat16(self, value: Expr) -> Expr:
        return TO_BFLOAT16(value) if self.spec.packed > 1 else rounded_to_bfloat16(value)

    def _zeros(self, j: int) -> Expr:
        """Return the representation of 0 in vector `j` of `channels` that repeat along a row."""
        if self.spec.packed < quantization.PACKED["int8"]:
            return _constant([0] * LANES, self.element)
        return _constant(self._repeated(j), self.element)

    def _repeated(self, j: int) -> list[int]:
        zeros = quantization.zero_bytes(self.spec)
        return [zeros[(j * LANES + i) % len(zeros)] for i in range(LANES)]


def _magnitude(value: Expr, lanes: int = LANES) -> Expr:
    kind = "" if lanes == 1 else f"x{lanes}"
    mask = tirx.IntImm("uint32", 0x7FFFFFFF)
    bits = T.bitwise_and(T.reinterpret(f"uint32{kind}", value), mask if lanes == 1 else splat(mask))
    return T.reinterpret(f"float32{kind}", bits)


def _interleaved(apart: list[Expr], j: int) -> Expr:
    """Return vector `j` of pixels with interleaved channels."""
    if len(apart) == 1:
        return apart[0]
    places = [divmod(j * LANES + i, len(apart)) for i in range(LANES)]
    return tirx.Shuffle(apart, [tirx.IntImm("int32", c * LANES + x) for x, c in places])


def _constant(values: list[int], dtype: str) -> Expr:
    one = tirx.FloatImm if dtype == "float32" else tirx.IntImm
    if len(set(values)) == 1:
        return splat(one(dtype, values[0]))
    return tirx.Shuffle(
        [one(dtype, v) for v in values], [tirx.IntImm("int32", i) for i in range(LANES)]
    )
