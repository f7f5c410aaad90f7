"""What a schedule must know about a machine, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TargetSpec:
    """One kind of machine that bnncc can make code for."""

    name: str
    """What the user calls it."""
    kind: str
    """What makes code: TVM's generators ``llvm`` and ``cuda``, or ``c``, portable C99."""
    mcpu: str
    """LLVM's name of the processor; for GPUs, that of the machine they are in."""
    mattr: tuple[str, ...] = ()
    """Features added to (``+x``) or taken from (``-x``) those of `mcpu`."""
    triple: str = ""
    """LLVM's target triple; empty for the machine that compiles."""
    features: tuple[str, ...] = ()
    """CPU features, spelled as in Linux' ``/proc/cpuinfo``, without which the code does not run."""
    vector_bits: int = 128
    """Width of a vector register."""
    vector_registers: int = 16
    """How many there are."""
    popcount: str = "bytes"
    """How bits of a vector are counted: ``vector`` (one instruction per vector of 32-bit lanes),
    ``bytes`` (XOR, then table lookup in bytes, then sums), ``lookup`` (one lookup, by x86's
    ``pshufb`` or WebAssembly's ``i8x16.swizzle``, takes the place of XOR and count; where that does
    not apply, as ``bytes``),
    ``neon`` (NEON's count of each byte, summed in bytes) or ``neon-dot`` (the same count, summed
    by the dot product of Armv8.2)."""
    float_unit: bool = True
    """Whether there are instructions for floats; if not, functions compute them."""
    float_abi: str = ""
    """``hard`` where floats are passed in registers and LLVM must be told so (32-bit Arm)."""
    abi: str = ""
    """LLVM's name of the calling convention, where the processor has several (RISC-V)."""
    base: str = ""
    """The target of the catalog that this one was made from, if it is none itself."""
    l1_bytes: int = 32 * 1024
    """First-level data cache of a core."""
    l2_bytes: int = 1024 * 1024
    """Second-level cache of a core."""
    gpus: tuple[str, ...] = ()
    """NVIDIA's architectures that the code is for, for example ``sm_80``."""
    engine: str = ""
    """How a GPU multiplies bits: ``simt`` (in ordinary threads), ``mma`` (tensor cores), ``wgmma``
    (those of sm_90a), or ``int8`` (tensor cores that have no products of bits; as ``mma``, with
    operands that take more registers)."""

    @property
    def family(self) -> str:
        """The target whose tuning records are for this one too."""
        return self.base or self.name

    @property
    def has_runtime(self) -> bool:
        """Whether TVM's runtime exists for this target: as wheels, for two architectures."""
        return self.kind != "c" and self.arch in ("", "x86_64", "aarch64")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> TargetSpec:
        """Return the target with these fields, of which JSON makes lists."""
        values: dict[str, Any]
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**values)

    @property
    def default_format(self) -> str:
        """What `bnncc compile` writes: ``artifact``, ``wasm`` or ``c``."""
        if self.has_runtime:
            return "artifact"
        return "wasm" if self.arch == "wasm32" else "c"

    @property
    def saves_memory(self) -> bool:
        """Whether a network in C should take less memory rather than less time: without Linux."""
        return self.default_format == "c" and "linux" not in self.triple

    @property
    def has_known_size(self) -> bool:
        """Whether bnncc makes the machine code of a network in C: then it knows flash and stack."""
        return self.kind == "llvm" and self.arch != "wasm32"

    @property
    def arch(self) -> str:
        """The architecture that the triple begins with; empty for the machine that compiles."""
        return self.triple.split("-")[0]

    @property
    def scalar(self) -> bool:
        """Whether there are no vectors: unrolled lanes would be long code, so they are loops."""
        return self.vector_bits == 32

    def registers_per_vector(self, lanes: int = 16) -> int:
        """Return how many registers hold one vector of `lanes` values of 32 bits."""
        return max(1, lanes * 32 // self.vector_bits)
