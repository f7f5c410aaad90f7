"""Tensors that take a few evenly spaced values, called a *lattice*.

`bnncc.Levels` produces such a tensor, and so does `bnncc.Sign`: signs are two levels, or three with
a middle one. Operators that move elements preserve lattices, elementwise operators with scalar
constants change the values of the levels, and all other results are real. `kept` defines, for all
analyses of values, which operators only move elements and where these come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bnncc.ir.dims import channel_shape
from bnncc.ir.evaluate import evaluate_node
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.image_bits import IMAGE_BITS
from bnncc.ir.magnitude import coarseness
from bnncc.ir.moves import MOVES, PIXEL_SHUFFLES, REPEATS, VIEW
from bnncc.ir.numeric import UNITS, noise
from bnncc.ir.quantizers import LEVELS
from bnncc.recognise.monotone import step_at

UNEVEN = 1e-6
"""Deviation from even spacing, relative to the largest value, that float32 rounding can cause."""

MAX_FILLED = 16
"""Maximum number of evenly spaced values, including those that do not occur."""

REMAPS = {"Neg", "Mul", "Add", "Sub", "Div", "Clip", "Relu"}
"""Elementwise operators that change the values of levels, but not the levels."""


@dataclass(frozen=True)
class Lattice:
    """A set of evenly spaced values, indexed by level."""

    values: tuple[float, ...]
    """Values of levels 0, 1, ...; ascending or descending."""
    signs: bool = False
    """Whether it is stored as a sign: a plane for the two outer values and, for three values, a
    plane that marks the middle one, which a kernel may prove not to occur."""

    @property
    def lo(self) -> float:
        """The value of the lowest level: bit 0."""
        return self.values[0]

    @property
    def hi(self) -> float:
        """The value of the highest level: bit 1."""
        return self.values[-1]

    @property
    def zero(self) -> bool:
        """Whether it is a sign with a middle value."""
        return self.signs and len(self.values) == 3

    @property
    def bipolar(self) -> bool:
        """Whether the outer values are -a and +a."""
        return self.lo == -self.hi

    @property
    def count(self) -> int:
        """The highest level."""
        return len(self.values) - 1

    @property
    def step(self) -> float:
        """Difference between the values of adjacent levels."""
        return (self.hi - self.lo) / self.count

    @property
    def bits(self) -> int:
        """Bits needed for a level."""
        return self.count.bit_length()

    def level_of(self, value: float) -> float | None:
        """Return the level of `value`, possibly a half-integer; None if there is none."""
        level = (value - self.lo) / self.step
        nearest = round(2 * level) / 2
        return nearest if abs(level - nearest) < 1e-4 else None

    def with_zero(self, zero: bool) -> Lattice:
        """Return the same sign with or without the middle value."""
        return sign_values(self.lo, self.hi, zero)


def sign_values(lo: float, hi: float, zero: bool = False) -> Lattice:
    """Return the lattice of signs.

    Parameters
    ----------
    lo, hi : float
        Value of bit 0 and of bit 1.
    zero : bool, default False
        Whether the middle value may occur.
    """
    return Lattice((lo, (lo + hi) / 2, hi) if zero else (lo, hi), signs=True)


def as_multiples(values: Sequence[float]) -> tuple[int, int, float] | None:
    """Return evenly spaced values as integers and a unit.

    Parameters
    ----------
    values : sequence of float
        Values of levels 0, 1, ...

    Returns
    -------
    tuple or None
        First value and step, in units, and the unit. The unit is the step if 0 is a level, or
        would be with twice as many levels. Otherwise it is at least 1/255 of the largest value and
        divides all values as precisely as `bnncc.ir.numeric.multiples` requires; None if there is
        no such unit.

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
        # At most as far from 0 as the levels reach, so offsets of sums stay within the sums' bound.
        if most < 2 * len(array) and np.abs(array / top * most - whole).max() <= noise(most):
            return int(whole[0]), 1, top / most
    found = in_units(array)
    if found is None:
        return None
    whole, unit = found
    step = int(whole[1] - whole[0])
    evenly_so = (whole == whole[0] + step * np.arange(len(whole))).all()
    return (int(whole[0]), step, unit) if evenly_so else None


def in_units(values: Sequence[float] | np.ndarray) -> tuple[np.ndarray, float] | None:
    """Return numbers, not all 0, as integers and a unit if they are small multiples of one.

    Examples
    --------
    >>> in_units([-0.25, 0.75, 0.0]), in_units([1.0, 1.618])
    ((array([-1.,  3.,  0.]), 0.25), None)
    """
    array = np.array(values, np.float64)
    top = float(np.abs(array).max())
    for number in UNITS:
        whole = np.rint(array / top * number)
        if np.abs(array / top * number - whole).max() <= noise(number):
            return whole, top / number
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
        None if no such pair was found. It is exact with and without rounding of the product.
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
    """Return the tolerated unevenness of each tensor for which it is not `UNEVEN`.

    Products of levels and a scale are rounded to the type of the network. In half precision they
    are evenly spaced up to two roundings, and are treated as the unrounded values.
    """
    return {name: slack / 8 for name, slack in coarseness(graph, computed=False).items()}


def even(values: np.ndarray, uneven: float = UNEVEN) -> Lattice | None:
    """Return `values` as a lattice, if they are evenly spaced up to the relative tolerance."""
    if not 2 <= len(values) <= 256 or not np.isfinite(values).all() or values[0] == values[-1]:
        return None
    even = np.linspace(values[0], values[-1], len(values))
    if np.abs(values - even).max() > uneven * np.abs(values).max():
        return None
    return Lattice(tuple(float(v) for v in (values if uneven == UNEVEN else even)))


def evenly(values: np.ndarray, uneven: float = UNEVEN) -> np.ndarray | None:
    """Return the smallest set of evenly spaced numbers that includes `values`.

    Parameters
    ----------
    values : ndarray
        At least two different numbers, in any order.
    uneven : float
        Tolerated deviation, relative to the largest value.

    Returns
    -------
    ndarray or None
        Ascending; at most `MAX_FILLED`, or as many as `values` has.

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
        known = even(full, uneven)
        if known is not None and len(set(place.tolist())) == len(held):
            return np.array(known.values)
    return None


def lattices(graph: Graph) -> dict[str, Lattice]:
    """Return the tensors of `graph` that are lattices, with their values.

    Parameters
    ----------
    graph : Graph
        After `recognise_signs` and `recognise_quantizers`.

    Returns
    -------
    dict of str to Lattice
        Without real-valued tensors.
    """
    table: dict[str, Lattice] = {}
    for name in graph.inputs:
        kind = graph.datatypes.get(name)
        if kind is not None and kind.count > 1:
            table[name] = Lattice(tuple(kind.low + kind.step * k for k in range(kind.count)))
    for node in graph.nodes:
        found = _made(node, graph, table)
        if found is not None:
            table.update({out: found for out in node.outputs if out})
    return table


def sign_lattices(graph: Graph) -> dict[str, Lattice]:
    """Return the tensors of `lattices` that are signs."""
    return {name: known for name, known in lattices(graph).items() if known.signs}


def decision(
    graph: Graph, source: str, out: str, limits: np.ndarray, values: np.ndarray, name: str
) -> list[Node]:
    """Return nodes that select one of `values` by how many of `limits` a number reaches.

    Parameters
    ----------
    graph : Graph
        Receives constants.
    source, out : str
        Input and output of the decision.
    limits : ndarray of float32, shape (count,) or (channels, count)
        Ascending.
    values : ndarray of float32, shape (count + 1,)
        Evenly spaced.
    name : str
        Name of the nodes.
    """
    if len(values) > 2:
        return [Node(LEVELS, [source], [out], {"thresholds": limits, "values": values}, name)]
    zero, cut = step_at(np.asarray(limits[..., 0], np.float32))
    column = channel_shape(len(graph.types[source].shape))
    limit = graph.constant(cut.reshape(column if cut.ndim else ()), f"{source}.cut")
    shifted = graph.fresh(f"{source}.minus_cut")
    graph.types[shifted] = graph.types[source]
    signs = {"lo": float(values[0]), "hi": float(values[1]), "zero": zero}
    return [
        Node("Sub", [source, limit], [shifted], {}, name),
        Node("bnncc.Sign", [shifted], [out], signs, name),
    ]


def decided_as_rows(kind: TensorType) -> bool:
    """Whether one threshold can decide on a tensor (no image) as rows: its last size is known.

    Parameters
    ----------
    kind : TensorType
        Type of the input.
    """
    return len(kind.shape) > 0 and isinstance(kind.shape[-1], int) and kind.shape[-1] > 0


def of_decision(node: Node) -> Lattice | None:
    """Return the lattice that a decision produces; None for other nodes."""
    if node.op in ("bnncc.Sign", IMAGE_BITS):
        a = node.attrs
        return sign_values(float(a["lo"]), float(a["hi"]), a.get("zero") == "mid")
    return even(node.attrs["values"]) if node.op == LEVELS else None


def _made(node: Node, graph: Graph, table: dict[str, Lattice]) -> Lattice | None:
    if (decided := of_decision(node)) is not None:
        return decided
    if node.op in REMAPS:
        return _renamed(node, graph, table)
    taken = kept(node, graph) if any(i in table for i in node.inputs) else None
    if taken is None or not taken[0] or not all(i in table for i in taken[0]):
        return None
    return _joined([table[i] for i in taken[0]], taken[1])


def _joined(parts: Sequence[Lattice], numbers: Iterable[np.ndarray]) -> Lattice | None:
    """Return the lattice that contains several lattices and additional numbers."""
    first, zero = parts[0], any(part.zero for part in parts)
    if any(part != first and not _same_signs(part, first) for part in parts):
        return None
    extra = {float(v) for held in numbers for v in np.unique(held)} - {first.lo, first.hi}
    if not first.signs:
        return first if extra <= set(first.values) else None
    if extra - {0.0} or (extra and not first.bipolar):
        return None
    return first.with_zero(zero or bool(extra))


def _same_signs(one: Lattice, other: Lattice) -> bool:
    return one.signs and other.signs and (one.lo, one.hi) == (other.lo, other.hi)


def _renamed(node: Node, graph: Graph, table: dict[str, Lattice]) -> Lattice | None:
    """Apply an elementwise operator with scalar constants to the values of a lattice."""
    data = graph.computed(node.inputs)
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
    made = even(np.asarray(evaluate_node(node, args)[0]))
    if made is None or not known.signs:
        return made
    return sign_values(made.lo, made.hi, known.zero)


def kept(node: Node, graph: Graph) -> tuple[list[str], list[np.ndarray]] | None:
    """Return the sources of a node that moves elements without computing values.

    Returns
    -------
    tuple or None
        Tensors and additional constants, e.g. padding: all values of the result are among theirs.
        None if the node computes values, or the constants are unknown.
    """
    taken = node.inputs if node.op in ("Concat", "bnncc.Interleave") else node.inputs[:1]
    numbers = [graph.constants[i] for i in taken if i in graph.constants]
    names = [i for i in taken if i not in graph.constants]
    if node.op in ("MaxPool", "bnncc.BitPool") and not pools_images(node, graph):
        return None
    if node.op == "Resize" and not copies_pixels(node):
        return None
    if node.op == "Pad" and str(node.attrs.get("mode", "constant")) == "constant":
        pads, fill = node.input(1), node.input(2)
        if fill and fill not in graph.constants:
            return None
        if pads not in graph.constants or (graph.constants[pads] > 0).any():
            numbers.append(graph.constants[fill].reshape(-1)[:1] if fill else np.zeros(1))
    return (names, numbers) if node.op in _KEEPS else None


_KEEPS = MOVES | PIXEL_SHUFFLES | REPEATS | {
    "MaxPool", "bnncc.BitPool", "Resize", "Concat", "bnncc.Interleave", "Pad", VIEW,
}  # fmt: skip


def pools_images(node: Node, graph: Graph) -> bool:
    """Whether a max-pooling is one of images whose windows all overlap the image.

    A window entirely in the padding would give -inf, which is not a value of the data.
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
    """Whether a `Resize` only copies pixels: nearest neighbour, without extrapolation."""
    outside = node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    return str(node.attrs.get("mode", "nearest")) == "nearest" and not outside
