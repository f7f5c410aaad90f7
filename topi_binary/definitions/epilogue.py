"""The steps of an epilogue, one named block for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.topi_binary.algebra import changed, conditions, nearest, stands_for
from bnncc.topi_binary.definitions.blocks import Buffer, Expr, bit, buffer, compute, pack
from bnncc.topi_binary.definitions.terms import SCALAR
from bnncc.topi_binary.few_bit_data import PER_WORD
from bnncc.topi_binary.layout import LANES, blocks
from bnncc.topi_binary.signature import Operator
from bnncc.topi_binary.step import FETCHED, Step, output_kinds, step_inputs, step_outputs


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


def epilogue(
    operator: Operator, steps: Sequence[Step], params: Sequence[Buffer], pixels: Pixels,
    value: Buffer, acc: Buffer | None = None,
    bits: Callable[[Step, list[Buffer]], None] | None = None,
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
    value : Buffer of float32, shape pixels.extents
        What the steps start from.
    acc : Buffer of int32, same shape, optional
        The accumulator.
    bits : callable, optional
        Writes a ``threshold`` whose limits are stored otherwise, given its inputs and outputs.
    """
    inputs, outputs = iter(params), iter(operator.outputs)
    channels = pixels.extents[3]
    for number, step in enumerate(steps):
        taken = [next(inputs) for _ in range(step_inputs(step))]
        made = [next(outputs) for _ in range(step_outputs(step))]
        name = f"{step.op}_{number}"
        at = pixels.at(step.layout)
        if step.op == "levels":
            _levels(name, step, pixels, value, acc, taken, made)
        elif step.op == "store":
            compute(name, made[0], pixels.extents, lambda *i: value[i], at)  # noqa: B023
        elif step.op == "threshold" and bits is not None:
            bits(step, [*taken, *made])
        elif step.op in ("bits", "threshold"):
            for plane, condition in zip(made, _conditions(step, value, acc, taken), strict=True):
                pack(name, plane, pixels.extents[:3], channels, condition, at)
        else:
            source = value
            value = buffer(name, pixels.extents, "float32")
            compute(name, value, pixels.extents, applied(step, source, taken, at))


def _conditions(
    step: Step, value: Buffer, acc: Buffer, taken: Sequence[Buffer]
) -> Iterator[Callable[..., Expr]]:
    seen = acc if step.op == "threshold" else value

    def plane(number: int) -> Callable[..., Expr]:
        def condition(*i: Expr) -> Expr:
            return conditions(SCALAR, step, seen[i], [limit[i[3]] for limit in taken])[number]

        return condition

    return map(plane, range(1 + step.zero))


def applied(
    step: Step, source: Buffer, taken: Sequence[Buffer], at: Callable[..., Sequence[Expr]]
) -> Callable[..., Expr]:
    """Return the value after a step that changes it."""

    def read(param: Buffer, *i: Expr) -> Expr:
        if step.op == "gate":
            return param[i[0], i[3]]
        if step.op not in FETCHED:
            return param[i[3]]
        return param[tuple(at(*i[:3], i[3] % step.period if step.period else i[3]))]

    return lambda *i: changed(SCALAR, step, source[i], [read(param, *i) for param in taken])


def _levels(
    name: str, step: Step, pixels: Pixels, value: Buffer, acc: Buffer, taken: Sequence[Buffer],
    made: Sequence[Buffer],
) -> None:  # fmt: skip
    channels, at = pixels.extents[3], pixels.at(step.layout)
    level = buffer(name, pixels.extents, "int32")
    compute(name, level, pixels.extents, _level(step, value, acc, taken))
    plane = 0
    for kind, out in zip(output_kinds(step), made, strict=True):
        if kind == "planes":
            number = T.int64(plane)
            pack(f"{name}_bits", out, pixels.extents[:3], channels,
                 lambda *i: bit(T.Cast("uint32", level[i]), number), at)  # fmt: skip  # noqa: B023
            plane += 1
        elif kind == "value":
            compute(f"{name}_value", out, pixels.extents,
                    lambda *i: stands_for(SCALAR, step, level[i]), at)  # fmt: skip
        elif kind == "table":
            compute(f"{name}_value", out, pixels.extents, lambda *i: taken[-1][level[i]], at)
        else:
            _numbers(f"{name}_{kind}", kind, out, pixels, level)


def _level(step: Step, value: Buffer, acc: Buffer, taken: Sequence[Buffer]) -> Callable[..., Expr]:
    """Return which level a value has, see `step.WAYS`."""

    def level(*i: Expr) -> Expr:
        if step.way == "whole":
            return SCALAR.whole(value[i])
        if step.way == "acc-scale":
            return nearest(SCALAR, step, SCALAR.real(acc[i]), taken[0][i[3]], taken[1][i[3]])
        x = acc[i] if step.way == "acc" else value[i]
        if step.flip:
            x = x ^ taken[1][i[3]]
        count = T.int32(0)
        for number in range(step.count):
            limit = taken[0][number + 3] if step.way == "search" else taken[0][number, i[3]]
            count = count + T.Cast("int32", x >= limit)
        return count

    return level


def _numbers(name: str, kind: str, out: Buffer, pixels: Pixels, level: Buffer) -> None:
    """Write levels side by side in words, or one by one as floats; what lies beyond is 0."""
    channels, count = pixels.extents[3], PER_WORD[kind]
    words = blocks(channels) * LANES // count

    def word(*i: Expr) -> Expr:
        *where, number = i
        total: Expr = None
        for place in range(count):
            channel = number * count + place
            one = level[tuple([*where, T.min(channel, T.int64(channels - 1))])]
            one = T.if_then_else(channel < channels, one, T.int32(0))
            if kind == "floats":
                return T.Cast("float32", one)
            one = T.shift_left(T.Cast("uint32", one), T.uint32(32 // count * place))
            total = one if total is None else total | one
        return total

    compute(name, out, (*pixels.extents[:3], words), word, pixels.at())
