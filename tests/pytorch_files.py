"""The files of `tests/data/pytorch`, and other archives made of them; without torch."""

from __future__ import annotations

import io
import json
import lzma
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "data" / "pytorch"
LINES = (
    *("sign sign", "sign where", "sign where-ones_like", "sign where-greater", "sign float*2-1"),
    *("sign autograd.Function", "sign hardtanh-detach", "sign clamp-detach", "sign detach-detach"),
    *("sign no_grad", "sign ApproxSign", "sign sign(x+1e-20)", "sign zeros-replaced"),
    *("sign zeros-assigned", "sign copysign", "weight sign", "weight where"),
    *("weight autograd.Function", "weight ReActNet", "weight mean-of-filter"),
    *("weight mean-of-all", "weight IR-Net", "parametrize", "RSign", "RPReLU", "BatchNorm"),
    *("pad -1", "linear", "mean"),
)
"""The outputs of ``lines.pt2``: the ways to write binary layers, each with its own layer."""
BITNET = ("packed", "divided before", "as trained", "one bit", "zero point")
"""The outputs of ``bitnet.pt2``: linear layers of BitNet and its kin, see `pytorch_bitnet`."""


def content(name: str) -> bytes:
    """Return a file as torch.export.save wrote it."""
    return lzma.decompress((FOLDER / f"{name}.pt2.xz").read_bytes())


def write(name: str, folder: Path) -> Path:
    """Put a file into `folder`."""
    path = folder / f"{name}.pt2"
    path.write_bytes(content(name))
    return path


def arrays(name: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return an input, and what torch computes of it."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return file["input"], [file[key] for key in sorted(file.files) if key != "input"]


def entries(data: bytes) -> dict[str, bytes]:
    """Return the entries of an archive, by name without their root."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {n.partition("/")[2]: file.read(n) for n in file.namelist()}


def packed(files: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive of `files`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, value in files.items():
            file.writestr(f"archive/{name}", value)
    return buffer.getvalue()


def edited(name: str, change: Callable[[Any], object], entry: str = "models/model.json") -> bytes:
    """Return the file `name` after `change` was applied to the JSON of one of its entries."""
    files = entries(content(name))
    value = json.loads(files[entry])
    change(value)
    return packed({**files, entry: json.dumps(value).encode()})
