"""Extract the part of a graph on which parts of its outputs depend.

A *box* is a range for each axis. Going backwards, each node determines the boxes of its inputs that
a box of its output depends on; an operator without a rule depends on its whole inputs. The result
is a smaller graph, whose tensors are exactly those boxes of the original tensors. So a few pixels
of a large image, or one image of a batch, can be evaluated in a fraction of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bnncc.ir import numeric
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.operators import ELEMENTWISE
from bnncc.ir.quantizers import LEVELS, MULTI_THRESHOLD, QUANT
from bnncc.ir.resize import taps

Array = np.ndarray[Any, Any]
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Region:
    """Part of a graph."""

    graph: Graph
    """Tensors keep their names from the original graph."""
    boxes: dict[str, Box]
    """The box of each input and output in the original graph; outputs may exceed the request."""

    def of(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the inputs of `graph`, cut from those of the original graph."""
        return {name: feeds[name][slices(self.boxes[name])] for name in self.graph.inputs}


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index expression of a box."""
    return tuple(slice(low, high) for low, high in box)


def whole(shape: Iterable[Any]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, d) for d in shape)


def region(graph: Graph, wanted: Mapping[str, Box]) -> Region:
    """Return the part of `graph` on which boxes of its outputs depend.

    Parameters
    ----------
    graph : Graph
        In canonical form, with static shapes.
    wanted : mapping of str to Box
        By output, the box.
    """
    hulls: dict[str, Box] = {}

    def want(name: str, box: Box) -> None:
        if name not in graph.constants:
            hulls[name] = _union(hulls[name], box) if name in hulls else box

    for name in graph.outputs:
        want(name, wanted[name])
    reads: dict[int, _Read] = {}
    for number, node in reversed(list(enumerate(graph.nodes))):
        outs = [hulls.get(name) for name in node.outputs]
        if not any(outs):
            continue
        read = _read(graph, node, outs)
        for name, box in zip(node.outputs, read.outs, strict=True):
            if name in hulls and box is not None:
                hulls[name] = box
        for name, box in zip(node.inputs, read.needs, strict=True):
            if name and box is not None:
                want(name, box)
        reads[number] = read
    return _built(graph, hulls, reads)


def _built(graph: Graph, hulls: Mapping[str, Box], reads: Mapping[int, _Read]) -> Region:
    constants = {name: graph.constants[name] for name in graph.outputs if name in graph.constants}
    types = {name: _type(graph, name, box) for name, box in hulls.items()}
    types |= {name: graph.types[name] for name in constants}
    part = Graph(
        [], [i for i in graph.inputs if i in hulls], list(graph.outputs), constants, types,
        graph.source, datatypes=graph.datatypes,
    )  # fmt: skip
    for number in sorted(reads):
        node, read = graph.nodes[number], reads[number]
        ins = [
            _taken(part, graph, name, box, hulls)
            for name, box in zip(node.inputs, read.needs, strict=True)
        ]
        if not read.steps:
            attrs = {**node.attrs, **read.attrs}
            part.nodes.append(Node(node.op, ins, list(node.outputs), attrs, node.name))
        data = ins[0] if ins else ""
        for k, (op, others, attrs) in enumerate(read.steps):
            last = k == len(read.steps) - 1
            given = [part.constant(v) if isinstance(v, np.ndarray) else v for v in others]
            outs = list(node.outputs) if last else [part.fresh(node.outputs[0])]
            if not last:  # only a Gather has a second step
                shape = list(part.types[data].shape)
                shape[attrs["axis"]] = len(others[0])
                part.types[outs[0]] = TensorType(tuple(shape), part.types[data].dtype)
            part.nodes.append(Node(op, [data, *given], outs, dict(attrs), node.name))
            data = outs[0]
    boxes = {i: hulls[i] for i in part.inputs}
    for name in graph.outputs:
        boxes[name] = hulls.get(name, whole(_shape(graph, name)))
    return Region(part, boxes)


def _taken(part: Graph, graph: Graph, name: str, box: Box | None, hulls: Mapping[str, Box]) -> str:
    """Return the name of a box of a tensor, adding a constant or node if necessary."""
    if not name or box is None:
        return name
    if name in graph.constants:
        value = graph.constants[name]
        if box != whole(value.shape):
            return part.constant(value[slices(box)])
        part.constants[name], part.types[name] = value, graph.types[name]
        return name
    if box == hulls[name]:
        return name
    made = part.fresh(name)
    part.types[made] = _type(graph, name, box)
    starts = [low - first for (low, _), (first, _) in zip(box, hulls[name], strict=True)]
    ends = [high - first for (_, high), (first, _) in zip(box, hulls[name], strict=True)]
    axes = range(len(box))
    given = [part.constant(np.array(v, np.int64)) for v in (starts, ends, axes)]
    part.nodes.append(Node("Slice", [name, *given], [made], {}, made))
    return made


def _shape(graph: Graph, name: str) -> tuple[int, ...]:
    return tuple(int(d) for d in graph.types[name].shape)


def _type(graph: Graph, name: str, box: Box) -> TensorType:
    return TensorType(tuple(high - low for low, high in box), graph.types[name].dtype)


def _union(a: Box, b: Box) -> Box:
    return tuple((min(p[0], q[0]), max(p[1], q[1])) for p, q in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------ rules


@dataclass(frozen=True)
class _Read:
    """What a node reads for given boxes of its outputs.

    `outs` are the boxes that it computes, at least those requested; `needs` are those of its
    inputs; `attrs` are changed attributes. `steps`, if any, replace the node: a sequence of
    operators on the data, with further inputs and attributes.
    """

    outs: list[Box | None]
    needs: list[Box | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[tuple[str, list[Any], dict[str, Any]], ...] = ()


_Rule = Callable[[Graph, Node, Box], "_Read | None"]


def _read(graph: Graph, node: Node, outs: list[Box | None]) -> _Read:
    rule = _RULES.get(node.op)
    boxes = [box for box in outs if box is not None]
    first = boxes[0]
    if node.op == "Split":
        for box in boxes[1:]:  # they differ only along an axis that is read as a whole
            first = _union(first, box)
        rule = _split
    elif len([name for name in node.outputs if name]) > 1:
        rule = None
    found = rule(graph, node, first) if rule is not None else None
    if found is not None:
        return found
    return _Read(
        [whole(_shape(graph, o)) if o else None for o in node.outputs],
        [whole(_shape(graph, i)) if i else None for i in node.inputs],
    )


def _wholes(graph: Graph, names: list[str]) -> list[Box | None]:
    return [whole(_shape(graph, i)) if i else None for i in names]


def _along(box: Box, shape: tuple[Any, ...], axes: set[int]) -> Box:
    """Return `box`, extended to the full extent along `axes`."""
    return tuple((0, shape[k]) if k in axes else ends for k, ends in enumerate(box))


def _elementwise(graph: Graph, node: Node, out: Box) -> _Read | None:
    shape = _shape(graph, node.outputs[0])
    needs: list[Box | None] = []
    for name in node.inputs:
        if not name:
            needs.append(None)
            continue
        own = _shape(graph, name)
        start = len(shape) - len(own)
        if start < 0 or any(d not in (1, shape[start + k]) for k, d in enumerate(own)):
            return None
        needs.append(tuple(out[start + k] if d != 1 else (0, 1) for k, d in enumerate(own)))
    return _Read([out], needs)


def _normalized(graph: Graph, node: Node, out: Box) -> _Read | None:
    """Inference BatchNormalization: per-channel parameters."""
    if len(out) < 2:
        return None
    return _Read([out], [out, *[(out[1],)] * (len(node.inputs) - 1)])


def _quantized(graph: Graph, node: Node, out: Box) -> _Read | None:
    """Quantizers: one scale, or one per index of an axis, which is then read as a whole."""
    shape = _shape(graph, node.outputs[0])
    if any(math.prod(_shape(graph, i)) != 1 for i in node.inputs[1:] if i):
        out = _along(out, shape, {int(node.attrs.get("axis", 1)) % len(shape), min(1, len(out))})
        for name in node.inputs[1:]:
            own = _shape(graph, name) if name else ()
            if len(own) > 1 and any(
                d != 1 and out[k + len(out) - len(own)] != (0, d) for k, d in enumerate(own)
            ):
                return None
    return _Read([out], [out, *_wholes(graph, node.inputs[1:])])


def _per_channel(graph: Graph, node: Node, out: Box) -> _Read | None:
    """Operators with per-channel attributes or inputs (axis 1)."""
    if len(out) < 2:
        return None
    out = _along(out, _shape(graph, node.outputs[0]), {1})
    return _Read([out], [out, *_wholes(graph, node.inputs[1:])])


def _windows(
    out: Box, size: tuple[int, ...], kernel: list[int], attrs: dict[str, Any]
) -> tuple[Box, list[int]] | None:
    """Return the pixels that windows read, and the padding that remains."""
    strides, dilations, pads = numeric.window(attrs, size, kernel)
    box, begins, ends = [], [], []
    for k, (first, last) in enumerate(out[2:]):
        low = first * strides[k] - pads[k]
        high = (last - 1) * strides[k] - pads[k] + (kernel[k] - 1) * dilations[k] + 1
        if max(low, 0) >= min(high, size[k]):
            return None  # only padding
        box.append((max(low, 0), min(high, size[k])))
        begins.append(max(0, -low))
        ends.append(max(0, high - size[k]))
    return tuple(box), begins + ends


def _conv(graph: Graph, node: Node, out: Box) -> _Read | None:
    shape = _shape(graph, node.inputs[0])
    kernel = list(_shape(graph, node.inputs[1])[2:])
    found = _windows(out, shape[2:], kernel, node.attrs)
    if found is None:
        return None
    out = _along(out, _shape(graph, node.outputs[0]), {1})
    data = (out[0], (0, shape[1]), *found[0])
    return _Read(
        [out], [data, *_wholes(graph, node.inputs[1:])],
        {"pads": found[1], "auto_pad": "NOTSET"},
    )  # fmt: skip


def _conv_transpose(graph: Graph, node: Node, out: Box) -> _Read | None:
    shape = _shape(graph, node.inputs[0])
    size = [int(d) for d in shape[2:]]
    kernel = [int(k) for k in _shape(graph, node.inputs[1])[2:]]
    ones = [1] * len(size)
    attrs = node.attrs
    strides, dilations = (list(attrs.get(k) or ones) for k in ("strides", "dilations"))
    more = list(attrs.get("output_padding") or [0] * len(size))
    spans = numeric.window_spans(kernel, dilations)
    full = [
        s * (n - 1) + span + m for s, n, span, m in zip(strides, size, spans, more, strict=True)
    ]
    pads = numeric.transposed_pads(attrs, size, strides, full)
    box, begins, ends = [], [], []
    for k, (first, last) in enumerate(out[2:]):
        start, stop = first + pads[k], last + pads[k]
        low = max(0, -(-(start - spans[k] + 1) // strides[k]))
        high = min(size[k], (stop - 1) // strides[k] + 1)
        if low >= high:
            return None
        box.append((low, high))
        begins.append(start - low * strides[k])
        ends.append((high - 1 - low) * strides[k] + spans[k] - (stop - low * strides[k]))
    out = _along(out, _shape(graph, node.outputs[0]), {1})
    plain = {"pads": begins + ends, "auto_pad": "NOTSET", "output_padding": [], "output_shape": []}
    data = (out[0], (0, shape[1]), *box)
    return _Read([out], [data, *_wholes(graph, node.inputs[1:])], plain)


def _pool(graph: Graph, node: Node, out: Box) -> _Read | None:
    if node.op == "AveragePool" and node.attrs.get("ceil_mode"):
        return None  # elements beyond the padding do not count in averages
    shape = _shape(graph, node.inputs[0])
    kernel = list(node.attrs["kernel_shape"])
    found = _windows(out, shape[2:], kernel, node.attrs)
    if found is None:
        return None
    data = (out[0], out[1], *found[0])
    return _Read([out], [data], {"pads": found[1], "auto_pad": "NOTSET", "ceil_mode": 0})


def _global(graph: Graph, node: Node, out: Box) -> _Read | None:
    shape = _shape(graph, node.inputs[0])
    return _Read([out], [(out[0], out[1], *whole(shape[2:]))])


def _transpose(graph: Graph, node: Node, out: Box) -> _Read | None:
    order = list(node.attrs.get("perm") or range(len(out))[::-1])
    data: list[Any] = [None] * len(out)
    for k, axis in enumerate(order):
        data[axis] = out[k]
    return _Read([out], [tuple(data)])


def _concat(graph: Graph, node: Node, out: Box) -> _Read | None:
    axis = int(node.attrs["axis"]) % len(out)
    out = _along(out, _shape(graph, node.outputs[0]), {axis})
    return _Read([out], [_along(out, _shape(graph, i), {axis}) for i in node.inputs])


def _split(graph: Graph, node: Node, out: Box) -> _Read | None:
    axis = int(node.attrs.get("axis", 0)) % len(out)
    outs: list[Box | None] = [
        _along(out, _shape(graph, o), {axis}) if o else None for o in node.outputs
    ]
    data = _along(out, _shape(graph, node.inputs[0]), {axis})
    return _Read(outs, [data, *_wholes(graph, node.inputs[1:])])


def _slice(graph: Graph, node: Node, out: Box) -> _Read | None:
    axes = graph.constants.get(node.input(3))
    if axes is None:
        return None
    touched = {int(a) % len(out) for a in axes}
    out = _along(out, _shape(graph, node.outputs[0]), touched)
    data = _along(out, _shape(graph, node.inputs[0]), touched)
    return _Read([out], [data, *_wholes(graph, node.inputs[1:])])


def _rows(graph: Graph, node: Node, out: Box) -> _Read | None:
    """Reshapes that keep the first axis, so that rows remain separate."""
    before, after = _shape(graph, node.inputs[0]), _shape(graph, node.outputs[0])
    if not before or not after or before[0] != after[0] or 0 in (*before, *after):
        return None
    rows = out[0]
    target = np.array([rows[1] - rows[0], *after[1:]], np.int64)
    return _Read(
        [(rows, *whole(after[1:]))],
        [(rows, *whole(before[1:])), *_wholes(graph, node.inputs[1:])],
        steps=(("Reshape", [target], {}),),
    )


def _images(graph: Graph, node: Node, out: Box) -> _Read | None:
    """Operators that treat the images of a batch separately."""
    before, after = _shape(graph, node.inputs[0]), _shape(graph, node.outputs[0])
    if len(after) < 2 or before[0] != after[0]:
        return None
    return _Read(
        [(out[0], *whole(after[1:]))],
        [(out[0], *whole(before[1:])), *_wholes(graph, node.inputs[1:])],
    )


def _last_axes(graph: Graph, node: Node, out: Box) -> _Read | None:
    """Map normalizations over the last axes, starting at attribute `axis`."""
    axis = int(node.attrs.get("axis", -1)) % len(out)
    out = _along(out, _shape(graph, node.outputs[0]), set(range(axis, len(out))))
    return _Read([out], [out, *_wholes(graph, node.inputs[1:])])


def _one_axis(graph: Graph, node: Node, out: Box) -> _Read | None:
    axis = int(node.attrs.get("axis", -1)) % len(out)
    out = _along(out, _shape(graph, node.outputs[0]), {axis})
    return _Read([out], [out])


def _reduced(graph: Graph, node: Node, out: Box) -> _Read | None:
    shape = _shape(graph, node.inputs[0])
    if node.op in ("ArgMax", "ArgMin"):
        axes = [int(node.attrs.get("axis", 0))]
    else:
        given = graph.constants.get(node.input(1))
        if given is None or not given.size:
            return None
        axes = [int(a) for a in given]
    gone = {a % len(shape) for a in axes}
    left = iter(out)
    data = []
    for k, extent in enumerate(shape):
        if k not in gone:
            data.append(next(left))
            continue
        data.append((0, extent))
        if node.attrs.get("keepdims", 1):
            next(left)
    return _Read([out], [tuple(data), *_wholes(graph, node.inputs[1:])])


def _pad(graph: Graph, node: Node, out: Box) -> _Read | None:
    pads = graph.constants.get(node.inputs[1])
    given = graph.constants.get(node.inputs[3]) if len(node.inputs) > 3 else np.arange(len(out))
    if pads is None or given is None or node.attrs.get("mode", "constant") != "constant":
        return None
    shape = [int(d) for d in _shape(graph, node.inputs[0])]
    before = [0] * len(shape)
    for k, axis in enumerate(given.tolist()):
        before[axis % len(shape)] = int(pads[k])
    data, begins, ends = [], [], []
    for k, (first, last) in enumerate(out):
        low, high = first - before[k], last - before[k]
        if max(low, 0) >= min(high, shape[k]):
            return None
        data.append((max(low, 0), min(high, shape[k])))
        begins.append(max(0, -low))
        ends.append(max(0, high - shape[k]))
    value = node.inputs[2:3] if len(node.inputs) > 2 else []
    return _Read(
        [out], [tuple(data), *_wholes(graph, node.inputs[1:])],
        steps=(("Pad", [np.array(begins + ends, np.int64), *value], dict(node.attrs)),),
    )  # fmt: skip


def _gemm(graph: Graph, node: Node, out: Box) -> _Read | None:
    if node.attrs.get("transA"):
        return None
    a, b = (_shape(graph, i) for i in node.inputs[:2])
    out = _along(out, _shape(graph, node.outputs[0]), {1})
    needs: list[Box | None] = [(out[0], *whole(a[1:])), whole(b)]
    for name in node.inputs[2:]:
        own = _shape(graph, name) if name else ()
        rows = len(own) == 2 and own[0] != 1
        needs.append((out[0], *whole(own[1:])) if rows else whole(own) if name else None)
    return _Read([out], needs)


def _matmul(graph: Graph, node: Node, out: Box) -> _Read | None:
    a, b = (_shape(graph, i) for i in node.inputs)
    shape = _shape(graph, node.outputs[0])
    if len(a) < 2 or len(b) < 2:
        return None
    if len(b) == 2:
        out = _along(out, shape, {len(out) - 1})
        return _Read([out], [(*out[:-1], (0, a[-1])), whole(b)])
    if len(a) != len(b) or a[0] != b[0]:
        return None
    out = (out[0], *whole(shape[1:]))
    return _Read([out], [(out[0], *whole(a[1:])), (out[0], *whole(b[1:]))])


def _depth_to_space(graph: Graph, node: Node, out: Box) -> _Read | None:
    size = int(node.attrs["blocksize"])
    data = tuple((low // size, -(-high // size)) for low, high in out[2:])
    made = tuple((low * size, high * size) for low, high in data)
    channels = (0, _shape(graph, node.inputs[0])[1])
    every = (0, _shape(graph, node.outputs[0])[1])
    return _Read([(out[0], every, *made)], [(out[0], channels, *data)])


def _space_to_depth(graph: Graph, node: Node, out: Box) -> _Read | None:
    size = int(node.attrs["blocksize"])
    data = tuple((low * size, high * size) for low, high in out[2:])
    channels = (0, _shape(graph, node.inputs[0])[1])
    out = _along(out, _shape(graph, node.outputs[0]), {1})
    return _Read([out], [(out[0], channels, *data)])


def _resize(graph: Graph, node: Node, out: Box) -> _Read | None:
    """Resize by pixel repetition or subsampling, as a Gather."""
    shape = tuple(int(d) for d in _shape(graph, node.inputs[0]))
    given = [None, *(graph.constants.get(i) if i else None for i in node.inputs[1:])]
    if any(i and v is None for i, v in zip(node.inputs[1:], given[1:], strict=True)):
        return None
    tables = taps(node.attrs, given, shape)
    if not all(t.plain and not t.outside.any() for t in tables):
        return None
    data, steps = list(whole(shape)), []
    for axis, ends in enumerate(out):
        data[axis] = ends
    for table in tables:
        index = table.index[slice(*out[table.axis]), 0]
        low, high = int(index.min()), int(index.max()) + 1
        data[table.axis] = low, high
        steps.append(("Gather", [(index - low).astype(np.int64)], {"axis": table.axis}))
    needs: list[Box | None] = [tuple(data), *_wholes(graph, node.inputs[1:])]
    return _Read([out], needs, steps=tuple(steps)) if steps else None


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "BatchNormalization": _normalized,
    "DequantizeLinear": _quantized,
    "QuantizeLinear": _quantized,
    QUANT: _elementwise,
    MULTI_THRESHOLD: _per_channel,
    LEVELS: _per_channel,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "GlobalAveragePool": _global,
    "GlobalMaxPool": _global,
    "Transpose": _transpose,
    "Concat": _concat,
    "Slice": _slice,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _rows),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization", "LRN"), _images),
    "LayerNormalization": _last_axes,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _one_axis),
    **dict.fromkeys(
        ("ArgMax", "ArgMin", *(f"Reduce{op}" for op in ("Max", "Mean", "Min", "Prod", "Sum", "L1",
                                                        "L2", "SumSquare"))),
        _reduced,
    ),
    "Pad": _pad,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Resize": _resize,
}  # fmt: skip
"""Rules for the input boxes of operators; others read their whole inputs."""
