"""What ``--dump-ir`` and ``--time-passes`` say of the passes, and of rewriting without end."""

from __future__ import annotations

import re
from pathlib import Path

import onnx.parser
import pytest

from bnncc.cli import main as cli
from bnncc.frontend.onnx import load
from bnncc.trace import Trace
from bnncc.transform import simplify
from bnncc.transform.pipeline import PASSES
from tests.devices import DIGITS


def test_each_step_is_written_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ir, out = tmp_path / "ir", tmp_path / "digits.bnncc"
    args = ["compile", DIGITS / "digits.onnx", "-o", out, "--dump-ir", ir, "--time-passes"]
    assert cli.main([*map(str, args)]) == 0
    names = [step.name for step in PASSES]
    files = sorted(path.name for path in ir.iterdir())
    wanted = ["load", "options", *names, "relax", "schedule"]
    assert [f.partition("-")[2].rpartition(".")[0] for f in files] == [
        name.replace(" ", "-") for name in wanted
    ]
    assert "bnncc.Sign" not in (ir / files[wanted.index("simplify")]).read_text()
    assert "bnncc.Sign" in (ir / files[wanted.index("signs")]).read_text()
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("  time s time %  pass") + 1
    rows = [
        re.fullmatch(r" *[\d.]+ +([\d.]+)  ( *)(\S.*?)(?:  +(\S.*))?", x) for x in lines[start:]
    ]
    found = [row for row in rows if row is not None and not row[2]]
    steps = {row[3]: float(row[1]) for row in found}
    assert steps.pop("total") == 100
    purposes = {row[3]: row[4] for row in found}
    for step in PASSES:
        assert purposes[step.name] == step.purpose
        assert f"# {step.purpose}\n" in (ir / files[wanted.index(step.name)]).read_text()
    assert [*steps] == [
        *("start TVM", "load", "options", *names, "confirm passes", "relax", "legalize", "measure"),
        *("schedule", "build", "link", "self-check"),
    ]
    assert sum(steps.values()) == pytest.approx(100, abs=0.1 * len(steps))


def test_endless_rewriting_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplify, "_REWRITES", (("restless", lambda graph: True),))
    trace = Trace()
    text = '<ir_version: 8, opset_import: ["" : 9]> g (float[2] x) => (float[2] y) { y = Relu (x) }'
    simplify.simplify(load(onnx.parser.parse_model(text)), trace)
    assert "stopped after" in trace.warnings[0]
