"""A small artifact made without the compiler: two inputs, two outputs, dynamic batch."""

from __future__ import annotations

import functools
import platform
from typing import Any

import numpy as np

from bnncc import report
from bnncc.codegen.link import build_library
from bnncc.options import CompileOptions
from bnncc.runtime import manifest
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.selfcheck import LEAST_BYTES, Check, pack
from bnncc.targets.catalog import resolve
from bnncc.targets.host import normal_arch
from bnncc.targets.spec import TargetSpec

BASELINE = "x86-64-v2" if normal_arch(platform.machine()) == "x86_64" else "arm64"
"""The target with a name that every processor like this one runs."""

WEIGHT = np.arange(64, dtype=np.float32).reshape(8, 8)
INPUTS = (
    manifest.TensorInfo("x/in:0", ("n", 8), "float32"),
    manifest.TensorInfo("y", ("n", 8), "float32"),
)
OUTPUTS = (
    manifest.TensorInfo("product", ("n", 8), "float32"),
    manifest.TensorInfo("sum", ("n", 8), "float32"),
)


def expected(x: Any, y: Any) -> dict[str, np.ndarray]:
    """Return the outputs for inputs `x` and `y`."""
    product = np.asarray(x, np.float32) @ WEIGHT
    return {"product": product, "sum": product + np.asarray(y)}


@functools.cache
def _library() -> bytes:
    import tvm
    from tvm import relax

    from bnncc.codegen.pipeline import tvm_target

    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 8), "float32"))
    y = relax.Var("y", relax.TensorType((n, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(x, relax.const(WEIGHT)))
            total = builder.emit(relax.op.add(product, y))
            result = builder.emit_output(relax.Tuple([product, total]))
        builder.emit_func_output(result)
    target = resolve(BASELINE)
    executable = relax.build(builder.get(), tvm_target(target), exec_mode="compiled")
    return build_library(executable, target)


def library() -> bytes:
    """Return the linked library, made anew."""
    _library.cache_clear()
    return _library()


def tiny(*, target: TargetSpec | None = None, **options: Any) -> Artifact:
    """Return the artifact."""
    tensor = report.KernelArg(("n", 8), "float32")
    layer = report.Layer(
        "mm",
        "MatMul",
        "float",
        reason="weights of `mm` are not two-valued",
        remedy="train them binary",
        macs=64,
        kernel="matmul",
        output_shape=("n", 8),
        weight_shape=(8, 8),
    )
    plan = report.Plan(
        layers=(layer,),
        kernels=(
            report.Kernel(
                "matmul", ("mm",), 64, (tensor, report.KernelArg((8, 8), "float32"), tensor)
            ),
            report.Kernel("add", args=(tensor, tensor, tensor), nodes=("bias", "cast")),
        ),
        arena_bytes=64,
        binary_bytes=0,
        float_bytes=WEIGHT.nbytes,
        warnings=("no layer is binary",),
    )
    x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(1, 8)
    content, members = manifest.make(
        _library(),
        plan=plan,
        model="tiny.onnx",
        target=target or resolve(BASELINE),
        options=CompileOptions(**options),
        inputs=INPUTS,
        outputs=OUTPUTS,
        selfcheck=pack(
            [Check({"x/in:0": x, "y": x}, expected(x, x))], INPUTS, OUTPUTS, (), LEAST_BYTES
        ),
    )
    return Artifact(content, members)
