"""Bits of a uint8 image: thresholds of channels, a threshold of grey values, local patterns.

Lanes are pixels, contiguous in memory, so bits are never packed across lanes: the word of a pixel
is the OR of one bit per channel. Channels-last images are deinterleaved in registers. The last
vector of a row starts early enough to end with the row, and overlaps pixels that are already done.
That and the deinterleaving make it a template; it is tested against `definitions.image_bits`, which
computes bit by bit.

References
----------
.. [1] Khan et al., "Binarized Convolutional Neural Networks for Efficient Inference on GPUs",
   EUSIPCO 2018, section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import or_

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin import imported
from bnncc.schedules.intrin_portable import less
from bnncc.schedules.intrin_x86 import DOT_PAIRS
from bnncc.schedules.templates.kernel import (
    Buffer,
    Expr,
    Register,
    bind,
    const,
    flat,
    loop,
    ramp,
    splat,
    u32,
)
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.spec import GREY, NEIGHBOURS, ImageBits

_EDGE = 16
"""Columns of zeros on both sides of a row of grey values, for the neighbours of its ends."""

_ROWS = 4
"""Rows of grey values in the ring: three that are compared, and one being written."""

_UNROLLED = 8
"""Maximum number of vectors per row without a loop."""


def image_bits(spec: ImageBits, machine: str = "") -> tirx.PrimFunc:
    """Write the kernel that computes the bits of an image.

    Parameters
    ----------
    spec : ImageBits
        Spec of the kernel.
    machine : str, default ""
        Instructions for products of number pairs, ``x86-512``, if the target has any.

    Returns
    -------
    tirx.PrimFunc
        The kernel: straight-line code on vectors of pixels. It needs no schedule.
    """
    with Operator(spec) as kernel, ExitStack() as stack:
        if machine == "x86-512":
            stack.enter_context(imported(DOT_PAIRS[512].source, less.source))
        data, out = flat(kernel.inputs[0]), flat(kernel.outputs[0])
        with loop(kernel.n) as n:
            if spec.kind == "lbp" and _fits_registers(spec.width, machine):
                _patterns_in_registers(spec, data, out, n, machine)
            elif spec.kind == "lbp":
                _patterns(spec, data, out, n)
            else:
                _pixelwise(spec, data, out, n, machine)
    return kernel.func


def _pixelwise(spec: ImageBits, data: Buffer, out: Buffer, n: Expr, machine: str) -> None:
    """Write bits that depend on their own pixel only."""
    area = spec.height * spec.width
    word, most = (_grey_word, 16) if spec.kind == "grey" else (_threshold_word, 64)
    if spec.data_layout == "NHWC":
        most = 16
    lanes = _lanes(area, most)
    if spec.kind == "grey" and area % 16 == 0 and _pairs_fit(spec, area, machine):
        for begin, end in ((0, area // 16 - 1), (area // 16 - 1, area // 16)):
            with loop(end - begin) as number:
                pixel = bind((number + begin) * 16)
                grey = _grey_of_pairs(spec, data, n, pixel, machine, last=begin > 0)
                T.buffer_store(out, _grey_bits(spec, grey, 16), [_at(n * area + pixel, 16)])
        return
    with _vectors(area, lanes) as pixel:
        bits = word(spec, data, n, pixel, lanes)
        T.buffer_store(out, bits, [_at(n * area + pixel, lanes)])


def _lanes(size: int, most: int) -> int:
    """Return how many of `size` pixels to process at once: a whole vector, or one."""
    return next(lanes for lanes in (most, 16, 1) if lanes <= size)


def _at(base: Expr, lanes: int) -> Expr:
    return ramp(base, lanes) if lanes > 1 else base


def _all(value: Expr, lanes: int) -> Expr:
    return splat(value, lanes) if lanes > 1 else value


def _typed(dtype: str, lanes: int) -> str:
    return f"{dtype}x{lanes}" if lanes > 1 else dtype


@contextmanager
def _vectors(size: int, lanes: int) -> Iterator[Expr]:
    """Loop over the first pixels of vectors that cover `size` pixels."""
    with loop(-(-size // lanes)) as number:
        if size % lanes == 0:
            yield number * lanes
        else:
            yield bind(T.min(number * lanes, const(size - lanes)))


def _in_row(size: int, lanes: int, write: Callable[[Expr], None]) -> None:
    """Call `write` with the first pixels of vectors that cover a row, without a loop if few do."""
    count = -(-size // lanes)
    if count <= _UNROLLED:
        for number in range(count):
            write(const(min(number * lanes, size - lanes)))
        return
    with _vectors(size, lanes) as first:
        write(first)


def _interleaved(spec: ImageBits, lanes: int) -> bool:
    """Whether pixels are loaded as words: three bytes, and an undefined fourth."""
    return spec.data_layout == "NHWC" and spec.channels == 3 and lanes > 1


def _words(spec: ImageBits, data: Buffer, n: Expr, pixel: Expr, lanes: int) -> Expr:
    """Return the bytes of `lanes` interleaved pixels, four per pixel."""
    start = (n * spec.height * spec.width + pixel) * 3
    parts, order = [], []
    for group in range(lanes // 4):
        first = min(12 * group, 3 * lanes - 16)  # the last load must not exceed the pixels
        parts.append(data[ramp(start + first, 16)])
        base = 16 * group + 12 * group - first
        order += [base + 3 * k + min(c, 2) for k in range(4) for c in range(4)]
    return tirx.Shuffle(parts, [tirx.IntImm("int32", k) for k in order])


def _channels(spec: ImageBits, data: Buffer, n: Expr, pixel: Expr, lanes: int) -> list[Expr]:
    """Return the bytes of each channel of `lanes` pixels."""
    area, channels = spec.height * spec.width, spec.channels
    if spec.data_layout == "NCHW" or channels == 1:
        starts = [(n * channels + c) * area + pixel for c in range(channels)]
        return [data[_at(start, lanes)] for start in starts]
    start = (n * area + pixel) * channels
    if lanes == 1:
        return [data[start + c] for c in range(channels)]
    whole = data[ramp(start, lanes * channels)]
    return [
        tirx.Shuffle([whole], [tirx.IntImm("int32", c + channels * k) for k in range(lanes)])
        for c in range(channels)
    ]


def _threshold_word(spec: ImageBits, data: Buffer, n: Expr, pixel: Expr, lanes: int) -> Expr:
    """Return the words of `lanes` pixels: bit c is set if channel c reaches its threshold."""
    some, none = _choices(spec)
    limits = [min(max(t, 0), 255) for t in spec.thresholds]
    if _interleaved(spec, lanes):
        yes, no, least = (_bytes(v, lanes) for v in (some, none, limits))
        x = _words(spec, data, n, pixel, lanes)
        bits = T.reinterpret(f"uint32x{lanes}", T.Select(x >= least, yes, no))
        return (bits | bits >> u32(8, lanes) | bits >> u32(16, lanes)) & u32(7, lanes)
    parts = []
    for c, x in enumerate(_channels(spec, data, n, pixel, lanes)):
        least = _all(tirx.IntImm("uint8", limits[c]), lanes)
        yes, no = (_all(tirx.IntImm("uint8", v[c]), lanes) for v in (some, none))
        parts.append(T.Select(x >= least, yes, no))
    return T.Cast(_typed("uint32", lanes), reduce(or_, parts))


def _choices(spec: ImageBits) -> tuple[list[int], list[int]]:
    """Return the bits that each channel sets if its threshold is reached, and if not."""
    some, none = [], []
    for c, threshold in enumerate(spec.thresholds):
        pair = (1 << c, 0) if not any(spec.flip[c : c + 1]) else (0, 1 << c)
        some.append(pair[threshold > 255])  # above all bytes: never reached
        none.append(pair[1])
    return some, none


def _bytes(values: Sequence[int], lanes: int) -> Expr:
    """Return the bytes of words: three given ones and a zero."""
    word = sum(value << 8 * k for k, value in enumerate(values))
    return T.reinterpret(f"uint8x{4 * lanes}", u32(word, lanes))


def _grey(spec: ImageBits, data: Buffer, n: Expr, pixel: Expr, lanes: int) -> Expr:
    """Return the grey values of `lanes` pixels, times 1000."""
    if _interleaved(spec, lanes):
        word = T.reinterpret(f"uint32x{lanes}", _words(spec, data, n, pixel, lanes))
        bytes_ = [word >> u32(8 * c, lanes) & u32(255, lanes) for c in range(3)]
        channels = [T.Cast(f"int32x{lanes}", b) for b in bytes_]
    else:
        loaded = _channels(spec, data, n, pixel, lanes)
        channels = [T.Cast(_typed("int32", lanes), x) for x in loaded]
    parts = [
        x * _all(tirx.IntImm("int32", weight), lanes)
        for x, weight in zip(channels, GREY, strict=True)
    ]
    return parts[0] + parts[1] + parts[2]


def _pairs_fit(spec: ImageBits, run: int, machine: str) -> bool:
    """Whether `_grey_of_pairs` is faster, and has enough pixels around it in runs of `run`."""
    return machine == "x86-512" and _interleaved(spec, 16) and run > 16


def _grey_of_pairs(
    spec: ImageBits, data: Buffer, n: Expr, pixel: Expr, machine: str, last: bool
) -> Expr:
    """Return the grey values of 16 interleaved pixels, with one product for red and blue.

    One load reads 16 bytes beyond the pixels, or, if they are `last`, before them.
    """
    start = (n * spec.height * spec.width + pixel) * 3 - (16 if last else 0)
    words = T.reinterpret("uint32x16", data[ramp(start, 64)])
    order = [3 * (k // 4) + min(k % 4, 2) + (4 if last else 0) for k in range(16)]
    fours = tirx.Shuffle([words], [tirx.IntImm("int32", k) for k in order])
    bytes_ = T.Bind(T.reinterpret("uint8x64", fours))
    none = splat(tirx.IntImm("uint8", 0), 64)

    def picked(low: int, high: int | None) -> Expr:
        """Return one channel of each pixel in the low 16 bits, and another in the high 16."""
        index = []
        for k in range(16):
            first = 16 * (k // 4) + 3 * (k % 4)
            index += [first + low, 64, 64 if high is None else first + high, 64]
        shuffled = tirx.Shuffle([bytes_, none], [tirx.IntImm("int32", k) for k in index])
        return T.reinterpret("int32x16", shuffled)

    red, green, blue = GREY
    total = picked(1, None) * splat(tirx.IntImm("int32", green), 16)
    weights = splat(tirx.IntImm("int32", red | blue << 16), 16)
    return DOT_PAIRS[512](total, picked(0, 2), weights)


def _grey_word(spec: ImageBits, data: Buffer, n: Expr, pixel: Expr, lanes: int) -> Expr:
    """Return the words of `lanes` pixels: all bits are set if the grey value reaches its limit."""
    return _grey_bits(spec, _grey(spec, data, n, pixel, lanes), lanes)


def _grey_bits(spec: ImageBits, grey: Expr, lanes: int) -> Expr:
    """Return the words for grey values."""
    less = _all(tirx.IntImm("int32", spec.thresholds[0] - 1), lanes) - grey
    sign = T.Cast(_typed("uint32", lanes), less >> _all(tirx.IntImm("int32", 31), lanes))
    return sign & _word((1 << spec.out_channels) - 1, lanes)


def _word(value: int, lanes: int) -> Expr:
    return _all(tirx.IntImm("uint32", value), lanes)


def _fits_registers(width: int, machine: str) -> bool:
    """Whether three rows of grey values are whole vectors that fit AVX-512's 32 registers."""
    return machine == "x86-512" and width % 16 == 0 and width <= 16 * _UNROLLED


def _patterns_in_registers(
    spec: ImageBits, data: Buffer, out: Buffer, n: Expr, machine: str
) -> None:
    """Write local patterns with rows of grey values in registers only.

    The left neighbours of a row are compared with by the rows below and above it, so they are
    shifted by a lane only once.
    """
    count, lanes = spec.width // 16, range(16)
    zero = splat(tirx.IntImm("int32", 0), 16)
    greys, left, above = ([Register("int32", 16) for _ in range(count)] for _ in range(3))

    def moved(first: Expr, second: Expr, by: int) -> Expr:
        return tirx.Shuffle([first, second], [tirx.IntImm("int32", by + k) for k in lanes])

    def grey_of(row: Expr, i: int) -> Expr:
        pixel = bind(row * spec.width) + 16 * i
        if _pairs_fit(spec, spec.width, machine):
            return _grey_of_pairs(spec, data, n, pixel, machine, last=i == count - 1)
        return _grey(spec, data, n, pixel, 16)

    def write(row: Expr, last: bool) -> None:
        for i in range(count):
            grey = zero if last else grey_of(row + 1, i)
            beside = greys[i + 1].value if i + 1 < count else zero
            right = moved(greys[i].value, beside, 1)
            values = greys[i].value, above[i].value
            word = T.Bind(less(*values))
            more = word | _word(2, 16)
            seen = T.Bind(T.Select(right > greys[i].value, more, word))
            centre = T.Bind(greys[i].value)
            greys[i].set(grey)
            above[i].set(left[i].value)
            left[i].set(moved(greys[i - 1].value if i else zero, greys[i].value, 15))
            more = seen | _word(4, 16)
            T.buffer_store(
                out, T.Select(left[i].value > centre, more, seen),
                [_at((n * spec.height + row) * spec.width + 16 * i, 16)],
            )  # fmt: skip

    for i in range(count):
        greys[i].set(grey_of(const(0), i))
        above[i].set(zero)
        left[i].set(moved(greys[i - 1].value if i else zero, greys[i].value, 15))
    with loop(spec.height - 1) as row:
        write(row, False)
    write(const(spec.height - 1), True)


def _patterns(spec: ImageBits, data: Buffer, out: Buffer, n: Expr) -> None:
    """Write local patterns, with a ring buffer of grey rows padded by zeros.

    Grey values are written two rows ahead: a load that overlaps two recent stores would stall.
    """
    height, width = spec.height, spec.width
    lanes = _lanes(width, 16)
    length = width + 2 * _EDGE
    ring = T.sblock_alloc_buffer((_ROWS * length,), "int32")

    def clear(row: Expr) -> None:
        with loop(length) as column:
            at = row % _ROWS * length + column
            T.buffer_store(ring, tirx.IntImm("int32", 0), [at])

    def fill(row: Expr) -> None:
        slot = bind(row % _ROWS * length + _EDGE)

        def write(column: Expr) -> None:
            grey = _grey(spec, data, n, bind(row * width) + column, lanes)
            T.buffer_store(ring, grey, [_at(slot + column, lanes)])

        _in_row(width, lanes, write)

    def compare(row: Expr) -> None:
        slots = [bind((row + dy + _ROWS) % _ROWS * length + _EDGE) for dy in (-1, 0, 1)]
        first = bind((n * height + row) * width)

        def at(dy: int, column: Expr, dx: int) -> Expr:
            return ring[_at(slots[dy + 1] + column + dx, lanes)]

        def write(column: Expr) -> None:
            centre, word = at(0, column, 0), _word(0, lanes)
            for number, (dy, dx) in enumerate(NEIGHBOURS):
                more = word | _word(1 << number, lanes)
                word = T.Select(at(dy, column, dx) > centre, more, word)
            T.buffer_store(out, word, [_at(first + column, lanes)])

        _in_row(width, lanes, write)

    for slot in range(_ROWS):
        clear(const(slot))
    for row in range(min(_ROWS - 2, height)):
        fill(const(row))
    with loop(height) as row:
        with T.If(row + _ROWS - 2 < height):
            with T.Then():
                fill(row + _ROWS - 2)
            with T.Else():
                clear(row + _ROWS - 2)
        compare(row)
