"""Artifacts for 64-bit Arm, made on whatever machine this is."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bnncc.cli import main as cli
from bnncc.targets import catalog
from bnncc.verification.confirm import runs_here
from tests.devices import DIGITS, ENVIRONMENT

pytestmark = pytest.mark.links("arm64")
MODEL = DIGITS / "digits.onnx"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", ["arm64-a53", "arm64-dotprod"])
def test_same_bytes_each_time(target: str, tmp_path: Path) -> None:
    made = []
    every = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "bnncc", "compile", str(MODEL), "--target", target]
    for seed, cpus in (("1", every), ("2", every[:1])):  # other orders of sets, fewer processors
        folder = tmp_path / seed
        folder.mkdir()
        subprocess.run(
            [*command, "-o", "out.bnncc"],
            cwd=folder, check=True, timeout=300, env={**ENVIRONMENT, "PYTHONHASHSEED": seed},
            preexec_fn=functools.partial(os.sched_setaffinity, 0, cpus),
        )  # fmt: skip
        made.append((folder / "out.bnncc").read_bytes())
    assert made[0] == made[1]
    assert str(tmp_path).encode() not in made[0]


def test_what_was_not_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {}
    for target in ("native", "arm64"):
        output = ("-o", str(tmp_path / f"{target}.bnncc"))
        assert cli.main(["compile", str(MODEL), "--target", target, *output]) == 0
        lines[target] = capsys.readouterr().err.splitlines()
    assert len(lines["native"]) == 1
    if not runs_here(catalog.CATALOG["arm64"]):
        assert len(lines["arm64"]) == 2
        assert "was not run on this machine: `bnncc deploy` checks it" in lines["arm64"][1]
