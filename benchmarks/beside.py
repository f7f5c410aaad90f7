"""Time this checkout beside another commit, kernel by kernel and network by network, in turns.

    taskset -c 1 python benchmarks/beside.py [COMMIT] [--target T ...] [--only WORD] [--json FILE]

COMMIT may be the folder of a checkout, too. Each checkout compiles the same ONNX files in a process
of its own. Then processes of the two take turns: with each kernel of each network alone, on random
bits and numbers, and with the whole network. Layers are told apart by their names; one kernel that
serves several is timed once, and none whose tensors differ between the two. Outputs are compared
before anything is timed. Ratios are speeds relative to the other checkout: above 1 is faster.

Times of a kernel differ by 10 % between processes, for example with where the stack begins, and on
a shared machine a neighbour may slow one side for longer than a turn. So a ratio below 1 is
measured in several pairs of processes, and the median of their ratios counts. `--again` adds pairs
to the rows of `--json` in which a kernel is below 0.97 or the network below 0.99. Without it, a run
goes on where another of the same commits was interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "1")

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from tables import markdown, where

BURST = 0.01
"""Seconds of one turn."""

ROUNDS = 12
"""Turns of each in a pair of processes, of which the least time counts."""

BASE = "4be7ed9"
"""The last commit whose kernels were all written, not scheduled from their definitions."""

TARGETS = ("x86-64-v2", "x86-64-v3", "x86-64-v4", "native")
LOW, WHOLE = 0.97, 0.99
"""Below this the ratio of a kernel, or of a network, is a loss, if it repeats."""

PLACES = 4
"""Pairs of processes that measure what has a ratio below 1."""


class Served:
    """What a process of one checkout answers: one method for each request."""

    def compile(self, path: str, target: str, artifact: str) -> dict[str, Any]:
        """Compile a network; return seconds of the processor, and the kernels of its layers."""
        from bnncc.driver import compile_model
        from bnncc.options import CompileOptions

        start = time.process_time()
        made = compile_model(onnx.load(path), CompileOptions(target=target, threads=1))
        spent = time.process_time() - start
        made.save(artifact)
        kinds = {layer["kernel"]: layer["kind"] for layer in made.report["layers"]}
        tensors = {kernel["name"]: kernel["args"] for kernel in made.report["kernels"]}
        layers = {str(layer["name"]): layer["kernel"] for layer in made.report["layers"]}
        return {"seconds": spent, "layers": layers, "kinds": kinds, "tensors": tensors}

    def load(self, path: str, artifact: str) -> None:
        """Load what was compiled from a file."""
        from contest import Kernel
        from peers import Ours

        from bnncc.runtime.artifact import Artifact

        self._artifact = Artifact.load(Path(artifact))
        kind = onnx.load(path).graph.input[0].type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        values = np.random.default_rng(0).integers(-128, 128, shape)
        if kind.elem_type == onnx.TensorProto.FLOAT:
            self._image = (values.astype(np.float32) + 0.5) / 64
        else:  # levels
            self._image = (values & 3).astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        self._makers = {"": lambda: Ours(self._artifact, self._image)}
        for kernel in self._artifact.report["kernels"]:
            self._makers[kernel["name"]] = partial(Kernel, self._artifact, kernel)
        self._made: dict[str, Any] = {}

    def output(self, path: str) -> None:
        """Write the first output to a file."""
        made = self._artifact.run({self._artifact.inputs[0].name: self._image})
        np.save(path, next(iter(made.values())))

    def run(self, name: str) -> float:
        """Run a kernel, or the network without a name, for a turn; return the least seconds."""
        if name not in self._made:
            self._made[name] = self._makers[name]()
            self._made[name].run(8)
        one = self._made[name]
        return float(one.run(max(4, int(BURST / one.best))))


def serve() -> None:
    """Answer requests on the standard input until it ends."""
    served, replies = Served(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but replies
    for line in sys.stdin:
        name, *given = json.loads(line)
        replies.write(json.dumps(getattr(served, name)(*given)) + "\n")
        replies.flush()


class Checkout:
    """Processes that import bnncc from one checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._processes: list[subprocess.Popen[str]] = []
        self._loaded: set[int] = set()

    @cached_property
    def commit(self) -> str:
        """Return what is checked out."""
        command = ["git", "-C", str(self.folder), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def compile(self, path: Path, target: str) -> Any:
        """Return the answer to `Served.compile`; `run` then runs what was compiled."""
        self._path, self._artifact = path, path.with_suffix(f".{id(self)}.bnncc")
        self._loaded.clear()
        return self._ask(0, "compile", str(path), target, str(self._artifact))

    def output(self) -> np.ndarray:
        """Return the first output of the network."""
        path = self._path.with_suffix(".npy")
        self._load(0)
        self._ask(0, "output", str(path))
        return np.load(path)

    def run(self, name: str, place: int) -> float:
        """Return the answer to `Served.run` in one of the processes."""
        self._load(place)
        return float(self._ask(place, "run", name))

    def _load(self, place: int) -> None:
        if place not in self._loaded:
            self._ask(place, "load", str(self._path), str(self._artifact))
            self._loaded.add(place)

    def _ask(self, place: int, *request: object) -> Any:
        if place == len(self._processes):
            self._processes.append(self._started())
        process = self._processes[place]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        reply = process.stdout.readline()
        if not reply:
            raise SystemExit(f"error: a process of {self.folder} ended")
        return json.loads(reply)

    def _started(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        command = [sys.executable, __file__, "--serve"]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            cwd=self.folder,
        )  # fmt: skip


def networks(only: str) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield the networks of the benchmarks, and layers as networks of one."""
    from few_bit import GOALS, Problem
    from layers import FEW, NINE, RAGGED
    from networks import NETWORKS, Builder

    def one(shape: tuple[int, ...], *, binary: bool) -> onnx.ModelProto:
        channels, side, out, kernel, stride = shape
        builder = Builder(str(shape), channels, side)
        if binary:
            return builder.model(builder.binary_conv(builder.input, out, kernel, stride, 1.0)[0])
        return builder.model(builder.conv(builder.input, out, kernel, stride)[0])

    for shape in (*NINE, *RAGGED, *FEW):
        yield f"binary {shape}", one(shape, binary=True)
    for pair in GOALS:
        for shape in NINE[3:]:
            yield f"W{pair[0]}A{pair[1]} {shape}", Problem(shape, *pair).peer_model(last=False)
    for shape in ((3, 224, 64, 7, 2), (64, 56, 64, 3, 1), (64, 28, 128, 1, 1), (32, 56, 32, 3, 2)):
        yield f"float {shape}", one(shape, binary=False)
    for name, make in NETWORKS.items():
        yield name, make("where")


def race(mine: Callable[[int], float], other: Callable[[int], float]) -> dict[str, Any]:
    """Return the least microseconds of the first, and what `counted` adds."""
    pairs = []
    for place in range(PLACES):
        best = [math.inf, math.inf]
        for turn in range(ROUNDS):
            for side in (0, 1) if turn % 2 else (1, 0):
                best[side] = min(best[side], (mine, other)[side](place))
        pairs.append((best[0], best[1] / best[0]))
        if median(ratio for _, ratio in pairs) >= 1:
            break
    return counted(1e6 * min(us for us, _ in pairs), [ratio for _, ratio in pairs])


def counted(us: float, ratios: list[float]) -> dict[str, Any]:
    """Return microseconds, the ratio of each pair of processes, and the median of these."""
    return {"us": us, "ratio": median(ratios), "ratios": ratios}


def compare(
    name: str, model: onnx.ModelProto, target: str, mine: Checkout, other: Checkout, folder: Path
) -> dict[str, Any]:
    """Return the ratios of one network for one target."""
    path = folder / "network.onnx"
    onnx.save(model, path)
    ours, theirs = (side.compile(path, target) for side in (mine, other))
    outputs = [side.output() for side in (mine, other)]
    if not np.allclose(*outputs, rtol=1e-4, atol=1e-4 * np.abs(outputs[1]).max()):
        raise SystemExit(f"error: {name} for {target}: outputs differ")
    whole = race(partial(mine.run, ""), partial(other.run, ""))
    found: dict[str, Any] = {}
    for layer, kernel in ours["layers"].items():
        before = theirs["layers"].get(layer)
        if not kernel or not before or any(f["kernel"] == kernel for f in found.values()):
            continue
        if ours["tensors"][kernel] != theirs["tensors"][before]:
            continue  # other work, as where one kernel writes NCHW and in the other's another does
        alone = race(partial(mine.run, kernel), partial(other.run, before))
        found[layer] = {"kernel": kernel, "kind": ours["kinds"][kernel], **alone}
    return {
        "network": name, "target": target, **whole,
        "compile": ours["seconds"] / theirs["seconds"], "layers": found,
    }  # fmt: skip


def together(row: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Return what two runs have measured of one network."""

    def both(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
        return {**one, **counted(min(one["us"], two["us"]), [*one["ratios"], *two["ratios"]])}

    names = [name for name in row["layers"] if name in again["layers"]]
    layers = {name: both(row["layers"][name], again["layers"][name]) for name in names}
    return {**both(row, again), "layers": layers}


def mean(ratios: list[float]) -> float:
    """Return the geometric mean, 1 of nothing."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def worst(row: dict[str, Any]) -> float:
    """Return the least ratio of a network and its kernels."""
    return min([row["ratio"], *(layer["ratio"] for layer in row["layers"].values())])


def lost(row: dict[str, Any]) -> bool:
    """Return whether a network or one of its kernels seems to be slower."""
    return row["ratio"] < WHOLE or worst(row) < LOW


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the least and mean ratios of each target and kind of layer, and of networks."""
    made: dict[str, Any] = {}
    for target in dict.fromkeys(row["target"] for row in rows):
        here = [row for row in rows if row["target"] == target]
        kinds: dict[str, list[float]] = {}
        for row in here:
            kinds.setdefault("whole", []).append(row["ratio"])
            for layer in row["layers"].values():
                kinds.setdefault(layer["kind"], []).append(layer["ratio"])
        made[target] = {
            kind: {"count": len(r), "least": min(r), "mean": mean(r)} for kind, r in kinds.items()
        }
        made[target]["compile"] = median(row["compile"] for row in here)
    return made


def _table(content: dict) -> str:
    rows = []
    for target, kinds in content["summary"].items():
        for kind, found in kinds.items():
            if kind != "compile":
                ratios = (f"{found[key]:.3f}" for key in ("mean", "least"))
                rows.append([target, kind, found["count"], *ratios])
        rows.append(
            [target, "time to compile", len(content["networks"]) // len(content["summary"])]
        )
        rows[-1] += [f"{kinds['compile']:.3f}", ""]
    head = ["target", "what", "count", f"mean, `{content['beside']}` = 1", "least"]
    return markdown(head, rows) + "\n\n" + where(content)


TABLES = {"beside": (_table, ("beside",))}


@contextmanager
def checked_out(other: str) -> Iterator[Path]:
    """Open a checkout of a commit; `other` itself, if it is a folder."""
    if Path(other).is_dir():
        yield Path(other)
        return
    git = ["git", "-C", str(machine.ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "before"
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), other], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def asking(purpose: str, base: str, targets: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of the command line of a comparison of two checkouts."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("other", nargs="?", default=base, help=f"a commit; default: {base}")
    parser.add_argument("--target", action="append", help=f"default: {', '.join(targets)}")
    parser.add_argument("--only", default="", help="networks whose name has this word")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def main() -> None:
    """Compare two checkouts."""
    parser = asking(__doc__.splitlines()[0], BASE, TARGETS)
    parser.add_argument("--again", action="store_true", help="measure losses in --json anew")
    args = parser.parse_args()
    if args.again and not (args.json and args.json.is_file()):
        parser.error("--again needs --json, a file of what was measured before")
    there = args.json is not None and args.json.is_file()
    old = json.loads(args.json.read_text()) if there else {"networks": []}
    rows = {(row["network"], row["target"]): row for row in old["networks"]}
    with checked_out(args.other) as before, tempfile.TemporaryDirectory() as folder:
        mine, other = Checkout(machine.ROOT), Checkout(before)
        commits = machine.commit(), other.commit
        if there and (old["commit"], old["beside"]) != commits:
            if args.again:
                parser.error(f"{args.json} compares {old['commit']} with {old['beside']}")
            rows = {}
        for name, model in networks(args.only):
            if args.only not in name:
                continue
            for target in args.target or TARGETS:
                seen = rows.get((name, target))
                if args.again and (seen is None or not lost(seen)):
                    continue
                if seen is not None and not args.again:
                    continue
                row = compare(name, model, target, mine, other, Path(folder))
                rows[name, target] = row = together(seen, row) if seen else row
                print(
                    f"{name:28} {target:12} {row['us']:9.1f} us, speed relative to {commits[1]}: "
                    f"{row['ratio']:.3f}, at least {worst(row):.3f} with "
                    f"{len(row['layers'])} kernels; compile time {row['compile']:.2f}",
                    flush=True,
                )
                made = [*rows.values()]
                if args.json:
                    machine.save(args.json, beside=commits[1], summary=summary(made), networks=made)
    print(json.dumps(summary([*rows.values()]), indent=1))


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()
