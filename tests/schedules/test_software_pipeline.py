"""Software pipelining: what is computed ahead is what it was, and needs little memory."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, tirx

from bnncc.codegen.pipeline import tvm_target
from bnncc.schedules import ranges, software_pipeline
from bnncc.targets import catalog

GROUPS, REPEATS, STEPS, INNER = 4, 3, 3, 5
ROWS, COLUMNS = 2, 8
SHAPE = (GROUPS, STEPS, INNER, ROWS, COLUMNS)


def plain(outermost: bool) -> tirx.PrimFunc:
    """Return sums of elements, each computed just before it is added; groups may be outermost."""
    given = te.placeholder(SHAPE, "int32", "given")
    made = te.compute(SHAPE, lambda *i: given[i] * 2 + 1, "made")
    step, inner = te.reduce_axis((0, STEPS), "step"), te.reduce_axis((0, INNER), "inner")
    sums = te.compute(
        (GROUPS, REPEATS, ROWS, COLUMNS),
        lambda g, r, i, j: te.sum(made[g, step, inner, i, j] * (step + r), axis=[step, inner]),
        "sums",
    )
    sch = s_tir.Schedule(te.create_prim_func([given, sums], index_dtype_override="int64"))
    g, r, i, j, step, inner = sch.get_loops("sums")
    sch.reorder(*((g, r) if outermost else (r, g)), step, inner, i, j)
    sch.compute_at("made", inner)
    sch.annotate(step, software_pipeline.STEP, 1)
    sch.decompose_reduction("sums", step)
    return sch.mod["main"]


def computed(func: tirx.PrimFunc, given: np.ndarray) -> np.ndarray:
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    library = tvm.compile(module, target=tvm_target(catalog.native()))
    sums = tvm.runtime.tensor(np.full((GROUPS, REPEATS, ROWS, COLUMNS), -1, np.int32))
    library["main"](tvm.runtime.tensor(given), sums)
    return sums.numpy()


@pytest.mark.parametrize("distance", [1, 4, 7])
@pytest.mark.parametrize("kept", ["none", "group", "all"])
@pytest.mark.parametrize("outermost", [False, True])
def test_elements_are_computed_ahead(
    outermost: bool, kept: software_pipeline.Kept, distance: int
) -> None:
    func, number = plain(outermost), int(not outermost)
    parts = software_pipeline.ahead(func, range(number, number + 1), distance, kept)
    first, rest = (ranges.statements(part.body.block.body) for part in parts)
    assert len(first) == len(rest) == 1
    assert int(first[0].extent) == distance
    made = ranges.joined(parts, 0)
    given = np.random.default_rng(distance).integers(-99, 99, SHAPE, np.int32)
    wanted = np.einsum("gsixy,srq->grxy", given * 2 + 1, factors())
    np.testing.assert_array_equal(computed(func, given), wanted)
    np.testing.assert_array_equal(computed(made, given), wanted)
    rings = [one for one in made.body.block.alloc_buffers if one.name == "ring"]
    if kept == "all":
        assert not rings
    else:  # as many elements as are computed but not used yet, or a few more
        (ring,) = rings
        assert distance < int(ring.shape[0]) <= STEPS * INNER
        assert kept == "none" or int(ring.shape[0]) == STEPS * INNER


def factors() -> np.ndarray:
    """Return what elements are multiplied by: [step, repeat, 1]."""
    return (np.arange(STEPS)[:, None, None] + np.arange(REPEATS)[:, None]).astype(np.int32)


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize(("lined", "width"), [(1, 7), (2, 12), (3, 1), (6, 8)])
def test_data_of_a_line_is_made_during_the_line_before(
    lined: int, width: int, channels_first: bool
) -> None:
    rows, taps, inner, channels = 6, 3, 2, 4
    given = te.placeholder((rows + taps - 1, width), "int32", "given")
    made = te.compute(given.shape, lambda y, x: given[y, x] * 2 + 1, "made")
    tap, part = te.reduce_axis((0, taps), "tap"), te.reduce_axis((0, inner), "part")
    shape = (rows // lined, channels, lined, width)
    sums = te.compute(
        shape,
        lambda h, o, y, x: te.sum(made[h * lined + y + tap, x] * (o + part), axis=[tap, part]),
        "sums",
    )
    whole = te.create_prim_func([given, sums], index_dtype_override="int64")
    first, later = (
        ranges.part(whole, {"made": bounds}, ["made"])
        for bounds in ({0: (0, lined + taps - 1)}, {})
    )
    sch = s_tir.Schedule(ranges.part(whole, {"sums": {}}, ["made"]))
    h, o, y, x, tap, part = sch.get_loops("sums")
    sch.reorder(*((o, h) if channels_first else (h, o)), tap, part, y, x)
    sch.annotate(tap, software_pipeline.STEP, 1)
    sch.decompose_reduction("sums", tap)
    merged = software_pipeline.alongside(
        sch.mod["main"], later, int(channels_first), lined, lined + taps - 1
    )
    func = ranges.joined([first, merged], 0)
    numbers = np.random.default_rng(width).integers(-99, 99, (rows + taps - 1, width), np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(numbers * 2 + 1, taps, axis=0).sum(-1)
    factors = 2 * np.arange(channels)[:, None, None] + 1
    wanted = windows.reshape(rows // lined, 1, lined, width) * factors
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    library = tvm.compile(module, target=tvm_target(catalog.native()))
    found = tvm.runtime.tensor(np.zeros(shape, np.int32))
    library["main"](tvm.runtime.tensor(numbers), found)
    np.testing.assert_array_equal(found.numpy(), wanted)
