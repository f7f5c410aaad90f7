"""Compile the digits network for this machine and run it beside ONNX Runtime.

``make demo`` runs this. It shows, for images the network was not trained on, that both predict the
same digit image by image, how often they are right, and the time per image of each. It exits with 1
if a prediction differs or fewer than 95 % are right.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# One thread each; TVM reads its setting once, when it starts.
os.environ["TVM_NUM_THREADS"] = "1"

import numpy as np
import onnxruntime as ort

import bnncc

HERE = Path(__file__).resolve().parent
MODEL = HERE / "digits.onnx"
IMAGES = HERE / "test_images.npz"
MIN_ACCURACY = 0.95
ROUNDS, REPEATS = 20, 100


def best_seconds(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least seconds of one call of each function, in interleaved runs."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            for _ in range(REPEATS):
                start = time.perf_counter()
                function()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> int:
    """Compile, compare, time; return the exit code."""
    with np.load(IMAGES) as data:
        images, labels = data["images"], data["labels"]

    start = time.perf_counter()
    artifact = bnncc.compile(MODEL, target="native")
    print(f"compiled {MODEL.name} for this machine in {time.perf_counter() - start:.1f} s")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])

    # The network has one input and one output; the file names them.
    source, result = artifact.inputs[0].name, artifact.outputs[0].name
    ours = artifact.run({source: images})[result].argmax(axis=1)
    theirs = session.run([result], {source: images})[0].argmax(axis=1)

    print("\nthe first images, as labelled, by bnncc and by ONNX Runtime:")
    for name, row in (("label", labels), ("bnncc", ours), ("onnxruntime", theirs)):
        print(f"  {name:<12}", *row[:20])

    one = {source: images[:1]}
    seconds = best_seconds(
        {
            "bnncc": lambda: artifact.run(one),
            "onnxruntime": lambda: session.run([result], one),
        }
    )
    equal = int((ours == theirs).sum())
    print(f"\n{equal} of {len(labels)} predictions equal, image by image")
    print(f"  {'':<12} {'accuracy':>8} {'us/image':>9}   (best, batch 1, one thread)")
    accuracies = {}
    for name, predicted in (("bnncc", ours), ("onnxruntime", theirs)):
        accuracies[name] = float((predicted == labels).mean())
        print(f"  {name:<12} {accuracies[name]:8.2%} {seconds[name] * 1e6:9.1f}")

    print(
        "\nthe same by command line:\n"
        "  bnncc compile examples/digits/digits.onnx -o digits.bnncc\n"
        "  bnncc run digits.bnncc --input examples/digits/test_images.npz --output logits.npz"
    )
    if equal != len(labels):
        print(f"error: {len(labels) - equal} predictions differ", file=sys.stderr)
        return 1
    if min(accuracies.values()) < MIN_ACCURACY:
        print(f"error: accuracy is below {MIN_ACCURACY:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
