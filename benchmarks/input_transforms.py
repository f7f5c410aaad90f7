"""Binarizing an image of bytes beside copying it: 96x96, red, green and blue.

    taskset -c 1 python benchmarks/input_transforms.py [--json FILE] [--repeat N] [--target T]

Each transform of `--input-transform` in both orders of bytes, against NumPy making a copy of the
image (`image.copy()`) and copying it over another (`numpy.copyto`). One thread; everything runs in
turn, and the best of all repeats counts. The bits take 4 bytes for a pixel, the image 3.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from tables import markdown, where

from bnncc.ir.image_bits import bits_of
from bnncc.runtime.session import aligned_empty
from bnncc.schedules import schedule
from bnncc.targets import catalog
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.layout import pack_bits
from bnncc.topi_binary.spec import ImageBits

SIDE = 96
CALLS = 500
KINDS = {
    "rgb-threshold": ("threshold", (120, 128, 100)),
    "gray-threshold": ("grey", (128_001,)),
    "lbp": ("lbp", ()),
}


class Transform:
    """One kernel on one image, checked against NumPy."""

    def __init__(self, kind: str, layout: str, target: TargetSpec) -> None:
        name, thresholds = KINDS[kind]
        spec = ImageBits(1, SIDE, SIDE, 3, name, thresholds, (), layout, 3)
        options = {"kind": target.kind, "mcpu": target.mcpu, "mattr": list(target.mattr)}
        module = tvm.IRModule({"main": schedule(define(spec), target)})
        library = tvm.compile(module, target=tvm.target.Target(options)).jit()
        image = np.random.default_rng(0).integers(0, 256, (1, SIDE, SIDE, 3)).astype(np.uint8)
        wanted = pack_bits(bits_of(image, name, thresholds))
        given = image if layout == "NHWC" else image.transpose(0, 3, 1, 2)
        data = aligned_empty(given.shape, "uint8")
        data[...] = given
        bits = aligned_empty(wanted.shape, "uint32")
        self._args = [tvm.runtime.tensor(data), tvm.runtime.tensor(bits)]
        library["main"](*self._args)
        np.testing.assert_array_equal(self._args[1].numpy(), wanted)
        self._timer = library.time_evaluator("main", tvm.cpu(), number=CALLS, repeat=2)
        self.best = float("inf")

    def measure(self) -> None:
        self.best = min(self.best, *self._timer(*self._args).results)


class Copy:
    """What NumPy does to the image."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action, self.best = action, float("inf")

    def measure(self) -> None:
        for _ in range(2):
            start = time.perf_counter()
            for _ in range(CALLS):
                self._action()
            self.best = min(self.best, (time.perf_counter() - start) / CALLS)


def table(content: dict) -> str:
    """Return the figures as Markdown."""
    us = content["us"]
    rows = [
        [
            kind,
            *(
                f"{us[kind][o]:.2f} ({us[kind][o] / us['copyto']:.1f} x, "
                f"{us[kind][o] / us['copy']:.1f} x)"
                for o in ("NCHW", "NHWC")
            ),
        ]
        for kind in KINDS
    ]
    head = ["us (x `copyto`, x `copy`)", "planes", "interleaved"]
    copies = f"`numpy.copyto` {us['copyto']:.2f} us, `image.copy()` {us['copy']:.2f} us; "
    return markdown(head, rows) + "\n\n" + copies + where(content)


TABLES = {"input-transforms": (table, ("input_transforms",))}


def main() -> None:
    """Measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--target", default="native")
    options = parser.parse_args()
    target = catalog.resolve(options.target)
    image, other = (aligned_empty((1, SIDE, SIDE, 3), "uint8") for _ in range(2))
    image[...] = 7
    copies = {
        "copy": Copy(image.copy),
        "copyto": Copy(lambda: np.copyto(other, image)),
    }
    transforms = {(k, o): Transform(k, o, target) for k in KINDS for o in ("NCHW", "NHWC")}
    for _ in range(options.repeat):
        for item in (*copies.values(), *transforms.values()):
            item.measure()
    us: dict = {name: item.best * 1e6 for name, item in copies.items()}
    for (kind, order), item in transforms.items():
        us.setdefault(kind, {})[order] = item.best * 1e6
    content = machine.head(target=target.name, side=SIDE, us=us)
    print(table(content))
    if options.json:
        machine.save(options.json, **content)


if __name__ == "__main__":
    main()
