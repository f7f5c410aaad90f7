"""Derive the same network for smaller inputs: one image of a batch, smaller images.

Passes depend on operators and on the values of tensors, and hardly on sizes. If a network is too
large to be evaluated twice during compilation, its passes are confirmed on such a twin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Dim, Graph, TensorType
from bnncc.ir.region import region, whole

Array = np.ndarray[Any, Any]

_SIDE = 32
"""Pixels that are left at least: enough for an inside and a border."""


@dataclass(frozen=True)
class Twin:
    """A network for smaller inputs."""

    graph: Graph
    """Its constants are those of the large one."""
    feeds: dict[str, Array]
    """Inputs."""
    values: dict[str, Array]
    """All tensors, for `feeds`."""

    @property
    def sizes(self) -> str:
        """Shapes of the inputs, in words."""
        return ", ".join(f"{n} {'x'.join(map(str, v.shape))}" for n, v in self.feeds.items())


def twins(
    graph: Graph, copy: Callable[[Graph], Graph], draw: Callable[[Graph], dict[str, Array]]
) -> Iterator[Twin]:
    """Yield twins of a graph, the smallest first.

    Parameters
    ----------
    graph : Graph
        As loaded, with fixed shapes.
    copy : callable
        Copies a graph.
    draw : callable
        Makes inputs for a graph.

    Yields
    ------
    Twin
    """
    names = [o for node in graph.nodes for o in node.outputs if o]
    for shapes in _smaller({name: graph.types[name].shape for name in graph.inputs}):
        small = copy(graph)
        for name, shape in shapes.items():
            small.types[name] = TensorType(shape, graph.types[name].dtype)
        try:
            feeds = draw(small)
            values = evaluate(small, feeds, names)
        except Exception:  # the network's own shapes do not fit: evaluation raises anything then
            continue
        for name in names:
            if len(graph.types[name].shape) != values[name].ndim or not values[name].size:
                break
            small.types[name] = TensorType(values[name].shape, graph.types[name].dtype)
        else:
            yield Twin(small, feeds, values)
    if all(kind.static for kind in graph.types.values()):
        first = {name: whole(graph.types[name].shape) for name in graph.outputs}
        first = {name: ((0, 1), *box[1:]) if box else box for name, box in first.items()}
        image = region(graph, first).graph  # what is reshaped to so many images, is to one
        if all(image.types[name].shape == graph.types[name].shape for name in image.inputs):
            return
        feeds = draw(image)
        made = [o for node in image.nodes for o in node.outputs if o]
        yield Twin(image, feeds, evaluate(image, feeds, made))


def _smaller(shapes: Mapping[str, tuple[Dim, ...]]) -> Iterator[dict[str, tuple[Dim, ...]]]:
    """Yield smaller shapes of all inputs, the smallest first; the network may not support them."""
    batches = {s[0] for s in shapes.values() if len(s) > 1}
    one = {k: (1, *s[1:]) if len(batches) == 1 and len(s) > 1 else s for k, s in shapes.items()}
    found = [
        {k: _divided(s, size, last) for k, s in start.items()}
        for start in (one, shapes)
        for size in (32, 16, 8, 4, 2, 1)
        for last in (False, True)  # channels come first, or last
    ]

    def size_of(made: Mapping[str, tuple[Dim, ...]]) -> int:
        return sum(math.prod(d for d in s if isinstance(d, int)) for s in made.values())

    tried = [shapes]
    for made in sorted(found, key=size_of):
        if made not in tried:
            tried.append(made)
            yield made


def _divided(shape: tuple[Dim, ...], size: int, last: bool) -> tuple[Dim, ...]:
    axes = range(1, len(shape) - 1) if last else range(2, len(shape))
    return tuple(
        d // size if k in axes and isinstance(d, int) and d >= _SIDE * size and not d % size else d
        for k, d in enumerate(shape)
    )
