"""From a Relax module to an executable: legalize, fuse TVM's operators, schedule, plan, build."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tvm
import tvm_ffi
from tvm import relax, te, tirx, topi
from tvm.relax import backend, transform

import bnncc.schedules.generic as generic
from bnncc import schedules
from bnncc.codegen import gpu, in_place, memory
from bnncc.codegen.arguments import mark_trusting
from bnncc.codegen.fewer_calls import reshaped_once, without_repeats
from bnncc.codegen.fusion import LimitFusion
from bnncc.codegen.ops import register
from bnncc.codegen.origins import Origins
from bnncc.codegen.outputs import through_outputs, with_outputs
from bnncc.codegen.shape_functions import ShareShapeFunctions
from bnncc.codegen.sizes import SortSizes
from bnncc.errors import TargetError, message_lines
from bnncc.ir import dims
from bnncc.records.database import Records
from bnncc.targets.catalog import LLVM_NAMES
from bnncc.targets.gpus import shared_bytes
from bnncc.targets.host import normal_arch
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.signature import spec_of
from bnncc.topi_binary.spec import OPERATORS

Made = TypeVar("Made")

NO_SLP = {"cl-opt": ["-vectorize-slp:bool=0"]}
"""Options of a target of TVM that keep LLVM from vectorizing scalar code (SLP)."""


@dataclass(frozen=True)
class KernelCall:
    """A call of a PrimFunc in the network, in order."""

    name: str
    """Name of the PrimFunc."""
    spec: str
    """JSON of its spec; empty for operators that TVM legalized."""
    args: tuple[tuple[tuple[int | str, ...], str], ...]
    """Shapes and types of all tensors in call order, outputs last; str dimensions are symbolic."""
    reads: tuple[int, ...] = ()
    """Indices of the calls whose results it reads."""
    sizes: tuple[tuple[int, str], ...] = ()
    """Arguments that are symbolic sizes: position among all arguments, and symbol."""
    nodes: tuple[int, ...] = ()
    """Positions of the nodes of the physical graph that it computes."""


def legalize(module: tvm.IRModule, target: TargetSpec, origins: Origins) -> tvm.IRModule:
    """Turn every operator into a PrimFunc, and fuse TVM's operators.

    Parameters
    ----------
    module : tvm.IRModule
        From `lower.to_relax`.
    target : TargetSpec
        The target; sorting depends on it.
    origins : Origins
        Of `module`; gets the nodes that each variable of the result's ``main`` comes from.

    Returns
    -------
    tvm.IRModule
        ``main`` calls PrimFuncs; our own have the attribute `SPEC_ATTR`.

    Raises
    ------
    TargetError
        From `require_instructions`.
    """
    require_instructions(target)
    register()
    ours = [f"relax.bnncc.{name}" for name in OPERATORS]
    # A reshape is the same memory, but RewriteCUDAGraph captures nothing else than kernels.
    views = [] if target.kind == "cuda" else ["relax.reshape"]
    first = [transform.DecomposeOpsForInference(), transform.CanonicalizeBindings()]
    before, after = (
        tvm.transform.module_pass(step, opt_level=0) for step in (origins.before, origins.after)
    )
    with tvm_target(target):
        module = tvm.transform.Sequential([*first, backend.DispatchSortScan()])(module)
    return tvm.transform.Sequential(
        [
            transform.LegalizeOps({"relax.take": _take}, skip_ops=ours),
            SortSizes(),
            transform.AnnotateTIROpPattern(),
            transform.FoldConstant(),
            LimitFusion(),
            before,
            transform.FuseOps(),
            after,
            transform.FuseTIR(),
            SortSizes(),  # fused kernels get sizes of their own
            # It cannot analyse our kernels, so it runs before they are legalized.
            tvm.transform.module_pass(_reshapes_as_views, opt_level=0),
            tvm.transform.module_pass(reshaped_once, opt_level=0),
            transform.LegalizeOps(skip_ops=views),
            transform.DeadCodeElimination(["main"]),
        ]
    )(module)


def _reshapes_as_views(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Replace kernels that only reshape by views.

    TVM's analysis fails on some kernels with symbolic sizes, such as transpositions; it does not
    see their bodies.
    """
    module, hidden = module.clone(), {}
    for var, func in module.functions_items():
        if isinstance(func, tirx.PrimFunc):
            try:
                relax.analysis.has_reshape_pattern(func)
            except tvm.error.InternalError:
                hidden[var] = func
                module.update_func(var, func.with_body(tirx.Evaluate(0)))
    module = transform.RewriteDataflowReshape()(module)
    for var, func in hidden.items():
        module.update_func(var, func)
    return module


def _take(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Legalize `relax.take` along one axis; TVM's version warns that indices may be out of range.

    They are not: tables of positions come from `converters`, and indices of the model are proved or
    checked, and also clipped, in `lower` (see `bnncc.ir.demands` and `guards`).
    """
    data, index = call.args
    axis, mode = call.attrs.axis, call.attrs.mode
    if axis is None or mode != "fast" or not isinstance(index.ty, relax.TensorType):
        return bb.call_te(topi.take, data, index, axis, mode="clip" if mode == "fast" else mode)

    def picked(x: te.Tensor, at: te.Tensor) -> te.Tensor:
        first = int(axis) % len(x.shape)
        last = first + len(at.shape)

        def value(*place: tirx.Var) -> tirx.Expr:
            return x(*place[:first], at(*place[first:last]), *place[last:])

        shape = [*x.shape[:first], *at.shape, *x.shape[first + 1 :]]
        return te.compute(shape, value, name="taken")

    return bb.call_te(picked, data, index)


def schedule(
    module: tvm.IRModule, target: TargetSpec, threads: int, records: Records | None = None
) -> tuple[tvm.IRModule, frozenset[str]]:
    """Schedule every PrimFunc.

    Parameters
    ----------
    module : tvm.IRModule
        From `legalize`.
    threads : int
        Threads that kernels may use.
    records : Records, optional
        Tuning records. Those that do not apply to their kernel are listed in ``records.stale``.

    Returns
    -------
    module : tvm.IRModule
        Scheduled.
    tuned : frozenset of str
        Kernels scheduled from a record.
    """
    tuned: set[str] = set()
    out = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
    for var, func in module.functions_items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        if spec_of(func):
            out[var], recorded = _ours(func, target, threads, records)
            tuned |= {var.name_hint} if recorded else set()
        else:
            plain = func if target.kind == "cuda" else _without_scopes(func)
            out[var] = generic.schedule(plain, target, threads)
    return out, frozenset(tuned)


def _without_scopes(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Remove scopes from TVM's scatters: CPU code generation warns that it ignores them."""

    def inside(node: tirx.AttrStmt) -> tirx.Stmt:
        return node.body if node.attr_key == "pragma_scope" else node

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.AttrStmt, inside)))


def _ours(
    func: tirx.PrimFunc, target: TargetSpec, threads: int, records: Records | None
) -> tuple[tirx.PrimFunc, bool]:
    """Schedule one of our kernels, from a record if there is one that applies."""
    found = records.find(spec_of(func), threads) if records is not None else None
    if found is not None and records is not None:
        point, where = found
        try:
            return schedules.schedule(func, target, threads, point), True
        except Exception as error:  # of another version, or damaged: not fatal
            reason = message_lines(error)
            records.stale.append(f"{where}: {reason[-1]}")
    return schedules.schedule(func, target, threads), False


def kernel_calls(module: tvm.IRModule, origins: Origins) -> list[KernelCall]:
    """List the PrimFunc calls of ``main`` in order; `origins` are those given to `legalize`."""
    calls: list[KernelCall] = []
    makers: dict[Any, frozenset[int]] = {}  # by variable: the calls it is computed by

    def made_by(expr: Any) -> frozenset[int]:
        parts = {relax.Tuple: "fields", relax.Call: "args"}.get(type(expr))
        if parts is not None:
            return frozenset().union(*map(made_by, getattr(expr, parts)))
        return makers.get(getattr(expr, "tuple_value", expr), frozenset())

    for block in module["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            makers[binding.var] = made_by(value)
            if not isinstance(value, relax.Call) or getattr(value.op, "name", "") not in (
                "relax.call_tir",
                "relax.call_tir_inplace",
            ):
                continue
            func = module[value.args[0]]
            spec = spec_of(func)
            made = value.ty
            outs = list(made.fields) if isinstance(made, relax.TupleType) else [made]
            if value.op.name == "relax.call_tir_inplace":
                over = value.attrs.inplace_indices
                outs = [kind for kind, index in zip(outs, over, strict=True) if int(index) < 0]
            kinds = [a.ty for a in value.args[1].fields if isinstance(a.ty, relax.TensorType)]
            sizes = tuple(
                (position, str(arg.name))
                for position, arg in enumerate(value.args[1].fields)
                if tvm.ir.is_prim_expr(arg)
            )
            kinds += outs
            reads = tuple(sorted(makers[binding.var]))
            makers[binding.var] = frozenset([len(calls)])
            args = tuple(_kind(k) for k in kinds)
            nodes = origins.of(binding.var)
            calls.append(KernelCall(value.args[0].name_hint, spec, args, reads, sizes, nodes))
    return calls


def _kind(kind: Any) -> tuple[tuple[int | str, ...], str]:
    return tuple(_dim(d) for d in kind.shape.values), str(kind.dtype)


def _dim(value: Any) -> int | str:
    """Return a dimension; 1 stands for symbols of one that is not a polynomial."""
    if isinstance(value, tirx.Var):
        return str(value.name)
    if isinstance(value, tirx.Mul):
        return dims.product((_dim(value.a), _dim(value.b)))
    if isinstance(value, tirx.Add):
        return dims.total((_dim(value.a), _dim(value.b)))
    return memory.at_one(value)


def memory_plan(module: tvm.IRModule) -> memory.Plan:
    """Return the static plan of a legalized module."""
    return memory.plan(planned(module))


def planned(module: tvm.IRModule) -> tvm.IRModule:
    """Return a legalized or scheduled module after memory planning."""
    return tvm.transform.Sequential(_plan_passes())(module)


def in_calls(module: tvm.IRModule) -> tvm.IRModule:
    """Return a scheduled module whose ``main`` calls kernels with all their tensors."""
    return tvm.transform.Sequential(_plan_passes()[:-1])(module)


def build(
    module: tvm.IRModule, target: TargetSpec
) -> tuple[relax.VMExecutable, dict[str, memory.Scratch]]:
    """Compile a scheduled module.

    Parameters
    ----------
    module : tvm.IRModule
        From `schedule`.

    Returns
    -------
    relax.VMExecutable
        Ready for `link.build_library`.
    dict
        Scratch memory by kernel.
    """
    on_gpu = target.kind == "cuda"
    if in_place.PAIRS in (module["main"].attrs or {}):
        in_place.check(with_outputs(planned(module), None))
    pipeline = tvm.transform.Sequential(
        [
            *_plan_passes(),
            transform.RewriteCUDAGraph()
            if on_gpu
            else tvm.transform.module_pass(with_outputs, opt_level=0),
            tvm.transform.module_pass(in_place.with_in_place, opt_level=0),
            tvm.transform.module_pass(through_outputs, opt_level=0),
            tvm.transform.module_pass(mark_trusting, opt_level=0),
            transform.LowerAllocTensor(),
            transform.KillAfterLastUse(),
            transform.LowerRuntimeBuiltin(),
            transform.ComputePrimValue(),
            transform.VMShapeLower(),
            ShareShapeFunctions(),
            tvm.transform.module_pass(without_repeats, opt_level=0),
            transform.AttachGlobalSymbol(),
        ]
    )
    gpu_code = gpu.compiling(target) if on_gpu else nullcontext()
    context = memory.lowering(**{"relax.backend.use_cuda_graph": on_gpu})
    with context, memory.recorded() as scratch, gpu_code:
        executable = compiled(
            target,
            lambda machine: relax.build(
                module,
                machine,
                relax_pipeline=pipeline,
                tir_pipeline=memory.PIPELINE,
                exec_mode="compiled",
            ),
        )
    return executable, scratch


def _plan_passes() -> list[tvm.transform.Pass]:
    return [
        transform.ToNonDataflow(),
        transform.RemovePurityChecking(),
        transform.CallTIRRewrite(),
        transform.StaticPlanBlockMemory(),
    ]


def compiled(target: TargetSpec, build: Callable[[tvm.target.Target], Made]) -> Made:
    """Compile for a target; once more without LLVM's SLP vectorizer if that broke the code.

    It does in some short loops of scalar code, such as that of a softmax of 4 x 3 rows of 3 values
    for AVX2. LLVM's own verification notices.

    Parameters
    ----------
    target : TargetSpec
        The target.
    build : callable
        Takes TVM's description of it.

    Raises
    ------
    InternalError
        If TVM or LLVM fails otherwise.
    """
    try:
        return build(tvm_target(target))
    except tvm.error.InternalError as error:
        if "LLVM module verification failed" not in str(error):
            raise
    return build(tvm_target(target, slp=False))


def require_instructions(target: TargetSpec) -> None:
    """Require that LLVM makes code for a target, with all instructions that kernels make use of.

    LLVM takes another processor for one that it does not know, ignores features, ends the process
    where a kernel uses an instruction that it was not told of, and crashes on an architecture.

    Raises
    ------
    TargetError
        If it does not.
    """
    if target.kind == "c":
        return
    if not _has_architecture(target.arch):
        raise TargetError(
            f"target {target.name}: LLVM has no architecture `{target.arch}`, with which its "
            "triple begins",
            hint="a triple is such as x86_64-unknown-linux-gnu",
        )
    made = tvm_target(replace(target, kind="llvm"))
    if target.mcpu not in tvm.get_global_func("target.llvm_get_cpu_archlist")(made):
        raise TargetError(
            f"target {target.name}: LLVM has no `mcpu` {target.mcpu} for "
            f"{target.triple or 'this machine'}",
            hint="`llc -march=ARCHITECTURE -mcpu=help` lists all",
        )
    known = {str(name) for name in tvm.get_global_func("target.llvm_get_cpu_features")(made)}
    if unknown := [name for name in target.mattr if name[0] == "+" and name[1:] not in known]:
        raise TargetError(f"target {target.name}: LLVM has no feature `{unknown[0]}` of `mattr`")
    for feature in target.features:
        if (name := LLVM_NAMES.get(feature, "")) and name not in known:
            raise TargetError(
                f"target {target.name}: its features have {feature}, but LLVM's {target.mcpu} has "
                f"no `{name}`",
                hint="leave it out of `features`, or set another `mcpu`",
            )
    needed = _counting_feature(target)
    if needed and needed not in known:
        raise TargetError(
            f"target {target.name}: with `popcount` {target.popcount} and `vector_bits` "
            f"{target.vector_bits}, kernels have instructions of `{needed}`, and LLVM's "
            f"{target.mcpu} has none",
            hint="set another `popcount`, such as bytes, or other `vector_bits`",
        )


_LOOKUPS = {
    "x86_64": {128: "ssse3", 256: "avx2", 512: "avx512bw"},
    "wasm32": {128: "simd128"},
}
"""LLVM's names of the features that look up bytes, by architecture and width of a vector."""


def _counting_feature(target: TargetSpec) -> str:
    """Return LLVM's name of the feature by whose instructions bits are counted, if it is one.

    Raises
    ------
    TargetError
        If vectors of this width cannot look up bytes.
    """
    arch = normal_arch(target.arch or platform.machine())
    if target.popcount == "lookup":
        lookups = _LOOKUPS.get(arch, {})
        if target.vector_bits not in lookups:
            raise TargetError(
                f"target {target.name}: `popcount` is lookup, for which {arch} has no vectors of "
                f"{target.vector_bits} bits",
                hint="set another `popcount`, such as bytes, or other `vector_bits`",
            )
        return lookups[target.vector_bits]
    if target.popcount == "vector" and arch == "x86_64" and target.vector_bits == 512:
        return LLVM_NAMES["avx512_vpopcntdq"]
    return {"neon": LLVM_NAMES["asimd"], "neon-dot": LLVM_NAMES["asimddp"]}.get(target.popcount, "")


def _has_architecture(name: str) -> bool:
    """Tell whether LLVM has code for what a triple begins with; nothing is this machine's."""
    if not name or re.fullmatch(r"(arm|thumb)v[4-9][a-z0-9.]*|arm64|amd64|i[3-6]86", name):
        return True
    return name in tvm.get_global_func("target.llvm_get_targets")()


def tvm_target(target: TargetSpec, *, slp: bool = True) -> tvm.target.Target:
    """Return TVM's description of `target`, with or without LLVM's SLP vectorizer."""
    config: dict[str, Any] = {"kind": "llvm", "mcpu": target.mcpu}
    if not slp:
        config |= NO_SLP
    if target.mattr:
        config["mattr"] = list(target.mattr)
    if target.triple:
        config["mtriple"] = target.triple
    if target.arch == "wasm32" or target.arch.startswith("thumb"):  # avoids a warning
        config["vector-width"] = 128
    if target.abi:
        config["mabi"] = target.abi
    if target.float_abi:
        config["mfloat-abi"] = target.float_abi
    if target.kind == "llvm":
        return tvm.target.Target(config)
    if target.kind == "c":
        return tvm.target.Target({"kind": "c"})
    device = {
        "kind": "cuda",
        "arch": target.gpus[0],  # kernels' text does not depend on it
        "max_shared_memory_per_block": shared_bytes(target.gpus),
    }
    return tvm.target.Target(device, host=tvm.target.Target(config))
