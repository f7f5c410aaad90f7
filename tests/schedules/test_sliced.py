"""Grouped and depthwise binary convolutions in bit slices, against the NumPy oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tvm

from bnncc.schedules import with_weight_order
from bnncc.schedules.templates import carry_save_adders as adders
from bnncc.targets import catalog
from bnncc.topi_binary import layout, reference, sliced_data
from bnncc.topi_binary.build import aliases
from bnncc.topi_binary.spec import BinaryConv2d, Step
from tests.binary_cases import build, check, make_inputs
from tests.kernel_harness import HERE, TARGETS

pytestmark = pytest.mark.sampled(4)

SIGN = (Step("threshold"),)
THREE = (Step("threshold", zero=True),)
FLOAT = (Step("threshold"), Step("affine"), Step("add"), Step("store"), Step("bits"))
BASE = BinaryConv2d(1, 6, 7, 64, 64, (3, 3), pads=(1, 1, 1, 1), groups=64, steps=SIGN)


def grouped(size: int, groups: int, **changes: object) -> BinaryConv2d:
    channels = size * groups
    sizes = {"channels": channels, "out_channels": channels, "groups": groups}
    return dataclasses.replace(BASE, **sizes, **changes)  # type: ignore[arg-type]


EDGES = [
    grouped(1, 33, strides=(2, 2), pad_value=1),
    grouped(1, 5, n="n", pads=(2, 0, 1, 3), steps=FLOAT),
    grouped(1, 160, width=20, ternary=True, steps=THREE),
    grouped(1, 530, mode="and", steps=FLOAT),
    grouped(2, 16, dilations=(2, 1), mode="and", pad_value=1),
    grouped(3, 11, strides=(1, 3), ternary=True, steps=FLOAT),
    grouped(5, 13, height=3, width=3, pads=(0, 0, 0, 0)),
    grouped(8, 4, kernel=(1, 1), pads=(0, 0, 0, 0), strides=(2, 2)),
    grouped(8, 3, kernel=(5, 5), pads=(2, 2, 2, 2), ternary=True),
    grouped(16, 3, kernel=(2, 1), width=1, steps=FLOAT),
    grouped(16, 40, strides=(3, 1), pad_value=-1),
    grouped(31, 2, dilations=(1, 2)),
    grouped(33, 2),
    dataclasses.replace(grouped(5, 13), out_channels=26),
    dataclasses.replace(grouped(16, 8), weight_order=sliced_data.ORDER),
]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_edges_equal_the_oracle(target: str) -> None:
    specs = [with_weight_order(spec, catalog.resolve(target)) for spec in EDGES[:-1]] + EDGES[-1:]
    others = {s.channels // s.groups for s in specs if s.weight_order != sliced_data.ORDER}
    assert others <= {5, 16, 33}
    library = build(specs, target)
    for number, spec in enumerate(specs):
        check(library, number, spec, make_inputs(spec, np.random.default_rng(number)))


@pytest.mark.parametrize("target", HERE[-1:])
def test_threads_share_bands_of_rows(target: str) -> None:
    large = {"height": 96, "width": 96}
    specs = [grouped(1, 512, **large), grouped(8, 64, strides=(2, 1), **large, steps=FLOAT)]
    specs = [with_weight_order(spec, catalog.resolve(target)) for spec in specs]
    library = build(specs, target, threads=3)
    for number, spec in enumerate(specs):
        check(library, number, spec, make_inputs(spec, np.random.default_rng(number)))


def test_results_are_stored_over_what_is_added() -> None:
    steps = (Step("affine"), Step("add"), Step("store", in_place=True), Step("bits"))
    target = HERE[-1]
    spec = with_weight_order(grouped(3, 13, steps=steps), catalog.resolve(target))
    inputs = make_inputs(spec, np.random.default_rng(0))
    total, signs = reference.binary_conv2d(spec, inputs)
    given = [tvm.runtime.tensor(x) for x in inputs]
    made = tvm.runtime.tensor(np.zeros_like(signs))
    build([spec], target)["k0"](*given, made)
    np.testing.assert_array_equal(given[aliases(spec)[0]].numpy(), total)
    np.testing.assert_array_equal(made.numpy(), signs)


def test_no_weight_is_stored_twice() -> None:
    deep = dataclasses.replace(grouped(1, 512), weight_order=sliced_data.ORDER)
    assert sliced_data.weight_size(deep) == 9 * 512 // layout.WORD_BITS
    wide = dataclasses.replace(grouped(8, 64), weight_order=sliced_data.ORDER)
    assert sliced_data.weight_size(wide) == 9 * 8 * 512 // layout.WORD_BITS


@pytest.mark.parametrize("pad_value", [0, 1, -1])
def test_limits_are_thresholds_moved(pad_value: int) -> None:
    spec = dataclasses.replace(
        grouped(1, 40), weight_order=sliced_data.ORDER, pad_value=pad_value, height=4, width=5
    )
    rng = np.random.default_rng(1)
    bits, data = rng.random((40, 3, 3, 1)) < 0.5, rng.random((1, 4, 5, 40)) < 0.5
    threshold = rng.integers(-3, 22, 40).astype(np.int32)
    limit = sliced_data.limits(spec, bits, layout.pad_lanes(threshold))
    assert limit.shape == sliced_data.limit_shape(spec)
    acc = reference.accumulate(spec, data, np.zeros_like(data), np.where(bits, 1, -1))
    inputs = [layout.pack_bits(data), sliced_data.pack(spec, bits), limit]
    (signs,) = reference.binary_conv2d(spec, inputs)
    assert (layout.unpack_bits(signs, 40) == (acc <= threshold)).all()


def test_ternary_logic_tables() -> None:
    tables = {
        adders.SUM: lambda a, b, c: a ^ b ^ c,
        adders.MAJORITY: lambda a, b, c: (a + b + c) // 2,
        adders.LESS: lambda a, b, c: c if a == b else int(a < b),
        adders.CHOOSE: lambda a, b, c: b if a else c,
    }
    for table, function in tables.items():
        bits = [function(row >> 2 & 1, row >> 1 & 1, row & 1) for row in range(8)]
        assert table == sum(bit << row for row, bit in enumerate(bits))
