"""Offsets of tensors that share memory over time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from bnncc.codegen import arena
from bnncc.codegen.arena import Span


@pytest.mark.parametrize("seed", range(30))
def test_what_is_in_use_at_once_does_not_overlap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(0, 10, (seed % 13, 2)), axis=1).tolist()
    spans = [Span(int(rng.integers(400)), *both) for both in ends]
    starts, total = arena.offsets(spans)
    used = arena.live(spans, 10)
    for call in range(10):
        there = sorted(
            (start, start + span.size)
            for start, span in zip(starts, spans, strict=True)
            if span.first <= call <= span.last and span.size
        )
        assert all(start % 64 == 0 for start, _ in there)
        assert all(a[1] <= b[0] for a, b in pairwise(there))
        assert all(end <= total for _, end in there)
        assert used[call] == sum(-(-(end - start) // 64) * 64 for start, end in there)
    assert max(used) <= total


def test_a_gap_is_filled() -> None:
    """A large tensor in the middle; before and after it, small ones at the same place."""
    spans = [Span(64, 0, 1), Span(640, 1, 2), Span(64, 2, 3), Span(128, 3, 3)]
    starts, total = arena.offsets(spans)
    assert total == 704
    assert starts[0] == starts[2]
