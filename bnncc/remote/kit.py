"""Kits for devices: a server, TVM's runtime libraries, and their licences.

The server is compiled here, for the device; the libraries come from TVM's own wheel for its
architecture, of the version in use, and are kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bnncc._version import __version__
from bnncc.codegen.link import first_success
from bnncc.errors import TargetError, UsageError
from bnncc.osutil import cache_folder
from bnncc.progress import phase
from bnncc.targets import host
from bnncc.targets.host import normal_arch
from bnncc.targets.spec import TargetSpec

SERVER = "rpc_server"
LIBRARIES = ("libtvm_ffi.so", "libtvm_runtime.so", "libtvm_runtime_extra.so")

_SOURCES = Path(__file__).parent / "device"
_GLIBC = "2.27"  # what TVM's libraries ask for, and the first with memfd_create
_SECONDS = 1200
_DISTRIBUTIONS = ("apache-tvm", "apache-tvm-ffi")
# Where a wheel keeps what a kit takes; `*` is the wheel's own name.
_LICENCES = re.compile(r"^(tvm/(LICENSE|NOTICE)|apache_tvm_ffi-[^/]+/licenses/(LICENSE|NOTICE))$")
_README = """\
# What a device needs to run networks for bnncc

Made by bnncc {bnncc} for {arch}, with TVM {tvm}. Needs Linux, glibc {glibc} or newer, libstdc++.

    ./{server} --port 9090

serves one client at a time, on this machine only: `--host 0.0.0.0` opens it to the network. Whoever
can connect can run programs here, so do that in networks you trust, or use `ssh -L`.

    ./{server} --host 0.0.0.0 --tracker HOST:9190 --key pi4

reports to a TVM RPC tracker. `./{server} --help` lists the options. Nothing is written to the disk.

On the machine with bnncc: `bnncc deploy MODEL.bnncc --rpc THIS_MACHINE:9090`.

`lib/` holds libraries of Apache TVM, unchanged, under the licences in `licenses/`; they are also
what a program without the server needs (docs/deploy.md of bnncc). {server} is part of bnncc, under
the Apache License 2.0.
"""


@dataclass(frozen=True)
class Kit:
    """A kit that was made."""

    arch: str
    """Architecture of the device."""
    tvm: str
    """Version of its TVM."""
    glibc: str
    """Least version of the C library it needs."""
    size: int
    """Bytes of all files."""


def make(
    folder: Path, target: TargetSpec, *, progress: Callable[[str], None] = lambda line: None
) -> Kit:
    """Build a kit, completely or not at all.

    Parameters
    ----------
    folder : Path
        Folder to create; an older kit in it is replaced, anything else is an error.
    target : TargetSpec
        Says for which architecture.
    progress : callable
        Told what is going on.

    Raises
    ------
    UsageError
        If `folder` cannot be made.
    TargetError
        If there is no runtime or no compiler for the architecture.
    """
    folder = Path(os.path.realpath(folder))
    _check_replaceable(folder)
    if not folder.parent.is_dir():
        raise UsageError(f"{folder}: folder {folder.parent} does not exist")
    arch = normal_arch(target.triple.split("-")[0] or platform.machine())
    if arch not in ("x86_64", "aarch64"):
        raise TargetError(
            f"no kit for {arch}: TVM offers its runtime for x86_64 and aarch64 only",
            hint="kernels alone need no runtime",
        )
    tvm = importlib.metadata.version("apache-tvm")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
            made = Path(name, "kit")
            with phase("TVM runtime"):
                shutil.copytree(_runtime(arch, progress), made)
            progress(f"compiling {SERVER} for {arch}")
            with phase("server"):
                build_program(
                    [_SOURCES / f"{SERVER}.cc"],
                    made / SERVER,
                    arch=arch,
                    libraries=made / "lib",
                    defines={"BNNCC_TVM_VERSION": f'"{tvm}"'},
                )
            glibc = _glibc(made)
            (made / "README.md").write_text(
                _README.format(bnncc=__version__, arch=arch, tvm=tvm, glibc=glibc, server=SERVER)
            )
            size = sum(p.stat().st_size for p in made.rglob("*") if p.is_file())
            with _aside(folder, Path(name, "old")):
                made.rename(folder)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return Kit(arch, tvm, glibc, size)


def build_program(
    sources: list[Path],
    output: Path,
    *,
    arch: str,
    libraries: Path,
    defines: dict[str, str] | None = None,
) -> None:
    """Compile a C++ program against TVM's runtime, which it finds in ``lib`` beside it.

    Parameters
    ----------
    sources : list of Path
        C++17.
    output : Path
        The program.
    arch : str
        Architecture it is for.
    libraries : Path
        Folder with TVM's libraries for that.
    defines : dict of str to str, optional
        Macros.

    Raises
    ------
    TargetError
        If no compiler for `arch` is installed, or all of them fail.
    """
    import tvm_ffi.libinfo

    includes = {tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()}
    command = [
        *("-std=c++17", "-O2", "-s", "-pthread"),
        *(f"-I{path}" for path in sorted(includes)),
        *(f"-D{name}={value}" for name, value in (defines or {}).items()),
        *map(str, sources),
        *("-o", str(output), f"-L{libraries}"),
        # Needed for what it registers, though the program calls none of it.
        *("-Wl,--no-as-needed", "-ltvm_runtime", "-ltvm_ffi", "-Wl,-rpath,$ORIGIN/lib", "-ldl"),
    ]
    failures = first_success(
        [[*compiler, *command] for compiler in _compilers(arch)],
        lambda lines: next((line for line in lines if "error" in line), lines[0]),
        seconds=_SECONDS,
    )
    if failures is None:
        return
    if not failures:
        wanted = f"g++-{arch.replace('_', '-')}-linux-gnu"
        raise TargetError(
            f"no C++ compiler for {arch} found",
            hint=f"install the package {wanted}, or `{Path(sys.executable).name} -m pip install "
            "ziglang`",
        )
    raise TargetError(f"compiling for {arch} failed: {'; '.join(failures)}")


def _compilers(arch: str) -> Iterator[list[str]]:
    """Yield the start of each usable compile command, best first."""
    # For another machine zig: what a cross compiler makes needs a glibc like that of this machine.
    names = [f"{arch}-linux-gnu-g++"]
    if _is_here(arch):
        names = ["c++", "g++", "clang++", *names]
    found = [[path] for name in names if (path := shutil.which(name))][:1]
    if importlib.util.find_spec("ziglang") is not None:
        target = f"{arch}-linux-gnu.{_GLIBC}"
        zig = [sys.executable, "-m", "ziglang", "c++", "-target", target]
        found.insert(len(found) if _is_here(arch) else 0, zig)
    yield from found


def _is_here(arch: str) -> bool:
    """Whether this machine is what a kit is for: Linux on `arch`."""
    return arch == normal_arch(platform.machine()) and host.system() == "linux"


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace anything other than a kit that contains nothing else."""
    if not os.path.lexists(folder):
        return
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else None
    if found is None or (found and not (folder / "lib" / LIBRARIES[1]).is_file()):
        raise UsageError(
            f"{folder}: exists and is not a bnncc kit", hint="give a folder that does not exist"
        )
    if others := sorted(found - {"lib", "licenses", "README.md", SERVER}):
        raise UsageError(
            f"{folder}: is a kit, but `{others[0]}` is not part of it, and would be deleted",
            hint="move it elsewhere, or give another folder",
        )


@contextlib.contextmanager
def _aside(folder: Path, place: Path) -> Iterator[None]:
    """Move a folder that exists to `place`, and back if what takes its place fails."""
    there = folder.exists()
    if there:
        folder.rename(place)
    try:
        yield
    except BaseException:
        if there:
            place.rename(folder)
        raise


def _runtimes() -> Path:
    """Return the folder in the user's cache that runtimes are kept in, made if it is not there.

    Raises
    ------
    UsageError
        If there is none.
    """
    folder = cache_folder()
    if folder is None:
        raise UsageError(
            "there is no cache folder, because this user has no home",
            hint="set XDG_CACHE_HOME to a folder for TVM's runtime libraries",
        )
    with _written(folder):
        (folder / "runtime").mkdir(parents=True, exist_ok=True)
    return folder / "runtime"


@contextlib.contextmanager
def _written(cache: Path) -> Iterator[None]:
    """Turn an error of the operating system into one line about the cache folder.

    Raises
    ------
    UsageError
        Instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cache folder {cache}: cannot be written: {error.strerror or error}",
            hint="set XDG_CACHE_HOME to another folder",
        ) from error


def _runtime(arch: str, progress: Callable[[str], None]) -> Path:
    """Return a folder with ``lib`` and ``licenses`` for `arch`, from the cache or made now."""
    versions = {name: importlib.metadata.version(name) for name in _DISTRIBUTIONS}
    label = "-".join((arch, *versions.values()))
    cache = _runtimes()
    ready = cache / label
    if (ready / "lib" / LIBRARIES[-1]).is_file():
        return ready
    with _written(cache), tempfile.TemporaryDirectory(prefix=f".{label}.", dir=cache) as name:
        made = Path(name, "runtime")
        for part in ("lib", "licenses"):
            (made / part).mkdir(parents=True)
        if _is_here(arch):
            for distribution in _DISTRIBUTIONS:
                for file in importlib.metadata.files(distribution) or ():
                    if place := _place(file.as_posix(), distribution):
                        shutil.copyfile(str(file.locate()), made / place)
        else:
            progress(f"fetching TVM's wheels for {arch}, about 100 MB")
            for wheel in _download(versions, arch, Path(name)):
                with zipfile.ZipFile(wheel) as archive:
                    for item in archive.namelist():
                        if place := _place(item, _distribution(wheel)):
                            (made / place).write_bytes(archive.read(item))
        missing = [n for n in LIBRARIES if not (made / "lib" / n).is_file()]
        if missing:
            raise TargetError(f"TVM's wheels for {arch} lack {', '.join(missing)}")
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(ready)
    return ready


def _place(item: str, distribution: str) -> str:
    """Return where in a kit a file of a wheel goes; empty if nowhere."""
    if item.endswith(tuple(f"/lib/{name}" for name in LIBRARIES)):
        return f"lib/{item.rpartition('/')[2]}"
    if match := _LICENCES.match(item):
        return f"licenses/{distribution}.{match[2] or match[3]}"
    return ""


def _distribution(wheel: Path) -> str:
    return wheel.name.split("-")[0].replace("_", "-")


def _download(versions: dict[str, str], arch: str, folder: Path) -> list[Path]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", f"{sys.version_info.major}.{sys.version_info.minor}"]
    for glibc in ("2_28", "2_27", "2_24", "2_17", "2014"):
        command += ["--platform", f"manylinux{glibc if glibc == '2014' else f'_{glibc}'}_{arch}"]
    command += [f"{name}=={version}" for name, version in versions.items()]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
        failure = "" if done.returncode == 0 else (done.stderr.strip() or "failed").splitlines()[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        wanted = " and ".join(f"{name}=={version}" for name, version in versions.items())
        raise TargetError(
            f"cannot fetch {wanted} for {arch} with pip: {failure[:200]}",
            hint="this needs the network once; offline, put these wheels in a folder and set "
            "PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER",
        )
    return sorted(folder.glob("*.whl"))


def _glibc(folder: Path) -> str:
    """Return the highest version of glibc whose symbols the programs in `folder` use."""
    found = {(2, 17)}
    for path in (folder / SERVER, *(folder / "lib").iterdir()):
        found |= {(2, int(n)) for n in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())}
    return ".".join(map(str, max(found)))
