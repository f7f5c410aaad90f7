"""Random networks through the passes, in shards that a long run can be stopped and resumed between.

    python -m tests.random_passes --shards 0:400 --tally tests/random_passes_tally.json

A shard is `SHARD` seeds. The tally has a line for each shard that is done, with what came of its
networks, and how often each pair of features was met in a layer. It is of one generator: where
that makes other networks of the same seeds, a long run starts again.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncc.ir.evaluate import evaluate
from bnncc.verification.confirm_passes import compare_passes
from tests.collection import oracle
from tests.physical_networks import evaluated, passed
from tests.random_models import Maker

TARGETS = ("native", "x86-64-v3", "x86-64-v4-vpopcntdq", "arm64", "armv7", "cuda-sm80")
SHARD = 250


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
    elif wrong := compare_passes(physical, before, feeds, values=lambda _: values):
        verdict = f"passes: {wrong[0]}"
    elif maker.exact and "float" not in kinds:
        made = evaluated(physical, before, feeds)
        found = oracle.judge(model, oracle.evaluate(model, feeds), made)
        verdict = found.kind if found.kind != "wrong" else f"outputs: {found.text}"
    return Outcome(verdict, kinds, frozenset(maker.pairs))


def generator() -> str:
    """Return a digest of what the first seeds make."""
    return digest(Maker(seed) for seed in range(20))


def digest(makers: Iterable[Maker]) -> str:
    """Return a digest of what generators make."""
    made = b"".join(maker.build().SerializeToString() for maker in makers)
    return hashlib.sha256(made).hexdigest()[:16]


def run_shards(
    shards: Mapping[str, Iterable[int]], path: Path, outcome: Callable[[int], Outcome], made_by: str
) -> dict[str, Any]:
    """Run shards, seeds by name, that the tally at `path` does not have yet; return the tally.

    An exception counts as a failure: nothing in a random network may end in one.
    """
    tally: dict[str, Any] = {"generator": made_by, "shards": {}, "pairs": {}}
    if path.exists():
        tally = json.loads(path.read_text())
        if tally["generator"] != made_by:
            raise SystemExit(f"error: {path} is of another generator: move it away")
    pairs = Counter(tally["pairs"])
    for name, seeds in shards.items():
        if name in tally["shards"]:
            continue
        counts: Counter[str] = Counter()
        failures = {}
        for seed in seeds:
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
        counted: dict[str, Any] = dict(sorted(counts.items()))
        tally["shards"][name] = {**counted, **({"failures": failures} if failures else {})}
        tally["pairs"] = dict(sorted(pairs.items()))
        partial = path.with_suffix(".part")
        partial.write_text(_text(tally))
        os.replace(partial, path)
    return tally


def numbered(first: int, end: int, size: int) -> dict[str, range]:
    """Return shards of so many seeds, by number."""
    return {str(n): range(n * size, (n + 1) * size) for n in range(first, end)}


def _text(tally: dict[str, Any]) -> str:
    """Return JSON with a line for each shard and pair."""
    parts = [f'"generator": {json.dumps(tally["generator"])}']
    for key in ("shards", "pairs"):
        lines = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in tally[key].items())
        parts.append(f'"{key}": {{\n' + ",\n".join(lines) + "\n}")
    return "{" + ",\n".join(parts) + "}\n"


def summary(tally: dict[str, Any]) -> str:
    """Return one line: what came of all networks, and the pair that was met least."""
    total: Counter[str] = Counter()
    for shard in tally["shards"].values():
        total.update({k: v for k, v in shard.items() if isinstance(v, int)})
    rarest = min(tally["pairs"].items(), key=lambda pair: pair[1], default=("none", 0))
    return f"{dict(sorted(total.items()))}, rarest pair: {rarest[0]} ({rarest[1]})"


def main() -> None:
    """Run shards from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", default="0:10", help="first:end")
    parser.add_argument("--tally", type=Path, required=True)
    options = parser.parse_args()
    first, end = (int(part) for part in options.shards.split(":"))
    warnings.simplefilter("ignore")
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # networks are small, and all of one dies together
    shards = numbered(first, end, SHARD)
    print(summary(run_shards(shards, options.tally, outcome, generator())))


if __name__ == "__main__":
    main()
