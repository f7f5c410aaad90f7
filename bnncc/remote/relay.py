"""Pass bytes between TVM's RPC client and a device: a process that notices when the device is lost.

TVM's client waits forever, and with Python's lock held where it frees remote objects; so no thread
of its own process could look after it. This file is run by its path and needs Python alone:
``relay.py DEVICE_FD LISTENER_FD REASON_FD SECONDS``, with the key on standard input.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time

MAGIC = 0xFF271
CONNECT_SECONDS = 10.0

_CHUNK = 1 << 20


def greeting(key: str) -> bytes:
    """Return what a client of TVM's RPC says first."""
    data = f"client:{key}".encode()
    return struct.pack("<ii", MAGIC, len(data)) + data


def receive(sock: socket.socket, size: int) -> bytes:
    """Read `size` bytes.

    Raises
    ------
    ConnectionError
        If the other side ends before.
    """
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("connection closed")
        data += part
    return data


class Relay:
    """Two connected sockets.

    Parameters
    ----------
    client, device : socket
        TVM's client, and the device; both greeted.
    silence : float
        Seconds without a byte from the device, while it owes an answer, after which it is lost.
    """

    def __init__(self, client: socket.socket, device: socket.socket, silence: float) -> None:
        self._client, self._device = client, device
        self._silence = silence
        self._heard = self._spoke = time.monotonic()
        self._client_gone = False

    def forward(self) -> None:
        """Pass on what the client says, until it has gone; what a lost device misses is dropped."""
        device_there = True
        with contextlib.suppress(OSError):
            while data := self._client.recv(_CHUNK):
                self._spoke = time.monotonic()
                if device_there:
                    try:
                        self._device.sendall(data)
                    except OSError:  # `back` finds out why
                        device_there = False
                        _shut(self._device)
        self._client_gone = True
        _shut(self._device)

    def back(self, reason_to: int) -> None:
        """Pass on what the device says, until it is lost; then write how to `reason_to`."""
        if sys.platform == "win32":
            return  # `connect` refuses
        poll = select.poll()
        poll.register(self._device, select.POLLIN)
        reason = ""
        try:
            while not reason:
                if poll.poll(500):
                    data = self._device.recv(_CHUNK)
                    self._heard = time.monotonic()
                    if data:
                        self._client.sendall(data)
                    else:
                        reason = "it closed the connection"
                elif self._heard < self._spoke < time.monotonic() - self._silence:
                    reason = f"it did not respond for {self._silence:g} s"
        except OSError as error:
            reason = error.strerror or str(error)
        if not self._client_gone:
            os.write(reason_to, reason.encode())
        _shut(self._device)
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_WR)  # TVM sees the end, and may say good-bye


def accept(listener: socket.socket, key: str) -> socket.socket | None:
    """Return the connection of the client that knows `key`, greeted as a server would."""
    listener.settimeout(CONNECT_SECONDS)
    wanted = greeting(key)
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return None
        try:
            sock.settimeout(CONNECT_SECONDS)
            if receive(sock, len(wanted)) == wanted:
                answer = b"server:bnncc"
                sock.sendall(struct.pack("<ii", MAGIC, len(answer)) + answer)
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
        except OSError:
            pass
        sock.close()


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Run until the client has gone."""
    device_fd, listener_fd, reason_fd = map(int, sys.argv[1:4])
    device, listener = socket.socket(fileno=device_fd), socket.socket(fileno=listener_fd)
    device.settimeout(None)
    with device, listener:
        client = accept(listener, sys.stdin.readline().strip())
        if client is None:
            return
        with client:
            relay = Relay(client, device, float(sys.argv[4]))
            back = threading.Thread(target=relay.back, args=(reason_fd,))
            back.start()
            relay.forward()
            back.join()


if __name__ == "__main__":
    main()
