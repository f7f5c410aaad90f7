"""Definitions, run as they are: every kind of kernel against its oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm

from bnncc.codegen.pipeline import tvm_target
from bnncc.records.workload import Workload
from bnncc.schedules import schedule, with_packed_operands, with_weight_order
from bnncc.targets import catalog
from bnncc.topi_binary import sliced_data, tiles
from bnncc.topi_binary.build import aliases, input_types, output_types
from bnncc.topi_binary.definitions import byte_products, carry_save, define, nibbles
from bnncc.topi_binary.definitions.binary_conv2d import WORDS, counts_words
from bnncc.topi_binary.reference import binary_conv2d
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d, Pool2d, Spec, Step
from bnncc.tuning.cases import make
from tests import definition_cases, kernel_harness
from tests.binary_cases import make_inputs

pytestmark = pytest.mark.sampled(6)


def run(spec: Spec, inputs: list[np.ndarray], form: str = "") -> list[np.ndarray]:
    """Compile the definition of `spec`, scalar by scalar, and run it."""
    with tvm.transform.PassContext(config={"tirx.disable_vectorize": True}):
        module = tvm.IRModule({"main": define(spec, form).with_attr("global_symbol", "main")})
        library = tvm.compile(module, tvm_target(catalog.native()))
    return call(library["main"], spec, inputs)


def call(kernel: Any, spec: Spec, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run a kernel of `spec` on outputs that are not 0 before."""
    batch = inputs[0].shape[0]
    operands = [tvm.runtime.tensor(np.ascontiguousarray(x)) for x in inputs]
    outputs: list[Any] = []
    fresh = []
    for (shape, dtype), over in zip(output_types(spec), aliases(spec), strict=True):
        if over >= 0:
            outputs.append(operands[over])
            continue
        extents = [batch if isinstance(d, str) else d for d in shape]
        fresh.append(tvm.runtime.tensor(np.full(extents, 0x5A5A5A5A, "uint32").view(dtype)))
        outputs.append(fresh[-1])
    kernel(*operands, *fresh)
    return [out.numpy() for out in outputs]


CASES = [
    *definition_cases.SPECS,
    *(pytest.param(spec, marks=pytest.mark.slow) for spec in definition_cases.LONG),
]


@pytest.mark.parametrize("spec", CASES, ids=lambda spec: Workload.of(spec).name)
def test_a_definition_computes_what_its_oracle_computes(spec: Spec) -> None:
    case = make(spec)
    assert case.difference(run(spec, case.inputs)) == ""


@pytest.mark.parametrize(
    "spec",
    [
        definition_cases.WORDS,
        replace(definition_cases.WORDS, strides=(1, 2), dilations=(1, 2), pads=(2, 1, 0, 3)),
        replace(definition_cases.WORDS, channels=33, ternary=True),
        replace(definition_cases.WORDS, mode="and", pad_value=1, steps=(Step("store"),)),
        replace(definition_cases.WORDS, pad_value=-1, groups=2, channels=80, out_channels=64),
    ],
    ids=lambda spec: Workload.of(spec).name,
)
def test_three_taps_at_a_time_count_the_same(spec: BinaryConv2d) -> None:
    assert carry_save.fits(spec)
    case = make(spec)  # no exact zeros, which this form does not count
    assert case.difference(run(spec, case.inputs, carry_save.FORM)) == ""


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(definition_cases.WORDS, channels=96), 3),
        (replace(definition_cases.WORDS, channels=120, ternary=True, out_channels=40), 2),
        (replace(definition_cases.WORDS, channels=64, mode="and", pad_value=1), 2),
        (replace(definition_cases.WORDS, channels=256, groups=2, out_channels=32), 4),
        (replace(definition_cases.MATRIX, channels=100), 2),
    ],
    ids=lambda value: Workload.of(value).name if isinstance(value, BinaryConv2d) else str(value),
)
def test_several_words_together_count_the_same(spec: BinaryConv2d, words: int) -> None:
    assert counts_words(spec)
    case = make(spec)  # no exact zeros, which this form does not count
    assert case.difference(run(spec, case.inputs, f"{WORDS}{words}")) == ""


COUNTED = [
    definition_cases.WORDS,
    replace(definition_cases.WORDS, strides=(1, 2), dilations=(1, 2), pads=(2, 1, 0, 3)),
    replace(definition_cases.WORDS, channels=33, out_channels=100, ternary=True),
    replace(definition_cases.WORDS, mode="and", pad_value=1, steps=(Step("store"),)),
    replace(definition_cases.WORDS, channels=300, pad_value=1),
    replace(definition_cases.WORDS, pad_value=-1, groups=2, channels=80, out_channels=128),
]
"""Layers of which other forms make the same sums."""


EDGES = [
    replace(definition_cases.WORDS, kernel=kernel, pads=pads, width=width, **more)
    for kernel, pads, width, more in [
        ((2, 1), (0, 0, 1, 0), 1, {}),  # a single column
        ((1, 1), (0, 0, 0, 0), 3, {"strides": (1, 2)}),
        ((3, 2), (0, 1, 0, 0), 5, {"pad_value": 1, "channels": 64}),
        ((2, 3), (1, 3, 0, 0), 2, {"strides": (2, 3)}),  # windows in nothing but padding
        ((3, 5), (1, 2, 1, 2), 7, {"strides": (1, 2), "channels": 96}),
        ((1, 6), (0, 2, 0, 4), 4, {"pad_value": -1}),
        ((2, 7), (0, 6, 0, 6), 9, {"dilations": (2, 2), "channels": 33, "ternary": True}),
        ((3, 3), (1, 1, 1, 1), 3, {"groups": 2, "channels": 64, "out_channels": 128}),
    ]
]
"""Layers at the edges of lookups for two columns: odd widths, and kernels of any width."""


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("spec", [*COUNTED, *EDGES], ids=lambda spec: Workload.of(spec).name)
def test_looking_nibbles_up_counts_the_same(spec: BinaryConv2d, size: int) -> None:
    spec = replace(spec, weight_order="nibbles")
    form = f"{nibbles.FORM}{size}{nibbles.ZEROS if spec.ternary else ''}"
    inputs = make_inputs(spec, np.random.default_rng(1))
    assert not spec.ternary or inputs[1].any()
    for found, wanted in zip(run(spec, inputs, form), binary_conv2d(spec, inputs), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "spec",
    [*COUNTED, replace(definition_cases.WORDS, channels=300, out_channels=7, pad_value=1)],
    ids=lambda spec: Workload.of(spec).name,
)
@pytest.mark.parametrize("whole", [False, True])
def test_products_of_bytes_are_the_same(spec: BinaryConv2d, whole: bool) -> None:
    spec = replace(spec, weight_order="fours")
    lines = byte_products.Lines(spec, spec.output_hw[0] if whole else 1)
    form = replace(lines, places=lines.needed + 3).form
    inputs = make_inputs(spec, np.random.default_rng(1))
    for found, wanted in zip(run(spec, inputs, form), binary_conv2d(spec, inputs), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("channels", [3, 40, 64, 100])
@pytest.mark.parametrize("starts", [False, True])
def test_products_of_levels_are_the_same(channels: int, starts: bool) -> None:
    spec = FewBitConv2d(
        1, 5, 6, channels, 20, (3, 3), strides=(2, 1), pads=(1, 1, 1, 1), data_bits=8,
        weight_bits=4, method="bytes", starts=starts, steps=(Step("store"),),
    )  # fmt: skip
    lines = byte_products.Lines(spec, 1)
    case = make(spec)
    found = run(spec, case.inputs, replace(lines, places=lines.needed).form)
    assert case.difference(found) == ""


@pytest.mark.parametrize(
    "target",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in kernel_harness.HERE[:-1]),
        *kernel_harness.TARGETS[len(kernel_harness.HERE) - 1 :],
    ],
)
@pytest.mark.parametrize("kind", ["BINARY", "FEW_BIT", "FLOAT", "BITS"])
def test_what_rules_make_of_them_computes_the_same(kind: str, target: str) -> None:
    chosen = catalog.resolve(target)
    own = with_weight_order(definition_cases.WORDS, chosen).weight_order
    specs = [
        spec for spec in getattr(definition_cases, kind)
        if getattr(spec, "weight_order", own) in ("words", own, sliced_data.ORDER)
    ]  # fmt: skip
    specs = [with_packed_operands(s, chosen) if isinstance(s, Conv2d) else s for s in specs]
    made = {f"k{i}": schedule(define(spec), chosen) for i, spec in enumerate(specs)}
    library = kernel_harness.build(made, chosen)
    for name, spec in zip(made, specs, strict=True):
        case = make(spec)
        assert case.difference(call(library[name], spec, case.inputs)) == "", spec


def test_the_largest_of_nothing_but_minus_infinity_is_that() -> None:
    spec = Pool2d(1, 2, 2, 3, "max", (2, 2), steps=(Step("store"),))
    (found,) = run(spec, [np.full((1, 2, 2, 3), -np.inf, "float32")])
    assert (found == -np.inf).all()


def test_definitions_have_the_parameters_of_their_kernels() -> None:
    for spec in definition_cases.SPECS:
        func = define(spec)
        made = zip(aliases(spec), output_types(spec), strict=True)
        kinds = [*input_types(spec), *(kind for over, kind in made if over < 0)]
        assert [str(p.dtype) for p in func.params] == [dtype for _, dtype in kinds]


def test_definitions_know_no_target() -> None:
    spec = replace(definition_cases.WORDS, weight_order="words")
    bodies = set()
    for order in ("words", "nibbles", "vectors", "fours", *tiles.ORDERS):
        text = define(replace(spec, weight_order=order)).script(show_meta=False)
        bodies.add(text.count("sblock("))
    assert len(bodies) == 1  # the same blocks: only where a weight lies differs
