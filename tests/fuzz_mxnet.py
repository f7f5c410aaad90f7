"""Damage MXNet's files: JSON by its values, parameters where they keep their structure."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence

from tests.fuzz_mutations import hurt, mutated


def mxnet(data: bytes) -> list[range]:
    """Find the structure: all of a network, and what lies around the values of parameters."""
    if data.startswith(b"{"):
        return [range(len(data))]
    found, at, mark = [], 24, 0
    sizes = {0: 4, 1: 8, 2: 2, 3: 1, 4: 4, 5: 1, 6: 8}
    for _ in range(struct.unpack_from("<Q", data, 16)[0]):
        first = struct.unpack_from("<I", data, at)[0]
        if first < 0xF993FAC8:
            shape = struct.unpack_from(f"<{first}I", data, at + 4)
            at += 4 + 4 * first
        else:
            at += 4 if first == 0xF993FAC8 else 8
            axes = struct.unpack_from("<I", data, at)[0]
            shape = struct.unpack_from(f"<{axes}q", data, at + 4)
            at += 4 + 8 * axes
        count = sizes[struct.unpack_from("<i", data, at + 8)[0]]
        for size in shape:
            count *= size
        found.append(range(mark, at + 12))
        mark = at = at + 12 + count
    return [*found, range(mark, len(data))]


def mutated_mxnet(data: bytes, rng: random.Random, structure: Sequence[range]) -> bytes:
    """Return a file with wounds in its bytes or, as often, a network with other values."""
    if not data.startswith(b"{") or rng.random() < 0.5:
        return mutated(data, rng, structure)
    content = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        hurt(content, rng)
    return json.dumps(content).encode()
