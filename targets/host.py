"""What the machine at hand offers, read from Linux' own tables."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1024, "M": 1024 * 1024}


@functools.cache
def features() -> frozenset[str]:
    """Return the features that programs may use, as Linux spells them; empty where it has no table.

    Tiles (AMX) are asked for here, once in a process: Linux wants that before they are used.
    """
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            found = frozenset(value.split())
            if "amx_tile" in found and not _permits_tiles():
                found -= {feature for feature in found if feature.startswith("amx_")}
            return found
    return frozenset()


def _permits_tiles() -> bool:
    """Ask for the registers of tiles, for the threads of this process; x86-64 alone."""
    number, request, tile_data = 158, 0x1023, 18  # arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA
    return ctypes.CDLL(None).syscall(number, request, tile_data) == 0


@functools.cache
def processor() -> str:
    """Return the processor's model name, or ``unknown``."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    values = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return values[0] if values else "unknown"


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
