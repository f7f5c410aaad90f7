"""The definition of right with `--first-layer` and `--float-type`: the model, with roundings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph
from bnncc.options import Uint8Input
from bnncc.transform.first_layer import relax_first_layer
from bnncc.transform.half_floats import round_floats
from bnncc.transform.image import take_uint8

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Relaxed:
    """Evaluates a model, or a part of it, as `--first-layer` and `--float-type` have it."""

    operands: str
    float_type: str
    """`operands`, `float_type`: the options' values."""
    pixels: Mapping[str, Array]
    """Inputs taken as bytes."""
    images: tuple[Uint8Input, ...]
    """What they stand for."""
    data: frozenset[str] = frozenset()
    """Tensors of the model that rounded convolutions read: bytes may not exist in this form."""
    whole: frozenset[str] = frozenset()
    """Outputs of the whole model: what lies between kernels is rounded where all of them are."""

    @classmethod
    def of(
        cls,
        operands: str,
        float_type: str,
        model: onnx.ModelProto,
        feeds: Mapping[str, Array],
        pixels: Mapping[str, Array],
        images: tuple[Uint8Input, ...],
    ) -> Relaxed | None:
        """Return the definition for `model` on `feeds`; None if nothing in it is rounded.

        Parameters
        ----------
        operands, float_type : str
            Values of the options.
        model : ModelProto
            The whole model.
        feeds, pixels : mapping of str to ndarray
            Its inputs as it has them, and those that are given as bytes instead.
        images : tuple of Uint8Input
            What the bytes stand for.

        Returns
        -------
        Relaxed or None
        """
        graph, _ = cls("float32", "float32", pixels, images).loaded(model, feeds)
        rounded = set(relax_first_layer(graph, operands).layers)
        if not rounded and float_type == "float32":
            return None
        made = [n for n in model.graph.node if rounded.intersection(n.output)]
        read = frozenset(n.input[0] for n in made)
        whole = frozenset(output.name for output in model.graph.output)
        return cls(operands, float_type, pixels, images, read, whole)

    def run(self, model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run `model`; return its outputs by name."""
        return evaluate(*self.loaded(model, feeds))

    def loaded(
        self, model: onnx.ModelProto, feeds: Mapping[str, Array]
    ) -> tuple[Graph, dict[str, Array]]:
        """Return the graph of `model` with rounded operands, and what it is fed."""
        graph = load(model, input_shapes={k: v.shape for k, v in feeds.items()})
        take_uint8(graph, [image for image in self.images if image.name in feeds])
        relax_first_layer(graph, self.operands)
        if self.float_type != "float32" and self.whole.issubset(graph.outputs):
            round_floats(graph)
        return graph, {k: self.pixels.get(k, v) for k, v in feeds.items()}
