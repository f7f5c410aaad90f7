"""Fourier transforms of static length, as products with matrices of cosines and sines."""

from __future__ import annotations

import numpy as np

from bnncc.errors import ShapeError, UnsupportedOp
from bnncc.ir import moves
from bnncc.ir.nodechecks import checked_axis
from bnncc.ir.pieces import Expression

MAX_LENGTH = 4096
"""Maximum length of a transform; its matrices have that many rows and columns."""


def _matrices(length: int, rows: int, columns: int, inverse: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the real and imaginary part of the transform from `rows` to `columns` numbers."""
    turns = np.outer(np.arange(rows), np.arange(columns)) % length
    angle = 2 * np.pi / length * turns
    scale = 1 / length if inverse else 1.0
    return np.cos(angle) * scale, np.sin(angle) * (scale if inverse else -scale)


def _check(write: Expression, length: int) -> None:
    if not 0 < length <= MAX_LENGTH:
        raise UnsupportedOp(
            f"{write.where}: a transform of length {length}, expected 1 to {MAX_LENGTH}"
        )


def _transform(
    write: Expression, parts: list[str], matrices: tuple[np.ndarray, np.ndarray], dtype: str
) -> tuple[str, str]:
    """Transform the last axis of a real part and, if given, an imaginary part."""
    cosine, sine = (write.constant(m, dtype) for m in matrices)
    real, imaginary = write("MatMul", parts[0], cosine), write("MatMul", parts[0], sine)
    if len(parts) > 1:
        real = write("Sub", real, write("MatMul", parts[1], sine))
        imaginary = write("Add", imaginary, write("MatMul", parts[1], cosine))
    return real, imaginary


def _stacked(write: Expression, parts: list[str]) -> str:
    whole = [write.unsqueeze(part, -1) for part in parts]
    return whole[0] if len(whole) == 1 else write("Concat", *whole, axis=-1)


def _parts(write: Expression, x: str, count: int) -> list[str]:
    if count not in (1, 2):
        raise ShapeError(f"{write.where}: a last axis of {count}, expected 1 (real) or 2")
    return [write.at(x, k, -1) for k in range(count)]


def _sized(write: Expression, x: str, have: int, want: int, dtype: str) -> str:
    """Return `x` with its last axis cropped or padded with zeros."""
    if have == want:
        return x
    if have > want:
        return write("Slice", x, write.ints(0), write.ints(want), write.ints(-1))
    pads = write.ints(0, want - have)
    return write("Pad", x, pads, write.constant(0, dtype), write.ints(-1), mode="constant")


def _dft(write: Expression) -> None:
    shape, dtype, attrs = write.shape(), write.type().dtype, write.node.attrs
    rank = len(shape)
    length, place = write.fixed(1), write.fixed(2)
    axis = -2 if place is None else int(place.reshape(-1)[0])
    if checked_axis(axis, rank, write.where) == rank - 1:
        raise ShapeError(
            f"{write.where}: `axis` is {axis}, which holds the parts of complex numbers"
        )
    axis %= rank
    inverse, onesided = bool(attrs.get("inverse")), bool(attrs.get("onesided"))
    have = shape[axis]
    size = have if length is None else int(length.reshape(-1)[0])
    if inverse and onesided and length is None:
        size = 2 * (have - 1)
    _check(write, size)
    parts = _parts(write, write.node.inputs[0], shape[-1])
    order = [k for k in range(rank - 1) if k != axis] + [axis]
    parts = [write("Transpose", part, perm=order) for part in parts]
    half = size // 2 + 1
    wanted = half if inverse and onesided else size
    parts = [_sized(write, part, have, wanted, dtype) for part in parts]
    cosine, sine = _matrices(size, wanted, half if onesided and not inverse else size, inverse)
    if inverse and onesided:  # the other half is the complex conjugate
        twice = np.full((wanted, 1), 2.0)
        twice[0] = 1.0
        if size % 2 == 0:
            twice[-1] = 1.0
        cosine, sine = cosine * twice, sine * twice
        made = [_transform(write, parts, (cosine, sine), dtype)[0]]
    else:
        made = list(_transform(write, parts, (cosine, sine), dtype))
    made = [write("Transpose", part, perm=moves.inverse(order)) for part in made]
    write.give(_stacked(write, made), 0)


def _stft(write: Expression) -> None:
    shape, dtype, attrs = write.shape(), write.type().dtype, write.node.attrs
    step, size = write.fixed(1), write.fixed(3)
    window = write.input(2)
    if len(shape) not in (2, 3) or step is None:
        raise ShapeError(f"{write.where}: a signal of shape {shape}, expected three axes")
    if size is not None:
        length = int(size.reshape(-1)[0])
    else:
        length = write.shape(2)[0] if window else shape[1]
    stride = int(step.reshape(-1)[0])
    _check(write, length)
    if stride <= 0 or length > shape[1] or (window and write.shape(2) != [length]):
        raise ShapeError(f"{write.where}: frames of {length} by steps of {stride} do not fit")
    count = (shape[1] - length) // stride + 1
    write.room(count, length)
    index = np.arange(count)[:, None] * stride + np.arange(length)
    signal = write.node.inputs[0]
    parts = _parts(write, signal, shape[2]) if len(shape) == 3 else [signal]
    frames = [write("Gather", part, write.constant(index, "int64"), axis=1) for part in parts]
    if window:
        frames = [write("Mul", frame, window) for frame in frames]
    columns = length // 2 + 1 if attrs.get("onesided", 1) else length
    matrices = _matrices(length, length, columns, inverse=False)
    write.give(_stacked(write, list(_transform(write, frames, matrices, dtype))), 0)


EXPANSIONS = {"DFT": _dft, "STFT": _stft}
"""Rewrite rules, by operator."""
