"""Float layers with operands of bfloat16 (`--float-precision`) beside float32: times.

    taskset -c 1 python benchmarks/bfloat16_layers.py [--json FILE] [--repeat N] [--target T]

Convolutions and dense layers of common networks, one thread. Each runs in float32 the default way,
filtered where that is chosen, and with rounded operands as the option has it, in turn; the best of
all repeats counts.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from float_layers import STORE, Layer, _conv
from tables import markdown, times, where

from bnncc.schedules import with_packed_operands
from bnncc.targets import catalog, host
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import filtering
from bnncc.topi_binary.spec import Conv2d

_SHAPES = (
    (64, 56, 64, 3, 1), (128, 28, 128, 3, 1), (256, 14, 256, 3, 1), (512, 7, 512, 3, 1),
    (64, 56, 128, 3, 2), (128, 28, 256, 3, 2), (64, 56, 128, 1, 1), (128, 28, 256, 1, 1),
    (256, 14, 512, 1, 1), (64, 56, 128, 1, 2), (96, 27, 256, 5, 1), (16, 32, 16, 3, 1),
)  # fmt: skip
_DENSE = ((1, 512, 1000), (1, 4096, 1000), (16, 512, 1000), (64, 768, 768))

LAYERS: dict[str, Conv2d] = {
    f"{k}x{k} s{stride} {channels}->{out} at {size}": _conv(channels, size, out, k, stride)
    for channels, size, out, k, stride in _SHAPES
} | {
    f"dense {rows} x {depth}->{units}": Conv2d(
        rows, 1, 1, depth, units, (1, 1), rank=2, steps=STORE
    )
    for rows, depth, units in _DENSE
}


def ways(spec: Conv2d, target: TargetSpec) -> dict[str, Conv2d]:
    """Return the layer in float32 and in bfloat16."""
    rounded = with_packed_operands(replace(spec, operands="bfloat16"), target)
    return {
        name: replace(way, method=filtering.choose(way, "filtered", *way.output_hw))
        for name, way in (("float32", spec), ("bfloat16", rounded))
    }


def table(content: dict) -> str:
    """Return the figures as Markdown."""
    rows = []
    for layer in content["layers"]:
        us, method = layer["us"], layer["method"]
        cells = [f"{us[name]:.1f} ({method[name]})" for name in ("float32", "bfloat16")]
        rows.append([layer["name"], *cells, times(us["float32"] / us["bfloat16"])])
    head = ["layer", "float32, us", "bfloat16, us", "gain"]
    return markdown(head, rows) + "\n\n" + where(content)


TABLES = {"bfloat16-layers": (table, ("bfloat16_layers",))}


def main() -> None:
    """Measure the layers asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--target", default="native")
    parser.add_argument("--only", default="", help="layers whose name contains this")
    options = parser.parse_args()
    target = catalog.resolve(options.target)
    if missing := catalog.missing_features(target):
        raise SystemExit(f"{target.name} needs {', '.join(missing)}")
    rows = []
    print(f"{host.processor()}, target {target.name}")
    for name, spec in LAYERS.items():
        if options.only not in name:
            continue
        made = ways(spec, target)
        layers = {form: Layer(name, way, target) for form, way in made.items()}
        for _ in range(options.repeat):
            for layer in layers.values():
                layer.measure()
        us = {form: layer.best * 1e6 for form, layer in layers.items()}
        rows.append({"name": name, "method": {f: w.method for f, w in made.items()}, "us": us})
        print(f"{name:26} " + "  ".join(f"{f} {v:8.1f} us" for f, v in us.items()), flush=True)
    if options.json:
        machine.save(options.json, target=target.name, layers=rows)


if __name__ == "__main__":
    main()
