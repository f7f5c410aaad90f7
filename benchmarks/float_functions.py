"""Float functions and normalizations of 8,192 values beside other runtimes: times and errors.

    taskset -c 1 python benchmarks/float_functions.py [--json FILE] [--only NAME ...]

Each function is a network of its own, called as a caller calls it, one thread, all taking turns.
Errors are the largest distance from float64, in units of the last place of float32: for functions
of one value over samples of every exponent and sign, for the others over rows of random values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import contest  # first: it sets the number of threads
import machine
import numpy as np
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper, save
from peers import Ours, interleave, open_peers
from tables import markdown, where

import bnncc

Array = np.ndarray[Any, Any]

ROWS, DEPTH = 16, 512
PEERS = ("onnxruntime-f32", "openvino-f32", "torch-function")
EPSILON = 1e-6
BATCHES = 256
"""Inputs of `ROWS` times `DEPTH` values on which errors are measured."""

MOST = 1e9
"""Larger errors, also of infinities and NaN, are written as this."""


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _sigmoid(x: Array) -> Array:
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1) / (1 + np.exp(-np.abs(x)))


def _gelu(x: Array) -> Array:
    return x / 2 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))


def _softmax(x: Array) -> Array:
    power = np.exp(x - x.max(-1, keepdims=True))
    return power / power.sum(-1, keepdims=True)


def _rms(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)


def _layer(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON)


@dataclass(frozen=True)
class Function:
    """A function as ONNX and exactly.

    Attributes
    ----------
    nodes : list of tuple
        Operator, inputs and attributes of each node; the last one makes the output.
    exact : callable
        Of float64.
    rows : bool
        Whether a result depends on a whole row.
    """

    nodes: list[tuple[str, list[str], dict[str, Any]]]
    exact: Callable[[Array], Array]
    rows: bool = False


def _one(op: str, exact: Callable[[Array], Array], **attrs: Any) -> Function:
    return Function([(op, ["x"], attrs)], exact)


FUNCTIONS = {
    "sigmoid": _one("Sigmoid", _sigmoid),
    "tanh": _one("Tanh", np.tanh),
    "exp": _one("Exp", np.exp),
    "log": _one("Log", np.log),
    "erf": _one("Erf", _erf),
    "gelu": _one("Gelu", _gelu),
    "silu": Function([("Sigmoid", ["x"], {}), ("Mul", ["x", "v0"], {})], lambda x: x * _sigmoid(x)),
    "softplus": _one("Softplus", lambda x: np.logaddexp(x, 0)),
    "softmax": Function([("Softmax", ["x"], {"axis": -1})], _softmax, True),
    "rms_norm": Function(
        [("RMSNormalization", ["x", "scale"], {"axis": -1, "epsilon": EPSILON})], _rms, True
    ),
    "layer_norm": Function(
        [("LayerNormalization", ["x", "scale", "bias"], {"axis": -1, "epsilon": EPSILON})],
        _layer, True,
    ),
}  # fmt: skip


def model(name: str) -> ModelProto:
    """Return the network of a function."""
    nodes = FUNCTIONS[name].nodes
    steps = [
        helper.make_node(op, inputs, [f"v{k}" if k + 1 < len(nodes) else "y"], **attrs)
        for k, (op, inputs, attrs) in enumerate(nodes)
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [ROWS, DEPTH]) for n in "xy")
    held = {"scale": np.ones(DEPTH, np.float32), "bias": np.zeros(DEPTH, np.float32)}
    used = {i for _, inputs, _ in nodes for i in inputs}
    weights = [numpy_helper.from_array(v, k) for k, v in held.items() if k in used]
    graph = helper.make_graph(steps, name, [x], [y], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    checker.check_model(made)
    return made


def inputs(function: Function) -> list[Array]:
    """Return what errors are measured on."""
    rng = np.random.default_rng(0)
    size = ROWS * DEPTH
    if function.rows:
        return [np.float32(rng.normal(0, 3, (ROWS, DEPTH))) for _ in range(8)]
    every = (np.arange(512, dtype=np.uint32) << 23)[:, None]
    low = rng.integers(0, 1 << 23, (512, BATCHES * size // 512), dtype=np.uint32)
    values = (every | low).view(np.float32).reshape(BATCHES, ROWS, DEPTH)
    return list(np.where(np.isfinite(values), values, 1))


def ulps(found: Array, exact: Array) -> float:
    """Return the largest error in units of the last place."""
    nearest = exact.astype(np.float32)
    same = (found == nearest) | (np.isnan(found) & np.isnan(nearest))
    off = np.abs(found - exact) / np.spacing(np.abs(nearest)).astype(np.float64)
    return float(np.where(same, 0, np.where(off < MOST, off, MOST)).max())


def measured(name: str, options: Any, folder: Path) -> dict[str, Any]:
    """Return times and errors of all that can run a function."""
    function, path = FUNCTIONS[name], folder / f"{name}.onnx"
    proto = model(name)
    save(proto, path)
    artifact = bnncc.compile(proto)
    image = np.random.default_rng(1).normal(0, 3, (ROWS, DEPTH)).astype(np.float32)
    if name == "log":
        image = np.abs(image)
    with open_peers(PEERS, path, 1, options.peers) as peers:
        errors: dict[str, float] = {}
        with np.errstate(all="ignore"):
            for given in inputs(function):
                exact = function.exact(given.astype(np.float64))
                outs = {peer.kind: peer.out(given) for peer in peers}
                outs["bnncc"] = next(iter(artifact.run({"x": given}).values()))
                for kind, out in outs.items():
                    errors[kind] = max(errors.get(kind, 0.0), ulps(out, exact))
        for peer in peers:
            peer.out(image)
        turns = [Ours(artifact, image), *peers]
        interleave(turns, options.repeat, burst=0.005)
        return {
            "name": name,
            "us": {turn.kind: turn.best * 1e6 for turn in turns},
            "median_us": {turn.kind: turn.median * 1e6 for turn in turns},
            "ulp": errors,
            "versions": {peer.kind: f"{peer.name} {peer.version}" for peer in peers},
        }


def _shown(ulp: float) -> str:
    return f"{ulp:.1f}" if ulp < 100 else "100 or more"


def table(content: dict) -> str:
    """Return the figures as Markdown."""
    rows = []
    for row in content["functions"]:
        us, ulp = row["us"], row["ulp"]
        cells = [
            f"{us[kind]:.1f} ({_shown(ulp[kind])})" if kind in us else "not measured"
            for kind in ("bnncc", *PEERS)
        ]
        best = min(v for k, v in us.items() if k != "bnncc")
        rows.append([row["name"], *cells, f"{us['bnncc'] / best:.2f}"])
    names = [kind.partition("-")[0] for kind in PEERS]
    head = ["function", *(f"{n}, us (ulp)" for n in ("bnncc", *names)), "bnncc / fastest other"]
    return markdown(head, rows) + "\n\n" + where(content)


TABLES = {"float-functions": (table, ("float_functions",))}


def main() -> None:
    """Measure the functions asked for."""
    parser = contest.parser(__doc__)
    parser.add_argument("--only", nargs="*", default=list(FUNCTIONS), choices=list(FUNCTIONS))
    options = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        for name in options.only:
            rows.append(measured(name, options, Path(folder)))
            print(json.dumps({k: rows[-1][k] for k in ("name", "us", "ulp")}), flush=True)
    if options.json:
        machine.save(options.json, shape=[ROWS, DEPTH], functions=rows)


if __name__ == "__main__":
    main()
