"""A network without TVM's runtime: kernels, and the order in which they are called.

`c_folder` and `wasm_network` generate files from the result of `build`. Nothing is allocated at run
time: the caller provides one arena, in which each tensor has a fixed place.
"""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from bnncc import report
from bnncc.codegen import bare, c_kernels, c_text, call_order, memory, pipeline
from bnncc.codegen.arena import aligned
from bnncc.codegen.c_text import Kernels, Loop, Named, Order, Sizes
from bnncc.codegen.float_operations import in_software
from bnncc.codegen.object_size import loaded_bytes
from bnncc.files import names_folder, require_path, write_atomic, write_folder
from bnncc.ir.halves import is_float
from bnncc.runtime.compare import RELATIVE, largest, tolerance
from bnncc.runtime.manifest import TensorInfo
from bnncc.runtime.selfcheck import Check, sample
from bnncc.targets.spec import TargetSpec


@dataclass(frozen=True)
class CNetwork:
    """A network compiled to C or WebAssembly, from `driver.compile_c`."""

    files: dict[str, bytes]
    """From `c_folder.make` or `wasm_network.make`."""
    content: dict[str, Any]
    """The report, without the size of the file."""

    @property
    def report(self) -> dict[str, Any]:
        """Return the report (docs/report.md)."""
        size = len(archive(self.files))
        return dict(report.with_old_keys(report.with_file_size(self.content, size)))

    def save(self, path: str | Path) -> int:
        """Write all files atomically; return their size in bytes.

        The result is a tar file, or a folder if `path` has no suffix (`names_folder`).
        """
        require_path(path=path)
        if names_folder(Path(path)):
            return write_folder(Path(path), self.files)
        return write_atomic(path, [archive(self.files)])


@dataclass(frozen=True)
class Bare:
    """A network as kernels without a runtime, and the order in which they are called."""

    prefix: str
    """Prefix of its symbols."""
    order: Order
    sizes: Sizes
    given: Named
    made: Named
    """`given`, `made`: inputs and outputs, with their names in C."""
    kernels: Kernels

    @property
    def library(self) -> bytes:
        """The object file, or the C text of the kernels."""
        return self.kernels.code

    @property
    def weights_symbol(self) -> str:
        """Symbol of the weights in an object file."""
        return f"{self.prefix}{WEIGHTS}"

    @property
    def scratch(self) -> dict[str, int]:
        """Bytes of scratch memory, by kernel."""
        return self._by_kernel(self.kernels.scratch)

    def _by_kernel(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the largest size of each kernel of the network, of those that compute parts."""
        found: dict[str, int] = {}
        for name, size in sizes.items():
            kernel = self.order.whole(name.removeprefix(f"{self.prefix}_"))
            found[kernel] = max(size, found.get(kernel, 0))
        return found

    def activations(self, plan: memory.Plan) -> memory.Plan:
        """Return the memory plan of an artifact with the sizes of this network's arena."""
        calls = zip(plan.calls, self.order.live, strict=True)
        return memory.Plan(tuple(replace(c, live=live) for c, live in calls), self.order.arena)

    @property
    def footprint(self) -> dict[str, Any]:
        """Memory that it needs on a device, in bytes, for the report."""
        flash, weights = loaded_bytes(self.library), self.sizes.weights
        inputs, outputs = (
            sum(c_text.nbytes(tensor) for _, tensor in tensors)
            for tensors in (self.given, self.made)
        )
        tensors, scratch = self.sizes.tensors, self.sizes.arena - self.sizes.tensors
        stack = self._by_kernel(self.kernels.stack)
        most, deepest = (max(of, key=of.__getitem__, default="") for of in (self.scratch, stack))
        frames = stack.get(deepest, 0) + self._call_bytes
        return {
            "flash_bytes": flash,
            "kernels_bytes": flash - weights,
            "weights_bytes": weights,
            "ram_bytes": tensors + scratch + inputs + outputs + frames,
            "tensors_bytes": tensors,
            "scratch_bytes": scratch,
            "scratch_kernel": most if self.scratch.get(most) else "",
            "inputs_bytes": inputs,
            "outputs_bytes": outputs,
            "stack_bytes": frames,
            "stack_kernel": deepest if stack.get(deepest) else "",
            "soft_floats": self._soft_floats,
        }

    @property
    def _soft_floats(self) -> dict[str, int]:
        """Upper bound of float operations that the processor computes in software, by kernel."""
        kinds, count = in_software(self.library), Counter[str]()
        for times, call in self.order.calls:
            of = self.kernels.floats[f"{self.prefix}_{call.kernel}"]
            count[self.order.whole(call.kernel)] += times * sum(of[kind] for kind in kinds)
        return {kernel: number for kernel, number in count.items() if number}

    @property
    def _call_bytes(self) -> int:
        """Return the stack in bytes, as C compilers make it, of the function that calls kernels.

        It holds the function's own arguments, the arguments of the longest call, eight registers,
        and in loops four more numbers.
        """
        word = 8 if self.library[4] == 2 else 4  # ELF class
        longest = max((len(call.args) for _, call in self.order.calls), default=0)
        held = 8 + 4 * any(isinstance(one, Loop) for one in self.order.statements)
        return word * (1 + len(self.given) + len(self.made) + longest + 1 + held)

    def pairs(
        self, selfcheck: SelfCheckMaker, limit: int
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Return the stored self-check of at most `limit` bytes, by file, and tolerances.

        These are how far each float output may be off.
        """
        stored, check = selfcheck(limit // 2)
        near = {}
        pairs = {identity: stored[info.name] for identity, info in self.given}
        for number, (identity, info) in enumerate(self.made):
            where, values = sample(check, info, limit // 2 // len(self.made), number)
            pairs[identity] = values
            if where is not None:
                pairs[f"{identity}{c_text.PLACES}"] = where
            if is_float(values):
                right = check.outputs[info.name]
                relative = tolerance(right, check.coarse.get(info.name, RELATIVE))
                near[identity] = relative * max(largest(right), 1e-30)
        return pairs, near


CHECK = "check/"
"""Folder of the stored inputs and outputs, if they are in files."""

WEIGHTS = "_weights"
"""Suffix of the weights' symbol in an object file."""

SelfCheckMaker = Callable[[int], tuple[Mapping[str, np.ndarray], Check]]
"""Takes a size limit in bytes; returns the stored test inputs, and the check made of them."""


def build(
    module: tvm.IRModule,
    target: TargetSpec,
    *,
    name: str,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    caller: Callable[[str, Order, Named, Named], tirx.PrimFunc] | None = None,
    row_wise: bool = False,
) -> Bare:
    """Build a scheduled network.

    Parameters
    ----------
    module : tvm.IRModule
        From `pipeline.schedule`, for one thread and with static shapes.
    name : str
        Name of the network, the prefix of its symbols.
    inputs, outputs : sequence of TensorInfo
        Of ``main``, in order.
    caller : callable, optional
        Returns the function that runs the network, as part of the object file; takes the prefix of
        symbols, the order of calls, inputs and outputs.
    row_wise : bool
        Whether layers run row-wise where that takes less memory.

    Raises
    ------
    TargetError
        If the network needs TVM's runtime.
    """
    made = _built(module, target, name, inputs, outputs, caller, row_wise)
    scratch = made.kernels.scratch
    most = max(scratch, key=scratch.__getitem__, default="").removeprefix(f"{made.prefix}_")
    if most in made.order.variants:  # the scratch memory of a band may be more than bands save
        whole = _built(module, target, name, inputs, outputs, caller, False)
        return min(whole, made, key=lambda one: one.sizes.arena)
    return made


def _built(
    module: tvm.IRModule,
    target: TargetSpec,
    name: str,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    caller: Callable[[str, Order, Named, Named], tirx.PrimFunc] | None,
    row_wise: bool,
) -> Bare:
    """Build a network, with kernels that may run row-wise or not; otherwise as `build`."""
    prefix = c_text.network_prefix(name)
    given = c_text.unique([c_text.identifier(t.name) for t in inputs], prefix, "in")
    made = c_text.unique([c_text.identifier(t.name) for t in outputs], prefix, "out", given)
    calls = pipeline.in_calls(module)
    order, bands = call_order.planned(calls, given, made, target if row_wise else None)
    scheduled, _ = pipeline.schedule(tvm.IRModule(bands), target, 1)
    called = {call.kernel for _, call in order.calls}
    functions = {
        f"{prefix}_{var.name_hint}": func
        for var, func in (*calls.functions_items(), *scheduled.functions_items())
        if isinstance(func, tirx.PrimFunc) and var.name_hint in called
    }
    ios = [*zip(given, inputs, strict=True)], [*zip(made, outputs, strict=True)]
    if target.kind == "c":
        kernels = c_kernels.build(functions, pipeline.tvm_target(target))
    else:
        callers = {f"{prefix}_run": caller(prefix, order, *ios)} if caller else {}
        constants = {} if caller else {f"{prefix}{WEIGHTS}": weight_bytes(order)}
        kernels = pipeline.compiled(
            target,
            lambda machine: bare.build(functions, machine, callers=callers, constants=constants),
        )
    scratch = max(kernels.scratch.values(), default=0)
    return Bare(prefix, order, Sizes(order.arena, scratch, order.weight_bytes), *ios, kernels)


def check_files(pairs: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Return the files of stored inputs and outputs."""
    return {
        f"{CHECK}{identity}.bin": np.ascontiguousarray(value).tobytes()
        for identity, value in pairs.items()
    }


def archive(content: Mapping[str, bytes]) -> bytes:
    """Return `content` as a deterministic tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def weight_bytes(order: Order) -> bytes:
    """Return all constants, each at a multiple of `ALIGNMENT`."""
    return b"".join(_padded(w.tobytes()) for w in order.weights)


def _padded(data: bytes) -> bytes:
    return data + bytes(aligned(len(data)) - len(data))
