"""How few-bit layers are computed on each target: in which method, and in how many bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.boards import BOARDS
from bnncc.driver import compile_c, compile_model
from bnncc.errors import TargetError
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.options import CompileOptions
from bnncc.schedules import few_bit_method, multithreading
from bnncc.targets import catalog
from bnncc.topi_binary import few_bit_data
from bnncc.topi_binary.spec import FewBitConv2d
from tests import cortex_m
from tests.kernel_harness import HERE

pytestmark = pytest.mark.sampled(2)

CONV = FewBitConv2d(1, 14, 14, 64, 64, (3, 3), pads=(1, 1, 1, 1))
DENSE = FewBitConv2d(1, 1, 1, 512, 256, (1, 1), rank=2)
MICROCONTROLLERS = ("cortex-m0plus", "cortex-m4", "cortex-m33", "riscv32imc", "c99")


def candidates(layer: FewBitConv2d, weight_bits: int, data_bits: int) -> list[FewBitConv2d]:
    """Return the specs of all methods that are possible."""
    specs = []
    for method in few_bit_data.METHODS:
        bits = few_bit_data.code_bits(weight_bits, False) if method == "packed" else weight_bits
        spec = replace(layer, method=method, weight_bits=bits, data_bits=data_bits)
        largest = layer.taps * 2 ** (weight_bits - 1) * (2**data_bits - 1)
        if method == "xor" or (method == "packed" and not few_bit_data.packs(spec)):
            continue
        if method != "floats" or largest < few_bit_data.MAX_FLOAT:
            specs.append(spec)
    return specs


def choice(
    layer: FewBitConv2d, weight_bits: int, data_bits: int, target: str
) -> tuple[FewBitConv2d, str]:
    """Return the spec of the method that is chosen, and the reason."""
    specs = candidates(layer, weight_bits, data_bits)
    found = few_bit_method.choose(specs, catalog.resolve(target))
    assert found is not None
    return found


def chosen(layer: FewBitConv2d, weight_bits: int, data_bits: int, target: str) -> FewBitConv2d:
    return choice(layer, weight_bits, data_bits, target)[0]


@pytest.mark.parametrize(
    "target", [*MICROCONTROLLERS, "wasm32", "arm64", "arm64-dotprod", "x86-64-v3"]
)
@pytest.mark.parametrize("bits", [(3, 3), (4, 4), (3, 5)])
def test_weights_take_a_byte_or_less(bits: tuple[int, int], target: str) -> None:
    assert few_bit_method.weight_bytes(chosen(CONV, *bits, target)) <= 64 * 9 * 64
    dense = few_bit_method.weight_bytes(chosen(DENSE, *bits, target))
    assert dense <= 512 * 256 // (2 if target in MICROCONTROLLERS else 1)


@pytest.mark.parametrize("target", [t for t in catalog.CATALOG if not t.startswith("cuda")])
def test_large_sums_are_not_counted_in_planes(target: str) -> None:
    """Float32 cannot hold them, and W8A8 has 64 pairs of planes."""
    wide = replace(CONV, channels=256)
    assert chosen(wide, 8, 8, target).method in ("bytes", "pairs")


@pytest.mark.parametrize("target", ["cortex-m0plus", "riscv32imc"])
@pytest.mark.parametrize("bits", [(2, 2), (2, 8), (4, 4), (8, 8), (9, 8)])
def test_no_floats_without_a_unit_for_them(bits: tuple[int, int], target: str) -> None:
    assert not catalog.resolve(target).float_unit
    for layer in (CONV, DENSE):
        assert chosen(layer, *bits, target).method != "floats"


def test_planes_where_there_are_few() -> None:
    for target in ("arm64-dotprod", "cortex-m4", "x86-64-v4-vpopcntdq"):
        assert chosen(CONV, 1, 2, target).form == "planes"
    assert chosen(CONV, 2, 2, "arm64").form == "planes"
    assert chosen(CONV, 2, 2, "arm64-dotprod").method == "bytes"


def test_weights_that_no_cache_holds() -> None:
    """Then their bytes decide."""
    assert chosen(DENSE, 4, 8, "arm64").method == "floats"
    large = replace(DENSE, channels=4096, out_channels=4096)
    assert chosen(large, 4, 8, "arm64").method == "packed"


@pytest.mark.parametrize("target", [t for t in catalog.CATALOG if not t.startswith("cuda")])
@pytest.mark.parametrize("bits", [(2, 8), (4, 8), (8, 8), (4, 4), (2, 2)])
def test_no_method_is_faster_without_being_larger(bits: tuple[int, int], target: str) -> None:
    """Also where both are read from memory: W8A8 was counted in 64 pairs of planes there."""
    spec = catalog.resolve(target)
    for layer in (DENSE, replace(DENSE, channels=4096, out_channels=4096)):
        made = chosen(layer, *bits, target)
        size, work = few_bit_method.weight_bytes(made), multithreading.multiplying(made, spec)
        for other in candidates(layer, *bits):
            if few_bit_method.weight_bytes(other) <= size:
                assert multithreading.multiplying(other, spec) >= work, other.method


def test_small_weights_are_not_worth_longer_code() -> None:
    small = replace(DENSE, channels=64, out_channels=64)
    assert chosen(small, 4, 4, "cortex-m4").method == "bytes"
    spec, why = choice(DENSE, 4, 4, "cortex-m4")
    assert spec.method == "packed"
    assert "to save memory: about" in why
    assert "to save memory" not in choice(DENSE, 4, 4, "arm64")[1]


@pytest.mark.parametrize(
    ("weights", "bits"), [((-8, 7), 4), ((-4, 3), 4), ((-2, 1), 2), ((-1, 1), 2), ((-9, 7), 5)]
)
def test_bits_of_codes(weights: tuple[int, int], bits: int) -> None:
    stored = max(1, *(int(w if w >= 0 else ~w).bit_length() + 1 for w in weights))
    assert few_bit_data.code_bits(stored, False) == bits
    assert few_bit_data.code_bits(1, True) == 1


def network(weight_bits: int, data_bits: int) -> onnx.ModelProto:
    """Return a 3x3 and a 1x1 convolution with padding, and a dense layer, of random levels."""
    rng = np.random.default_rng(weight_bits * 10 + data_bits)
    top, half = 2**data_bits - 1, 2 ** (weight_bits - 1)
    constants: dict[str, np.ndarray] = {}
    nodes = []
    name = "x"
    shapes = [(12, 5, 3, 3), (40, 12, 1, 1), (9, 40 * 30)]
    for number, shape in enumerate(shapes):
        scale = np.float32(2.0 ** -int(np.log2(half * top * np.sqrt(np.prod(shape[1:])))))
        weight = rng.integers(-half, half, shape).astype(np.float32)
        weight.reshape(-1)[:2] = -half, half - 1
        constants |= {f"w{number}": weight, f"s{number}": scale}
        nodes += [
            helper.make_node("Mul", [name, "top"], [f"m{number}"]),
            helper.make_node("Round", [f"m{number}"], [f"r{number}"]),
            helper.make_node("Clip", [f"r{number}", "low", "top"], [f"q{number}"]),
        ]
        data = f"q{number}"
        if len(shape) == 2:
            nodes.append(helper.make_node("Flatten", [data], ["flat"]))
            nodes.append(helper.make_node("Gemm", ["flat", f"w{number}"], ["y"], transB=1))
        else:
            pads = [shape[2] // 2] * 4
            nodes += [
                helper.make_node("Conv", [data, f"w{number}"], [f"c{number}"], pads=pads),
                helper.make_node("Mul", [f"c{number}", f"s{number}"], [f"y{number}"]),
            ]
            name = f"y{number}"
    constants |= {"top": np.float32(top), "low": np.float32(0)}
    graph = helper.make_graph(
        nodes, "levels",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 5, 6, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 9])],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("target", [*HERE, "native"])
@pytest.mark.parametrize("bits", [(2, 7), (4, 4), (3, 8), (8, 7), (8, 8)])
def test_networks(bits: tuple[int, int], target: str) -> None:
    model = network(*bits)
    x = np.random.default_rng(1).random((1, 5, 6, 5), np.float32)
    artifact = compile_model(model, CompileOptions(target=target, threads=1))
    (wanted,) = evaluate(load(model), {"x": x}).values()
    np.testing.assert_array_equal(artifact.run({"x": x})["y"], wanted)
    assert {layer["kind"] for layer in artifact.report["layers"]} == {"few_bit"}


@cortex_m.needs_cortex_m
@pytest.mark.parametrize("bits", [(2, 2), (2, 7), (4, 4), (3, 8), (8, 8)])
@pytest.mark.parametrize("target", ["cortex-m0plus", "cortex-m4", "cortex-m7"])
def test_networks_on_a_board(target: str, bits: tuple[int, int], tmp_path: Path) -> None:
    """The check that comes with the code compares with the reference result."""
    made = compile_c(network(*bits), CompileOptions(target=target))
    for name, content in made.files.items():
        (tmp_path / name).write_bytes(content)
    (prefix,) = {n.removesuffix("_check.c") for n in made.files if n.endswith("_check.c")}
    sources = [f"{prefix}_check.c", f"{prefix}.c", f"{prefix}_kernels.o"]
    status, said = cortex_m.run(tmp_path, sources, board=BOARDS[target])
    assert (status, ": 0 of " in said) == (0, True), said
    # Code and weights: float32 alone would take 4 x 49,788 bytes.
    assert made.report["device"]["flash_bytes"] < 49_788 * bits[0] / 8 + 40_000


def test_target_files_without_the_instructions(tmp_path: Path) -> None:
    """A Cortex-M33 may lack the DSP extension; and LLVM must know what the features promise."""
    path = tmp_path / "board.json"
    path.write_text('{"base": "cortex-m33", "mattr": ["-dsp"]}')
    made = compile_c(network(4, 4), CompileOptions(target=str(path), confirm=False))
    assert {layer["kind"] for layer in made.report["layers"]} == {"few_bit"}
    path.write_text('{"base": "arm64-dotprod", "mcpu": "cortex-a72", "mattr": []}')
    with pytest.raises(TargetError, match="have asimddp, but LLVM's cortex-a72 has no `dotprod`"):
        compile_c(network(4, 4), CompileOptions(target=str(path), confirm=False))
