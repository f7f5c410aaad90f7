"""Networks as other tools export them, as C and WebAssembly on every kind of machine, by an oracle.

Each network is compiled as a user would, called from a program of its own, and its outputs compared
with those of `tests.collection.oracle`, which shares no code with the compiler.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest

from bnncc.codegen.c_network import CNetwork
from bnncc.driver import compile_c
from bnncc.errors import TargetError
from bnncc.options import CompileOptions
from tests import c_programs
from tests.c_programs import MACHINES
from tests.collection import cases_deployed, files, handmade, oracle

pytestmark = pytest.mark.sampled(3)

CASES = {case.name: case for case in [*handmade.cases(), *files.cases()]}
"""The whole collection."""


def _parameters() -> list:
    """Return all machines for networks like those of devices, and one machine for each other.

    Each machine has one network that is not slow.
    """
    machines, chosen = list(MACHINES), []
    others = [name for name in CASES if name not in cases_deployed.NAMES]
    for number, name in enumerate([*cases_deployed.NAMES, *others]):
        for place in range(len(machines) if name in cases_deployed.NAMES else 1):
            machine = machines[(number + place) % len(machines)]
            quick = number < len(machines) and place == 0
            marks = () if quick else pytest.mark.slow
            chosen.append(pytest.param(name, machine, id=f"{name}-{machine}", marks=marks))
    return chosen


@functools.lru_cache(maxsize=8)
def compiled(name: str, target: str) -> CNetwork:
    form = "wasm" if target.startswith("wasm") else "c"
    return compile_c(CASES[name].model, CompileOptions(target=target), form=form)


@functools.lru_cache(maxsize=2)
def evaluated(name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], oracle.Evaluation]:
    """Return a model, inputs that meet no tie, and all that it makes of them."""
    case = CASES[name]
    model = oracle.load(case.model)
    feeds = oracle.tie_free_feeds(model, domain=case.domain, seed=1)
    return model, feeds, oracle.evaluate(model, feeds)


@pytest.mark.parametrize(("name", "machine"), _parameters())
def test_network(name: str, machine: str) -> None:
    if missing := MACHINES[machine].missing:
        pytest.skip(f"needs {missing}")
    model, feeds, right = evaluated(name)
    try:
        network = compiled(name, MACHINES[machine].target)
    except TargetError as error:
        if "needs TVM's runtime" in str(error):
            pytest.skip(str(error))
        raise
    like = {info.name: right.values[info.name].data for info in model.graph.output}
    made = c_programs.outputs(MACHINES[machine], network, feeds, like)
    verdict = oracle.judge(model, right, made)
    assert verdict.right, f"{verdict.kind}: {verdict.text} {verdict.ties}"
