"""Contents of one kernel: an anchor, and the chain of graph nodes fused into it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bnncc.ir.graph import Node
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    Pool2d,
    Step,
)
from bnncc.transform.physical import Physical

NEAR = 1e-3
"""Tolerated absolute error where a sum is 0, if it is the rounding of much larger terms."""

Anchor = BinaryConv2d | FewBitConv2d | Conv2d | Pool2d | Elementwise


@dataclass(frozen=True)
class Event:
    """One operation on the value of a group."""

    kind: str
    """``apply`` (a node with constants), ``tensor`` (a node with another tensor), ``function``
    (swish, which is approximated), ``sign``, ``levels``, ``store``, ``pool`` (max-pooling of a
    float convolution: at most once, preceded by ``apply`` only)."""
    tensor: str
    """The logical tensor concerned: the result of the node, or the tensor to store."""
    node: Node | None = None
    """The graph node, if there is one."""
    layouts: tuple[str, ...] = ()
    """For ``store``: the layouts required; for ``levels``: the forms, see `step.FORMS`."""
    operand: str = ""
    """For ``tensor``: the input of the node that is the group's value."""


@dataclass(eq=False)
class Group:
    """An anchor and the operations fused into it."""

    spec: Anchor
    """Without steps."""
    inputs: list[str]
    """Physical inputs of the anchor; the weight of a binary layer is packed at `realise`."""
    scale: np.ndarray
    offset: np.ndarray
    """`scale`, `offset` (float64, shape (channels,)): the value starts as ``scale * raw + offset``.
    `raw` is the exact sum of a binary or few-bit layer, or the value of another anchor."""
    tip: str
    """The logical tensor that the current value is."""
    name: str
    covers: tuple[str, ...] = ()
    bits: np.ndarray | None = None
    """Constant weights of a binary layer, as bool."""
    rank: int = 4
    """Rank of the logical tensors; also 2 for a convolution over a whole image that gives rows."""
    pool: Pool2d | None = None
    """The pooling of the event ``pool``."""
    top: int = 0
    """For an anchor with an integer accumulator: a bound of its magnitude."""
    dot: tuple[int, np.ndarray] | None = None
    """For such an anchor: ``(a, b)`` with ``raw == a * acc + b``, exact, `b` by channel."""
    step: int = 1
    first: np.ndarray | int = 0
    """`step`, `first`: for a binary layer: `raw` is ``step * dot + first``."""
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.spec, BinaryConv2d):
            a, b = self.spec.dot_from_acc()
            self.dot = a * self.step, np.full(self.channels, b) * self.step + self.first
            self.top = 2 * self.spec.taps

    def negate(self, flip: np.ndarray) -> None:
        """Negate the stored weights of some channels of a binary layer."""
        if flip.any():
            assert self.bits is not None
            sign = np.where(flip, -1, 1)
            self.bits = self.bits ^ flip[:, None, None, None]
            self.scale, self.first = self.scale * sign, self.first * sign
            self.__post_init__()

    @property
    def channels(self) -> int:
        """Channels of the result."""
        return self.scale.shape[0]

    @property
    def squeezed(self) -> bool:
        """Whether the kernel computes images of one pixel for logical rows."""
        return self.rank == 2 and self.spec.output_rank == 4


def _shows(merged: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return, by channel, whether merging constants loses too much of `offset` where a sum is 0.

    Keeping the constants apart costs another step, 2 % of the time of a small kernel, and an error
    relative to the terms is allowed. So they are kept apart only if the terms are larger than those
    of trained layers.

    Parameters
    ----------
    merged : ndarray of float64
        Added to `offset` in one constant, and subtracted again with the sum.
    offset : ndarray of float64
        The exact value where the sum is 0.
    """
    return np.asarray(2.0**-23 * np.abs(merged) > np.maximum(NEAR, np.abs(offset)))


class Writer:
    """Collects steps, parameters and outputs; defers affine operators in order to merge them.

    Parameters
    ----------
    physical : Physical
        Receives the parameters.
    group : Group
        The group whose epilogue is written.
    """

    def __init__(self, physical: Physical, group: Group) -> None:
        self.physical, self.group = physical, group
        self.steps: list[Step] = []
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self._reset()
        self.dot = group.dot

    def _reset(self) -> None:
        """Clear the deferred operator ``scale * (v + before) + offset``."""
        channels = self.group.channels
        self.scale, self.offset, self.before = np.ones(channels), *np.zeros((2, channels))

    def affine(self, scale: np.ndarray, offset: np.ndarray) -> None:
        """Defer ``scale * v + offset``, by channel."""
        if (np.abs(scale * self.scale) == 1).all() and not self.offset.any():
            self.scale = self.scale * scale
            self.before = self.before + offset * self.scale
        else:
            self.scale, self.offset = self.scale * scale, self.offset * scale + offset

    def normalized(self, mean: np.ndarray, scale: np.ndarray, beta: np.ndarray) -> None:
        """Defer ``scale * (v - mean) + beta``, by channel."""
        met = (mean != 0) & (mean == np.rint(mean)) & _shows(scale * mean, beta)
        if self.dot is None or not met.any():
            self.affine(scale, beta - mean * scale)
            return
        # A sum may equal its mean exactly. Other runtimes merge `beta - mean * scale` to one
        # constant, which keeps only as much of `beta` as float32 can hold.
        merged = (mean * scale).astype(np.float32)
        left = (beta - merged).astype(np.float32).astype(np.float64) + merged
        self.affine(np.ones_like(mean), -mean)
        self.affine(scale, np.where(met & np.isfinite(left), left, beta))

    def flush(self) -> None:
        """Write deferred affine operators, after the conversion of accumulator to dot product.

        They become one step, except where a value that is exactly 0 must stay 0: in channels that
        are only scaled at the end, and after sums of integers if the loss would be visible, see
        `_shows`.
        """
        scale, offset, before = self.scale, self.offset, self.before
        dot, self.dot = self.dot, None

        def matters(shift: np.ndarray, exact: np.ndarray) -> bool:
            shows = (offset.astype(np.float32) == 0) | (exact & _shows(scale * shift, offset))
            return bool(shows[shift != 0].any())

        # A sum of integers may equal the constant subtracted from it only if that is an integer.
        whole = np.array(dot is not None) & (before == np.rint(before))
        if (np.abs(scale) == 1).all() or not matters(before, whole):
            offset, before = offset + scale * before, 0 * before
        if dot is not None:
            a, b = dot
            if before.any() or matters(b, np.array(True)):
                joined = before if whole.all() else 0 * before
                self._write(np.full_like(scale, a), b + joined)
                before = before - joined
            else:
                scale, offset = scale * a, scale * b + offset
        if before.any():
            self._write(np.ones_like(scale), before)
        self._write(scale, offset)
        self._reset()

    def _write(self, scale: np.ndarray, offset: np.ndarray) -> None:
        scale, offset = scale.astype(np.float32), offset.astype(np.float32)
        scaled, shifted = bool((scale != 1).any()), bool(offset.any())
        vectors = ([scale] if scaled else []) + ([offset] if shifted else [])
        op = {(True, True): "affine", (True, False): "scale", (False, True): "shift"}.get(
            (scaled, shifted)
        )
        if op is not None:
            self.steps.append(Step(op))
            self.inputs += [self.physical.vector(v, f"{self.group.tip}.{op}") for v in vectors]

    def step(self, step: Step, inputs: list[str], outputs: list[str]) -> None:
        """Add a step, its parameters and its outputs."""
        self.steps.append(step)
        self.inputs += inputs
        self.outputs += outputs
