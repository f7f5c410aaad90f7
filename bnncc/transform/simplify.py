"""Canonicalize an imported graph, so that later passes meet one form of each pattern."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bnncc.errors import UnsupportedOp
from bnncc.ir.fold import fold
from bnncc.ir.graph import Graph, Node
from bnncc.ir.infer import COMPARE
from bnncc.ir.pieces import reshape_target
from bnncc.trace import Trace
from bnncc.transform.cancel import cancel
from bnncc.transform.dense import computed_bias, dense_bias, gemm
from bnncc.transform.late_expand import EXPANDED_LATE, late_expand
from bnncc.transform.layout import pull_up, push_down, reorder_flatten, squeeze_transposes
from bnncc.transform.lines import lift_lines
from bnncc.transform.pairs import larger_of_two, with_negative
from bnncc.transform.rewrite import Result, Walk, alias_outputs, settle_outputs, walk

_ROUNDS = 12
_RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
_COMMUTATIVE = {"Add", "And", "Equal", "Max", "Min", "Mul", "Or", "Sum", "Xor"}
_NEGATED = {
    "Greater": "LessOrEqual",
    "GreaterOrEqual": "Less",
    "Less": "GreaterOrEqual",
    "LessOrEqual": "Greater",
}
_MIRRORED = {
    "Equal": "Equal",
    "Greater": "Less",
    "GreaterOrEqual": "LessOrEqual",
    "Less": "Greater",
    "LessOrEqual": "GreaterOrEqual",
}


def simplify(graph: Graph, trace: Trace | None = None) -> None:
    """Rewrite the graph in place into a simpler equivalent form.

        Identity, no-op Cast/Reshape/Transpose/Pad/...  ->  gone
        equal nodes                                     ->  one node
        s - c + c                                       ->  s
        Not(Less(x, c))                                 ->  GreaterOrEqual(x, c)
        Conv -> Transpose -> Sign -> Transpose -> Conv  ->  Conv -> Sign -> Conv
        Conv of 1-D inputs                              ->  Conv of images of height 1

    Parameters
    ----------
    graph : Graph
        As returned by `bnncc.frontend.onnx.load`.
    trace : Trace, optional
        Records times, and a warning if rewriting does not terminate.

    Raises
    ------
    UnsupportedOp
        If a BatchNormalization has parameters that are not constant.

    Notes
    -----
    Values are preserved exactly for finite inputs, up to the sign of zero, with two exceptions:
    cancelling straight-through residues omits a rounding (`transform.cancel`), and a Gemm's
    `alpha` and `beta`, and a MatMul's bias, may be applied on the other side of a rounding.
    """
    trace = trace or Trace()
    lift_lines(graph)
    for _ in range(_ROUNDS):
        changed = False
        for name, rewrite in _REWRITES:
            with trace.timed(f"simplify/{name}"):
                changed |= bool(rewrite(graph))
        if not changed and not squeeze_transposes(graph):
            break
        fold(graph)
    else:
        trace.warnings.append(
            f"simplify: stopped after {_ROUNDS} rounds while the graph still changed: correct, but "
            "perhaps slower than necessary"
        )
    settle_outputs(graph)
    graph.prune()


def _merge_constants(graph: Graph) -> None:
    """Merge equal constants."""
    alike: dict[Any, list[str]] = {}
    for name, value in graph.constants.items():
        some = value[(0,) * (value.ndim - 1)] if value.size and value.ndim else value
        alike.setdefault((value.dtype.name, value.shape, some.tobytes()), []).append(name)
    alias: dict[str, str] = {}
    for names in alike.values():
        if len(names) == 1:
            continue
        first: dict[bytes, str] = {}
        for name in names:
            alias[name] = first.setdefault(_digest(graph.constants[name]), name)
    for node in graph.nodes:
        node.inputs = [alias.get(i, i) for i in node.inputs]


def _digest(value: np.ndarray) -> bytes:
    return hashlib.sha1(np.ascontiguousarray(value).tobytes()).digest()


def _freeze(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.shape, value.tobytes())
    return value


def _common(graph: Graph) -> bool:
    """Eliminate common subexpressions."""
    seen: dict[Any, Node] = {}
    found = False

    def rule(node: Node, state: Walk) -> Result:
        nonlocal found
        inputs = sorted(node.inputs) if node.op in _COMMUTATIVE else node.inputs
        attrs = tuple(sorted((k, _freeze(v)) for k, v in node.attrs.items()))
        key = (node.op, tuple(inputs), attrs, len(node.outputs))
        other = seen.setdefault(key, node)
        if other is node:
            return None
        if len(node.outputs) == 1:
            if node.op != "Identity":
                other.covers = tuple(dict.fromkeys(other.covers + node.covers))
                return other.outputs[0]
        elif alias_outputs(state, node, other):
            found = True
            return []
        return None

    return walk(graph, rule) or found


# ------------------------------------------------------------------------------------ local rules


def _local(node: Node, state: Walk) -> Result:
    """Rewrite one node, given the producers of its inputs."""
    rule = _RULES.get(node.op)
    made = rule(node, state) if rule else None
    return late_expand(node, state) if made is None and node.op in EXPANDED_LATE else made


def _same_type(node: Node, state: Walk) -> bool:
    types = state.graph.types
    return types[node.inputs[0]] == types[node.outputs[0]]


def _always(node: Node, state: Walk) -> Result:
    return node.inputs[0]


def _if_same_type(node: Node, state: Walk) -> Result:
    return node.inputs[0] if _same_type(node, state) else None


def _cast(node: Node, state: Walk) -> Result:
    if _same_type(node, state):
        return node.inputs[0]
    inner = state.producer(node.inputs[0], "Cast")
    if inner is not None and state.graph.types[inner.inputs[0]].dtype == "bool":
        if state.graph.types[node.outputs[0]].dtype == "bool":
            return inner.inputs[0]
        return [Node("Cast", inner.inputs[:1], node.outputs, node.attrs, node.name)]
    return None


def _reshape(node: Node, state: Walk) -> Result:
    if _same_type(node, state):
        return node.inputs[0]
    inner = state.producer(node.inputs[0], *_RESHAPES)
    if inner is None:
        return None
    types = state.graph.types
    source, target = types[inner.inputs[0]].shape, types[node.outputs[0]].shape
    if source == target:
        return inner.inputs[0]
    dims = reshape_target(source, target)
    if dims.count(-1) > 1:
        return None
    shape = state.graph.constant(np.array(dims, np.int64), f"{node.name}.shape")
    return [Node("Reshape", [inner.inputs[0], shape], node.outputs, {}, node.name)]


def transpose(node: Node, state: Walk) -> Result:
    """Remove a transpose that is the identity; merge consecutive transposes."""
    perm = node.attrs["perm"]
    if perm == list(range(len(perm))):
        return node.inputs[0]
    inner = state.producer(node.inputs[0], "Transpose")
    if inner is None:
        return None
    both = [inner.attrs["perm"][p] for p in perm]
    if both == list(range(len(both))):
        return inner.inputs[0]
    return [Node("Transpose", inner.inputs[:1], node.outputs, {"perm": both}, node.name)]


def _pad(node: Node, state: Walk) -> Result:
    pads = state.value(node.inputs[1])
    return node.inputs[0] if pads is not None and not pads.any() else None


def _single(node: Node, state: Walk) -> Result:
    if len(node.inputs) == 1:
        return node.inputs[0]
    if node.op == "Sum" and len(node.inputs) == 2:
        return [Node("Add", node.inputs, node.outputs, {}, node.name)]
    return None


def _neutral(value: int, sides: tuple[int, ...], node: Node, state: Walk) -> Result:
    """Drop an operand that is the neutral element of the operator."""
    for side in sides:
        constant = state.value(node.inputs[side])
        other = node.inputs[1 - side]
        types = state.graph.types
        if constant is None or types[other] != types[node.outputs[0]]:
            continue
        if constant.size and (constant == value).all():
            return other
    return None


def _slice(node: Node, state: Walk) -> Result:
    steps = state.value(node.inputs[4]) if len(node.inputs) > 4 else np.ones(1)
    if steps is None or (steps < 0).any():
        return None
    return _if_same_type(node, state)


def _unpooled(node: Node, state: Walk) -> Result:
    attrs = node.attrs
    plain = all(k == 1 for k in [*attrs["kernel_shape"], *attrs["strides"]])
    return node.inputs[0] if plain and not any(attrs.get("pads") or [0]) else None


def _neg(node: Node, state: Walk) -> Result:
    inner = state.producer(node.inputs[0], "Neg")
    return inner.inputs[0] if inner is not None else None


def _twice(node: Node, state: Walk) -> Result:
    return node.inputs[0] if state.producer(node.inputs[0], node.op) is not None else None


def _not(node: Node, state: Walk) -> Result:
    inner = state.producer(node.inputs[0], "Not", *_NEGATED)
    if inner is None:
        return None
    if inner.op == "Not":
        return inner.inputs[0]
    return [Node(_NEGATED[inner.op], list(inner.inputs), node.outputs, {}, node.name)]


def _compare(node: Node, state: Walk) -> Result:
    """Move the constant of a comparison to the right."""
    a, b = node.inputs
    if (compared := with_negative(node, state)) is not None:
        return compared
    if state.value(a) is None or state.value(b) is not None:
        return None
    return [Node(_MIRRORED[node.op], [b, a], node.outputs, {}, node.name)]


def _where(node: Node, state: Walk) -> Result:
    inner = state.producer(node.inputs[0], "Not")
    if inner is not None:
        inputs = [inner.inputs[0], node.inputs[2], node.inputs[1]]
        return [Node("Where", inputs, node.outputs, {}, node.name)]
    if node.inputs[1] == node.inputs[2]:
        types = state.graph.types
        if types[node.inputs[1]] == types[node.outputs[0]]:
            return node.inputs[1]
    return None


def _bound(node: Node, state: Walk) -> Result:
    """Turn Max or Min with a scalar into a Clip; `_clip` merges those of Min(Max(x, lo), hi)."""
    if len(node.inputs) == 1:
        return node.inputs[0]
    if len(node.inputs) != 2:
        return None
    for side in (0, 1):
        x, limit = node.inputs[1 - side], node.inputs[side]
        types = state.graph.types
        if state.scalar(limit) is None or types[x] != types[node.outputs[0]]:
            continue
        if not types[x].dtype.startswith("float"):
            continue
        bound = state.graph.constant(state.graph.constants[limit].reshape(()), f"{node.name}.bound")
        inputs = [x, bound] if node.op == "Max" else [x, "", bound]
        return [Node("Clip", inputs, node.outputs, {}, node.name)]
    return None


def _clip(node: Node, state: Walk) -> Result:
    """Merge a Clip with the preceding one; drop a Clip without bounds."""
    bounds = node.input(1), node.input(2)
    if not any(bounds):
        return node.inputs[0]
    inner = state.producer(node.inputs[0], "Clip")
    if inner is None:
        return None
    before = [*inner.inputs[1:], "", ""][:2]
    values = [state.scalar(b) if b else None for b in (*before, *bounds)]
    if any(b and v is None for b, v in zip((*before, *bounds), values, strict=True)):
        return None
    low = max((v for v in (values[0], values[2]) if v is not None), default=None)
    high = min((v for v in (values[1], values[3]) if v is not None), default=None)
    if low is not None and high is not None and low > high:
        return None
    names = [
        "" if v is None else state.graph.constant(np.asarray(v), f"{node.name}.bound")
        for v in (low, high)
    ]
    return [Node("Clip", [inner.inputs[0], *names], node.outputs, {}, node.name)]


def _batch_norm(node: Node, state: Walk) -> Result:
    if any(state.value(i) is None for i in node.inputs[1:5]):
        raise UnsupportedOp(
            f"BatchNormalization `{node.name}`: its parameters are computed at run time; "
            "expected constants"
        )
    return None


_RULES: dict[str, Callable[[Node, Walk], Result]] = {
    "Add": partial(_neutral, 0, (0, 1)),
    "ArgMax": larger_of_two,
    "ArgMin": larger_of_two,
    "AveragePool": _unpooled,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _single,
    "Conv": computed_bias,
    "ConvTranspose": computed_bias,
    "Div": partial(_neutral, 1, (1,)),
    "Expand": _if_same_type,
    "Flatten": _reshape,
    "Gemm": gemm,
    "GlobalAveragePool": _if_same_type,
    "GlobalMaxPool": _if_same_type,
    "Identity": _always,
    "Max": _bound,
    "MaxPool": _unpooled,
    "Mean": _single,
    "Min": _bound,
    "Mul": partial(_neutral, 1, (0, 1)),
    "Neg": _neg,
    "Not": _not,
    "Pad": _pad,
    "Pow": partial(_neutral, 1, (1,)),
    "Relu": _twice,
    "Reshape": _reshape,
    "Round": _twice,
    "Sign": _twice,
    "Slice": _slice,
    "Split": lambda node, state: node.inputs[0] if len(node.outputs) == 1 else None,
    "Squeeze": _reshape,
    "Sub": partial(_neutral, 0, (1,)),
    "Sum": _single,
    "Tile": _if_same_type,
    "Transpose": transpose,
    "Unsqueeze": _reshape,
    "Where": _where,
    **dict.fromkeys(COMPARE, _compare),
}

_REWRITES: tuple[tuple[str, Callable[[Graph], object]], ...] = (
    ("equal constants", _merge_constants),
    ("node by node", lambda graph: walk(graph, _local)),
    ("equal nodes", _common),
    ("cancel", cancel),
    ("push transposes down", push_down),
    ("prune", Graph.prune),
    ("equal nodes", _common),
    ("pull transposes up", pull_up),
    ("flatten", reorder_flatten),
    ("dense bias", dense_bias),
    ("prune", Graph.prune),
)
"""Rewrites of one round; each returns whether it made a change that requires another round."""
