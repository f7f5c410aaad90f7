"""Devices and clients that are missing, strange, silent, busy or killed: one clear line each."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bnncc.errors import DeviceError
from bnncc.remote import network as remote
from bnncc.runtime.artifact import Artifact
from tests import devices
from tests.devices import (
    ENVIRONMENT,
    SECONDS,
    Server,
    children,
    fails,
    hello,
    succeeds,
    until,
)


def test_nobody_there(digits: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    port = devices.free_port()
    message = fails(capsys, "deploy", digits["host"], "--rpc", f"127.0.0.1:{port}")
    assert "no device answers" in message
    assert "rpc_server" in message
    where = ("--tracker", f"127.0.0.1:{port}", "--key", "k")
    assert "no tracker answers" in fails(capsys, "deploy", digits["host"], *where)
    message = fails(capsys, "deploy", digits["host"], "--rpc", "no-such-host.invalid:1")
    assert "no-such-host.invalid:1: " in message


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x71\xf2\x0f\x00"])
def test_strangers(
    answer: bytes, digits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                sock, _ = listener.accept()
                with sock:
                    sock.recv(4)
                    sock.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert "not a TVM RPC server" in fails(capsys, "deploy", digits["host"], "--rpc", address)
        where = ("--tracker", address, "--key", "k")
        assert "is not a TVM RPC tracker" in fails(capsys, "deploy", digits["host"], *where)


def test_a_silent_device_is_given_up(
    digits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            sock, _ = listener.accept()
            sock.recv(8 + len("client:"))
            sock.sendall(b"\x71\xf2\x0f\x00" + b"\x07\0\0\0server:")
            while sock.recv(1 << 16):
                pass

        threading.Thread(target=serve, daemon=True).start()
        where = ("--rpc", f"127.0.0.1:{port}", "--timeout", 1)
        message = fails(capsys, "deploy", digits["host"], *where)
        assert "lost the device" in message
        assert "it did not respond for 1 s" in message


@pytest.mark.sampled(2)
def test_two_clients_at_once(
    machine: str, server: Server, digits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with remote.connect(server.address) as device:
        artifact = Artifact.load(digits[machine], check_host=False).on_device(device)
        given, wanted = artifact.selfcheck_arrays()
        for _ in range(3):
            message = fails(capsys, "deploy", digits[machine], "--rpc", server.address)
            assert "the device is busy" in message
            assert "with a client at 127.0.0.1" in message
            made = artifact.run(given)
            np.testing.assert_allclose(made["logits"], wanted["logits"], rtol=1e-4, atol=1e-4)
    server.settled()
    assert "PASS" in succeeds(capsys, "deploy", digits[machine], "--rpc", server.address)


@pytest.mark.sampled(2)
def test_killing_the_client_in_mid_upload(
    machine: str, server: Server, digits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.handles()
    program = (
        "import sys; from bnncc.remote import network as remote\n"
        "device = remote.connect(sys.argv[1])\n"
        "print('connected', flush=True)\n"
        "device.load(bytes(100 << 20))\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", program, server.address],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdout.readline() == "connected\n"
    (session,) = server.sessions()
    started = memory(session)
    until(lambda: memory(session) > started + (20 << 20), "some of the upload to arrive")
    relays = children(client.pid)
    client.kill()
    client.wait(SECONDS)
    client.stdout.close()
    server.settled()
    until(lambda: not any(map(devices.alive, relays)), "the relay to end")
    assert "session lost its client" in server.said()
    assert "PASS" in succeeds(capsys, "deploy", digits[machine], "--rpc", server.address)
    server.settled()
    until(lambda: server.handles() == before, "the server to close what it opened")


def memory(pid: int) -> int:
    """Return how many bytes a process has had in memory at most."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


@pytest.mark.sampled(2)
def test_killing_the_server_in_mid_run(
    machine: str, kits: dict[str, Path], digits: dict[str, Path], tmp_path: Path
) -> None:
    with devices.running(machine, kits[machine], tmp_path / "log") as server:
        args = ("bench", digits[machine], "--rpc", server.address, "--repeat", 10**8)
        client = devices.start(*args)
        until(lambda: len(server.sessions()) == 1, "the session to begin")
        (session,) = server.sessions()
        until(lambda: busy_seconds(session) > 1, "the network to run")
        server.process.kill()
        out, err = client.communicate(timeout=SECONDS)
        assert client.returncode == 1
        assert out == ""
        assert "lost the device while timing the network: " in err
        assert "Traceback" not in err
        until(lambda: not devices.alive(session), "the session to end with its server")


def busy_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.sampled(3)
def test_a_session_that_crashes_says_how(
    machine: str, server: Server, digits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("bench", digits[machine], "--rpc", server.address, "--repeat", 10**8)
    client = devices.start(*args)
    until(lambda: len(server.sessions()) == 1, "the session to begin")
    (session,) = server.sessions()
    until(lambda: busy_seconds(session) > 1, "the network to run")
    os.kill(session, signal.SIGKILL)
    _, err = client.communicate(timeout=SECONDS)
    assert client.returncode == 1
    assert "the session crashed: Killed, while timing the network" in err
    assert "PASS" in succeeds(capsys, "deploy", digits[machine], "--rpc", server.address)


def test_interrupted_client_frees_the_device(
    host: Server, digits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    client = devices.start("bench", digits["host"], "--rpc", host.address, "--repeat", 10**8)
    until(lambda: len(host.sessions()) == 1, "the session to begin")
    (session,) = host.sessions()
    until(lambda: busy_seconds(session) > 1, "the network to run")
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=SECONDS)
    assert client.returncode == 130
    host.settled()
    assert "PASS" in succeeds(capsys, "deploy", digits["host"], "--rpc", host.address)


def test_silent_clients_do_not_hold_the_device(
    kits: dict[str, Path],
    digits: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = devices.have(kits, "host")
    with devices.running("host", folder, tmp_path / "log", "--timeout", "1") as server:
        deploy = ("deploy", digits["host"], "--rpc", server.address)
        where = ("127.0.0.1", server.port)
        strangers = [socket.create_connection(where) for _ in range(5)]  # have said nothing yet
        strangers[0].sendall(b"\x71\xf2")
        strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[2].sendall(b"\x71\xf2\x0f\x00\xff\xff\xff\x7f")
        assert "PASS" in succeeds(capsys, *deploy)
        holder = socket.create_connection(where)
        server.settled()
        holder.sendall(hello() + (1 << 20).to_bytes(8, "little") + bytes(1000))
        until(lambda: len(server.sessions()) == 1, "the session to begin")
        server.settled()
        assert "PASS" in succeeds(capsys, *deploy)
        for sock in (*strangers, holder):
            sock.close()


def test_random_bytes_leave_the_server_usable(
    host: Server, digits: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    before = host.handles()
    for _ in range(20):
        host.settled()
        with socket.create_connection(("127.0.0.1", host.port)) as sock:
            sock.sendall(hello())
            size = int(rng.integers(1, 300))
            sock.sendall(size.to_bytes(8, "little") + rng.bytes(size))
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(SECONDS)
            while sock.recv(1 << 16):
                pass
    host.settled()
    assert "PASS" in succeeds(capsys, "deploy", digits["host"], "--rpc", host.address)
    host.settled()
    until(lambda: host.handles() == before, "the server to close what it opened")


@pytest.mark.sampled(2)
def test_many_deployments(
    machine: str, server: Server, digits: dict[str, Path], tmp_path: Path
) -> None:
    artifact = Artifact.load(digits[machine], check_host=False)
    given, wanted = artifact.selfcheck_arrays()
    before = server.handles()
    ours = []
    count = 100 if os.environ.get("BNNCC_TEST_ALL") else 20
    for _ in range(count):
        with remote.connect(server.address) as device:
            made = artifact.on_device(device).run(given)
        np.testing.assert_allclose(made["logits"], wanted["logits"], rtol=1e-4, atol=1e-4)
        gc.collect()
        ours.append((len(os.listdir("/proc/self/fd")), len(children(os.getpid()))))
    server.settled()
    until(lambda: server.handles() == before, "the server to close what it opened")
    assert ours[-1] <= max(ours[:10])
    assert server.said().count("session ended") + server.said().count("lost its client") == count
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log"]


def test_the_server_ends_when_told(
    machine: str, kits: dict[str, Path], tmp_path: Path
) -> None:  # fmt: skip
    with devices.running(machine, kits[machine], tmp_path / "log") as server:
        device = remote.connect(server.address)
        (session,) = server.sessions()
        server.process.terminate()
        assert server.process.wait(SECONDS) == 0
        until(lambda: not devices.alive(session), "the session to end")
        with pytest.raises(DeviceError, match="lost the device"):
            device.set_threads(1)
        device.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "x"), "--port takes a number"),
        (("--port", "70000"), "--port takes a number from 0 to 65535"),
        (("--tracker", "h:1"), "--tracker needs --key"),
        (("--tracker", "h", "--key", "k"), "--tracker takes HOST:PORT"),
        (("--key", "a b"), "--key takes letters"),
        (("surplus",), "unknown argument `surplus`"),
    ],
)
def test_server_usage(options: tuple[str, ...], message: str, kits: dict[str, Path]) -> None:
    program = devices.have(kits, "host") / "rpc_server"
    done = subprocess.run([str(program), *options], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 2
    assert message in done.stderr
    assert "usage: rpc_server" in done.stderr


def test_a_taken_port_is_one_line(host: Server, kits: dict[str, Path]) -> None:
    command = [str(kits["host"] / "rpc_server"), "--port", str(host.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{host.port}: Address already in use" in done.stderr
