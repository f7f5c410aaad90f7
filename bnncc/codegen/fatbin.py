"""Machine code for several GPU architectures in one image, from which the driver selects.

The format is that of NVIDIA's ``fatbinary``: a header, and for each architecture a header and an
ELF file. ``test_cuda_code.py`` compares with that program if it is installed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

_MAGIC, _VERSION = 0xBA55ED50, 1
_ELF_IMAGE, _ENTRY_VERSION = 2, 0x0101
_ENTRY = struct.Struct("<HHIQ8xHHI8xQ16x")
_HEADER = struct.Struct("<IHHQ")
_CODE_VERSION = (8, 1)
_64_BIT_LINUX = 0x11
_NOT_FOR_LATER = 1 << 20  # code for sm_90a runs on 9.0 only
_ALIGNMENT = 8


def pack(cubins: Mapping[str, bytes]) -> bytes:
    """Return an image of `cubins`, which are given by architecture (``sm_90a``)."""
    body = b""
    for arch, code in cubins.items():
        data = code + bytes(-len(code) % _ALIGNMENT)
        number = int(arch.removeprefix("sm_").rstrip("a"))
        flags = _64_BIT_LINUX | (_NOT_FOR_LATER if arch.endswith("a") else 0)
        body += _ENTRY.pack(
            _ELF_IMAGE, _ENTRY_VERSION, _ENTRY.size, len(data), *_CODE_VERSION, number, flags
        )
        body += data
    return _HEADER.pack(_MAGIC, _VERSION, _HEADER.size, len(body)) + body
