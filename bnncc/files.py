"""Write files whole or not at all, and read files nobody vouches for, or say why not."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from bnncc.errors import BnnccError, InputError, ModelError, UsageError


def model_stem(path: Path) -> str:
    """Return the name of a model: that of its file, for MXNet without ``-symbol.json``."""
    return path.stem.removesuffix("-symbol") if path.suffix == ".json" else path.stem


def write_atomic(path: str | Path, chunks: Iterable[bytes]) -> int:
    """Write `chunks` to `path` under a temporary name in the same folder, then rename.

    A link stays one: what it points to is written.

    Returns
    -------
    int
        Bytes written.

    Raises
    ------
    BnnccError
        If the folder cannot be written to, or there is something that is no file.
    """
    path = Path(path)
    size = 0
    temporary = ""
    try:
        place = Path(os.path.realpath(path))
        if place.is_dir():
            raise BnnccError(f"{path}: is a folder, not a file to write")
        if place.exists() and not place.is_file():
            raise BnnccError(f"{path}: is not a regular file")
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name[:40]}.")
        with os.fdopen(handle, "wb") as file:
            for chunk in chunks:
                size += file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, place)
        temporary = ""
    except OSError as error:
        raise BnnccError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return size


def check_folder(path: Path) -> None:
    """Refuse a folder to write that holds anything, or cannot be made.

    Raises
    ------
    UsageError
        If so.
    """
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(
                f"{path}: is not an empty folder", hint="give one that is not there yet"
            )
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
            whole.replace(path)
    except OSError as error:
        raise BnnccError(f"{path}: cannot be written: {error.strerror or error}") from error
    return sum(map(len, files.values()))


_LOCK = "bnncc.lock"


@contextlib.contextmanager
def scratch_folder(what: str) -> Iterator[str]:
    """Give a folder for temporary files, gone afterwards even if the process is killed meanwhile.

    Nothing can clean up behind a process that is killed but the next one. So each folder holds a
    lock for as long as its process lives, and what holds none is removed by whoever comes next.

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
    with tempfile.TemporaryDirectory(prefix=f"bnncc-{what}-") as folder:
        fresh = os.path.join(folder, f".{_LOCK}")
        with open(fresh, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(fresh, os.path.join(folder, _LOCK))  # now others see it, and that it is taken
            yield folder


def _sweep(place: Path) -> None:
    """Remove scratch folders in `place` that dead processes of this user left."""
    with contextlib.suppress(OSError):
        for path in place.glob(f"bnncc-*/{_LOCK}"):
            with contextlib.suppress(OSError):
                if path.parent.is_symlink() or path.parent.stat().st_uid != os.getuid():
                    continue
                with open(path, "rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path.parent, ignore_errors=True)


def npz_bytes(arrays: Mapping[str, np.ndarray], *, compress: bool = False) -> bytes:
    """Return `arrays` as an npz file that depends on nothing but them.

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
            member = io.BytesIO()
            data = np.asarray(array, order="C")
            np.lib.format.write_array(member, data, version=(1, 0), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            info.compress_type = method
            archive.writestr(info, member.getvalue())
    return buffer.getvalue()


def read_npz(
    file: str | Path | io.BytesIO,
    *,
    names: Collection[str],
    check: Callable[[str, tuple[int, ...], np.dtype], None],
    source: str = "",
) -> dict[str, np.ndarray]:
    """Read arrays of an npz file, each only after its header was accepted.

    Parameters
    ----------
    file : path or bytes stream
        What to read.
    names : collection of str
        Arrays to read; others are passed over.
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
    try:
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
        raise InputError(f"{source}: array `{name}` has .npy version {version}, wanted 1.0 or 2.0")
    if dtype.hasobject or dtype.names is not None:
        raise InputError(f"{source}: array `{name}` holds {dtype}, not numbers")
    check(name, shape, dtype)
    wanted = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if wanted > size:
        raise InputError(f"{source}: array `{name}` is cut short")
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
