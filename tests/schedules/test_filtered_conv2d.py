"""Filtered convolutions and convolutions with max-pooling, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bnncc import schedules
from bnncc.options import CHOICES
from bnncc.schedules.templates.window import taps_inside
from bnncc.targets import catalog
from bnncc.topi_binary import filtering, layout, reference
from bnncc.topi_binary.build import input_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import Conv2d, RowPool, Step, from_json, to_json
from tests.kernel_harness import FLOAT_TARGETS, HERE, TARGETS, run_kernel, same, small_integers

pytestmark = pytest.mark.sampled(4)

QUICK = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
SLOW = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
ONE = (1, 1, 1, 1)
STEM = Conv2d(
    1, 30, 30, 3, 32, (7, 7), (2, 2), pads=(3, 3, 3, 3), data_layout="NCHW", method="filtered",
    steps=(Step("store"), Step("bits")),
    pool=RowPool((3, 3), (2, 2), ONE, before=(Step("affine"),)),
)  # fmt: skip

befores = st.sampled_from(
    [(), (Step("affine"),), (Step("shift"), Step("relu")), (Step("prelu"), Step("scale"))]
)
afters = st.sampled_from(
    [
        (Step("store"),),
        (Step("store", layout="NCHW"),),
        (Step("bits"),),
        (Step("affine"), Step("add"), Step("relu"), Step("store"), Step("bits")),
    ]
)


@st.composite
def convs(draw: st.DrawFn) -> Conv2d:
    kernel = draw(st.tuples(st.integers(1, 7), st.integers(3, 7)))
    spec = Conv2d(
        draw(st.sampled_from([1, 1, 2, "n"])),
        draw(st.integers(5, 20)),
        draw(st.integers(5, 36)),
        draw(st.sampled_from([1, 3, 7, 8, 16, 19])),
        draw(st.sampled_from([1, 16, 20, 32, 64, 90])),
        kernel,
        (draw(st.integers(1, 3)), draw(st.integers(1, 2))),
        pads=draw(st.sampled_from([(0, 0, 0, 0), ONE, (3, 3, 3, 3), (0, 2, 1, 0)])),
        data_layout=draw(st.sampled_from(["NHWC", "NCHW"])),
        steps=draw(afters),
        method=draw(st.sampled_from(filtering.METHODS)),
    )
    assume(min(spec.output_hw) > 0)
    if draw(st.booleans()):
        pool = RowPool(
            draw(st.tuples(st.integers(1, 4), st.integers(1, 3))),
            draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
            draw(st.sampled_from([(0, 0, 0, 0), ONE, (0, 0, 1, 1)])),
            draw(st.sampled_from([(0, 0), (0, 0), (1, 1)])),
            draw(befores),
        )
        spec = replace(spec, pool=pool)
        after = spec.pooling
        sizes = spec.output_hw
        assume(min(sizes) > 0)
        assume(all(taps_inside(after, axis, i) for axis in (0, 1) for i in range(sizes[axis])))
    return spec


def _inputs(spec: Conv2d, seed: int, batch: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return inputs of the kernel and of the oracle, which takes weights as they are."""
    direct = small_integers(replace(spec, method="direct"), np.random.default_rng(seed), batch)
    depth = spec.channels
    weight = np.random.default_rng(seed).integers(-3, 4, (spec.out_channels, *spec.kernel, depth))
    direct[1] = layout.pack_float_weight(weight.astype(np.float32))
    mine = list(direct)
    if spec.method != "direct":
        mine[1] = filtering.pack_weight(weight.astype(np.float32), spec)
    assert mine[1].shape == tuple(input_types(spec)[1][0])
    return mine, direct


def _check(spec: Conv2d, target: str, seed: int, threads: int = 1) -> None:
    batch = spec.n if isinstance(spec.n, int) else 2
    mine, direct = _inputs(spec, seed, batch)
    plain = replace(spec, method="direct")
    want = reference.conv2d(plain, direct)
    got = run_kernel(spec, mine, target, batch, threads)
    if spec.method == "direct":
        same(got, want)
        return
    floats = replace(plain, steps=(*(s for s in spec.steps if s.op != "bits"), Step("store")))
    exact = reference.conv2d(floats, direct)[-1]
    # Filtering rounds sums, which steps scale, and may cut down to what is small.
    sums = reference.conv2d(replace(plain, pool=None, steps=(Step("store"),)), direct[:2])[-1]
    scales = [np.abs(a).max() for a in direct[2:] if a.dtype == np.float32 and a.ndim == 1]
    largest = np.abs(sums).max() * np.prod([max(1.0, float(s)) for s in scales])
    largest = max(largest, np.abs(exact).max(), 1.0)
    for one, other in zip(got, want, strict=True):
        if one.dtype == np.float32:
            np.testing.assert_allclose(one, other, rtol=0, atol=3e-5 * largest)
        else:
            # A sign may differ only where rounding decides it.
            bits = [layout.unpack_bits(x, spec.out_channels) for x in (one, other)]
            assert np.abs(exact[bits[0] != bits[1]]).max(initial=0) <= 3e-5 * largest
            np.testing.assert_array_equal(one, layout.pack_bits(bits[0]))


@pytest.mark.parametrize("target", FLOAT_TARGETS)
@QUICK
@given(spec=convs(), seed=st.integers(0, 99))
def test_quick(target: str, spec: Conv2d, seed: int) -> None:
    _check(spec, target, seed)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@SLOW
@given(spec=convs(), seed=st.integers(0, 99), threads=st.sampled_from([1, 2, 3]))
def test_slow(target: str, spec: Conv2d, seed: int, threads: int) -> None:
    _check(spec, target, seed, threads)


# Both filtered methods pass tiles of as many columns on, so one of them takes all shapes here.
@pytest.mark.parametrize(
    "method", ["direct", "filtered", pytest.param("filtered-2d", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("kernel", "stride", "pads", "extra"),
    [
        (3, 1, (1, 1, 1, 1), (0, 0)),  # two windows reach into the next tile
        (5, 1, (0, 2, 0, 2), (0, 0)),  # too many: columns are kept as they are
        (5, 2, (0, 2, 0, 1), (0, 0)),
        (3, 3, (0, 1, 0, 1), (0, 0)),  # no tile has a multiple of 3 columns
        (2, 4, (0, 0, 0, 0), (1, 1)),  # columns that no window has
        (3, 2, (0, 0, 0, 0), (1, 1)),  # the last window ends outside
    ],
)
def test_pooling_across(
    method: str, kernel: int, stride: int, pads: tuple[int, ...], extra: tuple[int, int]
) -> None:
    pool = RowPool((2, kernel), (2, stride), pads, extra)  # type: ignore[arg-type]
    spec = replace(STEM, width=45, out_channels=40, method=method, pool=pool)
    _check(spec, HERE[-1], 0)


@pytest.mark.parametrize("target", FLOAT_TARGETS)
@pytest.mark.parametrize("method", filtering.METHODS)
def test_stem(target: str, method: str) -> None:
    _check(replace(STEM, method=method), target, 0)


@pytest.mark.parametrize("method", filtering.METHODS)
@pytest.mark.parametrize("pool", [STEM.pool, None])
def test_threads_change_nothing(method: str, pool: RowPool | None) -> None:
    spec = replace(STEM, n=2, height=60, width=60, out_channels=80, method=method, pool=pool)
    mine, _ = _inputs(spec, 0, 2)
    one = run_kernel(spec, mine, HERE[-1], 2, threads=1)
    assert "parallel" in str(schedules.schedule(define(spec), catalog.resolve(HERE[-1]), 2))
    same(run_kernel(spec, mine, HERE[-1], 2, threads=2), one)


def test_spec_travels_as_json() -> None:
    assert from_json(to_json(STEM)) == STEM
    assert CHOICES["float_conv"] == filtering.METHODS


@pytest.mark.parametrize("outputs", [2, 3, 4])
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_transforms_are_exact(outputs: int, taps: int) -> None:
    size = outputs + taps - 1
    if size not in filtering.POINTS:
        return
    found = filtering.cook_toom(outputs, taps)
    data, weight = range(3, 3 + size), range(-2, taps - 2)
    forward = [sum(a * b for a, b in zip(row, data, strict=True)) for row in found.forward]
    kernel = [sum(a * b for a, b in zip(row, weight, strict=True)) for row in found.kernel]
    products = [a * b for a, b in zip(forward, kernel, strict=True)]
    for i, row in enumerate(found.inverse):
        want = sum(data[i + j] * weight[j] for j in range(taps))
        assert sum(a * b for a, b in zip(row, products, strict=True)) == want


@pytest.mark.parametrize(
    "spec",
    [
        Conv2d(1, 56, 56, 3, 32, (7, 7), (2, 2), pads=(3, 3, 3, 3), data_layout="NCHW"),
        Conv2d(1, 24, 24, 16, 16, (3, 3), pads=ONE),
        Conv2d(1, 24, 24, 8, 16, (5, 5)),
        Conv2d(1, 24, 24, 8, 16, (3, 3), (2, 2), pads=ONE),
    ],
)
def test_rounding_errors(spec: Conv2d) -> None:
    """Along rows at most 3 times direct float32's own root mean square; both ways 9 times."""
    rng = np.random.default_rng(0)
    spec = replace(spec, steps=(Step("store"),))
    data = rng.standard_normal(input_types(spec)[0][0]).astype(np.float32)
    weight = rng.standard_normal((spec.out_channels, *spec.kernel, spec.channels), np.float32)
    packed = layout.pack_float_weight(weight)
    plain = replace(spec, method="direct")
    exact = reference.conv2d(plain, [data, packed])[0].astype(np.float64)
    errors = {}
    for method in filtering.METHODS:
        chosen = replace(spec, method=method)
        mine = packed if method == "direct" else filtering.pack_weight(weight, chosen)
        got = run_kernel(chosen, [data, mine], HERE[-1])[0]
        errors[method] = np.sqrt(((got - exact) ** 2).mean())
    print(spec.kernel, spec.strides, {k: v / errors["direct"] for k, v in errors.items()})
    assert errors["filtered"] <= 3 * errors["direct"]
    assert errors["filtered-2d"] <= 9 * errors["direct"]
