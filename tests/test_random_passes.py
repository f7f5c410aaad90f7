"""Random binary and few-bit networks: the passes keep what they compute, for every target."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import random_passes
from tests.random_models import Maker

COUNT = 5000 if os.environ.get("BNNCC_TEST_ALL") else 120
BATCH = 10
FIRST = 1_000_000
"""Seeds of the long run are below."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(FIRST, FIRST + COUNT, BATCH))
def test_networks(start: int) -> None:
    for seed in range(start, start + BATCH):
        result = random_passes.outcome(seed)
        assert result.right, f"seed {seed}: {result.verdict}"


def test_a_seed_is_a_network() -> None:
    one, other, third = (Maker(seed).build().SerializeToString() for seed in (7, 7, 8))
    assert one == other != third


def test_a_long_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are done once; what fails is kept with its seed."""
    seen = []

    def outcome(seed: int) -> random_passes.Outcome:
        seen.append(seed)
        if seed == 3:
            raise KeyError("a traceback")
        verdict = "passes: x" if seed == 4 else "right"
        return random_passes.Outcome(verdict, ("binary",), frozenset({("a", "b")}))

    monkeypatch.setattr(random_passes, "outcome", outcome)
    monkeypatch.setattr(random_passes, "SHARD", 3)
    path = tmp_path / "tally.json"
    random_passes.run_shards([0], path)
    tally = random_passes.run_shards([0, 1], path)
    assert seen == list(range(6))
    assert tally == json.loads(path.read_text())
    assert tally["shards"]["0"] == {"right": 3, "binary layers": 3}
    assert tally["shards"]["1"]["failures"] == {"3": "KeyError: 'a traceback'", "4": "passes: x"}
    assert tally["pairs"] == {"a + b": 5}
