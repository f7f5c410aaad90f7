"""Float convolutions done directly and filtered: times, the method chosen, rounding errors.

    taskset -c 1 python benchmarks/filtered_layers.py [--json FILE] [--repeat N] [--target T]

For each layer the three methods run in turn, one thread, batch 1; the best of all repeats counts.
`gain` is the time of the direct way over that of the method chosen by default; it should not be
below 1. Errors are against float64, on normal data and weights, in units of the standard deviation
of the results.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from float_layers import BITS, ONE, STORE, Layer, _conv
from tables import markdown, where

from bnncc.schedules import schedule
from bnncc.targets import catalog, host
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import filtering, layout, reference
from bnncc.topi_binary.build import input_types, output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import Conv2d, RowPool, Step

POOL = RowPool((3, 3), (2, 2), ONE)
LAYERS: dict[str, Conv2d] = {
    "7x7 s2 3->64 at 224, max-pool, store, bits": replace(
        _conv(3, 224, 64, 7, 2, data_layout="NCHW"),
        pool=POOL, steps=(Step("affine"), *STORE, *BITS),
    ),
    "7x7 s2 3->64 at 224": _conv(3, 224, 64, 7, 2, data_layout="NCHW"),
    "3x3 s2 3->16 at 224": _conv(3, 224, 16, 3, 2, data_layout="NCHW"),
    "3x3 s2 3->32 at 224": _conv(3, 224, 32, 3, 2, data_layout="NCHW"),
    "3x3 3->128 at 32": _conv(3, 32, 128, 3, data_layout="NCHW"),
    "3x3 16->16 at 32": _conv(16, 32, 16, 3),
    "3x3 64->64 at 56": _conv(64, 56, 64, 3),
    "3x3 s2 64->128 at 56": _conv(64, 56, 128, 3, 2),
    "3x3 128->128 at 28": _conv(128, 28, 128, 3),
    "3x3 256->256 at 14": _conv(256, 14, 256, 3),
    "3x3 512->512 at 7": _conv(512, 7, 512, 3),
    "3x3 33->100 at 17": _conv(33, 17, 100, 3),
    "5x5 1->20 at 28": _conv(1, 28, 20, 5, data_layout="NCHW"),
    "5x5 32->64 at 28": _conv(32, 28, 64, 5),
    "7x7 16->32 at 28": _conv(16, 28, 32, 7),
}  # fmt: skip


def errors(spec: Conv2d, target: TargetSpec) -> dict[str, tuple[float, float]]:
    """Return maximum and root mean square of each method's error, on a small image."""
    side = min(spec.height, 56)
    spec = replace(spec, height=side, width=side, pool=None, steps=STORE)
    rng = np.random.default_rng(0)
    data = rng.standard_normal(input_types(spec)[0][0]).astype(np.float32)
    shape = (spec.out_channels, *spec.kernel, spec.channels)
    weight = (rng.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32)
    packed = layout.pack_float_weight(weight)
    exact = reference.conv2d(replace(spec, method="direct"), [data, packed])[0]
    out = {}
    for method in filtering.METHODS:
        chosen = replace(spec, method=method)
        mine = packed if method == "direct" else filtering.pack_weight(weight, chosen)
        options = {"kind": target.kind, "mcpu": target.mcpu, "mattr": list(target.mattr)}
        module = tvm.IRModule({"main": schedule(define(chosen), target)})
        library = tvm.compile(module, target=tvm.target.Target(options))
        got = tvm.runtime.empty(output_types(chosen)[0][0])
        library["main"](tvm.runtime.tensor(data), tvm.runtime.tensor(mine), got)
        error = got.numpy() - exact
        out[method] = float(np.abs(error).max()), float(np.sqrt((error**2).mean()))
    return out


def _table(content: dict) -> str:
    methods = list(filtering.METHODS)
    rows = [
        [row["name"], *(f"{row['us'][m]:.1f}" for m in methods), row["chosen"],
         *(f"{row['errors'][m][1]:.1e}" for m in methods)]
        for row in content["layers"]
    ]  # fmt: skip
    head = ["layer", *(f"{m}, us" for m in methods), "chosen", *(f"{m}, error" for m in methods)]
    return f"{markdown(head, rows)}\n\n{where(content)}"


TABLES = {"filtered-layers": (_table, ("filtered_layers",))}


def main() -> None:
    """Measure the layers asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--target", default="native")
    parser.add_argument("--only", default="", help="layers whose name contains this")
    options = parser.parse_args()
    target = catalog.resolve(options.target)
    rows = []
    print(f"{host.processor()}, target {target.name}")
    print(f"{'layer':44} {'direct':>8} {'1-d':>8} {'2-d':>8} us   chosen      gain   rms error")
    for name, spec in LAYERS.items():
        if options.only not in name:
            continue
        layers = {m: Layer(name, replace(spec, method=m), target) for m in filtering.METHODS}
        for _ in range(options.repeat):
            for layer in layers.values():
                layer.measure()
        best = {method: layer.best * 1e6 for method, layer in layers.items()}
        chosen = filtering.choose(spec, "filtered", *spec.unpooled.output_hw)
        found = errors(spec, target)
        rows.append({"name": name, "us": best, "chosen": chosen, "errors": found})
        times = " ".join(f"{best[m]:8.1f}" for m in filtering.METHODS)
        sizes = " ".join(f"{found[m][1]:.1e}" for m in filtering.METHODS)
        gain = best["direct"] / best[chosen]
        print(f"{name:44} {times}      {chosen:10} {gain:5.2f}   {sizes}", flush=True)
    if options.json:
        machine.save(options.json, target=target.name, layers=rows)


if __name__ == "__main__":
    main()
