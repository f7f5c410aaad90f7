"""Deprecated names: they work, say what took their place, and mean the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import bnncc
from bnncc import report
from bnncc.cli import main as cli
from bnncc.cli.arguments import OLD_VALUES, RENAMED, renamed
from bnncc.options import CompileOptions
from bnncc.runtime import container
from bnncc.runtime.artifact import Artifact
from tests.devices import DIGITS
from tests.tiny import expected, tiny

MODEL = str(DIGITS / "digits.onnx")


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_options(old: str) -> None:
    new = RENAMED[old]
    for words, wanted in (([old, "x"], [new, "x"]), ([f"{old}=x"], [f"{new}=x"])):
        made, said = renamed(["tune", *words])
        assert made == ["tune", *wanted]
        (line,) = said
        assert line == (f"{old} is deprecated and will be removed in the next version: use {new}")
    assert renamed(["tune", new, "x"]) == (["tune", new, "x"], [])
    assert renamed(["run", "--input", "records"]) == (["run", "--input", "records"], [])


@pytest.mark.parametrize("option", sorted(OLD_VALUES))
def test_values(option: str) -> None:
    for old, new in OLD_VALUES[option].items():
        for words, wanted in (([option, old], [option, new]), ([f"{option}={old}"], None)):
            made, said = renamed(["compile", *words])
            assert made == ["compile", *(wanted or [f"{option}={new}"])]
            assert f"{option} {old} is deprecated" in said[0]
        assert renamed(["compile", "--target", old])[1] == []


def test_the_command_line_warns_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    old = ("--records", "logs", "--assume", "nothing", "--few-bit=planes")
    new = ("--tuning-dir", "logs", "--assume", "none", "--few-bit=bitplanes")
    # What is measured on this machine may differ between two compilations.
    assert cli.main(["compile", MODEL, "-o", "old", "--no-measure", *old]) == 0
    warnings = [w for w in capsys.readouterr().err.splitlines() if w.startswith("warning: ")]
    assert [w.split(" is deprecated")[0] for w in warnings] == [
        "warning: --records",
        "warning: --assume nothing",
        "warning: --few-bit planes",
    ]
    assert cli.main(["compile", MODEL, "-o", "new", "--no-measure", *new]) == 0
    assert "deprecated" not in capsys.readouterr().err
    assert Path("old").read_bytes() == Path("new").read_bytes()


def test_python() -> None:
    with pytest.warns(DeprecationWarning, match="`tuned` is deprecated .* use `untuned`"):
        old = bnncc.compile(MODEL, tuned=False, threads=1)
    with pytest.warns(DeprecationWarning, match="`records` is deprecated .* use `tuning_dir`"):
        bnncc.compile(MODEL, records=(), threads=1)
    new = bnncc.compile(MODEL, untuned=True, threads=1, assume="none")
    assert old.manifest == new.manifest
    assert CompileOptions(assume="nothing", few_bit="planes") == CompileOptions(few_bit="bitplanes")


def test_artifacts(tmp_path: Path) -> None:
    tiny().save(tmp_path / "a.bnncc")
    with pytest.warns(DeprecationWarning, match="`for_this_machine` .* use `check_host`"):
        artifact = Artifact.load(tmp_path / "a.bnncc", for_this_machine=False)
    with pytest.warns(DeprecationWarning, match=r"`Artifact.on` .* use `Artifact.on_device`"):
        twin = artifact.on(None)
    x = np.ones((1, 8), np.float32)
    np.testing.assert_array_equal(
        twin.run({"x/in:0": x, "y": x})["product"], expected(x, x)["product"]
    )


def test_reports_have_both_keys() -> None:
    artifact = tiny()
    for kernel in artifact.report["kernels"]:
        assert kernel["zeros"] == kernel["zero_plane_args"]
        assert kernel["bitstream"] == kernel["reference_memory"]
    assert artifact.report["format"] == 2
    for result in artifact.selfcheck():
        assert result["right"] is result["passed"] is True
        assert result["difference"] == result["max_abs_error"] == 0
    nested = {"right": 0, "outputs": [{"passed": True, "max_abs_error": 0.5}]}
    (output,) = report.with_old_keys(nested)["outputs"]
    assert output == {"passed": True, "max_abs_error": 0.5, "right": True, "difference": 0.5}


def test_verify_and_the_command_line_write_both(capsys: pytest.CaptureFixture[str]) -> None:
    artifact = bnncc.compile(MODEL, threads=1)
    artifact.save("/dev/null")
    from bnncc.agreement import verify

    result = verify(MODEL, artifact)
    assert result["format"] == 2
    assert result["passed"] is result["right"] is True
    assert result["verdict"] == "pass"
    for part in ("layers", "outputs", "kernels"):
        assert all(x["right"] == x["passed"] for x in result[part])
        assert all(x["difference"] == x["max_abs_error"] for x in result[part])


def test_artifacts_with_old_reports_load(tmp_path: Path) -> None:
    new = tiny()
    content = json.loads(json.dumps(new.manifest))
    content["report"]["format"] = 1
    old_names = {new_name: old for old, new_name in report.RENAMED.items()}
    content["report"]["kernels"] = [
        {old_names.get(k, k): v for k, v in kernel.items()}
        for kernel in content["report"]["kernels"]
    ]
    Artifact(container.sealed(content, new._members), new._members).save(tmp_path / "old.bnncc")
    loaded = Artifact.load(tmp_path / "old.bnncc")
    assert loaded.report["kernels"] == new.report["kernels"]
    loaded.save(tmp_path / "again.bnncc")
    assert Artifact.load(tmp_path / "again.bnncc").manifest == new.manifest
