"""Generated cases of binary convolution: specs, inputs, and running them in batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tvm
from hypothesis import strategies as st

from bnncc import schedules
from bnncc.targets import catalog
from bnncc.topi_binary import layout, reference, sliced_data, tiles
from bnncc.topi_binary.build import output_types, step_input_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Step
from tests import kernel_harness

RAGGED = (1, 5, 7, 16, 31, 33, 48, 63, 65, 100, 130, 200)
WHOLE = (32, 64, 96, 128, 160, 256)
BATCH = (1, 1, 2, 3, "n")


@st.composite
def epilogues(draw: Any) -> tuple[Step, ...]:
    def where() -> str:
        return draw(st.sampled_from(("NHWC", "NCHW")))

    kind = draw(st.integers(0, 11))
    if kind < 5:  # half of all cases have thresholds, chosen among the values met
        return (Step("threshold", zero=draw(st.booleans())),)
    if kind < 7:
        bits = Step("bits", zero=draw(st.booleans()), compare=draw(st.sampled_from(("ge", "gt"))))
        return (Step("affine"), Step("store", layout=where()), bits)
    if kind < 8:
        more = (Step("shift"), Step("prelu"), Step("scale"), Step("bits"))
        return (Step("affine"), Step("add", layout=where()), Step("store", layout=where()), *more)
    if kind > 9:
        count, forms = draw(st.sampled_from((1, 3, 7, 15))), ("planes", "value")
        by_thresholds = Step("levels", count=count, way="acc", flip=draw(st.booleans()))
        by_scale = Step("levels", count=count, way="acc-scale", lo=-1.0, hi=0.5)
        steps = [dataclasses.replace(s, forms=forms) for s in (by_thresholds, by_scale)]
        only = dataclasses.replace(by_thresholds, forms=("planes",))
        return draw(st.sampled_from(((only,), (*steps, Step("affine"), Step("bits")))))
    first = (Step("scale"), Step("shift"), Step("relu"), Step("gate"), Step("rsub", layout=where()))
    last = (Step("clip", lo=-3, hi=50), Step("mul", layout=where()), Step("store", layout=where()))
    return (Step("threshold"), *first, *last)


@st.composite
def dense(draw: Any, large: bool, ragged: bool) -> BinaryConv2d:
    channels = draw(st.sampled_from(RAGGED if ragged else WHOLE))
    if large:
        channels = 1001 + 31 * draw(st.integers(0, 9)) if ragged else 1024
    out = draw(st.sampled_from((1, 10, 16, 17, 31, 32, 48, 100, 130)))
    n = draw(st.sampled_from((*BATCH, 17)))
    mode = draw(st.sampled_from(("xor", "and")))
    return BinaryConv2d(n, 1, 1, channels, out, (1, 1), mode=mode, rank=2)


@st.composite
def convolutions(draw: Any, large: bool, ragged: bool) -> BinaryConv2d:
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    channels, out = pick(*(RAGGED if ragged else WHOLE)), pick(1, 5, 16, 17, 32, 33, 48, 64, 100)
    kernel = pick((1, 1), (3, 3), (3, 3), (3, 3), (2, 3), (5, 5), (1, 7), (7, 1))
    groups = 1
    if large:
        kernel = pick((3, 3), (3, 3), (5, 5), (7, 5))
        channels = 1001 // (kernel[0] * kernel[1]) + 1
        channels = channels + (channels % 32 == 0) if ragged else -(-channels // 32) * 32
    elif draw(st.integers(0, 4)) == 0:
        groups = pick(2, 3, 4)
        channels, out = groups * pick(5, 16, 32, 40), groups * pick(1, 5, 8, 16, 32)
        if draw(st.booleans()):  # depthwise
            groups = channels = pick(3, 16, 20, 33)
            out = groups * pick(1, 2)
    dilations = pick((1, 1), (1, 1), (2, 2), (1, 3))
    pads = tuple(draw(st.integers(0, 2)) for _ in range(4))
    pads = pick((0, 0, 0, 0), (1, 1, 1, 1), pads)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    return BinaryConv2d(
        n=pick(*BATCH),
        height=max(1, reach[0] - pads[0] - pads[2]) + draw(st.integers(0, 7)),
        width=max(1, reach[1] - pads[1] - pads[3]) + pick(0, 1, 5, 8, 13, 17, 27, 40),
        channels=channels,
        out_channels=out,
        kernel=kernel,
        strides=pick((1, 1), (1, 1), (2, 2), (1, 2), (3, 1)),
        dilations=dilations,
        pads=pads,
        pad_value=pick(0, 0, 1, -1),
        groups=groups,
        mode=pick("xor", "xor", "xor", "and"),
        ternary=draw(st.integers(0, 3)) == 0,
    )


@st.composite
def specs(draw: Any, large: bool, ragged: bool) -> BinaryConv2d:
    """One spec: `large` with more than 1000 products, `ragged` with channels that fill no word."""
    kinds = dense if draw(st.integers(0, 7)) == 0 else convolutions
    spec = draw(kinds(large, ragged))
    if spec.mode == "and":
        spec = dataclasses.replace(spec, ternary=False, pad_value=max(spec.pad_value, 0))
    return dataclasses.replace(spec, steps=draw(epilogues()))


@st.composite
def batches(draw: Any, size: int = 20) -> list[BinaryConv2d]:
    """Up to `size` distinct specs: every third large, every second ragged.

    Hypothesis begins with the simplest batch, in which only four specs differ.
    """
    drawn = (draw(specs(large=i % 3 == 0, ragged=i % 2 == 0)) for i in range(size))
    return list(dict.fromkeys(drawn))


def make_inputs(spec: BinaryConv2d, rng: np.random.Generator, batch: int = 0) -> list[np.ndarray]:
    """Return inputs; thresholds lie exactly on accumulators that occur.

    A symbolic batch is `batch`, or 1 to 3. Scales and other floats are small multiples of 1/4, also
    negative and 0, so that float32 results do not depend on whether the machine rounds a product
    before it is added.
    """
    n = spec.n if isinstance(spec.n, int) else batch or int(rng.integers(1, 4))
    depth = spec.channels // spec.groups
    shape = (n, spec.height, spec.width, spec.groups, depth)
    bits, zeros = rng.random(shape) < 0.5, np.zeros(shape, bool)
    if spec.ternary and rng.random() < 0.6:
        zeros = rng.random(shape) < 0.1

    def packed(plane: np.ndarray) -> np.ndarray:
        if spec.weight_order == sliced_data.ORDER:
            plane = plane.reshape(*shape[:3], -1)
        words = layout.pack_bits(plane)
        return words.reshape(n, -1) if spec.rank == 2 else words.reshape(*shape[:3], -1)

    weight = rng.random((spec.out_channels, *spec.kernel, depth)) < 0.5
    inputs = [packed(bits | zeros), *([packed(zeros)] if spec.ternary else [])]
    inputs.append(tiles.pack(spec, weight))
    flat = (*shape[:3], -1)
    acc = reference.accumulate(
        spec, (bits | zeros).reshape(flat), zeros.reshape(flat), np.where(weight, 1, -1)
    )
    rows = acc.reshape(-1, spec.out_channels)
    for step in spec.steps:
        for extents, dtype in step_input_types(spec, step):
            if step.op == "threshold":
                limits = layout.pad_lanes(np.zeros(spec.out_channels, np.int32))
                limits[: spec.out_channels] = rng.permuted(rows, axis=0)[0]
                if len(inputs) > 2 + spec.ternary:  # the other end of the zero interval
                    limits -= rng.integers(0, 3, limits.shape, np.int32)
                sliced = sliced_data.limited(spec)
                inputs.append(sliced_data.limits(spec, weight, limits) if sliced else limits)
            elif step.op == "levels" and dtype == "int32":
                inputs.append(_level_limits(step, extents, rows, rng))
            else:
                sizes = [n if isinstance(extent, str) else extent for extent in extents]
                inputs.append((rng.integers(-8, 9, sizes) / 4).astype(dtype))
    return inputs


def _level_limits(
    step: Step, extents: tuple, rows: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return thresholds of levels among the accumulators met, or which of these are turned."""
    lanes = np.zeros(extents, np.int32)
    channels = rows.shape[1]
    if len(extents) == 1:
        lanes[:channels] = -rng.integers(0, 2, channels)
        return lanes
    picked = rows[rng.integers(0, len(rows), step.count)]
    turned = rng.random((1, channels)) < 0.5
    lanes[:, :channels] = np.sort(np.where(turned & step.flip, ~picked, picked), axis=0)
    return lanes


def build(specs: list[BinaryConv2d], target: str, threads: int = 1) -> Any:
    """Compile one module with a kernel ``k0, k1, ...`` for each spec."""
    chosen = catalog.resolve(target)
    functions = {
        f"k{i}": schedules.schedule(define(spec), chosen, threads) for i, spec in enumerate(specs)
    }
    return kernel_harness.build(functions, chosen)


def run(
    library: Any, number: int, spec: BinaryConv2d, inputs: list[np.ndarray]
) -> list[np.ndarray]:
    """Run kernel `number`; outputs start as garbage, so that what is not written shows."""
    n = inputs[0].shape[0]
    outputs = []
    for extents, dtype in output_types(spec):
        sizes = [n if isinstance(extent, str) else extent for extent in extents]
        outputs.append(tvm.runtime.tensor(np.full(sizes, 0x5A5A5A5A, "uint32").view(dtype)))
    library[f"k{number}"](*[tvm.runtime.tensor(x) for x in inputs], *outputs)
    return [out.numpy() for out in outputs]


def check(library: Any, number: int, spec: BinaryConv2d, inputs: list[np.ndarray]) -> None:
    """Compare kernel `number` with the oracle, bit for bit."""
    wanted = reference.binary_conv2d(spec, inputs)
    for got, want in zip(run(library, number, spec, inputs), wanted, strict=True):
        assert got.dtype == want.dtype, spec
        np.testing.assert_array_equal(got, want, err_msg=str(spec))
