"""Every kernel on record beside its rule's default, in turns.

    python benchmarks/tuned_kernels.py [--target T] [--records DIR] [--passes N]
        [--keep | --beside DIR]

Both are checked against the oracle, then take turns; the shortest time of each counts. All kernels
are gone through several times, because a busy neighbour slows a machine for seconds. ``--keep``
puts what was measured on record, so that a point that was only lucky in its tuning run loses its
place: ``bnncc records prune`` then leaves the default.

With ``--beside`` the best point of another folder of records takes the default's place: whether one
tuner finds tiles as good as another.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TVM_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from tables import markdown, where

from bnncc.console import Console
from bnncc.records import database as records
from bnncc.records.database import Writer
from bnncc.records.workload import Workload
from bnncc.schedules.space import Point
from bnncc.targets import host
from bnncc.targets.catalog import resolve
from bnncc.targets.spec import TargetSpec
from bnncc.tuning.pool import Pool, Setup
from bnncc.tuning.search import Search
from bnncc.tuning.task import key_of
from bnncc.tuning.trials import Plan, Trials, shortest
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
    return markdown(head, rows) + "\n\n" + where(content)


def mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


TABLES = {"tuned-kernels": (_table, ("tuned_kernels",))}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="native")
    parser.add_argument("--records", type=Path, default=records.shipped())
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--lock", type=Path, default=None)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="not the defaults")
    parser.add_argument("--keep", action="store_true", help="put the times on record")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    target = resolve(args.target)
    best = records.read(args.records / target.family).best()
    other = {} if args.beside is None else records.read(args.beside / target.family).best()
    if args.beside is not None:
        best = {workload: record for workload, record in best.items() if workload in other}
    setup = Setup(target, prefix=tuple(args.prefix.split()))
    times: dict[Workload, list[list[float]]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(Setup(target, method="none"), 2) as builders,
        Pool(setup, 1) as measurers,
    ):
        trials = Trials(Plan(lock=args.lock), builders, measurers, Path(folder), Console())
        for number in range(args.passes):
            for workload, record in best.items():
                (task,) = tasks_of([(workload.spec, 1)], target, workload.threads)
                before = other[workload].point if other else task.space.default
                if key_of(record.point) == key_of(before):
                    continue
                trials.cases([task])
                pairs = [(task, before), (task, record.point)]
                found = trials.turns(pairs, args.turns)
                if found is None:
                    raise SystemExit(f"{workload.name}: cannot be measured")
                so_far = times.setdefault(workload, [[], []])
                times[workload] = [
                    shortest([old, *new]) for old, new in zip(so_far, found, strict=True)
                ]
            print(f"{number + 1} of {args.passes} passes", flush=True)
    if args.keep:
        points = {workload: best[workload].point for workload in times}
        keep(args.records / target.family, target, points, times)
    rows = []
    for workload, record in best.items():
        row = {"kernel": workload.name, "spec": workload.spec, "point": dict(record.point)}
        if workload in times:
            default, tuned = (1e6 * found[0] for found in times[workload])
            row |= {"default_us": default, "us": tuned}
            print(f"{workload.name}: {default:.2f} us before, {tuned:.2f} us")
        rows.append({**row, "ratio": tuned / default if workload in times else 1.0})
    ratios = [row["ratio"] for row in rows]
    print(f"{len(rows)} kernels, {mean(ratios):.3f} of what is before, at most {max(ratios):.3f}")
    if args.json:
        machine.save(args.json, target=target.name, rows=rows)


def keep(
    folder: Path,
    target: TargetSpec,
    points: dict[Workload, Point],
    times: dict[Workload, list[list[float]]],
) -> None:
    """Put the times of defaults and of other points on record."""
    search = Search(target, cpu=host.core_model())
    with Writer(folder) as writer:
        for workload, found in times.items():
            (task,) = tasks_of([(workload.spec, 1)], target, workload.threads)
            number = writer.workload(workload, search.workload_line(task))
            for chosen, own in zip((task.space.default, points[workload]), found, strict=True):
                writer.record(number, search.record_line(task, chosen, own))


if __name__ == "__main__":
    main()
