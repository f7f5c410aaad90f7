"""Read the bytes of model files, or say in one line why not."""

from __future__ import annotations

from pathlib import Path

from bnncc.errors import ModelError

MAX_FILE_BYTES = 2 << 30


def read_bytes(file: Path, what: str, limit: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole file.

    Parameters
    ----------
    file : Path
        Where it is.
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
