"""The memory plan in the report, against sizes worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import tirx as T

import bnncc
from bnncc import report
from bnncc.codegen import memory
from bnncc.codegen.bitstream import bitstream
from bnncc.codegen.pipeline import tvm_target
from bnncc.driver import compile_c
from bnncc.options import CompileOptions
from bnncc.schedules import schedule, space_of
from bnncc.targets import catalog
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, FewBitConv2d, Spec, Step
from tests.collection.builder import Net


def test_network() -> None:
    net = Net(seed="memory")
    x = net.input("x", [1, 32, 8, 8])
    weights = [net.rng.choice([-1.0, 1.0], s) for s in ((64, 32, 3, 3), (32, 64, 1, 1))]
    one, minus, zero = net.const(1.0), net.const(-1.0), net.const(0.0)

    def sign(value: str) -> str:
        return net.op("Where", net.op("GreaterOrEqual", value, zero), one, minus)

    y = net.op("Conv", sign(x), net.const(weights[0]), pads=[1, 1, 1, 1])
    z = net.op("Conv", sign(y), net.const(weights[1]))
    net.outputs.append(net.op("GlobalMaxPool", z))
    artifact = bnncc.compile(net.model(), threads=1)
    kernels = artifact.report["kernels"]
    image, bits32, bits64 = 32 * 64 * 4, 64 * 4, 64 * 8
    for kernel, given, made in zip(
        kernels, (image, bits32, bits64), (bits32, bits64, image), strict=False
    ):
        assert (kernel["input_bytes"], kernel["output_bytes"]) == (given, made)
        in_use = made + kernel["workspace_bytes"] + (given if kernel is not kernels[0] else 0)
        assert kernel["live_bytes"] == in_use
    assert kernels[0]["workspace_bytes"] == 0
    assert kernels[0]["reference_memory"] is None
    # ic * ih**2 * (2.25 * 4 + (4 + 1/8) * 9), and (9/8 + 9/32 + 4)
    assert kernels[1]["reference_memory"] == [2048 * 46.125, 2048 * 5.40625]
    found = artifact.report["memory"]
    high = max(kernels, key=lambda k: k["live_bytes"])
    assert found["high_water_bytes"] == high["live_bytes"]
    assert high["live_bytes"] - high["workspace_bytes"] <= found["arena_bytes"]
    assert found["high_water_kernel"] == high["name"] == kernels[2]["name"]
    text = " ".join(report.text(artifact.report).split())
    assert f"at most {high['live_bytes']:,} in use at once, in {high['name']}" in text


def test_scratch_of_threads() -> None:
    @I.ir_module(check_well_formed=False)
    class Module:
        @T.prim_func(s_tir=True)
        def kernel(a: T.Buffer((64, 1024), "float32"), b: T.Buffer((64, 1024), "float32")):
            T.func_attr({"tirx.noalias": True})
            whole = T.sblock_alloc_buffer((64, 1024), "float32")
            part = T.sblock_alloc_buffer((1024,), "float32")
            few = T.sblock_alloc_buffer((16,), "float32")
            for i, j in T.grid(64, 1024):
                whole[i, j] = a[i, j] * T.float32(2)
            for i in T.parallel(64):
                for j in range(1024):
                    part[j] = whole[63 - i, j]
                for j in range(16):
                    few[j] = part[j]
                for j in range(1024):
                    b[i, j] = part[1023 - j] + few[j % 16]

    with memory.recorded() as found:
        tvm.tirx.build(Module, target="llvm", pipeline=memory.PIPELINE)
    (scratch,) = found.values()
    assert scratch == memory.Scratch(64 * 1024 * 4, 1024 * 4)
    assert scratch.total(3) == 64 * 1024 * 4 + 3 * 1024 * 4


def test_register_tiles_are_no_scratch() -> None:
    """16 vectors and more: only the sums of words, of three rows, may be in memory."""
    width = 14
    spec = BinaryConv2d(
        1, 9, width, 64, 48, (3, 3), pads=(1, 1, 1, 1), steps=(Step("affine"), Step("store"))
    )
    target = catalog.resolve("x86-64-v4-vpopcntdq")
    module = tvm.IRModule(
        {"main": schedule(define(spec), target).with_attr("global_symbol", "main")}
    )
    with memory.recorded() as found:
        tvm.compile(module, target=tvm_target(target), tir_pipeline=memory.PIPELINE)
    assert found["main"].total(1) <= 3 * width * 2 * 4


def test_sums_that_an_epilogue_reads_by_halves_are_no_scratch() -> None:
    """Lookups of 8 vectors: sums of 16 bits are kept by 32, and become floats by 16."""
    pairs, channels, steps = 7 * 4, 512, (Step("affine"), Step("store"))  # of columns
    spec = BinaryConv2d(
        1, 7, 7, channels, 1024, (1, 1), weight_order="nibbles", steps=steps
    )  # fmt: skip
    target = catalog.resolve("x86-64-v4")
    point = space_of(spec, target).default
    assert (point["columns"], point["vectors"]) == (4, 2)
    module = tvm.IRModule(
        {"main": schedule(define(spec), target).with_attr("global_symbol", "main")}
    )
    with memory.recorded() as found:
        tvm.compile(module, target=tvm_target(target), tir_pipeline=memory.PIPELINE)
    nibbles, table = channels // 4, 17 * 17 * 64
    # The nibbles of data are then replaced by those of weights.
    assert found["main"].total(1) == 2 * pairs * nibbles + nibbles * 128 + table


@pytest.mark.parametrize(
    "spec",
    [
        BinaryConv2d("N", 1, 1, 1024, 1024, (1, 1), rank=2, steps=(Step("store"),)),
        FewBitConv2d(
            "N", 1, 1, 1024, 1024, (1, 1), data_bits=8, weight_bits=2, method="packed",
            steps=(Step("store"),), rank=2,
        ),
    ],
    ids=["binary", "few-bit"],
)  # fmt: skip
def test_tiles_that_share_memory_with_those_of_a_rest_are_no_scratch(spec: Spec) -> None:
    """Of a symbolic number of rows: only the sums of levels, one for each row, are in memory."""
    target = catalog.resolve("x86-64-v4-vpopcntdq")
    module = tvm.IRModule(
        {"main": schedule(define(spec), target).with_attr("global_symbol", "main")}
    )
    with memory.recorded() as found:
        tvm.compile(module, target=tvm_target(target), tir_pipeline=memory.PIPELINE)
    assert found["main"].total(1) <= 4


def test_plan_follows_views_and_in_place_results() -> None:
    """Storage of what is read later stays in use; what is free is taken again."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 64), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            a = builder.emit(relax.op.nn.relu(x))
            b = builder.emit(relax.op.exp(a))
            c = builder.emit(relax.op.sqrt(b))
            out = builder.emit_output(relax.op.add(a, c))
        builder.emit_func_output(out)
    module = relax.transform.LegalizeOps()(builder.get())
    from bnncc.codegen.pipeline import memory_plan

    plan = memory_plan(module)
    size = 4 * 64 * 4
    assert [(c.inputs, c.outputs) for c in plan.calls] == [
        (size, size), (size, size), (size, size), (2 * size, size)
    ]  # fmt: skip
    assert [c.live for c in plan.calls] == [size, 2 * size, 3 * size, 3 * size]
    assert plan.arena == 4 * size


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (BinaryConv2d(1, 27, 27, 96, 256, (5, 5)), (96 * 729 * 112.125, 96 * 729 * 7.40625)),
        (BinaryConv2d(1, 1, 1, 96, 256, (1, 1), rank=2), None),
        (BinaryConv2d(1, 8, 8, 96, 96, (3, 3), groups=3), None),
        (Conv2d(1, 8, 8, 96, 96, (3, 3)), None),
        (None, None),
    ],
)
def test_bitstream(spec: BinaryConv2d | Conv2d | None, want: tuple[float, float] | None) -> None:
    assert bitstream(spec) == (want and tuple(np.rint(want)))


@pytest.mark.parametrize("target", ["c99", "cortex-m4"])
def test_filters_take_no_memory_of_small_machines(target: str) -> None:
    """Where there are no vectors, float convolutions are direct, whatever a filter would save."""
    net = Net(seed="filters")
    x = net.input("x", [1, 3, 32, 32])
    weight = net.rng.standard_normal((32, 3, 3, 3)).astype("float32")
    net.outputs.append(net.op("Conv", x, net.const(weight), pads=[1, 1, 1, 1]))
    network = compile_c(net.model(), CompileOptions(target=target))
    assert network.report["memory"]["workspace_bytes"] < 32 * 32 * 4  # less than one channel
