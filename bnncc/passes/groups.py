"""From a chain of graph nodes to the epilogue of one kernel.

`Group` collects what happens to an anchor's value (`Event`); `realise` turns the events into steps
and their parameters: runs of per-channel affine operators become one ``affine`` (composed in
float64), and signs after nothing but per-channel operators on a binary accumulator become integer
thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from bnncc.ir.graph import Node
from bnncc.ir.halves import ROUND
from bnncc.passes import level_steps, sign_tables
from bnncc.passes import thresholds as th
from bnncc.passes.affine import affine_of, channel_vector
from bnncc.passes.merge import ADD_REPEATED
from bnncc.passes.physical import Physical, Planes
from bnncc.passes.rows import product
from bnncc.passes.values import TwoValued
from bnncc.topi_binary import sliced_data, tiles
from bnncc.topi_binary.build import output_hw
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    Conv2d,
    Elementwise,
    FewBitConv2d,
    Pool2d,
    RowPool,
    Step,
)

Anchor = BinaryConv2d | FewBitConv2d | Conv2d | Pool2d | Elementwise


@dataclass(frozen=True)
class Event:
    """One thing that happens to the value of a group.

    Attributes
    ----------
    kind : str
        ``apply`` (a node with constants), ``tensor`` (a node with another tensor), ``sign``,
        ``levels``, ``store``, ``pool`` (max-pooling of a float convolution, once, after nothing but
        ``apply``).
    tensor : str
        The logical tensor concerned: the result of a node, the sign's output, the one to store.
    node : Node or None
        The graph node, if there is one.
    layouts : tuple of str
        For ``store``: the layouts wanted; for ``levels``: the forms, see `step.FORMS`.
    operand : str
        For ``tensor``: which input of the node is the group's value.
    """

    kind: str
    tensor: str
    node: Node | None = None
    layouts: tuple[str, ...] = ()
    operand: str = ""


@dataclass(eq=False)
class Group:
    """An anchor and what is fused into it.

    Attributes
    ----------
    spec : Anchor
        Without steps.
    inputs : list of str
        Physical inputs of the anchor; the weight of a binary layer is packed at `realise`.
    scale, offset : ndarray of float64, shape (channels,)
        The tip starts as ``scale * raw + offset``, `raw` being the exact sum of a binary or few-bit
        layer, else the anchor's value.
    tip : str
        The logical tensor the value stands for at present.
    bits : ndarray of bool or None
        Constant weights of a binary layer.
    top : int
        For an anchor with integer accumulators: a bound of their magnitude.
    dot : tuple or None
        For such an anchor: ``(a, b)`` with ``a * acc + b`` what `raw` is, `b` by channel and exact.
    step, first : int and ndarray, or 0
        For a binary layer: `raw` is ``step * dot + first``.
    rank : int
        Of the logical tensors: 2 also where a convolution covers a whole image and gives rows.
    pool : Pool2d or None
        What the event ``pool`` stands for.
    """

    spec: Anchor
    inputs: list[str]
    scale: np.ndarray
    offset: np.ndarray
    tip: str
    name: str
    covers: tuple[str, ...] = ()
    bits: np.ndarray | None = None
    rank: int = 4
    pool: Pool2d | None = None
    top: int = 0
    dot: tuple[int, np.ndarray] | None = None
    step: int = 1
    first: np.ndarray | int = 0
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.spec, BinaryConv2d):
            a, b = self.spec.dot_from_acc()
            self.dot = a * self.step, np.full(self.channels, b) * self.step + self.first
            self.top = 2 * self.spec.taps

    def negate(self, flip: np.ndarray) -> None:
        """Store the weights of some channels of a binary layer negated."""
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
        """Whether the kernel makes images of one pixel for what are logically rows."""
        return self.rank == 2 and self.spec.output_rank == 4


class _Writer:
    """Collects steps, their parameters and outputs; holds back affine operators to merge them."""

    def __init__(self, physical: Physical, group: Group) -> None:
        self.physical, self.group = physical, group
        self.steps: list[Step] = []
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self._reset()
        self.dot = group.dot

    def _reset(self) -> None:
        """Hold nothing back: the value is ``scale * (v + before) + offset``."""
        channels = self.group.channels
        self.scale, self.offset, self.before = np.ones(channels), *np.zeros((2, channels))

    def affine(self, scale: np.ndarray, offset: np.ndarray) -> None:
        if (np.abs(scale * self.scale) == 1).all() and not self.offset.any():
            self.scale = self.scale * scale
            self.before = self.before + offset * self.scale
        else:
            self.scale, self.offset = self.scale * scale, self.offset * scale + offset

    def flush(self) -> None:
        """Write the affine operators held back, behind the dot product that an anchor owes.

        All are merged to one, but for channels that are only scaled at last: there what is exactly
        0 before, as an integer may be, must stay 0.
        """
        scale, offset, before = self.scale, self.offset, self.before
        dot, self.dot = self.dot, None
        scaled_only = offset.astype(np.float32) == 0
        if (np.abs(scale) == 1).all() or not scaled_only[before != 0].any():
            offset, before = offset + scale * before, 0 * before
        if dot is not None:
            a, b = dot
            if before.any() or (b.any() and (offset.astype(np.float32) == 0).any()):
                self._write(np.full_like(scale, a), b.astype(np.float64))
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
        self.steps.append(step)
        self.inputs += inputs
        self.outputs += outputs


def realise(group: Group, physical: Physical) -> None:
    """Append the kernel of `group` to the physical graph and register what it makes.

    Parameters
    ----------
    group : Group
        Complete.
    physical : Physical
        The graph being built.
    """
    spec = group.spec
    signs, flip = sign_tables.plan(group, physical.source)
    group.negate(flip)
    writer = _Writer(physical, group)
    writer.affine(group.scale, group.offset)
    done: dict[object, Planes] = {}
    stored: list[tuple[str, str, str]] = []
    chain = level_steps.Chain(group, physical.source)
    for event in group.events:
        chain.follow(event)
        if event.kind == "levels":
            level_steps.write(event, writer, chain)
        elif event.kind == "sign" and level_steps.sign(event, writer, chain):
            pass
        elif event.kind == "sign":
            _write_sign(event, writer, signs, flip, done)
        elif event.kind == "store":
            writer.flush()
            for layout in event.layouts:
                name = physical.graph.fresh(f"{event.tensor}.{layout.lower()}")
                writer.step(Step("store", layout), [], [name])
                stored.append((event.tensor, layout, name))
        elif event.kind == "pool":
            spec = _pooled(group, writer)
        else:
            _write_node(event, writer)
    spec = replace(spec, steps=tuple(writer.steps))
    if isinstance(spec, BinaryConv2d):
        spec = physical.ordered(spec)
    inputs = [*group.inputs, *_weights(spec, group, writer), *writer.inputs]
    physical.kernel(spec, inputs, writer.outputs, group.name, group.covers)
    for tensor, layout, name in stored:
        forms = physical.floats.setdefault(tensor, {})
        forms[layout if group.rank == 4 else "NCHW"] = _logical(name, group, physical)
    for event in group.events:
        if event.kind == "levels":
            level_steps.settle(event, group, physical, _logical)
        if event.kind == "sign":
            have = physical.planes[event.tensor]
            zero = _logical(have.zero, group, physical) if have.zero else None
            physical.planes[event.tensor] = Planes(
                _logical(have.sign, group, physical), zero, have.value
            )


def _weights(spec: Anchor, group: Group, writer: _Writer) -> list[str]:
    """Return the packed weight of a binary layer; thresholds that depend on it are changed."""
    if not isinstance(spec, BinaryConv2d) or spec.per_image:
        return []
    assert group.bits is not None
    physical, bits = writer.physical, group.bits
    if sliced_data.limited(spec):
        writer.inputs = [
            physical.constant(
                sliced_data.limits(spec, bits, physical.graph.constants[name]), f"{name}.limit"
            )
            for name in writer.inputs
        ]
    return [physical.constant(tiles.pack(spec, bits), f"{group.name}.weight")]


def _pooled(group: Group, writer: _Writer) -> Conv2d:
    """Return the group's convolution with its pooling; the steps written so far go before it."""
    spec, pool = group.spec, group.pool
    assert isinstance(spec, Conv2d)
    assert pool is not None
    if writer.steps or not (writer.scale.astype(np.float32) > 0).all():
        writer.flush()
    # Else what is held back rises with the value: the maximum of the results is, bit for bit, the
    # result of the maximum.
    before, writer.steps = tuple(writer.steps), []
    rows = RowPool(pool.kernel, pool.strides, pool.pads, pool.ceil_extra, before)
    return replace(spec, pool=rows)


def _logical(name: str, group: Group, physical: Physical) -> str:
    """Return a kernel's result in the rank of the graph."""
    shape = physical.graph.types[name].shape
    rows = (product(shape[:-1]), shape[-1])
    return physical.reshape(name, rows) if group.squeezed else name


def _write_node(event: Event, writer: _Writer) -> None:
    node, physical, group = event.node, writer.physical, writer.group
    assert node is not None
    graph, rank = physical.source, group.rank
    if event.kind == "tensor":
        _write_tensor(event, writer)
        return
    if node.op == ROUND:  # decides in thresholds only: what is stored is computed in float32
        return
    if (affine := affine_of(node, graph, group.channels, rank)) is not None:
        writer.affine(*affine)
        return
    writer.flush()
    if node.op == "Relu":
        writer.step(Step("relu"), [], [])
    elif node.op == "Clip":
        low, high = (
            float(graph.constants[i].reshape(())) if i else limit
            for i, limit in zip(
                [*node.inputs[1:], "", ""],
                (-3.4028234663852886e38, 3.4028234663852886e38),
                strict=False,
            )
        )
        writer.step(Step("clip", lo=low, hi=high), [], [])
    else:
        slope = (
            np.full(group.channels, float(node.attrs.get("alpha", 0.01)))
            if node.op == "LeakyRelu"
            else channel_vector(graph.constants[node.inputs[1]], group.channels, rank)
        )
        assert slope is not None, node.op
        writer.step(
            Step("prelu"), [physical.vector(slope.astype(np.float32), f"{event.tensor}.slope")], []
        )


def _write_tensor(event: Event, writer: _Writer) -> None:
    node, physical = event.node, writer.physical
    assert node is not None
    value_first = node.inputs[0] == event.operand
    other = node.inputs[1 if value_first else 0]
    writer.flush()
    layout = physical.layout_of(other)
    tensor = physical.float(other, layout)
    if writer.group.squeezed:
        spec = writer.group.spec
        shape = (spec.n, *output_hw(spec), physical.shape(other)[1])
        tensor = physical.reshape(tensor, shape)
    if node.op == ADD_REPEATED:
        period = int(physical.shape(other)[1])
        writer.step(Step("add", "NHWC", period=period), [physical.float(other, "NHWC")], [])
    elif physical.shape(other) != physical.shape(event.tensor):
        n, channels, *_ = physical.image(other)
        writer.step(Step("gate"), [physical.reshape(tensor, (n, channels))], [])
    elif node.op == "Sub":
        writer.step(Step("rsub", layout), [tensor], [])
        if value_first:  # v - t == -(t - v), exactly
            writer.affine(-np.ones(writer.group.channels), np.zeros(writer.group.channels))
    else:
        writer.step(Step({"Add": "add", "Mul": "mul"}[node.op], layout), [tensor], [])


def _write_sign(
    event: Event,
    writer: _Writer,
    tables: dict[str, tuple[th.Planes, np.ndarray]],
    flip: np.ndarray,
    done: dict[object, Planes],
) -> None:
    node, group, physical = event.node, writer.group, writer.physical
    assert node is not None
    kind = str(node.attrs["zero"])
    table = tables.get(event.tensor)
    proven = table is not None and not table[0].zero_attainable
    zero = kind == "mid" and not proven
    if kind == "mid":
        physical.graph.sign_zero[node.name] = (
            "zeros may occur: they travel in a plane of their own, and layers that read it take "
            "the plain kernel while it is empty"
            if zero
            else "no accumulator value gives zero: one plane"
        )
    inverted = node.attrs.get("flip")
    compare = "gt" if kind == "gt" else "ge"
    key = (node.inputs[0], compare, None if inverted is None else np.asarray(inverted).tobytes())
    value = TwoValued(float(node.attrs["lo"]), float(node.attrs["hi"]), zero)
    if key in done and (done[key].zero is not None or not zero):
        shared = Planes(done[key].sign, done[key].zero if zero else None, value)
        physical.planes[event.tensor] = shared
        return
    names = [physical.graph.fresh(f"{event.tensor}.{p}") for p in ("bits", "zero")[: 1 + zero]]
    spec = group.spec
    if (
        table is not None
        and isinstance(spec, BinaryConv2d)
        and sign_tables.fits(table, compare, zero, flip)
    ):
        planes, mask = table
        wanted = (planes.gt if compare == "gt" else planes.ge) ^ mask
        thr = [th.thresholds(planes, wanted, flip, spec.dot_from_acc())]
        if zero:
            thr.append(th.thresholds(planes, planes.gt ^ mask, flip, spec.dot_from_acc()))
        vectors = [physical.vector(t, f"{event.tensor}.threshold", th.NEVER) for t in thr]
        writer.step(Step("threshold", zero=zero), vectors, names)
    else:
        assert inverted is None, f"{node.name}: passes.commute inverts channels of thresholds only"
        writer.flush()
        writer.step(Step("bits", compare=compare, zero=zero), [], names)
    done[key] = Planes(names[0], names[1] if zero else None, value)
    physical.planes[event.tensor] = done[key]
