"""The definition of right with `--first-layer`: the model's graph with rounded operands."""

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
from bnncc.transform.image import take_uint8

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class FirstLayer:
    """Evaluates a model, or a part of it, as `--first-layer` has it.

    Attributes
    ----------
    operands : str
        The option's value.
    pixels : dict of str to ndarray
        Inputs taken as bytes.
    images : tuple of Uint8Input
        What they stand for.
    data : frozenset of str
        Tensors of the model that rounded convolutions read: bytes may not exist in this form.
    """

    operands: str
    pixels: Mapping[str, Array]
    images: tuple[Uint8Input, ...]
    data: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        operands: str,
        model: onnx.ModelProto,
        feeds: Mapping[str, Array],
        pixels: Mapping[str, Array],
        images: tuple[Uint8Input, ...],
    ) -> FirstLayer | None:
        """Return the definition for `model` on `feeds`; None if nothing in it is rounded.

        Parameters
        ----------
        operands : str
            Value of the option.
        model : ModelProto
            The whole model.
        feeds, pixels : mapping of str to ndarray
            Its inputs as it has them, and those that are given as bytes instead.
        images : tuple of Uint8Input
            What the bytes stand for.
        """
        graph, _ = cls("float32", pixels, images).loaded(model, feeds)
        rounded = set(relax_first_layer(graph, operands).layers)
        if not rounded:
            return None
        made = [n for n in model.graph.node if rounded.intersection(n.output)]
        return cls(operands, pixels, images, frozenset(n.input[0] for n in made))

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
        return graph, {k: self.pixels.get(k, v) for k, v in feeds.items()}
