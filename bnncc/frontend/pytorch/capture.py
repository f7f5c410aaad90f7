"""Modules and exported programs in memory: they are saved like a file, and then read.

Operators that the reader does not support are first replaced by torch's own decompositions.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

from bnncc.errors import ModelError, UsageError, message_lines


def is_torch(model: object) -> bool:
    """Whether `model` is a module or exported program; does not import torch."""
    return any(base.__module__.partition(".")[0] == "torch" for base in type(model).__mro__)


def exported(model: Any, example_inputs: Any = None, dynamic_shapes: Any = None) -> Any:
    """Return the exported program of a module; return an exported program unchanged.

    Parameters
    ----------
    model : torch.nn.Module or torch.export.ExportedProgram
        A module is exported in eval mode; its mode is restored.
    example_inputs : tensor or tuple of tensors, optional
        Arguments of a module's ``forward``.
    dynamic_shapes : optional
        The argument of ``torch.export.export``.

    Returns
    -------
    torch.export.ExportedProgram

    Raises
    ------
    UsageError
        If example inputs are missing, or given for an exported program.
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
        return model
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"a {type(model).__name__} cannot be compiled; expected a torch.nn.Module or a "
            "torch.export.ExportedProgram"
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
            return torch.export.export(model, tuple(example_inputs), dynamic_shapes=dynamic_shapes)
        except Exception as error:  # including errors of the module's own code
            text, hint = _reason(error)
            raise ModelError(f"torch.export cannot export it: {text}", hint=hint) from error


def decomposed(program: Any, known: Callable[[str], bool]) -> Any:
    """Return an exported program without side effects, and with few unsupported operators.

    Parameters
    ----------
    program : torch.export.ExportedProgram
        The program; not modified.
    known : callable
        Whether an operator, such as ``conv2d.default``, should be kept.

    Returns
    -------
    torch.export.ExportedProgram
        With torch's decompositions of unsupported operators, as far as torch has them.

    Raises
    ------
    ModelError
        If torch fails.
    """
    import torch
    from torch._decomp import decomposition_table

    if any("autocast" in str(op) for op in _wrappers(torch, program)):
        raise ModelError("torch.export would drop the autocast in it")
    implicit = torch.export.default_decompositions().materialize()
    try:
        # What depends only on weights is computed as written: torch's decomposition of `inverse`,
        # for example, checks the result through an effect, which a file cannot have.
        program = program.run_decompositions({})  # without operators that modify their operands
        _compute_constants(torch, program)
        for _ in range(_ROUNDS):
            unknown = {op for op in _operators(torch, program) if not known(_named(op))}
            table = {
                op: implicit.get(op) or decomposition_table[op]
                for op in unknown
                if op in implicit or op in decomposition_table
            }
            before, program = program, program.run_decompositions(table)
            if not table or _operators(torch, before) == _operators(torch, program):
                break
        _compute_constants(torch, program)
    except Exception as error:  # of any kind
        text, hint = _reason(error)
        raise ModelError(f"torch.export cannot decompose it: {text}", hint=hint) from error
    return program


def _compute_constants(torch: Any, program: Any) -> None:
    """Replace what is computed from parameters and constants only by its value.

    Weights from `torch.nn.utils.parametrizations.orthogonal` are an example, and weights unpacked
    with shifts: operators may be unsupported, or their operands.
    """
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted = signature.inputs_to_lifted_tensor_constants
    changed = {*signature.buffers_to_mutate.values()}
    values: dict[Any, Any] = {}
    for node in list(program.graph.nodes):
        if node.op == "placeholder":
            key = names.get(node.name)
            if key is not None and key not in changed:
                stored = program.state_dict.get(key)
                values[node] = program.constants.get(key) if stored is None else stored
            elif node.name in lifted:
                values[node] = program.constants[lifted[node.name]]
        elif node.op == "call_function" and all(n in values for n in node.all_input_nodes):
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                continue
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)
    for node in list(program.graph.nodes):
        made = values.get(node)
        if node.op != "call_function" or not isinstance(made, torch.Tensor):
            continue
        if any(user not in values for user in node.users):
            _store(torch, program, node, made.detach())
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _store(torch: Any, program: Any, node: Any, value: Any) -> None:
    """Replace a node by a constant."""
    from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

    first = next(n for n in program.graph.nodes if n.op == "placeholder")
    with program.graph.inserting_before(first):
        place = program.graph.placeholder(f"computed_{node.name}")
    name = place.target = place.name  # unique: another round may have stored one of this name
    place.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(place)
    spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(name), name)
    program.graph_signature.input_specs.insert(0, spec)
    program.constants[name] = value.contiguous()


_ROUNDS = 6
"""Rounds of decomposition: a decomposition may contain others; more than one round is rare."""


def _operators(torch: Any, program: Any) -> set[Any]:
    """Return the operators that a program calls, including those in subgraphs."""
    graphs = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    nodes = (node for graph in graphs for node in graph.graph.nodes)
    return {n.target for n in nodes if isinstance(n.target, torch._ops.OpOverload)}


def _wrappers(torch: Any, program: Any) -> list[Any]:
    """Return the operators that call subgraphs, such as ``with`` statements."""
    higher = torch._ops.HigherOrderOperator
    return [n.target for n in program.graph.nodes if isinstance(n.target, higher)]


def _named(operator: Any) -> str:
    """Return the name of an operator in files."""
    name = str(operator)
    return name.removeprefix("aten.") if name.startswith("aten.") else f"torch.ops.{name}"


def _reason(error: Exception) -> tuple[str, str]:
    """Return torch's reason for a failed export, and a hint."""
    lines = message_lines(error)
    hint = "make torch.export.export(model.eval(), example_inputs) work first"
    if "fake tensor" in lines[0]:
        hint = (
            "torch.export cannot see assignments to `.data`: compute with x.detach() or "
            "(sign(x) - x).detach() + x instead"
        )
    return lines[0][:200], hint


@contextlib.contextmanager
def _evaluating(torch: Any, model: Any) -> Iterator[None]:
    """Switch `model` to eval mode inside the context."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def saved(program: Any) -> bytes:
    """Return the ``.pt2`` file of an exported program.

    Raises
    ------
    ModelError
        If torch cannot serialize something in it.
    """
    import torch

    buffer = io.BytesIO()
    try:
        with _plain_results(torch, program):
            torch.export.save(program, buffer)
    except Exception as error:  # several types, for operators and constants it cannot serialize
        raise ModelError(f"torch.export cannot save the program: {str(error)[:200]}") from error
    return buffer.getvalue()


@contextlib.contextmanager
def _plain_results(torch: Any, program: Any) -> Iterator[None]:
    """Make a program return a flat tuple of its results inside the context.

    Files contain the nesting of results, which torch cannot serialize in all cases, e.g. for the
    result of topk. The reader does not use it.
    """
    signature = program.module_call_graph[0].signature
    spec = signature.out_spec
    flat = [None] * spec.num_leaves
    signature.out_spec = torch.utils._pytree.tree_flatten(tuple(flat))[1]
    try:
        yield
    finally:
        signature.out_spec = spec
