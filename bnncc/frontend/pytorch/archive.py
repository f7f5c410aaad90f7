"""Read files of ``torch.export.save``, without torch and without unpickling.

A ``.pt2`` file is a zip archive of uncompressed entries in one folder: the graph as JSON, the bytes
of each weight, and JSON that maps them to tensors. Only those are read. The sample inputs next to
them are a pickle, which can run arbitrary code when it is opened, and are skipped.
torch.export.load, in contrast, unpickles; and files of older releases store their weights that way.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from bnncc.errors import ModelError, ShapeError
from bnncc.frontend.checks import MAX_CONSTANT_BYTES
from bnncc.ir.graph import MAX_RANK, elements

Array = np.ndarray[Any, Any]

ZIP_MAGIC = b"PK\x03\x04"
MAX_ENTRIES = 200_000
MAX_JSON_BYTES = 24 << 20
"""Maximum total size of JSON; as Python values it may need 25 times as much memory."""
_SMALL = 4 << 20
"""Size in bytes up to which a tensor may be larger than its data (a broadcast weight)."""
_GROWTH = 4
"""Maximum total size of tensors relative to the file, beyond ``16 * _SMALL``."""

EXPORT = (
    "in the program that made it: torch.export.save(torch.export.export(model.eval(), (example,)), "
    "'model.pt2'), with torch 2.10 or newer"
)

DTYPES: Mapping[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.float16),
    7: np.dtype(np.float32),
    8: np.dtype(np.float64),
    12: np.dtype(np.bool_),
    13: np.dtype(ml_dtypes.bfloat16),
    28: np.dtype(np.uint16),
    34: np.dtype(np.uint32),
    35: np.dtype(np.uint64),
}
"""Types, by their number in the files."""

_OTHER = "a zip archive, but not of an exported PyTorch program"
_STRIDED = 7
_DAMAGE = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error, OSError, EOFError),
    *(RuntimeError, ValueError, OverflowError, IndexError),
)
"""Exceptions that zipfile raises for damaged archives."""


@dataclass(frozen=True)
class Payload:
    """Location and type of a tensor's bytes."""

    entry: str
    """Name within the archive, without the root folder."""
    dtype: np.dtype[Any]
    """Type of an element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """`shape`, `strides`: strides are in elements."""
    offset: int
    """Offset of the first element, in elements."""


class Archive:
    """An opened ``.pt2`` file.

    Attributes
    ----------
    program : dict
        The JSON of the exported program.
    weights, constants : dict of str to Payload
        By name: parameters and buffers of the state dict, and other tensors.

    Raises
    ------
    ModelError
        If the file has another format, is damaged, or cannot be read without unpickling.
    """

    def __init__(self, content: bytes) -> None:
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(content))
        except _DAMAGE as error:
            reason = str(error)[:160]
            raise ModelError(f"not a PyTorch file, or a truncated one: {reason}") from error
        self._root = ""
        self._infos = self._entries(len(content))
        self._json_left = MAX_JSON_BYTES
        self._budget = _GROWTH * len(content) + 16 * _SMALL
        self._check_kind()
        names = [
            n[len("models/") : -len(".json")]
            for n in self._infos
            if n.startswith("models/") and n.endswith(".json")
        ]
        if not names and any(n.startswith("data/aotinductor/") for n in self._infos):
            raise ModelError(
                "the archive holds compiled code (AOTInductor), no program",
                hint=f"export it {EXPORT}",
            )
        if len(names) != 1:
            raise ModelError(f"the archive holds {len(names)} exported programs, expected one")
        name = names[0]
        for folder in ("weights", "constants"):
            if f"data/{folder}/{name}.pt" in self._infos:
                raise pickled(f"its {folder}")
        self.program = self._json(f"models/{name}.json")
        self.weights = self._payloads("weights", name)
        self.constants = self._payloads("constants", name)

    def _entries(self, size: int) -> dict[str, zipfile.ZipInfo]:
        infos = self._zip.infolist()
        if len(infos) > MAX_ENTRIES:
            raise ModelError(f"the archive has {len(infos)} entries, at most {MAX_ENTRIES}")
        if not infos:
            raise ModelError("the archive is empty")
        if all(info.filename.endswith(".npy") for info in infos):
            raise ModelError("this is an .npz file of arrays, not a model")
        if "/" not in infos[0].filename.strip("/"):
            raise ModelError(_OTHER)
        self._root = infos[0].filename.partition("/")[0] + "/"
        found: dict[str, zipfile.ZipInfo] = {}
        total = 0
        for info in infos:
            name = info.filename
            parts = name.split("/")
            if name.startswith("/") or "\\" in name or ".." in parts or not name.isprintable():
                raise ModelError(f"archive entry {name[:60]!r}: not a plain path")
            if not name.startswith(self._root):
                raise ModelError(f"archive entry `{name[:60]}`: not under `{self._root}`")
            name = name[len(self._root) :]
            if name in found:
                raise ModelError(f"archive entry `{name[:60]}`: is there twice")
            total += max(0, info.file_size)
            if total > size:
                raise ModelError(
                    f"archive entry `{name[:60]}`: the entries have more bytes than the file, "
                    f"{size}"
                )
            found[name] = info
        return found

    def _check_kind(self) -> None:
        """Reject zip archives of other kinds, with a hint."""
        has = self._infos
        if "archive_format" not in has:
            if "serialized_exported_program.json" in has:
                raise ModelError(
                    "an exported program of torch 2.8 or older: its weights are a pickle, which "
                    "can run code when it is read",
                    hint=f"export the model again {EXPORT}",
                )
            if "constants.pkl" in has:
                raise ModelError(
                    "a TorchScript archive, not an exported program", hint=f"export it {EXPORT}"
                )
            if "data.pkl" in has:
                raise pickled("a checkpoint, that is, all of it")
            raise ModelError(_OTHER)
        if self._read("archive_format", 64) != b"pt2":
            raise ModelError("the archive's format is not `pt2`")
        if self._read("archive_version", 64) != b"0":
            raise ModelError("the archive's version is not 0, the only one known")
        if "byteorder" in has and self._read("byteorder", 64) != b"little":
            raise ModelError("the archive's byte order is not `little`")

    def _read(self, name: str, limit: int) -> bytes:
        info = self._infos.get(name)
        if info is None:
            raise ModelError(f"archive entry `{name[:80]}`: missing")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ModelError(
                f"archive entry `{name[:80]}`: is compressed or encrypted; torch stores it plainly"
            )
        if info.file_size > limit:
            raise ModelError(
                f"archive entry `{name[:80]}`: {info.file_size} bytes, expected at most {limit}"
            )
        try:
            data = self._zip.read(info)
        except _DAMAGE as error:
            reason = str(error)[:160]  # contains names of arbitrary length
            raise ModelError(f"archive entry `{name[:80]}`: damaged: {reason}") from error
        if len(data) != info.file_size:
            raise ModelError(f"archive entry `{name[:80]}`: truncated")
        return data

    def _json(self, name: str) -> dict[str, Any]:
        data = self._read(name, self._json_left)
        self._json_left -= len(data)
        try:
            value = json.loads(data)
            if b"\\ud" in data.lower():  # surrogates, which are invalid in text
                json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise ModelError(f"archive entry `{name[:80]}`: is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ModelError(f"archive entry `{name[:80]}`: is not a JSON object")
        return value

    def _payloads(self, folder: str, model: str) -> dict[str, Payload]:
        """Return the payloads in ``data/FOLDER``."""
        name = f"data/{folder}/{model}_{folder}_config.json"
        config = self._json(name).get("config")
        if not isinstance(config, dict):
            raise ModelError(f"archive entry `{name}`: lacks `config`")
        found = {}
        for key, entry in config.items():
            where = f"{folder} `{key[:80]}`"
            try:
                if entry["use_pickle"] is not False or entry["tensor_meta"] is None:
                    raise pickled(where)
                found[key] = _payload(f"data/{folder}/{entry['path_name']}", entry["tensor_meta"])
            except (KeyError, TypeError, AttributeError, OverflowError) as error:
                raise ModelError(f"{where}: its description is damaged") from error
        return found

    def tensor(self, payload: Payload, where: str) -> Array:
        """Return a tensor.

        Parameters
        ----------
        payload : Payload
            Of `weights` or `constants`.
        where : str
            Description of the tensor for messages.

        Returns
        -------
        ndarray
            Contiguous.

        Raises
        ------
        ModelError
            If the bytes are missing or damaged.
        ShapeError
            If there are fewer bytes than the shape needs.
        """
        item = payload.dtype.itemsize
        wanted = elements(payload.shape, where) * item
        if len(payload.shape) > MAX_RANK:
            raise ShapeError(f"{where}: has {len(payload.shape)} axes, at most {MAX_RANK}")
        data = self._read(payload.entry, MAX_CONSTANT_BYTES)
        if wanted > max(_SMALL, _GROWTH * len(data)) or wanted > self._budget:
            raise ShapeError(
                f"{where}: shape {list(payload.shape)} needs {wanted} bytes, the file has "
                f"{len(data)} for it"
            )
        self._budget -= wanted
        if wanted == 0:
            return np.empty(payload.shape, payload.dtype)
        steps = zip(payload.shape, payload.strides, strict=True)
        last = payload.offset + sum((n - 1) * step for n, step in steps)
        if len(data) % item or last >= len(data) // item:
            raise ModelError(
                f"{where}: holds {len(data)} bytes, shape {list(payload.shape)} with strides "
                f"{list(payload.strides)} from {payload.offset} needs {(last + 1) * item}"
            )
        flat = np.frombuffer(data, np.uint8 if payload.dtype == bool else payload.dtype)
        strides = tuple(step * item for step in payload.strides)
        view = as_strided(flat[payload.offset :], payload.shape, strides, writeable=False)
        if payload.dtype == bool:
            return view != 0
        return np.ascontiguousarray(view).reshape(payload.shape)  # keeps rank 0


def pickled(what: str) -> ModelError:
    """Return the error for a file that could only be read by running its code."""
    return ModelError(
        f"{what} is a pickle, which can run code when it is read, so it is not read",
        hint=f"save the model as an exported program {EXPORT}",
    )


def _payload(entry: str, meta: Mapping[str, Any]) -> Payload:
    shape = tuple(_whole(d["as_int"]) for d in meta["sizes"])
    strides = tuple(_whole(d["as_int"]) for d in meta["strides"])
    if len(shape) != len(strides) or meta["layout"] != _STRIDED:
        raise KeyError("layout")
    if meta["dtype"] not in DTYPES:
        raise ModelError(f"`{entry}`: tensors of its type are not supported")
    offset = _whole(meta["storage_offset"]["as_int"])
    if entry.count("/") != 2:
        raise KeyError("path_name")
    return Payload(entry, DTYPES[meta["dtype"]], shape, strides, offset)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise KeyError("size")
    return value
