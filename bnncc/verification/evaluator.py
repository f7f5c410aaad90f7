"""Evaluate a physical graph with NumPy: what the passes made, before any code is generated.

Kernels are computed by their oracles (`bnncc.topi_binary.reference`) from the packed weights,
thresholds and planes that the compiled kernels read, in the same order; nodes that stay ONNX by
`bnncc.ir.evaluate`. This finds mistakes of the passes for every target, also for one whose code
cannot run on this machine.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bnncc.errors import InputError, VerificationError
from bnncc.ir.dims import Dim, evaluated
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.moves import VIEW
from bnncc.topi_binary.build import aliases, input_types
from bnncc.topi_binary.reference import evaluate_kernel
from bnncc.topi_binary.spec import Spec
from bnncc.transform.physical import KERNEL

Array = np.ndarray[Any, Any]

Replace = Callable[[Node, str, Array], Array]
"""Sees each tensor that a node made; what it returns is what later nodes read."""

Compute = Callable[[Spec, Sequence[Array]], list[Array]]
"""Computes what a kernel makes; `evaluate_kernel` is one."""


def evaluate_physical(
    graph: Graph,
    inputs: Mapping[str, Array],
    replace: Replace | None = None,
    compute: Compute = evaluate_kernel,
) -> dict[str, Array]:
    """Evaluate a physical graph.

    Parameters
    ----------
    graph : Graph
        From `bnncc.transform.fuse.fuse`.
    inputs : mapping of str to ndarray
        The graph's inputs.
    replace : callable, optional
        Gets every tensor when it is computed, and may return a replacement.
    compute : callable
        Computes kernels.

    Returns
    -------
    dict of str to ndarray
        The graph's outputs, under their physical names.

    Raises
    ------
    InputError
        If an input is missing.
    VerificationError
        If a kernel reads a tensor of the wrong shape or type.
    """
    for name in graph.inputs:
        if name not in inputs:
            raise InputError(f"input `{name}` is missing")
    symbols = _symbols(graph, inputs)
    left: dict[str, int] = dict.fromkeys(graph.outputs, 1)
    for node in graph.nodes:
        for name in node.inputs:
            left[name] = left.get(name, 0) + 1
    values: dict[str, Array] = {name: np.asarray(inputs[name]) for name in graph.inputs}
    held = ChainMap(values, graph.constants)
    for node in graph.nodes:
        given = [held[i] if i else None for i in node.inputs]
        made = _evaluate(graph, node, given, symbols, compute)
        for name in (*node.inputs, *_overwritten(node)):
            left[name] -= 1
            if left[name] <= 0:
                values.pop(name, None)
        for name, value in zip(node.outputs, made, strict=False):
            if name and left.get(name):
                values[name] = value if replace is None else replace(node, name, value)
    return {n: held[n] for n in graph.outputs}


def _evaluate(
    graph: Graph, node: Node, given: list[Array | None], symbols: Mapping[str, int],
    compute: Compute,
) -> list[Array]:  # fmt: skip
    if node.op == KERNEL:
        arrays = [v for v in given if v is not None]
        _check(node, arrays, symbols)
        return compute(node.attrs["spec"], arrays)
    if node.op == VIEW:
        (data,) = given
        assert data is not None
        shape = graph.types[node.outputs[0]].shape
        return [data.reshape([_extent(d, symbols) for d in shape])]
    if node.op == "bnncc.FloatSign":
        return [_float_sign(node, given[0])]
    return evaluate_node(node, given, graph.types)


def _check(node: Node, arrays: list[Array], symbols: Mapping[str, int]) -> None:
    """Raise an error if an input of a kernel has the wrong shape or type."""
    wanted = input_types(node.attrs["spec"])
    for place, ((shape, dtype), array) in enumerate(zip(wanted, arrays, strict=True)):
        if array.dtype != dtype or array.shape != tuple(_extent(d, symbols) for d in shape):
            raise VerificationError(
                f"kernel `{node.name}` reads {dtype}{list(shape)} as its input {place}, but "
                f"`{node.inputs[place]}` is {array.dtype}{list(array.shape)}",
                hint="this is a bug in bnncc; please report it with the model",
            )


def _overwritten(node: Node) -> list[str]:
    """Return the inputs that a kernel overwrites: later kernels must not read them."""
    if node.op != KERNEL:
        return []
    return [node.inputs[over] for over in aliases(node.attrs["spec"]) if over >= 0]


def _float_sign(node: Node, value: Array | None) -> Array:
    assert value is not None
    lo, hi = (np.float32(node.attrs[k]) for k in ("lo", "hi"))
    up = value > 0 if node.attrs["zero"] == "gt" else value >= 0
    signs = np.where(up, hi, lo)
    middle = np.float32((node.attrs["lo"] + node.attrs["hi"]) / 2)
    return np.where(value == 0, middle, signs) if node.attrs["zero"] == "mid" else signs


def _symbols(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, int]:
    """Return the sizes of the symbolic dimensions of the inputs."""
    found: dict[str, int] = {}
    for name in graph.inputs:
        for dim, extent in zip(graph.types[name].shape, np.shape(inputs[name]), strict=True):
            if isinstance(dim, str):
                found.setdefault(dim, extent)
    return found


def _extent(dim: Dim, symbols: Mapping[str, int]) -> int:
    return evaluated(dim, symbols.__getitem__)
