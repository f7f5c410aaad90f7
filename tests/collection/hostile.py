"""Broken and hostile model files, written into a folder of the test's choosing.

`hostile_files(directory)` writes them and says of each why it is there and what is right: "refuse"
(exit 1 or 2 with one error line), or "either" (an implementation may refuse it, or accept it and
then be correct).

It is over 700 lines because it is a table, one entry per file.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F32, I64 = TensorProto.FLOAT, TensorProto.INT64


class Hostile(NamedTuple):
    """One file, the reason it exists, and what is right: "refuse" or "either"."""

    path: Path
    why: str
    right: str


_FILES: list[tuple[str, str, str, Callable[[Path], None]]] = []


def _file(name: str, why: str, right: str = "refuse") -> Callable:
    """Register a function that writes the file itself."""

    def register(function: Callable[[Path], None]) -> Callable:
        _FILES.append((f"{name}.onnx", why, right, function))
        return function

    return register


def _save(model: onnx.ModelProto, path: Path) -> None:
    path.write_bytes(model.SerializeToString())


def _model(name: str, why: str, right: str = "refuse") -> Callable:
    """Register a function that returns a ModelProto."""

    def register(function: Callable[[], onnx.ModelProto]) -> Callable:
        _FILES.append((f"{name}.onnx", why, right, lambda path: _save(function(), path)))
        return function

    return register


# --------------------------------------------------------------------------------- pieces of models

_RNG = np.random.default_rng(0)


def _signs(*shape: int) -> np.ndarray:
    return np.where(_RNG.random(shape) < 0.5, -1, 1).astype(np.float32)


def _tensor(name: str, array: object, dtype: type = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.asarray(array, dtype), name)


def _graph(
    nodes: list,
    *,
    weights: list | None = None,
    inputs: list | None = None,
    outputs: tuple[str, ...] = ("y",),
    opset: int = 17,
    ir: int = 8,
    functions: list | None = None,
    domains: tuple[tuple[str, int], ...] = (),
) -> onnx.ModelProto:
    """Return an unchecked model; its default input is x of 1x8x6x6."""
    x = [helper.make_tensor_value_info("x", F32, [1, 8, 6, 6])] if inputs is None else inputs
    outs = [onnx.ValueInfoProto(name=o) for o in outputs]
    graph = helper.make_graph(nodes, "g", x, outs, weights or [])
    opsets = [helper.make_opsetid("", opset), *[helper.make_opsetid(d, v) for d, v in domains]]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir, functions=functions or [])
    _declare_outputs(model)
    return model


def _declare_outputs(model: onnx.ModelProto) -> None:
    """Give outputs their inferred type, else float of rank 4: the fault is elsewhere."""
    known = {}
    if not model.functions and 0 < model.opset_import[0].version < 100:
        with contextlib.suppress(Exception):
            known = {o.name: o for o in onnx.shape_inference.infer_shapes(model).graph.output}
    for out in model.graph.output:
        found = known.get(out.name)
        if found is not None and found.type.tensor_type.HasField("shape"):
            out.CopyFrom(found)
        else:
            out.CopyFrom(helper.make_tensor_value_info(out.name, F32, ["a", "b", "c", "d"]))


def _conv(
    weight: object = None, *, sign: bool = True, inputs: list | None = None, tensor=None, **attrs
) -> onnx.ModelProto:
    """Return (sign and) one convolution with `weight`, 4x8x3x3 signs unless told."""
    weight = _signs(4, 8, 3, 3) if weight is None else weight
    nodes = [helper.make_node("Sign", ["x"], ["s"], name="binarize")] if sign else []
    nodes.append(
        helper.make_node("Conv", ["s" if sign else "x", "w"], ["y"], name="conv1", **attrs)
    )
    return _graph(
        nodes, weights=[tensor if tensor is not None else _tensor("w", weight)], inputs=inputs
    )


def _op(
    kind: str, ins: list, weights: list | None = None, *, opset: int = 17, domain: str = "", **attrs
) -> onnx.ModelProto:
    """Return one node from `ins` to y."""
    return _graph(
        [helper.make_node(kind, ins, ["y"], name="bad", domain=domain, **attrs)],
        weights=weights,
        opset=opset,
    )


def _input(shape: object, dtype: int = F32) -> list:
    return [helper.make_tensor_value_info("x", dtype, shape)]


def _good() -> onnx.ModelProto:
    return _conv(pads=[1, 1, 1, 1])


# ---------------------------------------------------------------------------------- not ONNX at all

_file("empty", "no bytes")(lambda p: p.write_bytes(b""))
_file("text", "a text file")(lambda p: p.write_text("this is not a model\n" * 40))
_file("json", "JSON")(lambda p: p.write_text('{"graph": {"node": []}}'))
_file("random", "random bytes")(lambda p: p.write_bytes(np.random.default_rng(1).bytes(5000)))
_file("zeros", "a megabyte of NUL")(lambda p: p.write_bytes(bytes(1 << 20)))
_file("png", "a PNG picture")(
    lambda p: p.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(200))
)
_file("gzip", "a gzipped model")(
    lambda p: p.write_bytes(gzip.compress(_good().SerializeToString(), mtime=0))
)
_file("zip", "a zip archive (PyTorch checkpoint)")(
    lambda p: p.write_bytes(b"PK\x03\x04" + bytes(300))
)
_file("elf", "an executable")(lambda p: p.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(300)))
_file("git_lfs", "a Git LFS pointer")(
    lambda p: p.write_text("version https://git-lfs.example/spec/v1\noid sha256:0\nsize 3\n")
)
_file("directory", "a folder")(lambda p: p.mkdir())
_file("missing", "no such file")(lambda p: None)
_file("fifo", "a named pipe nobody writes to: opening it blocks")(lambda p: os.mkfifo(p))
_file("dangling_link", "a symbolic link to nothing")(lambda p: p.symlink_to("nowhere.onnx"))
_file("tensor_proto", "another protobuf: a TensorProto")(
    lambda p: p.write_bytes(_tensor("w", _signs(9, 9)).SerializeToString())
)
_file("no_graph", "a ModelProto without a graph")(
    lambda p: p.write_bytes(onnx.ModelProto(ir_version=8, producer_name="x").SerializeToString())
)


def _truncated(fraction: float) -> None:
    @_file(f"truncated_{int(fraction * 100)}", f"cut after {int(fraction * 100)} % of its bytes")
    def _(path: Path) -> None:
        data = _good().SerializeToString()
        path.write_bytes(data[: max(1, int(len(data) * fraction))])


for _fraction in (0.01, 0.1, 0.5, 0.9, 0.99):
    _truncated(_fraction)


@_file("trailing_bytes", "a good model followed by rubbish")
def _(path: Path) -> None:
    path.write_bytes(_good().SerializeToString() + b"\xff\xff\xff\xffrubbish")


@_file("flipped_length", "a length field that points past the end")
def _(path: Path) -> None:
    data = bytearray(_good().SerializeToString())
    at = data.index(b"conv1") - 1
    data[at] = 0x7F
    path.write_bytes(bytes(data))


# ---------------------------------------------------------------------------------- graph structure


@_model("cycle", "two nodes that read each other")
def _() -> onnx.ModelProto:
    return _graph(
        [
            helper.make_node("Add", ["x", "b"], ["a"]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Relu", ["b"], ["y"]),
        ]
    )


@_model("self_loop", "a node that reads its own output")
def _() -> onnx.ModelProto:
    return _graph([helper.make_node("Add", ["x", "y"], ["y"], name="loop")])


@_model("duplicate_tensor", "one tensor name produced twice")
def _() -> onnx.ModelProto:
    return _graph([helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])])


@_model("output_shadows_input", "a node writes over a graph input")
def _() -> onnx.ModelProto:
    return _graph([helper.make_node("Relu", ["x"], ["x"]), helper.make_node("Neg", ["x"], ["y"])])


@_model("output_shadows_weight", "a node writes over an initializer")
def _() -> onnx.ModelProto:
    return _graph(
        [helper.make_node("Relu", ["x"], ["w"]), helper.make_node("Neg", ["w"], ["y"])],
        weights=[_tensor("w", [1.0])],
    )


@_model("duplicate_input", "two graph inputs of one name")
def _() -> onnx.ModelProto:
    return _graph([helper.make_node("Relu", ["x"], ["y"])], inputs=_input([1, 8]) + _input([1, 9]))


@_model("duplicate_initializer", "two initializers of one name")
def _() -> onnx.ModelProto:
    return _graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], weights=[_tensor("w", 1.0), _tensor("w", 2.0)]
    )


@_model("undefined_input", "a node reads a name nobody defines")
def _() -> onnx.ModelProto:
    return _graph([helper.make_node("Add", ["x", "ghost"], ["y"], name="reader")])


@_model("unsorted", "nodes in the wrong order, otherwise fine", "either")
def _() -> onnx.ModelProto:
    return _graph([helper.make_node("Relu", ["s"], ["y"]), helper.make_node("Sign", ["x"], ["s"])])


@_model("output_not_produced", "a graph output nobody produces")
def _() -> onnx.ModelProto:
    return _graph([helper.make_node("Relu", ["x"], ["z"])], outputs=("y",))


@_model("no_outputs", "a graph without outputs")
def _() -> onnx.ModelProto:
    return _graph([helper.make_node("Relu", ["x"], ["y"])], outputs=())


@_model("empty_graph", "a graph with nothing in it")
def _() -> onnx.ModelProto:
    return _graph([], inputs=[], outputs=())


@_model("duplicate_output", "one tensor listed twice as graph output", "either")
def _() -> onnx.ModelProto:
    return _graph([helper.make_node("Relu", ["x"], ["y"])], outputs=("y", "y"))


@_model("no_op_type", "a node without an operator")
def _() -> onnx.ModelProto:
    return _op("", ["x"])


@_file("bad_utf8", "a tensor name that is not UTF-8", "either")
def _(path: Path) -> None:
    path.write_bytes(_good().SerializeToString().replace(b"conv1", b"\xff\xfe\xfd\xfc\xfb"))


# ------------------------------------------------------------------------------------ external data


def _external(
    name: str,
    why: str,
    location: str,
    prepare: Callable[[Path], None] | None = None,
    right: str = "refuse",
    **entries,
) -> None:
    @_file(f"external_{name}", why, right)
    def _(path: Path) -> None:
        w = TensorProto(
            name="w", data_type=F32, dims=[4, 8, 3, 3], data_location=TensorProto.EXTERNAL
        )
        for key, value in {"location": location.replace("$", str(path.parent)), **entries}.items():
            w.external_data.add(key=key, value=str(value))
        if prepare:
            prepare(path.parent)
        _save(_conv(tensor=w), path)


def _write(folder: Path, name: str, count: int) -> None:
    (folder / name).write_bytes(_signs(count).tobytes())


_external("missing", "the file of the weights is missing", "nowhere.bin")
_external(
    "parent", "weights read from a parent folder", "../../../../../../../etc/passwd", length=16
)
_external("absolute", "weights read by an absolute path", "/etc/passwd")
_external(
    "symlink",
    "weights behind a link out of the folder",
    "link.bin",
    lambda d: (d / "link.bin").symlink_to("/etc/passwd"),
)
_external("inner_parent", "a path that leaves the folder and comes back", "sub/../../escape.bin")
_external("is_directory", "the file of the weights is a folder", ".")
_external("empty_location", "an empty location", "")
_external(
    "short",
    "the file of the weights is too short",
    "short.bin",
    lambda d: _write(d, "short.bin", 100),
)
_external(
    "offset_beyond",
    "an offset past the end",
    "whole.bin",
    lambda d: _write(d, "whole.bin", 288),
    offset=1 << 40,
    length=1152,
)
_external(
    "negative_offset",
    "a negative offset",
    "whole2.bin",
    lambda d: _write(d, "whole2.bin", 288),
    offset=-4,
    length=1152,
)
_external(
    "negative_length",
    "a negative length",
    "whole3.bin",
    lambda d: _write(d, "whole3.bin", 288),
    offset=0,
    length=-1,
)
_external(
    "wrong_length",
    "a length that does not fit the shape",
    "whole4.bin",
    lambda d: _write(d, "whole4.bin", 288),
    offset=0,
    length=64,
)
_external(
    "text_offset",
    "an offset that is not a number",
    "whole5.bin",
    lambda d: _write(d, "whole5.bin", 288),
    offset="zero",
)


@_file("external_hardlink_fifo", "the file of the weights is a named pipe")
def _(path: Path) -> None:
    os.mkfifo(path.parent / "pipe.bin")
    w = TensorProto(name="w", data_type=F32, dims=[4, 8, 3, 3], data_location=TensorProto.EXTERNAL)
    w.external_data.add(key="location", value="pipe.bin")
    _save(_conv(tensor=w), path)


# ------------------------------------------------------------------------------------- tensors


def _weight(
    name: str, why: str, right: str = "refuse", *, raw: bytes | None = None, **fields
) -> None:
    @_model(f"weight_{name}", why, right)
    def _() -> onnx.ModelProto:
        w = TensorProto(name="w", **{"data_type": F32, "dims": [4, 8, 3, 3], **fields})
        if raw is not None:
            w.raw_data = raw
        return _conv(tensor=w)


_full = _signs(4, 8, 3, 3)
_weight("short_raw", "raw_data one value short", raw=_full.tobytes()[:-4])
_weight("odd_raw", "raw_data that is no whole number of floats", raw=_full.tobytes()[:-3])
_weight("long_raw", "raw_data longer than the shape", raw=_full.tobytes() + bytes(64))
_weight("no_data", "a tensor without data")
_weight(
    "both_data",
    "raw_data and float_data at once",
    raw=_full.tobytes(),
    float_data=_full.ravel().tolist(),
)
_weight("wrong_field", "floats kept in int32_data", int32_data=[1] * 288)
_weight("short_float_data", "float_data too short", float_data=[1.0] * 100)
_weight("huge_dim", "a dimension of 2^40", raw=_full.tobytes(), dims=[1 << 40, 8, 3, 3])
_weight("negative_dim", "a negative dimension", raw=_full.tobytes(), dims=[-4, 8, 3, 3])
_weight(
    "overflow_dims",
    "dimensions whose product overflows to 288",
    raw=_full.tobytes(),
    dims=[1 << 32, 1 << 32, 9, 32],
)
_weight("undefined_type", "data type 0", raw=_full.tobytes(), data_type=0)
_weight("unknown_type", "data type 9999", raw=_full.tobytes(), data_type=9999)
_weight("complex", "complex64 weights", raw=_full.tobytes() * 2, data_type=TensorProto.COMPLEX64)
_weight("string", "string weights", data_type=TensorProto.STRING, string_data=[b"a"] * 288)
_weight(
    "double",
    "double weights on float data",
    raw=_full.astype(np.float64).tobytes(),
    data_type=TensorProto.DOUBLE,
)
_weight(
    "int8",
    "int8 weights on float data",
    raw=_full.astype(np.int8).tobytes(),
    data_type=TensorProto.INT8,
)
_weight(
    "segment",
    "a segmented tensor",
    "either",
    raw=_full.tobytes(),
    segment=TensorProto.Segment(begin=0, end=10),
)


def _not_finite(name: str, value: float, sign: bool, scale: float) -> None:
    @_model(name, f"{value} in the weights of a {'binary' if sign else 'float'} convolution")
    def _() -> onnx.ModelProto:
        w = _signs(4, 8, 3, 3) * np.float32(scale)
        w[1, 2, 1, 1] = value
        return _conv(w, sign=sign)


_not_finite("nan_binary", float("nan"), True, 1)
_not_finite("nan_float", float("nan"), False, 0.37)
_not_finite("inf_binary", float("inf"), True, 1)
_not_finite("inf_float", float("-inf"), False, 0.37)


@_model("nan_all_weights", "nothing but NaN in the weights")
def _() -> onnx.ModelProto:
    return _conv(np.full((4, 8, 3, 3), np.nan, np.float32))


@_model("nan_batchnorm", "NaN in a BatchNormalization's scale")
def _() -> onnx.ModelProto:
    arrays = [np.full(8, np.nan), np.zeros(8), np.zeros(8), np.ones(8)]
    names = ["g", "b", "m", "v"]
    return _op(
        "BatchNormalization",
        ["x", *names],
        [_tensor(n, a) for n, a in zip(names, arrays, strict=True)],
    )


@_model("negative_variance", "a negative variance: the network computes NaN", "either")
def _() -> onnx.ModelProto:
    names = ["g", "b", "m", "v"]
    return _op(
        "BatchNormalization",
        ["x", *names],
        [_tensor(n, np.full(8, v)) for n, v in zip(names, (1, 0, 0, -2), strict=True)],
    )


@_model("nan_bias", "NaN in a convolution's bias")
def _() -> onnx.ModelProto:
    model = _good()
    model.graph.initializer.append(_tensor("b", [0, np.nan, 0, 0]))
    model.graph.node[1].input.append("b")
    return model


@_model("sparse_initializer", "weights given as a sparse tensor", "either")
def _() -> onnx.ModelProto:
    model = _conv()
    del model.graph.initializer[:]
    values, at = _tensor("w", np.ones(3)), _tensor("at", [0, 5, 100], np.int64)
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, at, [4, 8, 3, 3]))
    return model


@_model("sparse_initializer_outside", "a sparse tensor whose index lies outside")
def _() -> onnx.ModelProto:
    model = _conv()
    del model.graph.initializer[:]
    values, at = _tensor("w", np.ones(3)), _tensor("at", [0, 5, 10**9], np.int64)
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, at, [4, 8, 3, 3]))
    return model


# ------------------------------------------------------------------------------------- inputs

_model("input_2_40", "an input dimension of 2^40")(lambda: _conv(inputs=_input([1, 8, 1 << 40, 6])))
_model("input_huge_batch", "a batch of 2^40")(lambda: _conv(inputs=_input([1 << 40, 8, 6, 6])))
_model("input_negative", "a negative input dimension")(lambda: _conv(inputs=_input([1, 8, -6, 6])))
_model("input_overflow", "input dimensions whose product overflows")(
    lambda: _conv(inputs=_input([1 << 31, 8, 1 << 31, 1 << 31]))
)
_model("input_65535_cubed", "a float input of 65535^3 elements")(
    lambda: _graph([helper.make_node("Relu", ["x"], ["y"])], inputs=_input([65535, 65535, 65535]))
)
_model("input_65535_cubed_sign", "a sign of 65535^3 elements and a convolution")(
    lambda: _conv(_signs(4, 65535, 1, 1), inputs=_input([1, 65535, 65535, 65535]))
)
_model("input_zero_size", "an input without elements", "either")(
    lambda: _conv(inputs=_input([1, 8, 0, 6]))
)
_model("input_zero_batch", "a batch of none", "either")(lambda: _conv(inputs=_input([0, 8, 6, 6])))
_model("input_no_rank", "an input of unknown rank", "either")(lambda: _conv(inputs=_input(None)))
_model("input_symbolic_image", "height and width unknown", "either")(
    lambda: _conv(inputs=_input([1, 8, "H", "W"]))
)
_model("input_symbolic_channels", "channels unknown", "either")(
    lambda: _conv(inputs=_input([1, "C", 6, 6]))
)
_model("input_string", "a string input")(
    lambda: _graph(
        [helper.make_node("Identity", ["x"], ["y"])], inputs=_input([3], TensorProto.STRING)
    )
)
_model("input_complex", "a complex input")(
    lambda: _graph(
        [helper.make_node("Identity", ["x"], ["y"])], inputs=_input([3], TensorProto.COMPLEX128)
    )
)
_model("input_unknown_type", "an input of a type that ONNX does not have")(
    lambda: _graph([helper.make_node("Identity", ["x"], ["y"])], inputs=_input([3], -1))
)
_model("input_wrong_type", "int32 data into a float convolution")(
    lambda: _conv(sign=False, inputs=_input([1, 8, 6, 6], TensorProto.INT32))
)
_model("input_wrong_rank", "a vector into a convolution")(lambda: _conv(inputs=_input([8])))
_model("input_no_type", "an input without a type")(
    lambda: _conv(inputs=[onnx.ValueInfoProto(name="x")])
)
_model("input_sequence", "a sequence input")(
    lambda: _graph(
        [helper.make_node("SequenceAt", ["x", "i"], ["y"])],
        weights=[_tensor("i", 0, np.int64)],
        inputs=[helper.make_tensor_sequence_value_info("x", F32, [1, 3])],
    )
)


@_model("output_shape_lie", "an output declared with another shape than computed", "either")
def _() -> onnx.ModelProto:
    model = _good()
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", F32, [1, 4, 99, 99]))
    return model


@_model("value_info_lie", "a value_info with another shape than computed", "either")
def _() -> onnx.ModelProto:
    model = _good()
    model.graph.value_info.append(helper.make_tensor_value_info("s", F32, [7, 7, 7]))
    return model


# ----------------------------------------------------------------------------- attributes of layers

_model("kernel_larger", "a kernel larger than its input")(lambda: _conv(_signs(4, 8, 9, 9)))
_model("dilated_kernel_larger", "a dilated kernel larger than its input")(
    lambda: _conv(dilations=[5, 5])
)
_model("group_zero", "group 0")(lambda: _conv(group=0))
_model("group_negative", "group -1")(lambda: _conv(group=-1))
_model("group_not_dividing", "a group that does not divide the channels")(
    lambda: _conv(_signs(6, 2, 3, 3), group=3)
)
_model("group_not_dividing_units", "a group that does not divide the filters")(
    lambda: _conv(_signs(5, 4, 3, 3), group=2)
)
_model("channel_mismatch", "weights for other channels")(lambda: _conv(_signs(4, 9, 3, 3)))
_model("stride_zero", "stride 0")(lambda: _conv(strides=[0, 1]))
_model("stride_negative", "stride -1")(lambda: _conv(strides=[-1, -1]))
_model("dilation_zero", "dilation 0")(lambda: _conv(dilations=[0, 0]))
_model("dilation_negative", "dilation -1")(lambda: _conv(dilations=[-1, 1]))
_model("pads_huge", "pads of 10^9")(lambda: _conv(pads=[10**9] * 4))
_model("pads_overflow", "pads of 2^62")(lambda: _conv(pads=[1 << 62] * 4))
_model("pads_negative", "negative convolution pads", "either")(lambda: _conv(pads=[-1, -1, -1, -1]))
_model("pads_three", "three pads for two axes")(lambda: _conv(pads=[1, 1, 1]))
_model("strides_three", "three strides for two axes")(lambda: _conv(strides=[1, 1, 1]))
_model("kernel_shape_lie", "a kernel_shape other than the weights'")(
    lambda: _conv(kernel_shape=[5, 5])
)
_model("auto_pad_unknown", "an auto_pad nobody knows")(lambda: _conv(auto_pad="SOMEHOW"))
_model("auto_pad_and_pads", "auto_pad together with pads", "either")(
    lambda: _conv(auto_pad="SAME_UPPER", pads=[2, 2, 2, 2])
)
_model("weight_rank_2", "convolution weights of rank 2")(lambda: _conv(_signs(4, 8)))
_model("no_filters", "a convolution with no filters", "either")(
    lambda: _conv(np.zeros((0, 8, 3, 3), np.float32))
)
_model("bias_length", "a bias of the wrong length")(
    lambda: _graph(
        [helper.make_node("Conv", ["x", "w", "b"], ["y"])],
        weights=[_tensor("w", _signs(4, 8, 3, 3)), _tensor("b", np.zeros(5))],
    )
)
_model("batchnorm_length", "BatchNormalization parameters of the wrong length")(
    lambda: _op("BatchNormalization", ["x", "g", "g", "g", "g"], [_tensor("g", np.ones(7))])
)
_model("pool_kernel_zero", "a pool over nothing")(
    lambda: _op("MaxPool", ["x"], kernel_shape=[0, 0])
)
_model("pool_no_kernel", "a pool without kernel_shape")(lambda: _op("MaxPool", ["x"]))
_model("pool_pads_exceed_kernel", "pool pads as large as the kernel", "either")(
    lambda: _op("MaxPool", ["x"], kernel_shape=[2, 2], pads=[2, 2, 2, 2])
)
_model("pool_stride_zero", "a pool with stride 0")(
    lambda: _op("AveragePool", ["x"], kernel_shape=[2, 2], strides=[0, 0])
)
_model("gemm_mismatch", "Gemm shapes that do not fit")(
    lambda: _graph(
        [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("Gemm", ["f", "w"], ["y"])],
        weights=[_tensor("w", _signs(99, 5))],
    )
)
_model("matmul_mismatch", "MatMul shapes that do not fit")(
    lambda: _op("MatMul", ["x", "w"], [_tensor("w", _signs(7, 5))])
)
_model("broadcast_mismatch", "Add of shapes that do not broadcast")(
    lambda: _op("Add", ["x", "w"], [_tensor("w", _signs(5))])
)
_model("reshape_impossible", "Reshape to another number of elements")(
    lambda: _op("Reshape", ["x", "s"], [_tensor("s", [1, 7, 7], np.int64)])
)
_model("reshape_two_unknown", "Reshape with two -1")(
    lambda: _op("Reshape", ["x", "s"], [_tensor("s", [-1, -1], np.int64)])
)
_model("reshape_negative", "Reshape to -5")(
    lambda: _op("Reshape", ["x", "s"], [_tensor("s", [-5, 2], np.int64)])
)
_model("transpose_perm", "Transpose with axis 7")(
    lambda: _op("Transpose", ["x"], perm=[0, 1, 2, 7])
)
_model("transpose_repeated", "Transpose with an axis twice")(
    lambda: _op("Transpose", ["x"], perm=[0, 1, 1, 3])
)
_model("softmax_axis", "Softmax over axis 9")(lambda: _op("Softmax", ["x"], axis=9))
_model("concat_axis", "Concat along axis -9")(lambda: _op("Concat", ["x", "x"], axis=-9))
_model("concat_no_axis", "Concat without its required axis")(lambda: _op("Concat", ["x", "x"]))
_model("cast_no_to", "Cast without its required type")(lambda: _op("Cast", ["x"]))
_model("cast_unknown", "Cast to type 777")(lambda: _op("Cast", ["x"], to=777))
_model("constant_without_value", "Constant without a value")(
    lambda: _graph(
        [helper.make_node("Constant", [], ["c"]), helper.make_node("Add", ["x", "c"], ["y"])]
    )
)
_model("split_sum", "Split sizes that do not add up")(
    lambda: _graph(
        [helper.make_node("Split", ["x", "s"], ["y", "z"], axis=1)],
        weights=[_tensor("s", [3, 4], np.int64)],
        outputs=("y", "z"),
    )
)
_model("slice_step_zero", "Slice with step 0")(
    lambda: _op(
        "Slice",
        ["x", "a", "b", "c", "a"],
        [_tensor("a", [0], np.int64), _tensor("b", [4], np.int64), _tensor("c", [1], np.int64)],
    )
)
_model("gather_outside", "Gather with an index outside")(
    lambda: _op("Gather", ["x", "i"], [_tensor("i", [99], np.int64)], axis=1)
)
_model("squeeze_not_one", "Squeeze of an axis of 8")(
    lambda: _op("Squeeze", ["x", "a"], [_tensor("a", [1], np.int64)])
)
_model("attribute_type", "strides given as a string")(lambda: _conv(strides="two"))
_model("attribute_float", "group given as a float")(lambda: _conv(group=2.0))
_model("attribute_unknown", "an attribute Conv does not have", "either")(lambda: _conv(flavour=3))
_model("conv_one_input", "Conv without weights")(lambda: _op("Conv", ["x"]))
_model("conv_four_inputs", "Conv with four inputs")(
    lambda: _graph(
        [helper.make_node("Conv", ["x", "w", "b", "b"], ["y"])],
        weights=[_tensor("w", _signs(4, 8, 3, 3)), _tensor("b", np.zeros(4))],
    )
)
_model("conv_two_outputs", "Conv with two outputs")(
    lambda: _graph(
        [helper.make_node("Conv", ["x", "w"], ["y", "z"])],
        weights=[_tensor("w", _signs(4, 8, 3, 3))],
    )
)
_model("empty_required_input", "a required input given as an empty name")(
    lambda: _op("Add", ["x", ""])
)


@_model("attribute_reference", "an attribute reference outside a function")
def _() -> onnx.ModelProto:
    model = _conv()
    attr = model.graph.node[1].attribute.add()
    attr.name, attr.ref_attr_name, attr.type = "strides", "anything", onnx.AttributeProto.INTS
    return model


@_model("attribute_twice", "one attribute given twice")
def _() -> onnx.ModelProto:
    model = _conv(strides=[1, 1])
    model.graph.node[1].attribute.append(helper.make_attribute("strides", [2, 2]))
    return model


# --------------------------------------------------------------------------- operators and versions

_model("unknown_op", "an operator nobody knows")(lambda: _op("Frobnicate", ["x"]))
_model("unknown_domain", "an operator of an unknown domain")(
    lambda: _op("Sign", ["x"], domain="com.example.unknown")
)
_model("newer_op", "Gelu, of opset 20, at opset 13")(lambda: _op("Gelu", ["x"], opset=13))
_model("newer_layer_norm", "LayerNormalization, of opset 17, at opset 11")(
    lambda: _op("LayerNormalization", ["x", "g"], [_tensor("g", np.ones(6))], opset=11)
)
_model("older_form", "Clip's old attributes at opset 13")(
    lambda: _op("Clip", ["x"], opset=13, min=-1.0, max=1.0)
)
_model("newer_form", "Pad's new inputs at opset 9")(
    lambda: _op("Pad", ["x", "p"], [_tensor("p", [0, 0, 1, 1, 0, 0, 1, 1], np.int64)], opset=9)
)
_model("opset_zero", "opset 0")(lambda: _op("Relu", ["x"], opset=0))
_model("opset_9999", "opset 9999")(lambda: _op("Relu", ["x"], opset=9999))
_model("opset_negative", "opset -1")(lambda: _op("Relu", ["x"], opset=-1))
_model("ir_9999", "IR version 9999")(
    lambda: _graph([helper.make_node("Relu", ["x"], ["y"])], ir=9999)
)
_model("ir_zero", "IR version 0")(lambda: _graph([helper.make_node("Relu", ["x"], ["y"])], ir=0))
_model("random_op", "a random operator")(
    lambda: _graph([helper.make_node("RandomNormalLike", ["x"], ["y"])])
)
_model("nonzero", "an output whose shape depends on the data", "either")(
    lambda: _graph([helper.make_node("NonZero", ["x"], ["y"])])
)
_model("to_string", "Cast to string")(lambda: _op("Cast", ["x"], to=TensorProto.STRING))
_model("training_batchnorm", "BatchNormalization in training mode", "either")(
    lambda: _graph(
        [
            helper.make_node(
                "BatchNormalization", ["x", "g", "g", "g", "g"], ["y", "m", "v"], training_mode=1
            )
        ],
        weights=[_tensor("g", np.ones(8))],
    )
)


@_model("no_opset", "no opset_import at all", "either")
def _() -> onnx.ModelProto:
    model = _good()
    del model.opset_import[:]
    return model


@_model("two_opsets", "one domain imported in two versions")
def _() -> onnx.ModelProto:
    model = _good()
    model.opset_import.append(helper.make_opsetid("", 9))
    return model


def _branch(name: str, kind: str = "Relu") -> onnx.GraphProto:
    return helper.make_graph(
        [helper.make_node(kind, ["x"], [name])],
        name,
        [],
        [helper.make_tensor_value_info(name, F32, None)],
    )


@_model("if_node", "an If over a run-time condition", "either")
def _() -> onnx.ModelProto:
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    node = helper.make_node(
        "If", ["flag"], ["y"], then_branch=_branch("t"), else_branch=_branch("e", "Neg")
    )
    return _graph([node], inputs=[*_input([1, 8]), flag])


def _loop(name: str, count: int, why: str) -> None:
    @_model(name, why, "either" if count < 100 else "refuse")
    def _() -> onnx.ModelProto:
        body = helper.make_graph(
            [helper.make_node("Neg", ["v"], ["u"]), helper.make_node("Identity", ["c"], ["d"])],
            "body",
            [
                helper.make_tensor_value_info("i", I64, []),
                helper.make_tensor_value_info("c", TensorProto.BOOL, []),
                helper.make_tensor_value_info("v", F32, None),
            ],
            [
                helper.make_tensor_value_info("d", TensorProto.BOOL, []),
                helper.make_tensor_value_info("u", F32, None),
            ],
        )
        weights = [_tensor("n", count, np.int64), _tensor("go", True, np.bool_)]
        return _graph(
            [helper.make_node("Loop", ["n", "go", "x"], ["y"], body=body)], weights=weights
        )


_loop("loop", 3, "a Loop of three rounds")
_loop("loop_forever", 1 << 60, "a Loop of 2^60 rounds")


# ------------------------------------------------------------------------------------- bombs


def _function(name: str, calls: list[str], opset: int = 17) -> onnx.FunctionProto:
    """Return a function that calls others one after the other."""
    nodes, last = [], "a"
    for i, other in enumerate(calls):
        nodes.append(
            helper.make_node(
                other, [last], [f"t{i}"], domain="bomb" if other.startswith("f") else ""
            )
        )
        last = f"t{i}"
    nodes.append(helper.make_node("Identity", [last], ["b"]))
    return helper.make_function(
        "bomb",
        name,
        ["a"],
        ["b"],
        nodes,
        [helper.make_opsetid("", opset), helper.make_opsetid("bomb", 1)],
    )


def _calls(functions: list) -> onnx.ModelProto:
    return _graph(
        [helper.make_node("f0", ["x"], ["y"], domain="bomb")],
        functions=functions,
        domains=(("bomb", 1),),
        ir=8,
    )


_model("function_recursive", "a function that calls itself")(
    lambda: _calls([_function("f0", ["f0"])])
)
_model("function_mutual", "two functions that call each other")(
    lambda: _calls([_function("f0", ["f1"]), _function("f1", ["f0"])])
)
_model("function_doubling", "functions that call the next one twice: 2^40 nodes")(
    lambda: _calls(
        [_function(f"f{i}", [f"f{i + 1}"] * 2) for i in range(40)] + [_function("f40", ["Neg"])]
    )
)
_model("function_missing", "a call of a function that is not there")(
    lambda: _calls([_function("f1", ["Neg"])])
)
_model("function_duplicate", "one function defined twice", "either")(
    lambda: _calls([_function("f0", ["Neg"]), _function("f0", ["Relu"])])
)

_CONST = helper.make_tensor("v", F32, [1], [1.0])
_model("constant_of_shape_bomb", "ConstantOfShape of 2^40 elements")(
    lambda: _graph(
        [
            helper.make_node("ConstantOfShape", ["s"], ["c"], value=_CONST),
            helper.make_node("Add", ["x", "c"], ["y"]),
        ],
        weights=[_tensor("s", [1 << 40, 1, 1, 1], np.int64)],
    )
)
_model("constant_of_shape_negative", "ConstantOfShape of negative size")(
    lambda: _graph(
        [helper.make_node("ConstantOfShape", ["s"], ["y"], value=_CONST)],
        weights=[_tensor("s", [-3], np.int64)],
    )
)
_model("expand_bomb", "Expand to 2^40 elements")(
    lambda: _op("Expand", ["x", "s"], [_tensor("s", [1 << 34, 1, 1, 1], np.int64)])
)
_model("expand_constant_bomb", "Expand of a constant to 2^36 elements, then a sum of it")(
    lambda: _graph(
        [
            helper.make_node("Expand", ["one", "s"], ["e"]),
            helper.make_node("ReduceSum", ["e"], ["r"]),
            helper.make_node("Add", ["x", "r"], ["y"]),
        ],
        weights=[_tensor("one", [1.0]), _tensor("s", [1 << 18, 1 << 18], np.int64)],
    )
)
_model("pad_bomb", "Pad by 10^9 on each side")(
    lambda: _op(
        "Pad", ["x", "p"], [_tensor("p", [0, 0, 10**9, 10**9, 0, 0, 10**9, 10**9], np.int64)]
    )
)
_model("tile_bomb", "Tile by 2^20 in three axes")(
    lambda: _op("Tile", ["x", "r"], [_tensor("r", [1, 1 << 20, 1 << 20, 1 << 20], np.int64)])
)
_model("range_bomb", "Range to 10^15")(
    lambda: _graph(
        [
            helper.make_node("Range", ["a", "b", "c"], ["r"]),
            helper.make_node("ReduceMax", ["r"], ["m"]),
            helper.make_node("Add", ["x", "m"], ["y"]),
        ],
        weights=[_tensor("a", 0), _tensor("b", 1e15), _tensor("c", 1)],
    )
)
_model("range_step_zero", "Range with step 0")(
    lambda: _graph(
        [helper.make_node("Range", ["a", "b", "a"], ["y"])],
        weights=[_tensor("a", 0), _tensor("b", 5)],
    )
)
_model("resize_bomb", "Resize by 10^6")(
    lambda: _op("Resize", ["x", "", "s"], [_tensor("s", [1, 1, 1e6, 1e6])], mode="nearest")
)
_model("one_hot_bomb", "OneHot of depth 2^40")(
    lambda: _graph(
        [helper.make_node("OneHot", ["i", "d", "v"], ["y"])],
        weights=[
            _tensor("i", [0, 1], np.int64),
            _tensor("d", 1 << 40, np.int64),
            _tensor("v", [0, 1]),
        ],
    )
)
_model("unsqueeze_reshape_bomb", "MatMul of two vectors into 2^50 elements")(
    lambda: _graph(
        [
            helper.make_node("MatMul", ["a", "b"], ["m"]),
            helper.make_node("ReduceMax", ["m"], ["r"]),
            helper.make_node("Add", ["x", "r"], ["y"]),
        ],
        weights=[_tensor("a", np.ones((1 << 17, 1))), _tensor("b", np.ones((1, 1 << 17)))],
    )
)


@_model("concat_doubling", "Concat of a tensor with itself, forty times")
def _() -> onnx.ModelProto:
    names = ["x", *[f"d{i}" for i in range(39)], "y"]
    return _graph(
        [helper.make_node("Concat", [a, a], [b], axis=1) for a, b in itertools.pairwise(names)]
    )


@_model("constant_doubling", "a constant added to itself by Concat, forty times, foldable")
def _() -> onnx.ModelProto:
    names = [f"d{i}" for i in range(41)]
    nodes = [helper.make_node("Concat", [a, a], [b], axis=0) for a, b in itertools.pairwise(names)]
    nodes += [
        helper.make_node("ReduceSum", [names[-1]], ["r"]),
        helper.make_node("Add", ["x", "r"], ["y"]),
    ]
    return _graph(nodes, weights=[_tensor("d0", [1.0])])


@_model("units_2_40", "weights whose output would take terabytes")
def _() -> onnx.ModelProto:
    return _conv(_signs(1 << 16, 8, 1, 1), inputs=_input([1 << 16, 8, 64, 64]))


@_model("nested_if", "If inside If, fifteen levels", "either")
def _() -> onnx.ModelProto:
    graph = _branch("t0")
    for i in range(1, 15):
        node = helper.make_node(
            "If", ["flag"], [f"t{i}"], then_branch=graph, else_branch=_branch(f"e{i}")
        )
        graph = helper.make_graph(
            [node], f"g{i}", [], [helper.make_tensor_value_info(f"t{i}", F32, None)]
        )
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    node = helper.make_node("If", ["flag"], ["y"], then_branch=graph, else_branch=_branch("e"))
    return _graph([node], inputs=[*_input([1, 8]), flag])


def hostile_files(directory: Path | str) -> list[Hostile]:
    """Write every file into `directory` and return them, with why and what is right."""
    directory = Path(directory)
    result = []
    for name, why, right, write in _FILES:
        path = directory / name
        write(path)
        result.append(Hostile(path, why, right))
    return result
