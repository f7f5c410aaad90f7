"""What a layer without records should get: the rule's default, or its nearest neighbour's point.

    python benchmarks/held_out.py [--trials N] [--exhaustive N] [--json FILE] [--again]

Twenty binary convolutions that are in no benchmark network are searched from a random start, the
first ones exhaustively too. Then default, the point of the nearest kernel on record, and the best
that was found are timed in turns. The logs of the search are kept in ``--work``, so the same
command goes on after an interruption. ``--again`` searches nothing: what FILE says was found is
timed beside the defaults of today.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from tables import markdown, where

from bnncc import schedules
from bnncc.console import Console
from bnncc.records import database as records
from bnncc.records.tools import merge
from bnncc.records.workload import Workload
from bnncc.schedules.space import UnfitPoint
from bnncc.targets.catalog import resolve
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import BinaryConv2d, Step
from bnncc.tuning.features import of_kernel
from bnncc.tuning.pool import Pool, Setup
from bnncc.tuning.task import Task
from bnncc.tuning.trials import Plan, Trials, shortest
from bnncc.tuning.tuner import Tuner, tasks_of

THRESHOLD = (Step("threshold"),)
FLOAT = (Step("affine"), Step("add"), Step("store"), Step("bits"))
SHAPES = (
    # channels, side, outputs, kernel, stride, steps; the first three are searched exhaustively
    (256, 7, 256, 3, 1, THRESHOLD),
    (96, 14, 96, 3, 1, FLOAT),
    (160, 14, 80, 3, 2, THRESHOLD),
    (32, 112, 32, 3, 1, THRESHOLD),
    (64, 28, 64, 3, 1, FLOAT),
    (128, 14, 128, 3, 1, FLOAT),
    (192, 13, 384, 3, 1, THRESHOLD),
    (48, 40, 96, 5, 1, THRESHOLD),
    (256, 28, 256, 3, 2, FLOAT),
    (512, 14, 512, 3, 1, THRESHOLD),
    (1024, 7, 1024, 3, 1, THRESHOLD),
    (64, 32, 128, 3, 1, FLOAT),
    (320, 10, 320, 3, 1, THRESHOLD),
    (128, 56, 128, 1, 1, FLOAT),
    (512, 14, 256, 1, 1, FLOAT),
    (80, 20, 160, 3, 1, THRESHOLD),
    (100, 24, 50, 3, 1, THRESHOLD),
    (224, 9, 224, 5, 1, FLOAT),
    (64, 60, 64, 7, 2, THRESHOLD),
    (384, 6, 768, 3, 1, FLOAT),
)


def spec_of(shape: tuple[Any, ...], target: TargetSpec) -> BinaryConv2d:
    """Return the kernel of a shape, with zero padding."""
    channels, side, out, kernel, stride, steps = shape
    spec = BinaryConv2d(
        1, side, side, channels, out, (kernel, kernel), (stride, stride),
        pads=(kernel // 2,) * 4, steps=steps,
    )  # fmt: skip
    return schedules.with_weight_order(spec, target)


def nearest(
    spec: BinaryConv2d, target: TargetSpec, known: dict[Workload, records.Record]
) -> dict[str, int] | None:
    """Return the point of the nearest kernel on record whose choices fit, in this one's space."""
    space, own = schedules.space_of(spec, target), of_kernel(spec)

    def distance(workload: Workload) -> float:
        other = of_kernel(workload.kernel)
        return sum(abs(a - b) for a, b in zip(own, other, strict=True))

    for workload in sorted((w for w in known if w.threads == 1), key=distance):
        kernel = workload.kernel
        if not isinstance(kernel, BinaryConv2d) or kernel.weight_order != spec.weight_order:
            continue
        point = {
            name: max((v for v in space.choices[name] if v <= value), default=value)
            for name, value in known[workload].point.items()
            if name in space.choices
        }
        try:
            return space.complete(point)
        except UnfitPoint:
            continue
    return None


def mean(ratios: list[float]) -> float:
    """Return the geometric mean; 0 if there is nothing to take it of."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0


def _table(content: dict) -> str:
    names = ("default", "nearest", "exhaustive")

    def cells(ratios: dict) -> list[str]:
        return [f"{ratios[name]:.3f}" if ratios[name] else "" for name in names]

    rows = [
        [row["kernel"], row["trials"], f"{row['best_us']:.2f}", *cells(row)]
        for row in content["rows"]
    ]
    rows.append(["geometric mean", "", "", *cells(content["means"])])
    head = ["kernel", "trials", "best found, us"]
    head += ["default over it", "nearest over it", "over exhaustive"]
    return markdown(head, rows) + "\n\n" + where(content)


TABLES = {"held-out": (_table, ("held_out",))}


def main() -> None:
    """Search and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=128)
    parser.add_argument("--exhaustive", type=int, default=3, help="shapes to search exhaustively")
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--target", default="native")
    parser.add_argument("--records", type=Path, default=records.shipped())
    parser.add_argument(
        "--work", type=Path, default=Path("build/held-out"), help="folder for logs of the search"
    )
    parser.add_argument("--lock", type=Path, default=None)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--again", action="store_true", help="time what is in FILE once more")
    args = parser.parse_args()
    target = resolve(args.target)
    setup = Setup(target, prefix=tuple(args.prefix.split()))
    known = records.read(args.records / target.family).best()
    done: dict[str, Any] = {}
    if args.json and args.json.exists():  # go on
        done = {row["spec"]: row for row in json.loads(args.json.read_text())["rows"]}
    rows = []
    for number, shape in enumerate(SHAPES[: args.shapes]):
        (task,) = tasks_of([(Workload.of(spec_of(shape, target)).spec, 1)], target, 1)
        row = done.get(task.workload.spec)
        if args.again and row is None:
            continue
        if args.again or row is None:
            if row is None:
                points, count = _found(task, setup, args, number)
            else:
                points, count = row["points"], row["trials"]
            points |= {"default": dict(task.space.default)}
            if point := nearest(task.workload.kernel, target, known):
                points["nearest"] = point
            row = _compared(task, points, count, setup, args.lock)
            shown = {k: v for k, v in row.items() if k not in ("points", "spec")}
            print(json.dumps(shown), flush=True)
        rows.append(row)
        if args.json:  # after each, so that an interruption loses none
            left = [r for r in done.values() if r["spec"] not in {row["spec"] for row in rows}]
            machine.save(args.json, **_content([*rows, *left]))
    print(_content(rows)["means"])


def _found(
    task: Task, setup: Setup, args: argparse.Namespace, number: int
) -> tuple[dict[str, Any], int]:
    """Search; return what was best, by how it was found, and the number of trials."""
    plan = Plan(each=args.trials, jobs=2, lock=args.lock, seed=number, from_default=False)
    search, everything = args.work / "search", args.work / "exhaustive"
    (task,) = Tuner([task], setup, search, plan, Console(-1)).run().tasks
    points = {"best": task.best[0]}
    if number < args.exhaustive:
        (whole,) = tasks_of([(task.workload.spec, 1)], setup.target, 1)
        merge(search / setup.target.family, everything / setup.target.family)
        plan = Plan(each=len(whole.all), jobs=2, lock=args.lock, repeat_seconds=0.01)
        run = Tuner([whole], setup, everything, plan, Console(-1)).run()
        points["exhaustive"] = run.tasks[0].best[0]
    return points, task.trials


def _compared(
    task: Task, points: dict[str, Any], count: int, setup: Setup, lock: Path | None
) -> dict[str, Any]:
    """Time points in turns."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Pool(Setup(setup.target, method="none"), 2) as builders,
        Pool(setup, 1) as measurers,
    ):
        trials = Trials(Plan(lock=lock), builders, measurers, Path(folder), Console())
        trials.cases([task])
        times = trials.turns([(task, point) for point in points.values()], 5)
    least = dict(zip(points, (shortest(turns)[0] for turns in times), strict=True))
    row: dict[str, Any] = {"kernel": task.workload.name, "spec": task.workload.spec}
    row |= {"best_us": least["best"] * 1e6, "trials": count, "points": points}
    for name in ("default", "nearest"):
        row[name] = least[name] / least["best"] if name in least else None
    whole = least.get("exhaustive")
    return {**row, "exhaustive": least["default"] / whole if whole else None}


def _content(rows: list[dict]) -> dict[str, Any]:
    means = {
        name: mean([row[name] for row in rows if row.get(name)])
        for name in ("default", "nearest", "exhaustive")
    }
    trials = min(row["trials"] for row in rows)
    return {"trials": trials, "means": means, "rows": rows}


if __name__ == "__main__":
    main()
