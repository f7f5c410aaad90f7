"""Read MXNet's network files (``-symbol.json``): nodes, their inputs, and attributes as text.

The file is untrusted. Types and node indices are checked here, and that nodes read only preceding
nodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bnncc.errors import ModelError, UnsupportedOp
from bnncc.files import read_bytes
from bnncc.frontend import checks

MAX_BYTES = 16 << 20
"""Maximum size of a network file; the largest real ones have half a megabyte."""

_MAX_INT = 2**31 - 1
_IGNORED = frozenset(
    ("workspace", "cudnn_tune", "cudnn_off", "momentum", "ctx_group", "lr_mult", "wd_mult",
     "force_mirroring", "mirror_stage", "weight_lr_mult", "gradient_update_mode", "grad_scale",
     "use_global_stats", "profiler_scope", "dtype_hint")
)  # fmt: skip
"""Attributes that do not affect what an operator computes."""


@dataclass(frozen=True)
class SymbolNode:
    """A node of the file."""

    op: str
    """MXNet's operator; ``null`` for a variable."""
    name: str
    """Name in the file."""
    inputs: tuple[tuple[int, int], ...]
    """Index of a preceding node, and of its output."""
    attrs: Attributes
    """Attributes in the file."""

    @property
    def where(self) -> str:
        """Description of the node for messages."""
        return f"{self.op} `{self.name}`"


@dataclass(frozen=True)
class Symbol:
    """A network file."""

    nodes: tuple[SymbolNode, ...]
    """In topological order."""
    heads: tuple[tuple[int, int], ...]
    """The outputs."""


@dataclass
class Attributes:
    """Attributes of a node; each method reads one, or returns a default."""

    where: str
    """The node, for messages."""
    values: dict[str, str]
    """Texts from the file."""
    _read: set[str] = field(default_factory=set)

    def text(self, key: str, default: str | None = None, choices: Sequence[str] = ()) -> str:
        """Return a text, which must be one of `choices` if there are any."""
        self._read.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise ModelError(f"{self.where}: attribute `{key}` is missing")
        if choices and value not in choices:
            raise UnsupportedOp(
                f"{self.where}: `{key}` is `{value[:40]}`, expected one of {', '.join(choices)}"
            )
        return value

    def _given(self, key: str) -> str | None:
        self._read.add(key)
        value = self.values.get(key)
        return None if value is None or value.strip() in ("", "None") else value.strip()

    def integer(self, key: str, default: int | None = None, least: int = -_MAX_INT) -> int:
        """Return an integer, at least `least`."""
        value = self._given(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.where}: attribute `{key}` is missing")
            return default
        if not re.fullmatch(r"[+-]?\d{1,10}L?", value):
            raise ModelError(f"{self.where}: `{key}` is `{value[:40]}`, expected an integer")
        number = int(value.rstrip("L"))
        if not least <= number <= _MAX_INT:
            raise ModelError(f"{self.where}: `{key}` is {number}, expected at least {least}")
        return number

    def optional(self, key: str) -> int | None:
        """Return an integer, or None if it is ``None`` or absent."""
        return None if self._given(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._given(key)
        if value is None and default is not None:
            return default
        try:
            number = float(value or "")
        except ValueError:
            number = float("nan")
        if not abs(number) < float("inf"):
            raise ModelError(f"{self.where}: `{key}` is `{(value or '')[:40]}`, expected a number")
        return number

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._given(key)
        table = {"true": True, "1": True, "false": False, "0": False}
        if value is None:
            return default
        if value.lower() not in table:
            raise ModelError(f"{self.where}: `{key}` is `{value[:40]}`, expected True or False")
        return table[value.lower()]

    def integers(self, key: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return a tuple of integers; a single integer is a tuple too."""
        value = self._given(key)
        if value is None or value in ("()", "[]"):
            if default is None:
                raise ModelError(f"{self.where}: attribute `{key}` is missing")
            return tuple(default)
        body = value[1:-1] if value[0] + value[-1] in ("()", "[]") else value
        parts = [part.strip() for part in body.rstrip(", ").split(",")]
        if len(parts) > 32 or not all(re.fullmatch(r"[+-]?\d{1,10}L?", part) for part in parts):
            raise ModelError(f"{self.where}: `{key}` is `{value[:40]}`, expected integers")
        numbers = tuple(int(part.rstrip("L")) for part in parts)
        if any(abs(n) > _MAX_INT for n in numbers):
            raise ModelError(f"{self.where}: `{key}` is `{value[:40]}`, expected smaller sizes")
        return numbers

    def done(self) -> None:
        """Raise an error if an attribute has not been read.

        Raises
        ------
        UnsupportedOp
            Names the first: it may change what the operator computes.
        """
        for key, value in self.values.items():
            if key not in self._read and key not in _IGNORED and not key.startswith("__"):
                raise UnsupportedOp(
                    f"{self.where}: attribute `{key[:40]}` (`{value[:40]}`) is not known"
                )


def read_symbol(path: Path) -> Symbol:
    """Read a network file.

    Raises
    ------
    ModelError
        If the file is damaged, or is something else.
    """
    data = read_bytes(path, "an MXNet network", MAX_BYTES)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}"
        raise ModelError(f"{path}: {what[:200]}") from None
    try:
        return _symbol(content)
    except ModelError as error:
        raise error.within(path) from None


def _symbol(content: Any) -> Symbol:
    if not isinstance(content, dict) or not isinstance(content.get("nodes"), list):
        raise ModelError("this is not an MXNet network: it has no list of nodes")
    if len(content["nodes"]) > checks.MAX_NODES:
        raise ModelError(f"{len(content['nodes'])} nodes, expected at most {checks.MAX_NODES}")
    nodes = tuple(_node(raw, number) for number, raw in enumerate(content["nodes"]))
    heads = _references(content.get("heads"), len(nodes), "heads")
    if not heads:
        raise ModelError("the network has no outputs")
    seen: set[str] = set()
    for node in nodes:
        if node.op == "null" and node.name in seen:
            raise ModelError(f"two variables are called `{node.name}`")
        seen.add(node.name)
    return Symbol(nodes, heads)


def _node(raw: Any, number: int) -> SymbolNode:
    where = f"node {number}"
    if not isinstance(raw, dict):
        raise ModelError(f"{where} is not an object")
    op, name = raw.get("op"), raw.get("name")
    if not isinstance(op, str) or not isinstance(name, str) or not op or not name:
        raise ModelError(f"{where}: `op` and `name` are to be words")
    where = f"{op[:60]} `{name[:60]}`"
    values: dict[str, str] = {}
    for key in ("param", "attr", "attrs"):  # in files of different ages; some have two
        given = raw.get(key, {})
        if not isinstance(given, dict):
            raise ModelError(f"{where}: `{key}` is not an object")
        for word, value in given.items():
            if not isinstance(value, str | int | float):
                raise ModelError(f"{where}: attribute `{word[:40]}` is not text")
            values[word] = str(value)
    if "subgraphs" in raw:
        raise UnsupportedOp(f"{where}: operators with networks inside are not supported")
    inputs = _references(raw.get("inputs", []), number, where)
    return SymbolNode(op, name, inputs, Attributes(where, values))


def _references(raw: Any, below: int, where: str) -> tuple[tuple[int, int], ...]:
    """Check a list of ``[node, output]`` or ``[node, output, version]``."""
    if not isinstance(raw, list):
        raise ModelError(f"{where}: expected a list of the nodes it reads")
    found = []
    for item in raw:
        fits = isinstance(item, list) and 1 <= len(item) <= 3
        if not fits or not all(type(n) is int for n in item):
            raise ModelError(f"{where}: reads {str(item)[:40]}, expected [node, output]")
        node, output = item[0], item[1] if len(item) > 1 else 0
        if not 0 <= node < below or not 0 <= output < 1000:
            raise ModelError(
                f"{where}: reads output {output} of node {node}, which is not before it"
            )
        found.append((node, output))
    return tuple(found)
