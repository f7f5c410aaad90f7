"""Value sets: which tensors hold only two values (or three: with zero), and through what.

`bnncc.Sign` makes such a tensor; max-pooling, padding, concatenation and moves of whole channels
keep it one. Everything else is real. A convolution is binary when its data is in this table and its
weights are two-valued per output channel (`binary_weight`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.image_bits import IMAGE_BITS
from bnncc.ir.moves import MOVES, PIXEL_SHUFFLES, REPEATS

WEIGHT_TOLERANCE = 1e-5
"""Relative spread of ``|w|`` within one filter that still counts as one magnitude. STE residues
left in trained weights measure up to 4e-6; a larger bound would change results."""


_UNEVEN = 1e-6
"""Part of the largest value by which a middle one may be off the middle: float32 rounds."""


@dataclass(frozen=True)
class TwoValued:
    """The value set ``{lo, hi}``, or ``{lo, (lo + hi) / 2, hi}`` if `zero`.

    Attributes
    ----------
    lo, hi : float
        Value of bit 0 and of bit 1.
    zero : bool
        Whether the middle value may occur.
    """

    lo: float
    hi: float
    zero: bool = False

    @property
    def bipolar(self) -> bool:
        """Whether the values are -a and +a."""
        return self.lo == -self.hi


def binary_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Split weights into signs and one scale per output channel.

    Parameters
    ----------
    weight : ndarray of float, shape (out_channels, ...)
        Filters.

    Returns
    -------
    bits : ndarray of bool, same shape
        True where the weight is positive (anything in an all-zero filter).
    scale : ndarray of float64, shape (out_channels,)
        ``weight == scale * (2 * bits - 1)`` within `WEIGHT_TOLERANCE`; zero for all-zero filters.
        None is returned if some filter is not two-valued.
    """
    flat = np.abs(weight.reshape(weight.shape[0], -1).astype(np.float64))
    if flat.shape[1] == 0:
        return None
    top = flat.max(axis=1)
    if (top - flat.min(axis=1) > WEIGHT_TOLERANCE * top).any() or not top.any():
        return None
    exact = (flat == top[:, None]).all(axis=1)
    scale = np.where(exact, top, flat.mean(axis=1))
    return weight > 0, scale


def two_valued_filters(filters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return filters of two values each as signs around a middle.

    Parameters
    ----------
    filters : ndarray, shape (out_channels, ...)
        Weights.

    Returns
    -------
    tuple or None
        Bits of the shape of `filters`; half the distance and the middle of each filter, float64.
    """
    flat = filters.reshape(len(filters), -1).astype(np.float64)
    if not flat.size:
        return None
    low, high = flat.min(axis=1), flat.max(axis=1)
    bits = flat > ((low + high) / 2)[:, None]
    near = WEIGHT_TOLERANCE * np.maximum(np.abs(low), np.abs(high))[:, None]
    if (np.abs(flat - np.where(bits, high[:, None], low[:, None])) > near).any():
        return None
    count = bits.sum(axis=1)
    upper = np.where(count, (flat * bits).sum(axis=1) / np.maximum(count, 1), high)
    rest = flat.shape[1] - count
    lower = np.where(rest, (flat * ~bits).sum(axis=1) / np.maximum(rest, 1), low)
    return bits.reshape(filters.shape), (upper - lower) / 2, (upper + lower) / 2


def value_sets(graph: Graph) -> dict[str, TwoValued]:
    """Return the two- and three-valued tensors of `graph`.

    Parameters
    ----------
    graph : Graph
        After `recognise_signs`.

    Returns
    -------
    dict of str to TwoValued
        Real tensors are not in it.
    """
    table: dict[str, TwoValued] = {}
    for node in graph.nodes:
        transfer = _TRANSFER.get(node.op)
        if transfer is None:
            continue
        value = transfer(node, graph, table)
        if value is not None:
            for out in node.outputs:
                if out:
                    table[out] = value
    return table


def pad_of(node: Node, graph: Graph) -> tuple[tuple[int, int, int, int], float] | None:
    """Return ``((top, left, bottom, right), value)`` of a `Pad` that pads an image by a constant.

    Parameters
    ----------
    node : Node
        A `Pad` node.
    graph : Graph
        Its graph.

    Returns
    -------
    tuple or None
        None for other modes, negative pads, padded batch or channels, or pads not known.
    """
    if (
        str(node.attrs.get("mode", "constant")) != "constant"
        or len(graph.types[node.inputs[0]].shape) != 4
    ):
        return None
    given = [*node.inputs[1:], "", "", ""][:3]
    if given[2] or any(i and i not in graph.constants for i in given) or not given[0]:
        return None
    pads = [int(p) for p in graph.constants[given[0]].reshape(-1)]
    if len(pads) != 8 or any(pads[i] for i in (0, 1, 4, 5)) or min(pads) < 0:
        return None
    value = float(graph.constants[given[1]].reshape(-1)[0]) if given[1] else 0.0
    return (pads[2], pads[3], pads[6], pads[7]), value


def channel_index(
    node: Node, output: int, graph: Graph, maps: dict[str, np.ndarray]
) -> np.ndarray | None:
    """Follow channels through an operator that only moves elements.

    Parameters
    ----------
    node : Node
        Reshape, Transpose, Slice, Split, Gather, Squeeze, Unsqueeze or Flatten.
    output : int
        Which of its outputs.
    graph : Graph
        Its graph.
    maps : dict of str to ndarray
        For tensors on the way, the element numbers of the origin tensor (batch 1) they hold.

    Returns
    -------
    ndarray or None
        Element numbers of the output, or None if they cannot be followed.
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
    except Exception:  # an operator form that does not make sense for batch 1
        return None


def as_channel_map(elements: np.ndarray, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Read element numbers as a move of whole channels.

    Parameters
    ----------
    elements : ndarray of int, shape (1, out_channels, height, width) or (1, out_channels)
        Element numbers of the origin tensor.
    shape : tuple of int
        Origin shape without the batch: ``(channels, height, width)`` or ``(channels,)``.

    Returns
    -------
    tuple of int or None
        Origin channel of each output channel, or None if it is not such a move.
    """
    if elements.ndim != len(shape) + 1 or elements.shape[0] != 1 or elements.shape[2:] != shape[1:]:
        return None
    area = int(np.prod(shape[1:], dtype=np.int64))
    first = elements.reshape(elements.shape[1], area)
    index = first[:, 0] // area
    if not (first == index[:, None] * area + np.arange(area)).all():
        return None
    return tuple(int(i) for i in index)


def _sign(node: Node, graph: Graph, table: dict[str, TwoValued]) -> TwoValued | None:
    return TwoValued(float(node.attrs["lo"]), float(node.attrs["hi"]), node.attrs["zero"] == "mid")


def _image_bits(node: Node, graph: Graph, table: dict[str, TwoValued]) -> TwoValued | None:
    return TwoValued(float(node.attrs["lo"]), float(node.attrs["hi"]))


def _same(node: Node, graph: Graph, table: dict[str, TwoValued]) -> TwoValued | None:
    if node.op in ("MaxPool", "bnncc.BitPool") and not pools_images(node, graph):
        return None
    return table.get(node.inputs[0])


def pools_images(node: Node, graph: Graph) -> bool:
    """Whether a max-pooling is one of images, and each of its windows meets the image.

    A window wholly in the padding gives -inf, which is no value of the data.
    """
    shape, out = graph.types[node.inputs[0]].shape, graph.types[node.outputs[0]].shape
    if len([o for o in node.outputs if o]) > 1 or len(shape) != 4:
        return False
    a = node.attrs
    for axis, (size, made) in enumerate(zip(shape[2:], out[2:], strict=True)):
        if not isinstance(size, int) or not isinstance(made, int):
            return False
        first = np.arange(made) * int(a["strides"][axis]) - int(a["pads"][axis])
        reach = np.arange(int(a["kernel_shape"][axis])) * int((a.get("dilations") or (1, 1))[axis])
        taps = first[:, None] + reach
        if not ((taps >= 0) & (taps < size)).any(axis=1).all():
            return False
    return True


def copies_pixels(node: Node) -> bool:
    """Whether a `Resize` only copies: to the nearest pixel, with nothing around the image."""
    outside = node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    return str(node.attrs.get("mode", "nearest")) == "nearest" and not outside


def _resize(node: Node, graph: Graph, table: dict[str, TwoValued]) -> TwoValued | None:
    return table.get(node.inputs[0]) if copies_pixels(node) else None


def _pad(node: Node, graph: Graph, table: dict[str, TwoValued]) -> TwoValued | None:
    value = table.get(node.inputs[0])
    if value is None or str(node.attrs.get("mode", "constant")) != "constant":
        return value
    given = [*node.inputs[1:], "", ""][:2]
    if any(i and i not in graph.constants for i in given):
        return None
    pads = graph.constants[given[0]]
    fill = float(graph.constants[given[1]].reshape(-1)[0]) if given[1] else 0.0
    if (pads <= 0).all() or fill in (value.lo, value.hi):
        return value
    return TwoValued(value.lo, value.hi, True) if fill == 0.0 and value.bipolar else None


def _concat(node: Node, graph: Graph, table: dict[str, TwoValued]) -> TwoValued | None:
    known = [table[i] for i in node.inputs if i in table]
    others = [i for i in node.inputs if i not in table]
    if len({(v.lo, v.hi) for v in known}) != 1 or any(i not in graph.constants for i in others):
        return None
    lo, hi, zero = known[0].lo, known[0].hi, any(v.zero for v in known)
    for name in others:  # padding by concatenation with constants
        held = set(np.unique(graph.constants[name]).tolist()) - {lo, hi}
        if held - {0.0} or (held and lo != -hi):
            return None
        zero = zero or bool(held)
    return TwoValued(lo, hi, zero)


def _all_same(node: Node, graph: Graph, table: dict[str, TwoValued]) -> TwoValued | None:
    known = [table.get(i) for i in node.inputs]
    held = [v for v in known if v is not None]
    if len(held) != len(known) or len({(v.lo, v.hi) for v in held}) != 1:
        return None
    return TwoValued(held[0].lo, held[0].hi, any(v.zero for v in held))


def _remap(node: Node, graph: Graph, table: dict[str, TwoValued]) -> TwoValued | None:
    """Apply an elementwise operator with scalar constants to the values themselves."""
    data = [i for i in node.inputs if i and i not in graph.constants]
    value = table.get(data[0]) if len(data) == 1 else None
    if value is None or graph.types[node.outputs[0]] != graph.types[data[0]]:
        return None
    if any(graph.constants[i].size != 1 for i in node.inputs if i and i != data[0]):
        return None
    values = np.array([value.lo, (value.lo + value.hi) / 2, value.hi], np.float32)
    args = [
        None if not i else values if i == data[0] else graph.constants[i].reshape(())
        for i in node.inputs
    ]
    low, middle, high = (float(v) for v in evaluate_node(node, args)[0])
    if low == high or not np.isfinite(low) or not np.isfinite(high):
        return None
    if value.zero and abs(middle - (low + high) / 2) > _UNEVEN * max(abs(low), abs(high)):
        return None
    return TwoValued(low, high, value.zero)


REMAPS = {"Neg", "Mul", "Add", "Sub", "Div", "Clip", "Relu"}
"""Elementwise operators that change what bits mean, not the bits."""

_TRANSFER = {
    "bnncc.Sign": _sign,
    IMAGE_BITS: _image_bits,
    "bnncc.BitPool": _same,
    "bnncc.Interleave": _all_same,
    "MaxPool": _same,
    "Pad": _pad,
    "Concat": _concat,
    "Resize": _resize,
    **dict.fromkeys(MOVES | PIXEL_SHUFFLES | REPEATS, _same),
    **dict.fromkeys(REMAPS, _remap),
}
