"""Data types that inputs are declared to have."""

from __future__ import annotations

import numpy as np
import pytest

from bnncc.ir.datatypes import datatype

SETS = {
    "BIPOLAR": {-1, 1}, "BINARY": {0, 1}, "TERNARY": {-1, 0, 1}, "UINT1": {0, 1}, "INT1": {-1, 0},
    "UINT2": {0, 1, 2, 3}, "INT2": {-2, -1, 0, 1}, "FIXED<2,1>": {-1, -0.5, 0, 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_which_numbers_a_type_holds(name: str) -> None:
    kind = datatype(name)
    assert kind is not None
    values = np.float32([*np.arange(-40, 41) / 8, np.nan, np.inf, -np.inf, 1e30, 0.99999994])
    held = [v.item() in SETS[name] for v in values]
    assert kind.holds(values).tolist() == held
    assert [kind.holds_all(v.reshape(1)) for v in values] == held
    drawn = kind.random(np.random.default_rng(0), (200,))
    assert drawn.dtype == np.float32
    assert set(drawn.tolist()) == SETS[name]
    assert kind.holds_all(drawn)


@pytest.mark.parametrize(
    "name",
    ["FLOAT32", "INT16", "UINT9", "INT0", "SCALEDINT<4>", "", "FIXED<8,999>", "INT" + "8" * 40],
)
def test_types_that_are_not_narrow(name: str) -> None:
    assert datatype(name) is None
