"""Tune networks, and check outside the tuner that none got slower.

    python benchmarks/tune_check.py FOLDER [NETWORK ...] [--trials N] [--beside COMMIT]
        [--target T] [--json FILE]

Each network is tuned by `bnncc tune` and compiled with its records and untuned. Both are then timed
in turns, in several processes, where their tensors and code lie elsewhere in memory: a network is
slower if the interval of 95 % of the processes' ratios lies above 1. With ``--beside`` another
commit's tuner does the same with as many trials, and its mean gain stands beside. A network that
kept all its defaults is the same machine code, and is not timed. FOLDER keeps records, artifacts
and results: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TVM_NUM_THREADS"] = "1"

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from beside import BASE, checked_out, mean
from networks import NETWORKS, vehicle
from tables import markdown, where

PROCESSES = 10
"""Each gives one ratio."""

ROUNDS = 20
"""Turns of each artifact in a process, of which the least time counts."""


def digits() -> onnx.ModelProto:
    """Return the network of the README."""
    return onnx.load(machine.ROOT / "examples" / "digits" / "digits.onnx")


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "digits": digits,
    **NETWORKS,
    "vehicle_floats": partial(vehicle, binary_input=False),
}
"""The ten that are tuned by default."""


def run(checkout: Path, *command: str) -> str:
    """Run Python with a checkout's bnncc; return what it writes."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environment, check=True, text=True,
        stdout=subprocess.PIPE,
    ).stdout  # fmt: skip


def times(artifacts: Sequence[str]) -> list[float]:
    """Return the least seconds of each artifact, timed in turns."""
    from peers import Ours, interleave

    from bnncc.runtime.artifact import Artifact

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    runners, outputs = [], []
    for path in artifacts:
        artifact = Artifact.load(path)
        shape = [1 if isinstance(n, str) else n for n in artifact.inputs[0].shape]
        image = (np.random.default_rng(0).integers(-128, 128, shape) + 0.5).astype(np.float32) / 64
        runners.append(Ours(artifact, image))
        outputs.append(next(iter(artifact.run({artifact.inputs[0].name: image}).values())))
    if not np.allclose(*outputs, rtol=1e-4, atol=1e-4 * np.abs(outputs[0]).max()):
        raise SystemExit("error: outputs of the tuned and the untuned network differ")
    interleave(runners, ROUNDS)
    return [runner.best for runner in runners]


def same_code(*artifacts: str) -> bool:
    """Return whether artifacts hold the same machine code: whatever they take is no difference."""
    from bnncc.runtime.artifact import Artifact

    return len({Artifact.load(path).library for path in artifacts}) == 1


def check(name: str, checkout: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Tune a network with a checkout's tuner; return what it takes relative to the default."""
    from bnncc.records.race import Gain

    folder.mkdir(parents=True, exist_ok=True)
    model, records = folder / f"{name}.onnx", folder / f"{name}.records"
    onnx.save(MODELS[name](), model)
    target = ("--target", args.target, "--threads", "1")
    trials = ("--trials", str(args.trials), "--records", str(records))
    run(checkout, "-m", "bnncc", "tune", str(model), *target, *trials)
    paths = [str(folder / f"{name}.{which}.bnncc") for which in ("untuned", "tuned")]
    for path, option in zip(paths, (["--untuned"], ["--records", str(records)]), strict=True):
        run(checkout, "-m", "bnncc", "compile", str(model), "-o", path, *target, *option)
    if checkout == machine.ROOT and same_code(*paths):
        print(f"{name:15} kept the default", flush=True)
        return {"untuned_us": None, "tuned_us": None, **asdict(Gain.of([1.0], [1.0]))}
    seconds = [
        json.loads(run(checkout, __file__, "--times", *order))[:: 1 if order == paths else -1]
        for order in (paths, paths[::-1]) * (PROCESSES // 2)
    ]
    untuned, tuned = zip(*seconds, strict=True)
    gain = Gain.of(untuned, tuned)
    print(f"{name:15} {1e6 * min(untuned):9.1f} us untuned, {gain.text}", flush=True)
    return {"untuned_us": 1e6 * min(untuned), "tuned_us": 1e6 * min(tuned), **asdict(gain)}


def _table(content: dict) -> str:
    rows = []
    for row in content["networks"]:
        cells = [f"{row['ratio']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}"]
        if row["untuned_us"] is None:
            cells[1] = "the same code"
        beside = f"{row['beside']['ratio']:.3f}" if "beside" in row else ""
        untuned = "" if row["untuned_us"] is None else f"{row['untuned_us']:.0f}"
        rows.append([row["network"], untuned, *cells, beside])
    means = [f"{content[key]:.3f}" if key in content else "" for key in ("mean", "beside_mean")]
    rows.append(["geometric mean", "", means[0], "", means[1]])
    head = ["network", "untuned, us", "tuned / untuned", "95 %", f"`{content.get('beside', '')}`"]
    if "beside" not in content:
        head, rows = head[:-1], [row[:-1] for row in rows]
    return markdown(head, rows) + "\n\n" + where(content)


TABLES = {"tune-check": (_table, ("tune_check",))}


def main() -> None:
    """Check the tuner; end with 1 if a network got slower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("networks", nargs="*", default=list(MODELS), metavar="NETWORK")
    parser.add_argument("--target", default="native")
    parser.add_argument("--trials", type=int, default=64, help="total per network [64]")
    parser.add_argument("--beside", metavar="COMMIT", help=f"another tuner, {BASE} for example")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    folder = args.folder.resolve()

    rows = []
    with checked_out(args.beside) if args.beside else nullcontext() as other:
        for name in args.networks:
            done = folder / f"{name}.json"
            row = json.loads(done.read_text()) if done.exists() else {"network": name}
            if "ratio" not in row:
                row |= check(name, machine.ROOT, folder / "here", args)
            if other and "beside" not in row:
                row["beside"] = check(name, other.resolve(), folder / "beside", args)
            done.write_text(json.dumps(row))
            rows.append(row)
    content = {"trials": args.trials, "networks": rows, "mean": mean([r["ratio"] for r in rows])}
    if args.beside:
        ratios = [row["beside"]["ratio"] for row in rows]
        content |= {"beside": args.beside, "beside_mean": mean(ratios)}
    slower = [row["network"] for row in rows if row["low"] > 1]
    print(f"mean {content['mean']:.3f}; slower: {', '.join(slower) or 'none'}")
    if args.json:
        machine.save(args.json, **content)
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--times"]:
        print(json.dumps(times(sys.argv[2:])))
    else:
        main()
