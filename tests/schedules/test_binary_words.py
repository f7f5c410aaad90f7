"""Popcounts of words, and of several words that are counted together, against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bnncc.schedules import space_of, with_weight_order
from bnncc.targets import catalog
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.reference import binary_conv2d
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.topi_binary.step import Step
from bnncc.tuning.cases import make
from tests.binary_cases import build, check, make_inputs, run
from tests.definition_cases import MATRIX
from tests.kernel_harness import HERE, IN_NODE

pytestmark = pytest.mark.sampled(2)

STORE = (Step("store"),)
DENSE = BinaryConv2d(1, 1, 1, 512, 40, (1, 1), rank=2, steps=STORE)
SMALL = BinaryConv2d(1, 7, 6, 192, 9, (3, 3), pads=(1, 1, 1, 1), steps=STORE)
LOOKUP = [name for name in HERE if catalog.resolve(name).popcount == "lookup"]
"""Targets that count bits in bytes."""


@pytest.mark.parametrize("target", [*HERE, *IN_NODE])
def test_any_number_of_words(target: str) -> None:
    """1 to 18 words are one body or several, or, as 17, none that divides them."""
    specs = [replace(DENSE, channels=32 * words - words % 3) for words in range(1, 19)]
    specs += [replace(DENSE, n=2, channels=800), replace(DENSE, n=3, channels=1056)]
    specs += [replace(DENSE, out_channels=out) for out in (1, LANES, LANES + 1)]
    specs += [replace(DENSE, ternary=True), replace(DENSE, steps=(Step("threshold"),))]
    specs += [replace(SMALL, pad_value=value) for value in (-1, 0, 1)]
    specs += [replace(SMALL, mode="and", pad_value=1), replace(SMALL, ternary=True)]
    specs += [replace(SMALL, strides=(2, 1), dilations=(1, 2), channels=224)]
    specs += [replace(SMALL, n=2, groups=2, channels=128, out_channels=2 * LANES)]
    specs = [with_weight_order(spec, catalog.resolve(target)) for spec in specs]
    assert sum(spec.weight_order == "words" for spec in specs) >= 25
    library = build(specs, target)
    for number, spec in enumerate(specs):
        check(library, number, spec, make_inputs(spec, np.random.default_rng(number)))


@pytest.mark.parametrize("target", [*HERE, *IN_NODE])
def test_weights_of_each_image(target: str) -> None:
    specs = [replace(MATRIX, channels=32 * words) for words in (1, 2, 3, 7, 16, 18)]
    specs += [replace(MATRIX, channels=128, out_channels=48), replace(MATRIX, mode="and")]
    library = build(specs, target)
    for number, spec in enumerate(specs):
        case = make(spec)
        assert case.difference(run(library, number, spec, case.inputs)) == "", spec


@pytest.mark.parametrize("target", LOOKUP)
@pytest.mark.parametrize("differ", [False, True])
def test_sums_of_bytes_reach_their_bounds(target: str, differ: bool) -> None:
    """All bits of sixteen words differ: 128 in each byte."""
    data = np.full((1, 16), 0xFFFFFFFF, np.uint32)
    weight = np.full(16 * DENSE.out_channels + LANES, 0 if differ else 0xFFFFFFFF, np.uint32)
    library = build([DENSE], target)
    check(library, 0, DENSE, [data, weight])
    assert (binary_conv2d(DENSE, [data, weight])[0] == 512 * differ).all()


@pytest.mark.parametrize("target", LOOKUP)
def test_as_many_words_as_can_be_are_counted_together(target: str) -> None:
    machine = catalog.resolve(target)
    for channels, words in ((4096, 16), (800, 5), (1056, 11), (32 * 17, 1), (20, 1)):
        spec = replace(DENSE, channels=channels)
        assert space_of(spec, machine).default["unroll"] == words, channels
