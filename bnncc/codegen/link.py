"""Link TVM's objects into a shared library, reproducibly.

Linkers are tried in this order: the C compiler driver if the code is for this machine, ``ld.lld``,
GNU's linker (or compiler driver) for the target, then zig's linker from the ``ziglang`` wheel. The
result is a bare shared object without start files and libraries, so it does not depend on the
version of a C library: it takes ``memcpy``, ``expf`` and TVM's runtime from the process that loads
it. It has no build ids, paths or symbol tables, so it depends on its input only.

For macOS the result is a dylib, likewise. For Windows it is a DLL, which must name the libraries
that it imports from: TVM's, whose import libraries are in its wheels, and those of the C compiler.
It is called ``lib.so`` on all systems, because it is part of an artifact.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncc.errors import TargetError
from bnncc.files import scratch_folder
from bnncc.targets import host
from bnncc.targets.host import normal_arch

if TYPE_CHECKING:
    from bnncc.targets.spec import TargetSpec

LIBRARY = "lib.so"

_LINKER_FLAGS = ("--build-id=none", "-s", "-z", "noexecstack")
_DRIVER_FLAGS = ("-shared", "-nostdlib", "-Wl," + ",".join(_LINKER_FLAGS))
_EMULATIONS = {"aarch64": ("-m", "aarch64linux"), "arm": ("-m", "armelf_linux_eabi")}
_MACOS_VERSION = "11.0"  # the first one on Arm
_FLOATS = ("floats.c", "int _fltused = 0x9875;\n")
"""On Windows: a symbol that every object with floats needs, and zig's C library lacks."""
_LATER = ("-undefined", "dynamic_lookup")  # macOS: resolve symbols when the library is loaded
_SECONDS = 300


def build_library(executable: Any, target: TargetSpec) -> bytes:
    """Link the result of ``relax.build`` into a shared library; raises like `link`.

    Parameters
    ----------
    executable : tvm.runtime.Executable
        Objects are emitted for the target it was built for.
    target : TargetSpec
        Determines the machine to link for; without a triple, this one.

    Returns
    -------
    bytes
        The library, loadable by ``tvm.runtime.load_module``.
    """
    with scratch_folder("link") as folder:

        def link_here(output: str, objects: list[str]) -> None:
            names = [Path(o).relative_to(folder).as_posix() for o in objects]
            link(Path(folder), names, Path(output).name, triple=target.triple)

        executable.export_library(
            str(Path(folder) / LIBRARY), fcompile=link_here, workspace_dir=folder
        )
        return (Path(folder) / LIBRARY).read_bytes()


def link(
    folder: Path, objects: list[str], output: str, *, triple: str, options: tuple[str, ...] = ()
) -> None:
    """Link `objects` in `folder` into the shared library `output`; `options` are passed on.

    Raises
    ------
    TargetError
        If no linker for `triple` is installed, or all of them fail.
    """
    caches = {f"ZIG_{which}_CACHE_DIR": str(folder / "zig") for which in ("GLOBAL", "LOCAL")}
    if host.system(triple) == "windows":
        (folder / _FLOATS[0]).write_text(_FLOATS[1], encoding="utf-8")
    failures = first_success(
        [[*command, "-o", output, *objects] for command in _linkers(triple, options)],
        lambda lines: lines[-1],
        folder=folder,
        env={**os.environ, **caches, "LC_ALL": "C"},
    )
    if failures is None:
        return
    machine = triple or platform.machine()
    if not failures:
        raise TargetError(
            f"no linker for {machine} found: tried {_tried(triple)}",
            hint=f"{Path(sys.executable).name} -m pip install ziglang",
        )
    raise TargetError(f"linking for {machine} failed: {'; '.join(failures)}")


_STACK_BYTES = 64 << 10

_UNDEFINED = re.compile(r"undefined symbol: (\S+)")


def link_wasm(code: bytes, *, exports: Sequence[str], imports: Collection[str] = ()) -> bytes:
    """Link an object file into a WebAssembly module with its own memory.

    Parameters
    ----------
    code : bytes
        The object file.
    exports : sequence of str
        Exported symbols, besides ``memory`` and ``__heap_base``.
    imports : collection of str
        Functions that it may import from the module ``env``.

    Raises
    ------
    TargetError
        If it needs other functions, or there is no linker.
    """
    options = ["--no-entry", "--strip-all", "--stack-first", "-z", f"stack-size={_STACK_BYTES}"]
    options += [f"--export={name}" for name in (*exports, "__heap_base")]
    with scratch_folder("link") as folder:
        place = Path(folder)
        (place / "kernels.o").write_bytes(code)
        (place / "imports.txt").write_text("\n".join(imports))
        files = ["--allow-undefined-file=imports.txt", "-o", "network.wasm", "kernels.o"]
        commands = [[*linker, *options, *files] for linker in _wasm_linkers()]
        failures = first_success(commands, "\n".join, folder=place)
        if failures is None:
            return (place / "network.wasm").read_bytes()
    if not failures:
        raise TargetError(
            "no linker for WebAssembly found: tried wasm-ld and the ziglang wheel",
            hint="`apt-get install lld`, or `pip install ziglang`",
        )
    if missing := sorted({name for text in failures for name in _UNDEFINED.findall(text)}):
        raise TargetError(
            f"the network calls {', '.join(f'`{n}`' for n in missing)}, which WebAssembly lacks",
            hint="`--format c` leaves that to a C library",
        )
    raise TargetError(f"linking WebAssembly failed: {'; '.join(failures)}")


def _wasm_linkers() -> Iterator[list[str]]:
    if found := shutil.which("wasm-ld"):
        yield [found]
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "wasm-ld"]


def _tried(triple: str) -> str:
    arch, system = _machine_of(triple)
    if system != "linux":
        return f"{'cc, ld64.lld' if system == 'macos' else 'clang'} and the ziglang wheel"
    first = "cc" if _is_here(arch, system) else f"a GNU linker for {arch}"
    return f"{first}, ld.lld and the ziglang wheel"


def _machine_of(triple: str) -> tuple[str, str]:
    """Return architecture and operating system of a triple; default: those of this machine."""
    return normal_arch(triple.split("-")[0] or platform.machine()), host.system(triple)


def _is_here(arch: str, system: str) -> bool:
    return arch == normal_arch(platform.machine()) and system == host.system()


def first_success(
    commands: Iterable[list[str]],
    reason: Callable[[list[str]], str],
    *,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = _SECONDS,
) -> list[str] | None:
    """Run compilers or linkers in turn until one succeeds.

    Parameters
    ----------
    commands : iterable of list of str
        Programs with their arguments, best first.
    reason : callable
        Selects, from the output lines of a failed command (at least one), the reason to report.
    folder : Path, optional
        Working directory.
    env : mapping of str to str, optional
        Environment, instead of that of this process.
    seconds : float, optional
        Timeout of each command.

    Returns
    -------
    list of str or None
        None if one succeeded, otherwise a reason for each; empty if there were no commands.
    """
    failures: list[str] = []
    for command in commands:
        name = Path(command[0]).name
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            failures.append(f"{name}: {error}")
            continue
        if done.returncode == 0:
            return None
        lines = (done.stderr or done.stdout).strip().splitlines()
        failures.append(f"{name}: {reason(lines) if lines else 'failed'}")
    return failures


def _linkers(triple: str, options: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the start of each available link command, best first."""
    arch, system = _machine_of(triple)
    formats = {"linux": _elf_linkers, "macos": _macho_linkers, "windows": _coff_linkers}
    yield from formats[system](arch, _is_here(arch, system), options)


def _zig(target: str, *more: str) -> Iterator[list[str]]:
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "cc", "-target", target, *more]


def _macho_linkers(arch: str, here: bool, options: tuple[str, ...]) -> Iterator[list[str]]:
    through = [f"-Wl,{option}" for option in (",".join(_LATER), *options)]
    name = "arm64" if arch == "aarch64" else arch
    if here and (found := shutil.which("cc")):
        yield [found, "-arch", name, "-dynamiclib", "-Wl,-x", *through]
    if found := shutil.which("ld64.lld"):
        version = ("-platform_version", "macos", _MACOS_VERSION, _MACOS_VERSION)
        yield [found, "-dylib", "-arch", name, *version, *_LATER, *options]
    yield from _zig(f"{arch}-macos.{_MACOS_VERSION}", "-shared", "-nostdlib", "-Wl,-s", *through)


def _coff_linkers(arch: str, here: bool, options: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield link commands for Windows, if TVM's import libraries are available."""
    libraries = [str(path) for path in _import_libraries()]
    if not (here and libraries):
        return
    if found := shutil.which("clang"):
        through = [f"-Wl,{option}" for option in ("/Brepro", *options)]
        yield [found, f"--target={arch}-pc-windows-msvc", "-shared", *through, *libraries]
    yield from _zig(f"{arch}-windows-gnu", "-shared", "-s", _FLOATS[0], *libraries)


def _import_libraries() -> list[Path]:
    """Return the ``.lib`` files of TVM's runtime and of its FFI."""
    found = []
    for package, name in (("tvm", "tvm_runtime.lib"), ("tvm_ffi", "tvm_ffi.lib")):
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            found.append(Path(spec.origin).parent / "lib" / name)
    return [path for path in found if path.is_file()]


def _elf_linkers(arch: str, here: bool, options: tuple[str, ...]) -> Iterator[list[str]]:
    through = [f"-Wl,{option}" for option in options]  # for a compiler driver
    system = "linux-gnueabihf" if arch == "arm" else "linux-gnu"
    if here and (found := shutil.which("cc")):
        yield [found, *_DRIVER_FLAGS, *through]
    if found := shutil.which("ld.lld"):
        yield [found, *_EMULATIONS.get(arch, ()), "-shared", *_LINKER_FLAGS, *options]
    if not here:
        if found := shutil.which(f"{arch}-{system}-ld"):
            yield [found, "-shared", *_LINKER_FLAGS, *options]
        if found := shutil.which(f"{arch}-{system}-gcc"):
            yield [found, *_DRIVER_FLAGS, *through]
    yield from _zig(f"{arch}-{system}", *_DRIVER_FLAGS, *through)


def available(triple: str) -> bool:
    """Whether there is a linker for the machine of a target triple."""
    commands = _wasm_linkers() if triple.startswith("wasm32") else _linkers(triple, ())
    return next(commands, None) is not None
