"""Networks in which no sum is rounded agree with their models, in whatever order code adds."""

from __future__ import annotations

import numpy as np
import pytest

import bnncc
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from tests.exact_networks import Exact, exact

SMALL = ("vehicle", "cifar")
PLAIN = [
    pytest.param(network, id=network.name, marks=() if network.name in SMALL else pytest.mark.slow)
    for network in exact()
    if not network.options
]
ROUNDING = ("GlobalAveragePool", "Gemm", "Flatten")
"""Operators of the last layers."""


@pytest.mark.parametrize("network", PLAIN)
def test_compiled_networks_agree(network: Exact) -> None:
    feeds, right = network.case(images=3)
    made = bnncc.compile(network.make(3), target="native").run(feeds)
    for name, wanted in right.items():
        assert np.abs(made[name] - wanted).max() <= network.tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("network", PLAIN)
def test_no_sum_is_rounded(network: Exact) -> None:
    """All values are multiples of 2**-14 below 2**9: 23 bits, which float32 holds."""
    feeds, _ = network.case()
    graph = load(network.make(1))
    names = [node.outputs[0] for node in graph.nodes if node.op not in ROUNDING]
    values = evaluate(graph, feeds, names)
    for name in names:
        scaled = values[name].astype(np.float64) * 2**14
        assert (scaled == np.rint(scaled)).all(), name
        assert np.abs(scaled).max() < 2**23, name
