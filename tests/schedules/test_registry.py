"""The registry of operators: every kind of kernel has every part, and nobody asks for kinds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm

from bnncc.codegen.pipeline import tvm_target
from bnncc.records.workload import Workload
from bnncc.schedules import generic, multithreading, schedule, space_of
from bnncc.schedules.registry import function, row
from bnncc.targets import catalog
from bnncc.topi_binary.build import SPEC_ATTR, input_types, output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.reference import ORACLES
from bnncc.topi_binary.spec import (
    KINDS,
    BinaryConv2d,
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    ImageBits,
    PadBits,
    Pool2d,
    RowPool,
    SliceBits,
    Spec,
    Step,
    WeightsOfRows,
    to_json,
)
from bnncc.tuning.cases import make
from tests import definition_cases
from tests.kernel_harness import build
from tests.topi_binary.test_definitions import run

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_GPU = {WeightsOfRows}  # may only shrink


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_has_every_part(kind: type[Spec]) -> None:
    module, name = kind.definition.split(":")
    text = (ROOT / "topi_binary" / "definitions" / f"{module}.py").read_text()
    assert f"def {name}(" in text
    assert callable(ORACLES[kind])
    assert all(name.islower() for name in kind.operators)
    assert any(type(spec) is kind for spec in definition_cases.SPECS)
    own = row(kind)
    assert own.apply or own.template
    for name in filter(None, (own.apply, own.template)):
        assert callable(function(name))
    assert callable(function(own.space))
    assert bool(own.gpu) == (kind not in WITHOUT_GPU)
    for name in filter(None, (own.nchw, own.gpu, own.gpu_space, own.gpu_cut)):
        assert callable(function(name))


@pytest.mark.parametrize("spec", definition_cases.SPECS, ids=lambda spec: Workload.of(spec).name)
def test_what_a_kind_says_fits_together(spec: Spec) -> None:
    shapes = [shape for shape, _ in output_types(spec)]
    height, width = spec.output_hw
    for shape in shapes:
        if spec.output_rank == 4 and len(shape) == 4:
            assert shape[1:3] == (height, width) or shape[2:] == (height, width)
    assert input_types(spec)[: spec.data_tensors] == spec.data_types
    assert bool(spec.macs) == bool(row(spec).rate)
    target = catalog.resolve("x86-64-v3")
    assert space_of(spec, target).default is not None
    assert multithreading.microseconds(spec, target) > 0
    assert spec.operator in spec.operators


def products(spec: BinaryConv2d | FewBitConv2d | Conv2d) -> int:
    """Count products one output at a time."""
    reach = [(k - 1) * d + 1 for k, d in zip(spec.kernel, spec.dilations, strict=True)]
    size = spec.height + spec.pads[0] + spec.pads[2], spec.width + spec.pads[1] + spec.pads[3]
    places = [len(range(0, size[i] - reach[i] + 1, spec.strides[i])) for i in (0, 1)]
    depth = spec.channels // spec.groups * spec.kernel[0] * spec.kernel[1]
    return spec.images * places[0] * places[1] * spec.out_channels * depth


def test_products_are_counted_alike_for_every_kind() -> None:
    shape = (2, 9, 8, 32, 48, (3, 2), (2, 1), (1, 2), (1, 0, 2, 1))
    for kind in (BinaryConv2d, FewBitConv2d, Conv2d):
        spec = kind(*shape)
        assert spec.macs == products(spec) > 0
        assert replace(spec, n="n").macs * 2 == spec.macs
        assert replace(spec, groups=4).macs * 4 == spec.macs
    pooled = Conv2d(*shape, pool=RowPool((2, 2), (2, 2)), steps=(Step("store"),))
    assert pooled.macs == products(pooled)
    assert BinaryConv2d(7, 1, 1, 100, 10, (1, 1), rank=2).macs == 7000
    assert Pool2d(1, 8, 8, 3, "max", (2, 2)).macs == 0


DEFINED: list[Spec] = [
    ConcatBits(2, 3, 4, (40, 3, 32)),
    SliceBits(2, 3, 4, 40, (39, 0, -1, 5)),
    PadBits(2, 3, 4, 40, (2, 1, 0, 1), 1),
    ImageBits(2, 6, 7, 3, "grey", (70,)),
    Pool2d(2, 6, 7, 18, "max", (3, 3), (2, 2), steps=(Step("relu"), Step("bits"))),
    replace(definition_cases.WORDS, n=1, steps=(Step("threshold"),)),
]


@pytest.mark.parametrize("spec", DEFINED, ids=lambda spec: Workload.of(spec).name)
def test_a_kind_without_a_rule_runs_as_it_is_defined(spec: Spec) -> None:
    target = catalog.native()
    func = generic.as_defined(define(spec), spec, target, 1, {})
    case = make(spec)
    library = tvm.compile(
        tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), tvm_target(target)
    )
    inputs = [tvm.runtime.tensor(np.ascontiguousarray(x)) for x in case.inputs]
    outputs = [tvm.runtime.tensor(np.full_like(x, 90)) for x in case.outputs]
    library["main"](*inputs, *outputs)
    assert case.difference([out.numpy() for out in outputs]) == ""
    assert case.difference(run(spec, case.inputs)) == ""


def _kinds(node: ast.expr) -> list[str]:
    """Return the kinds that the second operand of an isinstance names."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    found = [part.id if isinstance(part, ast.Name) else getattr(part, "attr", "") for part in parts]
    return [name for name in found if name in {kind.__name__ for kind in KINDS}]


def ladders(source: str) -> Iterator[int]:
    """Yield the lines where code asks which of several kinds something is."""
    for scope in ast.walk(ast.parse(source)):
        if not isinstance(scope, ast.FunctionDef):
            continue
        seen: dict[str, set[str]] = {}
        for node in ast.walk(scope):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                asked = seen.setdefault(ast.unparse(node.args[0]), set())
                asked.update(_kinds(node.args[1]))
                if len(asked) > 1:
                    yield node.lineno


def test_nobody_asks_which_of_several_kinds_a_spec_is() -> None:
    assert list(ladders("def f(s):\n  if isinstance(s, (Pool2d, Conv2d)): pass")) == [2]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in ("bnncc", "schedules", "topi_binary")
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in ladders(path.read_text(encoding="utf-8"))
    ]
    assert found == []


SWAPPED: list[tuple[Spec, Spec]] = [
    (
        Elementwise(2, 3, 4, 40, steps=(Step("scale"), Step("store"), Step("bits"))),
        Elementwise(2, 3, 4, 40, steps=(Step("shift"), Step("store"), Step("bits"))),
    ),
    (PadBits(2, 3, 4, 40, (2, 1, 0, 1), 1), PadBits(2, 3, 4, 40, (2, 1, 0, 1), 0)),
    (SliceBits(2, 3, 4, 40, (39, 0, -1, 5)), SliceBits(2, 3, 4, 40, (1, 0, 7, -1))),
    (
        BitwiseMaxPool(2, 6, 7, 40, (2, 2), (2, 2), minimum=True),
        BitwiseMaxPool(2, 6, 7, 40, (2, 2), (2, 2)),
    ),
    (
        Pool2d(2, 6, 7, 40, "max", (2, 2), (2, 2), steps=(Step("scale"), Step("store"))),
        Pool2d(2, 6, 7, 40, "max", (2, 2), (2, 2), steps=(Step("shift"), Step("store"))),
    ),
]


@pytest.mark.parametrize(("named", "given"), SWAPPED, ids=lambda spec: type(spec).__name__)
def test_a_rule_schedules_the_function_that_it_is_given(named: Spec, given: Spec) -> None:
    assert row(named).apply
    case = make(given)
    func = schedule(define(given).with_attr(SPEC_ATTR, to_json(named)), catalog.native())
    library = build({"main": func}, catalog.native())
    inputs = [tvm.runtime.tensor(np.ascontiguousarray(x)) for x in case.inputs]
    outputs = [tvm.runtime.tensor(np.full_like(x, 90)) for x in case.outputs]
    library["main"](*inputs, *outputs)
    assert case.difference([out.numpy() for out in outputs]) == ""


def test_vpopcntdq_only_counts_bits() -> None:
    """Float kernels are the same with and without it, so `FLOAT_TARGETS` has only one of them."""
    targets = [catalog.resolve(name) for name in ("x86-64-v4", "x86-64-v4-vpopcntdq")]
    floats = [s for s in definition_cases.FLOAT if isinstance(s, (Conv2d, Pool2d, Elementwise))]
    varied = {(type(s), *(getattr(s, k, "") for k in ("method", "operands"))): s for s in floats}
    assert len(varied) > 4
    for spec in varied.values():
        one, other = (schedule(define(spec), target) for target in targets)
        tvm.ir.assert_structural_equal(one, other, map_free_vars=True)
