"""OpenVINO's fast binary path for the networks of `networks.py`, as a worker process.

    PYTHON_WITH_OPENVINO benchmarks/peer_openvino.py MODEL.onnx THREADS

OpenVINO does not recognise ONNX ``Sign`` + ``Conv``: left as it is, such a layer runs in float. So
that the comparison is fair, every sign and binary convolution is rewritten by hand to what the CPU
plugin keeps as bits: ``FakeQuantize`` with two levels {0, 1}, and ``BinaryConvolution``. Precision
is float32. Reads lines ``run N`` from stdin and answers the least of N times in seconds; ``out
FILE`` writes the output for the input saved in FILE.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import onnx
import openvino as ov
import openvino.opset8 as op
from onnx import numpy_helper

_KEEP: list[np.ndarray] = []  # a constant made from a tensor borrows its memory


def build(model: onnx.ModelProto) -> ov.Model:
    """Translate the operators that `networks.py` uses."""
    consts = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    values: dict[str, object] = {}
    signs: dict[str, object] = {}
    pads: dict[str, tuple[str, float, list[int]]] = {}
    info = model.graph.input[0]
    shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
    parameter = op.parameter(shape, np.float32)
    values[info.name] = parameter

    def constant(value: np.ndarray) -> object:
        return op.constant(np.asarray(value, np.float32))

    def bits(x: object) -> object:
        zero, one = (constant(np.full((1, 1, 1, 1), v)) for v in (0, 1))
        return op.fake_quantize(x, zero, zero, zero, one, 2)

    for node in model.graph.node:
        a = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
        ins, out = list(node.input), node.output[0]
        if node.op_type in ("GreaterOrEqual", "Sign"):
            signs[out] = values[ins[0]]
        elif node.op_type == "Where":
            signs[out] = signs[ins[0]]
        elif node.op_type == "Pad":
            pads[out] = (ins[0], float(consts[ins[2]]), consts[ins[1]].tolist())
        elif node.op_type == "Conv":
            pad, value, data = a["pads"], 0.0, ins[0]
            if data in pads:
                data, value, given = pads[data]
                pad = [given[2], given[3], given[6], given[7]]
            weight, strides = consts[ins[1]], a["strides"]
            begin, end = pad[:2], pad[2:]
            if data in signs:
                packed = np.packbits((weight.reshape(-1) > 0).astype(np.uint8), bitorder="little")
                _KEEP.append(packed)
                tensor = ov.Tensor(packed, ov.Shape(list(weight.shape)), ov.Type.u1)
                values[out] = op.binary_convolution(
                    bits(signs[data]), ov.op.Constant(tensor), strides, begin, end, [1, 1],
                    "xnor-popcount", value,
                )  # fmt: skip
            elif a.get("group", 1) == 1:
                values[out] = op.convolution(
                    values[data], constant(weight), strides, begin, end, [1, 1]
                )
            else:
                values[out] = op.group_convolution(
                    values[data], constant(weight[:, None]), strides, begin, end, [1, 1]
                )
        elif node.op_type == "BatchNormalization":
            gamma, beta, mean, var = (consts[i].astype(np.float64) for i in ins[1:5])
            scale = gamma / np.sqrt(var + a["epsilon"])
            rows = [v.reshape(1, -1, 1, 1) for v in (scale, beta - mean * scale)]
            values[out] = op.add(op.multiply(values[ins[0]], constant(rows[0])), constant(rows[1]))
        elif node.op_type == "Relu":
            values[out] = op.relu(values[ins[0]])
        elif node.op_type == "Add":
            values[out] = op.add(values[ins[0]], values[ins[1]])
        elif node.op_type == "MaxPool":
            pad = a.get("pads", [0] * 4)
            values[out] = op.max_pool(
                values[ins[0]], a["strides"], [1, 1], pad[:2], pad[2:], a["kernel_shape"]
            ).output(0)
        elif node.op_type == "AveragePool":
            values[out] = op.avg_pool(
                values[ins[0]], a["strides"], [0, 0], [0, 0], a["kernel_shape"], True
            )
        elif node.op_type == "GlobalAveragePool":
            values[out] = op.reduce_mean(values[ins[0]], np.array([2, 3]), False)
        elif node.op_type == "Flatten":
            values[out] = values[ins[0]]
        elif node.op_type == "Gemm":
            product = op.matmul(values[ins[0]], constant(consts[ins[1]]), False, True)
            values[out] = op.add(product, constant(consts[ins[2]]))
        else:
            raise SystemExit(f"{node.op_type} is not translated")
    return ov.Model([values[model.graph.output[0].name]], [parameter], "peer")


def main() -> None:
    """Serve requests."""
    model, threads = build(onnx.load(sys.argv[1])), int(sys.argv[2])
    settings = {
        "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip
    compiled = ov.Core().compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    shape = list(compiled.inputs[0].shape)
    data = ov.Tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    request.set_input_tensor(data)
    print(f"openvino {ov.__version__.split('-')[0]}", flush=True)
    for line in sys.stdin:
        verb, argument = line.split(maxsplit=1)
        if verb == "run":
            best = float("inf")
            for _ in range(int(argument)):
                start = time.perf_counter()
                request.infer()
                best = min(best, time.perf_counter() - start)
            print(best, flush=True)
        else:
            path = argument.strip()
            data.data[...] = np.load(path)
            request.infer()
            np.save(path, request.get_output_tensor(0).data)
            print("done", flush=True)


if __name__ == "__main__":
    main()
