"""What the machine at hand offers, read from Linux' own tables."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1024, "M": 1024 * 1024}


@functools.cache
def _facts() -> dict[str, str]:
    """Return what Linux says of the first processor; empty where there is no such table."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = [(key.strip(), value.strip()) for key, _, value in (x.partition(":") for x in lines)]
    return dict(reversed(pairs))


def features() -> frozenset[str]:
    """Return the features that programs may use, as Linux spells them; empty where it has no table.

    Tiles (AMX) are asked for here, once in a process: Linux wants that before they are used.
    """
    found = frozenset((_facts().get("flags") or _facts().get("Features", "")).split())
    if "amx_tile" in found and not _permits_tiles():
        found -= {feature for feature in found if feature.startswith("amx_")}
    return found


@functools.cache
def _permits_tiles() -> bool:
    """Ask for the registers of tiles, for the threads of this process; x86-64 alone."""
    number, request, tile_data = 158, 0x1023, 18  # arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA
    return ctypes.CDLL(None).syscall(number, request, tile_data) == 0


def processor() -> str:
    """Return the processor's model name, or ``unknown``."""
    return _facts().get("model name", "unknown")


def identity() -> str:
    """Return maker, family, model and stepping, or what Arm calls these; ``unknown`` elsewhere."""
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
