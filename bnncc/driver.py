"""The compiler from end to end: one model in, one artifact out.

load -> passes (`bnncc.transform.pipeline`) -> Relax -> legalize -> schedule -> build -> self-check
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncc import notices, report
from bnncc.codegen.bitstream import bitstream
from bnncc.codegen.link import build_library
from bnncc.errors import BnnccError, TargetError, UsageError, VerificationError, deprecated
from bnncc.frontend.formats import Model, as_onnx, captured
from bnncc.frontend.onnx import load
from bnncc.input_transforms import InputTransform, as_transform
from bnncc.ir.graph import Graph, copy_of
from bnncc.ir.ties import TIE
from bnncc.options import (
    FASTER,
    Activations,
    Assume,
    CompileOptions,
    FewBit,
    FirstLayer,
    FloatConv,
    FloatPrecision,
    FloatProducts,
    FloatType,
    SignZero,
    Uint8Input,
    flag,
    refuse_type,
)  # fmt: skip
from bnncc.recognise.dabnn import assume_dabnn
from bnncc.records.database import Records
from bnncc.records.database import load as load_records
from bnncc.runtime import manifest
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.selfcheck import Check
from bnncc.runtime.threads import usable_cpus
from bnncc.schedules.multithreading import estimated
from bnncc.schedules.weight_order import Recorded
from bnncc.targets.catalog import NATIVE, resolve
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.spec import from_json, zero_planes
from bnncc.trace import Trace
from bnncc.transform.caches import caches
from bnncc.transform.coverage import covered
from bnncc.transform.first_layer import Relaxed
from bnncc.transform.float_precision import in_three_terms
from bnncc.transform.half_floats import store_halves
from bnncc.transform.physical import KERNEL
from bnncc.transform.pipeline import Compilation, to_physical
from bnncc.transform.relaxations import apply_options
from bnncc.verification.checks import SelfCheck
from bnncc.verification.confirm import LOOSER, Judge, confirmed, runs_here
from bnncc.verification.confirm_passes import affordable, confirm_passes
from bnncc.verification.half_range import refuse_overflow
from bnncc.verification.recorded import orders_of
from bnncc.verification.twin import twins

if TYPE_CHECKING:
    import onnx

    from bnncc.codegen import memory
    from bnncc.codegen.c_network import CNetwork
    from bnncc.codegen.pipeline import KernelCall

CORES = 4
"""Cores that another machine is taken to have, so that its code does not depend on this one's."""


def compile(
    model: Model,
    example_inputs: Any = None,
    *,
    target: str | Path | TargetSpec = "native",
    params: str | Path | None = None,
    dynamic_shapes: Any = None,
    input_shapes: Mapping[str, tuple[int | str, ...]] | None = None,
    max_dims: Mapping[str, int] | None = None,
    in_place: Mapping[str, str] | None = None,
    assume: Assume = "none",
    sign_zero: SignZero = "exact",
    float_conv: FloatConv = "filtered",
    first_layer: FirstLayer = "float32",
    activations: Activations = "float32",
    float_type: FloatType = "float32",
    float_precision: FloatPrecision = "float32",
    float_products: FloatProducts = "float32",
    few_bit: FewBit = "auto",
    check_finite: bool = False,
    input_uint8: Sequence[Uint8Input] = (),
    input_transform: InputTransform | str | None = None,
    dump_ir: str | Path | None = None,
    threads: int | None = None,
    seed: int = 0,
    tuning_dir: str | Path | Sequence[str | Path] = (),
    untuned: bool = False,
    measure: bool = True,
    records: Sequence[str | Path] | None = None,
    tuned: bool | None = None,
) -> Artifact:
    """Compile a model.

    Parameters
    ----------
    model : path, onnx.ModelProto, torch.nn.Module or torch.export.ExportedProgram
        The network as exported by its training framework, or a module.
    example_inputs : tensor or tuple of tensors, optional
        For a module: arguments of its ``forward``, which define the input shapes.
    target : str, path or TargetSpec
        A name from ``bnncc targets``, or a target file; ``native`` is this machine.
    params : path, optional
        A ``.safetensors`` file whose tensors replace the model's, by name; or the parameters of an
        MXNet network, if not in the file ``NAME-0000.params`` beside it.
    dynamic_shapes : optional
        For a module: which sizes may vary, as in ``torch.export.export``.
    input_shapes : mapping of str to tuple, optional
        Shapes that replace those in the file.
    max_dims : mapping of str to int, optional
        The greatest sizes of symbolic dimensions.
    in_place : mapping of str to str, optional
        Outputs that append to an input or write rows of it, by its name, such as key/value
        caches: `Artifact.run` writes only what is new if both are views of one array.
    assume : {"none", "dabnn"}
        What to assume beyond the model: ``dabnn`` applies sign() to the input of every convolution
        with binary weights, and pads it with -1.
    sign_zero : {"exact", "+1", "-1"}
        The sign of an exact zero where the graph gives 0 or NaN; ``exact`` keeps that value.
    float_conv : {"filtered", "direct", "filtered-2d"}
        Algorithm of float convolutions: every product, or minimal filtering (Winograd) along rows
        or in both directions where that is faster.
    first_layer : {"float32", "bfloat16", "int8", "float16"}
        Type to which the data and weights of convolutions on an input are rounded.
    activations : {"float32", "int8"}
        Type to which the data of float dense layers are quantized, a scale per row, if their
        weights have few bits; on a CPU.
    float_type : {"float32", "float16"}
        Type of float tensors between kernels, and of their convolutions, on a GPU.
    float_precision : {"float32", "bfloat16"}
        Type to which the data and weights of all float convolutions and dense layers are rounded,
        on a CPU.
    float_products : {"float32", "bf16x3"}
        Algorithm of float32 products in 1x1 convolutions and dense layers: ``bf16x3`` computes each
        from three bfloat16 terms, on AMX.
    few_bit : {"auto", "bitplanes"}
        Algorithm of few-bit layers: the fastest by estimate, or always bit planes.
    check_finite : bool
        Reject inputs with NaN or infinity at run time.
    input_uint8 : sequence of Uint8Input
        Inputs taken as bytes, with their mean and scale folded in.
    input_transform : InputTransform or str, optional
        How an image input of bytes is binarized; a str is as on the command line.
    dump_ir : path, optional
        Folder for one file per phase.
    threads : int, optional
        Threads to compile for; by default the CPUs that this process may use.
    seed : int
        Of the self-check's random input.
    tuning_dir : path or sequence of path
        Folders of tuning records (see `bnncc tune`), used before those that come with bnncc.
    untuned : bool
        Use no tuning records at all.
    measure : bool
        For ``native``: choose among schedules recorded on other CPUs by short measurements, and
        warn of options that make the network slower on this machine.
    records : sequence of path, optional
        Deprecated name of `tuning_dir`.
    tuned : bool, optional
        Deprecated opposite of `untuned`.

    Raises
    ------
    BnnccError
        See `bnncc.errors` for which; the message is one line.
    """
    if records is not None:
        deprecated("records", "tuning_dir")
        tuning_dir = records
    if tuned is not None:
        deprecated("tuned", "untuned")
        untuned = not tuned
    folders = (tuning_dir,) if isinstance(tuning_dir, str | os.PathLike) else tuning_dir
    for name, given in (("tuning_dir", folders), ("input_uint8", input_uint8)):
        if not isinstance(given, Sequence):
            refuse_type(name, given, "a sequence")
    options = CompileOptions(
        target=target,
        params=params,
        input_shapes={} if input_shapes is None else input_shapes,
        max_dims={} if max_dims is None else max_dims,
        in_place={} if in_place is None else in_place,
        assume=assume,
        sign_zero=sign_zero,
        float_conv=float_conv,
        first_layer=first_layer,
        activations=activations,
        float_type=float_type,
        float_precision=float_precision,
        float_products=float_products,
        few_bit=few_bit,
        check_finite=check_finite,
        input_uint8=tuple(input_uint8),
        input_transform=as_transform(input_transform),
        dump_ir=dump_ir,
        threads=threads,
        seed=seed,
        records=tuple(folders),
        tuned=not untuned,
        measure=measure,
    )
    return compile_model(captured(model, example_inputs, dynamic_shapes), options)


def compile_model(
    model: Model, options: CompileOptions | None = None, trace: Trace | None = None
) -> Artifact:
    """Compile a model with checked options.

    Parameters
    ----------
    model : path, onnx.ModelProto or torch.export.ExportedProgram
        The network.
    options : CompileOptions, optional
        All defaults if not given.
    trace : Trace, optional
        Takes the time of each step, and what it makes; by default one in `options.dump_ir`.

    Raises
    ------
    TargetError
        If TVM has no runtime for the target: see `compile_c`.
    """
    options = options or CompileOptions()
    _refuse_less_memory(options)
    target = _target(options)
    if not target.has_runtime:
        raise TargetError(
            f"TVM has no runtime for {target.name}, so there can be no artifact",
            hint="`bnncc compile --format c` makes an object file and C for it",
        )
    trace = trace or Trace(options.dump_ir)
    made = _scheduled(model, options, target, trace)
    network = made.lowered
    from bnncc.codegen import pipeline

    with trace.timed("build", "generate machine code"):
        executable, scratch = pipeline.build(made.module, target)
    workspace = {name: used.total(made.threads) for name, used in scratch.items()}
    plan = _plan(made, workspace)
    orders = network.orders if target.kind == "cuda" else {}
    network.physical.constants.clear()  # the module has its own, and linking makes more
    with trace.timed("link", "link the library"):
        library = build_library(executable, target)
    del executable

    def packed(checks: Sequence[Check]) -> Artifact:
        content, members = manifest.make(
            library, plan=plan, model=network.name, target=target,
            options=replace(options, threads=made.threads),
            inputs=network.inputs, outputs=network.outputs,
            selfcheck=network.checks.packed(checks, library),
            weight_orders=orders,
        )  # fmt: skip
        return Artifact(content, members)

    checks = network.checks.checks if options.confirm else [network.checks.check(0)]
    if not options.confirm or not runs_here(target):
        return packed([network.checks.settled(check) for check in checks])
    artifact = packed(checks)
    judge = Judge(network.module, network.checks, artifact)
    with trace.timed("self-check", "run it on known inputs"):
        agreed = confirmed(artifact, checks, judge, options.threads)
        for check in network.checks.larger:
            confirmed(artifact, [check], judge, options.threads)
    return artifact if agreed == checks else packed(agreed)


def compile_c(
    model: Model, options: CompileOptions, trace: Trace | None = None, form: str = "c"
) -> CNetwork:
    """Compile a model to code that needs no runtime: an object file and C, or WebAssembly.

    Parameters
    ----------
    model : path, onnx.ModelProto or torch.export.ExportedProgram
        The network; symbolic dimensions become 1.
    options : CompileOptions
        What was asked; its threads make no difference.
    trace : Trace, optional
        As of `compile_model`.
    form : {"c", "wasm"}
        For any CPU, or for one of the targets ``wasm32``.

    Raises
    ------
    TargetError
        If the network needs TVM's runtime.
    UsageError
        If the format, the target and the options cannot be combined.
    """
    target = _target(options)
    if form == "wasm" and target.arch != "wasm32":
        raise UsageError(
            f"--format wasm needs a WebAssembly target, and {target.name} is not one",
            hint="--target wasm32-simd128",
        )
    if target.kind == "cuda":
        raise UsageError(
            f"{target.name} is a GPU: its kernels need TVM's runtime", hint="C is for CPUs"
        )
    if options.check_finite:
        raise UsageError("--check-finite needs TVM's runtime, which C code lacks")
    if options.in_place:
        raise UsageError("--in-place needs TVM's runtime, which C code lacks")
    if form == "wasm":
        _refuse_less_memory(options)
    trace = trace or Trace(options.dump_ir)
    made = _scheduled(model, replace(options, threads=1), target, trace, fixed=True)
    network = made.lowered
    from bnncc.codegen import c_folder, c_network, wasm_network

    ios: dict[str, Any] = {"inputs": network.inputs, "outputs": network.outputs}
    ios |= {"name": Path(network.name).stem, "selfcheck": network.checks.repeated}
    if form == "wasm":
        files, bare, code = wasm_network.make(made.module, target, **ios)
    else:
        automatic = "memory" if target.saves_memory else "speed"
        asked = automatic if options.optimize_for == "auto" else options.optimize_for
        files, bare, code = c_folder.make(made.module, target, row_wise=asked == "memory", **ios)
    planned = replace(made, activations=bare.activations(made.activations))
    content = report.build(
        _plan(planned, bare.scratch, bare.order.rows), model=network.name, target=target.name,
        code=code, selfcheck=c_folder.check_bytes(files),
    )  # fmt: skip
    if form == "c" and target.has_known_size:
        content["device"] = bare.footprint
    return c_network.CNetwork(files, content)


def _refuse_less_memory(options: CompileOptions) -> None:
    if options.optimize_for == "memory":
        raise UsageError("--optimize-for memory is for C", hint="--format c")


def opened(model: Model, options: CompileOptions) -> tuple[Model, dict[str, str]]:
    """Return a model as ONNX, with the options applied that change it.

    Parameters
    ----------
    model : path, onnx.ModelProto or torch.export.ExportedProgram
        Of any format.
    options : CompileOptions
        Where its parts are, and what it implies.

    Returns
    -------
    model : path or onnx.ModelProto
        ONNX.
    assumed : dict of str to str
        By layer, what the file does not say of it.
    """
    model = as_onnx(model, params=options.params, input_shapes=options.input_shapes)
    if options.assume == "none":
        return model, {}
    return assume_dabnn(model, options.input_shapes)


def kernels(
    model: str | os.PathLike[str] | onnx.ModelProto, options: CompileOptions
) -> list[tuple[str, int]]:
    """Return the distinct kernels of a compiled network, for tuning.

    Returns
    -------
    list of (str, int)
        JSON of a kernel's spec, and how often the network calls it, in the order of the first call.
    """
    return list(_counted(lowered(model, options)).items())


def _target(options: CompileOptions) -> TargetSpec:
    given = options.target
    target = given if isinstance(given, TargetSpec) else resolve(str(given))
    for option, value, instead in (
        ("--first-layer", options.first_layer, "--first-layer takes bfloat16 and int8"),
        ("--float-type", options.float_type, "there is --float-precision bfloat16"),
    ):
        if value == "float16" and target.kind != "cuda":
            raise UsageError(
                f"{option} float16 needs a GPU target, and {target.name} is not one",
                hint=f"on CPUs, {instead}",
            )
    if options.in_place and target.kind == "cuda":
        raise UsageError(f"--in-place needs a CPU target, and {target.name} is not one")
    for name in ("activations", "float_precision", "float_products"):
        option, chosen = flag(name), getattr(options, name)
        if chosen != "float32" and target.kind == "cuda":
            raise UsageError(
                f"{option} {chosen} needs a CPU target, and {target.name} is not one",
                hint="GPUs have --float-type float16",
            )
    return target


def _records(options: CompileOptions, target: TargetSpec) -> Records:
    if not options.tuned:
        return Records()
    return load_records(target, [Path(folder) for folder in options.records])


@dataclass(frozen=True)
class Lowered:
    """A network as calls of kernels that are not scheduled yet."""

    name: str
    """Of the model."""
    module: Any
    """From `bnncc.codegen.pipeline.legalize`."""
    inputs: list[manifest.TensorInfo]
    outputs: list[manifest.TensorInfo]
    """`inputs`, `outputs`: of the network."""
    checks: SelfCheck
    """What it is checked on."""
    physical: Graph
    """What the module was made of."""
    layers: list[report.Layer]
    """How each is computed."""
    calls: list[KernelCall]
    """In order."""
    warnings: tuple[str, ...]
    """What a user should know."""
    compared: report.Compared
    """Whether the passes were compared with the model."""
    orders: Mapping[str, str]
    """In what order weights of binary layers are, from `orders_of`."""
    covered: list[tuple[str, ...]]
    """The nodes of the model that each node of `physical` computes."""


@dataclass(frozen=True)
class _Scheduled:
    """A network before it becomes machine code, with what the report says of it."""

    lowered: Lowered
    module: Any
    target: TargetSpec
    threads: int
    activations: memory.Plan
    tuned: frozenset[str]
    warnings: tuple[str, ...]


def lowered(model: Model, options: CompileOptions, orders: Recorded | None = None) -> Lowered:
    """Go as far as kernels that are not scheduled yet.

    Parameters
    ----------
    model : path, onnx.ModelProto or torch.export.ExportedProgram
        The network.
    orders : Recorded, optional
        What takes the place of tuning records.
    """
    target = _target(options)
    known = _records(options, target) if orders is None else orders
    return _lowered(model, options, target, Trace(options.dump_ir), known)


def _lowered(
    model: Model,
    options: CompileOptions,
    target: TargetSpec,
    trace: Trace,
    records: Recorded,
    fixed: bool = False,
) -> Lowered:
    """Go as far as kernels that are not scheduled yet; `fixed` makes symbolic dimensions 1."""
    with trace.timed("load", "read and check the model"):
        model, assumed = opened(model, options)
    graph, relaxed = _loaded(model, options, target, trace, fixed=fixed)
    inputs, outputs = manifest.infos(graph, graph.inputs), manifest.infos(graph, graph.outputs)
    model_graph = copy_of(graph)
    checks = SelfCheck(
        model_graph, options.seed, near=TIE * LOOSER.get(options.float_conv, 1),
        zeros=options.sign_zero != "exact",
    )  # fmt: skip
    made = Compilation(options, target, records, trace, relaxed)
    physical = to_physical(graph, made)
    layers = [replace(x, assumed=assumed.get(x.name, "")) for x in made.layers]
    terms = in_three_terms(physical)
    layers, tripled = notices.in_three_terms(layers, terms, options.float_products, target)
    with trace.timed("confirm passes", "compare with the model, tensor by tensor"):
        compared = _confirm(physical, model_graph, checks, made, model)
    orders = orders_of(physical)
    inputs = manifest.with_empty(inputs, physical, graph.positive, target)
    store_halves(physical, model_graph, target)
    if options.float_type != "float32" and compared.passes == "whole":
        refuse_overflow(physical, checks.inputs(0))

    with trace.timed("relax", "translate to Relax"):
        from bnncc.codegen import pipeline
        from bnncc.codegen.lower import to_relax
        from bnncc.codegen.origins import Origins

        names = [info.name for info in inputs], [info.name for info in outputs]
        pairs = caches(physical, *names, options.in_place)
        module = to_relax(physical, checks=target.kind != "cuda", pairs=pairs)
    trace.module("relax", module)
    with trace.timed("legalize", "write kernels as TensorIR"):
        origins = Origins(module)
        module = pipeline.legalize(module, target, origins)
    warnings = (
        *notices.layers(layers, assumed),
        *notices.rounded(relaxed, options, target),
        *tripled,
        *notices.compared(compared),
        *notices.overflowed(compared.passes == "whole" and checks.overflow),
        *trace.warnings,
    )
    return Lowered(
        Path(graph.source).name, module, inputs, outputs, checks, physical, layers,
        pipeline.kernel_calls(module, origins), warnings, compared, orders,
        covered(physical, model_graph),
    )  # fmt: skip


def _loaded(
    model: Model, options: CompileOptions, target: TargetSpec, trace: Trace, *, fixed: bool
) -> tuple[Graph, dict[str, Relaxed]]:
    """Return the graph that is to be computed; `fixed` makes symbolic dimensions 1.

    Then which layers options round in it.
    """
    with trace.timed("load", "read and check the model"):
        graph = load(model, input_shapes=options.input_shapes, max_dims=options.max_dims)
        if fixed and (sizes := graph.symbolic_as_one()):
            graph = load(model, input_shapes={**options.input_shapes, **sizes})
    trace.graph("load", graph)
    with trace.timed("options", "apply options to inputs and float layers"):
        relaxed = apply_options(graph, options, target)
    trace.graph("options", graph)
    return graph, relaxed


def _confirm(
    physical: Graph, graph: Graph, checks: SelfCheck, made: Compilation, model: Model
) -> report.Compared:
    """Compare what the passes made of `graph`, or of a smaller twin."""
    options = made.options
    if not options.confirm:
        return report.Compared("none", "nobody asked")
    if affordable(physical, graph, sum(layer.macs for layer in made.layers)):
        try:
            feeds, values, zero = checks.inputs(0), partial(checks.values, 0), options.sign_zero
            done = confirm_passes(physical, graph, feeds, sign_zero=zero, values=values)
        except VerificationError:
            if options.float_type != "float32":
                refuse_overflow(graph, checks.inputs(0))
            raise
        return report.Compared("whole") if done else report.Compared("none", notices.ZEROS)
    if not all(graph.types[name].static for name in graph.inputs):
        graph, *_ = _loaded(model, options, made.target, Trace(), fixed=True)
    return _confirmed_twin(graph, made)


def _confirmed_twin(large: Graph, made: Compilation) -> report.Compared:
    """Confirm the passes on a twin of a graph as loaded, if there is one."""

    def drawn(graph: Graph) -> dict[str, Any]:
        return SelfCheck(graph, made.options.seed).inputs(0)

    for twin in twins(large, copy_of, drawn):
        small = replace(made, trace=Trace(), layers=[])
        try:
            physical = to_physical(copy_of(twin.graph), small)
        except BnnccError:  # no reason to refuse the network itself, which has passed
            continue
        if affordable(physical, twin.graph, sum(layer.macs for layer in small.layers)):
            done = confirm_passes(
                physical, twin.graph, twin.feeds, sign_zero=made.options.sign_zero,
                values=lambda _: twin.values,  # noqa: B023
            )  # fmt: skip
            smaller = report.Compared("smaller", twin.sizes)
            return smaller if done else report.Compared("none", notices.ZEROS)
    return report.Compared("none", notices.TOO_LARGE)


def _scheduled(
    model: Model, options: CompileOptions, target: TargetSpec, trace: Trace, fixed: bool = False
) -> _Scheduled:
    """Go as far as the target's kernels; `fixed` makes symbolic dimensions 1."""
    records = _records(options, target)
    measures = options.measure and target.name == NATIVE and target.kind == "llvm"

    from bnncc.codegen import measuring, pipeline

    if measures:
        with measuring.Stopwatch(target, measuring.ORDER_SECONDS) as watch:
            records.undecided = partial(measuring.weight_order, watch)
            network = _lowered(model, options, target, trace, records, fixed)
    else:
        network = _lowered(model, options, target, trace, records, fixed)
    lost: tuple[str, ...] = ()
    if measures:
        with trace.timed("measure", "time alternative schedules"):
            lost = _measured(network, model, options, target, records, fixed)
    with trace.timed("schedule", "schedule each kernel"):
        activations = pipeline.memory_plan(network.module)
        threads = options.threads or (usable_cpus() if runs_here(target) else CORES)
        module, tuned = pipeline.schedule(network.module, target, threads, records)
    trace.module("schedule", module)
    warnings = (*network.warnings, *lost, *notices.stale_records(records))
    return _Scheduled(network, module, target, threads, activations, tuned, warnings)


def _measured(
    network: Lowered, model: Model, options: CompileOptions, target: TargetSpec, records: Records,
    fixed: bool,
) -> tuple[str, ...]:  # fmt: skip
    """Let short measurements choose among records; return what options lose on this machine."""
    from bnncc.codegen.measuring import Stopwatch, choose, seconds

    asked = _counted(network)
    with Stopwatch(target) as watch:
        choose(records, asked, watch)
    lines: list[str] = []
    for name, values in FASTER.items():
        value, default = getattr(options, name), getattr(CompileOptions, name)
        if value not in values:
            continue
        without = replace(options, **{name: default}, confirm=False, dump_ir=None)
        plain = _counted(_lowered(model, without, target, Trace(), records, fixed))
        with Stopwatch(target) as watch:  # what both have takes the same
            ours, theirs = (seconds(x, watch) for x in (asked - plain, plain - asked))
        if ours is not None and theirs is not None:
            lines += notices.lost(name, value, default, ours, theirs)
    return tuple(lines)


def _counted(network: Lowered) -> Counter[str]:
    """Return the kernels of a network, and how often it calls each."""
    return Counter(call.spec for call in network.calls if call.spec)


def _plan(
    made: _Scheduled, workspace: Mapping[str, int], band_rows: Sequence[int] = ()
) -> report.Plan:
    """Collect what the report says of kernels, layers and bytes."""
    network, activations = made.lowered, made.activations
    physical = network.physical
    macs = {layer.name: layer.macs for layer in network.layers}
    ours = iter([n for n in physical.nodes if n.op == KERNEL])
    kernels, made_by = [], {}
    bands = band_rows or [0] * len(network.calls)
    for call, used, rows in zip(network.calls, activations.calls, bands, strict=True):
        covers = next(ours).covers if call.spec else ()
        args = tuple(report.KernelArg(shape, dtype) for shape, dtype in call.args)
        total = sum(macs.get(c, 0) for c in covers)
        spec = from_json(call.spec) if call.spec else None
        made_by.update(dict.fromkeys(covers, (call.name, spec.code_bits if spec else 0)))
        scratch = workspace.get(call.name, 0)
        estimate = estimated(network.module[call.name], spec, made.target)
        kernels.append(
            report.Kernel(
                call.name, covers, total, args, call.name.rstrip("0123456789_"),
                nodes=tuple(dict.fromkeys(n for at in call.nodes for n in network.covered[at])),
                tuned=call.name in made.tuned,
                zero_plane_args=zero_planes(spec),
                input_bytes=used.inputs, output_bytes=used.outputs, workspace_bytes=scratch,
                live_bytes=used.live + scratch, reference_memory=bitstream(spec),
                estimated_us=estimate if estimate is None else round(estimate, 3), reads=call.reads,
                band_rows=rows,
                sizes=call.sizes,
            )
        )  # fmt: skip
    binary = {
        n.inputs[n.attrs["spec"].weight_position]
        for n in physical.nodes
        if n.op == KERNEL and (n.attrs["spec"].exact or n.attrs["spec"].code_bits)
    }
    sizes = {name: value.nbytes for name, value in physical.constants.items()}
    binary_bytes = sum(size for name, size in sizes.items() if name in binary)
    return report.Plan(
        tuple(layer.of_kernel(*made_by.get(layer.name, ("",))) for layer in network.layers),
        tuple(kernels),
        activations.arena,
        binary_bytes,
        sum(sizes.values()) - binary_bytes,
        tuple(report.SignZero(node, said) for node, said in physical.sign_zero.items()),
        made.warnings,
        network.compared,
    )
