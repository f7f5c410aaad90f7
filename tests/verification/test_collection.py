"""Compile every model of the collection and compare it with the oracle; count its binary operators.

A representative part runs in `make test`, all of it in `make test-all`.
"""

from __future__ import annotations

import pytest

import bnncc
from tests.collection import files, handmade, oracle
from tests.collection.builder import Case

pytestmark = pytest.mark.sampled(5)


def _parameters() -> list:
    return [
        pytest.param(case, id=case.name, marks=() if case.quick else pytest.mark.slow)
        for case in [*handmade.cases(), *files.cases()]
    ]


@pytest.mark.parametrize("case", _parameters())
def test_model(case: Case) -> None:
    artifact = bnncc.compile(case.model, target="native")
    summary = artifact.report["summary"]
    for feeds in case.feeds:
        verdict = oracle.compare(case.model, feeds, artifact.run(feeds))
        assert verdict.right, f"{case.pattern}: {verdict.kind}: {verdict.text} {verdict.ties}"
    rest = summary["float"] + summary["few_bit"]
    if case.binary is not None:
        assert summary["binary"] == case.binary, f"{case.pattern}: {summary}"
    if case.float_ is not None:
        assert rest == case.float_, f"{case.pattern}: {summary}"
