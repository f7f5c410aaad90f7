"""Worker processes: each job gets an answer, even if its process crashes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bnncc import osutil
from bnncc.errors import TuningError
from bnncc.targets.spec import TargetSpec

READY_SECONDS = 300.0
"""For a worker to start, on a busy machine."""

MAX_SENT = 3
"""Devices that a job may lose before the job is considered the cause."""

Job = dict[str, Any]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What workers build and measure."""

    target: TargetSpec
    """Target of the kernels."""
    device: dict[str, Any] | None = None
    """Arguments of `bnncc.remote.connect`; None to measure here."""
    threads: int = 1
    """That kernels use."""
    preload: tuple[str, ...] = ()
    """Modules that workers import first."""
    method: str = "clock"
    """``clock``, ``instructions`` or ``none``: what is measured."""
    prefix: tuple[str, ...] = ()
    """Command that starts the worker's command, such as ``("taskset", "-c", "1")``."""


@dataclass
class _Process:
    """A worker process and its current job."""

    popen: subprocess.Popen[bytes]
    ready: bool = False
    job: int | None = None
    until: float = 0.0


@dataclass
class _Batch:
    """Jobs in progress."""

    jobs: Sequence[Job]
    seconds: float
    waiting: deque[int] = field(default_factory=deque)
    answers: dict[int, Answer] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)


class Pool:
    """Workers, started when there are jobs; a context manager, which ends them.

    Parameters
    ----------
    setup : Setup
        What they are for.
    count : int
        How many.
    """

    def __init__(self, setup: Setup, count: int) -> None:
        self.setup, self.count = setup, count
        self._processes: list[_Process] = []
        self._heard: queue.SimpleQueue[tuple[_Process, bytes]] = queue.SimpleQueue()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        for process in self._processes:
            self._end(process)
        self._processes.clear()

    def run(
        self, jobs: Sequence[Job], seconds: float, done: Callable[[int, Answer], None] | None = None
    ) -> list[Answer]:
        """Do jobs, several at a time.

        Parameters
        ----------
        jobs : sequence of dict
            For `worker.Worker.do`.
        seconds : float
            Time limit of a job.
        done : callable, optional
            Called with each job's number and answer when it arrives.

        Returns
        -------
        list of dict
            The answers, with ``error`` for those that crashed or took too long.

        Raises
        ------
        TuningError
            If no worker can be started, or all have lost their devices.
        """
        batch = _Batch(jobs, seconds, deque(range(len(jobs))))
        while len(batch.answers) < len(jobs):
            self._start(len(jobs) - len(batch.answers))
            for process in self._processes:
                if process.ready and process.job is None and batch.waiting:
                    self._send(process, batch)
            before = set(batch.answers)
            self._wait(batch)
            for number in sorted(set(batch.answers) - before):
                if done is not None:
                    done(number, batch.answers[number])
        return [batch.answers[i] for i in range(len(jobs))]

    def _start(self, wanted: int) -> None:
        while len(self._processes) < min(self.count, wanted):
            popen = subprocess.Popen(
                [*self.setup.prefix, sys.executable, "-m", "bnncc.tuning.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                **osutil.DETACHED,  # Ctrl-C is for us
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            process = _Process(popen, until=time.monotonic() + READY_SECONDS)
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(process,), daemon=True).start()
            self._write(process, asdict(self.setup))

    def _listen(self, process: _Process) -> None:
        """Pass on the output of a worker, line by line, and an empty line at its end."""
        assert process.popen.stdout is not None
        with contextlib.suppress(OSError, ValueError), process.popen.stdout as stdout:
            for line in stdout:
                self._heard.put((process, line))
        self._heard.put((process, b""))

    def _send(self, process: _Process, batch: _Batch) -> None:
        process.job = batch.waiting.popleft()
        process.until = time.monotonic() + batch.seconds
        batch.sent[process.job] = batch.sent.get(process.job, 0) + 1
        self._write(process, batch.jobs[process.job])

    def _write(self, process: _Process, value: Any) -> None:
        assert process.popen.stdin is not None
        with contextlib.suppress(OSError):  # dead; `_wait` finds out
            process.popen.stdin.write(json.dumps(value).encode() + b"\n")
            process.popen.stdin.flush()

    def _wait(self, batch: _Batch) -> None:
        """Wait for the next event, and handle it."""
        busy = [p.until for p in self._processes if not p.ready or p.job is not None]
        with contextlib.suppress(queue.Empty):
            wait = max(0.0, min(busy, default=0.0) - time.monotonic())
            while True:  # all that was said
                process, line = self._heard.get(timeout=wait)
                if process in self._processes:
                    self._read(process, line, batch)
                wait = 0.0
        now = time.monotonic()
        for process in list(self._processes):
            if (not process.ready or process.job is not None) and now > process.until:
                if not process.ready:
                    self.close()
                    raise TuningError(f"a worker did not start within {READY_SECONDS:g} s")
                self._fail(process, batch, f"took longer than {batch.seconds:g} s")

    def _read(self, process: _Process, line: bytes, batch: _Batch) -> None:
        if not line.endswith(b"\n"):
            code = process.popen.wait()
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            if not process.ready:
                self.close()
                raise TuningError(f"a worker ended while starting: {reason}")
            self._fail(process, batch, f"crashed: {reason}")
            return
        self._take(process, json.loads(line), batch)

    def _take(self, process: _Process, answer: Answer, batch: _Batch) -> None:
        if "ready" in answer:
            process.ready = True
            return
        if "fatal" in answer:  # it found no device, perhaps because one is gone
            self._remove(process)
            self.count -= 1
            if not self._processes:
                raise TuningError(f"cannot measure: {answer['fatal']}", hint="records are kept")
            return
        number, process.job = process.job, None
        if number is None:
            return
        if "lost" not in answer:
            batch.answers[number] = answer
            return
        self._remove(process)  # the next one connects anew
        if batch.sent[number] < MAX_SENT and not answer["guilty"]:
            batch.waiting.appendleft(number)
        else:
            batch.answers[number] = {"error": f"loses its device: {answer['lost']}"}

    def _fail(self, process: _Process, batch: _Batch, reason: str) -> None:
        """End a worker that crashed or hangs; another takes its place."""
        if process.job is not None:
            batch.answers[process.job] = {"error": reason}
        self._remove(process)

    def _remove(self, process: _Process) -> None:
        self._end(process)
        self._processes.remove(process)

    @staticmethod
    def _end(process: _Process) -> None:
        with contextlib.suppress(OSError):
            process.popen.kill()
        process.popen.wait()
        if process.popen.stdin is not None:
            with contextlib.suppress(OSError):
                process.popen.stdin.close()
