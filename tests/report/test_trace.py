"""`bench --trace`: the file keeps to Chrome's Trace Event Format, and holds every kernel once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bnncc.cli.main import main
from bnncc.report.trace import trace
from tests.tiny import tiny

jsonschema = pytest.importorskip("jsonschema", reason="no jsonschema")

# From "Trace Event Format" (Google, 2016), "JSON Object Format" and the events used: complete
# events need a name, a phase, a time and a duration in microseconds, and a process and a thread;
# metadata events need the name of what they say, which stands in `args.name`.
COMMON = {
    "name": {"type": "string", "minLength": 1},
    "ph": {"enum": ["X", "M"]},
    "pid": {"type": "integer", "minimum": 0},
    "tid": {"type": "integer", "minimum": 0},
    "args": {"type": "object"},
}
COMPLETE = {
    "required": ["name", "cat", "ph", "ts", "dur", "pid", "tid"],
    "additionalProperties": False,
    "properties": {
        **COMMON,
        "ph": {"const": "X"},
        "cat": {"type": "string"},
        "ts": {"type": "number", "minimum": 0},
        "dur": {"type": "number", "minimum": 0},
    },
}
METADATA = {
    "required": ["name", "ph", "pid", "args"],
    "additionalProperties": False,
    "properties": {
        **COMMON,
        "ph": {"const": "M"},
        "name": {
            "enum": [
                *("process_name", "process_labels", "process_sort_index"),
                *("thread_name", "thread_sort_index"),
            ]
        },
        "args": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}},
        },
    },
}
SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph"],
                "properties": COMMON,
                "oneOf": [COMPLETE, METADATA],
            },
        },
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
    },
}


def valid(content: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(content))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, made = tmp_path / "a.bnncc", tmp_path / "trace.json"
    tiny().save(artifact)
    given = ["bench", str(artifact), "--threads", "1", "--repeat", "3"]
    assert main([*given, "--json", "--trace", str(made)]) == 0
    bench = json.loads(capsys.readouterr().out)
    content = json.loads(made.read_text())
    assert valid(content)
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    network, *kernels = events
    assert network["dur"] == bench["network"]["median_us"]
    assert [event["args"]["name"] for event in kernels] == [k["name"] for k in bench["kernels"]]
    assert [event["name"] for event in kernels] == ["mm", "bias +1"]
    assert kernels[1]["args"]["nodes"] == ["bias", "cast"]
    assert [event["dur"] for event in kernels] == [k["median_us"] for k in bench["kernels"]]
    end = 0.0
    for event in kernels:  # one after the other, on a track of their own
        assert event["ts"] == pytest.approx(end)
        assert event["tid"] != network["tid"]
        end = event["ts"] + event["dur"]
    assert main([*given, "--trace", str(artifact)]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert main([*given, "--trace", str(made), "--bundle", str(tmp_path / "b")]) == 2
    assert "--trace needs times" in capsys.readouterr().err


def test_hostile_names_are_data() -> None:
    name = 'a"},{"ph":"X"\n\x00'
    kernel = {"name": "k", "op": "conv", "layers": [name], "median_us": 1.5, "macs": 0}
    bench = {
        "model": name, "target": "native", "cpu": "", "threads": 1, "repeat": 1,
        "network": {"median_us": 2.0}, "kernels": [kernel, kernel],
    }  # fmt: skip
    content = json.loads(json.dumps(trace(bench)))
    assert valid(content)
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events] == [name] * 3


@pytest.mark.parametrize("damage", ["name", "ph", "ts", "dur", "pid", "tid"])
def test_the_schema_refuses(damage: str) -> None:
    content = trace(
        {
            "model": "m", "target": "t", "cpu": "", "threads": 1, "repeat": 1,
            "network": {"median_us": 2.0}, "kernels": [],
        }
    )  # fmt: skip
    assert valid(content)
    del content["traceEvents"][-1][damage]
    assert not valid(content)
