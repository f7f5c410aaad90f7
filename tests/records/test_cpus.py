"""Records of another CPU: `native` tries them, targets with a name use them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bnncc import schedules
from bnncc.cli import main as cli
from bnncc.records import database as records
from bnncc.records.workload import Workload
from bnncc.targets import catalog, host
from bnncc.topi_binary.spec import BinaryConv2d, Step
from bnncc.tuning.search import Search
from bnncc.tuning.task import Task, key_of

KERNEL = Workload.of(
    BinaryConv2d(1, 8, 8, 64, 32, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))
)
NATIVE = catalog.native()
ZEN, XEON = "AuthenticAMD-26-2-1", "GenuineIntel-6-207-2"


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let this machine be one of `ZEN`."""
    monkeypatch.setattr(host, "identity", lambda: ZEN)
    return monkeypatch


def task() -> Task:
    return Task(KERNEL, 1, schedules.space_of(KERNEL.kernel, NATIVE))


def put(folder: Path, cpu: str, number: int, session: str | None = None) -> dict[str, int]:
    """Record point `number` of the kernel's space as measured on `cpu`; return the point."""
    own, search = task(), Search(NATIVE, cpu=cpu)
    point = own.all[number]
    with records.Writer(folder / NATIVE.family) as writer:
        if session is not None:
            writer.note({"session": "now", **({"cpu": session} if session else {})})
        line = writer.workload(KERNEL, search.workload_line(own))
        writer.record(line, search.record_line(own, point, [1e-6 * (2 + number)]))
    return dict(point)


@pytest.mark.parametrize(
    ("said", "here"),
    [
        ("AuthenticAMD-26-2", True),
        ("AuthenticAMD-26", True),  # it says no model: of all of the family
        ("AuthenticAMD-26-2-1", True),
        ("AuthenticAMD-26-2-0", False),
        ("AuthenticAMD-2", False),
        ("GenuineIntel-6-207", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("where", ["record", "session"])
def test_native_uses_what_was_measured_on_its_own_cpu(
    tmp_path: Path, cpu: pytest.MonkeyPatch, said: str, here: bool, where: str
) -> None:
    point = put(tmp_path, *((said, 3) if where == "record" else ("", 3, said)))
    known = records.load(NATIVE, [tmp_path], own=False)
    found = known.find(KERNEL.spec, 1)
    assert (found is not None) == here
    assert known.candidates(KERNEL.spec, 1) == ([] if here else [point])
    assert known.candidates(KERNEL.spec, 2) == known.candidates(KERNEL.spec, 1)
    named = records.load(catalog.resolve(NATIVE.family), [tmp_path], own=False)
    assert dict(named.find(KERNEL.spec, 1)[0]) == point  # type: ignore[index]
    assert named.candidates(KERNEL.spec, 1) == []


def test_each_cpu_has_a_best_of_its_own(
    tmp_path: Path, cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faster, slower = put(tmp_path, "GenuineIntel-6-207", 1), put(tmp_path, "AuthenticAMD-26-2", 5)
    known = records.load(NATIVE, [tmp_path], own=False)
    assert dict(known.find(KERNEL.spec, 1)[0]) == slower  # type: ignore[index]
    assert known.candidates(KERNEL.spec, 1) == [faster]
    cpu.setattr(host, "identity", lambda: XEON)
    known = records.load(NATIVE, [tmp_path], own=False)
    assert dict(known.find(KERNEL.spec, 1)[0]) == faster  # type: ignore[index]
    assert cli.main(["records", "prune", str(tmp_path)]) == 0
    capsys.readouterr()
    assert cli.main(["records", "list", str(tmp_path), "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)[NATIVE.family]["kernels"]
    assert {k["cpu"] for k in kernels} == {"GenuineIntel-6-207", "AuthenticAMD-26-2"}


def test_a_search_first_tries_what_other_cpus_found() -> None:
    own = task()
    own.elsewhere = [own.all[7], own.all[4], {"no": 1}]
    search = Search(NATIVE)
    assert [key_of(p) for p in search.propose(own, 1)] == [key_of(own.all[0])]
    first = [key_of(p) for p in search.propose(own, 4)]
    assert first[:3] == [key_of(own.all[n]) for n in (0, 7, 4)]
    assert len(first) == 4
    own.note(own.all[7], 1e-6)
    assert key_of(own.all[7]) not in map(key_of, search.propose(own, 4))


def test_the_records_that_come_with_bnncc_say_their_cpu() -> None:
    for folder in records.shipped().glob("x86-*"):
        log = records.read(folder)
        assert log.records
        assert {record.cpu.partition("-")[0] for record in log.records} == {"AuthenticAMD"}


def test_each_record_has_the_unit_of_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for words, unit in (("arm64", "instructions"), ("x86-64-v3", "us")):
        assert cli.main(["records", "list", "--target", words]) == 0
        head, *lines = capsys.readouterr().out.splitlines()
        assert re.split("  +", head)[3:7] == ["trials", "best", "default", "unit"]
        assert lines
        assert all(f" {unit} " in line for line in lines)
        assert cli.main(["records", "list", "--target", words, "--json"]) == 0
        (listed,) = json.loads(capsys.readouterr().out).values()
        assert {kernel["unit"] for kernel in listed["kernels"]} == {unit}
