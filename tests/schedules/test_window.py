"""Rows of windows, cut into register tiles."""

from __future__ import annotations

from itertools import product

import pytest

from bnncc.schedules.templates.window import segments
from bnncc.topi_binary.spec import BinaryConv2d, taps_inside

pytestmark = pytest.mark.sampled(3)


@pytest.mark.parametrize(("kernel", "pad"), [(1, 0), (3, 1), (3, 0), (5, 2)])
def test_tiles_cover_a_row_once_and_know_the_taps_of_each_column(kernel: int, pad: int) -> None:
    for width, columns, unit in product(range(kernel, 40), range(1, 15), (1, 2, 4)):
        spec = BinaryConv2d(1, 8, width, 32, 16, (kernel, kernel), pads=(pad,) * 4)
        seen = []
        for start, size, tiles, taps in segments(spec, columns, unit):
            assert size <= max(columns, unit)
            for tile in range(tiles):
                first = start + tile * size
                seen += range(first, first + size)
                assert [taps_inside(spec, 1, first + i) for i in range(size)] == list(taps)
                assert first % unit == 0
        assert seen == list(range(spec.output_hw[1])), (width, columns, unit)


@pytest.mark.parametrize(("width", "columns", "most"), [(14, 4, 3), (56, 6, 3), (28, 7, 3)])
def test_few_kinds_of_tiles_follow_one_another(width: int, columns: int, most: int) -> None:
    spec = BinaryConv2d(1, 8, width, 32, 16, (3, 3), pads=(1, 1, 1, 1))
    assert len(segments(spec, columns)) <= most
