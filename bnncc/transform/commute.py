"""Move signs before operators that are cheaper on bits.

    commute_moves   before: f = Flatten(x); s = Sign(f)
                    after:  t = Sign(x); s = Flatten(t)
    commute_pads    before: p = Pad(x, v); s = Sign(p)
                    after:  t = Sign(x); s = Pad(t, sign(v))
    commute_pools   before: y = Conv(b); m = MaxPool(y); z = BatchNormalization(m); s = Sign(z)
                    after:  y = Conv(b); z = BatchNormalization(y); t = Sign(z); s = BitPool(t)

All are exact: a sign is elementwise, and a monotone function commutes with the maximum. If the
function between pool and sign decreases in a channel (a negative BatchNormalization scale), the
sign of that channel is inverted before the pool and again after it (attribute ``flip``): the
maximum of decreasing values is the AND of their bits.
"""

from __future__ import annotations

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.recognise.affine import chain_above
from bnncc.recognise.lattice import pools_images
from bnncc.recognise.monotone import chain_direction
from bnncc.recognise.operands import pad_of
from bnncc.transform import thresholds as th


def commute_moves(graph: Graph) -> None:
    """Move signs before flattening, so that they apply to images, on which kernels compute signs.

    Signs stay after a reshape by `flatten_rows` whose result a matrix product reads as bits.

    Runs after `recognise_signs`.
    """
    consumers = graph.consumers()
    for sign, move in _behind(graph, "Flatten", "Reshape"):
        before, after = (graph.types[t].shape for t in (move.inputs[0], move.outputs[0]))
        rows = len(after) == 2 and len(before) != 2 and before[-1:] == after[-1:]
        readers = consumers.get(sign.outputs[0], [])
        if not (rows and any(r.op in ("Gemm", "MatMul") for r in readers)):
            _exchange(graph, sign, move, *move.inputs[1:])
    graph.prune()


def commute_pads(graph: Graph) -> None:
    """Move signs before pads.

    Runs after `recognise_signs`.
    """
    for sign, pad in _behind(graph, "Pad"):
        if (known := pad_of(pad, graph)) is None:
            continue
        lo, hi, zero = float(sign.attrs["lo"]), float(sign.attrs["hi"]), sign.attrs["zero"]
        value = known[1]
        at_zero = {"ge": hi, "gt": lo, "mid": (lo + hi) / 2}[str(zero)]
        padded = hi if value > 0 else lo if value < 0 else at_zero
        fill = graph.constant(np.float32(padded).reshape(()), "pad_value")
        _exchange(graph, sign, pad, pad.inputs[1], fill)
    graph.prune()


def _behind(graph: Graph, *operators: str) -> list[tuple[Node, Node]]:
    """Return (sign, node) for each `node` of `operators` whose only reader is a sign."""
    producers, consumers = graph.producers(), graph.consumers()
    found = []
    for sign in (node for node in graph.nodes if node.op == "bnncc.Sign"):
        before = producers.get(sign.inputs[0])
        if before is None or before.op not in operators:
            continue
        if _single_reader(graph, before.outputs[0], consumers):
            found.append((sign, before))
    return found


def _exchange(graph: Graph, sign: Node, move: Node, *inputs: str) -> None:
    """Swap `sign` and `move`, which it reads; `inputs` are further inputs of `move`."""
    source, inner = move.inputs[0], graph.fresh(f"{sign.outputs[0]}.inner")
    graph.types[inner] = graph.types[source]
    first = Node("bnncc.Sign", [source], [inner], dict(sign.attrs), sign.name)
    then = Node(move.op, [inner, *inputs], [sign.outputs[0]], dict(move.attrs), move.name)
    for old, new in ((move, first), (sign, then)):
        graph.nodes[graph.nodes.index(old)] = new


def commute_pools(graph: Graph) -> None:
    """Move signs before max-pooling whose numeric result has no other reader.

    Runs after `binarize`.
    """
    producers, consumers = graph.producers(), graph.consumers()
    for sign in [n for n in graph.nodes if n.op == "bnncc.Sign"]:
        found = chain_above(
            graph, sign.inputs[0], producers, "MaxPool",
            lambda name: _single_reader(graph, name, consumers),  # noqa: B023
        )  # fmt: skip
        if found is None or not pools_images(found[0], graph):
            continue
        pool, chain = found
        flip = _falling(graph, pool, chain)
        if flip is None:
            continue
        if flip.any() and not _threshold_only(graph, pool, chain, sign, producers, consumers):
            continue
        _swap(graph, sign, pool, chain, flip)
        producers, consumers = graph.producers(), graph.consumers()
    graph.sort()
    graph.prune()


def _single_reader(graph: Graph, name: str, consumers: dict[str, list[Node]]) -> bool:
    return len(consumers.get(name, [])) == 1 and name not in graph.outputs


def _falling(graph: Graph, pool: Node, chain: list[Node]) -> np.ndarray | None:
    """Return the channels in which the nodes after the pool decrease; None if unknown for any."""
    channels = int(graph.types[pool.outputs[0]].shape[1])
    way = chain_direction(chain, graph, channels, 4)
    return None if way is None else way < 0


def _threshold_only(
    graph: Graph,
    pool: Node,
    chain: list[Node],
    sign: Node,
    producers: dict[str, Node],
    consumers: dict[str, list[Node]],
) -> bool:
    """Whether the sign will become thresholds of a binary layer that has no other reader."""
    found = chain_above(
        graph, pool.inputs[0], producers, "bnncc.BinaryConv",
        lambda name: _single_reader(graph, name, consumers),
    )  # fmt: skip
    if found is None:
        return False
    node, before = found
    bits = np.asarray(node.attrs["bits"])
    taps = int(np.prod(bits.shape[1:]))
    dots = th.attainable_dots(taps, any_parity=True)
    nodes = before + chain
    scale, bias, *lift = (node.attrs[k] for k in ("scale", "bias", "step", "first"))
    planes = th.tabulate(graph, nodes, scale, bias, dots, 4, lift)
    if sign.attrs["zero"] == "mid" and planes.zero_attainable:
        return False
    return all(th.direction(p).single for p in (planes.ge, planes.gt))


def _swap(graph: Graph, sign: Node, pool: Node, chain: list[Node], flip: np.ndarray) -> None:
    kind = graph.types[pool.inputs[0]]
    name = pool.inputs[0]
    for node in chain:
        data = graph.computed(node.inputs)[0]
        node.inputs = [name if i == data else i for i in node.inputs]
        # These tensors now hold values before pooling, so they get new names.
        name = graph.fresh(f"{node.outputs[0]}.unpooled")
        node.outputs, graph.types[name] = [name], kind
    attrs = dict(sign.attrs)
    pool_attrs = dict(pool.attrs)
    if flip.any():
        # Keep the zero of a three-valued sign, even if it never occurs: later layers expect it.
        attrs["flip"] = pool_attrs["flip"] = flip
    inner = graph.fresh(f"{sign.outputs[0]}.unpooled")
    graph.types[inner] = kind
    new_sign = Node("bnncc.Sign", [name], [inner], attrs, sign.name)
    new_pool = Node("bnncc.BitPool", [inner], [sign.outputs[0]], pool_attrs, pool.name)
    graph.nodes[graph.nodes.index(sign)] = new_pool
    graph.nodes.insert(graph.nodes.index(new_pool), new_sign)
    graph.nodes.remove(pool)
