"""The sequence of passes from a model's graph to its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from bnncc.ir.graph import Graph
from bnncc.options import CompileOptions, flag
from bnncc.recognise.binarize import binarize
from bnncc.recognise.bounded import bound_roundings
from bnncc.recognise.channel_scales import split_channel_scales
from bnncc.recognise.few_values import read_again
from bnncc.recognise.integer_sums import float_integer_products
from bnncc.recognise.offsets import split_offsets
from bnncc.recognise.products import pair_products
from bnncc.recognise.quantizers import recognise_quantizers
from bnncc.recognise.ramps import recognise_ramps
from bnncc.recognise.row_scales import move_row_scales
from bnncc.recognise.signs import recognise_signs
from bnncc.recognise.stacked_weights import unstack_weights
from bnncc.recognise.transposed import split_transposed
from bnncc.recognise.whole_sums import drop_integer_casts
from bnncc.report import Layer
from bnncc.schedules import in_slices
from bnncc.schedules.few_bit_method import chooser
from bnncc.schedules.weight_order import Recorded
from bnncc.targets.spec import TargetSpec
from bnncc.trace import Trace
from bnncc.transform.byte_signs import compare_bytes
from bnncc.transform.commute import commute_moves, commute_pads, commute_pools
from bnncc.transform.first_layer import Relaxed
from bnncc.transform.fuse import fuse
from bnncc.transform.in_place import store_in_place
from bnncc.transform.left_weights import turn_left_weights
from bnncc.transform.merge import merge_siblings
from bnncc.transform.normalizations import join_normalizations, join_softmax
from bnncc.transform.plain import write_plain
from bnncc.transform.rotary import join_rotations
from bnncc.transform.rows import flatten_rows
from bnncc.transform.simplify import simplify


@dataclass
class Compilation:
    """Inputs of the passes besides the graph, and their findings."""

    options: CompileOptions
    """The user's options."""
    target: TargetSpec
    """The target."""
    records: Recorded | None = None
    """Tuning records, which may prefer other weight orders."""
    trace: Trace = field(default_factory=Trace)
    """Records the graph and the time after each pass."""
    relaxed: Mapping[str, Relaxed] = field(default_factory=dict)
    """By option, layers that it has rounded in the graph before the passes."""
    layers: list[Layer] = field(default_factory=list)
    """How each convolution and dense layer is computed, for the report."""


@dataclass(frozen=True)
class Pass:
    """One pass of the pipeline."""

    name: str
    """Name in dumps and timing tables."""
    run: Callable[[Graph, Compilation], object]
    """Modifies the graph in place, or returns its replacement."""
    purpose: str
    """What it does, in a few words, for dumps and timing tables."""


_RELAXED = {
    "float_precision": "its operands are rounded",
    "activations": "its data are quantized by rows",
}
"""What options do to layers, for the report."""


def _described(layer: Layer, made: Compilation) -> Layer:
    """Return a layer with what an option has done to it."""
    for option, said in _RELAXED.items():
        if option in made.relaxed and layer.name in made.relaxed[option].names:
            reason = f"{layer.reason}; {said} ({flag(option)} {getattr(made.options, option)})"
            bits = (16, 16) if option == "float_precision" else layer.bits
            return replace(layer, bits=bits, reason=reason)
    return layer


def _binarize(graph: Graph, made: Compilation) -> None:
    method = chooser(made.target, made.options.few_bit)
    layers = binarize(graph, method, partial(in_slices, target=made.target))
    made.layers = [_described(layer, made) for layer in layers]


def _products(graph: Graph, made: Compilation) -> None:
    if made.target.kind != "cuda":
        pair_products(graph)


def _normalizations(graph: Graph, made: Compilation) -> None:
    if made.target.kind != "cuda":
        join_normalizations(graph)


def _softmax(graph: Graph, made: Compilation) -> None:
    if made.target.kind != "cuda":
        join_softmax(graph)
        join_rotations(graph)


def _alone(run: Callable[[Graph], object]) -> Callable[[Graph, Compilation], object]:
    """Return a pass that needs nothing but the graph."""
    return lambda graph, _: run(graph)


PASSES = (
    Pass("simplify", lambda g, c: simplify(g, c.trace), "bring equivalent patterns to one form"),
    Pass(
        "integer products",
        _alone(float_integer_products),
        "compute products of small integers in float32",
    ),
    Pass("ramps", _alone(recognise_ramps), "replace sums of ReLU, Abs and such that equal a Clip"),
    Pass(
        "signs",
        lambda g, c: recognise_signs(g, sign_zero=c.options.sign_zero),
        "recognise sign() in every form",
    ),
    Pass("channel scales", _alone(split_channel_scales), "split per-channel scales off quantizers"),
    Pass("bounds", _alone(bound_roundings), "limit roundings of data divided by their maximum"),
    Pass("quantizers", _alone(recognise_quantizers), "recognise quantizers"),
    Pass("few values", _alone(read_again), "recognise other tensors of few values"),
    Pass("transposed", _alone(split_transposed), "write transposed convolutions as ordinary ones"),
    Pass("stacked weights", _alone(unstack_weights), "write a product for each matrix of weights"),
    Pass(
        "left weights", _alone(turn_left_weights), "move weights to the right operand of products"
    ),
    Pass("row scales", _alone(move_row_scales), "apply per-row scales after products"),
    Pass("whole sums", _alone(drop_integer_casts), "drop casts of integer-valued tensors"),
    Pass("normalizations", _normalizations, "fuse normalizations of rows"),
    Pass("rows", _alone(flatten_rows), "merge batches of matrices into one matrix"),
    Pass("moves", _alone(commute_moves), "move signs before flattening"),
    Pass("products", _products, "recognise products of two computed tensors"),
    Pass("pads", _alone(commute_pads), "move signs before padding"),
    Pass("bytes", _alone(compare_bytes), "compare the bytes of an image, not floats"),
    Pass("offsets", _alone(split_offsets), "write weights of two values as signs and an offset"),
    Pass("binarize", _binarize, "choose how each layer is computed"),
    Pass("pools", _alone(commute_pools), "move signs before max-pooling"),
    Pass("siblings", _alone(merge_siblings), "merge binary layers of the same data"),
    Pass("plain", _alone(write_plain), "write quantizers outside kernels as ONNX operators"),
    Pass("softmax", _softmax, "fuse softmax, sigmoid gates and rotary embeddings"),
    Pass(
        "fuse",
        lambda g, c: fuse(g, c.options.float_conv, c.target, c.records, c.options.float_products),
        "fuse chains of nodes into kernels",
    ),
    Pass("in place", _alone(store_in_place), "add residuals in place"),
)
"""The passes, in order; docs/exactness.md explains why each preserves the model's results."""


def choose_methods(graph: Graph, made: Compilation) -> None:
    """Run the passes as far as `made` says how each layer is computed; modifies `graph`."""
    for step in PASSES[: 1 + next(i for i, p in enumerate(PASSES) if p.run is _binarize)]:
        other = step.run(graph, made)
        graph = other if isinstance(other, Graph) else graph


def to_physical(graph: Graph, made: Compilation) -> Graph:
    """Find the binary and few-bit layers of a graph and fuse it into kernels.

    Parameters
    ----------
    graph : Graph
        The logical graph; modified.
    made : Compilation
        Options and target; receives the findings.
    """
    for step in PASSES:
        with made.trace.timed(step.name, step.purpose):
            other = step.run(graph, made)
        graph = other if isinstance(other, Graph) else graph
        made.trace.graph(step.name, graph)
    return graph
