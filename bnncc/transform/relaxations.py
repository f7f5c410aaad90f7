"""Apply the options that change what a network computes: its inputs, and layers that round."""

from __future__ import annotations

from bnncc.ir.graph import Graph, copy_of
from bnncc.options import CompileOptions
from bnncc.report import Layer
from bnncc.targets.spec import TargetSpec
from bnncc.transform import activations, float_precision
from bnncc.transform.activations import of_few_bits, quantize_rows
from bnncc.transform.first_layer import Relaxed, float_layers, relax_first_layer
from bnncc.transform.float_precision import round_layers
from bnncc.transform.half_floats import round_floats
from bnncc.transform.image import take_uint8, transform_input
from bnncc.transform.pipeline import Compilation, choose_methods

RELAXING = ("first_layer", "activations", "float_precision")
"""Options that round the operands of layers, in the order in which they are applied."""


def apply_options(graph: Graph, options: CompileOptions, target: TargetSpec) -> dict[str, Relaxed]:
    """Apply options to a graph as loaded; modifies it.

    Returns
    -------
    dict of str to Relaxed
        By option of `RELAXING`, the layers that it rounds.
    """
    take_uint8(graph, options.input_uint8)
    transform_input(graph, options.input_transform)
    first = relax_first_layer(graph, options.first_layer)
    if options.float_type != "float32":
        round_floats(graph)
    quantized = quantized_layers(graph, options, target)
    quantize_rows(graph, quantized.layers)
    rounded = rounded_layers(graph, options, target)
    round_layers(graph, rounded.layers)
    return dict(zip(RELAXING, (first, quantized, rounded), strict=True))


def quantized_layers(graph: Graph, options: CompileOptions, target: TargetSpec) -> Relaxed:
    """Return the float layers of a loaded graph whose data `--activations` quantizes."""
    if options.activations == "float32":
        return Relaxed()
    asked = float_layers(graph, _layers(graph, options, target), activations.why_not)
    trial = copy_of(graph)
    quantize_rows(trial, asked.layers)
    return of_few_bits(asked, _layers(trial, options, target))


def rounded_layers(graph: Graph, options: CompileOptions, target: TargetSpec) -> Relaxed:
    """Return the float layers of a loaded graph that `--float-precision` rounds."""
    if options.float_precision == "float32":
        return Relaxed()
    return float_layers(graph, _layers(graph, options, target), float_precision.why_not)


def _layers(graph: Graph, options: CompileOptions, target: TargetSpec) -> list[Layer]:
    found = Compilation(options, target)
    choose_methods(copy_of(graph), found)
    return found.layers
