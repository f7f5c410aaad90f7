"""Split per-channel scales off quantizers.

    before: y = bnncc.Quant(x, s[c], zero, bits)
    after:  a = Div(x, s[c]); k = bnncc.Quant(a, 1, zero, bits); y = Mul(k, s[c])

Both forms give the same float32 numbers, but the second contains levels. A depthwise layer can read
these, because each of its sums has a single scale; sums over several channels do not.
"""

from __future__ import annotations

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.quantizers import QUANT
from bnncc.recognise.affine import channel_vector


def split_channel_scales(graph: Graph) -> None:
    """Split the per-channel scales of activation quantizers into separate operators.

    Runs before `recognise_quantizers`.
    """
    graph.replace(lambda node: _split(node, graph) if _by_channel(node, graph) else None)


def _by_channel(node: Node, graph: Graph) -> bool:
    if node.op != QUANT or node.inputs[0] in graph.constants:
        return False
    known = [graph.constants.get(name) for name in node.inputs[1:]]
    if any(value is None for value in known):
        return False
    scale, *others = (value for value in known if value is not None)
    kind = graph.types[node.inputs[0]]
    same = kind == graph.types[node.outputs[0]] and kind.dtype == "float32"
    return same and scale.size > 1 and all(value.size == 1 for value in others)


def _split(node: Node, graph: Graph) -> list[Node]:
    x, scale, *others = node.inputs
    (out,) = node.outputs
    one = graph.constant(np.ones((), np.float32), f"{node.name}.one")
    divided, levels = graph.fresh(f"{out}.divided"), graph.fresh(f"{out}.levels")
    graph.types[divided] = graph.types[levels] = graph.types[out]
    return [
        Node("Div", [x, scale], [divided], {}, node.name),
        Node(QUANT, [divided, one, *others], [levels], dict(node.attrs), node.name),
        Node("Mul", [levels, scale], [out], {}, node.name),
    ]


def scaled_source(
    name: str, graph: Graph, producers: dict[str, Node]
) -> tuple[str, np.ndarray] | None:
    """Return the tensor and per-channel factors whose product `name` is, or None.

    Returns
    -------
    tuple or None
        The tensor, and float64 of shape (channels,), all finite and not 0.
    """
    node = producers.get(name)
    if node is None or node.op not in ("Mul", "Div"):
        return None
    data = [i for i in node.inputs if i not in graph.constants]
    if len(data) != 1 or (node.op == "Div" and node.inputs[0] != data[0]):
        return None
    shape = graph.types[data[0]].shape
    constant = graph.constants[node.inputs[1 if node.inputs[0] == data[0] else 0]]
    if shape != graph.types[name].shape or len(shape) not in (2, 4):
        return None
    if not isinstance(shape[1], int):
        return None
    factor = channel_vector(constant, shape[1], len(shape))
    if factor is None or not np.isfinite(factor).all() or not np.all(factor):
        return None
    factor = factor.astype(np.float64)
    return data[0], 1 / factor if node.op == "Div" else factor
