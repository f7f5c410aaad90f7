"""Few-bit kernels: random operands for a spec."""

from __future__ import annotations

import numpy as np

from bnncc.topi_binary.build import input_types
from bnncc.topi_binary.spec import FewBitConv2d
from bnncc.tuning.level_cases import operands


def inputs(spec: FewBitConv2d, seed: int, batch: int = 1, outside: float = 0) -> list:
    """Return inputs of the kernel of `spec`; parameters of its steps are small integers."""
    rng = np.random.default_rng(seed)
    arrays = operands(spec, batch if isinstance(spec.n, str) else spec.n, rng, outside)
    for shape, dtype in input_types(spec)[len(arrays) :]:
        extents = [batch if isinstance(d, str) else d for d in shape]
        values = rng.integers(-40, 40, extents)
        arrays.append((np.sort(values, axis=0) if len(extents) == 2 else values).astype(dtype))
    return arrays
