"""Build QONNX models, and run them with the executor of the package `qonnx`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DOMAINS = ("qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general")
CHANNELS_LAST = "qonnx.custom_op.channels_last"
IR_VERSION = 10

Array = np.ndarray[Any, Any]


class Builder:
    """Collects the nodes of one model; `add` returns the name of what it computes."""

    def __init__(self, domain: str = DOMAINS[0]) -> None:
        self.domain = domain
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def constant(self, value: Any, dtype: type = np.float32) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def add(self, op: str, *inputs: Any, domain: str = "", **attrs: Any) -> str:
        """Add a node; inputs that are not names become float32 constants."""
        names = [i if isinstance(i, str) else self.constant(i) for i in inputs]
        name = f"t{len(self.nodes)}"
        node = helper.make_node(op, names, [name], name=f"{op}_{len(self.nodes)}", domain=domain)
        node.attribute.extend(helper.make_attribute(k, v) for k, v in attrs.items())
        self.nodes.append(node)
        return name

    def custom(self, op: str, *inputs: Any, **attrs: Any) -> str:
        return self.add(op, *inputs, domain=self.domain, **attrs)

    def quant(
        self, x: Any, scale: Any, bits: float, *, zero: Any = 0.0, signed: int = 1,
        narrow: int = 0, mode: str = "ROUND",
    ) -> str:  # fmt: skip
        attrs = {"signed": signed, "narrow": narrow, "rounding_mode": mode}
        return self.custom("Quant", x, scale, zero, float(bits), **attrs)

    def model(
        self,
        shape: Sequence[int],
        output: str,
        rank: int,
        *,
        annotation: str = "",
        imported: bool = True,
        opset: int = 13,
        version: int = 1,
    ) -> onnx.ModelProto:
        """Return the model of input `x` and one output, of `rank` axes."""
        graph = helper.make_graph(
            self.nodes,
            "qonnx",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, [None] * rank)],
            self.initializers,
        )
        if annotation:
            annotate(graph, "x", annotation)
        opsets = [helper.make_opsetid("", opset)]
        if imported:
            opsets += [helper.make_opsetid(d, version) for d in (self.domain, CHANNELS_LAST)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def annotate(graph: onnx.GraphProto, tensor: str, datatype: str) -> None:
    """Declare the data type of a tensor as FINN does."""
    entry = onnx.TensorAnnotation(tensor_name=tensor)
    entry.quant_parameter_tensor_names.add(key="finn_datatype", value=datatype)
    graph.quantization_annotation.append(entry)


class Executor:
    """The package's executor for one model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        from qonnx.core import onnx_exec
        from qonnx.core.modelwrapper import ModelWrapper
        from qonnx.custom_op.channels_last import base_wrapped_op
        from qonnx.transformation.infer_shapes import InferShapes
        from qonnx.util.basic import qonnx_make_model

        def small(*args: Any, **options: Any) -> onnx.ModelProto:
            """Make the models of single nodes in an IR version that ONNX Runtime knows."""
            made = qonnx_make_model(*args, **options)
            made.ir_version = IR_VERSION
            return made

        onnx_exec.qonnx_make_model = base_wrapped_op.qonnx_make_model = small
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        copy.ir_version = min(copy.ir_version, IR_VERSION)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model = ModelWrapper(copy).transform(InferShapes())

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        from qonnx.core.onnx_exec import execute_onnx

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return execute_onnx(self._model, dict(feeds))
