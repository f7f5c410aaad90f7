"""Binary and ternary transformers as plain ONNX, with random weights.

    python benchmarks/transformer_networks.py OUTDIR [NAME ...] [--layers N]

BitNet b1.58 blocks (Ma et al., 2024; Wang et al., 2023): per-token int8 activations, ternary
weights, RMSNorm, rotary embedding, grouped-query attention, and a gate of squared ReLU or SiLU.
BiT (Liu et al., NeurIPS 2022): elastic binarization of activations to {0, a} and {-a, a}, and
attention between bits. BinaryViT (Le and Li, CVPR Workshops 2023): the same for images, with
RPReLU and shortcuts around each layer. BinaryBERT (Bai et al., ACL 2021): binary weights,
activations of 4 bits.

Networks read hidden states: what an embedding table gives is a lookup, of no interest to a
benchmark. `NETWORKS` has the shapes of published models; tests build small ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

if __package__:
    from benchmarks.networks import OPSET, Builder
else:
    from networks import OPSET, Builder


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer."""

    hidden: int
    heads: int
    inner: int
    """Width inside of the feed-forward part."""
    layers: int = 1
    kv_heads: int = 0
    """Heads of keys and values; 0 for as many as `heads`."""
    head_size: int = 0
    """Width of a head; 0 for ``hidden / heads``."""
    tokens: int | str = 128
    past: int | str = 0
    """Tokens in the key/value cache, which are inputs; 0 for no cache."""
    batch: int | str = 1
    cache: int = TensorProto.FLOAT
    """Type of the cache; attention computes in float32."""

    @property
    def size(self) -> int:
        """Width of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def whole(self) -> int | str:
        """Tokens that are attended to."""
        if isinstance(self.past, int) and isinstance(self.tokens, int):
            return self.past + self.tokens
        return f"{self.past}+{self.tokens}" if self.past else self.tokens

    @property
    def shared(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads


BITNET_2B4T = Shape(2560, 20, 6912, layers=30, kv_heads=5)
"""BitNet b1.58 2B4T (Microsoft, 2025)."""
SMALL_06B = Shape(1024, 16, 3072, layers=28, kv_heads=8, head_size=128)
"""The shapes of Qwen3 0.6B, which embedding encoders share."""
BERT_BASE = Shape(768, 12, 3072, layers=12)
VIT_SMALL = Shape(384, 6, 1536, layers=12, tokens=196)


class Transformer(Builder):
    """Writes the nodes of a transformer; tensors are names."""

    def __init__(self, name: str, shape: Shape) -> None:
        super().__init__(name, shape.hidden, 1)
        self.shape = shape
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[tuple[str, Sequence[int | str]]] = []

    def _kind(self, output: int) -> int:
        """Return the type of an output: caches follow the first one."""
        return self.shape.cache if output else TensorProto.FLOAT

    # ---- parts ------------------------------------------------------------------------------

    def given(self, name: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> str:
        """Add an input."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def number(self, value: float) -> str:
        """Add a scalar of float32."""
        return self.const(np.float32(value))

    def ints(self, *values: int) -> str:
        """Add a vector of int64."""
        return self.const(np.array(values, np.int64))

    def spread(self, *shape: int, scale: float = 0.2, around: float = 1.0) -> str:
        """Add random parameters, such as the scales of a norm."""
        value = around + scale * self.rng.standard_normal(shape)
        return self.const(value.astype(np.float32))

    def rms_norm(self, x: str, size: int) -> str:
        """Divide by the root of the mean square, and scale, as transformers' classes do."""
        mean = self.op("ReduceMean", self.op("Pow", x, self.number(2)), axes=[-1], keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.number(1e-5)))
        scaled = self.op("Mul", x, self.op("Reciprocal", root))
        return self.op("Mul", self.spread(size), scaled)

    def layer_norm(self, x: str, size: int) -> str:
        """Normalize the last axis."""
        return self.op(
            "LayerNormalization", x, self.spread(size), self.spread(size, around=0), axis=-1,
            epsilon=1e-5,
        )  # fmt: skip

    def ternary_linear(self, x: str, depth: int, units: int) -> str:
        """Multiply int8 values, scaled per token, by ternary weights, then undo both scales."""
        most = self.op("ReduceMax", self.op("Abs", x), axes=[-1], keepdims=1)
        scale = self.op("Div", self.number(127), self.op("Clip", most, self.number(1e-5)))
        rounded = self.op("Round", self.op("Mul", x, scale))
        data = self.op("Clip", rounded, self.number(-128), self.number(127))
        weight = self.rng.integers(-1, 2, (depth, units)).astype(np.float32)
        y = self.op("Div", self.op("MatMul", data, self.const(weight)), scale)
        return self.op("Mul", y, self.number((1.5 * depth) ** -0.5))

    def heads(self, x: str, count: int) -> str:
        """Cut [N, T, count * size] into [N, count, T, size]."""
        cut = self.op("Reshape", x, self.ints(0, 0, count, self.shape.size))
        return self.op("Transpose", cut, perm=[0, 2, 1, 3])

    def joined(self, x: str) -> str:
        """Join [N, count, T, size] into [N, T, count * size]."""
        turned = self.op("Transpose", x, perm=[0, 2, 1, 3])
        return self.op("Reshape", turned, self.ints(0, 0, self.shape.heads * self.shape.size))

    def repeated(self, x: str) -> str:
        """Give each query head the head of keys or values that it shares."""
        times = self.shape.heads // self.shape.shared
        if times == 1:
            return x
        whole = self.op("Shape", x)
        n, h, t, d = (self.op("Gather", whole, self.ints(k)) for k in range(4))
        sizes = self.op("Concat", n, h, self.ints(times), t, d, axis=0)
        wide = self.op("Expand", self.op("Unsqueeze", x, self.ints(2)), sizes)
        return self.op("Reshape", wide, self.ints(0, self.shape.heads, -1, self.shape.size))

    def rotation(self, tokens: int) -> tuple[str, str]:
        """Return cosines and sines, of constant positions or of an input `position_ids`."""
        half = self.shape.size // 2
        rates = (10000.0 ** -(np.arange(half) / half)).astype(np.float32)
        if isinstance(self.shape.tokens, int) and not self.shape.past:
            angles = np.arange(tokens, dtype=np.float32)[:, None] * np.concatenate([rates, rates])
            return self.const(np.cos(angles)), self.const(np.sin(angles))
        at = self.given("position_ids", [self.shape.batch, self.shape.tokens], TensorProto.INT64)
        at = self.op("Cast", self.op("Unsqueeze", at, self.ints(1, 3)), to=TensorProto.FLOAT)
        angle = self.op("Mul", at, self.const(rates))
        angles = self.op("Concat", angle, angle, axis=-1)
        return self.op("Cos", angles), self.op("Sin", angles)

    def rotated(self, x: str, rotation: tuple[str, str]) -> str:
        """Rotate pairs of values by angles that grow with the position."""
        half, last = self.shape.size // 2, np.iinfo(np.int64).max
        low = self.op("Slice", x, self.ints(0), self.ints(half), self.ints(-1))
        high = self.op("Slice", x, self.ints(half), self.ints(last), self.ints(-1))
        turned = self.op("Concat", self.op("Neg", high), low, axis=-1)
        cosine, sine = rotation
        return self.op("Add", self.op("Mul", x, cosine), self.op("Mul", turned, sine))

    def cached(self, x: str, layer: int, kind: str) -> str:
        """Append to a cache, which is an input and an output."""
        s = self.shape
        if not s.past:
            return x
        past = self.given(f"past_{kind}_{layer}", [s.batch, s.shared, s.past, s.size], s.cache)
        narrow = s.cache != TensorProto.FLOAT
        new = self.op("Cast", x, to=s.cache) if narrow else x
        out = self.op("Concat", past, new, axis=2)
        self.outputs.append((out, [s.batch, s.shared, s.whole, s.size]))
        return self.op("Cast", out, to=TensorProto.FLOAT) if narrow else out

    def attend(self, q: str, k: str, v: str, mask: str | None) -> str:
        """Return the values that queries find by keys."""
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.number(self.shape.size**-0.5))
        if mask is not None:
            scores = self.op("Add", scores, mask)
        return self.op("MatMul", self.op("Softmax", scores, axis=-1), v)

    def causal(self) -> str | None:
        """Return the mask of a decoder that reads several tokens at once."""
        tokens, past = self.shape.tokens, self.shape.past
        if tokens == 1:
            return None
        if not isinstance(tokens, int) or not isinstance(past, int):
            return self.given("mask", [self.shape.batch, 1, tokens, self.shape.whole])
        later = np.arange(past + tokens) > past + np.arange(tokens)[:, None]
        return self.const(np.where(later, np.float32(-1e9), np.float32(0))[None, None])

    # ---- blocks -----------------------------------------------------------------------------

    def bitnet_block(
        self, x: str, layer: int, rotation: tuple[str, str], mask: str | None, gate: str
    ) -> str:
        """Append a BitNet block; `gate` is ``relu2``, with norms inside, or ``silu``."""
        s = self.shape
        norm = self.rms_norm(x, s.hidden)
        q = self.heads(self.ternary_linear(norm, s.hidden, s.heads * s.size), s.heads)
        k = self.heads(self.ternary_linear(norm, s.hidden, s.shared * s.size), s.shared)
        v = self.heads(self.ternary_linear(norm, s.hidden, s.shared * s.size), s.shared)
        q, k = self.rotated(q, rotation), self.rotated(k, rotation)
        k, v = self.cached(k, layer, "key"), self.cached(v, layer, "value")
        y = self.joined(self.attend(q, self.repeated(k), self.repeated(v), mask))
        if gate == "relu2":
            y = self.rms_norm(y, s.heads * s.size)
        x = self.op("Add", x, self.ternary_linear(y, s.heads * s.size, s.hidden))
        norm = self.rms_norm(x, s.hidden)
        up = self.ternary_linear(norm, s.hidden, s.inner)
        opened = self.ternary_linear(norm, s.hidden, s.inner)
        if gate == "relu2":
            opened = self.op("Pow", self.op("Relu", opened), self.number(2))
            y = self.rms_norm(self.op("Mul", opened, up), s.inner)
        else:
            y = self.op("Mul", self.op("Mul", opened, self.op("Sigmoid", opened)), up)
        return self.op("Add", x, self.ternary_linear(y, s.inner, s.hidden))

    def elastic(self, x: str, low: int) -> str:
        """Binarize to {0, a}, or to {-a, a} if `low` is -1, with a learned offset."""
        scale = float(np.float32(self.rng.uniform(0.3, 0.8)))
        if low:
            x = self.op("Sub", x, self.number(self.rng.uniform(-0.1, 0.1)))
            over = self.op("GreaterOrEqual", x, self.number(0))
            return self.op("Where", over, self.number(scale), self.number(-scale))
        scaled = self.op("Div", x, self.number(scale))
        bits = self.op("Clip", self.op("Round", scaled), self.number(0), self.number(1))
        return self.op("Mul", bits, self.number(scale))

    def binary_linear(self, x: str, depth: int, units: int) -> str:
        """Multiply by signs times the mean of their absolute values, and add a bias."""
        weight = self.signs(depth, units) * np.float32(depth**-0.5)
        return self.op(
            "Add", self.op("MatMul", x, self.const(weight)), self.spread(units, around=0)
        )

    def binary_attention(self, x: str) -> str:
        """Attend with queries, keys and values of bits, and weights of 0 and a."""
        s = self.shape
        data = self.elastic(x, -1)
        q, k, v = (
            self.elastic(self.heads(self.binary_linear(data, s.hidden, s.hidden), s.heads), -1)
            for _ in range(3)
        )
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        weights = self.op("Softmax", self.op("Mul", scores, self.number(s.size**-0.5)), axis=-1)
        small = float(np.float32(2.0 / (s.tokens if isinstance(s.tokens, int) else 128)))
        rounded = self.op("Round", self.op("Div", weights, self.number(small)))
        bits = self.op("Clip", rounded, self.number(0), self.number(1))
        weights = self.op("Mul", bits, self.number(small))
        return self.joined(self.op("MatMul", weights, v))

    def bit_block(self, x: str, layer: int) -> str:
        """Append a block of BiT."""
        s = self.shape
        y = self.elastic(self.binary_attention(x), -1)
        x = self.layer_norm(self.op("Add", x, self.binary_linear(y, s.hidden, s.hidden)), s.hidden)
        y = self.op("Relu", self.binary_linear(self.elastic(x, -1), s.hidden, s.inner))
        y = self.binary_linear(self.elastic(y, 0), s.inner, s.hidden)
        return self.layer_norm(self.op("Add", x, y), s.hidden)

    def rprelu(self, x: str, size: int) -> str:
        """Shift, bend and shift again, as ReActNet does."""
        x = self.op("Sub", x, self.spread(size, around=0))
        return self.op("Add", self.op("PRelu", x, self.spread(size, around=0.25)),
                       self.spread(size, around=0))  # fmt: skip

    def binary_vit_block(self, x: str, layer: int) -> str:
        """Append a block of BinaryViT: norms in front, shortcuts around each layer."""
        s = self.shape
        y = self.binary_attention(self.layer_norm(x, s.hidden))
        y = self.op("Add", y, self.binary_linear(self.elastic(y, -1), s.hidden, s.hidden))
        x = self.op("Add", x, self.rprelu(y, s.hidden))
        norm, times = self.layer_norm(x, s.hidden), s.inner // s.hidden
        y = self.binary_linear(self.elastic(norm, -1), s.hidden, s.inner)
        y = self.rprelu(self.op("Add", y, self.op("Concat", *[norm] * times, axis=-1)), s.inner)
        out = self.binary_linear(self.elastic(y, -1), s.inner, s.hidden)
        return self.op("Add", x, self.rprelu(out, s.hidden))

    def four_bits(self, x: str, low: int) -> str:
        """Quantize to 16 levels of a learned step."""
        step = float(np.float32(self.rng.uniform(0.1, 0.3)))
        rounded = self.op("Round", self.op("Div", x, self.number(step)))
        levels = self.op("Clip", rounded, self.number(low), self.number(low + 15))
        return self.op("Mul", levels, self.number(step))

    def binary_bert_block(self, x: str, layer: int) -> str:
        """Append a block of BinaryBERT, with an exact GELU."""
        s = self.shape
        data = self.four_bits(x, -8)
        q, k, v = (
            self.four_bits(self.heads(self.binary_linear(data, s.hidden, s.hidden), s.heads), -8)
            for _ in range(3)
        )
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        weights = self.op("Softmax", self.op("Div", scores, self.number(s.size**0.5)), axis=-1)
        y = self.joined(self.op("MatMul", self.four_bits(weights, 0), v))
        y = self.binary_linear(self.four_bits(y, -8), s.hidden, s.hidden)
        x = self.layer_norm(self.op("Add", x, y), s.hidden)
        y = self.binary_linear(self.four_bits(x, -8), s.hidden, s.inner)
        erf = self.op("Erf", self.op("Div", y, self.number(2**0.5)))
        y = self.op("Mul", self.op("Mul", y, self.op("Add", erf, self.number(1))), self.number(0.5))
        y = self.binary_linear(self.four_bits(y, -8), s.inner, s.hidden)
        return self.layer_norm(self.op("Add", x, y), s.hidden)

    # ---- networks ---------------------------------------------------------------------------

    def model(self, block: Callable[[str, int], str], norm: bool = False) -> onnx.ModelProto:
        """Return a network of equal blocks, and a norm if wanted."""
        s = self.shape
        x = self.given("x", [s.batch, s.tokens, s.hidden])
        for layer in range(s.layers):
            x = block(x, layer)
        if norm:
            x = self.rms_norm(x, s.hidden)
        self.outputs.insert(0, (x, [s.batch, s.tokens, s.hidden]))
        graph = helper.make_graph(
            self.nodes, self.name, self.inputs,
            [helper.make_tensor_value_info(n, self._kind(i), d)
             for i, (n, d) in enumerate(self.outputs)],
            self.inits,
        )  # fmt: skip
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def bitnet(
    shape: Shape,
    *,
    decoder: bool = True,
    gate: str = "relu2",
    kind: type[Transformer] = Transformer,
) -> onnx.ModelProto:
    """Return BitNet b1.58, as a decoder or as an encoder without a mask."""
    net = kind("bitnet", shape)
    rotation = net.rotation(shape.tokens if isinstance(shape.tokens, int) else 0)
    mask = net.causal() if decoder else None
    return net.model(
        lambda x, layer: net.bitnet_block(x, layer, rotation, mask, gate), norm=True
    )  # fmt: skip


def blocks(name: str, shape: Shape) -> onnx.ModelProto:
    """Return a network of blocks of ``bit``, ``binary_vit`` or ``binary_bert``."""
    net = Transformer(name, shape)
    return net.model(getattr(net, f"{name}_block"))


NETWORKS: dict[str, Callable[..., onnx.ModelProto]] = {
    "encoder-0.6b": partial(bitnet, SMALL_06B, decoder=False, gate="silu"),
    "decode-0.6b": partial(bitnet, replace(SMALL_06B, tokens=1, past=512), gate="silu"),
    "bitnet-2b4t": partial(bitnet, replace(BITNET_2B4T, layers=1)),
    "bit-base": partial(blocks, "bit", BERT_BASE),
    "binary-vit-small": partial(blocks, "binary_vit", VIT_SMALL),
    "binary-bert-base": partial(blocks, "binary_bert", BERT_BASE),
}
"""By name: an encoder of 28 layers at 128 tokens, decoding one token with a cache of 512, a block
of BitNet 2B4T, and the binary transformers."""


def main() -> None:
    """Write networks to a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NETWORKS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names or NETWORKS:
        path = args.folder / f"{name}.onnx"
        onnx.save(NETWORKS[name](), path, save_as_external_data=True, location=f"{path.name}.data")
        print(path)


if __name__ == "__main__":
    main()
