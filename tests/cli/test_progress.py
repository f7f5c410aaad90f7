"""Phases: a bar on a terminal, nothing in a pipe, lines where verbose, records for Python."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import onnx
import pytest

import bnncc
from bnncc import console
from bnncc.cli import main as cli
from bnncc.progress import SHARES, phase
from tests.cli.test_cli import ENVIRONMENT
from tests.devices import DIGITS
from tests.tiny import tiny

MODEL = str(DIGITS / "digits.onnx")


def on_a_terminal(*args: str, columns: int = 80, **environment: str) -> str:
    """Return what a command writes to a terminal so wide."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "bnncc", *args],
        env={**ENVIRONMENT, "TERM": "xterm", **environment},
        stdout=subprocess.DEVNULL,
        stderr=follower,
    )
    os.close(follower)
    said = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # Linux says so when the other end is closed
            break
        if not piece:
            break
        said += piece
    os.close(leader)
    assert process.wait() == 0
    return said.decode()


def test_bar(tmp_path: Path) -> None:
    said = on_a_terminal("compile", MODEL, "-o", str(tmp_path / "a"), columns=24)
    shown = [part for part in said.split("\r\x1b[K") if part]
    assert len(shown) > 5
    *bars, last = shown
    full = []
    for bar in bars:
        assert len(bar) <= 23
        found = re.match(r"\[(#*)(\.*)\]", bar)
        assert found is not None
        assert len(found[1] + found[2]) == 20
        full.append(len(found[1]))
    assert full == sorted(full)
    assert full[-1] >= 18
    assert last.startswith(f"{tmp_path}/a: ")  # over the bar, which is gone
    assert "#" not in last
    small = str(tmp_path / "small.onnx")
    text = '<ir_version: 9, opset_import: ["": 17]> g (float[3] x) => (float[3] y) {y = Sign(x)}'
    onnx.save(onnx.parser.parse_model(text), small)
    assert "[#" not in on_a_terminal("compile", small, "-o", str(tmp_path / "a"), TERM="dumb")
    assert on_a_terminal("compile", small, "-q", "-o", str(tmp_path / "a")) == ""


def test_no_bar_in_a_pipe_and_lines_where_verbose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = str(tmp_path / "a")
    assert cli.main(["compile", MODEL, "-o", made]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "\r" not in err
    assert cli.main(["-v", "compile", MODEL, "-o", made]) == 0
    err = capsys.readouterr().err
    assert re.search(r"^build: \d+\.\d\d s$", err, re.MULTILINE)
    assert re.search(r"^link: \d+\.\d\d s$", err, re.MULTILINE)
    assert cli.main(["-v", "verify", MODEL, made]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^layers: \d+\.\d\d s$", err, re.MULTILINE)
    assert " s\n" not in out


def test_phases_of_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny().save(tmp_path / "a")
    np.savez(tmp_path / "i.npz", **{"x/in:0": np.zeros((1, 8), "f"), "y": np.zeros((1, 8), "f")})
    files = ("--input", str(tmp_path / "i.npz"), "--output", str(tmp_path / "o.npz"))
    monkeypatch.setattr(console, "_WORTH_SAYING", 0)
    assert cli.main(["run", "-v", str(tmp_path / "a"), *files]) == 0
    said = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert said[:-1] == [*SHARES["run"]]


def test_python_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "bnncc"):
        bnncc.compile(MODEL, threads=1)
    assert {record.name for record in caplog.records} == {"bnncc"}
    names = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert [n for n in names if n in SHARES[""]][-4:] == ["schedule", "build", "link", "self-check"]
    with (
        caplog.at_level(logging.INFO, "bnncc"),
        pytest.raises(ValueError, match="x"),
        phase("broken"),
    ):
        raise ValueError("x")
    assert caplog.records[-1].getMessage().startswith("broken: 0.0")


def test_shares_are_of_a_whole() -> None:
    assert {verb: sum(shares.values()) for verb, shares in SHARES.items()} == dict.fromkeys(
        SHARES, 100
    )
