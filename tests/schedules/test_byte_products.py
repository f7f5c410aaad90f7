"""Kernels on tiles: every way to divide an image."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

from bnncc.schedules import schedule, space_of, tile_choice
from bnncc.targets import catalog
from bnncc.topi_binary.definitions import byte_products, define
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d, Step
from bnncc.tuning.cases import make
from tests.binary_cases import check, make_inputs
from tests.kernel_harness import TILES, build, with_two_threads

pytestmark = pytest.mark.sampled(3)

STORED = (Step("affine"), Step("add"), Step("store"), Step("bits"))
LAYER = BinaryConv2d(
    1, 6, 7, 128, 64, (3, 3), pads=(1, 1, 1, 1), weight_order=tile_choice.ORDER, steps=STORED
)
THRESHOLD = (Step("threshold"),)
ZEROS = {
    "tiles of zeros": replace(LAYER, height=14, width=14),
    "tiles of two rows": replace(LAYER, n=2, height=7, width=7, steps=THRESHOLD),
    "two rows of zeros": replace(
        LAYER, height=9, width=15, dilations=(2, 1), pads=(2, 1, 3, 1), mode="and"
    ),
    "zeros below": replace(LAYER, height=27, width=26, strides=(2, 2), pads=(0, 0, 2, 1)),
}
NCHW = (Step("affine"), Step("store", layout="NCHW"))

LAYERS = {
    "padded": LAYER,
    "several runs per line": replace(LAYER, height=9, width=40, channels=64, steps=THRESHOLD),
    "ragged channels, three images": replace(LAYER, n=3, channels=100, out_channels=40),
    "odd vectors": replace(LAYER, out_channels=48, pad_value=1, mode="and"),
    "strides and dilation": replace(LAYER, strides=(2, 1), dilations=(1, 2), pads=(2, 1, 0, 3)),
    "exact zeros": replace(LAYER, ternary=True, channels=96, pad_value=-1),
    "many taps": replace(LAYER, kernel=(5, 5), pads=(2, 2, 2, 2), width=17, steps=NCHW),
    "groups": replace(LAYER, groups=2, channels=256),
    "groups of one vector": replace(LAYER, groups=2, channels=256, out_channels=32),
    "groups of three vectors": replace(LAYER, groups=2, channels=256, out_channels=96),
    "few steps": replace(LAYER, kernel=(1, 1), pads=(0, 0, 0, 0), channels=64),
    "rows of two tiles": replace(LAYER, height=8, width=26, channels=64, out_channels=40),
    **ZEROS,
    "padding of ones": replace(ZEROS["tiles of zeros"], pad_value=-1),
    **{
        f"{n} rows": BinaryConv2d(
            n, 1, 1, 320, 96, (1, 1), rank=2, weight_order=tile_choice.ORDER, steps=THRESHOLD
        )
        for n in (33, 132)
    },
    **{
        f"{n} rows in chunks of channels": BinaryConv2d(
            n, 1, 1, 2240, 104, (1, 1), rank=2, weight_order=tile_choice.ORDER, steps=THRESHOLD
        )
        for n in (70, 150)
    },
}


@pytest.mark.parametrize(
    ("tiles", "vectors", "threads"),
    [
        *((1, 1, 1), (2, 2, 2), (4, 1, 1), (5, 1, 2)),
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in ((1, 2, 2), (2, 1, 1), (2, 2, 1), (4, 1, 2), (5, 1, 1))
        ),
    ],
)
@pytest.mark.parametrize("target", TILES)
def test_all_ways_equal_the_oracle(tiles: int, vectors: int, threads: int, target: str) -> None:
    machine, functions = catalog.resolve(target), {}
    for number, spec in enumerate(LAYERS.values()):
        point = {"tiles": tiles, **({"divide": 1} if threads > 1 else {})}
        if "vectors" in space_of(spec, machine, threads).choices:
            point["vectors"] = vectors
        functions[f"k{number}"] = schedule(define(spec), machine, threads, point)
    library = build(functions, machine)

    def checked() -> None:
        for number, spec in enumerate(LAYERS.values()):
            check(library, number, spec, make_inputs(spec, np.random.default_rng(number)))

    with_two_threads(checked)


FEW_BIT = FewBitConv2d(
    70, 1, 1, 1152, 104, (1, 1), data_bits=8, weight_bits=2, method="packed", rank=2,
    steps=(Step("affine"), Step("store")),
)  # fmt: skip
FLOATS = Conv2d(1, 9, 8, 320, 64, (1, 1), operands="bfloat16", packed=2, apart=True, steps=STORED)
POINTWISE: dict[str, byte_products.Layer] = {
    "2-bit weights": FEW_BIT,
    "1-bit weights, few steps": replace(FEW_BIT, n=150, channels=320, weight_bits=1),
    "8-bit weights, pixels of images": replace(
        FEW_BIT, n=2, height=16, width=14, channels=256, method="bytes", weight_bits=8, rank=4
    ),
    "bfloat16": FLOATS,
    "bfloat16, more windows than one line may have": replace(FLOATS, height=33, width=40),
    "three terms": replace(FLOATS, operands="bfloat16x3", channels=128, steps=STORED[:1]),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("target", TILES)
def test_vectors_share_data_of_pointwise_layers(target: str, threads: int) -> None:
    machine, functions = catalog.resolve(target), {}
    for number, spec in enumerate(POINTWISE.values()):
        space = space_of(spec, machine, threads)
        assert space.default["vectors"] == 2
        point = {"divide": 1} if threads > 1 else {}
        functions[f"k{number}"] = schedule(define(spec), machine, threads, point)
    library = build(functions, machine)

    def checked() -> None:
        for number, spec in enumerate(POINTWISE.values()):
            case = make(spec)
            outputs = [tvm.runtime.tensor(np.zeros_like(one)) for one in case.outputs]
            library[f"k{number}"](*map(tvm.runtime.tensor, case.inputs), *outputs)
            assert not case.difference([one.numpy() for one in outputs])

    with_two_threads(checked)


def test_memory_for_sums_does_not_grow_with_rows() -> None:
    """Two runs of sums are kept, not two of all rows."""
    held = {}
    for rows in (64, 512):
        spec = replace(FEW_BIT, n=rows, out_channels=96)
        func = schedule(define(spec), catalog.resolve("x86-64-v4-amx"), 1)
        (tensor,) = (one for one in func.body.block.alloc_buffers if one.name == "held")
        held[rows] = [*map(int, tensor.shape)]
    assert held[64] == held[512] == [2, 2, 1, 32, 16]
