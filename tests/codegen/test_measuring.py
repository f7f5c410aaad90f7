"""Short measurements at compile time: what they may decide, and that nothing can break them."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import bnncc
from bnncc import driver, schedules
from bnncc.cli import main as cli
from bnncc.codegen import measuring
from bnncc.codegen.measuring import TURNS, Cache, Stopwatch, choose, seconds
from bnncc.records.database import Records
from bnncc.records.workload import Workload
from bnncc.schedules.space import Point
from bnncc.targets import catalog, host
from bnncc.topi_binary.spec import BinaryConv2d, Spec, Step
from tests.devices import DIGITS

pytestmark = pytest.mark.sampled(2)

KERNEL = BinaryConv2d("n", 8, 8, 64, 32, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))
WORKLOAD = Workload.of(KERNEL)
NATIVE = catalog.native()
DEFAULT, *OTHERS = schedules.space_of(WORKLOAD.kernel, NATIVE).points()
EQUAL, LESS, NOISE = [2.0] * TURNS, [1.5] * TURNS, [1.0, 2.9] * (TURNS // 2)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own; return its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "bnncc" / f"{host.core_model()}.json"


def others(*points: Point) -> Records:
    """Return records of another CPU with these points."""
    known = Records(NATIVE)
    known._elsewhere[WORKLOAD] = list(points)
    return known


AMX = catalog.resolve("x86-64-v4-amx")
LAYER = BinaryConv2d(1, 14, 14, 256, 256, (3, 3), pads=(1, 1, 1, 1), steps=(Step("threshold"),))


class Fake(Stopwatch):
    """Says what it was told, and what it was asked."""

    def __init__(self, *times: Sequence[float]) -> None:
        super().__init__(NATIVE)
        self.said, self.asked = times, 0

    def times_of(self, kernels: Sequence[tuple[Spec, Point | None]]) -> list[list[float]] | None:
        self.asked += 1
        return [list(t) for t in self.said] or None


def found(known: Records) -> Point | None:
    taken = known.find(WORKLOAD.spec, 1)
    return None if taken is None else taken[0]


@pytest.mark.parametrize(
    ("times", "wins"),
    [
        ((EQUAL, LESS, EQUAL), 0),
        ((EQUAL, EQUAL, LESS), 1),
        ((EQUAL, EQUAL, NOISE), None),
        ((LESS, EQUAL, EQUAL), None),
        ((), None),  # no time, or no kernel
    ],
)
def test_what_is_faster_beyond_noise_is_used(
    times: tuple[list[float], ...], wins: int | None, file: Path
) -> None:
    candidates = OTHERS[3], OTHERS[5]
    for measured in (True, False):  # the second time, the cache knows
        known = others(*candidates, candidates[0])
        with Fake(*times) as watch:
            choose(known, {WORKLOAD.spec: 2}, watch)
        assert found(known) == (None if wins is None else candidates[wins])
        assert watch.asked == (measured or not times)
    assert file.exists() == bool(times)


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ((EQUAL, [time * 0.7 for time in EQUAL]), "words"),
        ((EQUAL, [time * 0.8 for time in EQUAL]), "fours"),  # may be another hyperthread
        ((LESS, EQUAL), "fours"),
        ((), "fours"),
    ],
)
def test_weight_orders_are_chosen_by_measurement(
    times: tuple[list[float], ...], wanted: str
) -> None:
    assert schedules.weight_orders(LAYER, AMX) == ("fours", "words")
    for measured in (True, False):
        known = Records(AMX)
        with Fake(*times) as watch:
            known.undecided = partial(measuring.weight_order, watch)
            assert schedules.with_weight_order(LAYER, AMX, known).weight_order == wanted
            plain = catalog.resolve("x86-64-v4-vpopcntdq")
            assert schedules.with_weight_order(LAYER, plain, known).weight_order == "words"
        assert watch.asked == (measured or not times)


def test_kernels_of_several_orders_are_timed() -> None:
    wide = replace(KERNEL, channels=128)
    times = Stopwatch(NATIVE).times_of([(KERNEL, None), (wide, None)])
    assert times is not None
    assert all(0 < t < 1 for turns in times for t in turns)


def test_nothing_is_measured_where_there_is_no_choice() -> None:
    recorded = others(OTHERS[3])
    recorded.take(WORKLOAD.spec, OTHERS[1])
    for known in (Records(NATIVE), others(DEFAULT), others({"no": 1}), recorded):
        watch = Fake(EQUAL, LESS)
        choose(known, {WORKLOAD.spec: 1}, watch)
        assert not watch.asked
    assert found(recorded) == OTHERS[1]


def test_kernels_are_timed_in_turns_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Stopwatch(NATIVE).times(WORKLOAD.kernel, [DEFAULT, OTHERS[0]])
    assert times is not None
    assert [len(turns) for turns in times] == [TURNS, TURNS]
    assert all(0 < t < 1 for turns in times for t in turns)
    assert Stopwatch(NATIVE).times(WORKLOAD.kernel, [{"no": 1}]) is None
    monkeypatch.setattr(measuring, "SECONDS", 0.0)
    assert Stopwatch(NATIVE).times(WORKLOAD.kernel, [DEFAULT]) is None


def test_the_longest_kernels_come_first() -> None:
    large = Workload.of(BinaryConv2d(1, 56, 56, 64, 64, (3, 3), pads=(1, 1, 1, 1)))
    known, order = others(OTHERS[3]), []
    space = schedules.space_of(large.kernel, NATIVE)
    known._elsewhere[large] = [next(p for p in space.points() if p != dict(space.default))]

    class Listening(Fake):
        def times(self, spec: Spec, points: Sequence[Point]) -> None:
            order.append(spec)

    choose(known, {WORKLOAD.spec: 1, large.spec: 1}, Listening())
    assert order == [large.kernel, WORKLOAD.kernel]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\x00", b"[" * 100_000, b'{"a": 1'])
def test_a_damaged_cache_is_an_empty_one(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    cache = Cache()
    with pytest.raises(KeyError):
        cache.get("a")
    cache.put("a", 2)
    cache.save()
    assert json.loads(file.read_text()) == {"a": 2}


@pytest.mark.parametrize("value", [None, 7, -1, "1", [1], True, 1.5])
def test_a_strange_value_is_measured_again(value: object) -> None:
    watch = Fake(EQUAL, EQUAL)
    watch.cache.put(watch.key(WORKLOAD.spec, [DEFAULT, OTHERS[3]]), value)
    known = others(OTHERS[3])
    choose(known, {WORKLOAD.spec: 1}, watch)
    assert watch.asked
    assert found(known) is None


@pytest.mark.parametrize("where", ["a file", "read-only", "relative", "homeless", "nowhere"])
def test_a_cache_that_cannot_be_written_is_done_without(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    if where == "a file":
        place.write_text("")
    elif where == "read-only":
        place.mkdir()
        (place / "bnncc").symlink_to("/proc/self")  # nobody writes there, not even root
    monkeypatch.setenv("XDG_CACHE_HOME", "relative" if where == "relative" else str(place))
    if where == "relative":  # is no cache folder, says the specification
        monkeypatch.setenv("HOME", str(place))
        monkeypatch.chdir(tmp_path)
    if where == "homeless":  # as in a container, for a user that it does not know
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
        monkeypatch.chdir(tmp_path)
    cache = Cache()
    cache.put("a", 1)
    cache.save()
    assert cache.get("a") == 1
    assert not (tmp_path / "relative").exists()
    assert not (tmp_path / "~").exists()
    assert list(tmp_path.rglob("*.json")) == [] or where in ("relative", "nowhere")


def test_two_processes_keep_what_both_found(file: Path) -> None:
    first, second = Cache(), Cache()
    for number, cache in enumerate((first, second)):
        cache.put(str(number), number)
        cache.save()
    assert json.loads(file.read_text()) == {"0": 0, "1": 1}
    assert os.listdir(file.parent) == [file.name]


def test_the_time_of_kernels_is_their_sum() -> None:
    assert seconds({WORKLOAD.spec: 3}, Fake(NOISE)) == pytest.approx(3.0)
    assert seconds({WORKLOAD.spec: 3}, Fake()) is None
    assert seconds({}, Fake()) == 0.0


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let kernels that round take twice as long as others; return how often that was asked."""
    asked: list[int] = []

    def said(kernels: dict[str, int], watch: Stopwatch) -> float:
        asked.append(len(kernels))
        return sum(1e-6 if '"operands": "float32"' in k else 2e-6 for k in kernels)

    monkeypatch.setattr(measuring, "seconds", said)
    return asked


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"first_layer": "int8"}, True),
        ({"first_layer": "int8", "measure": False}, False),
        ({"first_layer": "int8", "target": NATIVE.family}, False),
        ({}, False),
    ],
)
def test_an_option_that_loses_says_so(
    measured: list[int], options: dict[str, object], warns: bool
) -> None:
    asked = {"threads": 1, **options}
    artifact = bnncc.compile(DIGITS / "digits.onnx", **asked)  # type: ignore[arg-type]
    lost = [line for line in artifact.report["warnings"] if "slower" in line]
    assert bool(measured) == bool(lost) == warns
    if warns:
        assert measured == [1, 1]  # only what differs: the first layer
        assert lost == [
            "--first-layer int8 is slower than float32 on this machine: 2 us for its kernels, "
            "1 us for those without it (2.00 x)"
        ]


def test_a_named_target_is_never_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(driver, "_measured", never)
    model, out = str(DIGITS / "digits.onnx"), str(tmp_path / "a.bnncc")
    assert cli.main(["compile", model, "-o", out, "--no-measure"]) == 0
    assert cli.main(["compile", model, "-o", out, "--target", NATIVE.family]) == 0
    assert cli.main(["compile", model, "-o", out]) == 70
