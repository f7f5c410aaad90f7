"""Binary convolutions of few channels, whose taps share words or lookups, against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from bnncc.schedules import schedule, space_of, with_weight_order
from bnncc.targets import catalog
from bnncc.topi_binary.build import output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Step
from tests.binary_cases import build, check, make_inputs
from tests.kernel_harness import ALL, EMULATED, HERE, IN_NODE

LAYER = BinaryConv2d(1, 9, 13, 3, 40, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))

WINDOWS = (
    {"kernel": (5, 5), "pads": (2, 2, 2, 2)},
    {"kernel": (7, 7), "strides": (2, 2), "pads": (3, 3, 3, 3)},
    {"kernel": (1, 11), "pads": (0, 4, 0, 5)},
    {"kernel": (2, 4), "strides": (1, 3), "dilations": (2, 2), "pads": (0, 3, 1, 2)},
    {"kernel": (3, 3), "strides": (2, 1), "width": 3},
    {"kernel": (4, 2), "pads": (3, 1, 3, 1), "width": 1},
    {"kernel": (1, 33), "pads": (0, 16, 0, 16), "height": 2, "width": 70},
)


def _specs() -> Iterator[BinaryConv2d]:
    for channels in (1, 2, 3, 5, 8, 10, 11, 16, 17, 28):
        yield replace(LAYER, channels=channels)
        for value in (-1, 1):
            yield replace(LAYER, channels=channels, pad_value=value)
    for number, window in enumerate(WINDOWS):
        for channels in (1, 3, 6, 13):
            spec = replace(LAYER, channels=channels, pad_value=number % 3 - 1, **window)
            yield from (spec, replace(spec, pad_value=0, out_channels=7 + 25 * (number % 3)))
    for channels in (3, 6, 14):
        few = replace(LAYER, channels=channels)
        yield from (replace(few, mode="and", pad_value=value) for value in (0, 1))
        yield from (replace(few, ternary=True, pad_value=value) for value in (0, 1))
        yield replace(few, n=3)
        yield replace(few, steps=(Step("affine"), Step("store", layout="NCHW"), Step("bits")))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("target", [*HERE, *EMULATED, *IN_NODE])
def test_few_channels(target: str, threads: int) -> None:
    """Unless all are run, each target has others."""
    if target in IN_NODE and threads > 1:
        pytest.skip("WebAssembly has one thread")
    machine, some = catalog.resolve(target), 8 if target in HERE else 24
    first = (sum(target.encode()) + 3 * threads) % some
    specs = [with_weight_order(spec, machine) for spec in _specs()]
    specs = specs if ALL else specs[first::some]
    library = build(specs, target, threads)
    for number, spec in enumerate(specs):
        check(library, number, spec, make_inputs(spec, np.random.default_rng(number)))


def test_taps_share_words_by_choice() -> None:
    """Tuning may do without."""
    machine = catalog.resolve("x86-64-v4-vpopcntdq")
    space = space_of(LAYER, machine)
    assert space.default["folded"] == 1
    assert {point["folded"] for point in space.points()} == {0, 1}
    for spec in (replace(LAYER, channels=17), replace(LAYER, kernel=(3, 1))):
        assert {point["folded"] for point in space_of(spec, machine).points()} == {0}


@pytest.mark.parametrize("target", EMULATED)
def test_few_channels_take_fewer_instructions(target: str) -> None:
    from bnncc.codegen.emulator import Library, compiled

    machine = catalog.resolve(target)
    counts = []
    for channels in (4, 8, 16, 32):
        spec = with_weight_order(replace(LAYER, channels=channels, out_channels=64), machine)
        func = schedule(define(spec), machine).with_attr("global_symbol", "main")
        library = Library(compiled({"main": func}, machine))
        outputs = [np.zeros(shape, dtype) for shape, dtype in output_types(spec)]
        library.call("main", [*make_inputs(spec, np.random.default_rng(0)), *outputs], count=True)
        counts.append(library.instructions)
    assert counts[0] <= counts[1] < 0.6 * counts[3]
    assert counts[2] < 0.85 * counts[3]
