"""The NumPy oracle of any kernel: one entry for all specs, beside `build.prim_func`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bnncc.topi_binary.reference import binary, few_bit, floats
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    ImageBits,
    PadBits,
    Pool2d,
    SliceBits,
    Spec,
    WeightsOfRows,
)

Array = np.ndarray[Any, Any]

ORACLES: dict[type, Callable[[Any, Sequence[Array]], list[Array]]] = {
    BinaryConv2d: binary.binary_conv2d,
    BitwiseMaxPool: floats.bitwise_maxpool,
    ConcatBits: floats.concat_bits,
    Conv2d: floats.conv2d,
    Elementwise: floats.elementwise,
    FewBitConv2d: few_bit.few_bit_conv2d,
    ImageBits: floats.image_bits,
    PadBits: floats.pad_bits,
    Pool2d: floats.pool2d,
    SliceBits: floats.slice_bits,
    WeightsOfRows: binary.weights_of_rows,
}
"""By class of spec, what its kernel computes."""


def evaluate_kernel(spec: Spec, inputs: Sequence[Array]) -> list[Array]:
    """Compute what the kernel of `spec` computes.

    Parameters
    ----------
    spec : Spec
        Any of the spec classes; a symbolic batch is taken from the data.
    inputs : sequence of ndarray
        The kernel's inputs in order, weights packed as the kernel reads them.

    Returns
    -------
    list of ndarray
        Its outputs in order, contiguous.
    """
    return [np.ascontiguousarray(array) for array in ORACLES[type(spec)](spec, inputs)]
