"""Row-wise execution: the same bits as without it, in less memory, and only where it is less."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bnncc.cli import main as cli
from bnncc.codegen import c_network, row_wise
from bnncc.codegen.c_text import Loop
from bnncc.driver import compile_c
from bnncc.options import CompileOptions
from tests import cortex_m
from tests.collection.builder import Net
from tests.devices import DIGITS
from tests.portable_c import needs_gcc
from tests.row_networks import Scheduled, chain_network, ran, signs

pytestmark = pytest.mark.sampled(2)

SEEDS = [2, 9, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 60))]


def images(bare: c_network.Bare) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [tuple(map(int, info.shape)) for _, info in bare.given]
    return [2 * rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def possible(scheduled: Scheduled, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return all chains of a network."""
    found: list[tuple[int, int]] = []

    def chosen(program: Any, fits: Any) -> list[row_wise.Chain]:
        pairs = combinations(range(len(program.calls)), 2)
        found.extend(p for p in pairs if row_wise.chained(program, *p, 1, fits) is not None)
        return []

    with monkeypatch.context() as patch:
        patch.setattr(row_wise, "chosen", chosen)
        scheduled.files()
    return found


@needs_gcc
@pytest.mark.parametrize("seed", SEEDS)
def test_chains_compute_the_same_bits(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random layers, pads, strides and dilations, under sanitizers; bands may be ragged."""
    scheduled = Scheduled(chain_network(("stream", seed), 2 + seed % 4))
    if not (chains := possible(scheduled, monkeypatch)):
        pytest.skip("no two layers in a row have bands")
    files, bare = scheduled.with_chains(monkeypatch, [])
    wanted = ran(tmp_path / "whole", files, bare, images(bare))
    first, last = max(chains, key=lambda pair: pair[1] - pair[0])
    files, bare = scheduled.with_chains(monkeypatch, [(first, last, 1 + seed % 3)])
    if not bare.order.variants and seed not in SEEDS:
        pytest.skip("a kernel for bands needs more memory than they save")
    assert bare.order.variants
    assert ran(tmp_path / "rows", files, bare, images(bare)) == wanted


def residual_network(width: int = 16) -> onnx.ModelProto:
    """Return a stem, residual blocks whose sums overwrite their operands, and a pooling."""
    net = Net(seed="residual")
    value = net.input("x", [1, 3, 65, 48])
    weight = net.rng.standard_normal((width, 3, 3, 3))
    value = net.op("Conv", value, net.const(weight), pads=[1, 1, 1, 1], strides=[2, 2])
    for _ in range(3):
        weight = np.where(net.rng.random((width, width, 3, 3)) < 0.5, -1.0, 1.0)
        made = net.op("Conv", signs(net, value), net.const(weight), pads=[1, 1, 1, 1])
        made = net.op("Mul", made, net.const(net.rng.uniform(0.1, 0.2, (1, width, 1, 1))))
        value = net.op("Add", made, value)
    value = net.op("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2])
    net.outputs.append(net.op("GlobalAveragePool", value))
    return net.model()


@needs_gcc
def test_the_planner_takes_a_chain_through_residual_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled = Scheduled(residual_network())
    files, whole = scheduled.with_chains(monkeypatch, [])
    wanted = ran(tmp_path / "whole", files, whole, images(whole))
    files, rows = scheduled.files()
    assert ran(tmp_path / "rows", files, rows, images(rows)) == wanted
    assert rows.sizes.arena < 0.8 * whole.sizes.arena
    assert any(isinstance(one, Loop) for one in rows.order.statements)
    assert sum(number > 0 for number in rows.order.rows) >= 5
    assert max(rows.order.live) <= rows.order.arena


def test_a_chain_must_save_more_than_its_code_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = Scheduled(residual_network())
    monkeypatch.setattr(row_wise, "PRICE", 1 << 20)
    _, bare = scheduled.files()
    assert not bare.order.variants
    assert set(bare.order.rows) == {0}


def test_digits_take_a_third_of_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["explain", str(DIGITS / "digits.onnx"), "--target", "cortex-m4"]
    assert cli.main(asked) == 0
    assert "row-wise 1 row at a time: conv2d, binary_conv2d\n" in capsys.readouterr().out
    assert cli.main([*asked, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"]["tensors_bytes"] == report["memory"]["arena_bytes"] < 9984 / 3
    rows = {kernel["name"]: kernel["band_rows"] for kernel in report["kernels"]}
    assert {name for name, number in rows.items() if number} == {"conv2d", "binary_conv2d"}


def test_what_has_an_operating_system_computes_whole_layers() -> None:
    network = compile_c(DIGITS / "digits.onnx", CompileOptions(target="x86-64-v3"))
    assert all(kernel["band_rows"] == 0 for kernel in network.report["kernels"])
    assert b"_rows" not in network.files["digits.c"]


@cortex_m.needs_cortex_m
@pytest.mark.slow
def test_a_cortex_m4_computes_the_same(tmp_path: Path) -> None:
    network = compile_c(residual_network(), CompileOptions(target="cortex-m4"))
    assert any(kernel["band_rows"] for kernel in network.report["kernels"])
    for name, data in network.files.items():
        (tmp_path / name).write_bytes(data)
    (prefix,) = (name.removesuffix("_check.c") for name in network.files if "_check.c" in name)
    sources = [f"{prefix}_check.c", f"{prefix}.c", f"{prefix}_kernels.o"]
    code, said = cortex_m.run(tmp_path, sources, "-O2")
    assert code == 0, said


def test_the_user_decides_what_it_takes_less_of() -> None:
    model = DIGITS / "digits.onnx"
    size = {
        (target, asked): _arena(compile_c(model, CompileOptions(target=target, optimize_for=asked)))
        for target, asked in (
            ("c99", "auto"), ("c99", "memory"), ("c99", "speed"),
            ("x86-64-v4-vpopcntdq", "auto"), ("x86-64-v4-vpopcntdq", "memory"),
        )
    }  # fmt: skip
    assert size["c99", "auto"] == size["c99", "memory"] < 0.5 * size["c99", "speed"]
    assert size["x86-64-v4-vpopcntdq", "memory"] < 0.7 * size["x86-64-v4-vpopcntdq", "auto"]


def _arena(network: c_network.CNetwork) -> int:
    (size,) = re.findall(rb"define \w+_ARENA_BYTES (\d+)", b"".join(network.files.values()))
    return int(size)


@pytest.mark.parametrize("target", ["native", "wasm32"])
def test_only_c_can_be_optimized_for_memory(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--target", target, "--optimize-for", "memory", "-o", str(tmp_path / "x.tar"))
    assert cli.main(["compile", str(DIGITS / "digits.onnx"), *asked]) == 2
    assert capsys.readouterr().err == (
        "error: --optimize-for memory is for C\n\nhint: --format c\n"
    )
