"""Classify nodes for `fuse`: anchor of a kernel, elementwise, movement of bits, or other."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.halves import NARROW, ROUND
from bnncc.ir.image_bits import IMAGE_BITS
from bnncc.ir.quantizers import LEVELS, QUANTIZED_CONV
from bnncc.ir.rows import SWISH
from bnncc.recognise.affine import affine_of, has_constant_form
from bnncc.recognise.few_bit import FEW_BIT_CONV
from bnncc.recognise.products import BINARY_PRODUCT
from bnncc.recognise.transposed import INTERLEAVE
from bnncc.topi_binary.quantization import to_bfloat16
from bnncc.topi_binary.spec import Pool2d, ceil_extra, output_size
from bnncc.transform.float_precision import OPERAND
from bnncc.transform.level_routes import ROUTED
from bnncc.transform.merge import ADD_REPEATED
from bnncc.transform.routes import ROUTES

_BY_OPERATOR = {
    "bnncc.BinaryConv": "binary", BINARY_PRODUCT: "product", FEW_BIT_CONV: "few-bit",
    INTERLEAVE: "interleave", ADD_REPEATED: "glue", IMAGE_BITS: "image-bits",
}  # fmt: skip
"""Kinds of nodes that passes have made."""
_POOLS = {"MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean"}
_TENSOR_OPS = {"Add", "Sub", "Mul", "Div"}
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
    ROUND,
}
_VIEWS = {"Flatten", "Reshape", "Transpose"}
"""Operators that may lie between a rounding and the layers it applies to."""
_RELAYOUTS: dict[tuple[int, ...], tuple[str, str]] = {
    (0, 3, 1, 2): ("NCHW", "NHWC"),
    (0, 2, 3, 1): ("NHWC", "NCHW"),
}


class Kinds:
    """Classifies nodes of the logical graph.

    Parameters
    ----------
    graph : Graph
        After `binarize`; only read.
    signs : collection of str
        Tensors that are signs.
    packed : collection of str, optional
        Few-valued tensors that are read as levels.
    """

    def __init__(self, graph: Graph, signs: Collection[str], packed: Collection[str] = ()) -> None:
        self.graph = graph
        self._signs = signs
        self._packed = packed
        self._consumers, self._producers = graph.consumers(), graph.producers()

    def kind(self, node: Node, routes: bool = True) -> str:
        """Return how `transform.fuse` treats `node`.

        Parameters
        ----------
        node : Node
            A node of the graph.
        routes : bool, default True
            Whether levels may be moved as planes.

        Returns
        -------
        str
            ``binary``, ``few-bit``, ``product``, ``conv``, ``dense``, ``pool``: anchors of kernels.
            ``glue``: elementwise. ``image``: bytes to float. ``image-bits``: bytes to bits.
            ``route``: moves bits. ``level-route``: moves levels. ``relayout``: the same memory in
            another layout. ``absent``: folded into the dense layers that read it.
            ``interleave``: interleaves phases. ``rounded``: a rounding done by the layers that read
            it. ``generic``: left to TVM.
        """
        if node.op in _BY_OPERATOR:
            return _BY_OPERATOR[node.op]
        if node.op == NARROW and self._for_rounding_layers(node.outputs[0]):
            return "rounded"
        if routes and node.op in ROUTED and node.outputs[0] in self._packed:
            return "level-route"
        if node.op in ("Flatten", "Reshape") and self._feeds_dense_only(node):
            return "absent"
        if node.op in ROUTES and node.outputs[0] in self._signs:
            return "route"
        if self.relayout(node) is not None:
            return "relayout"
        if node.op in ("bnncc.Sign", LEVELS):
            return "glue" if self._image_ok(node.inputs[0]) else "generic"
        if not node.outputs or not self._image_ok(node.outputs[0]):
            return "generic"
        if node.op == QUANTIZED_CONV:
            return "conv"
        if node.op == "Conv" and self._float_weights(node) and self._image_ok(node.inputs[0]):
            return "conv"
        if node.op in ("Gemm", "MatMul") and self._dense_ok(node):
            return "dense"
        if node.op in _POOLS and self.pool_spec(node) is not None:
            return "pool"
        if node.op == "Cast" and self.graph.types[node.inputs[0]].dtype == "uint8":
            return "image"
        if self.constant_glue(node) is not None or self.tensor_glue(node) is not None:
            return "generic" if self._of_reduced_rows(node) else "glue"
        return "generic"

    def _of_reduced_rows(self, node: Node) -> bool:
        """Whether `node` computes one number per row from a reduction, whose kernel can do it."""
        made: Node | None = node
        while made is not None and self.graph.types[made.outputs[0]].shape[1:] == (1,):
            if made.op.startswith("Reduce"):
                return True
            made = self._producers.get(next(iter(self.graph.computed(made.inputs)), ""))
        return False

    def rounded(self, node: Node) -> bool:
        """Whether an option rounds data and weights of a convolution or dense layer."""
        if node.op not in ("Conv", "Gemm", "MatMul") or int(node.attrs.get("group", 1)) != 1:
            return False
        name = node.inputs[0]
        while (made := self._producers.get(name)) is not None and made.op in _VIEWS:
            name = made.inputs[0]
        if made is None or made.op != NARROW or OPERAND not in made.attrs:
            return False
        weight = self.graph.constants.get(node.inputs[1])
        return weight is not None and bool((to_bfloat16(weight) == weight).all())

    def _for_rounding_layers(self, name: str) -> bool:
        """Whether all readers of a rounded tensor are layers that round it themselves."""
        readers = self._consumers.get(name, [])
        return (
            name not in self.graph.outputs
            and bool(readers)
            and all(
                self._for_rounding_layers(r.outputs[0])
                if r.op in _VIEWS
                else self.rounded(r) and self.kind(r) in ("conv", "dense")
                for r in readers
            )
        )

    def zeros_matter(self, node: Node) -> bool:
        """Whether a sign may depend on an exact zero in the result of the convolution `node`.

        Over a region of zeros, a direct convolution gives exactly its bias. If there is no bias and
        nothing is added, a sign would see the rounding errors of any other method.
        """
        if not any(n.op == "bnncc.Sign" for n in self.graph.nodes):
            return False
        name = node.outputs[0]
        channels = int(self.graph.types[name].shape[1])
        offset = np.zeros(channels) + np.asarray(node.attrs.get("bias", 0.0))
        if node.input(2):
            offset = offset + self.graph.constants[node.inputs[2]].reshape(-1)
        while len(readers := self._consumers.get(name, [])) == 1:
            if self.constant_glue(readers[0]) != name:
                break
            if (step := affine_of(readers[0], self.graph, channels, 4)) is None:
                break
            offset = offset * step[0] + step[1]
            name = readers[0].outputs[0]
        return bool((offset.astype(np.float32) == 0).any())

    def relayout(self, node: Node) -> tuple[str, str] | None:
        """Return the layouts in which operand and result of `node` are the same memory.

        An NHWC tensor, for example, is the result of ``Transpose(0, 2, 3, 1)`` in the file's
        layout.
        """
        if node.op != "Transpose" or len(self.graph.types[node.outputs[0]].shape) != 4:
            return None
        perm = tuple(int(p) for p in node.attrs.get("perm", ()))
        return _RELAYOUTS.get(perm)

    def _image_ok(self, name: str) -> bool:
        """Whether `name` is a float image or matrix that kernels can process."""
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
        bias = self.graph.constants[node.inputs[2]] if node.input(2) else None
        units = int(self.graph.types[node.outputs[0]].shape[1])
        if bias is None:
            return True
        return bias.size in (1, units) and (bias.ndim < 2 or bias.shape[0] == 1)

    def flattened_image(self, name: str) -> str | None:
        """Return the image that `name` flattens, with the same elements per row."""
        move = self._producers.get(name)
        if move is None or move.op not in ("Flatten", "Reshape") or not self._image_ok(name):
            return None
        image, flat = self.graph.types[move.inputs[0]], self.graph.types[name]
        if not self._image_ok(move.inputs[0]) or len(image.shape) != 4 or len(flat.shape) != 2:
            return None
        same = image.shape[0] == flat.shape[0] and np.prod(image.shape[1:]) == flat.shape[1]  # type: ignore[arg-type]
        return move.inputs[0] if same else None

    def _feeds_dense_only(self, node: Node) -> bool:
        out = node.outputs[0]
        if out in self.graph.outputs or self.flattened_image(out) is None:
            return False
        readers = self._consumers.get(out, [])
        return all(
            (r.op in ("Gemm", "MatMul") and r.inputs[0] == out and self._dense_ok(r))
            for r in readers
        )

    def constant_glue(self, node: Node) -> str | None:
        """Return the data operand if `node` is elementwise, with per-channel constants at most."""
        if node.op == SWISH:  # in images, TVM's `LowerIntrin` would take half a second per vector
            return node.inputs[0] if len(self.graph.types[node.inputs[0]].shape) == 2 else None
        if node.op not in _CONSTANT_OPS:
            return None
        data = self.graph.computed(node.inputs)
        if len(data) != 1 or self.graph.types[data[0]] != self.graph.types[node.outputs[0]]:
            return None
        shape = self.graph.types[data[0]].shape
        fits = has_constant_form(node, self.graph, int(shape[1]), len(shape))
        return data[0] if fits else None

    def tensor_glue(self, node: Node) -> tuple[str, ...] | None:
        """Return the operands that may be the group's value, if `node` combines two tensors."""
        if node.op == ADD_REPEATED:
            return (node.inputs[0],)
        if node.op not in _TENSOR_OPS or len(node.inputs) != 2 or node.inputs[0] == node.inputs[1]:
            return None
        out = self.graph.types[node.outputs[0]]
        kinds = [self.graph.types[i] for i in node.inputs]
        if kinds[0] == out and kinds[1] == out:
            return tuple(node.inputs) if node.op != "Div" else None
        for i, kind in enumerate(kinds):
            full = kinds[1 - i]
            rows = TensorType((out.shape[0], 1), out.dtype)
            if full == out and len(out.shape) == 2 and kind == rows:
                by_row = node.inputs[i] not in self.graph.constants and (i or node.op != "Div")
                return (node.inputs[1 - i],) if by_row else None
            gate = (*out.shape[:2], 1, 1)
            if node.op == "Mul" and full == out and kind.shape == gate and kind.dtype == out.dtype:
                return (node.inputs[1 - i],) if node.inputs[i] not in self.graph.constants else None
        return None

    def pool_spec(self, node: Node) -> Pool2d | None:
        """Return `node` as a pooling of an NHWC image; None if no kernel computes it."""
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
        both = [(d, kernel[i], strides[i], dilations[i], pads[i] + pads[i + 2])
                for i, d in enumerate((height, width))]  # fmt: skip
        extra = ceil_extra(int(out[2]), *both[0]), ceil_extra(int(out[3]), *both[1])
        made = output_size(*both[0], extra[0]), output_size(*both[1], extra[1])
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
