"""The check of the tuner: pairs times rightly, and fails where a network got slower."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tune_check")


def fake(times, commands):
    """Return a `run` that answers what an artifact takes by its name."""

    def run(checkout, *command):
        commands.append((checkout, command))
        if "--times" not in command:
            return ""
        return json.dumps([times[checkout][Path(p).name.split(".")[1]] for p in command[2:]])

    return run


def checked(script, monkeypatch, tmp_path, times, *options):
    commands: list = []
    monkeypatch.setattr(script, "run", fake(times, commands))
    here = times[ROOT]
    monkeypatch.setattr(script, "same_code", lambda *_: here["untuned"] == here["tuned"])
    result = tmp_path / "made.json"
    arguments = ["tune_check.py", str(tmp_path / "work"), "digits", "--json", str(result), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        script.main()
    return end.value.code, json.loads(result.read_text()), commands


def test_both_tuners_are_compared_with_their_own_defaults(script, monkeypatch, tmp_path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    times = {ROOT: {"untuned": 2.0, "tuned": 1.0}, other: {"untuned": 4.0, "tuned": 3.0}}
    code, made, commands = checked(script, monkeypatch, tmp_path, times, "--beside", str(other))
    assert code == 0
    assert (made["mean"], made["beside_mean"]) == pytest.approx((0.5, 0.75))
    orders = [[Path(p).name.split(".")[1] for p in c[2:]] for _, c in commands if "--times" in c]
    assert orders.count(["tuned", "untuned"]) == orders.count(["untuned", "tuned"])
    tunes = [command for _, command in commands if "tune" in command]
    assert all(command[command.index("--trials") + 1] == "64" for command in tunes)
    table = script.TABLES["tune-check"][0](made)
    assert "| geometric mean |  | 0.500 |  | 0.750 |" in table


def test_a_slower_network_is_an_error(script, monkeypatch, tmp_path) -> None:
    times = {ROOT: {"untuned": 1.0, "tuned": 1.01}}
    code, made, _ = checked(script, monkeypatch, tmp_path, times)
    assert code == 1
    assert made["networks"][0]["low"] > 1
    assert "| geometric mean |  | 1.010 |  |\n" in script.TABLES["tune-check"][0](made)


def test_a_network_that_kept_its_defaults_is_not_timed(script, monkeypatch, tmp_path) -> None:
    times = {ROOT: {"untuned": 1.0, "tuned": 1.0}}
    code, made, commands = checked(script, monkeypatch, tmp_path, times)
    assert code == 0
    assert made["mean"] == 1.0
    assert not [command for _, command in commands if "--times" in command]
    assert "| digits |  | 1.000 | the same code |" in script.TABLES["tune-check"][0](made)
    assert checked(script, monkeypatch, tmp_path, times)[2] == []  # it was done
