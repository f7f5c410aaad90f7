"""The errors that bnncc raises on purpose.

    BnnccError                    exit code 1
    ├── UsageError                exit code 2: an option or argument is wrong
    ├── ModelError                the model file cannot be compiled
    │   ├── UnsupportedOp         ... because of an operator
    │   └── ShapeError            ... because of a shape
    ├── TargetError               missing CPU feature, no linker
    │   └── UnknownTarget         no target has that name: bad usage, too, exit code 2
    ├── ArtifactError             damaged or incompatible artifact
    ├── InputError                an array given at run time does not fit
    ├── TuningError
    ├── DeviceError               remote device missing, busy or lost
    └── VerificationError         outputs differ from the model file's graph

A message is one line: *where* it was found, *what* was found, *what* was expected. `hint` says what
to do. This module imports no other of bnncc, so every layer may raise these.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


def deprecated(old: str, new: str) -> None:
    """Warn the caller's caller that a name is deprecated."""
    text = f"`{old}` is deprecated and will be removed in the next version: use `{new}`"
    warnings.warn(text, DeprecationWarning, stacklevel=3)


class BnnccError(Exception):
    """Base of all errors meant for the user.

    Parameters
    ----------
    message : str
        One line: where, what was found, what was expected.
    hint : str, optional
        One line: what to do about it.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(" ".join(str(message).split()))
        self.hint = None if hint is None else " ".join(hint.split())

    def within(self, where: object) -> BnnccError:
        """Return the same error, with the file or model that it is about before its message."""
        return type(self)(f"{where}: {self}", hint=self.hint)


class UsageError(BnnccError):
    """An option or argument is wrong."""

    exit_code = 2


class ModelError(BnnccError):
    """The model cannot be compiled."""


class UnsupportedOp(ModelError):
    """An operator, or one of its forms, is not supported."""


class ShapeError(ModelError):
    """Shapes in the model do not fit together or are out of bounds."""


class TargetError(BnnccError):
    """The target is unknown, or this machine cannot build for it or run it."""


class UnknownTarget(TargetError, UsageError):
    """No target has the name that is given."""


class ArtifactError(BnnccError):
    """An artifact is damaged or incompatible."""


class InputError(BnnccError):
    """An array given at run time has the wrong name, shape, dtype or values."""


class TuningError(BnnccError):
    """Tuning cannot start or continue."""


class DeviceError(BnnccError):
    """A remote device is missing or busy, or the connection to it was lost."""


class VerificationError(BnnccError):
    """Outputs differ from those of the model."""


@contextlib.contextmanager
def onnx_needed() -> Iterator[None]:
    """Turn a missing onnx, which only models need, into a `BnnccError`.

    Raises
    ------
    BnnccError
        If it is onnx that cannot be imported.
    ModuleNotFoundError
        If it is another module.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise BnnccError(
            "this needs onnx, which is not installed; only artifacts can be used without it",
            hint="pip install onnx",
        ) from error


def message_lines(error: BaseException) -> list[str]:
    """Return the lines of an exception's message; the name of its type if it has none."""
    return str(error).strip().splitlines() or [type(error).__name__]


def unreadable(path: object, error: OSError) -> str:
    """Return the message for a file that cannot be read."""
    return f"{path}: cannot be read: {error.strerror or error}"
