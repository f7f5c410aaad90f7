"""Data movement of bits, on packed words.

before: a = Sign(x); b = Sign(y); c = Concat(a, b); p = MaxPool(c)
after:  c = concat_bits(a, b); p = bitwise_maxpool(c)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bnncc.ir.dims import is_static
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.moves import MOVES
from bnncc.recognise.lattice import REMAPS
from bnncc.recognise.operands import pad_of
from bnncc.topi_binary.layout import pack_bits, words
from bnncc.topi_binary.spec import BitwiseMaxPool, PadBits, ceil_extra
from bnncc.transform.physical import Physical, Planes

ROUTES = MOVES | REMAPS | {"MaxPool", "bnncc.BitPool", "Pad", "Concat"}
"""Operators that `Router` handles."""


class Router:
    """Applies data movement to planes of bits.

    Parameters
    ----------
    physical : Physical
        The graph under construction.
    """

    def __init__(self, physical: Physical) -> None:
        self.physical = physical
        self._elements: dict[str, np.ndarray] = {}
        self._origin: dict[str, str] = {}

    def route(self, node: Node) -> bool:
        """Append kernels for `node` if its inputs are available as planes.

        Parameters
        ----------
        node : Node
            Its operator is in `ROUTES`.

        Returns
        -------
        bool
            False if the node must be computed in float.
        """
        planes = self.physical.planes
        if node.op in MOVES:
            return self._move(node)
        if node.op in REMAPS:
            data = next(i for i in node.inputs if i and i not in self.physical.source.constants)
            if data in planes:
                value = self.physical.lattices[node.outputs[0]]
                planes[node.outputs[0]] = replace(planes[data], value=value)
            return data in planes
        if any(i not in planes for i in (node.inputs if node.op == "Concat" else node.inputs[:1])):
            return False
        if node.op == "Pad":
            return self._pad(node)
        if node.op == "Concat":
            return self._concat(node)
        return self._pool(node)

    def _move(self, node: Node) -> bool:
        data = node.inputs[0]
        if data in self.physical.planes:
            shape = self.physical.shape(data)
            if not is_static(shape[1:]):
                return False
            count = int(np.prod(shape[1:], dtype=np.int64))  # type: ignore[arg-type]
            self._elements[data] = np.arange(count).reshape(1, *shape[1:])
            self._origin[data] = data
        if data not in self._elements:
            return False
        origin = self._origin[data]
        done = True
        for position, out in enumerate(node.outputs):
            elements = channel_index(node, position, self.physical.source, self._elements)
            if not out or elements is None or elements.shape != (1, *self.physical.shape(out)[1:]):
                done = False
                continue
            self._elements[out], self._origin[out] = elements, origin
            if self._settle(out, origin, elements):
                continue
            if self._only_moves_follow(out):
                self.physical.postpone(node)
            else:
                done = False
        return done

    def _settle(self, out: str, origin: str, elements: np.ndarray) -> bool:
        """Create the planes of `out`, if it consists of whole channels of `origin`."""
        source = self.physical.shape(origin)
        shape = self.physical.shape(out)
        if len(shape) not in (2, 4) or len(source) not in (2, 4):
            return False
        area = source[2:] if len(source) == 4 else ()
        target = shape[2:] if len(shape) == 4 else ()
        if np.prod(area, initial=1) == 1 and np.prod(target, initial=1) == 1:  # type: ignore[arg-type]
            index: tuple[int, ...] | None = tuple(int(i) for i in elements.reshape(-1))
        elif len(shape) == len(source):
            index = as_channel_map(elements, source[1:])  # type: ignore[arg-type]
        else:
            index = None
        if index is None:
            return False
        from_planes = self.physical.planes[origin]

        def pick(plane: str) -> str:
            picked = self.physical.pick(plane, origin, index)
            packed = words(len(index))
            view = (shape[0], *target, packed) if len(shape) == 4 else (shape[0], packed)
            return self.physical.reshape(picked, view)

        zero = pick(from_planes.zero) if from_planes.zero else None
        self.physical.planes[out] = Planes(pick(from_planes.sign), zero, from_planes.value)
        return True

    def _only_moves_follow(self, out: str) -> bool:
        """Whether `out` may need no form of its own, e.g. inside a channel shuffle."""
        readers = [n for n in self.physical.source.nodes if out in n.inputs]
        return (
            out not in self.physical.source.outputs
            and all(r.op in MOVES for r in readers)
            and bool(readers)
        )

    def _pad(self, node: Node) -> bool:
        pad = pad_of(node, self.physical.source)
        if pad is None:
            return False
        pads, value = pad
        have = self.physical.planes[node.inputs[0]]
        n, channels, height, width, _ = self.physical.image(node.inputs[0])
        middle = value == 0.0 and have.value.bipolar

        def padded(plane: str, bit: int, what: str) -> str:
            out = self.physical.graph.fresh(f"{node.outputs[0]}.{what}")
            spec = PadBits(n, height, width, channels, pads, bit)
            self.physical.kernel(spec, [plane], [out], node.name)
            return out

        sign = padded(have.sign, int(value == have.value.hi or middle), "bits")
        zero = have.zero
        if zero is None and middle and any(pads):
            zero = self.no_bits(node.inputs[0])
        if zero is not None:
            zero = padded(zero, int(middle), "zero")
        two = have.value.with_zero(zero is not None)
        self.physical.planes[node.outputs[0]] = Planes(sign, zero, two)
        return True

    def no_bits(self, name: str) -> str:
        """Return a plane of `name` with all bits 0."""
        _, channels, *_ = self.physical.image(name)
        return self.physical.pick(self.physical.planes[name].sign, name, (-1,) * channels)

    def _concat(self, node: Node) -> bool:
        rank = len(self.physical.shape(node.outputs[0]))
        if rank not in (2, 4) or int(node.attrs["axis"]) % rank != 1:
            return False
        parts = [self.physical.planes[i] for i in node.inputs]
        sign = self.physical.concat([p.sign for p in parts], node.inputs, node.outputs[0])
        zero = None
        if any(p.zero for p in parts):
            zeros = [p.zero or self.no_bits(i) for p, i in zip(parts, node.inputs, strict=True)]
            zero = self.physical.concat(zeros, node.inputs, node.outputs[0])
        two = self.physical.lattices[node.outputs[0]].with_zero(zero is not None)
        self.physical.planes[node.outputs[0]] = Planes(sign, zero, two)
        return True

    def _pool(self, node: Node) -> bool:
        have = self.physical.planes[node.inputs[0]]
        flip = node.attrs.get("flip")
        minimum = node.op == "MaxPool" and have.value.lo > have.value.hi
        spec = replace(pool_spec(node, self.physical), minimum=minimum, flip=flip is not None)

        def pooled(plane: str) -> str:
            inputs = [plane]
            if flip is not None:
                inputs.append(
                    self.physical.constant(pack_bits(np.asarray(flip, bool)), f"{node.name}.flip")
                )
            name = self.physical.graph.fresh(f"{node.outputs[0]}.bits")
            self.physical.kernel(spec, inputs, [name], node.name)
            return name

        sign = pooled(have.sign)
        zero = None
        if have.zero is not None:  # positive = sign ^ zero, since zero bits are also set in sign
            positive = pooled(self.physical.xor(have.sign, have.zero))
            zero = self.physical.xor(sign, positive)
        self.physical.planes[node.outputs[0]] = Planes(sign, zero, have.value)
        return True


def pool_spec(node: Node, physical: Physical) -> BitwiseMaxPool:
    """Return the max-pooling of an image as one of packed bits."""
    n, channels, height, width, _ = physical.image(node.inputs[0])
    out = physical.source.types[node.outputs[0]].shape
    a = node.attrs
    kernel, strides, pads = tuple(a["kernel_shape"]), tuple(a["strides"]), tuple(a["pads"])
    dilations = tuple(a.get("dilations", (1, 1)))
    rows, columns = (
        ceil_extra(int(out[2 + i]), size, kernel[i], strides[i], dilations[i],
                   pads[i] + pads[i + 2])
        for i, size in enumerate((height, width))
    )  # fmt: skip
    return BitwiseMaxPool(
        n, height, width, channels, kernel, strides, dilations, pads, (rows, columns)
    )


def channel_index(
    node: Node, output: int, graph: Graph, maps: dict[str, np.ndarray]
) -> np.ndarray | None:
    """Track channels through an operator that only moves elements.

    Parameters
    ----------
    node : Node
        Reshape, Transpose, Slice, Split, Gather, Squeeze, Unsqueeze or Flatten.
    output : int
        Index of the output.
    maps : dict of str to ndarray
        By tensor, the indices of the elements of the origin tensor (batch 1) that it holds.

    Returns
    -------
    ndarray or None
        Element indices of the output, or None if they cannot be tracked.
    """
    origin = maps.get(node.inputs[0])
    if origin is None:
        return None
    args: list[np.ndarray | None] = [origin]
    for name in node.inputs[1:]:
        if name and name not in graph.constants:
            return None
        args.append(graph.constants[name] if name else None)
    if node.op == "Reshape" and args[1] is not None:
        target = args[1].copy()
        batch = graph.types[node.inputs[0]].shape[0]
        if len(target) and graph.types[node.outputs[0]].shape[0] == batch:
            target[0] = 1
        args[1] = target
    try:
        return np.asarray(evaluate_node(node, args)[output])
    except Exception:  # a form of the operator that is invalid for batch 1
        return None


def as_channel_map(elements: np.ndarray, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Interpret element indices as a movement of whole channels.

    Parameters
    ----------
    elements : ndarray of int, shape (1, out_channels, height, width) or (1, out_channels)
        Indices of elements of the origin tensor.
    shape : tuple of int
        Origin shape without the batch: ``(channels, height, width)`` or ``(channels,)``.

    Returns
    -------
    tuple of int or None
        Origin channel of each output channel, or None if other than whole channels move.
    """
    if elements.ndim != len(shape) + 1 or elements.shape[0] != 1 or elements.shape[2:] != shape[1:]:
        return None
    area = int(np.prod(shape[1:], dtype=np.int64))
    first = elements.reshape(elements.shape[1], area)
    index = first[:, 0] // area
    if not (first == index[:, None] * area + np.arange(area)).all():
        return None
    return tuple(int(i) for i in index)
