"""Popcounts in vectors of bytes: a data vector is compared with the same bytes of four channels.

The data words that one kernel row reads for an output column are contiguous in memory (one *run*),
or, with dilation, one run per tap. A run is split into vectors of `BYTES`. For weights in the order
``halves``, a vector holds one tap of two adjacent columns, with the weights of the tap in both
halves.

Differing bits are accumulated in bytes, over at most `MAX_COUNTS` vectors, then in 16 bits, and
finally the lanes of a channel are added. In forms with `FOURS`, four bytes at a time are added in
32 bits instead. A 16-bit sum must hold the differing bits of a whole output: see `fits`.

Rows outside the image are skipped. Columns outside are words of 0 in a copy of the data, and their
contribution is subtracted from the initial value, see `binary_conv2d`.

If a plane z marks exact zeros, ``2 * popcount((d ^ w) & ~z) + popcount(z)`` is ``popcount((d | z) ^
w) + popcount((d & ~z) ^ w)``: forms with `ZEROS` sum over these two planes of data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout
from bnncc.topi_binary.definitions.binary_operands import Operands, Sums
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    Window,
    axes,
    buffer,
    compute,
    int64,
    under,
)
from bnncc.topi_binary.definitions.taps import leaves_image, tests_of
from bnncc.topi_binary.definitions.taps import place as place_of
from bnncc.topi_binary.layout import LANES, QUAD
from bnncc.topi_binary.signature import aliased
from bnncc.topi_binary.spec import BinaryConv2d

FORM, FOURS, ZEROS = "bytes", "-fours", "-zeros"
"""Forms of `binary_conv2d`: `FORM`, optionally followed by `FOURS`, `ZEROS` or both."""

BYTES = 16
"""Bytes per vector."""

MAX_COUNTS = 31
"""Popcounts of one byte (at most 8 each) that fit in a byte."""

MAX_PRODUCTS = 2**16 - 1
"""Largest 16-bit sum."""

Add = Callable[..., None]
Extents = Mapping[str, Any]


def fits(spec: BinaryConv2d) -> bool:
    """Return whether 16-bit sums hold all differing bits, over both planes if there are zeros."""
    return spec.taps * (1 + spec.ternary) <= MAX_PRODUCTS and not (
        spec.ternary and spec.mode == "and"
    )


@dataclass(frozen=True)
class Cut:
    """Partition of the sum for one output.

    Attributes
    ----------
    runs : int
        Contiguous runs per kernel row.
    full, tail : int
        Whole vectors per run, and words in the partial vector after them.
    turns : dict of str to int
        Extents, other than 1, of the loops over sums in bytes: planes, kernel rows, parts of a run.
    reduced : dict of str to int
        Extents of the loops within such a sum: planes, kernel rows, runs; and vectors, ``x``.
    """

    runs: int
    full: int
    tail: int
    turns: dict[str, int]
    reduced: dict[str, int]

    @property
    def vectors(self) -> int:
        """Vectors per run."""
        return self.full + (self.tail > 0)

    @property
    def ragged(self) -> bool:
        """Whether the last part of a run has fewer vectors than the others."""
        return self.turns.get("turn", 1) * self.reduced["x"] > self.vectors


def cut(spec: BinaryConv2d, form: str) -> Cut:
    """Return how the sums of a form are partitioned."""
    halves, (rows, columns) = spec.weight_order == "halves", spec.kernel
    runs = columns if halves or spec.dilations[1] > 1 else 1
    full, tail = divmod(layout.words(spec.channels_per_group) * columns // runs, 4)
    full, tail = (1, 0) if halves else (full, tail)
    vectors, planes = full + (tail > 0), 1 + (ZEROS in form)
    # Kernel rows that do not fit together in bytes are widened one by one.
    split = runs * rows > MAX_COUNTS
    part = _part(full, vectors, max(1, MAX_COUNTS // (runs * (1 if split else rows))))
    turns = {"plane": planes, "kh": rows if split else 1, "turn": -(-vectors // part)}
    reduced = {"kh": 1 if split else rows, "run": runs, "x": part}
    if FOURS in form:
        turns, reduced = {}, {"plane": planes, "kh": rows, "run": runs, "x": vectors}
    turns = {axis: count for axis, count in turns.items() if count > 1}
    return Cut(runs, full, tail, turns, {a: e for a, e in reduced.items() if e > 1 or a == "x"})


def _part(full: int, vectors: int, most: int) -> int:
    """Return how many vectors of a run are summed in bytes: equal parts unless they are too small.

    Examples
    --------
    >>> _part(12, 12, 10), _part(18, 19, 10), _part(15, 15, 10)
    (6, 9, 8)
    """
    if vectors <= most:
        return vectors
    sizes = range(most, most // 2, -1)
    equal = (size for count in (vectors, full) for size in sizes if count % size == 0)
    return next(equal, -(-vectors // -(-vectors // most)))


class ByteSums(Sums):
    """Sums in a form that begins with `FORM`: popcounts in vectors of bytes."""

    def __init__(self, met: Operands, n: Expr, form: str) -> None:
        super().__init__(met, n, form)
        self.count_columns_outside = leaves_image(self.spec, 1)
        self._halves, self._cut = met.spec.weight_order == "halves", cut(met.spec, form)
        self._sides = 1 + self._halves
        self._quads = layout.blocks(met.spec.out_channels, QUAD)
        self._weight = self._weights()

    def _weights(self) -> Buffer:
        """View weights as bytes: four channels, kernel row, run, vector, byte of the channels."""
        stored = self._met.weight
        if self._halves:
            taps = aliased(stored, [stored.shape[0] // 2], "uint64")
            made = buffer("twice", (taps.shape[0], 2), "uint64")
            compute("twice", made, made.shape, lambda tap, side: taps[tap])
            stored = made
        shape = (self._quads, self.spec.kernel[0], self._cut.runs, self._cut.vectors)
        return T.decl_buffer((*shape, QUAD * BYTES), "uint8", data=stored.data)

    def weight_bits(self) -> Buffer:
        """Write the popcount of each tap's weights, by kernel row, kernel column and channel."""
        spec, size, apart = self.spec, self._met.words * 4, self._cut.runs > 1
        count = -(-size // BYTES) + (size % BYTES > 0 and not apart)
        part = min(count, MAX_COUNTS)
        extents = {"kh": spec.kernel[0], "kw": spec.kernel[1], "q": self._quads}
        turns = {"turn": -(-count // part)} if part < count else {}

        def write(i: Mapping[str, Expr], add: Add) -> None:
            run, first = (i["kw"], int64(0)) if apart else (int64(0), i["kw"] * size)
            x = first // BYTES + i["x"] + (i["turn"] * part if turns else 0)
            vector = T.min(x, int64(self._cut.vectors - 1))
            low, high = first - x * BYTES, first + size - x * BYTES

            def term(lane: Expr) -> Expr:
                byte, value = lane % BYTES, self._weight[i["q"], i["kh"], run, vector, lane]
                if size % BYTES:
                    value = T.Select(T.And(byte >= low, byte < high), value, T.uint8(0))
                return T.popcount(value)

            add("", term)

        sums = self._bytes("ones", extents, turns, {"x": part}, "uint8", write)
        return self._totals("ones", extents, turns, sums)

    def summed(self) -> Callable[..., Expr]:
        """Write the sums; return a reader that takes a pixel, a channel vector and a lane."""
        spec, cut, zero, sides = self.spec, self._cut, int64(0), self._sides
        data, vector = self._data()
        wide = -(-spec.output_hw[1] // sides)
        extents = {"n": self._n, "h": spec.output_hw[0], "w": wide, "q": self._quads}

        def write(i: Mapping[str, Expr], add: Add) -> None:
            plane, kh, run = (i.get(axis, zero) for axis in ("plane", "kh", "run"))
            x = i["x"] + (i["turn"] * cut.reduced["x"] if "turn" in i else 0)
            start = vector(plane, i["n"], i["q"], i["h"], kh, i["w"] * sides, run) + x * BYTES
            weight = i["q"], kh, run, x
            read = (
                data[start : start + BYTES],
                self._weight[tuple([*weight, slice(0, QUAD * BYTES)])],
            )

            def differ(kept: int, lane: Expr) -> Expr:
                byte = data[start + lane % BYTES]
                if kept < BYTES:
                    byte = T.Select(lane % BYTES < kept, byte, T.uint8(0))
                return T.popcount(byte ^ self._weight[tuple([*weight, lane])])

            def fours(kept: int, lane: Expr) -> Expr:
                a, b, c, d = (T.Cast("uint32", differ(kept, lane * 4 + k)) for k in range(4))
                return a + b + c + d

            term = fours if FOURS in self._form else differ
            with under(*tests_of(spec, 0, i["h"], kh)):
                whole = x < cut.full if cut.tail or cut.ragged else None
                add("_whole", partial(term, BYTES), read, whole)
                if cut.tail:
                    add("_tail", partial(term, cut.tail * 4), read, x == cut.full)

        dtype = "uint32" if FOURS in self._form else "uint8"
        sums = self._bytes("sum", extents, cut.turns, cut.reduced, dtype, write)
        total = self._totals("sum", extents, cut.turns, sums, sides)
        if sides == 1:
            return lambda n, h, w, o, lane: total[n, h, w, o * LANES + lane]
        return lambda n, h, w, o, lane: total[
            n, h, w // 2, o * (2 * LANES) + (lane // QUAD * (2 * QUAD) + w % 2 * QUAD + lane % QUAD)
        ]

    def _bytes(
        self, name: str, extents: Extents, turns: Extents, reduced: Extents, dtype: str,
        write: Callable[[Mapping[str, Expr], Add], None],
    ) -> Buffer:  # fmt: skip
        """Write the block `name`: vector sums of the terms that `write` adds in its loops."""
        *outer, q = extents
        spatial = {**{a: extents[a] for a in outer}, **turns}
        count = QUAD * (BYTES // (4 if dtype == "uint32" else 1))
        made = buffer(name, (*spatial.values(), self._quads * count), dtype)
        with axes(name, {**spatial, q: self._quads}, reduced) as i:
            here = Window(made, [i[axis] for axis in spatial], i[q] * count, count)
            here.clear()

            def add(
                end: str, term: Callable[[Expr], Expr], read: Sequence[Expr] = (), test: Expr = None
            ) -> None:
                # A block around each: TVM rejects sibling blocks that write the same tensor.
                with under(test), T.sblock(f"{name}{end}_only"):
                    if read:
                        T.reads(here.region, *read)
                        T.writes(here.region)
                    here.add(f"{name}{end}_add", term)

            write(i, add)
        return made

    def _totals(
        self, name: str, extents: Extents, turns: Extents, sums: Buffer, sides: int = 1
    ) -> Buffer:
        """Add parts in 16 bits (``name_wide``), then the lanes of each channel (``name_total``)."""
        *outer, q = extents
        per, wide = int(sums.shape[-1]) // (self._quads * QUAD), QUAD * 8
        if turns:
            made = buffer(
                f"{name}_wide", (*(extents[a] for a in outer), self._quads * wide), "uint16"
            )
            with axes(f"{name}_wide", extents, turns) as i:
                narrow = (*(i[a] for a in (*outer, *turns)),)
                here, first = (
                    Window(made, [i[a] for a in outer], i[q] * wide, wide),
                    i[q] * wide * 2,
                )
                T.reads(sums[tuple([*narrow, slice(first, first + wide * 2)])])
                T.writes(here.region)
                here.clear()

                def both(lane: Expr) -> Expr:
                    one, two = (sums[tuple([*narrow, first + (lane * 2 + k)])] for k in (0, 1))
                    return T.Cast("uint16", one) + T.Cast("uint16", two)

                here.add(f"{name}_wide_add", both)
            sums, per = made, 8
        count = QUAD * sides
        shape = *(extents[a] for a in outer), layout.blocks(self.spec.out_channels) * LANES * sides
        # Separate from the sums: LLVM does not keep an array in registers if an index is unknown.
        scope = "local" if name == "sum" else "global"
        total = T.sblock_alloc_buffer(shape, "int32", scope=scope)
        with axes(f"{name}_total", extents, {}) as i:
            at = [i[a] for a in outer]
            here, first = Window(total, at, i[q] * count, count), i[q] * (QUAD * per)
            T.reads(sums[tuple([*at, slice(first, first + QUAD * per)])])
            T.writes(here.region)

            def lanes(lane: Expr) -> Expr:
                begin, number = lane * per, per
                if sides == 2:
                    begin, number = lane % QUAD * per + lane // QUAD * (per // 2), per // 2
                values = (sums[tuple([*at, first + (begin + k)])] for k in range(number))
                return sum((T.Cast("int32", value) for value in values), T.int32(0))

            here.write(f"{name}_total_add", lanes)
        return total

    def _data(self) -> tuple[Buffer, Callable[..., Expr]]:
        """Return the data as bytes, and a function that locates the first vector of a run.

        Rows are contiguous; each holds the pixels of each phase of the stride (one phase unless the
        order is ``halves``). The data are copied if columns of 0 must be added, or if the words of
        a group, or the columns of a phase, are not contiguous.
        """
        spec, words = self.spec, self._met.words
        phases = spec.strides[1] if self._halves else 1
        pitch = -(-(spec.pads[1] + spec.width + spec.pads[3]) // phases)
        run = words * (spec.kernel[1] if spec.dilations[1] == 1 else 1)
        whole = spec.output_hw[1] % 2 == 0 if self._halves else run % 4 == 0
        moved = leaves_image(spec, 1) or any(spec.pads[1::2]) or spec.groups > 1 or phases > 1
        row, planes = phases * pitch * words, 1 + (ZEROS in self._form)

        def line(plane: Expr, n: Expr, group: Expr, row_: Expr) -> Expr:
            return (((plane * self._n + n) * spec.groups + group) * spec.height + row_) * row

        size = line(planes, int64(0), int64(0), int64(0))
        if moved or planes > 1 or not whole:
            made, size = self._copied(line, size + BYTES // 4, phases, pitch), size + BYTES // 4
        else:
            made = aliased(self._met.data, [size])
        as_bytes = T.decl_buffer((size * 4,), "uint8", data=made.data)

        def vector(plane: Expr, n: Expr, q: Expr, h: Expr, kh: Expr, w: Expr, run: Expr) -> Expr:
            group = q * QUAD // (spec.out_channels // spec.groups) if spec.groups > 1 else int64(0)
            row, _ = place_of(spec, h, w, kh, run)
            column = run * spec.dilations[1]
            if phases > 1:
                column = column % phases * pitch + column // phases
            step = 1 if self._halves else spec.strides[1]
            return (line(plane, n, group, row) + w * (step * words) + column * words) * 4

        return as_bytes, vector

    def _copied(self, line: Callable[..., Expr], total: Expr, phases: int, pitch: int) -> Buffer:
        """Copy the data to `total` words; the last vector may read beyond the last row."""
        spec, words, left = self.spec, self._met.words, self.spec.pads[1]
        size = self._n * (spec.height * spec.width * spec.groups * words)
        data = aliased(self._met.data, [size])
        zero = aliased(self._met.zero, [size]) if ZEROS in self._form else None
        made = buffer("data", (total,), "uint32")
        compute("data", made, (total,), lambda i: T.uint32(0))

        def copy(plane: int, phase: int) -> None:
            first, end = (-(-(c - phase) // phases) for c in (left, left + spec.width))
            count, length = end - first, words
            if spec.groups == phases == 1:
                count, length = 1, spec.width * words

            def value(n: Expr, h: Expr, x: Expr, g: Expr, c: Expr) -> Expr:
                column = (x + first) * phases + (phase - left)
                start = ((n * spec.height + h) * spec.width + column) * spec.groups + g
                word = data[start * words + c]
                if zero is None:
                    return word
                other = zero[start * words + c]
                return word & ~other if plane else word | other

            def where(n: Expr, h: Expr, x: Expr, g: Expr, c: Expr) -> Sequence[Expr]:
                return [line(plane, n, g, h) + (x + (first + phase * pitch)) * words + c]

            extents = self._n, spec.height, count, spec.groups, length
            compute(f"data_{plane}_{phase}", made, extents, value, where)

        for plane, phase in product(range(1 if zero is None else 2), range(phases)):
            copy(plane, phase)
        return made
