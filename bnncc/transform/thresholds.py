"""Turn ``sign(f(conv))`` into integer thresholds on the accumulator.

    before: y = BinaryConv(x); z = BatchNormalization(y); b = bnncc.Sign(z)
    after:  b[c] = acc <= thr[c]

Thresholds are found by evaluating the graph's own float32 expression on every value of the dot
product, not by a division, so rounding is taken into account exactly. The same table shows whether
an exact zero can occur before the sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node

ALWAYS, NEVER = 2**30, -(2**30)
"""Thresholds that every sum meets, and none. Not the limits of int32: TVM moves terms of a sum to
the other side of the comparison, as if nothing overflowed."""
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Planes:
    """Result of a sign for every attainable dot product of every channel."""

    dots: np.ndarray
    """int64, shape (D,): attainable dot products, ascending."""
    ge: np.ndarray
    gt: np.ndarray
    """`ge`, `gt` (bool, shape (D, channels)): whether the value before the sign is >= 0, and
    whether it is > 0."""

    @property
    def zero_attainable(self) -> bool:
        """Whether the value before the sign can be exactly zero."""
        return bool((self.ge != self.gt).any())


@dataclass(frozen=True)
class Direction:
    """Direction of each channel's step as a function of the dot product."""

    up: np.ndarray
    down: np.ndarray
    """`up`, `down` (bool, shape (channels,)): neither is set for constant channels; both are set
    if there is more than one step."""

    @property
    def single(self) -> bool:
        """Whether every channel is a single step or constant."""
        return not bool((self.up & self.down).any())


def attainable_dots(taps: int, *, any_parity: bool) -> np.ndarray:
    """Return the attainable values of a dot product of `taps` signs.

    Parameters
    ----------
    taps : int
        Number of products, K.
    any_parity : bool
        Whether products may be missing (zero padding, zeros in the data, data in {0, 1}).

    Returns
    -------
    ndarray of int64
        Ascending, from -K to K.
    """
    return np.arange(-taps, taps + 1, 1 if any_parity else 2, dtype=np.int64)


def tabulate(
    graph: Graph,
    chain: Sequence[Node],
    scale: np.ndarray,
    bias: np.ndarray,
    dots: np.ndarray,
    rank: int,
    lift: Sequence[np.ndarray | int] = (1, 0),
) -> Planes:
    """Evaluate the expression between a binary layer and a sign on all attainable dot products.

    Parameters
    ----------
    graph : Graph
        Holds the constants.
    chain : sequence of Node
        Elementwise nodes with per-channel constants, in order; may be empty.
    scale, bias : ndarray of float64, shape (channels,)
        The layer's output is ``float32(scale * (step * dot + first) + bias)``.
    dots : ndarray of int64
        From `attainable_dots`.
    rank : int
        4 for nodes on images, 2 on rows.
    lift : sequence of int or ndarray
        Step and first.

    Returns
    -------
    Planes
    """
    channels = scale.shape[0]
    step = max(1, _CHUNK // max(channels, 1))
    ge = np.empty((len(dots), channels), bool)
    gt = np.empty_like(ge)
    for start in range(0, len(dots), step):
        part = dots[start : start + step]
        value = ((part[:, None] * lift[0] + lift[1]) * scale + bias).astype(np.float32)
        shaped = value.reshape(len(part), channels, *([1] * (rank - 2)))
        current = evaluate_chain(graph, chain, shaped).reshape(len(part), channels)
        ge[start : start + step] = current >= 0
        gt[start : start + step] = current > 0
    return Planes(dots, ge, gt)


def evaluate_chain(graph: Graph, chain: Sequence[Node], value: np.ndarray) -> np.ndarray:
    """Evaluate a chain of elementwise nodes with constant operands.

    Parameters
    ----------
    graph : Graph
        Holds the constants.
    chain : sequence of Node
        In order.
    value : ndarray of float32
        Input of the first node; any batch.

    Returns
    -------
    ndarray of float32
    """
    for node in chain:
        args = [
            graph.constants.get(i) if i in graph.constants else (value if i else None)
            for i in node.inputs
        ]
        with np.errstate(all="ignore"):
            value = np.asarray(evaluate_node(node, args)[0], np.float32)
    return value


def direction(plane: np.ndarray) -> Direction:
    """Return the direction of each channel's step.

    Parameters
    ----------
    plane : ndarray of bool, shape (D, channels)
        `Planes.ge` or `Planes.gt`.

    Returns
    -------
    Direction
    """
    before, after = plane[:-1], plane[1:]
    return Direction((~before & after).any(axis=0), (before & ~after).any(axis=0))


def thresholds(
    planes: Planes, plane: np.ndarray, flip: np.ndarray, dot_from_acc: tuple[int, int]
) -> np.ndarray:
    """Return ``thr`` such that ``bit = acc <= thr``.

    Parameters
    ----------
    planes : Planes
        Table over all dot products.
    plane : ndarray of bool, shape (D, channels)
        The bit; one step per channel, falling where `flip` is set and rising elsewhere.
    flip : ndarray of bool, shape (channels,)
        Channels whose weights will be stored negated.
    dot_from_acc : tuple of int
        ``(a, b)`` with ``dot = a * acc + b``, a < 0.

    Returns
    -------
    ndarray of int32, shape (channels,)
        `ALWAYS` or `NEVER` for constant channels.
    """
    a, b = dot_from_acc
    seen = np.where(flip, -planes.dots[:, None], planes.dots[:, None])
    far = np.iinfo(np.int64).max
    least = np.where(plane, seen, far).min(axis=0)
    thr = (b - np.where(least == far, 0, least)) // -a
    thr = np.where(plane.all(axis=0), ALWAYS, np.where(plane.any(axis=0), thr, NEVER))
    return np.asarray(thr, np.int32)
