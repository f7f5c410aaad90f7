"""Partition of convolutions into AMX tiles: the one with the fewest estimated cycles.

Windows form lines, see `definitions.byte_products`, lines runs, and runs tiles of at most sixteen
windows. A product of tiles takes 8 cycles and half a cycle for each window; steps, stored sums and
expanded weights add to that. `byte_products` schedules the partition.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from bnncc.schedules.intrin_amx import SUMS, TILE_BYTES, TILE_ROWS
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions.byte_products import (
    Layer,
    Lines,
    blocks_per_group,
    folds,
    in_tiles,
    products_of,
)
from bnncc.topi_binary.definitions.taps import flattened
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.spec import BinaryConv2d

TILE_CYCLES, ROW_CYCLES, STEP_CYCLES, LEAST_CYCLES = 8.0, 0.5, 5.0, 25.0
"""Measured cycles: per product of tiles that share a weight tile, and per row of it; more per step,
and the least of a step, which also expands weights."""

FEW, CROWDED = 4, 3.0
"""Tiles per run up to which the next data is loaded in time, and more cycles per step of others.
(With a busy hyperthread beside it, a step of five takes half as long again as one of four.)"""

TAPS = 9
"""Maximum number of taps whose loop is unrolled."""

UNEVEN = 4
"""Runs per line up to which each has code of its own, so that the last one may have fewer tiles."""

BLOCKED, BLOCKED_STEPS = 64, 4
"""Windows and steps from which two vectors of channels share each tile of data of a pointwise
layer."""

CHUNK, DEEP, KEPT = 16, 8, 12
"""Steps of two vectors whose weights stay in the L1 cache: at most; at least, if they are a part of
all; and at most if they are expanded there. For more it takes less time to expand them again."""

MAX_WINDOWS, DATA_SHARE = 1024, 0.5
"""Windows per line up to which such a layer has long lines, and maximum fraction of the L2 cache
for the data of a line."""

ZEROS = 0.03
"""Minimum fraction of the products of a layer, those of padding, that are left out."""

LONG = 0.33
"""Estimated loss when the sums of a line fill the L1 cache; shorter lines lose a part of it."""

MAX_COLUMNS = 128
"""Pixels above which those of a pointwise layer are more than one line; also the most per row."""

POOLED_SHARE = 0.25
"""Maximum fraction of the L2 cache for two lines of sums with pooling: the longer lines are, the
fewer rows are computed twice."""


@dataclass(frozen=True)
class Cut:
    """Partition of the sums of an image into tiles.

    Attributes
    ----------
    lines : Lines
        Output rows per line, and windows per line, which fill all tiles.
    rows : int
        Windows per tile.
    tiles : int
        Tiles per run, which share each weight tile. The last run of a line may have fewer, if the
        line has few runs.
    vectors : int
        Vectors of channels per run, which share each tile of data.
    """

    lines: Lines
    rows: int
    tiles: int
    vectors: int

    @property
    def windows(self) -> int:
        """Windows per run: those whose sums are computed together."""
        return self.rows * self.tiles

    @property
    def runs(self) -> int:
        """Runs per line."""
        return self.lines.places // self.windows

    @property
    def filled(self) -> int:
        """Tiles per line that have outputs."""
        return layout.blocks(self.lines.needed, self.rows)


def cut(spec: Layer, target: TargetSpec, tiles: int = 0, vectors: int = 0) -> Cut:
    """Return the partition with the fewest estimated cycles.

    `tiles` is the number of tiles per run, or 0 for any number, and `vectors` that of vectors of
    channels that share a tile of data, or 0 for that of the rule. Their product is at most
    `intrin_amx.SUMS`.
    """
    flat = flattened(spec)
    vectors = vectors or _vectors(spec)
    chunks = _steps(flat) // _chunk(flat) if vectors > 1 and not folds(spec) else 1
    sizes = [0]
    if flat is not spec and flat.width > MAX_COLUMNS:
        sizes += [size for size in range(TILE_ROWS, MAX_COLUMNS + 1) if flat.width % size == 0]
    found = [
        (*one, columns)
        for columns in sizes
        for one in _cuts(flattened(spec, columns), target, tiles, vectors)
    ]
    _, (lined, rows, count, width, together), columns = min(found, key=lambda one: one[0])
    lines = Lines(flattened(spec, columns), lined, 0, width, columns, chunks, together)
    places = layout.blocks(lines.needed, rows * count) * rows * count
    return Cut(replace(lines, places=places), rows, count, vectors)


def shares(spec: Layer) -> bool:
    """Return whether vectors of channels may share tiles of data."""
    full = spec.out_channels // LANES
    pointwise = flattened(spec) is not spec and _chunk(spec) > 1
    return full > 0 == full % 2 and (folds(spec) or pointwise)


def _vectors(spec: Layer) -> int:
    """Return how many vectors of channels share a tile of data by default.

    In pointwise layers they do so because data comes from the L2 cache; the weights of a chunk then
    stay in the L1 cache for all windows of a line.
    """
    if not shares(spec) or folds(spec):
        return 1 + shares(spec)
    steps, chunk = _steps(spec), _chunk(spec)
    whole = chunk == steps >= BLOCKED_STEPS or chunk >= DEEP
    return 1 + (whole and _pixels(flattened(spec)) >= BLOCKED)


def _chunk(spec: Layer) -> int:
    """Return the steps per chunk of a pointwise layer whose vectors share data."""
    steps = _steps(spec)
    if not in_tiles(spec):  # they are expanded for each run
        return steps
    return next(size for size in range(min(CHUNK, steps), 0, -1) if steps % size == 0)


def _pixels(spec: Layer) -> int:
    return math.prod(spec.output_hw)


def _steps(spec: Layer) -> int:
    """Return the number of steps per tap."""
    return products_of(spec) * blocks_per_group(spec)


def _cuts(
    spec: Layer, target: TargetSpec, tiles: int, vectors: int
) -> Iterator[tuple[float, tuple[int, int, int, int, int]]]:
    """Yield estimated cycles for one step of all runs of an image, by partition of a flat spec.

    Yields
    ------
    float
        Cycles.
    tuple of int
        Rows per line, windows per tile, tiles per run, `Lines.width` and `Lines.together`.
    """
    height = spec.output_hw[0]
    divisors = [rows for rows in range(1, height + 1) if height % rows == 0]
    counts = [tiles] if tiles else range(1, SUMS // vectors + 1)
    blocked = vectors > 1 and not folds(spec)
    least = 2  # TVM cannot tensorize a loop of extent 1
    zero = functools.cache(zeros)
    for lined, rows, count in product(divisors, range(least, TILE_ROWS + 1), counts):
        tile = TILE_CYCLES + rows * ROW_CYCLES
        more = STEP_CYCLES + CROWDED * (count * vectors > FEW)
        for lines in _lines(spec, lined, rows):
            high, needed = lines.high, lines.needed
            size = needed * vectors * LANES * 4
            data = needed * _steps(spec) * TILE_BYTES
            few = needed <= MAX_WINDOWS and data <= DATA_SHARE * target.l2_bytes
            share = 0 if blocked and few and _steps(spec) >= DEEP else size / target.l1_bytes
            pooled = high > lined and 2 * size <= POOLED_SHARE * target.l2_bytes
            if lined > 1 and share > 1 and not pooled:
                continue
            filled = layout.blocks(needed, rows)
            runs, last = divmod(filled, count)
            if runs >= UNEVEN and last:
                runs, last = runs + 1, 0
            cycles = runs * max(count * vectors * tile + more, LEAST_CYCLES)
            cycles += max(last * vectors * tile + more, LEAST_CYCLES) * (last > 0)
            cycles *= (1 + LONG * min(share, 1)) * (1 - zero(lines, min(count, filled)))
            cycles *= height // lined
            yield cycles, (lined, rows, count, lines.width, lines.together)


def _lines(spec: Layer, lined: int, rows: int) -> Iterator[Lines]:
    """Yield lines that tiles of `rows` windows may divide: anywhere, or where rows begin.

    Yields
    ------
    Lines
        With `lined` output rows.
    """
    plain = Lines(spec, lined)
    wide, pitch = plain.spec.output_hw[1], plain.pitch
    yield plain
    yield Lines(spec, lined, width=layout.blocks(wide, rows) * rows)
    together, rest = divmod(rows - wide, pitch)
    if together > 0 == rest:
        yield Lines(spec, lined, width=rows, together=together + 1)


def by_run(chosen: Cut) -> bool:
    """Return whether the results of a run can be computed during the next one, and should be.

    Two runs of sums fit into the L1 cache; those of two lines may not.
    """
    lines = chosen.lines
    rows = lines.layer.output_hw[0]
    plain = lines.chunks == 1 and math.prod(lines.spec.kernel) == 1 and not folds(lines.layer)
    return plain and rows == lines.count and _steps(lines.spec) >= BLOCKED_STEPS


def rows_of(chosen: Cut, number: int) -> list[int]:
    """Return the rows of a line of which a tile has windows."""
    lines, first, wide = chosen.lines, number * chosen.rows, chosen.lines.spec.output_hw[1]
    return [
        row
        for row in range(lines.high)
        if lines.window(row, 0) < first + chosen.rows and lines.window(row, wide - 1) >= first
    ]


def zeros(lines: Lines, tiles: int) -> float:
    """Return the fraction of products that read only zeros, or 0 if it saves no time.

    `tiles` is the number per run; the expansion of weights takes as long as two products.
    """
    spec, taps = lines.spec, math.prod(lines.spec.kernel)
    split = not lines.width and lines.high > 1
    padded = isinstance(spec, BinaryConv2d) and spec.pad_value != 0
    if split or padded or tiles < 3 or not 1 < taps <= TAPS:
        return 0
    parts = [
        range(row, min(row + lines.together, lines.high))
        for row in range(0, lines.high, lines.together)
    ]
    every = [*product(range(lines.count), range(spec.kernel[0]), parts)]
    none = sum(not reads(lines, *one) for one in every) / len(every)
    return none if none >= ZEROS else 0


def reads(lines: Lines, line: int, kh: int, rows: Iterable[int]) -> bool:
    """Return whether windows of some rows read the image at one row of the kernel."""
    spec = lines.spec
    first = line * lines.step
    at = ((first + row) * spec.strides[0] + kh * spec.dilations[0] - spec.pads[0] for row in rows)
    return any(0 <= y < spec.height for y in at)


def streams(chosen: Cut, target: TargetSpec) -> bool:
    """Return whether the data of a line comes from the L2 cache, and is not read for other taps."""
    lines = chosen.lines
    size = lines.needed * _steps(lines.spec) * TILE_BYTES
    return math.prod(lines.spec.kernel) == 1 and size > target.l1_bytes
