"""Other runtimes, each in a process and a Python environment of its own.

    with open_peers(("openvino-binary", "onnxruntime-f32"), path) as peers:
        for peer in peers:
            compare(peer.out(image), wanted)
        interleave([Ours(artifact, image), *peers], rounds=60)
        # then .best and .median of each, in seconds

`make peers` makes the environments `.venv-peers` and `.venv-lce`; `--peers` and `--lce` name
others. A peer that is not installed, or that cannot run a network, is not measured: it is said so,
and nothing fails. `peer_worker.py` has the kinds; they take their threads and cores from here, and
run only when asked, so that all take turns on the same cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
VENVS = {"peers": ROOT / ".venv-peers/bin/python", "lce": ROOT / ".venv-lce/bin/python"}


class NotMeasured(Exception):
    """A peer is not installed or cannot run this network."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the peers' environments."""
    parser.add_argument("--peers", metavar="PYTHON", default=str(VENVS["peers"]))
    parser.add_argument("--lce", metavar="PYTHON", default=str(VENVS["lce"]))


class Turns:
    """Times of one that takes turns."""

    def __init__(self) -> None:
        self.best = float("inf")
        self._medians: list[float] = []

    @property
    def median(self) -> float:
        """The median of its turns' medians, in seconds."""
        return statistics.median(self._medians)

    def _took(self, least: float, median: float) -> float:
        self.best = min(self.best, least)
        self._medians.append(median)
        return least


class Peer(Turns):
    """One kind of `peer_worker.py` on one network.

    Parameters
    ----------
    kind : str
        A key of ``peer_worker.KINDS``.
    path : Path
        The ONNX file. Kinds that quantize it write beside it.
    threads : int
        How many threads it may use.
    python : str or None
        The interpreter of its environment; by default that of `make peers`.

    Raises
    ------
    NotMeasured
        If it is not installed or cannot run the network.
    """

    def __init__(self, kind: str, path: Path, threads: int = 1, python: str | None = None) -> None:
        super().__init__()
        self.kind = kind
        if python is None:
            python = str(VENVS["lce" if kind.startswith(("lce", "tflite")) else "peers"])
        if not Path(python).exists():
            raise NotMeasured(f"{kind}: no {python} (make peers)")
        script = Path(__file__).with_name("peer_worker.py")
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment.update(OMP_NUM_THREADS=str(threads), OPENBLAS_NUM_THREADS=str(threads))
        self._folder = tempfile.TemporaryDirectory(prefix="peer-")
        self._file = Path(self._folder.name) / "array.npy"
        complaints = Path(self._folder.name) / "stderr.txt"
        with complaints.open("w") as stderr:
            self._process = subprocess.Popen(
                [python, str(script), kind, str(path), str(threads)], env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        word, _, rest = self._process.stdout.readline().strip().partition(" ")
        if word != "ready":
            reason = rest or complaints.read_text().strip()[-200:]
            self.close()
            raise NotMeasured(f"{kind}: {reason}")
        self.name, self.version = rest.split()

    def _ask(self, request: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(request, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise RuntimeError(f"{self.kind} died on `{request}`")
        return answer

    def out(self, image: np.ndarray) -> np.ndarray:
        """Set the input, float32 NCHW, run once and return the output."""
        np.save(self._file, image)
        self._ask(f"out {self._file}")
        return np.load(self._file)

    def run(self, times: int) -> float:
        """Run that often and return the least time, in seconds; `best` keeps the least of all."""
        return self._took(*map(float, self._ask(f"run {times}").split()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def timed(function: Callable[[], object], times: int) -> tuple[float, float]:
    """Return the least time and the median of that many calls, in seconds."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds), statistics.median(seconds)


class Timed(Turns):
    """A contestant that calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self._function = function

    def run(self, times: int) -> float:
        """Run that often and return the least time, in seconds; `best` keeps the least of all."""
        return self._took(*timed(self._function, times))


class Ours(Timed):
    """A compiled network that takes its turns as peers do: inputs and outputs in place.

    Parameters
    ----------
    artifact : bnncc.Artifact
        The network, of one input.
    image : ndarray
        Its input.
    """

    def __init__(self, artifact: Any, image: np.ndarray) -> None:
        session = artifact.session()
        super().__init__(partial(session.main, *session.tensors({artifact.inputs[0].name: image})))
        self.kind = "bnncc"


class Contestant(Protocol):
    """What takes turns: `Ours`, `Peer`, or anything else with these two."""

    best: float

    def run(self, times: int) -> float:
        """Run that often, keep the least time in `best`, return the least of these."""
        ...


def interleave(
    contestants: Sequence[Contestant],
    rounds: int = 60,
    burst: float = 0.015,
    between: Sequence[Callable[[], object]] = (),
    before: Callable[[], object] | None = None,
) -> None:
    """Let all take turns, so that whatever disturbs the machine disturbs all alike.

    Parameters
    ----------
    contestants : sequence of Contestant
        Each keeps its best.
    rounds : int
        How many turns each gets. One that needs a second or more gets three, for the sake of time.
    burst : float
        Seconds that a turn should take: a fast one runs several times, a slow one once.
    between : sequence of callables
        Called after every round: ceilings, for example.
    before : callable, optional
        Called before every turn, to wait for a quiet machine.
    """
    for contestant in contestants:
        contestant.run(2)
    for number in range(rounds):
        for contestant in contestants:
            if number < 3 or contestant.best < 1:
                if before is not None:
                    before()
                contestant.run(max(1, min(200, int(burst / contestant.best))))
        for call in between:
            call()


@contextmanager
def open_peers(
    kinds: Iterable[str],
    path: Path,
    threads: int = 1,
    python: str | None = None,
    lce: str | None = None,
) -> Iterator[list[Peer]]:
    """Yield the peers of these kinds that can run the network; say which cannot."""
    found: list[Peer] = []
    try:
        for kind in kinds:
            ours = lce if kind.startswith(("lce", "tflite")) else python
            try:
                found.append(Peer(kind, path, threads, ours))
            except NotMeasured as reason:
                print(f"not measured: {reason}", file=sys.stderr, flush=True)
        yield found
    finally:
        for peer in found:
            peer.close()


def main() -> None:
    """Print the requirements of an extra, for an environment that bnncc itself is not in."""
    parser = argparse.ArgumentParser(description="Print the requirements of an extra of bnncc.")
    parser.add_argument("extra")
    marker = f'extra == "{parser.parse_args().extra}"'
    for line in requires("bnncc") or []:
        requirement, _, condition = line.partition(";")
        if condition.strip() == marker:
            print(requirement.strip())


if __name__ == "__main__":
    main()
