"""``manifest.json``: its contents, and the checks it must pass (docs/artifact.md)."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from bnncc import report
from bnncc._version import __version__
from bnncc.errors import ArtifactError, TargetError
from bnncc.ir.datatypes import datatype
from bnncc.ir.demands import NO_LIMITS, Limits, limits_of_inputs
from bnncc.ir.empty import may_be_empty
from bnncc.options import ADDED, CHOICES, CompileOptions
from bnncc.runtime import container
from bnncc.targets import gpus, host
from bnncc.targets.host import normal_arch

if TYPE_CHECKING:
    from bnncc.ir.graph import Graph
    from bnncc.targets.spec import TargetSpec

Dim = int | str

DTYPES = (
    "float32", "float64", "float16", "bool",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """An input or output."""

    name: str
    """As in the model."""
    shape: tuple[Dim, ...]
    """A str is a symbolic dimension."""
    dtype: str
    """NumPy's name."""
    datatype: str = ""
    """Of an input that holds few values: their type (`bnncc.ir.datatypes`); else empty."""
    limits: Limits = NO_LIMITS
    """Of an input of integers that are indices or divisors."""
    bounds: tuple[tuple[str, int], ...] = ()
    """The greatest sizes of symbols in the shape, where there are any."""
    may_be_empty: tuple[str, ...] = ()
    """Symbols in the shape that may be 0; sizes are 1 or more otherwise."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> TensorInfo:
        """Return what a manifest says of an input or output."""
        shape = tuple(content["shape"])
        limits = NO_LIMITS
        if "limits" in content or "nonzero" in content:
            low, high = content.get("limits", (None, None))
            limits = Limits(low, high, content.get("nonzero", False))
        bounds = tuple(content.get("max_dims", {}).items())
        declared = content.get("datatype", "")
        empty = tuple(content.get("may_be_empty", ()))
        return cls(content["name"], shape, content["dtype"], declared, limits, bounds, empty)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"


def infos(graph: Graph, names: Sequence[str]) -> list[TensorInfo]:
    """Return descriptions of inputs or outputs of `graph`."""
    kinds = {i: graph.datatypes[i].name for i in graph.inputs if i in graph.datatypes}
    limits = limits_of_inputs(graph)
    return [
        TensorInfo(
            i, graph.types[i].shape, graph.types[i].dtype, kinds.get(i, ""),
            limits.get(i, NO_LIMITS),
            tuple((s, n) for s, n in graph.bounds.items() if s in graph.types[i].shape),
        )
        for i in names
    ]  # fmt: skip


def with_empty(
    inputs: Sequence[TensorInfo], physical: Graph, positive: AbstractSet[str], target: TargetSpec
) -> list[TensorInfo]:
    """Return descriptions of inputs that say which sizes may be 0.

    On GPUs none may: a kernel has at least one thread.
    """
    symbols = set() if target.kind == "cuda" else may_be_empty(physical, positive)
    held = [tuple(str(dim) for dim in info.shape if dim in symbols) for info in inputs]
    return [replace(i, may_be_empty=empty) for i, empty in zip(inputs, held, strict=True)]


def make(
    library: bytes,
    *,
    plan: report.Plan,
    model: str,
    target: TargetSpec,
    options: CompileOptions,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    selfcheck: bytes,
    weight_orders: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the contents of an artifact.

    Parameters
    ----------
    library : bytes
        ``lib.so``, from `bnncc.codegen.link.build_library`.
    plan : Plan
        What was compiled how.
    model : str
        The model's name, without folders.
    target : TargetSpec
        What it was compiled for.
    inputs, outputs : sequence of TensorInfo
        In the order of the VM function's parameters and results.
    selfcheck : bytes
        ``selfcheck.npz``, from `bnncc.runtime.selfcheck.pack`.
    weight_orders : mapping of str to str, optional
        Where records may have chosen them: `bnncc.verification.recorded.orders_of`.

    Returns
    -------
    manifest : dict
        Sealed with checksums.
    members : dict of str to bytes
        The other files of the artifact.
    """
    code = len(library) - plan.binary_bytes - plan.float_bytes
    content = {
        "format": container.FORMAT,
        "bnncc": __version__,
        "tvm": importlib.metadata.version("apache-tvm"),
        "model": model,
        "target": {
            "name": target.name,
            "triple": target.triple or host.triple() or f"{platform.machine()}-linux-gnu",
            "mcpu": target.mcpu,
            "features": sorted(target.features),
            "spec": asdict(target),
        },
        "inputs": [_info(t) for t in inputs],
        "outputs": [_info(t) for t in outputs],
        "semantics": {
            **{name: getattr(options, name) for name in CHOICES},
            "check_finite": options.check_finite,
            "input_uint8": [
                {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(u).items()}
                for u in options.input_uint8
            ],
            "input_transform": _transform(options, inputs),
            **({"in_place": dict(options.in_place)} if options.in_place else {}),
        },
        "options": {
            "threads": options.threads,
            "tuned": options.tuned,
            "records": len(options.records),
            "weight_orders": dict(weight_orders or {}),
        },
        "seed": options.seed,
        "report": report.build(
            plan, model=model, target=target.name, code=code, selfcheck=len(selfcheck)
        ),
    }
    members = {container.LIBRARY: library, container.SELFCHECK: selfcheck}
    return container.sealed(content, members), members


def _transform(options: CompileOptions, inputs: Sequence[TensorInfo]) -> dict[str, Any] | None:
    transform = options.input_transform
    if transform is None:
        return None
    found = transform.name or next(t.name for t in inputs if t.dtype == "uint8")
    return {**asdict(transform), "thresholds": list(transform.thresholds), "name": found}


def check(content: Any, path: str) -> None:
    """Refuse a manifest that lacks fields the rest of bnncc relies on, naming the first."""
    _Checker(path).manifest(content)


@dataclass(frozen=True)
class Machine:
    """A machine that is to run artifacts."""

    name: str
    """As messages call it."""
    arch: str
    """As `bnncc.targets.host.normal_arch` has it."""
    features: frozenset[str]
    """Of its processor."""
    tvm: str
    """Version of its TVM; empty if unknown."""
    system: str = "linux"
    """As `bnncc.targets.host.system` has it."""


def this_machine() -> Machine:
    """Describe this machine and its TVM."""
    try:
        tvm = importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        tvm = ""
    arch = normal_arch(platform.machine())
    return Machine("this machine", arch, host.features(), tvm, host.system())


def check_machine(content: Mapping[str, Any], path: str, machine: Machine) -> None:
    """Refuse an artifact that `machine` cannot run.

    Raises
    ------
    ArtifactError
        If major or minor version of TVM differ.
    TargetError
        If the architecture or operating system differs, or features are missing.
    """
    if machine.tvm and machine.tvm.split(".")[:2] != content["tvm"].split(".")[:2]:
        raise ArtifactError(
            f"{path}: was compiled with TVM {content['tvm']}, {machine.name} has TVM {machine.tvm}",
            hint="compile it again, or install the TVM it was compiled with",
        )
    target = content["target"]
    wanted, found = normal_arch(target["triple"].split("-")[0]), machine.arch
    if (system := host.system(target["triple"])) != machine.system:
        wanted, found = f"{wanted} with {system}", f"{found} with {machine.system}"
    if wanted != found:
        raise TargetError(
            f"{path}: is for {wanted} ({target['name']}), {machine.name} is {found}",
            hint="choose another with `bnncc compile --target`; `bnncc targets` lists all",
        )
    if codes := target["spec"].get("gpus", ()):
        here = machine.name == "this machine"
        why = gpus.missing(codes) if here else "GPUs cannot be used over RPC"
        if why:
            raise TargetError(
                f"{path}: needs an NVIDIA GPU for {', '.join(codes)}, but {why}",
                hint="choose another with `bnncc compile --target`; `bnncc targets` lists all",
            )
    missing = sorted(set(target["features"]) - machine.features)
    if missing:
        native = machine.name == "this machine"
        raise TargetError(
            f"{path}: needs CPU features {machine.name} lacks: {', '.join(missing)}",
            hint=f"it was compiled for `{target['name']}`; compile it with "
            + ("`--target native`" if native else "a `--target` that needs less"),
        )


def _info(tensor: TensorInfo) -> dict[str, Any]:
    content: dict[str, Any] = {
        "name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype,
    }  # fmt: skip
    if tensor.datatype:
        content["datatype"] = tensor.datatype
    if tensor.limits.low is not None:
        content["limits"] = [tensor.limits.low, tensor.limits.high]
    if tensor.limits.nonzero:
        content["nonzero"] = True
    if tensor.bounds:
        content["max_dims"] = dict(tensor.bounds)
    if tensor.may_be_empty:
        content["may_be_empty"] = list(tensor.may_be_empty)
    return content


@dataclass(frozen=True)
class _Checker:
    """Checks of JSON data, each naming the field at fault."""

    path: str

    def manifest(self, content: Any) -> None:
        for key in ("bnncc", "tvm", "model"):
            self.typed(content, key, str)
        target = self.typed(content, "target", dict)
        for key in ("name", "triple", "mcpu"):
            self.typed(target, key, str, "target.")
        self.typed(target, "spec", dict, "target.")
        for feature in self.typed(target, "features", list, "target."):
            self.require(isinstance(feature, str), "target.features")
        for key in ("inputs", "outputs"):
            tensors = self.typed(content, key, list)
            for tensor in tensors:
                self.tensor(tensor, key)
            names = [tensor["name"] for tensor in tensors]
            self.require(len(set(names)) == len(names), f"{key} (a name occurs twice)")
        semantics = self.typed(content, "semantics", dict)
        self.typed(semantics, "check_finite", bool, "semantics.")
        for name in CHOICES:
            if name in semantics or name not in ADDED:
                self.typed(semantics, name, str, "semantics.")
        if "in_place" in semantics:
            pairs = self.typed(semantics, "in_place", dict, "semantics.")
            for names, key in ((pairs.keys(), "inputs"), (pairs.values(), "outputs")):
                known = [tensor["name"] for tensor in content[key]]
                self.require(all(n in known for n in names), "semantics.in_place")
        self.typed(self.typed(content, "options", dict), "tuned", bool, "options.")
        self.report(self.typed(content, "report", dict))

    def report(self, content: Any) -> None:
        content = report.with_new_keys(content)
        self.require(content.get("format") == report.FORMAT, "report.format")
        summary = self.typed(content, "summary", dict, "report.")
        for kind in report.KINDS:
            self.typed(summary, kind, int, "report.summary.")
            self.typed(summary, f"{kind}_macs", int, "report.summary.")
        for key in ("kernels", "tuned"):
            self.typed(summary, key, int, "report.summary.")
        sizes = self.typed(content, "bytes", dict, "report.")
        for key in ("code", "binary", "float", "selfcheck"):
            self.typed(sizes, key, int, "report.bytes.")
        memory = self.typed(content, "memory", dict, "report.")
        for key in ("arena", "workspace", "high_water"):
            self.typed(memory, f"{key}_bytes", int, "report.memory.")
        self.typed(memory, "high_water_kernel", str, "report.memory.")
        for layer in self.typed(content, "layers", list, "report."):
            for key in ("name", "op", "kind", "reason", "remedy", "kernel"):
                self.typed(layer, key, str, "report.layers.")
            self.typed(layer, "macs", int, "report.layers.")
            self.shape(self.typed(layer, "output_shape", list, "report.layers."), "report.layers")
        for at, kernel in enumerate(self.typed(content, "kernels", list, "report.")):
            for key in ("name", "op"):
                self.typed(kernel, key, str, "report.kernels.")
            for key in ("macs", *(f"{k}_bytes" for k in ("input", "output", "workspace", "live"))):
                self.typed(kernel, key, int, "report.kernels.")
            for number in kernel.get("reference_memory") or []:
                self.require(type(number) is int, "report.kernels.reference_memory")
            for position in self.typed(kernel, "zero_plane_args", list, "report.kernels."):
                self.require(isinstance(position, int), "report.kernels.zero_plane_args")
            for source in kernel.get("reads", []):
                ok = type(source) is int and 0 <= source < at
                self.require(ok, "report.kernels.reads")
            estimate = kernel.get("estimated_us")
            ok = estimate is None or (type(estimate) in (int, float) and 0 <= estimate < 1e12)
            self.require(ok, "report.kernels.estimated_us")
            for layer in self.typed(kernel, "layers", list, "report.kernels."):
                self.require(isinstance(layer, str), "report.kernels.layers")
            for node in kernel.get("nodes", []):
                self.require(isinstance(node, str), "report.kernels.nodes")
            for arg in self.typed(kernel, "args", list, "report.kernels."):
                self.shape(self.typed(arg, "shape", list, "report.kernels.args."), "args.shape")
                self.require(arg.get("dtype") in DTYPES, "report.kernels.args.dtype")
            for size in kernel.get("sizes", []):
                ok = isinstance(size, list) and list(map(type, size)) == [int, str]
                self.require(ok, "report.kernels.sizes")
        for item in self.typed(content, "sign_zero", list, "report."):
            for key in ("node", "decision"):
                self.typed(item, key, str, "report.sign_zero.")
        for key in ("passes", "detail") if "compared" in content else ():
            self.typed(content["compared"], key, str, "report.compared.")
        for line in self.typed(content, "warnings", list, "report."):
            self.require(isinstance(line, str), "report.warnings")

    def tensor(self, tensor: Any, where: str) -> None:
        self.typed(tensor, "name", str, f"{where}.")
        self.shape(self.typed(tensor, "shape", list, f"{where}."), f"{where}.shape")
        self.require(self.typed(tensor, "dtype", str, f"{where}.") in DTYPES, f"{where}.dtype")
        declared = tensor.get("datatype", "")
        ok = not declared or (isinstance(declared, str) and datatype(declared) is not None)
        self.require(ok, f"{where}.datatype")
        limits = tensor.get("limits", [0, 0])
        ok = isinstance(limits, list) and len(limits) == 2 and all(type(v) is int for v in limits)
        self.require(ok, f"{where}.limits")
        self.require(type(tensor.get("nonzero", False)) is bool, f"{where}.nonzero")
        bounds = tensor.get("max_dims", {})
        ok = isinstance(bounds, dict) and all(type(v) is int for v in bounds.values())
        self.require(ok, f"{where}.max_dims")
        empty = tensor.get("may_be_empty", [])
        ok = isinstance(empty, list) and all(isinstance(symbol, str) for symbol in empty)
        self.require(ok, f"{where}.may_be_empty")

    def shape(self, dims: list[Any], where: str) -> None:
        for dim in dims:
            ok = isinstance(dim, str) or (type(dim) is int and 0 <= dim < 2**40)
            self.require(ok, where)

    def typed(self, content: Any, key: str, kind: type, where: str = "") -> Any:
        value = content.get(key) if isinstance(content, dict) else None
        self.require(type(value) is kind, where + key)
        return value

    def require(self, ok: bool, where: str) -> None:
        if not ok:
            raise ArtifactError(
                f"{self.path}: manifest.json: field `{where}` is missing or wrong",
                hint="compile it again",
            )
