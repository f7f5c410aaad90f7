"""Kernels that move bits, and pooling of bits, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bnncc.topi_binary import reference
from bnncc.topi_binary.bits_table import needs_table, slice_table
from bnncc.topi_binary.spec import BitwiseMaxPool, ConcatBits, PadBits, SliceBits, Spec
from tests.kernel_harness import TARGETS, clear_tails, run_kernel, same, small_integers
from tests.schedules.test_float_kernels import CHANNELS, batches, windows

pytestmark = pytest.mark.sampled(3)

QUICK = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
SLOW = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))

channels = st.sampled_from([*CHANNELS, 32, 512])
sizes = st.integers(1, 5)


@st.composite
def pools(draw: st.DrawFn) -> BitwiseMaxPool:
    planes = draw(st.sampled_from([1, 1, 2, 3, 8]))
    return BitwiseMaxPool(
        n=draw(batches),
        channels=draw(channels),
        **draw(windows()),
        ceil_extra=draw(st.sampled_from([(0, 0), (1, 1)])),
        minimum=draw(st.booleans()) and planes == 1,
        flip=draw(st.booleans()) and planes == 1,
        planes=planes,
    )


@st.composite
def concats(draw: st.DrawFn) -> ConcatBits:
    parts = tuple(draw(st.lists(channels, min_size=1, max_size=4)))
    rank = draw(st.sampled_from([2, 4]))
    height, width = (1, 1) if rank == 2 else (draw(sizes), draw(sizes))
    return ConcatBits(draw(batches), height, width, parts, rank)


@st.composite
def slices(draw: st.DrawFn) -> SliceBits:
    count = draw(channels)
    kind = draw(st.sampled_from(["range", "shuffle", "random", "long"]))
    if kind == "range":
        first = draw(st.integers(0, count - 1))
        index = range(first, draw(st.integers(first, count - 1)) + 1)
    elif kind == "shuffle":
        index = [i % 2 * (count // 2) + i // 2 for i in range(count // 2 * 2)] or [0]
    else:
        size = draw(st.integers(1, 60)) if kind == "random" else 500
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        index = rng.integers(-1, count, size).tolist()
    rank = draw(st.sampled_from([2, 4]))
    height, width = (1, 1) if rank == 2 else (draw(sizes), draw(sizes))
    return SliceBits(draw(batches), height, width, count, tuple(index), rank)


@st.composite
def pads(draw: st.DrawFn) -> PadBits:
    border = draw(st.tuples(*[st.integers(0, 3)] * 4))
    bit = draw(st.integers(0, 1))
    return PadBits(draw(batches), draw(sizes), draw(sizes), draw(channels), border, bit)


NAMES = {
    BitwiseMaxPool: "bitwise_maxpool",
    ConcatBits: "concat_bits",
    SliceBits: "slice_bits",
    PadBits: "pad_bits",
}


def check(spec: Spec, target: str, seed: int, threads: int = 1) -> None:
    rng = np.random.default_rng(seed)
    batch = spec.n if isinstance(spec.n, int) else 2
    inputs = small_integers(spec, rng, batch)
    if isinstance(spec, SliceBits) and needs_table(spec):
        inputs[1] = slice_table(spec)
    else:
        counts = spec.channels if isinstance(spec, ConcatBits) else [spec.channels] * len(inputs)
        inputs = [clear_tails(x, c) for x, c in zip(inputs, counts, strict=True)]
    want = getattr(reference, NAMES[type(spec)])(spec, inputs)
    same(run_kernel(spec, inputs, target, batch, threads), want)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", [pools, concats, slices, pads])
def test_bits_quick(target: str, kind: object) -> None:
    @QUICK
    @given(spec=kind(), seed=st.integers(0, 99))
    def run(spec: Spec, seed: int) -> None:
        check(spec, target, seed)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", [pools, concats, slices, pads])
def test_bits_slow(target: str, kind: object) -> None:
    @SLOW
    @given(spec=kind(), seed=st.integers(0, 99))
    def run(spec: Spec, seed: int) -> None:
        check(spec, target, seed)

    run()
