"""Cut the graph into kernels.

    before: y = BinaryConv(b); z = BatchNormalization(y); r = Add(z, x); s = Sign(r)
    after:  r, s = Kernel(b, x; binary convolution, affine, add, store, bits)

where r has other readers.

Walks the nodes in order. A convolution, dense layer or pooling (or, for lone glue, nothing) is the
*anchor* of a kernel; what follows it is absorbed while it is elementwise: signs of any tensor on
the way become bits, tensors that others read are stored, and one reader is followed. Operators that
only move bits get kernels on packed words. Everything else stays an ONNX node for TVM's importer,
on float tensors in the file's layout.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bnncc.graph import Graph, Node, TensorType
from bnncc.passes.groups import Event, Group, has_constant_form, realise
from bnncc.passes.physical import Physical
from bnncc.passes.routes import ROUTES, Router
from bnncc.passes.values import TwoValued, value_sets
from bnncc.topi_binary.layout import WORD_BITS, pack_float_weight, words
from bnncc.topi_binary.spec import BinaryConv2d, Conv2d, Elementwise, Pool2d, output_size

_POOLS = {"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean"}
_TENSOR_OPS = {"Add", "Sub", "Mul"}
_CONSTANT_OPS = {
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Neg",
    "Relu",
    "LeakyRelu",
    "PRelu",
    "Clip",
    "BatchNormalization",
}
_ANY_LAYOUT = {
    "Sigmoid", "Tanh", "Exp", "Log", "Sqrt", "Erf", "HardSigmoid", "HardSwish", "Softplus",
    "Softsign", "Elu", "Selu", "Celu", "Gelu", "Mish", "Abs", "Floor", "Ceil", "Round", "Sign",
    "Reciprocal", "ThresholdedRelu", "Sin", "Cos", "Not", "Cast",
}  # fmt: skip
"""Unary operators that work on NHWC as well as on NCHW."""


def fuse(graph: Graph) -> Graph:
    """Return the physical graph of a binarised logical graph.

    Parameters
    ----------
    graph : Graph
        After `binarize`.

    Returns
    -------
    Graph
        Kernel nodes (`physical.KERNEL`), views, and ONNX nodes; float tensors between kernels are
        NHWC, tensors of bits packed.
    """
    return _Fuser(graph).run()


class _Fuser:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.physical = Physical(graph)
        self.router = Router(self.physical)
        self.consumers = graph.consumers()
        self.values: dict[str, TwoValued] = value_sets(graph)
        self.absorbed: set[int] = set()
        self.producers = graph.producers()
        self.kinds = {id(n): self._kind(n) for n in graph.nodes}
        self.starters: dict[str, Callable[[Node], Group]] = {
            "binary": self._start_binary,
            "conv": self._start_conv,
            "dense": self._start_dense,
            "pool": self._start_pool,
            "glue": self._start_glue,
        }

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if id(node) in self.absorbed:
                continue
            kind = self.kinds[id(node)]
            if kind == "route" and self.router.route(node, self.values):
                continue
            if kind in self.starters:
                group = self.starters[kind](node)
                self._grow(group)
                realise(group, self.physical)
            elif kind != "absent":
                self._generic(node)
        out = self.physical.graph
        out.outputs = [self._output(name) for name in self.graph.outputs]
        out.prune()
        return out

    def _output(self, name: str) -> str:
        return self.physical.float(name, "NCHW")

    # ---- what a node is ---------------------------------------------------------------------

    def _kind(self, node: Node) -> str:
        if node.op == "bnncc.BinaryConv":
            return "binary"
        if node.op in ("Flatten", "Reshape") and self._feeds_dense_only(node):
            return "absent"
        if node.op in ROUTES and node.outputs[0] in self.values:
            return "route"
        if node.op == "bnncc.Sign":
            return "glue" if self._image_ok(node.inputs[0]) else "generic"
        if not node.outputs or not self._image_ok(node.outputs[0]):
            return "generic"
        if node.op == "Conv" and self._float_weights(node) and self._image_ok(node.inputs[0]):
            return "conv"
        if node.op in ("Gemm", "MatMul") and self._dense_ok(node):
            return "dense"
        if node.op in _POOLS and self._pool_spec(node) is not None:
            return "pool"
        if self._constant_glue(node) is not None or self._tensor_glue(node) is not None:
            return "glue"
        return "generic"

    def _image_ok(self, name: str) -> bool:
        """Whether `name` is a float image or matrix that kernels work on."""
        kind = self.graph.types[name]
        return (
            kind.dtype == "float32"
            and len(kind.shape) in (2, 4)
            and all(isinstance(d, int) and d > 0 for d in kind.shape[1:])
        )

    def _float_weights(self, node: Node) -> bool:
        return all(i in self.graph.constants for i in node.inputs[1:] if i)

    def _dense_ok(self, node: Node) -> bool:
        shape = self.graph.types[node.inputs[0]].shape
        if not self._float_weights(node) or len(shape) != 2 or node.attrs.get("transA"):
            return False
        if self.graph.constants[node.inputs[1]].ndim != 2 or node.inputs[0] in self.graph.constants:
            return False
        bias = (
            self.graph.constants[node.inputs[2]]
            if len(node.inputs) > 2 and node.inputs[2]
            else None
        )
        units = int(self.graph.types[node.outputs[0]].shape[1])
        if bias is None:
            return True
        return bias.size in (1, units) and (bias.ndim < 2 or bias.shape[0] == 1)

    def _flattened_image(self, name: str) -> str | None:
        """Return the image that `name` flattens, row by row."""
        move = self.producers.get(name)
        if move is None or move.op not in ("Flatten", "Reshape") or not self._image_ok(name):
            return None
        image, flat = self.graph.types[move.inputs[0]], self.graph.types[name]
        if not self._image_ok(move.inputs[0]) or len(image.shape) != 4 or len(flat.shape) != 2:
            return None
        same = image.shape[0] == flat.shape[0] and np.prod(image.shape[1:]) == flat.shape[1]  # type: ignore[arg-type]
        return move.inputs[0] if same else None

    def _feeds_dense_only(self, node: Node) -> bool:
        out = node.outputs[0]
        if out in self.graph.outputs or self._flattened_image(out) is None:
            return False
        readers = self.consumers.get(out, [])
        return all(
            (r.op in ("Gemm", "MatMul") and r.inputs[0] == out and self._dense_ok(r))
            for r in readers
        )

    def _constant_glue(self, node: Node) -> str | None:
        """Return the operand if `node` is elementwise with per-channel constants."""
        if node.op not in _CONSTANT_OPS:
            return None
        data = [i for i in node.inputs if i and i not in self.graph.constants]
        if len(data) != 1 or self.graph.types[data[0]] != self.graph.types[node.outputs[0]]:
            return None
        _, channels, _, _, rank = self.physical.image(node.outputs[0])
        return data[0] if has_constant_form(node, self.graph, channels, rank) else None

    def _tensor_glue(self, node: Node) -> tuple[str, ...] | None:
        """Return the operands that may be the running value, if `node` combines two tensors."""
        if node.op not in _TENSOR_OPS or len(node.inputs) != 2 or node.inputs[0] == node.inputs[1]:
            return None
        out = self.graph.types[node.outputs[0]]
        kinds = [self.graph.types[i] for i in node.inputs]
        if kinds[0] == out and kinds[1] == out:
            return tuple(node.inputs)
        for i, kind in enumerate(kinds):
            full = kinds[1 - i]
            gate = (*out.shape[:2], 1, 1)
            if node.op == "Mul" and full == out and kind.shape == gate and kind.dtype == out.dtype:
                return (node.inputs[1 - i],) if node.inputs[i] not in self.graph.constants else None
        return None

    # ---- growing a group --------------------------------------------------------------------

    def _grow(self, group: Group) -> None:
        while True:
            tip = group.tip
            follow = None
            layouts: set[str] = set()
            for reader in {id(r): r for r in self.consumers.get(tip, [])}.values():
                if reader.op == "bnncc.Sign":
                    group.events.append(Event("sign", reader.outputs[0], reader))
                    self.absorbed.add(id(reader))
                elif follow is None and (event := self._absorb(reader, tip)) is not None:
                    follow = event
                else:
                    layouts.add(self._wanted_layout(reader))
            if tip in self.graph.outputs:
                layouts.add("NCHW")
            layouts.discard("")
            if layouts:
                shape = self.graph.types[tip].shape
                only = {"NHWC"} if len(shape) != 4 or shape[2:] == (1, 1) else layouts
                group.events.append(Event("store", tip, None, tuple(sorted(only))))
                if shape[2:] == (1, 1):
                    layouts = only
            if follow is None:
                return
            assert follow.node is not None
            group.events.append(follow)
            self.absorbed.add(id(follow.node))
            group.tip = follow.tensor

    def _absorb(self, reader: Node, tip: str) -> Event | None:
        if self.kinds[id(reader)] != "glue" or id(reader) in self.absorbed:
            return None
        out = reader.outputs[0]
        if self._constant_glue(reader) == tip:
            return Event("apply", out, reader)
        operands = self._tensor_glue(reader)
        if operands is None or tip not in operands:
            return None
        other = reader.inputs[1 if reader.inputs[0] == tip else 0]
        return Event("tensor", out, reader, operand=tip) if self.physical.available(other) else None

    def _wanted_layout(self, reader: Node) -> str:
        kind = self.kinds[id(reader)]
        if kind == "generic" and reader.op not in _ANY_LAYOUT:
            return "NCHW"
        return "NHWC"

    # ---- anchors ----------------------------------------------------------------------------

    def _start_binary(self, node: Node) -> Group:
        a = node.attrs
        data = node.inputs[0]
        planes = self.physical.bits(data, self.values[data])
        bits = np.asarray(a["bits"])
        out_channels, kh, kw, per_group = bits.shape
        groups = int(a["groups"])
        n, channels, height, width, rank = self.physical.image(data)
        inputs = [planes.sign] + ([planes.zero] if planes.zero else [])
        if groups > 1 and per_group % WORD_BITS:
            index = tuple(
                g * per_group + i if i < per_group else -1
                for g in range(groups)
                for i in range(words(per_group) * WORD_BITS)
            )
            inputs = [self.physical.pick(p, data, index) for p in inputs]
        out_rank = len(self.graph.types[node.outputs[0]].shape)
        if rank == 4 and out_rank == 2 and (height, width) == (1, 1):
            inputs = [self.physical.reshape(i, (n, words(channels))) for i in inputs]
            rank = 2
        spec = BinaryConv2d(
            n, height, width, channels, out_channels, (kh, kw), a["strides"], a["dilations"],
            a["pads"], a["pad_value"], groups, a["mode"], planes.zero is not None, (), rank,
        )  # fmt: skip
        return Group(
            spec, inputs, np.asarray(a["scale"]), np.asarray(a["bias"]), node.outputs[0],
            node.name, node.covers, bits, out_rank,
        )  # fmt: skip

    def _start_conv(self, node: Node) -> Group:
        a, data = node.attrs, node.inputs[0]
        weight = self.graph.constants[node.inputs[1]]
        n, channels, height, width, _ = self.physical.image(data)
        layout = self.physical.layout_of(data)
        spec = Conv2d(
            n, height, width, channels, weight.shape[0], weight.shape[2:], tuple(a["strides"]),
            tuple(a["dilations"]), tuple(a["pads"]), int(a["group"]), layout,
        )  # fmt: skip
        packed = self.physical.constant(
            pack_float_weight(weight.transpose(0, 2, 3, 1)), f"{node.name}.weight"
        )
        return self._float_group(
            node, spec, [self.physical.float(data, layout), packed], weight.shape[0]
        )

    def _float_group(self, node: Node, spec: Conv2d, inputs: list[str], units: int) -> Group:
        bias = np.zeros(units)
        if len(node.inputs) > 2 and node.inputs[2]:
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
        image = self._flattened_image(data)
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
        packed = self.physical.constant(pack_float_weight(columns), f"{node.name}.weight")
        spec = Conv2d(n, 1, 1, columns.shape[3], units, (1, 1), rank=2)
        return self._float_group(node, spec, [tensor, packed], units)

    def _start_pool(self, node: Node) -> Group:
        spec = self._pool_spec(node)
        assert spec is not None
        layout = self.physical.layout_of(node.inputs[0])
        spec = Pool2d(**{**spec.__dict__, "data_layout": layout})
        ones = np.ones(spec.channels)
        data = self.physical.float(node.inputs[0], layout)
        rank = len(self.graph.types[node.outputs[0]].shape)
        return Group(
            spec, [data], ones, np.zeros(spec.channels), node.outputs[0], node.name, rank=rank
        )

    def _pool_spec(self, node: Node) -> Pool2d | None:
        a, data = node.attrs, node.inputs[0]
        if (
            len([o for o in node.outputs if o]) != 1
            or not self._image_ok(data)
            or data in self.graph.constants
        ):
            return None
        shape, out = self.graph.types[data].shape, self.graph.types[node.outputs[0]].shape
        if len(shape) != 4:
            return None
        n, channels, height, width = shape[0], int(shape[1]), int(shape[2]), int(shape[3])
        if node.op in ("GlobalAveragePool", "GlobalMaxPool", "ReduceMean"):
            if node.op == "ReduceMean" and not self._reduces_image(node):
                return None
            kind = "max" if node.op == "GlobalMaxPool" else "avg"
            return Pool2d(n, height, width, channels, kind, (height, width), squeeze=len(out) == 2)
        kernel, strides = tuple(a["kernel_shape"]), tuple(a["strides"])
        dilations, pads = tuple(a.get("dilations", (1, 1))), tuple(a["pads"])
        extra = tuple(
            max(0, (int(out[2 + i]) - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1
                - (height, width)[i] - pads[i] - pads[i + 2])
            for i in range(2)
        )  # fmt: skip
        made = tuple(
            output_size(
                (height, width)[i],
                kernel[i],
                strides[i],
                dilations[i],
                pads[i] + pads[i + 2],
                extra[i],
            )
            for i in range(2)
        )
        include = bool(a.get("count_include_pad", 0)) and any(pads)
        if made != out[2:] or (node.op == "AveragePool" and include and any(extra)):
            return None
        kind = "max" if node.op == "MaxPool" else "avg_full" if include else "avg"
        return Pool2d(n, height, width, channels, kind, kernel, strides, dilations, pads, extra)

    def _reduces_image(self, node: Node) -> bool:
        if len(node.inputs) < 2 or node.inputs[1] not in self.graph.constants:
            return False
        axes = {int(x) % 4 for x in self.graph.constants[node.inputs[1]].reshape(-1)}
        return axes == {2, 3}

    def _start_glue(self, node: Node) -> Group:
        """Start a kernel without an anchor: the first operand of `node`, read as it is."""
        if node.op == "bnncc.Sign":
            data = node.inputs[0]
        else:
            data = self._constant_glue(node) or self._first_operand(node)
        n, channels, height, width, rank = self.physical.image(data)
        scale, offset = np.ones(channels), np.zeros(channels)
        if data in self.physical.planes and data not in self.physical.floats:
            spec, inputs, value = self.physical.bits_source(data)
            scale = scale * (value.hi - value.lo) / 2
            offset = offset + (value.hi + value.lo) / 2
        else:
            layout = self.physical.layout_of(data)
            spec = Elementwise(n, height, width, channels, layout, (), rank)
            inputs = [self.physical.float(data, layout)]
        group = Group(spec, inputs, scale, offset, data, node.name, rank=rank)
        if node.op == "bnncc.Sign":
            for reader in self.consumers[data]:
                if reader.op == "bnncc.Sign" and id(reader) not in self.absorbed:
                    group.events.append(Event("sign", reader.outputs[0], reader))
                    self.absorbed.add(id(reader))
            group.tip = ""
            return group
        event = self._absorb(node, data)
        assert event is not None, node.name
        group.events.append(event)
        self.absorbed.add(id(node))
        group.tip = event.tensor
        return group

    def _first_operand(self, node: Node) -> str:
        operands = self._tensor_glue(node)
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
        inputs = [self.physical.float(i, layout) if i else "" for i in node.inputs]
        types: list[TensorType] = []
        outputs = []
        for out in node.outputs:
            if not out:
                outputs.append("")
                types.append(TensorType((), "float32"))
                continue
            kind = self.graph.types[out]
            shape = kind.shape
            if layout == "NHWC":
                shape = (shape[0], shape[2], shape[3], shape[1])
            name = self.physical.graph.fresh(out)
            self.physical.floats[out] = {layout: name}
            outputs.append(name)
            types.append(TensorType(shape, kind.dtype))
        op = node.op if node.op != "bnncc.Sign" else "bnncc.FloatSign"
        self.physical.node(
            Node(op, inputs, outputs, dict(node.attrs), node.name, node.covers), types
        )
