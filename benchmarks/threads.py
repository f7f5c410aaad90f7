"""Two threads: against one, and against OpenVINO's binary path with two.

    python benchmarks/threads.py [NAME ...] [--json FILE] [--rounds N]

Every contestant is a process of its own, since TVM's pool is made once per process; they take
turns. Outputs are compared first: ours with one and two threads must be the same bytes, and
OpenVINO's within 1e-4.

A turn counts only if both processors were otherwise free. Two things say so: while it ran, its
threads waited for a processor less than 1 % of the time (``/proc/PID/task/*/schedstat``), and other
processes (``/proc/stat``, less its own) took less than 2 % of the processors, or one tick. With no
such turn, a time is null: unmeasured. `disturbed_ms` has the least of all turns, for what it is
worth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from networks import NETWORKS
from peers import NotMeasured, Peer, Turns, add_arguments, timed
from tables import markdown, times, where

import bnncc

NAMES = ("birealnet18", "quicknet", "vgg_small")
BATCHES = (1, 8)
TURN = 0.3
"""Seconds of a turn: many ticks of /proc/stat."""
PAUSE = 0.03
"""Seconds between turns: idle workers of a pool look for work that long."""
MAX_WAITED, MAX_OTHERS = 0.01, 0.02
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Worker(Peer):
    """Our network in a process of its own."""

    def __init__(self, path: Path, threads: int) -> None:
        Turns.__init__(self)
        self.kind = f"bnncc-{threads}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TVM_")}
        self._folder = tempfile.TemporaryDirectory(prefix="worker-")
        self._file = Path(self._folder.name) / "array.npy"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(path), str(threads)],
            env=environment | {"TVM_USE_RUNTIME_LIB": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        used = int(self._process.stdout.readline())
        if used != threads:
            self.close()
            raise NotMeasured(f"{self.kind}: only {used} processors")


def serve(path: str, threads: int) -> None:
    """Be a `Worker`."""
    from bnncc.runtime.threads import prepare

    prepare(threads)
    artifact = bnncc.Artifact.load(path)
    session = artifact.session()
    name = artifact.inputs[0].name
    print(session.use_threads(), flush=True)
    tensors = []
    for line in sys.stdin:
        verb, argument = line.split(maxsplit=1)
        if verb == "out":
            image = np.load(argument.strip())
            tensors = session.tensors({name: image})
            np.save(argument.strip(), session.flatten(session.main(*tensors))[0].numpy())
            print("done", flush=True)
            continue
        print(*timed(partial(session.main, *tensors), int(argument)), flush=True)


def _busy() -> float:
    """Return the seconds that all processors have worked since the machine started."""
    user, nice, system, _, _, *rest = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + sum(rest)) * TICK


def _threads(pid: int) -> tuple[float, float]:
    """Return the seconds that the threads of a process have run, and have waited to."""
    ran = waited = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        on, off, _ = map(int, (task / "schedstat").read_text().split())
        ran, waited = ran + on, waited + off
    return ran * 1e-9, waited * 1e-9


def turn(peer: Peer, runs: int) -> tuple[float, bool]:
    """Run a contestant; return its least time and whether it had the processors to itself."""
    time.sleep(PAUSE)
    pid = peer._process.pid
    busy, (ran, waited), start = _busy(), _threads(pid), time.perf_counter()
    seconds = peer.run(runs)
    wall = time.perf_counter() - start
    now_ran, now_waited = _threads(pid)
    others = _busy() - busy - (now_ran - ran)
    free = others <= max(MAX_OTHERS * wall * len(os.sched_getaffinity(0)), TICK)
    return seconds, free and now_waited - waited <= MAX_WAITED * wall


def measure(name: str, batch: int, folder: Path, args: argparse.Namespace) -> dict[str, object]:
    """Compile one network for two threads, check it, and take turns."""
    path = folder / f"{name}.onnx"
    onnx.save(NETWORKS[name]("where"), path)
    dims = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
    shape = (batch, *(d.dim_value for d in dims[1:]))
    compiled = folder / f"{name}.{batch}.bnncc"
    bnncc.compile(path, input_shapes={"x": shape}, threads=2).save(compiled)
    image = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    contestants: dict[str, Peer] = {"one": Worker(compiled, 1), "two": Worker(compiled, 2)}
    if batch == 1:
        try:
            contestants["openvino"] = Peer("openvino-binary", path, 2, args.peers)
        except NotMeasured as why:
            print(why, file=sys.stderr)
    outputs = {key: peer.out(image) for key, peer in contestants.items()}
    assert outputs["one"].tobytes() == outputs["two"].tobytes(), name
    if "openvino" in outputs:
        apart = np.abs(outputs["openvino"].reshape(outputs["one"].shape) - outputs["one"]).max()
        assert apart <= 1e-4 * np.abs(outputs["one"]).max(), name
    runs = {key: max(3, int(TURN / float(p._ask("run 5")))) for key, p in contestants.items()}
    best = dict.fromkeys(contestants, float("inf"))
    disturbed, counted = dict(best), dict.fromkeys(contestants, 0)
    for _ in range(args.rounds):
        for key, peer in contestants.items():
            seconds, free = turn(peer, runs[key])
            disturbed[key] = min(disturbed[key], seconds)
            if free:
                best[key] = min(best[key], seconds)
                counted[key] += 1
    for peer in contestants.values():
        peer.close()
    milliseconds = {k: 1e3 * v if counted[k] else None for k, v in best.items()}
    return {
        "network": name,
        "batch": batch,
        **{f"{key}_ms": milliseconds.get(key) for key in ("one", "two", "openvino")},
        "speedup": _ratio(milliseconds, "one", "two"),
        "openvino_ratio": _ratio(milliseconds, "openvino", "two"),
        "disturbed_ms": {key: 1e3 * value for key, value in disturbed.items()},
        "turns_counted": counted,
        "turns": args.rounds,
    }


def _ratio(values: dict[str, float | None], slow: str, fast: str) -> float | None:
    first, second = values.get(slow), values.get(fast)
    return None if first is None or second is None else first / second


def _table(content: dict) -> str:
    """Return the results as Markdown."""

    def ms(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.3f}"

    rows = [
        [
            r["network"], r["batch"], ms(r["one_ms"]), ms(r["two_ms"]), times(r["speedup"]),
            ms(r["openvino_ms"]) if r["batch"] == 1 else "",
            times(r["openvino_ratio"]) if r["batch"] == 1 else "",
        ]
        for r in content["networks"]
    ]  # fmt: skip
    head = ["network", "batch", "1 thread, ms", "2 threads, ms", "gain", "OpenVINO, 2, ms", "to it"]
    return markdown(head, rows) + f"\n\n{where(content)}"


TABLES = {"threads": (_table, ("threads",))}


def main() -> None:
    """Measure the networks asked for."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, nargs="*", default=BATCHES)
    add_arguments(parser)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names:
            for batch in args.batch:
                results.append(measure(name, batch, Path(folder), args))
                print(json.dumps(results[-1]), flush=True)
    content = machine.head(networks=results)
    print(_table(content))
    if args.json is not None:
        machine.save(args.json, **content)


if __name__ == "__main__":
    main()
