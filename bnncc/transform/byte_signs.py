"""Replace signs of a uint8 image by comparisons of the bytes themselves.

    before: f = Cast(x); g = Sub(f, mean); h = Mul(g, scale); s = bnncc.Sign(h)    x: uint8
    after:  s = bnncc.ImageBits(x)                                                 x >= t[c]

Thresholds are found by evaluating the nodes in between, as they are in the graph, on all 256 bytes.
"""

from __future__ import annotations

import numpy as np

from bnncc.ir.dims import is_static
from bnncc.ir.graph import Graph, Node
from bnncc.ir.image_bits import IMAGE_BITS
from bnncc.recognise.affine import chain_above
from bnncc.topi_binary.spec import ImageBits
from bnncc.transform import thresholds as th
from bnncc.transform.physical import Physical, Planes

MAX_CHANNELS = 8
"""Maximum number of channels: the bits of a pixel are put together in a byte."""

_TO_NCHW = [0, 3, 1, 2]


def compare_bytes(graph: Graph) -> None:
    """Replace signs of uint8 images by comparisons of bytes.

    Runs after `commute_pads`.
    """
    producers = graph.producers()
    for position, sign in enumerate(graph.nodes):
        if sign.op != "bnncc.Sign":
            continue
        found = _bytes_above(graph, sign.inputs[0], producers)
        attrs = None if found is None else _attributes(graph, sign, found[1])
        if found is None or attrs is None:
            continue
        image = found[0]
        attrs["layout"] = "nchw"
        turn = producers.get(image)
        if turn is not None and turn.op == "Transpose" and list(turn.attrs["perm"]) == _TO_NCHW:
            image, attrs["layout"] = turn.inputs[0], "nhwc"
        graph.nodes[position] = Node(IMAGE_BITS, [image], list(sign.outputs), attrs, sign.name)
    graph.prune()


def write_image_bits(node: Node, physical: Physical) -> None:
    """Append the kernel that computes the bits of a uint8 image.

    Parameters
    ----------
    node : Node
        A node whose operator is `IMAGE_BITS`.
    """
    a, (image,), (out,) = node.attrs, node.inputs, node.outputs
    n, channels, height, width, _ = physical.image(out)
    layout = str(a["layout"]).upper()
    depth = int(physical.shape(image)[3 if layout == "NHWC" else 1])
    spec = ImageBits(
        n, height, width, depth, a["kind"], a["thresholds"], a["flip"], layout, channels
    )
    name = physical.graph.fresh(f"{out}.bits")
    physical.kernel(spec, [physical.float(image)], [name], node.name)
    physical.planes[out] = Planes(name, None, physical.lattices[out])


def _bytes_above(
    graph: Graph, name: str, producers: dict[str, Node]
) -> tuple[str, list[Node]] | None:
    """Return the uint8 image that `name` is computed from, and the nodes from its Cast on."""
    shape = graph.types[name].shape
    if len(shape) != 4 or not isinstance(shape[1], int) or shape[1] > MAX_CHANNELS:
        return None
    found = chain_above(graph, name, producers, "Cast", lambda _: True)
    if found is None:
        return None
    (image,), chain = found[0].inputs, found[1]
    kind = graph.types[image]
    known = kind.dtype == "uint8" and is_static(kind.shape[1:])
    return (image, chain) if known else None


def _attributes(graph: Graph, sign: Node, chain: list[Node]) -> dict[str, object] | None:
    """Return the thresholds on bytes that equal the sign, if it is one step in each channel."""
    channels = int(graph.types[sign.outputs[0]].shape[1])
    values = np.arange(256, dtype=np.float32)[:, None, None, None]
    table = th.evaluate_chain(graph, chain, np.broadcast_to(values, (256, channels, 1, 1)))
    table = np.broadcast_to(table.reshape(256, -1), (256, channels))
    if sign.attrs["zero"] == "mid" and (table == 0).any():
        return None
    bits = table > 0 if sign.attrs["zero"] == "gt" else table >= 0
    way = th.direction(bits)
    if not way.single:
        return None
    rising = bits ^ way.down
    limits = np.where(rising.any(axis=0), rising.argmax(axis=0), 256)
    return {
        "kind": "threshold", "thresholds": tuple(limits.tolist()),
        "flip": tuple(way.down.astype(int).tolist()), "channels": channels,
        "lo": float(sign.attrs["lo"]), "hi": float(sign.attrs["hi"]),
    }  # fmt: skip
