"""Convolutions, matrix products and attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bnncc.frontend.pytorch.program import Ref
from bnncc.frontend.pytorch.site import Name, Rule, Site, Value


def batched(site: Site, x: Value, rank: int, layer: Any) -> Name:
    """Run a layer that wants a batch, also on a single image."""
    if x.rank == rank + 2:
        return layer(x)
    zero = site.ints_const([0])
    return site.emit("Squeeze", [layer(site.emit("Unsqueeze", [x, zero])), zero])


def _conv(site: Site) -> Name:
    x, weight = site.tensor("input"), site.tensor("weight")
    rank = weight.rank - 2
    strides = site.ints("stride", rank, 1)
    dilations = site.ints("dilation", rank, 1)
    group = site.get("groups", 1)
    if site.get("transposed") or "conv_transpose" in site.call.target:
        return _conv_transpose(site, x, weight, strides, dilations, group)
    given = site.get("padding", 0)
    if given == "same":
        pads = _same_pads(weight, dilations)
    elif given == "valid":
        pads = [0] * 2 * rank
    else:
        pads = site.ints("padding", rank, 0) * 2
    return batched(
        site, x, rank,
        lambda data: site.emit(
            "Conv", [data, weight, site.optional("bias")], strides=strides, pads=pads,
            dilations=dilations, group=group, kernel_shape=[int(k) for k in weight.shape[2:]],
        ),
    )  # fmt: skip


def _same_pads(weight: Value, dilations: list[int]) -> list[int]:
    totals = [d * (int(k) - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
    return [t // 2 for t in totals] + [t - t // 2 for t in totals]


def _conv_transpose(
    site: Site, x: Value, weight: Value, strides: list[int], dilations: list[int], group: int
) -> Name:
    rank = weight.rank - 2
    return site.emit(
        "ConvTranspose", [x, weight, site.optional("bias")], strides=strides,
        pads=site.ints("padding", rank, 0) * 2, dilations=dilations, group=group,
        output_padding=site.ints("output_padding", rank, 0),
        kernel_shape=[int(k) for k in weight.shape[2:]],
    )  # fmt: skip


def _linear(site: Site) -> Name:
    x, weight, bias = site.tensor("input"), site.tensor("weight"), site.optional("bias")
    if x.rank == 2 and weight.rank == 2:
        return site.emit("Gemm", [x, weight, bias], transB=1)
    turned: Name = site.transpose(weight, [1, 0]) if weight.rank == 2 else weight
    made = site.emit("MatMul", [x, turned])
    return site.emit("Add", [made, bias]) if bias else made


def _matmul(site: Site) -> Name:
    return site.emit("MatMul", [site.value(v) for v in site.call.args.values()])


def _addmm(site: Site) -> Name:
    bias = site.tensor("self")
    one, two = (site.value(site.get(k)) for k in _factors(site))
    alpha, beta = float(site.get("alpha", 1)), float(site.get("beta", 1))
    if one.rank == 2 and two.rank == 2:
        return site.emit("Gemm", [one, two, bias], alpha=alpha, beta=beta)
    if alpha != 1 or beta != 1:
        raise site.refuse("with alpha or beta")
    return site.emit("Add", [site.emit("MatMul", [one, two]), bias])


def _factors(site: Site) -> list[str]:
    names = [k for k, v in site.call.args.items() if isinstance(v, Ref) and k != "self"]
    return names[:2]


def _einsum(site: Site) -> Name:
    values = [site.value(r) for r in site.get("tensors")]
    return site.emit("Einsum", values, equation=site.get("equation"))


def _attention(site: Site) -> Name:
    query, key, value = (site.tensor(k) for k in ("query", "key", "value"))
    if site.get("dropout_p", 0) or site.get("enable_gqa"):
        raise site.refuse("with dropout or grouped queries")
    dtype, width = query.dtype, query.shape[-1]
    given = site.get("scale")
    if given is None and not isinstance(width, int):
        raise site.refuse("its last axis is dynamic")
    scale = given if given is not None else 1 / math.sqrt(width)  # type: ignore[arg-type]
    perm = [*range(key.rank - 2), key.rank - 1, key.rank - 2]
    scores = site.emit("MatMul", [query, site.transpose(key, perm)])
    scores = site.emit("Mul", [scores, site.const(scale, dtype)])
    mask: Name = ""
    if site.get("is_causal"):
        rows, columns = query.shape[-2], key.shape[-2]
        if not isinstance(rows, int) or not isinstance(columns, int):
            raise site.refuse("is causal over a dynamic length")
        if rows * columns > 1 << 24:
            raise site.refuse(f"is causal over {rows} x {columns}")
        mask = site.const(np.tril(np.ones((rows, columns), bool)), "bool")
    elif site.has("attn_mask"):
        mask = site.tensor("attn_mask")
        if isinstance(mask, Value) and mask.dtype != "bool":
            scores, mask = site.emit("Add", [scores, mask]), ""
    if mask:
        least = float(np.finfo(np.float32).min)
        scores = site.emit("Where", [mask, scores, site.const(least, dtype)])
    return site.emit("MatMul", [site.emit("Softmax", [scores], axis=-1), value])


_RANKS = (1, 2, 3)

RULES: dict[str, Rule] = {
    **{f"conv{r}d.{k}": _conv for r in _RANKS for k in ("default", "padding")},
    **dict.fromkeys(("convolution.default", "_convolution.default"), _conv),
    "conv_transpose1d.default": _conv,
    **{f"conv_transpose{k}d.input": _conv for k in _RANKS},
    **dict.fromkeys(("matmul.default", "mm.default", "bmm.default", "mv.default"), _matmul),
    **dict.fromkeys(("addmm.default", "baddbmm.default"), _addmm),
    "einsum.default": _einsum,
    "linear.default": _linear,
    "scaled_dot_product_attention.default": _attention,
}
