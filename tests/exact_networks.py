"""Networks of the benchmarks with numbers of so few digits that every sum of floats is exact.

Whole networks with random weights can only be compared loosely: a sum that is rounded differently
turns a sign, and many others follow. Here no sum before the last layers is rounded in float32, in
any order, so a compiled network must agree but for how those last layers round.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks import networks
from bnncc import driver
from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.options import CompileOptions
from bnncc.targets.catalog import resolve
from bnncc.targets.spec import TargetSpec
from bnncc.verification.evaluator import evaluate_physical
from bnncc.verification.relaxed import Relaxed

Array = np.ndarray[Any, Any]
_ROUNDED = {"first_layer": "float16", "float_type": "float16"}
_OPTIONS: Mapping[str, tuple[Mapping[str, str], ...]] = {
    "birealnet18": ({}, {"first_layer": "bfloat16"}, _ROUNDED),
    "quicknet": ({}, _ROUNDED),
    "reactnet18": ({}, _ROUNDED),
    "vgg_small": ({},),
    "cifar": ({},),
    "vehicle": ({},),
}


@dataclass(frozen=True)
class Exact:
    """A network, and what its outputs must be.

    Attributes
    ----------
    name : str
        Of the network, and what its floats are rounded to.
    make : callable
        Gives the model for a batch.
    options : mapping of str to str
        To compile it with, for a GPU if there are any.
    tolerance : float
        Of the largest output: the mean of the last pixels and the dense layer behind it round.
    """

    tolerance: ClassVar[float] = 3e-6

    name: str
    make: Callable[[int], onnx.ModelProto]
    options: Mapping[str, str]

    def case(
        self, images: int = 1, target: TargetSpec | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return images, and the outputs for them, by name.

        Which tensors are float16 is up to the passes, so with `--float-type` their result for
        `target` says what is right.
        """
        model = self.make(images)
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
        feeds = {model.graph.input[0].name: rng.integers(-8, 9, shape).astype(np.float32)}
        if "float_type" in self.options:
            assert target is not None
            known = driver.lowered(model, CompileOptions(target=target, **self.options))
            made = evaluate_physical(known.physical, feeds)
            names = zip(known.outputs, known.physical.outputs, strict=True)
            return feeds, {output.name: made[name] for output, name in names}
        chosen = target or resolve("native")  # what is rounded does not depend on it here
        rounded = Relaxed.of(CompileOptions(target=chosen, **self.options), model, feeds, {})
        if rounded is not None:
            return feeds, rounded.run(model, feeds)
        return feeds, evaluate(load(model), feeds)


def exact() -> Iterator[Exact]:
    """Yield all of them."""
    for name, options in _OPTIONS.items():
        for chosen in options:
            ending = "".join(f"-{kind}" for kind in dict.fromkeys(chosen.values()))
            yield Exact(name + ending, lambda n, name=name: few_digits(name, n), chosen)


def few_digits(name: str, batch: int = 1) -> onnx.ModelProto:
    """Return a network of the benchmarks whose weights are small multiples of powers of 2.

    Parameters
    ----------
    name : str
        In `benchmarks.networks.NETWORKS`.
    batch : int
        Images at a time.
    """
    model = networks.NETWORKS[name](batch=batch)
    stored = {s.name: s for s in model.graph.initializer}
    for node in model.graph.node:
        known = {
            i: numpy_helper.to_array(stored[x]) for i, x in enumerate(node.input) if x in stored
        }
        for i, value in _rewritten(node, known).items():
            weight = node.input[i]
            stored[weight].CopyFrom(numpy_helper.from_array(value.astype(known[i].dtype), weight))
    return model


def _rewritten(node: onnx.NodeProto, known: Mapping[int, Array]) -> dict[int, Array]:
    """Return other constants for a node, by the number of its input."""
    if node.op_type == "Conv":
        return {1: _filters(known[1])} if set(np.unique(known[1])) != {-1.0, 1.0} else {}
    if node.op_type == "BatchNormalization":
        (epsilon,) = (a for a in node.attribute if a.name == "epsilon")
        epsilon.CopyFrom(helper.make_attribute("epsilon", 0.0))
        gamma, beta, mean, var = (known[i] for i in range(1, 5))
        return {
            1: np.where(gamma < 1, 1, 2), 2: np.round(4 * beta) / 4, 3: np.round(mean),
            4: 4 ** np.round(np.log2(var.mean()) / 2) * np.ones_like(var),
        }  # fmt: skip
    if node.op_type == "PRelu":
        return {1: np.round(4 * known[1]) % 3 - 1}
    if node.op_type == "Add":
        return {i: np.round(4 * value) / 4 for i, value in known.items()}
    return {}


def _filters(weight: Array) -> Array:
    """Round filters that read the image; of others keep the four largest weights."""
    if weight.shape[1] == 3:
        return np.round(8 * weight) / 8
    flat = weight.reshape(len(weight), -1)
    rank = np.argsort(np.argsort(-np.abs(flat), axis=1), axis=1)
    return (np.sign(flat) * (rank < 4) / 2).reshape(weight.shape)
