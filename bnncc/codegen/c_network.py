"""A network as C: an object file of kernels, and the program text that calls them in order.

For machines without TVM's runtime. `make` makes a folder's worth: ``kernels.o``; ``network.h``
with the one function that runs the network, and every kernel; ``network.c``, whose body is the call
order; ``weights.bin``; a pair of inputs and right outputs; and ``README.md``. Nothing is allocated
at run time: the caller gives one arena, in which network.c has a fixed place for each tensor.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from bnncc import report
from bnncc.codegen import bare, c_kernels, c_text, memory, pipeline
from bnncc.codegen.c_text import ALIGNMENT, C_TYPES, Named, Order, Place, Sizes
from bnncc.errors import TargetError
from bnncc.files import names_folder, write_atomic, write_folder
from bnncc.runtime.manifest import TensorInfo
from bnncc.runtime.selfcheck import LEAST_BYTES, SHARE, Check, sample
from bnncc.targets.spec import TargetSpec


@dataclass(frozen=True)
class CNetwork:
    """A compiled network of C, from `driver.compile_c`."""

    files: dict[str, bytes]
    """From `make`."""
    content: dict[str, Any]
    """What was compiled how, but for the size of the file."""

    @property
    def report(self) -> dict[str, Any]:
        """What was compiled how (docs/report.md)."""
        size = len(archive(self.files))
        return dict(report.with_old_keys(report.with_file_size(self.content, size)))

    def save(self, path: str | Path) -> int:
        """Write all files atomically, and return their size in bytes.

        They become a tar file, or a folder if `path` has no suffix (`names_folder`).
        """
        if names_folder(Path(path)):
            return write_folder(Path(path), self.files)
        return write_atomic(path, [archive(self.files)])


@dataclass(frozen=True)
class Bare:
    """A network as kernels without a runtime, and the order in which they are called."""

    prefix: str
    """What its symbols begin with."""
    order: Order
    sizes: Sizes
    given: Named
    made: Named
    """`given`, `made`: inputs and outputs, with their names in C."""
    library: bytes
    """The object file, or the text of kernels."""
    scratch: dict[str, int]
    """Bytes of scratch memory by kernel."""

    @property
    def weights(self) -> bytes:
        """All constants, as `order` has them."""
        return weight_bytes(self.order)

    @property
    def footprint(self) -> dict[str, Any]:
        """What it takes of a device, in bytes, for the report."""
        kernels, weights = bare.loaded_bytes(self.library), self.sizes.weights
        inputs, outputs = (
            sum(c_text.nbytes(tensor) for _, tensor in tensors)
            for tensors in (self.given, self.made)
        )
        tensors, scratch = self.sizes.tensors, self.sizes.arena - self.sizes.tensors
        largest = max(self.scratch, key=lambda kernel: self.scratch[kernel], default="")
        return {
            "flash_bytes": kernels + weights,
            "kernels_bytes": kernels,
            "weights_bytes": weights,
            "ram_bytes": tensors + scratch + inputs + outputs,
            "tensors_bytes": tensors,
            "scratch_bytes": scratch,
            "scratch_kernel": largest if self.scratch.get(largest) else "",
            "inputs_bytes": inputs,
            "outputs_bytes": outputs,
        }

    def pairs(
        self, selfcheck: SelfCheckMaker, limit: int
    ) -> tuple[dict[str, np.ndarray], Mapping[str, float]]:
        """Return what is stored of a check in `limit` bytes, by file, and its `coarse`."""
        stored, check = selfcheck(limit // 2)
        pairs = {identity: stored[info.name] for identity, info in self.given}
        for number, (identity, info) in enumerate(self.made):
            where, values = sample(check, info, limit // 2 // len(self.made), number)
            pairs[identity] = values
            if where is not None:
                pairs[f"{identity}{c_text.PLACES}"] = where
        return pairs, check.coarse


SelfCheckMaker = Callable[[int], tuple[Mapping[str, np.ndarray], Check]]
"""Returns what is stored of inputs, in so many bytes at most, and the check that it makes."""


def build(
    module: tvm.IRModule,
    target: TargetSpec,
    *,
    name: str,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    caller: Callable[[str, Order, Named, Named], tirx.PrimFunc] | None = None,
) -> Bare:
    """Build a scheduled network.

    Parameters
    ----------
    module : tvm.IRModule
        From `pipeline.schedule` for one thread, with fixed shapes.
    name : str
        Of the network: what its symbols begin with.
    inputs, outputs : sequence of TensorInfo
        Of ``main``, in order.
    caller : callable, optional
        Returns the function that runs the network, as part of the object file, from the prefix of
        symbols, the order of calls, inputs and outputs.

    Raises
    ------
    TargetError
        If the network needs TVM's runtime.
    """
    prefix = c_text.identifier(name)
    given = c_text.unique([c_text.identifier(t.name) for t in inputs], prefix, "in")
    made = c_text.unique([c_text.identifier(t.name) for t in outputs], prefix, "out", given)
    planned = pipeline.planned(module)
    order = _order(planned, given, made)
    functions = {
        f"{prefix}_{var.name_hint}": func
        for var, func in planned.functions_items()
        if isinstance(func, tirx.PrimFunc) and var.name_hint in order.kernels
    }
    ios = [*zip(given, inputs, strict=True)], [*zip(made, outputs, strict=True)]
    build_kernels = c_kernels.build if target.kind == "c" else bare.build
    callers = {f"{prefix}_run": caller(prefix, order, *ios)} if caller else {}
    library, scratch = build_kernels(
        functions, pipeline.tvm_target(target), **({"callers": callers} if callers else {})
    )
    sizes = Sizes(order.arena, max(scratch.values(), default=0), order.weight_bytes)
    own = {kernel.removeprefix(f"{prefix}_"): size for kernel, size in scratch.items()}
    return Bare(prefix, order, sizes, *ios, library, own)


def make(
    module: tvm.IRModule, target: TargetSpec, *, name: str, selfcheck: SelfCheckMaker, **ios: Any
) -> tuple[dict[str, bytes], Bare, int]:
    """Make the files of a network of C.

    Parameters
    ----------
    module, target, name
        As of `build`.
    selfcheck : callable
        What is stored of inputs.
    **ios
        Inputs and outputs, as of `build`.

    Returns
    -------
    files : dict of str to bytes
        By name, the same bytes for the same content.
    made : Bare
        What they are made of.
    code : int
        Bytes of code.
    """
    made = build(module, target, name=name, **ios)
    limit = max(LEAST_BYTES, int(SHARE * (len(made.library) + made.sizes.weights)))
    pairs, coarse = made.pairs(selfcheck, limit)
    kept = {identity: value.size for identity, value in pairs.items()}
    prefix, sizes, tensors = made.prefix, made.sizes, (made.given, made.made)
    text = {
        "network.h": c_text.header(prefix, name, target.name, made.order, sizes, *tensors),
        "network.c": c_text.source(prefix, made.order, sizes, *tensors)
        + c_text.soft_floats(made.library, target.arch),
        "check.c": c_text.program(prefix, *tensors, kept, coarse),
        "README.md": c_text.readme(prefix, name, target, sizes, *tensors),
    }
    files = {
        **{file: content.encode() for file, content in text.items()},
        "kernels.o": made.library,
        "weights.bin": made.weights,
        **check_files(pairs),
    }
    return files, made, len(made.library)


def check_files(pairs: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Return the files of a pair of inputs and outputs."""
    return {
        f"{c_text.CHECK}{identity}.bin": np.ascontiguousarray(value).tobytes()
        for identity, value in pairs.items()
    }


def check_bytes(files: Mapping[str, bytes]) -> int:
    """Return the size of the pair of inputs and outputs."""
    return sum(len(data) for name, data in files.items() if name.startswith(c_text.CHECK))


def archive(content: Mapping[str, bytes]) -> bytes:
    """Return `content` as a tar file that depends on nothing else."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


_FRESH = ""
"""Root of what outputs may be written to directly; its offset is a number."""


def aligned(size: int) -> int:
    """Return `size` as a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def weight_bytes(order: Order) -> bytes:
    """Return all constants, each at a multiple of `ALIGNMENT`."""
    return b"".join(_padded(w.tobytes()) for w in order.weights)


def _padded(data: bytes) -> bytes:
    return data + bytes(aligned(len(data)) - len(data))


def _order(module: tvm.IRModule, given: Sequence[str], made: Sequence[str]) -> Order:
    """Read the calls off ``main``, after memory was planned."""
    main, order = module["main"], Order()
    tensors: dict[Any, Any] = {}  # by variable: an expression, or a tuple of them
    storages: dict[Any, int] = {}
    constants: dict[Any, Place] = {}
    fresh: list[Any] = []  # what outputs may be written to directly

    def place(kind: str, size: int) -> Place:
        order.arena += aligned(size)
        return Place("base", kind, order.arena - aligned(size))

    def constant(value: Any) -> Place:
        array = np.ascontiguousarray(value.value.numpy())
        order.weights.append(array)
        start = order.weight_bytes
        order.weight_bytes += aligned(array.nbytes)
        return Place("constants", str(value.ty.dtype), start)

    def held(expr: Any) -> Any:
        if isinstance(expr, relax.Tuple):
            return tuple(held(f) for f in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return held(expr.tuple_value)[expr.index]
        if isinstance(expr, relax.Var):
            return tensors[expr]
        if expr not in constants:
            constants[expr] = constant(expr)
        return constants[expr]

    for var, name in zip(main.params, given, strict=True):
        tensors[var] = Place(name, str(var.ty.dtype))
    for block in main.body.blocks:
        for binding in block.bindings:
            var, value = binding.var, binding.value
            op = str(getattr(getattr(value, "op", None), "name", ""))
            if op == "relax.memory.alloc_storage":
                storages[var] = order.arena
                order.arena += aligned(memory.product(value.args[0].values))
            elif op == "relax.memory.alloc_tensor":
                start = storages[value.args[0]] + int(value.args[1].value)
                tensors[var] = Place("base", str(var.ty.dtype), start)
            elif op == "relax.builtin.alloc_tensor":
                tensors[var] = Place(_FRESH, str(var.ty.dtype), len(fresh))
                fresh.append(var)
            elif isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
                kernel = value.op.name_hint
                types = tuple(C_TYPES[str(a.ty.dtype)] for a in value.args)
                order.kernels[kernel] = types
                order.calls.append((kernel, [held(a) for a in value.args]))
            elif op in ("relax.reshape", "relax.memory.view"):
                tensors[var] = replace(held(value.args[0]), dtype=str(var.ty.dtype))
            elif isinstance(value, relax.Call) and not op.startswith("relax.memory.kill"):
                raise TargetError(f"`{op or value.op}` needs TVM's runtime, which C code lacks")
            elif not isinstance(value, relax.Call):
                tensors[var] = held(value)
    body = main.body.body
    result = body.fields if isinstance(body, relax.Tuple) else None
    whole = held(body)
    results = [held(f) for f in result] if result is not None else _listed(whole)
    kinds = _kinds(body.ty)
    homes: dict[int, Place] = {}
    for name, expr, kind in zip(made, results, kinds, strict=True):
        output = Place(name, expr.dtype)
        if expr.root == _FRESH and expr.offset not in homes:
            homes[expr.offset] = output
        else:
            order.copies.append((output, expr, memory.tensor_bytes(kind)))
    for number, var in enumerate(fresh):
        if number not in homes:
            homes[number] = place(str(var.ty.dtype), memory.tensor_bytes(var.ty))

    def placed(expr: Place) -> Place:
        return replace(homes[expr.offset], dtype=expr.dtype) if expr.root == _FRESH else expr

    order.calls = [(kernel, [placed(e) for e in args]) for kernel, args in order.calls]
    order.copies = [(to, placed(e), size) for to, e, size in order.copies]
    return order


def _listed(whole: Any) -> list[Any]:
    """Return the parts of what a function returns."""
    return list(whole) if isinstance(whole, tuple) else [whole]


def _kinds(kind: Any) -> list[Any]:
    return list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]
