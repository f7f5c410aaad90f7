"""Builder of the ONNX model for a TensorFlow Lite network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.frontend.flatbuffer import Table
from bnncc.frontend.tflite_file import Network, Operator, Tensor
from bnncc.ir.graph import Dim

Array = np.ndarray[Any, Any]

OPSET = 20
FIRST, LAST = [0, 3, 1, 2], [0, 2, 3, 1]
"""Permutations from channels-last to channels-first, and back."""

WORD_BITS = 32
_PRODUCTS = {"Conv", "Gemm", "MatMul", "ConvTranspose"}
_ACTIVATIONS = {0: "NONE", 1: "RELU", 2: "RELU_N1_TO_1", 3: "RELU6", 4: "TANH"}
_SLACK = 1 << 24
_GROWTH = 64
"""Limit of the bytes of ONNX constants per byte of the file, beyond `_SLACK`; bits expand to 32
times their size."""


def words(channels: int) -> int:
    """Return the number of words that hold `channels` bits."""
    return -(-channels // WORD_BITS)


class Writer:
    """Collects ONNX nodes, operator by operator.

    Parameters
    ----------
    network : Network
        The network to translate.

    Attributes
    ----------
    channels : dict of Tensor to int
        Numbers of channels of packed tensors.
    operator : Operator
        The current operator.
    where : str
        Description of the current operator for messages.
    """

    operator: Operator

    def __init__(self, network: Network) -> None:
        self.network = network
        self.nodes: list[onnx.NodeProto] = []
        self.channels: dict[Tensor, int] = {}
        self.where = self._label = ""
        self._constants: dict[str, onnx.TensorProto] = {}
        self._known: dict[Tensor, str] = {}
        self._makers: dict[str, tuple[onnx.NodeProto, int]] = {}
        self._called: set[str] = set()
        self._serial = 0
        self._budget = _SLACK + _GROWTH * network.size

    def begin(self, operator: Operator, op: str) -> None:
        """Start with an operator."""
        self.operator = operator
        self._label = operator.outputs[0].name
        self.where = f"{op} `{self._label}`"

    # ---- the operator at hand ---------------------------------------------------------------

    def operands(self, least: int, most: int | None = None) -> list[Any]:
        """Return the operands, `most` in number, with None for absent ones."""
        most = least if most is None else most
        given = self.operator.inputs
        if not least <= len(given) <= most or any(t is None for t in given[:least]):
            raise ModelError(
                f"{self.where}: has {sum(t is not None for t in given)} inputs, "
                f"expected {least} to {most}"
            )
        return [*given, *[None] * (most - len(given))]

    def only(self) -> str:
        """Return the name of the only operand."""
        return self.read(self.operands(1)[0])

    def option(self, slot: int, kind: str, default: Any = 0) -> Any:
        """Return an option, or `default` if it is absent."""
        options = self.operator.options
        return default if options is None else options.scalar(slot, kind, default)

    def options(self) -> Table:
        """Return the options, which must exist."""
        if self.operator.options is None:
            raise ModelError(f"{self.where}: has no options")
        return self.operator.options

    def rank(self, tensor: Tensor) -> int:
        """Return the rank of a tensor, which must not be 0."""
        if not tensor.shape:
            raise ShapeError(f"{self.where}: `{tensor.name}` is a scalar, expected axes")
        return len(tensor.shape)

    # ---- tensors ----------------------------------------------------------------------------

    def name(self, tensor: Tensor) -> str:
        """Return the ONNX name of the numbers of a tensor.

        Bits and quantized integers are floats inside the model; inputs and outputs keep their
        names.
        """
        if tensor in self.channels:
            return f"{tensor.name}/signs"
        return f"{tensor.name}/values" if quantized(tensor) else tensor.name

    def read(self, tensor: Tensor | None) -> str:
        """Return the name of an operand; constants are added to the model."""
        if tensor is None:
            raise ModelError(f"{self.where}: an input is missing")
        if tensor.data is None:
            return self.name(tensor)
        if tensor not in self._known:
            data = tensor.data.astype(np.float32) if quantized(tensor) else tensor.data
            self._known[tensor] = self.constant(data, tensor.name)
        return self._known[tensor]

    def numbers(self, tensor: Tensor | None, what: str) -> Array:
        """Return the value of an operand, which must be constant."""
        if tensor is None or tensor.data is None:
            raise UnsupportedOp(f"{self.where}: its {what} is not constant")
        return tensor.data

    def ints(self, tensor: Tensor | None, what: str) -> list[int]:
        """Return a constant vector of integers."""
        values = self.numbers(tensor, what)
        if values.dtype.kind not in "iu" or values.size > 64:
            raise ModelError(f"{self.where}: its {what} is {values.dtype} {list(values.shape)}")
        return [int(v) for v in values.reshape(-1)]

    def constant(self, value: Array | float | Sequence[int], stem: str = "") -> str:
        """Add a constant; Python floats become float32, and integers int64."""
        if not isinstance(value, np.ndarray | np.generic):
            value = np.asarray(value, np.float32 if isinstance(value, float) else np.int64)
        value = np.asarray(value)
        self._budget -= value.nbytes
        if self._budget < 0:
            raise ModelError(f"{self.where}: the constants are larger than the file can hold")
        if value.dtype == bool:  # stored as bytes, of which only 0 is false
            value = value.view(np.uint8) != 0
        name = self._fresh(stem or f"{self._label}/constant")
        self._constants[name] = numpy_helper.from_array(np.asarray(value, order="C"), name)
        return name

    def _fresh(self, stem: str) -> str:
        self._serial += 1
        return f"{stem}.{self._serial}"

    # ---- nodes ------------------------------------------------------------------------------

    def node(self, op: str, *inputs: str, outputs: int = 1, **attrs: Any) -> Any:
        """Append a node and return the name of its output, or their names."""
        label = self._label if op in _PRODUCTS else f"{self._label}/{op}"
        names = [self._fresh(label) for _ in range(outputs)]
        called = label if label not in self._called else names[0]
        self._called.add(called)
        made = helper.make_node(op, list(inputs), names, called, **attrs)
        self.nodes.append(made)
        for used in inputs:
            self._makers.pop(used, None)
        self._makers.update({n: (made, k) for k, n in enumerate(names)})
        return names[0] if outputs == 1 else names

    def bind(self, tensor: Tensor, name: str) -> None:
        """Associate a result with a tensor of the file."""
        wanted = self.name(tensor)
        if name in self._makers:  # not read yet, so it can be renamed
            self.rename(name, wanted)
        else:
            self.nodes.append(helper.make_node("Identity", [name], [wanted], f"{wanted}/Identity"))

    def first(self, name: str) -> str:
        """Transpose an image to channels-first."""
        return str(self.node("Transpose", name, perm=FIRST))

    def last(self, name: str) -> str:
        """Transpose an image to channels-last."""
        return str(self.node("Transpose", name, perm=LAST))

    def turned(self, tensor: Tensor | None, perm: Sequence[int]) -> str:
        """Return an operand, transposed."""
        if tensor is not None and tensor.data is not None and not quantized(tensor):
            return self.constant(np.ascontiguousarray(tensor.data.transpose(perm)), tensor.name)
        return str(self.node("Transpose", self.read(tensor), perm=list(perm)))

    def activated(self, name: str, code: int) -> str:
        """Apply a fused activation."""
        if code not in _ACTIVATIONS:
            raise UnsupportedOp(f"{self.where}: fused activation {code} is not supported")
        if code == 0:
            return name
        if code in (1, 4):
            return str(self.node("Relu" if code == 1 else "Tanh", name))
        low, high = activation_range(code)
        return str(self.node("Clip", name, self.constant(low), self.constant(high)))

    def rounded(self, name: str, dtype: str, offset: str = "") -> str:
        """Round to integers, halves away from 0, then add `offset` and saturate.

        Adding the largest float below 0.5 and rounding down is correct for all floats below 2**23.
        """
        half = self.constant(np.nextafter(np.float32(0.5), np.float32(0)))
        limits = self.constant(-65536.0), self.constant(65536.0)
        value = self.node("Clip", name, *limits)
        up = self.node("Floor", self.node("Add", self.node("Relu", value), half))
        mirrored = self.node("Relu", self.node("Neg", value))
        down = self.node("Floor", self.node("Add", mirrored, half))
        whole = self.node("Sub", up, down)
        if offset:
            whole = self.node("Add", whole, offset)
        info = np.iinfo(dtype)
        ends = self.constant(float(info.min)), self.constant(float(info.max))
        return str(self.node("Clip", whole, *ends))

    def quantization(self, tensor: Tensor) -> tuple[str, str]:
        """Return scale and zero point of a tensor as float constants that broadcast with it."""
        known = tensor.quantization
        assert known is not None
        shape = [1] * len(tensor.shape)
        if known.scale.size > 1:
            shape[known.axis] = known.scale.size
        values = (known.scale, known.zero_point.astype(np.float32))
        scale, zero = (v.reshape(shape) if v.size > 1 else v.reshape(()) for v in values)
        return self.constant(scale), self.constant(zero)

    def cast(self, name: str, dtype: str) -> str:
        """Convert numbers to another type."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return str(self.node("Cast", name, to=kind))

    def cast_input(self, tensor: Tensor) -> None:
        """Convert an input of quantized integers to float."""
        self.bind(tensor, self.cast(tensor.name, "float32"))

    def cast_output(self, tensor: Tensor) -> None:
        """Convert an output back to quantized integers."""
        self.rename(self.cast(self.name(tensor), tensor.dtype), tensor.name)

    def rename(self, name: str, wanted: str) -> None:
        """Rename a result that has not been read yet."""
        made, k = self._makers.pop(name)
        made.output[k] = wanted

    def fail(self, what: str, hint: str | None = None) -> UnsupportedOp:
        """Return an error about the current operator."""
        return UnsupportedOp(f"{self.where}: {what}", hint=hint)

    def image(self, tensor: Tensor | None) -> tuple[Dim, ...]:
        """Return the shape of an operand that must be an image, channels last."""
        if tensor is None or len(tensor.shape) != 4:
            found = "nothing" if tensor is None else list(tensor.shape)
            raise ShapeError(f"{self.where}: its input has shape {found}, expected 4 axes")
        return tensor.shape

    # ---- the whole --------------------------------------------------------------------------

    def model(self, name: str) -> onnx.ModelProto:
        """Return the ONNX model."""
        inputs = [_info(t) for t in self.network.inputs]
        outputs = [_info(t) for t in self.network.outputs]
        for tensor in self.network.outputs:
            if tensor.data is not None:
                self.nodes.append(
                    helper.make_node("Identity", [self.read(tensor)], [tensor.name], tensor.name)
                )
        graph = helper.make_graph(self.nodes, name, inputs, outputs, list(self._constants.values()))
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, opset_imports=[opset], ir_version=10)


def quantized(tensor: Tensor) -> bool:
    """Whether the integers of a tensor represent real numbers."""
    return tensor.quantization is not None and tensor.dtype in ("int8", "uint8", "int16")


def activation_range(code: int) -> tuple[float, float]:
    """Return the bounds of a fused RELU, RELU_N1_TO_1 or RELU6; for NONE, the largest floats."""
    most = float(np.finfo(np.float32).max)
    return {0: (-most, most), 1: (0.0, most), 2: (-1.0, 1.0), 3: (0.0, 6.0)}[code]


def _info(tensor: Tensor) -> onnx.ValueInfoProto:
    dims = [d if isinstance(d, int) else None for d in tensor.shape]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
    return helper.make_tensor_value_info(tensor.name, kind, dims)


Results = str | list[str]
"""Names of an operator's results, one per output."""

Rule = Callable[[Writer], Results]
"""Writes the current operator."""
