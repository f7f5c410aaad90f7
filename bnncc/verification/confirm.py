"""Make sure of a fresh artifact: run it on random input and compare with the graph's own result.

TVM converts and compiles the operators that are not ours; a mistake there (or here) must not reach
a user unseen. Where the compiling machine can run the code, no artifact leaves the compiler that
disagrees with the NumPy evaluation of its model, but for ties (docs/semantics.md).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from bnncc.codegen.link import normal_arch
from bnncc.errors import UnsupportedOp, VerificationError
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph, Node
from bnncc.runtime.artifact import Artifact
from bnncc.targets.catalog import missing_features
from bnncc.targets.gpus import missing
from bnncc.targets.spec import TargetSpec

if TYPE_CHECKING:
    import onnx

_TRIES = 4
_INDEXED = {"GatherElements", "GatherND", "ScatterElements", "ScatterND"}
_RELATIVE = {"float16": 2.0**-7, "bfloat16": 2.0**-4}
_RELATIVE_FLOAT = 1e-4


class SelfCheck:
    """Random inputs of a graph with their right outputs.

    Parameters
    ----------
    graph : Graph
        As loaded.
    seed : int
        Of the first pair.
    """

    def __init__(self, graph: Graph, seed: int) -> None:
        self._graph, self._seed = graph, seed

    def pair(self, number: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return inputs and right outputs by name; every `number` gives others."""
        indexed = any(node.op in _INDEXED for node in self._graph.nodes)
        for top in (2, 1) if indexed else (127, 2, 1):  # positions are to be within bounds
            feeds = self._feeds(np.random.default_rng(self._seed + number), top)
            try:
                return feeds, evaluate(self._graph, feeds)
            except (IndexError, UnsupportedOp):
                if top == 1:
                    raise
        raise AssertionError("the last round returns or raises")

    def _feeds(self, rng: np.random.Generator, top: int) -> dict[str, np.ndarray]:
        """Return random inputs, integers below `top`."""
        feeds = {}
        for name in self._graph.inputs:
            kind = self._graph.types[name]
            shape = tuple(d if isinstance(d, int) else 1 for d in kind.shape)
            if name in self._graph.datatypes:
                feeds[name] = self._graph.datatypes[name].random(rng, shape)
            elif kind.dtype == "bool":
                feeds[name] = rng.integers(0, 2, shape).astype(bool)
            elif kind.dtype.startswith(("int", "uint")):
                bound = 256 if kind.dtype == "uint8" and top > 2 else top
                feeds[name] = rng.integers(0, bound, shape).astype(kind.dtype)
            else:
                feeds[name] = rng.standard_normal(shape).astype(kind.dtype)
        return feeds


def copy_of(graph: Graph) -> Graph:
    """Return a copy of `graph` that passes do not reach; constants are shared."""
    nodes = [
        Node(n.op, list(n.inputs), list(n.outputs), dict(n.attrs), n.name, n.covers)
        for n in graph.nodes
    ]
    return Graph(
        nodes, list(graph.inputs), list(graph.outputs), dict(graph.constants), dict(graph.types),
        graph.source, datatypes=graph.datatypes,
    )  # fmt: skip


def runs_here(target: TargetSpec) -> bool:
    """Whether this machine can run code for `target`."""
    arch = normal_arch(target.triple.split("-")[0]) if target.triple else ""
    return arch in ("", normal_arch(platform.machine())) and not missing_features(target)


def not_run(target: TargetSpec, output: object) -> str:
    """Return what a user should know of `output`, if this machine cannot run it; else nothing."""
    if not target.has_runtime:
        return (
            f"TVM has no runtime for {target.name} on PyPI: unpack {output} for the kernels "
            "(kernels.o, network.h), a C file that calls them in order, and README.md"
        )
    if target.gpus and not runs_here(target):
        return (
            f"code for {target.name} was not run here: {missing(target.gpus)}; `bnncc verify` "
            "checks it where there is such a GPU"
        )
    if not runs_here(target):
        return (
            f"code for {target.name} was not run on this machine: `bnncc deploy` checks it on the "
            "device with the pair of input and output it carries"
        )
    return ""


def confirmed(
    packed: Callable[[int], Artifact],
    model: str | os.PathLike[str] | onnx.ModelProto,
    threads: int | None = None,
) -> Artifact:
    """Return an artifact that agrees with its own self-check.

    Parameters
    ----------
    packed : callable
        Makes the artifact with the self-check pair of a number.
    model : path or onnx.ModelProto
        What it was compiled from; only read if all pairs disagree.
    threads : int, optional
        The most that the runs use, and those of the calling thread after them.

    Returns
    -------
    Artifact
        With the first pair that agrees. Random inputs with a value within rounding of a sign's zero
        may disagree: if all do, layers are compared one by one.

    Raises
    ------
    VerificationError
        If a layer is wrong.
    """
    for number in range(_TRIES):
        artifact = packed(number)
        artifact.session(threads=threads)
        given, wanted = artifact.selfcheck_arrays()
        made = artifact.run(given)
        if all(agree(made[name], wanted[name]) for name in wanted):
            return artifact
    from bnncc.verification.verify import verify

    result = verify(model, artifact)
    if result["verdict"] == "wrong":
        bad = next(
            (x["name"] for x in (*result["layers"], *result["outputs"]) if not x["right"]), ""
        )
        raise VerificationError(
            f"the compiled network disagrees with its model from tensor `{bad}` on",
            hint="this is a bug in bnncc; please report it with the model",
        )
    return artifact


def tolerance(dtype: np.dtype) -> float:
    """Return how far a float may be off, relative to the largest: eight roundings of a half."""
    return _RELATIVE.get(dtype.name, _RELATIVE_FLOAT)


def agree(mine: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether `mine` is `wanted`: integers exactly, floats but for rounding."""
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
        return False
    if mine.dtype.kind not in "fV":  # V is bfloat16
        return bool((mine == wanted).all())
    relative = tolerance(mine.dtype)
    a, b = mine.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(all="ignore"):
        off = np.where(a == b, 0.0, np.abs(a - b))
    off = off[~(np.isnan(a) & np.isnan(b))]
    top = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return bool((off <= relative * max(top, 1e-30)).all())
