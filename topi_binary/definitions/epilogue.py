"""The steps of an epilogue, one named block for each, on the lanes of one vector of channels.

Behind an anchor stands the block ``out``, for each pixel and each `layout.LANES` channels, and
``out_last`` where the last few channels fill no vector. In them values are fetched into tensors of
so many lanes, each step is a block of its own over those, and what it stores goes to the outputs.
Parameters are padded to whole vectors (`layout.pad_lanes`), images are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.topi_binary import layout
from bnncc.topi_binary.algebra import changed, conditions, nearest, stands_for
from bnncc.topi_binary.definitions.blocks import (
    Buffer,
    Expr,
    accumulate,
    bit,
    buffer,
    compute,
    int64,
)
from bnncc.topi_binary.definitions.terms import SCALAR
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.step import FETCHED, Step, output_kinds, step_inputs, step_outputs

NUMBERS = {"bytes": "uint8", "pairs": "uint16", "floats": "float32"}
"""Type of one level, in the forms of `step.FORMS` where each is a number."""

MAX_XORS = 7
"""Thresholds up to which planes are XORs of comparisons, without a number between them."""

Lane = Expr


@dataclass(frozen=True)
class Pixels:
    """What the steps go through.

    Attributes
    ----------
    extents : tuple
        Images, rows, columns and channels.
    rank : int
        Of tensors beside: 4, or 2 for ``[n, channels]``.
    """

    extents: tuple[Any, int, int, int]
    rank: int = 4

    def at(self, where: str = "NHWC") -> Callable[..., Sequence[Expr]]:
        """Return how a pixel and a channel are the index of a tensor."""
        if self.rank == 2:
            return lambda n, h, w, c: (n, c)
        if where == "NCHW":
            return lambda n, h, w, c: (n, c, h, w)
        return lambda n, h, w, c: (n, h, w, c)


@dataclass(frozen=True)
class Vector:
    """The channels that one turn of the steps is about.

    Attributes
    ----------
    pixels : Pixels
        All of them.
    where : tuple of Expr
        Image, row and column.
    block : Expr
        Which `layout.LANES` channels.
    lanes : int
        How many of them exist.
    """

    pixels: Pixels
    where: tuple[Expr, Expr, Expr]
    block: Expr
    lanes: int = LANES

    def channel(self, lane: Lane) -> Expr:
        """Return the channel in a lane."""
        return self.block * LANES + lane

    def at(self, lane: Lane, where: str = "NHWC") -> list[Expr]:
        """Return the index of a lane in a tensor."""
        return list(self.pixels.at(where)(*self.where, self.channel(lane)))

    def pixel(self, last: Expr) -> list[Expr]:
        """Return the index of an element of a pixel, whatever its elements are."""
        return list(self.pixels.at()(*self.where, last))

    def repeated(self, period: int) -> Vector:
        """Return where the lanes lie in a tensor that repeats every `period` channels."""
        return replace(self, block=self.block % (period // LANES)) if period else self

    def fetched(self, name: str, dtype: str, value: Callable[[Lane], Expr]) -> Buffer:
        """Write values of the lanes that exist into a tensor of them all; the others are 0."""
        zero = tirx.const(0, dtype)
        made = buffer(name, (LANES,), dtype)
        if self.lanes == LANES:
            return compute(name, made, (LANES,), value)
        return compute(name, made, (LANES,), lambda lane: T.if_then_else(
            lane < self.lanes, value(lane), zero))  # fmt: skip

    def packed(self, name: str, condition: Callable[[Lane], Expr]) -> Expr:
        """Write a condition as the bits of half a word, 0 in lanes that do not exist; return it."""
        lanes, half = buffer(f"{name}_lanes", (LANES,), "bool"), buffer(name, (1,), "uint16")
        compute(f"{name}_lanes", lanes, (LANES,), condition)

        def step(found: Expr, lane: Lane) -> Expr:
            one = T.shift_left(T.Cast("uint16", lanes[lane]), T.Cast("uint16", lane))
            return T.bitwise_or(found, one)

        first = int64(0)
        accumulate(f"{name}_pack", half, (), (LANES,), T.uint16(0), step, lambda: (first,))
        if self.lanes == LANES:
            return half[first]
        return T.bitwise_and(half[first], T.uint16(2**self.lanes - 1))

    def store(self, name: str, half: Expr, halves: Buffer) -> None:
        """Write half a word to where it lies."""
        with T.sblock(f"{name}_half"):
            T.buffer_store(halves, half, self.pixel(self.block))
        self.end_word(halves)

    def end_word(self, halves: Buffer) -> None:
        """Write the other half of the last word, where there is nothing in it."""
        channels = self.pixels.extents[3]
        last = layout.blocks(channels) - 1
        if last % 2:
            return
        if self.lanes < LANES:  # then this is the last
            T.buffer_store(halves, T.uint16(0), self.pixel(self.block + 1))
        elif channels % LANES == 0:
            with T.If(self.block == last), T.Then():
                T.buffer_store(halves, T.uint16(0), self.pixel(self.block + 1))


def half_view(plane: Buffer, channels: int) -> Buffer:
    """Declare a packed tensor once more, as half words.

    Parameters
    ----------
    plane : Buffer of uint32
        Packed tensor with the words last.
    channels : int
        Bits per row.

    Returns
    -------
    Buffer of uint16
        Same data, ``2 * words(channels)`` last.
    """
    shape = [*plane.shape[:-1], 2 * layout.words(channels)]
    return T.decl_buffer(shape, "uint16", data=plane.data)


def views(steps: Sequence[Step], outputs: Sequence[Buffer], channels: int) -> list[Buffer]:
    """Declare a kernel's `outputs` once more, packed ones as their parts: half words, levels."""
    kinds = [kind for step in steps for kind in output_kinds(step)]
    return [_view(kind, b, channels) for kind, b in zip(kinds, outputs, strict=True)]


def _view(kind: str, made: Buffer, channels: int) -> Buffer:
    if kind in ("bits", "planes"):
        return half_view(made, channels)
    if kind not in NUMBERS or kind == "floats":
        return T.decl_buffer(list(made.shape), made.dtype, data=made.data)
    shape = [*made.shape[:-1], layout.blocks(channels) * LANES]
    return T.decl_buffer(shape, NUMBERS[kind], data=made.data)


Start = Callable[[Vector, Lane], Expr]
"""Takes a vector and a lane; returns what is there."""

Below = Callable[[Step, Sequence[Buffer], Vector, Buffer], list[Callable[[Lane], Expr]]]
"""Takes a ``threshold`` whose limits are stored otherwise, its inputs, where, and the lanes of the
accumulator; returns what its planes hold."""


def epilogue(
    operator: Operator, steps: Sequence[Step], params: Sequence[Buffer], pixels: Pixels,
    value: Start | None = None, acc: Buffer | None = None, below: Below | None = None,
) -> None:  # fmt: skip
    """Write `steps` behind a block.

    Parameters
    ----------
    operator : Operator
        The function; its outputs are those of the steps.
    steps : sequence of Step
        What is done.
    params : sequence of Buffer
        Inputs of the steps, in order.
    pixels : Pixels
        Where.
    value : callable, optional
        What the steps start from; the accumulator, if not given.
    acc : Buffer of int32, shape pixels.extents, optional
        The accumulator.
    below : callable, optional
        Writes thresholds whose limits are stored otherwise.
    """
    full, rest = divmod(pixels.extents[3], LANES)
    for name, first, count, lanes in (("out", 0, full, LANES), ("out_last", full, 1, rest)):
        if not count or not lanes:
            continue
        # Views of its own: what two blocks write, threads could not share.
        outputs = views(steps, operator.outputs, pixels.extents[3])
        extents = [int64(e) if isinstance(e, int) else e for e in (*pixels.extents[:3], count)]
        with T.grid(*extents) as loops, T.sblock(name):
            n, h, w, o = T.axis.remap("SSSS", list(loops))
            at = Vector(pixels, (n, h, w), o + first, lanes)
            _Steps(at, value, acc, below).write(steps, params, outputs)


class _Steps:
    """Writes the steps of one vector."""

    def __init__(
        self, at: Vector, value: Start | None, acc: Buffer | None, below: Below | None
    ) -> None:
        self._at, self._start, self._source, self._below = at, value, acc, below
        self._value: Buffer | None = None
        self._acc: Buffer | None = None

    @property
    def value(self) -> Buffer:
        """The lanes of the running value."""
        if self._value is None:
            at, start = self._at, self._start
            if start is not None:
                self._value = at.fetched("value", "float32", lambda lane: start(at, lane))
            else:
                acc, self._value = self.acc, buffer("value", (LANES,), "float32")
                compute("value", self._value, (LANES,), lambda i: T.Cast("float32", acc[i]))
        return self._value

    @property
    def acc(self) -> Buffer:
        """The lanes of the accumulator."""
        if self._acc is None:
            at, source = self._at, self._source
            value = lambda lane: source[(*at.where, at.channel(lane))]  # noqa: E731
            self._acc = at.fetched("acc_lanes", "int32", value)
        return self._acc

    def write(
        self, steps: Sequence[Step], params: Sequence[Buffer], outputs: Sequence[Buffer]
    ) -> None:
        """Write them in order."""
        inputs, results = iter(params), iter(outputs)
        for number, step in enumerate(steps):
            taken = [next(inputs) for _ in range(step_inputs(step))]
            made = [next(results) for _ in range(step_outputs(step))]
            name = f"{step.op}_{number}"
            if step.op == "levels":
                self._levels(name, step, taken, made)
            elif step.op == "store":
                self._store(name, step, made[0], lambda lane, value=self.value: value[lane])
            elif step.op in ("bits", "threshold"):
                tests = enumerate(self._conditions(step, taken))
                for (plane, test), out in zip(tests, made, strict=True):
                    self._pack(f"{name}_{plane}", out, test)
            else:
                self._change(name, step, taken)

    def _pack(self, name: str, out: Buffer, test: Callable[[Lane], Expr]) -> None:
        self._at.store(name, self._at.packed(name, test), out)

    def _store(self, name: str, step: Step, out: Buffer, value: Callable[[Lane], Expr]) -> None:
        at = self._at
        compute(name, out, (at.lanes,), value, lambda lane: at.at(lane, step.layout))

    def _conditions(self, step: Step, taken: Sequence[Buffer]) -> list[Callable[[Lane], Expr]]:
        if self._below is not None and step.op == "threshold":
            return self._below(step, taken, self._at, self.acc)
        seen = self.acc if step.op == "threshold" else self.value

        def plane(number: int) -> Callable[[Lane], Expr]:
            return lambda lane: conditions(
                SCALAR, step, seen[lane], [limit[self._at.channel(lane)] for limit in taken]
            )[number]

        return [plane(number) for number in range(1 + step.zero)]

    def _change(self, name: str, step: Step, taken: Sequence[Buffer]) -> None:
        at, source = self._at, self.value
        read: Callable[[Buffer, Lane], Expr] = lambda param, lane: param[at.channel(lane)]  # noqa: E731
        if step.op in FETCHED:
            tensor = taken[0]
            there = at.repeated(step.period)

            def fetch(lane: Lane) -> Expr:
                if step.op == "gate":
                    return tensor[at.where[0], at.channel(lane)]
                return tensor[tuple(there.at(lane, step.layout))]

            taken = [at.fetched(f"{name}_tensor", "float32", fetch)]
            read = lambda param, lane: param[lane]  # noqa: E731
        self._value = buffer(name, (LANES,), "float32")
        compute(name, self._value, (LANES,), lambda lane: changed(
            SCALAR, step, source[lane], [read(param, lane) for param in taken]))  # fmt: skip

    def _levels(
        self, name: str, step: Step, taken: Sequence[Buffer], made: Sequence[Buffer]
    ) -> None:
        at = self._at
        if step.forms == ("planes",) and step.way in ("acc", "value") and step.count <= MAX_XORS:
            self._xors(name, step, taken, made)
            return
        level = buffer(name, (LANES,), "int32")
        compute(name, level, (LANES,), self._level(name, step, taken))
        plane = 0
        for kind, out in zip(output_kinds(step), made, strict=True):
            if kind == "planes":
                place = T.int64(plane)
                test = lambda lane, p=place: bit(T.Cast("uint32", level[lane]), p)  # noqa: E731
                self._pack(f"{name}_{plane}", out, test)
                plane += 1
            elif kind == "value":
                value = lambda lane: stands_for(SCALAR, step, level[lane])  # noqa: E731
                self._store(f"{name}_value", step, out, value)
            elif kind == "table":
                table = taken[-1]
                self._store(f"{name}_table", step, out, lambda lane, t=table: t[level[lane]])
            else:

                def whole(lane: Lane, dtype: str = NUMBERS[kind]) -> Expr:
                    one = T.Cast(dtype, level[lane])
                    if at.lanes == LANES:
                        return one
                    return T.Select(lane < at.lanes, one, tirx.const(0, dtype))

                compute(f"{name}_{kind}", out, (LANES,), whole, at.at)

    def _seen(self, step: Step, taken: Sequence[Buffer]) -> Callable[[Lane], Expr]:
        """Return what a step compares with thresholds."""
        value = self.acc if step.way == "acc" else self.value
        if not step.flip:
            return lambda lane: value[lane]
        return lambda lane: value[lane] ^ taken[1][self._at.channel(lane)]

    def _level(self, name: str, step: Step, taken: Sequence[Buffer]) -> Callable[[Lane], Expr]:
        """Return which level a value has, see `step.WAYS`."""
        at = self._at
        if step.way == "acc-scale":
            acc = self.acc
            return lambda lane: nearest(
                SCALAR, step, SCALAR.real(acc[lane]), *(t[at.channel(lane)] for t in taken[:2])
            )
        if step.way == "whole":
            value = self.value
            return lambda lane: SCALAR.whole(value[lane])
        if step.way == "search":
            return self._search(name, step, taken[0])
        seen = self._seen(step, taken)

        def count(lane: Lane) -> Expr:
            total: Expr = T.int32(0)
            for number in range(step.count):
                reached = seen(lane) >= taken[0][number, at.channel(lane)]
                total = total + T.Cast("int32", reached)
            return total

        return count

    def _search(self, name: str, step: Step, table: Buffer) -> Callable[[Lane], Expr]:
        """Guess the level, then compare with the thresholds on both sides of it."""
        value, guess = self.value, buffer(f"{name}_guess", (LANES,), "int32")
        compute(f"{name}_guess", guess, (LANES,), lambda lane: nearest(
            SCALAR, step, value[lane], table[0], table[1]))  # fmt: skip

        def level(lane: Lane) -> Expr:
            place = T.Cast("int64", guess[lane])
            below, above = table[place + 2], table[place + 3]
            up = T.Cast("int32", value[lane] >= above)
            return guess[lane] + up - T.Cast("int32", value[lane] < below)

        return level

    def _xors(self, name: str, step: Step, taken: Sequence[Buffer], made: Sequence[Buffer]) -> None:
        """Write planes without levels.

        Bit j of a level is the XOR of those of its thresholds whose numbers ``2**j`` divides.
        """
        at, seen = self._at, self._seen(step, taken)
        reached = []
        for number in range(step.count):
            limit = lambda lane, k=number: taken[0][k, at.channel(lane)]  # noqa: E731
            test = lambda lane, t=limit: seen(lane) >= t(lane)  # noqa: E731
            reached.append(at.packed(f"{name}_reached_{number}", test))
        for plane, out in enumerate(made):
            every = 2**plane
            odd = functools.reduce(T.bitwise_xor, reached[every - 1 :: every])
            at.store(f"{name}_{plane}", odd, out)
