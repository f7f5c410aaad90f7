"""Times what a GPU's libraries do with the same layers and network.

    python peers.py [--json FILE]

Convolution in fp16 and bf16 by cuDNN (channels last, its fastest algorithm); the product of
matrices that a convolution is, without the im2col before it, in int8 and fp8 by cuBLASLt; ResNet-18
in fp16, eager and by torch.compile. All in CUDA graphs. Needs PyTorch, for networks torchvision.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = ((56, 64), (28, 128), (14, 256), (7, 512))
BATCHES = (1, 8, 256)
REPEATS = 15


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


def network(batch: int, compiled: bool) -> float:
    import torch
    import torchvision

    model = torchvision.models.resnet18().cuda().half().eval()
    model = model.to(memory_format=torch.channels_last)
    data = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.float16)
    data = data.to(memory_format=torch.channels_last)
    called = torch.compile(model, mode="max-autotune-no-cudagraphs") if compiled else model
    with torch.no_grad():
        return microseconds(lambda: called(data), launches=3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=None, help="write results to this file")
    args = parser.parse_args()
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
    for batch in BATCHES:
        for compiled in (False, True):
            name = f"resnet18_{batch} torch {'compiled' if compiled else 'eager'} float16"
            jobs.append((name, lambda b=batch, c=compiled: network(b, c)))
    results = []
    for name, job in jobs:
        try:
            results.append({"peer": name, "us": round(job(), 3)})
        except Exception as error:  # a library may lack a format
            results.append({"peer": name, "error": f"{type(error).__name__}: {error}"[:200]})
        print(json.dumps(results[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
