"""Binary convolution and dense layers against the NumPy oracle, on every target that runs here."""

from __future__ import annotations

import dataclasses
import os
import time
import zlib
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from bnncc.schedules import multithreading, tile_choice, with_weight_order
from bnncc.targets import catalog
from bnncc.topi_binary import layout, reference
from bnncc.topi_binary.spec import BinaryConv2d, Step, to_json
from bnncc.transform.thresholds import ALWAYS, NEVER
from bnncc.tuning.cases import make
from tests.binary_cases import batches, build, check, make_inputs, run
from tests.kernel_harness import EMULATED, HERE, TARGETS, TILES, run_kernel

pytestmark = pytest.mark.sampled(6)

EXAMPLES = 50 if os.environ.get("BNNCC_TEST_ALL") else 2
THRESHOLD = (Step("threshold"),)

generated = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# Twelve cases and four simple ones for each of three targets; 196 in all tests.
emulated = settings(generated, max_examples=17 if EXAMPLES > 5 else 2)


def seed(spec: BinaryConv2d) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(to_json(spec).encode()))


def for_target(spec: BinaryConv2d, target: str) -> BinaryConv2d:
    """Return `spec` with the target's order of weights; on tiles also where they do not pay."""
    chosen = catalog.resolve(target)
    if target in TILES and tile_choice.supports(spec, chosen):
        return dataclasses.replace(spec, weight_order=tile_choice.ORDER)
    return with_weight_order(spec, chosen)


@pytest.mark.parametrize("target", [*HERE, *TILES])
@generated
@given(specs=batches())
def test_generated_cases_equal_the_oracle(target: str, specs: list[BinaryConv2d]) -> None:
    _compare(target, specs)


@pytest.mark.parametrize("target", EMULATED)
@emulated
@given(specs=batches(12))
def test_generated_cases_equal_the_oracle_on_arm(target: str, specs: list[BinaryConv2d]) -> None:
    _compare(target, specs)


def _compare(target: str, specs: list[BinaryConv2d]) -> None:
    specs = [for_target(spec, target) for spec in specs]
    library = build(specs, target)
    cases = [make_inputs(spec, seed(spec)) for spec in specs]
    for number, (spec, inputs) in enumerate(zip(specs, cases, strict=True)):
        check(library, number, spec, inputs)
    assert sum(spec.taps > 1000 for spec in specs) >= len(specs) / 4
    assert sum(spec.channels % layout.WORD_BITS > 0 for spec in specs) >= len(specs) / 4
    exact = [any(step.op == "threshold" for step in spec.steps) for spec in specs]
    assert sum(exact) >= len(specs) / 10


@pytest.mark.parametrize("target", [*TARGETS, *TILES])
def test_word_and_lane_edges(target: str) -> None:
    channels = (1, 31, 32, 33, 63, 64, 65)
    outs = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49)
    steps = (*THRESHOLD, Step("store"))
    specs = [BinaryConv2d(1, 2, 3, c, 33, (1, 1), steps=steps) for c in channels]
    specs += [BinaryConv2d(1, 2, 3, 33, out, (1, 1), steps=steps) for out in outs]
    specs += [BinaryConv2d(1, 1, 9, 33, out, (1, 3), steps=steps) for out in (64, 96, 112, 160)]
    specs = [for_target(spec, target) for spec in specs]
    library = build(specs, target)
    for number, spec in enumerate(specs):
        check(library, number, spec, make_inputs(spec, seed(spec)))


@pytest.mark.parametrize("target", [*TARGETS, *TILES])
def test_accumulators_reach_their_bounds(target: str) -> None:
    base = BinaryConv2d(1, 5, 5, 4096, 17, (5, 5), steps=(Step("store"),))
    variants = [
        base,
        dataclasses.replace(base, ternary=True),
        dataclasses.replace(base, mode="and"),
        dataclasses.replace(base, pads=(2, 2, 2, 2), pad_value=1),
    ]
    small = dataclasses.replace(base, channels=2560)  # 64000 products: as many as 16 bits count
    variants = [for_target(spec, target) for spec in (*variants, small)]
    library = build(variants, target)
    for (number, spec), equal in product(enumerate(variants), (True, False)):
        ones = np.ones((1, 5, 5, spec.channels), bool)
        weight = np.full((17, 5, 5, spec.channels), equal)
        planes = [layout.pack_bits(ones), *([layout.pack_bits(~ones)] if spec.ternary else [])]
        inputs = [*planes, layout.pack_conv_weight(weight, spec.weight_order)]
        (got,) = run(library, number, spec, inputs)
        scale, offset = spec.dot_from_acc()
        dot = scale * got.astype(np.int64) + offset
        assert (dot == (spec.taps if equal else -spec.taps)).all()


@pytest.mark.parametrize("target", TARGETS)
def test_narrow_sums_reach_their_bounds(target: str) -> None:
    # 8 * 7 lookups of 4 in a byte (the most for whole words), 65520 products in 16 bits.
    spec = BinaryConv2d(1, 2, 10, 4680, 32, (2, 7), steps=(Step("store"),))
    masked = dataclasses.replace(spec, ternary=True, channels=2340, out_channels=48)
    beyond = dataclasses.replace(spec, channels=4704)
    specs = [for_target(s, target) for s in (spec, masked, beyond)]
    library = build(specs, target)
    narrow = catalog.resolve(target).popcount in ("lookup", "neon", "neon-dot")
    wide = "words", tile_choice.ORDER
    assert [s.weight_order not in wide for s in specs] == [narrow, narrow, False]
    for (number, one), equal in product(enumerate(specs), (True, False)):
        ones = np.ones((1, 2, 10, one.channels), bool)
        zero = ~ones
        if one.ternary:
            zero[..., 0, 0] = True
        weight = np.full((one.out_channels, 2, 7, one.channels), equal)
        planes = [layout.pack_bits(ones), *([layout.pack_bits(zero)] if one.ternary else [])]
        inputs = [*planes, layout.pack_conv_weight(weight, one.weight_order)]
        check(library, number, one, inputs)
        (got,) = run(library, number, one, inputs)
        worst = 0 if equal else one.taps * (1 + one.ternary)
        assert got[0, 0, 3, 0] == worst


@pytest.mark.parametrize("target", [*TARGETS, *TILES])
@pytest.mark.parametrize("pad_value", [0, 1, -1])
def test_threads_share_the_rows(target: str, pad_value: int) -> None:
    spec = BinaryConv2d(
        1, 24, 24, 128, 129, (3, 3), pads=(1, 1, 1, 1), pad_value=pad_value, steps=THRESHOLD
    )
    spec = for_target(spec, target)
    assert multithreading.shared(spec, catalog.resolve(target), 2)
    inputs = make_inputs(spec, seed(spec))
    check(build([spec], target, threads=2), 0, spec, inputs)


@pytest.mark.parametrize("target", [*HERE, *TILES])
def test_threads_share_any_number_of_images(target: str) -> None:
    spec = BinaryConv2d("n", 24, 40, 256, 160, (3, 3), pads=(1, 1, 1, 1), steps=THRESHOLD)
    spec = for_target(spec, target)
    inputs = make_inputs(spec, seed(spec))
    check(build([spec], target, threads=2), 0, spec, inputs)


@pytest.mark.parametrize("target", [*HERE, *EMULATED, *TILES])
@pytest.mark.parametrize("ternary", [False, True])
def test_dense_layers_of_any_number_of_rows(ternary: bool, target: str) -> None:
    """Rows run in tiles, and those of a rest alone."""
    steps = (Step("affine"), Step("store"), Step("bits"))
    spec = BinaryConv2d("n", 1, 1, 130, 100, (1, 1), rank=2, ternary=ternary, steps=steps)
    wide = dataclasses.replace(spec, channels=1024, out_channels=1040, steps=THRESHOLD)
    specs = [for_target(one, target) for one in (spec, wide)]
    for threads in (1, 2):
        library = build(specs, target, threads)
        for number, one in enumerate(specs):
            for rows in (1, 2, 5, 8, 19):
                check(library, number, one, make_inputs(one, seed(one), rows))


@pytest.mark.parametrize("target", [*TARGETS, *TILES])
@pytest.mark.parametrize("channels", [29, 100])
def test_a_border_of_partial_words_is_compiled_in_seconds(target: str, channels: int) -> None:
    spec = BinaryConv2d(
        2, 7, 30, channels, 17, (3, 3), pads=(1, 1, 1, 1), pad_value=1, steps=THRESHOLD
    )
    spec = for_target(spec, target)
    start = time.process_time()
    library = build([spec], target)
    check(library, 0, spec, make_inputs(spec, seed(spec)))
    assert time.process_time() - start < 15  # about 1 s; minutes where LLVM merges single bytes


@pytest.mark.parametrize("target", [*TARGETS, *TILES])
def test_windows_wholly_outside_the_image(target: str) -> None:
    steps = (Step("threshold", zero=True),)
    spec = BinaryConv2d(1, 5, 18, 64, 64, (7, 1), pads=(1, 1, 1, 1), ternary=True, steps=steps)
    wide = dataclasses.replace(spec, kernel=(1, 1), pads=(2, 3, 2, 3), ternary=False)
    vectors = dataclasses.replace(wide, channels=128, kernel=(3, 1), pads=(4, 0, 4, 0))
    specs = [for_target(s, target) for s in (spec, wide, vectors)]
    library = build(specs, target)
    for number, one in enumerate(specs):
        check(library, number, one, make_inputs(one, seed(one)))


@pytest.mark.parametrize("target", [*TARGETS, *TILES])
def test_rows_of_large_kernels_outside_the_image(target: str) -> None:
    # 49 taps of one vector each are more than bytes can sum, so each row is a sum of its own.
    spec = BinaryConv2d(1, 12, 12, 64, 32, (7, 7), (2, 2), pads=(3, 3, 3, 3), steps=THRESHOLD)
    spec = for_target(spec, target)
    check(build([spec], target), 0, spec, make_inputs(spec, seed(spec)))


def test_weight_order_is_chosen_by_rule() -> None:
    layer = BinaryConv2d(1, 8, 8, 64, 64, (3, 3), pads=(1, 1, 1, 1))
    wide = dataclasses.replace(layer, channels=128)
    odd_groups = dataclasses.replace(layer, groups=4)
    dense = BinaryConv2d(1, 1, 1, 512, 100, (1, 1), rank=2)
    dilated = dataclasses.replace(layer, channels=96, dilations=(2, 2))
    for spec, x86, arm, tiles in (
        (layer, "nibbles", "halves", "fours"),
        (wide, "nibbles", "vectors", "fours"),
        (odd_groups, "sliced", "sliced", "words"),
        (dense, "words", "vectors", "words"),
        (dilated, "nibbles", "words", "words"),  # sixteen pixels
    ):
        for name, target in catalog.CATALOG.items():
            if target.gpus:
                continue
            sliced = "sliced" if spec is odd_groups and target.kind == "llvm" else "words"
            ways = {"lookup": x86, "neon": arm, "neon-dot": arm, "bytes": sliced}
            wanted = ways.get(target.popcount, "words")
            wanted = tiles if "amx_int8" in target.features else wanted
            assert with_weight_order(spec, target).weight_order == wanted, (spec, name)
    bits = np.ones((64, 3, 3, 64), bool)
    sizes = [layout.pack_conv_weight(bits, order).size for order in layout.WEIGHT_ORDERS]
    assert sizes == [64 * 9 * 2] * 2 + [64 * 3 * 8, 64 * 9 * 2, 64 * 9 * 2]


def test_tiles_are_used_where_they_were_measured_to_be_faster() -> None:
    layer = BinaryConv2d(1, 16, 16, 128, 64, (3, 3), pads=(1, 1, 1, 1))
    pointwise = dataclasses.replace(layer, kernel=(1, 1), pads=(0, 0, 0, 0))
    rows = BinaryConv2d(32, 1, 1, 512, 100, (1, 1), rank=2, steps=THRESHOLD)
    added = (Step("affine"), Step("add"), Step("store"))
    large = dataclasses.replace(layer, height=64, width=64, steps=added)
    for spec, pays in (
        (layer, True),
        (dataclasses.replace(layer, height=5, width=5, pads=(0, 0, 0, 0)), False),  # nine pixels
        (dataclasses.replace(layer, channels=32), False),  # tiles would be half empty
        (dataclasses.replace(layer, groups=8), False),  # of 16 channels each
        (pointwise, False),
        (rows, True),
        (dataclasses.replace(rows, n=16), False),
        (dataclasses.replace(rows, n=128), False),
        (dataclasses.replace(layer, steps=added), True),
        (large, False),  # 2 MiB of floats
        (dataclasses.replace(large, channels=512), False),
        (dataclasses.replace(layer, channels=64, steps=added), False),  # 72 products per byte
        (dataclasses.replace(rows, steps=(Step("affine"), Step("store"))), False),
    ):
        for name, target in catalog.CATALOG.items():
            order = with_weight_order(spec, target).weight_order
            assert (order == "fours") == (pays and "amx_int8" in target.features), (spec, name)


def test_oracle_of_a_hand_computed_convolution() -> None:
    spec = BinaryConv2d(
        1, 1, 2, 2, 1, (1, 2), pads=(0, 1, 0, 0), steps=(Step("affine"), Step("store"))
    )
    data = layout.pack_bits(np.array([[[[True, True], [True, False]]]]))
    weight = layout.pack_conv_weight(np.array([[[[True, True], [False, True]]]]))
    scale, offset = spec.dot_from_acc()
    affine = [layout.pad_lanes(np.array([v], np.float32)) for v in (scale, offset)]
    (dot,) = reference.binary_conv2d(spec, [data, weight, *affine])
    # Left: the pad counts 0, then 1*-1 + 1*1. Right: 1*1 + 1*1, then 1*-1 + -1*1.
    assert dot.ravel().tolist() == [0, 0]


@pytest.mark.parametrize("target", [*HERE, *TILES])
@pytest.mark.parametrize("ternary", [False, True])
def test_channels_that_never_change(ternary: bool, target: str) -> None:
    """Their thresholds are beyond all sums, but no comparison may overflow."""
    spec = BinaryConv2d(
        1, 10, 12, 70, 48, (3, 3), pads=(1, 1, 1, 1), ternary=ternary, steps=(Step("threshold"),)
    )
    spec = with_weight_order(spec, catalog.resolve(target))
    case = make(spec)
    case.inputs[-1][::3], case.inputs[-1][1::3] = NEVER, ALWAYS
    (found,) = run_kernel(spec, case.inputs, target)
    bits = np.unpackbits(found.view(np.uint8), axis=-1, bitorder="little")[..., :48]
    assert not bits[..., ::3].any()
    assert bits[..., 1::3].all()
