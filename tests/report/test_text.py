"""The text of `explain`: columns that fit, every operator, and each reason once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tvm

import bnncc
from bnncc import report
from bnncc.schedules.multithreading import estimated
from bnncc.targets.catalog import resolve
from bnncc.topi_binary.spec import BinaryConv2d
from tests.collection.builder import Net
from tests.tiny import tiny


@pytest.fixture(scope="module")
def gated() -> dict[str, Any]:
    """Return the report of a binary layer beside a sigmoid that takes longer than the layer."""
    net = Net(seed="gated")
    x = net.input("x", [1, 32, 28, 28])
    weight = net.rng.choice([-1.0, 1.0], (32, 32, 3, 3))
    one, minus, zero = net.const(1.0), net.const(-1.0), net.const(0.0)
    sign = net.op("Where", net.op("GreaterOrEqual", x, zero), one, minus)
    y = net.op("Conv", sign, net.const(weight), pads=[1, 1, 1, 1])
    net.outputs.append(net.op("Mul", y, net.op("Sigmoid", x)))
    return bnncc.compile(net.model(), threads=1).report


def test_every_kernel_has_a_time(gated: dict[str, Any]) -> None:
    kernels = gated["kernels"]
    assert all(kernel["estimated_us"] > 0 for kernel in kernels)
    (sigmoid,) = [kernel for kernel in kernels if "sigmoid" in kernel["name"]]
    (layer,) = [kernel for kernel in kernels if kernel["layers"]]
    assert sigmoid["estimated_us"] > layer["estimated_us"]  # 25 thousand calls of exp
    text = report.text(gated)
    first = text.split("\n\n")[0]
    assert all(k["nodes"][0] in first for k in kernels)
    rows = report.text(gated, sort="time").splitlines()
    assert rows[2].split()[:2] == [*sigmoid["nodes"], "other"]
    assert sum(float(row.split()[-1]) for row in first.splitlines()[2:]) == pytest.approx(
        100, abs=1
    )


def test_what_is_read_is_what_was_made(gated: dict[str, Any]) -> None:
    """Bits of the input, the layer, a sigmoid of the input, and the product of both."""
    assert [kernel["reads"] for kernel in gated["kernels"]] == [[], [0], [], [1, 2]]


def test_measured_times_replace_estimates(gated: dict[str, Any]) -> None:
    bench = {
        "cpu": "a CPU", "threads": 1, "repeat": 3,
        "network": {"median_us": 12.5},
        "kernels": [{"name": k["name"], "median_us": 4.0} for k in gated["kernels"]],
    }  # fmt: skip
    text = report.text(gated, bench=bench)
    count = len(gated["kernels"])
    assert all(" 4.00 " in row for row in text.splitlines()[2 : 2 + count])
    assert f"time     {4 * count:.1f} us in kernels, each timed alone; network 12.5 us" in text


@pytest.mark.parametrize("width", [40, 50, 63, 80, 100, 200])
def test_lines_fit(gated: dict[str, Any], width: int) -> None:
    long = json.loads(json.dumps(gated))
    name = "a.very.long.name/of/a layer" * 9
    long["layers"][0] |= {"name": name, "kind": "float", "reason": "r" * 300, "remedy": "so " * 99}
    for kernel in long["kernels"]:
        kernel["name"] = "fused_" * 20 + kernel["name"]
        kernel["layers"] = [name] if kernel["layers"] else []
    long["memory"]["high_water_kernel"] = "fused_" * 20
    text = report.text(long, width=width)
    assert max(map(len, text.splitlines())) <= width
    whole = "".join(text.split())
    assert "".join(name.split()) in whole or width <= 80  # wrapped in a column of its own


def test_columns_dropped_in_a_narrow_terminal(gated: dict[str, Any]) -> None:
    """The table names the columns it leaves out; name, kind and time stay."""
    first = report.text(gated, width=40).split("\n\n")[0]
    assert "not shown in 40 columns: mult-adds M, bits data" in " ".join(first.split())
    (layer,) = [k["layers"][0] for k in gated["kernels"] if k["layers"]]
    (row,) = [line for line in first.splitlines() if line.startswith(layer)]
    assert row.split()[1] == "binary"
    times = [f"{k['estimated_us']:.2f}" for k in gated["kernels"]]
    assert all(time in first.split() for time in times)
    assert "not shown" not in report.text(gated, width=80)


def test_same_reason_once() -> None:
    content = json.loads(json.dumps(tiny().report))
    content["layers"] = [content["layers"][0] | {"name": name} for name in ("a", "b")]
    text = report.text(content)
    assert "float: a, b\n  weights of `mm` are not two-valued\n  -> train them binary\n" in text


def test_without_layers_or_estimates() -> None:
    content = json.loads(json.dumps(tiny().report))
    content["layers"], content["kernels"] = [], []
    assert report.text(content).startswith("no layer and no kernel")
    assert "not estimated for this target" in report.text(tiny().report)


@pytest.mark.parametrize(
    ("target", "known"),
    [("arm64", True), ("x86-64-v3", True), ("cortex-m4", False), ("riscv64gcv", False),
     ("wasm32", False), ("c99", False), ("cuda-sm80", False)],
)  # fmt: skip
def test_targets_whose_speed_is_known(target: str, known: bool) -> None:
    nothing = tvm.tirx.PrimFunc([], tvm.tirx.Evaluate(0))
    spec = BinaryConv2d(1, 14, 14, 64, 64, (3, 3))
    assert (estimated(nothing, spec, resolve(target)) is not None) == known


def test_sizes_that_estimates_assume(gated: dict[str, Any]) -> None:
    assert " us estimated, one thread" in report.text(gated)
    content = json.loads(json.dumps(gated))
    content["kernels"][0]["args"][0]["shape"] = ["past + tokens", 8]
    content["kernels"][0]["args"][1]["shape"] = ["batch", 8]
    assert "estimated for batch = 1, past = 1, tokens = 1, one" in report.text(content, width=200)


def test_wrapped_columns() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        cells = ["".join(rng.choice(list("ab "), rng.integers(0, 60))) for _ in range(3)]
        lines = report.table([("head", "x", "y"), tuple(cells)], width=50, wraps=(0, 2))
        joined = "".join("".join(lines).split())
        assert sorted(joined) == sorted("headxy" + "".join("".join(cells).split()))
        if len(cells[1]) <= 20:
            assert max(map(len, lines)) <= 50
