"""ONNX's own node tests, as models that bnncc can be asked to compile.

`onnx.backend.test` makes one small model for each operator and attribute, with inputs and outputs.
Inputs that decide shapes or axes (the target of Reshape, the axes of a reduction) are made
initializers, as they are in the files of exporters: an artifact has fixed shapes.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from bnncc.frontend.narrow import CARRIERS

STRUCTURE = {
    "AffineGrid": {"size"},
    "BlackmanWindow": {"size"},
    "CenterCropPad": {"shape"},
    "Col2Im": {"image_shape", "block_shape"},
    "ConstantOfShape": {"input"},
    "CumProd": {"axis"},
    "CumSum": {"axis"},
    "DFT": {"dft_length", "axis"},
    "Expand": {"shape"},
    "HammingWindow": {"size"},
    "HannWindow": {"size"},
    "Loop": {"M", "cond"},
    "MaxUnpool": {"output_shape"},
    "MelWeightMatrix": {
        *("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz"),
    },
    "OneHot": {"depth"},
    "Pad": {"pads", "axes"},
    "Range": {"start", "limit", "delta"},
    "Reshape": {"shape"},
    "Resize": {"roi", "scales", "sizes"},
    "STFT": {"frame_step", "frame_length"},
    "Slice": {"starts", "ends", "axes", "steps"},
    "Split": {"split"},
    "Squeeze": {"axes"},
    "Tile": {"repeats"},
    "TopK": {"K"},
    "Trilu": {"k"},
    "Unsqueeze": {"axes"},
    "Upsample": {"scales"},
}
"""Inputs of each operator, by their formal names, that are made initializers; Reduce*: axes."""

RANDOM = {
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"),
    "RandomUniformLike",
}
DATA_SHAPED = {"Compress", "ImageDecoder", "NonMaxSuppression", "NonZero", "Unique"}
"""Operators whose output shape is not known before they have run."""
LOSSES = {"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"}
_EXPANDED = re.compile(r"_expanded(_ver\d+|_function_body)?$")


@dataclass(frozen=True)
class Case:
    """One node test.

    Attributes
    ----------
    name : str
        ONNX's name of the test.
    model : ModelProto
        With structural inputs as initializers.
    feeds, wanted : dict of str to ndarray
        Inputs, and the outputs that ONNX says are right.
    rtol, atol : float
        ONNX's own tolerances of the test.
    """

    name: str
    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    wanted: dict[str, np.ndarray]
    rtol: float
    atol: float


@functools.cache
def collected() -> dict[str, object]:
    """Return ONNX's test cases by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with np.errstate(all="ignore"):
            from onnx.backend.test.case.node import collect_testcases

            return {case.name: case for case in collect_testcases(None)}


def excluded(name: str) -> str:
    """Return why a test is none of bnncc's business; empty if it is."""
    model = collected()[name].model
    every = list(nodes(model.graph))
    ops = {node.op_type for node in every}
    if {node.domain for node in every} - {"", "ai.onnx"}:
        return "another domain"
    if ops & RANDOM:
        return "random"
    if ops & LOSSES or (
        "_expanded" in name and _base(name).startswith(("test_sce", "test_nllloss"))
    ):
        return "training"
    if "training" in name or name.startswith("test_bernoulli"):
        return "training" if "training" in name else "random"
    if ops & DATA_SHAPED:
        return "shape depends on data"
    for value in (*model.graph.input, *model.graph.output):
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            return "sequences, maps and optional values"
        if value.type.tensor_type.elem_type == TensorProto.STRING:
            return "strings"
    if any(op.startswith(("Sequence", "Optional", "ConcatFromSequence")) for op in ops):
        return "sequences, maps and optional values"
    if ops & {"StringNormalizer", "TfIdfVectorizer", "RegexFullMatch", "StringConcat"}:
        return "strings"
    return ""


@functools.cache
def names() -> list[str]:
    """Return the names of the tests of inference operators, sorted."""
    return sorted(name for name in collected() if not excluded(name))


def case(name: str) -> Case:
    """Return the test of a name."""
    test = collected()[name]
    model = onnx.ModelProto()
    model.CopyFrom(test.model)
    inputs, outputs = test.data_sets[0]
    given = {
        value.name: array
        for value, array in zip(model.graph.input, map(_array, inputs), strict=False)
        if array is not None
    }
    made = [value.name for value in model.graph.output]
    wanted = dict(zip(made, map(_array, outputs), strict=True))
    fixed = _structural(name)
    kept = [v for k, v in enumerate(model.graph.input) if k not in fixed and v.name in given]
    for k in fixed:
        value = model.graph.input[k]
        if value.name in given:
            model.graph.initializer.append(
                numpy_helper.from_array(given.pop(value.name), value.name)
            )
    del model.graph.input[:]
    model.graph.input.extend(kept)
    if not kept:
        model.graph.input.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, [1]))
        given["unused"] = np.zeros(1, np.float32)
    for value in model.graph.input:  # some are declared without a shape
        dims = given[value.name].shape
        elem = value.type.tensor_type.elem_type
        value.CopyFrom(helper.make_tensor_value_info(value.name, elem, dims))
    feeds = {n: carried(v) for n, v in given.items()}
    return Case(name, model, feeds, wanted, test.rtol, test.atol)


def carried(value: np.ndarray) -> np.ndarray:
    """Return what an artifact takes for an array: bytes, for types that NumPy lacks."""
    carrier = CARRIERS.get(value.dtype.name)
    if carrier is None:
        return value
    return value.astype(carrier) if "int" in value.dtype.name else value.view(np.uint8)


def _base(name: str) -> str:
    return _EXPANDED.sub("", name)


def _structural(name: str) -> set[int]:
    """Return positions of the graph inputs that are to be initializers."""
    base = collected().get(_base(name)) or collected()[name]
    model = base.model
    version = next(e.version for e in model.opset_import if e.domain in ("", "ai.onnx"))
    position = {value.name: k for k, value in enumerate(model.graph.input)}
    found: set[int] = set()
    for node in nodes(model.graph):
        formal_names = STRUCTURE.get(node.op_type, set())
        if node.op_type.startswith("Reduce"):
            formal_names = {"axes"}
        if not formal_names:
            continue
        schema = onnx.defs.get_schema(node.op_type, version, "")
        for formal, actual in zip(schema.inputs, node.input, strict=False):
            if formal.name in formal_names and actual in position:
                found.add(position[actual])
    return found


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from nodes(attribute.g)


_HALVES = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance of 1 and the next number."""


def differences(case: Case, made: dict[str, np.ndarray]) -> str:
    """Return how outputs differ from the right ones; nothing where they do not.

    ONNX's tolerances stand, with two additions. A number that is small beside others of its tensor
    may be off by a millionth of the largest: sums are rounded in another order. And half floats may
    be off by eight roundings: ONNX's own numbers are rounded after each step.
    """
    said = []
    for name, want in case.wanted.items():
        have = made[name]
        if want.dtype.name in CARRIERS:
            if have.dtype == carried(want).dtype:
                is_float = "float" in want.dtype.name
                have = have.view(want.dtype) if is_float else have.astype(want.dtype)
            have, want = (
                v.astype(np.float32) if v.dtype == want.dtype else v for v in (have, want)
            )
        if have.dtype != want.dtype or have.shape != want.shape:
            said.append(f"{name}: {have.dtype}{have.shape}, expected {want.dtype}{want.shape}")
            continue
        if want.dtype.kind not in "fV" or not want.size:
            wrong = have != want
        else:
            a, b = have.astype(np.float64), want.astype(np.float64)
            top = float(np.abs(b[np.isfinite(b)]).max(initial=0))
            unit = _HALVES.get(want.dtype.name, 1e-6 / 8)
            atol = max(case.atol, 8 * unit * top)
            with np.errstate(all="ignore"):
                wrong = ~np.isclose(a, b, rtol=case.rtol, atol=atol, equal_nan=True)
        if wrong.any():
            said.append(f"{name}: {int(wrong.sum())} of {want.size} differ")
    return "; ".join(said)


def _array(value: object) -> np.ndarray | None:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return None if value is None else np.asarray(value)
