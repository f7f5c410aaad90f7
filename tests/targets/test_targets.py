"""Targets by name, by file, and of this machine."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from bnncc.errors import TargetError
from bnncc.targets import catalog, host
from bnncc.targets.spec import TargetSpec


def test_native_is_the_best_target_that_runs_here() -> None:
    native = catalog.native()
    assert not catalog.missing_features(native)
    better = [spec for spec in catalog.CATALOG.values() if spec.kind == "llvm"]
    mcpus = [(spec.mcpu, spec.popcount) for spec in better]
    for spec in better[mcpus.index((native.mcpu, native.popcount)) + 1 :]:
        assert catalog.missing_features(spec)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(TargetError, match="unknown target `x86-64-v5`") as caught:
        catalog.resolve("x86-64-v5")
    assert "did you mean `x86-64-v" in str(caught.value.hint)


def test_file_fills_in_its_base(tmp_path: Path) -> None:
    path = tmp_path / "zen5.json"
    path.write_text(json.dumps({"base": "x86-64-v4-vpopcntdq", "mcpu": "znver5"}))
    spec = catalog.resolve(str(path))
    assert (spec.name, spec.mcpu, spec.popcount) == ("zen5", "znver5", "vector")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "found no JSON object"),
        ('{"mcpu": "znver4", "vector_bit": 512}', "unknown field `vector_bit`"),
        ('{"mcpu": "znver4", "vector_bits": "512"}', "is '512', a whole number above 0 is wanted"),
        ('{"base": "arm64", "mattr": 5}', "`mattr` is 5, a list of texts is wanted"),
        ("{}", "`mcpu` is missing"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TargetError, match=message):
        catalog.load(path)


def test_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="No such file"):
        catalog.resolve(str(tmp_path / "none.json"))


@pytest.mark.parametrize("permitted", [True, False])
def test_tiles_are_a_feature_where_the_system_permits_them(
    permitted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "cpuinfo"
    table.write_text("flags\t\t: avx2 amx_bf16 avx512f amx_tile amx_int8\n")
    monkeypatch.setattr(host, "_CPUINFO", table)
    monkeypatch.setattr(host, "_permits_tiles", lambda: permitted)
    amx = {"amx_bf16", "amx_tile", "amx_int8"}
    assert host.features.__wrapped__() == {"avx2", "avx512f"} | (amx if permitted else set())


@pytest.mark.skipif(
    host.normal_arch(platform.machine()) != "x86_64"
    or "amx_tile" in Path("/proc/cpuinfo").read_text().split(),
    reason="for x86-64 processors without tiles",
)
def test_tiles_are_not_permitted_where_the_processor_has_none() -> None:
    assert not host._permits_tiles()


def test_registers_of_a_vector() -> None:
    assert [
        TargetSpec("t", "llvm", "x", vector_bits=b).registers_per_vector() for b in (128, 512)
    ] == [4, 1]


def test_caches_are_plausible() -> None:
    l1, l2 = host.cache_bytes()
    assert l1 == 0 or 8 * 1024 <= l1 <= 1024 * 1024
    assert l2 == 0 or l2 >= l1
