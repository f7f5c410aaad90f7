"""RNN, GRU and LSTM, unrolled over a sequence of known length.

The products of the inputs and `W` do not depend on the state, so they are one matrix product over
all steps. Each step is then a product of the state and `R`, and elementwise operators. If sequences
have individual lengths, steps after the end keep the state and give 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.ir.pieces import Expression

MAX_STEPS = 1024
"""Maximum sequence length; each step has separate code."""


@dataclass(frozen=True)
class _Kind:
    """Properties of an operator: gates, default activations, and whether it has a cell state."""

    gates: int
    activations: tuple[str, ...]
    cell: bool
    step: Callable[[_Direction, str, str, str], tuple[str, str]]


class _Direction:
    """One direction of a recurrent node.

    Parameters
    ----------
    write : Expression
        Writes the nodes.
    kind : _Kind
        The operator.
    index : int
        0, or 1 for the second direction.
    backward : bool
        Whether it processes steps in reverse order.
    """

    def __init__(self, write: Expression, kind: _Kind, index: int, backward: bool) -> None:
        self.write, self.kind, self.index, self.backward = write, kind, index, backward
        node = write.node
        self.attrs = node.attrs
        self.dtype = write.type().dtype
        self.hidden = int(node.attrs["hidden_size"])
        self.functions = _activations(write, kind, index)
        self.clip = node.attrs.get("clip")
        self.w = self._operand(1)
        self.r = self._operand(2)
        self.bias = self._operand(3)
        self.peephole = self._operand(7) if kind.cell else ""

    def _operand(self, k: int) -> str:
        name = self.write.input(k)
        return self.write.at(name, self.index, 0) if name else ""

    def rows(self, name: str, gate: int, count: int = 1) -> str:
        """Return the rows of gates ``gate`` to ``gate + count`` of a weight or bias."""
        low, high = gate * self.hidden, (gate + count) * self.hidden
        ints = self.write.ints
        return self.write("Slice", name, ints(low), ints(high), ints(0))

    def times(self, state: str, weight: str) -> str:
        """Return ``state @ weight.T``, or "" if the state is zero."""
        if not state:
            return ""
        turned = self.write("Transpose", weight, perm=[1, 0])
        return self.write("MatMul", state, turned, covers=(self.write.node.name,))

    def plus(self, *terms: str) -> str:
        """Return the sum of the terms that are not ""."""
        present = [t for t in terms if t]
        total = present[0] if present else ""
        for term in present[1:]:
            total = self.write("Add", total, term)
        return total

    def one(self) -> str:
        """Return the constant 1."""
        return self.write.constant(1, self.dtype)

    def apply(self, which: int, x: str) -> str:
        """Return an activation of `x`, after clipping if requested."""
        if self.clip is not None:
            bounds = (self.write.constant(v, self.dtype) for v in (-self.clip, self.clip))
            x = self.write("Clip", x, *bounds)
        return _activate(self.write, x, self.dtype, *self.functions[which])

    def run(self, x: str, steps: int, hidden: str, cell: str, lengths: str) -> tuple[str, ...]:
        """Return all outputs (steps, batch, hidden), the last output, and the last cell state."""
        write = self.write
        turned = write("Transpose", self.w, perm=[1, 0])
        inputs = write("MatMul", x, turned, covers=(write.node.name,))
        made: dict[int, str] = {}
        for t in range(steps)[:: -1 if self.backward else 1]:
            part = write.at(inputs, t, 0)
            new, new_cell = self.kind.step(self, part, hidden, cell)
            shown = new
            if lengths:
                inside = write.unsqueeze(write("Less", write.constant(t, "int32"), lengths), 1)
                zero = write.constant(0, self.dtype)
                shown = write("Where", inside, new, zero)
                new = write("Where", inside, new, hidden or zero)
                new_cell = write("Where", inside, new_cell, cell or zero) if new_cell else ""
            hidden, cell, made[t] = new, new_cell, shown
        parts = [write.unsqueeze(made[t], 0) for t in range(steps)]
        sequence = parts[0] if steps == 1 else write("Concat", *parts, axis=0)
        return sequence, hidden, cell


def _rnn_step(d: _Direction, x: str, hidden: str, cell: str) -> tuple[str, str]:
    del cell
    bias = d.plus(d.rows(d.bias, 0), d.rows(d.bias, 1)) if d.bias else ""
    return d.apply(0, d.plus(x, d.times(hidden, d.r), bias)), ""


def _gru_step(d: _Direction, x: str, hidden: str, cell: str) -> tuple[str, str]:
    del cell
    write, n = d.write, d.hidden
    zr, candidate = write.several("Split", [x, write.ints(2 * n, n)], 2, axis=-1)
    both = d.plus(d.rows(d.bias, 0, 2), d.rows(d.bias, 3, 2)) if d.bias else ""
    gates = d.apply(0, d.plus(zr, d.times(hidden, d.rows(d.r, 0, 2)), both))
    z, r = write.several("Split", [gates, write.ints(n, n)], 2, axis=-1)
    w_bias, r_bias = (d.rows(d.bias, k) if d.bias else "" for k in (2, 5))
    recurrent = d.rows(d.r, 2)
    if d.attrs.get("linear_before_reset"):
        inner = d.plus(d.times(hidden, recurrent), r_bias)
        inner = write("Mul", r, inner) if inner else ""
    else:
        inner = d.times(write("Mul", r, hidden) if hidden else "", recurrent)
        inner = d.plus(inner, r_bias)
    new = write("Mul", write("Sub", d.one(), z), d.apply(1, d.plus(candidate, w_bias, inner)))
    return (d.plus(new, write("Mul", z, hidden)) if hidden else new), ""


def _lstm_step(d: _Direction, x: str, hidden: str, cell: str) -> tuple[str, str]:
    write, n = d.write, d.hidden
    bias = d.plus(d.rows(d.bias, 0, 4), d.rows(d.bias, 4, 4)) if d.bias else ""
    gates = d.plus(x, d.times(hidden, d.r), bias)
    i, o, f, c = write.several("Split", [gates, write.ints(n, n, n, n)], 4, axis=-1)

    def peep(gate: str, which: int, state: str) -> str:
        if not d.peephole or not state:
            return gate
        return d.plus(gate, write("Mul", d.rows(d.peephole, which), state))

    i = d.apply(0, peep(i, 0, cell))
    coupled = bool(d.attrs.get("input_forget"))
    f = write("Sub", d.one(), i) if coupled else d.apply(0, peep(f, 2, cell))
    new_cell = write("Mul", i, d.apply(1, c))
    if cell:
        new_cell = d.plus(write("Mul", f, cell), new_cell)
    o = d.apply(0, peep(o, 1, new_cell))
    name, alpha, beta = d.functions[2]
    squashed = _activate(write, new_cell, d.dtype, name, alpha, beta)
    return write("Mul", o, squashed), new_cell


# ------------------------------------------------------------------------------------- activations

_PARAMETERS: dict[str, tuple[float | None, float | None]] = {
    "Affine": (1.0, 0.0),
    "Elu": (1.0, None),
    "HardSigmoid": (0.2, 0.5),
    "LeakyRelu": (0.01, None),
    "Relu": (None, None),
    "ScaledTanh": (1.0, 1.0),
    "Sigmoid": (None, None),
    "Softplus": (None, None),
    "Softsign": (None, None),
    "Tanh": (None, None),
    "ThresholdedRelu": (1.0, None),
}
"""Default alpha and beta of each activation, or None."""

Activation = tuple[str, "float | None", "float | None"]


def _activations(write: Expression, kind: _Kind, index: int) -> list[Activation]:
    """Return the activations of one direction with their parameters."""
    node = write.node
    directions = _directions(write)
    count = len(kind.activations)
    names = list(node.attrs.get("activations") or kind.activations * directions)
    if len(names) != count * directions:
        raise ModelError(f"{write.where}: {len(names)} activations, expected {count * directions}")
    known = {name.lower(): name for name in _PARAMETERS}
    alphas = iter(node.attrs.get("activation_alpha") or ())
    betas = iter(node.attrs.get("activation_beta") or ())
    found: list[Activation] = []
    for name in names:
        plain = known.get(name.lower())
        if plain is None:
            raise UnsupportedOp(f"{write.where}: activation `{name}` is not supported")
        alpha, beta = _PARAMETERS[plain]
        found.append(
            (
                plain,
                None if alpha is None else float(next(alphas, alpha)),
                None if beta is None else float(next(betas, beta)),
            )
        )
    return found[index * count : (index + 1) * count]


def _activate(
    write: Expression, x: str, dtype: str, name: str, alpha: float | None, beta: float | None
) -> str:
    if name == "Affine":
        scaled = write("Mul", x, write.constant(alpha, dtype))
        return write("Add", scaled, write.constant(beta, dtype))
    if name == "ScaledTanh":
        inner = write("Tanh", write("Mul", x, write.constant(beta, dtype)))
        return write("Mul", inner, write.constant(alpha, dtype))
    attrs = {k: v for k, v in (("alpha", alpha), ("beta", beta)) if v is not None}
    return write(name, x, **attrs)


# -------------------------------------------------------------------------------------- whole nodes


def _directions(write: Expression) -> int:
    return 2 if write.node.attrs.get("direction", "forward") == "bidirectional" else 1


def _expand(kind: _Kind) -> Callable[[Expression], None]:
    def rule(write: Expression) -> None:
        steps = _steps(write)
        node = write.node
        batch_first = bool(node.attrs.get("layout"))
        x = write("Transpose", node.inputs[0], perm=[1, 0, 2]) if batch_first else node.inputs[0]
        lengths = _lengths(write, steps)
        sequences, finals, cells = [], [], []
        for k, backward in enumerate(_order(write)):
            direction = _Direction(write, kind, k, backward)
            hidden, cell = (_initial(write, i, k, batch_first) for i in (5, 6))
            sequence, last, last_cell = direction.run(x, steps, hidden, cell, lengths)
            sequences.append(write.unsqueeze(sequence, 1))
            finals.append(write.unsqueeze(last, 0))
            cells.append(write.unsqueeze(last_cell, 0) if kind.cell else "")
        many = len(sequences) > 1
        y = write("Concat", *sequences, axis=1) if many else sequences[0]
        write.give(write("Transpose", y, perm=[2, 0, 1, 3]) if batch_first else y, 0)
        for k, parts in enumerate([finals, cells] if kind.cell else [finals], 1):
            whole = write("Concat", *parts, axis=0) if many else parts[0]
            write.give(write("Transpose", whole, perm=[1, 0, 2]) if batch_first else whole, k)

    return rule


def _order(write: Expression) -> Iterator[bool]:
    """Yield, for each direction, whether it is reversed."""
    node = write.node
    direction = node.attrs.get("direction", "forward")
    orders = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    if direction not in orders:
        raise ModelError(f"{write.where}: `direction` is {direction!r}")
    yield from orders[direction]


def _steps(write: Expression) -> int:
    """Check shapes, and return the length of the sequence."""
    node, shape = write.node, write.type().shape
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[node.op]
    hidden = node.attrs.get("hidden_size")
    weights = [write.type(k).shape for k in (1, 2)]
    if len(shape) != 3 or any(len(s) != 3 for s in weights):
        raise ShapeError(f"{write.where}: X, expected W and R of three axes")
    if hidden is None:
        hidden = weights[1][2]
    if not isinstance(hidden, int) or hidden <= 0:
        raise ShapeError(f"{write.where}: `hidden_size` is {hidden}")
    node.attrs["hidden_size"] = hidden
    count = _directions(write)
    wanted: dict[int, Sequence[Any]] = {
        1: (count, gates * hidden, shape[2]),
        2: (count, gates * hidden, hidden),
        3: (count, 2 * gates * hidden),
        7: (count, 3 * hidden),
    }
    for k, form in wanted.items():
        if write.input(k):
            found = write.type(k).shape
            if tuple(found) != tuple(form):
                raise ShapeError(
                    f"{write.where}: input {k} has shape {list(found)}, expected {list(form)}"
                )
    first = 1 if node.attrs.get("layout") else 0
    batch = shape[1 - first]
    state = (batch, count, hidden) if first else (count, batch, hidden)
    for k in (5, 6):
        if write.input(k):
            found = write.type(k).shape
            pairs = zip(found, state, strict=False)
            known = [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int)]
            if len(found) != 3 or any(a != b for a, b in known):
                raise ShapeError(
                    f"{write.where}: input {k} has shape {list(found)}, expected {list(state)}"
                )
    steps = shape[first]
    if not isinstance(steps, int) or not 0 < steps <= MAX_STEPS:
        raise UnsupportedOp(
            f"{write.where}: a sequence of {steps} steps, expected 1 to {MAX_STEPS}, "
            "because it is unrolled",
            hint=None if isinstance(steps, int) else "give its length with --input-shape",
        )
    return steps


def _lengths(write: Expression, steps: int) -> str:
    """Return the lengths of the sequences, or "" if all have full length."""
    name = write.input(4)
    value = write.graph.constants.get(name)
    if value is not None:
        if value.size and (int(value.min()) < 0 or int(value.max()) > steps):
            raise ShapeError(
                f"{write.where}: sequence lengths {value.tolist()[:8]} of {steps} steps"
            )
        if bool(np.all(value == steps)):
            return ""
    return name


def _initial(write: Expression, k: int, index: int, batch_first: bool) -> str:
    """Return the initial state of one direction, or "" if it is zero."""
    name = write.input(k)
    value = write.graph.constants.get(name)
    if not name or (value is not None and not value.any()):
        return ""
    return write.at(name, index, 1 if batch_first else 0)


EXPANSIONS = {
    "GRU": _expand(_Kind(3, ("Sigmoid", "Tanh"), False, _gru_step)),
    "LSTM": _expand(_Kind(4, ("Sigmoid", "Tanh", "Tanh"), True, _lstm_step)),
    "RNN": _expand(_Kind(1, ("Tanh",), False, _rnn_step)),
}
"""Rewrite rules, by operator."""
