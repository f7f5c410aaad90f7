"""Dense layers and 1x1 convolutions whose weights are codes, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from bnncc.targets import catalog
from bnncc.topi_binary import layout
from bnncc.topi_binary.spec import Conv2d, Step
from bnncc.topi_binary.weight_codes import BITS, Codes
from tests.kernel_harness import ALL, EMULATED, HERE, IN_NODE, run_kernel, with_two_threads

DENSE = Conv2d(1, 1, 1, 64, 40, (1, 1), rank=2, steps=(Step("store"),), code_bits=1, code_block=64)
IMAGE = replace(DENSE, rank=4, height=5, width=7)


def _specs() -> Iterator[Conv2d]:
    for bits, zeros in ((1, False), *product(BITS[1:], (False, True))):
        spec = replace(DENSE, code_bits=bits, code_zeros=zeros)
        for n in (1, 2, 5, 16, 29, "n"):
            yield replace(spec, n=n)
            yield replace(spec, n=n, channels=100, code_block=20, out_channels=21)
        yield replace(spec, channels=33, code_block=33, out_channels=5, n=3)
        yield replace(spec, channels=1, code_block=1, out_channels=130, n=17)
        yield replace(spec, channels=1000, code_block=8, out_channels=130)
        image = replace(IMAGE, code_bits=bits, code_zeros=zeros)
        yield image
        yield replace(image, n=2, channels=48, code_block=16, out_channels=70)
        ends = (Step("affine"), Step("relu"), Step("store"), Step("bits"))
        yield replace(spec, n=9, out_channels=72, steps=ends)


def _case(spec: Conv2d, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray, int]:
    """Return inputs of the kernel, the weights that codes stand for, and the number of rows."""
    n = 6 if spec.n == "n" else spec.n
    half = 0 if spec.code_bits == 1 else 1 << (spec.code_bits - 1)
    codes = rng.integers(-half, half or 2, (spec.out_channels, spec.channels))
    count = 1 + (spec.code_zeros or not half)
    shape = (spec.out_channels, spec.channels // spec.code_block, count)
    numbers = rng.integers(-3, 4, shape).astype(np.float32) / 2
    first, *_, last = np.repeat(numbers, spec.code_block, axis=1).transpose(2, 0, 1)[[0, -1]]
    if half:
        weight = (codes - (first if spec.code_zeros else 0)) * last
    else:
        weight = np.where(codes == 1, last, first)
    packed = Codes(codes.astype(np.int16), numbers, spec.code_bits).packed()
    data = (n, spec.channels) if spec.rank == 2 else (n, spec.height, spec.width, spec.channels)
    inputs = [rng.integers(-4, 5, data).astype(np.float32), *packed]
    if spec.steps[0].op == "affine":
        scale, bias = rng.integers(-2, 3, (2, spec.out_channels)).astype(np.float32)
        inputs += [layout.pad_lanes(scale), layout.pad_lanes(bias)]
    return inputs, weight, n


def _check(spec: Conv2d, target: str, threads: int, rng: np.random.Generator) -> None:
    inputs, weight, n = _case(spec, rng)
    got = run_kernel(spec, inputs, target, n, threads)
    want = inputs[0].astype(np.float64) @ weight.T  # exact: all are small multiples of a half
    if spec.steps[0].op == "affine":
        scale, bias = (x[: spec.out_channels] for x in inputs[3:])
        want = np.maximum(want * scale + bias, 0)
        assert np.array_equal(layout.unpack_bits(got[1], spec.out_channels), want >= 0)
    assert np.array_equal(got[0], want)


@pytest.mark.parametrize("target", [*HERE, *EMULATED, *IN_NODE])
def test_kernels(target: str) -> None:
    """Unless all are run, each target has others."""
    some, static = 8 if target in HERE else 24, catalog.resolve(target).arch == "wasm32"
    first = sum(target.encode()) % some
    specs = [replace(s, n=6) if s.n == "n" and static else s for s in _specs()]
    rng = np.random.default_rng(0)

    def check(threads: int) -> None:
        for spec in specs if ALL else specs[first::some]:
            _check(spec, target, threads, rng)

    check(1)
    if target in HERE:
        with_two_threads(lambda: check(2))
