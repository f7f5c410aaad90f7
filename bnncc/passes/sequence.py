"""All passes in their order: from a model's graph to kernels."""

from __future__ import annotations

from functools import partial

from bnncc.dump import Dumper
from bnncc.ir.graph import Graph
from bnncc.options import CompileOptions
from bnncc.passes.binarize import binarize
from bnncc.passes.byte_signs import compare_bytes
from bnncc.passes.channel_scales import split_channel_scales
from bnncc.passes.commute import commute_moves, commute_pads, commute_pools
from bnncc.passes.few_values import read_again
from bnncc.passes.fuse import fuse
from bnncc.passes.in_place import store_in_place
from bnncc.passes.merge import merge_siblings
from bnncc.passes.offsets import split_offsets
from bnncc.passes.plain import write_plain
from bnncc.passes.products import pair_products
from bnncc.passes.quantisers import recognise_quantisers
from bnncc.passes.ramps import recognise_ramps
from bnncc.passes.rows import flatten_rows
from bnncc.passes.signs import recognise_signs
from bnncc.passes.simplify import simplify
from bnncc.passes.transposed import split_transposed
from bnncc.report import Layer
from bnncc.schedules import in_slices
from bnncc.schedules.few_bit_method import chooser
from bnncc.schedules.weight_order import Recorded
from bnncc.targets.spec import TargetSpec


def to_physical(
    graph: Graph,
    options: CompileOptions,
    target: TargetSpec,
    dump: Dumper,
    records: Recorded | None = None,
) -> tuple[list[Layer], Graph]:
    """Find the bits in a graph and group what is computed together into kernels.

    Parameters
    ----------
    graph : Graph
        The logical graph, which is changed.
    options : CompileOptions
        What was asked.
    target : TargetSpec
        The machine.
    dump : Dumper
        Takes the graph after each phase.
    records : Recorded, optional
        What measurements say of the orders of weights.

    Returns
    -------
    list of Layer
        What became of each convolution and dense layer, for the report.
    Graph
        The physical graph.
    """
    simplify(graph)
    recognise_ramps(graph)
    dump.graph("simplify", graph)

    recognise_signs(graph, sign_zero=options.sign_zero)
    split_channel_scales(graph)
    recognise_quantisers(graph)
    read_again(graph)
    split_transposed(graph)
    flatten_rows(graph)
    commute_moves(graph)
    if target.kind == "llvm":
        pair_products(graph)
    commute_pads(graph)
    compare_bytes(graph)
    split_offsets(graph)
    slices = partial(in_slices, target=target)
    layers = binarize(graph, chooser(target, options.few_bit), slices)
    commute_pools(graph)
    merge_siblings(graph)
    write_plain(graph)
    dump.graph("binarize", graph)

    physical = fuse(graph, options.float_conv, target, records)
    store_in_place(physical)
    dump.graph("fuse", physical)
    return layers, physical
