"""Tuning: what it records, how it goes on, and what kernels and signals cannot do to it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bnncc
from bnncc import driver, schedules
from bnncc.cli import main as cli
from bnncc.console import Console
from bnncc.errors import TuningError
from bnncc.options import CompileOptions
from bnncc.records import database as records
from bnncc.records import race
from bnncc.records.tools import described
from bnncc.records.workload import Workload, candidate, module, point_of_trace, sampler
from bnncc.targets import catalog, host
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    BitwiseMaxPool,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    Spec,
    Step,
    from_json,
)
from bnncc.tuning import network
from bnncc.tuning.cases import Case, make
from bnncc.tuning.interrupts import Interrupts
from bnncc.tuning.pool import Pool, Setup
from bnncc.tuning.task import Task, key_of
from bnncc.tuning.trials import Plan
from bnncc.tuning.tuner import Progress, Result, Tuner, tasks_of
from tests.devices import DIGITS, ENVIRONMENT, until
from tests.kernel_harness import run_kernel
from tests.passes import test_products
from tests.planted import PLANTED, WHY_NOT

KERNEL = Workload.of(
    BinaryConv2d(2, 4, 8, 64, 32, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))
)  # few pixels, so that no tiles are used where there are such
NATIVE = catalog.native()
QUIET = Console(-1)
BREVITAS = Path(__file__).parents[1] / "data" / "brevitas"
KILLS = 20 if os.environ.get("BNNCC_TEST_ALL") else 1


def tune(
    folder: Path, trials: int, preload: tuple[str, ...] = (), jobs: int = 1, **options: object
) -> Result:
    """Tune one small kernel here; each job is a process, which takes seconds to start."""
    plan = Plan(trials=trials, jobs=jobs, repeat_seconds=0.002, **options)  # type: ignore[arg-type]
    tasks = tasks_of([(KERNEL.spec, 1)], NATIVE, 1)
    return Tuner(tasks, Setup(NATIVE, preload=preload), folder, plan, QUIET).run()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the records of twelve trials."""
    folder = tmp_path_factory.mktemp("records")
    assert tune(folder, 12).trials == 12
    return folder


def log_of(folder: Path) -> records.Log:
    return records.read(folder / NATIVE.family)


@pytest.mark.skipif("amx_int8" not in NATIVE.features, reason="the CPU has no tiles")
def test_workers_ask_for_tiles(tmp_path: Path) -> None:
    layer = BinaryConv2d(1, 16, 16, 128, 64, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))
    tasks = tasks_of([(Workload.of(schedules.with_weight_order(layer, NATIVE)).spec, 1)], NATIVE, 1)
    assert [from_json(task.workload.spec).weight_order for task in tasks] == ["fours", "words"]
    plan = Plan(trials=2, jobs=1, repeat_seconds=0.002)
    Tuner(tasks, Setup(NATIVE), tmp_path, plan, QUIET).run()
    assert all(task.best is not None for task in tasks)


@pytest.mark.slow
def test_records_are_metaschedules(tuned: Path) -> None:
    import tvm
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.JSONDatabase(work_dir=str(tuned / NATIVE.family))
    log = log_of(tuned)
    assert not log.damaged
    assert len(database) == len(log.records) >= 12
    stored = module(KERNEL)
    assert database.has_workload(stored)
    best = database.query_tuning_record(stored, tvm.target.Target("llvm"), "main")
    assert point_of_trace(records.numbers(best.trace.as_json(False))) in [
        record.point for record in log.records
    ]


def test_the_trace_says_the_point() -> None:
    from tvm import s_tir

    space = schedules.space_of(KERNEL.kernel, NATIVE)
    stored = module(KERNEL)
    design = s_tir.Schedule(stored)
    sampler(space.choices)(design)
    for point in random.Random(1).sample(list(space.points()), 5):
        made = candidate(stored, point, design.trace)
        assert point_of_trace(records.numbers(made.trace.as_json(False))) == point


def test_a_second_run_goes_on(tuned: Path) -> None:
    before = log_of(tuned)
    assert tune(tuned, 12).trials == 0
    again = tune(tuned, 16)
    assert again.trials == 4
    assert again.tasks[0].trials == 16
    after = log_of(tuned)
    assert after.records[: len(before.records)] == before.records
    sessions = [entry for entry in after.index if "session" in entry]
    assert len(sessions) == 3
    assert {"device", "tvm", "bnncc", "session", "command"} <= sessions[0].keys()
    assert sessions[0]["cpu"] == host.identity() != "unknown"


def test_one_process_writes_at_a_time(tuned: Path) -> None:
    with (
        records.Writer(tuned / NATIVE.family),
        pytest.raises(TuningError, match="another process writes"),
    ):
        tune(tuned, 20)


@pytest.mark.skipif(NATIVE.popcount == "lookup", reason=WHY_NOT)
def test_bad_kernels_cost_their_trial_and_nothing_else(tmp_path: Path) -> None:
    bad = set(PLANTED.values())
    result = tune(tmp_path, 14, ("tests.planted",), jobs=2, measure_seconds=3.0)
    (task,) = result.tasks
    assert result.trials == task.trials == 14
    tried = {name: [k for k in task.failed if f"columns={c} " in k] for name, c in PLANTED.items()}
    assert all(tried.values()), tried
    assert {task.failed[k] for k in tried["builder"]} == {"crashed: SIGABRT"}
    hung = "took longer than 3 s"
    assert {task.failed[k] for k in tried["crash"]} <= {"crashed: SIGABRT", hung}  # TVM is slow
    assert {task.failed[k] for k in tried["hang"]} == {hung}
    assert all(task.failed[k].startswith("WrongResult") for k in tried["wrong"])
    assert len(task.failed) == sum(map(len, tried.values()))
    assert len(task.times) == 14 - len(task.failed)
    recorded = [record.point["columns"] for record in log_of(tmp_path).records]
    assert recorded
    assert not bad & set(recorded)
    again = tune(tmp_path, 14)
    assert again.trials == 0
    assert again.tasks[0].failed == task.failed


def compiled(folder: Path, **options: object) -> bnncc.Artifact:
    return bnncc.compile(DIGITS / "digits.onnx", tuning_dir=[folder], threads=1, **options)  # type: ignore[arg-type]


def killed(folder: Path, waits: Callable[[], bool], seconds: float) -> bool:
    """Kill a tuning run some seconds after `waits` ends; False if it came to its end before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bnncc", "tune", str(DIGITS / "digits.onnx"), "--trials", "400",
         "--tuning-dir", str(folder), "--kernels", "BinaryConv2d 32"],
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until = time.monotonic() + 300
    while waits() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.send_signal(signal.SIGKILL)
    assert process.wait() in (0, -signal.SIGKILL)
    return process.returncode != 0


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL leaves records that the next run and a compilation can use."""
    folder, kills, seen = tmp_path / "0", 0, 0
    moments = random.Random(0)
    while kills < KILLS:
        found = folder / NATIVE.family / records.RECORDS
        size = found.stat().st_size if found.exists() else 0

        def nothing_new(found: Path = found, size: int = size) -> bool:
            return not found.exists() or found.stat().st_size <= size

        # every second one as soon as something is written, as this is when most could be lost
        waits, most = (nothing_new, 0.2) if kills % 2 == 0 else (lambda: False, 8.0)
        if not killed(folder, waits, moments.uniform(0, most)):
            folder, seen = tmp_path / f"{len(list(tmp_path.iterdir()))}", 0  # all was tried
            continue
        kills += 1
        if not found.exists():
            assert seen == 0
            continue
        log = log_of(folder)
        assert not log.damaged
        assert len(log.records) >= seen
        seen = len(log.records)
        # the next run takes up everything
        tasks = tasks_of([(w.spec, 1) for w in {r.workload for r in log.records}], NATIVE, 1)
        plan = Plan(trials=1)
        assert Tuner(tasks, Setup(NATIVE), folder, plan, QUIET).run().trials == 0
        seen = len(log_of(folder).records)
        assert not compiled(folder).report["warnings"]
    assert any(tmp_path.glob(f"*/*/{records.RECORDS}"))


def test_a_torn_line_is_passed_over_and_removed(tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / NATIVE.family
    folder.mkdir()
    for name in (records.INDEX, records.WORKLOADS, records.RECORDS):
        content = (tuned / NATIVE.family / name).read_bytes()
        (folder / name).write_bytes(content + content.split(b"\n")[0][:-7])
    assert log_of(tmp_path).records == log_of(tuned).records
    assert not log_of(tmp_path).damaged
    with records.Writer(folder):
        pass
    for name in (records.INDEX, records.WORKLOADS, records.RECORDS):
        assert (folder / name).read_bytes() == (tuned / NATIVE.family / name).read_bytes()


def test_stale_records_are_reported_and_skipped(tmp_path: Path) -> None:
    """A record of another version, of an unknown kernel or damaged never ends a compilation."""
    kernels = driver.kernels(DIGITS / "digits.onnx", CompileOptions(threads=1, tuned=False))
    tasks = tasks_of(kernels, NATIVE, 1)
    Tuner(tasks, Setup(NATIVE), tmp_path, Plan(trials=len(tasks)), QUIET).run()
    good = compiled(tmp_path)
    assert good.report["summary"]["tuned"] >= len(tasks)
    assert not good.report["warnings"]
    path = tmp_path / NATIVE.family / records.RECORDS
    whole = path.read_text().splitlines()
    first = whole[0].replace("bnncc.columns", "bnncc.colours")
    path.write_text("\n".join([first, "{]", '["x",[]]', *whole[1:]]) + "\n")
    (path.parent / records.WORKLOADS).open("a").write('["1","AAAA"]\n')
    stale = compiled(tmp_path)
    assert stale.report["summary"]["tuned"] == good.report["summary"]["tuned"] - 1
    (warning,) = stale.report["warnings"]
    assert warning.startswith("ignored a tuning record that does not apply: ")
    assert "(and 3 more)" in warning
    why = [line.rpartition(": not ")[2] for line in log_of(tmp_path).damaged]
    assert why == ["a kernel that bnncc wrote", "JSON", "a measurement that bnncc wrote"]
    path.write_text(whole[0].replace("[0,", "[77,", 1) + "\n")
    (damaged,) = log_of(tmp_path).damaged[1:]
    assert damaged.endswith("database_workload.json has no line 78, its kernel")
    untuned = bnncc.compile(DIGITS / "digits.onnx", untuned=True, threads=1)
    assert untuned.report["summary"]["tuned"] == 0


def test_records_can_be_listed_pruned_and_merged(
    tuned: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*args: object) -> str:
        assert cli.main(["records", *map(str, args)]) == 0
        return capsys.readouterr().out

    assert json.loads(run("merge", tuned, tmp_path, "--json"))[NATIVE.family] > 0
    assert json.loads(run("merge", tuned, tmp_path, "--json"))[NATIVE.family] == 0
    empty = tmp_path / "empty"
    empty.mkdir()
    assert json.loads(run("merge", empty, tuned, tmp_path, "--json"))[NATIVE.family] == 0
    for asked, said in (
        (("merge", empty, tmp_path), f"{empty}: contains no records"),
        (("list", tuned, "--target", "c99"), f"{tuned}: contains no records for c99"),
    ):
        assert cli.main(["records", *map(str, asked)]) == 1
        assert said in capsys.readouterr().err
    listed = json.loads(run("list", tmp_path, "--json"))[NATIVE.family]
    (kernel,) = listed["kernels"]
    assert kernel["spec"] == KERNEL.spec
    assert kernel["trials"] >= 12
    best = log_of(tuned).best()[KERNEL]
    assert kernel["best"] == pytest.approx(best.seconds * 1e6)
    assert kernel["unit"] == "us"
    assert "BinaryConv2d 64,4x8 -> 32 3x3" in run("list", tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    narrow = run("list", tmp_path).splitlines()
    assert max(map(len, narrow)) <= 60
    assert narrow[-1].startswith("not shown in 60 columns: point")
    assert cli.main(["records", "list", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("gain", [0.005, 0.1], ids=["noise", "gain"])
def test_pruning_keeps_what_gains_over_the_default(
    tuned: Path, tmp_path: Path, gain: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["records", "merge", str(tuned), str(tmp_path)]) == 0
    default = dict(schedules.space_of(KERNEL.kernel, NATIVE).default)
    log = log_of(tmp_path)
    chosen = next(record.point for record in log.records if dict(record.point) != default)
    # What was measured differs from run to run; times are written instead, and no race.
    index = tmp_path / NATIVE.family / records.INDEX
    index.write_text("".join(line + "\n" for line in index.read_text().splitlines()[:1]))
    path = tmp_path / NATIVE.family / records.RECORDS
    timed = []
    for record, line in zip(log.records, path.read_text().splitlines(), strict=True):
        number, measured = json.loads(line)
        others = 1.0 if dict(record.point) == default else 1.5
        measured[1] = [(1 - gain if record.point == chosen else others) * 1e-5]
        timed.append(json.dumps([number, measured]))
    path.write_text("\n".join(timed) + "\n")
    capsys.readouterr()
    assert cli.main(["records", "prune", str(tmp_path), "--json"]) == 0
    kept = [dict(record.point) for record in log_of(tmp_path).records]
    expected = [default, dict(chosen)] if gain > 0.05 else [default]
    assert sorted(kept, key=str) == sorted(expected, key=str)
    removed = json.loads(capsys.readouterr().out)[NATIVE.family]
    assert removed == len(log.records) - len(kept)


def test_the_best_races_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(trials=14, jobs=2, repeat_seconds=0.002)
    tasks = tasks_of([(KERNEL.spec, 1)], NATIVE, 1)
    (task,) = Tuner(tasks, Setup(NATIVE), tmp_path, plan, Console(0)).run().tasks
    default = key_of(task.space.default)
    assert task.best is not None
    assert task.kept == key_of(task.best[0])
    assert (task.kept != default) == (task.gain is not None and task.gain.faster)
    said = capsys.readouterr()
    assert "cannot be measured" not in said.err
    last = (said.out + said.err).splitlines()[-1]
    assert ("kept the default" in last) == (task.kept == default)
    assert ("less than the default" in last) <= (task.kept != default)


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


@pytest.mark.parametrize("columns", [24, 60])
def test_progress_stays_on_one_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = tasks_of([(KERNEL.spec, 1)], NATIVE, 1)
    for point, seconds in zip(task.all, (2e-6, 1e-6), strict=False):
        task.note(point, seconds)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(Console(0), 14, None, "s")
    for done in (1, 7, 14):
        progress.show(done, task)
    *lines, rest = terminal.getvalue().split("\r\x1b[K")[1:]
    progress.end([task])
    assert len(lines) == 2
    assert all(len(line) < columns and "\n" not in line for line in (*lines, rest))
    assert rest.startswith("[####################]"[: columns - 1])
    *_, last = terminal.getvalue().split("\r\x1b[K")
    assert last.startswith(f"{task.workload.name}: 1.00 us (50.0 % less than the default), ")


def test_only_the_race_says_what_is_best() -> None:
    """A point that lost its race, or had none, is not called the best for one short time."""
    (task,) = tasks_of([(KERNEL.spec, 1)], NATIVE, 1)
    first, second, *_ = task.all
    task.note(first, 2e-6)
    task.note(second, 3e-6)
    task.trials = task.raced = 2
    task.kept = key_of(second)
    assert task.best == (second, 3e-6)
    task.note(first, 1e-6)  # a turn of the race, noted late
    assert task.best == (second, 3e-6)
    task.trials += 1  # a trial since then: it has to race again
    assert task.best == (first, 1e-6)


@pytest.mark.parametrize("kept", ["default", "slowest", "other order"])
def test_the_race_decides_what_counts(tuned: Path, tmp_path: Path, kept: str) -> None:
    """What won its race is used and kept, not what was fastest once."""
    assert cli.main(["records", "merge", str(tuned), str(tmp_path)]) == 0
    own = [r for r in log_of(tmp_path).records if r.workload == KERNEL]
    default = key_of(schedules.space_of(KERNEL.kernel, NATIVE).default)
    last = {key_of(record.point): record.seconds for record in own}
    slowest = max((key for key in last if key != default), key=last.__getitem__)
    won = {"default": default, "slowest": slowest, "other order": ""}[kept]
    with records.Writer(tmp_path / NATIVE.family) as writer:
        said = {"kernel": KERNEL.spec, "threads": 1, "trials": 12, "cpu": host.core_model()}
        writer.note({**said, records.KEPT: won})
    best = log_of(tmp_path).best().get(KERNEL)
    assert (best and key_of(best.point)) == (won or None)
    assert cli.main(["records", "prune", str(tmp_path)]) == 0
    left = {key_of(record.point) for record in log_of(tmp_path).records}
    assert left <= {won, default}
    found = records.load(NATIVE, [tmp_path], own=False).find(KERNEL.spec, 1)
    if kept == "default":
        assert found is not None
        assert key_of(found[0]) == default


@pytest.mark.slow
def test_what_has_not_raced_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped before its races leaves the defaults in force, and goes on there."""

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Tuner, "_race", stopped)
        assert tune(tmp_path, 10).interrupted
    default = key_of(schedules.space_of(KERNEL.kernel, NATIVE).default)
    assert key_of(log_of(tmp_path).best()[KERNEL].point) == default
    again = tune(tmp_path, 10)
    assert again.trials == 0
    assert again.tasks[0].raced == again.tasks[0].trials
    assert again.tasks[0].kept is not None


TIMES = {
    "slower": [1.2, 1.21, 1.19],
    "the same": [1.01, 1.0, 0.99],
    "faster": [0.8, 0.81, 0.79],
    "stopped": [],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("race_of", TIMES)
def test_a_network_must_win_its_own_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, race_of: str
) -> None:
    """Kernels that win their races may yet gain the network nothing: then none of them is used."""
    won: dict[str, str] = {}

    def others_win(tuner: Tuner, layer: Sequence[Task]) -> None:
        for task in layer:
            others = set(task.times) - {key_of(task.space.default)}
            task.kept, task.raced = max(others, default=""), task.trials
            task.gain = race.Gain.of([1.0], [0.5])
            tuner._note(task)
            won.update(dict.fromkeys([task.workload.spec] if others else [], task.kept))

    def raced(*_: object) -> dict[str, object]:
        if not TIMES[race_of]:
            raise KeyboardInterrupt
        gain = asdict(race.Gain.of([1.0, 1.01, 0.99], TIMES[race_of]))
        return {"before_us": 1.0, "after_us": 1.2, "gain": gain}

    monkeypatch.setattr(Tuner, "_race", others_win)
    monkeypatch.setattr(network, "_raced", raced)

    def run() -> dict[str, Any]:
        return network.tune(
            DIGITS / "digits.onnx", CompileOptions(target="native"), NATIVE, folder=tmp_path,
            pattern=re.compile("BinaryConv2d"), trials=4, jobs=1,
        )  # fmt: skip

    if race_of == "stopped":
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        kept = "tuned schedules" if race_of == "faster" else "defaults"
        assert f"so the {kept} are kept" in network.text(run(), tmp_path)
    assert won
    best = log_of(tmp_path).best()
    assert best
    for workload, record in best.items():
        default = key_of(schedules.space_of(workload.kernel, NATIVE).default)
        expected = won.get(workload.spec, default) if race_of == "faster" else default
        assert key_of(record.point) == expected
    notes = log_of(tmp_path).notes().values()
    assert all((note["raced"] == 0) == (race_of == "stopped") for note in notes)


@pytest.mark.slow
def test_networks_race_in_processes_of_their_own(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn is a process that times both networks, the one first as often as the other."""
    jobs: list[dict[str, Any]] = []

    def listening(pool: Pool, batch: list[dict[str, Any]], *args: Any) -> list[dict[str, Any]]:
        jobs.extend(batch)
        return run(pool, batch, *args)

    run = Pool.run
    monkeypatch.setattr(Pool, "run", listening)
    monkeypatch.setattr(network, "TURN_SECONDS", 1e-4)
    monkeypatch.setattr(race, "TURNS", 4)
    options = CompileOptions(threads=1, tuned=False, confirm=False)
    sides = network._compiled(DIGITS / "digits.onnx", options, tuned)
    made = network._raced(sides, Setup(NATIVE))
    assert 0 < made["before_us"] <= made["before_median_us"]
    assert 0 < made["after_us"] <= made["after_median_us"]
    assert made["gain"]["low"] <= made["gain"]["ratio"] <= made["gain"]["high"]
    first = [Path(job["artifacts"][0]).stem for job in jobs]
    assert first in (["0", "1"] * (race.TURNS // 2), ["0", "1"] * race.TURNS)


FORMS = ("planes", "bytes", "pairs", "floats", "value", "table")
AFFINE = (Step("affine"),)


def levels(way: str, count: int = 5, **more: object) -> Step:
    return Step("levels", count=count, way=way, forms=FORMS, lo=-1.0, hi=0.5, **more)  # type: ignore[arg-type]


FEW = FewBitConv2d(1, 3, 4, 40, 20, (3, 3), pads=(1, 1, 1, 1), data_bits=2, weight_bits=2)
REAL = Conv2d(1, 6, 6, 3, 20, (3, 3), pads=(1, 1, 1, 1), method="filtered")
PRODUCT = BinaryConv2d("n", 1, 5, 40, 21, (1, 1), per_image=True, steps=(Step("store"),))
KINDS = [
    KERNEL.kernel,
    Elementwise("n", 3, 3, 40, steps=(Step("bits"),)),
    replace(REAL, steps=(*AFFINE, Step("add"), Step("store"), Step("bits"))),
    replace(REAL, steps=(*AFFINE, levels("value"))),
    replace(KERNEL.kernel, steps=(levels("acc"), *AFFINE, Step("bits"))),
    replace(FEW, starts=True, steps=(levels("acc"), levels("acc", 3, flip=True), Step("store"))),
    replace(FEW, method="bytes", steps=(levels("acc-scale", 7),)),
    replace(FEW, method="xor", starts=True, steps=(*AFFINE, levels("search", 15))),
    FewBitConv2d(
        "n", 1, 1, 75, 37, (1, 1), rank=2, method="floats", steps=(*AFFINE, levels("value"))
    ),
    Elementwise(1, 2, 3, 20, "NCHW", steps=(*AFFINE, levels("whole", 3))),
    Elementwise(1, 1, 1, 20, rank=2, planes=2, steps=(levels("whole", 3), Step("store"))),
    BitwiseMaxPool(1, 6, 6, 40, (2, 2), (2, 2), planes=2),
    PRODUCT,
    replace(PRODUCT, mode="and", steps=(*AFFINE, Step("store"))),
    replace(PRODUCT, ternary=True, weight_zeros=True),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: Workload.of(spec).name)
def test_every_kind_of_kernel_has_a_case(spec: Spec) -> None:
    case = Case.of(make(spec).arrays())
    assert case.difference(case.outputs) == ""
    assert case.difference(run_kernel(spec, case.inputs, NATIVE.name)) == ""
    for number, output in enumerate(case.outputs):
        other = [array.copy() for array in case.outputs]
        unsure = case.unsure[number]
        place = 0 if unsure is None else int(np.flatnonzero(unsure == 0)[0])
        other[number].flat[place] = ~output.flat[place] if output.dtype == "uint32" else 1e9
        assert case.difference(other).startswith("1 of"), number


@pytest.mark.sampled(2)
@pytest.mark.parametrize("network", ["few-bit", "attention"])
def test_networks_of_every_kind_can_be_tuned(network: str, tmp_path: Path) -> None:
    path = BREVITAS / "mlp_2w2a.qcdq.onnx"
    if network == "attention":
        path = tmp_path / "attention.onnx"
        onnx.save(test_products.built(test_products.attention), path)
    options = CompileOptions(threads=1, tuned=False)
    tasks = tasks_of(driver.kernels(path, options), NATIVE, 1)
    plan = Plan(trials=len(tasks) + 1, jobs=1, repeat_seconds=0.001)
    result = Tuner(tasks, Setup(NATIVE), tmp_path / "logs", plan, QUIET).run()
    assert result.trials == len(tasks) + 1
    assert not any(task.failed for task in result.tasks)
    artifact = bnncc.compile(path, tuning_dir=[tmp_path / "logs"], threads=1)
    assert artifact.report["summary"]["tuned"] >= len(tasks)


def test_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = str(DIGITS / "digits.onnx")
    for options, says in (
        (["--kernels", "("], "is not a regular expression"),
        (["--kernels", "nothing like it"], "no kernel matches nothing like it"),
        (["--target", "arm64"], "this machine cannot run arm64"),
        (["--measure", "instructions"], "is for Arm"),
        (["--tracker", "127.0.0.1:1"], "--tracker needs --key"),
        (["--untuned"], "--untuned cannot be combined with `tune`"),
        (["--tuning-dir", "other"], "tune takes at most one"),
    ):
        assert cli.main(["tune", model, "--tuning-dir", str(tmp_path), *options]) in (1, 2)
        assert says in capsys.readouterr().err
    assert cli.main(["compile", model, "--tuning-dir", str(tmp_path / "none")]) == 2
    assert "no such folder of records" in capsys.readouterr().err


def test_the_records_that_come_with_bnncc_apply() -> None:
    for path in records.shipped().glob(f"*/{records.RECORDS}"):
        content = described(path.parent)
        assert content["stale"] == []
        assert content["kernels"]
        assert all(kernel["trials"] > 0 for kernel in content["kernels"])
        sessions = content["sessions"]
        assert all({"device", "tvm", "bnncc", "session"} <= entry.keys() for entry in sessions)
        assert not any(b"/tmp" in p.read_bytes() for p in path.parent.iterdir())


def test_interrupts_wait_for_the_end_of_a_shield() -> None:
    done = []

    def shielded(interrupts: Interrupts) -> None:
        with interrupts.shield():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("the rest of the block")

    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            shielded(interrupts)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert done


@pytest.mark.slow
def test_interrupted_by_the_user(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "bnncc", "tune", str(DIGITS / "digits.onnx"), "--trials", "400",
         "--tuning-dir", str(tmp_path)],
        env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    found = tmp_path / NATIVE.family / records.RECORDS
    until(lambda: found.exists() and found.stat().st_size > 0, "records", 300)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted; measurements are kept" in err
    assert log_of(tmp_path).records
