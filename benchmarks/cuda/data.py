"""Random bits that are the same on every machine and in every version of NumPy."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np


def bits_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return bits that depend on `name` and their place: a counter through splitmix64."""
    count = math.prod(shape)
    state = np.arange(-(-count // 64), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 24)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ state >> np.uint64(shift)) * np.uint64(factor)
    state ^= state >> np.uint64(31)
    return np.unpackbits(state.view(np.uint8), count=count).reshape(shape).astype(bool)


def words_of(bits: np.ndarray) -> np.ndarray:
    """Pack the last axis, a multiple of 32, as bnncc does: least significant bit first."""
    packed = np.packbits(bits, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u4")


def thresholds_of(name: str, spec: Any) -> np.ndarray:
    """Return thresholds in the middle of the sums of layer `name`, one apart."""
    half = np.full(spec.out_channels, spec.taps // 2, np.int32)
    return half + bits_of(f"{name}.threshold", half.shape).astype(np.int32)
