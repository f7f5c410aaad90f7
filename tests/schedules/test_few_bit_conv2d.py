"""Few-bit convolutions and dense layers, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bnncc.schedules import tile_choice
from bnncc.targets import catalog
from bnncc.topi_binary import few_bit_data, reference
from bnncc.topi_binary.spec import FewBitConv2d, from_json, to_json
from bnncc.topi_binary.step import Step
from tests import amx_emulator
from tests.few_bit_cases import inputs
from tests.kernel_harness import EMULATED, TARGETS, TILES, run_kernel, same
from tests.tiny import BASELINE

pytestmark = pytest.mark.sampled(5)

NATIVE = "native"
FORMS = ("planes", "bytes", "pairs", "floats", "value", "table")
LEVELS = Step("levels", count=5, way="acc", forms=FORMS, lo=-1.0, hi=0.5)
FLIPPED = replace(LEVELS, flip=True, forms=("planes",))
PADDED = FewBitConv2d(
    1, 4, 5, 40, 20, (3, 3), pads=(1, 1, 1, 1), data_bits=2, weight_bits=2, method="and",
    steps=(LEVELS, Step("store")),
)  # fmt: skip
SMALL = replace(PADDED, height=3, width=3, out_channels=8, steps=(Step("store"),))
DENSE = FewBitConv2d(5, 1, 1, 75, 37, (1, 1), rank=2, data_bits=3, weight_bits=2,
                     steps=(Step("store"), FLIPPED))  # fmt: skip
PACKED = replace(DENSE, channels=64, data_bits=8, method="packed", steps=(Step("store"),))


def _check(
    spec: FewBitConv2d, target: str, outside: float = 0, threads: int = 1, batch: int = 3
) -> None:
    assert from_json(to_json(spec)) == spec
    batch = spec.n if isinstance(spec.n, int) else batch
    arrays = inputs(spec, 1, batch, outside)
    want = reference.few_bit_conv2d(spec, arrays)
    got = run_kernel(spec, arrays, target, batch, threads)
    _same_levels(spec, got, want)


def _same_levels(spec: FewBitConv2d, got: list, want: list) -> None:
    """Compare, but for what lies beyond the channels in forms that are numbers."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        words = one.shape[-1]
        for form, per_word in few_bit_data.PER_WORD.items():
            size = -(-spec.out_channels // 16) * 16 // per_word
            kind = {"bytes": "<u1", "pairs": "<u2", "floats": "<f4"}[form]
            if words == size and words != spec.out_channels and one.dtype.itemsize == 4:
                one, other = (np.ascontiguousarray(x).view(kind)[..., : spec.out_channels]
                              for x in (one, other))  # fmt: skip
                break
        same([one], [other])


@pytest.mark.parametrize("target", [*TARGETS, NATIVE, *TILES])
@pytest.mark.parametrize("method", [m for m in few_bit_data.METHODS if m != "packed"])
def test_every_method_on_every_target(method: str, target: str) -> None:
    _check(replace(PADDED, method=method, starts=True), target, 1)


@pytest.mark.parametrize("target", [*TARGETS, *EMULATED[1:], NATIVE])
@pytest.mark.parametrize("rows", [3, 21])
@pytest.mark.parametrize("weight_bits", [1, 2, 4])
def test_packed_weights_on_every_target(weight_bits: int, rows: int, target: str) -> None:
    _check(replace(PACKED, n=rows, weight_bits=weight_bits), target)


@pytest.mark.parametrize(
    "change",
    [
        {"n": 1, "channels": 16, "weight_bits": 2, "out_channels": 1},
        {"n": "n", "channels": 96, "weight_bits": 2, "starts": True},
        {"n": 9, "channels": 52, "weight_bits": 1, "data_bits": 3},
        {"n": 2, "rank": 4, "height": 3, "width": 7, "steps": (LEVELS,)},
        {"rank": 4, "height": 4, "width": 6, "steps": (Step("store", layout="NCHW"),)},
        {"n": 40, "out_channels": 300, "doubled": True, "channels": 250},
    ],
    ids=str,
)
def test_packed_weights_of_any_shape(change: dict) -> None:
    for threads in (1, 2):
        _check(replace(PACKED, **change), NATIVE, threads=threads)


@pytest.mark.parametrize("target", [NATIVE, *TARGETS])
@pytest.mark.parametrize(
    ("channels", "weight_bits", "data_bits", "words"),
    [
        (208, 2, 8, 5),
        (368, 2, 8, 5),
        (1024, 2, 8, 4),
        (416, 1, 8, 7),
        (2080, 2, 4, 65),
        (1040, 4, 8, 2),
        (2080, 4, 4, 26),
    ],
)
def test_words_that_are_added_in_16_bits(
    channels: int, weight_bits: int, data_bits: int, words: int, target: str
) -> None:
    """Words whose sums fit in 16 bits, also if their number does not divide all words."""
    spec = replace(PACKED, n=5, channels=channels, data_bits=data_bits, weight_bits=weight_bits)
    assert few_bit_data.short_words(spec) == words
    _check(spec, target)


@pytest.mark.parametrize("target", [NATIVE, BASELINE, *EMULATED])
@pytest.mark.parametrize("weight_bits", [1, 2, 4])
def test_extreme_levels_and_packed_weights(weight_bits: int, target: str) -> None:
    """Some instructions add products in 16 bits."""
    lowest, highest = {1: (-1, 1), 2: (-2, 1), 4: (-8, 7)}[weight_bits]
    for channels in (512, 592):  # words by fours, or by fives and the last two
        spec = replace(PACKED, n=3, channels=channels, weight_bits=weight_bits)
        data = np.full((3, channels), 255, np.uint8)
        for weight in (lowest, highest):
            packed = few_bit_data.pack_weight(np.full((37, 1, 1, channels), weight), spec)
            (got,) = run_kernel(spec, [data.view("<u4"), packed], target, 3)
            wanted = np.full((3, 37), 255 * channels * weight, np.float32)
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("target", [NATIVE, *TARGETS, *EMULATED[1:]])
@pytest.mark.parametrize(("data_bits", "weight_bits"), [(7, 8), (8, 8), (8, 7)])
def test_extreme_bytes(data_bits: int, weight_bits: int, target: str) -> None:
    """Some instructions add two products in 16 bits, in which not all fit."""
    spec = replace(
        PADDED, channels=36, data_bits=data_bits, weight_bits=weight_bits, method="bytes",
        pads=(0, 0, 0, 0), steps=(Step("store"),),
    )  # fmt: skip
    data = np.full((1, 4, 5, 48), 2**data_bits - 1, np.uint8)
    for weight in (-(2 ** (weight_bits - 1)), 2 ** (weight_bits - 1) - 1):
        packed = few_bit_data.pack_weight(np.full((20, 3, 3, 36), weight), spec)
        (got,) = run_kernel(spec, [data.view("<u4"), packed], target, 1)
        wanted = np.full((1, 2, 3, 20), (2**data_bits - 1) * 36 * 9 * weight, np.float32)
        np.testing.assert_array_equal(got, wanted)


def test_bytes_of_packed_weights() -> None:
    for bits in (1, 2, 4):
        spec = replace(PACKED, channels=2048, out_channels=640, weight_bits=bits)
        (((words,), _),) = few_bit_data.constants(spec)
        assert words * 32 == 2048 * 640 * bits


@pytest.mark.parametrize("target", TILES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        {"channels": 64, "data_bits": 8, "weight_bits": 8},
        {"channels": 100, "out_channels": 33, "strides": (2, 2), "height": 11, "width": 12},
        {"dilations": (2, 1), "pads": (2, 1, 0, 3), "height": 8, "width": 8},
        {"channels": 80, "out_channels": 64, "groups": 2},
        {"kernel": (1, 1), "pads": (0, 0, 0, 0), "starts": False},
        {"kernel": (1, 1), "pads": (0, 0, 0, 0), "height": 12, "width": 15},
        {"n": "n", "channels": 256, "height": 20, "width": 20, "steps": (LEVELS, FLIPPED)},
        *(
            {
                "n": 21,
                "rank": 2,
                "height": 1,
                "width": 1,
                "kernel": (1, 1),
                "pads": (0,) * 4,
                "method": "packed",
                "data_bits": 8,
                "weight_bits": bits,
                "starts": False,
                **change,
            }
            for bits, change in (
                (1, {"channels": 192, "out_channels": 100}),
                (2, {"channels": 64}),
                (2, {"channels": 64, "n": 160}),
                (4, {"channels": 128, "n": 160}),
            )
        ),
    ],
)
def test_levels_are_multiplied_on_tiles(change: dict, threads: int, target: str) -> None:
    spec = replace(PADDED, **{"method": "bytes", "starts": True, **change})
    emulator = amx_emulator.load()
    before = emulator.amx_emulator_performed() if emulator else 0
    _check(spec, target, float(any(spec.pads)), threads)
    assert emulator is None or emulator.amx_emulator_performed() > before


def test_tiles_of_levels_need_pixels() -> None:
    target = catalog.resolve("x86-64-v4-amx")
    rows = replace(DENSE, method="bytes", data_bits=8, weight_bits=8)
    for n, wanted in ((15, False), (16, True)):
        assert tile_choice.pays(replace(rows, n=n), target) == wanted
    assert not tile_choice.pays(replace(rows, n=16, method="xor"), target)
    assert not tile_choice.pays(replace(rows, n=16), catalog.resolve("x86-64-v4"))


@pytest.mark.parametrize("channels", [32, 40])
def test_depthwise(channels: int) -> None:
    spec = replace(PADDED, method="floats", starts=True, channels=channels, out_channels=channels)
    _check(replace(spec, groups=channels, strides=(2, 1)), NATIVE, 1)


@pytest.mark.parametrize("method", ["xor", "bytes"])
def test_threads(method: str) -> None:
    steps = (Step("levels", count=3, way="acc", forms=("planes", "bytes")),)
    spec = replace(PADDED, height=40, width=18, channels=128, out_channels=200, steps=steps)
    _check(replace(spec, method=method, starts=True), NATIVE, 1, threads=2)


@pytest.mark.parametrize("method", [m for m in few_bit_data.METHODS if m != "packed"])
def test_dense_layers(method: str) -> None:
    _check(replace(DENSE, method=method, starts=True), NATIVE, 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", [*TARGETS, *EMULATED[1:], NATIVE])
@pytest.mark.parametrize("method", few_bit_data.METHODS)
def test_dense_layers_of_any_number_of_rows(method: str, target: str) -> None:
    """Rows run in tiles, and those of a rest alone."""
    base = PACKED if method == "packed" else DENSE
    spec = replace(base, n="n", out_channels=90, method=method, starts=True)
    for rows in (1, 2, 5, 16, 23):
        _check(spec, target, 0 if method == "packed" else 1, batch=rows)


@pytest.mark.parametrize("method", ["packed", "bytes"])
def test_threads_share_any_number_of_rows(method: str) -> None:
    base = PACKED if method == "packed" else DENSE
    spec = replace(base, n="n", channels=4096, out_channels=2000, method=method)
    for rows in (1, 4, 11):
        _check(spec, NATIVE, threads=2, batch=rows)


@pytest.mark.slow  # in networks, `test_few_bit_networks` has every pair
@pytest.mark.parametrize("method", ["xor", "and"])
@pytest.mark.parametrize("data_bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("weight_bits", [1, 2, 3, 4])
def test_every_pair_of_bits(weight_bits: int, data_bits: int, method: str) -> None:
    spec = replace(SMALL, data_bits=data_bits, weight_bits=weight_bits, method=method, starts=True)
    _check(spec, NATIVE, 2**data_bits // 2)


@pytest.mark.parametrize(
    "method", ["xor", *(pytest.param(m, marks=pytest.mark.slow) for m in ("and", "bytes", "pairs"))]
)
@pytest.mark.parametrize(
    "change",
    [
        {"strides": (2, 2)},
        {"dilations": (2, 1), "pads": (2, 1, 0, 2)},
        {"kernel": (1, 1), "pads": (0, 0, 0, 0)},
        {"kernel": (5, 5), "pads": (2, 2, 2, 2), "channels": 3},
        {"channels": 128, "out_channels": 64, "groups": 2},
        {"n": "n", "out_channels": 1},
        {"doubled": True},
        {"width": 18, "height": 3},
        {"n": 2, "rank": 2, "height": 1, "width": 1, "kernel": (1, 1), "pads": (0, 0, 0, 0)},
    ],
    ids=str,
)
def test_shapes(change: dict, method: str) -> None:
    steps = (Step("store"), FLIPPED)
    spec = replace(PADDED, **{"method": method, "starts": True, "steps": steps, **change})
    _check(spec, NATIVE, 1.5 if spec.doubled else 1)
