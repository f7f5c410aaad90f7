"""On an emulated GPU: the kernels that test_cuda_device.py compares with oracles on a real one.

All of them in slow tests; samples of some targets in the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_emulator import COMPILER
from tests.cuda_tools import MAIN, on_emulated_gpu

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64"),
    pytest.mark.sampled(4),
]
PARTS, SAMPLE = 8, 40
SCRIPT = """
from bnncc.targets import catalog
from tests import cuda_cases
from tests.runtime.test_cuda_device import check

check(cuda_cases.odd(catalog.resolve("TARGET"))[PART], "TARGET")
"""


def compared(target: str, part: str, folder: Path) -> None:
    script = SCRIPT.replace("TARGET", target).replace("PART", part)
    done = on_emulated_gpu(script, folder, target.removeprefix("cuda-sm").rstrip("a"))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("number", range(len(MAIN)))
def test_some_kernels(number: int, tmp_path: Path) -> None:
    compared(MAIN[number], f"{number}::{SAMPLE}", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", MAIN)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_kernels(part: int, target: str, tmp_path: Path) -> None:
    compared(target, f"{part}::{PARTS}", tmp_path)
