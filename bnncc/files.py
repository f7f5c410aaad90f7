"""Write files atomically, and read untrusted files safely."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import stat
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from bnncc import osutil
from bnncc.errors import BnnccError, InputError, ModelError, UsageError


def model_stem(path: Path) -> str:
    """Return the name of a model: that of its file, for MXNet without ``-symbol.json``."""
    return path.stem.removesuffix("-symbol") if path.suffix == ".json" else path.stem


STDOUT = Path("-")
"""What stands for standard output where a file to write is named."""


def require_path(**arguments: object) -> None:
    """Require that all arguments are paths: `open` takes a number for an open file.

    Raises
    ------
    UsageError
        If one is something else.
    """
    for name, given in arguments.items():
        if not isinstance(given, str | os.PathLike):
            raise UsageError(f"{name} is of type {type(given).__name__}, expected a path")


def write_atomic(path: str | Path, chunks: Iterable[bytes]) -> int:
    """Write a file atomically; standard output, FIFOs and devices are written directly.

    A regular file is written under a temporary name in its folder, then renamed, so that an
    existing file is kept if anything fails. Symbolic links are followed; a file that is replaced
    keeps its permissions.

    Parameters
    ----------
    path : path
        The file; ``-`` is standard output.
    chunks : iterable of bytes
        What to write.

    Returns
    -------
    int
        Bytes written.

    Raises
    ------
    BnnccError
        If it cannot be written, or is a folder or a socket.
    """
    place = replaced_by(path)
    size = 0
    with errors_named(path), _through(path) if place is None else replacing(place) as file:
        for chunk in chunks:
            size += file.write(chunk)
        file.flush()
    return size


def replaced_by(path: str | Path) -> Path | None:
    """Return the regular file, existing or not, that writing to `path` replaces.

    Returns
    -------
    Path or None
        Without symbolic links; None for what is written directly.

    Raises
    ------
    BnnccError
        If nothing can be written there.
    """
    if _is_stdout(path):
        return None
    with errors_named(path):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            mode = 0
        if stat.S_ISDIR(mode):
            raise BnnccError(f"{path}: is a folder, not a file to write")
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            return None
        if mode and not stat.S_ISREG(mode):
            raise BnnccError(f"{path}: is a socket, not a file to write")
        place = Path(os.path.realpath(path))
        folder = place.parent if os.path.islink(path) else Path(path).parent
        if not folder.is_dir():
            raise BnnccError(f"{path}: folder {folder} does not exist")
        if not os.access(folder, os.W_OK):
            raise BnnccError(f"{path}: folder {folder} cannot be written to")
        if mode and not os.access(place, os.W_OK):
            raise BnnccError(f"{path}: cannot be written: the file is read-only")
    return place


def output_name(path: str | Path) -> str:
    """Return what to call a file that is written, in messages."""
    return "standard output" if str(path) == str(STDOUT) else str(path)


@contextlib.contextmanager
def errors_named(path: str | Path) -> Iterator[None]:
    """Turn an error of the operating system into one line about `path`, a file to write.

    Raises
    ------
    BnnccError
        Instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise BnnccError(f"{output_name(path)}: cannot be written: {reason}") from error


@contextlib.contextmanager
def replacing(place: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `place` on success, and is removed on failure.

    Yields
    ------
    file
        Open for writing.
    """
    mask = os.umask(0)
    os.umask(mask)
    mode = stat.S_IMODE(place.stat().st_mode) if place.exists() else 0o666 & ~mask
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name[:40]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _through(path: str | Path) -> Iterator[IO[bytes]]:
    if not _is_stdout(path):
        with os.fdopen(os.open(path, os.O_WRONLY), "wb") as file:
            yield file
        return
    if not hasattr(sys.stdout, "buffer"):
        raise OSError(errno.EBADF, "it is closed" if sys.stdout is None else "it takes text only")
    sys.stdout.flush()
    yield sys.stdout.buffer


def _is_stdout(path: str | Path) -> bool:
    """Tell whether a name leads to standard output: ``-``, ``/dev/stdout``, or its file."""
    if str(path) == str(STDOUT):
        return True
    try:
        return os.path.samestat(os.stat(path), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError, AttributeError):  # no such file, or no real standard output
        return False


def names_folder(path: Path) -> bool:
    """Whether several files that are written to `path` become a folder: it has no suffix."""
    return not path.suffix and path != STDOUT and (path.is_dir() or not path.exists())


def check_folder(path: Path) -> None:
    """Refuse an output folder that is not empty or cannot be created.

    Raises
    ------
    UsageError
        If so.
    """
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path}: is not an empty folder", hint="give one that does not exist")
        if not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: folder {path.parent} does not exist")
    except OSError as error:
        raise UsageError(f"{path}: cannot be made: {error.strerror or error}") from error


def write_folder(path: Path, files: Mapping[str, bytes]) -> int:
    """Write files to a folder under a temporary name beside it, then rename it.

    Parameters
    ----------
    path : Path
        The folder; after `check_folder`.
    files : mapping of str to bytes
        By name, which may be in folders of its own.

    Returns
    -------
    int
        Bytes written.

    Raises
    ------
    UsageError
        If the folder holds anything.
    BnnccError
        If it cannot be written.
    """
    check_folder(path)
    try:
        parent = path.absolute().parent
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{path.name[:40]}.") as folder:
            whole = Path(folder) / "files"
            whole.mkdir()
            for name, data in files.items():
                (whole / name).parent.mkdir(parents=True, exist_ok=True)
                (whole / name).write_bytes(data)
            osutil.replace_folder(whole, path)
    except OSError as error:
        raise BnnccError(f"{path}: cannot be written: {error.strerror or error}") from error
    return sum(map(len, files.values()))


_LOCK = "bnncc.lock"


@contextlib.contextmanager
def scratch_folder(what: str) -> Iterator[str]:
    """Create a folder for temporary files, removed afterwards even if the process is killed.

    Only the next process can clean up after one that was killed. So each folder is locked as long
    as its process lives, and the next process removes folders without a lock.

    Parameters
    ----------
    what : str
        What it is for; part of its name.

    Yields
    ------
    str
        Its path.
    """
    _sweep(Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix=f"bnncc-{what}-")
    fresh = os.path.join(folder, _LOCK if osutil.WINDOWS else f".{_LOCK}")
    try:
        with open(fresh, "wb") as lock:
            osutil.lock(lock.fileno())
            if not osutil.WINDOWS:  # where nobody can remove what is open
                os.rename(fresh, os.path.join(folder, _LOCK))  # now others see that it is taken
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        # On Windows the lock is left, and a library that is loaded, which waits for the next sweep.
        with contextlib.suppress(OSError):
            if os.listdir(folder) == [_LOCK]:
                shutil.rmtree(folder)


def _sweep(place: Path) -> None:
    """Remove scratch folders in `place` left by dead processes of this user."""
    with contextlib.suppress(OSError):
        for path in place.glob(f"bnncc-*/{_LOCK}"):
            with contextlib.suppress(OSError):
                if path.parent.is_symlink() or not osutil.is_ours(path.parent):
                    continue
                with open(path, "rb") as lock:
                    osutil.lock(lock.fileno(), wait=False)
                shutil.rmtree(path.parent, ignore_errors=True)


def npy_bytes(array: np.ndarray) -> bytes:
    """Return `array` as an npy file."""
    buffer = io.BytesIO()
    data = np.asarray(array, order="C")
    np.lib.format.write_array(buffer, data, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def npz_bytes(arrays: Mapping[str, np.ndarray], *, compress: bool = False) -> bytes:
    """Return `arrays` as an npz file that depends only on them.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        Stored in this order.
    compress : bool
        Deflate the members.
    """
    buffer = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", method, compresslevel=6 if compress else None) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            info.compress_type = method
            archive.writestr(info, npy_bytes(array))
    return buffer.getvalue()


def read_npz(
    file: str | Path | io.BytesIO,
    *,
    names: Collection[str],
    check: Callable[[str, tuple[int, ...], np.dtype], None],
    source: str = "",
) -> dict[str, np.ndarray]:
    """Read arrays of an npz file, each only after its header was checked.

    If one array is expected, an npy file may hold it instead.

    Parameters
    ----------
    file : path or bytes stream
        What to read.
    names : collection of str
        Arrays to read; others are ignored.
    check : callable
        Given name, shape and dtype of an array, raises `InputError` if it is not wanted; so the
        memory used is bounded by what the caller accepts.
    source : str
        What to call the file in messages.

    Returns
    -------
    dict of str to ndarray
        In the file's order.

    Raises
    ------
    InputError
        If the file is no npz file, is damaged, or holds Python objects.
    """
    source = source or str(file)
    hint = "write it with numpy.savez(path, **{input_name: array})"
    arrays: dict[str, np.ndarray] = {}
    kind = "" if isinstance(file, io.BytesIO) else kind_of(file)
    single = kind == NPY and len(names) == 1
    if kind and not single and not kind.startswith("a zip"):  # an artifact ends like a zip file
        raise InputError(f"{source}: this is {kind}, not an .npz file", hint=hint)
    try:
        if single:
            (only,) = names
            with open(str(file), "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                return {only: _read_member(stream, only, source, size, check)}
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name not in names:
                    continue
                if name in arrays:
                    raise InputError(f"{source}: holds `{name}` twice")
                with archive.open(info) as stream:
                    arrays[name] = _read_member(stream, name, source, info.file_size, check)
    except (OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, OSError) and error.filename is None:  # no zip: a place before it
            raise InputError(f"{source}: not an intact .npz file", hint=hint) from error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"{source}: cannot be read as .npz: {reason}") from error
    except (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error) as error:
        raise InputError(
            f"{source}: not an intact .npz file: {str(error)[:160]}", hint=hint
        ) from error
    return arrays


def _read_member(
    stream: IO[bytes],
    name: str,
    source: str,
    size: int,
    check: Callable[[str, tuple[int, ...], np.dtype], None],
) -> np.ndarray:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise InputError(
            f"{source}: array `{name}` has .npy version {version}, expected 1.0 or 2.0"
        )
    if dtype.hasobject or dtype.names is not None:
        raise InputError(f"{source}: array `{name}` holds {dtype}, not numbers")
    check(name, shape, dtype)
    wanted = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if wanted > size:
        raise InputError(f"{source}: array `{name}` is truncated")
    data = stream.read(wanted)
    if len(data) != wanted or stream.read(1):
        raise InputError(f"{source}: array `{name}` is not {wanted} bytes long as its header says")
    array = np.frombuffer(bytearray(data), dtype=dtype)
    return array.reshape(shape, order="F" if fortran else "C")


MAX_FILE_BYTES = 2 << 30


def read_bytes(file: Path, what: str, limit: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole file.

    Parameters
    ----------
    what : str
        What it is to be, for messages: ``an ONNX file``.
    limit : int
        Larger ones are refused.

    Returns
    -------
    bytes
        Not empty.

    Raises
    ------
    ModelError
        If there is no such file, or it cannot be one.
    """
    try:
        if file.is_dir():
            raise ModelError(f"{file}: is a directory, not {what}")
        if file.exists() and not file.is_file():
            raise ModelError(f"{file}: is not a regular file")
        size = file.stat().st_size
        if size == 0:
            raise ModelError(f"{file}: the file is empty, not {what}")
        if size > limit:
            raise ModelError(f"{file}: {size} bytes, {what} holds at most {limit}")
        return file.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{file}: cannot be read: {reason}") from error


NPY = "a .npy file"
_KINDS = (
    (rb"\x08[\x01-\x1f][\x12\x1a\x22\x3a\x42]", "an ONNX model"),
    (rb".{4}TFL3", "a TensorFlow Lite model"),
    (rb"\s*\{.*\"nodes\"", "an MXNet network"),
    (rb"(\./)?(manifest\.json|lib\.so|selfcheck\.npz)\0", "a bnncc artifact"),
    (rb"\x1f\x8b", "a gzip file"),
    (rb"PK\x03\x04", "a zip file (a PyTorch checkpoint or .npz file?)"),
    (rb"version https://git-lfs", "a Git LFS pointer"),
    (rb"<!DOCTYPE|<html", "an HTML page"),
    (rb"\x89HDF", "an HDF5 file"),
    (rb"\x93NUMPY", NPY),
    (rb"\x89PNG", "a PNG image"),
    (rb"\xff\xd8\xff", "a JPEG image"),
    (rb"\x7fELF", "an ELF file"),
    (rb"\x12\x01\0\0\0\0\0\0", "a file of MXNet parameters (give the network's -symbol.json)"),
)
"""How files of some kinds begin."""
MODELS = tuple(kind for _, kind in _KINDS[:3])
"""Those of them that can be compiled."""


def kind_of(file: str | Path | bytes) -> str:
    """Return what kind of file it is, by how its content begins; empty if that is not known.

    Parameters
    ----------
    file : path or bytes
        The file, or its beginning.
    """
    if isinstance(file, bytes):
        head = file[:4096]
    else:
        try:
            with open(file, "rb") as stream:
                head = stream.read(4096)
        except (OSError, ValueError):
            return ""
    return next((kind for start, kind in _KINDS if re.match(start, head, re.DOTALL)), "")
