"""A network in WebAssembly: one file of code and weights, and a JavaScript module."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx

from bnncc.codegen import bare, c_network, wasm_text
from bnncc.codegen.c_text import Named, Order, Place
from bnncc.codegen.link import link_wasm
from bnncc.runtime.selfcheck import LEAST_BYTES
from bnncc.targets.spec import TargetSpec


def make(
    module: tvm.IRModule,
    target: TargetSpec,
    *,
    name: str,
    selfcheck: c_network.SelfCheckMaker,
    **ios: Any,
) -> tuple[dict[str, bytes], c_network.Bare, int]:
    """Make the files of a network in WebAssembly; parameters and result as for `c_folder.make`.

    Raises
    ------
    TargetError
        If it calls functions that browsers lack, or needs TVM's runtime.
    """
    made = c_network.build(module, target, name=name, caller=_caller, **ios)
    prefix, tensors = made.prefix, (made.given, made.made)
    wasm = link_wasm(made.library, exports=[f"{prefix}_run"], imports=wasm_text.FUNCTIONS)
    pairs, near = made.pairs(selfcheck, LEAST_BYTES)
    kept = {identity: value.size for identity, value in pairs.items()}
    text = {
        f"{prefix}.mjs": wasm_text.module(prefix, name, target.name, made.sizes, *tensors, wasm),
        f"{prefix}.d.mts": wasm_text.declarations(prefix, *tensors),
        "check.mjs": wasm_text.program(prefix, *tensors, kept, near),
        "README.md": wasm_text.readme(prefix, name, target, made.sizes, wasm),
    }
    files = {
        f"{prefix}.wasm": wasm,
        **{file: content.encode() for file, content in text.items()},
        **c_network.check_files(pairs),
    }
    return files, made, len(wasm) - made.sizes.weights


_CONSTANTS = "bnncc_constants"


def _caller(prefix: str, order: Order, given: Named, made: Named) -> tirx.PrimFunc:
    """Return ``run(arena, inputs..., outputs...)``, which contains the weights."""
    names = "base", *(name for name, _ in (*given, *made))
    parameters = {name: tirx.Var(name, "handle") for name in names}

    def pointer(place: Place) -> tirx.PrimExpr:
        if place.root in parameters and place.root != "base":
            return parameters[place.root]
        constants = tirx.call_extern("handle", _CONSTANTS)
        root = parameters["base"] if place.root == "base" else constants
        return tirx.handle_add_byte_offset(root, place.offset)

    body: list[tirx.Stmt] = []
    for _, call in order.calls:  # none is repeated
        pointers = [pointer(place) for place in (*call.args, Place("base", "uint8", order.arena))]
        failed = tirx.call_extern("int32", f"{prefix}_{call.kernel}{bare.LATER}", *pointers)
        left = tirx.Evaluate(tirx.tvm_throw_last_error())  # becomes `return -1`
        body.append(tirx.IfThenElse(failed != 0, left, None))
    for to, source, size in order.copies:
        copied = tirx.call_extern("handle", "memcpy", pointer(to), pointer(source), size)
        body.append(tirx.Evaluate(copied))
    zero = tirx.const(0, "int32")
    text = f"""{bare.constant("constants", c_network.weight_bytes(order), "internal ")}
define ptr @{_CONSTANTS}() {{
  ret ptr @constants
}}
"""
    body.append(tirx.Return(zero))
    whole = tirx.AttrStmt(zero, "pragma_import_llvm", text, tirx.SeqStmt(body))
    return tirx.PrimFunc([*parameters.values()], whole, tvm.ir.PrimType("int32"))
