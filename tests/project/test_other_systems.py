"""What is done on macOS and Windows, as far as it can be seen on Linux."""

from __future__ import annotations

import ctypes
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import onnx
import pytest
from elftools.elf.elffile import ELFFile

import bnncc
from bnncc import console, files, osutil, remote
from bnncc.codegen import link
from bnncc.driver import compile_c
from bnncc.errors import BnnccError, DeviceError, TargetError
from bnncc.options import CompileOptions
from bnncc.records import database
from bnncc.remote import kit
from bnncc.runtime import manifest
from bnncc.targets import catalog, host
from bnncc.verification.confirm import runs_here

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits" / "digits.onnx"
Machine = Callable[[str, str], None]


FACTS = host._facts, host.cache_bytes


@pytest.fixture(autouse=True)
def fresh_facts() -> Iterator[None]:
    """Let no test see what another one has made of this machine."""
    for known in FACTS:
        known.cache_clear()
    yield
    for known in FACTS:
        known.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Pretend that this is another system, on another processor."""

    def pretend(system: str, arch: str) -> None:
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(platform, "machine", lambda: arch)

    return pretend


MAC, WINDOWS, ARM_LINUX = ("darwin", "arm64"), ("win32", "AMD64"), ("linux", "aarch64")


def test_nothing_needs_modules_that_only_posix_has() -> None:
    code = (
        "import sys, os, pkgutil, importlib, select\n"
        "import numpy, onnx, tvm\n"  # which look at the system themselves
        "for name in ('fcntl', 'grp', 'pty', 'pwd', 'resource', 'termios', 'tty'):\n"
        "    sys.modules[name] = None\n"
        "for name in ('fork', 'getuid', 'memfd_create', 'pread', 'sched_getaffinity'):\n"
        "    delattr(os, name)\n"
        "del select.poll, os.sched_setaffinity, os.O_CLOEXEC\n"
        "import bnncc\n"
        "for found in pkgutil.walk_packages(bnncc.__path__, 'bnncc.'):\n"
        "    if not found.name.endswith('__main__'):\n"
        "        importlib.import_module(found.name)\n"
        "from bnncc.runtime import threads\n"
        "print(len([n for n in sys.modules if n.startswith('bnncc')]), threads.usable_cpus())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    count, cpus = map(int, done.stdout.split())
    assert count > 150
    assert cpus >= 1


class _Msvcrt(types.ModuleType):
    """Windows' locks of bytes: not to be had twice."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.held: set[tuple[int, int]] = set()

    def locking(self, handle: int, mode: int, count: int) -> None:
        place = (os.fstat(handle).st_ino, os.lseek(handle, 0, os.SEEK_CUR))
        assert (mode, count) == (self.LK_NBLCK, 1)
        assert place[1] > os.fstat(handle).st_size, "who reads the file would be stopped"
        if place in self.held:
            raise PermissionError(13, "Permission denied")
        self.held.add(place)


def test_files_are_locked_on_windows(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    msvcrt = _Msvcrt()
    monkeypatch.setitem(sys.modules, "msvcrt", msvcrt)
    monkeypatch.setattr(osutil.time, "sleep", lambda seconds: msvcrt.held.clear())
    with open(tmp_path / "lock", "w+b") as first, open(tmp_path / "lock", "r+b") as second:
        first.write(b"12345")
        first.flush()
        machine(*WINDOWS)
        osutil.lock(first.fileno())
        assert first.tell() == 5
        with pytest.raises(BlockingIOError):
            osutil.lock(second.fileno(), wait=False)
        osutil.lock(second.fileno())  # waits until the first is gone
        assert second.read() == b"12345"


def test_locks_exclude_others_here(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "wb") as first, open(tmp_path / "lock", "wb") as second:
        osutil.lock(first.fileno())
        with pytest.raises(BlockingIOError):
            osutil.lock(second.fileno(), wait=False)
        first.close()
        osutil.lock(second.fileno(), wait=False)


def test_a_library_that_windows_keeps_is_swept_up_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(osutil, "WINDOWS", True)
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    remove = shutil.rmtree
    with files.scratch_folder("load") as folder:
        Path(folder, "lib.so").write_bytes(b"loaded")
        monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
    assert sorted(os.listdir(folder)) == ["bnncc.lock", "lib.so"]
    monkeypatch.setattr(shutil, "rmtree", remove)
    with files.scratch_folder("load") as other:
        assert sorted(os.listdir(tmp_path)) == [Path(other).name]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("whole", [b"", b"[]\n", b"[]\n" * 50_000])
def test_torn_records_are_mended_on_windows(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pread")
    path = tmp_path / database.RECORDS
    path.write_bytes(whole + b"x" * 100_000)
    with database.Writer(tmp_path) as writer:
        assert path.read_bytes() == whole
        writer.record(0, [1])
    assert path.read_bytes() == whole + b"[0,[1]]\n"


def test_folders_replace_empty_ones_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(osutil, "WINDOWS", True)
    (tmp_path / "out").mkdir()
    files.write_folder(tmp_path / "out", {"a/b": b"1"})
    assert (tmp_path / "out" / "a" / "b").read_bytes() == b"1"


def test_what_libraries_say_is_kept_where_there_is_no_memfd() -> None:
    code = (
        "import os, sys\n"
        "del os.memfd_create\n"
        "from bnncc.console import library_output_hidden\n"
        "with library_output_hidden() as written:\n"
        "    os.write(2, b'by a library')\n"
        "    print('by Python', file=sys.stderr)\n"
        "    print(written())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("by a library\n", "by Python\n")


def test_colours_are_for_terminals_that_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "TERM", "WT_SESSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(osutil, "WINDOWS", True)
    for coloured in (False, True):
        monkeypatch.setattr(sys, "stderr", Terminal())
        console.Console().warning("said")
        assert ("\x1b[" in sys.stderr.getvalue()) == coloured
        monkeypatch.setenv("WT_SESSION", "1")


def test_native_is_apples_arm(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    says = {
        "hw.optional.arm.FEAT_DotProd": 1,
        "hw.perflevel0.l1dcachesize": 131072,
        "hw.perflevel0.l2cachesize": 12 << 20,
    }
    monkeypatch.setattr(host, "_sysctl", lambda name: says.get(name, 0).to_bytes(8, "little"))
    monkeypatch.setattr(host, "cache_bytes", host.cache_bytes.__wrapped__)
    machine(*MAC)
    spec = catalog.native()
    assert (spec.base, spec.triple) == ("arm64-dotprod", "aarch64-apple-darwin")
    assert (spec.l1_bytes, spec.l2_bytes) == (131072, 12 << 20)
    assert runs_here(spec)
    assert not runs_here(catalog.CATALOG["arm64"])  # Linux' libraries are not loaded there


def test_native_on_windows_is_what_it_tells_of(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {13, 14, 17, 36, 37, 38}
    kernel32 = types.SimpleNamespace(IsProcessorFeaturePresent=lambda n: int(n in known))
    monkeypatch.setattr(ctypes, "windll", types.SimpleNamespace(kernel32=kernel32), raising=False)
    machine(*WINDOWS)
    assert catalog.native().base == "x86-64-v2"
    known |= {39, 40, 41}
    spec = catalog.native()
    assert (spec.base, spec.triple) == ("x86-64-v3", "x86_64-pc-windows-msvc")


@pytest.mark.parametrize(
    ("part", "bits", "target"),
    [
        ("0xd03", 1 << 1, "arm64-a53"),
        ("0xd08", 1 << 1, "arm64-a76"),
        ("0xd0b", 1 << 1 | 1 << 20, "arm64-dotprod"),
        ("0xd00", 1 << 1, "arm64"),
        ("", 1 << 1, "arm64"),  # an emulator that shows the table of the processor it runs on
    ],
)
def test_native_is_the_arm_core(
    part: str, bits: int, target: str,
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    arm = f"Features\t: fp\nCPU implementer\t: 0x41\nCPU part\t: {part}\n"
    x86 = "flags\t\t: popcnt avx avx2 avx512f\n"
    (tmp_path / "cpuinfo").write_text(arm if part else x86)
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(host, "_facts", host._facts.__wrapped__)
    monkeypatch.setattr(host, "_hwcap", lambda: bits)
    machine(*ARM_LINUX)
    assert catalog.native().base == target


APPLE = {
    "hw.cpufamily": (0x1B588BB3).to_bytes(4, "little"),
    "hw.cpusubfamily": (2).to_bytes(4, "little"),
    "machdep.cpu.brand_string": b"Apple M1\0",
}


@pytest.mark.parametrize(
    ("known", "processor", "identity", "model"),
    [(APPLE, "Apple M1", "0x61-0x1b588bb3-2", "0x61-0x1b588bb3"), ({}, *["unknown"] * 3)],
)
def test_apples_processors_have_names(
    known: dict[str, bytes], processor: str, identity: str, model: str,
    machine: Machine, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(host, "_sysctl", lambda name: known.get(name, b""))
    monkeypatch.setattr(host, "_facts", host._facts.__wrapped__)
    machine(*MAC)
    assert (host.processor(), host.identity(), host.core_model()) == (processor, identity, model)
    assert (host.core(), host.clock()) == ("", None)


@pytest.mark.parametrize(
    ("said", "processor", "identity"),
    [
        ("Intel64 Family 6 Model 207 Stepping 2, GenuineIntel", "", "GenuineIntel-6-207-2"),
        ("AMD64 Family 26 Model 2 Stepping 1, AuthenticAMD", "", "AuthenticAMD-26-2-1"),
        ("something else", "", "unknown"),
        ("", "unknown", "unknown"),
    ],
)
def test_windows_identifies_processors_as_linux_does(
    said: str, processor: str, identity: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROCESSOR_IDENTIFIER", said)
    monkeypatch.setattr(host, "_facts", host._facts.__wrapped__)
    machine(*WINDOWS)
    assert (host.processor(), host.identity()) == (processor or said, identity)


def linkers(
    triple: str, present: set[str], monkeypatch: pytest.MonkeyPatch, *, zig: bool, libs: Path
) -> list[list[str]]:
    def find(name: str) -> ModuleSpec | None:
        spec = ModuleSpec(name, None, origin=str(libs / name / "__init__.py"))
        return spec if name != "ziglang" or zig else None

    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in present else None)
    monkeypatch.setattr(link.importlib.util, "find_spec", find)
    return list(link._linkers(triple, ()))


def test_commands_that_link_for_macos(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triple = "aarch64-apple-darwin"
    everything = {"cc", "clang", "ld.lld", "ld64.lld", "aarch64-linux-gnu-ld"}
    here, lld, zig = range(3)
    machine(*MAC)
    found = linkers(triple, everything, monkeypatch, zig=True, libs=tmp_path)
    assert found[here] == [
        *("/bin/cc", "-arch", "arm64", "-dynamiclib", "-Wl,-x", "-Wl,-undefined,dynamic_lookup")
    ]
    assert found[lld][:4] == ["/bin/ld64.lld", "-dylib", "-arch", "arm64"]
    assert found[lld][-2:] == ["-undefined", "dynamic_lookup"]
    assert found[zig][1:5] == ["-m", "ziglang", "cc", "-target"]
    assert found[zig][5] == "aarch64-macos.11.0"
    machine("linux", "x86_64")
    assert linkers(triple, everything, monkeypatch, zig=True, libs=tmp_path) == found[1:]


def test_a_mac_links_for_linux_by_linkers_for_linux(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(*MAC)
    triple = catalog.CATALOG["arm64"].triple
    found = linkers(triple, {"cc", "ld.lld"}, monkeypatch, zig=False, libs=tmp_path)
    assert [command[0] for command in found] == ["/bin/ld.lld"]
    assert "aarch64linux" in found[0]


def test_commands_that_link_for_windows(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, name in (("tvm", "tvm_runtime.lib"), ("tvm_ffi", "tvm_ffi.lib")):
        (tmp_path / package / "lib").mkdir(parents=True)
        (tmp_path / package / "lib" / name).touch()
    libraries = [str(path) for path in sorted(tmp_path.glob("*/lib/*.lib"))]
    triple = "x86_64-pc-windows-msvc"
    machine(*WINDOWS)
    clang, zig = linkers(triple, {"clang", "cc"}, monkeypatch, zig=True, libs=tmp_path)
    assert clang[:3] == ["/bin/clang", "--target=x86_64-pc-windows-msvc", "-shared"]
    assert clang[-2:] == zig[-2:] == libraries
    assert zig[5:8] == ["x86_64-windows-gnu", "-shared", "-s"]
    machine("linux", "x86_64")
    assert linkers(triple, {"clang", "cc"}, monkeypatch, zig=True, libs=tmp_path) == []


def compiled(base: str, triple: str, folder: Path) -> bytes:
    (folder / "other.json").write_text(json.dumps({"base": base, "triple": triple}))
    artifact = bnncc.compile(DIGITS, target=str(folder / "other.json"))
    artifact.save(folder / "other.bnncc")
    with pytest.raises(TargetError, match=r"is for \w+ with (macos|windows)"):
        bnncc.Artifact.load(folder / "other.bnncc")
    return artifact.library


def test_library_for_macos_is_a_dylib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(path) for path in sorted(Path("/usr/lib").glob("llvm-*/bin"))]
    monkeypatch.setenv("PATH", os.pathsep.join([os.environ["PATH"], *folders]))
    if not link.available("aarch64-apple-darwin"):
        pytest.skip("needs ld64.lld (package lld) or the ziglang wheel")
    data = compiled("arm64", "aarch64-apple-darwin", tmp_path)
    kind = [int.from_bytes(data[at : at + 4], "little") for at in (0, 4, 12)]
    assert kind == [0xFEEDFACF, 0x0100000C, 6]  # 64 bits, Arm, a dynamic library
    assert b"___tvm_ffi_binary_conv2d\0" in data


@pytest.mark.links("arm64")
def test_libraries_for_arm_can_be_loaded_with_pages_of_64_kib() -> None:
    library = bnncc.compile(DIGITS, target="arm64").library
    loaded = [s for s in ELFFile(io.BytesIO(library)).iter_segments() if s["p_type"] == "PT_LOAD"]
    assert loaded
    assert {segment["p_align"] % (64 << 10) for segment in loaded} == {0}


def test_no_library_for_windows_is_linked_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no linker for x86_64-pc-windows-msvc found: tried cl"):
        compiled("x86-64-v2", "x86_64-pc-windows-msvc", tmp_path)


@pytest.mark.parametrize(
    ("base", "triple", "magic", "command"),
    [
        ("arm64", "aarch64-apple-darwin", b"\xcf\xfa\xed\xfe", "cc -std=c99 -O3 NET -lm -o check"),
        ("x86-64-v2", "x86_64-pc-windows-msvc", b"\x64\x86", "clang -std=c99 -O3 NET -o check"),
    ],
)
def test_networks_in_c_for_other_systems(
    base: str, triple: str, magic: bytes, command: str, tmp_path: Path
) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"base": base, "triple": triple}))
    weight = np.random.default_rng(0).choice([-1.0, 1.0], (256, 64)).astype("f4")
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> net (float[1, 256] x) => (float[1, 64] y) '
        "{ s = Sign(x) y = MatMul(s, w) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    flash = {}
    for target in (base, str(tmp_path / "other.json")):
        made = compile_c(model, CompileOptions(target=target))
        flash[target] = made.report["device"]["flash_bytes"]
    assert made.files["net_kernels.o"].startswith(magic)
    assert flash[target] == pytest.approx(flash[base], rel=0.2)
    files = "net_check.c net.c net_kernels.o"
    assert f"\n    {command.replace('NET', files)}\n" in made.files["README.md"].decode()


def test_artifacts_say_for_which_system_they_are() -> None:
    content = {"tvm": "", "target": {"name": "native", "triple": "aarch64-apple-darwin"}}
    here = manifest.Machine("this machine", "aarch64", frozenset(), "")
    with pytest.raises(TargetError) as caught:
        manifest.check_machine(content, "a.bnncc", here)
    wanted = "is for aarch64 with macos (native), this machine is aarch64 with linux"
    assert wanted in str(caught.value)


def test_what_windows_and_macos_cannot_do_is_said(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bnncc.bundle.runtime import add_runtime
    from bnncc.runtime import cuda

    machine(*WINDOWS)
    with pytest.raises(DeviceError, match="devices cannot be reached from Windows"):
        remote.connect("127.0.0.1:9090")
    machine(*MAC)
    with pytest.raises(BnnccError, match="bundles are built on Linux only"):
        add_runtime(tmp_path, (), gpu=False)
    monkeypatch.setattr(cuda, "_CREATE", "ffi.Module.create.nothing")
    with pytest.raises(TargetError, match="on Linux only"):
        cuda.load_runtime()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_bundles_get_the_binding_for_this_processor(
    arch: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bnncc.bundle import runtime

    asked: list[str] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.extend(command)
        (tmp_path / "a.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(runtime.subprocess, "run", run)
    machine("linux", arch)
    assert runtime._fetch("3.10", tmp_path) == tmp_path / "a.whl"
    platforms = [word for word in asked if word.startswith("manylinux")]
    assert platforms
    assert all(word.endswith(f"_{arch}") for word in platforms)


def test_a_kit_is_not_built_by_a_compiler_for_macos(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(kit.importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    gnu = ["/bin/aarch64-linux-gnu-g++"]
    machine(*MAC)
    zig, *others = kit._compilers("aarch64")
    assert others == [gnu]
    assert zig[-2:] == ["-target", "aarch64-linux-gnu.2.27"]
    machine("linux", "x86_64")
    assert list(kit._compilers("aarch64")) == [zig, gnu]
    machine(*ARM_LINUX)
    assert list(kit._compilers("aarch64")) == [["/bin/c++"], zig]
