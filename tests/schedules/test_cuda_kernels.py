"""GPU kernels against the oracle, without a GPU: their text runs in an emulator on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest

from bnncc.ir.image_bits import bits_of
from bnncc.schedules import cuda
from bnncc.schedules.cuda import binary, float_tiles
from bnncc.topi_binary import layout, quantization, reference, tiles
from bnncc.topi_binary.build import aliases, output_types
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
    ImageBits,
    PadBits,
    Pool2d,
    SliceBits,
    Spec,
    Step,
)
from tests import kernel_harness
from tests.binary_cases import make_inputs, specs
from tests.cuda_emulator import COMPILER, Emulated
from tests.passes.test_input_transform import KINDS

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64"),
    pytest.mark.sampled(3),
]

ENGINES = {
    "simt": ("simt", 800),
    "mma-xor": ("mma", 800),
    "mma-and": ("mma", 900),
    "mma-sm75": ("mma", 750),
    "mma-int8": ("int8", 1000),
    "wgmma": ("wgmma", 900),
}
"""Engine of a target, and the architecture whose text is emulated."""

MAIN = [
    pytest.param(name, marks=() if name in ("simt", "mma-xor", "wgmma") else pytest.mark.slow)
    for name in ENGINES
]

THRESHOLD = (Step("threshold"),)
STORE = (Step("store"),)


def seed(number: int) -> np.random.Generator:
    return np.random.default_rng(number)


def with_order(spec: BinaryConv2d, engine: str) -> BinaryConv2d:
    """Return `spec` for an engine, which gets it however few its pixels are."""
    name, _ = ENGINES[engine]
    order = binary.weight_order(spec, name)
    if name == "wgmma":
        order = order.replace("fragments", "cores")
    return dataclasses.replace(spec, weight_order=order)


def check(cases: Iterable[tuple[BinaryConv2d, binary.Cut | None]], engine: str) -> None:
    """Compile all cases together and compare each with the oracle, bit for bit."""
    name, arch = ENGINES[engine]
    chosen = []
    for spec, cut in cases:
        if spec.weight_order == "words":
            spec = with_order(spec, engine)
        chosen.append((spec, cuda.kernel(spec, cut or binary.default_cut(spec, name))))
    library = Emulated([kernel for _, kernel in chosen], arch)
    for number, (spec, kernel) in enumerate(chosen):
        inputs = make_inputs(spec, seed(number))
        wanted = reference.binary_conv2d(spec, inputs)
        # A block that goes from pixels to pixels must do so with any number of blocks.
        for most in {kernel.most, min(1, kernel.most)}:
            limited = dataclasses.replace(kernel, most=most)
            got = run(library, spec, limited, inputs, number)
            for mine, other in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(mine, other, err_msg=f"{spec}")


def run(
    library: Emulated, spec: Spec, kernel: cuda.text.Kernel, inputs: list[np.ndarray], number: int
) -> list[np.ndarray]:
    """Return the outputs; they start as garbage, so that what is not written shows."""
    n = inputs[0].shape[0]
    inputs, outputs, fresh = [np.ascontiguousarray(x) for x in inputs], [], []
    for (shape, dtype), over in zip(output_types(spec), aliases(spec), strict=True):
        if over >= 0:
            inputs[over] = inputs[over].copy()
            outputs.append(inputs[over])
            continue
        extents = [n if isinstance(d, str) else d for d in shape]
        outputs.append(np.empty(extents, dtype))
        outputs[-1].view("uint8")[...] = 0x5A
        fresh.append(outputs[-1])
    library.run(kernel, [*inputs, *fresh], n, seed=number + 1)
    return outputs


def generated(count: int) -> list[BinaryConv2d]:
    """Return `count` of the specs that operators are tested with on CPUs."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    found: list[BinaryConv2d] = []

    @settings(
        max_examples=1, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.tuples(*[specs(large=i % 3 == 0, ragged=i % 2 == 0) for i in range(count)]))
    def collect(drawn: tuple[BinaryConv2d, ...]) -> None:
        found.extend(drawn)

    collect()
    return found


FEW = (
    BinaryConv2d("n", 5, 7, 64, 100, (3, 3), pads=(1, 1, 1, 1), steps=(*THRESHOLD, Step("store"))),
    BinaryConv2d(
        2, 4, 6, 96, 33, (3, 3), (2, 1), pads=(1, 0, 2, 1), ternary=True,
        steps=(Step("threshold", zero=True),),
    ),
    BinaryConv2d(3, 1, 1, 1024, 130, (1, 1), rank=2, mode="and", steps=THRESHOLD),
    BinaryConv2d(1, 5, 3, 20, 20, (3, 3), pads=(1, 1, 1, 1), pad_value=-1, groups=4,
                 steps=(Step("affine"), Step("bits", zero=True))),
    BinaryConv2d(1, 5, 5, 128, 64, (3, 3), pads=(1, 1, 1, 1), groups=2, steps=(
        Step("affine"), Step("add"), Step("store", in_place=True), Step("prelu"), Step("bits"))),
)  # fmt: skip


@pytest.mark.parametrize("engine", MAIN)
def test_few_shapes_equal_the_oracle(engine: str) -> None:
    check([(spec, None) for spec in FEW], engine)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(11))
@pytest.mark.parametrize("engine", ENGINES)
def test_all_operator_shapes_equal_the_oracle(engine: str, part: int) -> None:
    # 220 of the specs that the operators are tested with, and their word and lane edges.
    cases = generated(220)[part::11]
    check([(spec, None) for spec in cases], engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_word_and_lane_edges(engine: str) -> None:
    steps = (*THRESHOLD, Step("store"))
    cases = [BinaryConv2d(1, 2, 3, c, 33, (1, 1), steps=steps) for c in (1, 31, 32, 33, 63, 64, 65)]
    cases += [BinaryConv2d(1, 2, 3, 33, out, (1, 1), steps=steps) for out in (1, 15, 17, 31, 64)]
    check([(spec, None) for spec in cases], engine)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_width_and_cut(engine: str) -> None:
    kind = with_order(FEW[0], engine).weight_order.partition("-")[0]
    cuts = [binary.Cut(rows, splits) for rows in (1, 2) for splits in (1, 2, 4)]
    if kind != "fragments":
        cuts = [binary.Cut(teams=n) for n in (1, 2)]
    if kind == "strips":
        cuts = [binary.Cut(splits=n) for n in (1, 8, 32)]
    orders = [order for order in tiles.ORDERS if order.startswith(kind)]
    base = BinaryConv2d(2, 6, 7, 160, 200, (3, 3), pads=(1, 1, 1, 1), ternary=True, steps=THRESHOLD)
    check(
        [(dataclasses.replace(base, weight_order=order), cut) for order in orders for cut in cuts],
        engine,
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_accumulators_reach_their_bounds(engine: str) -> None:
    name, arch = ENGINES[engine]
    channels = 1024 if name == "wgmma" else 4096  # whole filters are in shared memory
    base = BinaryConv2d(1, 5, 5, channels, 17, (5, 5), steps=STORE)
    variants = [
        base,
        dataclasses.replace(base, ternary=True),
        dataclasses.replace(base, mode="and"),
        dataclasses.replace(base, pads=(2, 2, 2, 2), pad_value=1),
    ]
    variants = [with_order(spec, engine) for spec in variants]
    kernels = [cuda.kernel(spec, binary.default_cut(spec, name)) for spec in variants]
    library = Emulated(kernels, arch)
    for equal in (True, False):
        for spec, kernel in zip(variants, kernels, strict=True):
            ones = np.ones((1, 5, 5, spec.channels), bool)
            planes = [layout.pack_bits(ones), *([layout.pack_bits(~ones)] if spec.ternary else [])]
            weight = tiles.pack(spec, np.full((17, 5, 5, spec.channels), equal))
            (acc,) = run(library, spec, kernel, [*planes, weight], 0)
            scale, offset = spec.dot_from_acc()
            dot = scale * acc.astype(np.int64) + offset
            assert (dot == (spec.taps if equal else -spec.taps)).all()


def test_orders_of_weights_hold_what_they_say() -> None:
    spec = BinaryConv2d(1, 4, 4, 96, 70, (3, 2), pads=(1, 0, 0, 1))
    bits = seed(0).random((70, 3, 2, 96)) < 0.5
    for order in tiles.ORDERS:
        tiled = dataclasses.replace(spec, weight_order=order)
        packed = tiles.pack(tiled, bits)
        assert packed.size == tiles.of(tiled).words
        np.testing.assert_array_equal(reference.read_binary_weight(tiled, packed) > 0, bits)


PLAIN: tuple[Spec, ...] = (
    Conv2d("n", 6, 7, 3, 20, (3, 3), (2, 1), pads=(1, 1, 0, 1), data_layout="NCHW",
           steps=(Step("affine"), Step("store"), Step("bits", zero=True))),
    Conv2d(2, 5, 5, 16, 48, (3, 3), groups=1, dilations=(1, 2), steps=(Step("relu"), *STORE)),
    Conv2d(1, 5, 5, 12, 12, (3, 3), groups=12, pads=(1, 1, 1, 1), steps=STORE),
    Conv2d("n", 1, 1, 70, 37, (1, 1), rank=2, steps=(Step("shift"), *STORE)),
    Pool2d("n", 7, 6, 20, "max", (3, 3), (2, 2), pads=(1, 1, 1, 1), steps=(*STORE, Step("bits"))),
    Pool2d(1, 6, 6, 17, "avg", (3, 3), (2, 2), pads=(1, 1, 1, 1), data_layout="NCHW", steps=STORE),
    Pool2d(1, 6, 6, 8, "avg_full", (3, 3), (2, 2), ceil_extra=(1, 1), steps=STORE),
    Pool2d(2, 7, 7, 64, "avg", (7, 7), squeeze=True, steps=STORE),
    Elementwise("n", 5, 3, 33, data_layout="NCHW", steps=(Step("bits"),)),
    Elementwise(2, 5, 3, 48, steps=(Step("scale"), Step("store", layout="NCHW"), Step("bits"))),
    Elementwise(3, 1, 1, 70, rank=2, steps=(Step("bits", compare="gt"),)),
    Elementwise(5, 1, 1, 21, rank=2, steps=(
        Step("mul", period=1), Step("rsub", period=1), *STORE)),
    Elementwise(1, 4, 4, 3, dtype="uint8", data_layout="NCHW", steps=(Step("affine"), *STORE)),
    Elementwise(2, 3, 3, 40, from_bits=True, ternary=True, steps=STORE),
    Elementwise(2, 3, 3, 40, from_bits=True, mode="and", steps=(Step("clip", lo=0.5), *STORE)),
    BitwiseMaxPool("n", 7, 6, 70, (3, 2), (2, 2), pads=(1, 0, 1, 1)),
    BitwiseMaxPool(1, 4, 4, 40, (2, 2), (2, 2), pads=(2, 0, 0, 0), minimum=True, flip=True),
    BitwiseMaxPool(2, 7, 6, 70, (3, 2), (2, 2), pads=(1, 0, 1, 1), planes=3),
    ConcatBits(2, 3, 2, (20, 33, 64, 7)),
    SliceBits(2, 3, 2, 70, (*range(40, 70), -1, -1, *range(5))),
    SliceBits(1, 2, 2, 700, tuple(int(i) for i in np.random.default_rng(3).integers(0, 700, 600))),
    PadBits(2, 3, 2, 40, (1, 0, 2, 1), 1),
)  # fmt: skip
ORACLE = {
    Conv2d: reference.conv2d,
    Pool2d: reference.pool2d,
    Elementwise: reference.elementwise,
    BitwiseMaxPool: reference.bitwise_maxpool,
    ConcatBits: reference.concat_bits,
    SliceBits: reference.slice_bits,
    PadBits: reference.pad_bits,
}


def test_other_kernels_equal_the_oracle() -> None:
    kernels = [cuda.kernel(spec) for spec in PLAIN]
    library = Emulated(kernels, 800)
    for number, (spec, kernel) in enumerate(zip(PLAIN, kernels, strict=True)):
        inputs = kernel_harness.small_integers(spec, seed(number), batch=2)
        _fill_bits(spec, inputs)
        kernel_harness.same(
            run(library, spec, kernel, inputs, number), ORACLE[type(spec)](spec, inputs)
        )


def test_swish_is_close_to_the_oracle() -> None:
    """Also where exp(-x) is infinite; the result has the NaN and the infinity of the exact one."""
    spec = Elementwise(3, 1, 1, 70, rank=2, steps=(Step("swish"), *STORE))
    x = np.linspace(-100, 20, 210, dtype=np.float32).reshape(3, 70)
    x[0, :3] = -np.inf, np.inf, np.nan
    kernel = cuda.kernel(spec)
    (made,) = run(Emulated([kernel], 800), spec, kernel, [x], 0)
    (wanted,) = reference.elementwise(spec, [x])
    np.testing.assert_allclose(made, wanted, rtol=1e-6, atol=0)


TILED = (
    Conv2d("n", 17, 13, 3, 70, (7, 7), (2, 2), pads=(3, 3, 3, 3), data_layout="NCHW",
           steps=(Step("affine"), *STORE, Step("bits", zero=True))),
    Conv2d(2, 9, 7, 20, 64, (3, 3), pads=(1, 1, 1, 1), steps=(Step("add"), *STORE, Step("bits"))),
    Conv2d(2, 9, 7, 40, 33, (3, 2), (2, 1), dilations=(1, 2), pads=(1, 0, 1, 1),
           data_layout="NCHW", steps=(*STORE, Step("bits"))),
    Conv2d(2, 14, 14, 64, 128, (1, 1), steps=(Step("relu"), *STORE)),
    Conv2d(40, 1, 1, 70, 37, (1, 1), rank=2, steps=(Step("shift"), *STORE)),
)  # fmt: skip
"""Float layers that are products of matrices, tile by tile."""


def test_tiles_of_every_size_equal_the_oracle() -> None:
    cases = [(spec, cut) for spec in TILED for cut in float_tiles.cuts(spec)]
    assert {cut for _, cut in cases} == set(float_tiles.EFFORT)
    kernels = [cuda.kernel(spec, cut) for spec, cut in cases]
    library = Emulated(kernels, 800)
    for number, ((spec, _), kernel) in enumerate(zip(cases, kernels, strict=True)):
        inputs = kernel_harness.small_integers(spec, seed(number), batch=2)
        kernel_harness.same(
            run(library, spec, kernel, inputs, number), reference.conv2d(spec, inputs)
        )


def test_rounded_operands_equal_the_oracle() -> None:
    small = Conv2d(1, 14, 9, 16, 100, (5, 5), pads=(2, 2, 2, 2), steps=STORE)
    specs = [
        dataclasses.replace(spec, operands="bfloat16", packed=2)
        for spec in (TILED[0], small, dataclasses.replace(small, kernel=(9, 9)))
    ]
    kernels = [cuda.kernel(spec) for spec in specs]
    library = Emulated(kernels, 800)
    for number, (spec, kernel) in enumerate(zip(specs, kernels, strict=True)):
        draw = seed(number)
        inputs = kernel_harness.small_integers(spec, draw, batch=2)
        weight = draw.integers(-3, 4, (spec.out_channels, *spec.kernel, spec.channels))
        inputs[1] = quantization.pack_weight(weight.astype(np.float32), spec)
        inputs[0] = inputs[0] + np.float32(2**-9)  # what is rounded away
        wanted = reference.conv2d(spec, inputs)
        for most in {kernel.most, min(1, kernel.most)}:
            limited = dataclasses.replace(kernel, most=most)
            kernel_harness.same(run(library, spec, limited, inputs, number), wanted)


def _fill_bits(spec: Spec, inputs: list[np.ndarray]) -> None:
    """Make packed inputs proper planes, and the table of a selection what it is."""
    from bnncc.topi_binary.bits_table import needs_table, slice_table

    counts = spec.channels if isinstance(spec, ConcatBits) else (spec.channels,) * len(inputs)
    for i, array in enumerate(inputs):
        if array.dtype == np.uint32:
            inputs[i] = kernel_harness.clear_tails(array, counts[i])
    if isinstance(spec, SliceBits) and needs_table(spec):
        inputs[1] = slice_table(spec)


@pytest.mark.slow
def test_a_missing_barrier_shows() -> None:
    spec = dataclasses.replace(FEW[0], weight_order="fragments-32")
    kernel = cuda.kernel(spec, binary.Cut(splits=4))
    assert kernel.source.count("__syncthreads();") == 1
    broken = dataclasses.replace(kernel, source=kernel.source.replace("__syncthreads();", ""))
    library = Emulated([broken], 800)
    inputs = make_inputs(spec, seed(0))
    wanted = reference.binary_conv2d(spec, inputs)
    results = [run(library, spec, broken, inputs, number) for number in range(4)]
    assert any((a != b).any() for got in results for a, b in zip(got, wanted, strict=True))


def test_bits_of_images_equal_the_oracle() -> None:
    cases = [(layout, *kind) for layout in ("NCHW", "NHWC") for kind in KINDS]
    chosen = [
        ImageBits(2, 5, 9, 3, kind, thresholds, flip, where, channels)
        for where, kind, thresholds, flip, channels in cases
    ]
    kernels = [cuda.kernel(spec) for spec in chosen]
    library = Emulated(kernels, 800)
    image = seed(0).integers(0, 256, (2, 5, 9, 3), dtype=np.uint8)
    image[:, :, :4] //= 64  # many equal neighbours
    for number, (spec, kernel) in enumerate(zip(chosen, kernels, strict=True)):
        given = image if spec.data_layout == "NHWC" else image.transpose(0, 3, 1, 2)
        (made,) = run(library, spec, kernel, [np.ascontiguousarray(given)], number)
        bits = bits_of(image, spec.kind, spec.thresholds, spec.flip, spec.out_channels)
        np.testing.assert_array_equal(made, layout.pack_bits(bits), err_msg=f"{spec}")
