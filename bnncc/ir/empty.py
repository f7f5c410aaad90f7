"""Which symbolic dimensions may be 0: those of caches that a sequence starts without.

    past [N, heads, past, size], new [N, heads, 1, size]  ->  Concat along the third axis

Sizes are 1 or more everywhere else: only a Concat reads an empty tensor, and it copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from bnncc.ir.dims import Dim, evaluated, symbols_of
from bnncc.ir.graph import Graph


def may_be_empty(graph: Graph, positive: Iterable[str]) -> set[str]:
    """Return the symbols that may be 0.

    Parameters
    ----------
    graph : Graph
        Physical; all that it computes is then not empty.
    positive : iterable of str
        Symbols that its reader took to be 1 or more, see `Graph.positive`.

    Returns
    -------
    set of str
        Any of them may be 0 at once.
    """
    shapes = {name: graph.types[name].shape for name in graph.inputs}
    found = {str(d) for shape in shapes.values() for d in shape if isinstance(d, str)}
    found = {symbol for symbol in found if symbol.isidentifier()} - set(positive)
    made = {name: graph.types[name].shape for n in graph.nodes for name in n.outputs if name}
    while refused := _refused(graph, shapes, made, found):
        found -= refused
    return found


def _refused(
    graph: Graph,
    inputs: dict[str, tuple[Dim, ...]],
    made: dict[str, tuple[Dim, ...]],
    symbols: set[str],
) -> set[str]:
    """Return some of the symbols of which one must be 1 or more if all others are 0."""
    refused: list[set[str]] = []
    readers = graph.consumers()
    for name, shape in (inputs | made).items():
        empty = [k for k, dim in enumerate(shape) if _vanishes(dim, symbols)]
        if not empty:
            continue
        joined = all(
            node.op == "Concat" and [int(node.attrs["axis"]) % len(shape)] == empty
            for node in readers.get(name, [])
        )
        if name in made or name in graph.outputs or not joined:
            refused.append(symbols & symbols_of(shape[empty[0]]))
    fewest = min(map(len, refused), default=0)  # P+T is not 0 if T alone is refused
    return set().union(*(some for some in refused if len(some) == fewest))


def _vanishes(dim: Dim, symbols: set[str]) -> bool:
    return isinstance(dim, str) and not evaluated(dim, lambda symbol: int(symbol not in symbols))
