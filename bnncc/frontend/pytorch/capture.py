"""Modules and exported programs in memory: what ``torch.export.save`` makes of them is read."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from bnncc.errors import ModelError, UsageError

INSTALL = "pip install 'bnncc[torch]', or give the path of a .pt2 file, which needs no torch"


def is_torch(model: object) -> bool:
    """Whether `model` is a module or exported program; torch is not imported to find out."""
    return any(base.__module__.partition(".")[0] == "torch" for base in type(model).__mro__)


def captured(model: Any, example_inputs: Any = None, dynamic_shapes: Any = None) -> bytes:
    """Return the ``.pt2`` file of a module or exported program.

    Parameters
    ----------
    model : torch.nn.Module or torch.export.ExportedProgram
        A module is exported as it is in eval mode, and left as it was.
    example_inputs : tensor or tuple of tensors, optional
        Arguments of a module's ``forward``.
    dynamic_shapes : optional
        What ``torch.export.export`` calls so.

    Returns
    -------
    bytes

    Raises
    ------
    UsageError
        If there are no example inputs, or they do not go with `model`.
    ModelError
        If torch cannot export it.
    """
    import torch

    if isinstance(model, torch.export.ExportedProgram):
        if example_inputs is not None or dynamic_shapes is not None:
            raise UsageError(
                "an exported program has its inputs already: `example_inputs` and "
                "`dynamic_shapes` go with a module"
            )
        return _saved(torch, model)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"a {type(model).__name__} cannot be compiled; a torch.nn.Module or a "
            "torch.export.ExportedProgram is wanted"
        )
    if example_inputs is None:
        raise UsageError(
            "a module is compiled for inputs like `example_inputs`, which are missing",
            hint="bnncc.compile(model, (torch.zeros(1, 3, 224, 224),))",
        )
    if not isinstance(example_inputs, tuple | list):
        example_inputs = (example_inputs,)
    with _evaluating(torch, model):
        try:
            program = torch.export.export(
                model, tuple(example_inputs), dynamic_shapes=dynamic_shapes
            )
        except Exception as error:  # torch raises whatever the module's own code raises, too
            text, hint = _reason(error)
            raise ModelError(f"torch.export cannot export it: {text}", hint=hint) from error
    return _saved(torch, program)


def _reason(error: Exception) -> tuple[str, str]:
    """Return what torch says of a module it cannot export, and what to do."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    hint = "make torch.export.export(model.eval(), example_inputs) work first"
    if "fake tensor" in lines[0]:
        hint = (
            "torch.export cannot see assignments to `.data`: compute with x.detach() or "
            "(sign(x) - x).detach() + x instead"
        )
    return lines[0][:200], hint


@contextlib.contextmanager
def _evaluating(torch: Any, model: Any) -> Iterator[None]:
    """Put `model` into eval mode, and back."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _saved(torch: Any, program: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.export.save(program, buffer)
    except Exception as error:  # of several kinds: operators and constants it has no form for
        raise ModelError(f"torch.export cannot save the program: {str(error)[:200]}") from error
    return buffer.getvalue()
