"""What the machine at hand offers: from Linux' own tables, or as macOS and Windows tell it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import sys
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_BOARD = Path("/proc/device-tree/model")
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1024, "M": 1024 * 1024}
_SYSTEMS = {"darwin": "macos", "win32": "windows"}
_TRIPLES = {"macos": "apple-darwin", "windows": "pc-windows-msvc"}

_HWCAP = 16  # what getauxval calls AT_HWCAP
_HWCAP_NAMES = (
    *("fp", "asimd", "evtstrm", "aes", "pmull", "sha1", "sha2", "crc32", "atomics", "fphp"),
    *("asimdhp", "cpuid", "asimdrdm", "jscvt", "fcma", "lrcpc", "dcpop", "sha3", "sm3", "sm4"),
    *("asimddp", "sha512", "sve", "asimdfhm", "dit", "uscat", "ilrcpc", "flagm", "ssbs", "sb"),
    *("paca", "pacg"),
)
"""Linux' names of the bits of AT_HWCAP on 64-bit Arm, the lowest first."""

_WINDOWS_NAMES = {
    13: "pni", 14: "cx16", 17: "xsave", 36: "ssse3", 37: "sse4_1", 38: "sse4_2 popcnt lahf_lm",
    39: "avx", 40: "avx2 abm bmi1 bmi2 f16c fma movbe",
}  # fmt: skip
"""By number, what ``IsProcessorFeaturePresent`` tells; with what all processors add that have it.
It tells nothing of AVX-512 beyond its foundation."""


_WINDOWS_MODEL = re.compile(r"\w+ Family (\d+) Model (\d+) Stepping (\d+), (\w+)")
"""What ``PROCESSOR_IDENTIFIER`` looks like on x86."""


@functools.cache
def _facts() -> dict[str, str]:
    """Return what is known of the first processor, by Linux' names; empty if nothing is."""
    return {"linux": _linux_facts, "macos": _macos_facts, "windows": _windows_facts}[system()]()


def _linux_facts() -> dict[str, str]:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = [(key.strip(), value.strip()) for key, _, value in (x.partition(":") for x in lines)]
    return dict(reversed(pairs))


def _macos_facts() -> dict[str, str]:
    """Ask macOS, which knows Apple's cores by a number for each family of them."""
    part = int.from_bytes(_sysctl("hw.cpufamily"), "little")
    facts = {"model name": _sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode()}
    if part:
        revision = int.from_bytes(_sysctl("hw.cpusubfamily"), "little")
        facts |= {"CPU implementer": "0x61", "CPU part": hex(part), "CPU revision": str(revision)}
    return facts


def _windows_facts() -> dict[str, str]:
    name = os.environ.get("PROCESSOR_IDENTIFIER", "")
    found = _WINDOWS_MODEL.fullmatch(name)
    keys = ("cpu family", "model", "stepping", "vendor_id")
    return {"model name": name, **(dict(zip(keys, found.groups(), strict=True)) if found else {})}


def system(triple: str = "") -> str:
    """Return the operating system of a triple, by default the one that runs this.

    Examples
    --------
    >>> system("aarch64-apple-darwin"), system("x86_64-unknown-linux-gnu")
    ('macos', 'linux')
    """
    if not triple:
        return _SYSTEMS.get(sys.platform, "linux")
    return next((name for name, end in _TRIPLES.items() if triple.endswith(end)), "linux")


def triple() -> str:
    """Return LLVM's triple of this machine; empty on Linux, whose triples targets have."""
    end = _TRIPLES.get(system())
    return f"{normal_arch(platform.machine())}-{end}" if end else ""


def features() -> frozenset[str]:
    """Return the features that programs may use, as Linux spells them; empty where nothing says it.

    Tiles (AMX) are asked for here, once in a process: Linux wants that before they are used.
    """
    readers = {"linux": _linux_features, "macos": _macos_features, "windows": _windows_features}
    found = readers[system()]()
    if "amx_tile" in found and not _permits_tiles():
        found -= {feature for feature in found if feature.startswith("amx_")}
    return found


def _linux_features() -> frozenset[str]:
    """Read the table of processors; on 64-bit Arm the bits that Linux gives each program.

    Those are right in an emulator too, where the table can be that of another processor.
    """
    if normal_arch(platform.machine()) == "aarch64":
        bits = _hwcap()
        return frozenset(name for i, name in enumerate(_HWCAP_NAMES) if bits >> i & 1)
    return frozenset((_facts().get("flags") or _facts().get("Features", "")).split())


def _hwcap() -> int:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return int(getauxval(_HWCAP))


def _macos_features() -> frozenset[str]:
    """Ask macOS, which TVM has wheels for on Arm alone."""
    dot = int.from_bytes(_sysctl("hw.optional.arm.FEAT_DotProd"), "little")
    return frozenset(["asimd", "asimddp"] if dot else ["asimd"])


def _windows_features() -> frozenset[str]:
    present = vars(ctypes)["windll"].kernel32.IsProcessorFeaturePresent  # unknown elsewhere
    return frozenset(" ".join(v for k, v in _WINDOWS_NAMES.items() if present(k)).split())


def _sysctl(name: str) -> bytes:
    """Return what macOS holds under a name; empty if nothing."""
    size = ctypes.c_size_t(64)
    room = ctypes.create_string_buffer(size.value)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), room, ctypes.byref(size), None, 0)
    return b"" if failed else room.raw[: size.value]


def core() -> str:
    """Return Arm's number of the core, for example ``0xd08``; empty for those of others."""
    facts = _facts()
    return facts.get("CPU part", "") if facts.get("CPU implementer") == "0x41" else ""


@functools.cache
def _permits_tiles() -> bool:
    """Ask for the registers of tiles, for the threads of this process; x86-64 alone."""
    number, request, tile_data = 158, 0x1023, 18  # arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA
    return ctypes.CDLL(None).syscall(number, request, tile_data) == 0


def processor() -> str:
    """Return the processor's model name, on Arm boards that of the board; or ``unknown``."""
    with contextlib.suppress(OSError):
        if board := _BOARD.read_text(encoding="utf-8", errors="replace").rstrip("\0"):
            return board
    return _facts().get("model name") or "unknown"


def identity() -> str:
    """Return maker, family, model and stepping, or what Arm calls these; or ``unknown``."""
    x86 = ("vendor_id", "cpu family", "model", "stepping")
    arm = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")
    return "-".join(_facts()[key] for key in (*x86, *arm) if key in _facts()) or "unknown"


def core_model() -> str:
    """Return `identity` without the stepping or revision: what records are measured on."""
    return identity().rpartition("-")[0] or "unknown"


def clock() -> float | None:
    """Return the clock rate in MHz at this moment, if Linux says it."""
    return float(_facts().get("cpu MHz", 0)) or None


@functools.cache
def cache_bytes() -> tuple[int, int]:
    """Return the sizes of a core's first (data) and second cache; 0 where unknown."""
    if system() == "macos":
        names = ("hw.perflevel0.l1dcachesize", "hw.perflevel0.l2cachesize")
        first, second = (int.from_bytes(_sysctl(name), "little") for name in names)
        return first, second
    sizes = {1: 0, 2: 0}
    for index in sorted(_CACHE.glob("index*")):
        try:
            level = int((index / "level").read_text())
            kind = (index / "type").read_text().strip()
            size = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if level in sizes and kind in ("Data", "Unified"):
            sizes[level] = int(size.rstrip("KM")) * _UNITS.get(size[-1:], 1)
    return sizes[1], sizes[2]


def normal_arch(name: str) -> str:
    """Return one name per architecture: ``x86_64``, ``aarch64``, ``arm``, or `name` itself.

    Examples
    --------
    >>> normal_arch("arm64"), normal_arch("armv7l"), normal_arch("AMD64")
    ('aarch64', 'arm', 'x86_64')
    """
    name = name.lower()
    if name in ("x86_64", "amd64", "x86-64"):
        return "x86_64"
    if name in ("aarch64", "arm64"):
        return "aarch64"
    return "arm" if name.startswith("arm") else name
