"""Select the signs after a binary layer that become thresholds."""

from __future__ import annotations

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.topi_binary.spec import BinaryConv2d
from bnncc.transform import thresholds as th
from bnncc.transform.kernel_group import Group


def plan(group: Group, graph: Graph) -> tuple[dict[str, tuple[th.Planes, np.ndarray]], np.ndarray]:
    """Select signs that become thresholds, and channels whose weights are stored negated.

    Parameters
    ----------
    group : Group
        A complete group.

    Returns
    -------
    tables : dict
        By sign output: its result for every dot product, and the channels it inverts.
    flip : ndarray of bool
        Channels to negate.
    """
    flip = np.zeros(group.channels, bool)
    tables: dict[str, tuple[th.Planes, np.ndarray]] = {}
    spec = group.spec
    if not isinstance(spec, BinaryConv2d):
        return tables, flip
    parity = (
        spec.ternary
        or spec.weight_zeros
        or spec.mode == "and"
        or (any(spec.pads) and spec.pad_value == 0)
    )
    dots = th.attainable_dots(spec.taps, any_parity=parity)
    chain: list[Node] = []
    pure = True
    all_pure = True
    down = np.zeros(group.channels, bool)
    up = np.zeros(group.channels, bool)
    for event in group.events:
        if event.kind == "apply" and event.node is not None:
            chain.append(event.node)
        elif event.kind in ("tensor", "function"):
            pure = False
        elif event.kind == "store":
            all_pure = False
        elif event.kind == "sign" and event.node is not None:
            if not pure:
                all_pure = False
                continue
            lift = group.step, group.first
            table = th.tabulate(graph, chain, group.scale, group.offset, dots, group.rank, lift)
            inverted = event.node.attrs.get("flip")
            mask = (
                np.zeros(group.channels, bool) if inverted is None else np.asarray(inverted, bool)
            )
            ways = [th.direction(p ^ mask) for p in (table.ge, table.gt)]
            tables[event.tensor] = (table, mask)
            if all(w.single for w in ways):
                for way in ways:
                    up |= way.up
                    down |= way.down
            else:
                all_pure = False
    if all_pure and not spec.per_image and not (up & down).any():
        flip = down
    return tables, flip


def fits(table: tuple[th.Planes, np.ndarray], compare: str, zero: bool, flip: np.ndarray) -> bool:
    """Whether the planes rise in one step (fall where weights are negated)."""
    planes, mask = table
    wanted = [planes.gt if compare == "gt" else planes.ge] + ([planes.gt] if zero else [])
    if zero and mask.any():
        return False
    for plane in wanted:
        way = th.direction(plane ^ mask)
        if not way.single or (way.down & ~flip).any() or (way.up & flip).any():
            return False
    return True
