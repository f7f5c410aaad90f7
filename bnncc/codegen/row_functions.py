"""Kernels of functions of rows, and of functions whose formula in TVM is too inaccurate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx

from bnncc.codegen.products import read_by_products
from bnncc.codegen.views import broadcast_index, permuted, source_of
from bnncc.ir.graph import Graph, Node

Expr = Any
At = Callable[..., Expr]


def _rows(x: te.Tensor, value: At, name: str, reducer: Callable[..., Expr] = te.sum) -> te.Tensor:
    """Reduce `value` along the last axis."""
    k = te.reduce_axis((0, x.shape[-1]), f"{name}_k")
    return te.compute(x.shape[:-1], lambda *at: reducer(value(*at, k), axis=k), name=name)


def _wide(value: Expr) -> Expr:
    return value.astype("float64")


def _inverse(value: Expr) -> Expr:
    """Return 1 / value in float64, rounded once: computed once per row, it should add no error."""
    return (tirx.const(1.0, "float64") / value).astype("float32")


def normalization(bb: relax.BlockBuilder, node: Node, args: list[Any], graph: Graph) -> relax.Expr:
    """Return `ir.rows.ROW_NORM` as one kernel."""
    given = [k for k, arg in enumerate(args) if arg is not None]
    epsilon, centred = node.attrs["epsilon"], node.attrs["centred"]

    def compute(*tensors: te.Tensor) -> te.Tensor:
        x, *_ = tensors
        _, scale, bias = (dict(zip(given, tensors, strict=True)).get(k) for k in range(3))
        width = tirx.const(float(int(x.shape[-1])), "float64")
        value: At = x
        if centred:
            total = _rows(x, x, "total")
            mean = te.compute(
                total.shape, lambda *at: (_wide(total(*at)) / width).astype("float32"), name="mean"
            )
            value = lambda *at: x(*at) - mean(*at[:-1])  # noqa: E731
        squares = _rows(x, lambda *at: value(*at) * value(*at), "squares")

        def result(*at: Expr) -> Expr:
            mean_square = _wide(squares(*at[:-1])) / width + tirx.const(epsilon, "float64")
            made = value(*at) * _inverse(tirx.sqrt(mean_square))
            made = made if scale is None else made * scale(at[-1])
            return made if bias is None else made + bias(at[-1])

        return te.compute(x.shape, result, name="normalized")

    return bb.emit_te(compute, *(args[k] for k in given), primfunc_name_hint="row_norm")


def softmax(bb: relax.BlockBuilder, node: Node, args: list[Any], graph: Graph) -> relax.Expr:
    """Return `ir.rows.ROW_SOFTMAX` as one kernel."""
    scale = node.attrs["scale"]

    def compute(x: te.Tensor, *masks: te.Tensor) -> te.Tensor:
        def value(*at: Expr) -> Expr:
            made = x(*at) if scale == 1 else x(*at) * tirx.const(scale, "float32")
            for mask in masks:
                made = made + mask(*broadcast_index(mask.shape, at))
            return made

        if masks:
            top = _rows(x, value, "top", te.max)
            below: At = lambda *at: value(*at) - top(*at[:-1])  # noqa: E731
        else:  # scaled last: where a compiler joins a product and a difference, large ones overflow
            top = _rows(x, x, "top", te.max if scale >= 0 else te.min)
            below = lambda *at: (x(*at) - top(*at[:-1])) * tirx.const(scale, "float32")  # noqa: E731
        power = te.compute(x.shape, lambda *at: tirx.exp(below(*at)), name="power")
        total = _rows(x, power, "total")
        return te.compute(
            x.shape, lambda *at: power(*at) * _inverse(_wide(total(*at[:-1]))), name="softmax"
        )

    return bb.emit_te(compute, *args, primfunc_name_hint="softmax")


def rotary(bb: relax.BlockBuilder, node: Node, args: list[Any], graph: Graph) -> relax.Expr:
    """Return `ir.rows.ROTARY` as one kernel, which reads through views.

    If matrix products read it, it is computed in the order of its data. So all heads of a token
    read the same cosines and sines one after another.
    """
    found = permuted(args[0], bb) if read_by_products(node.outputs[0], graph) else None
    data, order = found or (args[0], [*range(len(args[0].ty.shape.values))])
    shape = data.ty.shape.values
    half = int(shape[-1]) // 2
    source, place = source_of(data, bb)

    def compute(sizes: list[Expr], x: te.Tensor, cos: te.Tensor, sin: te.Tensor) -> te.Tensor:
        def value(*at: Expr) -> Expr:
            *row, side, column = at
            here, there = ([*row, k * half + column] for k in (side, 1 - side))
            sign = tirx.Cast("float32", side * 2 - 1)
            angle = [here[axis] for axis in order]
            straight = x(*place(here)) * cos(*broadcast_index(cos.shape, angle))
            turned = x(*place(there)) * sign * sin(*broadcast_index(sin.shape, angle))
            return straight + turned

        return te.compute([*sizes[:-1], 2, half], value, name="rotated")

    whole = relax.ShapeExpr(shape)
    made = bb.emit_te(compute, whole, source, *args[1:], primfunc_name_hint="rotary")
    made = relax.op.reshape(made, whole)
    return relax.op.permute_dims(bb.emit(made), order) if found else made


def elementwise(function: Callable[[Expr], Expr]) -> Callable[..., relax.Expr | None]:
    """Return the converter of an elementwise function on float32."""

    def converter(
        bb: relax.BlockBuilder, node: Node, args: list[Any], graph: Graph
    ) -> relax.Expr | None:
        if graph.types[node.inputs[0]].dtype != "float32":
            return None
        name = function.__name__
        return bb.emit_te(
            lambda x: te.compute(x.shape, lambda *at: function(x(*at)), name=name),
            args[0],
            primfunc_name_hint=name,
        )

    return converter


def softplus(x: Expr) -> Expr:
    """Return ``log(1 + exp(x))``, accurate also where it approaches ``exp(x)``."""
    size = tirx.max(x, tirx.const(0.0, "float32") - x)
    rest = tirx.log1p(tirx.exp(tirx.const(0.0, "float32") - size))
    return tirx.max(x, tirx.const(0.0, "float32")) + rest
