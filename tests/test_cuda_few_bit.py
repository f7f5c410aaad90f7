"""Few-bit kernels for GPUs against the oracle, in the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bnncc.schedules import cuda
from bnncc.topi_binary import few_bit_data, reference_few_bit
from bnncc.topi_binary.spec import Elementwise, FewBitConv2d
from bnncc.topi_binary.step import Step
from tests import few_bit_cases
from tests.cuda_emulator import COMPILER, Emulated
from tests.test_cuda_kernels import run
from tests.test_few_bit_conv2d import DENSE, FLIPPED, PADDED, _same_levels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64")

STORE = (Step("store"),)
WAYS = (
    (Step("levels", count=7, way="acc-scale", forms=("planes", "bytes")),),
    (Step("affine"), Step("levels", count=3, way="value", forms=("planes", "value"), hi=0.5)),
    (Step("relu"), Step("levels", count=15, way="whole", forms=("pairs", "floats"))),
    (replace(FLIPPED, forms=("planes", "value"), layout="NCHW", lo=-1.0, hi=2.0), *STORE),
)
CHANGES: tuple[dict, ...] = (
    {"strides": (2, 2), "dilations": (2, 1), "pads": (2, 1, 0, 2)},
    {"channels": 128, "out_channels": 64, "groups": 2},
    {"n": "n", "out_channels": 1, "kernel": (1, 1), "pads": (0, 0, 0, 0), "doubled": True},
)


def specs() -> list[FewBitConv2d]:
    made = [
        replace(s, method=m, starts=True) for s in (PADDED, DENSE) for m in few_bit_data.METHODS
    ]
    made += [replace(PADDED, steps=steps) for steps in WAYS]
    for method in ("xor", "bytes"):
        base = replace(PADDED, method=method, starts=True, data_bits=3, weight_bits=3, steps=STORE)
        made += [replace(base, **change) for change in CHANGES]
    return made


def test_few_bit_layers_equal_the_oracle() -> None:
    chosen = specs()
    kernels = [cuda.kernel(spec) for spec in chosen]
    library = Emulated(kernels, 800)
    for number, (spec, kernel) in enumerate(zip(chosen, kernels, strict=True)):
        batch = spec.n if isinstance(spec.n, int) else 3
        arrays = few_bit_cases.inputs(spec, number, batch, 1)
        wanted = reference_few_bit.few_bit_conv2d(spec, arrays)
        _same_levels(spec, run(library, spec, kernel, arrays, number), wanted)


def test_levels_of_planes() -> None:
    spec = Elementwise(2, 3, 4, 40, planes=3, steps=(Step("scale"), *STORE))
    rng = np.random.default_rng(0)
    planes = few_bit_cases.levels((2, 3, 4, 40), 7, "planes", rng)
    scale = rng.integers(-4, 5, 48).astype(np.float32)
    kernel = cuda.kernel(spec)
    (got,) = run(Emulated([kernel], 800), spec, kernel, [*planes, scale], 0)
    levels = reference_few_bit.read_levels(planes, 40, "planes")
    np.testing.assert_array_equal(got, levels * scale[:40])
