"""The epilogue: what is done to one vector of values while it is still in a register.

`emit` writes the steps of a spec as TensorIR, inside the block that the caller has opened with
TVM's IRBuilder. Full blocks of `layout.LANES` channels are loaded and stored as vectors; the block
of the last few channels goes lane by lane, because float tensors are not padded. Bits are one
compare and one 16-bit store, into a view of the packed tensor as half words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import mask
from bnncc.schedules.templates import levels
from bnncc.schedules.templates.lanes import VECTOR
from bnncc.schedules.templates.place import Place
from bnncc.topi_binary import layout
from bnncc.topi_binary.algebra import changed, conditions, stands_for
from bnncc.topi_binary.definitions.epilogue import MAX_XORS, NUMBERS
from bnncc.topi_binary.definitions.epilogue import half_view as half_view
from bnncc.topi_binary.definitions.epilogue import views as views
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.step import FETCHED, TENSORS, Step, output_kinds, step_inputs, step_outputs

Buffer = Any
Expr = Any


def regions(
    steps: Sequence[Step], params: Sequence[Buffer], outputs: Sequence[Buffer], at: Place
) -> tuple[list[Expr], list[Expr]]:
    """Return what `emit` reads (besides its value) and writes, for ``T.reads`` and ``T.writes``.

    Parameters
    ----------
    steps : sequence of Step
        The epilogue.
    params, outputs : sequence of Buffer
        As for `emit`.
    at : Place
        As for `emit`.

    Returns
    -------
    reads, writes : list of TensorRegion
        One per parameter, one per output.
    """
    reads, writes = [], []
    inputs, results = iter(params), iter(outputs)
    for step in steps:
        for number in reversed(range(step_inputs(step))):
            buffer = next(inputs)
            if number == 0 and "table" in step.forms:
                reads.append(buffer[0 : buffer.shape[0]])
            elif step.op in TENSORS:
                source = at.repeated(step.period)
                reads.append(buffer[tuple(source.index(source.span, step.layout))])
            elif step.op == "gate":
                reads.append(buffer[at.n, at.span])
            else:
                reads.append(buffer[at.padded_span])
        for kind in output_kinds(step):
            buffer = next(results)
            if kind in ("store", "value", "table"):
                writes.append(buffer[tuple(at.index(at.span, step.layout))])
            elif kind in NUMBERS:
                writes.append(buffer[tuple(at.index(at.padded_span))])
            else:
                writes.append(buffer[tuple(at.index(at.halves()))])
    return reads, writes


def emit(
    steps: Sequence[Step],
    value: Expr,
    params: Sequence[Buffer],
    outputs: Sequence[Buffer],
    at: Place,
    acc: Expr = None,
    halved: bool = False,
) -> Expr:
    """Write the steps on one vector, in the block that is open.

    Parameters
    ----------
    steps : sequence of Step
        The epilogue, see `spec.Step`.
    value : Expr of float32x16 or None
        What the steps start from; None for the accumulator.
    params : sequence of Buffer
        The steps' inputs, in their order.
    outputs : sequence of Buffer
        The steps' outputs, in their order, passed through `views`.
    at : Place
        Where the vector lies.
    acc : Expr of int32x16, optional
        The integer accumulator, for ``threshold``.
    halved : bool, default False
        Whether `acc` is half of the accumulator that the steps mean. Signs and numbers cost nothing
        more, because thresholds and scales are changed instead, once for all pixels of a tile;
        levels are found from the double.

    Returns
    -------
    Expr of float32x16
        The value after the last step.
    """
    if value is None:
        value = VECTOR.real(acc)
        halved_value = halved
    else:
        halved_value = False
    whole = None if halved else acc
    inputs, results = iter(params), iter(outputs)
    for number, step in enumerate(steps):
        taken = [next(inputs) for _ in range(step_inputs(step))]
        made = [next(results) for _ in range(step_outputs(step))]
        if halved_value and step.op not in ("threshold", "affine"):
            value = value * VECTOR.number(2.0)
            halved_value = False
        if step.op == "levels":
            if not step.way.startswith("acc"):
                value = T.Bind(value)
            elif halved and whole is None:
                whole = T.Bind(acc + acc)
            if _compared(step):
                _store_masks(levels.masks(step, value, whole, taken, at), made, at)
            else:
                level = T.Bind(levels.find(step, value, whole, taken, at))
                _store_levels(step, level, taken[-1:], made, at)
        elif step.op == "store":
            if _used_later(steps[number + 1 :]):
                value = T.Bind(value)
            _store(made[0], value, at, step.layout)
        elif step.op == "bits":
            if step.zero or _used_later(steps[number + 1 :]):
                value = T.Bind(value)
            _store_planes(made, conditions(VECTOR, step, value, ()), at)
        elif step.op == "threshold":
            if step.zero:
                acc = T.Bind(acc)
            # 2 * a <= t is a <= t >> 1, and 2 * a > t is a > t >> 1, rounded down.
            one = T.Broadcast(T.int32(1), LANES)
            limits = [T.shift_right(t[at.vector], one) if halved else t[at.vector] for t in taken]
            _store_planes(made, conditions(VECTOR, step, acc, limits), at)
        elif halved_value:
            scale, bias = _operands(step, taken, at)
            value = changed(VECTOR, step, value, [scale * VECTOR.number(2.0), bias])
            halved_value = False
        else:
            value = changed(VECTOR, step, value, _operands(step, taken, at))
    return value


def _operands(step: Step, taken: Sequence[Buffer], at: Place) -> list[Expr]:
    """Return what a step reads for one vector."""
    if step.op not in FETCHED:
        return [buffer[at.vector] for buffer in taken]
    gate = step.op == "gate"
    return [_load(taken[0], at if gate else at.repeated(step.period), step.layout, gate)]


def _used_later(steps: Sequence[Step]) -> bool:
    return any(step.op != "threshold" and not step.way.startswith("acc") for step in steps)


def _load(buffer: Buffer, at: Place, where: str = "NHWC", gate: bool = False) -> Expr:
    def index(channel: Expr) -> tuple[Expr, ...]:
        return (at.n, channel) if gate else tuple(at.index(channel, where))

    contiguous = gate or at.rank == 2 or where == "NHWC"
    if contiguous and at.lanes == LANES:
        return buffer[index(at.vector)]
    lanes = T.sblock_alloc_buffer((LANES,), "float32")
    if at.lanes < LANES:
        T.buffer_store(lanes, VECTOR.number(0.0), [T.Ramp(0, 1, LANES)])
    with T.unroll(at.lanes) as lane:
        T.buffer_store(lanes, buffer[index(at.channel(lane))], [lane])
    return lanes[T.Ramp(0, 1, LANES)]


def _store(buffer: Buffer, value: Expr, at: Place, where: str) -> None:
    contiguous = at.rank == 2 or where == "NHWC"
    if contiguous and at.lanes == LANES:
        T.buffer_store(buffer, value, at.index(at.vector))
        return
    lanes = T.sblock_alloc_buffer((LANES,), "float32")
    T.buffer_store(lanes, value, [T.Ramp(0, 1, LANES)])
    with T.unroll(at.lanes) as lane:
        T.buffer_store(buffer, lanes[lane], at.index(at.channel(lane), where))


def _store_levels(
    step: Step, level: Expr, table: Sequence[Buffer], made: Sequence[Buffer], at: Place
) -> None:
    plane = 0
    for kind, buffer in zip(output_kinds(step), made, strict=True):
        if kind == "planes":
            _store_bits(buffer, levels.bit(level, plane), at)
            plane += 1
        elif kind == "value":
            _store(buffer, stands_for(VECTOR, step, level), at, step.layout)
        elif kind == "table":
            _store(buffer, table[0][level], at, step.layout)
        else:
            number = T.Cast(f"{NUMBERS[kind]}x{LANES}", level)
            T.buffer_store(buffer, number, at.index(at.vector))


def _compared(step: Step) -> bool:
    """Whether planes are made of comparisons, without a vector of levels."""
    return step.forms == ("planes",) and step.way in ("acc", "value") and step.count <= MAX_XORS


def _store_masks(masks: Sequence[Expr], made: Sequence[Buffer], at: Place) -> None:
    for plane, buffer in enumerate(made):
        every = 2**plane
        chosen = masks[every - 1 :: every]
        bits = chosen[0]
        for one in chosen[1:]:
            bits = T.bitwise_xor(bits, one)
        _store_half(buffer, bits, at)


def _store_planes(made: Sequence[Buffer], tests: Sequence[Expr], at: Place) -> None:
    for plane, test in zip(made, tests, strict=True):
        _store_bits(plane, test, at)


def _store_bits(halves: Buffer, condition: Expr, at: Place) -> None:
    _store_half(halves, mask(condition), at)


def _store_half(halves: Buffer, bits: Expr, at: Place) -> None:
    if at.lanes < LANES:
        bits = bits & T.uint16((1 << at.lanes) - 1)
    T.buffer_store(halves, bits, at.index(at.block))
    last = layout.blocks(at.channels) - 1
    if last % 2:
        return
    if at.lanes < LANES:  # then this is the last block
        T.buffer_store(halves, T.uint16(0), at.index(at.block + 1))
    elif at.channels % LANES == 0:
        with T.If(at.block == last), T.Then():
            T.buffer_store(halves, T.uint16(0), at.index(at.block + 1))
