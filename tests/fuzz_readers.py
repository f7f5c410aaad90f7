"""Damage model files and see that readers stay calm: success, or one clear error.

    python -m tests.fuzz_readers onnx FILE... [--mutations N] [--seed K] [--compile N] [--keep DIR]

Each damaged file is read in a child process (a fork, so that imports are paid once) with at most 10
seconds of the processor and 1 GiB for its data. Half of the mutations hit bytes of the format's
structure, which a reader's `structure` tells from payload. A new reader is one entry of `READERS`
(how it is called, where structure is) and one of SEEDS in test_fuzz_readers.py. Files that
belong together (a graph and its parameters) are one seed, joined by a comma on the command line;
one of them is damaged at a time.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz_mutations import everything, mutated, mutated_onnx, protobuf
from tests.fuzz_mxnet import mutated_mxnet, mxnet
from tests.fuzz_pytorch import mutated_pytorch, pytorch
from tests.fuzz_tflite import tflite

SECONDS = 10
"""Of the processor, so that a busy machine makes no difference."""
ASLEEP = 120
"""Seconds after which a reader that waits for something is taken to hang."""
BYTES = 1 << 30
LONGEST_MESSAGE = 500
_FINE, _REFUSED, _BAD = 0, 1, 2


# --------------------------------------------------------------------------------------- readers


@dataclass(frozen=True)
class Reader:
    """How files of a format are read.

    Attributes
    ----------
    load : callable
        Takes the path of a seed's first file; raises `BnnccError` for what it does not like.
    structure : callable
        Takes the bytes of a file; returns where its structure is.
    mutate : callable
        Takes bytes, a generator and the structure; for formats with checksums, say.
    """

    load: Callable[[Path], object]
    structure: Callable[[bytes], Sequence[range]] = everything
    mutate: Callable[[bytes, random.Random, Sequence[range]], bytes] = mutated


def _load_onnx(path: Path) -> object:
    from bnncc.frontend.onnx import load

    return load(path)


def _load_other(path: Path) -> object:
    from bnncc.frontend.formats import as_onnx

    return _load_onnx(as_onnx(path))


READERS: dict[str, Reader] = {
    "mxnet": Reader(_load_other, mxnet, mutated_mxnet),
    "onnx": Reader(_load_onnx, protobuf, mutated_onnx),
    "pytorch": Reader(_load_other, pytorch, mutated_pytorch),
    "tflite": Reader(_load_other, tflite),
}


# ------------------------------------------------------------------------------------------ runs


@dataclass
class Outcome:
    """What came of some mutations.

    Attributes
    ----------
    read, refused : int
        How many were read, and refused with one clear error.
    bad : list of str
        Crashes, hangs, and errors that are not clear, each with the number of its mutation.
    slowest : float
        Seconds.
    said : Counter
        The errors, without names and numbers.
    """

    read: int = 0
    refused: int = 0
    bad: list[str] = field(default_factory=list)
    slowest: float = 0.0
    said: Counter[str] = field(default_factory=Counter)


def fuzz(
    reader: Reader,
    seeds: Sequence[Sequence[Path]],
    *,
    mutations: int,
    seed: int = 0,
    compile_every: int = 0,
    keep: Path | None = None,
) -> Outcome:
    """Read damaged copies of files, each in a child process.

    Parameters
    ----------
    reader : Reader
        Of their format.
    seeds : sequence of sequence of path
        Whole files; those that belong together in one sequence.
    mutations : int
        How many damaged copies.
    seed : int
        Same seed, same damage.
    compile_every : int
        Compile each so many-th of those that could be read as well (in as much time and memory as
        it takes); 0 for none.
    keep : path, optional
        Folder for the damaged files that were not taken calmly.

    Returns
    -------
    Outcome
    """
    whole = [[(path.name, path.read_bytes()) for path in files] for files in seeds]
    found = {id(data): reader.structure(data) for files in whole for _, data in files}
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="bnncc-fuzz-") as folder:
        for number in range(mutations):
            rng = random.Random(f"{seed}/{number}")
            files = rng.choice(whole)
            victim = rng.randrange(len(files))
            paths = []
            for k, (name, data) in enumerate(files):
                path = Path(folder, name)
                worse = reader.mutate(data, rng, found[id(data)]) if k == victim else data
                path.write_bytes(worse)
                paths.append(path)
            _note(outcome, number, _child(reader.load, paths[0], bounded=True))
            if compile_every and outcome.read and number % compile_every == 0:
                _note(outcome, number, _child(_compile, paths[0], bounded=False))
            if keep is not None and outcome.bad and outcome.bad[-1].startswith(f"{number}:"):
                keep.mkdir(parents=True, exist_ok=True)
                for path in paths:
                    (keep / f"{number}-{path.name}").write_bytes(path.read_bytes())
    return outcome


def _compile(path: Path) -> object:
    import bnncc

    return bnncc.compile(path)


def _note(outcome: Outcome, number: int, result: tuple[int, str, float]) -> None:
    status, text, seconds = result
    outcome.slowest = max(outcome.slowest, seconds)
    if status == _FINE:
        outcome.read += 1
    elif status == _REFUSED:
        outcome.refused += 1
        outcome.said[re.sub(r"`[^`]*`|\d+|b?'[^']*'", "_", text)[:60]] += 1
    else:
        outcome.bad.append(f"{number}: {text}")


def _child(
    action: Callable[[Path], object], path: Path, *, bounded: bool
) -> tuple[int, str, float]:
    """Run `action` of a file in a fork; return what came of it, in words, and its seconds."""
    start = time.monotonic()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os._exit(_run(action, path, write, bounded))
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode("utf-8", "replace")
    _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - start
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hangs = number in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL)
        what = f"hangs: {seconds:.0f} s" if hangs else f"died of signal {number}"
        return _BAD, what, seconds
    return os.WEXITSTATUS(status), text, seconds


def _data_bytes() -> int:
    """Return how much data this process has, as `RLIMIT_DATA` counts it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmData:")[1].split()[0])


def _run(action: Callable[[Path], object], path: Path, write: int, bounded: bool) -> int:
    """Do what the child does; its status tells the parent."""
    from bnncc.errors import BnnccError

    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    if bounded:
        most = _data_bytes() + BYTES  # the process this one is a copy of may hold much
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))  # ends loops in C, too
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ASLEEP)
    try:
        action(path)
    except BnnccError as error:
        text = str(error)
        clear = bool(text.strip()) and "\n" not in text and len(text) < LONGEST_MESSAGE
        os.write(write, text.encode("utf-8", "replace")[:4000])
        return _REFUSED if clear else _BAD
    except BaseException as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        where = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}" if frame else ""
        text = f"{type(error).__name__} in {where}: {str(error)[:200]}"
        os.write(write, text.encode("utf-8", "replace"))
        return _BAD
    return _FINE


def _lines(outcome: Outcome) -> Iterator[str]:
    yield (
        f"{outcome.read} read, {outcome.refused} refused, {len(outcome.bad)} bad; "
        f"slowest {outcome.slowest:.1f} s"
    )
    yield from outcome.bad[:20]


def main() -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reader", choices=sorted(READERS))
    parser.add_argument("files", nargs="+", help="seeds; commas join files that belong together")
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="each N-th one as well")
    parser.add_argument("--keep", type=Path, help="folder for files that were not taken calmly")
    parser.add_argument("--errors", action="store_true", help="show which errors there were")
    args = parser.parse_args()
    seeds = [[Path(part) for part in text.split(",")] for text in args.files]
    for files in seeds:
        READERS[args.reader].load(files[0])  # and all that it imports
    outcome = fuzz(
        READERS[args.reader], seeds, mutations=args.mutations, seed=args.seed,
        compile_every=args.compile, keep=args.keep,
    )  # fmt: skip
    print("\n".join(_lines(outcome)))
    if args.errors:
        print("\n".join(f"{count:6} {text}" for text, count in outcome.said.most_common(60)))
    return 1 if outcome.bad else 0


if __name__ == "__main__":
    sys.exit(main())
