"""Minimal filtering (Winograd, Cook-Toom): transforms, packed weights, and choice of the method.

One row of a convolution, ``m`` outputs of ``r`` taps, takes ``m * r`` products directly and
``n = m + r - 1`` with Cook-Toom's method: ``y = A ((G w) * (B d))`` for `n` data ``d``, with
constant matrices from `n - 1` points and infinity [1]_. ``G w`` is computed at compile time, ``B
d`` is shared by all output channels, and ``A`` is applied once for all input channels and kernel
rows.

A convolution with stride s, or with a long kernel, is a sum of *parts*: at most `LONGEST` taps on
every s-th column. All parts use the same transform, so they are summed before ``A``. The last tap
of a shorter part is 0, so its product at infinity is omitted.

This module does not import TVM: passes pack weights with it, and kernels use its matrices.

References
----------
.. [1] Winograd, "Arithmetic Complexity of Computations", SIAM 1980; Lavin and Gray, "Fast
   Algorithms for Convolutional Neural Networks", CVPR 2016, section 4.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from bnncc.topi_binary import quantization
from bnncc.topi_binary.layout import LANES, blocks, pad_lanes
from bnncc.topi_binary.spec import Conv2d

METHODS = ("direct", "filtered", "filtered-2d")
"""Methods of float convolution: direct, or filtered along rows or in both directions."""

LONGEST = 4
"""Maximum number of taps per part; more would need points with large powers, which lose digits."""

OUTPUTS = 4
"""Outputs per transform."""

POINTS = {
    size: tuple(map(Fraction, points.split()))
    for size, points in {
        4: "0 1 -1", 5: "0 1 -1 2", 6: "0 1 -1 1/2 -2", 7: "0 1 -1 2 -2 1/2",
    }.items()
}  # fmt: skip
"""Evaluation points besides infinity, by size of the transform. Pairs +-p share most of their sums,
and rounding errors are within 15 % of those of the best sets."""

Matrix = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class Transform:
    """Matrices of ``y = inverse ((G w) * (forward d))``."""

    forward: Matrix
    """Shape (points, points), applied to data; integers."""
    kernel: Matrix
    """Shape (points, taps), applied to weights."""
    inverse: Matrix
    """Shape (outputs, points), applied to products."""


@dataclass(frozen=True)
class Axis:
    """One direction of a convolution, divided into parts."""

    parts: tuple[tuple[int, ...], ...]
    """Taps of each part: kernel columns (or rows), `stride` apart."""
    stride: int
    """Stride of the convolution."""
    taps: int
    """Number of taps of the longest part."""
    outputs: int
    """Outputs per tile."""

    @property
    def points(self) -> int:
        """Products per tile and part."""
        return self.outputs + self.taps - 1

    @property
    def step(self) -> int:
        """Columns of data from one tile to the next."""
        return self.outputs * self.stride

    def at(self, point: int) -> list[int]:
        """Return the parts whose product at `point` does not vanish for all weights."""
        last = point == self.points - 1
        return [i for i, p in enumerate(self.parts) if not last or len(p) == self.taps]

    @property
    def products(self) -> float:
        """Products per output; the direct method has as many as taps."""
        return sum(len(self.at(q)) for q in range(self.points)) / self.outputs

    @property
    def transform(self) -> Transform:
        """The matrices of the transform."""
        return cook_toom(self.outputs, self.taps)


def cut(kernel: int, stride: int, outputs: int = OUTPUTS) -> Axis:
    """Divide one direction of a convolution into parts.

    Examples
    --------
    >>> cut(7, 2).parts
    ((0, 2, 4, 6), (1, 3, 5))
    >>> cut(5, 1).parts
    ((0, 1, 2), (3, 4))
    >>> cut(7, 2).products, cut(3, 1).products
    (3.25, 1.5)
    """
    parts: list[tuple[int, ...]] = []
    for phase in range(min(stride, kernel)):
        taps = range(phase, kernel, stride)
        size = -(-len(taps) // -(-len(taps) // LONGEST))
        parts += [tuple(taps[i : i + size]) for i in range(0, len(taps), size)]
    return Axis(tuple(parts), stride, max(map(len, parts)), outputs)


def axes(spec: Conv2d) -> tuple[Axis | None, Axis]:
    """Return the parts of rows (None if not filtered) and of columns of a filtered `spec`."""
    columns = cut(spec.kernel[1], spec.strides[1])
    if spec.method != "filtered-2d":
        return None, columns
    return cut(spec.kernel[0], spec.strides[0]), columns


@functools.cache
def cook_toom(outputs: int, taps: int) -> Transform:
    """Return the transform for `outputs` outputs and `taps` taps.

    Parameters
    ----------
    outputs, taps : int
        Their sum minus 1 is a key of `POINTS`.

    Returns
    -------
    Transform
        Exact; the rows of `forward` are coprime integers.
    """
    size = outputs + taps - 1
    points = POINTS[size]
    inverse = [[p**i for p in points] + [Fraction(i == outputs - 1)] for i in range(outputs)]
    kernel, forward = [], []
    for p in points:
        others = [q for q in points if q != p]
        row = _monic(others, size)
        norm = math.prod((p - q for q in others), start=Fraction(1))
        scale = _whole(row)
        forward.append([c * scale for c in row])
        kernel.append([p**j / (norm * scale) for j in range(taps)])
    row = _monic(points, size)
    scale = _whole(row)
    forward.append([c * scale for c in row])
    kernel.append([Fraction(j == taps - 1) / scale for j in range(taps)])
    return Transform(_frozen(forward), _frozen(kernel), _frozen(inverse))


def _monic(roots: list[Fraction] | tuple[Fraction, ...], size: int) -> list[Fraction]:
    """Return the coefficients of the product of (x - root), lowest first, `size` of them."""
    out = [Fraction(1)]
    for root in roots:
        out = [a - root * b for a, b in zip([Fraction(0), *out], [*out, Fraction(0)], strict=True)]
    return out + [Fraction(0)] * (size - len(out))


def _whole(row: list[Fraction]) -> int:
    return math.lcm(*(c.denominator for c in row))


def _frozen(rows: list[list[Fraction]]) -> Matrix:
    return tuple(tuple(row) for row in rows)


def as_array(matrix: Matrix) -> np.ndarray:
    """Return a matrix in float64."""
    return np.array([[float(x) for x in row] for row in matrix])


# ---- weights --------------------------------------------------------------------------------


def weight_size(spec: Conv2d) -> int:
    """Return the number of floats in the packed weights of `spec`."""
    return blocks(spec.out_channels) * LANES * block_terms(spec)


def block_terms(spec: Conv2d) -> int:
    """Return the number of weight vectors per block of output channels."""
    return spec.channels * sum(len(terms) for _, terms in places(spec))


def places(spec: Conv2d) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Return the points of a filtered convolution, with the terms summed at each per input channel.

    Parameters
    ----------
    spec : Conv2d
        With a `method` other than direct.

    Returns
    -------
    list of (point, terms)
        A point is (row, column); a term is (row part, column part). If rows are not filtered, a
        row part is a kernel row, and the row of the point is 0.
    """
    rows, columns = axes(spec)
    out = []
    for q in range(columns.points):
        for p in range(rows.points if rows else 1):
            first = rows.at(p) if rows else range(spec.kernel[0])
            out.append(((p, q), [(i, j) for i in first for j in columns.at(q)]))
    return out


def pack_weight(weight: np.ndarray, spec: Conv2d) -> np.ndarray:
    """Transform float weights and pack them in the order in which filtered kernels read them.

    Parameters
    ----------
    weight : ndarray of float32, shape (out_channels, kernel_h, kernel_w, channels)
        Weights with the input channel last.
    spec : Conv2d
        A spec with a filtered method.

    Returns
    -------
    ndarray of float32, one-dimensional
        Blocks of `LANES` output channels, the last one padded with zeros; within a block the order
        is (column point, row point, row part, column part, input channel, lane).
    """
    rows, columns = axes(spec)
    cells = _along(weight.astype(np.float64), 2, columns)  # o, h, (part, point) for w, c
    cells = cells[:, :, None] if rows is None else _along(cells, 1, rows)
    # o, row part, row point, column part, column point, c
    lanes = pad_lanes(cells).reshape(-1, LANES, *cells.shape[1:])
    kept = [lanes[:, :, i, p, j, q].transpose(0, 2, 1) for (p, q), terms in places(spec)
            for i, j in terms]  # fmt: skip
    packed = np.stack(kept, axis=1) if kept else np.zeros(0)
    return np.ascontiguousarray(packed.astype(np.float32).reshape(-1))


def _along(weight: np.ndarray, position: int, axis: Axis) -> np.ndarray:
    """Replace one axis of `weight` by (part, point)."""
    matrix = as_array(axis.transform.kernel)
    moved = np.moveaxis(weight, position, -1)
    parts = []
    for taps in axis.parts:
        padded = np.zeros((*moved.shape[:-1], axis.taps))
        padded[..., : len(taps)] = moved[..., list(taps)]
        parts.append(padded @ matrix.T)
    out = np.stack(parts, axis=-2)
    return np.moveaxis(out, (-2, -1), (position, position + 1))


# ---- choice ---------------------------------------------------------------------------------

RESULT_COST = 8.0
"""Cost of inverse transform and scratch memory per output, in products."""

DATUM_COST = 0.6
"""Cost of transforming a data element, in products with one vector of output channels."""

GAIN = 0.9
"""Filtering is used only if its estimate is below this fraction of the direct method's."""

ALONE_COST, COPY_COST = 1.25, 2.0
"""For bfloat16, with two products per word: relative cost of a product that only one vector of
channels reads, and cost per vector of moving `LANES` data elements next to each other."""

MIN_PIXELS = 100
"""With fewer output pixels, loading weights dominates, and filtered weights are larger."""


def integral(weight: np.ndarray) -> bool:
    """Whether each filter is a small integer multiple of a scale, as quantized weights are.

    With data of the same kind, direct sums are exact, while filtered sums are not.

    Examples
    --------
    >>> integral(np.array([[0.1, -0.3, 0.2], [7, 0, 7]])), integral(np.array([[0.1, 0.32, 0.97]]))
    (True, False)
    """
    for row in np.abs(weight.reshape(weight.shape[0], -1).astype(np.float64)):
        levels = np.unique(np.append(row, 0.0))
        gaps = np.diff(levels)
        unit = gaps[gaps > 1e-5 * levels[-1]].min(initial=np.inf)
        multiple = row / unit
        if levels[-1] > 512 * unit or (np.abs(multiple - np.round(multiple)) > 0.05).any():
            return False
    return True


def fits(spec: Conv2d) -> bool:
    """Whether `spec` can be computed by a filtered method."""
    columns = spec.kernel[1]
    return (
        spec.rank == 4
        and spec.groups == 1
        and spec.dilations == (1, 1)
        and 3 <= columns <= 7
        and columns > spec.strides[1]
    )


def choose(spec: Conv2d, wish: str, height: int, width: int) -> str:
    """Select the method of a float convolution.

    Parameters
    ----------
    spec : Conv2d
        Spec of the layer; its `method` is ignored.
    wish : str
        The most aggressive method in `METHODS` that is allowed.
    height, width : int
        Of the output.

    Returns
    -------
    str
        The method with the fewest products, including the cost of transforms
        (``benchmarks/filtered_layers.py`` compares this choice with measured times of all three).

    Examples
    --------
    >>> stem = Conv2d(1, 224, 224, 3, 64, (7, 7), (2, 2), pads=(3, 3, 3, 3), data_layout="NCHW")
    >>> choose(stem, "filtered", 112, 112)
    'filtered'
    >>> quick = Conv2d(1, 224, 224, 3, 16, (3, 3), (2, 2), pads=(0, 0, 1, 1), data_layout="NCHW")
    >>> choose(quick, "filtered", 112, 112)
    'direct'
    """
    if not fits(spec) or height * width < MIN_PIXELS:
        return "direct"
    best, least = "direct", _direct_cost(spec)
    for method in METHODS[1 : METHODS.index(wish) + 1]:
        if (cost := _cost(replace(spec, method=method), height, width)) < least:
            best, least = method, cost
    return best


def _direct_cost(spec: Conv2d) -> float:
    """Return the cost of the direct method that filtering must beat."""
    if spec.operands == "float32" or spec.packed == 1:
        return GAIN * spec.kernel[0] * spec.kernel[1] * spec.channels
    vectors = blocks(spec.out_channels)
    data = DATUM_COST * spec.channels * spec.strides[0] * spec.strides[1] / vectors
    words = quantization.words(spec)
    if spec.apart:
        return words * (ALONE_COST if vectors == 1 else 1.0) + data
    copied = spec.kernel[0] * blocks(spec.kernel[1] * spec.channels)
    return words + data + COPY_COST * copied / vectors


def _cost(spec: Conv2d, height: int, width: int) -> float:
    """Return the cost of a filtered convolution per output, in products."""
    rows, columns = axes(spec)
    along = columns.products * (-(-width // columns.outputs) * columns.outputs / width)
    down: float = spec.kernel[0]
    if rows is not None:
        down = rows.products * (-(-height // rows.outputs) * rows.outputs / height)
    data = spec.channels * spec.strides[0] * spec.strides[1] / blocks(spec.out_channels)
    return along * down * spec.channels + RESULT_COST + DATUM_COST * data
