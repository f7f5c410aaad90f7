"""Data movement of levels, plane by plane on packed bits.

before: a = Levels(x); p = Pad(a, 0); c = Flatten(p)
after:  c = the planes of x, each padded by the bit it has in the level of 0
"""

from __future__ import annotations

import copy
from dataclasses import replace

from bnncc.ir.graph import Node
from bnncc.ir.moves import MOVES
from bnncc.recognise.lattice import REMAPS, sign_values
from bnncc.recognise.operands import pad_of
from bnncc.topi_binary.spec import PadBits
from bnncc.transform.physical import Physical, Planes
from bnncc.transform.routes import Router, pool_spec

ROUTED = MOVES | REMAPS | {"Concat", "bnncc.Interleave", "MaxPool", "Pad"}
"""Operators that move levels, or change the values that they stand for."""

_BIT = sign_values(0.0, 1.0)


class LevelRouter:
    """Applies data movement to planes of levels.

    Parameters
    ----------
    physical : Physical
        The graph under construction, with its lattices.
    """

    def __init__(self, physical: Physical) -> None:
        self.physical = physical
        self._routers: dict[int, Router] = {}
        self._parts: set[str] = set()

    def route(self, node: Node) -> bool:
        """Append kernels for `node` if its inputs are available as planes.

        Parameters
        ----------
        node : Node
            Its operator is in `ROUTED` and its output is few-valued.

        Returns
        -------
        bool
            False if the node must be computed in float.
        """
        lattices, levels = self.physical.lattices, self.physical.levels
        data = [i for i in node.inputs if i in lattices]
        if not data or not all(self._followed(i) for i in data):
            return False
        if node.op in REMAPS:
            levels[node.outputs[0]] = {"planes": levels[data[0]]["planes"]}
            return True
        if node.op == "Pad":
            return self._pad(node)
        if node.op == "MaxPool":
            return self._pool(node)
        return self._moved(node, data)

    def _followed(self, name: str) -> bool:
        """Whether planes of `name` exist, or it is part of a movement of planes."""
        if "planes" in self.physical.levels.get(name, {}):
            return True
        return name in self.physical.postponed and name in self._parts

    def _moved(self, node: Node, data: list[str]) -> bool:
        """Move each plane as a tensor of signs."""
        levels = self.physical.levels
        count = self.physical.lattices[data[0]].bits
        done = True
        made: list[dict[str, Planes]] = []
        for number in range(count):
            router = self._routers.get(number)
            if router is None:
                router = self._routers[number] = Router(copy.copy(self.physical))
                router.physical.planes = {}
            for i in data:
                if i in levels:
                    plane = levels[i]["planes"][number]
                    router.physical.planes[i] = Planes(plane, None, _BIT)
            router.physical.lattices = dict.fromkeys(node.outputs, _BIT)
            done &= router.route(node)
            made.append(router.physical.planes)
        for out in node.outputs:
            if out and all(out in planes for planes in made):
                levels[out] = {"planes": [planes[out].sign for planes in made]}
            elif out and done:
                self._parts.add(out)
        return done

    def _pool(self, node: Node) -> bool:
        data, out = node.inputs[0], node.outputs[0]
        if self.physical.lattices[data].step < 0:
            return False
        planes = self.physical.levels[data]["planes"]
        spec = replace(pool_spec(node, self.physical), planes=len(planes))
        made = [self.physical.graph.fresh(f"{out}.planes") for _ in planes]
        self.physical.kernel(spec, planes, made, node.name)
        self.physical.levels[out] = {"planes": made}
        return True

    def _pad(self, node: Node) -> bool:
        pad = pad_of(node, self.physical.source)
        data, out = node.inputs[0], node.outputs[0]
        level = None if pad is None else self.physical.lattices[data].level_of(pad[1])
        if pad is None or level is None or level != int(level):
            return False
        n, channels, height, width, _ = self.physical.image(data)
        planes = []
        for number, plane in enumerate(self.physical.levels[data]["planes"]):
            spec = PadBits(n, height, width, channels, pad[0], int(level) >> number & 1)
            planes.append(self.physical.graph.fresh(f"{out}.planes"))
            self.physical.kernel(spec, [plane], planes[-1:], node.name)
        self.physical.levels[out] = {"planes": planes}
        return True
