"""Find results that depend on a tie: a value so close to a discontinuity that rounding decides.

docs/semantics.md defines ties. Each tensor is accompanied by a mask of the elements that depend on
a tie; all correct implementations agree on the other elements, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bnncc.ir.evaluate import evaluate, evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.halves import NARROW, ROUND
from bnncc.ir.magnitude import JUMPS, NORMAL, PRODUCTS, walked
from bnncc.ir.moves import MOVES, PIXEL_SHUFFLES, REPEATS
from bnncc.ir.numeric import FLOAT_SUM
from bnncc.ir.quantizers import LEVELS, MULTI_THRESHOLD, QUANT

Array = np.ndarray[Any, Any]

TIE = 8 * float(np.finfo(np.float32).eps)
"""A value is tied if it is within this many times the sum of its terms."""

_STEPS = frozenset((
    "Sign", "Round", "Floor", "Ceil", "QuantizeLinear", "Cast", "Not", "IsNaN", "IsInf",
    QUANT, MULTI_THRESHOLD, LEVELS,
))  # fmt: skip
_BENT = frozenset(("Tanh", "Sigmoid", "Softsign", "Erf", "HardSigmoid"))
"""Functions that saturate within a few units; after sums that cancel, the result is arbitrary."""
_WHOLE = ("fi", "fu")
_SEEN = 5e-5
"""An element counts if rounding may change it by this fraction of the tensor's largest value."""
_COMPARISONS = frozenset(("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"))
_BEST = frozenset(("ArgMax", "ArgMin", "TopK", "Hardmax"))
_ELEMENTWISE = frozenset((
    "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "Where", "And", "Or",
    "Xor", "PRelu", "Clip", "BatchNormalization", "DequantizeLinear", *_COMPARISONS, *_STEPS,
    "Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh",
    "Erf", "Gelu", "Softplus", "Softsign", "Exp", "Log", "Sqrt", "Reciprocal", "Abs", "Neg",
    "Sin", "Cos", "Tan", "Identity", ROUND, NARROW, "Dropout", "Mish", "Swish", *JUMPS,
))  # fmt: skip
_MOVES = MOVES | REPEATS | PIXEL_SHUFFLES | {
    "GatherElements", "GatherND", "Concat", "MaxPool", "GlobalMaxPool", "AveragePool",
    "GlobalAveragePool", "ReduceMax", "ReduceMean", "ReduceSum", "Pad",
}  # fmt: skip


def tied(
    graph: Graph, feeds: Mapping[str, Array], *, near: float = TIE, zeros: bool = False,
    outputs: Iterable[str] | None = None, sizes: Mapping[str, Array] | None = None,
    rounded: dict[str, Array] | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Return masks of the elements that depend on a tie.

    Parameters
    ----------
    graph : Graph
        In canonical form.
    feeds : mapping of str to ndarray
        Its inputs.
    near : float
        Width of a tie, relative to the sum of a value's terms.
    zeros : bool
        Whether an exact 0 before a sign also counts as a tie.
    outputs : iterable of str, optional
        Tensors to return; default: the graph's outputs.
    sizes : mapping of str to ndarray, optional
        Magnitudes of inputs that are rounded (see `bnncc.ir.magnitude`); others are exact.
    rounded : dict of str to ndarray, optional
        Filled with masks of the elements of each tensor that are rounded, for `rounded_otherwise`.

    Returns
    -------
    dict of str to ndarray of bool
    """
    values: dict[str, Array] = {**graph.constants, **{k: np.asarray(v) for k, v in feeds.items()}}
    sizes = dict(sizes or {})
    masks: dict[str, Array] = {}
    clear = np.zeros((), bool)
    wanted = list(graph.outputs if outputs is None else outputs)
    left: dict[str, int] = {}
    for name in [*wanted, *(i for node in graph.nodes for i in node.inputs)]:
        left[name] = left.get(name, 0) + 1
    for node, ins, errs, outs in walked(graph, values, sizes):
        before = [masks.get(name, clear) for name in node.inputs]
        for k, (name, out) in enumerate(zip(node.outputs, outs, strict=False)):
            if name:
                masks[name] = _spread(node, ins, before, out, k)
                if rounded is not None and out.dtype.kind == "f":
                    rounded[name] = _shortened(sizes[name] > 0)
        for name, mask in zip(node.outputs, _undefined(node, ins, outs), strict=False):
            if name and mask.any():
                masks[name] = np.broadcast_to(masks[name], mask.shape) | mask
        if any(e.any() for e in errs) or zeros:
            bounds = [near * e + NORMAL * (e > 0) for e in errs]  # absolute bound for underflow
            for k, mask in enumerate(_decided(node, ins, bounds, outs, zeros)):
                name = node.outputs[k]
                if name and mask.any():
                    masks[name] = np.broadcast_to(masks[name], mask.shape) | mask
        for name in node.inputs:
            left[name] -= 1
            if not left[name] and name not in graph.constants:
                for table in (values, sizes, masks):
                    table.pop(name, None)
    return {n: np.broadcast_to(masks.get(n, clear), values[n].shape) for n in wanted}


def rounded_otherwise(
    graph: Graph, feeds: Mapping[str, Array], rounded: Mapping[str, Array], *,
    near: float = TIE, seed: int = 0,
) -> dict[str, Array]:  # fmt: skip
    """Evaluate a graph with other roundings, which decide some ties the other way.

    Each rounded result is moved at random, by at most `near` times its value: further than a
    correct implementation does, so that many decisions fall otherwise that may do so.

    Parameters
    ----------
    graph : Graph
        In canonical form.
    feeds : mapping of str to ndarray
        Its inputs.
    rounded : mapping of str to ndarray
        Which elements are rounded, from `tied`.
    near : float
        Width of a tie, relative to the sum of a value's terms.
    seed : int
        Of the random numbers.

    Returns
    -------
    dict of str to ndarray
        The graph's outputs.
    """
    rng = np.random.default_rng(seed)

    def moved(name: str, out: Array) -> Array:
        mask = rounded.get(name)
        if mask is None or not mask.any():
            return out
        with np.errstate(all="ignore"):
            other = out * (1 + near * (2 * rng.random(out.shape, np.float32) - 1))
        return np.where(mask, other, out).astype(out.dtype)

    return evaluate(graph, feeds, change=moved)


def _shortened(mask: Array) -> Array:
    """Return a mask, or a single element if all are equal."""
    some = np.asarray(mask.any())
    return mask if some and not mask.all() else some


def _undefined(node: Node, ins: list[Array | None], outs: list[Array]) -> list[Array]:
    """Return masks of integers cast from out-of-range numbers, which ONNX leaves undefined."""
    first = ins[0] if ins else None
    if node.op != "Cast" or first is None or first.dtype.kind + outs[0].dtype.kind not in _WHOLE:
        return []
    kind = np.iinfo(outs[0].dtype)
    whole = np.trunc(first.astype(np.float64))
    return [~((whole >= kind.min) & (whole < float(kind.max) + 1))]


@np.errstate(all="ignore")
def _decided(
    node: Node, ins: list[Array | None], bounds: list[Array], outs: list[Array], zeros: bool
) -> list[Array]:
    """Return, for each output, a mask of the elements that a tie before this node decides."""
    first = ins[0] if ins else None
    if first is None or first.dtype.kind != "f":
        return []
    if node.op in _BEST:
        return [_contested(node, first, bounds[0], out) for out in outs]
    if node.op in _COMPARISONS and ins[1] is not None:
        apart = np.abs(first.astype(np.float64) - ins[1])
        reach = bounds[0] + bounds[1]
        near = (apart <= reach) & (reach > 0)
        return [near | (apart == 0) if zeros else near]
    if node.op in _BENT:
        moved = [
            evaluate_node(node, [(first + sign * bounds[0]).astype(first.dtype), *ins[1:]])[0]
            for sign in (-1, 1)
        ]
        top = float(np.abs(outs[0]).max(initial=0.0))
        return [np.maximum(*(np.abs(m - outs[0]) for m in moved)) > _SEEN * top]
    if node.op not in _STEPS | JUMPS or (node.op == "Cast" and outs[0].dtype.kind == "f"):
        return []
    step = np.asarray(bounds[0])
    if zeros and node.op == "Sign":
        step = np.where(first == 0, np.maximum(step, NORMAL), step)
    mask = np.zeros(outs[0].shape, bool)
    for sign in (-1, 1):
        moved = (first + sign * step).astype(first.dtype)
        other = evaluate_node(node, [moved, *ins[1:]])[0]
        if node.op in JUMPS:  # other results change no more than their data
            mask |= np.abs(other.astype(np.float64) - outs[0]) > 2 * np.abs(moved - first)
        else:
            mask |= other != outs[0]
    return [mask]


def _contested(node: Node, x: Array, bound: Array, out: Array) -> Array:
    """Return where the best of several values is the best only within rounding."""
    axis = int(node.attrs.get("axis", 0 if node.op.startswith("Arg") else -1)) % x.ndim
    ordered = np.sort(x.astype(np.float64), axis)
    reach = 2 * np.broadcast_to(bound, x.shape).max(axis, keepdims=True)
    # Equal exact values are not ties: their order is defined.
    close = (np.diff(ordered, axis=axis) <= reach) & (reach > 0)
    if node.op != "TopK":
        end = -1 if node.op != "ArgMin" else 0
        close = np.take(close, [end], axis) if close.shape[axis] else np.zeros_like(reach, bool)
    close = close.any(axis, keepdims=True)
    if out.ndim < x.ndim:
        close = close.squeeze(axis)
    return np.broadcast_to(close, out.shape)


def _spread(
    node: Node, ins: list[Array | None], masks: list[Array], out: Array, index: int
) -> Array:
    """Return a mask of the elements of an output that depend on elements in `masks`."""
    if not any(mask.any() for mask in masks):
        return np.zeros((), bool)
    if node.op in _ELEMENTWISE:
        data = masks[:1] if node.op == "BatchNormalization" else masks
        whole = np.zeros((), bool)
        for mask in data:
            whole = whole | mask
        if np.broadcast_shapes(whole.shape, out.shape) == out.shape:
            return np.asarray(whole)
    if node.op in _MOVES and not any(m.any() for m in masks[1:] if node.op != "Concat"):
        shown = [
            None if v is None else np.broadcast_to(m, v.shape).astype(np.float32)
            for v, m in zip(ins, masks, strict=True)
        ]
        count = len(ins) if node.op == "Concat" else 1
        given = [*shown[:count], *ins[count:]]
        if node.op == "Pad" and len(given) > 2:
            given[2] = np.zeros((), np.float32)
        if node.op in ("ReduceSum", "ReduceMean"):
            node = Node("ReduceMax", node.inputs, node.outputs, node.attrs, node.name)
        return np.asarray(evaluate_node(node, given)[index] != 0)
    if node.op in PRODUCTS and not (len(masks) > 2 and masks[2].any()):
        shapes = [v.shape for v in ins[:2] if v is not None]
        reached = np.zeros(out.shape, bool)
        for k in (0, 1):
            if masks[k].any():
                reached |= _sums_of(node, np.broadcast_to(masks[k], shapes[k]), shapes, k)
        return reached
    return np.ones(out.shape, bool)


def _sums_of(node: Node, mask: Array, shapes: Sequence[tuple[int, ...]], operand: int) -> Array:
    """Return which sums of a product have a term in `mask`, of one operand.

    Elements of one sum are joined first where they lie along an axis: most of the work is spared.
    """
    made = [list(shape) for shape in shapes]
    if node.op in ("MatMul", "Gemm"):
        first = 0 if node.attrs.get("transA") else -1
        second = -1 if node.attrs.get("transB") or len(shapes[1]) == 1 else -2
        axes = first, second
        for shape, axis in zip(made, axes, strict=True):
            shape[axis] = 1
        mask = np.asarray(mask.any(axes[operand], keepdims=True))
    elif operand == 0:
        group = int(node.attrs.get("group", 1))
        mask = np.asarray(mask.reshape(shapes[0][0], group, -1, *shapes[0][2:]).any(2))
        if node.op == "Conv":
            made[1][1] = 1
        else:
            made[1][0] = group
    given: list[Array | None] = [np.ones(shape, np.float32) for shape in made]
    given[operand] = mask.astype(np.float32)
    attrs = {k: v for k, v in node.attrs.items() if k not in ("alpha", "beta")}
    attrs[FLOAT_SUM] = "float32"
    plain = Node(node.op, node.inputs, node.outputs, attrs, node.name)
    return evaluate_node(plain, given)[0] > 0
