"""Every kind of kernel as portable C: strict warnings, sanitizers, and the oracle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bnncc.records.workload import Workload
from bnncc.topi_binary.spec import Spec
from bnncc.tuning.cases import make
from tests import binary_cases, definition_cases, portable_c
from tests.codegen.test_bare_kernels import SAMPLE, fixed, generated
from tests.cortex_m import needs_cortex_m
from tests.schedules import test_bits_kernels, test_float_kernels

pytestmark = [portable_c.needs_gcc, pytest.mark.sampled(6)]

# Kernels in C read weights in the order of words only; other orders are tested as definitions.
CASES = [
    pytest.param(spec, marks=[] if spec.weight_order == "words" else pytest.mark.slow)
    for spec in definition_cases.SPECS
] + [pytest.param(spec, marks=pytest.mark.slow) for spec in definition_cases.LONG]


@pytest.mark.parametrize("spec", CASES, ids=lambda spec: Workload.of(spec).name)
def test_portable_c_computes_what_the_oracle_computes(spec: Spec) -> None:
    spec = fixed(spec)
    case = make(spec)
    assert case.difference(portable_c.run(spec, case.inputs)) == ""


GENERATED = {
    "binary convolution": binary_cases.specs(False, True),
    "large binary convolution": binary_cases.specs(True, True),
    "binary dense": binary_cases.dense(False, True),
    "bitwise pool": test_bits_kernels.pools(),
    "concatenation": test_bits_kernels.concats(),
    "slice": test_bits_kernels.slices(),
    "pad": test_bits_kernels.pads(),
    "elementwise": test_float_kernels.elementwises(),
    "float convolution": test_float_kernels.convs(),
    "float pool": test_float_kernels.pools(),
}


@pytest.mark.parametrize("kind", GENERATED)
@generated
@given(data=st.data())
def test_generated_kernels(kind: str, data: st.DataObject) -> None:
    spec = fixed(data.draw(GENERATED[kind]))
    case = make(spec)
    assert case.difference(portable_c.run(spec, case.inputs)) == ""


@needs_cortex_m
@pytest.mark.parametrize("kind", SAMPLE, ids=lambda kind: kind.__name__)
def test_so_does_a_cortex_m4(kind: type) -> None:
    spec = fixed(SAMPLE[kind])
    case = make(spec)
    assert case.difference(portable_c.run(spec, case.inputs, portable_c.on_cortex_m4)) == ""
