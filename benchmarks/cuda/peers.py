"""Times what a GPU's libraries do with the same layers and networks: the part `peers` of `run.py`.

Convolution in fp16 and bf16 by cuDNN (channels last, its fastest algorithm); the product of
matrices that a convolution is, without the im2col before it, in int8 and fp8 by cuBLASLt; the
networks of the bundle and ResNet-18 in fp16, channels last, eager and by torch.compile (its default
mode: the search of "max-autotune" takes minutes for each network). All in CUDA graphs. Needs
PyTorch.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = ((56, 64), (28, 128), (14, 256), (7, 512))
BATCHES = (1, 8, 256)
SIZES = (1, 256)
REPEATS = 15
HERE = Path(__file__).parent


def microseconds(call: Callable[[], Any], launches: int = 20) -> float:
    """Return the median time of one call in a CUDA graph."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(5):
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            call()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def convolution(side: int, channels: int, batch: int, kind: str) -> float:
    import torch

    dtype, last = getattr(torch, kind), torch.channels_last
    layer = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    layer = layer.to("cuda", dtype).to(memory_format=last)
    data = torch.randn(batch, channels, side, side, device="cuda", dtype=dtype)
    data = data.to(memory_format=last)
    with torch.no_grad():
        return microseconds(lambda: layer(data))


def product(side: int, channels: int, batch: int, kind: str) -> float:
    import torch

    rows, depth = -(-batch * side * side // 32) * 32, 9 * channels
    if kind == "int8":
        a = torch.randint(-1, 2, (rows, depth), dtype=torch.int8, device="cuda")
        b = torch.randint(-1, 2, (channels, depth), dtype=torch.int8, device="cuda")
        return microseconds(lambda: torch._int_mm(a, b.t()))
    a, b = (torch.randn(n, depth, device="cuda").to(torch.float8_e4m3fn) for n in (rows, channels))
    one = torch.ones((), device="cuda")
    return microseconds(
        lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    )


def network(steps: list[dict[str, Any]]) -> Any:
    """Return a module of the operations that `layers_of.py` wrote down, with random weights."""
    import torch
    from torch.nn import functional as F

    def conv(x: Any, step: dict[str, Any], w: Any) -> Any:
        return F.conv2d(x, w, None, step["strides"], step["pads"], 1, step["groups"])

    def pad(x: Any, step: dict[str, Any], _: Any) -> Any:
        top, left, bottom, right = step["pads"]
        return F.pad(x, (left, right, top, bottom), value=step["value"])

    def affine(x: Any, step: dict[str, Any], w: Any) -> Any:  # as an evaluated BatchNorm is run
        return F.batch_norm(x, w[0], w[1], w[2], w[3], False, 0.0, 1e-5)

    calls: dict[str, Callable[..., Any]] = {
        "conv": conv,
        "pad": pad,
        "affine": affine,
        "sign": lambda x, *_: torch.where(x >= 0, 1.0, -1.0).to(x.dtype),
        "shift": lambda x, _, w: x + w,
        "relu": lambda x, *_: F.relu(x),
        "prelu": lambda x, _, w: F.prelu(x, w),
        "clip": lambda x, step, _: torch.clamp(x, step["low"], step["high"]),
        "max": lambda x, step, _: F.max_pool2d(x, step["kernel"], step["strides"], step["pads"]),
        "average": lambda x, step, _: F.avg_pool2d(x, step["kernel"], step["strides"]),
        "global_average": lambda x, *_: F.adaptive_avg_pool2d(x, 1),
        "flatten": lambda x, *_: x.flatten(1),
        "dense": lambda x, _, w: F.linear(x, w),
    }
    shapes: dict[str, Callable[..., Any]] = {
        "conv": lambda step: step["weight"],
        "dense": lambda step: step["weight"],
        "affine": lambda step: (4, step["channels"]),
        "shift": lambda step: (1, step["channels"], 1, 1),
        "prelu": lambda step: (step["channels"],),
    }

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, step in enumerate(steps, 1):
                if step["op"] in shapes:
                    weight = torch.rand(*shapes[step["op"]](step))
                    self.register_buffer(f"w{number}", weight)

        def forward(self, x: Any) -> Any:
            values = [x]
            for number, step in enumerate(steps, 1):
                args = [values[i] for i in step["args"]]
                if step["op"] == "add":
                    values.append(args[0] + args[1])
                    continue
                weight = getattr(self, f"w{number}", None)
                values.append(calls[step["op"]](args[0], step, weight))
            return values[-1]

    return Network()


def resnet18() -> list[dict[str, Any]]:
    """Return ResNet-18 (He et al., CVPR 2016) at 224x224 as steps, BatchNorm as in evaluation."""
    steps: list[dict[str, Any]] = []

    def step(op: str, *args: int, **sizes: Any) -> int:
        steps.append({"op": op, "args": args, **sizes})
        return len(steps)

    def conv(x: int, channels: int, out: int, kernel: int, stride: int) -> int:
        sizes = {"strides": [stride] * 2, "pads": [kernel // 2] * 2, "groups": 1}
        made = step("conv", x, weight=(out, channels, kernel, kernel), **sizes)
        return step("affine", made, channels=out)

    x = step("relu", conv(0, 3, 64, 7, 2))
    x, channels = step("max", x, kernel=[3, 3], strides=[2, 2], pads=[1, 1]), 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and width > 64 else 1
            short = x if stride == 1 else conv(x, channels, width, 1, stride)
            y = step("relu", conv(x, channels, width, 3, stride))
            x, channels = step("relu", step("add", conv(y, width, width, 3, 1), short)), width
    step("dense", step("flatten", step("global_average", x)), weight=(1000, channels))
    return steps


def time_network(
    steps: list[dict[str, Any]], shape: tuple[int, ...], batch: int, how: str
) -> float:
    import torch

    last = torch.channels_last
    model = network(steps).cuda().half().eval()
    for name, weight in model.named_buffers():
        if weight.dim() == 4:
            setattr(model, name, weight.to(memory_format=last))
    data = torch.randn(batch, *shape, device="cuda", dtype=torch.float16).to(memory_format=last)
    torch._dynamo.reset()  # else the second batch is compiled for any
    called = torch.compile(model) if how == "compiled" else model
    with torch.no_grad():
        return microseconds(lambda: called(data), launches=3)


def main() -> int:
    import torch

    torch.backends.cudnn.benchmark = True
    jobs: list[tuple[str, Callable[[], float]]] = []
    for side, channels in STAGES:
        for batch in BATCHES:
            shape = f"conv_{side}_{channels}_{batch}"
            for kind in ("float16", "bfloat16"):
                call = lambda s=side, c=channels, b=batch, k=kind: convolution(s, c, b, k)  # noqa: E731
                jobs.append((f"{shape} cudnn {kind}", call))
            for kind in ("int8", "fp8"):
                call = lambda s=side, c=channels, b=batch, k=kind: product(s, c, b, k)  # noqa: E731
                jobs.append((f"{shape} cublaslt {kind}", call))
    networks = json.loads((HERE / "index.json").read_text())["peers"]
    networks["resnet18"] = {"shape": (3, 224, 224), "steps": resnet18()}
    # What is compiled comes last, as it takes minutes.
    for how in ("eager", "compiled"):
        for name, known in sorted(networks.items(), key=lambda item: "18" not in item[0]):
            for batch in SIZES:
                call = lambda k=known, b=batch, h=how: time_network(k["steps"], k["shape"], b, h)  # noqa: E731
                jobs.append((f"{name}_{batch} torch {how} float16", call))
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    for name, job in jobs:
        result: dict[str, Any] = {"peer": name}
        try:
            result["us"] = round(job(), 3)
        except Exception as error:  # a library may lack a format
            result["error"] = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
