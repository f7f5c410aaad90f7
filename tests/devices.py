"""Devices to test with: kits for this machine and for an emulated one, and their servers."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bnncc.cli import main as cli
from bnncc.errors import TargetError
from bnncc.remote import kit
from bnncc.targets.catalog import resolve

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SYSROOT = "/usr/aarch64-linux-gnu"
DIGITS = ROOT / "examples" / "digits"
EMULATOR = ("qemu-aarch64", "-L", SYSROOT)
SECONDS = 60
MACHINES = ("host", "arm64")
TARGETS = {"host": "native", "arm64": "arm64"}


def require(machine: str) -> None:
    """Skip the test where `machine` cannot be had."""
    if machine == "host":
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            pytest.skip("needs a C++ compiler")
        return
    if platform.machine() in ("aarch64", "arm64"):
        pytest.skip("this machine is the arm64 one: see `host`")
    for tool in ("qemu-aarch64", "aarch64-linux-gnu-g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (packages qemu-user, g++-aarch64-linux-gnu)")


def prefix(machine: str) -> tuple[str, ...]:
    """Return what stands before the command of a program for `machine`."""
    return EMULATOR if machine == "arm64" else ()


def make_kit(machine: str, folder: Path) -> Path:
    """Make a kit, or skip the test where that cannot be done."""
    require(machine)
    try:
        kit.make(folder, resolve(TARGETS[machine]))
    except TargetError as error:
        if "cannot fetch" not in str(error):
            raise
        pytest.skip(str(error))
    return folder


def have(kits: dict[str, Path], machine: str) -> Path:
    """Return the kit for `machine` out of `kits`, made if it is not there yet."""
    if machine not in kits:
        kits[machine] = make_kit(machine, kits[""] / machine)
    return kits[machine]


@dataclass
class Server:
    """A running server: its process, its port, and what it printed."""

    process: subprocess.Popen[str]
    port: int
    log: Path
    options: tuple[str, ...] = field(default=())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def said(self) -> str:
        return self.log.read_text()

    def sessions(self) -> list[int]:
        """Return the processes that serve clients."""
        return children(self.process.pid)

    def handles(self) -> int:
        """Return how many files the server has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def settled(self) -> None:
        """Wait until no client is served, and the log says how each session ended.

        A session's process is gone a moment before the server writes its line, which takes
        long enough to be seen where the server is emulated.
        """

        def done() -> bool:
            lines = re.findall(r": session (\w+)", self.said())
            return not self.sessions() and len(lines) == 2 * lines.count("begins")

        until(done, "the session to end")


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    with contextlib.suppress(OSError):
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def until(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    """Wait for something that happens soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@contextlib.contextmanager
def running(machine: str, folder: Path, log: Path, *options: str) -> Iterator[Server]:
    """Start the server of the kit in `folder`; end it, and check that nothing is left."""
    command = [*prefix(machine), str(folder / kit.SERVER), "--port", "0", *options]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: "listening on" in log.read_text() or process.poll() is not None, "a server")
        assert process.poll() is None, log.read_text()
        server = Server(process, int(log.read_text().split("\n")[0].split(":")[-1]), log)
        yield server
        left = server.sessions()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)
    until(lambda: not any(map(alive, left)), "sessions to end with their server")


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def tvm_process(module: str, *options: str) -> Iterator[int]:
    """Run one of TVM's own servers; yields its port."""
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port)),
            *("--port-end", str(port + 1), *options),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    try:
        until(answers, f"{module} to start")
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):  # its workers too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(SECONDS)


def hello(key: str = "") -> bytes:
    """Return what a client says first."""
    data = f"client:{key}".encode()
    return struct.pack("<ii", 0xFF271, len(data)) + data


def start(*args: object) -> subprocess.Popen[str]:
    """Start a command of bnncc."""
    return subprocess.Popen(
        [sys.executable, "-m", "bnncc", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def succeeds(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    code = cli.main([str(a) for a in args])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def fails(capsys: pytest.CaptureFixture[str], *args: object, code: int = 1) -> str:
    """Run a command that must fail with one clear line; return that and its hint."""
    assert cli.main([str(a) for a in args]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n(\nhint: [^\n]+\n)?", err), err
    return err
