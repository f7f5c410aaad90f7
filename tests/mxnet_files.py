"""Write MXNet's files as its releases do; as a program, write those of ``tests/data/bmxnet``."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

DATA = Path(__file__).parent / "data" / "bmxnet"
FORMS = {"0.9": None, "0.11": 0xF993FAC8, "1.0": 0xF993FAC9, "2.0": 0xF993FACA}
"""Magic number of an array by the release that began to write it."""
_CODES = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6}


def params_bytes(arrays: dict[str, Array], form: str = "0.9") -> bytes:
    """Return a parameter file; names without ``aux:`` get ``arg:``."""
    magic, out = FORMS[form], [struct.pack("<QQQ", 0x112, 0, len(arrays))]
    for value in arrays.values():
        if magic is None:
            out.append(struct.pack(f"<I{value.ndim}I", value.ndim, *value.shape))
        else:
            storage = b"" if form == "0.11" else struct.pack("<i", 0)
            out.append(struct.pack("<I", magic) + storage)
            out.append(struct.pack(f"<I{value.ndim}q", value.ndim, *value.shape))
        out += [struct.pack("<iii", 1, 0, _CODES[value.dtype.name]), value.tobytes()]
    out.append(struct.pack("<Q", len(arrays)))
    for name in arrays:
        text = (name if name.startswith("aux:") else f"arg:{name}").encode()
        out.append(struct.pack("<Q", len(text)) + text)
    return b"".join(out)


class Net:
    """A network being written: `layer` appends a node, and variables for its parameters."""

    def __init__(self, *, key: str = "attr") -> None:
        self.nodes: list[dict[str, Any]] = []
        self.params: dict[str, Array] = {}
        self.key = key
        self.tip = self.variable("data")

    def variable(self, name: str, **attrs: Any) -> int:
        return self._append("null", name, [], attrs)

    def layer(
        self, op: str, name: str, params: dict[str, Array] | None = None,
        inputs: list[int] | None = None, **attrs: Any,
    ) -> int:  # fmt: skip
        read = list(inputs or [self.tip])
        for suffix, value in (params or {}).items():
            kind, _, plain = suffix.rpartition(":")
            read.append(self.variable(f"{name}_{plain}"))
            self.params[f"{kind}:{name}_{plain}" if kind else f"{name}_{plain}"] = value
        self.tip = self._append(op, name, read, attrs)
        return self.tip

    def batch_norm(self, name: str, channels: int, seed: int, **attrs: Any) -> int:
        rng = np.random.default_rng(seed)
        values = {
            "gamma": rng.normal(0, 1, channels),
            "beta": rng.normal(0, 1, channels),
            "aux:moving_mean": rng.normal(0, 2, channels),
            "aux:moving_var": rng.uniform(0.1, 2, channels),
        }
        params = {k: v.astype(np.float32) for k, v in values.items()}
        return self.layer("BatchNorm", name, params, **attrs)

    def _append(self, op: str, name: str, read: list[int], attrs: dict[str, Any]) -> int:
        node: dict[str, Any] = {"op": op, "name": name, "inputs": [[n, 0, 0] for n in read]}
        if attrs:
            node[self.key] = {k: str(v) for k, v in attrs.items()}
        self.nodes.append(node)
        return len(self.nodes) - 1

    def symbol(self, heads: list[int] | None = None) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "arg_nodes": [k for k, n in enumerate(self.nodes) if n["op"] == "null"],
            "heads": [[n, 0, 0] for n in heads or [self.tip]],
            "attrs": {"mxnet_version": ["int", 903]},
        }

    def write(self, folder: Path, name: str = "net", form: str = "0.9") -> tuple[Path, Path]:
        """Write both files; return their paths."""
        paths = folder / f"{name}-symbol.json", folder / f"{name}-0000.params"
        paths[0].write_text(json.dumps(self.symbol(), indent=1) + "\n")
        paths[1].write_bytes(params_bytes(self.params, form))
        return paths


def packed(weight: Array, bits: int, *, by_word: bool = False) -> Array:
    """Return weights as BMXNet's converter packs them into words of `bits` bits."""
    rows = (weight.reshape(len(weight), -1, bits) >= 0).astype(object)
    words = (rows * [1 << k for k in range(bits)]).sum(axis=2).astype(f"<u{bits // 8}")
    return (words.T if by_word else words).reshape(-1).copy().view(f"<f{bits // 8}")


def small(bits: int, seed: int = 0) -> Net:
    """Return a network like BMXNet's LeNet, packed into words of `bits` bits."""
    rng = np.random.default_rng(seed)
    net = Net()

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    first = {"weight": normal(bits, 2, 3, 3) * np.float32(0.3), "bias": normal(bits)}
    net.layer("Convolution", "conv0", first, kernel=(3, 3), num_filter=bits)
    net.layer("Activation", "act0", act_type="tanh")
    net.batch_norm("bn0", bits, seed + 1)
    net.layer("QActivation", "qact0", act_bit=1, backward_only=True)
    q = {"weight": packed(normal(8, bits, 3, 3), bits)}
    net.layer("QConvolution", "qconv", q, act_bit=1, kernel=(3, 3), num_filter=8, pad=(1, 1),
              binarized_weights_only=True)  # fmt: skip
    net.batch_norm("bn1", 8, seed + 2, fix_gamma=False, eps=2e-5)
    net.layer("Pooling", "pool", kernel=(2, 2), pool_type="max", stride=(2, 2))
    net.layer("Flatten", "flat")
    net.layer("QActivation", "qact1", act_bit=1, backward_only=True)
    q = {"weight": packed(normal(12, 128), bits, by_word=True)}
    net.layer("QFullyConnected", "qfc", q, act_bit=1, num_hidden=12, binarized_weights_only=True)
    net.batch_norm("bn2", 12, seed + 3)
    net.layer("Activation", "act1", act_type="tanh")
    net.layer("FullyConnected", "fc", {"weight": normal(4, 12), "bias": normal(4)}, num_hidden=4)
    net.layer("SoftmaxOutput", "softmax", inputs=[net.tip, net.variable("softmax_label")])
    return net


if __name__ == "__main__":
    for word in (32, 64):
        small(word).write(DATA, f"packed{word}")
