"""The artifact file: an uncompressed tar of three members, the same bytes for the same content.

Reading trusts nothing: only plain files of the three known names, each once, no links, no extended
headers, sizes within the file, and every byte under a checksum.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

from bnncc.errors import ArtifactError, unreadable
from bnncc.files import MODELS, kind_of

FORMAT = 1
LIBRARY, MANIFEST, SELFCHECK = "lib.so", "manifest.json", "selfcheck.npz"
MEMBERS = (MANIFEST, LIBRARY, SELFCHECK)

_BLOCK = 512
_RECORD = 20 * _BLOCK
_MAX_MANIFEST = 64 << 20


def sealed(manifest: dict[str, Any], members: dict[str, bytes]) -> dict[str, Any]:
    """Return `manifest` as JSON reads it back, with checksums of the members and its own."""
    result = json.loads(_encode({k: v for k, v in manifest.items() if k != "sha256"}, indent=None))
    result["members"] = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sorted(members.items())
    }
    result["sha256"] = _digest(result)
    return result


def file_chunks(manifest: dict[str, Any], members: dict[str, bytes]) -> list[bytes]:
    """Return the artifact file, in pieces; `manifest` must be `sealed`."""
    everything = {MANIFEST: _encode(manifest, indent=1), **members}
    chunks = []
    for name in MEMBERS:
        data = everything[name]
        info = tarfile.TarInfo(name)
        info.size = len(data)
        info.mode = 0o755 if name == LIBRARY else 0o644
        chunks += [info.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % _BLOCK)]
    return [*chunks, bytes(2 * _BLOCK)]


def file_size(manifest: dict[str, Any]) -> int:
    """Return the size of the file that `file_chunks` writes for a `sealed` manifest."""
    sizes = [len(_encode(manifest, indent=1))]
    sizes += [member["bytes"] for member in manifest["members"].values()]
    return sum(_BLOCK + size + -size % _BLOCK for size in sizes) + 2 * _BLOCK


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read an artifact file and check that it is whole.

    Returns
    -------
    manifest : dict
        As written; its fields are checked by the caller.
    members : dict of str to bytes
        ``lib.so`` and ``selfcheck.npz``.

    Raises
    ------
    ArtifactError
        If the file is missing, damaged, or of a format this version does not know.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArtifactError(f"path is of type {type(path).__name__}, expected str or Path")
    kind = kind_of(path)
    if kind in MODELS:
        raise ArtifactError(f"{path}: this is {kind}; `bnncc compile` it first")
    if kind and kind != "a bnncc artifact":
        raise ArtifactError(f"{path}: this is {kind}, not a bnncc artifact")
    try:
        with open(path, "rb") as file:
            raw = _read_members(file, str(path))
    except OSError as error:
        raise ArtifactError(unreadable(path, error)) from error
    manifest = _decode(raw.pop(MANIFEST), str(path))
    _check_members(manifest, raw, str(path))
    return manifest, raw


def _check_members(manifest: dict[str, Any], raw: dict[str, bytes], path: str) -> None:
    for name, data in raw.items():
        said = manifest["members"].get(name)
        actual = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if said != actual:
            raise _damaged(path, f"checksum of `{name}` does not match the manifest")


_OTHERS = ("_kernels.o", "_kernels.c", ".wasm")
"""How the first name in a tar file of another format ends."""


def _damaged(path: str, what: str) -> ArtifactError:
    return ArtifactError(f"{path}: not an intact bnncc artifact: {what}", hint="compile it again")


def _read_members(file: BinaryIO, path: str) -> dict[str, bytes]:
    left = os.fstat(file.fileno()).st_size
    if left == 0:
        raise _damaged(path, "the file is empty")
    found: dict[str, bytes] = {}
    while len(found) < len(MEMBERS):
        header = file.read(_BLOCK)
        left -= _BLOCK
        if len(header) < _BLOCK:
            raise _damaged(path, f"it ends before `{_missing(found)}`")
        try:
            info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            what = "not a tar file" if not found else f"bad tar header ({error})"
            raise _damaged(path, what) from error
        name = info.name.removeprefix("./")
        if not found and name.endswith(_OTHERS):
            raise ArtifactError(
                f"{path}: this is a network compiled to C or WebAssembly, which bnncc does not run",
                hint="it contains a check; `bnncc compile --format artifact` makes what bnncc runs",
            )
        if name not in MEMBERS or name in found or info.type not in (b"0", b"\0"):
            raise _damaged(path, f"unexpected member `{info.name[:80]}`")
        padded = info.size + -info.size % _BLOCK
        if info.size < 0 or info.size > left:
            raise _damaged(path, f"`{name}` is truncated")
        if name == MANIFEST and info.size > _MAX_MANIFEST:
            raise _damaged(path, "the manifest is too large")
        found[name] = file.read(info.size)
        if len(found[name]) != info.size:
            raise _damaged(path, f"`{name}` is truncated")
        if file.read(padded - info.size).strip(b"\0"):
            raise _damaged(path, f"unexpected data after `{name}`")
        left -= padded
    # tar itself fills its last record with zeros; anything else is not ours.
    end = file.read(_RECORD + 1)
    if not 2 * _BLOCK <= len(end) <= _RECORD or len(end) % _BLOCK or end.strip(b"\0"):
        raise _damaged(path, "it does not end after its members")
    return found


def _missing(found: dict[str, bytes]) -> str:
    return next(name for name in MEMBERS if name not in found)


def _decode(data: bytes, path: str) -> dict[str, Any]:
    try:
        manifest = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "manifest.json is not JSON") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise _damaged(path, "manifest.json has no format number")
    if manifest["format"] != FORMAT:
        raise ArtifactError(
            f"{path}: has artifact format {manifest['format']}, this bnncc reads {FORMAT}",
            hint=f"it was written by bnncc {str(manifest.get('bnncc'))[:40]}; compile it again",
        )
    if manifest.get("sha256") != _digest(manifest):
        raise _damaged(path, "manifest.json does not match its own checksum")
    members = manifest.get("members")
    if not isinstance(members, dict) or set(members) != {LIBRARY, SELFCHECK}:
        raise _damaged(path, "manifest.json does not list the members")
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    content = copy.copy(manifest)
    content.pop("sha256", None)
    return hashlib.sha256(_encode(content, indent=None)).hexdigest()


def _encode(manifest: dict[str, Any], *, indent: int | None) -> bytes:
    text = json.dumps(manifest, indent=indent, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return (text + "\n").encode("ascii")
