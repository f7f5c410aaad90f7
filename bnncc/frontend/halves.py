"""Convert float16 and bfloat16 networks to float32 with explicit roundings.

    before: y = Mul(x, s)           x, s, y: float16
    after:  m = Mul(x, s); y = bnncc.Round(m)         all float32

Float32 represents every number of either type, and an operation computed in float32 and rounded
once gives the result of the narrow type's own arithmetic. So passes handle one type only, and
evaluate the effects of rounding.

    before: h = Cast(x) to float16; y = Cast(h) to float32        x, y: float32
    after:  y = bnncc.Narrow(x)

If nothing is computed in half precision, a Cast to it is a rounding, which generated code performs.

    before: present = Concat(past, new)              past, present: float16, of the network
    after:  h = Cast(new.wide) to float16; present = Concat(past, h); present.wide = Cast(present)

Key/value caches stay as they are in memory, so that a network can write new rows in place.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto

from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.halves import KINDS, NARROW, ROUND
from bnncc.ir.infer import COMPARE

_EXACT = frozenset((
    "Abs", "Ceil", "Clip", "Compress", "Concat", "DepthToSpace", "Expand", "Flatten", "Floor",
    "Gather", "GatherElements", "GatherND", "GlobalMaxPool", "Identity", "Max", "MaxPool",
    "MaxUnpool", "Min", "Neg", "Pad", "ReduceMax", "ReduceMin", "Relu", "Reshape",
    "ReverseSequence", "Round", "Scatter", "ScatterElements", "ScatterND", "Sign", "Slice",
    "SpaceToDepth", "Split", "Squeeze", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where",
    "QuantizeLinear", *COMPARE,
))  # fmt: skip
"""Operators whose results need no rounding: values of their operands, or integers."""

_OWN = frozenset(("BitCast", "ConstantOfShape", "EyeLike", "Range"))
"""Operators that determine their own output type; their readers read it as float32."""

_HELD = frozenset(("bool", "int8", "uint8"))
"""Integer types that both half-precision types represent exactly."""


def widen(graph: Graph) -> None:
    """Represent float16 and bfloat16 tensors as float32; inputs and outputs keep their type.

    Parameters
    ----------
    graph : Graph
        In canonical form; modified in place.
    """
    if not any(kind.dtype in KINDS for kind in graph.types.values()):
        return
    halves = {name: kind.dtype for name, kind in graph.types.items() if kind.dtype in KINDS}
    caches = _caches(graph, halves)
    alone = _only_cast(graph, halves)
    held: dict[str, str] = {}
    nodes: list[Node] = []

    def single(name: str) -> str:
        """Return the float32 tensor for `name`."""
        if name not in halves:
            return name
        if name not in held:
            wide = held[name] = graph.fresh(f"{name}.wide")
            graph.types[wide] = TensorType(graph.types[name].shape, "float32")
            value = graph.constants.get(name)
            if value is not None:
                graph.constants[wide] = value.astype(np.float32)
            else:  # a graph input
                nodes.append(Node("Cast", [name], [wide], {"to": TensorProto.FLOAT}, name))
        return held[name]

    for node in graph.nodes:
        made = [o for o in node.outputs if o in halves]
        if node.op in _OWN or (node.op == "CastLike" and node.inputs[1] in halves):
            nodes += _in_own_type(node, graph, halves, held)
            continue
        if node.outputs[0] in caches:
            nodes += _in_memory(node, graph, halves, held, caches)
            continue
        kinds = {halves[i] for i in node.inputs if i in halves}
        source = graph.types[node.inputs[0]].dtype if node.inputs else ""
        node.inputs = [single(i) for i in node.inputs]
        if node.op == "Cast" and made:
            node.attrs = {**node.attrs, "to": TensorProto.FLOAT}
        if made:
            node.attrs.pop("output_dtype", None)  # DequantizeLinear's
        rounds = node.op not in _EXACT and not (node.op == "Cast" and source in _HELD)
        after: list[Node] = []
        for name in made:
            kind = halves[name]
            if node.op == "Cast" and kinds == {kind}:
                rounds = False
            inside = held[name] = _inside(name, graph)
            if rounds:
                raw = graph.fresh(f"{name}.sum")
                graph.types[raw] = graph.types[inside]
                op = NARROW if name in alone else ROUND
                after.append(Node(op, [raw], [inside], {"to": kind}, node.name))
            else:
                raw = inside
            node.outputs = [raw if o == name else o for o in node.outputs]
        nodes += [node, *after]
    for name in graph.outputs:
        if name in halves and name not in graph.inputs and name not in caches:
            _give_back(name, halves[name], held, graph, nodes)
    graph.nodes = nodes
    graph.prune()


def _caches(graph: Graph, halves: Mapping[str, str]) -> set[str]:
    """Return half-precision outputs that continue an input, and what is between the two.

    That is a Concat of the input and one other tensor, a ScatterND into the input, or a ScatterND
    into such a Concat, which nothing else reads; each may have an Identity behind it.
    """
    found: set[str] = set()
    for node in graph.nodes:
        over = node.inputs[0] if node.inputs else ""
        starts = node.op in ("Concat", "ScatterND") and over in graph.inputs
        continues = node.op in ("ScatterND", "Identity") and over in found
        if node.outputs[0] in halves and (starts or continues):
            found.add(node.outputs[0])
    kept: set[str] = set()
    readers = graph.consumers()
    for node in graph.nodes[::-1]:
        name = node.outputs[0]
        ends = [reader.op for reader in readers.get(name, []) if reader.outputs[0] in kept]
        alone = len(readers.get(name, [])) == 1
        if name in found and (name in graph.outputs or "Identity" in ends or (ends and alone)):
            kept.add(name)
    return kept


def _only_cast(graph: Graph, halves: dict[str, str]) -> set[str]:
    """Return half-precision tensors that only Casts and exact operators make and read."""
    groups = {name: {name} for name in halves if name not in graph.constants}
    computed: set[str] = set()
    for node in graph.nodes:
        near = [name for name in (*node.inputs, *node.outputs) if name in groups]
        if not near:
            continue
        joined = set().union(*(groups[name] for name in near))
        groups.update(dict.fromkeys(joined, joined))
        if node.op != "Cast" and node.op not in _EXACT:
            computed.update(near)
    read = {name for node in graph.nodes for name in node.inputs}
    return {name for name, group in groups.items() if name in read and not group & computed}


_CODES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def _inside(name: str, graph: Graph) -> str:
    """Return the internal name of a computed tensor, which differs for graph outputs."""
    kind = TensorType(graph.types[name].shape, "float32")
    if name in graph.outputs:
        name = graph.fresh(f"{name}.wide")
    graph.types[name] = kind
    return name


def _give_back(name: str, kind: str, held: dict[str, str], graph: Graph, nodes: list[Node]) -> None:
    """Convert an output back to its declared type."""
    if name in graph.constants:
        return
    nodes.append(Node("Cast", [held[name]], [name], {"to": _CODES[kind]}, name))


def _in_memory(
    node: Node, graph: Graph, halves: Mapping[str, str], held: dict[str, str], caches: set[str]
) -> list[Node]:
    """Return a node that makes a cache in its own type, and a widened copy for its readers."""
    before, name = [], node.outputs[0]
    as_they_are = {*graph.inputs, *graph.constants, *caches}
    for k, given in enumerate(node.inputs):
        if given in halves and given not in as_they_are:
            narrow = graph.fresh(f"{given}.narrow")
            graph.types[narrow] = TensorType(graph.types[given].shape, halves[given])
            to = {"to": _CODES[halves[given]]}
            before.append(Node("Cast", [held[given]], [narrow], to, node.name))
            node.inputs[k] = narrow
    wide = held[name] = graph.fresh(f"{name}.wide")
    graph.types[wide] = TensorType(graph.types[name].shape, "float32")
    widened = Node("Cast", [name], [wide], {"to": TensorProto.FLOAT}, node.name)
    return [*before, node, widened]


def _in_own_type(
    node: Node, graph: Graph, halves: dict[str, str], held: dict[str, str]
) -> list[Node]:
    """Return a node that operates on the narrow types, surrounded by casts."""
    before, after = [], []
    for k, name in enumerate(node.inputs):
        if name in held and name in halves and name not in graph.inputs:
            narrow = graph.fresh(f"{name}.narrow")
            graph.types[narrow] = TensorType(graph.types[name].shape, halves[name])
            before.append(
                Node("Cast", [held[name]], [narrow], {"to": _CODES[halves[name]]}, node.name)
            )
            node.inputs[k] = narrow
    for name in [o for o in node.outputs if o in halves]:
        shape = graph.types[name].shape
        inside = held[name] = _inside(name, graph)
        narrow = graph.fresh(f"{name}.narrow")
        graph.types[narrow] = TensorType(shape, halves[name])
        node.outputs = [narrow if o == name else o for o in node.outputs]
        after.append(Node("Cast", [narrow], [inside], {"to": TensorProto.FLOAT}, node.name))
    return [*before, node, *after]
