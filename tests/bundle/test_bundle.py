"""Bundles for machines without bnncc and TVM, proven on this CPU, and what comes back of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bnncc
from bnncc import schedules
from bnncc.bundle import build, candidates, importing, results
from bnncc.bundle.candidates import Trial
from bnncc.cli import main as cli
from bnncc.console import Console
from bnncc.errors import TuningError
from bnncc.records import database as records
from bnncc.records.workload import Workload
from bnncc.runtime.artifact import Artifact
from bnncc.targets import catalog
from bnncc.topi_binary.spec import BinaryConv2d, Step
from bnncc.tuning.task import Task
from tests.devices import DIGITS
from tests.planted import PLANTED, WHY_NOT
from tests.tiny import BASELINE

# Few pixels, so that no tiles are used where there are such.
SPEC = BinaryConv2d(20, 2, 14, 64, 32, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))
NATIVE = catalog.native()
pytestmark = pytest.mark.skipif(NATIVE.popcount == "lookup", reason=WHY_NOT)
QUIET_SECONDS = 8  # a loaded machine may need some to start a process
MEGABYTES = 4
"""What the archive of one kernel and one network may take: TVM's runtime is half of it."""

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def kernel() -> Workload:
    return Workload.of(schedules.with_weight_order(SPEC, NATIVE))


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return bnncc.compile(DIGITS / "digits.onnx", threads=1)


@pytest.fixture(scope="module", autouse=True)
def _packed_fast() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "PRESET", 1)
        yield


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory, kernel: Workload, artifact: Artifact) -> Path:
    """Return a bundle of a network, and of a kernel whose candidates misbehave, but for two."""
    task = Task(kernel, 1, schedules.space_of(kernel.kernel, NATIVE))
    default = dict(task.space.default)
    free = set(task.space.choices["columns"]) - {*PLANTED.values(), default["columns"]}
    assert default["columns"] not in PLANTED.values()
    good = {**default, "columns": max(free)}
    bad = [{**default, "columns": columns} for columns in PLANTED.values()]
    trials = [Trial(task, default, default=True), *(Trial(task, p) for p in (*bad, good))]
    place = tmp_path_factory.mktemp("bundle")
    made = candidates.build(
        [trials], NATIVE, place, jobs=1, console=Console(-1), preload=("tests.planted",)
    )
    assert len(made[0].candidates) == len(trials) - 1  # one ends the process that builds it
    contents = build.Contents(made, [build.Network.of(artifact, "digits")])
    return build.write(place / "bundle", NATIVE, contents)


@pytest.fixture
def bundle(archive: Path, tmp_path: Path) -> Path:
    """Return what was unpacked from the archive, with little patience."""
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    runner = tmp_path / "bundle/bnncc/bundle/device/runner.py"
    text = runner.read_text()
    assert "QUIET_SECONDS = 180.0" in text
    runner.write_text(text.replace("QUIET_SECONDS = 180.0", f"QUIET_SECONDS = {QUIET_SECONDS}"))
    return tmp_path / "bundle"


def start(bundle: Path, *options: str) -> subprocess.Popen[str]:
    """Start a bundle where neither bnncc nor TVM can be imported but from the bundle."""
    absent = bundle.parent / "absent/tvm"
    absent.mkdir(parents=True, exist_ok=True)
    (absent / "__init__.py").write_text("raise ImportError('not here')")
    return subprocess.Popen(
        [sys.executable, str(bundle / "run.py"), *options], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=bundle.parent,
        env={**os.environ, "PYTHONPATH": str(absent.parent)},
    )  # fmt: skip


def run(bundle: Path, *options: str) -> tuple[int, str, str]:
    process = start(bundle, *options)
    said, errors = process.communicate(timeout=120)
    return process.returncode, said, errors


def read(bundle: Path) -> Lines:
    return [json.loads(line) for line in (bundle / "results.jsonl").read_text().splitlines()]


def of_kernel(lines: Lines) -> dict[int, dict[str, Any]]:
    return {line["point"]["columns"]: line for line in lines if "point" in line}


@pytest.fixture(scope="module")
def ran(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of results of the whole bundle."""
    place = tmp_path_factory.mktemp("ran")
    with tarfile.open(archive) as packed:
        packed.extractall(place, filter="data")
    runner = place / "bundle/bnncc/bundle/device/runner.py"
    text = runner.read_text().replace("QUIET_SECONDS = 180.0", f"QUIET_SECONDS = {QUIET_SECONDS}")
    runner.write_text(text)
    code, said, errors = run(place / "bundle")
    assert code == 1, said + errors  # some of it is wrong
    assert "3 results are wrong or failed" in errors
    assert "digits: " in said
    return place / "bundle/results.jsonl"


# ---- running ----------------------------------------------------------------------------------


def test_what_misbehaves_costs_itself_and_nothing_else(ran: Path) -> None:
    lines = read(ran.parent)
    found = of_kernel(lines)
    assert found[PLANTED["crash"]]["error"] == "died: SIGABRT"
    assert found[PLANTED["hang"]]["error"] == f"did not respond for {QUIET_SECONDS} s"
    assert "values of output 0 are wrong" in found[PLANTED["wrong"]]["error"]
    right = [line for line in found.values() if line["right"]]
    assert len(right) == len(found) - 3 == 2
    for line in right:
        assert line["us"] == pytest.approx(float(np.median(line["times_us"])), abs=1e-3)
        assert line["us"] > 0
    assert [line["default"] for line in right].count(True) == 1
    assert [line["done"] for line in lines if "done" in line] == ["network-0", "kernel-0"]


def test_networks_are_timed_with_each_kernel(ran: Path, artifact: Artifact) -> None:
    timed = {line["key"]: line for line in read(ran.parent) if "network" in line}
    names = [kernel["name"] for kernel in artifact.report["kernels"]]
    assert list(timed) == ["main", *names]
    assert all(line["right"] and line["us"] > 0 for line in timed.values())


def test_time_is_kept_and_work_is_taken_up(bundle: Path) -> None:
    before = time.monotonic()
    code, _, errors = run(bundle, "--seconds", "0.01")
    assert code == 3, errors
    assert "run it again to continue" in errors
    assert len(read(bundle)) == 1  # says which bundle it is
    code, _, errors = run(bundle, "--seconds", "60", "--only", "network-0")
    assert (code, "error" in errors) == (0, False)
    assert time.monotonic() - before < 60
    done = read(bundle)
    code, _, _ = run(bundle, "--seconds", "60")
    assert code == 1
    assert read(bundle)[: len(done)] == done  # nothing is done twice
    assert {line.get("network") for line in read(bundle)[len(done) :]} == {None}


def test_killed_at_any_moment_it_goes_on(bundle: Path, ran: Path) -> None:
    process = start(bundle)
    path = bundle / "results.jsonl"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (path.exists() and "SIGABRT" in path.read_text()):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"part": "kernel-0", "ke')  # killed while it wrote
    code, _, errors = run(bundle)
    assert code == 1, errors
    assert path.read_bytes().startswith(whole)
    lines = read(bundle)
    assert sum(line.get("error") == "died: SIGABRT" for line in lines) == 1
    outcome = {k: line["right"] for k, line in of_kernel(lines).items()}
    assert outcome == {k: line["right"] for k, line in of_kernel(read(ran.parent)).items()}


def test_kernels_are_checked(bundle: Path) -> None:
    draws = bundle / "bnncc/tuning/draws.py"
    draws.write_text(draws.read_text().replace("PCG64(seed)", "PCG64(seed + 1)"))
    code, _, _ = run(bundle, "--only", "kernel-0")
    assert code == 1
    assert not [line for line in read(bundle) if line.get("right")]


def test_networks_are_checked(bundle: Path) -> None:
    path = bundle / "networks/0.npz"
    arrays = dict(np.load(path))
    arrays["output_0"] = arrays["output_0"] + 1
    np.savez(path, **arrays)
    code, _, _ = run(bundle, "--only", "network-0")
    assert code == 1
    main, *kernels = (line for line in read(bundle) if "network" in line)
    assert main["right"] is False
    assert "us" not in main
    assert all(line["right"] for line in kernels)


def test_refusals_are_one_line(bundle: Path) -> None:
    index = json.loads((bundle / "index.json").read_text())
    (bundle / "results.jsonl").write_text(json.dumps({"bundle": "another"}) + "\n")
    code, _, errors = run(bundle)
    assert code == 1
    assert errors.splitlines() == [
        f"error: {bundle / 'results.jsonl'}: holds results of another bundle; give another "
        "--results"
    ]
    (bundle / "results.jsonl").unlink()
    (bundle / "tvm_ffi/__init__.py").write_text("raise ImportError('another Python')")
    code, _, errors = run(bundle)
    assert code == 1
    (line,) = errors.splitlines()
    assert line.startswith("error: TVM's binding does not load in Python")
    assert index["device"] == "cpu"


def test_archive_is_small_and_holds_no_compiler(archive: Path) -> None:
    assert archive.stat().st_size < MEGABYTES * 1e6
    with tarfile.open(archive) as packed:
        members = {member.name: member.size for member in packed.getmembers()}
    assert not [name for name in members if "libtvm_compiler" in name]
    case = members["bundle/kernels/0/case.npz"]
    weights = SPEC.out_channels * SPEC.taps // 8
    assert case < weights + 2000  # three images of results, no weights and no data


# ---- records ----------------------------------------------------------------------------------


def changed(ran: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write results again, each line changed."""
    path = folder / "results.jsonl"
    lines = read(ran.parent)
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def timed(ran: Path, folder: Path, default: float, good: float) -> Path:
    """Write results with these microseconds for the default and the other right candidate."""

    def change(line: dict[str, Any]) -> None:
        if line.get("right") and "point" in line:
            line["us"] = default if line["default"] else good
            line["times_us"] = [line["us"]]

    return changed(ran, folder, change)


def test_what_is_faster_goes_on_record(ran: Path, tmp_path: Path, kernel: Workload) -> None:
    path = timed(ran, tmp_path, default=4.0, good=3.0)
    made = importing.take(results.read(path), tmp_path / "logs", target=None, command="import")
    assert made.records == 2
    log = records.read(made.folder)
    assert {record.seconds for record in log.records} == {4e-6, 3e-6}
    best = log.best()[kernel]
    (good,) = (x for x in of_kernel(read(ran.parent)).values() if x["right"] and not x["default"])
    assert dict(best.point) == good["point"]
    session = next(entry for entry in log.index if "session" in entry)
    assert session["device"] == results.read(path).device != "unknown"
    assert session["tvm"] == results.read(path).tvm
    assert len(log.notes()[kernel]["failed"]) == 3
    assert log.notes()[kernel]["trials"] == 5


def test_records_are_those_of_tuning_here(ran: Path, tmp_path: Path, kernel: Workload) -> None:
    path = timed(ran, tmp_path, default=4.0, good=3.0)
    importing.take(results.read(path), tmp_path, target=NATIVE, command="import")
    from tvm.s_tir import meta_schedule as ms

    folder = tmp_path / NATIVE.family
    database = ms.database.JSONDatabase(
        str(folder / records.WORKLOADS), str(folder / records.RECORDS)
    )
    assert len(database) == 2
    known = records.load(NATIVE, [tmp_path], own=False)
    found = known.find(kernel.spec, 1)
    assert found is not None
    assert schedules.space_of(kernel.kernel, NATIVE).complete(found[0]) == dict(found[0])


@pytest.mark.parametrize("good", [4.0, 3.97, 5.0])
def test_what_is_no_faster_is_not_recorded(
    good: float, ran: Path, tmp_path: Path, kernel: Workload
) -> None:
    path = timed(ran, tmp_path, default=4.0, good=good)
    made = importing.take(results.read(path), tmp_path, target=None, command="")
    assert made.records == 1
    default = schedules.space_of(kernel.kernel, NATIVE).default
    assert dict(records.read(made.folder).best()[kernel].point) == dict(default)


def test_without_its_default_a_kernel_is_not_recorded(ran: Path, tmp_path: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        if line.get("default"):
            line["right"] = False

    made = importing.take(
        results.read(changed(ran, tmp_path, change)), tmp_path, target=None, command=""
    )
    assert made.records == 0
    assert "the default of this version was not timed; not recorded" in made.warnings[0]


def test_what_another_oracle_checked_is_not_recorded(ran: Path, tmp_path: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        if "check" in line:
            line["check"] = "0" * 64

    made = importing.take(
        results.read(changed(ran, tmp_path, change)), tmp_path, target=None, command=""
    )
    assert made.records == 0
    assert "was checked against results that differ" in made.warnings[0]


@pytest.mark.parametrize("spec", ["no JSON", "{}", '{"spec": "BinaryConv2d", "groups": 0}'])
def test_what_is_no_kernel_is_not_recorded(spec: str, ran: Path, tmp_path: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        if "spec" in line:
            line["spec"] = spec if spec != "{}" else line["spec"].replace('"n": 5', '"n": "x y"')
            line["spec"] = line["spec"].replace('"groups": 1', '"groups": 0')

    made = importing.take(
        results.read(changed(ran, tmp_path, change)), tmp_path, target=None, command=""
    )
    assert made.records == 0
    assert "is not a kernel of this version" in made.warnings[0]


def test_points_of_another_space_are_passed_over(ran: Path, tmp_path: Path) -> None:
    path = timed(ran, tmp_path, default=4.0, good=3.0)

    def change(line: dict[str, Any]) -> None:
        if line.get("us") == 3.0:
            line["point"] = {"columns": 12345}

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = importing.take(results.read(path), tmp_path, target=None, command="")
    assert made.records == 1


def test_a_torn_last_line_is_left_out(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = timed(ran, tmp_path, default=4.0, good=3.0)
    path.write_bytes(path.read_bytes()[:-1] + b'\n{"part": "ker')
    code = cli.main(["tune", "--import", str(path), "--tuning-dir", str(tmp_path / "logs")])
    errors = capsys.readouterr().err.splitlines()
    assert code == 0
    number = len(path.read_bytes().splitlines())
    assert errors[0] == f"warning: {path}:{number}: the last line is incomplete, and ignored"
    assert errors[-1].endswith("2 records of 1 kernels")


def test_records_do_not_say_where_files_were(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = timed(ran, tmp_path, default=4.0, good=3.0), tmp_path / "logs"
    asked = ["tune", "--import", str(path), "--tuning-dir", str(folder)]
    monkeypatch.setattr(sys, "argv", ["bnncc", *asked])
    assert cli.main(asked) == 0
    (index,) = folder.glob("*/index.json")
    command = json.loads(index.read_text().splitlines()[0])["command"]
    assert command == f"bnncc tune --import {path.name} --tuning-dir logs"


def heads(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda line: line.update(changes) if "bundle" in line else None


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ("", 2, "contains no results of a bundle"),
        ("not JSON\n", 2, "is not a line of a bundle's results"),
        ('{"format": 1}\n', 2, "contains no results of a bundle"),
        ('{"session": 1}\n[]\n', 2, ":2: is not a line of a bundle's results"),
        (None, 2, "cannot be read: No such file or directory"),
        (heads(format=9), 1, "has format 9, expected 1"),
        (heads(bnncc="0.0.1"), 1, "was made with bnncc 0.0.1, this is"),
        (heads(tvm="0.19.0"), 1, "was made with TVM 0.19.0, this is"),
        (heads(family="arm64"), 1, "was measured with arm64, not"),
        (lambda line: line.pop("right", None), 2, "field `right` is missing or wrong"),
        (lambda line: line.pop("check", None), 2, "field `check` is missing or wrong"),
        (lambda line: line.update(point=[1]), 2, "field `point` is missing or wrong"),
        (lambda line: line.update(point={"a": "b"}), 2, "field `point` is missing or wrong"),
        (lambda line: line.update(times_us=[-1.0]), 2, "field `times_us` is missing or wrong"),
        (lambda line: line.update(us=0), 2, "field `us` is missing or wrong"),
        (lambda line: line.update(device=3), 2, "field `device` is missing or wrong"),
    ],
)
def test_wrong_files_are_refused_in_one_line(
    content: Any, code: int, said: str, ran: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "results.jsonl"
    if callable(content):
        changed(ran, tmp_path, content)
    elif content is not None:
        path.write_text(content)
    options = ["--target", NATIVE.family] if "measured" in said else []
    folder = tmp_path / "logs"
    assert cli.main(["tune", "--import", str(path), "--tuning-dir", str(folder), *options]) == code
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith(f"error: {path}")
    assert said in errors[0]
    assert len(errors) in (1, 3)  # with a hint
    assert not folder.exists()


def test_results_without_kernels_are_refused(ran: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = [line for line in read(ran.parent) if "point" not in line]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(TuningError, match="contains no kernels to choose from"):
        importing.take(results.read(path), tmp_path, target=None, command="")


# ---- times ------------------------------------------------------------------------------------


def test_times_are_printed_as_if_taken_here(
    ran: Path, artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "digits.bnncc"
    artifact.save(path)
    assert cli.main(["bench", str(path), "--import", str(ran), "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert cli.main(["bench", str(path), "--threads", "1", "--repeat", "3", "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert there.keys() == here.keys()
    assert there["network"].keys() == here["network"].keys()
    assert [k["name"] for k in there["kernels"]] == [k["name"] for k in here["kernels"]]
    whole = next(line for line in read(ran.parent) if line.get("key") == "main")
    assert there["network"]["median_us"] == pytest.approx(whole["us"], abs=1e-3)
    assert cli.main(["bench", str(path), "--import", str(ran)]) == 0
    assert "kernels  " in capsys.readouterr().out


def test_times_of_another_artifact_are_refused(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.bnncc"
    bnncc.compile(DIGITS / "digits.onnx", threads=1, input_shapes={"images": (3, 1, 8, 8)}).save(
        path
    )
    assert cli.main(["bench", str(path), "--import", str(ran)]) == 1
    assert "contains no times of this artifact" in capsys.readouterr().err


# ---- the command line -------------------------------------------------------------------------


@pytest.fixture
def here() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def test_commands_write_bundles(
    here: str, artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = tmp_path / "b", str(DIGITS / "digits.onnx")
    tune = ["tune", model, "--bundle", str(folder), "--kernels", "MaxPool", "--threads", "1"]
    assert cli.main([*tune, "--python", here, "--jobs", "1", "--json", "--trials", "2"]) == 0
    out, errors = capsys.readouterr()
    said = json.loads(out)
    assert [kernel["candidates"] for kernel in said["kernels"]] == [2]
    assert said["bytes"] == Path(said["archive"]).stat().st_size
    assert "run `python b/run.py`" in errors
    code, _, errors = run(folder, "--seconds", "60")
    assert code == 0, errors
    logs = tmp_path / "logs"
    assert (
        cli.main(["tune", "--import", str(folder / "results.jsonl"), "--tuning-dir", str(logs)])
        == 0
    )
    assert records.read(logs / NATIVE.family).records

    saved, timing = tmp_path / "digits.bnncc", tmp_path / "t"
    artifact.save(saved)
    assert cli.main(["bench", str(saved), "--bundle", str(timing), "--python", here]) == 0
    index = json.loads((timing / "index.json").read_text())
    assert (len(index["networks"]), index["kernels"]) == (1, [])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["tune"], "tune needs a MODEL, or --import RESULTS"),
        (["tune", "{model}", "{model}"], "takes one MODEL; with --bundle it takes several"),
        (["tune", "{model}", "--import", "{used}/file"], "--import takes no MODEL"),
        (["tune", "--bundle", "x", "--import", "{used}/file"], "--bundle and --import cannot"),
        (["tune", "{model}", "--bundle", "{used}"], "is not an empty folder"),
        (["tune", "{model}", "--bundle", "x", "--rpc", "a:1"], "be combined with --rpc"),
        (["tune", "{model}", "--python", "3.12"], "--python needs --bundle"),
        (["tune", "{model}", "--bundle", "x", "--python", "2.7"], "--python is `2.7`, not one of"),
        (
            ["tune", "{model}", "--bundle", "x", "--measure", "instructions"],
            "--measure instructions cannot be combined with --bundle",
        ),
        (["tune", "{model}", "--bundle", "{used}/file/b"], "cannot be made: Not a directory"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    names = {"model": DIGITS / "digits.onnx", "used": tmp_path}
    assert cli.main([option.format(**names) for option in options]) == 2
    assert said in capsys.readouterr().err


OTHERS = {"x86-64-v2": ("arm64", "x86_64", "aarch64"), "arm64": ("x86-64-v2", "aarch64", "x86_64")}


def test_other_processors_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, here, other = OTHERS[BASELINE]
    tune = ["tune", str(DIGITS / "digits.onnx"), "--target", target, "--bundle", str(tmp_path)]
    assert cli.main(tune) == 1
    said = f"a bundle holds TVM's runtime for {here}, not for {other}"
    assert said in capsys.readouterr().err


def test_trials_are_shared_and_the_likeliest_come_first(kernel: Workload) -> None:
    hopper = catalog.resolve("cuda-sm90a")
    specs = [schedules.with_weight_order(replace(SPEC, channels=c), hopper) for c in (64, 256)]
    layers = candidates.layers_of([(Workload.of(spec).spec, 1) for spec in specs], hopper)
    assert len(layers) == 2
    for spec, trials in zip(specs, layers, strict=True):
        assert [trial.default for trial in trials] == [True] + [False] * (len(trials) - 1)
        assert trials[0].task.workload == Workload.of(spec)
        orders = schedules.weight_orders(spec, hopper)
        first = [trial.task.workload.kernel.weight_order for trial in trials[: len(orders)]]
        assert tuple(first) == orders
        assert len({(t.task.workload, str(t.point)) for t in trials}) == len(trials)
    few = candidates.limited(layers, 7)
    assert [len(trials) for trials in few] == [4, 3]
    assert candidates.limited(layers, 2) == []


@pytest.fixture(autouse=True)
def _no_leftovers(tmp_path: Path) -> Iterator[None]:
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_large_outputs_are_checked_at_some_places(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[1, 8, 64, 64] x) => '
        "(float[1, 8, 64, 64] y) { s = Sign(x) y = Conv <pads = [1, 1, 1, 1]> (s, w) }"
    )
    w = np.sign(np.random.default_rng(0).standard_normal((8, 8, 3, 3))).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    network = build.Network.of(bnncc.compile(model, threads=1), "image")
    packed = build.write(tmp_path / "bundle", NATIVE, build.Contents([], [network]))
    with tarfile.open(packed) as members:
        members.extractall(tmp_path, filter="data")
    path = tmp_path / "bundle/networks/0.npz"
    arrays = dict(np.load(path))
    assert arrays["where_0"].size == arrays["output_0"].size < 8 * 64 * 64
    for change, right in ((0, True), (1, False)):
        np.savez(path, **{**arrays, "output_0": arrays["output_0"] + np.float32(change)})
        (tmp_path / "bundle/results.jsonl").unlink(missing_ok=True)
        code, _, errors = run(tmp_path / "bundle")
        assert (code == 0) == right, errors
        lines = [line for line in read(tmp_path / "bundle") if line.get("key") == "main"]
        assert [line["right"] for line in lines] == [right]


SYMBOLIC = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 13]> g (float[1, past, 48] keys, float[1, 1, 48] x) => '
    "(float[1, 1, next] y) { all = Concat <axis = 1> (keys, x) "
    "t = Transpose <perm = [0, 2, 1]> (all) p = MatMul(x, t) y = Softmax <axis = -1> (p) }"
)


def test_kernels_of_symbolic_sizes_are_timed(tmp_path: Path) -> None:
    """Kernels that take `past` as a number, and tensors with `past + 1` rows."""
    artifact = bnncc.compile(SYMBOLIC, threads=1)
    kernels = artifact.report["kernels"]
    assert any("sizes" in kernel for kernel in kernels)
    contents = build.Contents([], [build.Network.of(artifact, "cache")])
    with tarfile.open(build.write(tmp_path / "bundle", NATIVE, contents)) as members:
        members.extractall(tmp_path, filter="data")
    code, _, errors = run(tmp_path / "bundle")
    assert code == 0, errors
    timed = {line["key"]: line for line in read(tmp_path / "bundle") if "network" in line}
    assert list(timed) == ["main", *(kernel["name"] for kernel in kernels)]
