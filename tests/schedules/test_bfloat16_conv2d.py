"""Layers with bfloat16 operands whose pixels begin with a word, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bnncc import schedules
from bnncc.schedules import tile_choice
from bnncc.targets import catalog
from bnncc.topi_binary import filtering, layout, quantization, reference
from bnncc.topi_binary.build import input_types, output_types
from bnncc.topi_binary.definitions import byte_products, define
from bnncc.topi_binary.spec import Conv2d, RowPool, Step
from tests.kernel_harness import HERE, TILES, build, run_kernel

pytestmark = pytest.mark.sampled(3)

STORE = (Step("store"),)
RESIDUAL = (Step("affine"), Step("add"), Step("relu"), Step("bits"), *STORE)
HALF = ml_dtypes.bfloat16


def made(spec: Conv2d, target: str) -> Conv2d:
    chosen = catalog.resolve(target)
    return schedules.with_packed_operands(replace(spec, operands="bfloat16"), chosen)


def filters(spec: Conv2d, rng: np.random.Generator) -> np.ndarray:
    weight = rng.standard_normal((spec.out_channels, *spec.kernel, spec.channels))
    return weight.astype(HALF).astype(np.float32)


def inputs(spec: Conv2d, batch: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = []
    for number, (shape, _) in enumerate(input_types(spec)):
        extents = [batch if isinstance(d, str) else d for d in shape]
        if number == 1:
            weight = filters(spec, rng)
            whole = spec.method == "direct"
            pack = quantization.pack_weight if whole else filtering.pack_weight
            arrays.append(pack(weight, spec))
        elif number == 0 and spec.zero_points:
            arrays.append(rng.integers(0, 256, extents).astype(np.uint8))
        else:
            arrays.append((10 * rng.standard_normal(extents)).astype(np.float32))
    return arrays


def agree(spec: Conv2d, target: str, batch: int = 1, threads: int = 1) -> None:
    arrays = inputs(spec, batch)
    want = reference.conv2d(spec, arrays)
    got = run_kernel(spec, arrays, target, batch, threads)
    floats = replace(spec, steps=(*(s for s in spec.steps if s.op != "bits"), Step("store")))
    exact = reference.conv2d(floats, arrays)[-1]
    largest = 3e-6 * max(np.abs(exact).max(), 1e-30)
    for one, other in zip(got, want, strict=True):
        if one.dtype == np.float32:
            np.testing.assert_allclose(one, other, rtol=0, atol=largest)
        else:
            bits = [layout.unpack_bits(x, spec.out_channels) for x in (one, other)]
            assert np.abs(exact[bits[0] != bits[1]]).max(initial=0) <= largest


def on_threads(spec: Conv2d, target: str, threads: int) -> None:
    """Run a layer that threads share, small as it is, and compare it."""
    chosen, arrays = catalog.resolve(target), inputs(spec, 2)
    library = build(
        {"main": schedules.schedule(define(spec), chosen, threads, {"divide": 1})}, chosen
    )
    shape, _ = output_types(spec)[-1]
    extents = [2 if isinstance(d, str) else d for d in shape]
    out = tvm.runtime.tensor(np.full(extents, np.nan, np.float32))
    rest = [
        tvm.runtime.tensor(np.zeros([2 if isinstance(d, str) else d for d in s], t))
        for s, t in output_types(spec)[:-1]
    ]
    library["main"](*map(tvm.runtime.tensor, arrays), *rest, out)
    want = reference.conv2d(spec, arrays)[-1]
    assert np.abs(out.numpy() - want).max() <= 3e-6 * np.abs(want).max()


@pytest.mark.parametrize("target", ["native", *TILES])
def test_threads_wait_for_rounded_data(target: str) -> None:
    for spec in TILED:
        on_threads(made(spec, target), target, 2)


@st.composite
def layers(draw: st.DrawFn) -> Conv2d:
    channels = draw(st.sampled_from([8, 17, 32, 33, 48, 64]))
    out = draw(st.sampled_from([1, 16, 20, 64, 90]))
    planes = (Step("affine"), Step("store", layout="NCHW"))
    steps = draw(st.sampled_from([STORE, RESIDUAL, planes]))
    n = draw(st.sampled_from([1, 2, 5, "n"]))
    if draw(st.booleans()):
        return Conv2d(n, 1, 1, channels, out, (1, 1), rank=2, steps=steps)
    spec = Conv2d(
        n, draw(st.integers(1, 9)), draw(st.integers(1, 18)), channels, out,
        draw(st.tuples(st.integers(1, 5), st.integers(1, 5))),
        (draw(st.integers(1, 3)), draw(st.integers(1, 3))),
        (draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        draw(st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (0, 2, 1, 0), (5, 6, 7, 8)])),
        data_layout=draw(st.sampled_from(["NHWC", "NHWC", "NCHW"])), steps=steps,
    )  # fmt: skip
    assume(min(spec.output_hw) > 0)
    return spec


@pytest.mark.parametrize("target", sorted({*HERE[-1:], "x86-64-v3", "native"} & {*HERE, "native"}))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(spec=layers(), threads=st.sampled_from([1, 2]))
def test_layers(target: str, spec: Conv2d, threads: int) -> None:
    agree(made(spec, target), target, batch=7, threads=threads)


TILED = [
    Conv2d(1, 8, 9, 64, 64, (3, 3), pads=(1, 1, 1, 1), steps=RESIDUAL),
    Conv2d(2, 8, 9, 33, 20, (3, 3), (2, 2), pads=(1, 0, 2, 1), steps=STORE),
    Conv2d("n", 5, 6, 17, 90, (1, 1), steps=RESIDUAL),
    Conv2d(50, 1, 1, 100, 33, (1, 1), rank=2, steps=STORE),
    Conv2d(2, 13, 14, 64, 40, (1, 1), steps=RESIDUAL),  # rows of 91 or fewer pixels
    Conv2d(1, 10, 20, 64, 32, (1, 1), steps=(Step("affine"), Step("gate"), *STORE)),
    Conv2d(1, 9, 9, 18, 16, (3, 2), (1, 2), (2, 1), (2, 1, 0, 2), data_layout="NCHW", steps=STORE),
]  # fmt: skip


@pytest.mark.parametrize("target", TILES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spec", TILED)
def test_layers_on_tiles(spec: Conv2d, threads: int, target: str) -> None:
    spec = made(spec, target)
    assert tile_choice.pays(spec, catalog.resolve(target))
    agree(spec, target, batch=2, threads=threads)


POOLED = RowPool((3, 3), (2, 2), (1, 1, 1, 1))
FIRST = [
    Conv2d(1, 38, 39, 3, 20, (7, 7), (2, 2), pads=(3,) * 4, data_layout="NCHW", steps=STORE),
    Conv2d(2, 13, 16, 3, 64, (3, 3), pads=(1,) * 4, steps=RESIDUAL),
    Conv2d(1, 17, 21, 1, 16, (7, 7), pads=(3, 2, 3, 1), data_layout="NCHW", steps=STORE),
    Conv2d("n", 20, 33, 4, 16, (4, 4), (4, 3), pads=(0, 1, 0, 2), data_layout="NCHW", steps=STORE),
    Conv2d(1, 12, 19, 5, 33, (5, 5), (2, 1), (2, 1), pads=(2,) * 4, steps=STORE),
    Conv2d(1, 12, 18, 8, 33, (3, 3), (2, 2), pads=(1,) * 4, steps=STORE),
    Conv2d(2, 10, 35, 3, 1, (3, 5), (1, 3), pads=(0, 2, 1, 0), steps=STORE),  # one pixel unread
    Conv2d(1, 9, 39, 2, 16, (3, 3), (1, 4), pads=(1, 2, 1, 0), steps=STORE),
]  # fmt: skip
BYTES = [
    replace(FIRST[0], zero_points=(128, 0, 255)),
    replace(FIRST[1], zero_points=(100, 120, 140)),
]
MAXIMA = [
    replace(FIRST[0], pool=POOLED),
    replace(FIRST[0], pool=replace(POOLED, before=(Step("affine"), Step("relu"))), n=2),
    replace(FIRST[1], pool=RowPool((2, 2), (2, 2)), steps=(Step("affine"), *STORE)),
    replace(FIRST[1], pool=RowPool((3, 2), (1, 3), (1, 0, 0, 1), (0, 1))),
    replace(FIRST[1], pool=RowPool((2, 3), (3, 1)), steps=(Step("store", layout="NCHW"),)),
    replace(BYTES[0], pool=POOLED),
    Conv2d(1, 14, 14, 64, 64, (3, 3), pads=(1,) * 4, pool=POOLED, steps=RESIDUAL),
]


@pytest.mark.parametrize("target", TILES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spec", [*FIRST, *BYTES, *MAXIMA])
def test_first_layers_on_tiles(spec: Conv2d, threads: int, target: str) -> None:
    """Kernel rows of few channels fill tiles, and maxima of sums need no memory of their own."""
    spec = made(spec, target)
    assert tile_choice.pays(spec, catalog.resolve(target))
    agree(spec, target, batch=2, threads=threads)


def test_pairs_are_multiplied_where_that_is_fast() -> None:
    few = Conv2d(1, 16, 16, 3, 4, (1, 1), steps=STORE)
    assert made(few, "x86-64-v4-amx").packed == 1
    target = catalog.resolve("x86-64-v4-amx")
    others = replace(target, features=tuple(f for f in target.features if "amx" not in f))
    rounded = replace(few, operands="bfloat16")
    assert schedules.with_packed_operands(rounded, others).packed == 2
    assert made(replace(few, height=1, width=1), "x86-64-v4-amx").packed == 2
    assert made(FIRST[0], "x86-64-v4-amx").packed == 2


def test_which_layers_tiles_take() -> None:
    target = catalog.resolve("x86-64-v4-amx")
    pairs: Any = {"operands": "bfloat16", "packed": 2, "apart": True}
    wide = Conv2d(1, 4, 4, 64, 64, (1, 1), steps=STORE, **pairs)
    for spec, taken in (
        (wide, True), (replace(wide, width=3), False), (replace(wide, method="filtered"), False),
        (replace(wide, channels=1), False), (replace(wide, channels=3), False),
        (replace(wide, apart=False), False),
        (replace(FIRST[0], **pairs), True),
        (replace(FIRST[0], **{**pairs, "apart": False}), False),
        (replace(FIRST[0], **pairs, kernel=(11, 11)), False),
        (replace(wide, pool=RowPool((4, 3))), False),
        (replace(wide, operands="float32", packed=1), False),
        (Conv2d(16, 1, 1, 9, 9, (1, 1), rank=2, **pairs), True),
        (Conv2d("n", 1, 1, 9, 9, (1, 1), rank=2, **pairs), False),
    ):  # fmt: skip
        assert tile_choice.pays(spec, target) == taken
    assert not tile_choice.pays(wide, catalog.resolve("x86-64-v4-vpopcntdq"))


STEM = Conv2d(1, 38, 38, 3, 20, (7, 7), (2, 2), pads=(3,) * 4, data_layout="NCHW", steps=STORE)
FILTERED = [
    STEM,
    replace(STEM, kernel=(3, 3), strides=(1, 1), pads=(1,) * 4, width=45),
    replace(STEM, data_layout="NHWC", channels=16, kernel=(3, 3), strides=(1, 1)),
    replace(STEM, pool=RowPool((3, 3), (2, 2), (1, 1, 1, 1), before=(Step("affine"),))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "method"),
    [*((spec, "filtered") for spec in FILTERED), (FILTERED[0], "filtered-2d")],
)
def test_filtered_layers_of_rounded_numbers(spec: Conv2d, method: str) -> None:
    spec = made(replace(spec, method=method), "native")
    arrays = inputs(spec)
    got, want = run_kernel(spec, arrays, "native")[0], reference.conv2d(spec, arrays)[0]
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    plain = reference.conv2d(replace(spec, operands="float32"), arrays)[0]
    assert np.abs(got - plain).max() > 1e-4 * np.abs(want).max()  # rounding shows


def test_a_weight_of_more_channels_begins_each_pixel_with_a_word() -> None:
    spec = made(replace(STEM, channels=9, kernel=(1, 2), out_channels=1), "x86-64-v4-amx")
    assert (spec.packed, spec.apart) == (2, True)
    weight = np.arange(1, 19, dtype=np.float32).reshape(1, 1, 2, 9)
    packed = quantization.pack_weight(weight, spec)
    assert packed.size == quantization.weight_type(spec)[0] == 16 * 10
    halves = packed.reshape(10, 16)[:, 0].copy().view(np.uint16).astype(np.uint32) << 16
    want = [*range(1, 10), 0, *range(10, 19), 0]
    assert halves.view(np.float32).tolist() == want


@pytest.mark.skipif("native" not in (*HERE, "native"), reason="this machine runs no target")
def test_edges_of_the_format() -> None:
    """Ties go to even, the largest numbers stay, and numbers without an exponent may be zeros."""
    spec = made(Conv2d(1, 1, 1, 32, 16, (1, 1), rank=2, steps=STORE), "native")
    ends = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 3.38e38, 2.0**-126, 1.5 * 2.0**-127]
    values = np.array([*ends, -(2.0**-140)] + [0.0] * 25, np.float32)
    weight = np.zeros((16, 1, 1, 32), np.float32)
    weight[np.arange(16), 0, 0, np.arange(16)] = 1.0
    packed = quantization.pack_weight(weight, spec)
    (got,) = run_kernel(spec, [values.reshape(1, 32), packed], "native")
    want = values[:16].astype(HALF).astype(np.float32)
    np.testing.assert_array_equal(got[0, :5], want[:5])
    for one, other in zip(got[0, 5:], want[5:], strict=True):
        assert one in (other, 0.0)


def test_filtering_is_chosen_where_it_saves_more_than_pairs() -> None:
    quick = replace(STEM, kernel=(3, 3), out_channels=16, height=224, width=224)
    wide = Conv2d(1, 56, 56, 64, 64, (3, 3), pads=(1,) * 4, steps=STORE)
    stem = replace(STEM, out_channels=64, height=224, width=224)
    for spec, packed, chosen in (
        (stem, 2, "filtered"), (quick, 2, "direct"), (wide, 2, "direct"), (wide, 1, "filtered"),
    ):  # fmt: skip
        spec = replace(spec, operands="bfloat16", packed=packed, apart=spec is wide)
        assert filtering.choose(spec, "filtered", *spec.output_hw) == chosen


def three(spec: Conv2d) -> Conv2d:
    return replace(spec, operands="bfloat16x3", packed=2, apart=True)


TERMS = [
    three(Conv2d(1, 8, 9, 64, 64, (1, 1), steps=RESIDUAL)),
    three(Conv2d(17, 1, 1, 100, 33, (1, 1), rank=2, steps=STORE)),
    three(Conv2d("n", 9, 9, 17, 20, (1, 1), (2, 2), data_layout="NCHW", steps=STORE)),
]


@pytest.mark.parametrize("target", TILES)
@pytest.mark.parametrize("spec", TERMS)
def test_products_of_three_terms(spec: Conv2d, target: str) -> None:
    rng = np.random.default_rng(1)
    assert tile_choice.pays(spec, catalog.resolve(target))
    spec = replace(spec, steps=STORE)
    for positive in (False, True):
        shape = [3 if isinstance(d, str) else d for d in input_types(spec)[0][0]]
        data = rng.standard_normal(shape).astype(np.float32)
        weight = rng.standard_normal((spec.out_channels, 1, 1, spec.channels)).astype(np.float32)
        if positive:
            data, weight = abs(data), abs(weight)
        arrays = [data, quantization.pack_weight(weight, spec)]
        (got,) = run_kernel(spec, arrays, target, 3)
        plain = replace(spec, operands="float32", packed=1)
        (want,) = reference.conv2d(plain, [data, layout.pack_float_weight(weight)])
        (size,) = reference.conv2d(plain, [abs(data), layout.pack_float_weight(abs(weight))])
        assert (np.abs(got - want) <= 3e-7 * size).all()


@pytest.mark.parametrize("target", TILES)
def test_the_deepest_sums_of_three_terms(target: str) -> None:
    rng = np.random.default_rng(2)
    spec = three(Conv2d(16, 1, 1, tile_choice.MAX_TERMS, 16, (1, 1), rank=2, steps=STORE))
    data, weight = (abs(rng.standard_normal((16, spec.channels)).astype("f")) for _ in range(2))
    packed = quantization.pack_weight(weight.reshape(16, 1, 1, -1), spec)
    (got,) = run_kernel(spec, [data, packed], target)
    want = data.astype(np.float64) @ weight.T.astype(np.float64)
    assert (np.abs(got - want) <= 3e-7 * want).all()
    deeper = replace(spec, channels=spec.channels + 1)
    assert not tile_choice.pays(deeper, catalog.resolve(target))
    assert not tile_choice.pays(replace(spec, kernel=(3, 3)), catalog.resolve(target))


@pytest.mark.parametrize("target", TILES)
def test_edges_of_three_terms(target: str) -> None:
    """Infinities and NaN are NaN; numbers whose terms are denormal lose those."""
    spec = three(Conv2d(16, 1, 1, 32, 16, (1, 1), rank=2, steps=STORE))
    weight = np.eye(16, 32, dtype=np.float32).reshape(16, 1, 1, 32)
    odd = np.array([0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32).view(np.float32)
    values = [np.inf, -np.inf, *odd, 3.4e38, 1 + 2.0**-23, 1e38, 2.0**-126, 2.0**-130, -0.0]
    data = np.zeros((16, 32), np.float32)
    data[np.arange(len(values)), np.arange(len(values))] = values
    (got,) = run_kernel(spec, [data, quantization.pack_weight(weight, spec)], target)
    seen = got[np.arange(len(values)), np.arange(len(values))]
    assert np.isnan(seen[:6]).all()  # 3.4e38 is beyond bfloat16
    np.testing.assert_array_equal(seen[6:8], data[[6, 7], [6, 7]])
    assert seen[8:].tolist() == [2.0**-126, 0.0, 0.0]
    assert np.isnan(got[: len(values) - 5][:, 6]).all()  # of its whole row: 0 * inf is NaN
    assert (got[11:] == 0).all()


def test_terms_of_a_float() -> None:
    x = np.float32([1 / 3, -7e30, 1 + 2.0**-23, 0.0])
    made = quantization.terms(x)
    assert all((term.astype(HALF).astype("f") == term).all() for term in made)
    np.testing.assert_array_equal(sum(t.astype(np.float64) for t in made), x.astype(np.float64))
    pairs = [tuple(int(which(i)) for which in byte_products._TERM_OF) for i in range(6)]
    assert tuple(pairs) == quantization.PRODUCTS
