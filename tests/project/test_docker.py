"""The images of examples/docker: what their recipes name is there, and the server answers."""

from __future__ import annotations

import http.client
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.project.test_packaging import FOLDERS, ROOT
from tests.tiny import expected, tiny

DOCKER = ROOT / "examples" / "docker"
RECIPES = sorted(DOCKER.glob("*.Dockerfile"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start the server as its image does: without TVM's compiler."""
    tiny().save(tmp_path / "model.bnncc")
    process = subprocess.Popen(
        [sys.executable, str(DOCKER / "serve.py"), "model.bnncc", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TVM_USE_RUNTIME_LIB": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline().split()[-1])
    finally:
        process.kill()
        process.communicate()


def test_server_answers(server: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server

    def ask(method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        there = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        there.request(method, path, body)
        answer = there.getresponse()
        return answer.status, answer.read()

    def npz(**arrays: np.ndarray) -> bytes:
        body = io.BytesIO()
        np.savez(body, **arrays)
        return body.getvalue()

    assert ask("GET", "/health") == (200, b"ok\n")
    assert ask("GET", "/")[0] == 404
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    inputs = {"x/in:0": x, "y": -x}
    code, body = ask("POST", "/", npz(**inputs, labels=np.zeros(3)))
    assert code == 200
    with np.load(io.BytesIO(body)) as outputs:
        assert set(outputs) == {"product", "sum"}
        for name, value in expected(x, -x).items():
            np.testing.assert_array_equal(outputs[name], value)
    for wrong in (b"", b"no archive", npz(**inputs)[:-30], npz(y=np.array([{}], dtype=object))):
        code, said = ask("POST", "/", wrong)
        assert code == 400
        assert said.startswith(b"expected an .npz file of the inputs: ")
    code, said = ask("POST", "/", npz(y=inputs["y"]))
    assert code == 400
    assert b"x/in:0" in said
    there = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    there.putrequest("POST", "/")
    there.putheader("Content-Length", str(1 << 40))
    there.endheaders()
    assert there.getresponse().status == 413
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.name)
def test_recipes_hold(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    sources = {name for line in copied for name in line.split()} - {"${MODEL}"}
    assert sources
    assert not [name for name in sources if not (ROOT / name).exists()]
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"--from=(\S+)", text)) <= stages
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) - {"bnncc"}
    assert len(bases) == 1  # an environment is copied between stages: both need the same Python
    version = re.fullmatch(r"python:(3\.\d+)-slim", bases.pop())
    assert version is not None
    assert f'Python :: {version[1]}"' in (ROOT / "pyproject.toml").read_text()
    last = text[text.rindex("\nFROM ") :]
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["1000:1000"]
    assert f"examples/docker/{recipe.name}" in (ROOT / "docs" / "docker.md").read_text()


def test_the_compiler_is_installed_from_what_a_wheel_needs() -> None:
    text = (DOCKER / "compile.Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    files = {"pyproject.toml", "README.md", "LICENSE", "NOTICE"}
    assert {name for line in copied for name in line.split()} == {*FOLDERS, *files}


@pytest.mark.slow
def test_images_build() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode:
        pytest.skip("no docker, or its daemon is not running")
    for recipe, options in (
        ("compile", ("-t", "bnncc")),
        ("serve", ("-t", "bnncc-digits", "--build-arg", "MODEL=examples/digits/digits.onnx")),
    ):
        command = [docker, "build", "-f", f"examples/docker/{recipe}.Dockerfile", *options, "."]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
