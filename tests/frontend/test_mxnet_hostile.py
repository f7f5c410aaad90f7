"""Damaged and hostile files of MXNet end in one clear line."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bnncc.errors import BnnccError, ModelError, UnsupportedOp, UsageError
from bnncc.frontend.formats import as_onnx
from bnncc.frontend.onnx import load
from tests.mxnet_files import params_bytes, small


def _word(data: bytes, at: int, value: int, code: str = "<Q") -> bytes:
    part = struct.pack(code, value)
    return data[:at] + part + data[at + len(part) :]


def _words(data: bytes, at: int, values: tuple[int, ...]) -> bytes:
    return data[:at] + struct.pack(f"<{len(values)}I", *values) + data[at + 4 * len(values) :]


_PARAMS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("empty", lambda d: b"", "the file is empty"),
    ("text", lambda d: b"hello, world, this is text", "not an MXNet parameter file"),
    ("header", lambda d: d[:20], "the number of arrays needs 8 bytes, 4 are left"),
    ("half", lambda d: d[: len(d) // 2], "the file is truncated"),
    ("last", lambda d: d[:-1], "the file is truncated"),
    ("more", lambda d: d + b"x", "1 bytes follow the last name"),
    ("count", lambda d: _word(d, 16, 2**63), "arrays are announced, which this file cannot hold"),
    ("axes", lambda d: _word(d, 24, 1000, "<I"), "has 1000 axes"),
    ("sparse", lambda d: _word(_word(d, 24, 0xF993FAC9, "<I"), 28, 1, "<I"), "stored sparsely"),
    ("size", lambda d: _word(d, 28, 2**32 - 1, "<I"), "more than the limit"),
    ("none", lambda d: _words(d, 28, (2**28, 2**28, 2**28, 0)), "more than the limit"),
    ("type", lambda d: _word(d, 52, 99, "<I"), "array 0 has type 99"),
]


@pytest.mark.parametrize(("name", "damage", "said"), _PARAMS, ids=[p[0] for p in _PARAMS])
def test_damaged_parameters(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], said: str
) -> None:
    symbol, params = small(32).write(tmp_path)
    params.write_bytes(damage(params.read_bytes()))
    with pytest.raises(ModelError, match=said) as caught:
        as_onnx(symbol, input_shapes={"data": (1, 2, 10, 10)})
    assert "\n" not in str(caught.value)
    assert "net-0000.params" in str(caught.value)


def _node(number: int, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(content: dict[str, Any]) -> Any:
        content["nodes"][number].update(changes)
        return content

    return change


_Q = 12
"""Number of the QConvolution in `small`."""

_SYMBOLS: list[tuple[Callable[[dict[str, Any]], Any], type[BnnccError], str]] = [
    (lambda c: [], ModelError, "not JSON|no list of nodes|not an ONNX model"),
    (lambda c: {}, ModelError, "no list of nodes"),
    (lambda c: {**c, "heads": []}, ModelError, "no outputs"),
    (lambda c: {**c, "heads": [[10**9, 0, 0]]}, ModelError, "output 0 of node 1000000000"),
    (lambda c: {**c, "heads": [[True]]}, ModelError, "reads .True."),
    (lambda c: {**c, "nodes": [1]}, ModelError, "node 0 is not an object"),
    (_node(3, inputs=[[3, 0, 0]]), ModelError, "which is not before it"),
    (_node(3, inputs=[[0, 7, 0]]), ModelError, "node 3|reads output 7 of `data`"),
    (_node(_Q, inputs=[[9, 0, 0]]), ModelError, "QConvolution `qconv`: reads 1 tensors"),
    (_node(3, inputs=5), ModelError, "a list of the nodes it reads"),
    (_node(3, op=7), ModelError, "are to be words"),
    (_node(3, op="Convolutoin"), UnsupportedOp, "Convolutoin `conv0`: this operator is not"),
    (_node(3, attr={"kernel": "(3, 3)"}), ModelError, "attribute `num_filter` is missing"),
    (_node(3, attr={"kernel": "(3, x)", "num_filter": "32"}), ModelError, "expected integers"),
    (_node(3, attr={"kernel": [3, 3]}), ModelError, "attribute `kernel` is not text"),
    (
        _node(4, attr={"act_type": "gelu"}),
        UnsupportedOp,
        "`act_type` is `gelu`, expected one of relu",
    ),
    (_node(4, attr={"act_type": "relu", "new": "1"}), UnsupportedOp, "attribute `new`"),
    (_node(0, name="conv0_weight"), ModelError, "two variables are called `conv0_weight`"),
    (_node(1, name="other"), ModelError, "parameter `other` is not in net-0000.params"),
]


@pytest.mark.parametrize(("change", "kind", "said"), _SYMBOLS)
def test_damaged_networks(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], kind: type[BnnccError], said: str
) -> None:
    symbol, _ = small(32).write(tmp_path)
    symbol.write_text(json.dumps(change(json.loads(symbol.read_text()))))
    with pytest.raises(kind, match=said) as caught:
        load(as_onnx(symbol, input_shapes={"data": (1, 2, 10, 10)}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("attrs", "said"),
    [
        ({"num_filter": 7}, "do not divide among 7 filters"),
        ({"kernel": "(5, 5)"}, "do not divide among the 25 taps"),
        ({"kernel": "(0, 3)"}, "packed weights per filter"),
        ({"num_filter": 10**9}, "do not divide"),
        ({"num_group": 2}, "packed weights in 2 groups"),
        ({"scaling_mode": "forward"}, "have lost their mean"),
        ({"act_bit": 2}, "packed weights with 2 and 1 bits"),
        ({"act_bit": 99}, "`act_bit` is 99"),
        ({"binarized_weights_only": "False"}, "packed ones have the attribute"),
        ({"binarized_weights_only": "Maybe"}, "expected True or False"),
    ],
)
def test_packed_layers_that_do_not_fit(tmp_path: Path, attrs: dict[str, Any], said: str) -> None:
    net = small(32)
    node = next(n for n in net.nodes if n["name"] == "qconv")
    node["attr"].update({k: str(v) for k, v in attrs.items()})
    symbol, _ = net.write(tmp_path)
    with pytest.raises(ModelError, match=f"QConvolution `qconv`.*{said}|{said}"):
        load(as_onnx(symbol, input_shapes={"data": (1, 2, 10, 10)}))


@pytest.mark.parametrize(
    "text", ["{" * 100_000, '{"nodes": ' + "[" * 100_000, "{]", '{"nodes": 1' + "0" * 5000 + "}"]
)
def test_json_that_would_exhaust_the_parser(tmp_path: Path, text: str) -> None:
    symbol, _ = small(32).write(tmp_path)
    symbol.write_text(text)
    with pytest.raises(ModelError, match=r"not JSON|nested too deeply"):
        as_onnx(symbol)


def test_parameters_alone_and_with_other_formats_are_refused(tmp_path: Path) -> None:
    _, params = small(32).write(tmp_path)
    with pytest.raises(
        ModelError, match=r"file of MXNet parameters \(give the network.s -symbol.json\)"
    ):
        load(as_onnx(params))
    with pytest.raises(UsageError, match="--params takes a"):
        as_onnx(params, params=params)


def test_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    symbol, params = small(32).write(tmp_path)
    params.write_bytes(params_bytes({"a": np.zeros(1), "aux:a": np.zeros(1)}))
    with pytest.raises(ModelError, match="two arrays are called `a`"):
        as_onnx(symbol)
