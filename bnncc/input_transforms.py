"""Images taken as bytes and binarized before the network: ``--input-transform`` of Khan et al."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from math import floor
from pathlib import Path
from typing import Any

from bnncc.errors import UsageError, unreadable

KINDS = {"rgb-threshold": "threshold", "gray-threshold": "grey", "lbp": "lbp"}
"""What the option calls the kinds of `image_bits.bits_of`."""

_LARGEST = 1e6
_FORMS = "rgb-threshold:FILE.json, gray-threshold:V or lbp, with :nhwc behind it if need be"


@dataclass(frozen=True)
class InputTransform:
    """An image input taken as bytes, of which the network sees bits as +1 and -1."""

    kind: str
    """``rgb-threshold``, ``gray-threshold`` or ``lbp``: bits are ``x + T > 0`` for each channel,
    the same for the grey ``0.299 R + 0.587 G + 0.114 B``, or three neighbours whose grey is
    larger (local binary patterns)."""
    thresholds: tuple[float, ...] = ()
    """T: three, one, or none. They are taken for the decimal numbers they are written as."""
    layout: str = "nchw"
    """``nchw`` or ``nhwc``: of the bytes."""
    name: str = ""
    """The model's input; may be empty if there is one image."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"input transform `{self.kind}` is not one of {', '.join(KINDS)}")
        wanted = {"rgb-threshold": 3, "gray-threshold": 1, "lbp": 0}[self.kind]
        if len(self.thresholds) != wanted:
            raise UsageError(
                f"input transform {self.kind} has {len(self.thresholds)} thresholds, "
                f"expected {wanted}"
            )
        if not all(abs(t) <= _LARGEST for t in self.thresholds):
            raise UsageError(f"input transform {self.kind}: thresholds are to be finite numbers")
        if self.layout not in ("nchw", "nhwc"):
            raise UsageError(f"input transform: layout is `{self.layout}`, not nchw or nhwc")

    def attributes(self, channels: int) -> dict[str, Any]:
        """Return the attributes of `image_bits.IMAGE_BITS` for a network of so many channels."""
        unit, most = (1000, 255_001) if self.kind == "gray-threshold" else (1, 256)
        exact = (Decimal(repr(float(t))) * -unit for t in self.thresholds)
        return {
            "kind": KINDS[self.kind],
            "thresholds": tuple(min(max(floor(t) + 1, 0), most) for t in exact),
            "flip": (), "layout": self.layout, "channels": channels, "lo": -1.0, "hi": 1.0,
        }  # fmt: skip


def parse_input_transform(text: str) -> InputTransform:
    """Read ``[NAME=]rgb-threshold:FILE.json``, ``gray-threshold:V`` or ``lbp``, then ``[:nhwc]``.

    Raises
    ------
    UsageError
        If `text` has another form, or the file cannot be used.

    Examples
    --------
    >>> parse_input_transform("image=gray-threshold:-127.5:nhwc")
    InputTransform(kind='gray-threshold', thresholds=(-127.5,), layout='nhwc', name='image')
    """
    name, equals, rest = text.partition("=")
    if not equals or name.partition(":")[0] in KINDS:
        name, rest = "", text
    stem, _, last = rest.rpartition(":")
    layout = last.lower() if last.lower() in ("nchw", "nhwc") else ""
    kind, colon, value = (stem if layout else rest).partition(":")
    if kind not in KINDS or bool(colon) != (kind != "lbp"):
        raise UsageError(f"input transform `{text}` is not {_FORMS}")
    thresholds: tuple[float, ...] = ()
    if kind == "rgb-threshold":
        thresholds = _from_file(Path(value))
    elif kind == "gray-threshold":
        try:
            thresholds = (float(value),)
        except ValueError:
            raise UsageError(f"input transform: `{value}` is not a number") from None
    return InputTransform(kind, thresholds, layout or "nchw", name)


def transform_file(text: str) -> str:
    """Return the file that the text of a transform names; empty if it names none.

    Examples
    --------
    >>> transform_file("image=rgb-threshold:t.json:nhwc")
    't.json'
    """
    _, kind, rest = text.partition("rgb-threshold:")
    return re.sub(r":n(chw|hwc)$", "", rest, flags=re.IGNORECASE) if kind else ""


def as_transform(transform: InputTransform | str | None) -> InputTransform | None:
    """Return a transform that may be given as text."""
    return parse_input_transform(transform) if isinstance(transform, str) else transform


def _from_file(path: Path) -> tuple[float, ...]:
    """Read three numbers: a list, or an object that holds them."""
    try:
        if path.stat().st_size > 10_000:
            raise UsageError(f"{path}: is too long for three thresholds")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(unreadable(path, error)) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: is not JSON, expected a list of three numbers") from None
    if isinstance(content, dict):
        named = {str(k).lower(): v for k, v in content.items()}
        whole = {"r", "g", "b"} <= set(named)
        content = [named[k] for k in "rgb"] if whole else list(content.values())
        if len(content) == 1:
            content = content[0]
    numbers = content if isinstance(content, list) else []
    if len(numbers) != 3 or not all(type(n) in (int, float) for n in numbers):
        raise UsageError(f"{path}: expected three numbers, [red, green, blue]")
    return tuple(float(n) for n in numbers)
