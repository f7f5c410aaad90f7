"""Few-valued tensors: which hold only some evenly spaced values, and how weights are such numbers.

`bnncc.Levels` makes such a tensor; operators that move elements keep it one, elementwise ones with
scalar constants rename its values. A tensor of signs is one too, with two or three values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node
from bnncc.ir.magnitude import coarseness
from bnncc.ir.moves import MOVES
from bnncc.ir.numeric import UNITS, noise
from bnncc.ir.quantizers import LEVELS
from bnncc.passes.values import (
    REMAPS,
    TwoValued,
    copies_pixels,
    pools_images,
)

UNEVEN = 1e-6
"""Part of the largest value by which a level may be off an even spacing: float32 rounds."""

MAX_WEIGHT = 128
"""Largest magnitude of integer weights: they have up to 8 bits."""

MAX_FILLED = 16
"""Evenly spaced values of which some do not occur: how many there may be."""

SAMPLE = 64
"""Weights of each filter that are looked at first."""


@dataclass(frozen=True)
class Lattice:
    """Evenly spaced values, by level.

    Attributes
    ----------
    values : tuple of float
        Of level 0, 1, ...; rising or falling.
    signs : bool, default False
        Whether it is a tensor of `bnncc.Sign`: its planes are those of signs.
    """

    values: tuple[float, ...]
    signs: bool = False

    @property
    def count(self) -> int:
        """The highest level."""
        return len(self.values) - 1

    @property
    def step(self) -> float:
        """What a level more is worth."""
        return (self.values[-1] - self.values[0]) / self.count

    @property
    def bits(self) -> int:
        """Bits that hold a level."""
        return self.count.bit_length()

    def level_of(self, value: float) -> float | None:
        """Return the level, in whole or halves, that stands for `value`; None if none does."""
        level = (value - self.values[0]) / self.step
        nearest = round(2 * level) / 2
        return nearest if abs(level - nearest) < 1e-4 else None


def as_multiples(values: Sequence[float]) -> tuple[int, int, float] | None:
    """Return evenly spaced values as integers and a unit.

    Parameters
    ----------
    values : sequence of float
        Of level 0, 1, ...

    Returns
    -------
    tuple or None
        First value and step in units, and the unit: the step if 0 is a level or would be one with
        as many more; else None if no unit of at least 1/255 of the largest value fits all of them,
        as near as `bnncc.ir.numeric.multiples` wants.

    Examples
    --------
    >>> as_multiples([-1.0, 0.0, 1.0]), as_multiples([-3.0, -1.0, 1.0]), as_multiples([1.0, 1.618])
    ((-1, 1, 1.0), (-3, 2, 1.0), None)
    """
    array = np.array(values, np.float64)
    top = float(np.abs(array).max())
    if array[-1] != array[0]:
        levels = np.arange(len(array))
        whole = levels + np.rint(array[0] / (array[-1] - array[0]) * levels[-1])
        most = int(np.abs(whole).max())
        # No farther from 0 than the levels reach: offsets of sums stay in the bound of the sums.
        if most < 2 * len(array) and np.abs(array / top * most - whole).max() <= noise(most):
            return int(whole[0]), 1, top / most
    for number in UNITS:
        whole = np.rint(array / top * number)
        if np.abs(array / top * number - whole).max() <= noise(number):
            step = int(whole[1] - whole[0])
            even = (whole == whole[0] + step * np.arange(len(whole))).all()
            return (int(whole[0]), step, top / number) if even else None
    return None


def exact_line(values: np.ndarray) -> tuple[float, float] | None:
    """Return (first, step) with ``first + step * k`` equal to value k in float32, for all k.

    Parameters
    ----------
    values : ndarray of float32
        Evenly spaced.

    Returns
    -------
    tuple of float or None
        None if no such line was found. What there is does it with the product rounded, or not.
    """
    first, count = np.float32(values[0]), len(values) - 1
    level = np.arange(count + 1).astype(np.float32)
    steps = np.float64(values[-1]) / count - np.float64(first) / count, values[1] - first
    factors = [np.float32(step) for step in steps]
    factors += [np.nextafter(factors[0], np.float32(end)) for end in (-np.inf, np.inf)]
    for factor in factors:
        once = (level.astype(np.longdouble) * factor + first).astype(np.float32)
        if np.array_equal(level * factor + first, values) and np.array_equal(once, values):
            return float(first), float(factor)
    return None


def unevenness(graph: Graph) -> dict[str, float]:
    """Return by tensor how far its values may be off an even spacing, where that is not `UNEVEN`.

    Products of levels and a scale are rounded to the type of the network: levels of half precision
    are even but for two roundings, and taken for what was rounded.
    """
    return {name: slack / 8 for name, slack in coarseness(graph).items()}


def lattice(values: np.ndarray, uneven: float = UNEVEN) -> Lattice | None:
    """Return `values` as a lattice, if they are evenly spaced to a part of the largest one."""
    if not 2 <= len(values) <= 256 or not np.isfinite(values).all() or values[0] == values[-1]:
        return None
    even = np.linspace(values[0], values[-1], len(values))
    if np.abs(values - even).max() > uneven * np.abs(values).max():
        return None
    return Lattice(tuple(float(v) for v in (values if uneven == UNEVEN else even)))


def evenly(values: np.ndarray, uneven: float = UNEVEN) -> np.ndarray | None:
    """Return evenly spaced numbers that include `values`, as few as there can be.

    Parameters
    ----------
    values : ndarray
        At least two different numbers, in any order.
    uneven : float
        Part of the largest by which one may be off.

    Returns
    -------
    ndarray or None
        Ascending; no more than `MAX_FILLED`, or as many as there are values.

    Examples
    --------
    >>> evenly(np.array([1.0, -1.0, -0.5]))
    array([-1. , -0.5,  0. ,  0.5,  1. ])
    """
    held = np.unique(values.astype(np.float64))
    if len(held) < 2 or not np.isfinite(held).all():
        return None
    for count in range(len(held), max(MAX_FILLED, len(held)) + 1):
        full = np.linspace(held[0], held[-1], count)
        place = np.rint((held - held[0]) / (held[-1] - held[0]) * (count - 1)).astype(int)
        full[place] = held
        known = lattice(full, uneven)
        if known is not None and len(set(place.tolist())) == len(held):
            return np.array(known.values)
    return None


def lattices(graph: Graph, two: dict[str, TwoValued]) -> dict[str, Lattice]:
    """Return the few-valued tensors of `graph`, signs left out.

    Parameters
    ----------
    graph : Graph
        After `recognise_quantisers`.
    two : dict of str to TwoValued
        From `value_sets`; these are not looked at again.

    Returns
    -------
    dict of str to Lattice
    """
    table: dict[str, Lattice] = {}
    for name in graph.inputs:
        kind = graph.datatypes.get(name)
        if kind is not None and kind.count > 1 and name not in two:
            table[name] = Lattice(tuple(kind.low + kind.step * k for k in range(kind.count)))
    for node in graph.nodes:
        found = _of(node, graph, table)
        if found is not None:
            table.update({out: found for out in node.outputs if out and out not in two})
    return table


def of_signs(two: TwoValued) -> Lattice:
    """Return a two- or three-valued tensor as a lattice."""
    middle = ((two.lo + two.hi) / 2,) if two.zero else ()
    return Lattice((two.lo, *middle, two.hi), signs=True)


_SAME = {"Concat", "bnncc.Interleave"}
ROUTES = {*MOVES, *REMAPS, *_SAME, "MaxPool", "Pad"}
"""Operators that keep levels, or rename what they stand for."""


def _of(node: Node, graph: Graph, table: dict[str, Lattice]) -> Lattice | None:
    if node.op == LEVELS:
        return lattice(node.attrs["values"])
    if node.op == "Resize":
        return table.get(node.inputs[0]) if copies_pixels(node) else None
    if node.op not in ROUTES:
        return None
    known = table.get(next((i for i in node.inputs if i in table), ""))
    if known is None:
        return None
    if node.op in MOVES:
        return table.get(node.inputs[0])
    if node.op == "MaxPool":
        return table.get(node.inputs[0]) if pools_images(node, graph) else None
    if node.op in _SAME:
        return known if all(table.get(i) == known for i in node.inputs) else None
    if node.op == "Pad":
        return _padded(node, graph, known)
    return _renamed(node, graph, table)


def _padded(node: Node, graph: Graph, known: Lattice) -> Lattice | None:
    if str(node.attrs.get("mode", "constant")) != "constant" or node.inputs[0] in graph.constants:
        return None
    fill = 0.0
    if len(node.inputs) > 2 and node.inputs[2]:
        value = graph.constants.get(node.inputs[2])
        if value is None:
            return None
        fill = float(value.reshape(-1)[0])
    return known if fill in known.values else None


def _renamed(node: Node, graph: Graph, table: dict[str, Lattice]) -> Lattice | None:
    data = [i for i in node.inputs if i and i not in graph.constants]
    known = table.get(data[0]) if len(data) == 1 else None
    if known is None or graph.types[node.outputs[0]] != graph.types[data[0]]:
        return None
    if any(graph.constants[i].size != 1 for i in node.inputs if i and i != data[0]):
        return None
    values = np.array(known.values, np.float32)
    args = [
        None if not i else values if i == data[0] else graph.constants[i].reshape(())
        for i in node.inputs
    ]
    return lattice(np.asarray(evaluate_node(node, args)[0]))


@dataclass(frozen=True)
class Weights:
    """Filters as integers.

    Attributes
    ----------
    whole : ndarray of int64, shape (out_channels, ...)
        What is multiplied.
    scale : ndarray of float64, shape (out_channels,)
        What one is worth.
    odd : bool
        Whether all are odd: sums of signs times powers of two.
    bits : int
        Planes that hold them: signs if odd, else two's complement.
    """

    whole: np.ndarray
    scale: np.ndarray
    odd: bool
    bits: int

    @property
    def complement_bits(self) -> int:
        """Planes of two's complement."""
        low, high = int(self.whole.min()), int(self.whole.max())
        return max((-low - 1).bit_length() if low < 0 else 0, high.bit_length()) + 1


def few_bit_weights(weight: np.ndarray) -> Weights | None:
    """Split weights into integers of up to 8 bits and one scale per output channel.

    Parameters
    ----------
    weight : ndarray of float, shape (out_channels, ...)
        Filters.

    Returns
    -------
    Weights or None
        With the smallest integers, as near as `bnncc.ir.numeric.multiples` wants: filters of a
        few real numbers are near multiples of something by chance.
    """
    flat = weight.reshape(weight.shape[0], -1).astype(np.float64)
    if not flat.size:
        return None
    top = np.abs(flat).max(axis=1)
    ratio = flat / np.where(top == 0, 1.0, top)[:, None]
    sample = ratio[:, :: max(1, ratio.shape[1] // SAMPLE)]
    multiple = np.zeros(len(flat), np.int64)
    multiple[top == 0] = 1
    for number in range(1, MAX_WEIGHT + 1):
        left = np.flatnonzero(multiple == 0)
        if not left.size:
            break
        fits = _near(sample[left], number)
        left = left[fits]
        multiple[left[_near(ratio[left], number)]] = number
    if not multiple.all():
        return None
    whole = np.rint(ratio * multiple[:, None]).astype(np.int64)
    sign = np.where(whole.max(axis=1) > -whole.min(axis=1), -1, 1)  # -2**n has a place, 2**n none
    odd = bool((whole[top > 0] % 2 == 1).all())
    if odd:
        whole[top == 0] = 1
        sign[:] = 1
    scale = sign * top / multiple
    whole = (whole * sign[:, None]).reshape(weight.shape)
    found = Weights(whole, scale, odd, 1)
    bits = int(np.abs(whole).max()).bit_length() if odd else found.complement_bits
    return Weights(whole, scale, odd, bits) if bits <= 8 else None


def _near(ratio: np.ndarray, number: int) -> np.ndarray:
    scaled = ratio * number
    return np.asarray((np.abs(scaled - np.rint(scaled)) <= noise(number)).all(axis=1))
