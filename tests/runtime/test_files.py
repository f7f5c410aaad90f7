"""Folders for temporary files do not stay behind, however their process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bnncc.files import scratch_folder

HOLD = """
import sys, time
from bnncc.files import scratch_folder
with scratch_folder("test") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        (held / "large.o").write_bytes(bytes(1000))
        with scratch_folder("other"):
            assert held.is_dir()  # its process lives
        process.send_signal(signal.SIGKILL)
    assert held.is_dir()
    with scratch_folder("other") as mine:
        assert not held.exists()
        assert Path(mine).is_dir()
    assert not list(tmp_path.iterdir())


def test_folders_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "bnncc-notes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "bnncc.lock").touch()
    (tmp_path / "bnncc-link").symlink_to(tmp_path / "elsewhere")
    with scratch_folder("mine"), scratch_folder("mine"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bnncc-link", "bnncc-notes", "elsewhere"]
