"""NumPy oracles: independent implementations of every kernel, for tests and verification.

They are deliberately simple and slow. Packing, padding, accumulators and epilogue follow the
definitions in `spec`, `step` and `layout`, and share no code with the operators.
"""

from bnncc.topi_binary.reference.binary import (
    accumulate,
    binary_conv2d,
    read_binary_weight,
    weights_of_rows,
)
from bnncc.topi_binary.reference.epilogue import apply_steps
from bnncc.topi_binary.reference.few_bit import few_bit_conv2d
from bnncc.topi_binary.reference.floats import (
    bitwise_maxpool,
    concat_bits,
    conv2d,
    elementwise,
    image_bits,
    pad_bits,
    pool2d,
    slice_bits,
)
from bnncc.topi_binary.reference.kernels import ORACLES, evaluate_kernel
from bnncc.topi_binary.reference.packing import bits_to_words, read_levels, words_to_bits

__all__ = [
    "ORACLES",
    "accumulate",
    "apply_steps",
    "binary_conv2d",
    "bits_to_words",
    "bitwise_maxpool",
    "concat_bits",
    "conv2d",
    "elementwise",
    "evaluate_kernel",
    "few_bit_conv2d",
    "image_bits",
    "pad_bits",
    "pool2d",
    "read_binary_weight",
    "read_levels",
    "slice_bits",
    "weights_of_rows",
    "words_to_bits",
]
