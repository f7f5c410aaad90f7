"""Convolutions, matrix products and attention."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from bnncc.frontend.pytorch.program import Ref
from bnncc.frontend.pytorch.reductions import norm
from bnncc.frontend.pytorch.site import EVAL, Name, Rule, Site, Value


def batched(site: Site, x: Value, rank: int, layer: Any) -> Name:
    """Apply a layer that requires a batch, also to a single image."""
    if x.rank == rank + 2:
        return layer(x)
    zero = site.ints_const([0])
    return site.emit("Squeeze", [layer(site.emit("Unsqueeze", [x, zero])), zero])


def _conv(site: Site) -> Name:
    x, weight = site.tensor("input"), site.tensor("weight")
    rank = weight.rank - 2
    strides, dilations = site.ints("stride", rank, 1), site.ints("dilation", rank, 1)
    given = site.get("padding", 0)
    if given == "same":
        pads = _same_pads(weight, dilations)
    elif given == "valid":
        pads = [0] * 2 * rank
    else:
        pads = site.ints("padding", rank, 0) * 2
    op, more = "Conv", None
    if site.get("transposed") or "conv_transpose" in site.call.target:
        op, more = "ConvTranspose", site.ints("output_padding", rank, 0)
    return batched(
        site, x, rank,
        lambda data: site.emit(
            op, [data, weight, site.optional("bias")], strides=strides, pads=pads,
            dilations=dilations, group=site.get("groups", 1), output_padding=more,
            kernel_shape=[int(k) for k in weight.shape[2:]],
        ),
    )  # fmt: skip


def _same_pads(weight: Value, dilations: list[int]) -> list[int]:
    totals = [d * (int(k) - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
    return [t // 2 for t in totals] + [t - t // 2 for t in totals]


def _linear(site: Site) -> Name:
    x, weight, bias = site.tensor("input"), site.tensor("weight"), site.optional("bias")
    if x.rank == 2 and weight.rank == 2:
        return site.emit("Gemm", [x, weight, bias], transB=1)
    turned: Name = site.transpose(weight, [1, 0]) if weight.rank == 2 else weight
    made = site.emit("MatMul", [x, turned])
    return site.emit("Add", [made, bias]) if bias else made


def _operands(site: Site) -> list[Value]:
    return [site.value(v) for v in site.call.args.values()]


def _matmul(site: Site) -> Name:
    return site.emit("MatMul", _operands(site))


def _int_mm(site: Site) -> Name:
    return site.emit("MatMul", [site.cast(v, "int32") for v in _operands(site)])


def _addmm(site: Site) -> Name:
    bias = site.tensor("self")
    one, two = (site.value(site.get(k)) for k in _factors(site))
    alpha, beta = float(site.get("alpha", 1)), float(site.get("beta", 1))
    if one.rank == 2 and two.rank == 2:
        return site.emit("Gemm", [one, two, bias], alpha=alpha, beta=beta)
    made = site.emit("MatMul", [one, two])
    if site.call.target.startswith("addbmm"):
        made = site.emit("ReduceSum", [made, site.ints_const([0])], keepdims=0)
    return _weighted(site, bias, made, alpha, beta)


def _weighted(site: Site, bias: Value, made: Name, alpha: float, beta: float) -> Name:
    """Return ``beta * bias + alpha * made``; bias is omitted if beta is 0."""
    if alpha != 1:
        made = site.emit("Mul", [made, site.const(alpha, bias.dtype)])
    if beta == 0:
        return made
    scaled: Name = bias
    if beta != 1:
        scaled = site.emit("Mul", [bias, site.const(beta, bias.dtype)])
    return site.emit("Add", [scaled, made])


def _outer(site: Site, one: Value, two: Value) -> Name:
    column = site.emit("Unsqueeze", [one, site.ints_const([1])])
    return site.emit("Mul", [column, two])


def _addr(site: Site) -> Name:
    bias = site.tensor("self")
    made = _outer(site, site.tensor("vec1"), site.tensor("vec2"))
    alpha, beta = float(site.get("alpha", 1)), float(site.get("beta", 1))
    return _weighted(site, bias, made, alpha, beta)


def _bilinear(site: Site) -> Name:
    one, two, weight = (site.tensor(k) for k in ("input1", "input2", "weight"))
    inner = site.emit("Einsum", [one, weight], equation="...i,oij->...oj")
    column = site.emit("Unsqueeze", [two, site.ints_const([-1])])
    made: Name = site.emit("Squeeze", [site.emit("MatMul", [inner, column]), site.ints_const([-1])])
    return site.emit("Add", [made, site.tensor("bias")]) if site.has("bias") else made


def _cdist(site: Site) -> Name:
    """Return the distances of all rows of one matrix from all rows of another."""
    one, two, order = site.tensor("x1"), site.tensor("x2"), site.get("p", 2.0)
    rows = site.emit("Unsqueeze", [one, site.ints_const([one.rank - 1])])
    columns = site.emit("Unsqueeze", [two, site.ints_const([two.rank - 2])])
    apart = Value(site.emit("Sub", [rows, columns]), one.dtype, (*site.out.shape, *one.shape[-1:]))
    return norm(site, apart, order, [apart.rank - 1], keep=False)


def _factors(site: Site) -> list[str]:
    names = [k for k, v in site.call.args.items() if isinstance(v, Ref) and k != "self"]
    return names[:2]


def _einsum(site: Site) -> Name:
    values = [site.value(r) for r in site.get("tensors")]
    return site.emit("Einsum", values, equation=site.get("equation"))


def _attention(site: Site) -> Name:
    query, key, value = (site.tensor(k) for k in ("query", "key", "value"))
    if site.get("dropout_p", 0):
        raise site.refuse("with dropout", hint=EVAL)
    dtype, width = query.dtype, query.shape[-1]
    given = site.get("scale")
    if isinstance(given, Ref) or (given is None and not isinstance(width, int)):
        raise site.refuse("its last axis is dynamic")
    scale = given if given is not None else 1 / math.sqrt(int(width))
    keys, values = (_shared(site, query, v) for v in (key, value))
    perm = [*range(key.rank - 2), key.rank - 1, key.rank - 2]
    scores = site.emit("MatMul", [query, site.transpose(keys, perm)])
    scores = site.emit("Mul", [scores, site.const(scale, dtype)])
    shown: Name = ""  # mask of attended positions; a row without any gives zeros
    if site.get("is_causal"):
        shown = _causal(site, query, key)
    elif site.has("attn_mask"):
        mask = site.tensor("attn_mask")
        if mask.dtype == "bool":
            shown = mask
        else:
            scores = site.emit("Add", [scores, site.cast(mask, dtype)])
            hidden = site.emit("Equal", [scores, site.const(-math.inf, dtype)])
            shown = site.emit("Not", [hidden])
    if shown:
        least = float(ml_dtypes.finfo(dtype).min)
        scores = site.emit("Where", [shown, scores, site.const(least, dtype)])
    weights = site.emit("Softmax", [scores], axis=-1)
    if shown:
        weights = site.emit("Where", [shown, weights, site.const(0, dtype)])
    return site.emit("MatMul", [weights, values])


def _shared(site: Site, query: Value, x: Value) -> Name:
    """Repeat the heads of keys or values for the queries that share them."""
    if not site.get("enable_gqa") or x.shape[-3] == query.shape[-3]:
        return x
    have, want = x.shape[-3], query.shape[-3]
    if not isinstance(have, int) or not isinstance(want, int):
        raise site.refuse("a dynamic number of heads")
    places = np.repeat(np.arange(have), want // have)
    return site.emit("Gather", [x, site.ints_const(places.tolist())], axis=x.rank - 3)


def _causal(site: Site, query: Value, key: Value) -> Name:
    rows, columns = query.shape[-2], key.shape[-2]
    if isinstance(rows, int) and isinstance(columns, int):
        if rows * columns > 1 << 24:
            raise site.refuse(f"is causal over {rows} x {columns}")
        return site.const(np.tril(np.ones((rows, columns), bool)), "bool")
    sizes = [site.emit("Shape", [v], start=v.rank - 2, end=v.rank - 1) for v in (query, key)]
    ones = site.filled(site.emit("Concat", sizes, axis=0), 1, "int32")
    return site.cast(site.emit("Trilu", [ones], upper=0), "bool", "int32")


_RANKS = (1, 2, 3)

RULES: dict[str, Rule] = {
    **{f"conv{r}d.{k}": _conv for r in _RANKS for k in ("default", "padding")},
    **dict.fromkeys(("convolution.default", "_convolution.default"), _conv),
    "conv_transpose1d.default": _conv,
    **{f"conv_transpose{k}d.input": _conv for k in _RANKS},
    **dict.fromkeys(("matmul.default", "mm.default", "bmm.default", "mv.default"), _matmul),
    "_int_mm.default": _int_mm,
    **dict.fromkeys(("addmm.default", "baddbmm.default", "addbmm.default"), _addmm),
    **dict.fromkeys(("dot.default", "vdot.default"), _matmul),
    **{f"{name}.default": lambda site: _outer(site, *_operands(site)) for name in ("outer", "ger")},
    **dict.fromkeys(("cdist.default", "_cdist_forward.default"), _cdist),
    "addmv.default": _addmm,
    "addr.default": _addr,
    "bilinear.default": _bilinear,
    "det.default": lambda site: site.emit("Det", [site.value(site.first())]),
    "linalg_det.default": lambda site: site.emit("Det", [site.value(site.first())]),
    "einsum.default": _einsum,
    "linear.default": _linear,
    "scaled_dot_product_attention.default": _attention,
}
