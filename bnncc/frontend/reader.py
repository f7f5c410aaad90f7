"""Add the nodes of a file to a graph one by one, in the newest form or decomposed.

control flow         ->  the nodes that run (`control`)
function operators   ->  their ONNX definition (`functions`)
recurrences, ...     ->  operators that have kernels (`expansions`)
constant operands    ->  a constant
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, helper

from bnncc.errors import ModelError, UnsupportedOp
from bnncc.frontend import checks, control, custom, expansions, functions, narrow
from bnncc.frontend.attributes import check_attributes
from bnncc.frontend.channels_last import Columns
from bnncc.frontend.external import to_array
from bnncc.frontend.inline import Functions, Located, Versions, copy_of_subgraph, inline, reads
from bnncc.frontend.linear import as_floats
from bnncc.frontend.normalize import normalize
from bnncc.frontend.sequences import plain_tensors
from bnncc.ir.evaluate import OPSET
from bnncc.ir.fold import Folder
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.pieces import Expression
from bnncc.ir.schema import check_whole

MAX_UNFOLDED = 30_000
"""Maximum total number of nodes from loops, recurrences and functions."""
MAX_DEPTH = 16
"""Maximum nesting depth of subgraphs."""

NEWEST: Versions = {"": OPSET}


def graph_nodes(located: Sequence[Located]) -> list[tuple[Node, Versions]]:
    """Convert nodes of a file to graph nodes, and check them against their schemas.

    Parameters
    ----------
    located : sequence of (NodeProto, mapping)
        Each node with the opsets that it was written for.

    Returns
    -------
    list of (Node, mapping)
        With unique names. For sorting, a node's inputs include what its subgraphs read.

    Raises
    ------
    ModelError
        If a node violates its schema; `UnsupportedOp` if its operator is unknown.
    """
    names = node_names([node for node, _ in located])
    checks.check_operators(
        [(node, name, opsets) for (node, opsets), name in zip(located, names, strict=True)]
    )
    return [
        (_node(node, name), opsets) for (node, opsets), name in zip(located, names, strict=True)
    ]


def node_names(nodes: Sequence[onnx.NodeProto]) -> list[str]:
    """Return a unique name for each node: the file's, or one derived from its first output."""
    names: list[str] = []
    used: set[str] = set()
    for node in nodes:
        first = next((o for o in node.output if o), "")
        stem = node.name or f"{node.op_type}_{first}"
        name, serial = stem, 1
        while name in used:
            serial += 1
            name = f"{stem}_{serial}"
        used.add(name)
        names.append(name)
    return names


def _node(proto: onnx.NodeProto, name: str) -> Node:
    attrs = {a.name: _attribute(a, f"{proto.op_type} `{name}`") for a in proto.attribute}
    covers = (name,) if proto.op_type in ("Conv", "Gemm", "MatMul") else ()
    inputs = list(proto.input)
    if proto.op_type in checks.CONTROL_FLOW:
        attrs["inputs"] = len(inputs)
        inputs += [i for i in reads(proto) if i not in inputs]
    return Node(checks.op_name(proto), inputs, list(proto.output), attrs, name, covers)


def _attribute(attribute: onnx.AttributeProto, where: str) -> Any:
    if attribute.ref_attr_name:
        raise ModelError(f"{where}: attribute `{attribute.name}` refers to one of a function")
    kind = attribute.type
    if kind == AttributeProto.TENSOR:
        checks.check_tensor(attribute.t, f"{where}: attribute `{attribute.name}`")
        return to_array(attribute.t, None, f"{where}: attribute `{attribute.name}`")
    if kind == AttributeProto.STRING:
        return attribute.s.decode("utf-8", "replace")
    if kind == AttributeProto.STRINGS:
        return [s.decode("utf-8", "replace") for s in attribute.strings]
    if kind in (AttributeProto.FLOAT, AttributeProto.INT):
        return helper.get_attribute_value(attribute)
    if kind in (AttributeProto.FLOATS, AttributeProto.INTS):
        return list(helper.get_attribute_value(attribute))
    if kind == AttributeProto.GRAPH:
        return attribute.g
    raise UnsupportedOp(f"{where}: the type of attribute `{attribute.name}` is not supported")


@dataclass
class Reader:
    """Adds nodes of a file to a graph."""

    graph: Graph
    """Has inputs and constants with their types; nodes are added."""
    local: Functions
    """The model's own functions."""
    folder: Path | None
    """Folder of external data."""
    source: Folder
    """Infers types and folds constants."""
    _sequences: dict[str, list[str]] = field(default_factory=dict)
    _twins: dict[str, str] = field(default_factory=dict)
    _lowered: dict[str, Columns] = field(default_factory=dict)
    _unfolded: int = 0
    _serial: int = 0
    _depth: int = 0

    def read(self, node: Node, versions: Versions) -> None:
        """Add a node that was written for the opsets `versions`; its inputs must have been added.

        Raises
        ------
        ModelError
            If the node cannot be read; may be `UnsupportedOp` or `ShapeError`.
        """
        graph = self.graph
        if node.op == "Constant":
            self._constant(node)
        elif custom.known(node.op) or (node.op == "MatMul" and node.inputs[0] in self._lowered):
            for part in custom.read(node, graph, self._lowered):
                self._add_all(normalize(part, OPSET, graph))
        elif node.op in checks.CONTROL_FLOW:
            self._control(node, versions)
        else:
            plain = plain_tensors(node, graph, self._sequences)
            version = versions.get("", OPSET)
            self._add_all(normalize(plain, version, graph))

    def _add_all(self, pieces: Iterable[Node]) -> None:
        for piece in pieces:
            self._add(piece)

    def _add(self, node: Node) -> None:
        """Add a node in the newest form."""
        check_attributes(node)
        check_whole(node, self.graph)
        if self.source.constant(node):
            return
        written = expansions.expand(node, self.graph)
        if written is not None:
            for part in written.nodes:
                self._count(node)
                if id(part) in written.final:
                    self._emit(part)
                else:
                    self.read(part, NEWEST)
        elif functions.has_body(node):
            self._serial += 1
            prefix = f"{node.name}.{self._serial}/"
            for part, versions in graph_nodes(functions.body(node, self.graph, prefix)):
                self._count(node)
                self.read(part, versions)
        else:
            self._emit(node)

    def _emit(self, node: Node) -> None:
        floats = as_floats(node, self.graph, self._twins)
        for piece in [node] if floats is None else floats:
            self.source.emit(piece)

    def narrow_input(self, name: str) -> str:
        """Represent a graph input of narrow type as bytes; return the tensor used in its place."""
        graph, kind = self.graph, self.graph.types[name]
        inside = graph.fresh(f"{name}.{kind.dtype}")
        write = Expression(Node("Cast", [name], [inside], {}, name), graph)
        graph.types[name] = TensorType(kind.shape, narrow.CARRIERS[kind.dtype])
        self._twins[inside] = narrow.decoded(write, name, kind.dtype)
        graph.types[inside] = kind
        for part in write.nodes:
            self.source.emit(part)
        return inside

    def narrow_output(self, name: str) -> None:
        """Represent a graph output of narrow type as bytes."""
        graph, kind = self.graph, self.graph.types[name]
        if kind.dtype not in narrow.CARRIERS:
            return
        write = Expression(Node("Cast", [], [name], {}, name), graph)
        value = graph.constants.pop(name, None)
        if value is None:
            single = self._twins[name]
        else:
            single = write.constant(value.astype(np.float32), "float32")
        write.give(narrow.encoded(write, single, kind.dtype), 0)
        del graph.types[name]
        for part in write.nodes:
            self.source.emit(part)

    def unfolds(self, node: Node, body: onnx.GraphProto, times: int) -> None:
        """Raise an error early if that many iterations give too many nodes."""
        if times * len(body.node) > MAX_UNFOLDED:
            self._count(node, times * len(body.node))

    def _count(self, node: Node, more: int = 1) -> None:
        self._unfolded += more
        if self._unfolded > MAX_UNFOLDED:
            raise UnsupportedOp(
                f"{node.where}: loops, recurrences and functions unfold to more than "
                f"{MAX_UNFOLDED} nodes"
            )

    def _control(self, node: Node, versions: Versions) -> None:
        control.RULES[node.op](node, versions, self)

    def subgraph(
        self, body: onnx.GraphProto, inputs: Sequence[str], versions: Versions, node: Node
    ) -> list[str]:
        """Add the nodes of a subgraph and return the names of its outputs.

        Parameters
        ----------
        body : GraphProto
            The subgraph.
        inputs : sequence of str
            Tensors for its inputs.
        versions : mapping of str to int
            Opsets that it was written for.
        node : Node
            The node that contains it.

        Raises
        ------
        ModelError
            If it cannot be read.
        UnsupportedOp
            If it contains something that is not supported.
        """
        self._count(node)
        self._serial += 1
        where = node.where
        if len(body.input) != len(inputs):
            raise ModelError(f"{where}: its body has {len(body.input)} inputs, not {len(inputs)}")
        if body.sparse_initializer:
            raise UnsupportedOp(f"{where}: sparse initializers are not supported")
        if self._depth >= MAX_DEPTH:
            raise ModelError(f"{where}: control flow is nested more than {MAX_DEPTH} deep")
        self._depth += 1
        prefix = f"{node.name}.{self._serial}/"
        nodes, stored, outputs = copy_of_subgraph(body, inputs, prefix)
        for tensor in stored:
            said = f"initializer `{tensor.name}`"
            checks.check_tensor(tensor, said)
            self.graph.set_constant(tensor.name, to_array(tensor, self.folder, said))
        parts = list(graph_nodes(inline(nodes, self.local, versions)))
        self.graph.reserved.update(name for part, _ in parts for name in part.outputs)
        for part, opsets in parts:
            self._count(node)
            for name in part.inputs:
                if name and name not in self.graph.types and name not in self._sequences:
                    raise ModelError(f"{part.where}: input `{name}` is defined nowhere before it")
            for name in part.outputs:
                if name and name in self.graph.types:
                    raise ModelError(f"{part.where}: output `{name}` is defined twice")
            self.read(part, opsets)
        self._depth -= 1
        for name in outputs:
            if name not in self.graph.types:
                raise ModelError(f"{where}: output `{name}` of its body is not a tensor")
        return outputs

    def _constant(self, node: Node) -> None:
        where = f"Constant `{node.name}`"
        if len(node.attrs) != 1:
            raise ModelError(f"{where}: has {len(node.attrs)} attributes, expected one value")
        key, value = next(iter(node.attrs.items()))
        if key == "value":
            array = value
        elif key in ("value_int", "value_ints"):
            array = np.array(value, np.int64)
        elif key in ("value_float", "value_floats"):
            array = np.array(value, np.float32)
        else:
            raise UnsupportedOp(f"{where}: `{key}` is not supported")
        self.graph.set_constant(node.outputs[0], array)
