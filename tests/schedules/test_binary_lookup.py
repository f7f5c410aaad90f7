"""Lookups for two adjacent outputs: every tile, at every width, against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

from bnncc.schedules import binary_lookup, schedule, space_of, with_weight_order
from bnncc.targets import catalog
from bnncc.topi_binary import reference
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.topi_binary.step import Step
from tests.binary_cases import make_inputs
from tests.kernel_harness import ALL, HERE, build, run_kernel

pytestmark = pytest.mark.sampled(4)

LAYER = BinaryConv2d(1, 3, 7, 40, 80, (3, 3), pads=(1, 1, 1, 1), steps=(Step("store"),))
LOOKUP = [name for name in HERE if catalog.resolve(name).popcount == "lookup"]


@pytest.mark.parametrize("target", LOOKUP)
@pytest.mark.parametrize(("kernel", "strides"), [((3, 3), (1, 1)), ((1, 2), (1, 3))])
def test_all_tiles_are_the_same(
    target: str, kernel: tuple[int, int], strides: tuple[int, int]
) -> None:
    machine = catalog.resolve(target)
    spec = with_weight_order(replace(LAYER, kernel=kernel, strides=strides), machine)
    assert spec.weight_order == "nibbles"
    assert spec.output_hw[1] % 2 == 1
    points = list(space_of(spec, machine).points())[:: 1 if ALL else 4]
    functions = {f"k{i}": schedule(define(spec), machine, 1, p) for i, p in enumerate(points)}
    library, inputs = build(functions, machine), make_inputs(spec, np.random.default_rng(1))
    (wanted,) = reference.binary_conv2d(spec, inputs)
    for name in functions:
        found = tvm.runtime.tensor(np.full(wanted.shape, 7, np.float32))
        library[name](*map(tvm.runtime.tensor, inputs), found)
        np.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("target", LOOKUP)
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_rows_of_any_width(target: str, width: int) -> None:
    spec = replace(LAYER, height=8, width=width, pad_value=width % 3 - 1)
    spec = with_weight_order(spec, catalog.resolve(target))
    assert spec.weight_order == "nibbles"
    inputs = make_inputs(spec, np.random.default_rng(width))
    (wanted,) = reference.binary_conv2d(spec, inputs)
    np.testing.assert_array_equal(run_kernel(spec, inputs, target)[0], wanted)


@pytest.mark.parametrize("target", LOOKUP)
@pytest.mark.parametrize(("channels", "zero"), [(40, False), (40, True), (1824, False)])
def test_thresholds_of_any_size(target: str, channels: int, zero: bool) -> None:
    """1824 channels have sums that do not fit in 15 bits if they are doubled."""
    step = Step("threshold", zero=zero)
    spec = replace(LAYER, channels=channels, height=2, width=4, steps=(step,), pad_value=-1)
    spec = with_weight_order(spec, catalog.resolve(target))
    assert spec.weight_order == "nibbles"
    inputs = make_inputs(spec, np.random.default_rng(0))
    middle = spec.taps // 2
    limits = [-(2**31), -(2**15) - 1, -(2**15), -1, 0, middle - 9, middle, middle + 9]
    limits += [2**15 - 1, 2**15, 2**16 + middle, 2**31 - 1]
    for number in range(1 + zero):
        made = np.resize(np.roll(limits, number), inputs[2 + number].shape)
        inputs[2 + number] = made.astype(np.int32)
    for found, wanted in zip(
        run_kernel(spec, inputs, target), reference.binary_conv2d(spec, inputs), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("target", LOOKUP)
@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_pointwise_layers(target: str, strides: tuple[int, int], width: int) -> None:
    spec = replace(LAYER, width=width, kernel=(1, 1), pads=(0, 0, 0, 0), strides=strides, n=2)
    for one in (spec, replace(spec, channels=64, groups=2, out_channels=64)):
        ordered = with_weight_order(replace(one, height=6), catalog.resolve(target))
        assert strides != (1, 1) or ordered.weight_order == "nibbles"
        inputs = make_inputs(ordered, np.random.default_rng(width))
        (wanted,) = reference.binary_conv2d(ordered, inputs)
        np.testing.assert_array_equal(run_kernel(ordered, inputs, target)[0], wanted)


@pytest.mark.parametrize("width", range(1, 30))
@pytest.mark.parametrize("columns", [2, 4, 6])
def test_ranges_cover_each_column_once(width: int, columns: int) -> None:
    met: list[int] = []
    for part in binary_lookup._ranges(width, columns):
        assert 2 * part.width <= columns
        assert part.columns in (whole := 2 * part.width * part.tiles, whole - 1)
        met += range(2 * part.first, 2 * part.first + part.columns)
    assert met == [*range(width)]
