"""The reference for options that round: the model, rounded in the same places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from bnncc.frontend.onnx import load
from bnncc.ir.evaluate import evaluate
from bnncc.ir.graph import Graph
from bnncc.options import CompileOptions, Uint8Input
from bnncc.targets.spec import TargetSpec
from bnncc.transform.activations import quantize_rows
from bnncc.transform.first_layer import relax_first_layer
from bnncc.transform.float_precision import round_layers
from bnncc.transform.half_floats import round_floats
from bnncc.transform.image import take_uint8
from bnncc.transform.relaxations import quantized_layers, rounded_layers

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Relaxed:
    """Evaluates a model, or a part of it, with the rounding that options ask for."""

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
    quantized: frozenset[str] = frozenset()
    """What the layers make whose data `--activations` quantizes."""
    rounded: frozenset[str] = frozenset()
    """What the layers make that `--float-precision` rounds."""

    @property
    def inside(self) -> bool:
        """Whether layers are rounded that do not read an input."""
        return bool(self.quantized or self.rounded)

    @classmethod
    def of(
        cls,
        options: CompileOptions,
        model: onnx.ModelProto,
        feeds: Mapping[str, Array],
        pixels: Mapping[str, Array],
    ) -> Relaxed | None:
        """Return the definition for `model` on `feeds`; None if nothing in it is rounded.

        Parameters
        ----------
        options : CompileOptions
            From `recorded.options_of`.
        model : ModelProto
            The whole model.
        feeds, pixels : mapping of str to ndarray
            Its inputs, and those that are given as bytes instead.

        Returns
        -------
        Relaxed or None
        """
        operands, float_type = options.first_layer, options.float_type
        images = options.input_uint8
        graph, _ = cls("float32", "float32", pixels, images).loaded(model, feeds)
        first = set(relax_first_layer(graph, operands).layers)
        assert isinstance(options.target, TargetSpec)
        quantized = frozenset(quantized_layers(graph, options, options.target).layers)
        quantize_rows(graph, quantized)
        rounded = frozenset(rounded_layers(graph, options, options.target).layers)
        if not first | quantized | rounded and float_type == "float32":
            return None
        made = [n for n in model.graph.node if first.intersection(n.output)]
        read = frozenset(n.input[0] for n in made)
        whole = frozenset(output.name for output in model.graph.output)
        return cls(operands, float_type, pixels, images, read, whole, quantized, rounded)

    def run(self, model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run `model`; return its outputs by name."""
        return evaluate(*self.loaded(model, feeds))

    def loaded(
        self, model: onnx.ModelProto, feeds: Mapping[str, Array]
    ) -> tuple[Graph, dict[str, Array]]:
        """Return the graph of `model` with rounded operands, and its inputs."""
        graph = load(model, input_shapes={k: v.shape for k, v in feeds.items()})
        take_uint8(graph, [image for image in self.images if image.name in feeds])
        relax_first_layer(graph, self.operands)
        if self.float_type != "float32" and self.whole.issubset(graph.outputs):
            round_floats(graph)
        quantize_rows(graph, self.quantized)
        round_layers(graph, self.rounded)
        return graph, {k: self.pixels.get(k, v) for k, v in feeds.items()}
