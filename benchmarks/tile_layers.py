"""Binary layers on AMX tiles beside the same layers counted with VPOPCNTDQ, one thread.

    taskset -c 1 python benchmarks/tile_layers.py [--json FILE] [--repeat N] [--all]

Each layer runs with packed results and with the float epilogue of Bi-Real-Net, which stores its
results in a tensor of their own or over the residual; padding is SAME, with zeros.
Both kernels and all ceilings run in turn on one pinned core; each result is compared with the
NumPy oracle before it is timed. The least and the median of all repeats are written, without those
during which another hyperthread used the core (`ceilings.Quiet`). Only layers that the rule gives
to tiles are measured, with ``--all`` also those that it leaves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from ceilings import Ceiling, Quiet
from layers import FLOAT, IN_PLACE, THRESHOLD, Layer, make
from tables import both, markdown, times, where

from bnncc.schedules import tile_choice
from bnncc.targets import catalog
from bnncc.topi_binary.spec import BinaryConv2d

SHAPES = [
    (64, 56, 64, 3, 1), (128, 28, 128, 3, 1), (256, 14, 256, 3, 1), (512, 7, 512, 3, 1),
    (64, 56, 128, 3, 2), (128, 28, 256, 3, 2), (256, 14, 512, 3, 2),
    (128, 32, 128, 3, 1), (256, 16, 256, 3, 1), (512, 8, 512, 3, 1),
    (96, 27, 256, 5, 1), (256, 13, 384, 3, 1), (384, 13, 384, 3, 1), (64, 56, 192, 3, 1),
    (100, 28, 100, 3, 1), (320, 14, 320, 3, 1), (128, 13, 128, 3, 1), (128, 17, 128, 3, 1),
    (512, 4, 512, 3, 1), (128, 28, 128, 1, 1), (256, 14, 256, 1, 1), (512, 7, 512, 1, 1),
]  # fmt: skip
"""Channels, size, output channels, kernel, stride: ResNet-18, VGG-small, AlexNet, and others."""

DENSE = [(1024, 16, 1024), (512, 32, 512), (2304, 16, 256), (1024, 64, 1024)]
"""Channels, pixels, output channels."""

TILES, COUNTS = "x86-64-v4-amx", "x86-64-v4-vpopcntdq"
CEILINGS = (
    "int8 tiles", "int8 tiles, 4 x 1 loaded", "int8 tiles, 2 x 2 loaded", "xor+vpopcnt+add"
)  # fmt: skip


def layers() -> Iterator[Layer]:
    """Return all layers."""
    for steps, note in ((THRESHOLD, "bits"), (FLOAT, "float"), (IN_PLACE, "float in place")):
        for shape in SHAPES:
            yield make(shape, 0, steps, note)
        for channels, pixels, out in DENSE:
            spec = BinaryConv2d(1, 1, pixels, channels, out, (1, 1), pad_value=0, steps=steps)
            yield Layer(f"{channels} x {pixels} -> {out} {note}", spec)


@contextmanager
def always() -> Iterator[None]:
    """Let tiles compute whatever they can."""
    rule = tile_choice.pays
    tile_choice.pays = tile_choice.supports
    try:
        yield
    finally:
        tile_choice.pays = rule


class Pair:
    """A layer, computed in both ways."""

    def __init__(self, layer: Layer) -> None:
        self.name, self.macs = layer.name, layer.macs
        self.chosen = tile_choice.pays(layer.spec, catalog.CATALOG[TILES])
        with always():
            self.tiled = Layer(layer.name, layer.spec)
            self.tiled.build(catalog.CATALOG[TILES])
        self.counted = layer
        layer.build(catalog.CATALOG[COUNTS])
        self.seconds: dict[str, list[float]] = {TILES: [], COUNTS: []}

    def measure(self, quiet: Quiet) -> None:
        """Time both ways once more, unless the core was disturbed."""
        quiet.wait()
        found = {TILES: min(self.tiled.times()), COUNTS: min(self.counted.times())}
        if quiet.now() or not all(self.seconds.values()):
            for name, seconds in found.items():
                self.seconds[name].append(seconds)

    def row(self, peak: float) -> dict:
        """Return the figures."""
        least = {name: min(found) for name, found in self.seconds.items()}
        median = {name: statistics.median(found) for name, found in self.seconds.items()}
        return {
            "layer": self.name,
            "chosen": self.chosen,
            "us": least[TILES] * 1e6,
            "median_us": median[TILES] * 1e6,
            "counted_us": least[COUNTS] * 1e6,
            "counted_median_us": median[COUNTS] * 1e6,
            "ratio": least[COUNTS] / least[TILES],
            "median_ratio": median[COUNTS] / median[TILES],
            "of_ceiling": self.macs / least[TILES] / peak,
        }


def table(content: dict) -> str:
    """Return the figures as Markdown."""
    rows = [
        [row["layer"], both(row["us"], row["median_us"]),
         both(row["counted_us"], row["counted_median_us"]), times(row["ratio"]),
         times(row["median_ratio"]), f"{row['of_ceiling']:.0%}", "tiles" if row["chosen"] else ""]
        for row in content["layers"]
    ]  # fmt: skip
    head = ["layer", "tiles, us", "VPOPCNTDQ, us", "ratio", "of medians", "of ceiling", "rule"]
    return markdown(head, rows) + "\n\n" + where(content)


TABLES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "tile-layers": (table, ("tile_layers",))
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--all", action="store_true", help="layers that the rule leaves, too")
    parser.add_argument("--only", default="", help="layers whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tops = {name: Ceiling(name) for name in CEILINGS}
    pairs = [
        Pair(layer)
        for layer in layers()
        if options.only in layer.name
        and (options.all or tile_choice.pays(layer.spec, catalog.CATALOG[TILES]))
    ]
    quiet = Quiet()
    for _ in range(options.repeat):
        for pair in pairs:
            pair.measure(quiet)
        for top in tops.values():
            top.measure()
    peak = tops[CEILINGS[0]].best
    rows = [pair.row(peak) for pair in pairs]
    print(", ".join(f"{name} {top.best / 1e12:.3f} Tmac/s" for name, top in tops.items()))
    for row in rows:
        print(
            f"{row['layer']:28} {row['us']:7.1f} us, counted {row['counted_us']:7.1f}: "
            f"{row['ratio']:.2f} x (medians {row['median_ratio']:.2f}), "
            f"{row['of_ceiling']:4.0%} of ceiling{'' if row['chosen'] else ', not chosen'}"
        )
    if options.json:
        ceilings = {name: top.best for name, top in tops.items()}
        machine.save(options.json, ceilings=ceilings, layers=rows)


if __name__ == "__main__":
    main()
