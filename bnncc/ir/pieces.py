"""Make the nodes that stand in place of one node of the file."""

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
"""Elements of the largest constant that stands for a part of an operator."""


@dataclass
class Expression:
    """Writes what stands for a node: each call adds a node and names its result."""

    node: Node
    """What the nodes stand for."""
    graph: Graph
    """Gets the constants; the nodes are added to it by who asked for them."""
    nodes: list[Node] = field(default_factory=list)
    """What was written so far, in the newest opset's form."""
    final: set[int] = field(default_factory=set)
    """Identities of the nodes that stay as they are."""

    @property
    def where(self) -> str:
        """Operator and name of the node, for messages."""
        return self.node.where

    def input(self, k: int) -> str:
        """Return input `k` of the node, nothing where it is left out."""
        return self.node.inputs[k] if k < len(self.node.inputs) else ""

    def type(self, k: int = 0) -> TensorType:
        """Return the type of input `k`."""
        return self.graph.types[self.node.inputs[k]]

    def shape(self, k: int = 0) -> list[int]:
        """Return the shape of input `k`, all of whose sizes must be known.

        Raises
        ------
        ShapeError
            If one is not.
        """
        kind = self.type(k)
        if not kind.static:
            raise ShapeError(
                f"{self.where}: its input has shape {list(kind.shape)}, fixed sizes are wanted",
                hint="give the shape: --input-shape NAME:1x3x224x224",
            )
        return [int(d) for d in kind.shape]

    def fixed(self, k: int) -> np.ndarray | None:
        """Return the constant that input `k` is, None where it is left out.

        Raises
        ------
        UnsupportedOp
            If it is computed.
        """
        name = self.input(k)
        if name and name not in self.graph.constants:
            raise UnsupportedOp(f"{self.where}: its input {k} is computed, a constant is wanted")
        return self.graph.constants[name] if name else None

    def room(self, *sizes: int) -> None:
        """Refuse a table of `sizes` that is too large to be made.

        Raises
        ------
        ShapeError
            If it is.
        """
        if any(s < 0 for s in sizes) or math.prod(sizes) > MAX_TABLE:
            raise ShapeError(
                f"{self.where}: needs a table of shape {list(sizes)}, at most {MAX_TABLE} elements "
                "are wanted"
            )

    def as_is(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Add a node that is not to be written as simpler ones again."""
        made = self(op, *inputs, **attrs)
        self.final.add(id(self.nodes[-1]))
        return made

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Add a node with one output and return it; `covers` is no attribute, but the node's."""
        return self.several(op, inputs, 1, **attrs)[0]

    def several(self, op: str, inputs: Sequence[str], count: int, **attrs: Any) -> list[str]:
        """Add a node with `count` outputs and return them."""
        covers = attrs.pop("covers", ())
        stem = next(o for o in self.node.outputs if o)
        made = [self.graph.fresh(f"{stem}.{op.lower()}") for _ in range(count)]
        self.nodes.append(Node(op, list(inputs), made, attrs, self.node.name, covers))
        return made

    def give(self, name: str, output: int) -> None:
        """Let the tensor `name` be an output of the node, if that is wanted."""
        outputs = self.node.outputs
        if output < len(outputs) and outputs[output]:
            self.nodes.append(Node("Identity", [name], [outputs[output]], {}, self.node.name))

    def result(self, name: str) -> list[Node]:
        """Let the tensor `name`, which nothing else read, be the node's only output."""
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
        """Return `x` as `dtype`."""
        return self("Cast", x, to=int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))

    def reshape(self, x: str, *shape: int) -> str:
        """Return `x` in another shape; 0 keeps a dimension."""
        return self("Reshape", x, self.ints(*shape))

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
"""Writes nodes of ONNX, or internal ones, in place of a node of another operator set; returns the
result."""


def view(graph: Graph, name: str, out: str, kind: TensorType) -> Node:
    """Return a node that shows a tensor in another shape.

    Parameters
    ----------
    graph : Graph
        Gets types, and the constant that a Reshape reads.
    name, out : str
        What is shown, and as what.
    kind : TensorType
        Of `out`; if more than one size is open, no constant can say which is which.
    """
    graph.types[out] = kind
    target = np.array([d if isinstance(d, int) else -1 for d in kind.shape], np.int64)
    if (target < 0).sum() > 1:
        return Node(VIEW, [name], [out], {}, out)
    return Node("Reshape", [name, graph.constant(target, f"{out}.shape")], [out], {}, out)


def reshape_target(source: tuple[Dim, ...], shape: tuple[Dim, ...]) -> list[int]:
    """Return what a Reshape is told: 0 where a symbol stays in its place, -1 for other symbols."""
    return [
        d if isinstance(d, int) else 0 if source[i : i + 1] == (d,) else -1
        for i, d in enumerate(shape)
    ]
