"""Small transformers with odd sizes, and how many of their layers are in bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import onnx

from benchmarks.transformer_networks import Shape, bitnet, blocks

SHAPE = Shape(48, 3, 72, tokens=7, batch=2)
"""Three heads of 16; words are neither full nor whole numbers of vectors."""
SHARED = replace(SHAPE, heads=4, kv_heads=2, head_size=16)
WIDE = replace(SHAPE, inner=96)
DECODE = replace(SHARED, tokens=1, past=9, batch=1)

BLOCKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "bitnet decoder": partial(bitnet, SHARED),
    "bitnet encoder": partial(bitnet, SHARED, decoder=False, gate="silu"),
    "bitnet with a cache": partial(bitnet, DECODE, gate="silu"),
    "bit": partial(blocks, "bit", SHAPE),
    "binary vit": partial(blocks, "binary_vit", WIDE),
    "binary bert": partial(blocks, "binary_bert", SHAPE),
}
KINDS = {
    "bitnet decoder": {"few_bit": 7, "float": 2},
    "bitnet encoder": {"few_bit": 7, "float": 2},
    "bitnet with a cache": {"few_bit": 7, "float": 2},
    "bit": {"binary": 8},
    "binary vit": {"binary": 8},
    "binary bert": {"few_bit": 6, "float": 2},
}
"""Layers by kind; products of real-valued queries, keys and values are in float."""
