"""Damaged, hostile and foreign artifacts are refused, each with one clear line."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bnncc.errors import ArtifactError, BnnccError, TargetError
from bnncc.files import npz_bytes
from bnncc.runtime import container
from bnncc.runtime.artifact import Artifact
from bnncc.targets.catalog import resolve
from tests.tiny import BASELINE, tiny


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tiny().save(tmp_path / "tiny.bnncc")
    return tmp_path / "tiny.bnncc"


def refused(path: Path, match: str, kind: type[BnnccError] = ArtifactError) -> None:
    with pytest.raises(kind, match=match) as info:
        Artifact.load(path)
    assert "\n" not in str(info.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    refused(tmp_path / "none.bnncc", "cannot be read: No such file")
    (tmp_path / "empty").touch()
    refused(tmp_path / "empty", "the file is empty")
    (tmp_path / "text").write_text("hello " * 1000)
    refused(tmp_path / "text", "not a tar file")
    refused(tmp_path, "cannot be read: Is a directory")


def test_every_truncation_is_refused(path: Path) -> None:
    data = path.read_bytes()
    steps = [*range(0, len(data), 1711), len(data) - 1, len(data) - 512, len(data) - 1024]
    for size in steps:
        path.write_bytes(data[:size])
        refused(path, "not an intact bnncc artifact")


def test_trailing_bytes_are_refused(path: Path) -> None:
    data = path.read_bytes()
    for more in (b"x", b"\0", bytes(511) + b"x", data, bytes(1 << 20)):
        path.write_bytes(data + more)
        refused(path, "not an intact bnncc artifact: it does not end after its members")
    path.write_bytes(data + bytes(-len(data) % 10240))  # as tar itself ends a file
    assert Artifact.load(path).manifest


def test_every_flipped_bit_is_refused_or_harmless(path: Path) -> None:
    data = path.read_bytes()
    original = Artifact.load(path)
    rng = np.random.default_rng(0)
    refusals = 0
    for position in [*range(0, 512, 3), *rng.integers(0, len(data), 300)]:
        broken = bytearray(data)
        broken[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        try:
            loaded = Artifact.load(path)
        except ArtifactError:
            refusals += 1
        else:  # a byte that means nothing: padding, or white space of the manifest
            assert loaded.manifest == original.manifest
            assert loaded._members == original._members
    assert refusals > 400


def rewritten(path: Path, change: Callable[[dict[str, Any]], None], *, seal: bool = True) -> None:
    """Change the manifest, with a checksum that fits."""
    content, members = container.read_file(path)
    change(content)
    if seal:
        content = container.sealed(content, members)
    path.write_bytes(b"".join(container.file_chunks(content, members)))


def test_manifest_under_its_checksum(path: Path) -> None:
    rewritten(path, lambda m: m.update(model="other.onnx"), seal=False)
    refused(path, "manifest.json does not match its own checksum")


def test_format_of_the_future(path: Path) -> None:
    rewritten(path, lambda m: m.update(format=2, bnncc="9.9"), seal=False)
    with pytest.raises(ArtifactError, match="artifact format 2, this bnncc reads 1") as info:
        Artifact.load(path)
    assert info.value.hint == "it was written by bnncc 9.9; compile it again"


def test_other_tvm(path: Path) -> None:
    rewritten(path, lambda m: m.update(tvm="0.31.0"))
    refused(path, r"compiled with TVM 0\.31\.0, this machine has TVM 0\.27")
    assert Artifact.load(path, check_host=False).manifest["tvm"] == "0.31.0"


def test_features_this_machine_lacks(tmp_path: Path) -> None:
    spec = dataclasses.replace(resolve(BASELINE), features=("avx9",))
    path = tmp_path / "a.bnncc"
    tiny(target=spec).save(path)
    refused(path, "needs CPU features this machine lacks: avx9", TargetError)
    assert Artifact.load(path, check_host=False).report["summary"]["float"] == 1


def test_other_architecture(tmp_path: Path) -> None:
    spec = dataclasses.replace(resolve(BASELINE), name="mips", triple="mips64-linux-gnu")
    tiny(target=spec).save(tmp_path / "a.bnncc")
    refused(tmp_path / "a.bnncc", r"is for mips64 \(mips\), this machine is", TargetError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inputs", None),
        ("inputs", [{"name": "x", "shape": [-1], "dtype": "float32"}]),
        ("inputs", [{"name": "x", "shape": [1], "dtype": "object"}]),
        ("inputs", [{"name": "x", "shape": [True], "dtype": "float32"}]),
        ("outputs", [{"shape": [1], "dtype": "float32"}]),
        ("target", {}),
        ("tvm", 27),
        ("report", []),
        ("semantics", {"sign_zero": "exact", "check_finite": "no"}),
    ],
)
def test_wrong_fields_are_named(path: Path, field: str, value: Any) -> None:
    rewritten(path, lambda m: m.update({field: value}))
    refused(path, f"field `{field}")


def test_manifests_that_are_no_manifests(path: Path) -> None:
    _, members = container.read_file(path)
    for text in (b"", b"[]", b"{", b'{"format": "1"}', b"[" * 100_000, b"\xff\xfe", b"9" * 10_000):
        write_tar(path, {"manifest.json": text, **members})
        refused(path, "manifest.json")


def write_tar(path: Path, members: dict[str, bytes], **fields: Any) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))


def test_hostile_tars(path: Path, tmp_path: Path) -> None:
    content, members = container.read_file(path)
    everything = {"manifest.json": json.dumps(content).encode(), **members}
    names = list(everything)
    write_tar(path, {("../lib.so" if n == "lib.so" else n): everything[n] for n in names})
    refused(path, "unexpected member `../lib.so`")
    write_tar(path, {("/lib.so" if n == "lib.so" else n): everything[n] for n in names})
    refused(path, "unexpected member `/lib.so`")
    write_tar(path, {"x" * 200: b"long name record", **everything})
    refused(path, "unexpected member")
    write_tar(path, everything, type=tarfile.SYMTYPE, linkname="/etc/passwd")
    refused(path, "unexpected member")
    with tarfile.open(path, "w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("lib.so"), io.BytesIO())
    refused(path, "unexpected member `lib.so`")
    del everything["selfcheck.npz"]
    write_tar(path, everything)
    refused(path, "not an intact")
    assert not (tmp_path.parent / "lib.so").exists()


@pytest.mark.parametrize("name", ["net_kernels.o", "net_kernels.c", "net.wasm"])
def test_networks_in_c_are_named(name: str, path: Path) -> None:
    write_tar(path, {name: b"code", "net.h": b""})
    refused(path, "this is a network compiled to C or WebAssembly, which bnncc does not run")


def test_absurd_sizes_take_no_memory(path: Path) -> None:
    info = tarfile.TarInfo("lib.so")
    info.size = 8**11 - 1
    path.write_bytes(info.tobuf(tarfile.USTAR_FORMAT) + bytes(2048))
    tracemalloc.start()
    refused(path, "`lib.so` is truncated")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_library_that_is_none(path: Path) -> None:
    content, members = container.read_file(path)
    members["lib.so"] = b"\x7fELF" + bytes(4000)
    content = container.sealed(content, members)
    path.write_bytes(b"".join(container.file_chunks(content, members)))
    with pytest.raises(ArtifactError, match=r"lib\.so cannot be loaded"):
        Artifact.load(path).session()


def test_hostile_selfcheck(path: Path) -> None:
    content, members = container.read_file(path)
    members["selfcheck.npz"] = npz_bytes({"input_0": np.zeros((1, 9), np.float32)})
    content = container.sealed(content, members)
    path.write_bytes(b"".join(container.file_chunks(content, members)))
    with pytest.raises(ArtifactError, match=r"has shape \[1, 9\], expected \[n, 8\]"):
        Artifact.load(path).selfcheck_arrays()
