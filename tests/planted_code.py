"""Plant wrong instructions into kernels of networks: ``python -m tests.planted_code NAME COUNT``.

An instruction of a kernel's machine code becomes another with the same operands: an addition a
subtraction, XOR becomes OR, the larger of two the smaller. Planted code may do anything, so each
trial runs in a process of its own. One that crashes, or whose kernel computes the same on inputs
it has in the network, does not count. One line of JSON for each that does: which kernel, which
kernels `verify` found wrong, and whether the self-check noticed.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

TARGET = "x86-64-v3"

# Instructions, each with the byte of its operation, and the byte of another with the same operands.
_OTHER = {
    "vpaddd": (0xFE, 0xFA), "vpsubd": (0xFA, 0xFE), "vpaddb": (0xFC, 0xF8), "vpsubb": (0xF8, 0xFC),
    "vpaddw": (0xFD, 0xF9), "vpaddusb": (0xDC, 0xFC), "vpxor": (0xEF, 0xEB), "vpor": (0xEB, 0xEF),
    "vpand": (0xDB, 0xEB), "vpandn": (0xDF, 0xDB), "vpshufb": (0x00, 0x01), "vpsadbw": (0xF6, 0xE0),
    "vpcmpgtd": (0x66, 0x64), "vpcmpeqd": (0x76, 0x66), "vpmaddwd": (0xF5, 0xE5),
    "vpmaddubsw": (0x04, 0x00), "vpminsd": (0x39, 0x3D), "vpmaxsd": (0x3D, 0x39),
    "vaddps": (0x58, 0x5C), "vsubps": (0x5C, 0x58), "vmulps": (0x59, 0x58), "vdivps": (0x5E, 0x59),
    "vmaxps": (0x5F, 0x5D), "vminps": (0x5D, 0x5F), "vandps": (0x54, 0x57), "vxorps": (0x57, 0x56),
    "vaddss": (0x58, 0x5C), "vsubss": (0x5C, 0x58), "vmulss": (0x59, 0x58), "vmaxss": (0x5F, 0x5D),
    "vfmadd231ps": (0xB8, 0xBC), "vfmadd213ps": (0xA8, 0xAC), "vfmadd132ps": (0x98, 0x9C),
    "vpackssdw": (0x6B, 0x63), "vpacksswb": (0x63, 0x6B), "vpblendw": (0x0E, 0x0F),
}  # fmt: skip
_OPERATION = {0xC5: 2, 0xC4: 3, 0x62: 4}
"""Where the byte of an operation is, by the first byte of an instruction."""

_LINE = re.compile(r"^\s*([0-9a-f]+):\t((?:[0-9a-f]{2} )+)\s*(\S+)\s*(\S*)", re.MULTILINE)


def places(library: bytes) -> dict[str, list[tuple[int, int]]]:
    """Return by kernel where an instruction of its code could be another, and its byte then.

    What TVM exports checks arguments and calls the function that computes, which has no name.
    """
    from elftools.elf.elffile import ELFFile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lib.so")
        path.write_bytes(library)
        command = ["objdump", "-d", "-w", "--section=.text", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    exported = [
        (s["st_value"], s["st_value"] + s["st_size"], s.name.removeprefix("__tvm_ffi_"))
        for s in ELFFile(io.BytesIO(library)).get_section_by_name(".dynsym").iter_symbols()
        if s.name.startswith("__tvm_ffi_") and s["st_info"]["type"] == "STT_FUNC"
    ]
    lines = [(int(a, 16), bytes.fromhex(b), op, rest) for a, b, op, rest in _LINE.findall(text)]
    callers: dict[int, set[str]] = {}
    for address, _, op, rest in lines:
        if op in ("call", "jmp") and re.fullmatch("[0-9a-f]+", rest):
            for start, end, name in exported:
                if start <= address < end and not start <= int(rest, 16) < end:
                    callers.setdefault(int(rest, 16), set()).add(name)
    starts = {start for start, *_ in exported} | callers.keys()
    owner, current = {}, 0
    for address, *_ in lines:
        current = address if address in starts else current
        owner[address] = current
    # What several of them call is TVM's own, such as what raises errors.
    called_by = {to: min(names) for to, names in callers.items() if len(names) == 1}
    found: dict[str, list[tuple[int, int]]] = {}
    for address, code, op, _ in lines:
        kernel = called_by.get(owner[address])
        at = _OPERATION.get(code[0])
        if kernel is None or at is None or op not in _OTHER or code[at] != _OTHER[op][0]:
            continue
        found.setdefault(kernel, []).append((address + at, _OTHER[op][1]))
    return found


def with_library(artifact: Any, library: bytes) -> Any:
    """Return `artifact` with another library under the right checksums."""
    from bnncc.runtime import container
    from bnncc.runtime.artifact import Artifact

    members = {**artifact._members, container.LIBRARY: library}
    return Artifact(container.sealed(artifact.manifest, members), members)


def _signs(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.where(rng.random(shape) < 0.5, -1, 1).astype(np.float32)


def _model(nodes: list[Any], shape: list[int], out: str, kind: int, **constants: Any) -> Any:
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(out, kind, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def _binary(*, last: str = "") -> Any:
    """Return a real layer, two binary ones with a pooling, a classifier, perhaps its best."""
    rng, node = np.random.default_rng(0), helper.make_node
    nodes = [
        node("Conv", ["x", "w0"], ["c0"], pads=[1] * 4),
        node("BatchNormalization", ["c0", "s", "b", "m", "v"], ["n0"]),
        node("GreaterOrEqual", ["n0", "zero"], ["g0"]),
        node("Where", ["g0", "one", "minus"], ["s0"]),
        node("Conv", ["s0", "w1"], ["c1"], pads=[1] * 4),
        node("MaxPool", ["c1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        node("BatchNormalization", ["p1", "s", "b", "m", "v"], ["n1"]),
        node("GreaterOrEqual", ["n1", "zero"], ["g1"]),
        node("Where", ["g1", "one", "minus"], ["s1"]),
        node("Flatten", ["s1"], ["f"]),
        node("Gemm", ["f", "w2", "bias"], ["y"]),
        *([node(last, ["y"], ["best"], axis=1, keepdims=0)] if last else []),
    ]
    kind = onnx.TensorProto.INT64 if last else onnx.TensorProto.FLOAT
    f4 = np.float32
    return _model(
        nodes, [1, 3, 16, 16], "best" if last else "y", kind,
        w0=rng.standard_normal((32, 3, 3, 3)).astype(f4), w1=_signs(rng, 32, 32, 3, 3),
        w2=_signs(rng, 32 * 64, 10), bias=rng.standard_normal(10).astype(f4),
        s=rng.uniform(0.5, 2, 32).astype(f4), b=rng.standard_normal(32).astype(f4),
        m=rng.standard_normal(32).astype(f4), v=rng.uniform(0.5, 2, 32).astype(f4),
        zero=f4(0), one=f4(1), minus=f4(-1),
    )  # fmt: skip


def _few_bit() -> Any:
    """Return two layers of 2-bit data and weights."""
    rng, node, f4 = np.random.default_rng(1), helper.make_node, np.float32

    def quantizer(x: str, k: int) -> list[Any]:
        return [
            node("Clip", [x, "zero", "one"], [f"q{k}a"]),
            node("Mul", [f"q{k}a", "three"], [f"q{k}b"]),
            node("Round", [f"q{k}b"], [f"q{k}c"]),
            node("Div", [f"q{k}c", "three"], [f"q{k}"]),
        ]

    nodes = [
        *quantizer("x", 0),
        node("Conv", ["q0", "w0"], ["c0"], pads=[1] * 4),
        *quantizer("c0", 1),
        node("Conv", ["q1", "w1"], ["c1"], pads=[1] * 4),
        node("GlobalAveragePool", ["c1"], ["p"]),
        node("Flatten", ["p"], ["y"]),
    ]
    weights = [rng.integers(-1, 2, (32, 32, 3, 3)).astype(f4) / 2 for _ in range(2)]
    return _model(
        nodes, [1, 32, 8, 8], "y", onnx.TensorProto.FLOAT, w0=weights[0], w1=weights[1],
        zero=f4(0), one=f4(1), three=f4(3),
    )  # fmt: skip


def _float() -> Any:
    """Return a network without a binary layer."""
    rng, node, f4 = np.random.default_rng(2), helper.make_node, np.float32
    nodes = [
        node("Conv", ["x", "w0"], ["c0"], pads=[1] * 4),
        node("Relu", ["c0"], ["r0"]),
        node("Conv", ["r0", "w1"], ["c1"], strides=[2, 2]),
        node("Sigmoid", ["c1"], ["a1"]),
        node("AveragePool", ["a1"], ["p1"], kernel_shape=[3, 3]),
        node("Flatten", ["p1"], ["f"]),
        node("Gemm", ["f", "w2"], ["g"]),
        node("Softmax", ["g"], ["y"], axis=1),
    ]
    return _model(
        nodes, [1, 3, 12, 12], "y", onnx.TensorProto.FLOAT,
        w0=rng.standard_normal((16, 3, 3, 3)).astype(f4) / 5,
        w1=rng.standard_normal((16, 16, 3, 3)).astype(f4) / 12,
        w2=rng.standard_normal((144, 10)).astype(f4) / 12,
    )  # fmt: skip


def _pooling() -> Any:
    """Return signs that are packed, pooled, and concatenated."""
    rng, node, f4 = np.random.default_rng(3), helper.make_node, np.float32
    nodes = [
        node("Mul", ["x", "s"], ["m"]),
        node("Add", ["m", "b"], ["a"]),
        node("Sign", ["a"], ["s0"]),
        node("MaxPool", ["s0"], ["p0"], kernel_shape=[3, 3], strides=[2, 2]),
        node("Conv", ["p0", "w0"], ["c0"], pads=[1] * 4),
        node("AveragePool", ["x"], ["p1"], kernel_shape=[3, 3], strides=[2, 2]),
        node("Conv", ["p1", "w1"], ["c1"]),
        node("Add", ["c0", "c1"], ["sum"]),
        node("PRelu", ["sum", "slope"], ["r"]),
        node("Sign", ["r"], ["s1"]),
        node("Conv", ["s1", "w2"], ["y"]),
    ]
    return _model(
        nodes, [1, 40, 13, 13], "y", onnx.TensorProto.FLOAT,
        s=rng.standard_normal((1, 40, 1, 1)).astype(f4),
        b=rng.standard_normal((1, 40, 1, 1)).astype(f4), w0=_signs(rng, 48, 40, 3, 3),
        w1=rng.standard_normal((48, 40, 1, 1)).astype(f4), w2=_signs(rng, 20, 48, 3, 3),
        slope=rng.uniform(0.1, 0.5, (48, 1, 1)).astype(f4),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], Any]] = {
    "binary": _binary,
    "few-bit": _few_bit,
    "float": _float,
    "pooling": _pooling,
    "best": lambda: _binary(last="ArgMax"),
}


def trial(
    model: Any, artifact: Any, cases: dict[str, Any], kernel: str, place: int, byte: int
) -> Any:
    """Return what is noticed of one planted instruction; None if it changes nothing."""
    from bnncc import agreement as verify
    from bnncc.errors import BnnccError
    from bnncc.verification import kernels

    broken = bytearray(artifact.library)
    broken[place] = byte
    planted = with_library(artifact, bytes(broken))
    case = cases[kernel]
    before, after = (kernels.run(a.session(), case) for a in (artifact, planted))
    if after and all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        for x, y in zip(before, after, strict=True)
    ):
        return None
    if not case.differences(after)[0]:
        return None  # another rounding
    found = [k["name"] for k in verify.verify(model, planted)["kernels"] if not k["right"]]
    try:
        noticed = any(not result["right"] for result in planted.selfcheck())
    except BnnccError:
        noticed = True
    return {"kernel": kernel, "place": place, "byte": byte, "found": found, "noticed": noticed}


def in_a_child(work: Callable[[], Any]) -> Any:
    """Return what `work` does in a process of its own; None if that dies."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            with open(writer, "w") as pipe:
                json.dump(work(), pipe)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def planted(name: str, count: int, seed: int = 0) -> Iterator[Any]:
    """Yield what was noticed of `count` instructions planted into network `name`."""
    from bnncc.driver import compile_model, lowered
    from bnncc.options import CompileOptions
    from bnncc.runtime.runner import random_inputs
    from bnncc.verification import kernels

    model = NETWORKS[name]()
    options = CompileOptions(target=TARGET, threads=1)
    artifact = compile_model(model, options)
    inputs = random_inputs(artifact.inputs)
    walk = kernels.KernelWalk(lowered(model, options).module)
    cases = {case.name: case for case in walk.cases([inputs[t.name] for t in artifact.inputs])}
    rng = np.random.default_rng(seed)
    found = places(artifact.library)
    left = {kernel: list(rng.permutation(found.get(kernel, []))) for kernel in cases}
    while count and any(left.values()):
        for kernel, tries in left.items():
            while count and tries:
                place, byte = (int(v) for v in tries.pop())
                result = in_a_child(lambda: trial(model, artifact, cases, kernel, place, byte))  # noqa: B023
                if result is not None:
                    yield result
                    count -= 1
                    break


if __name__ == "__main__":
    for line in planted(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:])):
        print(json.dumps(line), flush=True)
