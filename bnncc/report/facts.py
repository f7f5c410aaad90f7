"""The report of a compilation as data (`Plan`) and as JSON (docs/report.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

FORMAT = 2
RENAMED = {
    "right": "passed",
    "difference": "max_abs_error",
    "bitstream": "reference_memory",
    "zeros": "zero_plane_args",
}
"""Keys of format 1 and their present names. The old ones are deprecated, and still written."""
KINDS = ("binary", "few_bit", "float")
FLOAT_BITS = 32
"""Bits of values that are not quantized."""

Dim = int | str


@dataclass(frozen=True)
class Layer:
    """One Conv, Gemm or MatMul node of the model file."""

    name: str
    op: str
    """`name`, `op`: as in the file."""
    kind: str
    """``binary``, ``few_bit`` or ``float``: how it is computed."""
    reason: str = ""
    remedy: str = ""
    """`reason`, `remedy`: why it is not binary, and what would change that; empty for binary
    layers."""
    macs: int = 0
    """Multiply-adds for one batch element (symbolic dimensions count as 1)."""
    kernel: str = ""
    """The PrimFunc that computes it."""
    output_shape: tuple[Dim, ...] = ()
    weight_shape: tuple[Dim, ...] = ()
    """`output_shape`, `weight_shape`: as in the file."""
    bits: tuple[int, int] = (FLOAT_BITS, FLOAT_BITS)
    """Bits per value of data and weight; 32 for float. Weights of float layers have fewer if they
    are stored as codes of so many bits."""
    assumed: str = ""
    """What an option assumes of it beyond the model."""

    def of_kernel(self, kernel: str, code_bits: int = 0) -> Layer:
        """Return the layer with its kernel, and the bits of its weights if they are codes."""
        if not code_bits:
            return replace(self, kernel=kernel)
        said = f"{self.reason}; weights are stored in {code_bits} bit{'s' if code_bits > 1 else ''}"
        return replace(self, kernel=kernel, bits=(FLOAT_BITS, code_bits), reason=said)


@dataclass(frozen=True)
class KernelArg:
    """One tensor a kernel is called with: weights, activations and outputs alike."""

    shape: tuple[Dim, ...]
    dtype: str


@dataclass(frozen=True)
class Kernel:
    """One PrimFunc call of the compiled network."""

    name: str
    """The PrimFunc's symbol in ``lib.so``."""
    layers: tuple[str, ...] = ()
    """Names of the layers it computes; empty if none."""
    macs: int = 0
    """Multiply-adds of these layers."""
    args: tuple[KernelArg, ...] = ()
    """All its tensors in call order, as the memory plan gives them."""
    op: str = ""
    """Kind: ``binary_conv2d``, ``conv2d``, ``elementwise``, ..."""
    tuned: bool = False
    """Whether a tuning record chose its schedule."""
    zero_plane_args: tuple[int, ...] = ()
    """Which of `args` hold planes of exact zeros, all 0 in the usual case."""
    input_bytes: int = 0
    output_bytes: int = 0
    """`input_bytes`, `output_bytes`: of its activations; stores over an input do not count as
    output."""
    workspace_bytes: int = 0
    """Scratch memory of all threads that the kernel is compiled for."""
    live_bytes: int = 0
    """Memory in use while it runs: scratch memory, its tensors and those that later kernels read,
    without the network's inputs."""
    reference_memory: tuple[int, int] | None = None
    """Bytes that a binary convolution takes by equations 16 and 17 of BitStream."""
    estimated_us: float | None = None
    """Estimated microseconds on one thread, within a factor of about two; None if unknown."""
    reads: tuple[int, ...] = ()
    """Positions in the plan of the kernels whose results it reads."""
    band_rows: int = 0
    """How many rows it computes at a time, if not all (`bnncc.codegen.row_wise`); else 0."""
    sizes: tuple[tuple[int, str], ...] = ()
    """Other arguments, which are symbolic sizes: position in the call, and symbol."""
    nodes: tuple[str, ...] = ()
    """Nodes of the model that it computes, its main one first; see docs/report.md."""


@dataclass(frozen=True)
class SignZero:
    """Decision about exact zeros at one sign, as a short sentence."""

    node: str
    decision: str


@dataclass(frozen=True)
class Compared:
    """Whether the results of the passes were compared with the model."""

    passes: str
    """``whole``, ``smaller`` or ``none``: for inputs of its own size, of smaller ones, or not at
    all."""
    detail: str = ""
    """The smaller inputs, or the reason for no comparison; else empty."""


@dataclass(frozen=True)
class Plan:
    """All facts about a compiled network, except for its file."""

    layers: tuple[Layer, ...]
    """Every Conv, Gemm and MatMul of the file, in its order."""
    kernels: tuple[Kernel, ...]
    """In call order."""
    arena_bytes: int
    """Activation memory of the plan (batch 1 where symbolic)."""
    binary_bytes: int
    float_bytes: int
    """`binary_bytes`, `float_bytes`: constants inside the library: packed weights (of few
    bits, and codes, too), and all others."""
    sign_zero: tuple[SignZero, ...] = ()
    """One per sign whose input can be zero."""
    warnings: tuple[str, ...] = ()
    """One line each."""
    compared: Compared = Compared("none", "nobody asked")
    """Whether the passes were checked."""


def build(plan: Plan, *, model: str, target: str, code: int, selfcheck: int) -> dict[str, Any]:
    """Return the report as plain data, without the sizes known only with the whole file.

    Parameters
    ----------
    plan : Plan
        From the driver.
    model, target : str
        Their names.
    code : int
        Bytes of the library that are not constants.
    selfcheck : int
        Bytes of ``selfcheck.npz``.

    Returns
    -------
    dict
        See docs/report.md.
    """
    count = Counter(layer.kind for layer in plan.layers)
    high = max(plan.kernels, key=lambda kernel: kernel.live_bytes, default=None)
    macs: Counter[str] = Counter()
    for layer in plan.layers:
        macs[layer.kind] += layer.macs
    return {
        "format": FORMAT,
        "model": model,
        "target": target,
        "summary": {
            **{kind: count[kind] for kind in KINDS},
            **{f"{kind}_macs": macs[kind] for kind in KINDS},
            "kernels": len(plan.kernels),
            "tuned": sum(kernel.tuned for kernel in plan.kernels),
        },
        "layers": [asdict(layer) for layer in plan.layers],
        "kernels": [asdict(kernel) for kernel in plan.kernels],
        "memory": {
            "arena_bytes": plan.arena_bytes,
            "workspace_bytes": max((k.workspace_bytes for k in plan.kernels), default=0),
            "high_water_bytes": high.live_bytes if high else 0,
            "high_water_kernel": high.name if high else "",
        },
        "bytes": {
            "code": code,
            "binary": plan.binary_bytes,
            "float": plan.float_bytes,
            "selfcheck": selfcheck,
        },
        "sign_zero": [asdict(item) for item in plan.sign_zero],
        "compared": asdict(plan.compared),
        "warnings": list(plan.warnings),
    }


def with_old_keys(data: Any) -> Any:
    """Return `data` with the deprecated keys in addition to their replacements."""
    if isinstance(data, list | tuple):
        return [with_old_keys(item) for item in data]
    if not isinstance(data, Mapping):
        return data
    made = {key: with_old_keys(value) for key, value in data.items()}
    return made | {old: made[new] for old, new in RENAMED.items() if new in made}


def with_new_keys(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of an artifact, possibly of format 1, in the present form."""
    if report.get("format") != 1 or not isinstance(report.get("kernels"), list):
        return dict(report)
    kernels = [
        {RENAMED.get(k, k): v for k, v in kernel.items()} if isinstance(kernel, dict) else kernel
        for kernel in report["kernels"]
    ]
    return {**report, "format": FORMAT, "kernels": kernels}


def with_file_size(report: Mapping[str, Any], total: int) -> dict[str, Any]:
    """Return `report` with ``bytes.manifest`` (and the container around it) and ``bytes.total``."""
    parts = {k: v for k, v in report["bytes"].items() if k not in ("manifest", "total")}
    parts["manifest"] = total - sum(parts.values())
    return {**report, "bytes": {**parts, "total": total}}
