"""Every kernel on record beside its rule's default, in turns.

    python benchmarks/tuned_kernels.py [--target T] [--records DIR] [--turns N] [--json FILE]

Both are checked against the oracle, then take turns; the shortest time of each counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TVM_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tables import markdown, where

from bnncc.console import Console
from bnncc.targets import host
from bnncc.targets.catalog import resolve
from bnncc.tuning import records
from bnncc.tuning.pool import Pool, Setup
from bnncc.tuning.search import key_of
from bnncc.tuning.trials import Plan, Trials
from bnncc.tuning.tuner import tasks_of


def _table(content: dict) -> str:
    groups: dict[str, list[float]] = {}
    for row in content["rows"]:
        groups.setdefault(row["kernel"].split()[0], []).append(row["ratio"])
    rows = [
        [kind, len(found), f"{mean(found):.3f}", f"{min(found):.3f}", f"{max(found):.3f}"]
        for kind, found in sorted(groups.items())
    ]
    head = ["kernels", "number", "tuned / default", "least", "most"]
    return markdown(head, rows) + "\n\n" + where(content, "tuned_kernels")


def mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


TABLES = {"tuned-kernels": (_table, ("tuned_kernels",))}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="native")
    parser.add_argument("--records", type=Path, default=records.shipped())
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--lock", type=Path, default=None)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    target = resolve(args.target)
    best = records.read(args.records / target.family).best()
    setup = Setup(target, prefix=tuple(args.prefix.split()))
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(Setup(target, method="none"), 2) as builders,
        Pool(setup, 1) as measurers,
    ):
        trials = Trials(Plan(lock=args.lock), builders, measurers, Path(folder), Console())
        for workload, record in best.items():
            (task,) = tasks_of([(workload.spec, 1)], target, workload.threads)
            row = {"kernel": workload.name, "spec": workload.spec, "point": dict(record.point)}
            if key_of(record.point) == key_of(task.space.default):
                rows.append({**row, "ratio": 1.0})
                continue
            trials.cases([task])
            pairs = [(task, task.space.default), (task, record.point)]
            times = trials.turns(pairs, args.turns)
            if times is None:
                raise SystemExit(f"{workload.name}: cannot be measured")
            default, tuned = (1e6 * t[0] for t in times)
            rows.append({**row, "default_us": default, "us": tuned, "ratio": tuned / default})
            print(f"{workload.name}: {default:.2f} us, tuned {tuned:.2f} us", flush=True)
    ratios = [row["ratio"] for row in rows]
    print(f"{len(rows)} kernels, {mean(ratios):.3f} of the default, at most {max(ratios):.3f}")
    if args.json:
        head = {"cpu": host.processor(), "date": str(datetime.date.today()), "target": target.name}
        args.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
