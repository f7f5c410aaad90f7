"""Damage .pt2 files: bytes of the archive, its JSON by bytes and by values, and whole entries."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Sequence

from tests.fuzz_mutations import hurt, mutated
from tests.pytorch_files import entries, packed


def pytorch(data: bytes) -> list[range]:
    """Find the structure: all but the weights' bytes."""
    found, mark = [], 0
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        for info in sorted(file.infolist(), key=lambda i: i.header_offset):
            if info.filename.endswith(".json"):
                continue
            at = info.header_offset
            start = at + 30 + sum(struct.unpack_from("<HH", data, at + 26))
            found.append(range(mark, start))
            mark = start + info.file_size
    return [*found, range(mark, len(data))]


def mutated_pytorch(data: bytes, rng: random.Random, structure: Sequence[range]) -> bytes:
    """Return an archive with wounds in its bytes or, more often, behind its checksums."""
    if rng.random() < 0.3:
        return mutated(data, rng, structure)
    files = entries(data)
    graphs = [name for name in files if name.endswith(".json")]
    kind = rng.random()
    if kind < 0.6:
        name = rng.choice([*graphs, "models/model.json", "models/model.json"])
        content = json.loads(files[name])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            hurt(content, rng)
        files[name] = json.dumps(content).encode()
    elif kind < 0.8:
        name = rng.choice(graphs)
        files[name] = mutated(files[name], rng, [range(len(files[name]))])
    else:
        name, other = (rng.choice(list(files)) for _ in range(2))
        change = rng.randrange(4)
        if change == 0:
            del files[name]
        elif change == 1:
            files[name] = files[other]
        elif change == 2:
            files[name] = files[name][: rng.randrange(len(files[name]) + 1)]
        else:
            moved = files.pop(name)
            files[rng.choice((name + "x", "../" + name, "/" + name, name.upper()))] = moved
    method = zipfile.ZIP_STORED if rng.random() < 0.95 else zipfile.ZIP_DEFLATED
    return packed(files, method)
