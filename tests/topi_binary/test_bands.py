"""Kernels for some rows, by the oracle: together they compute what the whole kernel computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bnncc.records.workload import Workload
from bnncc.topi_binary import bands
from bnncc.topi_binary.build import input_types
from bnncc.topi_binary.reference import evaluate_kernel
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, Pool2d, Spec, Step
from bnncc.tuning.cases import make
from tests import definition_cases

ALONE = [replace(spec, n=1) for spec in definition_cases.SPECS]
CASES = [spec for spec in ALONE if bands.has_bands(spec)]


def fed(
    spec: Spec, rows: range, inputs: list[np.ndarray], padded: bool = False
) -> list[np.ndarray]:
    """Return the inputs of the kernel for some rows."""
    part = bands.band(spec, rows, padded)
    read, above, below = rows, 0, 0
    for window in bands.windows(spec):
        read, above, below = window.read(read)
    axis = 2 if spec.data_layout == "NCHW" else 1
    found = []
    kinds = zip(bands.inputs_by_rows(spec), inputs, input_types(part), strict=True)
    for kind, value, (shape, _) in kinds:
        some = value
        if kind == bands.DATA:
            some = value.take(read, axis)
            around = [(above, below) if padded and a == axis else (0, 0) for a in range(4)]
            some = np.pad(some, around)
        elif kind == bands.OUTPUT:
            some = value[:, rows.start : rows.stop]
        elif kind == bands.CLASSES:
            some = value[bands.class_of(spec, rows.start) :][: shape[0]]
        found.append(np.ascontiguousarray(some))
        assert found[-1].shape == tuple(shape)
    return found


@pytest.mark.parametrize("spec", CASES, ids=lambda spec: Workload.of(spec).name)
def test_bands_together_are_the_whole(spec: Spec) -> None:
    inputs = make(spec).inputs
    wanted = evaluate_kernel(spec, inputs)
    height, seen = spec.output_hw[0], 0
    for count in (1, 3):
        for start in range(0, height, count):
            rows = range(start, min(start + count, height))
            if bands.band(spec, rows) is None:
                continue
            seen += 1
            for got, want in zip(
                evaluate_kernel(bands.band(spec, rows), fed(spec, rows, inputs)), wanted,
                strict=True,
            ):  # fmt: skip
                np.testing.assert_array_equal(got, want[:, rows.start : rows.stop])
    assert seen


@pytest.mark.parametrize("method", ["direct", "filtered"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_rows_of_zeros_are_padding(layout: str, method: str) -> None:
    spec = Conv2d(
        1, 9, 8, 3, 20, (3, 3), pads=(2, 1, 1, 0), data_layout=layout, method=method,
        steps=(Step("store"),),
    )  # fmt: skip
    inputs = make(spec).inputs
    (wanted,) = evaluate_kernel(spec, inputs)
    made = set()
    for start in range(spec.output_hw[0]):
        rows = range(start, start + 1)
        part = bands.band(spec, rows, padded=True)
        made.add(part)
        (got,) = evaluate_kernel(part, fed(spec, rows, inputs, padded=True))
        np.testing.assert_array_equal(got, wanted[:, start : start + 1])
    assert len(made) == 1


def test_what_has_no_bands() -> None:
    odd = BinaryConv2d(1, 8, 8, 33, 16, (3, 1), pads=(1, 0, 1, 0), steps=(Step("threshold"),))
    assert odd.doubled
    assert bands.band(odd, range(3, 4)) is None  # no padding: the unit of sums is another
    assert bands.band(odd, range(1)) is not None
    tiles = Conv2d(1, 8, 8, 16, 16, (3, 3), method="filtered-2d", steps=(Step("store"),))
    assert not bands.has_bands(tiles)
    scaled = replace(tiles, method="direct", operands="int8")  # by the maximum of the image
    assert not bands.has_bands(scaled)
    assert bands.has_bands(replace(scaled, zero_points=(0,) * 16))
    everything = Pool2d(1, 7, 7, 16, "avg", (7, 7), squeeze=True, steps=(Step("store"),))
    assert not bands.has_bands(everything)
    assert not bands.has_bands(replace(odd, n=2))
    assert not bands.has_bands(replace(odd, steps=(Step("store", layout="NCHW"),)))
