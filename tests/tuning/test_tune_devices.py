"""Tuning on devices: several behind one tracker, one of which is lost; and the stand-in for Arm."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path

import pytest

import bnncc
from bnncc.console import Console
from bnncc.errors import DeviceError, TuningError
from bnncc.records import database as records
from bnncc.records.workload import Workload
from bnncc.remote.connection import parse_address, summary
from bnncc.targets import catalog
from bnncc.topi_binary.spec import BinaryConv2d, Step
from bnncc.tuning.network import free_devices
from bnncc.tuning.pool import Setup
from bnncc.tuning.trials import Plan
from bnncc.tuning.tuner import Tuner, tasks_of
from tests import devices
from tests.devices import DIGITS, Server, until
from tests.kernel_harness import EMULATED

KERNEL = Workload.of(
    BinaryConv2d(1, 4, 12, 64, 32, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))
)
QUIET = Console(-1)


@contextlib.contextmanager
def cluster(machine: str, kit: Path, folder: Path, count: int):
    """Run servers that a tracker knows; yields how to connect, and the servers."""
    with devices.tvm_process("tvm.exec.rpc_tracker") as port, contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{port}"
        options = ("--tracker", address, "--key", "board")
        servers: list[Server] = [
            stack.enter_context(devices.running(machine, kit, folder / f"log{i}", *options))
            for i in range(count)
        ]
        until(lambda: summary(parse_address(address)).count("board") == count, "all devices")
        yield {"rpc": None, "tracker": address, "key": "board", "timeout": 60.0}, servers


@pytest.mark.slow
def test_a_lost_device_costs_no_trial(kits: dict[str, Path], tmp_path: Path) -> None:
    kit, native = devices.have(kits, "host"), catalog.native()
    with cluster("host", kit, tmp_path, 2) as (device, servers):
        assert free_devices(device) == 2
        with pytest.raises(DeviceError, match="no device with key `phone`"):
            free_devices({**device, "key": "phone"})
        tasks = tasks_of([(KERNEL.spec, 1)], native, 1)
        plan = Plan(trials=16, measurers=2, batch=4, repeat_seconds=0.001)
        tuner = Tuner(tasks, Setup(native, device), tmp_path / "logs", plan, QUIET)
        killer = threading.Thread(target=kill_half_way, args=(servers[0], tmp_path / "logs"))
        killer.start()
        result = tuner.run()
        killer.join()
        assert result.trials == 16
        assert not result.tasks[0].failed
        servers[1].process.send_signal(signal.SIGKILL)
        more = Tuner(tasks, Setup(native, device), tmp_path / "logs", Plan(trials=20), QUIET)
        with pytest.raises(TuningError, match="cannot measure"):
            more.run()
    assert len(records.read(tmp_path / "logs" / native.family).records) >= 16


def kill_half_way(server: Server, folder: Path) -> None:
    """Kill a server, and what serves its clients, when there are some records."""
    until(lambda: any(len(records.read(f).records) > 3 for f in folder.glob("*")), "records", 300)
    sessions = server.sessions()
    server.process.send_signal(signal.SIGKILL)
    for session in sessions:
        with contextlib.suppress(ProcessLookupError):
            os.kill(session, signal.SIGKILL)


@pytest.mark.slow
def test_three_emulated_boards_of_which_one_dies(kits: dict[str, Path], tmp_path: Path) -> None:
    kit, logs = devices.have(kits, "arm64"), tmp_path / "logs"
    with cluster("arm64", kit, tmp_path, 3) as (device, servers):
        killer = threading.Thread(target=kill_half_way, args=(servers[1], logs))
        killer.start()
        process = devices.start(
            *("tune", DIGITS / "digits.onnx", "--target", "arm64", "--trials", 30, "--json"),
            *("--tracker", device["tracker"], "--key", "board", "--tuning-dir", logs),
        )
        out, err = process.communicate(timeout=900)
        killer.join()
        assert process.returncode == 0, err
    result = json.loads(out)
    assert sum(k["trials"] for k in result["kernels"]) == result["trials"] == 30
    assert [kernel["failed"] for kernel in result["kernels"] if kernel["failed"]] == []
    artifact = bnncc.compile(DIGITS / "digits.onnx", target="arm64", tuning_dir=[logs])
    assert artifact.report["summary"]["tuned"] >= 6
    assert not artifact.report["warnings"]


@pytest.mark.parametrize("target", EMULATED[:1])
def test_instructions_stand_in_for_hardware(target: str, tmp_path: Path) -> None:
    machine = catalog.resolve(target)
    tasks = tasks_of([(KERNEL.spec, 1)], machine, 1)
    plan = Plan(trials=2, repeat_seconds=0.001)
    setup = Setup(machine, method="instructions")
    result = Tuner(tasks, setup, tmp_path, plan, QUIET).run()
    assert result.trials == 2
    assert not result.tasks[0].failed
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"{target}.instructions"
    log = records.read(folder)
    counts = [record.seconds * 1e6 for record in log.records]
    assert all(count == pytest.approx(round(count)) and count > 1000 for count in counts)
    assert log.index[0]["measured"] == "instructions"
    found = records.load(machine, [tmp_path], own=False).find(KERNEL.spec, 1)
    assert found is not None
