"""Where a TensorFlow Lite file keeps its structure."""

from __future__ import annotations

from bnncc.errors import ModelError
from bnncc.frontend.flatbuffer import Table
from tests.fuzz_mutations import PAYLOAD, everything


def tflite(data: bytes) -> list[range]:
    """Find the bytes of a file that are not long constants."""
    try:
        held = [buffer.numbers(0, "uint8").tobytes() for buffer in Table.root(data).tables(4)]
    except ModelError:
        return everything(data)
    places = sorted({(data.find(raw), len(raw)) for raw in held if len(raw) >= PAYLOAD})
    found, mark = [], 0
    for start, size in places:
        found.append(range(mark, start))
        mark = start + size
    return [r for r in [*found, range(mark, len(data))] if len(r)]
