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
    assert len(set(native.features)) == len(native.features)
    better = [spec for spec in catalog.CATALOG.values() if spec.kind == "llvm"]
    own = [set(spec.features) <= set(native.features) for spec in better]
    last = max(number for number, fits in enumerate(own) if fits)
    for spec in better[last + 1 :]:
        assert catalog.missing_features(spec)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(TargetError, match="unknown target `x86-64-v5`") as caught:
        catalog.resolve("x86-64-v5")
    assert "did you mean `x86-64-v" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("arm", "arm64"),
        ("aarch64", "arm64"),
        ("armhf", "armv7"),
        ("AMD64", "x86-64-v3"),
        ("x86_64", "x86-64-v3"),
        ("AVX512", "x86-64-v4"),
        ("cortex-m", "cortex-m4"),
        ("riscv64", "riscv64gcv"),
        ("wasm", "wasm32-simd128"),
    ],
)
def test_name_of_an_architecture_suggests_a_target(name: str, target: str) -> None:
    with pytest.raises(TargetError, match=f"unknown target `{name}`") as caught:
        catalog.resolve(name)
    assert f"did you mean `{target}`?" in str(caught.value.hint)
    assert target in catalog.names()


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
        ('{"mcpu": "znver4", "vector_bits": "512"}', "is '512', expected a whole number above 0"),
        ('{"base": "arm64", "mattr": 5}', "`mattr` is 5, expected a list of texts"),
        ("{}", "`mcpu` is missing"),
        ('{"base": "arm64", "popcount": "none"}', "`popcount` is `none`, not one of vector, bytes"),
        ('{"base": "arm64", "kind": "metal"}', "`kind` is `metal`, not one of llvm, cuda, c"),
        ('{"base": "arm64", "vector_bits": 64}', "`vector_bits` is `64`, not one of 128, 256, 512"),
        ('{"base": "armv7", "float_abi": "firm"}', "`float_abi` is `firm`, not one of hard, soft"),
        ('{"base": "riscv64gcv", "abi": "lp128"}', "`abi` is `lp128`, not one of ilp32, ilp32f"),
        ('{"base": "arm64", "mattr": ["neon"]}', "`mattr` has `neon`, expected \\+FEATURE or"),
        ('{"base": "arm64", "name": "../mine"}', "`name` is '../mine', which no folder"),
        ('{"base": "arm64", "name": ""}', "`name` is '', which no folder"),
        ('{"base": "arm46"}', "bad.json: `base`: unknown target `arm46`"),
        ('{"base": "bad.json"}', "`base` is 'bad.json', expected the name of a target"),
        ('{"base": 64}', "`base` is 64, expected the name of a target"),
        ('{"base": "arm64", "kind": "cuda"}', "`kind` is `cuda`, but `gpus` has none"),
        ('{"base": "arm64", "gpus": ["sm_80"]}', "`kind` is `llvm`, but `gpus` has sm_80"),
        ('{"base": "cuda-sm80", "gpus": ["sm_999"]}', "`gpus` has `sm_999`, not one of sm_75"),
        (
            '{"base": "cortex-m4", "mattr": ["-dsp"], "features": ["thumb2", "dsp"]}',
            "`features` has dsp, which `mattr` takes away",
        ),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TargetError, match=message):
        catalog.load(path)


def test_files_agree_with_llvm_on_features(tmp_path: Path) -> None:
    """A feature that LLVM is not told of makes it abort where a kernel uses its instructions."""
    path = tmp_path / "board.json"
    path.write_text('{"base": "cortex-m33", "mattr": ["-dsp"]}')
    assert catalog.load(path).features == ("thumb2", "fpv5-sp")
    path.write_text('{"base": "arm64", "features": ["asimd", "asimddp"]}')
    spec = catalog.load(path)
    assert (spec.features, spec.mattr) == (("asimd", "asimddp"), ("+neon", "+dotprod"))


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
    monkeypatch.setattr(host, "_facts", host._facts.__wrapped__)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")  # where features are in the table
    monkeypatch.setattr(host, "_permits_tiles", lambda: permitted)
    amx = {"amx_bf16", "amx_tile", "amx_int8"}
    assert host.features() == {"avx2", "avx512f"} | (amx if permitted else set())


def test_native_uses_tiles_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    amx = catalog.resolve("x86-64-v4-amx")
    monkeypatch.setattr(host, "features", lambda: frozenset(amx.features))
    native = catalog.native()
    assert native.base == amx.name
    assert sorted(native.features) == sorted(amx.features)


def test_tiles_that_a_machine_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    amx = catalog.resolve("x86-64-v4-amx")
    here = {feature for feature in amx.features if not feature.startswith("amx")}
    monkeypatch.setattr(host, "features", lambda: frozenset(here))
    assert catalog.missing_features(amx) == ["amx_tile", "amx_int8", "amx_bf16"]


@pytest.mark.skipif(
    host.normal_arch(platform.machine()) != "x86_64"
    or "amx_tile" in Path("/proc/cpuinfo").read_text().split(),
    reason="for x86-64 processors without tiles",
)
def test_tiles_are_not_permitted_where_the_processor_has_none() -> None:
    assert not host._permits_tiles()


def test_gpus_of_jetson_are_beside_an_arm_processor() -> None:
    gpus = {name: spec for name, spec in catalog.CATALOG.items() if spec.kind == "cuda"}
    arm = {name for name, spec in gpus.items() if spec.arch == "aarch64"}
    assert arm == {"cuda-sm87"}
    assert {spec.arch for name, spec in gpus.items() if name not in arm} == {"x86_64"}
    assert gpus["cuda-sm87"].mcpu == "generic"


def test_registers_of_a_vector() -> None:
    assert [
        TargetSpec("t", "llvm", "x", vector_bits=b).registers_per_vector() for b in (128, 512)
    ] == [4, 1]


def test_caches_are_plausible() -> None:
    l1, l2 = host.cache_bytes()
    assert l1 == 0 or 8 * 1024 <= l1 <= 1024 * 1024
    assert l2 == 0 or l2 >= l1


@pytest.mark.parametrize(
    ("text", "identity", "processor", "features", "clock"),
    [
        (
            "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\n"
            "model name\t: Xeon\nstepping\t: 2\ncpu MHz\t\t: 2300.000\nflags\t\t: fpu sse\n\n"
            "processor\t: 1\nvendor_id\t: other\nmodel name\t: Other\nflags\t\t: fpu\n",
            "GenuineIntel-6-207-2", "Xeon", {"fpu", "sse"}, 2300.0,
        ),
        (
            "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
            "CPU variant\t: 0x0\nCPU part\t: 0xd08\nCPU revision\t: 3\n",
            "0x41-8-0x0-0xd08-3", "unknown", {"fp", "asimd"}, None,
        ),
        ("", "unknown", "unknown", set(), None),
    ],
)  # fmt: skip
def test_what_linux_says_of_the_processor(
    text: str, identity: str, processor: str, features: set[str], clock: float | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(host, "_BOARD", tmp_path / "board")
    monkeypatch.setattr(host, "_facts", host._facts.__wrapped__)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")  # where features are in the table
    assert host.identity() == identity
    assert host.processor() == processor
    assert host.features() == features
    assert host.clock() == clock
    (tmp_path / "board").write_bytes(b"Raspberry Pi 5 Model B Rev 1.0\0")
    assert host.processor() == "Raspberry Pi 5 Model B Rev 1.0"
