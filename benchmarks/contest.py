"""What the scripts of the papers share: compile, check, take turns, write down.

Ours, its kernels, peers and anything else that can be called take their turns as `peers.py` says.
Import this module first: it sets the number of threads, which NumPy and TVM read when they are
loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine

os.environ.setdefault(
    "TVM_NUM_THREADS",
    sys.argv[sys.argv.index("--threads") + 1] if "--threads" in sys.argv[:-1] else "1",
)
os.environ.setdefault("OMP_NUM_THREADS", os.environ["TVM_NUM_THREADS"])
os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ["TVM_NUM_THREADS"])

import numpy as np
import onnx
import tvm
from peers import Contestant, Ours, add_arguments, interleave, open_peers
from tables import markdown

import bnncc
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.report import table
from bnncc.runtime.artifact import Artifact

THREADS = int(os.environ["TVM_NUM_THREADS"])
"""Of every contestant: ``--threads``, or the environment."""

BURST = 0.01
"""Seconds of one turn."""

MIN_ROUNDS = 4


def parser(doc: str | None, parts: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """Return a parser with the options of every script; `parts` can be measured one by one."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--threads", type=_threads, help="of every contestant (default 1)")
    made.add_argument("--repeat", type=int, default=40, help="rounds of turns (default 40)")
    made.add_argument("--seconds", type=float, default=3, help="at most, per row (default 3)")
    made.add_argument("--artifacts", type=Path, metavar="DIR", help="compiled networks to reuse")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    if parts:
        made.add_argument("parts", nargs="*", default=parts, help=f"of {', '.join(parts)} (all)")
    add_arguments(made)
    if THREADS == 1:  # kernels are compiled for the CPUs that the process may use
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return made


def _threads(text: str) -> int:
    if text != str(THREADS):
        raise argparse.ArgumentTypeError(f"already {THREADS}: by TVM_NUM_THREADS?")
    return THREADS


def compiled(
    name: str, model: onnx.ModelProto, folder: Path | None
) -> tuple[Artifact, dict[str, np.ndarray]]:
    """Compile `model` and check it against its graph evaluated in NumPy.

    Parameters
    ----------
    name : str
        Names the files in `folder`.
    model : onnx.ModelProto
        One input ``x``, one output.
    folder : Path or None
        Where an earlier run may have left the artifact and the expected output.

    Returns
    -------
    artifact : Artifact
    inputs : dict of str to ndarray
        Those it was checked with.
    """
    shape = input_shape(model)
    # Of few bits, as images are: sums are exact, so no sign depends on their order. And never 0,
    # which OpenVINO takes for negative.
    values = np.random.default_rng(0).integers(-128, 128, shape, dtype=np.int8)
    inputs = {"x": (values.astype(np.float32) + 0.5) / 64}
    path = folder / f"{name.replace(' ', '_')}.bnncc" if folder else None
    if path is not None and path.exists():
        artifact, wanted = Artifact.load(path), np.load(path.with_suffix(".npy"))
    else:
        graph = load(model)
        wanted = evaluate(graph, inputs)[graph.outputs[0]]
        artifact = bnncc.compile(model)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path.with_suffix(".npy"), wanted)
            artifact.save(path)
    require_equal(name, next(iter(artifact.run(inputs).values())), wanted)
    return artifact, inputs


def require_equal(name: str, got: np.ndarray, wanted: np.ndarray) -> None:
    """Stop unless two results agree to 1e-4 of the greatest."""
    error = np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30)
    if not error <= 1e-4:
        raise SystemExit(f"{name}: outputs differ by {error:.2g} of the greatest")


def input_shape(model: onnx.ModelProto) -> tuple[int, ...]:
    """Return the shape of the only input."""
    return tuple(d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim)


class Kernel:
    """A contestant that is one kernel of an artifact, alone, on tensors of its own.

    Parameters
    ----------
    artifact : Artifact
        The network.
    kernel : mapping
        Of its report.
    """

    def __init__(self, artifact: Artifact, kernel: Mapping[str, Any]) -> None:
        rng = np.random.default_rng(0)
        self._args = []
        planes = kernel.get("zero_plane_args", kernel.get("zeros", ()))  # as older commits say it
        for position, arg in enumerate(kernel["args"]):
            array = np.zeros(arg["shape"], arg["dtype"])
            if array.dtype.kind == "f":
                array[...] = rng.standard_normal(array.shape, dtype=np.float32)
            elif array.dtype.kind == "u" and position not in planes:
                array[...] = rng.integers(0, 2**32, array.shape, dtype=np.uint32)
            self._args.append(tvm.runtime.tensor(array))
        imports = artifact.session().module.imports
        library = next(m for m in imports if m.implements_function(kernel["name"]))
        # Once the calls of a turn are known they are made without Python between them.
        self._timer = partial(library.time_evaluator, kernel["name"], tvm.cpu(), repeat=4)
        self.best = float("inf")

    def run(self, times: int) -> float:
        """Run that often, keep the least time in `best`, return the least of these."""
        seconds = min(self._timer(number=max(1, times // 4))(*self._args).results)
        self.best = min(self.best, seconds)
        return seconds


@dataclass
class Result:
    """What `measure` found: seconds of ours, of its kernels, and of the rivals that can run."""

    artifact: Artifact
    seconds: dict[str, float]
    kernels: dict[str, float]

    def kernel_of(self, layer: int) -> float:
        """Return the seconds of the kernel that computes the layer of that number."""
        return self.kernels[self.artifact.report["layers"][layer]["kernel"]]

    def fastest(self, *kinds: str) -> float | None:
        """Return the least seconds of the rivals named that could run."""
        found = [self.seconds[kind] for kind in kinds if kind in self.seconds]
        return min(found) if found else None


def measure(
    name: str,
    model: onnx.ModelProto,
    args: argparse.Namespace,
    *,
    same: Iterable[str] = (),
    twin: onnx.ModelProto | None = None,
    floats: Iterable[str] = (),
    others: Mapping[str, Contestant] | None = None,
    kernels: bool = True,
) -> Result:
    """Compile, check and race one model.

    Parameters
    ----------
    name : str
        For messages and files.
    model : onnx.ModelProto
        What we compile.
    args : argparse.Namespace
        From `parser`.
    same : iterable of str
        Peers (`peer_worker.KINDS`) that run `model` itself; their outputs have to be ours.
    twin : onnx.ModelProto, optional
        The float network of the same shape.
    floats : iterable of str
        Peers that run `twin`.
    others : mapping of str to contestant, optional
        Who else takes turns.
    kernels : bool, default True
        Whether each of our kernels takes turns too, alone.

    Returns
    -------
    Result
    """
    artifact, inputs = compiled(name, model, args.artifacts)
    contestants: dict[str, Contestant] = {"ours": Ours(artifact, inputs["x"]), **(others or {})}
    alone = {k["name"]: Kernel(artifact, k) for k in artifact.report["kernels"] if kernels}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        for which, chosen, kinds in (("same", model, same), ("float", twin, floats)):
            if chosen is None:
                continue
            path = Path(folder) / f"{which}.onnx"
            onnx.save(chosen, path)
            for peer in stack.enter_context(open_peers(kinds, path, THREADS, args.peers, args.lce)):
                theirs = peer.out(inputs["x"])
                if which == "same":
                    mine = next(iter(artifact.run(inputs).values()))
                    require_equal(f"{name}, {peer.kind}", theirs.reshape(mine.shape), mine)
                contestants[peer.kind] = peer
                VERSIONS[peer.name] = peer.version
        race([*contestants.values(), *alone.values()], args)
    return Result(
        artifact,
        {key: contestant.best for key, contestant in contestants.items()},
        {key: kernel.best for key, kernel in alone.items()},
    )


VERSIONS: dict[str, str] = {}
"""Of the peers that ran."""


def race(contestants: list[Any], args: argparse.Namespace) -> None:
    """Let all take turns for about as long as asked for."""
    interleave(contestants, 1, BURST)
    once = sum(max(BURST, contestant.best) for contestant in contestants)
    interleave(contestants, max(MIN_ROUNDS, min(args.repeat, int(args.seconds / once))), BURST)


def write(args: argparse.Namespace, content: Mapping[str, object]) -> None:
    """Write `content` to the file asked for, with what it was measured on.

    What the file has besides stays, so that a script can measure its parts one by one.
    """
    if args.json is None:
        return
    before = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else {}
    versions = {**before.get("peers", {}), **VERSIONS}
    machine.save(args.json, **{**before, "threads": THREADS, "peers": versions, **content})


Columns = Mapping[str, str]
"""Heading of each key of a row, in order."""


def cells(rows: list[dict[str, Any]], columns: Columns) -> list[tuple[str, ...]]:
    """Return heading and rows as text, without columns that no row has; floats to three digits."""
    there = [key for key in columns if any(row.get(key) not in (None, "") for row in rows)]
    head = tuple(columns[key] for key in there)
    return [head, *(tuple(_cell(row.get(key, "")) for key in there) for row in rows)]


def show(rows: list[dict[str, Any]], columns: Columns) -> None:
    """Print `rows` in columns."""
    text = cells(rows, columns)
    print("\n".join(table(text, right=range(1, len(text[0])))), flush=True)


def markdown_of(content: Mapping[str, Any], part: str, columns: Columns) -> str:
    """Return `part` of a result file as Markdown, empty if it was not measured."""
    if part not in content:
        return ""
    head, *rows = cells(content[part], columns)
    return markdown(head, rows)


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - int(np.floor(np.log10(max(value, 1e-9)))))}f}"
