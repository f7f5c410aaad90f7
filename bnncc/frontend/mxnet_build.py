"""Builder of ONNX models for MXNet networks: nodes, constants, parameters, ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bnncc.errors import ModelError
from bnncc.ir.evaluate import make_attribute

Array = np.ndarray[Any, Any]


@dataclass
class Builder:
    """Collects ONNX nodes."""

    params: Mapping[str, Array]
    """The network's parameters."""
    source: str
    """Origin of the parameters, for messages."""
    variables: set[str] = field(default_factory=set)
    """Names of the network's variables: parameters, inputs and labels."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Ranks of tensors; some MXNet operators depend on the rank of their data."""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    """In order."""
    stored: dict[str, Array] = field(default_factory=dict)
    """Initializers: parameters that are read, and constants."""

    def add(
        self,
        op: str,
        inputs: Sequence[str],
        out: str,
        *,
        name: str = "",
        outputs: int = 1,
        rank: int | None = None,
        domain: str = "",
        **attrs: Any,
    ) -> str:
        """Append a node.

        Parameters
        ----------
        op : str
            ONNX operator.
        inputs : sequence of str
            Tensors.
        out : str
            Output; several are called ``out0``, ``out1``, ...
        name : str
            Name of the node; default: that of its output.
        outputs : int
            Number of outputs.
        rank : int, optional
            Rank of its outputs; default: the largest rank of its inputs.
        domain : str
            Domain of the operator, if it is not ONNX's.
        **attrs : Any
            ONNX attributes; those that are None are omitted.

        Returns
        -------
        str
            `out`.
        """
        names = [out] if outputs == 1 else [f"{out}{k}" for k in range(outputs)]
        node = helper.make_node(op, list(inputs), names, name or out, domain=domain)
        node.attribute.extend(make_attribute(k, v) for k, v in attrs.items() if v is not None)
        self.nodes.append(node)
        if rank is None:
            rank = max((self.rank(i) for i in inputs if i), default=0)
        self.ranks.update(dict.fromkeys(names, rank))
        return out

    def constant(self, value: Any, out: str, dtype: Any = np.float32) -> str:
        """Store a constant under the name `out`."""
        self.stored[out] = np.asarray(value, dtype)
        return out

    def rank(self, name: str) -> int:
        """Return the rank of a tensor; 4 if it is unknown."""
        if name in self.stored:
            return self.stored[name].ndim
        if name in self.params and name in self.variables:
            return self.params[name].ndim
        return self.ranks.get(name, 4)

    def param(self, name: str, where: str) -> Array:
        """Return the value of a parameter.

        Raises
        ------
        ModelError
            If it is missing, or is computed.
        """
        if name not in self.variables:
            raise ModelError(f"{where}: `{name}` is computed, expected a stored parameter")
        if name not in self.params:
            raise ModelError(f"{where}: its parameter `{name}` is not in {self.source}")
        return self.params[name]

    def weight(self, name: str, where: str) -> str:
        """Return `name`, which must be an existing parameter, or computed."""
        if name in self.variables:
            self.param(name, where)
        return name

    def proto(
        self, inputs: Mapping[str, Sequence[int | str]], outputs: Sequence[str], name: str
    ) -> onnx.ModelProto:
        """Return the model that computes `outputs`, without unused nodes."""
        live, kept = self._needed(outputs)
        read = {n: self.params[n] for n in self.variables & live if n in self.params}
        stored = {**read, **{n: v for n, v in self.stored.items() if n in live}}
        graph = helper.make_graph(
            kept,
            name,
            [helper.make_tensor_value_info(n, 1, list(s)) for n, s in inputs.items()],
            [onnx.ValueInfoProto(name=o) for o in outputs],
            [numpy_helper.from_array(_float32(v), n) for n, v in sorted(stored.items())],
        )
        domains = {"": 21, **{node.domain: 1 for node in kept if node.domain}}
        imports = [helper.make_opsetid(*pair) for pair in domains.items()]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def free(self, outputs: Sequence[str]) -> list[str]:
        """Return the variables without a value on which `outputs` depend."""
        live, _ = self._needed(outputs)
        return sorted(n for n in self.variables & live if n not in self.params)

    def _needed(self, outputs: Sequence[str]) -> tuple[set[str], list[onnx.NodeProto]]:
        """Return the tensors on which `outputs` depend, and the nodes that compute them."""
        live, kept = set(outputs), []
        for node in reversed(self.nodes):
            if live.intersection(node.output):
                kept.append(node)
                live.update(i for i in node.input if i)
        return live, kept[::-1]


def _float32(value: Array) -> Array:
    narrow = value.dtype.kind == "f" and value.dtype != np.float32
    return value.astype(np.float32) if narrow else value
