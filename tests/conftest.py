"""What the markers of pyproject.toml do: skip the tests that cannot, or need not, run here."""

from __future__ import annotations

import functools
import os
import shutil

import pytest

from bnncc.targets import host

# Set in `make test-all`, and by --run-slow; tests take more generated cases where it is set.
ALL = "BNNCC_TEST_ALL"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--run-slow",
        action="store_true",
        help=f"run slow tests too, with more generated cases (the same as {ALL}=1)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--run-slow"):
        os.environ[ALL] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not os.environ.get(ALL):
        pytest.skip("slow: give --run-slow, or make test-all")
    for marker in item.iter_markers("isa"):
        if missing := sorted(set(marker.args) - host.features()):
            pytest.skip(f"this CPU lacks {', '.join(missing)}")
    if item.get_closest_marker("cuda") and not _has_cuda():
        pytest.skip("needs an NVIDIA GPU and nvcc")


@functools.cache
def _has_cuda() -> bool:
    if shutil.which("nvcc") is None:
        return False
    import tvm

    return bool(tvm.cuda().exist)
