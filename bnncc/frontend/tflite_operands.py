"""What the rules of TensorFlow Lite's operators ask of an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bnncc.errors import ModelError, ShapeError
from bnncc.frontend.flatbuffer import Table
from bnncc.frontend.tflite_file import Operator, Tensor
from bnncc.frontend.tflite_writer import Writer

Results = str | list[str]
"""Names of the results of an operator's nodes, as many as the operator has outputs."""

Rule = Callable[[Writer, Operator], Results]
"""Writes an operator."""


def operands(writer: Writer, operator: Operator, least: int, most: int | None = None) -> list[Any]:
    """Return the operands, as many as `most`, absent ones None."""
    most = least if most is None else most
    given = operator.inputs
    if not least <= len(given) <= most or any(t is None for t in given[:least]):
        raise ModelError(
            f"{writer.where}: has {sum(t is not None for t in given)} inputs, {least} to {most} "
            "are wanted"
        )
    return [*given, *[None] * (most - len(given))]


def option(operator: Operator, slot: int, kind: str, default: Any = 0) -> Any:
    """Return an option; `default` also where there are none at all."""
    return default if operator.options is None else operator.options.scalar(slot, kind, default)


def options_of(writer: Writer, operator: Operator) -> Table:
    """Return the options of an operator that must have some."""
    if operator.options is None:
        raise ModelError(f"{writer.where}: has no options")
    return operator.options


def rank_of(writer: Writer, tensor: Tensor) -> int:
    """Return how many axes a tensor has, which must be some."""
    if not tensor.shape:
        raise ShapeError(f"{writer.where}: `{tensor.name}` is a scalar, axes are wanted")
    return len(tensor.shape)
