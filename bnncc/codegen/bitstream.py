"""Memory formulas of the BitStream paper, for comparison in the report."""

from __future__ import annotations

from bnncc.topi_binary.spec import BinaryConv2d, Spec


def bitstream(spec: Spec | None) -> tuple[int, int] | None:
    """Return the memory by BitStream's formulas for a binary convolution; None for other kernels.

    The formulas apply to a convolution with threshold and 2x2 pooling, equally many inputs and
    outputs, and 4-byte floats: equation 16 (float convolution as a matrix product) and 17 (packed).

    Examples
    --------
    >>> bitstream(BinaryConv2d(1, 56, 56, 64, 64, (3, 3), pads=(1, 1, 1, 1)))
    (9257472, 1085056)
    """
    if not isinstance(spec, BinaryConv2d) or spec.rank != 4 or spec.groups > 1 or spec.per_image:
        return None
    pixels, taps = spec.channels * spec.height * spec.width, spec.window_size
    return round(pixels * (9 + 4.125 * taps)), round(pixels * (taps / 8 + 9 / 32 + 4))
