"""Convolutions with bfloat16 and int8 operands, against the oracle."""

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
from bnncc.topi_binary import layout, quantization, reference
from bnncc.topi_binary.build import input_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import Conv2d, RowPool, Step, from_json, to_json
from tests.kernel_harness import FLOAT_TARGETS, run_kernel, same

pytestmark = pytest.mark.sampled(5)

QUICK = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
SLOW = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
ONE = (1, 1, 1, 1)
NATIVE = "native"
STORE = (Step("store"),)
STEM = Conv2d(
    1, 30, 30, 3, 32, (7, 7), (2, 2), pads=(3, 3, 3, 3), data_layout="NCHW", operands="int8",
    steps=(Step("store"), Step("bits")),
    pool=RowPool((3, 3), (2, 2), ONE, before=(Step("affine"),)),
)  # fmt: skip
SHAPES = {
    "7x7 s2": ((7, 7), 2, 3),
    "3x3 s2": ((3, 3), 2, 1),
    "3x3": ((3, 3), 1, 1),
    "5x5": ((5, 5), 1, 2),
    "11x11 s4": ((11, 11), 4, 2),
    "16x16 s16": ((16, 16), 16, 0),
    "1x1": ((1, 1), 1, 0),
    "1x7": ((1, 7), 1, 3),
}


@st.composite
def convs(draw: st.DrawFn) -> Conv2d:
    channels = draw(st.sampled_from([1, 2, 3, 4, 5, 16]))
    operands = draw(st.sampled_from(["bfloat16", "int8"]))
    zeros = tuple(draw(st.integers(0, 255)) for _ in range(channels))
    spec = Conv2d(
        draw(st.sampled_from([1, 2, "n"])),
        draw(st.integers(5, 20)),
        draw(st.integers(3, 40)),
        channels,
        draw(st.sampled_from([1, 16, 20, 64, 90])),
        draw(st.tuples(st.integers(1, 7), st.integers(1, 7))),
        (draw(st.integers(1, 4)), draw(st.integers(1, 4))),
        pads=draw(st.sampled_from([(0, 0, 0, 0), ONE, (3, 3, 3, 3), (0, 2, 1, 0), (5, 6, 7, 8)])),
        data_layout=draw(st.sampled_from(["NHWC", "NCHW"])),
        steps=draw(st.sampled_from([STORE, (Step("affine"), Step("bits"), *STORE)])),
        operands=operands,
        zero_points=draw(st.sampled_from([(), zeros])),
    )
    assume(min(spec.output_hw) > 0)
    plain = operands != "bfloat16" or quantization.side_by_side(spec)
    if plain and draw(st.booleans()):
        pool = RowPool((3, 2), (2, 2), draw(st.sampled_from([(0, 0, 0, 0), (1, 0, 1, 1)])))
        spec = replace(spec, pool=pool)
        sizes, after = spec.output_hw, spec.pooling
        assume(min(sizes) > 0)
        assume(all(taps_inside(after, axis, i) for axis in (0, 1) for i in range(sizes[axis])))
    return spec


def _for(spec: Conv2d, target: str) -> Conv2d:
    return schedules.with_packed_operands(spec, catalog.resolve(target))


def _inputs(spec: Conv2d, seed: int, batch: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = []
    for number, (shape, dtype) in enumerate(input_types(spec)):
        extents = [batch if isinstance(d, str) else d for d in shape]
        if number == 1:
            arrays.append(quantization.pack_weight(_weight(spec, rng), spec))
        elif dtype == "uint8":
            arrays.append(rng.integers(0, 256, extents).astype(np.uint8))
        else:
            arrays.append((10 * rng.standard_normal(extents)).astype(np.float32))
    return arrays


def _weight(spec: Conv2d, rng: np.random.Generator) -> np.ndarray:
    weight = rng.standard_normal((spec.out_channels, *spec.kernel, spec.channels))
    if spec.operands == "int8":
        return quantization.quantize_weight(weight)[0]
    return quantization.to_bfloat16(weight.astype(np.float32))


def _agree(spec: Conv2d, inputs: list[np.ndarray], target: str, batch: int, threads: int) -> None:
    want = reference.conv2d(spec, inputs)
    got = run_kernel(spec, inputs, target, batch, threads)
    floats = replace(spec, steps=(*(s for s in spec.steps if s.op != "bits"), Step("store")))
    exact = reference.conv2d(floats, inputs)[-1]
    largest = 1e-5 * max(np.abs(exact).max(), 1e-30)
    for one, other in zip(got, want, strict=True):
        if one.dtype == np.float32:
            np.testing.assert_allclose(one, other, rtol=0, atol=largest)
        else:
            # A sign may differ only where rounding decides it.
            bits = [layout.unpack_bits(x, spec.out_channels) for x in (one, other)]
            assert np.abs(exact[bits[0] != bits[1]]).max(initial=0) <= largest
            np.testing.assert_array_equal(one, layout.pack_bits(bits[0]))


def _check(spec: Conv2d, target: str, seed: int = 0, threads: int = 1) -> None:
    spec, batch = _for(spec, target), spec.n if isinstance(spec.n, int) else 2
    _agree(spec, _inputs(spec, seed, batch), target, batch, threads)


@pytest.mark.parametrize("target", [*FLOAT_TARGETS, NATIVE])
@pytest.mark.parametrize("channels", [7, 8, 16])
def test_bytes_of_many_channels_as_bfloat16(channels: int, target: str) -> None:
    zeros = tuple(range(3, 255, 250 // channels))[:channels]
    spec = Conv2d(
        2, 6, 5, channels, 20, (3, 3), pads=ONE, steps=STORE, operands="bfloat16", zero_points=zeros
    )
    _check(spec, target)


@pytest.mark.parametrize("target", [*FLOAT_TARGETS, NATIVE])
@QUICK
@given(spec=convs(), seed=st.integers(0, 99))
def test_quick(target: str, spec: Conv2d, seed: int) -> None:
    _check(spec, target, seed)


@pytest.mark.slow
@pytest.mark.parametrize("target", [*FLOAT_TARGETS, NATIVE])
@SLOW
@given(spec=convs(), seed=st.integers(0, 99), threads=st.sampled_from([1, 2, 3]))
def test_slow(target: str, spec: Conv2d, seed: int, threads: int) -> None:
    _check(spec, target, seed, threads)


@pytest.mark.parametrize("target", [*FLOAT_TARGETS, NATIVE])
@pytest.mark.parametrize("operands", ["bfloat16", "int8"])
@pytest.mark.parametrize("zeros", [(), (0, 255, 116)])
def test_stem(target: str, operands: str, zeros: tuple[int, ...]) -> None:
    _check(replace(STEM, operands=operands, zero_points=zeros), target)


@pytest.mark.parametrize("operands", ["bfloat16", "int8"])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, channels: int, operands: str) -> None:
    kernel, stride, pad = SHAPES[shape]
    spec = Conv2d(
        1, 33, 39, channels, 24, kernel, (stride, stride), pads=(pad,) * 4, data_layout="NCHW",
        operands=operands, steps=(Step("bits"), *STORE),
    )  # fmt: skip
    _check(spec, NATIVE)


@pytest.mark.parametrize("target", [*FLOAT_TARGETS, NATIVE])
@pytest.mark.parametrize("data", [(-5.0, -5.0), (0.0, 0.0), (1e-38, -1e-38), (1e30, -1e30)])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums(target: str, data: tuple[float, float], sign: int) -> None:
    """Filters of nothing but the largest weights, on images of one magnitude, are exact too."""
    spec = Conv2d(
        1, 13, 13, 4, 16, (11, 11), pads=ONE, operands="int8", steps=STORE, data_layout="NCHW"
    )
    spec = _for(spec, target)
    weight = np.full((16, 11, 11, 4), sign * quantization.LEVELS, np.float32)
    image = np.where(np.indices((1, 4, 13, 13)).sum(axis=0) % 7, *data).astype(np.float32)
    _agree(spec, [image, quantization.pack_weight(weight, spec)], target, 1, 1)


@pytest.mark.parametrize("target", [*FLOAT_TARGETS, NATIVE])
@pytest.mark.parametrize("pixel", [0, 255])
def test_largest_bytes(target: str, pixel: int) -> None:
    spec = Conv2d(
        1, 12, 12, 4, 16, (11, 11), pads=ONE, operands="int8", zero_points=(255 - pixel,) * 4,
        steps=(Step("bits", zero=True), *STORE),
    )  # fmt: skip
    spec = _for(spec, target)
    weight = np.full((16, 11, 11, 4), quantization.LEVELS, np.float32)
    image = np.full((1, 12, 12, 4), pixel, np.uint8)
    inputs = [image, quantization.pack_weight(weight, spec)]
    same(run_kernel(spec, inputs, target), reference.conv2d(spec, inputs))


@pytest.mark.parametrize("target", [*FLOAT_TARGETS, NATIVE])
def test_images_have_scales_of_their_own(target: str) -> None:
    spec = _for(replace(STEM, n=3, pool=None, steps=STORE), target)
    inputs = _inputs(spec, 0, 3)
    inputs[0] *= np.array([1e-3, 0.0, 1e6], np.float32).reshape(-1, 1, 1, 1)
    got = run_kernel(spec, inputs, target, 3)[0]
    assert not got[1].any()
    for n in (0, 2):
        alone = replace(spec, n=1)
        same([got[n : n + 1]], run_kernel(alone, [inputs[0][n : n + 1], inputs[1]], target))


@pytest.mark.parametrize("operands", ["bfloat16", "int8"])
@pytest.mark.parametrize("pool", [STEM.pool, None])
def test_threads_change_nothing(operands: str, pool: RowPool | None) -> None:
    spec = replace(STEM, n=2, height=90, width=90, out_channels=80, operands=operands, pool=pool)
    spec = _for(spec, NATIVE)
    inputs = _inputs(spec, 0, 2)
    one = run_kernel(spec, inputs, NATIVE, 2, threads=1)
    assert "parallel" in str(schedules.schedule(define(spec), catalog.native(), 2))
    same(run_kernel(spec, inputs, NATIVE, 2, threads=2), one)


def test_spec_travels_as_json() -> None:
    spec = replace(STEM, zero_points=(1, 2, 3), packed=4)
    assert from_json(to_json(spec)) == spec
    assert {*CHOICES["first_layer"], "bfloat16x3"} == {*quantization.FORMATS}


def test_rounding_to_bfloat16() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[::2] = bits[::2] & 0xFFFF0000 | 0x8000  # ties
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) > 1e-30) & (np.abs(values) < 1e38)]
    mantissa, exponent = np.frexp(values.astype(np.float64))
    want = np.ldexp(np.rint(mantissa * 256) / 256, exponent)
    np.testing.assert_array_equal(quantization.to_bfloat16(values), want)


def test_weights_become_integers() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 2))
    weight[1] = 0
    weight[2] = np.where(weight[2] > 0, 1e-30, -1e-30)
    integers, scale = quantization.quantize_weight(weight)
    assert np.abs(integers).max(axis=(1, 2, 3)).tolist() == [127, 0, 127, 127]
    error = np.abs(integers * scale[:, None, None, None] - weight)
    assert (error <= 0.5001 * scale[:, None, None, None]).all()
    np.testing.assert_allclose(error[2], 0, atol=1e-40)
