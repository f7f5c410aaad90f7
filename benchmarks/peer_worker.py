"""Serves one peer from its own Python environment; driven by `peers.py`.

    PYTHON benchmarks/peer_worker.py KIND MODEL.onnx THREADS

Answers `ready NAME VERSION` or `failed REASON`, then reads lines from stdin: ``run N`` answers the
least of N times in seconds; ``out FILE`` reads a float32 NCHW input from FILE, writes the output
over it, and answers ``done``. Kinds are the keys of `KINDS`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

# A peer's pool spins after its work; with more than one thread it would disturb who comes next.
PAUSE = 0.03


class Served:
    """What a kind returns: what it is called, how to set the input, run, and get the output."""

    def __init__(
        self,
        name: str,
        load: Callable[[np.ndarray], None],
        run: Callable[[], object],
        output: Callable[[], np.ndarray],
    ) -> None:
        self.name, self.load, self.run, self.output = name, load, run, output


def _shape(path: Path) -> list[int]:
    info = onnx.load(path).graph.input[0]
    return [d.dim_value for d in info.type.tensor_type.shape.dim]


def quantized(path: Path) -> Path:
    """Return the network with every convolution and dense layer in int8 (QDQ), made once.

    Weights are signed, one scale per output channel; activations unsigned; calibration data random.
    """
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    made = path.with_suffix(".int8.onnx")
    if made.exists():
        return made
    shape = _shape(path)

    class Random(CalibrationDataReader):
        def __init__(self) -> None:
            rng = np.random.default_rng(1)
            images = (rng.standard_normal(shape).astype(np.float32) for _ in range(4))
            self._left = iter([{onnx.load(path).graph.input[0].name: image} for image in images])

        def get_next(self):
            return next(self._left, None)

    prepared, draft = path.with_suffix(".prepared.onnx"), path.with_suffix(f".{os.getpid()}.onnx")
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared), str(draft), Random(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    prepared.unlink()
    return draft.rename(made)


def openvino(path: Path, threads: int, form: str) -> Served:
    """Serve OpenVINO: its binary path, float32, or int8 with its default precision for the rest."""
    import openvino as ov

    if form.startswith("binary"):
        from peer_openvino import build

        model = build(onnx.load(path))
    else:
        model = ov.Core().read_model(quantized(path) if form == "int8" else path)
    settings = {
        "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip
    if form not in ("int8", "levels", "binary-default"):
        settings["INFERENCE_PRECISION_HINT"] = "f32"
    if threads > 1:
        settings["ENABLE_CPU_PINNING"] = False
    compiled = ov.Core().compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    kind = np.uint8 if form == "levels" else np.float32
    data = ov.Tensor(np.zeros(list(compiled.inputs[0].shape), kind))
    request.set_input_tensor(data)

    def load(image: np.ndarray) -> None:
        data.data[...] = image

    version = ov.__version__.split("-")[0]
    return Served(
        f"openvino {version}", load, request.infer, lambda: request.get_output_tensor(0).data
    )


def onnxruntime(path: Path, threads: int, form: str) -> Served:
    """Serve ONNX Runtime."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    settings.log_severity_level = 3
    model = str(quantized(path) if form == "int8" else path)
    session = ort.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()

    def load(image: np.ndarray) -> None:
        given = image.astype(np.uint8) if form == "levels" else image
        binding.bind_cpu_input(session.get_inputs()[0].name, given)
        binding.bind_output(session.get_outputs()[0].name, "cpu")

    return Served(
        f"onnxruntime {ort.__version__}", load, lambda: session.run_with_iobinding(binding),
        lambda: binding.copy_outputs_to_cpu()[0],
    )  # fmt: skip


def torch(path: Path, threads: int, form: str) -> Served:
    """Serve PyTorch: eager, eager with channels last, or compiled (channels last)."""
    import torch
    from peer_torch import Module

    torch.set_num_threads(threads)
    module = Module(onnx.load(path)).eval()
    call = module
    if form == "compile":
        torch._inductor.config.freezing = True  # pack the weights once
        call = torch.compile(module)
    held: dict[str, torch.Tensor] = {}

    def load(image: np.ndarray) -> None:
        held["x"] = torch.from_numpy(image)
        if form != "eager":
            held["x"] = held["x"].contiguous(memory_format=torch.channels_last)

    def run() -> None:
        with torch.inference_mode():
            held["y"] = call(held["x"])

    return Served(f"torch {torch.__version__}", load, run, lambda: held["y"].numpy())


def torch_linear(path: Path, threads: int, form: str) -> Served:
    """Serve PyTorch for a network of one MatMul by constants, data and weights of type `form`."""
    import torch

    torch.set_num_threads(threads)
    (weight,) = onnx.load(path).graph.initializer
    dtype = getattr(torch, form)
    held = {"w": torch.from_numpy(onnx.numpy_helper.to_array(weight).T.copy()).to(dtype)}

    def load(image: np.ndarray) -> None:
        held["x"] = torch.from_numpy(image).to(dtype)

    def run() -> None:
        with torch.inference_mode():
            held["y"] = torch.nn.functional.linear(held["x"], held["w"])

    return Served(f"torch {torch.__version__}", load, run, lambda: held["y"].float().numpy())


def torch_encoder(path: Path, threads: int, form: str) -> Served:
    """Serve PyTorch for an encoder of `transformer_networks`, everything of type `form`."""
    import torch
    from peer_torch_encoder import Encoder

    torch.set_num_threads(threads)
    dtype = getattr(torch, form)
    call, held = Encoder(onnx.load(path), dtype).eval(), {}

    def load(states: np.ndarray) -> None:
        held["x"] = torch.from_numpy(states).to(dtype)

    def run() -> None:
        with torch.inference_mode():
            held["y"] = call(held["x"])

    return Served(f"torch {torch.__version__}", load, run, lambda: held["y"].float().numpy())


def torch_function(path: Path, threads: int, form: str) -> Served:
    """Serve PyTorch's own function of the name that the network has."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(threads)
    depth = _shape(path)[-1:]
    scale, bias = torch.ones(depth), torch.zeros(depth)
    functions = {
        "erf": torch.erf, "exp": torch.exp, "gelu": F.gelu, "log": torch.log, "silu": F.silu,
        "sigmoid": torch.sigmoid, "softplus": F.softplus, "tanh": torch.tanh,
        "softmax": lambda x: torch.softmax(x, -1),
        "rms_norm": lambda x: F.rms_norm(x, depth, scale, 1e-6),
        "layer_norm": lambda x: F.layer_norm(x, depth, scale, bias, 1e-6),
    }  # fmt: skip
    call = functions[onnx.load(path).graph.name]
    held: dict[str, torch.Tensor] = {}

    def load(values: np.ndarray) -> None:
        held["x"] = torch.from_numpy(values)

    def run() -> None:
        with torch.inference_mode():
            held["y"] = call(held["x"])

    return Served(f"torch {torch.__version__}", load, run, lambda: held["y"].numpy())


def lce(path: Path, threads: int, form: str) -> Served:
    """Serve Larq Compute Engine with one of its three x86 kernels; NHWC in."""
    from importlib.metadata import version

    from peer_larq import Keras  # first: it chooses the Keras that the others get

    import larq_compute_engine as engine  # isort: skip
    from larq_compute_engine.tflite.python import interpreter_wrapper_lite as wrapper

    made = path.with_suffix(".lce.tflite")
    if not made.exists():
        made.write_bytes(engine.convert_keras_model(Keras(onnx.load(path)).model))
    kernels = (form == "reference", form == "indirect", False)  # XNNPACK only costs time here
    interpreter = wrapper.LiteInterpreter(made.read_bytes(), threads, *kernels)
    held: dict[str, list[np.ndarray]] = {}

    def load(image: np.ndarray) -> None:
        held["x"] = [np.ascontiguousarray(image.transpose(0, 2, 3, 1))]

    def run() -> None:
        held["y"] = interpreter.predict(held["x"])

    name = f"larq-compute-engine {version('larq-compute-engine')}"
    return Served(name, load, run, lambda: _nchw(held["y"][0]))


def tflite(path: Path, threads: int, form: str) -> Served:
    """Serve TensorFlow Lite with XNNPACK; NHWC in."""
    from peer_larq import Keras, tf

    flatbuffer = tf.lite.TFLiteConverter.from_keras_model(Keras(onnx.load(path)).model).convert()
    interpreter = tf.lite.Interpreter(model_content=flatbuffer, num_threads=threads)
    interpreter.allocate_tensors()
    source = interpreter.get_input_details()[0]["index"]
    sink = interpreter.get_output_details()[0]["index"]

    def load(image: np.ndarray) -> None:
        interpreter.set_tensor(source, np.ascontiguousarray(image.transpose(0, 2, 3, 1)))

    return Served(
        f"tensorflow-lite {tf.__version__}", load, interpreter.invoke,
        lambda: _nchw(interpreter.get_tensor(sink)),
    )  # fmt: skip


def _nchw(value: np.ndarray) -> np.ndarray:
    return value.transpose(0, 3, 1, 2) if value.ndim == 4 else value


KINDS: dict[str, tuple[Callable[[Path, int, str], Served], str]] = {
    "openvino-binary": (openvino, "binary"),
    "openvino-binary-default": (openvino, "binary-default"),
    "openvino-f32": (openvino, "f32"),
    "openvino-int8": (openvino, "int8"),
    "openvino-levels": (openvino, "levels"),
    "onnxruntime-levels": (onnxruntime, "levels"),
    "onnxruntime-f32": (onnxruntime, "f32"),
    "onnxruntime-int8": (onnxruntime, "int8"),
    "torch": (torch, "eager"),
    "torch-channels-last": (torch, "channels-last"),
    "torch-compile": (torch, "compile"),
    "torch-bfloat16": (torch_linear, "bfloat16"),
    "torch-encoder-bfloat16": (torch_encoder, "bfloat16"),
    "torch-encoder-float32": (torch_encoder, "float32"),
    "torch-function": (torch_function, "eager"),
    "lce": (lce, "default"),
    "lce-indirect": (lce, "indirect"),
    "lce-reference": (lce, "reference"),
    "tflite": (tflite, "f32"),
}


def main() -> None:
    """Serve requests until stdin ends."""
    kind, path, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    # Libraries that print must not break the protocol.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(text: str) -> None:
        print(" ".join(text.split()), file=answers, flush=True)

    try:
        function, form = KINDS[kind]
        peer = function(path, threads, form)
        image = np.random.default_rng(0).standard_normal(_shape(path)).astype(np.float32)
        peer.load(np.abs(image))
        peer.run()
    except BaseException as error:  # a peer that cannot run a network is a result
        answer(f"failed {type(error).__name__}: {str(error)[:200]}")
        return
    answer(f"ready {peer.name}")
    for line in sys.stdin:
        verb, argument = line.split(maxsplit=1)
        if verb == "run":
            seconds = []
            for _ in range(int(argument)):
                start = time.perf_counter()
                peer.run()
                seconds.append(time.perf_counter() - start)
            if threads > 1:
                time.sleep(PAUSE)
            answer(f"{min(seconds)!r} {statistics.median(seconds)!r}")
        else:
            file = argument.strip()
            peer.load(np.load(file))
            peer.run()
            np.save(file, peer.output())
            answer("done")


if __name__ == "__main__":
    main()
