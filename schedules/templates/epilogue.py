"""Epilogue of templates: the steps applied to one vector of values in a register.

`emit` writes the steps of a spec as TensorIR, inside the block that the caller has opened with
TVM's IRBuilder. They are those of `definitions.epilogue`, applied to a whole vector instead of a
lane. Full blocks of `layout.LANES` channels are loaded and stored as vectors. In a last, partial
block, lanes are accessed one by one, because float tensors are not padded. Bits take one comparison
and one 16-bit store, into a view of the packed tensor as half words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from bnncc.schedules.intrin_portable import mask
from bnncc.schedules.templates.vector_algebra import VECTOR
from bnncc.topi_binary.definitions.epilogue import Lanes, Of, Steps, Values
from bnncc.topi_binary.definitions.epilogue import half_view as half_view
from bnncc.topi_binary.definitions.epilogue import views as views
from bnncc.topi_binary.definitions.place import Place
from bnncc.topi_binary.layout import LANES
from bnncc.topi_binary.step import NUMBERS, TENSORS, Step, output_kinds, step_inputs

Buffer = Any
Expr = Any

_EVERY = T.Ramp(0, 1, LANES)
"""All lanes, as a single index."""


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
            if (number == 0 and "table" in step.forms) or step.way == "round":
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


class _Held:
    """A vector in a register."""

    def __init__(self, value: Expr) -> None:
        self._value = value

    def __getitem__(self, lane: Expr) -> Expr:
        """Return all lanes, whatever the index."""
        return self._value


class _Registers(Lanes):
    """Represents the values of all lanes as one named vector."""

    algebra = VECTOR

    def const(self, dtype: str, value: int) -> Expr:
        return T.Broadcast(tirx.const(value, dtype), LANES)

    def cast(self, dtype: str, value: Expr) -> Expr:
        return T.Cast(f"{dtype}x{LANES}", value)

    def spread(self, value: Expr) -> Expr:
        return T.Broadcast(value, LANES)

    def each(self, name: str, dtype: str, value: Of) -> Values:
        return _Held(T.Bind(value(_EVERY)))

    def fetched(self, name: str, dtype: str, at: Place, value: Of, where: str = "NHWC") -> Values:
        if at.lanes == LANES and at.neighbours(where):
            return _Held(value(_EVERY))
        lanes = T.sblock_alloc_buffer((LANES,), dtype)
        if at.lanes < LANES:
            T.buffer_store(lanes, self.const(dtype, 0), [_EVERY])
        with T.unroll(at.lanes) as lane:
            T.buffer_store(lanes, value(lane), [lane])
        return _Held(lanes[_EVERY])

    def packed(self, name: str, condition: Callable[[Expr], Expr]) -> Expr:
        return T.Bind(mask(condition(_EVERY)))

    def half(self, name: str, out: Buffer, value: Expr, where: list[Expr]) -> None:
        T.buffer_store(out, value, where)

    def store(self, name: str, out: Buffer, at: Place, value: Of, where: str = "NHWC") -> None:
        if at.lanes == LANES and at.neighbours(where):
            T.buffer_store(out, value(_EVERY), at.index(at.vector))
            return
        lanes = T.sblock_alloc_buffer((LANES,), out.dtype)
        T.buffer_store(lanes, value(_EVERY), [_EVERY])
        with T.unroll(at.lanes) as lane:
            T.buffer_store(out, lanes[lane], at.index(at.channel(lane), where))


def emit(
    steps: Sequence[Step],
    value: Expr,
    params: Sequence[Buffer],
    outputs: Sequence[Buffer],
    at: Place,
    acc: Expr = None,
    halved: bool = False,
) -> Expr:
    """Write the steps for one vector, in the block that is open.

    Parameters
    ----------
    steps : sequence of Step
        The epilogue, see `spec.Step`.
    value : Expr of float32x16 or None
        Initial value; None for the accumulator.
    params : sequence of Buffer
        Inputs of the steps, in order.
    outputs : sequence of Buffer
        Outputs of the steps, in order, from `views`.
    at : Place
        Place of the vector.
    acc : Expr of int32x16, optional
        The integer accumulator, for ``threshold``.
    halved : bool, default False
        Whether `acc` is half of the accumulator that the steps expect, see `Steps`.

    Returns
    -------
    Expr of float32x16
        The final value, if a step used it.
    """
    found, count = (None if v is None else _Held(T.Bind(v)) for v in (value, acc))
    held = Steps(at, _Registers(), found, count, halved).write(steps, params, outputs)
    return None if held is None else held[_EVERY]
