"""What the markers of pyproject.toml do: skip the tests that cannot, or need not, run here."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bnncc.codegen import link, measuring
from bnncc.errors import TargetError
from bnncc.targets import gpus
from bnncc.targets import host as this_machine
from bnncc.targets.catalog import resolve
from tests import devices
from tests.devices import DIGITS, MACHINES, Server
from tests.resume import Resumed
from tests.sampling import taken

# Set in `make test-all`, and by --run-slow; tests take more generated cases where it is set.
ALL = "BNNCC_TEST_ALL"
ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--run-slow",
        action="store_true",
        help=f"run slow tests too, with more generated cases (the same as {ALL}=1)",
    )
    parser.addoption(
        "--resume",
        type=Path,
        metavar="FILE",
        help="go on with a run that was stopped: leave out the tests that FILE says have passed",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Shells make commands in the background ignore Ctrl-C, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--run-slow"):
        os.environ[ALL] = "1"
    if path := config.getoption("--resume"):
        config.pluginmanager.register(Resumed(path, not hasattr(config, "workerinput")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    met: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        if not taken(met[test], marker.args[0]):
            item.add_marker("slow")
        met[test] += 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not os.environ.get(ALL):
        pytest.skip("slow: give --run-slow, or make test-all")
    for marker in item.iter_markers("isa"):
        if missing := sorted(set(marker.args) - this_machine.features()):
            pytest.skip(f"this CPU lacks {', '.join(missing)}")
    for marker in item.iter_markers("links"):
        if missing := [t for t in marker.args if not link.available(resolve(t).triple)]:
            pytest.skip(f"needs a linker for {', '.join(missing)} (package lld, or pip's ziglang)")
    if item.get_closest_marker("cuda") and not gpus.here().startswith("sm_"):
        pytest.skip(f"needs an NVIDIA GPU: {gpus.here()}")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what compilations measure out of the user's folder, and what is there out of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # Seconds for each layer that could use tiles, on processors that have them.
        patch.setattr(measuring, "ORDER_SECONDS", 0.0)
        yield


@pytest.fixture
def workplace(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return an empty folder that shows the examples, and an environment that has `bnncc`."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = tmp_path / "programs"
    programs.mkdir()
    commands = {"bnncc": "-m bnncc", "python": "", "tvm-ffi-config": "-m tvm_ffi.config"}
    for name, command in commands.items():
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        script.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return tmp_path, {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the kits that were made, by machine; under `""`, where to make more."""
    return {"": tmp_path_factory.mktemp("kits")}


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, kits: dict[str, Path]) -> str:
    """Return a kind of device, whose kit is there."""
    devices.have(kits, request.param)
    return str(request.param)


@pytest.fixture
def server(machine: str, kits: dict[str, Path], tmp_path: Path) -> Iterator[Server]:
    with devices.running(machine, kits[machine], tmp_path / "log") as server:
        yield server


@pytest.fixture
def host(kits: dict[str, Path], tmp_path: Path) -> Iterator[Server]:
    folder = devices.have(kits, "host")
    with devices.running("host", folder, tmp_path / "log") as server:
        yield server


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the digits network compiled for each machine."""
    return _Digits(tmp_path_factory)


class _Digits(dict[str, Path]):
    """The network, compiled for a machine when it is asked for: not every host can link for all."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def __missing__(self, machine: str) -> Path:
        import bnncc

        path = self._folders.mktemp("digits") / f"{machine}.bnncc"
        try:
            made = bnncc.compile(DIGITS / "digits.onnx", target=devices.TARGETS[machine])
        except TargetError as error:
            pytest.skip(str(error))
        made.save(path)
        self[machine] = path
        return path
