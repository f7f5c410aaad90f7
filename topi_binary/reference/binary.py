"""NumPy oracle of the binary operators: plain products of unpacked values.

Deliberately simple and slow. Packing, padding, accumulators and epilogue follow the definitions in
`spec`, and share no code with the operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from bnncc.topi_binary.reference import windows
from bnncc.topi_binary.reference.epilogue import finished, nhwc
from bnncc.topi_binary.reference.packing import bits_to_words, words_to_bits
from bnncc.topi_binary.spec import BinaryConv2d, WeightsOfRows

Array = np.ndarray


def binary_conv2d(spec: BinaryConv2d, inputs: Sequence[Array]) -> list[Array]:
    """Compute what the kernel of `spec` computes."""
    stream = iter(inputs)
    data = nhwc(next(stream))
    zero = next(stream).reshape(data.shape) if spec.ternary else np.zeros_like(data)
    if spec.weight_order == "sliced" and {step.op for step in spec.steps} == {"threshold"}:
        return _sliced_signs(spec, data, zero, stream)
    if spec.per_image:
        acc = _matrix_products(spec, data, zero, stream)
    else:
        weight = read_binary_weight(spec, next(stream))
        acc = accumulate(spec, _read_data(spec, data), _read_data(spec, zero), weight)
    return finished(spec, acc, stream, acc)


def _matrix_products(
    spec: BinaryConv2d, data: Array, zero: Array, stream: Iterator[Array]
) -> Array:
    """Return the accumulators of a product of two activations, for each matrix."""
    bits = _read_lanes(spec, next(stream))
    zeros = _read_lanes(spec, next(stream)) if spec.weight_zeros else np.zeros_like(bits)
    if spec.mode == "and":
        next(stream)  # initial values: not needed here
    weights = np.where(zeros, 0, np.where(bits, 1, -1)).astype(np.int64)
    shape = (spec.out_channels, 1, 1, spec.channels)
    parts = [
        accumulate(
            spec,
            _read_data(spec, data[i : i + 1]),
            _read_data(spec, zero[i : i + 1]),
            weights[i].reshape(shape),
        )
        for i in range(data.shape[0])
    ]
    return np.concatenate(parts) if parts else np.zeros((0, 1, spec.width, spec.out_channels), int)


def _read_lanes(spec: BinaryConv2d, packed: Array) -> Array:
    """Return a plane of weights as `weights_of_rows` makes it, shape (n, rows, channels)."""
    blocks, count = -(-spec.out_channels // 16), -(-spec.channels // 32)
    rows = (
        packed.reshape(-1, blocks, count, 16).transpose(0, 1, 3, 2).reshape(-1, blocks * 16, count)
    )
    return words_to_bits(rows[:, : spec.out_channels], spec.channels)


def weights_of_rows(spec: WeightsOfRows, inputs: Sequence[Array]) -> list[Array]:
    """Compute what the kernel of `spec` computes."""
    (data,) = inputs
    n, rows, words = data.shape
    full = np.zeros((n, -(-rows // 16) * 16, words), np.uint32)
    full[:, :rows] = data
    weight = full.reshape(n, -1, 16, words).transpose(0, 1, 3, 2).reshape(n, -1)
    starts = -words_to_bits(full, 32 * words).sum(axis=2).astype(np.int32)
    return [weight, starts] if spec.count else [weight]


def _sliced_signs(
    spec: BinaryConv2d, data: Array, zero: Array, stream: Iterator[Array]
) -> list[Array]:
    """Compute a convolution whose thresholds are stored as limits of the kernel's count."""
    weight = read_binary_weight(spec, next(stream))
    counted = dataclasses.replace(spec, mode="xor", pad_value=1 if spec.pad_value == 1 else -1)
    count = accumulate(counted, _read_data(spec, data), _read_data(spec, zero), weight)
    of_pixel = np.zeros(count.shape[1:3], np.int64)
    if spec.mode == "xor" and spec.pad_value == 0 and any(spec.pads):
        high, wide = (windows.classes(spec, axis) for axis in (0, 1))
        of_pixel = high[:, None] * (wide[-1] + 1) + wide
    outputs = []

    def below() -> Array:
        limit = words_to_bits(next(stream), spec.channels).astype(np.int64)
        value = (limit << np.arange(limit.shape[1])[:, None]).sum(axis=1)
        return np.asarray(count < value[of_pixel])

    for step in spec.steps:
        sign = below()
        outputs.append(bits_to_words(sign))
        if step.zero:
            outputs.append(bits_to_words(sign & ~below()))
    return outputs


def _read_data(spec: BinaryConv2d, planes: Array) -> Array:
    if spec.weight_order == "sliced":
        return words_to_bits(planes, spec.channels)
    per_group = spec.channels_per_group
    count = -(-per_group // 32)
    parts = [
        words_to_bits(planes[..., g * count : (g + 1) * count], per_group)
        for g in range(spec.groups)
    ]
    return np.concatenate(parts, -1)


def read_binary_weight(spec: BinaryConv2d, packed: Array) -> Array:
    """Return weights +1/-1, shape (out_channels, kernel_h, kernel_w, channels per group)."""
    per_group = spec.channels_per_group
    count = -(-per_group // 32)
    height, width = spec.kernel
    if spec.weight_order == "nibbles":
        cut = packed.astype("<u4").view(np.uint8).reshape(-1, height, width, count * 4, 16, 2)
        channel = np.arange(spec.out_channels)
        chosen = cut[channel // 32, :, :, :, channel % 16, channel % 32 // 16]
        rows = np.ascontiguousarray(chosen).view("<u4")
        bits = words_to_bits(rows, per_group)
        return _signs(bits)
    if spec.weight_order == "fours":
        steps = -(-per_group // 64)
        cut = words_to_bits(packed.reshape(-1, height, width, steps, 16, 2), 64)
        apart = cut.reshape(-1, height, width, steps, 16, 16, 4).transpose(0, 5, 1, 2, 3, 4, 6)
        bits = apart.reshape(-1, height, width, steps * 64)
        return _signs(bits[: spec.out_channels, ..., :per_group])
    if spec.weight_order in ("vectors", "halves"):
        unit = 4 if spec.weight_order == "vectors" else 2
        quads = -(-spec.out_channels // 4)
        cut = packed.reshape(quads, height, -1, 4, unit)
        channel = np.arange(spec.out_channels)
        runs = cut[channel // 4, :, :, channel % 4].reshape(spec.out_channels, height, -1)
        taps = runs[:, :, : width * count] if unit == 4 else runs.reshape(*runs.shape[:2], -1, 2)
        taps = taps.reshape(*taps.shape[:2], width, -1)[..., :count]
        bits = words_to_bits(np.ascontiguousarray(taps), per_group)
        return _signs(bits)
    if spec.weight_order == "sliced":
        total, size = -(-spec.channels // 32), height * width * per_group
        turned = words_to_bits(packed[: size * total].reshape(size, total), spec.channels)
        of_tap = turned.reshape(height, width, per_group, spec.channels).transpose(3, 0, 1, 2)
        place = np.arange(spec.channels)[:, None] % per_group
        turn = (np.arange(per_group) - place) % per_group
        bits = np.take_along_axis(of_tap, turn[:, None, None, :], axis=3)
        return _signs(bits)
    if spec.weight_order.startswith(("strips", "fragments", "cores")):
        channel, word = np.indices((spec.out_channels, height * width * count))
        rows = packed[_tiled(spec.weight_order, channel, word, word.shape[1])]
        rows = rows.reshape(-1, height, width, count)
    else:
        rows = windows.unblocked(packed, spec.out_channels, (height, width, count))
    return _signs(words_to_bits(rows, per_group))


def _signs(bits: Array) -> Array:
    return np.where(bits, np.int64(1), np.int64(-1))


def _tiled(order: str, channel: Array, word: Array, run: int) -> Array:
    """Return the index of a GPU kernel's weight for `channel` and `word`, of `run` words each."""
    if order == "strips":
        return (channel // 32 * (-(-run // 4) * 4) + word) * 32 + channel % 32
    kind, width = order.split("-")
    size = int(width)
    sixteen, rest = np.divmod(channel % size, 16)
    thread, rest = np.divmod(rest, 4)
    eight, column = 2 * sixteen + rest // 2, 2 * thread + rest % 2
    step = channel // size * -(-run // 16) + word // 16
    if kind == "fragments":
        lane = 4 * column + word % 16 // 4
        return ((step * (size // 8) + eight) * 32 + lane) * 4 + word % 4
    return ((step * 4 + word % 4) * size + 8 * eight + column) * 4 + word % 16 // 4


def accumulate(spec: BinaryConv2d, bits: Array, zeros: Array, weight: Array) -> Array:
    """Return the accumulators of `spec`, from the dot products.

    Parameters
    ----------
    bits, zeros : ndarray of bool, shape (n, height, width, channels)
        Sign plane and zero plane.
    weight : ndarray of int64, shape (out_channels, kernel_h, kernel_w, channels per group)
        Weights, +1 or -1.

    Returns
    -------
    ndarray of int64, shape (n, out_height, out_width, out_channels)
        ``acc`` as `BinaryConv2d` defines it.

    Raises
    ------
    ArithmeticError
        If an accumulator is a half-integer, but `spec` is not ``doubled``.
    """
    low = 0 if spec.mode == "and" else -1
    total = spec.window_size * spec.channels_per_group
    kind = np.float32 if total < 2**24 else np.float64  # exact either way
    values = np.where(zeros, 0, np.where(bits, 1, low)).astype(kind)
    padded = windows.pad(spec, values, spec.pad_value)
    dot = windows.products(spec, padded, weight.astype(kind))
    exact = np.rint(dot).astype(np.int64)
    if spec.mode == "and":
        return -exact
    halves = total - exact
    if spec.doubled:
        return halves
    if np.any(halves % 2):
        raise ArithmeticError("the accumulator has a half, but the spec does not say `doubled`")
    return halves // 2
