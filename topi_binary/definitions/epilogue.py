"""The epilogue of a kernel: each step is a named block over the lanes of a channel vector.

After the anchor follows the block ``out``, over each pixel and each `layout.LANES` channels, and
``out_last`` for last channels that do not fill a vector. In these, values are loaded into tensors
of one vector, each step is a block over the lanes of those, and results are stored to the outputs.
Parameters are padded to whole vectors (`layout.pad_lanes`), images are not.

`Steps` defines what is computed and `Lanes` how the values of all lanes are written. Templates,
which write vector expressions, have a `Lanes` of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout
from bnncc.topi_binary.algebra import (
    Algebra,
    changed,
    compared,
    conditions,
    nearest,
    rounded,
    stands_for,
)
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    accumulate,
    buffer,
    compute,
    int64,
)
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.definitions.terms import SCALAR
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.step import (
    FETCHED,
    NUMBERS,
    Step,
    output_kinds,
    with_tensors,
)

MAX_XORS = 7
"""Up to this many thresholds, planes are XORs of comparisons, without computing the level."""

Lane = Expr


@dataclass(frozen=True)
class Pixels:
    """Iteration domain of the steps."""

    extents: tuple[Any, int, int, int]
    """Images, rows, columns and channels."""
    rank: int = 4
    """Rank of the other tensors: 4, or 2 for ``[n, channels]``."""

    def at(self, where: str = "NHWC") -> Callable[..., Sequence[Expr]]:
        """Return a function from pixel and channel to the index in a tensor of layout `where`."""
        if self.rank == 2:
            return lambda n, h, w, c: (n, c)
        if where == "NCHW":
            return lambda n, h, w, c: (n, c, h, w)
        return lambda n, h, w, c: (n, h, w, c)


def half_view(plane: Buffer, channels: int) -> Buffer:
    """View a packed tensor as half words.

    Parameters
    ----------
    plane : Buffer of uint32
        Packed tensor; words are the last axis.
    channels : int
        Channels before packing.

    Returns
    -------
    Buffer of uint16
        The same memory, with ``2 * words(channels)`` as the last extent.
    """
    shape = [*plane.shape[:-1], 2 * layout.words(channels)]
    return T.decl_buffer(shape, "uint16", data=plane.data)


def views(steps: Sequence[Step], outputs: Sequence[Buffer], channels: int) -> list[Buffer]:
    """View `outputs` of a kernel as what the steps store: half words, levels."""
    kinds = [kind for step in steps for kind in output_kinds(step)]
    return [_view(kind, b, channels) for kind, b in zip(kinds, outputs, strict=True)]


def _view(kind: str, made: Buffer, channels: int) -> Buffer:
    if kind in ("bits", "planes"):
        return half_view(made, channels)
    if kind not in NUMBERS or kind == "floats":
        return T.decl_buffer(list(made.shape), made.dtype, data=made.data)
    shape = [*made.shape[:-1], layout.blocks(channels) * LANES]
    return T.decl_buffer(shape, NUMBERS[kind], data=made.data)


Values = Any
"""Values of all lanes, as `Lanes` returns them; indexed by lane."""

Of = Callable[[Lane], Expr]
"""Takes a lane; returns its value."""

Start = Callable[[Place, Lane], Expr]
"""Takes the place of a vector and a lane; returns a value."""

Below = Callable[[Step, Sequence[Buffer], Place, Values], list[Of]]
"""Takes a ``threshold`` step whose limits are stored as bit slices, its inputs, the place and the
lanes of the accumulator; returns the conditions that its planes hold."""


class Lanes:
    """Writes values of all lanes as blocks over tensors, lane by lane."""

    algebra: Algebra = SCALAR

    def const(self, dtype: str, value: int) -> Expr:
        """Return a constant for every lane."""
        return tirx.const(value, dtype)

    def cast(self, dtype: str, value: Expr) -> Expr:
        """Return `value` converted to another type."""
        return T.Cast(dtype, value)

    def spread(self, value: Expr) -> Expr:
        """Return a scalar broadcast to every lane."""
        return value

    def each(self, name: str, dtype: str, value: Of) -> Values:
        """Write a value for every lane."""
        return compute(name, buffer(name, (LANES,), dtype), (LANES,), value)

    def fetched(self, name: str, dtype: str, at: Place, value: Of, where: str = "NHWC") -> Values:
        """Load the existing lanes from a tensor; the others become 0."""
        if at.lanes == LANES:
            return self.each(name, dtype, value)
        zero = self.const(dtype, 0)
        return self.each(
            name, dtype, lambda lane: T.if_then_else(lane < at.lanes, value(lane), zero)
        )

    def packed(self, name: str, condition: Of) -> Expr:
        """Write conditions as the bits of half a word, and return it."""
        lanes, half = buffer(f"{name}_lanes", (LANES,), "uint32"), buffer(name, (1,), "uint16")
        compute(f"{name}_lanes", lanes, (LANES,), lambda lane: T.Cast("uint32", condition(lane)))

        def step(found: Expr, lane: Lane) -> Expr:
            one = T.shift_left(T.Cast("uint16", lanes[lane]), T.Cast("uint16", lane))
            return T.bitwise_or(found, one)

        first = int64(0)
        accumulate(f"{name}_pack", half, (), (LANES,), T.uint16(0), step, lambda: (first,))
        return half[first]

    def half(self, name: str, out: Buffer, value: Expr, where: list[Expr]) -> None:
        """Store half a word."""
        with T.sblock(f"{name}_half"):
            T.buffer_store(out, value, where)

    def store(self, name: str, out: Buffer, at: Place, value: Of, where: str = "NHWC") -> None:
        """Store the existing lanes."""
        compute(name, out, (at.lanes,), value, lambda lane: at.index(at.channel(lane), where))


def stored(made: Buffer) -> Start:
    """Return a reader of a tensor that has the shape of the output."""
    return lambda at, lane: at.of(made, lane)


def epilogue(
    operator: Operator, steps: Sequence[Step], params: Sequence[Buffer], pixels: Pixels,
    value: Start | Sequence[Start] | None = None, acc: Sequence[Start] = (),
    below: Below | None = None, padded: bool = False, short: bool = False,
) -> None:  # fmt: skip
    """Write `steps` after an anchor.

    Parameters
    ----------
    operator : Operator
        The kernel, whose outputs are those of the steps.
    steps : sequence of Step
        Steps in order.
    params : sequence of Buffer
        Inputs of the steps, in order.
    pixels : Pixels
        Iteration domain.
    value : callable, optional
        Initial value, default: the accumulator. May have two readers, like `acc`.
    acc : sequence of callable, optional
        The accumulator; a second reader, if any, is for last channels that do not fill a vector.
    below : callable, optional
        Writes thresholds whose limits are stored as bit slices.
    padded : bool, default False
        Whether `value`, or `acc`, is defined in all lanes of the last vector.
    short : bool, default False
        Whether the accumulator fits in 16 bits, in which thresholds are then compared.
    """
    short = short and below is None and all(step.op == "threshold" for step in steps)
    channels = pixels.extents[3]
    full, rest = divmod(channels, LANES)
    for name, first, count, lanes in (("out", 0, full, LANES), ("out_last", full, 1, rest)):
        if not count or not lanes:
            continue
        # Separate views: threads could not share a buffer that two blocks write.
        outputs = views(steps, operator.outputs, channels)
        extents = [int64(e) if isinstance(e, int) else e for e in (*pixels.extents[:3], count)]
        with T.grid(*extents) as loops, T.sblock(name):
            n, h, w, o = T.axis.remap("SSSS", list(loops))
            at = Place(n, h, w, o + first, channels, lanes, pixels.rank)
            which = -1 if lanes < LANES else 0
            mine = acc[which] if acc else None
            start = value[which] if isinstance(value, Sequence) else value
            _Fetching(at, start, mine, below, padded, short).write(steps, params, outputs)


class Steps:
    """Writes the steps for one vector.

    Parameters
    ----------
    at : Place
        Place of the vector.
    lanes : Lanes
        Writer of values.
    value, acc : Values, optional
        Initial value (default: the accumulator), and the accumulator.
    halved : bool, default False
        Whether the accumulator is half of the value that the steps expect. Thresholds and scales
        are adjusted instead, at no cost; only levels need the doubled value.
    """

    _below: Below | None = None
    _short = False

    def __init__(
        self, at: Place, lanes: Lanes, value: Values = None, acc: Values = None,
        halved: bool = False,
    ) -> None:  # fmt: skip
        self._at, self._lanes, self._algebra = at, lanes, lanes.algebra
        self._value, self._acc = value, acc
        self._halved, self._halved_value = halved, halved and value is None

    @property
    def acc(self) -> Values:
        """The accumulator."""
        return self._acc

    @property
    def whole(self) -> Values:
        """The accumulator, doubled if it was halved."""
        if self._halved:
            half = self.acc
            self._acc = self._lanes.each("acc_whole", "int32", lambda i: half[i] + half[i])
            self._halved = False
            if self._value is None:  # it will be computed from the doubled accumulator
                self._halved_value = False
        return self.acc

    @property
    def value(self) -> Values:
        """The running value, still halved if the accumulator is and no step has doubled it."""
        if self._value is None:
            acc, real = self.acc, self._algebra.real
            self._value = self._lanes.each("value", "float32", lambda i: real(acc[i]))
        return self._value

    def write(
        self, steps: Sequence[Step], params: Sequence[Buffer], outputs: Sequence[Buffer]
    ) -> Values:
        """Write steps in order; return the final value, or None if no step used it."""
        for number, (step, taken, made) in enumerate(with_tensors(steps, params, outputs)):
            name = f"{step.op}_{number}"
            if self._halved_value and not (
                step.op in ("threshold", "affine") or step.way.startswith("acc")
            ):
                self._double(name)
            if step.op == "levels":
                self._levels(name, step, taken, made)
            elif step.op == "store":
                self._lanes.store(name, made[0], self._at, self._stored(step), step.layout)
            elif step.op in ("bits", "threshold"):
                for plane, test in enumerate(self._conditions(step, taken)):
                    self._pack(f"{name}_{plane}", made[plane], test)
            else:
                self._change(name, step, taken)
        return self._value

    def _stored(self, step: Step) -> Of:
        """Return the running value in the type that is stored."""
        value = self.value
        if step.dtype == "float32":
            return value.__getitem__
        return lambda lane: self._lanes.cast(step.dtype, value[lane])

    def _double(self, name: str) -> None:
        half, two = self.value, self._algebra.number(2.0)
        self._value = self._lanes.each(f"{name}_whole", "float32", lambda i: half[i] * two)
        self._halved_value = False

    def _pack(self, name: str, out: Buffer, test: Of) -> None:
        self._store_half(name, out, self._half(name, test))

    def _half(self, name: str, test: Of) -> Expr:
        """Write conditions as half a word, with 0 in lanes that do not exist."""
        half = self._lanes.packed(name, test)
        if self._at.lanes == LANES:
            return half
        return T.bitwise_and(half, T.uint16(2**self._at.lanes - 1))

    def _store_half(self, name: str, out: Buffer, half: Expr) -> None:
        at = self._at
        self._lanes.half(name, out, half, at.index(at.block))
        if not at.ends_word:
            return
        if at.lanes < LANES:  # the last block
            T.buffer_store(out, T.uint16(0), at.index(at.block + 1))
        else:
            with T.If(at.block == layout.blocks(at.channels) - 1), T.Then():
                T.buffer_store(out, T.uint16(0), at.index(at.block + 1))

    def _conditions(self, step: Step, taken: Sequence[Buffer]) -> list[Of]:
        by_acc, at = step.op == "threshold", self._at
        seen = self.acc if by_acc else self.value
        if by_acc and self._below is not None:
            return self._below(step, taken, at, seen)

        def limit(buffer: Buffer, lane: Lane) -> Expr:
            found = buffer[at.channel(lane)]
            if self._short:  # as every accumulator is within these bounds, its comparisons agree
                most, least = T.int32(2**15 - 1), T.int32(-(2**15))
                return T.Cast("int16", T.max(T.min(found, most), least))
            # 2 * a <= t is a <= t >> 1, and 2 * a > t is a > t >> 1 (shifts round down).
            return T.shift_right(found, self._lanes.const("int32", 1)) if self._halved else found

        def plane(number: int) -> Of:
            return lambda lane: conditions(
                self._algebra, step, seen[lane], [limit(buffer, lane) for buffer in taken]
            )[number]

        return [plane(number) for number in range(1 + step.zero)]

    def _change(self, name: str, step: Step, taken: Sequence[Buffer]) -> None:
        at, source, number = self._at, self.value, self._algebra.number
        doubled = self._halved_value
        fetched = self._fetched(f"{name}_tensor", step, taken[0]) if step.op in FETCHED else None

        def after(lane: Lane) -> Expr:
            params = (
                [fetched[lane]] if fetched is not None else [p[at.channel(lane)] for p in taken]
            )
            if doubled:  # the first step is affine: its scale is doubled instead
                params[0] = params[0] * number(2.0)
            return changed(self._algebra, step, source[lane], params)

        self._value = self._lanes.each(name, "float32", after)
        self._halved_value = False

    def _fetched(self, name: str, step: Step, tensor: Buffer) -> Values:
        at = self._at
        if step.op == "gate":
            return self._lanes.fetched(name, "float32", at, lambda i: tensor[at.n, at.channel(i)])
        there = at.repeated(step.period)
        if step.period == 1:
            one = self._lanes.spread(tensor[tuple(there.index(there.channel()))])
            return self._lanes.each(name, "float32", lambda _: one)

        def read(lane: Lane) -> Expr:
            found = tensor[tuple(there.index(there.channel(lane), step.layout))]
            return found if step.dtype == "float32" else self._lanes.cast("float32", found)

        return self._lanes.fetched(name, "float32", at, read, step.layout)

    def _levels(
        self, name: str, step: Step, taken: Sequence[Buffer], made: Sequence[Buffer]
    ) -> None:
        at, lanes = self._at, self._lanes
        if step.forms == ("planes",) and step.way in ("acc", "value") and step.count <= MAX_XORS:
            self._xors(name, step, taken, made)
            return
        level = lanes.each(name, "int32", self._level(name, step, taken))
        plane = 0
        for kind, out in zip(output_kinds(step), made, strict=True):
            if kind == "planes":
                self._pack(f"{name}_{plane}", out, self._bit(level, plane))
                plane += 1
            elif kind in ("value", "table"):
                meaning = self._meaning(step, kind, level, taken)
                lanes.store(f"{name}_{kind}", out, at, meaning, step.layout)
            else:
                self._numbers(f"{name}_{kind}", NUMBERS[kind], out, level)

    def _bit(self, level: Values, number: int) -> Of:
        one, none = self._lanes.const("int32", 1 << number), self._lanes.const("int32", 0)
        return lambda lane: T.bitwise_and(level[lane], one) != none

    def _meaning(self, step: Step, kind: str, level: Values, taken: Sequence[Buffer]) -> Of:
        """Return the number that a level stands for."""
        if kind == "table":
            return lambda lane: taken[-1][level[lane]]
        return lambda lane: stands_for(self._algebra, step, level[lane])

    def _numbers(self, name: str, dtype: str, out: Buffer, level: Values) -> None:
        """Write levels as numbers, 0 in lanes that do not exist."""
        at, lanes = self._at, self._lanes

        def number(lane: Lane) -> Expr:
            one = lanes.cast(dtype, level[lane])
            if at.lanes == LANES:
                return one
            return T.Select(lane < at.lanes, one, lanes.const(dtype, 0))

        lanes.store(name, out, replace(at, lanes=LANES), number)

    def _reached(self, step: Step, taken: Sequence[Buffer]) -> Callable[[int, Lane], Expr]:
        """Return a function of threshold number and lane: whether the threshold is reached."""
        seen, at = self.whole if step.way == "acc" else self.value, self._at
        if step.flip:
            value = seen
            seen = self._lanes.each(
                "flipped", "int32", lambda lane: value[lane] ^ taken[1][at.channel(lane)]
            )
        return lambda number, lane: compared(
            self._algebra, step, seen[lane], ">=", taken[0][number, at.channel(lane)]
        )

    def _level(self, name: str, step: Step, taken: Sequence[Buffer]) -> Of:
        """Return the level of a value, see `step.WAYS`."""
        at, algebra, lanes = self._at, self._algebra, self._lanes
        if step.way == "acc-scale":
            acc = self.whole
            return lambda lane: nearest(
                algebra, step, algebra.real(acc[lane]), *(t[at.channel(lane)] for t in taken[:2])
            )
        if step.way == "whole":
            value = self.value
            return lambda lane: algebra.whole(value[lane])
        if step.way == "round":
            seen, ends = self.value, [lanes.spread(taken[0][k]) for k in range(2)]
            return lambda lane: rounded(algebra, seen[lane], *ends)
        if step.way == "search":
            return self._search(name, step, taken[0])
        reached = self._reached(step, taken)

        def count(lane: Lane) -> Expr:
            total = lanes.const("int32", 0)
            for number in range(step.count):
                total = total + self._one(reached(number, lane))
            return total

        return count

    def _one(self, condition: Expr) -> Expr:
        return T.Select(condition, self._lanes.const("int32", 1), self._lanes.const("int32", 0))

    def _search(self, name: str, step: Step, table: Buffer) -> Of:
        """Estimate the level linearly, then compare with the thresholds on both sides."""
        value, lanes = self.value, self._lanes
        slope, offset = lanes.spread(table[0]), lanes.spread(table[1])
        guess = lanes.each(f"{name}_guess", "int32", lambda lane: nearest(
            self._algebra, step, value[lane], slope, offset))  # fmt: skip

        def level(lane: Lane) -> Expr:
            place = lanes.cast("int64", guess[lane])
            below, above = (table[place + lanes.const("int64", i)] for i in (2, 3))
            up, down = (
                compared(self._algebra, step, value[lane], how, limit)
                for how, limit in ((">=", above), ("<", below))
            )
            return guess[lane] + self._one(up) - self._one(down)

        return level

    def _xors(self, name: str, step: Step, taken: Sequence[Buffer], made: Sequence[Buffer]) -> None:
        """Write planes without computing the level.

        Bit j of a level is the XOR of the comparisons with those thresholds whose number is a
        multiple of ``2**j``.
        """
        reached = self._reached(step, taken)
        halves = [
            self._half(f"{name}_reached_{number}", partial(reached, number))
            for number in range(step.count)
        ]
        for plane, out in enumerate(made):
            every = 2**plane
            odd = reduce(T.bitwise_xor, halves[every - 1 :: every])
            self._store_half(f"{name}_{plane}", out, odd)


class _Fetching(Steps):
    """Steps that load the initial value when it is first needed."""

    def __init__(
        self, at: Place, start: Start | None, source: Start | None, below: Below | None,
        padded: bool, short: bool,
    ) -> None:  # fmt: skip
        super().__init__(at, Lanes())
        self._start, self._source, self._below, self._short = start, source, below, short
        self._valued = replace(at, lanes=LANES) if padded else at

    @property
    def acc(self) -> Values:
        """The accumulator."""
        if self._acc is None:
            at, source = self._valued, self._source
            assert source is not None

            def read(lane: Lane) -> Expr:
                found = source(at, lane)
                return self._lanes.cast("int16", found) if self._short else found

            dtype = "int16" if self._short else "int32"
            self._acc = self._lanes.fetched("acc_lanes", dtype, at, read)
        return self._acc

    @property
    def value(self) -> Values:
        """The running value."""
        start, at = self._start, self._at
        if self._value is None and start is not None:
            read = partial(start, at)
            self._value = self._lanes.fetched("value", "float32", self._valued, read)
        return super().value
