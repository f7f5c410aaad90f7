"""Kernels as plain C functions, without TVM's runtime.

TVM's own lowering gives each kernel the calling convention of its runtime. One pass is replaced
here: tensors become pointers to their first element, scratch memory that would come from the
runtime becomes a last pointer, and the function returns an int. Only the C library is needed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx import transform as tir

from bnncc.codegen import float_operations, memory
from bnncc.codegen.binds import limit_binds
from bnncc.codegen.c_text import ALIGNMENT, C_TYPES, Kernels, identifier, unique
from bnncc.errors import TargetError
from bnncc.files import scratch_folder
from bnncc.schedules import intrin_wasm
from bnncc.schedules.float_functions import expanded
from bnncc.schedules.intrin import Intrinsic

_CPU = 1

FAILED = -1
"""Return code of a kernel that received an invalid index or divisor (`bnncc.codegen.guards`)."""


def build(
    functions: dict[str, tirx.PrimFunc],
    target: tvm.target.Target,
    callers: Mapping[str, tirx.PrimFunc] | None = None,
    constants: Mapping[str, bytes] | None = None,
) -> Kernels:
    """Compile kernels into one object file.

    Parameters
    ----------
    functions : dict of str to PrimFunc
        Scheduled for one thread, with static shapes, by symbol name.
    target : tvm.target.Target
        From `pipeline.tvm_target`.
    callers : mapping of str to PrimFunc, optional
        Functions that call the kernels, by symbol name; they use nothing but pointers, name
        kernels with the suffix `LATER`, and are compiled as they are.
    constants : mapping of str to bytes, optional
        Read-only data, by symbol name.

    Returns
    -------
    Kernels
        As a relocatable object.

    Raises
    ------
    TargetError
        If a kernel needs more of TVM's runtime.
    """
    lowering = _without_scalable(target)
    lowered = lowered_by(_passes(), functions, lowering)
    floats = {name: float_operations.count(lowered[name]) for name in functions}
    lowered, scratch = _with_scratch(lowered)
    with lowering, memory.lowering():
        for var, func in lowered.functions_items():
            lowered[var] = expanded(func)
        lowered = tir.LowerIntrin()(lowered)
        if f"+{intrin_wasm.FEATURE}" in target.attrs.get("mattr", ()):
            lowered = _for_wasm(lowered)
        for name, f in (callers or {}).items():
            f = f.with_attr("global_symbol", name).with_attr("target", target)
            lowered[name] = f.with_attr("calling_conv", 1)
        made = tvm.get_global_func(f"target.build.{target.kind.name}")(lowered, target)
    text = _called(_without_halves(made.inspect_source("ll")))
    if target.attrs.get("mabi") == "lp64d":
        text = _halves_in_float_registers(text)
    if str(target.attrs.get("mtriple", "")).startswith("thumb"):
        text = _ARM_CONVERSION.sub(lambda found: f"@{_ARM_NAMES[found[1]]}(", text)
    parameters = {name: _parameters(name, f, text) for name, f in functions.items()}
    text = _FUNCTION.sub(r'\1"warn-stack-size"="0" ', text)
    text += "".join(constant(name, data) for name, data in (constants or {}).items())
    library, frames = _compiled(text)
    stack = {name: frames.get(name, 0) for name in scratch}
    return Kernels(library, scratch, parameters, stack, floats)


def _compiled(text: str) -> tuple[bytes, dict[str, int]]:
    """Return the object file of LLVM IR, and the bytes of stack that functions take, by name."""
    with scratch_folder("bare") as folder:
        source, written = Path(folder) / "kernels.ll", Path(folder) / "kernels.o"
        source.write_text(text, encoding="utf-8")
        said = Path(folder) / "said.txt"
        with _errors_to(said):
            tvm_ffi.load_module(str(source)).write_to_file(str(written))
        sizes = _FRAME.findall(said.read_text(errors="replace"))
        return written.read_bytes(), {name: int(size) for size, name in sizes}


LATER = "_later"
"""Suffix by which callers name a kernel, so that LLVM cannot inline it into them.

TVM tells LLVM that different tensors of a kernel do not overlap. Between kernels that is wrong: the
output of one is the input of another.
"""


def _called(text: str) -> str:
    """Let callers in LLVM IR call the kernels themselves."""
    text = re.sub(rf"^declare [^\n]*@\w+{LATER}\([^\n]*\n", "", text, flags=re.M)
    return re.sub(rf"@(\w+){LATER}\(", r"@\1(", text)


def _parameters(name: str, func: tirx.PrimFunc, text: str) -> list[str]:
    """Return the declarations of a kernel's tensors, with LLVM's knowledge of which are only read.

    Parameters
    ----------
    name : str
        Name of the kernel.
    func : PrimFunc
        The kernel as passed in.
    text : str
        LLVM IR of all kernels.
    """
    found = re.search(rf"^define [^\n]*@{name}\(([^\n]*?)\) [^()\n]*{{$", text, re.M)
    attributes = found[1].split("ptr ")[1:-1] if found else []  # scratch memory is last
    names = unique([identifier(param.name) for param in func.params], name, "t", ("scratch",))
    declared = []
    for param, own, given in zip(func.params, names, attributes, strict=True):
        const = "const " if re.search(r"\breadonly\b|\breadnone\b", given) else ""
        declared.append(f"{const}{C_TYPES[str(param.dtype)]} *{own}")
    return declared


def constant(name: str, data: bytes, linkage: str = "") -> str:
    """Return LLVM IR for read-only bytes."""
    data = data or bytes(1)
    content = "".join(map(_QUOTED.__getitem__, data))
    return f'\n@{name} = {linkage}constant [{len(data)} x i8] c"{content}", align {ALIGNMENT}\n'


_QUOTED = [chr(i) if 32 <= i < 127 and i not in b'"\\' else f"\\{i:02X}" for i in range(256)]
"""Escapes of bytes in LLVM IR strings."""

_FUNCTION = re.compile(r"^(attributes #\d+ = \{ )", re.M)
"""Function attributes; one more makes LLVM report the size of stack frames."""

_FRAME = re.compile(r"stack frame size \((\d+)\) exceeds limit \(\d+\) in function '(\w+)'")


@contextlib.contextmanager
def _errors_to(place: Path) -> Iterator[None]:
    """Redirect standard error to a file: LLVM reports frame sizes only there."""
    saved = os.dup(2)
    try:
        with open(place, "wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _without_halves(text: str) -> str:
    """Remove TVM's float16 conversions from the LLVM IR of a module without float16."""
    left = _CONVERSION.sub("", text)
    return text if re.search(r"\bhalf\b", left) else left


def _halves_in_float_registers(text: str) -> str:
    """Let TVM's float16 conversions pass their halves as LLVM does, in the low bits of a float."""

    def passed(found: re.Match[str]) -> str:
        body = found[0].replace("dso_local i16 @", "dso_local float @")
        for pattern, replacement in _PASSED.items():
            body = re.sub(pattern, replacement, body, flags=re.M)
        return body

    return _CONVERSION.sub(passed, text)


_PASSED = {
    r"^  ret i16 (\S+)$": "  %word = zext i16 \\1 to i32\n"
    "  %half = bitcast i32 %word to float\n  ret float %half",
    r"\(i16 %a0\)([^{]*{\n\w+:\n)": "(float %half)\\1"
    "  %word = bitcast float %half to i32\n  %a0 = trunc i32 %word to i16\n",
}
"""Result and argument of the conversions, by how TVM writes them."""

_CONVERSION = re.compile(r"^define weak [^\n]*@__(?:trunc|extend)[sh]f[sh]f2\(.*?^}\n", re.M | re.S)

_ARM_NAMES = {"truncsfhf2": "__aeabi_f2h", "extendhfsf2": "__aeabi_h2f"}
"""What LLVM calls on Arm without an operating system, and GCC's library for it lacks."""

_ARM_CONVERSION = re.compile(rf"@__({'|'.join(_ARM_NAMES)})\(")


def _without_scalable(target: tvm.target.Target) -> tvm.target.Target:
    """Hide RISC-V's vectors from TVM's passes, which would use vectors of unknown length."""
    attrs = {key: target.attrs[key] for key in target.attrs}
    kept = [feature for feature in attrs.get("mattr", ()) if feature != "+v"]
    return tvm.target.Target({"kind": target.kind.name, **attrs, "mattr": kept})


def lowered_by(
    passes: Sequence[tvm.transform.Pass],
    functions: Mapping[str, tirx.PrimFunc],
    target: tvm.target.Target,
) -> tvm.IRModule:
    """Return a module of functions, by symbol name, after `passes`."""
    named = {
        name: f.with_attr("global_symbol", name).with_attr("target", target)
        for name, f in functions.items()
    }
    with target, memory.lowering():
        return tvm.transform.Sequential(passes)(tvm.IRModule(named))


def without_blocks() -> list[tvm.transform.Pass]:
    """Return the first passes of all lowering, which prepare blocks for their removal."""
    return [
        s_tir.transform.CanonicalizeLoop(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.StmtSimplify(),
    ]


def _passes() -> list[tvm.transform.Pass]:
    """Return TVM's lowering for CPUs, with our calling convention."""
    return [
        *without_blocks(),
        s_tir.transform.AnnotateIrregularLoop(),
        s_tir.transform.LowerOpaqueBlock(),
        tir.FlattenBuffer(),
        tir.BF16ComputeLegalize(),
        tir.NarrowDataType(32),
        s_tir.transform.LoopPartition(),
        tir.VectorizeLoop(True),
        tir.StorageRewrite(),
        s_tir.transform.HoistIfThenElse(),
        tir.UnrollLoop(),
        s_tir.transform.RenormalizeSplitPattern(),
        tir.StmtSimplify(),
        tir.RemoveNoOp(),
        s_tir.transform.RewriteUnsafeSelect(),
        tir.VerifyMemory(),
        tvm.transform.module_pass(_returned, opt_level=0),
        tvm.transform.module_pass(_pointers, opt_level=0),
        tir.BF16StorageLegalize(),
        tvm.transform.module_pass(_limited, opt_level=0),
        tir.LowerTVMBuiltin(),
    ]


def _limited(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    return tvm.IRModule({var: limit_binds(func) for var, func in module.functions_items()})


def _returned(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Make failed checks return `FAILED`, where TVM would raise an error."""

    def check(node: Any) -> Any:
        left = tirx.Evaluate(tirx.tvm_throw_last_error())  # becomes `return -1`
        return tirx.IfThenElse(tirx.Not(node.condition), left, None)

    checks = (tirx.AssertStmt, check)
    return tvm.IRModule(
        {
            var: func.with_body(tvm_ffi.structural_map(func.body, [checks]))
            for var, func in module.functions_items()
        }
    )


def _pointers(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Replace buffers by pointers, and use the C calling convention."""
    out = {}
    for var, func in module.functions_items():
        pointers = [
            tirx.Var(f"{b.name}_p", tvm.ir.PointerType(tvm.ir.PrimType(str(b.dtype))))
            for b in func.params
        ]
        body = func.body
        for buffer, pointer in reversed(list(zip(func.params, pointers, strict=True))):
            body = tirx.DeclBuffer(buffer, body, data=pointer)
        # Scratch memory is requested with these attributes.
        for key, value in (("device_id", 0), ("device_type", _CPU)):
            body = tirx.AttrStmt(tirx.const(0, "int32"), key, tirx.const(value, "int32"), body)
        bare = tirx.PrimFunc(pointers, body, tvm.ir.PrimType("int32"))
        for key in ("global_symbol", "target"):
            bare = bare.with_attr(key, func.attrs[key])
        out[var] = bare.with_attr("tirx.noalias", True).with_attr("calling_conv", 1)
    return tvm.IRModule(out)


NEEDS_RUNTIME = "kernel `{}` needs TVM's runtime, which C code lacks"
"""Message about a kernel that calls TVM's runtime, as those do that sort."""


def _with_scratch(module: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, int]]:
    """Let kernels take scratch memory as a last parameter; reject calls of the runtime.

    Returns
    -------
    module : tvm.IRModule
        With that parameter.
    scratch : dict of str to int
        Bytes of scratch memory, by kernel.

    Raises
    ------
    TargetError
        If a kernel needs more of the runtime.
    """
    out, scratch = {}, {}
    for var, func in module.functions_items():
        name, place = var.name_hint, tirx.Var("scratch", "handle")
        sizes: list[int] = []
        refused: list[str] = []
        taken = partial(_from_scratch, place, sizes, refused)
        body = tvm_ffi.structural_map(func.body, [(tvm.ir.Call, taken)])
        if refused:
            raise TargetError(NEEDS_RUNTIME.format(name))
        made = tirx.PrimFunc([*func.params, place], body, func.ret_type)
        out[var], scratch[name] = made.with_attrs(func.attrs), sum(sizes)
    return tvm.IRModule(out), scratch


def _for_wasm(module: tvm.IRModule) -> tvm.IRModule:
    """Replace operations that LLVM would split into lanes for WebAssembly, using `intrin_wasm`."""
    sources: list[str] = []

    def used(instruction: Intrinsic, operand: Any) -> Any:
        sources.append(instruction.source)
        return instruction(operand)

    def convert(cast: Any) -> Any:
        kind, _, lanes = str(cast.value.ty).partition("x")
        if str(cast.ty) != intrin_wasm.FLOATS.result or kind not in _SMALL:
            return cast
        return used(intrin_wasm.FLOATS, tirx.Cast(f"int32x{lanes}", cast.value))

    def masked(call: Any) -> Any:
        if str(getattr(call.op, "name", "")) != "tirx.reinterpret":
            return call
        kind, _, lanes = str(call.args[0].ty).partition("x")
        mask = intrin_wasm.MASKS.get(int(lanes or 1)) if kind in ("uint1", "bool") else None
        return call if mask is None else used(mask, call.args[0])

    out = {}
    for var, func in module.functions_items():
        sources.clear()
        body = tvm_ffi.structural_map(func.body, [(tirx.Cast, convert), (tvm.ir.Call, masked)])
        if sources:
            code = "".join(dict.fromkeys(sources))
            body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", code, body)
        out[var] = func.with_body(body)
    return tvm.IRModule(out)


_SMALL = "int32", "int16", "int8", "uint16", "uint8"
"""Integer types whose values int32 holds."""


def _from_scratch(place: tirx.Var, sizes: list[int], refused: list[str], call: Any) -> Any:
    """Return the replacement of a runtime call, and record the memory that it requests."""
    op = str(getattr(call.op, "name", ""))
    if op == memory.ALLOCATE:
        sizes.append(-(-int(call.args[2]) // ALIGNMENT) * ALIGNMENT)
        return tirx.handle_add_byte_offset(place, sum(sizes[:-1]))
    if op == memory.FREE:
        return tirx.const(0, "int32")
    if "packed" in op or op.startswith("tirx.TVMBackendParallel"):
        refused.append(op)
    return call
