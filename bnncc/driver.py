"""The compiler from end to end: one model in, one artifact out.

load -> simplify -> recognise signs -> binarize -> commute -> fuse
     -> Relax -> legalize -> schedule -> build
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncc import manifest, report
from bnncc.artifact import Artifact
from bnncc.confirm import SelfCheck, confirmed, copy_of, runs_here
from bnncc.dump import Dumper
from bnncc.errors import TargetError
from bnncc.frontend.onnx import load
from bnncc.graph import Graph
from bnncc.image import take_uint8
from bnncc.link import build_library
from bnncc.options import CompileOptions, Uint8Input
from bnncc.passes.binarize import binarize
from bnncc.passes.commute import commute_pads, commute_pools
from bnncc.passes.first_layer import Relaxed, relax_first_layer
from bnncc.passes.fuse import fuse
from bnncc.passes.in_place import store_in_place
from bnncc.passes.merge import merge_siblings
from bnncc.passes.physical import KERNEL
from bnncc.passes.rows import flatten_rows
from bnncc.passes.signs import recognise_signs
from bnncc.passes.simplify import simplify
from bnncc.schedules import dot_product_missing
from bnncc.targets.catalog import resolve
from bnncc.targets.spec import TargetSpec
from bnncc.threads import usable_cpus
from bnncc.topi_binary.spec import BinaryConv2d, Spec, from_json

if TYPE_CHECKING:
    import onnx

    from bnncc import memory
    from bnncc.c_network import CNetwork
    from bnncc.pipeline import KernelCall

CORES = 4
"""Cores that another machine is taken to have, so that its code does not depend on this one's."""


def compile(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    target: str | Path | TargetSpec = "native",
    input_shapes: Mapping[str, tuple[int | str, ...]] | None = None,
    sign_zero: str = "exact",
    float_conv: str = "filtered",
    first_layer: str = "float32",
    check_finite: bool = False,
    input_uint8: Sequence[Uint8Input] = (),
    dump_ir: str | Path | None = None,
    threads: int | None = None,
    seed: int = 0,
) -> Artifact:
    """Compile a model.

    Parameters
    ----------
    model : path or onnx.ModelProto
        The network as its training framework exported it.
    target : str, path or TargetSpec
        A name from ``bnncc targets``, or a target file; ``native`` is this machine.
    input_shapes : mapping of str to tuple, optional
        Shapes that replace those in the file.
    sign_zero : {"exact", "+1", "-1"}
        What the sign of an exact zero is where the graph says 0: itself, or a bit.
    float_conv : {"filtered", "direct", "filtered-2d"}
        How float convolutions may be computed: with every product, or with fewer (minimal filtering
        along rows, or both ways) where that is faster.
    first_layer : {"float32", "bfloat16", "int8"}
        What data and weights of the convolutions that read an input are rounded to.
    check_finite : bool
        Refuse inputs with NaN or infinities at run time.
    input_uint8 : sequence of Uint8Input
        Inputs taken as bytes, with their mean and scale folded in.
    dump_ir : path, optional
        Folder for one file per phase.
    threads : int, optional
        How many threads kernels are cut for; by default the CPUs this process may use.
    seed : int
        Of the self-check's random input.

    Returns
    -------
    Artifact

    Raises
    ------
    BnnccError
        See `bnncc.errors` for which; the message is one line.
    """
    return compile_model(
        model,
        CompileOptions(
            target=target,
            input_shapes=dict(input_shapes or {}),
            sign_zero=sign_zero,
            float_conv=float_conv,
            first_layer=first_layer,
            check_finite=check_finite,
            input_uint8=tuple(input_uint8),
            dump_ir=dump_ir,
            threads=threads,
            seed=seed,
        ),
    )


def compile_model(
    model: str | os.PathLike[str] | onnx.ModelProto, options: CompileOptions | None = None
) -> Artifact:
    """Compile a model with checked options.

    Parameters
    ----------
    model : path or onnx.ModelProto
        The network.
    options : CompileOptions, optional
        All defaults if not given.

    Returns
    -------
    Artifact

    Raises
    ------
    TargetError
        If TVM has no runtime for the target: see `compile_c`.
    """
    options = options or CompileOptions()
    target = _target(options)
    if not target.has_runtime:
        raise TargetError(
            f"TVM has no runtime for {target.name}, so there can be no artifact",
            hint="`bnncc compile` makes an object file and C for it",
        )
    network = _scheduled(model, options, target)
    from bnncc import pipeline

    executable, scratch = pipeline.build(network.module, target)
    library = build_library(executable, target)
    workspace = {name: used.total(network.threads) for name, used in scratch.items()}
    plan = _plan(network, workspace)

    def packed(number: int) -> Artifact:
        content, members = manifest.make(
            library, plan=plan, model=network.name, target=target, options=options,
            inputs=network.inputs, outputs=network.outputs, selfcheck=network.checks.pair(number),
        )  # fmt: skip
        return Artifact(content, members)

    if not options.confirm or not runs_here(target):
        return packed(0)
    return confirmed(packed, model, options.threads)


def compile_c(model: str | os.PathLike[str] | onnx.ModelProto, options: CompileOptions) -> CNetwork:
    """Compile a model to an object file and C that need no runtime.

    Parameters
    ----------
    model : path or onnx.ModelProto
        The network; symbolic dimensions become 1.
    options : CompileOptions
        What was asked; its threads make no difference.

    Returns
    -------
    CNetwork

    Raises
    ------
    TargetError
        If the network needs TVM's runtime.
    """
    target = _target(options)
    if options.check_finite:
        raise TargetError(f"--check-finite needs TVM's runtime, which {target.name} lacks")
    network = _scheduled(model, replace(options, threads=1), target, fixed=True)
    from bnncc import c_network

    files, scratch = c_network.make(
        network.module, target, name=Path(network.name).stem,
        inputs=network.inputs, outputs=network.outputs, selfcheck=network.checks.pair(0),
    )  # fmt: skip
    content = report.build(
        _plan(network, scratch), model=network.name, target=target.name,
        code=len(files["kernels.o"]), selfcheck=c_network.check_bytes(files),
    )  # fmt: skip
    return c_network.CNetwork(files, content)


def _target(options: CompileOptions) -> TargetSpec:
    return (
        options.target if isinstance(options.target, TargetSpec) else resolve(str(options.target))
    )


@dataclass(frozen=True)
class _Scheduled:
    """A network before it becomes machine code, with what the report says of it."""

    name: str
    module: Any
    threads: int
    inputs: list[manifest.TensorInfo]
    outputs: list[manifest.TensorInfo]
    checks: SelfCheck
    physical: Graph
    layers: list[report.Layer]
    calls: list[KernelCall]
    activations: memory.Plan
    warnings: tuple[str, ...]


def _scheduled(
    model: str | os.PathLike[str] | onnx.ModelProto,
    options: CompileOptions,
    target: TargetSpec,
    fixed: bool = False,
) -> _Scheduled:
    """Go as far as the target's kernels; `fixed` makes symbolic dimensions 1."""
    dump = Dumper(options.dump_ir)

    graph = load(model, input_shapes=options.input_shapes)
    if fixed and (sizes := _symbolic_as_one(graph)):
        graph = load(model, input_shapes={**options.input_shapes, **sizes})
    dump.graph("load", graph)
    take_uint8(graph, options.input_uint8)
    inputs = [
        manifest.TensorInfo(i, graph.types[i].shape, graph.types[i].dtype) for i in graph.inputs
    ]
    outputs = [
        manifest.TensorInfo(o, graph.types[o].shape, graph.types[o].dtype) for o in graph.outputs
    ]
    relaxed = relax_first_layer(graph, options.first_layer)
    checks = SelfCheck(copy_of(graph), options.seed)

    simplify(graph)
    dump.graph("simplify", graph)
    recognise_signs(graph, sign_zero=options.sign_zero)
    flatten_rows(graph)
    commute_pads(graph)
    layers = binarize(graph)
    commute_pools(graph)
    merge_siblings(graph)
    dump.graph("binarize", graph)
    physical = fuse(graph, options.float_conv, target)
    store_in_place(physical)
    dump.graph("fuse", physical)

    from bnncc import pipeline
    from bnncc.lower import to_relax

    module = to_relax(physical)
    dump.module("relax", module)
    module = pipeline.legalize(module)
    calls = pipeline.kernel_calls(module)
    activations = pipeline.memory_plan(module)
    threads = options.threads or (usable_cpus() if runs_here(target) else CORES)
    module = pipeline.schedule(module, target, threads)
    dump.module("schedule", module)

    warnings = (*_warnings(layers), *_first_layer_warnings(options.first_layer, relaxed, target))
    return _Scheduled(
        Path(graph.source).name, module, threads, inputs, outputs, checks, physical, layers, calls,
        activations, warnings,
    )  # fmt: skip


def _symbolic_as_one(graph: Graph) -> dict[str, tuple[int | str, ...]]:
    """Return shapes with 1 for symbols, of the inputs that have any."""
    shapes = {name: graph.types[name].shape for name in graph.inputs}
    return {
        name: tuple(d if isinstance(d, int) else 1 for d in shape)
        for name, shape in shapes.items()
        if not all(isinstance(d, int) for d in shape)
    }


def _plan(network: _Scheduled, workspace: Mapping[str, int]) -> report.Plan:
    """Put together what the report says of kernels, layers and bytes."""
    physical, activations = network.physical, network.activations
    macs = {layer.name: layer.macs for layer in network.layers}
    ours = iter([n for n in physical.nodes if n.op == KERNEL])
    kernels, made_by = [], {}
    for call, used in zip(network.calls, activations.calls, strict=True):
        covers = next(ours).covers if call.spec else ()
        made_by.update(dict.fromkeys(covers, call.name))
        args = tuple(report.KernelArg(shape, dtype) for shape, dtype in call.args)
        total = sum(macs.get(c, 0) for c in covers)
        spec = from_json(call.spec) if call.spec else None
        scratch = workspace.get(call.name, 0)
        kernels.append(
            report.Kernel(
                call.name, covers, total, args, call.name.rstrip("0123456789_"),
                zeros=(1,) if getattr(spec, "ternary", False) else (),
                input_bytes=used.inputs, output_bytes=used.outputs, workspace_bytes=scratch,
                live_bytes=used.live + scratch, bitstream=bitstream(spec),
            )
        )  # fmt: skip
    binary = {
        n.inputs[1 + n.attrs["spec"].ternary]
        for n in physical.nodes
        if n.op == KERNEL and isinstance(n.attrs["spec"], BinaryConv2d)
    }
    sizes = {name: value.nbytes for name, value in physical.constants.items()}
    binary_bytes = sum(size for name, size in sizes.items() if name in binary)
    return report.Plan(
        tuple(replace(layer, kernel=made_by.get(layer.name, "")) for layer in network.layers),
        tuple(kernels),
        activations.arena,
        binary_bytes,
        sum(sizes.values()) - binary_bytes,
        tuple(report.SignZero(node, said) for node, said in physical.sign_zero.items()),
        network.warnings,
    )


def bitstream(spec: Spec | None) -> tuple[int, int] | None:
    """Return what BitStream's formulas count for a binary convolution; None for other kernels.

    They are for a convolution with threshold and 2x2 pooling, as many outputs as inputs, and floats
    of 4 bytes: its equation 16 (float convolution as a matrix product), and 17 (packed data).

    Examples
    --------
    >>> bitstream(BinaryConv2d(1, 56, 56, 64, 64, (3, 3), pads=(1, 1, 1, 1)))
    (9257472, 1085056)
    """
    if not isinstance(spec, BinaryConv2d) or spec.rank != 4 or spec.groups > 1:
        return None
    pixels, taps = spec.channels * spec.height * spec.width, spec.kernel[0] * spec.kernel[1]
    return round(pixels * (9 + 4.125 * taps)), round(pixels * (taps / 8 + 9 / 32 + 4))


def _warnings(layers: list[report.Layer]) -> tuple[str, ...]:
    floats = [layer.name for layer in layers if layer.kind == "float"]
    if not layers or len(floats) < len(layers):
        return ()
    return ("no layer is binary: the network was compiled in float (`bnncc explain` says why)",)


def _first_layer_warnings(operands: str, relaxed: Relaxed, target: TargetSpec) -> tuple[str, ...]:
    """Say where ``--first-layer`` changes nothing, or gains nothing."""
    if operands == "float32":
        return ()
    option = f"--first-layer {operands}"
    lines = [f"{option}: `{name}` stays in float32: {why}" for name, why in relaxed.kept.items()]
    if not relaxed.layers and not lines:
        lines.append(f"{option}: no float convolution reads an input of the network")
    missing = dot_product_missing(operands, target)
    if relaxed.layers and missing:
        lines.append(
            f"{option}: {target.name} lacks {missing}, so the rounded numbers are multiplied as "
            "float32, and nothing is gained"
        )
    return tuple(lines)
