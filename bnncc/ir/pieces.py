"""Decompose a node of the file into simpler nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import helper

from bnncc.errors import ShapeError, UnsupportedOp
from bnncc.ir.graph import Dim, Graph, Node, TensorType
from bnncc.ir.moves import VIEW

MAX_TABLE = 1 << 26
"""Maximum number of elements of a constant that replaces part of an operator."""


@dataclass
class Expression:
    """Writes the replacement of a node; each call adds a node and returns its output's name."""

    node: Node
    """The node to replace."""
    graph: Graph
    """Receives constants; its nodes are added by the caller."""
    nodes: list[Node] = field(default_factory=list)
    """Nodes written so far, in the form of the newest opset."""
    final: set[int] = field(default_factory=set)
    """Ids of nodes that must not be decomposed further."""

    @property
    def where(self) -> str:
        """Operator and name of the node, for messages."""
        return self.node.where

    def input(self, k: int) -> str:
        """Return input `k` of the node, or "" if it is absent."""
        return self.node.input(k)

    def type(self, k: int = 0) -> TensorType:
        """Return the type of input `k`."""
        return self.graph.types[self.node.inputs[k]]

    def shape(self, k: int = 0) -> list[int]:
        """Return the shape of input `k`, which must be static.

        Raises
        ------
        ShapeError
            If a size is unknown.
        """
        kind = self.type(k)
        if not kind.static:
            raise ShapeError(
                f"{self.where}: its input has shape {list(kind.shape)}, expected fixed sizes",
                hint="give the shape: --input-shape NAME:1x3x224x224",
            )
        return [int(d) for d in kind.shape]

    def fixed(self, k: int) -> np.ndarray | None:
        """Return the constant value of input `k`, or None if it is absent.

        Raises
        ------
        UnsupportedOp
            If the input is computed.
        """
        name = self.input(k)
        if name and name not in self.graph.constants:
            raise UnsupportedOp(f"{self.where}: its input {k} is computed, expected a constant")
        return self.graph.constants[name] if name else None

    def room(self, *sizes: int) -> None:
        """Check that a table of `sizes` is not too large.

        Raises
        ------
        ShapeError
            If it is too large.
        """
        if any(s < 0 for s in sizes) or math.prod(sizes) > MAX_TABLE:
            raise ShapeError(
                f"{self.where}: needs a table of shape {list(sizes)}, "
                f"expected at most {MAX_TABLE} elements"
            )

    def as_is(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Add a node that must not be decomposed further."""
        made = self(op, *inputs, **attrs)
        self.final.add(id(self.nodes[-1]))
        return made

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Add a node with one output and return it; `covers` sets the node's field."""
        return self.several(op, inputs, 1, **attrs)[0]

    def several(self, op: str, inputs: Sequence[str], count: int, **attrs: Any) -> list[str]:
        """Add a node with `count` outputs and return them."""
        covers = attrs.pop("covers", ())
        stem = next(o for o in self.node.outputs if o)
        made = [self.graph.fresh(f"{stem}.{op.lower()}") for _ in range(count)]
        self.nodes.append(Node(op, list(inputs), made, attrs, self.node.name, covers))
        return made

    def give(self, name: str, output: int) -> None:
        """Make the tensor `name` an output of the node, if that output is used."""
        outputs = self.node.outputs
        if output < len(outputs) and outputs[output]:
            self.nodes.append(Node("Identity", [name], [outputs[output]], {}, self.node.name))

    def result(self, name: str) -> list[Node]:
        """Make the tensor `name`, which has no other reader, the node's only output."""
        made = next((n for n in self.nodes if name in n.outputs), None)
        if made is None:
            self.give(name, 0)
        else:
            made.outputs[made.outputs.index(name)] = self.node.outputs[0]
        return self.nodes

    def constant(self, value: Any, dtype: str = "float32") -> str:
        """Return the name of a constant."""
        return self.graph.constant(np.asarray(value, np.dtype(dtype)), self.node.name)

    def ints(self, *values: int) -> str:
        """Return the name of a constant vector of int64."""
        return self.graph.constant(np.asarray(values, np.int64), self.node.name)

    def cast(self, x: str, dtype: str) -> str:
        """Return `x` converted to `dtype`."""
        return self("Cast", x, to=int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))

    def reshape(self, x: str, *shape: int) -> str:
        """Return `x` with another shape; 0 keeps a dimension."""
        return self("Reshape", x, self.ints(*shape))

    def scalar(self, x: str) -> str:
        """Return `x`, which has one element, without axes."""
        return self("Reshape", x, self.ints())

    def squeeze(self, x: str, *axes: int) -> str:
        """Return `x` without `axes`."""
        return self("Squeeze", x, self.ints(*axes))

    def unsqueeze(self, x: str, *axes: int) -> str:
        """Return `x` with more `axes`."""
        return self("Unsqueeze", x, self.ints(*axes))

    def at(self, x: str, index: int, axis: int) -> str:
        """Return one slice of `x`, without its axis."""
        return self("Gather", x, self.constant(index, "int64"), axis=axis)


Reader = Callable[[Expression], str]
"""Writes ONNX or internal nodes in place of a node of another operator set; returns the result."""


def view(graph: Graph, name: str, out: str, kind: TensorType) -> Node:
    """Return a node that gives a tensor another shape.

    Parameters
    ----------
    graph : Graph
        Receives types, and the constant of a Reshape.
    name, out : str
        Input and output.
    kind : TensorType
        Type of `out`; a Reshape can express at most one unknown size.
    """
    graph.types[out] = kind
    target = np.array([d if isinstance(d, int) else -1 for d in kind.shape], np.int64)
    if (target < 0).sum() > 1:
        return Node(VIEW, [name], [out], {}, out)
    return Node("Reshape", [name, graph.constant(target, f"{out}.shape")], [out], {}, out)


def reshape_target(source: tuple[Dim, ...], shape: tuple[Dim, ...]) -> list[int]:
    """Return the target of a Reshape: 0 for a symbol that keeps its position, -1 for others."""
    return [
        d if isinstance(d, int) else 0 if source[i : i + 1] == (d,) else -1
        for i, d in enumerate(shape)
    ]
