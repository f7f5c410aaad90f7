"""Few-bit kernels for GPUs against the oracle, in the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bnncc import driver
from bnncc.errors import TargetError
from bnncc.options import CompileOptions
from bnncc.schedules import cuda, few_bit_method
from bnncc.schedules.cuda import few_bit
from bnncc.targets import catalog
from bnncc.topi_binary import few_bit_data, reference
from bnncc.topi_binary.spec import Elementwise, FewBitConv2d
from bnncc.topi_binary.step import Step
from bnncc.trace import Trace
from bnncc.tuning import level_cases
from tests import few_bit_cases
from tests.cuda_emulator import COMPILER, Emulated
from tests.passes.test_few_bit_networks import _network
from tests.schedules.test_cuda_kernels import run
from tests.schedules.test_few_bit_conv2d import DENSE, FLIPPED, PADDED, _same_levels

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64"),
    pytest.mark.sampled(3),
]

METHODS = tuple(m for m in few_bit_data.METHODS if m != "packed")  # which CPUs have alone
STORE = (Step("store"),)
WAYS = (
    (Step("levels", count=7, way="acc-scale", forms=("planes", "bytes")),),
    (Step("affine"), Step("levels", count=3, way="value", forms=("planes", "value"), hi=0.5)),
    (Step("affine"), Step("levels", count=3, way="value", compare="place", forms=("planes",))),
    (Step("relu"), Step("levels", count=15, way="whole", forms=("pairs", "floats"))),
    (replace(FLIPPED, forms=("planes", "value", "table"), layout="NCHW", lo=-1.0, hi=2.0), *STORE),
)
CHANGES: tuple[dict, ...] = (
    {"strides": (2, 2), "dilations": (2, 1), "pads": (2, 1, 0, 2)},
    {"channels": 128, "out_channels": 64, "groups": 2},
    {"channels": 64, "out_channels": 32, "groups": 2},  # too few outputs of a group for a tile
    {"n": "n", "out_channels": 1, "kernel": (1, 1), "pads": (0, 0, 0, 0), "doubled": True},
)


def specs() -> list[FewBitConv2d]:
    made = [replace(s, method=m, starts=True) for s in (PADDED, DENSE) for m in METHODS]
    made += [replace(PADDED, steps=steps) for steps in WAYS]
    made += [replace(PADDED, method=m, starts=True, data_bits=6) for m in ("xor", "and")]
    for method in ("xor", "bytes"):
        base = replace(PADDED, method=method, starts=True, data_bits=3, weight_bits=3, steps=STORE)
        made += [replace(base, **change) for change in CHANGES]
    return made


@pytest.mark.parametrize(
    "arch", [800, 900, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (750, 1000))]
)
def test_few_bit_layers_equal_the_oracle(arch: int) -> None:
    chosen = specs()
    if arch != 800:  # the instructions that differ
        chosen = [spec for spec in chosen if few_bit.tiled(spec)]
    kernels = [cuda.kernel(spec) for spec in chosen]
    library = Emulated(kernels, arch)
    for number, (spec, kernel) in enumerate(zip(chosen, kernels, strict=True)):
        batch = spec.n if isinstance(spec.n, int) else 3
        arrays = few_bit_cases.inputs(spec, number, batch, 1)
        wanted = reference.few_bit_conv2d(spec, arrays)
        _same_levels(spec, run(library, spec, kernel, arrays, number), wanted)


def test_numbers_of_single_channels_are_refused() -> None:
    spec = replace(PADDED, method="floats", channels=32, out_channels=32, groups=32)
    with pytest.raises(TargetError, match="depthwise layers of a few bits"):
        cuda.kernel(spec)


def test_few_bit_layers_are_planes_on_gpus() -> None:
    target = catalog.resolve("cuda-sm80")
    made = [replace(PADDED, method=method, weight_bits=2 + (method == "and")) for method in METHODS]
    chosen, why = few_bit_method.choose(made, target) or (None, "")
    assert chosen == made[METHODS.index("xor")]
    assert why == "as 4 pairs of planes"
    alone = replace(PADDED, method="floats", channels=32, out_channels=32, groups=32)
    assert few_bit_method.choose([alone], target) is None


def test_layers_of_a_network_are_few_bit_on_gpus() -> None:
    target = catalog.resolve("cuda-sm80")
    made = driver._scheduled(_network(), CompileOptions(target=target), target, Trace())
    assert [layer.kind for layer in made.lowered.layers] == ["few_bit"] * 6
    assert any("BitwiseMaxPool" in call.spec for call in made.lowered.calls)


def test_levels_of_planes() -> None:
    spec = Elementwise(2, 3, 4, 40, planes=3, steps=(Step("scale"), *STORE))
    rng = np.random.default_rng(0)
    planes = level_cases.levels((2, 3, 4, 40), 7, "planes", rng)
    scale = rng.integers(-4, 5, 48).astype(np.float32)
    kernel = cuda.kernel(spec)
    (got,) = run(Emulated([kernel], 800), spec, kernel, [*planes, scale], 0)
    levels = reference.read_levels(planes, 40, "planes")
    np.testing.assert_array_equal(got, levels * scale[:40])
