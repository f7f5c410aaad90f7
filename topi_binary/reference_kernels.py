"""The NumPy oracle of any kernel: one entry for all specs, beside `build.prim_func`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bnncc.topi_binary import reference, reference_few_bit, reference_float
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
    BinaryConv2d: reference.binary_conv2d,
    BitwiseMaxPool: reference_float.bitwise_maxpool,
    ConcatBits: reference_float.concat_bits,
    Conv2d: reference_float.conv2d,
    Elementwise: reference_float.elementwise,
    FewBitConv2d: reference_few_bit.few_bit_conv2d,
    ImageBits: reference_float.image_bits,
    PadBits: reference_float.pad_bits,
    Pool2d: reference_float.pool2d,
    SliceBits: reference_float.slice_bits,
    WeightsOfRows: reference.weights_of_rows,
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
