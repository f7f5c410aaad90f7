"""Read operators of ONNX Runtime's own domain: those of transformers, and what its optimizer fuses.

SimplifiedLayerNormalization(x, g)          ->  RMSNormalization(x, g)
SkipSimplifiedLayerNormalization(x, s, g)   ->  RMSNormalization(x + s, g), and the sum
SkipLayerNormalization(x, s, g, b)          ->  LayerNormalization(x + s, g, b), and the sum
RotaryEmbedding(x, p, cos, sin)             ->  RotaryEmbedding(x, cos, sin, p) of ONNX
MultiHeadAttention(q, k, v)                 ->  Attention(q, k, v) of ONNX
Attention(x, w, b)                          ->  the same, of the three parts of x @ w + b
EmbedLayerNormalization(i, s, w, p, t, ...) ->  LayerNormalization(w[i] + p + t[s])
GroupQueryAttention(q, k, v, ...)           ->  products, masks and caches (`grouped_query`)
MatMulNBits(x, q, s, z)                     ->  MatMul(x, (q - z) * s) (`block_weights`)
Gelu(x), BiasGelu(x, b)                     ->  Gelu(x + b)
FastGelu(x, b)                              ->  Gelu(x + b), approximated by tanh
QuickGelu(x)                                ->  x * Sigmoid(alpha * x)
MatMulIntegerToFloat(a, b, s, t, y, z, c)   ->  MatMulInteger(a, b, y, z) * (s * t) + c
DynamicQuantizeMatMul(x, b, t, z, c)        ->  the same, of DynamicQuantizeLinear(x)
FusedMatMul(a, b), TransposeMatMul(a, b)    ->  alpha * MatMul(Transpose(a), Transpose(b))
FusedGemm(a, b, c)                          ->  an activation of Gemm(a, b, c)
FusedConv(x, w, b, z)                       ->  an activation of Conv(x, w, b) + z
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from bnncc.errors import ShapeError, UnsupportedOp
from bnncc.frontend import block_weights, grouped_query
from bnncc.ir.graph import Dim
from bnncc.ir.pieces import Expression, Reader

_EPSILON = 1e-5
_ALPHA = 1.702
"""Of QuickGelu."""
_TINY = 1e-12
"""Epsilon of EmbedLayerNormalization."""
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


def _integer_product(
    write: Expression, data: tuple[str, str, str], weight: tuple[int, int, int], bias: int
) -> str:
    """Multiply integers, their scale and zero point by weights, whose inputs are given."""
    name, scale, zero = data
    held, of_weights, shift = (write.input(k) for k in weight)
    given = [name, held, zero, shift]
    while not given[-1]:
        given.pop()
    sums = write.cast(write("MatMulInteger", *given), "float32")
    made = write("Mul", sums, write("Mul", scale, of_weights))
    return write("Add", made, write.input(bias)) if write.input(bias) else made


def _integer_to_float(write: Expression) -> str:
    scale, (rows, *more) = write.input(2), [*write.type(2).shape, 1]
    if more and rows != 1:  # one for each row of the data
        scale = write.unsqueeze(scale, 1)
    return _integer_product(write, (write.input(0), scale, write.input(4)), (1, 3, 5), 6)


def _dynamic_product(write: Expression) -> str:
    q, scale, zero = write.several("DynamicQuantizeLinear", [write.input(0)], 3)
    return _integer_product(write, (q, scale, zero), (1, 2, 3), 4)


_ACTIVATIONS = {
    "Clip": 2, "Elu": 1, "HardSigmoid": 2, "LeakyRelu": 1, "Relu": 0, "Selu": 2, "Sigmoid": 0,
    "Softplus": 0, "Softsign": 0, "Tanh": 0, "ThresholdedRelu": 1,
}  # fmt: skip
"""Those that are fused, and how many parameters they have."""


def _activated(write: Expression, x: str, params: Sequence[float]) -> str:
    op = str(write.node.attrs.get("activation", ""))
    if not op:
        return x
    if op not in _ACTIVATIONS or len(params) < _ACTIVATIONS[op]:
        found = f"`{op}` with {len(params)} parameters" if op in _ACTIVATIONS else f"`{op}`"
        raise UnsupportedOp(f"{write.where}: its activation {found} is not supported")
    if op == "Clip":
        return write("Clip", x, *(write.constant(p, write.type().dtype) for p in params[:2]))
    names = {"Selu": ("alpha", "gamma")}.get(op, ("alpha", "beta"))
    return write(op, x, **dict(zip(names, params[: _ACTIVATIONS[op]], strict=False)))


def _fused_conv(write: Expression) -> str:
    attrs = {k: v for k, v in write.node.attrs.items() if not k.startswith("activation")}
    made = write("Conv", *(name for name in map(write.input, range(3)) if name), **attrs)
    if write.input(3):
        made = write("Add", made, write.input(3))
    return _activated(write, made, write.node.attrs.get("activation_params", ()))


def _fused_gemm(write: Expression) -> str:
    attrs = {k: v for k, v in write.node.attrs.items() if not k.startswith("activation")}
    made = write("Gemm", *(name for name in map(write.input, range(3)) if name), **attrs)
    given = (write.node.attrs.get(f"activation_{k}") for k in ("alpha", "beta", "gamma"))
    return _activated(write, made, [p for p in given if p is not None])


def _fused_matmul(write: Expression) -> str:
    attrs = write.node.attrs
    operands = []
    for k, side in enumerate("AB"):
        *batch, row, column = range(len(write.type(k).shape))
        if batch and attrs.get(f"transBatch{side}", 0):
            *batch, row = [*batch[1:], row, batch[0]]
        if attrs.get(f"trans{side}", 0):
            row, column = column, row
        order, name = [*batch, row, column], write.input(k)
        same = order == sorted(order)
        operands.append(name if same else write("Transpose", name, perm=order))
    made = write("MatMul", *operands)
    alpha = float(attrs.get("alpha", 1.0))
    scaled = alpha != 1
    return write("Mul", made, write.constant(alpha, write.type().dtype)) if scaled else made


_FILTER = -10000.0
"""What attention adds to the scores of padding, unless an attribute says otherwise."""


def _refuse_causal_cache(write: Expression) -> None:
    raise UnsupportedOp(
        f"{write.where}: `unidirectional` with a cache is not supported",
        hint="export attention as it is, or with a mask (`attention_bias`)",
    )


def _attention(write: Expression) -> str:
    """Read MultiHeadAttention: Attention of ONNX, with a bias and a mask of padding."""
    node, heads = write.node, int(write.node.attrs["num_heads"])
    past = [write.input(k) for k in (6, 7)]
    causal = int(node.attrs.get("unidirectional", 0))
    if write.input(8) or write.input(9) or node.outputs[3:]:
        raise UnsupportedOp(f"{write.where}: buffers of beam search, and scores, are not supported")
    if causal and any(past):
        _refuse_causal_cache(write)
    query, key, value = _operands(write)
    if apart := bool(write.input(1)) and len(write.type(1).shape) == 4:  # keys of another sequence
        query = write("Transpose", write.reshape(query, 0, 0, heads, -1), perm=[0, 2, 1, 3])
    given = {} if apart else {"q_num_heads": heads, "kv_num_heads": heads}
    if "scale" in node.attrs:
        given["scale"] = node.attrs["scale"]
    operands = [query, key, value, _mask(write, 4), *past]
    made = write.several("Attention", operands, 3, is_causal=causal, **given)
    for k in (1, 2):
        write.give(made[k], k)
    if apart:
        return write.reshape(write("Transpose", made[0], perm=[0, 2, 1, 3]), 0, 0, -1)
    return made[0]


def _operands(write: Expression) -> list[str]:
    """Return queries, keys and values with the bias added; packed ones are taken apart."""
    found = [write.input(k) for k in range(3)]
    for first in (0, 1):  # all of them in one tensor, or keys and values
        if found[first] and len(write.type(first).shape) == 5:
            packed = found[first]
            found[first:] = [
                write.reshape(write.at(packed, k, 3), 0, 0, -1) for k in range(3 - first)
            ]
            break
    if not all(found):
        raise UnsupportedOp(f"{write.where}: keys and values are missing")
    bias = write.input(3)
    if not bias:
        return found
    if write.input(1) and len(write.type(1).shape) == 4:
        raise UnsupportedOp(f"{write.where}: a bias with keys of another sequence is not supported")
    whole, width = write.type(3).shape[0], math.prod(map(_size, write.type(0).shape[2:]))
    width //= 3 if len(write.type(0).shape) == 5 else 1
    ends = [0, width, 2 * width, _size(whole)]
    parts = [
        write("Slice", bias, write.ints(a), write.ints(b), write.ints(0))
        for a, b in itertools.pairwise(ends)
    ]
    return [write("Add", x, part) for x, part in zip(found, parts, strict=True)]


def _size(dim: Dim) -> int:
    return dim if isinstance(dim, int) else 0


def _packed_attention(write: Expression) -> str:
    """Read Attention: one product for queries, keys and values, and one tensor for both caches."""
    attrs, heads = write.node.attrs, int(write.node.attrs["num_heads"])
    past, causal = write.input(4), int(attrs.get("unidirectional", 0))
    if write.input(6) or attrs.get("do_rotary", 0) or attrs.get("past_present_share_buffer", 0):
        raise UnsupportedOp(f"{write.where}: rotary embedding and shared buffers are not supported")
    if causal and past:
        _refuse_causal_cache(write)
    whole = write("MatMul", write.input(0), write.input(1))
    if write.input(2):
        whole = write("Add", whole, write.input(2))
    sizes = attrs.get("qkv_hidden_sizes") or [_size(write.type(1).shape[-1]) // 3] * 3
    parts = write.several("Split", [whole, write.ints(*sizes)], 3, axis=-1)
    caches = [write.at(past, k, 0) for k in range(2 if past else 0)]
    operands = [*parts, _mask(write, 3), *caches]
    given = {"scale": attrs["scale"]} if attrs.get("scale") else {}
    made = write.several(
        "Attention", operands, 3, is_causal=causal, q_num_heads=heads, kv_num_heads=heads, **given
    )
    if write.node.outputs[1:2] not in ([], [""]):
        grown = (write.unsqueeze(name, 0) for name in made[1:])
        write.give(write("Concat", *grown, axis=0), 1)
    return made[0]


def _embedded(write: Expression) -> str:
    """Read EmbedLayerNormalization: the sum of three embeddings, normalized."""
    ids, segments, words, places, kinds, scale, bias, kept, where = map(write.input, range(9))
    total = write("Gather", words, ids)
    if where:
        total = write("Add", total, write("Gather", places, where))
    else:
        first, one = write.constant(0, "int64"), write.constant(1, "int64")
        tokens = write.at(write("Shape", ids), 1, 0)
        total = write("Add", total, write("Gather", places, write("Range", first, tokens, one)))
    if segments:
        total = write("Add", total, write("Gather", kinds, segments))
    write.give(total, _SUM - 1)
    if kept:  # how many tokens are no padding
        counted = write("ReduceSum", kept, write.ints(1), keepdims=0)
        write.give(write.cast(counted, "int32"), 1)
    epsilon = float(write.node.attrs.get("epsilon", _TINY))
    return write("LayerNormalization", total, scale, bias, axis=-1, epsilon=epsilon)


def _mask(write: Expression, k: int) -> str:
    """Return what is added to scores, or nothing: input `k` is of padding, the one at 5 a bias."""
    padding, bias = write.input(k), write.input(5)
    if not padding:
        return bias
    shape, dtype = write.type(k).shape, write.type().dtype
    rank = len(shape)
    lengths = rank == 1 and k == 3 and shape == write.type(0).shape[:1]
    if not lengths and rank not in (2, 3):
        raise UnsupportedOp(
            f"{write.where}: a mask of {rank} axes is not supported",
            hint="give the mask one number for each key: 1, or 0 for padding",
        )
    if lengths:
        tokens = write.at(write("Shape", write.input(0)), 1, 0)
        ends = write("Range", write.constant(0, "int64"), tokens, write.constant(1, "int64"))
        rank, kept = 2, write("Less", ends, write.unsqueeze(write.cast(padding, "int64"), 1))
    else:
        kept = write("Greater", padding, write.constant(0, write.type(k).dtype))
    lost = write.constant(float(write.node.attrs.get("mask_filter_value", _FILTER)), dtype)
    made = write("Where", kept, write.constant(0, dtype), lost)
    made = write.unsqueeze(made, *((1, 2) if rank == 2 else (1,)))
    return write("Add", made, bias) if bias else made


OPERATORS: dict[str, Reader] = {
    "Attention": _packed_attention,
    "BiasGelu": _gelu,
    "DynamicQuantizeMatMul": _dynamic_product,
    "EmbedLayerNormalization": _embedded,
    "FastGelu": lambda write: _gelu(write, "tanh"),
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _fused_matmul,
    "Gelu": _gelu,
    "GroupQueryAttention": grouped_query.read,
    "MatMulNBits": block_weights.read,
    "MatMulIntegerToFloat": _integer_to_float,
    "MultiHeadAttention": _attention,
    "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _simplified,
    "SkipSimplifiedLayerNormalization": lambda write: _skipped(write, "RMSNormalization", 3),
    "SkipLayerNormalization": lambda write: _skipped(write, "LayerNormalization", 4),
    "RotaryEmbedding": _rotary,
    "TransposeMatMul": _fused_matmul,
}
