"""Grouped and depthwise binary layers in bit slices, beside groups in words of their own.

    taskset -c 1 python benchmarks/grouped_layers.py [--json FILE] [--repeat N] [--target T]

In words, each group's channels are first moved to a word that nothing else is in, and that move is
counted: without bit slices, it is what a network needs. One thread; both ways take turns, and the
best of all repeats counts. Results are compared with the NumPy oracle first.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from tables import markdown, where

from bnncc.schedules import schedule, with_weight_order
from bnncc.targets import catalog
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout, reference, sliced_data, tiles
from bnncc.topi_binary.bits_table import needs_table, slice_table
from bnncc.topi_binary.build import output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, SliceBits, Spec, Step

LAYERS = [(128, 56, 1), (512, 14, 1), (128, 56, 8), (512, 14, 8), (256, 28, 16), (512, 14, 16)]
"""Channels, size, channels of a group; 3x3, zero padding."""

EPILOGUES = {
    "signs": (Step("threshold"),),
    "floats": (Step("affine"), Step("store")),
}


class Kernel:
    """One kernel with its operands."""

    def __init__(self, spec: Spec, inputs: list[np.ndarray], target: TargetSpec) -> None:
        options = {"kind": target.kind, "mcpu": target.mcpu, "mattr": list(target.mattr)}
        module = tvm.IRModule({"main": schedule(define(spec), target)})
        library = tvm.compile(module, target=tvm.target.Target(options)).jit()
        outputs = [np.zeros(shape, dtype) for shape, dtype in output_types(spec)]
        self._args = [tvm.runtime.tensor(a) for a in (*inputs, *outputs)]
        self._count = len(inputs)
        library["main"](*self._args)
        self._timer = library.time_evaluator("main", tvm.cpu(), min_repeat_ms=2, repeat=2)
        self.best = math.inf

    @property
    def outputs(self) -> list[np.ndarray]:
        return [a.numpy() for a in self._args[self._count :]]

    def measure(self) -> None:
        self.best = min(self.best, *self._timer(*self._args).results)


class Layer:
    """One layer, both ways."""

    def __init__(self, shape: tuple[int, int, int], epilogue: str, target: TargetSpec) -> None:
        channels, size, depth = shape
        groups, rng = channels // depth, np.random.default_rng(0)
        words = BinaryConv2d(
            1, size, size, channels, channels, (3, 3), pads=(1, 1, 1, 1), groups=groups,
            steps=EPILOGUES[epilogue],
        )  # fmt: skip
        sliced = dataclasses.replace(words, weight_order=sliced_data.ORDER)
        self.chosen = with_weight_order(words, target).weight_order
        data = layout.pack_bits(rng.random((1, size, size, channels)) < 0.5)
        bits = rng.random((channels, 3, 3, depth)) < 0.5
        index = [
            g * depth + i if i < depth else -1
            for g in range(groups)
            for i in range(layout.WORD_BITS)
        ]
        move = SliceBits(1, size, size, channels, tuple(index))
        self.move = Kernel(
            move, [data, *([slice_table(move)] if needs_table(move) else [])], target
        )
        self.words = self._kernel(words, self.move.outputs[0], bits, target)
        self.sliced = self._kernel(sliced, data, bits, target)
        self.name = f"{channels}, {size}x{size}, groups of {depth}, {epilogue}"

    def _kernel(
        self, spec: BinaryConv2d, data: np.ndarray, bits: np.ndarray, target: TargetSpec
    ) -> Kernel:
        threshold = np.full(spec.channels, spec.taps // 2 * (1 + spec.doubled), np.int32)
        params = [np.full(spec.channels, 0.5, np.float32)] * 2
        if sliced_data.limited(spec):
            params = [sliced_data.limits(spec, bits, threshold)]
        elif spec.steps[0].op == "threshold":
            params = [threshold]
        inputs = [data, tiles.pack(spec, bits), *params]
        kernel = Kernel(spec, inputs, target)
        for got, want in zip(kernel.outputs, reference.binary_conv2d(spec, inputs), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=str(spec))
        return kernel

    def row(self) -> dict:
        move, words, sliced = (k.best * 1e6 for k in (self.move, self.words, self.sliced))
        return {
            "layer": self.name,
            "move": move,
            "words": words,
            "sliced": sliced,
            "chosen": self.chosen,
        }


def table(content: dict) -> str:
    """Return the figures as Markdown."""
    rows = [
        [
            row["layer"], f"{row['move']:.1f} + {row['words']:.1f}", f"{row['sliced']:.1f}",
            f"{(row['move'] + row['words']) / row['sliced']:.1f}",
            "slices" if row["chosen"] == sliced_data.ORDER else row["chosen"],
        ]
        for row in content["layers"]
    ]  # fmt: skip
    head = ["channels, image, groups, epilogue", "words, us", "bit slices, us", "times", "chosen"]
    return markdown(head, rows) + "\n\n" + where(content)


TABLES = {"grouped-layers": (table, ("grouped_layers",))}


def main() -> None:
    """Measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--target", default="native")
    options = parser.parse_args()
    target = catalog.resolve(options.target)
    layers = [Layer(shape, epilogue, target) for shape in LAYERS for epilogue in EPILOGUES]
    for _ in range(options.repeat):
        for layer in layers:
            for kernel in (layer.move, layer.words, layer.sliced):
                kernel.measure()
    rows = [layer.row() for layer in layers]
    content = machine.head(target=target.name, layers=rows)
    print(table(content))
    if options.json:
        machine.save(options.json, **content)


if __name__ == "__main__":
    main()
