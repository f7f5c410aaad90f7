"""A long run of tests goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume import Resumed

TESTS = """\
import pathlib

def test_one():
    count("one")

def test_two():
    count("two")
    assert pathlib.Path("repaired").exists()

def count(name):
    with open("ran", "a") as file:
        file.write(name + " ")
"""


def run(folder: Path, code: str) -> tuple[int, str]:
    """Run the tests; return the exit status, and which of them ran."""
    (folder / "ran").write_text("")
    arguments = [str(folder / "test_some.py"), "-q", "-p", "no:cacheprovider", "--noconftest"]
    resumed = Resumed(folder / "passed", True, code)
    status = pytest.main([*arguments, f"--rootdir={folder}"], plugins=[resumed])
    return int(status), (folder / "ran").read_text().strip()


def test_what_passed_is_left_out_until_nothing_fails_or_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, "code") == (1, "one two")
    assert run(tmp_path, "code") == (1, "two")
    assert run(tmp_path, "other") == (1, "one two")
    (tmp_path / "repaired").touch()
    assert run(tmp_path, "other") == (0, "two")
    assert run(tmp_path, "other") == (0, "one two")
