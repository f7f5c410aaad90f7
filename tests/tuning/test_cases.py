"""What kernels are measured with: the same numbers everywhere, and results of the oracle."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from bnncc.topi_binary import reference
from bnncc.topi_binary.build import input_types, output_types
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, Elementwise, FewBitConv2d, Spec, Step
from bnncc.tuning import cases
from bnncc.tuning.draws import Draws

LAYER = BinaryConv2d(
    5, 6, 5, 40, 24, (3, 3), pads=(1, 1, 1, 1),
    steps=(Step("affine"), Step("add", "NHWC"), Step("store", "NHWC"), Step("bits")),
)  # fmt: skip
SPECS = [
    LAYER,
    replace(LAYER, n="n"),
    replace(LAYER, steps=(Step("threshold"),), weight_order="fragments-32"),
    Elementwise(7, 3, 3, 40, steps=(Step("bits"),)),
    Conv2d(4, 6, 6, 3, 8, (3, 3), steps=(Step("store"),)),
    FewBitConv2d(
        4, 6, 6, 32, 32, (3, 3), data_bits=2, weight_bits=2,
        steps=(Step("levels", count=3, way="acc", forms=("planes",)),),
    ),
]  # fmt: skip


def test_numbers_never_change() -> None:
    drawn = Draws(7)
    values = [
        drawn.bits((3, 50)), drawn.random(9), drawn.integers(-3, 4, (2, 5)),
        drawn.standard_normal(11), drawn.normal(2.0, 3.0, 4),
    ]  # fmt: skip
    content = b"".join(np.ascontiguousarray(v).tobytes() for v in values)
    assert hashlib.sha256(content).hexdigest()[:16] == "609576f0b61b9ada"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{type(spec).__name__}-{spec.n}")
def test_a_case_is_restored_without_its_oracle(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cases.make(spec)
    kept = cases.kept(spec, cases.small(spec))
    monkeypatch.setattr(cases, "ORACLES", {})
    again = cases.restored(spec, kept)
    for one, other in ((made.inputs, again.inputs), (made.outputs, again.outputs)):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert not again.difference(made.outputs)
    weights = {"input_1"} if not isinstance(spec, Elementwise) else set()
    assert not weights & set(kept)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{type(spec).__name__}-{spec.n}")
def test_arrays_have_the_shapes_of_the_kernel(spec: Spec) -> None:
    case = cases.make(spec)
    for arrays, types in ((case.inputs, input_types(spec)), (case.outputs, output_types(spec))):
        for array, (shape, dtype) in zip(arrays, types, strict=True):
            assert array.shape == tuple(d if isinstance(d, int) else 1 for d in shape)
            assert array.dtype == dtype


def test_a_large_batch_repeats_images_whose_results_the_oracle_confirms() -> None:
    case = cases.make(LAYER)
    np.testing.assert_array_equal(case.inputs[0][3], case.inputs[0][0])
    assert (case.inputs[0][1] != case.inputs[0][0]).any()
    for made, wanted in zip(case.outputs, reference.binary_conv2d(LAYER, case.inputs), strict=True):
        np.testing.assert_array_equal(made, wanted)


def test_orders_of_weights_make_the_same() -> None:
    threshold = replace(LAYER, steps=(Step("threshold"),))
    first = cases.make(replace(threshold, weight_order="strips"))
    second = cases.make(replace(threshold, weight_order="fragments-32"))
    np.testing.assert_array_equal(first.outputs[0], second.outputs[0])
    assert first.inputs[1].shape != second.inputs[1].shape


def test_float16_may_be_either_neighbour_of_a_sum_that_is_rounded() -> None:
    spec = Conv2d(4, 6, 6, 3, 8, (3, 3), steps=(Step("store", dtype="float16"),))
    case = cases.make(spec)
    (right,) = case.outputs
    assert right.dtype == np.float16
    next_one = np.nextafter(right, np.float16(np.inf))
    assert not case.difference([next_one])
    assert case.difference([next_one], tolerance=0.0)
    far = np.nextafter(np.nextafter(next_one, np.float16(np.inf)), np.float16(np.inf))
    assert case.difference([far])
