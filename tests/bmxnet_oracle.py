"""BMXNet's networks in plain NumPy: a second reading of its files that shares no code with bnncc's.

Written from the description of the formats and of what the layers compute; float64 but for the
quantizers, which BMXNet computes in float32. `run` also returns how close to zero a sign came whose
input was rounded: a network in float32 may take the other side there.
"""

from __future__ import annotations

import ast
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_TYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "u1", 4: "<i4", 5: "i1", 6: "<i8"}


def read_params(path: Path) -> dict[str, Array]:
    """Return the arrays of a parameter file by name."""
    data, at, values = path.read_bytes(), 24, []
    assert struct.unpack_from("<QQ", data) == (0x112, 0)
    for _ in range(struct.unpack_from("<Q", data, 16)[0]):
        first = struct.unpack_from("<I", data, at)[0]
        at += 4
        if first >= 0xF993FAC8:
            at += 4 * (first > 0xF993FAC8)
            axes = struct.unpack_from("<I", data, at)[0]
            shape = struct.unpack_from(f"<{axes}q", data, at + 4)
            at += 4 + 8 * axes
        else:
            shape = struct.unpack_from(f"<{first}I", data, at)
            at += 4 * first
        kind = np.dtype(_TYPES[struct.unpack_from("<i", data, at + 8)[0]])
        at += 12
        count = int(np.prod(shape))
        values.append(np.frombuffer(data, kind, count, at).reshape(shape))
        at += count * kind.itemsize
    at += 8
    names = []
    for _ in values:
        size = struct.unpack_from("<Q", data, at)[0]
        names.append(data[at + 8 : at + 8 + size].decode())
        at += 8 + size
    return {n.split(":", 1)[-1]: v for n, v in zip(names, values, strict=True)}


def run(symbol: Path, params: Path, **inputs: Array) -> tuple[Array, float]:
    """Return the first output, and the least distance of a rounded value from a sign's zero."""
    values, near = read_params(params), [np.inf]
    graph = json.loads(symbol.read_text())
    made: list[Any] = []
    for node in graph["nodes"]:
        attrs = {**node.get("param", {}), **node.get("attr", {}), **node.get("attrs", {})}
        a = {k: _value(v) for k, v in attrs.items() if not k.startswith("__")}
        if node["op"] == "null":
            made.append(inputs.get(node["name"], values.get(node["name"])))
            continue
        x = [made[i[0]] for i in node["inputs"]]
        made.append(_LAYERS[node["op"]](a, x, near))
    return np.asarray(made[graph["heads"][0][0]]), min(near)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _windows(x: Array, kernel: Any, stride: Any, pad: Any, fill: float, dilate: Any) -> Array:
    """Return (N, C, kh, kw, H', W')."""
    (kh, kw), (sy, sx), (py, px), (dy, dx) = kernel, stride, pad, dilate
    x = np.pad(x, ((0, 0), (0, 0), (py, py), (px, px)), constant_values=fill)
    height, width = (x.shape[2] - (kh - 1) * dy - 1) // sy + 1, 0
    width = (x.shape[3] - (kw - 1) * dx - 1) // sx + 1
    out = np.empty((*x.shape[:2], kh, kw, height, width), x.dtype)
    for i in range(kh):
        for j in range(kw):
            rows = x[:, :, i * dy : i * dy + (height - 1) * sy + 1 : sy]
            out[:, :, i, j] = rows[:, :, :, j * dx : j * dx + (width - 1) * sx + 1 : sx]
    return out


def _sums(x: Array, w: Array, a: dict[str, Any], fill: float) -> Array:
    groups = a.get("num_group", 1)
    size = a.get("stride", (1, 1)), a.get("pad", (0, 0)), a.get("dilate", (1, 1))
    windows = _windows(x, w.shape[2:], size[0], size[1], fill, size[2])
    n, _, _, _, height, width = windows.shape
    data = windows.reshape(n, groups, -1, height * width)
    weight = w.reshape(groups, w.shape[0] // groups, -1)
    sums = np.einsum("gok,ngkp->ngop", weight, data, optimize=True)
    return sums.reshape(n, w.shape[0], height, width)


def _convolution(a: dict[str, Any], x: list[Any], _: Any) -> Array:
    y = _sums(x[0].astype(np.float64), x[1].astype(np.float64), a, 0.0)
    return y if a.get("no_bias") else y + x[2].reshape(-1, 1, 1)


def _fully_connected(a: dict[str, Any], x: list[Any], _: Any) -> Array:
    y = x[0].reshape(len(x[0]), -1).astype(np.float64) @ x[1].astype(np.float64).T
    return y if a.get("no_bias") else y + x[2]


def _quantized(x: Array, bits: int, near: list[float]) -> Array:
    if bits == 32:
        return x
    if bits == 1:
        rounded = x[np.abs(x) != np.rint(np.abs(x))]
        if rounded.size:
            near.append(float(np.abs(rounded).min() / np.abs(x).max()))
        return np.where(x < 0, -1.0, 1.0)
    steps = np.float32(2**bits - 1)
    scaled = np.clip(x.astype(np.float32), np.float32(0), np.float32(1)) * steps
    near.append(float(np.abs(scaled - np.floor(scaled) - 0.5).min() / steps))
    up = scaled - np.floor(scaled) >= 0.5
    return ((np.floor(scaled) + up) / steps).astype(np.float64)


def _weights(w: Array, bits: int) -> Array:
    if bits == 1:
        return np.where(w < 0, -1.0, 1.0)
    if bits == 32:
        return w.astype(np.float64)
    steps, squashed = np.float32(2**bits - 1), np.tanh(w.astype(np.float32))
    t = (squashed / (np.float32(2) * np.abs(squashed).max()) + np.float32(0.5)) * steps
    t = np.floor(t) + (t - np.floor(t) >= 0.5)
    return (np.float32(2) * (t / steps) - np.float32(1)).astype(np.float64)


def _unpacked(w: Array, filters: int, word_major: bool) -> Array:
    words = w.reshape(-1).view("<u8" if w.dtype.itemsize == 8 else "<u4").tolist()
    bits = 8 * w.dtype.itemsize
    per = len(words) // filters
    rows = []
    for f in range(filters):
        mine = words[f::filters] if word_major else words[f * per : (f + 1) * per]
        rows.append([1.0 if word >> k & 1 else -1.0 for word in mine for k in range(bits)])
    return np.array(rows)


def _q_convolution(a: dict[str, Any], x: list[Any], near: list[float]) -> Array:
    act, weight = a.get("act_bit", 1), a.get("weight_bit", 1)
    if a.get("binarized_weights_only"):
        w = _unpacked(x[1], a["num_filter"], False).reshape(a["num_filter"], -1, *a["kernel"])
    else:
        w = _weights(x[1], weight)
    y = _sums(_quantized(x[0], act, near), w, a, 1.0 if act == 1 else 0.0)
    if act == weight == 1:
        y = (y + w[0].size) / 2
    y = y if a.get("no_bias", True) else y + x[2].reshape(-1, 1, 1)
    if act == weight == 1 and a.get("scaling_mode") == "forward":
        y = y * np.abs(x[1].astype(np.float64)).mean()
    return y


def _q_fully_connected(a: dict[str, Any], x: list[Any], near: list[float]) -> Array:
    act, weight = a.get("act_bit", 1), a.get("weight_bit", 1)
    data = _quantized(x[0].reshape(len(x[0]), -1), act, near)
    packed = a.get("binarized_weights_only")
    w = _unpacked(x[1], a["num_hidden"], True) if packed else _weights(x[1], weight)
    y = data @ w.T
    if act == weight == 1:
        y = (y + data.shape[1]) / 2
    return y if a.get("no_bias", True) else y + x[2]


def _q_activation(a: dict[str, Any], x: list[Any], near: list[float]) -> Array:
    return x[0] if a.get("backward_only") else _quantized(x[0], a.get("act_bit", 1), near)


def _batch_norm(a: dict[str, Any], x: list[Any], _: Any) -> Array:
    data, gamma, beta, mean, variance = x
    column = (-1, *(1,) * (data.ndim - 2))
    gamma = np.ones_like(beta) if a.get("fix_gamma", True) else gamma
    scale = gamma / np.sqrt(variance.astype(np.float64) + a.get("eps", 1e-3))
    return (data - mean.reshape(column)) * scale.reshape(column) + beta.reshape(column)


def _pooling(a: dict[str, Any], x: list[Any], _: Any) -> Array:
    data = x[0]
    reduce = {"max": np.max, "avg": np.mean, "sum": np.sum}[a.get("pool_type", "max")]
    if a.get("global_pool"):
        return reduce(data, axis=(2, 3), keepdims=True)
    kernel, stride, pad = a["kernel"], a.get("stride", (1, 1)), a.get("pad", (0, 0))
    fill = -np.inf if reduce is np.max else 0.0
    if a.get("pooling_convention") == "full":
        more = [
            -(s + 2 * p - k) % t
            for s, p, k, t in zip(data.shape[2:], pad, kernel, stride, strict=True)
        ]
        assert reduce is np.max
        data = np.pad(data, ((0, 0), (0, 0), (0, more[0]), (0, more[1])), constant_values=fill)
    return reduce(_windows(data, kernel, stride, pad, fill, (1, 1)), axis=(2, 3))


def _softmax(a: dict[str, Any], x: list[Any], _: Any) -> Array:
    e = np.exp(x[0] - x[0].max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


_FUNCTIONS = {
    "relu": lambda v: np.maximum(v, 0), "tanh": np.tanh, "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    "softrelu": lambda v: np.log1p(np.exp(v)),
}  # fmt: skip
_LAYERS: dict[str, Any] = {
    "Activation": lambda a, x, _: _FUNCTIONS[a["act_type"]](x[0]),
    "BatchNorm": _batch_norm,
    "Convolution": _convolution,
    "Flatten": lambda a, x, _: x[0].reshape(len(x[0]), -1),
    "FullyConnected": _fully_connected,
    "Pooling": _pooling,
    "QActivation": _q_activation,
    "QConvolution": _q_convolution,
    "QFullyConnected": _q_fully_connected,
    "SoftmaxOutput": _softmax,
    "elemwise_add": lambda a, x, _: x[0] + x[1],
}
