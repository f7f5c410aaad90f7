"""Random networks compiled for each family of code: what is run makes what the model says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bnncc.targets.catalog import resolve
from bnncc.verification.confirm import runs_here
from tests import c_programs, cuda_emulator, kernel_harness, random_code

ALL = bool(os.environ.get("BNNCC_TEST_ALL"))
COUNT = {f: 50 if f in random_code.MAIN else 10 for f in random_code.FAMILIES}
"""Networks of a family, when all tests are run; else one of each main one. The tally has more."""

FIRST = 50_000
"""Seeds of a family's long run are below."""

BATCH = 10 if ALL else 1


def runnable(family: str) -> None:
    """Skip the test where code of a family cannot be run."""
    if family == "c":
        if missing := c_programs.MACHINES["armv7"].missing:
            pytest.skip(f"needs {missing} (packages gcc-arm-linux-gnueabihf, qemu-user)")
    elif family.startswith("gpu"):
        if cuda_emulator.COMPILER is None:
            pytest.skip("needs g++ on an x86-64 machine")
    elif family in random_code.EMULATED:
        if not kernel_harness.CAN_EMULATE:
            pytest.skip("needs unicorn, pyelftools and ld.lld or ziglang")
    elif not runs_here(resolve(random_code.FAMILIES[family])):
        pytest.skip(f"this machine does not run code for {random_code.FAMILIES[family]}")


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "start"),
    [
        (family, start)
        for family, count in COUNT.items()
        for start in range(0, count if ALL else BATCH * (family in random_code.MAIN), BATCH)
    ],
)
def test_networks(family: str, start: int) -> None:
    runnable(family)
    first = random_code.first_seed(family) + FIRST + start
    for seed in range(first, first + BATCH):
        result = random_code.outcome(family, seed)
        assert result.right, f"seed {seed}: {result.verdict}"


def test_the_committed_tally_has_no_difference() -> None:
    """It is of networks of this generator, and nothing differs."""
    tally = json.loads((Path(__file__).parents[1] / "random_code_tally.json").read_text())
    assert tally["generator"] == random_code.generator()
    assert {name.split()[0] for name in tally["shards"]} <= set(random_code.FAMILIES)
    for shard in tally["shards"].values():
        assert sum(shard.get(k, 0) for k in ("right", "tie")) == random_code.SHARD
        assert "failures" not in shard


def test_code_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose last row is never written does not pass for its oracle."""
    runnable("lookup-sse")
    real = random_code.with_outputs

    def short(*args: object) -> list:
        made = real(*args)  # type: ignore[arg-type]
        made[0].reshape(-1)[-1:].view("uint32")[...] = 0x5A5A5A5A
        return made

    monkeypatch.setattr(random_code, "with_outputs", short)
    seeds = random_code.first_seed("lookup-sse") + FIRST
    assert not random_code.outcome("lookup-sse", seeds).right
