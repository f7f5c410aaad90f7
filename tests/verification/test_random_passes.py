"""Random binary and few-bit networks: the passes keep what they compute, for every target."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import planted_passes, random_passes
from tests.random_models import Maker

pytestmark = pytest.mark.sampled(5)

COUNT = 5000 if os.environ.get("BNNCC_TEST_ALL") else 300
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


def run(numbers: list[int], path: Path, seen: list[int]) -> dict[str, Any]:
    def outcome(seed: int) -> random_passes.Outcome:
        seen.append(seed)
        if seed == 3:
            raise KeyError("a traceback")
        verdict = "passes: x" if seed == 4 else "right"
        return random_passes.Outcome(verdict, ("binary",), frozenset({("a", "b")}))

    shards = {str(n): range(3 * n, 3 * n + 3) for n in numbers}
    return random_passes.run_shards(shards, path, outcome, "this generator")


def test_a_long_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Shards are done once; what fails is kept with its seed."""
    path, seen = tmp_path / "tally.json", []  # type: ignore[var-annotated]
    run([0], path, seen)
    tally = run([0, 1], path, seen)
    assert seen == list(range(6))
    assert tally == json.loads(path.read_text())
    assert tally["shards"]["0"] == {"right": 3, "binary layers": 3}
    assert tally["shards"]["1"]["failures"] == {"3": "KeyError: 'a traceback'", "4": "passes: x"}
    assert tally["pairs"] == {"a + b": 5}
    assert random_passes.summary(tally).endswith("rarest pair: a + b (5)")


def test_a_tally_is_of_one_generator(tmp_path: Path) -> None:
    path = tmp_path / "tally.json"
    run([0], path, [])
    path.write_text(path.read_text().replace("this", "that"))
    with pytest.raises(SystemExit, match="another generator"):
        run([1], path, [])


def test_the_committed_tally_has_no_difference() -> None:
    """It is of networks of this generator, each pair of features 50 times in 100,000 or more."""
    tally = json.loads((Path(__file__).parents[1] / "random_passes_tally.json").read_text())
    assert tally["generator"] == random_passes.generator()
    for shard in tally["shards"].values():
        assert sum(shard.get(k, 0) for k in ("right", "tie")) == random_passes.SHARD
        assert "failures" not in shard
    count = random_passes.SHARD * len(tally["shards"])
    assert min(tally["pairs"].values()) >= 50 * min(1, count / 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", planted_passes.PLANTED)
def test_planted_mistakes_are_noticed(name: str) -> None:
    assert planted_passes.networks_until_noticed(planted_passes.PLANTED[name], most=30)


@pytest.mark.parametrize(
    "seed",
    [
        4842,
        5032,
        5663,
        7318,
        7742,
        8020,
        5496,
        8008,
        28140,
        36891,
        38646,
        50840,
        73587,
        5000036,
        5001257,
    ],
)
def test_networks_that_were_refused(seed: int) -> None:
    """Three values around a middle that is not 0, read as numbers; bits of two values as data.

    A Sigmoid below the normal numbers; levels of ``x + y - x``; filters of different units; padding
    between levels, and a bias; a middle at five axes. A border that cancels the bias; data of
    two values that are the smaller one in a whole window, or 0 before filters of two values.
    """
    result = random_passes.outcome(seed)
    assert result.right, result.verdict
