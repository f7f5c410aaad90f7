"""Which level a value has: the epilogue step ``levels``, on one vector of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import mask
from bnncc.schedules.templates.lanes import VECTOR
from bnncc.schedules.templates.place import Place
from bnncc.topi_binary.algebra import nearest
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.step import Step

Buffer = Any
Expr = Any


def find(step: Step, value: Expr, acc: Expr, taken: Sequence[Buffer], at: Place) -> Expr:
    """Return the level, as int32 lanes.

    Parameters
    ----------
    step : Step
        One of ``levels``; `step.WAYS` says what is computed.
    value : Expr of float32x16
        The running value.
    acc : Expr of int32x16 or None
        The integer accumulator.
    taken : sequence of Buffer
        The step's inputs.
    at : Place
        Where the vector lies.

    Returns
    -------
    Expr of int32x16
        From 0 to ``step.count``, in lanes that exist.
    """
    if step.way == "whole":
        return VECTOR.whole(value)
    if step.way == "acc-scale":
        scale, bias = (buffer[at.vector] for buffer in taken[:2])
        return nearest(VECTOR, step, VECTOR.real(acc), scale, bias)
    if step.way == "search":
        return _search(step, T.Bind(value), taken[0])
    if step.way == "value":
        return _reached(step, T.Bind(value), taken[0], at)
    if step.flip:
        acc = acc ^ taken[1][at.vector]
    return _reached(step, T.Bind(acc), taken[0], at)


def masks(step: Step, value: Expr, acc: Expr, taken: Sequence[Buffer], at: Place) -> list[Expr]:
    """Return which lanes reach each threshold, as 16 bits each; for ``acc`` and ``value`` only.

    Bit j of a level is the XOR of those of its thresholds whose numbers ``2**j`` divides.
    """
    if step.way == "acc":
        value = acc ^ taken[1][at.vector] if step.flip else acc
    value = T.Bind(value)
    reached = [value >= taken[0][number, at.vector] for number in range(step.count)]
    return [T.Bind(mask(one)) for one in reached]


def bit(level: Expr, number: int) -> Expr:
    """Return as a condition whether bit `number` of each level is set."""
    return T.bitwise_and(level, _whole(1 << number)) != _whole(0)


def _reached(step: Step, value: Expr, limits: Buffer, at: Place) -> Expr:
    count = _whole(0)
    for number in range(step.count):
        limit = limits[number, at.vector]
        count = count + T.Select(value >= limit, _whole(1), _whole(0))
    return count


def _search(step: Step, value: Expr, table: Buffer) -> Expr:
    """Guess the level, then compare with the thresholds on both sides of it."""
    slope, offset = (T.Broadcast(table[i], LANES) for i in (0, 1))
    guess = T.Bind(nearest(VECTOR, step, value, slope, offset))
    below, above = (table[guess + _whole(i)] for i in (2, 3))
    up = T.Select(value >= above, _whole(1), _whole(0))
    return guess + up - T.Select(value < below, _whole(1), _whole(0))


def _whole(value: int) -> Expr:
    return tirx.Broadcast(tirx.IntImm("int32", value), LANES)
