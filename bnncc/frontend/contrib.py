"""Read operators of ONNX Runtime's own domain that transformers contain.

SimplifiedLayerNormalization(x, g)          ->  RMSNormalization(x, g)
SkipSimplifiedLayerNormalization(x, s, g)   ->  RMSNormalization(x + s, g), and the sum
SkipLayerNormalization(x, s, g, b)          ->  LayerNormalization(x + s, g, b), and the sum
RotaryEmbedding(x, p, cos, sin)             ->  RotaryEmbedding(x, cos, sin, p) of ONNX
Gelu(x), BiasGelu(x, b)                     ->  Gelu(x + b)
FastGelu(x, b)                              ->  Gelu(x + b), approximated by tanh
QuickGelu(x)                                ->  x * Sigmoid(alpha * x)
"""

from __future__ import annotations

from bnncc.errors import ShapeError, UnsupportedOp
from bnncc.ir.pieces import Expression, Reader

_EPSILON = 1e-5
_ALPHA = 1.702
"""Of QuickGelu."""
_SUM = 3
"""Output of the skip operators that is the sum."""


def _unused(write: Expression, *outputs: int) -> None:
    """Refuse outputs that only training reads."""
    for k in outputs:
        if k < len(write.node.outputs) and write.node.outputs[k]:
            raise UnsupportedOp(
                f"{write.where}: its output {k} (`{write.node.outputs[k]}`) is for training",
                hint="export the model for inference",
            )


def _simplified(write: Expression) -> str:
    _unused(write, 1)
    attrs = {k: write.node.attrs[k] for k in ("axis", "stash_type") if k in write.node.attrs}
    epsilon = float(write.node.attrs.get("epsilon", _EPSILON))
    return write("RMSNormalization", write.input(0), write.input(1), epsilon=epsilon, **attrs)


def _skipped(write: Expression, norm: str, bias: int) -> str:
    """Add the residual and a bias, and normalize with the inputs between these."""
    _unused(write, 1, 2)
    total = write("Add", write.input(0), write.input(1))
    if write.input(bias):
        total = write("Add", total, write.input(bias))
    write.give(total, _SUM)
    epsilon = float(write.node.attrs.get("epsilon", _EPSILON))
    given = [name for name in (write.input(k) for k in range(2, bias)) if name]
    return write(norm, total, *given, axis=-1, epsilon=epsilon)


def _rotary(write: Expression) -> str:
    attrs = write.node.attrs
    if attrs.get("is_packed_batching", 0) or attrs.get("scale", 1.0) != 1.0:
        raise UnsupportedOp(f"{write.where}: packed batches and a scale are not supported")
    x, where, cos, sin = (write.input(k) for k in range(4))
    shape, width = write.type(0).shape, write.type(2).shape[-1]
    heads, rotated = int(attrs.get("num_heads", 0)), int(attrs.get("rotary_embedding_dim", 0))
    if len(shape) == 3 and not heads:
        if not isinstance(shape[-1], int) or not isinstance(width, int):
            raise ShapeError(f"{write.where}: the size of its heads is not known")
        heads = shape[-1] // (2 * width)
    if write.type(1).shape == (1,):  # the position of the first token
        tokens = write.at(write("Shape", x), len(shape) - 2, 0)
        first, one = write.constant(0, "int64"), write.constant(1, "int64")
        places = write("Add", where, write("Range", first, tokens, one))
        size = write(
            "Concat", write("Shape", x, start=0, end=1), write.unsqueeze(tokens, 0), axis=0
        )
        where = write("Expand", places, size)
    given = {"interleaved": int(attrs.get("interleaved", 0)), "rotary_embedding_dim": rotated}
    if heads:
        given["num_heads"] = heads
    return write("RotaryEmbedding", x, cos, sin, where, **given)


def _gelu(write: Expression, approximate: str = "none") -> str:
    x = write.input(0)
    if write.input(1):
        x = write("Add", x, write.input(1))
    return write("Gelu", x, approximate=approximate)


def _quick_gelu(write: Expression) -> str:
    x, alpha = write.input(0), float(write.node.attrs.get("alpha", _ALPHA))
    scaled = write("Mul", x, write.constant(alpha, write.type().dtype))
    return write("Mul", x, write("Sigmoid", scaled))


OPERATORS: dict[str, Reader] = {
    "BiasGelu": _gelu,
    "FastGelu": lambda write: _gelu(write, "tanh"),
    "Gelu": _gelu,
    "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _simplified,
    "SkipSimplifiedLayerNormalization": lambda write: _skipped(write, "RMSNormalization", 3),
    "SkipLayerNormalization": lambda write: _skipped(write, "LayerNormalization", 4),
    "RotaryEmbedding": _rotary,
}
