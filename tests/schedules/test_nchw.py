"""Results in NCHW that kernels write themselves, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

from bnncc.schedules import nchw, schedule, space_of, with_weight_order, writes_nchw
from bnncc.schedules.ranges import blocks
from bnncc.targets import catalog
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.reference import ORACLES
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d, Spec, Step
from tests.kernel_harness import (
    FLOATS_HERE,
    HERE,
    TILES,
    build,
    run_kernel,
    same,
    small_integers,
)

pytestmark = pytest.mark.sampled(4)

PLANAR = (Step("affine"), Step("store", layout="NCHW"))
MANY = (*PLANAR, Step("bits"), Step("relu"), Step("store"), Step("store", layout="NCHW"))
ONE = (1, 1, 1, 1)
WIDTHS = (3, 4, 5, 7, 8, 9, 12, 14, 27)
CHANNELS = (1, 16, 19, 33, 64)


def check(spec: Spec, target: str, threads: int = 1, batch: int = 1) -> None:
    if isinstance(spec, BinaryConv2d):
        spec = with_weight_order(spec, catalog.resolve(target))
    inputs = small_integers(spec, np.random.default_rng(0), batch)
    same(run_kernel(spec, inputs, target, batch, threads), ORACLES[type(spec)](spec, inputs))


@pytest.mark.parametrize("target", [*HERE, *TILES])
@pytest.mark.parametrize("width", WIDTHS)
def test_binary_convolutions_of_any_width(target: str, width: int) -> None:
    channels = CHANNELS[WIDTHS.index(width) % len(CHANNELS)]
    check(BinaryConv2d(1, 6, width, 64, channels, (3, 3), pads=ONE, steps=PLANAR), target)


@pytest.mark.parametrize("target", [*HERE, *TILES])
@pytest.mark.parametrize("threads", [1, 2])
def test_several_results_of_an_open_batch(target: str, threads: int) -> None:
    spec = BinaryConv2d("n", 25, 24, 64, 100, (3, 3), (2, 2), pads=ONE, pad_value=1, steps=MANY)
    check(spec, target, threads, batch=2)


@pytest.mark.parametrize("target", FLOATS_HERE)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("data_layout", ["NHWC", "NCHW"])
def test_float_convolutions(target: str, threads: int, data_layout: str) -> None:
    conv = Conv2d(1, 28, 28, 12, 40, (3, 3), pads=ONE, data_layout=data_layout, steps=MANY)
    check(conv, target, threads)
    check(replace(conv, groups=4, out_channels=12), target, threads)


@pytest.mark.parametrize("target", [*HERE, *TILES])
@pytest.mark.parametrize("method", ["floats", "bytes"])
def test_levels(target: str, method: str) -> None:
    finding = Step("levels", layout="NCHW", count=3, way="acc", forms=("value",), hi=1.0)
    spec = FewBitConv2d(1, 13, 13, 64, 36, (3, 3), pads=ONE, method=method, data_bits=2)
    check(replace(spec, steps=(finding, *PLANAR)), target)


@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v4-vpopcntdq"])
def test_every_order_of_loops(name: str) -> None:
    if name not in HERE:
        pytest.skip(f"this processor does not run {name}")
    target = catalog.resolve(name)
    spec = BinaryConv2d(1, 10, 12, 64, 48, (3, 3), pads=ONE, steps=PLANAR)
    spec = with_weight_order(spec, target)
    inputs = small_integers(spec, np.random.default_rng(1))
    wanted, found = ORACLES[BinaryConv2d](spec, inputs), space_of(spec, target)
    points = [{**found.default, key: v} for key, some in found.choices.items() for v in some[:3]]
    fitting = [point for point in points if found.fits(point)]
    library = build(
        {f"main_{i}": schedule(define(spec), target, 1, p) for i, p in enumerate(fitting)}, target
    )
    for number in range(len(fitting)):
        out = tvm.runtime.tensor(np.full(wanted[0].shape, 7, np.float32))
        library[f"main_{number}"](*map(tvm.runtime.tensor, inputs), out)
        same([out.numpy()], wanted)


def test_a_row_is_transposed_in_the_kernel_that_made_it() -> None:
    spec = BinaryConv2d(1, 56, 56, 64, 64, (3, 3), pads=ONE, steps=PLANAR)
    names = [block.name_hint for block in blocks(nchw.held(define(spec), spec))]
    assert "transpose_0_0" in names
    assert names.index("out") < names.index("transpose_0_0")
    plain = replace(spec, steps=(Step("store"),))
    assert nchw.held(define(plain), plain) is define(plain)


@pytest.mark.parametrize("width", range(4, 40))
def test_runs_cover_each_column_and_no_other(width: int) -> None:
    spec = Conv2d(1, 12, width, 16, 16, (1, 1), steps=PLANAR)
    rows = nchw.rows_of(spec, catalog.resolve("x86-64-v3"), 1)
    assert 12 % rows == 0
    for pixels in (width, width * rows):
        met = np.zeros(pixels, int)
        for run in nchw._runs(pixels):
            for turn in range(run.turns):
                first = run.first + turn * run.size
                assert 0 <= first <= pixels - run.size
                met[first : first + run.size] += 1
        assert met.all()


def test_where_kernels_write_nchw() -> None:
    layer = BinaryConv2d(1, 56, 56, 64, 64, (3, 3), pads=ONE)
    conv = Conv2d(1, 56, 56, 64, 64, (3, 3), pads=ONE)
    v3 = catalog.resolve("x86-64-v3")
    assert writes_nchw(layer, v3)
    assert writes_nchw(conv, v3)
    assert not writes_nchw(replace(conv, method="filtered"), v3)
    assert not writes_nchw(replace(layer, width=3), v3)  # narrower than any run
    assert not writes_nchw(BinaryConv2d(8, 1, 1, 64, 64, (1, 1), rank=2), v3)
    for other in ("arm64", "cuda-sm80"):
        assert not writes_nchw(layer, catalog.resolve(other))
