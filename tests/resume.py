"""``--resume=FILE``: a long run of tests that is stopped goes on where it was.

The file has a digest of the code, then a test that passed on each line. Where the code is another,
or nothing failed, the next run starts from the beginning.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("bnncc", "schedules", "targets", "topi_binary", "tune_logs", "tests", "examples")


def digest() -> str:
    """Return a digest of all code that tests depend on."""
    made = hashlib.sha256()
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            made.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return made.hexdigest()[:16]


class Resumed:
    """Leaves out what passed before, and writes down what passes.

    Parameters
    ----------
    path : Path
        The file.
    writes : bool
        Whether this process has all reports; one that only runs some of the tests has not.
    code : str, optional
        `digest()`, if somebody knows it.
    """

    def __init__(self, path: Path, writes: bool, code: str = "") -> None:
        self._path, self._writes = path, writes
        first, *rest = path.read_text().splitlines() if path.exists() else [""]
        code = code or digest()
        self._done = set(rest) if first == code else set()
        self._failed: set[str] = set()
        if writes and first != code:
            path.write_text(f"{code}\n")

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left = [item for item in items if item.nodeid not in self._done]
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid in self._done])
        items[:] = left

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        # With its last phase a test is over.
        elif self._writes and report.when == "teardown" and report.nodeid not in self._failed:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self._writes and exitstatus == 0:
            self._path.unlink(missing_ok=True)
