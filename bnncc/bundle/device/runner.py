"""Runs a bundle: each part in a process of its own, each result kept as soon as it is there.

    python FOLDER/run.py [--seconds 540] [--results FILE] [--only PART ...]

Results are appended to a file of JSON lines. Started again, it goes on where it was stopped. What
crashes, hangs or is wrong is noted and not tried again. Leaves with 0 if all is done and right, 1
if something is wrong, 3 if the time was up before all was done.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DONE, WRONG, TIME_UP, INTERRUPTED = 0, 1, 3, 130
FORMAT = 1
HEAD = ("bundle", "target", "family", "bnncc", "tvm")
"""What of the index the first line of the results repeats."""

QUIET_SECONDS = 180.0
"""Without a word from a worker: then it hangs."""

GRACE_SECONDS = 10.0
"""Before the time is up, nothing is begun any more."""

_LATE, _UNFIT = 3, 4  # exit codes of a worker
_START = "start"

Line = dict[str, Any]


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
        """Append a line, so that nothing but a full disk can take it away."""
        with open(self.path, "ab") as file:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)

    def done(self, part: str) -> bool:
        """Return whether all of a part is there."""
        return any(line.get("done") == part for line in self.lines)

    def of(self, part: str) -> list[Line]:
        """Return what is said of a part."""
        return [line for line in self.lines if line.get("part") == part]


class Runner:
    """Runs the parts of a bundle.

    Parameters
    ----------
    root : Path
        The bundle.
    index : dict
        What is in it.
    log : Log
        Of results.
    seconds : float
        After which it stops.
    """

    def __init__(self, root: Path, index: Line, log: Log, seconds: float) -> None:
        self.root, self.index, self.log = root, index, log
        self.until = time.monotonic() + seconds
        self.grace = min(GRACE_SECONDS, seconds / 10)
        self._session: Line | None = None

    def run(self, names: Sequence[str] | None) -> bool:
        """Run parts, by default all; return whether there was time for them."""
        parts = [*self.index["networks"], *self.index["kernels"], *self.index["scripts"]]
        for part in parts:
            name = part["part"]
            if (names is not None and name not in names) or self.log.done(name):
                continue
            while (ended := self._attempt(part)) is None:
                pass
            if not ended:
                return False
            self.log.add({"done": name})
        return True

    def _attempt(self, part: Line) -> bool | None:
        """Run a part; True if it is done, False if the time is up, None if it is to go on."""
        script = "file" in part
        said = self.log.of(part["part"])
        known = [] if script else [line["key"] for line in said if _final(line, part)]
        if time.monotonic() > self.until - self.grace:
            return False
        command = [sys.executable, str(self.root / ("run.py" if not script else part["file"]))]
        if not script:
            until = repr(self.until - self.grace)
            command += ["--part", part["part"], "--until", until, "--skip", *known]
        current = _START
        with tempfile.TemporaryFile() as errors, _process(command, errors) as process:
            try:
                for line in self._heard(process):
                    if "begin" in line:
                        current = line["begin"]
                    else:
                        self._take(part, line)
                code = process.wait()
            except TimeoutError as late:
                process.kill()
                process.wait()
                if time.monotonic() > self.until:
                    return False
                code = None
                reason = str(late)
            words = _last_line(errors)
        if code == 0:
            return True
        if code == _LATE:
            return False
        if code == _UNFIT:
            raise Refused(words)
        if code is not None:
            died = f"died: {signal.Signals(-code).name}" if code < 0 else words
            reason = died or f"ended with exit code {code}"
        if current == _START and self._session is None and not script:
            raise Refused(f"{part['part']}: the worker did not start: {reason}")
        self._take(part, {"key": current, "right": False, "error": reason})
        return True if script or current == _START else None

    def _heard(self, process: subprocess.Popen[bytes]) -> Iterator[Line]:
        """Yield what a worker says; a time-out ends it."""
        assert process.stdout is not None
        held = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                left = self.until - time.monotonic()
                if not selector.select(max(0.0, min(left, QUIET_SECONDS))):
                    raise TimeoutError(f"said nothing for {QUIET_SECONDS:g} s")
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

    def _take(self, part: Line, line: Line) -> None:
        """Keep a line, with what it is about."""
        if "device" in line and "key" not in line:
            if self._session is None:
                now = datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds")
                self._session = {"session": now, **line}
                self.log.add(self._session)
            return
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
    """Whether what a line is about need not be done again: kernels are timed together."""
    return not line["right"] or "candidates" not in part


@contextlib.contextmanager
def _process(command: Sequence[str], errors: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
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
    """Return a result for people who watch."""
    what = [str(line.get(k)) for k in ("kernel", "network", "part") if k in line][:1]
    what += [line["label"]] if line.get("label") else []
    if "key" in line and "label" not in line:
        what.append(line["key"])
    said = f"{line['us']:.2f} us" if "us" in line else line.get("error", "")
    return f"{' '.join(what)}: {said or json.dumps(line)}"


def summary(lines: Sequence[Line]) -> list[str]:
    """Return what was found: each network, and the best of each kernel beside its default.

    Parameters
    ----------
    lines : sequence of dict
        Of a file of results.

    Returns
    -------
    list of str
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
    root : Path
        The bundle.
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
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=(), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part is not None:
        from bnncc.bundle.device import worker

        return worker.main(root, args.part, args.skip, args.until)
    try:
        index = json.loads((root / "index.json").read_text(encoding="utf-8"))
        log = Log(args.results, index)
        whole = Runner(root, index, log, args.seconds).run(args.only)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print("interrupted; run it again to go on", file=sys.stderr)
        return INTERRUPTED
    print("\n".join(summary(log.lines)))
    if index["report"]:
        report = [sys.executable, str(root / index["report"]), str(args.results)]
        subprocess.run(report, check=False)
    wrong = [line for line in log.lines if line.get("right") is False]
    if wrong:
        print(f"{len(wrong)} results are wrong or failed: see {args.results}", file=sys.stderr)
    if not whole:
        print("the time is up; run it again to go on", file=sys.stderr)
        return TIME_UP
    return WRONG if wrong else DONE
