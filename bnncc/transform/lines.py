"""Treat 1-D inputs as images of height 1: networks over sequences become networks over images.

    before: y = Conv(x, W); z = BatchNormalization(y); s = Sign(z)     x: [N, C, L], W: [O, C, K]
    after:  i = Unsqueeze(x); y = Conv(i, V); z = BatchNormalization(y); s = Sign(z)
                                                                       i: [N, C, 1, L]

Kernels, packing and thresholds expect images. Operators between 1-D convolutions or poolings that
treat all positions alike get the unit axis too, so that views remain only at the edges of the
region. For channels-last sequences ([N, L, C], between transposes) the unit axis is inserted before
the positions; the remaining transposes of images are removed by `layout`. Two-dimensional operators
on images of height 1, with reshapes to sequences in between, are handled likewise, and those
reshapes disappear.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.infer import ELEMENTWISE, infer_into
from bnncc.ir.quantizers import MULTI_THRESHOLD, QUANT

_WINDOWS = {"Conv", "ConvTranspose", "MaxPool", "AveragePool"}
_SPATIAL = _WINDOWS | {"GlobalAveragePool", "GlobalMaxPool"}
_VIEWS = {"Reshape", "Squeeze", "Unsqueeze"}
_NEUTRAL = {"kernel_shape": 1, "strides": 1, "dilations": 1, "output_padding": 0}
"""Attributes with one value per spatial axis, and the value for the unit axis."""

_BY_CHANNEL = {"BatchNormalization", MULTI_THRESHOLD}
"""Operators whose parameters apply to axis 1."""
_SPREAD = ELEMENTWISE | _BY_CHANNEL | {QUANT, "Concat", "Pad", "Slice", "Split"}
"""Operators that accept an additional unit axis, whatever they do along the other axes."""

_AFTER_CHANNELS = 2
_BEFORE_PLACES = 1


def lift_lines(graph: Graph) -> None:
    """Rewrite the one-dimensional parts of `graph`.

    Runs on the graph as loaded. Values do not change.
    """
    where = _regions(graph)
    if where:
        _Lifter(graph, where).run()


def _regions(graph: Graph) -> dict[str, int]:
    """Return the tensors of rank 3 to lift, and the position of the unit axis in each."""
    where: dict[str, int] = {}
    for node in graph.nodes:
        if _rank(graph, node.outputs[0]) == 3 and node.op in _SPATIAL and _single(node):
            where.update(dict.fromkeys((node.inputs[0], node.outputs[0]), _AFTER_CHANNELS))
    for node in graph.nodes:
        if node.op in _VIEWS and (place := _of_image(node, graph)) is not None:
            where.setdefault(*place)
    changed = bool(where)
    while changed:
        before = len(where)
        for node in [*graph.nodes, *graph.nodes[::-1]]:
            _spread(node, graph, where)
        changed = len(where) != before
    return {name: axis for name, axis in where.items() if name not in graph.constants}


def _single(node: Node) -> bool:
    return len([o for o in node.outputs if o]) == 1


def _rank(graph: Graph, name: str) -> int:
    return len(graph.types[name].shape)


def _of_image(node: Node, graph: Graph) -> tuple[str, int] | None:
    """Return the sequence that a view takes from or makes a window's image, and its unit axis."""
    names = node.inputs[0], node.outputs[0]
    by_rank = {_rank(graph, name): name for name in names}
    if set(by_rank) != {3, 4} or by_rank[3] in graph.constants:
        return None
    image, line = graph.types[by_rank[4]].shape, graph.types[by_rank[3]].shape
    for axis in (_AFTER_CHANNELS, _BEFORE_PLACES):
        if image[axis] == 1 and (*image[:axis], *image[axis + 1 :]) == line:
            return (by_rank[3], axis) if _meets_window(by_rank[4], graph) else None
    return None


def _meets_window(image: str, graph: Graph) -> bool:
    """Whether a window operator reads or makes `image`, with only moves and pads in between."""
    makers, readers = graph.producers(), graph.consumers()
    between = ("Transpose", "Pad", "Identity")
    name = image
    while (maker := makers.get(name)) is not None:
        if maker.op in _WINDOWS:
            return True
        if maker.op not in between:
            break
        name = maker.inputs[0]
    pending = [image]
    while pending:
        for reader in readers.get(pending.pop(), []):
            if reader.op in _WINDOWS:
                return True
            if reader.op in between:
                pending += reader.outputs
    return False


def _spread(node: Node, graph: Graph, where: dict[str, int]) -> None:
    """Propagate the position of the unit axis from any tensor of `node` to its other tensors."""
    lines = _lines(node, graph)
    known = [name for name in lines if name in where]
    if not known:
        return
    if node.op == "Transpose":
        if list(node.attrs["perm"]) == [0, 2, 1]:
            other = _BEFORE_PLACES + _AFTER_CHANNELS - where[known[0]]
            where.setdefault(next((n for n in lines if n != known[0]), known[0]), other)
    elif _spreads(node, graph, where[known[0]]):
        for name in lines:
            where.setdefault(name, where[known[0]])


def _lines(node: Node, graph: Graph) -> list[str]:
    """Return the computed tensors of rank 3 that `node` reads or makes."""
    names = [n for n in (*node.inputs, *node.outputs) if n and n not in graph.constants]
    return [n for n in names if _rank(graph, n) == 3]


def _spreads(node: Node, graph: Graph, axis: int) -> bool:
    if node.op in _BY_CHANNEL and axis != _AFTER_CHANNELS:
        return False
    if node.op not in _SPREAD or any(_rank(graph, o) != 3 for o in node.outputs if o):
        return False
    if node.op in ("Pad", "Slice", "Split") and any(i and i not in graph.constants
                                                    for i in node.inputs[1:]):  # fmt: skip
        return False
    given = graph.computed(node.inputs)
    return all(_rank(graph, i) in (0, 3) for i in given)


class _Lifter:
    """Rewrites nodes in order; `images` holds the tensors lifted so far."""

    def __init__(self, graph: Graph, where: dict[str, int]) -> None:
        self.graph, self.where = graph, where
        self.images: dict[str, str] = {}
        self.nodes: list[Node] = []

    def run(self) -> None:
        for node in self.graph.nodes:
            if not self._lift(node):
                self.nodes.append(node)
        self.graph.nodes = self.nodes
        self.graph.prune()

    def _lift(self, node: Node) -> bool:
        places = {self.where.get(name) for name in _lines(node, self.graph)}
        if node.op == "Transpose" and places == {_BEFORE_PLACES, _AFTER_CHANNELS}:
            return self._put(node, {}, {"perm": self._turn(node)})
        if None in places or len(places) != 1:
            return False
        (axis,) = places
        assert axis is not None
        if node.op in _SPATIAL and axis == _AFTER_CHANNELS and _single(node):
            self._note(node)
            return self._put(node, self._weights(node), _window_attrs(node))
        if node.op in ("ReduceMean", "ReduceMax", "ReduceSum"):
            return self._reduce(node, axis)
        if _spreads(node, self.graph, axis):
            return self._put(node, self._constants(node, axis), _axis_attrs(node, axis))
        return False

    def _turn(self, node: Node) -> list[int]:
        """Return the permutation of image axes that corresponds to one of a sequence."""
        return [0, 2, 3, 1] if self.where[node.inputs[0]] == _AFTER_CHANNELS else [0, 3, 1, 2]

    def _put(self, node: Node, replaced: dict[int, str], attrs: dict[str, object]) -> bool:
        """Append `node` on images, and views of its results as sequences."""
        inputs = [
            replaced[k] if k in replaced else self._image(name) if name in self.where else name
            for k, name in enumerate(node.inputs)
        ]
        outputs = [self.graph.fresh(f"{o}.image") if o else "" for o in node.outputs]
        made = Node(node.op, inputs, outputs, {**node.attrs, **attrs}, node.name, node.covers)
        infer_into(made, self.graph)
        self.nodes.append(made)
        for line, image in zip(node.outputs, outputs, strict=True):
            if line in self.where:
                self.images[line] = image
                axes = self._axes([self.where[line]], line)
                self.nodes.append(Node("Squeeze", [image, axes], [line], {}, line))
        return True

    def _axes(self, axes: list[int], stem: str) -> str:
        return self.graph.constant(np.array(axes, np.int64), f"{stem}.axes")

    def _image(self, line: str) -> str:
        if line not in self.images:
            image = self.graph.fresh(f"{line}.image")
            axes = self._axes([self.where[line]], line)
            node = Node("Unsqueeze", [line, axes], [image], {}, image)
            infer_into(node, self.graph)
            self.nodes.append(node)
            self.images[line] = image
        return self.images[line]

    def _weights(self, node: Node) -> dict[int, str]:
        if node.op not in ("Conv", "ConvTranspose"):
            return {}
        name = node.inputs[1]
        weight = np.expand_dims(self.graph.constants[name], _AFTER_CHANNELS)
        return {1: self.graph.constant(weight, name)}

    def _note(self, node: Node) -> None:
        """Keep the original description of a convolution for the report."""
        if node.op in ("Conv", "ConvTranspose"):
            out, weight = (self.graph.types[n].shape for n in (node.outputs[0], node.inputs[1]))
            self.graph.in_file.setdefault(node.name, (node.op, out, weight))

    def _constants(self, node: Node, axis: int) -> dict[int, str]:
        """Return the constants of `node` that depend on axes, with the unit axis inserted."""
        constants, found = self.graph.constants, {}
        if node.op in _BY_CHANNEL:
            return {}
        if node.op == "Pad":
            pads = constants[node.inputs[1]].reshape(2, -1)
            more = np.insert(pads, axis, 0, axis=1).reshape(-1)
            return {1: self.graph.constant(more, node.inputs[1])}
        if node.op == "Slice":
            given = constants.get(node.input(3))
            axes = np.arange(3)[: constants[node.inputs[1]].size] if given is None else given % 3
            if len(node.inputs) < 4:
                node.inputs += [""] * (4 - len(node.inputs))
            return {3: self._axes([_moved(int(a), axis) for a in axes], node.name)}
        if node.op == "Split":
            return {}
        for k, name in enumerate(node.inputs):
            if name in constants and (constants[name].size > 1 or node.op == "Concat"):
                value = constants[name]
                full = value.reshape((1,) * (3 - value.ndim) + value.shape)
                found[k] = self.graph.constant(np.expand_dims(full, axis), name)
        return found

    def _reduce(self, node: Node, axis: int) -> bool:
        """Reduce the unit axis along with the others."""
        given = self.graph.constants.get(node.input(1))
        if given is None or not given.size:
            return False
        axes = sorted({axis, *(_moved(int(a) % 3, axis) for a in given.reshape(-1))})
        if node.attrs.get("keepdims", 1):
            return self._put(node, {1: self._axes(axes, node.name)}, {})
        inputs = [self._image(node.inputs[0]), self._axes(axes, node.name)]
        self.nodes.append(
            Node(node.op, inputs, node.outputs, dict(node.attrs), node.name, node.covers)
        )
        return True


def _moved(place: int, axis: int) -> int:
    """Return the axis of the image that axis `place` of a sequence becomes."""
    return place + (place >= axis)


def _axis_attrs(node: Node, axis: int) -> dict[str, object]:
    return {"axis": _moved(int(node.attrs["axis"]) % 3, axis)} if "axis" in node.attrs else {}


def _window_attrs(node: Node) -> dict[str, object]:
    """Return the attributes of a window operator, with a window of 1 along the unit axis."""
    attrs: dict[str, object] = {}
    for key, neutral in _NEUTRAL.items():
        if node.attrs.get(key):
            attrs[key] = [neutral, *_ints(node.attrs[key])]
    if node.attrs.get("pads"):
        first, last = _ints(node.attrs["pads"])
        attrs["pads"] = [0, first, 0, last]
    if node.attrs.get("output_shape"):
        attrs["output_shape"] = [1, *_ints(node.attrs["output_shape"])]
    return attrs


def _ints(values: Iterable[int]) -> list[int]:
    return [int(v) for v in values]
