"""ONNX's own node tests: each is right, or is listed with the reason why it is not supported.

`data/onnx_nodes_unsupported.txt` may only shrink: a listed test that passes fails here, and so does
one that fails and is not listed. `make test` takes a sample, `make test-all` all of them.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest

import bnncc
from bnncc.errors import BnnccError, VerificationError
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from tests import onnx_node_cases as cases

LIST = Path(__file__).parents[1] / "data" / "onnx_nodes_unsupported.txt"
SHARDS = 160


def unsupported() -> dict[str, str]:
    """Return the listed tests, with the reason."""
    reasons: dict[str, str] = {}
    reason = ""
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if line.startswith(" "):
            reasons[line.strip()] = reason
        else:
            reason = line.strip()
    return reasons


def outcome(name: str) -> str:
    """Return what is wrong with a test, nothing if it is right."""
    case = cases.case(name)
    try:
        made = bnncc.compile(case.model, threads=1).run(case.feeds)
    except VerificationError as error:
        return f"a bug: {error}"
    except BnnccError as error:
        return f"refused: {error}"
    except Exception as error:  # the finding itself
        return f"a traceback: {type(error).__name__}: {error}"
    differ = cases.differences(case, {k: np.asarray(v) for k, v in made.items()})
    return f"wrong: {differ}" if differ else ""


def check(names: list[str]) -> None:
    listed, failures = unsupported(), []
    for name in names:
        found = outcome(name)
        if name in listed and not found:
            failures.append(f"{name} passes: take it out of {LIST.name}")
        elif found and (name not in listed or not found.startswith("refused: ")):
            failures.append(f"{name}: {found}")
    assert not failures, "\n".join(failures)


def shard(number: int) -> list[str]:
    return [n for n in cases.names() if zlib.crc32(n.encode()) % SHARDS == number]


def test_a_sample_of_node_tests() -> None:
    check(shard(0))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, SHARDS))
def test_all_node_tests(number: int) -> None:
    check(shard(number))


def test_evaluation_of_node_tests() -> None:
    """What compiled networks are compared with is what ONNX says, not what bnncc says."""
    listed, failures = unsupported(), []
    every = 1 if os.environ.get("BNNCC_TEST_ALL") else 3
    for name in cases.names()[::every]:
        case = cases.case(name)
        try:
            made = evaluate(load(case.model), case.feeds)
        except BnnccError as error:
            if name not in listed:
                failures.append(f"{name}: {error}")
            continue
        if differ := cases.differences(case, {k: np.asarray(v) for k, v in made.items()}):
            failures.append(f"{name}: {differ}")
    assert not failures, "\n".join(failures)


def test_the_list_names_tests_of_onnx() -> None:
    assert set(unsupported()) <= set(cases.names())


def test_a_constant_of_bfloat16_is_an_output() -> None:
    check(["test_range_bfloat16_type_positive_delta"])
