"""Row-wise execution: chains of kernels that run in bands of rows, which takes less memory.

A kernel usually runs once, from whole tensors to whole tensors. In a *chain* of consecutive calls,
each kernel runs many times, each time for a *band* of its output rows (`topi_binary.bands`)::

    whole tensor -> conv2d -> [rows] -> binary_conv2d -> [rows] -> bitwise_maxpool -> whole tensor

Only tensors that are read or written outside the chain lie whole in memory. Of the others, a *line
buffer* holds the rows that are still needed: after each band, these are moved to its front, and
the next band appends its rows. So no row is computed twice. A band of the last call is `rows` rows;
the bands of the calls before it are the rows that its windows need in addition to those of the
band before. The first and last bands differ from the rest, which are all alike, so that there are
at most a few variants of a kernel, and a loop calls those of the middle.

An operand in NCHW does not have its rows in one piece: they are collected before each call. A
result that would overwrite an operand is stored apart, because a window may still read it.

`chosen` looks for chains that lower the peak of memory; `Writer` writes the calls of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from bnncc.codegen import arena
from bnncc.codegen.arena import Span
from bnncc.codegen.c_text import Call, Clear, Move, Place, Statement, Step, itemsize
from bnncc.codegen.loops import looped
from bnncc.topi_binary import bands
from bnncc.topi_binary.build import aliases
from bnncc.topi_binary.spec import Spec

LONGEST = 12
"""Maximum number of calls in a chain."""

MOST_ROWS = 8
"""Maximum number of rows per band."""

PRICE = 512
"""Bytes of RAM that must be saved for one more kernel.

It takes about 2 kB of flash, of which microcontrollers have about four times as much as of RAM.
"""

VALUE = ""
"""Root of places of values before memory is planned; their offset is the number of the value."""


@dataclass
class Traced:
    """A call before memory is planned, when each tensor that it makes is a value of its own.

    A value is written once: a result that overwrites an operand is another value.
    """

    kernel: str
    spec: Spec | None
    args: list[Place]
    """As the kernel takes them."""
    outs: list[Place] = field(default_factory=list)
    """If there is a spec: the results, including those that overwrite an operand."""
    variants: dict[tuple[tuple[int, ...], bool], Spec | None] = field(default_factory=dict)
    """Specs of its bands, by their shape, and whether the data have their padding."""

    @cached_property
    def over(self) -> list[int]:
        """For each of `outs`, the index of the operand that it overwrites, or -1."""
        return aliases(self.spec) if self.spec is not None else []

    @property
    def ins(self) -> list[Place]:
        """The operands, if there is a spec."""
        return self.args[: len(self.args) - sum(over < 0 for over in self.over)]

    @cached_property
    def apart(self) -> Spec:
        """The spec of a kernel that overwrites nothing."""
        assert self.spec is not None
        spec: Any = self.spec  # not all kinds have steps
        steps = tuple(replace(s, in_place=False) if s.in_place else s for s in spec.steps)
        made: Spec = spec if steps == spec.steps else replace(spec, steps=steps)
        return made

    @cached_property
    def kinds(self) -> list[str]:
        """How each operand follows the rows of the results."""
        return bands.inputs_by_rows(self.apart)

    @cached_property
    def shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of the operands and results."""
        return bands.tensor_types(self.apart)

    @cached_property
    def height(self) -> int:
        """Rows of the results."""
        return self.apart.output_hw[0]

    @cached_property
    def scattered(self) -> bool:
        """Whether rows of the data are not in one piece."""
        return self.apart.data_layout == "NCHW" and self.apart.channels != 1

    @property
    def values(self) -> set[int]:
        """The values that it uses."""
        return {place.offset for place in (*self.args, *self.outs) if place.root == VALUE}

    def row_bytes(self, number: int) -> int:
        """Return the bytes per row of an operand or result whose rows are in one piece."""
        shape, dtype = self.shapes[number]
        data = number < self.apart.data_tensors and self.apart.data_layout == "NCHW"
        return math.prod(shape[3:] if data else shape[2:]) * itemsize(dtype)

    @cached_property
    def windows(self) -> tuple[bands.Window, ...]:
        """From the results to the data."""
        return bands.windows(self.apart)

    def reads(self, rows: range) -> tuple[range, int, int]:
        """Return the rows of data that some rows of the results read; padding above and below."""
        above = below = 0
        for window in self.windows:
            rows, above, below = window.read(rows)
        return rows, above, below

    def needs(self, by: str, rows: range) -> range:
        """Return the rows of an operand that some rows of the results need."""
        return rows if by == bands.OUTPUT else self.reads(rows)[0]

    def shape_of(self, rows: range) -> tuple[int, ...]:
        """Return what the kernel for some rows of the results depends on."""
        found = [len(rows)]
        for window in self.windows:
            rows, above, below = window.read(rows)
            found += len(rows), above, below
        return tuple(found)


@dataclass(frozen=True)
class Value:
    """A tensor between calls."""

    size: int
    """In bytes."""
    home: Place | None = None
    """Where it lies if not in the arena."""


@dataclass
class Program:
    """The calls of a network before memory is planned."""

    calls: list[Traced]
    values: list[Value]
    kept: set[int]
    """Values that are read after the last call."""

    @cached_property
    def uses(self) -> list[tuple[int, int]]:
        """First and last call that use each value."""
        found: dict[int, tuple[int, int]] = {}
        for number, call in enumerate(self.calls):
            for value in call.values:
                found[value] = (found.get(value, (number, number))[0], number)
        for value in self.kept:
            found[value] = (found.get(value, (0, 0))[0], len(self.calls))
        return [found.get(value, (0, -1)) for value in range(len(self.values))]


Fits = Callable[[Spec], bool]
"""Whether there is a kernel for a band."""


@dataclass(frozen=True)
class Chain:
    """Consecutive calls in bands of `rows` rows of the last one."""

    calls: Sequence[Traced]
    first: int
    """Position of the first call in the program."""
    rows: int
    done: Sequence[Sequence[int]]
    """For each call, how many of its rows exist after each band."""
    readers: dict[int, list[tuple[int, str]]]
    """The calls that read a value made in the chain, and how they follow its rows."""
    buffers: dict[int, int] = field(default_factory=dict)
    """Bytes of the line buffer of each value that does not lie whole in memory."""
    collected: dict[tuple[int, int], int] = field(default_factory=dict)
    """Bytes for rows that are collected, by call and operand."""
    kernels: set[tuple[str, Spec]] = field(default_factory=set)
    """The kernels for bands: of what they are a part, and their specs."""
    padded: set[int] = field(default_factory=set)
    """Calls whose data are collected with their padding above and below."""

    @property
    def last(self) -> int:
        """Position of the last call in the program."""
        return self.first + len(self.calls) - 1

    @property
    def turns(self) -> range:
        """The bands."""
        return range(len(self.done[-1]))

    @cached_property
    def units(self) -> list[int]:
        """For each call, the rows of a band in the middle."""
        middle = len(self.turns) // 2
        return [max(1, done[middle] - done[middle - 1]) for done in self.done]

    def parts(self, k: int, turn: int) -> list[range]:
        """Return the output rows of a call in a band, in parts of the size of the middle's."""
        first, last = self.done[k][turn - 1] if turn else 0, self.done[k][turn]
        unit = self.units[k]
        cuts = range(self.done[k][0] % unit, last, unit)
        ends = [first, *(cut for cut in cuts if cut > first), last] if first < last else []
        return [range(a, b) for a, b in pairwise(ends)]

    def band(self, k: int, rows: range) -> Spec | None:
        """Return the spec of the kernel for some rows of the results of a call."""
        known, key = self.calls[k].variants, (self.calls[k].shape_of(rows), k in self.padded)
        if key not in known:
            known[key] = bands.band(self.calls[k].apart, rows, k in self.padded)
        return known[key]

    def base(self, k: int, value: int, turn: int) -> int:
        """Return the first row in the line buffer of a value that call `k` makes, in a band."""
        if turn == 0:
            return 0
        low = self.done[k][turn - 1]
        for r, by in self.readers.get(value, ()):
            at = self.done[r][turn - 1]
            if at < self.calls[r].height:
                low = min(low, self.calls[r].needs(by, range(at, at + 1)).start)
        return low


def chained(program: Program, first: int, last: int, rows: int, fits: Fits) -> Chain | None:
    """Return a chain of calls, or None if they cannot run in bands."""
    calls = program.calls[first : last + 1]
    if not all(call.spec is not None and bands.has_bands(call.apart) for call in calls):
        return None
    readers, count = _readers(calls), -(-calls[-1].height // rows)
    if readers is None or count < 3:
        return None

    def whole(value: int) -> bool:
        return program.values[value].home is not None or program.uses[value][1] > last

    done = [[0] * count for _ in calls]
    done[-1] = [min(calls[-1].height, rows * (turn + 1)) for turn in range(count)]
    for k in reversed(range(len(calls) - 1)):
        made = [place.offset for place in calls[k].outs]
        following = [one for value in made for one in readers.get(value, ())]
        if not following:
            return None
        for turn in range(count):
            needed = [calls[r].needs(by, range(done[r][turn])).stop for r, by in following]
            done[k][turn] = max(needed)
        if any(map(whole, made)):
            done[k][-1] = calls[k].height
    found = Chain(calls, first, rows, done, readers)
    for k, call in enumerate(calls):
        data = call.ins[: call.apart.data_tensors]
        inside = any(place.offset in readers for place in data if place.root == VALUE)
        pads = not inside and len(data) == 1 and bands.padded_by_zeros(call.apart)
        found.padded.update([k] * pads)
        parts = [part for turn in found.turns for part in found.parts(k, turn)]
        variants = {call.shape_of(part): found.band(k, part) for part in parts}.values()
        if not all(variant is not None and fits(variant) for variant in variants):
            return None
        found.kernels.update((call.kernel, spec) for spec in variants if spec is not None)
        for number, value in enumerate((place.offset for place in call.outs), len(call.ins)):
            if not whole(value):
                most = max(done[k][turn] - found.base(k, value, turn) for turn in found.turns)
                found.buffers[value] = most * call.row_bytes(number)
        if pads or call.scattered:
            rows_of = max(variant.height for variant in variants if variant is not None)
            size = rows_of * call.row_bytes(0) * (call.shapes[0][0][1] if call.scattered else 1)
            found.collected.update({(k, number): size for number in range(len(data))})
    return found


def _readers(calls: Sequence[Traced]) -> dict[int, list[tuple[int, str]]] | None:
    """Return who reads the values made in a chain; None if one of them is not read by rows."""
    made: dict[int, tuple[tuple[int, ...], str]] = {}
    found: dict[int, list[tuple[int, str]]] = {}
    for k, call in enumerate(calls):
        for number, (place, by) in enumerate(zip(call.ins, call.kinds, strict=True)):
            if place.root != VALUE or place.offset not in made:
                continue
            apart = by not in (bands.DATA, bands.OUTPUT) or (by == bands.DATA and call.scattered)
            if apart or made[place.offset] != call.shapes[number]:
                return None
            found.setdefault(place.offset, []).append((k, by))
        types = call.shapes[len(call.ins) :]
        made |= {place.offset: kind for place, kind in zip(call.outs, types, strict=True)}
    return found


def chosen(program: Program, fits: Fits) -> list[Chain]:
    """Return chains that lower the peak of memory, in order; none if none does.

    Of the chains that contain the call with the peak, the one with the lowest peak is taken, until
    none lowers it further; kernels for bands have their `PRICE`. Bands then become as large as the
    peak allows.
    """
    known: dict[tuple[int, int, int], Chain | None] = {}

    def made(first: int, last: int, rows: int) -> Chain | None:
        key = first, last, rows
        if key not in known:
            known[key] = chained(program, first, last, rows, fits)
        return known[key]

    def peak(chains: Sequence[Chain]) -> tuple[int, int]:
        used = live(program, chains)
        kernels = set[tuple[str, Spec]]().union(*(one.kernels for one in chains))
        more = len(kernels) - len({kernel for kernel, _ in kernels})
        return max(used) + PRICE * more, used.count(max(used))

    def others(chains: list[Chain]) -> Iterator[tuple[tuple[int, int], int, list[Chain]]]:
        used = live(program, chains)
        at = used.index(max(used))
        for first in range(max(0, at - LONGEST + 1), at + 1):
            for last in range(max(at, first + 1), min(len(used), first + LONGEST)):
                if (new := made(first, last, 1)) is not None:
                    rest = [one for one in chains if one.last < first or one.first > last]
                    yield peak([*rest, new]), last - first, [*rest, new]

    chains: list[Chain] = []
    while program.calls:
        best = min(others(chains), key=lambda found: found[:2], default=None)
        if best is None or best[0] >= peak(chains):
            break
        chains = best[2]
    if not chains or (lowest := peak(chains)[0]) >= peak([])[0]:
        return []
    for number, one in enumerate(chains):
        for rows in range(2, MOST_ROWS + 1):
            larger = made(one.first, one.last, rows)
            rest = [*chains[:number], *chains[number + 1 :]]
            if larger is not None and peak([*rest, larger])[0] <= lowest:
                chains[number] = larger
    return sorted(chains, key=lambda one: one.first)


def live(program: Program, chains: Sequence[Chain]) -> list[int]:
    """Return the bytes of the arena in use during each call."""
    return arena.live([*spans(program, chains)[0].values()], len(program.calls))


Key = int | tuple[int, int]
"""A value, or an operand whose rows are collected, by call and index."""


def spans(program: Program, chains: Sequence[Chain]) -> tuple[dict[Key, Span], list[int]]:
    """Return what is in the arena, and for each value the one whose memory it shares."""
    inside = {n: one for one in chains for n in range(one.first, one.last + 1)}
    shared = list(range(len(program.values)))
    for number, call in enumerate(program.calls):
        for out, over in zip(call.outs, call.over, strict=bool(call.outs)):
            if over >= 0 and number not in inside:
                shared[out.offset] = shared[call.args[over].offset]
    away = {key for key, v in zip(shared, program.values, strict=True) if v.home is not None}
    found: dict[Key, Span] = {}
    for value, (first, last) in enumerate(program.uses):
        key = shared[value]
        if last < first or key in away:
            continue
        first = inside[first].first if first in inside else first
        last = inside[last].last if last in inside else last
        if key in found:
            first, last = min(first, found[key].first), max(last, found[key].last)
        found[key] = Span(program.values[key].size, first, last)
    for one in chains:
        for value, size in one.buffers.items():
            found[value] = replace(found[value], size=size)
        for (k, number), size in one.collected.items():
            found[one.first + k, number] = Span(size, one.first, one.last)
    return found, shared


@dataclass(frozen=True)
class Writer:
    """Writes the calls of a chain."""

    chain: Chain
    place: Callable[[Place], Place]
    """Returns the place of a value, or of a constant or input."""
    collected: dict[Key, int]
    """Offsets in the arena of rows that are collected."""
    variant: Callable[[Traced, Spec], str]
    """Takes a call and the spec of a band; returns the name of the kernel for it."""

    @cached_property
    def _makers(self) -> dict[int, tuple[int, int]]:
        """For each value made in the chain, its call, and its index among the call's tensors."""
        return {out.offset: (k, number)
                for k, call in enumerate(self.chain.calls)
                for number, out in enumerate(call.outs, len(call.ins))}  # fmt: skip

    def statements(self) -> list[Statement]:
        """Return the calls of all bands, and the copies that they need."""
        turns: list[list[list[list[Step]]]] = []  # by turn, call, and part of a band
        for turn in self.chain.turns:
            turns.append([[self._part(k, turn, rows) for rows in self.chain.parts(k, turn)]
                          for k in range(len(self.chain.calls))])  # fmt: skip
            turns[-1].append([self._kept(turn)])
        return looped(turns)

    def _part(self, k: int, turn: int, rows: range) -> list[Step]:
        """Return the call of a kernel for some rows of its results, and copies before it."""
        chain, call, part = self.chain, self.chain.calls[k], self.chain.band(k, rows)
        assert part is not None  # as `chained` has found
        items: list[Step] = []
        args = []
        for number, operand in enumerate((*call.ins, *call.outs)):
            by = call.kinds[number] if number < len(call.ins) else bands.OUTPUT
            here = self.place(operand)
            if (k, number) in chain.collected:
                read, above, below = call.reads(rows)
                line, pieces = call.row_bytes(number), call.shapes[0][0][1] if call.scattered else 1
                to = Place("base", here.dtype, self.collected[chain.first + k, number])
                args.append(to)
                if k in chain.padded and above + below:
                    items.append(Clear(to, pieces * part.height * line))
                to = replace(to, offset=to.offset + above * line * (k in chain.padded))
                origin = replace(here, offset=here.offset + read.start * line)
                apart = part.height * line, call.apart.height * line
                items.append(Move(to, origin, len(read) * line, pieces, apart))
                continue
            start = 0
            if by == bands.CLASSES:
                start = bands.class_of(call.apart, rows.start) * itemsize(here.dtype)
            elif by:
                start = call.needs(by, rows).start * call.row_bytes(number)
                if operand.root == VALUE and operand.offset in chain.buffers:
                    base = chain.base(self._makers[operand.offset][0], operand.offset, turn)
                    start -= base * call.row_bytes(number)
            args.append(replace(here, offset=here.offset + start))
        return [*items, Call(self.variant(call, part), tuple(args))]

    def _kept(self, turn: int) -> list[Step]:
        """Return the copies of rows that are needed after a band to the front of their buffers."""
        chain, items = self.chain, list[Step]()
        for value in chain.buffers if turn + 1 < len(chain.turns) else ():
            k, number = self._makers[value]
            call, base, keeps = chain.calls[k], *(chain.base(k, value, t) for t in (turn, turn + 1))
            size = call.row_bytes(number)
            start = self.place(call.outs[number - len(call.ins)])
            if base < keeps < chain.done[k][turn]:
                items += _shifted(
                    start, (keeps - base) * size, (chain.done[k][turn] - keeps) * size
                )
        return items


def _shifted(to: Place, distance: int, size: int) -> list[Step]:
    """Return copies to `to` of what lies `distance` bytes behind it, in pieces without overlap."""
    pieces, rest = divmod(size, distance)
    apart = distance, distance
    items: list[Step] = []
    for count, start, piece in ((pieces, 0, distance), (rest > 0, pieces * distance, rest)):
        here = replace(to, offset=to.offset + start)
        origin = replace(here, offset=here.offset + distance)
        items += [Move(here, origin, piece, int(count), apart)] * (count > 0)
    return items
