"""A definition cut into ranges and joined again computes the same."""

from __future__ import annotations

import pytest
import tvm
from tvm import s_tir, tirx

from bnncc.codegen.pipeline import tvm_target
from bnncc.schedules import ranges
from bnncc.targets import catalog
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BitwiseMaxPool
from bnncc.tuning.cases import make
from tests.topi_binary.test_definitions import call

pytestmark = pytest.mark.sampled(3)

SPEC = BitwiseMaxPool("n", 6, 7, 70, (3, 3), (1, 2), pads=(1, 1, 1, 1), flip=True)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_ranges_of_a_definition_make_up_the_whole(shared: int) -> None:
    func, parts = define(SPEC), []
    for bounds in ({2: (0, 1)}, {2: (1, 3), 3: (0, 2)}, {2: (1, 3), 3: (2, 1)}):
        sch = s_tir.Schedule(ranges.part(func, {"held": bounds, "out": bounds}))
        sch.compute_at("held", sch.get_loops("out")[-1])
        parts.append(sch.mod["main"])
    assert len({held for part in parts for held in part.body.block.alloc_buffers}) == 3
    whole = ranges.joined(parts, shared).with_attr("global_symbol", "main")
    library = tvm.compile(tvm.IRModule({"main": whole}), tvm_target(catalog.native()))
    case = make(SPEC)
    assert case.difference(call(library["main"], SPEC, case.inputs)) == ""


@pytest.mark.parametrize("count", [1, 2])
def test_the_rows_at_both_ends_and_those_between_make_up_the_whole(count: int) -> None:
    func, between = define(SPEC), SPEC.output_hw[0] - 2 * count
    parts = []
    for rows in (count, between), (0, SPEC.output_hw[0]):
        sch = s_tir.Schedule(ranges.part(func, {"held": {1: rows}, "out": {1: rows}}))
        sch.compute_at("held", sch.get_loops("out")[-1])
        parts.append(sch.mod["main"])
    parts[1] = ranges.ends(parts[1], 1, count)
    whole = ranges.joined(parts, 0).with_attr("global_symbol", "main")
    library = tvm.compile(tvm.IRModule({"main": whole}), tvm_target(catalog.native()))
    case = make(SPEC)
    assert case.difference(call(library["main"], SPEC, case.inputs)) == ""


def test_blocks_that_are_not_named_are_left_out() -> None:
    part = ranges.part(define(SPEC), {"out": {2: (1, 2)}})
    sch = s_tir.Schedule(part)
    assert [int(sch.get(loop).extent) for loop in sch.get_loops("out")[1:]] == [6, 2, 3]
    assert len(sch.get_child_blocks(sch.get_sblock("root"))) == 1


def test_parts_have_shared_tensors_in_common() -> None:
    func = define(SPEC)
    alone, shared = (
        [ranges.part(func, {"held": {2: (at, 1)}}, names) for at in (0, 1)]
        for names in ((), ("held",))
    )
    for parts, count in ((alone, 2), (shared, 1)):
        assert len({held for part in parts for held in part.body.block.alloc_buffers}) == count
    assert len(ranges.joined(shared, 0).body.block.alloc_buffers) == 1


def test_a_function_is_given_the_parameters_of_another() -> None:
    other = define.__wrapped__(SPEC)
    func = ranges.with_parameters(define(SPEC), other)
    assert [*func.params] == [*other.params]
    own = {*define(SPEC).params, define(SPEC).params[0].shape[0]}
    assert not own & {*tirx.analysis.undefined_vars(func.body, [])}
