"""The sequence of passes from a model's graph to its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from bnncc.ir.graph import Graph, copy_of
from bnncc.options import CompileOptions
from bnncc.recognise.binarize import binarize
from bnncc.recognise.channel_scales import split_channel_scales
from bnncc.recognise.few_values import read_again
from bnncc.recognise.offsets import split_offsets
from bnncc.recognise.products import pair_products
from bnncc.recognise.quantizers import recognise_quantizers
from bnncc.recognise.ramps import recognise_ramps
from bnncc.recognise.row_scales import move_row_scales
from bnncc.recognise.signs import recognise_signs
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
from bnncc.transform.float_precision import choose_layers
from bnncc.transform.fuse import fuse
from bnncc.transform.in_place import store_in_place
from bnncc.transform.left_weights import turn_left_weights
from bnncc.transform.merge import merge_siblings
from bnncc.transform.normalizations import join_normalizations
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
    rounded: Relaxed = field(default_factory=Relaxed)
    """Layers that `--float-precision` has rounded in the graph before the passes."""
    layers: list[Layer] = field(default_factory=list)
    """How each convolution and dense layer is computed, for the report."""


@dataclass(frozen=True)
class Pass:
    """One pass of the pipeline."""

    name: str
    """Name in dumps and timing tables."""
    run: Callable[[Graph, Compilation], object]
    """Modifies the graph in place, or returns its replacement."""
    why: str
    """Purpose, in a few words."""


def _binarize(graph: Graph, made: Compilation) -> None:
    method = chooser(made.target, made.options.few_bit)
    layers = binarize(graph, method, partial(in_slices, target=made.target))
    names, how = set(made.rounded.names), f"--float-precision {made.options.float_precision}"
    made.layers = [
        replace(x, bits=(16, 16), reason=f"{x.reason}; its operands are rounded ({how})")
        if x.name in names
        else x
        for x in layers
    ]


def _products(graph: Graph, made: Compilation) -> None:
    if made.target.kind != "cuda":
        pair_products(graph)


def _normalizations(graph: Graph, made: Compilation) -> None:
    if made.target.kind != "cuda":
        join_normalizations(graph)
        join_rotations(graph)


PASSES = (
    Pass("simplify", lambda g, c: simplify(g, c.trace), "one spelling of each pattern"),
    Pass("ramps", lambda g, c: recognise_ramps(g), "sums of bent lines are clips"),
    Pass(
        "signs",
        lambda g, c: recognise_signs(g, sign_zero=c.options.sign_zero),
        "decisions, in all their spellings, are signs",
    ),
    Pass("channel scales", lambda g, c: split_channel_scales(g), "a scale for each channel"),
    Pass("quantizers", lambda g, c: recognise_quantizers(g), "roundings to few numbers are levels"),
    Pass("few values", lambda g, c: read_again(g), "few values of any other origin are too"),
    Pass("transposed", lambda g, c: split_transposed(g), "transposed convolutions are ordinary"),
    Pass(
        "left weights", lambda g, c: turn_left_weights(g), "layers have their weights on the right"
    ),
    Pass("row scales", lambda g, c: move_row_scales(g), "products read the levels of rows"),
    Pass("whole sums", lambda g, c: drop_integer_casts(g), "sums of integers are exact floats"),
    Pass("rows", lambda g, c: flatten_rows(g), "batches of matrices are one matrix"),
    Pass("moves", lambda g, c: commute_moves(g), "moving bits costs less than moving numbers"),
    Pass("products", _products, "both operands of a product may be computed"),
    Pass("pads", lambda g, c: commute_pads(g), "padding bits costs less"),
    Pass("bytes", lambda g, c: compare_bytes(g), "signs of bytes compare the bytes"),
    Pass("offsets", lambda g, c: split_offsets(g), "weights of two values are signs and a sum"),
    Pass("binarize", _binarize, "the layers of bits and of levels"),
    Pass("pools", lambda g, c: commute_pools(g), "the maximum of bits costs less"),
    Pass("siblings", lambda g, c: merge_siblings(g), "layers that read the same are one"),
    Pass("plain", lambda g, c: write_plain(g), "what no kernel took is ONNX's again"),
    Pass(
        "normalizations",
        _normalizations,
        "rows are normalised by one kernel",
    ),
    Pass(
        "fuse",
        lambda g, c: fuse(g, c.options.float_conv, c.target, c.records, c.options.float_products),
        "chains of nodes are kernels: the physical graph",
    ),
    Pass("in place", lambda g, c: store_in_place(g), "residuals are added where they lie"),
)
"""The passes, in order; docs/exactness.md explains why each preserves the model's results."""


def rounded_layers(graph: Graph, options: CompileOptions, target: TargetSpec) -> Relaxed:
    """Return the float layers of a loaded graph that `--float-precision` rounds."""
    if options.float_precision == "float32":
        return Relaxed()
    found, whole = Compilation(options, target), copy_of(graph)
    for step in PASSES[: 1 + next(i for i, p in enumerate(PASSES) if p.run is _binarize)]:
        other = step.run(whole, found)
        whole = other if isinstance(other, Graph) else whole
    return choose_layers(graph, found.layers)


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
        with made.trace.timed(step.name):
            other = step.run(graph, made)
        graph = other if isinstance(other, Graph) else graph
        made.trace.graph(step.name, graph)
    return graph
