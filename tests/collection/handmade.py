"""All hand-written cases: `cases()` builds nothing until a case's `model` is asked for."""

from __future__ import annotations

from tests.collection import cases_blocks, cases_layers, cases_signs, cases_structure  # noqa: F401
from tests.collection.builder import CASES, Case


def cases() -> list[Case]:
    """Return every hand-written case, in a fixed order, names unique."""
    names = [c.name for c in CASES]
    if len(set(names)) != len(names):
        raise ValueError(f"duplicate case names: {sorted(n for n in names if names.count(n) > 1)}")
    return list(CASES)
