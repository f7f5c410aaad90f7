"""What the Arm benchmarks share: layers, and assembly cut into blocks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tvm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bnncc import schedules
from bnncc.codegen import memory, pipeline
from bnncc.targets import catalog
from bnncc.topi_binary.build import input_types, output_types
from bnncc.topi_binary.definitions import define
from bnncc.topi_binary.spec import BinaryConv2d, Step

Layer = tuple[int, int, int, int, int, int]
"""Channels, height and width, output channels, kernel, stride, padding."""

BITSTREAM: tuple[Layer, ...] = (
    (96, 27, 256, 5, 1, 2),
    (256, 13, 384, 3, 1, 1),
    (384, 13, 384, 3, 1, 1),
    (64, 56, 192, 3, 1, 1),
    (64, 56, 64, 3, 1, 1),
    (64, 56, 128, 3, 2, 1),
    (128, 28, 128, 3, 1, 1),
    (256, 14, 256, 3, 1, 1),
)
"""The layers of BitStream's tables."""

_ENDS = re.compile(r"(b|b\.\w+|cbn?z|tbn?z|ret)$")
_LABEL = re.compile(r"^(\.L\w+|\w+):")


def name_of(layer: Layer) -> str:
    """Return a layer as text."""
    channels, size, out, kernel, stride, _ = layer
    return f"{channels},{size} -> {out}, {kernel}x{kernel}" + f", s{stride}" * (stride > 1)


def spec_of(layer: Layer, target: str) -> BinaryConv2d:
    """Return a layer with thresholds, packed in and out."""
    channels, size, out, kernel, stride, pad = layer
    spec = BinaryConv2d(
        1, size, size, channels, out, (kernel, kernel), (stride, stride), pads=(pad,) * 4,
        steps=(Step("threshold"),),
    )  # fmt: skip
    return schedules.with_weight_order(spec, catalog.resolve(target))


def words_of(layer: Layer) -> float:
    """Return the layer's multiply-accumulates, divided by 128."""
    channels, size, out, kernel, stride, pad = layer
    side = (size + 2 * pad - kernel) // stride + 1
    return side * side * out * kernel * kernel * channels / 128


def scheduled(spec: BinaryConv2d, target: str) -> Any:
    """Return the kernel of `spec`."""
    return schedules.schedule(define(spec), catalog.resolve(target), 1)


def arguments(spec: BinaryConv2d) -> list[np.ndarray]:
    """Return random inputs, and outputs."""
    rng = np.random.default_rng(0)
    inputs = [
        rng.integers(0, 2**32, shape, dtype=np.uint32)
        if dtype == "uint32"
        else np.full(shape, spec.taps // 2, np.int32)
        for shape, dtype in input_types(spec)
    ]
    return [*inputs, *(np.zeros(shape, dtype) for shape, dtype in output_types(spec))]


def assembly(spec: BinaryConv2d, target: str) -> str:
    """Return the kernel of `spec` as assembly."""
    func = scheduled(spec, target).with_attr("global_symbol", "kernel")
    chosen = pipeline.tvm_target(catalog.resolve(target))
    with memory.lowering():
        made = tvm.compile(tvm.IRModule({"kernel": func}), target=chosen)
    return made.mod.inspect_source("asm")


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """Cut assembly into pieces without jumps into or out of them: a label and instructions."""
    found: list[tuple[str, list[str]]] = []
    label, piece = "", []

    def end(following: str) -> None:
        nonlocal label, piece
        if piece:
            found.append((label, piece))
        label, piece = following, []

    for line in text.splitlines():
        line = line.split("//")[0].rstrip()
        if match := _LABEL.match(line):
            if not match[1].startswith((".Ltmp", ".Lfunc")):  # marks of debuggers
                end(match[1])
        elif line.startswith("\t") and not line.strip().startswith("."):
            piece.append(" ".join(line.split()))
            if _ENDS.match(piece[-1].split()[0]):
                end("")
    end("")
    return found


def is_loop(label: str, piece: list[str]) -> bool:
    """Whether the piece ends in a jump to its start."""
    return bool(label) and piece[-1].split()[-1] == label


def counts(piece: list[str]) -> int:
    """Return how many vectors are counted: words of 128 bits."""
    return sum(line.startswith("cnt ") for line in piece)
