"""Random networks through the passes, in shards that a long run can be stopped and resumed between.

    python -m tests.random_passes --shards 0:1000 --tally tests/random_passes_tally.json

A shard is `SHARD` seeds. The tally has a line for each shard that is done, with what came of its
networks, and how often each pair of features was met.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bnncc.ir.evaluate import evaluate
from bnncc.verification.confirm_passes import compare_passes
from tests.collection import oracle
from tests.physical_networks import evaluated, passed
from tests.random_models import Maker

TARGETS = ("native", "x86-64-v3", "x86-64-v4-vpopcntdq", "arm64", "armv7", "cuda-sm80")
SHARD = 100


@dataclass(frozen=True)
class Outcome:
    """What came of one network: ``right``, ``tie``, or a text that says what is wrong."""

    verdict: str
    layers: tuple[str, ...]
    pairs: frozenset[tuple[str, str]]

    @property
    def right(self) -> bool:
        """Whether nothing differs but by ties."""
        return self.verdict in ("right", "tie")


def outcome(seed: int) -> Outcome:
    """Make the network of a seed and compare it, as compiled for one of the targets.

    Three comparisons: our definition of right with the independent oracle, tensor by tensor, each
    from the same inputs; each tensor of the physical graph with that definition; and outputs of the
    whole physical graph with the oracle, where all constants and levels are multiples of powers of
    two and no layer stays float. Elsewhere a sum may be exactly at a threshold or not: there the
    tie rule needs to know what a layer is computed from, and the second comparison does.
    """
    maker = Maker(seed)
    model = maker.build()
    before, physical, layers = passed(model, TARGETS[seed % len(TARGETS)])
    kinds = tuple(layer.kind for layer in layers)
    feeds = maker.feeds()
    values = evaluate(before, feeds, [o for node in before.nodes for o in node.outputs if o])
    verdict = "right"
    if text := oracle.first_difference(model, feeds, values):
        verdict = f"evaluate: {text}"
    elif wrong := compare_passes(physical, before, feeds, values=values):
        verdict = f"passes: {wrong[0]}"
    elif maker.exact and "float" not in kinds:
        made = evaluated(physical, before, feeds)
        found = oracle.judge(model, oracle.evaluate(model, feeds), made)
        verdict = found.kind if found.kind != "wrong" else f"outputs: {found.text}"
    return Outcome(verdict, kinds, frozenset(maker.pairs))


def run_shards(numbers: Iterable[int], path: Path) -> dict[str, object]:
    """Run shards that the tally at `path` does not have yet; return the tally.

    An exception counts as a failure: nothing in a random network may end in one.
    """
    tally = json.loads(path.read_text()) if path.exists() else {"shards": {}, "pairs": {}}
    pairs = Counter(tally["pairs"])
    for number in numbers:
        if str(number) in tally["shards"]:
            continue
        counts: Counter[str] = Counter()
        failures = {}
        for seed in range(number * SHARD, (number + 1) * SHARD):
            try:
                result = outcome(seed)
            except Exception as error:  # any is a finding
                failures[str(seed)] = f"{type(error).__name__}: {error}"[:300]
                counts["failed"] += 1
                continue
            counts[result.verdict if result.right else "wrong"] += 1
            counts.update(f"{kind} layers" for kind in result.layers)
            pairs.update(" + ".join(pair) for pair in result.pairs)
            if not result.right:
                failures[str(seed)] = result.verdict
        tally["shards"][str(number)] = {**counts, **({"failures": failures} if failures else {})}
        tally["pairs"] = dict(sorted(pairs.items()))
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(tally, indent=1) + "\n")
        os.replace(partial, path)
    return tally


def main() -> None:
    """Run shards from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", default="0:10", help="first:end")
    parser.add_argument("--tally", type=Path, required=True)
    options = parser.parse_args()
    first, end = (int(part) for part in options.shards.split(":"))
    warnings.simplefilter("ignore")
    tally = run_shards(range(first, end), options.tally)
    shards = tally["shards"].values()  # type: ignore[attr-defined]
    total: Counter[str] = Counter()
    for shard in shards:
        total.update({k: v for k, v in shard.items() if isinstance(v, int)})
    print(dict(total), "rarest pair:", min(tally["pairs"].values(), default=0))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
