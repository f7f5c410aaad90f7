"""Few-bit kernels: random operands for a spec."""

from __future__ import annotations

import numpy as np

from bnncc.topi_binary import few_bit_data, layout
from bnncc.topi_binary.build import input_types
from bnncc.topi_binary.spec import FewBitConv2d


def levels(shape: tuple[int, ...], top: int, form: str, rng: np.random.Generator) -> list:
    """Return random levels, packed in `form`; what is beyond the channels is garbage."""
    *outer, channels = shape
    data = rng.integers(0, top + 1, shape)
    if form == "planes":
        return [layout.pack_bits((data >> j & 1).astype(bool)) for j in range(top.bit_length())]
    dtype = {"bytes": "<u1", "pairs": "<u2", "floats": "<f4"}[form]
    wide = rng.integers(0, 100, (*outer, layout.blocks(channels) * layout.LANES)).astype(dtype)
    wide[..., :channels] = data
    return [wide.view("<f4" if form == "floats" else "<u4")]


def weights(spec: FewBitConv2d, rng: np.random.Generator) -> np.ndarray:
    shape = (spec.out_channels, *spec.kernel, spec.channels // spec.groups)
    top = 2**spec.weight_bits
    if spec.method == "xor":
        return 2 * rng.integers(0, top, shape) - top + 1
    return rng.integers(-top // 2, top // 2, shape)


def inputs(spec: FewBitConv2d, seed: int, batch: int = 1, outside: float = 0) -> list:
    """Return inputs of the kernel of `spec`; parameters of its steps are small integers."""
    rng = np.random.default_rng(seed)
    form = few_bit_data.FORM[spec.method]
    n = batch if isinstance(spec.n, str) else spec.n
    image = (n, spec.channels) if spec.rank == 2 else (n, spec.height, spec.width, spec.channels)
    arrays = levels(image, 2**spec.data_bits - 1, form, rng)
    weight = weights(spec, rng)
    arrays.append(few_bit_data.pack_weight(weight, spec))
    if spec.starts:
        arrays.append(few_bit_data.start_values(weight, spec, outside))
    for shape, dtype in input_types(spec)[len(arrays) :]:
        extents = [batch if isinstance(d, str) else d for d in shape]
        values = rng.integers(-40, 40, extents)
        arrays.append((np.sort(values, axis=0) if len(extents) == 2 else values).astype(dtype))
    return arrays
