"""Networks whose layers can run row-wise, and C programs that run them on given inputs."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bnncc import driver
from bnncc.codegen import c_folder, call_order, row_wise
from bnncc.codegen.c_network import Bare
from bnncc.codegen.c_text import C_TYPES, nbytes
from bnncc.codegen.row_wise import Chain
from bnncc.options import CompileOptions
from bnncc.targets.catalog import resolve
from bnncc.trace import Trace
from tests.collection.builder import Net
from tests.portable_c import SANITIZED, STRICT


def chain_network(seed: object, layers: int = 4) -> onnx.ModelProto:
    """Return a network of random convolutions, poolings, signs and residuals on one image."""
    net = Net(seed=seed)
    rng = net.rng
    height, width = (int(n) for n in rng.integers(9, 17, 2))
    channels = int(rng.choice([1, 3, 32]))
    value = net.input("x", [1, channels, height, width])
    for number in range(layers):
        out = int(rng.choice([16, 20, 32]))
        kind = rng.choice(["float", "binary", "binary", "residual", "few", "pool"])
        if number == 0 or height < 5:
            kind = "float" if number == 0 else "residual"
        if kind == "pool":
            value, height, width = _pooled(net, value, height, width)
            continue
        kernel, dilation = int(rng.choice([1, 2, 3, 3, 5])), int(rng.choice([1, 1, 2]))
        reach = dilation * (kernel - 1) + 1
        if reach > min(height, width):
            kernel, dilation, reach = 1, 1, 1
        pads = [int(n) for n in rng.integers(0, reach, 4)] if kernel > 1 else [0] * 4
        strides = [int(n) for n in rng.choice([1, 1, 2], 2)]
        if kind == "residual":
            kernel, dilation, strides, out = 3, 1, [1, 1], channels
            pads = [1, 1, 1, 1]
        data = value
        if kind in ("binary", "residual"):
            data = signs(net, value, int(rng.integers(3)) if kind == "binary" else 0)
        elif kind == "few":
            data = net.op("Clip", net.op("Round", value), net.const(0.0), net.const(3.0))
        weight = rng.standard_normal((out, channels, kernel, kernel))
        weight = np.where(weight < 0, -1.0, 1.0) if kind != "float" else weight * 0.5
        if kind == "binary" and rng.random() < 0.5 and any(pads):  # padded by +1 or -1
            amounts = net.const([0, 0, pads[0], pads[1], 0, 0, pads[2], pads[3]], np.int64)
            data = net.op("Pad", data, amounts, net.const(float(rng.choice([-1.0, 1.0]))))
            height, width = height + pads[0] + pads[2], width + pads[1] + pads[3]
            pads = [0] * 4
        made = net.op(
            "Conv", data, net.const(weight), kernel_shape=[kernel] * 2, pads=pads,
            strides=strides, dilations=[dilation] * 2,
        )  # fmt: skip
        scale = net.const(rng.uniform(0.1, 0.3, (1, out, 1, 1)))
        shift = net.const(rng.uniform(-1, 1, (1, out, 1, 1)))
        made = net.op("Add", net.op("Mul", made, scale), shift)
        value = net.op("Add", made, value) if kind == "residual" else made
        height, width = (
            (n + pads[i] + pads[i + 2] - reach_of(kernel, dilation)) // strides[i] + 1
            for i, n in enumerate((height, width))
        )
        channels = out
    net.outputs.append(value)
    return net.model()


def reach_of(kernel: int, dilation: int) -> int:
    """Return the extent of a window."""
    return dilation * (kernel - 1) + 1


def _pooled(net: Net, value: str, height: int, width: int) -> tuple[str, int, int]:
    rng = net.rng
    kind = str(rng.choice(["MaxPool", "AveragePool"]))
    stride, pad, ceil = int(rng.integers(1, 3)), int(rng.integers(2)), int(rng.integers(2))
    kernel = int(rng.integers(2, 4))
    if rng.random() < 0.5:
        value = signs(net, value, 0)
    made = net.op(
        kind, value, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, ceil_mode=ceil
    )

    def size(extent: int) -> int:
        exact = (extent + 2 * pad - kernel) / stride
        count = (math.ceil(exact) if ceil else math.floor(exact)) + 1
        return count - (ceil and (count - 1) * stride >= extent + pad)

    return made, size(height), size(width)


def signs(net: Net, value: str, zero: int = 0) -> str:
    """Return signs: +1 or -1 for 0, or 0 for it."""
    if zero == 2:
        return net.op("Sign", value)
    compare = ("GreaterOrEqual", "Greater")[zero]
    return net.op("Where", net.op(compare, value, net.const(0.0)), net.const(1.0), net.const(-1.0))


class Scheduled:
    """A network up to its kernels, from which folders with different chains are made."""

    def __init__(self, model: Any, target: str = "c99") -> None:
        options = CompileOptions(target=target, threads=1)
        self.target = resolve(target)
        self.made = driver._scheduled(model, options, self.target, Trace(None), fixed=True)

    def files(self) -> tuple[dict[str, bytes], Bare]:
        """Return the files of the network, with the chains that the planner takes."""
        lowered = self.made.lowered
        files, bare, _ = c_folder.make(
            self.made.module, self.target, name="net", inputs=lowered.inputs,
            outputs=lowered.outputs, selfcheck=lowered.checks.repeated,
            row_wise=self.target.saves_memory,
        )  # fmt: skip
        return files, bare

    def with_chains(
        self, monkeypatch: pytest.MonkeyPatch, chains: Sequence[tuple[int, int, int]]
    ) -> tuple[dict[str, bytes], Bare]:
        """Return the files with given chains: first and last call, and rows per band."""

        def chosen(program: Any, fits: Any) -> list[Chain]:
            made = [row_wise.chained(program, *one, fits) for one in chains]
            return [one for one in made if one is not None]

        with monkeypatch.context() as patch:
            patch.setattr(row_wise, "chosen", chosen)
            patch.setattr(call_order, "smaller", lambda whole, chained: chained)
            return self.files()


_MAIN = """
#include <stdio.h>
#include <stdlib.h>
#include "net.h"

static void *content(FILE *file, size_t bytes) {{
  void *place = malloc(bytes);
  if (!place || (file && fread(place, 1, bytes, file) != bytes)) exit(2);
  return place;
}}

int main(void) {{
  FILE *in = fopen("in", "rb"), *out = fopen("out", "wb");
  void *arena = content(NULL, NET_ARENA_BYTES);
  if (!in || !out) return 2;
  memset(arena, 0x5A, NET_ARENA_BYTES);
{tensors}
  if (net_run(arena, {names})) return 3;
{written}
  return fclose(in) | fclose(out);
}}
"""


def ran(
    folder: Path, files: Mapping[str, bytes], bare: Bare, inputs: Sequence[np.ndarray]
) -> bytes:
    """Compile a folder with sanitizers, run it, and return all outputs."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    sizes = {name: (nbytes(info), C_TYPES[info.dtype]) for name, info in (*bare.given, *bare.made)}
    tensors = [
        f"  {kind} *{name} = content({'in' if name in dict(bare.given) else 'NULL'}, {size});"
        for name, (size, kind) in sizes.items()
    ]
    written = [f"  fwrite({name}, 1, {sizes[name][0]}, out);" for name, _ in bare.made]
    text = "#include <string.h>" + _MAIN.format(
        tensors="\n".join(tensors), names=", ".join(sizes), written="\n".join(written)
    )
    (folder / "net_check.c").write_text(text)
    (folder / "in").write_bytes(b"".join(x.tobytes() for x in inputs))
    (kernels,) = (name for name in files if name in ("net_kernels.c", "net_kernels.o"))
    flags = [*STRICT, *SANITIZED, "-O0"]  # quick to compile
    command = ["gcc", *flags, "net_check.c", "net.c", kernels, "-lm", "-o", "run"]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        ["./run"], cwd=folder, capture_output=True, text=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr[:3000]
    return (folder / "out").read_bytes()
