"""The graph of an exported program as plain Python values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bnncc.errors import ModelError
from bnncc.ir.graph import Dim


@dataclass(frozen=True)
class Ref:
    """A value of the program: a tensor, or a number known at run time only."""

    name: str


@dataclass(frozen=True)
class Meta:
    """Type of a tensor as torch saw it."""

    dtype: str
    """NumPy's name; empty for types that cannot be compiled."""
    shape: tuple[Dim, ...]
    """A str is a symbol, or an expression of symbols."""
    contiguous: bool = True
    """Whether its strides are those of a freshly made tensor, as far as is known."""


@dataclass(frozen=True)
class Call:
    """One operator of the program."""

    target: str
    """``conv2d.default`` for ATen's operators, other namespaces in full."""
    args: Mapping[str, Any]
    """By the operator's own argument names; `Ref`, number, string, dtype, None or lists of them."""
    outputs: tuple[str, ...]
    """Names of results; empty for one that nothing uses."""
    name: str
    """Of the node."""
    module: str = ""
    """Path of the module it is called in, as ``layer1.0.conv1``."""
    leaf: bool = False
    """Whether that module is one of torch's own."""
    line: str = ""
    """Where in the user's code, as ``net.py:20``."""

    @property
    def where(self) -> str:
        """What to call it in messages."""
        line = f" ({self.line})" if self.line else ""
        return f"{self.target.removesuffix('.default')} `{self.name}`{line}"

    def refs(self) -> list[str]:
        """Return the names of all values it reads."""
        return [r.name for value in self.args.values() for r in references(value)]


def references(value: Any) -> list[Ref]:
    """Return the `Ref` that `value` is, or those in the list that it is."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, list):
        return [r for item in value for r in references(item)]
    return []


@dataclass
class Program:
    """An exported program."""

    calls: list[Call]
    """In order."""
    inputs: list[str]
    """User inputs."""
    outputs: list[Any]
    """What the program returns."""
    stored: dict[str, str]
    """What stands for a parameter, buffer or constant, and the parameter's name."""
    metas: dict[str, Meta]
    """Of every tensor."""
    mutated: set[str] = field(default_factory=set)
    """Stored values that change from call to call."""
    max_dims: dict[str, int] = field(default_factory=dict)
    """The greatest sizes of symbols, where the program has any."""


def check_order(program: Program) -> None:
    """Check that names are given once, and before they are used.

    Raises
    ------
    ModelError
        Naming the call.
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
    """Return the calls that outputs depend on, and those that change what they depend on."""
    live = {r.name for out in program.outputs for r in references(out)}
    kept: list[Call] = []
    for call in reversed(program.calls):
        if mutates(call) or any(o in live for o in call.outputs if o):
            kept.append(call)
            live.update(call.refs())
    return kept[::-1]
