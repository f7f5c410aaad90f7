"""Say what keeps levels from a layer whose data are computed from them.

Data that are levels times scales are real-valued once the scales cannot follow the product. Their
author quantized them, so "real-valued" alone would not help.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.moves import PERMUTATIONS, VIEW
from bnncc.recognise import reasons
from bnncc.recognise.lattice import Lattice
from bnncc.recognise.operands import operator
from bnncc.recognise.row_scales import Axes, axes_before, operands_of_rows

_DEPTH = 16
"""Maximum number of operators between levels and the layer."""

_ROUND = ("Round", "Floor", "Ceil")
_VARIES, _ROWS, _WIDE = "varies", "rows", "wide"


@dataclass(frozen=True)
class _Behind:
    """What the data of a layer are computed from."""

    what: str
    """Levels with scales that vary along the sums, or that do not; or unlimited integers."""
    levels: int
    """Number of levels."""
    node: Node | None = None
    """The operator that says so."""


def why(
    node: Node, graph: Graph, known: dict[str, Lattice], producers: dict[str, Node],
    filters: np.ndarray, *, few: bool,
) -> reasons.Why | None:  # fmt: skip
    """Return why a layer is float although its data come from levels, and a remedy.

    Parameters
    ----------
    node : Node
        A Conv, Gemm or MatMul with real-valued data.
    graph : Graph
        The graph.
    known : dict of str to Lattice
        Its lattices.
    producers : dict of str to Node
        Its producers.
    filters : ndarray, shape (out_channels, channels, ...)
        Weights.
    few : bool
        Whether these are small integers times a scale.

    Returns
    -------
    tuple of str or None
        None if no levels are near.
    """
    rank = len(graph.types[node.inputs[0]].shape)
    axis = 1 if node.op == "Conv" else rank - 1
    found = _behind(node.inputs[0], {axis}, graph, known, producers, _DEPTH)
    if found is None:
        return None
    said = f" ({operator(found.node)} `{found.node.name}`)" if found.node is not None else ""
    if found.what == _WIDE:
        return (
            f"its data are rounded{said}, to integers that may need more than 8 bits",
            "limit them behind the rounding, clamp(-128, 127), or divide them by their maximum",
        )
    if not few:
        return reasons.weights(filters, found.levels)
    data = f"its data are {found.levels} levels times"
    if found.what == _VARIES:
        return (
            f"{data} scales that differ along its sums{said}",
            "give each row one scale, or apply the scales before the quantizer",
        )
    if node.op == "Conv":
        return (
            f"{data} scales of pixels, or plus zero points, and its sums run over pixels",
            "give each image one scale, and no zero point where it is padded",
        )
    return None


def _behind(
    name: str, axes: Axes, graph: Graph, known: dict[str, Lattice], producers: dict[str, Node],
    depth: int,
) -> _Behind | None:  # fmt: skip
    if name in known:
        return _Behind(_ROWS, len(known[name].values))
    node = producers.get(name)
    if node is None or depth == 0:
        return None
    if node.op in _ROUND:
        return _Behind(_WIDE, 0, node)
    if node.op in ("Mul", "Div", "Add", "Sub"):
        rows = operands_of_rows(node, graph, axes)
        for place in rows:
            found = _behind(node.inputs[place], axes, graph, known, producers, depth - 1)
            if found is not None:
                return found
        places = () if node.op in ("Add", "Sub") else (0,) if node.op == "Div" else (0, 1)
        for place in places:
            found = _behind(node.inputs[place], axes, graph, known, producers, depth - 1)
            if place not in rows and found is not None:
                return found if found.what == _WIDE else _Behind(_VARIES, found.levels, node)
        return None
    if node.op == "Clip" and all((node.input(1), node.input(2))):
        return None
    if node.op in ("Clip", "Cast", "Identity"):
        return _behind(node.inputs[0], axes, graph, known, producers, depth - 1)
    if node.op not in PERMUTATIONS | {VIEW}:
        return None
    before = axes_before(node, graph, axes)
    found = _behind(node.inputs[0], before or {0}, graph, known, producers, depth - 1)
    if found is None or before is not None or found.what == _WIDE:
        return found
    return _Behind(_VARIES, found.levels, node)
