"""Turn a group of fused graph nodes into the spec of one kernel.

A `Group` holds the operations on an anchor's value (`Event`); `realise` converts them to steps with
parameters. Consecutive per-channel affine operators become one ``affine`` (composed in float64). A
sign that follows only per-channel operators on a binary accumulator becomes integer thresholds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bnncc.ir.dims import product
from bnncc.ir.halves import ROUND
from bnncc.recognise.affine import affine_of, centred_affine, channel_vector
from bnncc.recognise.lattice import sign_values
from bnncc.topi_binary import sliced_data, tiles
from bnncc.topi_binary.spec import (
    BinaryConv2d,
    Conv2d,
    RowPool,
    Step,
)
from bnncc.transform import level_steps, sign_tables
from bnncc.transform import thresholds as th
from bnncc.transform.kernel_group import Anchor, Event, Group, Writer
from bnncc.transform.merge import ADD_REPEATED
from bnncc.transform.physical import Physical, Planes

_STEPS = {"Add": "add", "Sub": "rsub", "Mul": "mul", "Div": "div"}


def realise(group: Group, physical: Physical) -> None:
    """Append the kernel of `group` to the physical graph and register its outputs.

    Parameters
    ----------
    group : Group
        A complete group.
    """
    spec = group.spec
    signs, flip = sign_tables.plan(group, physical.source)
    group.negate(flip)
    writer = Writer(physical, group)
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


def _weights(spec: Anchor, group: Group, writer: Writer) -> list[str]:
    """Return the packed weights of a binary layer; adjusts thresholds that depend on them."""
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


def _pooled(group: Group, writer: Writer) -> Conv2d:
    """Return the group's convolution with its pooling; steps written so far run before the pool."""
    spec, pool = group.spec, group.pool
    assert isinstance(spec, Conv2d)
    assert pool is not None
    if writer.steps or not (writer.scale.astype(np.float32) > 0).all():
        writer.flush()
    # Otherwise the deferred affine operator increases with the value, so the maximum of its results
    # equals, bit for bit, its result on the maximum.
    before, writer.steps = tuple(writer.steps), []
    rows = RowPool(pool.kernel, pool.strides, pool.pads, pool.ceil_extra, before)
    return replace(spec, pool=rows)


def _logical(name: str, group: Group, physical: Physical) -> str:
    """Return a kernel's output in the rank that the graph has."""
    shape = physical.graph.types[name].shape
    rows = (product(shape[:-1]), shape[-1])
    return physical.reshape(name, rows) if group.squeezed else name


def _write_node(event: Event, writer: Writer) -> None:
    node, physical, group = event.node, writer.physical, writer.group
    assert node is not None
    graph, rank = physical.source, group.rank
    if event.kind == "tensor":
        _write_tensor(event, writer)
        return
    if event.kind == "function":
        writer.flush()
        writer.step(Step("swish"), [], [])
        return
    if node.op == ROUND:  # affects thresholds only: stored values are computed in float32
        return
    if node.op == "BatchNormalization":
        writer.normalized(*centred_affine(node, graph))
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


def _write_tensor(event: Event, writer: Writer) -> None:
    node, physical = event.node, writer.physical
    assert node is not None
    value_first = node.inputs[0] == event.operand
    other = node.inputs[1 if value_first else 0]
    writer.flush()
    layout, by_row = physical.layout_of(other), (physical.shape(event.tensor)[0], 1)
    tensor = physical.float(other, layout)
    if writer.group.squeezed:
        spec = writer.group.spec
        shape = (spec.n, *spec.output_hw, physical.shape(other)[1])
        tensor = physical.reshape(tensor, shape)
    if node.op == ADD_REPEATED:
        period = int(physical.shape(other)[1])
        writer.step(Step("add", "NHWC", period=period), [physical.float(other, "NHWC")], [])
    elif physical.shape(other) not in (physical.shape(event.tensor), by_row):
        n, channels, *_ = physical.image(other)
        writer.step(Step("gate"), [physical.reshape(tensor, (n, channels))], [])
    else:
        period = int(physical.shape(other) != physical.shape(event.tensor))
        writer.step(Step(_STEPS[node.op], layout, period=period), [tensor], [])
        if node.op == "Sub" and value_first:  # v - t == -(t - v), exactly
            writer.affine(-np.ones(writer.group.channels), np.zeros(writer.group.channels))


def _write_sign(
    event: Event,
    writer: Writer,
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
            "its input may be 0: a second bit plane marks zeros, and costs little if there are none"
            if zero
            else "its input is never 0, so its result has two values"
        )
    inverted = node.attrs.get("flip")
    compare = "gt" if kind == "gt" else "ge"
    key = (node.inputs[0], compare, None if inverted is None else np.asarray(inverted).tobytes())
    value = sign_values(float(node.attrs["lo"]), float(node.attrs["hi"]), zero)
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
        assert inverted is None, f"{node.name}: commute inverts channels of thresholds only"
        writer.flush()
        writer.step(Step("bits", compare=compare, zero=zero), [], names)
    done[key] = Planes(names[0], names[1] if zero else None, value)
    physical.planes[event.tensor] = done[key]
