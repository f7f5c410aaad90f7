"""Float and memory-bound kernels beside the machine's ceilings: one thread, batch 1.

    taskset -c 1 python benchmarks/float_layers.py [--json FILE] [--repeat N] [--target T]

Kernels are compared with NumPy copying as many bytes as they read and write, convolutions also with
the FMA ceiling of the same run (in products of the direct way). `of bound` is the share of
whichever of the two allows less. Each repeat measures everything in turn; the best of all repeats
counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from ceilings import of_floats
from tables import markdown, where

from bnncc.codegen import memory
from bnncc.schedules import schedule
from bnncc.targets import catalog, host
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.build import input_types, output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import (
    BitwiseMaxPool,
    ConcatBits,
    Conv2d,
    Elementwise,
    Pool2d,
    RowPool,
    SliceBits,
    Spec,
    Step,
)

ONE = (1, 1, 1, 1)
STORE = (Step("store"),)
BITS = (Step("bits"),)
GLUE = (Step("affine"), Step("add"), Step("prelu"), Step("store"), Step("bits"))


def _conv(
    channels: int, size: int, out: int, kernel: int, stride: int = 1, **more: object
) -> Conv2d:
    pads = (kernel // 2,) * 4
    extents = {"kernel": (kernel, kernel), "strides": (stride, stride), "pads": pads}
    return Conv2d(1, size, size, channels, out, **extents, steps=STORE, **more)  # type: ignore[arg-type]


LAYERS: dict[str, Spec] = {
    "Bi-Real-18's stem: 7x7 s2 filtered, max-pool, bits": replace(
        _conv(3, 224, 64, 7, 2, data_layout="NCHW"), method="filtered",
        pool=RowPool((3, 3), (2, 2), ONE), steps=(Step("affine"), *BITS, *STORE),
    ),
    "QuickNet's stem: 3x3 s2 3->16 at 224, relu": replace(
        _conv(3, 224, 16, 3, 2, data_layout="NCHW"), steps=(Step("affine"), Step("relu"), *STORE)
    ),
    "1x1 16->64 at 56, bits": replace(
        _conv(16, 56, 64, 1), steps=(Step("affine"), *BITS, *STORE)
    ),
    "stem 7x7 s2 3->64 at 224, NCHW in": _conv(3, 224, 64, 7, 2, data_layout="NCHW"),
    "1x1 64->128 at 28": _conv(64, 28, 128, 1),
    "1x1 128->256 at 14": _conv(128, 14, 256, 1),
    "1x1 256->512 at 7": _conv(256, 7, 512, 1),
    "3x3 64->64 at 56": _conv(64, 56, 64, 3),
    "3x3 s2 64->128 at 56": _conv(64, 56, 128, 3, 2),
    "3x3 256->256 at 14": _conv(256, 14, 256, 3),
    "3x3 512->512 at 7": _conv(512, 7, 512, 3),
    "3x3 33->100 at 17": _conv(33, 17, 100, 3),
    "depthwise 3x3 128 at 56": _conv(128, 56, 128, 3, groups=128),
    "depthwise 3x3 s2 128 at 56": _conv(128, 56, 128, 3, 2, groups=128),
    "dense 512->1000": Conv2d(1, 1, 1, 512, 1000, (1, 1), rank=2, steps=STORE),
    "maxpool 3x3 s2 64 at 112, affine + store + bits": Pool2d(
        1, 112, 112, 64, "max", (3, 3), (2, 2), pads=ONE, steps=(Step("affine"), *STORE, *BITS)
    ),
    "avgpool 2x2 s2 64 at 56": Pool2d(1, 56, 56, 64, "avg", (2, 2), (2, 2), steps=STORE),
    "global avgpool 512 at 7": Pool2d(1, 7, 7, 512, "avg", (7, 7), squeeze=True, steps=STORE),
    "pack NHWC 64 at 56": Elementwise(1, 56, 56, 64, steps=BITS),
    "pack NCHW 64 at 56": Elementwise(1, 56, 56, 64, data_layout="NCHW", steps=BITS),
    "pack NCHW 3 at 224": Elementwise(1, 224, 224, 3, data_layout="NCHW", steps=BITS),
    "affine + add + prelu + store + bits 64 at 56": Elementwise(1, 56, 56, 64, steps=GLUE),
    "NCHW to NHWC 64 at 56": Elementwise(1, 56, 56, 64, data_layout="NCHW", steps=STORE),
    "NHWC to NCHW 64 at 56": Elementwise(1, 56, 56, 64, steps=(Step("store", layout="NCHW"),)),
    "bits to float 64 at 56": Elementwise(1, 56, 56, 64, from_bits=True, steps=STORE),
    "maxpool of bits 2x2 s2 64 at 56": BitwiseMaxPool(1, 56, 56, 64, (2, 2), (2, 2)),
    "concat of bits 64 + 100 at 28": ConcatBits(1, 28, 28, (64, 100)),
    "shuffle of bits 116 at 28": SliceBits(
        1, 28, 28, 116, tuple(i % 2 * 58 + i // 2 for i in range(116))
    ),
}  # fmt: skip


class Layer:
    """One kernel and, if it has no multiplications, a copy of as many bytes."""

    def __init__(self, name: str, spec: Spec, target: TargetSpec) -> None:
        self.name, self.spec = name, spec
        start = time.perf_counter()
        func = schedule(define(spec), target)
        options = {"kind": target.kind, "mcpu": target.mcpu, "mattr": list(target.mattr)}
        module = tvm.IRModule({"main": func})
        # As all code is made.
        with memory.lowering():
            self._lib = tvm.compile(module, target=tvm.target.Target(options)).jit()
        self.compile_seconds = time.perf_counter() - start
        rng = np.random.default_rng(0)
        arrays = [
            rng.standard_normal(shape).astype(dtype)
            if dtype == "float32"
            else np.zeros(shape, dtype)
            for shape, dtype in input_types(spec) + output_types(spec)
        ]
        self.bytes = sum(a.nbytes for a in arrays)
        self._args = [tvm.runtime.tensor(a) for a in arrays]
        self._copy = [np.zeros(self.bytes // 2 + 1, np.uint8) for _ in range(2)]
        self.best = self.copy = float("inf")
        once = self._lib.time_evaluator("main", tvm.cpu(), number=1, repeat=5)
        seconds = min(once(*self._args).results)
        self._number = max(1, int(2e-4 / seconds))
        self._timer = self._lib.time_evaluator("main", tvm.cpu(), number=self._number, repeat=2)

    @property
    def macs(self) -> int:
        spec = self.spec
        if not isinstance(spec, Conv2d):
            return 0
        height, width = spec.unpooled.output_hw
        taps = spec.kernel[0] * spec.kernel[1] * spec.channels // spec.groups
        return height * width * spec.out_channels * taps

    def measure(self) -> None:
        self.best = min(self.best, *self._timer(*self._args).results)
        for _ in range(2):
            start = time.perf_counter()
            for _ in range(self._number):
                np.copyto(self._copy[0], self._copy[1])
            self.copy = min(self.copy, (time.perf_counter() - start) / self._number)

    def row(self, ceiling: float) -> dict:
        """Return the results as plain data."""
        out = {
            "name": self.name,
            "us": self.best * 1e6,
            "gbytes_per_second": self.bytes / self.best / 1e9,
            "of_copy": self.copy / self.best,
            "of_bound": self.copy / self.best,
            "compile_seconds": self.compile_seconds,
        }
        if self.macs:
            rate = self.macs / self.best
            share = rate / ceiling if ceiling else 0.0
            out |= {"tmacs_per_second": rate / 1e12, "of_fma": share}
            out["of_bound"] = max(share, self.copy / self.best)
        return out


def _table(content: dict) -> str:
    rows = [
        [row["name"], f"{row['us']:.1f}", f"{row['of_fma']:.0%}" if "of_fma" in row else "",
         f"{row['of_copy']:.0%}"]
        for row in content["layers"]
    ]  # fmt: skip
    return (
        f"{markdown(['layer', 'us', 'of the FMA ceiling', 'of a copy'], rows)}\n\n{where(content)}"
    )


TABLES = {"float-layers": (_table, ("float_layers",))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--target", default="native")
    parser.add_argument("--only", default="", help="layers whose name contains this")
    options = parser.parse_args()
    target = catalog.resolve(options.target)
    layers = [Layer(n, s, target) for n, s in LAYERS.items() if options.only in n]
    ceiling = of_floats() if "avx2" in host.features() else None
    for _ in range(options.repeat):
        for layer in layers:
            layer.measure()
            if ceiling:
                ceiling.measure()
    best = ceiling.best if ceiling else 0.0
    rows = [layer.row(best) for layer in layers]
    print(f"{host.processor()}, target {target.name}, FMA ceiling {best / 1e12:.4f} Tmac/s")
    print(
        f"{'layer':50} {'us':>8} {'Tmac/s':>8} {'of FMA':>7} {'GB/s':>6} {'of copy':>8}"
        f" {'of bound':>8} {'s':>5}"
    )
    for row in rows:
        rate = f"{row.get('tmacs_per_second', 0):8.4f}" if "of_fma" in row else " " * 8
        share = f"{row['of_fma']:7.0%}" if "of_fma" in row else " " * 7
        print(
            f"{row['name']:50} {row['us']:8.1f} {rate} {share} {row['gbytes_per_second']:6.1f}"
            f" {row['of_copy']:8.0%} {row['of_bound']:8.0%} {row['compile_seconds']:5.2f}"
        )
    if options.json:
        machine.save(options.json, target=target.name, fma=best, layers=rows)


if __name__ == "__main__":
    main()
