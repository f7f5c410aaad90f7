"""Which nodes of the physical graph each kernel of TVM's is made of, for reports.

`lower` names variables after the node that they come from. TVM's passes keep these names until
``FuseOps`` moves calls into functions, and shares functions between equal groups. So calls are
numbered by what they compute, before and after: an operator and the numbers of its operands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tvm
from tvm import relax

_NAMED = re.compile(r"_(\d+)_\d*$")


def variable(op: str, number: int) -> str:
    """Return the name of the variables of the node at position `number`."""
    return f"{re.sub(r'[^A-Za-z0-9]', '_', op)}_{number}_"


class Origins:
    """By variable of ``main``, the nodes that it is computed by.

    Parameters
    ----------
    module : tvm.IRModule
        From `lower.to_relax`. The variables are known after the passes `before` and `after`.
    """

    def __init__(self, module: tvm.IRModule) -> None:
        self._named: dict[str, int] = {}
        self._numbers: dict[Any, int] = {}
        self._nodes: dict[int, set[int]] = {}
        self._found: dict[Any, set[int]] = {}
        node = None
        for binding in reversed(list(_bindings(module["main"]))):
            # Operands that were expressions are named by TVM: the next variable is their node's.
            named = _NAMED.search(binding.var.name)
            node = int(named[1]) if named else node
            if node is not None:
                self._named[binding.var.name] = node

    def of(self, var: relax.Var) -> tuple[int, ...]:
        """Return the positions of the nodes that compute a variable."""
        return tuple(sorted(self._found.get(var, ())))

    def before(self, module: tvm.IRModule, _: Any) -> tvm.IRModule:
        """Read the names of variables; to run before ``FuseOps``."""
        numbers: dict[Any, int] = {}
        for binding in _bindings(module["main"]):
            number = numbers[binding.var] = self._number(binding.value, numbers)
            if binding.var.name in self._named:
                self._nodes.setdefault(number, set()).add(self._named[binding.var.name])
        return module

    def after(self, module: tvm.IRModule, _: Any) -> tvm.IRModule:
        """Find the calls again, also inside groups; to run after ``FuseOps``."""
        numbers: dict[Any, int] = {}
        for binding in _bindings(module["main"]):
            value = binding.value
            of = getattr(value, "op", None)
            group = module[of] if isinstance(of, tvm.ir.GlobalVar) else None
            if group is None:
                number = numbers[binding.var] = self._number(value, numbers)
                self._found[binding.var] = self._nodes.get(number, set())
                continue
            inner = {
                param: self._number(arg, numbers)
                for param, arg in zip(group.params, value.args, strict=True)
            }
            nodes = self._found[binding.var] = set()
            for part in _bindings(group):
                inner[part.var] = self._number(part.value, inner)
                nodes |= self._nodes.get(inner[part.var], set())
            numbers[binding.var] = self._number(group.body.body, inner)
        return module

    def _number(self, value: Any, numbers: dict[Any, int]) -> int:
        """Return the number of an expression, given those of variables."""
        if isinstance(value, relax.Var):
            if value in numbers:
                return numbers[value]
            key: Any = value.name
        elif isinstance(value, relax.Call):
            op = str(getattr(value.op, "name", "") or value.op.name_hint)
            key = op, *(self._number(arg, numbers) for arg in value.args)
        elif isinstance(value, relax.Tuple):
            key = "", *(self._number(field, numbers) for field in value.fields)
        elif isinstance(value, relax.TupleGetItem):
            key = self._number(value.tuple_value, numbers), int(value.index)
        elif isinstance(value, tvm.ir.GenericConst):
            key = "constant", hash(value)  # of the object: its bytes are not read
        else:
            key = str(value)
        return self._numbers.setdefault(key, len(self._numbers))


def _bindings(func: relax.Function) -> Iterator[Any]:
    return (binding for block in func.body.blocks for binding in block.bindings)
