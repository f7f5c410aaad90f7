"""Split transposed convolutions into ordinary ones, and interleave images after later operators.

    before: y = ConvTranspose(x, W); z = BatchNormalization(y); s = Sign(z)        stride 2
    after:  y0 = Conv(x, W0); ... y3 = Conv(x, W3); s0 = Sign(BatchNormalization(y0)); ...
            s = bnncc.Interleave(s0, s1, s2, s3)
    before: y = Resize(x); s = Sign(y)                                nearest, twice as large
    after:  t = Sign(x); s = bnncc.Interleave(t, t, t, t)

Output positions with the same remainder modulo the stride (a *phase*) are sums over the same taps
of W, and adjacent ones read data shifted by one. So a phase is an ordinary convolution of stride 1,
and no products with inserted zeros are computed. Elementwise operators, signs and quantizers are
applied to phases, so that bits are interleaved where possible. Upsampling by integer factors
(nearest neighbour) has phases that are all equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bnncc.ir.dims import is_static
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.halves import NARROW, ROUND
from bnncc.ir.quantizers import LEVELS
from bnncc.recognise.affine import channel_vector
from bnncc.report import Layer

INTERLEAVE = "bnncc.Interleave"
"""Operator that interleaves phases. Attributes: ``strides``, and ``starts``: the first row and
column used of each phase. Phase ``a * strides[1] + b`` holds output rows ``a + strides[0] * i`` and
columns ``b + strides[1] * j``."""

_ALIKE = {
    "Add", "Sub", "Mul", "Div", "Neg", "Relu", "LeakyRelu", "PRelu", "Clip", "BatchNormalization",
    "bnncc.Sign", LEVELS, ROUND, NARROW,
}  # fmt: skip
"""Operators that treat all positions alike, if their constants do."""


@dataclass(frozen=True)
class Phase:
    """One phase along one axis, as an ordinary convolution of stride 1."""

    taps: tuple[int, ...]
    """Taps of the transposed kernel, in the order of the convolution's kernel."""
    dilation: int
    """Dilation of the convolution."""
    pads: tuple[int, int]
    """Padding at the beginning and at the end."""
    start: int
    """Index of the convolution's first output that belongs to the phase."""


def phases(
    size: int, out: int, *, kernel: int, stride: int, dilation: int = 1, pad: int = 0
) -> list[Phase]:
    """Split a transposed convolution along one axis.

    Output position ``j`` sums the taps ``t`` at data positions ``i`` with ``i * stride + t *
    dilation == j + pad``. So a phase ``j % stride`` has every ``stride / gcd(stride, dilation)``-th
    tap.

    Parameters
    ----------
    size, out : int
        Sizes of data and result.
    kernel, stride, dilation, pad : int
        Of the transposed convolution; `pad` is at the beginning.

    Returns
    -------
    list of Phase
        One for each remainder; a phase may have no taps.

    Examples
    --------
    >>> [phase.taps for phase in phases(4, 8, kernel=4, stride=2, pad=1)]
    [(3, 1), (2, 0)]
    """
    common = math.gcd(stride, dilation)
    made = []
    for number in range(stride):
        whole, rest = divmod(number + pad, stride)
        taps = [t for t in range(kernel) if t * dilation % stride == rest]
        if not taps:
            made.append(Phase((), 1, (0, 0), 0))
            continue
        step, count = dilation // common, -(-out // stride)
        first = whole - (taps[-1] * dilation - rest) // stride  # position that the last tap reads
        before, start = max(0, -first), max(0, first)
        last = first + count - 1 + (len(taps) - 1) * step
        pads = before, max(0, last - (size - 1))
        made.append(Phase(tuple(taps[::-1]), step, pads, start))
    return made


def split_transposed(graph: Graph) -> None:
    """Rewrite upsampling operators, and the operators after them.

    Runs after `recognise_signs`.
    """
    graph.replace(_Writer(graph).written)
    graph.prune()


def repeats(node: Node, graph: Graph) -> tuple[int, int] | None:
    """Return how often a `Resize` repeats rows and columns of an image; None if it does not."""
    data, out = graph.types[node.inputs[0]], graph.types[node.outputs[0]]
    mode = str(node.attrs.get("coordinate_transformation_mode", "half_pixel"))
    shift = {"asymmetric": 0.0, "half_pixel": 0.5, "pytorch_half_pixel": 0.5}.get(mode)
    known = is_static((*data.shape[1:], *out.shape[1:]))
    if str(node.attrs.get("mode", "nearest")) != "nearest" or shift is None or not known:
        return None
    if len(data.shape) != 4 or data.dtype != "float32" or data.shape[:2] != out.shape[:2]:
        return None
    given = graph.constants.get(node.input(2))
    factors = []
    for axis in (2, 3):
        size, wanted = int(data.shape[axis]), int(out.shape[axis])
        factor = wanted // size
        place = (np.arange(wanted) + shift) / max(factor, 1) - shift
        nearest = _NEAREST[str(node.attrs.get("nearest_mode", "round_prefer_floor"))](place)
        same = np.array_equal(nearest.clip(0, size - 1), np.arange(wanted) // max(factor, 1))
        if factor * size != wanted or not same:
            return None
        factors.append(factor)
    if given is not None and given.size and given.reshape(-1)[-2:].tolist() != factors:
        return None  # sizes were rounded down
    return (factors[0], factors[1]) if max(factors) > 1 else None


_NEAREST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda place: np.ceil(place - 0.5),
    "round_prefer_ceil": lambda place: np.floor(place + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def why_not(node: Node, graph: Graph) -> str:
    """Return why a transposed convolution is not split, or "" if it is."""
    kinds = [graph.types[i] for i in (node.inputs[0], node.outputs[0])]
    if graph.computed(node.inputs[1:]):
        return "its weights are computed at run time"
    if any(len(k.shape) != 4 or k.dtype != "float32" for k in kinds):
        return "its data are not float32 images"
    if not is_static(d for k in kinds for d in k.shape[1:]):
        return "its data has an unknown size"
    if node.attrs.get("output_shape") or node.attrs.get("auto_pad", "NOTSET") != "NOTSET":
        return "its padding follows from `output_shape` or `auto_pad`"
    if not all(p.taps for axis in _axes(node, graph) for p in axis):
        return "some of its outputs read no data: its stride is larger than its kernel"
    return ""


def _axes(node: Node, graph: Graph) -> tuple[list[Phase], list[Phase]]:
    """Return the phases of both axes."""
    kernel = graph.constants[node.inputs[1]].shape[2:]
    given = {
        key: [int(v) for v in node.attrs.get(key) or default]
        for key, default in (("strides", [1, 1]), ("dilations", [1, 1]), ("pads", [0] * 4))
    }
    size, out = graph.types[node.inputs[0]].shape, graph.types[node.outputs[0]].shape
    rows, columns = (
        phases(
            int(size[2 + i]), int(out[2 + i]), kernel=kernel[i], stride=given["strides"][i],
            dilation=given["dilations"][i], pad=given["pads"][i],
        )
        for i in (0, 1)
    )  # fmt: skip
    return rows, columns


def joined(layers: list[Layer], graph: Graph) -> list[Layer]:
    """Merge the layers of each transposed convolution's phases into one layer.

    Parameters
    ----------
    layers : list of Layer
        In order.
    graph : Graph
        Tells which layers belong to a ConvTranspose of the file.
    """
    result: list[Layer] = []
    for layer in layers:
        last = result[-1] if result else None
        same = last is not None and last.name == layer.name and last.op == layer.op
        if same and last is not None and graph.in_file.get(layer.name, ("",))[0] == "ConvTranspose":
            kept = layer if layer.kind == "float" else last
            result[-1] = replace(kept, macs=last.macs + layer.macs)
        else:
            result.append(layer)
    return result


class _Writer:
    """Writes the new nodes; `parts` are the phases of tensors, `starts` their first positions."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.parts: dict[str, list[str]] = {}
        self.layout: dict[str, dict[str, object]] = {}

    def written(self, node: Node) -> list[Node] | None:
        """Return the replacement of `node`, or None."""
        self.nodes = []
        if node.op == "ConvTranspose" and not why_not(node, self.graph):
            self._split(node)
        elif node.op == "Resize" and (factors := repeats(node, self.graph)) is not None:
            self._repeat(node, factors)
        elif not self._on_phases(node):
            return None
        return self.nodes

    def _split(self, node: Node) -> None:
        """Append the convolutions that replace `node`."""
        graph, out = self.graph, node.outputs[0]
        weight = graph.constants[node.inputs[1]]
        groups = int(node.attrs.get("group", 1))
        filters = weight.reshape(groups, -1, *weight.shape[1:]).transpose(0, 2, 1, 3, 4)
        filters = filters.reshape(-1, *filters.shape[2:])
        rows, columns = _axes(node, graph)
        parts, starts = [], []
        for row in rows:
            for column in columns:
                taps = filters[:, :, row.taps][:, :, :, column.taps]
                attrs = {
                    "kernel_shape": list(taps.shape[2:]),
                    "strides": [1, 1],
                    "dilations": [row.dilation, column.dilation],
                    "pads": [row.pads[0], column.pads[0], row.pads[1], column.pads[1]],
                    "group": groups,
                    "auto_pad": "NOTSET",
                }
                held = graph.constant(np.ascontiguousarray(taps), f"{node.inputs[1]}.phase")
                inputs = [node.inputs[0], held, *node.inputs[2:]]
                made = Node("Conv", inputs, [], attrs, node.name, (node.name,))
                sizes = self._sizes(graph.types[node.inputs[0]], row, column)
                kind = TensorType((graph.types[out].shape[0], len(taps), *sizes), "float32")
                parts.append(self._add(made, out, kind))
                starts.append((row.start, column.start))
        graph.in_file.setdefault(
            node.name, ("ConvTranspose", graph.types[out].shape, tuple(weight.shape))
        )
        self._interleave(out, parts, {"strides": (len(rows), len(columns)), "starts": starts})

    def _repeat(self, node: Node, factors: tuple[int, int]) -> None:
        """Interleave the image that `node` upsamples with itself."""
        count = factors[0] * factors[1]
        starts = [(0, 0)] * count
        parts = node.inputs[:1] * count
        self._interleave(node.outputs[0], parts, {"strides": factors, "starts": starts})

    @staticmethod
    def _sizes(data: TensorType, *axes: Phase) -> list[int]:
        spans = [(len(p.taps) - 1) * p.dilation for p in axes]
        return [
            int(size) + sum(p.pads) - span
            for size, p, span in zip(data.shape[2:], axes, spans, strict=True)
        ]

    def _add(self, node: Node, stem: str, kind: TensorType) -> str:
        node.outputs = [self.graph.fresh(f"{stem}.phase")]
        self.graph.types[node.outputs[0]] = kind
        self.nodes.append(node)
        return node.outputs[0]

    def _interleave(self, out: str, parts: list[str], layout: dict[str, object]) -> None:
        self.parts[out], self.layout[out] = parts, layout
        self.nodes.append(Node(INTERLEAVE, list(parts), [out], dict(layout), out))

    def _on_phases(self, node: Node) -> bool:
        """Append `node` once for each phase, if it treats all positions alike."""
        constants, types = self.graph.constants, self.graph.types
        data = [i for i in node.inputs if i and i not in constants]
        if node.op not in _ALIKE or len(data) != 1 or data[0] not in self.parts:
            return False
        out = node.outputs[0]
        if types[out] != types[data[0]] or len(node.outputs) != 1:
            return False
        channels = int(types[out].shape[1])
        others = [constants[i] for i in node.inputs if i and i != data[0]]
        if node.op != "BatchNormalization" and any(
            channel_vector(c, channels, 4) is None for c in others
        ):
            return False
        made: dict[str, str] = {}
        for part in dict.fromkeys(self.parts[data[0]]):
            inputs = [part if i == data[0] else i for i in node.inputs]
            copy = Node(node.op, inputs, [], dict(node.attrs), node.name, node.covers)
            made[part] = self._add(copy, out, types[part])
        self._interleave(out, [made[part] for part in self.parts[data[0]]], self.layout[data[0]])
        return True
