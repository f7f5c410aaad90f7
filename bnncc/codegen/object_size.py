"""How much of an object file occupies memory when the program runs: ELF, Mach-O and COFF."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MACHO = b"\xcf\xfa\xed\xfe"
_SEGMENT = 0x19  # LC_SEGMENT_64
_ALLOCATED = 2  # SHF_ALLOC
_NOT_LOADED = 0x0200_0A00  # IMAGE_SCN_LNK_INFO, LNK_REMOVE and MEM_DISCARDABLE


def loaded_bytes(library: bytes) -> int:
    """Return how many bytes of an object file occupy memory on the device.

    Parameters
    ----------
    library : bytes
        ELF, of 32 or 64 bits; Mach-O of 64 bits; else COFF, which has no signature.
    """
    if library.startswith(b"\x7fELF"):
        return sum(_elf(library))
    return sum(_macho(library) if library.startswith(_MACHO) else _coff(library))


def _elf(library: bytes) -> Iterator[int]:
    wide = library[4] == 2
    start, size, count = (
        (struct.unpack_from("<Q", library, 40)[0], *struct.unpack_from("<2H", library, 58))
        if wide
        else (struct.unpack_from("<I", library, 32)[0], *struct.unpack_from("<2H", library, 46))
    )
    for place in range(start, start + size * count, size):
        head = struct.unpack_from("<2I4Q" if wide else "<6I", library, place)
        yield head[5] if head[2] & _ALLOCATED else 0


def _macho(library: bytes) -> Iterator[int]:
    (commands,) = struct.unpack_from("<I", library, 16)
    place = 32
    for _ in range(commands):
        kind, size = struct.unpack_from("<2I", library, place)
        if kind == _SEGMENT:
            (sections,) = struct.unpack_from("<I", library, place + 64)
            for section in range(place + 72, place + 72 + 80 * sections, 80):
                segment, nbytes = struct.unpack_from("<16x16s8xQ", library, section)
                yield 0 if segment.rstrip(b"\0") in (b"__LD", b"__DWARF") else nbytes
        place += size


def _coff(library: bytes) -> Iterator[int]:
    (sections,) = struct.unpack_from("<H", library, 2)
    (optional,) = struct.unpack_from("<H", library, 16)
    for section in range(20 + optional, 20 + optional + 40 * sections, 40):
        nbytes, flags = struct.unpack_from("<16xI16xI", library, section)
        yield 0 if flags & _NOT_LOADED else nbytes
