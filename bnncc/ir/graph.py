"""The logical graph: ONNX operators on named tensors.

Frontends build it, passes rewrite it in place, and `bnncc.codegen.lower` converts it to Relax.
Operators keep ONNX's names and semantics, in the form of the newest opset: shapes, pads, axes and
clip bounds are constant *inputs*, as in ONNX. So a message can always name the node of the user's
file, and a pass can evaluate any subgraph with `bnncc.ir.evaluate`. Operators whose names start
with ``bnncc.`` are internal: frontends create a few, and passes insert the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bnncc.errors import ShapeError
from bnncc.ir.datatypes import Datatype
from bnncc.ir.dims import Dim as Dim
from bnncc.ir.dims import at_one, is_static


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a tensor."""

    shape: tuple[Dim, ...]
    """A str is a symbolic dimension."""
    dtype: str
    """NumPy name: ``float32``, ``int64``, ``bool``, ..."""

    @property
    def static(self) -> bool:
        """Whether every dimension is a number."""
        return is_static(self.shape)


@dataclass(eq=False)
class Node:
    """One application of an operator."""

    op: str
    """ONNX operator name (default domain), ``domain::Op`` of another domain, or ``bnncc.Op``."""
    inputs: list[str]
    outputs: list[str]
    """`inputs`, `outputs`: tensor names; ``""`` for an absent optional input or output."""
    attrs: dict[str, Any] = field(default_factory=dict)
    """Values are Python ints, floats, strings, lists, NumPy arrays or frozen dataclasses."""
    name: str = ""
    """Name of the node in the file, or a name derived from its first output; for messages."""
    covers: tuple[str, ...] = ()
    """Names of the Conv/Gemm/MatMul nodes of the file that this node computes; for reports."""

    @property
    def where(self) -> str:
        """Description of the node for messages."""
        return f"{self.op} `{self.name}`"

    def input(self, number: int) -> str:
        """Return the name of an input; ``""`` if it is absent."""
        return self.inputs[number] if number < len(self.inputs) else ""


@dataclass(eq=False)
class Graph:
    """A dataflow graph."""

    nodes: list[Node]
    """In topological order."""
    inputs: list[str]
    outputs: list[str]
    """`inputs`, `outputs`: tensor names, in the order of the file."""
    constants: dict[str, np.ndarray]
    """Initializers and folded values."""
    types: dict[str, TensorType]
    """Types of all inputs, constants and node outputs."""
    source: str = "model"
    """Name of the model in messages (the file name)."""
    sign_zero: dict[str, str] = field(default_factory=dict)
    """By sign node: treatment of exact zeros before it; for the report."""
    datatypes: dict[str, Datatype] = field(default_factory=dict)
    """Types of inputs that are declared to hold few values."""
    in_file: dict[str, tuple[str, tuple[Dim, ...], tuple[Dim, ...]]] = field(default_factory=dict)
    """For rewritten layers, by name, their original form: operator, shapes of the result and of the
    weights; for the report."""
    bounds: dict[str, int] = field(default_factory=dict)
    """User-defined maximum sizes of symbols."""
    positive: set[str] = field(default_factory=set)
    """Symbols that reading the model took to be 1 or more: with 0, it might be another graph."""
    sizes: dict[str, tuple[Dim | None, ...]] = field(default_factory=dict)
    """Elements of integer vectors that consist of dimensions; None for unknown ones."""
    forms: dict[str, Any] = field(default_factory=dict)
    """In a physical graph: by tensor, the logical tensor it holds, and in which form; see
    `bnncc.transform.physical.Form`."""
    reserved: set[str] = field(default_factory=set)
    """Names of tensors that are yet to be added."""
    _serial: int = 0

    def producers(self) -> dict[str, Node]:
        """Return the node that makes each tensor."""
        return {o: n for n in self.nodes for o in n.outputs if o}

    def consumers(self) -> dict[str, list[Node]]:
        """Return the nodes that read each tensor, once per reading input."""
        table: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in node.inputs:
                if name:
                    table.setdefault(name, []).append(node)
        return table

    def computed(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are neither absent (``""``) nor constants."""
        return [name for name in names if name and name not in self.constants]

    def tips(self, names: Collection[str]) -> set[str]:
        """Return those of `names` that are outputs, or read to compute tensors outside `names`."""
        last = {n for n in self.outputs if n in names}
        made = (i for n in self.nodes if n.outputs[0] not in names for i in n.inputs)
        return last.union(name for name in made if name in names)

    def fresh(self, stem: str) -> str:
        """Return an unused tensor name derived from `stem`."""
        while True:
            self._serial += 1
            name = f"{stem}.{self._serial}"
            if name not in self.types and name not in self.reserved:
                return name

    def constant(self, value: np.ndarray, stem: str = "const") -> str:
        """Add a constant tensor and return its name."""
        name = self.fresh(stem)
        self.set_constant(name, value)
        return name

    def set_constant(self, name: str, value: np.ndarray) -> None:
        """Turn the tensor `name` into a constant."""
        self.constants[name] = value
        self.types[name] = TensorType(tuple(value.shape), value.dtype.name)

    def replace(self, rule: Callable[[Node], Sequence[Node] | None]) -> None:
        """Replace each node by the nodes that `rule` returns; None keeps the node."""
        self.nodes = [one for node in self.nodes for one in rule(node) or [node]]

    def put_behind(self, behind: Mapping[str, Sequence[Node]]) -> None:
        """Insert nodes after the producer of each given tensor, or after the input."""
        nodes = [one for name in self.inputs for one in behind.get(name, ())]
        for node in self.nodes:
            nodes += [node, *(one for out in node.outputs for one in behind.get(out, ()))]
        self.nodes = nodes

    def prune(self) -> None:
        """Drop nodes, constants and types that no output depends on."""
        live = set(self.outputs)
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if any(o in live for o in node.outputs):
                kept.append(node)
                live.update(i for i in node.inputs if i)
        self.nodes = kept[::-1]
        live.update(self.inputs)
        for node in self.nodes:
            live.update(o for o in node.outputs if o)
        self.constants = {k: v for k, v in self.constants.items() if k in live}
        self.types = {k: v for k, v in self.types.items() if k in live}

    def sort(self) -> None:
        """Put the nodes in topological order (stable), without recursion."""
        made = self.producers()
        waiting = {id(n): len({i for i in n.inputs if i in made}) for n in self.nodes}
        readers = self.consumers()
        ready = [n for n in self.nodes if waiting[id(n)] == 0]
        order: list[Node] = []
        position = {id(n): k for k, n in enumerate(self.nodes)}
        heap = [(position[id(n)], n) for n in ready]
        heapq.heapify(heap)
        while heap:
            _, node = heapq.heappop(heap)
            order.append(node)
            for out in node.outputs:
                for reader in {id(r): r for r in readers.get(out, [])}.values():
                    waiting[id(reader)] -= 1
                    if waiting[id(reader)] == 0:
                        heapq.heappush(heap, (position[id(reader)], reader))
        if len(order) != len(self.nodes):
            raise ValueError("the graph has a cycle")
        self.nodes = order

    def symbolic_as_one(self) -> dict[str, tuple[Dim, ...]]:
        """Return the shapes of inputs with symbolic dimensions, with 1 for each symbol."""
        shapes = {name: self.types[name].shape for name in self.inputs}
        return {name: at_one(shape) for name, shape in shapes.items() if not is_static(shape)}

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)


MAX_RANK = 8
MAX_ELEMENTS = 1 << 29
"""Maximum number of elements per tensor (2 GiB of float32), with symbolic dimensions as 1."""


def elements(dims: Iterable[Dim], where: str) -> int:
    """Return the number of elements, with symbols as 1.

    Raises
    ------
    ShapeError
        If a dimension is negative, or the tensor is too large. A dimension of 0 counts as 1 here:
        NumPy refuses such shapes if the others are too large.
    """
    count = filled = 1
    shape = list(dims)
    if len(shape) > 64:
        raise ShapeError(f"{where}: {len(shape)} dimensions, expected at most 64")
    for dim in shape:
        if isinstance(dim, str):
            continue
        if dim < 0:
            raise ShapeError(f"{where}: dimension {dim} is negative in shape {shape}")
        count *= dim
        filled *= dim or 1
    if filled > MAX_ELEMENTS:
        raise ShapeError(
            f"{where}: shape {shape} has {filled} elements, more than the limit of {MAX_ELEMENTS}"
        )
    return count


def copy_of(graph: Graph) -> Graph:
    """Return a copy of `graph` that can be modified independently; constants are shared."""
    nodes = [
        Node(n.op, list(n.inputs), list(n.outputs), dict(n.attrs), n.name, n.covers)
        for n in graph.nodes
    ]
    return Graph(
        nodes, list(graph.inputs), list(graph.outputs), dict(graph.constants), dict(graph.types),
        graph.source, datatypes=graph.datatypes, bounds=graph.bounds, sizes=graph.sizes,
        positive=graph.positive,
    )  # fmt: skip
