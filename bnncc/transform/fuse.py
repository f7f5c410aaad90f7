"""Partition the graph into kernels.

    before: y = BinaryConv(b); z = BatchNormalization(y); r = Add(z, x); s = Sign(r)
    after:  r, s = Kernel(b, x; binary convolution, affine, add, store, bits)

where r has other readers.

Visits the nodes in order. A convolution, dense layer or pooling is the *anchor* of a kernel (an
elementwise operator without one starts a kernel of its own). Elementwise operators after the anchor
are fused into it, along one reader: signs of any intermediate tensor become bits, and tensors with
other readers are stored. Operators that only move bits get kernels on packed words. All else
remains an ONNX node, converted by TVM's importer, on float tensors in the layout of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from bnncc.ir.graph import Graph, Node
from bnncc.ir.quantizers import LEVELS, QUANTIZED_CONV
from bnncc.ir.rows import SWISH
from bnncc.recognise.lattice import lattices
from bnncc.schedules import uses_tiles, with_packed_operands, with_three_terms, writes_nchw
from bnncc.schedules.weight_order import Recorded
from bnncc.targets.spec import TargetSpec
from bnncc.topi_binary import filtering
from bnncc.topi_binary.layout import words
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, Elementwise, Pool2d, RowPool
from bnncc.transform.byte_signs import write_image_bits
from bnncc.transform.groups import realise
from bnncc.transform.interleave import interleave
from bnncc.transform.kernel_group import Event, Group
from bnncc.transform.kinds import Kinds
from bnncc.transform.level_routes import ROUTED, LevelRouter
from bnncc.transform.level_steps import wanted_forms
from bnncc.transform.physical import Physical
from bnncc.transform.routes import Router
from bnncc.transform.starts import (
    grouped_operands,
    start_few_bit,
    start_image,
    start_product,
    start_quantized,
)
from bnncc.transform.weight_codes import WeightCodes

DECISIONS = {"bnncc.Sign", LEVELS}
"""Operators that produce bits from numbers."""

_ANY_LAYOUT = {
    "Sigmoid", "Tanh", "Exp", "Log", "Sqrt", "Erf", "HardSigmoid", "HardSwish", "Softplus",
    "Softsign", "Elu", "Selu", "Celu", "Gelu", "Mish", "Abs", "Floor", "Ceil", "Round", "Sign",
    "Reciprocal", "ThresholdedRelu", "Sin", "Cos", "Not", "Cast", SWISH,
}  # fmt: skip
"""Unary elementwise operators, which do not depend on the layout."""

MAX_POOLED_ROWS = 8
"""Poolings with more window rows are not fused into a convolution."""

MAX_ROW_WEIGHTS = 2**16
"""More weights than this (a number, not bytes) do not stay in the L2 cache from row to row."""

MAX_EVENTS = 64
"""Maximum length of a fused chain of elementwise operators: TVM's passes are recursive."""


def fuse(
    graph: Graph,
    float_conv: str = "filtered",
    target: TargetSpec | None = None,
    records: Recorded | None = None,
    float_products: str = "float32",
) -> Graph:
    """Return the physical graph of a logical graph.

    Parameters
    ----------
    graph : Graph
        After `binarize`.
    float_conv : str
        Allowed methods of float convolutions, see `filtering.METHODS`.
    target : TargetSpec, optional
        The target, whose kernels may prefer an order of binary weights; default: the order that
        all targets support.
    records : Recorded, optional
        Tuning records, which may prefer another weight order.
    float_products : str
        Allowed methods of float products: with ``bf16x3``, three terms of bfloat16 if faster.

    Returns
    -------
    Graph
        Kernel nodes (`physical.KERNEL`), views, and ONNX nodes. Between kernels, float tensors are
        NHWC and tensors of bits are packed.
    """
    return _Fuser(float_conv, float_products, Physical(graph, target, records)).run()


class _Fuser:
    def __init__(self, float_conv: str, float_products: str, physical: Physical) -> None:
        self.physical, self.graph = physical, (graph := physical.source)
        # On GPUs, ring buffers and filtered rows would be shared by unsynchronized threads.
        kind = "llvm" if physical.target is None else physical.target.kind
        self.on_gpu, self.filters = kind == "cuda", kind == "llvm"
        self.float_conv, self.float_products = float_conv, float_products
        self.router = Router(self.physical)
        self.consumers = graph.consumers()
        self.physical.lattices = lattices(graph)
        signs = {name for name, held in self.physical.lattices.items() if held.signs}
        self.forms = wanted_forms(graph, set(self.physical.lattices) - signs, ROUTED)
        self.level_router = LevelRouter(self.physical)
        self.absorbed: set[int] = set()
        self.producers = graph.producers()
        packed = {name for name, forms in self.forms.items() if set(forms) - {"value"}}
        self.look = Kinds(graph, signs, packed)
        self.kinds = {id(n): self.look.kind(n) for n in graph.nodes}
        layers = [n for n in graph.nodes if self.kinds[id(n)] in ("conv", "dense")]
        self.codes = WeightCodes(layers, graph, self.physical.target)
        self.starters: dict[str, Callable[[Node], Group]] = {
            "binary": self._start_binary,
            "product": lambda node: start_product(node, self.physical),
            "few-bit": lambda node: start_few_bit(node, self.graph, self.physical),
            "conv": self._start_conv,
            "dense": self._start_dense,
            "pool": self._start_pool,
            "glue": self._start_glue,
            "image": lambda node: start_image(node, self.physical),
        }

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if id(node) in self.absorbed:
                continue
            kind = self.kinds[id(node)]
            if kind == "route" and self.router.route(node):
                continue
            if kind == "level-route":
                if self.level_router.route(node):
                    continue
                kind = self.look.kind(node, routes=False)
                self.kinds[id(node)] = kind
            if kind not in self.starters and self.physical.unrounded.intersection(node.inputs):
                self.physical.unrounded.update(node.outputs)
            if kind == "image-bits":
                write_image_bits(node, self.physical)
            elif kind in self.starters:
                group = self.starters[kind](node)
                self._grow(group)
                realise(group, self.physical)
            elif (layouts := self.look.relayout(node)) is not None:
                tensor = self.physical.float(node.inputs[0], layouts[0])
                self.physical.floats[node.outputs[0]] = {layouts[1]: tensor}
            elif kind == "rounded":
                layout = self.physical.layout_of(node.inputs[0])
                tensor = self.physical.float(node.inputs[0], layout)
                self.physical.floats[node.outputs[0]] = {layout: tensor}
                self.physical.unrounded.add(node.outputs[0])
            elif kind == "interleave":
                interleave(node, self.physical)
            elif kind != "absent":
                self._generic(node)
        out = self.physical.graph
        out.outputs = [self._output(name) for name in self.graph.outputs]
        out.prune()
        held = self.physical.held_forms()
        out.forms = {name: form for name, form in held.items() if name in out.types}
        return out

    def _output(self, name: str) -> str:
        return self.physical.float(name, "NCHW")

    # ---- growing a group --------------------------------------------------------------------

    def _grow(self, group: Group) -> None:
        while True:
            tip, room = group.tip, len(group.events) < MAX_EVENTS
            if (pool := self._row_pool(group)) is not None:
                group.pool = self.look.pool_spec(pool)
                group.events.append(Event("pool", pool.outputs[0], pool))
                self.absorbed.add(id(pool))
                group.tip = pool.outputs[0]
                continue
            follow = None
            layouts: set[str] = set()
            for reader in {id(r): r for r in self.consumers.get(tip, [])}.values():
                if reader.op in DECISIONS:
                    group.events.append(self._decision(reader))
                    self.absorbed.add(id(reader))
                elif follow is None and room and (event := self._absorb(group, reader)) is not None:
                    follow = event
                else:
                    layouts.add(self._wanted_layout(reader))
            if tip in self.graph.outputs:
                layouts.add("NCHW")
            layouts.discard("")
            if layouts:
                if not self._writes_nchw(group):
                    layouts = {"NHWC"}
                group.events.append(Event("store", tip, None, tuple(sorted(layouts))))
            if follow is None:
                return
            assert follow.node is not None
            group.events.append(follow)
            self.absorbed.add(id(follow.node))
            group.tip = follow.tensor

    def _writes_nchw(self, group: Group) -> bool:
        """Whether the kernel of a group should store its result in NCHW itself."""
        shape, target = self.graph.types[group.tip].shape, self.physical.target
        if len(shape) != 4 or shape[2:] == (1, 1):
            return False
        if isinstance(group.spec, Elementwise):
            return True
        pooled = group.pool is not None
        return target is not None and not pooled and writes_nchw(group.spec, target)

    def _decision(self, node: Node) -> Event:
        out = node.outputs[0]
        if node.op == LEVELS:
            return Event("levels", out, node, self.forms.get(out, ("value",)))
        return Event("sign", out, node)

    def _row_pool(self, group: Group) -> Node | None:
        """Return the max-pooling that is a convolution's only reader, if rows can be pooled."""
        spec, tip = group.spec, group.tip
        if not isinstance(spec, Conv2d) or spec.rank != 4 or group.rank != 4 or self.on_gpu:
            return None
        if (spec.groups > 1 and not spec.depthwise) or spec.code_bits:
            return None
        readers = self.consumers.get(tip, [])
        if any(e.kind != "apply" for e in group.events) or tip in self.graph.outputs:
            return None
        if len(readers) != 1 or self.kinds[id(readers[0])] != "pool":
            return None
        pool = self.look.pool_spec(readers[0])
        weights = self.physical.graph.constants[group.inputs[1]].size
        if pool is None or pool.kind != "max" or weights > MAX_ROW_WEIGHTS:
            return None
        fits = pool.dilations == (1, 1) and pool.kernel[0] <= MAX_POOLED_ROWS and not pool.squeeze
        if spec.method == "direct" and spec.apart:
            rows = RowPool(pool.kernel, pool.strides, pool.pads, pool.ceil_extra)
            fits &= self._on_tiles(replace(spec, pool=rows))
        return readers[0] if fits else None

    def _on_tiles(self, spec: Conv2d) -> bool:
        target = self.physical.target
        return target is not None and uses_tiles(spec, target)

    def _absorb(self, group: Group, reader: Node) -> Event | None:
        tip, out = group.tip, reader.outputs[0]
        if self.kinds[id(reader)] != "glue" or id(reader) in self.absorbed:
            return None
        if reader.op == SWISH:  # it takes too many registers beside products or another function
            first = all(event.kind != "function" for event in group.events)
            alone = first and isinstance(group.spec, Elementwise)
            return Event("function", out, reader) if alone else None
        if self.look.constant_glue(reader) == tip:
            return Event("apply", out, reader)
        operands = self.look.tensor_glue(reader)
        if operands is None or tip not in operands:
            return None
        other = reader.inputs[1 if reader.inputs[0] == tip else 0]
        return Event("tensor", out, reader, operand=tip) if self.physical.available(other) else None

    def _wanted_layout(self, reader: Node) -> str:
        kind = self.kinds[id(reader)]
        if (layouts := self.look.relayout(reader)) is not None:
            return layouts[0]
        if kind == "generic" and reader.op not in _ANY_LAYOUT:
            return "NCHW"
        return "NHWC"

    # ---- anchors ----------------------------------------------------------------------------

    def _start_binary(self, node: Node) -> Group:
        a = node.attrs
        data = node.inputs[0]
        planes = self.physical.bits(data)
        bits = np.asarray(a["bits"])
        out_channels, kh, kw, _ = bits.shape
        n, channels, height, width, rank = self.physical.image(data)
        inputs = [planes.sign] + ([planes.zero] if planes.zero else [])
        out_rank = len(self.graph.types[node.outputs[0]].shape)
        if rank == 4 and out_rank == 2 and (height, width) == (1, 1):
            inputs = [self.physical.reshape(i, (n, words(channels))) for i in inputs]
            rank = 2
        spec = BinaryConv2d(
            n, height, width, channels, out_channels, (kh, kw), a["strides"], a["dilations"],
            a["pads"], a["pad_value"], int(a["groups"]), a["mode"], planes.zero is not None,
            rank=rank,
        )  # fmt: skip
        spec, inputs = grouped_operands(spec, inputs, data, self.physical)
        return Group(
            spec, inputs, np.asarray(a["scale"]), np.asarray(a["bias"]), node.outputs[0],
            node.name, node.covers, bits, out_rank, step=a["step"], first=a["first"],
        )  # fmt: skip

    def _start_conv(self, node: Node) -> Group:
        if node.op == QUANTIZED_CONV:
            method = partial(self._method, node)
            return start_quantized(node, self.graph, self.physical, method)
        a, data = node.attrs, node.inputs[0]
        weight = self.graph.constants[node.inputs[1]]
        n, channels, height, width, _ = self.physical.image(data)
        layout = self.physical.layout_of(data)
        spec = Conv2d(
            n, height, width, channels, weight.shape[0], weight.shape[2:], tuple(a["strides"]),
            tuple(a["dilations"]), tuple(a["pads"]), int(a["group"]), layout,
        )  # fmt: skip
        spec = self._method(node, self._operands(node, spec))
        spec, packed = self._packed(node, spec, weight.transpose(0, 2, 3, 1))
        return self._float_group(
            node, spec, [self.physical.float(data, layout), *packed], weight.shape[0]
        )

    def _operands(self, node: Node, spec: Conv2d) -> Conv2d:
        """Return `spec` with the operand types that the options select for a layer."""
        if self.look.rounded(node):
            return with_packed_operands(replace(spec, operands="bfloat16"), self.physical.target)
        if self.float_products == "float32" or self._exact(node):
            return spec
        return with_three_terms(spec, self.physical.target)

    def _exact(self, node: Node) -> bool:
        """Whether sums may be exact (weights are multiples of a scale), and readers rely on it."""
        weight = self.graph.constants[node.inputs[1]]
        return node.inputs[0] not in self.graph.inputs and filtering.integral(weight)

    def _method(self, node: Node, spec: Conv2d) -> Conv2d:
        """Return `spec` with the method that computes its products."""
        target = self.physical.target
        direct = (
            self._exact(node)
            or self._on_tiles(spec)
            or self.on_gpu
            or spec.zero_points
            or self.look.zeros_matter(node)
            # Intermediate sums of the filtered method take as much memory as several output images.
            or (target is not None and target.scalar)
        )
        wish = "direct" if direct else self.float_conv
        return replace(spec, method=filtering.choose(spec, wish, *spec.output_hw))

    def _packed(self, node: Node, spec: Conv2d, rows: np.ndarray) -> tuple[Conv2d, list[str]]:
        """Pack weights ``[units, kernel_h, kernel_w, channels]``; return the constants' names."""
        spec, arrays = self.codes.packed(spec, rows)
        names = (f"{node.name}.weight", f"{node.name}.scale")
        return spec, [*map(self.physical.constant, arrays, names)]

    def _float_group(self, node: Node, spec: Conv2d, inputs: list[str], units: int) -> Group:
        bias = np.zeros(units)
        if node.input(2):
            bias = bias + self.graph.constants[node.inputs[2]].astype(np.float64).reshape(-1)
        rank = len(self.graph.types[node.outputs[0]].shape)
        return Group(
            spec, inputs, np.ones(units), bias, node.outputs[0], node.name, (node.name,), rank=rank
        )

    def _start_dense(self, node: Node) -> Group:
        data = node.inputs[0]
        weight = self.graph.constants[node.inputs[1]]
        rows = weight if node.op == "Gemm" and node.attrs.get("transB") else weight.T
        units = rows.shape[0]
        image = self.look.flattened_image(data)
        flat = self.producers.get(data)
        if image is not None and flat is not None and self.kinds[id(flat)] == "absent":
            n, channels, height, width, _ = self.physical.image(image)
            layout = self.physical.layout_of(image)
            shaped = rows.reshape(units, channels, height, width)
            order = (0, 2, 3, 1) if layout == "NHWC" else (0, 1, 2, 3)
            columns = shaped.transpose(order).reshape(units, 1, 1, -1)
            tensor = self.physical.reshape(
                self.physical.float(image, layout), (n, channels * height * width)
            )
        else:
            n, _, _, _, _ = self.physical.image(data)
            columns, tensor = rows[:, None, None, :], self.physical.float(data)
        spec = self._operands(node, Conv2d(n, 1, 1, columns.shape[3], units, (1, 1), rank=2))
        spec, packed = self._packed(node, spec, columns)
        return self._float_group(node, spec, [tensor, *packed], units)

    def _start_pool(self, node: Node) -> Group:
        spec = self.look.pool_spec(node)
        assert spec is not None
        layout = self.physical.layout_of(node.inputs[0])
        spec = Pool2d(**{**spec.__dict__, "data_layout": layout})
        ones = np.ones(spec.channels)
        data = self.physical.float(node.inputs[0], layout)
        rank = len(self.graph.types[node.outputs[0]].shape)
        return Group(
            spec, [data], ones, np.zeros(spec.channels), node.outputs[0], node.name, rank=rank
        )

    def _start_glue(self, node: Node) -> Group:
        """Start a kernel without an anchor; its data is the first operand of `node`."""
        if node.op in DECISIONS:
            data = node.inputs[0]
        else:
            data = self.look.constant_glue(node) or self._first_operand(node)
        n, channels, height, width, rank = self.physical.image(data)
        scale, offset = np.ones(channels), np.zeros(channels)
        source = None
        if data in self.physical.planes and data not in self.physical.floats:
            source = self.physical.bits_source(data)
        if source is not None:
            spec, inputs, (first, step) = source
            scale, offset = scale * step, offset + first
        else:
            layout = self.physical.layout_of(data)
            spec = Elementwise(n, height, width, channels, layout, (), rank)
            inputs = [self.physical.float(data, layout)]
        group = Group(spec, inputs, scale, offset, data, node.name, rank=rank)
        if node.op in DECISIONS:
            for reader in self.consumers[data]:
                if reader.op in DECISIONS and id(reader) not in self.absorbed:
                    group.events.append(self._decision(reader))
                    self.absorbed.add(id(reader))
            group.tip = ""
            return group
        event = self._absorb(group, node)
        assert event is not None, node.name
        group.events.append(event)
        self.absorbed.add(id(node))
        group.tip = event.tensor
        return group

    def _first_operand(self, node: Node) -> str:
        operands = self.look.tensor_glue(node)
        assert operands is not None
        return next((i for i in operands if i not in self.graph.constants), operands[0])

    # ---- everything else --------------------------------------------------------------------

    def _generic(self, node: Node) -> None:
        layout = "NCHW"
        if (
            node.op in _ANY_LAYOUT
            and self.physical.layout_of(node.inputs[0]) == "NHWC"
            and ("NHWC" in self.physical.floats.get(node.inputs[0], {}))
        ):
            layout = "NHWC"
        self.physical.plain(node, layout)
