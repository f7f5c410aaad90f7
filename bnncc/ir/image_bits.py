"""Bits of images in NumPy: semantics of `IMAGE_BITS`, and thereby of ``--input-transform``.

References
----------
.. [1] Khan et al., "Binarized Convolutional Neural Networks for Efficient Inference on GPUs",
   EUSIPCO 2018, section 2.3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

IMAGE_BITS = "bnncc.ImageBits"
"""Operator: two-valued float channels computed from a uint8 image. Attributes are those of
`topi_binary.spec.ImageBits` (``kind``, ``thresholds``, ``flip``, ``layout``, ``channels`` of the
result) and ``lo`` and ``hi``, the values of bits 0 and 1."""

GREY = (299, 587, 114)
_NEIGHBOURS = ((-1, -1), (0, 1), (1, -1))


def image_bits(attrs: dict[str, Any], ins: list[Any], _: int) -> list[Array]:
    """Evaluate `IMAGE_BITS`: the bits of `bits_of`, channels first, as ``lo`` and ``hi``."""
    bits = bits_of(
        ins[0] if attrs["layout"] == "nhwc" else ins[0].transpose(0, 2, 3, 1),
        attrs["kind"], attrs["thresholds"], attrs["flip"], attrs["channels"],
    )  # fmt: skip
    values = np.where(bits, np.float32(attrs["hi"]), np.float32(attrs["lo"]))
    return [np.ascontiguousarray(values.transpose(0, 3, 1, 2))]


def bits_of(
    image: Array,
    kind: str,
    thresholds: tuple[int, ...] = (),
    flip: tuple[int, ...] = (),
    channels: int = 3,
) -> Array:
    """Compute the bits of an image.

    Parameters
    ----------
    image : ndarray of uint8, shape (n, height, width, channels)
        Red, green and blue; any channels for thresholds.
    kind : {"threshold", "grey", "lbp"}
        Values compared: each channel with its threshold; the grey value with one threshold; the
        grey values of three neighbours (top left, right, bottom left; 0 outside the image) with
        that of the pixel.
    thresholds : tuple of int
        A bit is 1 if the value is at least this. Grey values are multiplied by 1000, which gives
        exact integers: ``299 * red + 587 * green + 114 * blue``.
    flip : tuple of int
        Channels (1) whose bits are inverted.
    channels : int
        Number of result channels for ``grey``, which all hold the same bit.

    Returns
    -------
    ndarray of bool, shape (n, height, width, channels)
    """
    values = image.astype(np.int64)
    if kind == "threshold":
        return np.asarray((values >= np.array(thresholds)) ^ np.array(flip or (0,), bool))
    grey = values @ np.array(GREY)
    if kind == "grey":
        return np.repeat((grey >= thresholds[0])[..., None], channels, axis=3)
    height, width = grey.shape[1:]
    around = np.pad(grey, ((0, 0), (1, 1), (1, 1)))
    others = [around[:, 1 + y : 1 + y + height, 1 + x : 1 + x + width] for y, x in _NEIGHBOURS]
    return np.stack([other > grey for other in others], axis=3)
