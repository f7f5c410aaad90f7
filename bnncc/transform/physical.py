"""The physical graph that `transform.fuse` builds: tensors in the forms that kernels read.

A logical tensor of the ONNX graph can exist in several physical forms at once: float in the file's
layout (``NCHW``, also used for every rank but 4), float ``NHWC``, and planes of bits. `Physical`
tracks the existing forms, creates missing ones, and appends kernel nodes. A `Form` tells which
logical tensor a physical tensor holds, and how.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from bnncc.ir.dims import is_static
from bnncc.ir.graph import Dim, Graph, Node, TensorType
from bnncc.ir.moves import VIEW
from bnncc.recognise.lattice import Lattice, exact_line
from bnncc.schedules import with_weight_order
from bnncc.schedules.weight_order import Recorded
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary.bits_table import needs_table, slice_table
from bnncc.topi_binary.build import input_types, output_types, over_residual
from bnncc.topi_binary.layout import pad_lanes
from bnncc.topi_binary.spec import BinaryConv2d, ConcatBits, Elementwise, SliceBits, Spec
from bnncc.topi_binary.step import Step

Held = tuple[float, ...]
"""The values that bits or levels stand for, in order."""


@dataclass(frozen=True)
class Form:
    """How a physical tensor holds a logical tensor."""

    tensor: str
    """The logical tensor."""
    kind: str
    """``NCHW`` (also of every rank but 4), ``NHWC``: numbers; ``sign``, ``zero``: planes of bits;
    ``plane``, ``bytes``, ``pairs``, ``floats``: levels, as in `topi_binary.step.FORMS`."""
    values: Held = ()
    """Values of bits 0 and 1, or of levels 0, 1, ...; for a zero plane, the middle value."""
    number: int = 0
    """Index of a ``plane``."""


KERNEL = "bnncc.Kernel"
"""Operator name of a fused kernel; its attribute ``spec`` defines it."""

Line = tuple[float, float]
"""First value and step."""


@dataclass(frozen=True)
class Planes:
    """A tensor as bits: the sign plane, the zero plane if any, and the values of the bits."""

    sign: str
    zero: str | None
    value: Lattice


class Physical:
    """Builds the physical graph.

    Parameters
    ----------
    source : Graph
        The logical graph; only types, constants and names are read.
    target : TargetSpec, optional
        The target; without one, weights are in the order that all targets support.
    records : Recorded, optional
        Tuning records, which may prefer other weight orders.
    """

    def __init__(
        self, source: Graph, target: TargetSpec | None = None, records: Recorded | None = None
    ) -> None:
        self.source, self.target, self.records = source, target, records
        self.graph = Graph([], list(source.inputs), [], {}, {}, source.source, source.sign_zero)
        self.graph.reserved.update(source.types)
        self.floats: dict[str, dict[str, str]] = {}
        self.unrounded: set[str] = set()
        """Tensors whose forms are not rounded yet; their readers round them."""
        self.planes: dict[str, Planes] = {}
        self.levels: dict[str, dict[str, list[str]]] = {}
        self.lattices: dict[str, Lattice] = {}
        self.postponed: dict[str, Node] = {}
        for name in source.inputs:
            self.graph.types[name] = source.types[name]
            self.floats[name] = {"NCHW": name}

    def shape(self, name: str) -> tuple[Dim, ...]:
        """Return the logical shape of `name`."""
        return self.source.types[name].shape

    def image(self, name: str) -> tuple[Dim, int, int, int, int]:
        """Return ``(n, channels, height, width, rank)`` of a logical image or matrix of rows."""
        shape = self.shape(name)
        if len(shape) == 2:
            return shape[0], int(shape[1]), 1, 1, 2
        return shape[0], int(shape[1]), int(shape[2]), int(shape[3]), 4

    def available(self, name: str) -> bool:
        """Whether `name` exists in any form."""
        made = name in self.floats or name in self.planes or name in self.levels
        return made or name in self.source.constants or name in self.postponed

    def constant(self, value: np.ndarray, stem: str) -> str:
        """Add a constant and return its name; equal ones are shared."""
        # Key by digest: using the weights themselves would copy them all.
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)  # bfloat16 has no buffer
        digest = hashlib.sha256(content.data).digest()
        key = (value.dtype.str, value.shape, digest)
        table: dict[object, str] = self.__dict__.setdefault("_constants", {})
        if key not in table:
            table[key] = self.graph.constant(value, stem)
        return table[key]

    def vector(self, value: np.ndarray, stem: str, fill: float = 0) -> str:
        """Add a per-channel vector, padded to whole blocks."""
        return self.constant(pad_lanes(value, fill), stem)

    def ordered(self, spec: BinaryConv2d) -> BinaryConv2d:
        """Return a binary layer with the order in which its weights will be packed.

        It is chosen for a residual that the result is stored over, as usual (`in_place`).
        """
        if self.target is None or spec.per_image:
            return spec
        chosen = with_weight_order(over_residual(spec), self.target, self.records)
        return replace(spec, weight_order=chosen.weight_order)

    def kernel(
        self,
        spec: Spec,
        inputs: list[str],
        outputs: list[str],
        name: str,
        covers: tuple[str, ...] = (),
    ) -> Node:
        """Append a kernel; `outputs` are the names of its results, in order."""
        for given, (shape, dtype) in zip(inputs, input_types(spec), strict=True):
            have = self.graph.types[given]
            if have.dtype != dtype or have.shape != tuple(shape):
                raise AssertionError(f"{name}: kernel input {given} is {have}, not {shape} {dtype}")
        for out, (shape, dtype) in zip(outputs, output_types(spec), strict=True):
            self.graph.types[out] = TensorType(tuple(shape), dtype)
        node = Node(KERNEL, inputs, outputs, {"spec": spec}, name, covers)
        self.graph.nodes.append(node)
        return node

    def node(self, node: Node, types: list[TensorType]) -> None:
        """Append an ONNX node whose outputs have the given types."""
        for out, kind in zip(node.outputs, types, strict=True):
            if out:
                self.graph.types[out] = kind
        self.graph.nodes.append(node)

    def plain(self, node: Node, layout: str = "NCHW") -> None:
        """Append a node of the logical graph unchanged, on numbers.

        Parameters
        ----------
        node : Node
            An ONNX operator, or a sign that no kernel can compute as bits.
        layout : str
            Layout of its operands and results.
        """
        inputs = [self.float(i, layout) if i else "" for i in node.inputs]
        types: list[TensorType] = []
        outputs = []
        for out in node.outputs:
            if not out:
                outputs.append("")
                types.append(TensorType((), "float32"))
                continue
            shape = self.shape(out)
            if layout == "NHWC":
                shape = (shape[0], shape[2], shape[3], shape[1])
            name = self.graph.fresh(out)
            self.floats[out] = {layout: name}
            outputs.append(name)
            types.append(TensorType(shape, self.source.types[out].dtype))
        op = node.op if node.op != "bnncc.Sign" else "bnncc.FloatSign"
        self.node(Node(op, inputs, outputs, dict(node.attrs), node.name, node.covers), types)

    def postpone(self, node: Node) -> None:
        """Defer `node` until its numeric result is requested, which usually never happens."""
        self.postponed.update({out: node for out in node.outputs if out})

    def fresh(self, stem: str, shape: tuple[Dim, ...], dtype: str) -> str:
        """Declare a tensor with a new name, and return the name."""
        name = self.graph.fresh(stem)
        self.graph.types[name] = TensorType(shape, dtype)
        return name

    # ---- float forms ------------------------------------------------------------------------

    def layout_of(self, name: str) -> str:
        """Return the layout in which a kernel reads `name`: NHWC unless only the other exists."""
        forms = self.floats.get(name, {"NHWC": ""})
        return "NHWC" if "NHWC" in forms else next(iter(forms))

    def float(self, name: str, layout: str = "NCHW") -> str:
        """Return the tensor that holds `name` in `layout`, creating it if necessary."""
        if len(self.shape(name)) != 4:
            layout = "NCHW"
        forms = self.floats.get(name, {})
        if layout not in forms:
            made = self._make_float(name, layout, forms)
            self.floats.setdefault(name, {})[layout] = made
        return self.floats[name][layout]

    def _make_float(self, name: str, layout: str, forms: dict[str, str]) -> str:
        if name in self.source.constants:
            value = self.source.constants[name]
            if layout == "NHWC":
                value = np.ascontiguousarray(value.transpose(0, 2, 3, 1))
            return self.constant(value, name)
        if not forms and name in self.postponed and name not in self.planes:
            self.plain(self.postponed[name])
            return self.float(name, layout)
        if not forms:
            if name in self.levels:
                return self._from_levels(name, layout)
            return self._from_bits(name, layout)
        other, have = next(iter(forms.items()))
        n, channels, height, width = self.shape(name)
        static = is_static((channels, height, width))
        shape: tuple[Dim, ...] = (
            (n, height, width, channels) if layout == "NHWC" else (n, channels, height, width)
        )
        if height == width == 1 or channels == 1:
            return self.reshape(have, shape)
        if self.source.types[name].dtype != "float32" or not static:
            out = self.fresh(f"{name}.{layout.lower()}", shape, self.source.types[name].dtype)
            perm = [0, 2, 3, 1] if layout == "NHWC" else [0, 3, 1, 2]
            self.node(
                Node("Transpose", [have], [out], {"perm": perm}, name), [self.graph.types[out]]
            )
            return out
        n, channels, height, width, _ = self.image(name)
        spec = Elementwise(n, height, width, channels, other, (Step("store", layout),))
        out = self.graph.fresh(f"{name}.{layout.lower()}")
        self.kernel(spec, [have], [out], name)
        return out

    def reshape(self, name: str, shape: tuple[Dim, ...]) -> str:
        """Return a view of `name` with another shape (same elements in the same order)."""
        kind = self.graph.types[name]
        if kind.shape == shape:
            return name
        out = self.fresh(f"{name}.view", shape, kind.dtype)
        self.graph.nodes.append(Node(VIEW, [name], [out], {}, name))
        return out

    def bits_source(self, name: str) -> tuple[Elementwise, list[str], Line] | None:
        """Return an anchor without steps that reads the planes of `name`.

        Also its inputs, and (first, step) such that the anchor's value v stands for exactly
        ``first + step * v``. None if no such pair exists.
        """
        planes = self.planes[name]
        value = planes.value
        n, channels, height, width, rank = self.image(name)
        spec = Elementwise(
            n, height, width, channels, rank=rank, from_bits=True, ternary=planes.zero is not None
        )
        inputs = [planes.sign] + ([planes.zero] if planes.zero else [])
        if value.bipolar:
            return spec, inputs, (0.0, value.hi)
        if planes.zero is not None:  # the anchor's value is -1, 0 or 1
            middle = np.float32((value.lo + value.hi) / 2)
            step = np.float32(value.hi) - middle
            if (middle - step, middle + step) != (np.float32(value.lo), np.float32(value.hi)):
                return None
            return spec, inputs, (float(middle), float(step))
        line = exact_line(np.array([value.lo, value.hi], np.float32))
        return None if line is None else (replace(spec, mode="and"), inputs, line)

    def _from_bits(self, name: str, layout: str) -> str:
        source = self.bits_source(name)
        if source is None:
            sign, zero, value = (getattr(self.planes[name], k) for k in ("sign", "zero", "value"))
            if zero is None:
                return self._from_planes(name, layout, [sign], value.with_zero(False).values)
            held = value.with_zero(True).values
            return self._from_planes(name, layout, [zero, self.xor(sign, zero)], held)
        spec, inputs, line = source
        steps: tuple[Step, ...] = (Step("store", layout),)
        if line != (0.0, 1.0):
            steps = (Step("affine"), *steps)
            inputs += self._line(line, spec.channels)
        out = self.graph.fresh(f"{name}.{layout.lower()}")
        self.kernel(replace(spec, steps=steps), inputs, [out], name)
        return out

    def _line(self, line: Line, channels: int) -> list[str]:
        """Return the inputs of an ``affine`` step that is the same for all channels."""
        pairs = ((line[1], "unit"), (line[0], "first"))
        return [self.vector(np.full(channels, v, np.float32), what) for v, what in pairs]

    # ---- levels -----------------------------------------------------------------------------

    def level_form(self, name: str, form: str) -> list[str]:
        """Return the tensors that hold the levels of `name` in one of `step.FORMS`."""
        known = self.lattices[name]
        forms = self.levels.setdefault(name, {})
        if form in forms:
            return forms[form]
        if known.signs:
            planes = self.bits(name)
            forms["planes"] = [planes.sign]
            if known.count == 2:  # levels of -1, 0, +1; a kernel may have proved 0 impossible
                zero = planes.zero or self.xor(planes.sign, planes.sign)
                forms["planes"] = [zero, self.xor(planes.sign, zero)]
            if form in forms:
                return forms[form]
        n, channels, height, width, rank = self.image(name)
        steps: tuple[Step, ...] = (Step("levels", count=known.count, way="whole", forms=(form,)),)
        if "planes" in forms:
            spec = Elementwise(n, height, width, channels, rank=rank, planes=known.bits)
            inputs = list(forms["planes"])
        else:
            layout = self.layout_of(name)
            spec = Elementwise(n, height, width, channels, layout, (), rank)
            first = 0.5 - known.values[0] / known.step
            inputs = [
                self.float(name, layout),
                self.vector(np.full(channels, 1 / known.step, np.float32), "unit"),
                self.vector(np.full(channels, first, np.float32), "first"),
            ]
            steps = (Step("affine"), *steps)
        count = known.bits if form == "planes" else 1
        forms[form] = [self.graph.fresh(f"{name}.{form}") for _ in range(count)]
        self.kernel(replace(spec, steps=steps), inputs, forms[form], name)
        return forms[form]

    def _from_levels(self, name: str, layout: str) -> str:
        planes = self.level_form(name, "planes")
        return self._from_planes(name, layout, planes, self.lattices[name].values)

    def _from_planes(self, name: str, layout: str, planes: list[str], held: Held) -> str:
        """Return the numeric values of planes of levels."""
        n, channels, height, width, rank = self.image(name)
        values, inputs = np.array(held, np.float32), list(planes)
        steps: tuple[Step, ...]
        if (line := exact_line(values)) is not None:
            steps = (Step("affine"), Step("store", layout))
            inputs += self._line(line, channels)
        else:
            count = len(held) - 1
            steps = (Step("levels", layout, count=count, way="whole", forms=("table",)),)
            inputs.append(self.constant(values, f"{name}.values"))
        spec = Elementwise(n, height, width, channels, rank=rank, planes=len(planes), steps=steps)
        out = self.graph.fresh(f"{name}.{layout.lower()}")
        self.kernel(spec, inputs, [out], name)
        return out

    # ---- planes -----------------------------------------------------------------------------

    def bits(self, name: str) -> Planes:
        """Return the planes of the signs `name`, packing its float form if there are none."""
        if name not in self.planes:
            value = self.lattices[name]
            n, channels, height, width, rank = self.image(name)
            layout = self.layout_of(name)
            steps: list[Step] = []
            inputs = [self.float(name, layout)]
            if not value.bipolar or value.lo > value.hi:
                sign = -1.0 if value.lo > value.hi else 1.0
                middle = (value.lo + value.hi) / 2
                steps.append(Step("affine"))
                inputs += [
                    self.vector(np.full(channels, sign, np.float32), "sign"),
                    self.vector(np.full(channels, -sign * middle, np.float32), "middle"),
                ]
            steps.append(Step("bits", zero=value.zero))
            spec = Elementwise(n, height, width, channels, layout, tuple(steps), rank)
            outs = [self.graph.fresh(f"{name}.{p}") for p in ("bits", "zero")[: 1 + value.zero]]
            self.kernel(spec, inputs, outs, name)
            self.planes[name] = Planes(outs[0], outs[1] if value.zero else None, value)
        return self.planes[name]

    def pick(self, plane: str, name: str, index: tuple[int, ...]) -> str:
        """Select the channels `index` of a plane of the logical tensor `name`."""
        n, channels, height, width, rank = self.image(name)
        if index == tuple(range(channels)) and len(index) == channels:
            return plane
        spec = SliceBits(n, height, width, channels, index, rank)
        inputs = [plane]
        if needs_table(spec):
            inputs.append(self.constant(slice_table(spec), "channel_index"))
        out = self.graph.fresh(f"{plane}.pick")
        self.kernel(spec, inputs, [out], name)
        return out

    def concat(self, planes: list[str], names: list[str], out_name: str) -> str:
        """Concatenate the planes of the logical tensors `names`."""
        n, _, height, width, rank = self.image(out_name)
        channels = tuple(self.image(i)[1] for i in names)
        out = self.graph.fresh(f"{out_name}.bits")
        self.kernel(ConcatBits(n, height, width, channels, rank), planes, [out], out_name)
        return out

    def xor(self, left: str, right: str) -> str:
        """Return the XOR of two planes."""
        kind = self.graph.types[left]
        out = self.fresh(f"{left}.xor", kind.shape, kind.dtype)
        self.graph.nodes.append(Node("BitwiseXor", [left, right], [out], {}, left))
        return out

    def held_forms(self) -> dict[str, tuple[Form, ...]]:
        """Return, for each tensor of the complete graph, the logical tensors that it holds.

        There may be several, for example if two comparisons of one tensor give the same bits.
        """
        table: dict[str, list[Form]] = {}

        def put(name: str, form: Form) -> None:
            table.setdefault(name, []).append(form)

        for tensor, made in self.floats.items():
            if tensor not in self.source.constants and tensor not in self.unrounded:
                for layout, name in made.items():
                    put(name, Form(tensor, layout))
        for tensor, planes in self.planes.items():
            values = planes.value.with_zero(planes.zero is not None).values
            put(planes.sign, Form(tensor, "sign", values))
            if planes.zero:
                put(planes.zero, Form(tensor, "zero", values))
        for tensor, kept in self.levels.items():
            values = self.lattices[tensor].values
            for kind, names in kept.items():
                held = "plane" if kind == "planes" else kind
                for number, name in enumerate(names):
                    put(name, Form(tensor, held, values, number))
        return {name: tuple(forms) for name, forms in table.items()}
