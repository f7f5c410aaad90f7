"""Prefetch of weights and of rows: which layers do it, and of which addresses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from tvm import s_tir, tirx
from tvm.sym import Analyzer

from bnncc import schedules
from bnncc.schedules import prefetch, ranges
from bnncc.schedules.expressions import of_kind
from bnncc.targets import catalog
from bnncc.topi_binary.build import first_step_input, input_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, FewBitConv2d, Spec, Step

pytestmark = pytest.mark.sampled(3)

AFFINE = (Step("affine"), Step("store"))
PACKED = FewBitConv2d(
    3, 1, 1, 200, 70, (1, 1), rank=2, data_bits=8, weight_bits=2, method="packed", steps=AFFINE
)
BINARY = BinaryConv2d(3, 1, 1, 200, 70, (1, 1), rank=2, steps=AFFINE)
TILES = replace(
    PACKED,
    n=128,
    channels=1024,
    out_channels=256,
    steps=(Step("affine"), Step("div", period=1), Step("mul"), Step("store")),
)
"""A dense layer of enough rows for tiles; its epilogue reads a tensor, and one number per row."""


def hinted(spec: Spec, target: str) -> list[tuple[int, list[int]]]:
    """Return, for each address that a kernel prefetches, which parameter it is in.

    With it, how far it is along each axis, the last one in bytes, from the beginning of what the
    same block accesses.
    """
    func = schedules.schedule(define(spec), catalog.resolve(target), 1)
    views = [ranges.views(func, [param]) for param in func.params]
    found = []
    for block in of_kind(func.body, s_tir.SBlock):
        for stmt in map(certain, ranges.statements(block.body)):
            if not isinstance(stmt, tirx.Evaluate) or "prefetch" not in str(stmt.value):
                continue
            (load,) = stmt.value.args[0].args
            (number,) = (i for i, same in enumerate(views) if load.source in same)
            regions = (*block.reads, *block.writes)
            (region,) = {r.source: r.region for r in regions if r.source in views[number]}.values()
            ends = zip(load.indices, region, strict=True)
            away = [int(Analyzer().simplify(at - r.min)) for at, r in ends]
            away[-1] *= np.dtype(str(load.source.dtype)).itemsize
            found.append((number, away))
    return found


def certain(stmt: tirx.Stmt) -> tirx.Stmt:
    """Return the statement that a condition guards, or the statement itself."""
    return stmt.then_case if isinstance(stmt, tirx.IfThenElse) else stmt


@pytest.mark.parametrize(
    ("spec", "target"),
    [
        *product((PACKED, BINARY), ("x86-64-v2", "x86-64-v3", "x86-64-v4")),
        (PACKED, "x86-64-v4-vpopcntdq"),
        (replace(TILES, steps=(Step("affine"), Step("bits"))), "x86-64-v4-amx"),
    ],
)
def test_weights_of_dense_layers(spec: Any, target: str) -> None:
    found = hinted(spec, target)
    assert found
    for number, distance in found:
        assert number == spec.weight_position
        assert distance[-1] == prefetch.AHEAD
        assert not any(distance[:-1])


def test_weights_that_are_read_again() -> None:
    """Weights on tiles are read again for every run of rows, and prefetched for the first one."""
    func = schedules.schedule(define(TILES), catalog.resolve("x86-64-v4-amx"), 1)
    runs = [x for x in of_kind(func.body, tirx.For) if prefetch.REPEATED in x.annotations]
    guarded = of_kind(func.body, tirx.IfThenElse)
    found = [x for x in guarded if isinstance(x.then_case, tirx.Evaluate)]
    assert not runs  # they have done their work
    assert found
    for test in found:
        assert int(test.condition.b) == 0
        (loop,) = (x for x in of_kind(func.body, tirx.For) if x.loop_var.same_as(test.condition.a))
        assert int(loop.extent) == TILES.n // 32  # two tiles of 16 rows


def test_rows_of_an_epilogue() -> None:
    """The next row of the tensor that is multiplied and of the result, not of one per row."""
    found = [x for x in hinted(TILES, "x86-64-v4-amx") if x[0] != TILES.weight_position]
    tensor = first_step_input(TILES) + 3  # after scale, bias, and the divisor of each row
    assert {number for number, _ in found} == {tensor, len(input_types(TILES))}
    assert all(distance[-2:] == [1, 0] for _, distance in found)


@pytest.mark.parametrize(
    ("size", "kernel", "some"), [(28, 1, True), (14, 1, False), (28, 3, False)]
)
def test_rows_of_pixels(size: int, kernel: int, some: bool) -> None:
    """Of pointwise layers whose results fill half of the L2 cache."""
    spec = FewBitConv2d(
        1, size, size, 256, 512, (kernel, kernel), pads=(kernel // 2,) * 4, data_bits=8,
        weight_bits=2, method="packed", steps=AFFINE,
    )  # fmt: skip
    found = hinted(spec, "x86-64-v4-amx")
    assert {(number, *distance[-2:]) for number, distance in found} == (
        {(4, 1, 0)} if some else set()
    )


@pytest.mark.parametrize(
    ("spec", "target"),
    [
        (replace(PACKED, n=1, height=6, width=6, rank=4), "x86-64-v3"),  # read for each pixel
        (replace(PACKED, method="bytes"), "x86-64-v4-vpopcntdq"),
        (BINARY, "x86-64-v4-vpopcntdq"),  # as fast as memory without
        (PACKED, "arm64"),
        (BINARY, "arm64"),
        (PACKED, "wasm32-simd128"),
    ],
)
def test_elsewhere_nothing_is_prefetched(spec: Spec, target: str) -> None:
    assert not hinted(spec, target)
