"""Serve a compiled network over HTTP: `serve.py MODEL.bnncc PORT`.

POST the inputs as an .npz file; the answer is an .npz file of the outputs. GET /health says `ok`.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

import bnncc

LARGEST = 64 << 20
"""Bytes of a request; larger ones are refused."""


class Handler(BaseHTTPRequestHandler):
    """Answers requests; `artifact` and `workers` are set by `main`."""

    artifact: bnncc.Artifact
    workers: ThreadPoolExecutor
    timeout = 60

    def do_GET(self) -> None:
        """Say that the server is up."""
        if self.path == "/health":
            return self._answer(200, b"ok\n")
        return self._answer(404, b"POST an .npz file to /\n")

    def do_POST(self) -> None:
        """Run the network."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST:
            self.close_connection = True
            return self._answer(413, f"expected at most {LARGEST} bytes, with a length\n".encode())
        try:
            with np.load(io.BytesIO(self.rfile.read(int(length)))) as file:
                # As `bnncc run`: test sets have labels beside the images.
                inputs = {t.name: file[t.name] for t in self.artifact.inputs if t.name in file}
        except Exception as error:  # anything can be sent
            return self._answer(400, f"expected an .npz file of the inputs: {error}\n".encode())
        try:
            outputs = self.workers.submit(self.artifact.run, inputs).result()
        except bnncc.BnnccError as error:
            return self._answer(400, f"{error}\n".encode())
        body = io.BytesIO()
        np.savez(body, **outputs)
        return self._answer(200, body.getvalue(), "application/octet-stream")

    def _answer(self, code: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(path: str, port: str) -> None:
    """Serve until SIGTERM, with one request at a time on each CPU."""
    artifact = Handler.artifact = bnncc.Artifact.load(path)
    Handler.workers = ThreadPoolExecutor(
        len(os.sched_getaffinity(0)), initializer=lambda: artifact.session(threads=1)
    )
    # By default, the first process of a container ignores the signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    server = ThreadingHTTPServer(("", int(port)), Handler)
    server.daemon_threads = True
    print(f"serving {path} on port {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
