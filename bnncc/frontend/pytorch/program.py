"""The graph of an exported program as plain Python values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bnncc.errors import ModelError
from bnncc.ir.graph import Dim


@dataclass(frozen=True)
class Ref:
    """A value of the program: a tensor, or a number computed at run time."""

    name: str


@dataclass(frozen=True)
class Meta:
    """Type of a tensor as recorded by torch."""

    dtype: str
    """NumPy name; empty for unsupported types."""
    shape: tuple[Dim, ...]
    """A str is a symbol, or an expression of symbols."""
    contiguous: bool = True
    """Whether it has the default strides, as far as known."""


@dataclass(frozen=True)
class Call:
    """A call of an operator."""

    target: str
    """``conv2d.default`` for ATen operators; full names for other namespaces."""
    args: Mapping[str, Any]
    """By the operator's argument names: `Ref`, number, string, dtype, None or lists of these."""
    outputs: tuple[str, ...]
    """Names of results; empty for unused ones."""
    name: str
    """Name of the node."""
    module: str = ""
    """Path of the calling module, such as ``layer1.0.conv1``."""
    leaf: bool = False
    """Whether that module is one of torch's."""
    line: str = ""
    """Position in the user's code, such as ``net.py:20``."""

    @property
    def where(self) -> str:
        """Description of the call for messages."""
        line = f" ({self.line})" if self.line else ""
        return f"{self.target.removesuffix('.default')} `{self.name}`{line}"

    def refs(self) -> list[str]:
        """Return the names of all values that it reads."""
        return [r.name for value in self.args.values() for r in references(value)]


def references(value: Any) -> list[Ref]:
    """Return the `Ref` in an argument, or all in a list."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, list):
        return [r for item in value for r in references(item)]
    return []


@dataclass
class Program:
    """An exported program."""

    calls: list[Call]
    """In program order."""
    inputs: list[str]
    """User inputs."""
    outputs: list[Any]
    """What the program returns."""
    stored: dict[str, str]
    """By value: name of the parameter, buffer or constant."""
    metas: dict[str, Meta]
    """Types of all tensors."""
    mutated: set[str] = field(default_factory=set)
    """Stored values that the program modifies."""
    max_dims: dict[str, int] = field(default_factory=dict)
    """Maximum sizes of symbols, if known."""


def check_order(program: Program) -> None:
    """Check that names are defined once, and before they are used.

    Raises
    ------
    ModelError
        Names the call.
    """
    made = {*program.inputs, *program.stored}
    if len(made) != len(program.inputs) + len(program.stored):
        raise ModelError("two inputs of the exported program have the same name")
    for call in program.calls:
        for name in call.refs():
            if name not in made:
                raise ModelError(f"{call.where}: reads `{name[:80]}`, which is defined nowhere")
        for name in filter(None, call.outputs):
            if name in made:
                raise ModelError(f"{call.where}: makes `{name[:80]}`, which exists already")
            made.add(name)
    for out in program.outputs:
        for ref in references(out):
            if ref.name not in made:
                raise ModelError(f"output `{ref.name[:80]}` is computed by no node")


def live_calls(program: Program, mutates: Callable[[Call], bool]) -> list[Call]:
    """Return the calls that outputs depend on, including those that modify dependencies."""
    live = {r.name for out in program.outputs for r in references(out)}
    kept: list[Call] = []
    for call in reversed(program.calls):
        if mutates(call) or any(o in live for o in call.outputs if o):
            kept.append(call)
            live.update(call.refs())
    return kept[::-1]
