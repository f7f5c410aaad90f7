"""Connections to devices with time limits, which TVM's own RPC client lacks.

A session is agreed on with the device here; then TVM's client connects to a `Link`, which passes
bytes on. So a device that is missing, busy, silent or lost is noticed, and the call that waits for
it ends with an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bnncc import osutil
from bnncc.errors import DeviceError, UsageError
from bnncc.remote import relay
from bnncc.remote.relay import CONNECT_SECONDS, MAGIC, greeting, receive

_BUSY, _MISMATCH = MAGIC + 1, MAGIC + 2
_TRACKER_MAGIC = 0x2F271
_TRACKER_REQUEST, _TRACKER_SUMMARY = 4, 6
_MAX_TEXT = 1 << 20
_BUSY_SECONDS = 2.0  # of asking again


@dataclass(frozen=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``HOST:PORT``.

    Parameters
    ----------
    text : str
        An IPv6 address is written in brackets.

    Raises
    ------
    UsageError
        If it is something else.

    Examples
    --------
    >>> parse_address("pi4.local:9090"), parse_address("[::1]:9090").host
    (Address(host='pi4.local', port=9090), '::1')
    """
    if not isinstance(text, str):
        raise UsageError(f"the address is of type {type(text).__name__}, expected HOST:PORT")
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"`{text}` is not HOST:PORT")
    return Address(host, int(port))


def request(tracker: Address, key: str, seconds: float) -> tuple[Address, str]:
    """Ask a TVM RPC tracker for a device.

    Parameters
    ----------
    tracker : Address
        Where it listens.
    key : str
        Kind of device.
    seconds : float
        How long to wait while all of that kind are busy.

    Returns
    -------
    address : Address
        Of the device.
    key : str
        What to tell it.

    Raises
    ------
    DeviceError
        If there is no such tracker, it knows no such device, or none becomes free.
    """
    with _tracker(tracker) as (sock, found):
        keys = sorted(set(found))
        if key not in keys:
            raise DeviceError(
                f"tracker {tracker} has no device with key `{key}`",
                hint=f"it has: {', '.join(keys) or 'none'}",
            )
        sock.settimeout(seconds)
        try:
            status, (host, port, match) = _ask(sock, [_TRACKER_REQUEST, key, "", 1])
        except TimeoutError as error:
            raise DeviceError(
                f"tracker {tracker}: every device with key `{key}` was busy for {seconds:g} s",
                hint="try again later, or wait longer with --timeout",
            ) from error
        except (OSError, ValueError, TypeError, struct.error) as error:
            raise DeviceError(f"tracker {tracker}: the connection was lost: {error}") from error
        if status != 0:
            raise DeviceError(f"tracker {tracker}: refused a device with key `{key}`")
        return Address(str(host), int(port)), str(match)


def summary(tracker: Address) -> list[str]:
    """Return the keys of the devices that a TVM RPC tracker knows, one for each device."""
    with _tracker(tracker) as (_, keys):
        return keys


@contextlib.contextmanager
def _tracker(tracker: Address) -> Iterator[tuple[socket.socket, list[str]]]:
    """Connect to a tracker, and ask for the keys of its devices."""
    stranger = DeviceError(f"{tracker}: is not a TVM RPC tracker", hint="use --rpc for a device")
    with _connected(tracker, "tracker", "start it: python -m tvm.exec.rpc_tracker") as sock:
        try:
            sock.sendall(struct.pack("<i", _TRACKER_MAGIC))
            if struct.unpack("<i", receive(sock, 4)) != (_TRACKER_MAGIC,):
                raise stranger
            servers = _ask(sock, [_TRACKER_SUMMARY])[1]["server_info"]
            keys = [str(s["key"]).removeprefix("server:") for s in servers]
        except (OSError, ValueError, LookupError, TypeError, struct.error) as error:
            raise stranger from error
        yield sock, keys


def _ask(sock: socket.socket, question: Any) -> Any:
    data = json.dumps(question).encode()
    sock.sendall(struct.pack("<i", len(data)) + data)
    return json.loads(_receive_text(sock))


def _connected(address: Address, what: str, hint: str) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS)
    except socket.gaierror as error:
        raise DeviceError(f"{address}: unknown host name") from error
    except ConnectionRefusedError as error:
        raise DeviceError(f"{address}: no {what} answers", hint=hint) from error
    except TimeoutError as error:
        raise DeviceError(f"{address}: no answer for {CONNECT_SECONDS:g} s", hint=hint) from error
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DeviceError(f"{address}: cannot connect: {reason}", hint=hint) from error


def _receive_text(sock: socket.socket) -> str:
    (size,) = struct.unpack("<i", receive(sock, 4))
    if not 0 <= size <= _MAX_TEXT:
        raise ValueError(f"a text of {size} bytes")
    return receive(sock, size).decode("utf-8", "replace")


def open_session(address: Address, key: str, *, from_tracker: bool = False) -> socket.socket:
    """Connect to a device and agree on a session.

    Parameters
    ----------
    address : Address
        Of the device.
    key : str
        What its server was started with, or what the tracker said.
    from_tracker : bool
        Whether the latter; for messages.

    Returns
    -------
    socket
        On which TVM's protocol goes on.

    Raises
    ------
    DeviceError
        If the device is missing or busy, or is something else.
    """
    hint = (
        "start the kit's server on the device: rpc_server --port N; it accepts connections from "
        "other machines only with --host"
    )
    until = time.monotonic() + _BUSY_SECONDS
    while True:
        sock, code, text = _greeted(address, key, hint)
        if code != _BUSY or time.monotonic() > until:
            break
        sock.close()  # whoever has just hung up may still be cleared away
        time.sleep(0.1)
    if code == MAGIC and text.startswith("server:"):
        _keep_alive(sock)
        return sock
    sock.close()
    if code == _BUSY:
        raise DeviceError(f"{address}: the device is busy {text}", hint="try again later")
    if code == _MISMATCH and from_tracker:
        raise DeviceError(
            f"{address}: the device no longer accepts this connection", hint="try again"
        )
    if code == _MISMATCH:
        raise DeviceError(
            f"{address}: the device does not take clients with key `{key}`",
            hint="if it belongs to a tracker, give --tracker HOST:PORT --key K; if its server was "
            "started with a key, give the same with --key",
        )
    raise DeviceError(f"{address}: is not a TVM RPC server")


def _greeted(address: Address, key: str, hint: str) -> tuple[socket.socket, int, str]:
    """Connect and say hello; return what the device answers, a number and a text."""
    sock = _connected(address, "device", hint)
    try:
        sock.sendall(greeting(key))
        (code,) = struct.unpack("<i", receive(sock, 4))
        text = ""
        if code in (MAGIC, _BUSY):
            with contextlib.suppress(OSError, ValueError):
                text = _receive_text(sock)
    except TimeoutError as error:
        sock.close()
        raise DeviceError(
            f"{address}: no answer for {CONNECT_SECONDS:g} s: it serves another client, or is not "
            "a device",
            hint="try again later",
        ) from error
    except OSError as error:
        sock.close()
        raise DeviceError(f"{address}: closed the connection: not a TVM RPC server") from error
    return sock, code, text


def _keep_alive(sock: socket.socket) -> None:
    """Notice within half a minute that the other machine or the connection is lost."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30000,
    }  # fmt: skip
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Link:
    """A session's connection, with a process in between that notices when the device is lost.

    Parameters
    ----------
    device : socket
        From `open_session`; handed over.
    silence : float
        Seconds without a byte from the device, while it owes an answer, after which it is lost.

    Attributes
    ----------
    port : int
        Where TVM's client connects to on 127.0.0.1.
    key : str
        What it must show there: no other process of this machine gets the session.
    """

    def __init__(self, device: socket.socket, silence: float) -> None:
        self.key = secrets.token_hex(16)
        self._reason, ours = os.pipe()
        if sys.platform != "win32":  # where `connect` refuses
            os.set_blocking(self._reason, False)
        with device, socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
            handles = (device.fileno(), listener.fileno(), ours)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", relay.__file__, *map(str, handles), str(silence)],
                pass_fds=handles,
                stdin=subprocess.PIPE,
                **osutil.DETACHED,  # Ctrl-C is for us; it ends when we close or die
            )
        os.close(ours)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            stdin.write(f"{self.key}\n".encode())
        self._lost = ""
        self._end = weakref.finalize(self, _end, self._process, self._reason)

    @property
    def lost(self) -> str:
        """How the device was lost; empty while it is connected."""
        if self._end.alive and not self._lost:
            with contextlib.suppress(BlockingIOError):
                self._lost = os.read(self._reason, 1024).decode()
        return self._lost

    def close(self) -> None:
        """End the session; a running call fails."""
        _ = self.lost
        self._end()


def _end(process: subprocess.Popen[bytes], reason: int) -> None:
    process.kill()
    process.wait()
    os.close(reason)
