"""Instructions per product of few-bit layers, by method, in emulated processors.

    python benchmarks/level_instructions.py [--json FILE]

For 64-bit and 32-bit Arm, a kernel runs in unicorn, and is compared with the oracle first. For
microcontrollers and portable C, a network of one layer and the quantizer of its data runs in QEMU,
on a Cortex-M0+ or M4, after its own check. The method that bnncc chooses is marked. Instructions
are not cycles, but on the processors without vectors they are near.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from c_instructions import count, counter
from machine import commit
from onnx import TensorProto, helper, numpy_helper
from tables import markdown

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bnncc.codegen.emulator import Library, compiled
from bnncc.driver import compile_c
from bnncc.options import CompileOptions
from bnncc.schedules import few_bit_method, schedule
from bnncc.targets import catalog
from bnncc.topi_binary import few_bit_data, reference
from bnncc.topi_binary.build import output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import FewBitConv2d
from bnncc.topi_binary.step import Step
from bnncc.tuning.level_cases import operands

METHODS = {"and": "planes", "bytes": "int8", "packed": "packed", "pairs": "int16",
           "floats": "float32"}  # fmt: skip
CORES = ("arm64", "arm64-dotprod", "armv7")
BOARDS = {"cortex-m0plus": "cortex-m0plus", "cortex-m4": "cortex-m4", "c99": "cortex-m4"}
"""Targets, and the board that runs them."""

BITS = ((2, 2), (4, 4), (4, 8), (8, 8))
LAYERS = {
    "3x3, 64 -> 64, 8 x 8": FewBitConv2d(1, 8, 8, 64, 64, (3, 3), pads=(1, 1, 1, 1)),
    "1x1, 64 -> 64, 8 x 8": FewBitConv2d(1, 8, 8, 64, 64, (1, 1)),
    "dense, 256 -> 64": FewBitConv2d(1, 1, 1, 256, 64, (1, 1), rank=2),
}
MOST_PAIRS = 16


def candidates(layer: FewBitConv2d, weight_bits: int, data_bits: int) -> list[FewBitConv2d]:
    """Return the specs of all methods that are compared."""
    made = []
    for method in METHODS:
        codes = method == "packed" and (weight_bits > 4 or not layer.pointwise)
        if codes or (method == "and" and weight_bits * data_bits > MOST_PAIRS):
            continue
        largest = layer.taps * 2 ** (weight_bits - 1) * (2**data_bits - 1)
        if method == "floats" and largest >= few_bit_data.MAX_FLOAT:
            continue
        made.append(replace(layer, method=method, weight_bits=weight_bits, data_bits=data_bits))
    return made


def on_core(spec: FewBitConv2d, target: str) -> int:
    """Return the instructions of a kernel in an emulated processor."""
    spec, machine = replace(spec, steps=(Step("store"),)), catalog.resolve(target)
    arrays = operands(spec, 1, np.random.default_rng(0))
    func = schedule(define(spec), machine).with_attr("global_symbol", "kernel")
    made = [np.zeros(shape, dtype) for shape, dtype in output_types(spec)]
    library = Library(compiled({"kernel": func}, machine))
    library.call("kernel", [*arrays, *made], count=True)
    np.testing.assert_array_equal(made[0], reference.few_bit_conv2d(spec, arrays)[0])
    return int(library.instructions)


def network(layer: FewBitConv2d, weight_bits: int, data_bits: int) -> onnx.ModelProto:
    """Return a model of one layer, whose data a quantizer rounds."""
    top, half = 2**data_bits - 1, 2 ** (weight_bits - 1)
    shape = (layer.out_channels, layer.channels, *layer.kernel)
    weight = np.random.default_rng(0).integers(-half, half, shape).astype(np.float32)
    constants = {"low": 0.0, "high": 1.0, "top": float(top), "weight": weight}
    nodes = [
        helper.make_node("Clip", ["x", "low", "high"], ["kept"]),
        helper.make_node("Mul", ["kept", "top"], ["scaled"]),
        helper.make_node("Round", ["scaled"], ["level"]),
    ]
    if layer.rank == 2:
        constants["weight"] = weight.reshape(layer.out_channels, -1).T
        nodes.append(helper.make_node("MatMul", ["level", "weight"], ["y"]))
        sizes = [[1, layer.channels], [1, layer.out_channels]]
    else:
        attrs = {"pads": list(layer.pads)}
        nodes.append(helper.make_node("Conv", ["level", "weight"], ["y"], **attrs))
        sizes = [[1, c, layer.height, layer.width] for c in (layer.channels, layer.out_channels)]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, size)
        for name, size in zip("xy", sizes, strict=True)
    ]
    initializers = [
        numpy_helper.from_array(np.asarray(value, np.float32), name)
        for name, value in constants.items()
    ]
    graph = helper.make_graph(nodes, "layer", ends[:1], ends[1:], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def on_board(spec: FewBitConv2d, target: str, plugin: Path) -> int:
    """Return the instructions of a network of one layer on a board."""

    def choose(specs: Sequence[FewBitConv2d], *_: Any, **__: Any) -> tuple[FewBitConv2d, str]:
        return next(one for one in specs if one.method == spec.method), ""

    with mock.patch.object(few_bit_method, "choose", choose):
        model = network(spec, spec.weight_bits, spec.data_bits)
        made = compile_c(model, CompileOptions(target=target))
    (kernels,) = (name for name in made.files if name.endswith(("_kernels.o", "_kernels.c")))
    with tempfile.TemporaryDirectory() as name:
        for file, content in made.files.items():
            (Path(name) / file).write_bytes(content)
        prefix = kernels[: -len("_kernels.o")]
        return count(Path(name), BOARDS[target], prefix, kernels, plugin)


def _table(content: dict[str, Any]) -> str:
    rows = []
    for row in content["rows"]:
        cells = []
        for method, words in METHODS.items():
            found = row["instructions"].get(method)
            mark = "**" if words == METHODS[row["chosen"]] else ""
            cells.append(f"{mark}{found:.2f}{mark}" if found else "")
        rows.append((f"`{row['target']}`", row["layer"], row["bits"], *cells))
    return markdown(("target", "layer", "bits", *METHODS.values()), rows)


TABLES = {"level-instructions": (_table, ("level_instructions",))}


def main() -> None:
    """Compare with the oracle, and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        plugin = counter(Path(name))
        for target in (*CORES, *BOARDS):
            machine = catalog.resolve(target)
            for layer, shape in LAYERS.items():
                for bits in BITS:
                    specs = candidates(shape, *bits)
                    chosen, _ = few_bit_method.choose(specs, machine) or (None, "")
                    found = {}
                    for spec in specs:
                        taken = (
                            on_core(spec, target)
                            if target in CORES
                            else on_board(spec, target, plugin)
                        )
                        products = shape.out_channels * shape.taps
                        products *= 1 if shape.rank == 2 else shape.height * shape.width
                        found[spec.method] = round(taken / products, 3)
                    row = {"target": target, "layer": layer, "bits": f"W{bits[0]}A{bits[1]}"}
                    rows.append({**row, "chosen": chosen.method, "instructions": found})
                    rows[-1]["weight_bytes"] = {
                        spec.method: few_bit_method.weight_bytes(spec) for spec in specs
                    }
                    print(rows[-1], file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps({"commit": commit(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
