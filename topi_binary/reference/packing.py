"""Packing and unpacking of bits and levels, from the definitions in `layout` and `step`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any


def bits_to_words(bits: Array) -> Array:
    """Pack the last axis of a bool array, 32 to a uint32, least significant first."""
    count = -(-bits.shape[-1] // 32)
    full = np.zeros((*bits.shape[:-1], 32 * count), bool)
    full[..., : bits.shape[-1]] = bits
    return np.packbits(full, axis=-1, bitorder="little").view("<u4")


def words_to_bits(words: Array, channels: int) -> Array:
    """Invert `bits_to_words`."""
    raw = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(raw, axis=-1, count=channels, bitorder="little").astype(bool)


def read_levels(data: Sequence[Array], channels: int, form: str) -> Array:
    """Return the levels, int64 with channels last, that `data` hold in `form`."""
    if form == "planes":
        return sum(
            words_to_bits(plane, channels).astype(np.int64) << j for j, plane in enumerate(data)
        )
    kind = {"bytes": "<u1", "pairs": "<u2", "floats": "<f4"}[form]
    return np.ascontiguousarray(data[0]).view(kind)[..., :channels].astype(np.int64)
