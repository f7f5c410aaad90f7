"""Hostile files are refused in one clear line, soon, in bounded memory, without leftovers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bnncc
from tests.collection import hostile, hostile_child, oracle

ROOT = Path(__file__).parents[2]
NAMES = [name for name, *_ in hostile._FILES]
REAL = (
    "empty",
    "missing",
    "directory",
    "group_zero",
    "nan_binary",
    "function_doubling",
    "tile_bomb",
)


class Outcome(dict):
    """What the child said of one file, with the `Hostile` it is about as `about`."""

    about: hostile.Hostile


def _children(paths: list[Path], folder: Path) -> dict[str, dict]:
    """Run the helper over `paths`; start it again behind a file that kills it."""
    results: dict[str, dict] = {}
    while paths:
        command = [
            sys.executable,
            "-m",
            "tests.collection.hostile_child",
            str(folder),
            *map(str, paths),
        ]
        limit = 60 + 10 * len(paths)
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
            )
            text, tail, status = done.stdout, done.stderr[-2000:], done.returncode
        except subprocess.TimeoutExpired as stop:
            text = (stop.stdout or b"").decode()
            tail, status = "", f"no answer in {limit} s"
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        results |= {line["file"]: line for line in lines}
        paths = paths[len(lines) :]
        if paths:
            code = f"killed the process ({status}): {tail}"
            results[paths[0].name] = {"code": code, "stdout": "", "stderr": "", "made": []}
            paths = paths[1:]
    return results


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder, out = tmp_path_factory.mktemp("hostile"), tmp_path_factory.mktemp("out")
    found = hostile.hostile_files(folder)
    results = _children([f.path for f in found], out)
    outcomes = {}
    for about in found:
        outcomes[about.path.name] = Outcome(results[about.path.name])
        outcomes[about.path.name].about = about
    return outcomes


def _check_refusal(code: object, stdout: str, stderr: str, name: str) -> None:
    assert code in (1, 2), f"exit {code}\n{stderr}"
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    assert all(line.startswith(("error: ", "hint: ")) for line in lines), stderr
    assert name in errors[0], f"the line does not name the file: {errors[0]}"
    assert "Traceback" not in stderr + stdout
    assert stdout == ""
    assert len(errors[0]) < 500, errors[0]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_file(name: str, outcomes: dict[str, Outcome]) -> None:
    found = outcomes[name]
    about = found.about
    if about.right == "either" and found["code"] == 0:
        model = oracle.load(about.path)
        feeds = {k: np.asarray(v) for k, v in oracle.tie_free_feeds(model).items()}
        made = about.path.parent / "made.bnncc"
        artifact = bnncc.compile(str(about.path), target="native")
        artifact.save(str(made))
        verdict = oracle.compare(model, feeds, bnncc.Artifact.load(str(made)).run(feeds))
        assert verdict.right, f"accepted, but {verdict.kind}: {verdict.text}"
        return
    _check_refusal(found["code"], found["stdout"], found["stderr"], name)
    assert found["made"] == [], "something half-written was left behind"
    assert found["seconds"] < hostile_child.SECONDS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stem", REAL)
def test_command_line(stem: str, tmp_path: Path) -> None:
    path = next(f.path for f in hostile.hostile_files(tmp_path) if f.path.stem == stem)
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "bnncc", "compile", str(path), "-o", str(out / "made.bnncc")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    _check_refusal(done.returncode, done.stdout, done.stderr, path.name)
    assert list(out.iterdir()) == []
