"""Bits and levels, packed and unpacked: from the definitions in `layout` and `step`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any


def bits_to_words(bits: Array) -> Array:
    """Pack the last axis of a bool array, 32 to a uint32, least significant first."""
    count = -(-bits.shape[-1] // 32)
    words = np.zeros((*bits.shape[:-1], count), np.uint32)
    for channel in range(bits.shape[-1]):
        value = bits[..., channel].astype(np.uint32) << np.uint32(channel % 32)
        words[..., channel // 32] |= value
    return words


def words_to_bits(words: Array, channels: int) -> Array:
    """Invert `bits_to_words`."""
    channel = np.arange(channels)
    shifted = words[..., channel // 32] >> (channel % 32).astype(np.uint32)
    return (shifted & 1).astype(bool)


def read_levels(data: Sequence[Array], channels: int, form: str) -> Array:
    """Return the levels, int64 with channels last, that `data` hold in `form`."""
    if form == "planes":
        return sum(
            words_to_bits(plane, channels).astype(np.int64) << j for j, plane in enumerate(data)
        )
    kind = {"bytes": "<u1", "pairs": "<u2", "floats": "<f4"}[form]
    return np.ascontiguousarray(data[0]).view(kind)[..., :channels].astype(np.int64)
