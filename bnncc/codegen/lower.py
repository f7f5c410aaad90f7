"""Lower the physical graph to a Relax module.

Kernels become ``relax.bnncc.*`` calls, views become reshapes, and every other node is converted by
TVM's ONNX importer or by `converters`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.relax.frontend.onnx import onnx_frontend

from bnncc.codegen import converters, guards, in_place, ops, origins
from bnncc.errors import ModelError, UnsupportedOp, message_lines
from bnncc.ir.demands import WHOLE_MOVES, Demand, demands, integer_ranges, limits_of_inputs, met
from bnncc.ir.dims import Dim, evaluated, is_static
from bnncc.ir.evaluate import OPSET
from bnncc.ir.fold import find_sizes
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.moves import VIEW
from bnncc.ir.schema import is_default
from bnncc.transform.physical import KERNEL


def to_relax(
    graph: Graph, *, checks: bool = True, pairs: Mapping[str, str] | None = None
) -> tvm.IRModule:
    """Build the Relax module of a physical graph.

    Parameters
    ----------
    graph : Graph
        From `transform.fuse`.
    checks : bool
        Whether code may check indices and divisors; GPU code cannot report failures.
    pairs : mapping of str to str, optional
        Outputs, by the input that each continues in the caller's memory.

    Returns
    -------
    tvm.IRModule
        One function ``main``; its parameters are the graph's inputs in order, its result is the
        tuple of the outputs (a tensor if there is one).

    Raises
    ------
    UnsupportedOp
        If TVM's importer cannot convert a node, or a check is needed that cannot be made; the
        message names the node.
    """
    ops.register()
    return _Lowering(graph, checks, pairs or {}).run()


class _Builder(relax.BlockBuilder):
    """A builder that names variables after the node that they come from; see `origins`."""

    hint = ""

    def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Var:
        """Emit a binding."""
        return super().emit(expr, name_hint or self.hint)

    def _exit_function_scope(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if exc_type is not None:
            self._end_block()  # TVM warns of blocks that are still open
        super()._exit_function_scope(exc_type, exc_val, exc_tb)


class _Lowering:
    def __init__(self, graph: Graph, checks: bool, pairs: Mapping[str, str]) -> None:
        self.graph = graph
        self.pairs = pairs
        self.checks = checks
        self.ranges = integer_ranges(graph)
        self.allowed = limits_of_inputs(graph)
        self.symbols: dict[str, tirx.Var] = {}
        self.values: dict[str, relax.Expr] = {}
        self.bb = _Builder()
        self.converters: Mapping[str, Any] = onnx_frontend._get_convert_map()

    def run(self) -> tvm.IRModule:
        params = [
            relax.Var(_identifier(i, k), self._type(self.graph.types[i]))
            for k, i in enumerate(self.graph.inputs)
        ]
        self.values.update(zip(self.graph.inputs, params, strict=True))
        find_sizes(self.graph)
        attrs: dict[str, Any] = {"num_input": len(params)}
        if self.pairs:
            ends = [
                (self.graph.inputs.index(past), self.graph.outputs.index(present))
                for past, present in self.pairs.items()
            ]
            attrs[in_place.PAIRS] = [k for pair in ends for k in pair]
        with self.bb.function("main", params, attrs=attrs):
            with self.bb.dataflow():
                for number, node in enumerate(self.graph.nodes):
                    self.bb.hint = origins.variable(node.op, number)
                    self._emit(node)
                results = [self._value(name) for name in self.graph.outputs]
                result = results[0] if len(results) == 1 else relax.Tuple(results)
                # Its variable may replace that of the last node.
                made = self.bb.emit_output(result, getattr(result, "name", "results"))
            self.bb.emit_func_output(made)
        return self.bb.get()

    def _shape(self, kind: TensorType) -> list[Any]:
        return [self._dim(d) for d in kind.shape]

    def _dim(self, dim: Dim) -> Any:
        """Return a dimension as a number or an expression of symbols."""
        return evaluated(dim, lambda s: self.symbols.setdefault(s, tirx.Var(s, "int64")))

    def _type(self, kind: TensorType) -> relax.TensorType:
        return relax.TensorType(self._shape(kind), kind.dtype)

    def _sizes(self, name: str) -> Sequence[Any] | None:
        """Return the elements of an integer tensor that consists of dimensions, or None."""
        if name in self.graph.constants:
            return [int(v) for v in self.graph.constants[name].reshape(-1)]
        known = self.graph.sizes.get(name, (None,))
        dims = [self._dim(d) for d in known if d is not None]
        return dims if len(dims) == len(known) else None

    def _symbolic(self, name: str) -> Sequence[Any] | None:
        return None if name in self.graph.constants else self._sizes(name)

    def _value(self, name: str) -> relax.Expr:
        if name not in self.values and (sizes := self._symbolic(name)):
            kind = self.graph.types[name]

            def written(sizes: Sequence[Any]) -> te.Tensor:
                def element(*at: Any) -> Any:
                    made = tirx.Cast(kind.dtype, sizes[0])
                    for k, size in enumerate(sizes[1:], 1):
                        made = tirx.Select(at[0] == k, tirx.Cast(kind.dtype, size), made)
                    return made

                return te.compute(self._shape(kind), element, name="sizes")

            shape = relax.ShapeExpr([tirx.convert(size) for size in sizes])
            # Opaque: TVM defines the size twice in a kernel that others are fused into.
            self.values[name] = self.bb.emit_te(
                written,
                shape,
                primfunc_name_hint="sizes",
                primfunc_attrs={"op_pattern": ops.OPAQUE},
            )
        if name not in self.values:
            # TVM would convert int64 to int32, and float64 to float32.
            value = np.array(self.graph.constants[name], order="C")
            self.values[name] = relax.const(value, value.dtype.name)
        return self.values[name]

    def _emit(self, node: Node) -> None:
        if node.op == KERNEL:
            args = [self._value(i) for i in node.inputs]
            made = self.bb.emit(ops.call(node.attrs["spec"], args))
            results = [made] if len(node.outputs) == 1 else [
                self.bb.emit(relax.TupleGetItem(made, k)) for k in range(len(node.outputs))
            ]  # fmt: skip
        elif node.outputs[0] in self.pairs.values():
            results = [self._continued(node)]
        elif node.op in _SHAPED:  # TVM's converters do not handle symbolic shapes
            shape = relax.ShapeExpr(self._shape(self.graph.types[node.outputs[0]]))
            results = [self.bb.emit(_SHAPED[node.op](self._value(node.inputs[0]), shape))]
        elif all(self._symbolic(o) for o in node.outputs):
            return  # evaluated where it is read
        elif node.op in ("Slice", "Range") and (found := self._of_symbols(node)) is not None:
            results = [self.bb.emit(found)]
        elif node.op == "bnncc.FloatSign":
            results = [self.bb.emit(_float_sign(self._value(node.inputs[0]), node.attrs))]
        elif node.op == "Cast" and (kind := self._narrow(node)):
            # TVM's converter copies its operand, with everything fused into it, a dozen times.
            whole = relax.op.astype(self._value(node.inputs[0]), "int64")
            results = [self.bb.emit(relax.op.astype(whole, kind))]
        else:
            results = self._convert(node)
        for name, value in zip(node.outputs, results, strict=False):
            if name:
                self.values[name] = value

    def _continued(self, node: Node) -> relax.Expr:
        """Return a cache with what is appended to it, or written into it (`caches`)."""
        made = self._type(self.graph.types[node.outputs[0]])
        base, written = node, []
        if node.op == "ScatterND":
            operands = [self._value(name) for name in node.inputs]
            self._guarded(node, operands)
            written = operands[1:]
            base = self.graph.producers().get(node.inputs[0], node)
        names = node.inputs[:1] if base.op == "ScatterND" else base.inputs
        axis = int(base.attrs.get("axis", 0)) % len(made.shape)
        return in_place.append(self.bb, [self._value(n) for n in names], made, axis, written)

    def _narrow(self, node: Node) -> str:
        """Return the type of a Cast from float32 to a narrow type, or ""."""
        kinds = self.graph.types[node.inputs[0]].dtype, self.graph.types[node.outputs[0]].dtype
        narrow = kinds[0] == "float32" and kinds[1] in ("int8", "uint8", "int16", "uint16")
        return kinds[1] if narrow else ""

    def _explicit(self, node: Node) -> list[str]:
        """Return the node's inputs, with explicit bounds of a Slice.

        TVM's converter loses elements if a start counts from the end and the end is open.
        """
        names = list(node.inputs)
        if node.op != "Slice" or self.graph.computed(names[1:]):
            return names
        shape = self.graph.types[names[0]].shape
        start, end = (self.graph.constants[i].astype(np.int64) for i in names[1:3])
        axes = self.graph.constants[names[3]] if names[3:4] and names[3] else np.arange(len(start))
        steps = self.graph.constants[names[4]] if names[4:5] and names[4] else np.ones_like(start)
        bounds = np.stack([start, end], axis=1)
        for row, axis, step in zip(bounds, axes, steps, strict=True):
            size = shape[int(axis)]
            if isinstance(size, int):
                low, high, _ = slice(int(row[0]), int(row[1]), int(step)).indices(size)
                row[:] = low, high if high >= 0 else -size - 1  # -1 would be the last element
        return [
            names[0], *(self.graph.constant(bounds[:, k], f"{node.name}.bound") for k in (0, 1)),
            *names[3:],
        ]  # fmt: skip

    def _of_symbols(self, node: Node) -> relax.Expr | None:
        """Return a Slice or a Range with symbolic bounds, or None for other nodes."""
        data, out = self.graph.types[node.inputs[0]], self.graph.types[node.outputs[0]]
        if data.static and not any(i in self.graph.sizes for i in node.inputs):
            return None
        vectors = [self._sizes(i) or () if i else () for i in node.inputs]
        if node.op == "Range":
            return relax.op.arange(*(v[0] for v in vectors), out.dtype)
        starts, _, given, steps = [*vectors[1:], (), ()][:4]
        axes = [int(a) % len(data.shape) for a in given or range(len(starts))]
        if any(step != 1 for step in steps):
            return None
        shape, made = self._shape(data), self._shape(out)
        begins: list[Any] = []
        for axis, start in zip(axes, starts, strict=True):
            if isinstance(start, int) and isinstance(shape[axis], int):
                start = slice(start, None).indices(shape[axis])[0]
            elif isinstance(start, int) and start < 0:
                start += shape[axis]
            begins.append(start)
        ends = [begin + made[axis] for axis, begin in zip(axes, begins, strict=True)]
        return relax.op.strided_slice(
            self._value(node.inputs[0]), axes, begins, ends, assume_inbound=True
        )

    def _convert(self, node: Node) -> list[relax.Expr]:
        args = onnx_frontend.onnx_input()
        for name in self._explicit(node):
            args.append(self._value(name) if name else None)
        made = self._guarded(node, args)
        if made is None:
            made = converters.convert(self.bb, node, args, self.graph)
        if made is None:
            made = self._imported(node, args)
        made = self.bb.normalize(made)
        if isinstance(made, relax.Tuple):
            results = [self.bb.emit(f) for f in made.fields]
        elif isinstance(made.ty, relax.TupleType):
            whole = self.bb.emit(made)
            results = [
                self.bb.emit(relax.TupleGetItem(whole, k)) for k in range(len(made.ty.fields))
            ]
        elif isinstance(made.ty, relax.ShapeType):
            return [made]
        else:
            results = [self.bb.emit(made)]
        if len(results) < len(node.outputs):
            raise UnsupportedOp(
                f"{self.graph.source}: {node.where}: only {len(results)} of its "
                f"{len(node.outputs)} outputs are supported"
            )
        return [
            self._typed(value, name) if name else value
            for value, name in zip(results, node.outputs, strict=False)
        ]

    def _typed(self, value: relax.Expr, name: str) -> relax.Expr:
        """Return a converted value in the type that the graph declares.

        Some of TVM's converters return a vector of one element for a scalar, or another integer
        type.
        """
        kind, have = self.graph.types[name], value.ty
        if str(have.dtype) != kind.dtype:
            value = self.bb.emit(relax.op.astype(value, kind.dtype))
        if not isinstance(have.shape, relax.ShapeExpr):
            return self.bb.match_cast(value, self._type(kind))
        shape = have.shape.values
        same = len(shape) == len(kind.shape) and all(
            isinstance(d, str) or int(s) == d
            for s, d in zip(shape, kind.shape, strict=True)
            if not isinstance(d, int) or isinstance(s, tirx.IntImm)
        )  # fmt: skip
        if not same:
            target = relax.ShapeExpr(self._shape(kind))
            value = self.bb.emit(relax.op.reshape(value, target))
        return value

    def _imported(self, node: Node, args: Any) -> relax.Expr:
        """Convert a node with TVM's ONNX importer."""
        where = f"{self.graph.source}: {node.where}"
        converter = self.converters.get(node.op)
        if converter is None:
            raise UnsupportedOp(
                f"{where}: this operator is not supported",
                hint="replace it by operators TVM's ONNX importer knows, "
                "or cut the model before it",
            )
        attrs = _Attributes({k: _attribute(v) for k, v in node.attrs.items()})
        attrs["tvm_custom"] = {"name": node.name, "num_outputs": len(node.outputs)}
        convert: Callable[..., relax.Expr] = converter.get_converter(OPSET)
        try:
            made = self.bb.normalize(convert(self.bb, args, attrs, [self.values, {}]))
        except Exception as error:
            said = message_lines(error)
            raise UnsupportedOp(
                f"{where}: TVM's importer cannot convert it: {said[-1][:160]}"
            ) from error
        unread = [
            key
            for key, value in node.attrs.items()
            if key not in attrs.read
            and (node.op, key) not in _IMPLIED
            and not is_default(node.op, key, value)
        ]
        if unread:
            raise UnsupportedOp(
                f"{where}: TVM's importer does not look at attribute `{unread[0]}` = "
                f"{node.attrs[unread[0]]!r}"
            )
        return made

    def _guarded(self, node: Node, args: Any) -> relax.Expr | None:
        """Check the operands of `node`; if it is an integer division, return its result."""
        demand = demands(node, self.graph.types)
        if demand is None:
            return None
        proved = met(demand, self.ranges, self.graph.constants)
        if not proved:
            self._guard(demand, args)
        if not demand.sizes and (not proved or self._may_trap(node)):
            return self._divided(node, args)
        return None

    def _guard(self, demand: Demand, args: Any) -> None:
        """Insert a check of an operand."""
        k = demand.position
        static = is_static(demand.sizes)
        if static and demand.operand in self.graph.constants:
            raise ModelError(
                f"{self.graph.source}: {demand}",
                hint="the values are constants of the model: it cannot run on any input",
            )
        sizes = [self._dim(d) for d in demand.sizes]
        if self.checks:
            args[k] = guards.checked(self.bb, demand, args[k], sizes)
        elif not self._from_input(demand):
            raise UnsupportedOp(
                f"{self.graph.source}: {demand.node.where}: the values of "
                f"`{demand.operand}` are computed, and code for GPUs cannot check them",
                hint="limit them in the model, for example by Clip",
            )
        if demand.sizes:
            args[k] = guards.inside(self.bb, args[k], sizes, wraps=demand.wraps and not self.checks)

    def _from_input(self, demand: Demand) -> bool:
        """Whether the runtime checks the operand, as an input of the network."""
        name, made = demand.operand, self.graph.producers()
        while name in made and made[name].op in (*WHOLE_MOVES, "Cast", VIEW):
            name = made[name].inputs[0]
        return name in self.allowed

    def _may_trap(self, node: Node) -> bool:
        """Whether the divisor may be -1 while the dividend is the smallest integer."""
        low, high = self.ranges[node.inputs[1]]
        return low <= -1 <= high

    def _divided(self, node: Node, args: Any) -> relax.Expr:
        """Divide integers without traps; the result is defined for all operands."""
        op = relax.op.divide
        if node.op == "Mod":
            op = relax.op.mod if node.attrs.get("fmod", 0) else relax.op.floor_mod
        return guards.divided(self.bb, op, args[0], args[1])


_SHAPED: Mapping[str, Callable[..., relax.Expr]] = {
    VIEW: relax.op.reshape,
    "Reshape": relax.op.reshape,
    "Expand": relax.op.broadcast_to,
}
"""Operators whose second operand is the shape of the result."""


class _Attributes(dict[str, Any]):
    """Attributes that record which of them were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute."""
        self.read.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        """Return an attribute and remove it."""
        self.read.add(key)
        return super().pop(key, *default)


_IMPLIED = {("Conv", "kernel_shape"), ("ConvTranspose", "kernel_shape")}
"""Attributes that TVM's importer may ignore, because the weight's shape implies them."""


def _identifier(name: str, position: int) -> str:
    clean = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return clean if clean and not clean[0].isdigit() else f"input_{position}"


def _attribute(value: Any) -> Any:
    """Return an attribute in the form in which TVM's importer reads it from a file."""
    if isinstance(value, list):
        return tuple(value)
    return value.encode() if isinstance(value, str) else value


def _float_sign(x: relax.Expr, attrs: Mapping[str, Any]) -> relax.Expr:
    """Return a sign as numbers, for places where no kernel can compute bits."""
    zero = relax.const(np.float32(0))
    middle = relax.const(np.float32((attrs["lo"] + attrs["hi"]) / 2))
    hi, lo = (relax.const(np.float32(attrs[k])) for k in ("hi", "lo"))
    compare = relax.op.greater if attrs["zero"] == "gt" else relax.op.greater_equal
    signs = relax.op.where(compare(x, zero), hi, lo)
    if attrs["zero"] != "mid":
        return signs
    return relax.op.where(relax.op.equal(x, zero), middle, signs)
