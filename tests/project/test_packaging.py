"""The wheel holds `bnncc/` alone, complete; and the version is the same everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bnncc

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bnncc", "schedules", "targets", "topi_binary", "tune_logs")


def sources(root: Path) -> set[str]:
    """Return what a wheel must hold, as names inside it."""
    names = set()
    for folder in FOLDERS:
        for where, _, files in os.walk(root / folder):
            inside = Path(where).relative_to(root)
            for name in files:
                if (
                    Path(name).suffix in (".py", ".json", ".cc", ".cuh", ".h", ".css", ".js")
                    or name == "py.typed"
                ):
                    names.add((inside if folder == "bnncc" else "bnncc" / inside) / name)
    return {name.as_posix() for name in names}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy, without the links: the build does not need them."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)

    def ignore(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if n == "__pycache__" or Path(folder, n).is_symlink()]

    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--wheel-dir", "dist", "."], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (copy / "dist").glob("*.whl")
    return path


def test_wheel_holds_bnncc_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"bnncc-{bnncc.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"bnncc", info}
    assert f"{info}/licenses/LICENSE" in names
    expected = sources(ROOT)
    assert "bnncc/topi_binary/__init__.py" in expected
    assert {n for n in names if n.startswith("bnncc/")} == expected


def test_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import bnncc, bnncc.schedules, bnncc.targets, bnncc.topi_binary, importlib.resources;"
        "assert importlib.resources.files('bnncc.tune_logs').is_dir();"
        "print(bnncc.__file__)"
    )
    # -P is too new and -I ignores PYTHONPATH: an empty folder to start in does the same.
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == tmp_path / "bnncc"


def test_xgboost_comes_with_tune_and_test_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"bnncc-{bnncc.__version__}.dist-info/METADATA").decode()
    requirements = [
        tuple(line.removeprefix("Requires-Dist: ").replace('"', "'").split("; extra == "))
        for line in metadata.partition("\n\n")[0].splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    assert any(r[0].startswith("apache-tvm[") for r in requirements if len(r) == 1)
    assert not [r for r in requirements if len(r) == 1 and "meta-schedule" in r[0]]
    assert [r for r in requirements if "xgboost" in r[0]] == [("xgboost", "'tune'")]
    assert [r for r in requirements if "[tune]" in r[0]] == [("bnncc[tune]", "'test'")]
    assert "--editable '.[test]'" in (ROOT / "Makefile").read_text()  # which is `make install`


def test_requirements_resolve_everywhere() -> None:
    # A local version, such as that of a build for CPUs, is on no public index.
    for name in ("Makefile", "pyproject.toml", ".ci/run"):
        assert re.findall(r"[=~]=\s*[\w.]+\+\w+", (ROOT / name).read_text()) == []
    pins = {
        pin
        for name in ("Makefile", "pyproject.toml")
        for pin in re.findall(r"torch==[\w.]+", (ROOT / name).read_text())
    }
    assert len(pins) == 1


def test_page_on_compatibility() -> None:
    from bnncc import agreement, report
    from bnncc.remote import deploy
    from bnncc.runtime import container, runner

    page = (ROOT / "docs/compatibility.md").read_text()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line]
    stable = {row[0]: row[1] for row in rows}
    assert stable["`--json`, `--report`, `Artifact.report`"] == f"format {report.FORMAT}"
    assert report.FORMAT == agreement.FORMAT == deploy.FORMAT
    assert stable["`bench --json`"] == f"format {runner.FORMAT}"
    assert stable["artifacts (`.bnncc`)"] == f"format {container.FORMAT}"
    project = (ROOT / "pyproject.toml").read_text()
    first, last = stable["Python"].split(" to ")
    assert f'requires-python = ">={first}"' in project
    assert re.findall(r'Python :: (3\.\d+)"', project)[-1] == last
    assert f"apache-tvm[popen-pool,rpc]>={stable['Apache TVM'].split(',')[0]}," in project


def test_version_by_command_line() -> None:
    command = [sys.executable, "-m", "bnncc", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert bnncc.__version__ in done.stdout
