"""Kits: what is in them, that they are whole or not there, and programs that need no server."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from bnncc.cli import main as cli
from bnncc.errors import TargetError, UsageError
from bnncc.remote import kit
from bnncc.targets.catalog import resolve
from tests import devices
from tests.devices import MACHINES, ROOT
from tests.project.test_readme import BLOCK, blocks_run
from tests.tiny import BASELINE

# The numbers of an ELF file's machine.
ELF = {"x86_64": 62, "aarch64": 183}


def elf_machine(path: Path) -> int:
    head = path.read_bytes()[:20]
    assert head[:4] == b"\x7fELF"
    return int(struct.unpack("<H", head[18:20])[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("machine", MACHINES)
def test_kit_is_complete(machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices.require(machine)
    folder = tmp_path / "kit"
    older = folder / "lib" / "libtvm_runtime.so"  # of a kit that is replaced
    older.parent.mkdir(parents=True)
    older.touch()
    code = cli.main(["device-kit", "--target", devices.TARGETS[machine], "-o", str(folder)])
    err = capsys.readouterr().err
    if "cannot fetch" in err:
        pytest.skip(err)
    assert code == 0, err
    arch = "aarch64" if machine == "arm64" else os.uname().machine
    assert f"TVM {resolved_tvm()} for {arch}" in err
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    names = [f"{d}.{n}" for d in ("apache-tvm", "apache-tvm-ffi") for n in ("LICENSE", "NOTICE")]
    licences = {f"licenses/{name}" for name in names}
    assert files == {"README.md", "rpc_server", *licences, *(f"lib/{n}" for n in kit.LIBRARIES)}
    for name in ("rpc_server", *(f"lib/{n}" for n in kit.LIBRARIES)):
        assert elf_machine(folder / name) == ELF[arch]
    assert os.access(folder / "rpc_server", os.X_OK)
    assert "./rpc_server --port 9090" in (folder / "README.md").read_text()
    assert "Apache License" in (folder / "licenses/apache-tvm.LICENSE").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["kit"]


def resolved_tvm() -> str:
    from importlib.metadata import version

    return version("apache-tvm")


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    full = tmp_path / "thesis"
    full.mkdir()
    (full / "chapter1.tex").write_text("x")
    with pytest.raises(UsageError, match="exists and is not a bnncc kit"):
        kit.make(full, resolve("native"))
    with pytest.raises(UsageError, match="is not a bnncc kit"):
        kit.make(full / "chapter1.tex", resolve("native"))
    assert (full / "chapter1.tex").read_text() == "x"
    with pytest.raises(UsageError, match="does not exist"):
        kit.make(tmp_path / "a" / "b", resolve("native"))


def test_nothing_is_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "_compilers", lambda arch: iter([["false"]]))
    with pytest.raises(TargetError, match=r"compiling for \w+ failed: false: failed"):
        kit.make(tmp_path / "kit", resolve(BASELINE))
    monkeypatch.setattr(kit, "_compilers", lambda arch: iter([]))
    with pytest.raises(TargetError, match=r"no C\+\+ compiler for \w+ found"):
        kit.make(tmp_path / "kit", resolve(BASELINE))
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"cache folder .*/file/bnncc: cannot be written: Not"):
        kit.make(tmp_path / "kit", resolve(BASELINE))
    monkeypatch.setattr(kit, "cache_folder", lambda: None)
    with pytest.raises(UsageError, match="there is no cache folder"):
        kit.make(tmp_path / "kit", resolve(BASELINE))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_kit_for_32_bits(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no kit for arm: TVM offers its runtime"):
        kit.make(tmp_path / "kit", resolve("armv7"))


def test_offline_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    other = {"x86_64": "arm64"}.get(os.uname().machine, "x86-64-v2")
    with pytest.raises(TargetError, match=r"cannot fetch apache-tvm==\S+ and apache-tvm-ffi") as e:
        kit.make(tmp_path / "kit", resolve(other))
    assert "PIP_FIND_LINKS" in str(e.value.hint)
    left = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert not left


@pytest.mark.sampled(2)
def test_the_cpp_example(
    machine: str, kits: dict[str, Path], digits: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(kits[machine], tmp_path / "kit")
    arch = "aarch64" if machine == "arm64" else os.uname().machine
    program = folder / "run"
    source = ROOT / "examples" / "cpp" / "run.cc"
    kit.build_program([source], program, arch=arch, libraries=folder / "lib")
    with tarfile.open(digits[machine]) as archive:
        archive.extractall(tmp_path)
    check = np.load(tmp_path / "selfcheck.npz")
    given, wanted = check["input_0"], check["output_0"]
    given.tofile(tmp_path / "in.raw")

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        command = [*devices.prefix(machine), program, *args]
        return subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=devices.SECONDS
        )

    shape = "x".join(map(str, given.shape))
    args = (tmp_path / "lib.so", "float32", shape, tmp_path / "in.raw", tmp_path / "out.raw")
    done = run(*args)
    assert done.returncode == 0, done.stderr
    made = np.fromfile(tmp_path / "out.raw", np.float32).reshape(wanted.shape)
    np.testing.assert_allclose(made, wanted, rtol=1e-4, atol=1e-5)

    (tmp_path / "in.raw").write_bytes(given.tobytes()[:-1])
    assert "does not hold 256 bytes" in run(*args).stderr
    assert run(*args[:-1]).returncode == 2
    done = run("nowhere.so", *args[1:])
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")


@pytest.mark.sampled(2)
def test_the_commands_of_the_page(machine: str, workplace: tuple[Path, dict[str, str]]) -> None:
    """docs/deploy.md leads to a deployed network and a program of one's own, under QEMU too."""
    why = {"host": "needs a C++ compiler", "arm64": "needs an emulator"}[machine]
    found = BLOCK.finditer((ROOT / "docs" / "deploy.md").read_text(encoding="utf-8"))
    blocks = [(m["language"], m["code"]) for m in found if m["why"] == why]
    assert len(blocks) == 2
    said = blocks_run("deploy.md", blocks, workplace)
    assert "logits: PASS" in said
    assert (workplace[0] / "logits.raw").stat().st_size == 40
