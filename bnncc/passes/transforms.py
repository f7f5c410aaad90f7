"""Put a binarising transform in front of a network: ``--input-transform`` of Khan et al."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncc.errors import UsageError

if TYPE_CHECKING:
    from bnncc.ir.graph import Graph

KINDS = {"rgb-threshold": "threshold", "gray-threshold": "grey", "lbp": "lbp"}
"""What the option calls the kinds of `image_bits.bits_of`."""

_LARGEST = 1e6
_FORMS = "rgb-threshold:FILE.json, gray-threshold:V or lbp, with :nhwc behind it if need be"


@dataclass(frozen=True)
class InputTransform:
    """An image input taken as bytes, of which the network sees bits as +1 and -1.

    Attributes
    ----------
    kind : {"rgb-threshold", "gray-threshold", "lbp"}
        Bits are ``x + T > 0`` for each channel, the same for the grey ``0.299 R + 0.587 G +
        0.114 B``, or three neighbours whose grey is larger (local binary patterns).
    thresholds : tuple of float
        T: three, one, or none. They are taken for the decimal numbers they are written as.
    layout : {"nchw", "nhwc"}
        Of the bytes.
    name : str
        The model's input; may be empty if there is one image.
    """

    kind: str
    thresholds: tuple[float, ...] = ()
    layout: str = "nchw"
    name: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"input transform `{self.kind}` is not one of {', '.join(KINDS)}")
        wanted = {"rgb-threshold": 3, "gray-threshold": 1, "lbp": 0}[self.kind]
        if len(self.thresholds) != wanted:
            raise UsageError(
                f"input transform {self.kind} has {len(self.thresholds)} thresholds, {wanted} "
                "are wanted"
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
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: is not JSON, a list of three numbers is wanted") from None
    if isinstance(content, dict):
        named = {str(k).lower(): v for k, v in content.items()}
        whole = {"r", "g", "b"} <= set(named)
        content = [named[k] for k in "rgb"] if whole else list(content.values())
        if len(content) == 1:
            content = content[0]
    numbers = content if isinstance(content, list) else []
    if len(numbers) != 3 or not all(type(n) in (int, float) for n in numbers):
        raise UsageError(f"{path}: three numbers are wanted, [red, green, blue]")
    return tuple(float(n) for n in numbers)


def transform_input(graph: Graph, transform: InputTransform | None) -> None:
    """Replace an image input by one of bytes, and put the transform behind it.

    Parameters
    ----------
    graph : Graph
        Rewritten in place.
    transform : InputTransform or None
        None changes nothing.

    Raises
    ------
    UsageError
        If there is no such input, or it does not fit the transform.
    """
    if transform is None:
        return
    from bnncc.ir.graph import Node, TensorType
    from bnncc.ir.image_bits import IMAGE_BITS

    option = f"--input-transform {transform.kind}"
    images = [
        i for i in graph.inputs
        if graph.types[i].dtype == "float32" and len(graph.types[i].shape) == 4
    ]  # fmt: skip
    name = transform.name or (images[0] if len(images) == 1 else "")
    if name not in images:
        found = f"`{name}` is no float32 image" if name else f"{len(images)} inputs are images"
        raise UsageError(
            f"{option}: {found}",
            hint=f"name one in front of it, NAME={transform.kind}...: {', '.join(graph.inputs)}",
        )
    kind = graph.types[name]
    n, channels, height, width = kind.shape
    wanted = (1, 3) if transform.kind == "gray-threshold" else (3,)
    if channels not in wanted or not isinstance(height, int) or not isinstance(width, int):
        counts = " or ".join(map(str, wanted))
        raise UsageError(
            f"{option}: input `{name}` has shape {list(kind.shape)}, {counts} channels of known "
            "sizes are wanted"
        )
    bits = graph.fresh(f"{name}.bits")
    for node in graph.nodes:
        node.inputs = [bits if i == name else i for i in node.inputs]
    graph.outputs = [bits if o == name else o for o in graph.outputs]
    given = (n, height, width, 3) if transform.layout == "nhwc" else (n, 3, height, width)
    graph.types[name], graph.types[bits] = TensorType(given, "uint8"), kind
    attrs = transform.attributes(int(channels))
    graph.nodes.insert(0, Node(IMAGE_BITS, [name], [bits], attrs, f"{name}.{transform.kind}"))
