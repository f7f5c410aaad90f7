"""Interleave the phases of a transposed convolution, as bits, levels or numbers.

Channels are the last axis in each form, so a pixel is a run of words. The phases of one row are
concatenated pixel by pixel, then the rows of all phases row by row.
"""

from __future__ import annotations

import numpy as np

from bnncc.ir.graph import Dim, Node, TensorType
from bnncc.transform.physical import Physical, Planes


def interleave(node: Node, physical: Physical) -> None:
    """Build the result of a `transposed.INTERLEAVE` in the form that its phases have.

    Parameters
    ----------
    node : Node
        The node.
    """
    out, planes = node.outputs[0], [physical.planes.get(i) for i in node.inputs]
    levels = [physical.levels.get(i, {}).get("planes", []) for i in node.inputs]
    known = physical.lattices.get(out)
    if known is not None and not known.signs and all(levels):
        mixed = [_mixed(node, physical, list(parts)) for parts in zip(*levels, strict=True)]
        physical.levels[out] = {"planes": mixed}
        return
    if known is None or not known.signs or any(p is None for p in planes):
        parts = [physical.float(i, "NHWC") for i in node.inputs]
        physical.floats[out] = {"NHWC": _mixed(node, physical, parts)}
        return
    held = [p for p in planes if p is not None]
    sign, zero = _mixed(node, physical, [p.sign for p in held]), None
    if any(p.zero for p in held):
        parts = [p.zero or physical.xor(p.sign, p.sign) for p in held]
        zero = _mixed(node, physical, parts)
    physical.planes[out] = Planes(sign, zero, known)


def _mixed(node: Node, physical: Physical, parts: list[str]) -> str:
    down, right = node.attrs["strides"]
    n, _, height, width, _ = physical.image(node.outputs[0])
    rows, columns = -(-height // down), -(-width // right)
    last = physical.graph.types[parts[0]].shape[3]
    cut = [
        _cropped(physical, part, start, (rows, columns))
        for part, start in zip(parts, node.attrs["starts"], strict=True)
    ]
    assert isinstance(last, int)
    lines = []
    for a in range(down):
        beside = _joined(physical, cut[a * right : (a + 1) * right], 3)
        lines.append(physical.reshape(beside, (n, rows, columns * right * last)))
    whole = physical.reshape(_joined(physical, lines, 2), (n, rows * down, columns * right, last))
    return _cropped(physical, whole, (0, 0), (height, width))


def _joined(physical: Physical, parts: list[str], axis: int) -> str:
    if len(parts) == 1:
        return parts[0]
    kind = physical.graph.types[parts[0]]
    shape: list[Dim] = list(kind.shape)
    shape[axis] = sum(int(physical.graph.types[p].shape[axis]) for p in parts)
    out = physical.graph.fresh(f"{parts[0]}.mixed")
    made = TensorType(tuple(shape), kind.dtype)
    physical.node(Node("Concat", parts, [out], {"axis": axis}, out), [made])
    return out


def _cropped(physical: Physical, name: str, start: tuple[int, int], size: tuple[int, int]) -> str:
    """Crop to `size` rows and columns from `start`."""
    kind = physical.graph.types[name]
    if start == (0, 0) and kind.shape[1:3] == size:
        return name
    ends = [s + d for s, d in zip(start, size, strict=True)]
    bounds = [
        physical.constant(np.array(value, np.int64), f"{name}.crop")
        for value in (list(start), ends, [1, 2])
    ]
    out = physical.graph.fresh(f"{name}.crop")
    made = TensorType((kind.shape[0], *size, kind.shape[3]), kind.dtype)
    physical.node(Node("Slice", [name, *bounds], [out], {}, out), [made])
    return out
