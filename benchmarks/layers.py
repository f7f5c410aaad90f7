"""Binary convolutions beside the machine's ceiling: packed in, packed out, one thread.

    taskset -c 1 python benchmarks/layers.py [--json FILE] [--repeat N] [--set NAME ...]

Every kernel and every ceiling is timed in turn in each repeat, on one pinned core; the best of all
repeats counts. ``of ceiling`` is nominal: K products per output, those outside the image included;
``executed`` leaves those out, as the kernels do. Each kernel's result is
compared with the NumPy oracle before it is timed. Kernels on record are as recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from ceilings import Ceiling, ceiling_of, of_floats
from tables import markdown, where

from bnncc.records.database import load
from bnncc.schedules import schedule, with_weight_order
from bnncc.targets import catalog, host
from bnncc.topi_binary import layout, reference
from bnncc.topi_binary.build import aliases, input_types, output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Step, to_json

NINE = [
    (96, 27, 256, 5, 1),
    (256, 13, 384, 3, 1),
    (384, 13, 384, 3, 1),
    (64, 56, 192, 3, 1),
    (64, 56, 64, 3, 1),
    (64, 56, 128, 3, 2),
    (128, 28, 128, 3, 1),
    (256, 14, 256, 3, 1),
    (512, 7, 512, 3, 1),
]
"""Channels, size, output channels, kernel, stride: the layers of AlexNet and ResNet-18."""

RAGGED = [
    (33, 28, 33, 3, 1),
    (100, 28, 100, 3, 1),
    (320, 14, 320, 3, 1),
    (128, 13, 128, 3, 1),
    (128, 17, 128, 3, 1),
    (100, 17, 100, 3, 1),
    (320, 13, 320, 3, 1),
    (33, 17, 100, 3, 1),
]
"""Channels that fill no word, widths that no tile divides."""

FEW = [
    (1, 28, 32, 3, 1),
    (3, 96, 32, 5, 1),
    (3, 224, 64, 7, 2),
    (8, 56, 64, 3, 2),
    (16, 56, 64, 3, 1),
]
"""Few channels: first layers of images that were made bits, the second of them Khan's."""

POINTWISE = [
    (32, 112, 64, 1, 1),
    (64, 56, 128, 1, 1),
    (128, 28, 256, 1, 1),
    (256, 14, 512, 1, 1),
    (512, 7, 1024, 1, 1),
]
"""The layers between the depthwise ones of MobileNet."""

BIREAL = [(64, 56, 64, 3, 1), (128, 28, 128, 3, 1), (256, 14, 256, 3, 1), (512, 7, 512, 3, 1)]
"""With the float epilogue of Bi-Real-Net: affine, residual, store, next layer's bits."""

SETS = ("nine", "ragged", "few", "pointwise", "float", "ternary")

THRESHOLD = (Step("threshold"),)
FLOAT = (Step("affine"), Step("add"), Step("store"), Step("bits"))
IN_PLACE = (Step("affine"), Step("add"), Step("store", in_place=True), Step("bits"))


@dataclass
class Layer:
    """One kernel under test."""

    name: str
    spec: BinaryConv2d
    best: float = float("inf")

    def build(self, target, threads: int = 1) -> None:  # type: ignore[no-untyped-def]
        self.spec = with_weight_order(self.spec, target)
        found = load(target).find(to_json(self.spec), threads)
        point = found[0] if found is not None else None
        func = schedule(define(self.spec), target, threads, point)
        tvm_target = tvm.target.Target(
            {"kind": target.kind, "mcpu": target.mcpu, "mattr": list(target.mattr)}
        )
        self._lib = tvm.compile(tvm.IRModule({"main": func}), target=tvm_target).jit()
        inputs = self._inputs()
        self._args = [tvm.runtime.tensor(a) for a in inputs]
        wanted = reference.binary_conv2d(self.spec, inputs)
        results = []
        made = zip(output_types(self.spec), aliases(self.spec), strict=True)
        for number, ((shape, dtype), over) in enumerate(made):
            if over < 0:
                self._args.append(tvm.runtime.tensor(np.zeros(shape, dtype)))
            results.append((number, self._args[over]))  # -1: the one just made
        self._lib["main"](*self._args)
        for number, got in results:
            if not np.array_equal(got.numpy(), wanted[number]):
                raise SystemExit(f"{self.name}: result differs from the oracle")
        number = max(1, int(4e-4 / (self.macs / 1e12)))
        self._timer = self._lib.time_evaluator("main", tvm.cpu(), number=number, repeat=2)

    def _inputs(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        spec = self.spec
        arrays = []
        for shape, dtype in input_types(spec):
            if dtype == "uint32" and len(shape) > 1:
                bits = rng.random((*shape[:-1], spec.channels)) < 0.5
                arrays.append(layout.pack_bits(bits))
            elif dtype == "uint32":
                shape = (spec.out_channels, *spec.kernel, spec.channels)
                arrays.append(layout.pack_conv_weight(rng.random(shape) < 0.5, spec.weight_order))
            elif dtype == "int32":
                arrays.append(np.full(shape, spec.taps // 2 * (1 + spec.doubled), dtype))
            else:
                arrays.append((rng.integers(-8, 9, shape) / 4).astype(dtype))
        if spec.ternary:
            arrays[1] *= 0
        return arrays

    def times(self) -> list[float]:
        """Return a few times of one run each, in seconds."""
        return list(self._timer(*self._args).results)

    def measure(self) -> None:
        """Time it once more."""
        self.best = min(self.best, *self.times())

    @property
    def macs(self) -> int:
        height, width = self.spec.output_hw
        return height * width * self.spec.out_channels * self.spec.taps

    @property
    def executed(self) -> int:
        """Products of taps inside the image."""
        spec = self.spec
        inside = 1
        for axis, size in enumerate(spec.output_hw):
            starts = np.arange(size)[:, None] * spec.strides[axis] - spec.pads[axis]
            taps = starts + np.arange(spec.kernel[axis]) * spec.dilations[axis]
            inside *= int(((taps >= 0) & (taps < (spec.height, spec.width)[axis])).sum())
        return inside * spec.out_channels * spec.channels


def make(shape: tuple[int, ...], pad_value: int, steps: tuple[Step, ...], note: str) -> Layer:
    """Return the layer of one row of the tables, with SAME padding."""
    channels, size, out, kernel, stride = shape
    before = kernel // 2 if stride == 1 else 0
    spec = BinaryConv2d(
        1,
        size,
        size,
        channels,
        out,
        (kernel, kernel),
        strides=(stride, stride),
        pads=(before, before, kernel // 2, kernel // 2),
        pad_value=pad_value,
        steps=steps,
    )
    name = f"{channels},{size} -> {out},{kernel}x{kernel}" + (f",s{stride}" if stride > 1 else "")
    return Layer(f"{name} {note}", spec)


def layers(which: str) -> list[Layer]:
    """Return the layers of one set."""
    if which in ("nine", "ragged"):
        shapes = NINE if which == "nine" else RAGGED
        return [
            make(shape, value, THRESHOLD, note)
            for value, note in ((0, "pad 0"), (1, "pad +1"))
            for shape in shapes
        ]
    if which in ("few", "pointwise"):
        shapes = FEW if which == "few" else POINTWISE
        return [make(shape, 0, THRESHOLD, "bits") for shape in shapes]
    if which == "ternary":
        plain = [make(shape, 0, THRESHOLD, "one plane") for shape in NINE]
        return plain + [
            Layer(
                p.name.replace("one plane", "with zero plane"),
                dataclasses.replace(p.spec, ternary=True),
            )
            for p in plain
        ]
    return [make(shape, 0, FLOAT, "float epilogue") for shape in BIREAL]


def _pairs(content: dict) -> list[tuple[str, dict, dict]]:
    """Return layers that were measured with both paddings."""
    rows = {row["layer"]: row for row in content["layers"]}
    return [
        (name.removesuffix(" pad 0"), row, rows[name.replace("pad 0", "pad +1")])
        for name, row in rows.items()
        if name.endswith(" pad 0")
    ]


def _mean(shares: list[float]) -> float:
    return math.exp(sum(map(math.log, shares)) / len(shares))


def _table(content: dict) -> str:
    rows = [
        [name, *(f for one in both
                 for f in (f"{one['microseconds']:.1f}", f"{one['of_ceiling']:.0%}"))]
        for name, *both in _pairs(content)
    ]  # fmt: skip
    head = ["layer", "zero padding, us", "of ceiling", "+1 padding, us", "of ceiling"]
    nine = _pairs(content)[: len(NINE)]
    means = [_mean([pair[side]["of_ceiling"] for pair in nine]) for side in (1, 2)]
    return (
        f"{markdown(head, rows)}\n\nGeometric means of the first nine {means[0]:.0%} and "
        f"{means[1]:.0%}. {where(content)}"
    )


def _lookups(*contents: dict) -> str:
    rows = []
    for content in contents:
        name = next(name for name in content["ceilings"] if name.startswith("lookup"))
        means = [
            _mean([pair[side]["of_ceiling"] for pair in _pairs(content)[: len(NINE)]])
            for side in (1, 2)
        ]
        rows.append(
            [f"`{LOOKUPS[name]}`", f"{content['ceilings'][name] / 1e12:.2f}",
             *(f"{share:.0%}" for share in means), f"`{content['file']}`"]
        )  # fmt: skip
    return markdown(["target", "ceiling, Tmac/s", "zero padding", "+1 padding", "file"], rows)


LOOKUPS = {"lookup 512": "x86-64-v4", "lookup 256": "x86-64-v3", "lookup 128": "x86-64-v2"}
"""Targets whose kernels look nibbles up, by their ceiling."""

TABLES = {
    "layers": (_table, ("layers",)),
    "layers-lookup-512": (_lookups, ("layers.x86-64-v4",)),
    "layers-lookup": (_lookups, ("layers.x86-64-v3", "layers.x86-64-v2")),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--set", action="append", choices=SETS, help="may be repeated; default: all of them"
    )
    parser.add_argument("--repeat", type=int, default=60)
    parser.add_argument("--target", default="native")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    target = catalog.resolve(options.target)
    rows = [layer for name in options.set or SETS for layer in layers(name)]
    for layer in rows:
        layer.build(target)
    top = ceiling_of(target)
    binary, floats = Ceiling(top), of_floats()
    for _ in range(options.repeat):
        for layer in rows:
            layer.measure()
            binary.measure()
        floats.measure()
    report(rows, top, {one.name: one.best for one in (binary, floats)}, options.json)


def report(rows: list[Layer], name: str, ceilings: dict[str, float], path: Path | None) -> None:
    """Print the table beside the ceiling `name`, and write it to `path`."""
    top = ceilings[name]
    print(f"{host.processor()}, one thread, TVM {tvm.__version__}")
    for name, rate in ceilings.items():
        print(f"ceiling {name}: {rate / 1e12:.3f} Tmac/s")
    print(f"{'layer':42} {'us':>8} {'Tmac/s':>8} {'of ceiling':>11} {'executed':>9}")
    table = []
    for layer in rows:
        rate, executed = layer.macs / layer.best, layer.executed / layer.best
        print(
            f"{layer.name:42} {layer.best * 1e6:8.1f} {rate / 1e12:8.3f} "
            f"{rate / top:10.1%} {executed / top:9.1%}"
        )
        table.append(
            {
                "layer": layer.name,
                "microseconds": layer.best * 1e6,
                "macs": layer.macs,
                "macs_executed": layer.executed,
                "macs_per_second": rate,
                "of_ceiling": rate / top,
                "of_ceiling_executed": executed / top,
            }
        )
    if path:
        machine.save(path, ceilings=ceilings, layers=table)


if __name__ == "__main__":
    main()
