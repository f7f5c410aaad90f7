"""The targets bnncc knows by name, and files that describe others."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bnncc.errors import TargetError, UnknownTarget
from bnncc.targets import gpus, host
from bnncc.targets.spec import TargetSpec

_ARM_TRIPLE = "aarch64-unknown-linux-gnu"
_X86_TRIPLE = "x86_64-unknown-linux-gnu"
_V2 = ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3")
_V3 = (*_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AMX = (
    "avx512_vpopcntdq", "avx512_vnni", "avx512_bf16", "gfni", "amx_tile", "amx_int8", "amx_bf16",
)  # fmt: skip
LLVM_NAMES = {
    "avx512_vpopcntdq": "avx512vpopcntdq", "avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni",
    "avx512_bf16": "avx512bf16", "gfni": "gfni", "amx_tile": "amx-tile", "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16", "asimd": "neon", "asimddp": "dotprod", "neon": "neon", "dsp": "dsp",
    "mve": "mve", "simd128": "simd128", "zvbb": "zvbb",
}  # fmt: skip
"""LLVM's names of features that kernels make use of where they are listed."""

_AMX_MATTR = tuple(f"+{LLVM_NAMES[feature]}" for feature in _AMX)

_ARM64 = TargetSpec(
    "arm64",
    "llvm",
    "generic",
    mattr=("+neon",),
    triple=_ARM_TRIPLE,
    features=("asimd",),
    vector_registers=32,
    popcount="neon",
    l2_bytes=512 * 1024,
)
_CORTEX_M = TargetSpec(
    "cortex-m4",
    "llvm",
    "cortex-m4",
    triple="thumbv7em-unknown-none-eabihf",
    features=("thumb2", "dsp", "fpv4-sp"),
    vector_bits=32,
    float_abi="hard",
    l1_bytes=16 * 1024,
    l2_bytes=256 * 1024,
)
_RISCV32 = TargetSpec(
    "riscv32imc",
    "llvm",
    "generic-rv32",
    mattr=("+m", "+c"),
    triple="riscv32-unknown-none-elf",
    features=("rv32imc",),
    vector_bits=32,
    float_unit=False,
    abi="ilp32",
    l1_bytes=16 * 1024,
    l2_bytes=256 * 1024,
)
_RISCV64 = dataclasses.replace(
    _RISCV32,
    name="riscv64gcv",
    float_unit=True,
    mcpu="generic-rv64",
    mattr=("+m", "+a", "+f", "+d", "+c", "+v"),
    triple="riscv64-unknown-linux-gnu",
    features=("rv64gcv",),
    vector_bits=128,
    vector_registers=32,
    abi="lp64d",
    l2_bytes=1024 * 1024,
)
_WASM = TargetSpec(
    "wasm32",
    "llvm",
    "generic",
    triple="wasm32-unknown-unknown",
    features=("bulk-memory",),
    vector_bits=32,
    popcount="bytes",
)
_V2_TARGET = TargetSpec(
    "x86-64-v2", "llvm", "x86-64-v2", triple=_X86_TRIPLE, features=_V2, popcount="lookup"
)
_V4_TARGET = dataclasses.replace(
    _V2_TARGET,
    name="x86-64-v4",
    mcpu="x86-64-v4",
    mattr=("-prefer-256-bit",),
    features=_V4,
    vector_bits=512,
    vector_registers=32,
)

CATALOG = {
    spec.name: spec
    for spec in (
        TargetSpec(
            "armv7",
            "llvm",
            "cortex-a7",
            mattr=("+neon",),
            triple="armv7l-unknown-linux-gnueabihf",
            features=("neon", "vfpv4"),
            popcount="neon",
            float_abi="hard",
            l2_bytes=512 * 1024,
        ),
        dataclasses.replace(_ARM64, name="arm64-a53", mcpu="cortex-a53", mattr=()),
        # cortex-a76 would take instructions that A72 lacks
        dataclasses.replace(
            _ARM64, name="arm64-a76", mcpu="cortex-a72", mattr=(), l2_bytes=1024 * 1024
        ),
        _ARM64,
        dataclasses.replace(
            _ARM64,
            name="arm64-dotprod",
            mattr=("+v8.2a", "+neon", "+dotprod"),
            features=("asimd", "asimddp"),
            popcount="neon-dot",
            l2_bytes=1024 * 1024,
        ),
        _V2_TARGET,
        dataclasses.replace(
            _V2_TARGET, name="x86-64-v3", mcpu="x86-64-v3", features=_V3, vector_bits=256
        ),
        _V4_TARGET,
        dataclasses.replace(
            _V4_TARGET,
            name="x86-64-v4-vpopcntdq",
            mattr=("+avx512vpopcntdq", "-prefer-256-bit"),
            features=(*_V4, "avx512_vpopcntdq"),
            popcount="vector",
        ),
        dataclasses.replace(
            _V4_TARGET,
            name="x86-64-v4-amx",
            mattr=(*_AMX_MATTR, "-prefer-256-bit"),
            features=(*_V4, *_AMX),
            popcount="vector",
            l1_bytes=48 * 1024,
            l2_bytes=2 * 1024 * 1024,
        ),
        dataclasses.replace(
            _CORTEX_M,
            name="cortex-m0plus",
            mcpu="cortex-m0plus",
            triple="thumbv6m-unknown-none-eabi",
            features=("thumb",),
            float_unit=False,
            float_abi="",
        ),
        _CORTEX_M,
        dataclasses.replace(
            _CORTEX_M, name="cortex-m7", mcpu="cortex-m7", features=("thumb2", "dsp", "fpv5")
        ),
        dataclasses.replace(
            _CORTEX_M,
            name="cortex-m33",
            mcpu="cortex-m33",
            triple="thumbv8m.main-unknown-none-eabihf",
            features=("thumb2", "dsp", "fpv5-sp"),
        ),
        dataclasses.replace(
            _CORTEX_M,
            name="cortex-m55",
            mcpu="cortex-m55",
            triple="thumbv8.1m.main-unknown-none-eabihf",
            features=("thumb2", "fpv5", "mve"),
            vector_bits=128,
            vector_registers=8,
        ),
        _RISCV32,
        _RISCV64,
        dataclasses.replace(
            _RISCV64,
            name="riscv64gcv-zvbb",
            mattr=(*_RISCV64.mattr, "+zvbb"),
            features=("rv64gcv", "zvbb"),
        ),
        _WASM,
        dataclasses.replace(
            _WASM,
            name="wasm32-simd128",
            mattr=("+simd128",),
            features=("bulk-memory", "simd128"),
            vector_bits=128,
            popcount="lookup",
        ),
        TargetSpec("c99", "c", "any", vector_bits=32, vector_registers=16),
        *gpus.TARGETS,
    )
}
"""Named targets; those of one architecture from the most to the least portable."""

ALIASES = {
    "arm64-a55": "arm64-a53",
    "arm64-a72": "arm64-a76",
    "arm64-neoverse-n1": "arm64-a76",
}
"""Other processors that a target of the catalog is for."""

_ARCHITECTURES = {
    **dict.fromkeys(("x86", "x86-64", "x64", "amd64", "avx2"), "x86-64-v3"),
    **dict.fromkeys(("sse4", "sse4.2"), "x86-64-v2"),
    **dict.fromkeys(("avx512", "avx-512"), "x86-64-v4"),
    **dict.fromkeys(("arm", "aarch64", "armv8", "neon"), "arm64"),
    **dict.fromkeys(("arm32", "armhf"), "armv7"),
    **dict.fromkeys(("cortex-m", "thumb"), "cortex-m4"),
    **dict.fromkeys(("riscv", "riscv64", "rv64"), "riscv64gcv"),
    **dict.fromkeys(("wasm", "webassembly"), "wasm32-simd128"),
}
"""The target to suggest for the name of an architecture or of instructions."""

NATIVE = "native"

_CORES = {
    **dict.fromkeys(("0xd03", "0xd04"), "arm64-a53"),  # Cortex-A53, A35
    **dict.fromkeys(("0xd07", "0xd08", "0xd09"), "arm64-a76"),  # Cortex-A57, A72, A73
}
"""Targets for Arm's cores without dot products, by number."""

_DOT_PRODUCTS = "avx512_vnni", "avx512_bf16"
"""Features that only ``--first-layer`` makes use of."""

_CHOICES = {
    "kind": ("llvm", "cuda", "c"),
    "vector_bits": (128, 256, 512, 32),
    "popcount": ("vector", "bytes", "lookup", "neon", "neon-dot"),
    "float_abi": ("", "hard", "soft"),
    "abi": ("", "ilp32", "ilp32f", "ilp32d", "ilp32e", "lp64", "lp64f", "lp64d", "lp64e"),
    "engine": ("", "simt", "mma", "wgmma", "int8"),
}
"""Possible values of fields of `TargetSpec`; 32-bit vectors are none."""

_NAME = re.compile(r"[^./\\\0-\x1f][^/\\\0-\x1f]*")
"""What a file or folder can be named after."""


def names() -> list[str]:
    """Return the names that `resolve` takes."""
    return [*CATALOG, NATIVE]


def resolve(name: str) -> TargetSpec:
    """Return the target called `name`, or described by the file `name`.

    Parameters
    ----------
    name : str
        A name from `names`, or the path of a JSON file with the fields of `TargetSpec`.

    Returns
    -------
    TargetSpec
        For ``native``, the most capable target that this machine runs, with its cache sizes and
        products of several operands.

    Raises
    ------
    UnknownTarget
        If there is no such target.
    TargetError
        If the file is not right.
    """
    name = ALIASES.get(name, name)
    if name in CATALOG:
        return CATALOG[name]
    if name == NATIVE:
        return native()
    if name.endswith(".json"):
        return load(Path(name))
    architecture = _ARCHITECTURES.get(name.lower().replace("_", "-"))
    close = (
        [architecture] if architecture else difflib.get_close_matches(name, [*names(), *ALIASES], 1)
    )
    hint = f"did you mean `{close[0]}`? " if close else ""
    if name.startswith("cuda"):  # a number that is near is another GPU
        hint = f"GPUs are {', '.join(k for k, s in CATALOG.items() if s.kind == 'cuda')}; "
    raise UnknownTarget(f"unknown target `{name}`", hint=f"{hint}`bnncc targets` lists all")


def native() -> TargetSpec:
    """Return the most capable target of the catalog that this machine runs, with its details.

    Raises
    ------
    TargetError
        If this machine runs none of them.
    """
    features = host.features()
    own = [CATALOG[_CORES[host.core()]]] if host.core() in _CORES else []
    for spec in (*own, *reversed(CATALOG.values())):
        if spec.kind != "llvm":
            continue
        if features.issuperset(spec.features):
            l1, l2 = host.cache_bytes()
            more = [f for f in _DOT_PRODUCTS if f in features and f not in spec.features]
            more = more if spec.vector_bits == 512 else []
            return dataclasses.replace(
                spec,
                name=NATIVE,
                base=spec.family,
                triple=host.triple() or spec.triple,
                mattr=(*spec.mattr, *(f"+{LLVM_NAMES[f]}" for f in more)),
                features=(*spec.features, *more),
                l1_bytes=l1 or spec.l1_bytes,
                l2_bytes=l2 or spec.l2_bytes,
            )
    raise TargetError(
        "bnncc has no schedules for this machine's processor",
        hint="give a target by name: `bnncc targets` lists all",
    )


def missing_features(spec: TargetSpec) -> list[str]:
    """Return what `spec` needs and this machine lacks: empty if it runs the code."""
    have = host.features()
    missing = [feature for feature in spec.features if feature not in have]
    return missing + (["such a GPU"] if spec.gpus and gpus.missing(spec.gpus) else [])


def load(path: Path) -> TargetSpec:
    """Read a target file: a JSON object with the fields of `TargetSpec`.

    Fields that are left out are taken from the target named in ``base``, if there is one.

    Returns
    -------
    TargetSpec
        The target; its name is the file's unless it has a ``name``.

    Raises
    ------
    TargetError
        If the file cannot be read, or a field is unknown, missing or of the wrong type.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError(f"target file {path}: {error.strerror}") from error
    except ValueError as error:
        raise TargetError(f"target file {path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise TargetError(f"target file {path}: found no JSON object")
    values: dict[str, Any] = {}
    if name := raw.pop("base", ""):
        base = _base(path, name)
        values = {**dataclasses.asdict(base), "base": base.family}
    values = {**values, "name": path.stem, **raw}
    values.setdefault("kind", "llvm")
    _check(path, values)
    _match_features(path, values, raw)
    return TargetSpec.of(values)


def _base(path: Path, name: Any) -> TargetSpec:
    """Return the target with this name; files have none, for one could be its own base.

    Raises
    ------
    TargetError
        If there is none.
    """
    if isinstance(name, str) and not name.endswith(".json"):
        try:
            return resolve(name)
        except UnknownTarget as error:
            raise TargetError(f"target file {path}: `base`: {error}", hint=error.hint) from error
    raise TargetError(
        f"target file {path}: `base` is {name!r}, expected the name of a target",
        hint="`bnncc targets` lists all",
    )


def _match_features(path: Path, values: dict[str, Any], raw: Mapping[str, Any]) -> None:
    """Have features and LLVM's names say the same: LLVM aborts on instructions unknown to it.

    What ``mattr`` takes away is not inherited from the base, and what the file lists is added.

    Raises
    ------
    TargetError
        If the file lists what ``mattr`` takes away.
    """
    mattr, features = list(values.get("mattr", ())), list(values.get("features", ()))
    lost = [f for f in features if f"-{LLVM_NAMES.get(f, f)}" in mattr]
    if lost and "features" in raw:
        raise TargetError(
            f"target file {path}: `features` has {lost[0]}, which `mattr` takes away",
            hint="leave one of them out",
        )
    if "features" in raw:
        names = [f"+{LLVM_NAMES[feature]}" for feature in features if feature in LLVM_NAMES]
        mattr += [name for name in dict.fromkeys(names) if name not in mattr]
    values.update(mattr=mattr, features=[f for f in features if f not in lost])


def _check(path: Path, values: dict[str, Any]) -> None:
    fields = {field.name: field for field in dataclasses.fields(TargetSpec)}
    for name, value in values.items():
        if name not in fields:
            close = difflib.get_close_matches(name, fields, 1)
            hint = f"did you mean `{close[0]}`?" if close else f"fields: {', '.join(fields)}"
            raise TargetError(f"target file {path}: unknown field `{name}`", hint=hint)
        kind = str(fields[name].type)
        sequence = isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)
        number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        checks = {"str": isinstance(value, str), "int": number, "bool": isinstance(value, bool)}
        if not checks.get(kind, sequence):
            words = {"str": "a text", "int": "a whole number above 0", "bool": "true or false"}
            wanted = words.get(kind, "a list of texts")
            raise TargetError(f"target file {path}: `{name}` is {value!r}, expected {wanted}")
    if "mcpu" not in values:
        raise TargetError(f"target file {path}: `mcpu` is missing")
    for name, known in _CHOICES.items():
        if (value := values.get(name, known[0])) not in known:
            said = ", ".join(str(choice) for choice in known if choice)
            raise TargetError(f"target file {path}: `{name}` is `{value}`, not one of {said}")
    if not _NAME.fullmatch(values["name"]):
        raise TargetError(
            f"target file {path}: `name` is {values['name']!r}, which no folder of records can have"
        )
    if signless := [text for text in values.get("mattr", ()) if text[:1] not in ("+", "-")]:
        raise TargetError(
            f"target file {path}: `mattr` has `{signless[0]}`, expected +FEATURE or -FEATURE"
        )
    if (values["kind"] == "cuda") != bool(values.get("gpus")):
        raise TargetError(
            f"target file {path}: `kind` is `{values['kind']}`, but `gpus` has "
            f"{', '.join(values.get('gpus', ())) or 'none'}",
            hint="take a target such as cuda-sm80 as the `base` for a GPU",
        )
    if unknown := [gpu for gpu in values.get("gpus", ()) if gpu not in gpus.ARCHITECTURES]:
        raise TargetError(
            f"target file {path}: `gpus` has `{unknown[0]}`, not one of "
            f"{', '.join(gpus.ARCHITECTURES)}"
        )
