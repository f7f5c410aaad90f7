"""Run a bundle in worker processes, which may crash, and record each result at once.

    python FOLDER/run.py [--seconds 540] [--results FILE] [--only PART ...]

Results are appended to a file of JSON lines. Started again, it continues. Candidates
that crash, hang or are wrong are noted and not tried again. Exits with 0 if everything is done and
correct, 1 if something is wrong, 3 if the time limit was reached before.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

DONE, WRONG, TIME_UP, INTERRUPTED = 0, 1, 3, 130
FORMAT = 1
HEAD = ("bundle", "target", "family", "bnncc", "tvm")
"""Fields of the index in the first line of the results."""

QUIET_SECONDS = 180.0
"""Seconds without output after which a worker counts as hanging."""

GRACE_SECONDS = 10.0
"""Seconds before the time limit from which nothing is started."""

_LATE, _UNFIT = 3, 4  # exit codes of a worker
_START = "start"

Line = dict[str, Any]


class _TimeUp(Exception):
    """The time limit is reached."""


class Refused(Exception):
    """The bundle cannot be run here, or the results are not its own."""


class Log:
    """The results: a file of JSON lines, appended to.

    Parameters
    ----------
    path : Path
        The file. A last line that was cut off is removed.
    index : dict
        Of the bundle, which the first line names.
    """

    def __init__(self, path: Path, index: Line) -> None:
        self.path = path
        self.lines: list[Line] = []
        head = {"format": FORMAT, **{key: index[key] for key in HEAD}}
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(path, len(whole))
            self.lines = [json.loads(line) for line in whole.splitlines()]
        except (OSError, ValueError) as error:
            raise Refused(f"{path}: cannot be read: {error}") from error
        if not self.lines:
            self.add(head)
        elif self.lines[0] != head:
            raise Refused(f"{path}: holds results of another bundle; give another --results")

    def add(self, line: Line) -> None:
        """Append a line, and flush it to the disk."""
        with open(self.path, "ab") as file:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)

    def done(self, part: str) -> bool:
        """Return whether a part is complete."""
        return any(line.get("done") == part for line in self.lines)

    def of(self, part: str) -> list[Line]:
        """Return the results of a part."""
        return [line for line in self.lines if line.get("part") == part]


class Runner:
    """Runs the parts of a bundle.

    Parameters
    ----------
    root : Path
        The bundle.
    index : dict
        Its index.
    log : Log
        Receives the results.
    seconds : float
        Time limit.
    """

    def __init__(self, root: Path, index: Line, log: Log, seconds: float) -> None:
        self.root, self.index, self.log = root, index, log
        self.until = time.monotonic() + seconds
        self.grace = min(GRACE_SECONDS, seconds / 10)
        self._session = False

    def run(self, names: Sequence[str] | None) -> bool:
        """Run parts, by default all; return whether there was time for them."""

        def left(parts: Sequence[Line]) -> list[Line]:
            wanted = [p for p in parts if names is None or p["part"] in names]
            return [part for part in wanted if not self.log.done(part["part"])]

        try:
            while parts := left([*self.index["networks"], *self.index["kernels"]]):
                self._work(parts)
            for script in left(self.index["scripts"]):
                self._script(script)
        except _TimeUp:
            return False
        return True

    def _work(self, parts: Sequence[Line]) -> None:
        """Run a worker on parts, until all are done or it ends."""
        known = [
            f"{part['part']}:{line['key']}"
            for part in parts
            for line in self.log.of(part["part"])
            if _final(line, part)
        ]
        command = [str(self.root / "run.py"), "--until", repr(self.until - self.grace)]
        command += ["--parts", *(part["part"] for part in parts), "--skip", *known]
        by_name = {part["part"]: part for part in parts}
        part, key = None, _START

        def take(line: Line) -> None:
            nonlocal part, key
            if "part" in line:
                part, key = by_name[line["part"]], _START
            elif "done" in line:
                self.log.add(line)
                part = None
            elif "begin" in line:
                key = line["begin"]
            elif "device" in line:
                self._open_session(line)
            elif part is not None:
                self._keep(part, line)

        reason = self._listen(command, take)
        if not reason:
            return
        if part is None:
            raise Refused(f"the worker ended: {reason}")
        self._keep(part, {"key": key, "right": False, "error": reason})
        if key == _START:  # it cannot even be loaded
            self.log.add({"done": part["part"]})

    def _script(self, script: Line) -> None:
        name = script["part"]
        reason = self._listen([str(self.root / script["file"])], lambda x: self._keep(script, x))
        if reason:
            self._keep(script, {"key": _START, "right": False, "error": reason})
        self.log.add({"done": name})

    def _listen(self, command: Sequence[str], take: Callable[[Line], None]) -> str:
        """Run a program and record its lines; return how it failed, if it did.

        Raises
        ------
        Refused
            If this machine lacks something.
        _TimeUp
            If there is no time left for it.
        """
        if time.monotonic() > self.until - self.grace:
            raise _TimeUp
        with tempfile.TemporaryFile() as errors, _process(command, errors) as process:
            try:
                for line in self._heard(process):
                    take(line)
                code = process.wait()
            except TimeoutError as late:
                if time.monotonic() > self.until:
                    raise _TimeUp from late
                return str(late)
            words = _last_line(errors)
        if code == _LATE:
            raise _TimeUp
        if code == _UNFIT:
            raise Refused(words)
        if code < 0:
            return f"died: {signal.Signals(-code).name}"
        return (words or f"ended with exit code {code}") if code else ""

    def _heard(self, process: subprocess.Popen[bytes]) -> Iterator[Line]:
        """Yield the lines of a worker; a time-out ends it."""
        assert process.stdout is not None
        held = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                left = self.until - time.monotonic()
                if left < 0 or not selector.select(min(left, QUIET_SECONDS)):
                    raise TimeoutError(f"did not respond for {QUIET_SECONDS:g} s")
                data = os.read(process.stdout.fileno(), 1 << 16)
                held += data
                *whole, held = held.split(b"\n")
                for line in whole:
                    with contextlib.suppress(ValueError):
                        value = json.loads(line)
                        if isinstance(value, dict):
                            yield value
                if not data:
                    return

    def _open_session(self, line: Line) -> None:
        """Record once the machine, the time and the versions."""
        if not self._session:
            now = datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds")
            self.log.add({"session": now, **line})
            self._session = True

    def _keep(self, part: Line, line: Line) -> None:
        """Record a line with its part."""
        more: Line = {"part": part["part"]}
        if "candidates" in part:
            more |= {"kernel": part["name"], "check": part["digest"], "macs": part["macs"]}
            if line["key"].isdigit():
                kept = ("spec", "threads", "point", "default", "label")
                candidate = part["candidates"][int(line["key"])]
                more |= {key: candidate[key] for key in kept}
        elif "library" in part:
            more |= {"network": part["name"], "library": part["digest"]}
        self.log.add({**more, **line})
        print(_short(self.log.lines[-1]), file=sys.stderr, flush=True)


def _final(line: Line, part: Line) -> bool:
    """Whether what a line is about is not done again: candidates are timed together."""
    return not line["right"] or "candidates" not in part


@contextlib.contextmanager
def _process(command: Sequence[str], errors: Any) -> Iterator[subprocess.Popen[bytes]]:
    whole = [sys.executable, *command]
    process = subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=errors)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _last_line(file: Any) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - 4000))
    lines = file.read().decode(errors="replace").strip().splitlines()
    return str(lines[-1])[:300] if lines else ""


def _short(line: Line) -> str:
    """Return a result as a line of progress."""
    what = [str(line.get(k)) for k in ("kernel", "network", "part") if k in line][:1]
    what += [line["label"]] if line.get("label") else []
    if "key" in line and "label" not in line:
        what.append(line["key"])
    said = f"{line['us']:.2f} us" if "us" in line else line.get("error", "")
    return f"{' '.join(what)}: {said or json.dumps(line)}"


def summary(lines: Sequence[Line]) -> list[str]:
    """Return the results: each network, and the best of each kernel beside its default.

    Parameters
    ----------
    lines : sequence of dict
        Lines of a results file.
    """
    latest = {(line["part"], line["key"]): line for line in lines if "key" in line}
    timed = [line for line in latest.values() if "us" in line]
    made = []
    for line in timed:
        if "network" in line and line["key"] == "main":
            graph = "as one CUDA graph" if line["graph"] else "a call"
            made.append(f"{line['network']}: {line['us']:.2f} us {graph}")
    for part in dict.fromkeys(line["part"] for line in timed if "kernel" in line):
        own = [line for line in timed if line["part"] == part]
        best = min(own, key=lambda line: line["us"])
        text = f"{best['kernel']}: {best['us']:.2f} us {best['label']}"
        default = [line["us"] for line in own if line["default"]]
        if default and best["us"] < default[0]:
            text += f" ({100 * (1 - best['us'] / default[0]):.1f} % less than the default)"
        made.append(text)
    return made


def main(root: Path, argv: Sequence[str] | None = None) -> int:
    """Run a bundle, or one part of it as its worker.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; by default those of the process.

    Returns
    -------
    int
        Exit code.
    """
    parser = argparse.ArgumentParser(prog="run.py", description="Check and time this bundle.")
    parser.add_argument("--seconds", type=float, default=540, help="stop after so many [540]")
    parser.add_argument("--results", type=Path, default=root / "results.jsonl", help="file")
    parser.add_argument("--only", nargs="+", default=None, metavar="PART", help="of the index")
    parser.add_argument("--parts", nargs="+", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=(), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.parts is not None:
        from bnncc.bundle.device import worker

        return worker.main(root, args.parts, args.skip, args.until)
    try:
        index = json.loads((root / "index.json").read_text(encoding="utf-8"))
        log = Log(args.results, index)
        whole = Runner(root, index, log, args.seconds).run(args.only)
    except (Refused, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("interrupted; run it again to continue", file=sys.stderr)
        return INTERRUPTED
    print("\n".join(summary(log.lines)))
    if index["report"]:
        report = [sys.executable, str(root / index["report"]), str(args.results)]
        subprocess.run(report, check=False)
    wrong = [line for line in log.lines if line.get("right") is False]
    if wrong:
        print(f"{len(wrong)} results are wrong or failed: see {args.results}", file=sys.stderr)
    if not whole:
        print("the time limit is reached; run it again to continue", file=sys.stderr)
        return TIME_UP
    return WRONG if wrong else DONE
