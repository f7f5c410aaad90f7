"""Compare an artifact with its model: whole outputs, and layer by layer from identical inputs.

A float runtime disagrees with itself where a value before a sign lies within rounding of 0, and
what follows then differs for good. So whole outputs decide only where no such *tie* was met. The
model is compiled once more with the tensors between its layers as further outputs, the
reference computes each of those from *our* values of the ones before it, and both must agree: to
1e-4 of the largest value, except that a decision may fall either way within 8 eps of sum|terms|.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bnncc import report
from bnncc.errors import BnnccError, VerificationError
from bnncc.frontend.checks import read
from bnncc.frontend.dabnn import assume_dabnn
from bnncc.frontend.formats import as_onnx
from bnncc.frontend.onnx import load
from bnncc.ir.image_bits import image_bits
from bnncc.ir.magnitude import magnitudes
from bnncc.options import CompileOptions, Uint8Input
from bnncc.passes.image import channel_axis
from bnncc.passes.transforms import InputTransform
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.runner import random_inputs
from bnncc.targets.spec import TargetSpec
from bnncc.verification import reference
from bnncc.verification.relaxed import FirstLayer

Array = np.ndarray[Any, Any]

FORMAT = 1
RELATIVE = 1e-4
TIE = 8 * float(np.finfo(np.float32).eps)
LOOSER = {"filtered-2d": 4}
"""How many times further apart ties may be with a value of ``--float-conv``."""

_EXAMPLES = 3
_TINY = float(np.finfo(np.float32).tiny)


def verify(
    model: str | Path | onnx.ModelProto,
    artifact: Artifact,
    inputs: Mapping[str, Array] | None = None,
    *,
    seed: int = 0,
    params: str | Path | None = None,
) -> dict[str, Any]:
    """Compare `artifact` with the model it was compiled from.

    Parameters
    ----------
    model : path, ModelProto or torch.export.ExportedProgram
        The model, of any format.
    artifact : Artifact
        Compiled from it.
    inputs : mapping of str to ndarray, optional
        The artifact's inputs; random ones by default.
    seed : int
        Of the random inputs.
    params : path, optional
        Parameters of an MXNet network, if not beside it.

    Returns
    -------
    dict
        See docs/report.md; ``right`` tells the verdict.
    """
    shapes = {t.name: t.shape for t in artifact.inputs}
    uint8 = {u["name"]: _uint8(u) for u in artifact.manifest["semantics"]["input_uint8"]}
    transform = _transform(artifact)
    wanted_shapes = {n: _model_shape(s, uint8.get(n)) for n, s in shapes.items()}
    if transform is not None:
        wanted_shapes.pop(transform.name)
    model = as_onnx(model, params=params, input_shapes=wanted_shapes)
    if artifact.manifest["semantics"]["assume"] == "dabnn":
        model, _ = assume_dabnn(model, wanted_shapes)
    fixed_shapes = {
        n: [d for d in s if isinstance(d, int)]
        for n, s in shapes.items()
        if n in wanted_shapes and n not in uint8 and all(isinstance(d, int) for d in s)
    }
    _check_names(model, artifact)
    load(model, input_shapes=fixed_shapes)  # refuses what the reference would choke on
    proto = reference.read_model(model)
    arrays = random_inputs(artifact.inputs, seed=seed) if inputs is None else dict(inputs)
    feeds = {n: _pixels(uint8[n], a) if n in uint8 else a for n, a in arrays.items()}
    if transform is not None:
        feeds[transform.name] = _bits(transform, arrays[transform.name], proto)

    runner = reference.Reference()
    ours = artifact.run(arrays)
    exact = runner.run(proto, feeds)
    operands = artifact.manifest["semantics"]["first_layer"]
    pixels = {n: a for n, a in arrays.items() if n in uint8}
    first = FirstLayer.of(operands, proto, feeds, pixels, tuple(uint8.values()))
    wanted = exact if first is None else first.run(proto, feeds)
    outputs = [_compared(t.name, ours[t.name], wanted[t.name]) for t in artifact.outputs]
    deviation = [_compared(t.name, ours[t.name], exact[t.name]) for t in artifact.outputs]

    layers, traced, note = _layers(proto, artifact, arrays, feeds, runner, first)
    ties = [tie for layer in layers for tie in layer.pop("ties")]
    whole = all(o["right"] for o in outputs)
    inside = all(layer["right"] for layer in layers)
    same = traced is not None and all(_compared(n, ours[n], traced[n])["right"] for n in ours)
    if whole and inside:
        verdict = "right"
    elif inside and ties and same:
        verdict = "right but for ties"
    elif inside and ties:
        verdict = "undecided: ties were met, so whole outputs tell nothing; try another seed"
    else:
        verdict = "wrong"
    return {
        "format": FORMAT,
        "model": artifact.manifest["model"],
        "reference": runner.name + (f", {reference.OWN} where rounded" if first else ""),
        "seed": None if inputs is not None else seed,
        "right": verdict.startswith("right"),
        "verdict": verdict,
        "outputs": outputs,
        "layers": layers,
        "ties": ties,
        "deviation": [] if first is None else deviation,
        "note": note,
    }


def _model_shape(shape: tuple[Any, ...], image: Uint8Input | None) -> tuple[Any, ...]:
    """Return the shape of the model's input, of which an artifact may take images as NHWC."""
    if image is None or image.layout == "nchw":
        return shape
    n, height, width, channels = shape
    return n, channels, height, width


def _check_names(model: str | Path | onnx.ModelProto, artifact: Artifact) -> None:
    """Refuse a model that `artifact` cannot have been compiled from."""
    graph = (model if isinstance(model, onnx.ModelProto) else read(model)).graph
    fixed = {t.name for t in graph.initializer}
    names = {i.name for i in graph.input} - fixed
    if names != {t.name for t in artifact.inputs} or [o.name for o in graph.output] != [
        t.name for t in artifact.outputs
    ]:
        raise VerificationError(
            "inputs and outputs of model and artifact have different names",
            hint=f"the artifact was compiled from {artifact.manifest['model']}",
        )


def text(result: Mapping[str, Any]) -> str:
    """Render what `verify` returned for a terminal."""
    lines = [f"reference  {result['reference']}"]
    rows = [("tensor", "layer", "largest difference", "of largest", "")]
    for item in (*result["layers"], *result["outputs"]):
        rows.append(
            (
                item["name"],
                item.get("layer", "output"),
                f"{item['difference']:.3g}",
                f"{item['relative']:.1e}",
                "" if item["right"] else "WRONG" if "layer" in item else "differs",
            )
        )
    lines += report.table(rows, right=(2, 3))
    for tie in result["ties"]:
        lines.append(
            f"tie  {tie['tensor']}: {tie['count']} values, such as {tie['value']:.3g} at "
            f"{tie['index']} (bound {tie['bound']:.3g})"
        )
    for item in result["deviation"]:
        lines.append(
            f"deviation  {item['name']}: {item['difference']:.3g} ({item['relative']:.1e} of the "
            "largest) from the model without --first-layer"
        )
    if result["note"]:
        lines.append(f"note  {result['note']}")
    lines.append(f"verdict  {result['verdict']}")
    return "\n".join(lines)


def _layers(
    proto: onnx.ModelProto,
    artifact: Artifact,
    arrays: Mapping[str, Array],
    feeds: Mapping[str, Array],
    runner: reference.Reference,
    first: FirstLayer | None,
) -> tuple[list[dict[str, Any]], dict[str, Array] | None, str]:
    """Compare each tensor between layers; also return the outputs of the artifact that has them."""
    from bnncc.driver import compile_model

    unseen = first.data if first is not None else frozenset()
    taps = [name for name in reference.tap_points(proto) if name not in unseen]
    tapped = reference.with_outputs(proto, taps)
    try:
        twin = compile_model(tapped, _options(artifact)).on(artifact.device)
    except BnnccError as error:
        return [], None, f"not compared layer by layer: {error}"
    ours = twin.run(arrays)
    values = {**feeds, **ours}
    splitter = reference.Splitter(proto, {*feeds, *taps})
    ends = [o.name for o in proto.graph.output if o.name not in feeds]
    semantics = artifact.manifest["semantics"]
    no_zeros = semantics["sign_zero"] != "exact"
    near = TIE * LOOSER.get(semantics["float_conv"], 1)
    bounds: dict[str, Array] = {}
    layers = []
    for name in dict.fromkeys([*taps, *ends]):
        part = splitter.segment(name, values)
        judge = runner if first is None or feeds.keys().isdisjoint(part.leaves) else first
        layers.append(_layer(part, values, bounds, judge, relaxed=no_zeros, near=near))
    return layers, {n: ours[n] for n in ends}, ""


def _layer(
    part: reference.Segment,
    values: Mapping[str, Array],
    bounds: dict[str, Array],
    runner: reference.Reference | FirstLayer,
    *,
    relaxed: bool,
    near: float,
) -> dict[str, Any]:
    """Compute one tensor from our values of those before it; `bounds` collects tie bounds."""
    name = part.tensor
    given = {leaf: values[leaf] for leaf in part.leaves}
    wanted = runner.run(part.model, given)[name]
    result = _compared(name, values[name], wanted)
    result["layer"] = part.node
    result["ties"] = []
    shaky = {leaf: b for leaf, b in bounds.items() if leaf in given and (b.any() or relaxed)}
    if shaky and reference.DECISIONS.intersection(part.ops):
        moved = []
        for sign in (-1, 1):
            shifted = dict(given)
            for leaf, bound in shaky.items():
                step = np.where((given[leaf] == 0) & relaxed, np.maximum(bound, _TINY), bound)
                shifted[leaf] = (given[leaf] + sign * step).astype(given[leaf].dtype)
            moved.append(runner.run(part.model, shifted)[name].astype(np.float64))
        low = np.minimum(np.minimum(*moved), wanted)
        high = np.maximum(np.maximum(*moved), wanted)
        slack = RELATIVE * max(float(np.abs(wanted).max(initial=0.0)), 1e-30)
        if wanted.shape == values[name].shape:
            mine = values[name].astype(np.float64)
            off = (mine < low - slack) | (mine > high + slack)
            result["right"] = not off.any() and not np.isnan(mine).any()
        crossed = (high - low) > 2 * slack
        if crossed.any():
            result["ties"] = [
                _tie(leaf, given[leaf], bound, crossed, relaxed) for leaf, bound in shaky.items()
            ]
            result["ties"] = [tie for tie in result["ties"] if tie["count"]]
    if values[name].dtype.kind == "f":
        graph, fed = runner.loaded(part.model, given)
        size = magnitudes(graph, fed)[name][1] if name in graph.outputs else np.zeros(())
        bounds[name] = np.broadcast_to(near * size, values[name].shape)
    return result


def _tie(tensor: str, values: Array, bound: Array, crossed: Array, relaxed: bool) -> dict[str, Any]:
    """Describe the values of a decision's input that lie within rounding of its threshold.

    An exact 0 of exact origin is among them only where `--sign-zero` gave it up. Where the decision
    is followed by more than elementwise operators, the threshold is taken to be 0.
    """
    if crossed.shape == values.shape:
        where = np.argwhere(crossed)
    else:
        where = np.argwhere((np.abs(values) <= bound) & ((bound > 0) | (relaxed & (values == 0))))
    tie: dict[str, Any] = {"tensor": tensor, "count": len(where)}
    if len(where):
        index = tuple(int(i) for i in where[0])
        tie.update(index=list(index), value=float(values[index]), bound=float(bound[index]))
        tie["examples"] = [[int(i) for i in row] for row in where[:_EXAMPLES]]
    return tie


def _compared(name: str, mine: Array, wanted: Array) -> dict[str, Any]:
    """Compare two tensors: integers and truth values exactly, floats to `RELATIVE`."""
    result: dict[str, Any] = {"name": name, "difference": 0.0, "relative": 0.0, "right": True}
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
        result.update(difference=float("inf"), relative=float("inf"), right=False)
        return result
    if not mine.size:
        return result
    a, b = mine.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.abs(a - b))
    gap = np.where(np.isnan(gap), np.inf, gap)
    top = float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
    difference = float(gap.max())
    relative = difference / top if top else difference
    right = difference == 0 if mine.dtype.kind != "f" else relative <= RELATIVE
    result.update(difference=difference, relative=relative, right=right)
    return result


def _options(artifact: Artifact) -> CompileOptions:
    """Return the options `artifact` was compiled with."""
    content = artifact.manifest
    spec: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in content["target"]["spec"].items()
    }
    images = tuple(_uint8(u) for u in content["semantics"]["input_uint8"])
    transform = _transform(artifact)
    bytewise = {u.name for u in images} | ({transform.name} if transform else set())
    return CompileOptions(
        target=TargetSpec(**spec),
        input_shapes={t.name: t.shape for t in artifact.inputs if t.name not in bytewise},
        sign_zero=content["semantics"]["sign_zero"],
        float_conv=content["semantics"]["float_conv"],
        first_layer=content["semantics"]["first_layer"],
        check_finite=content["semantics"]["check_finite"],
        input_uint8=images,
        input_transform=transform,
        confirm=False,
    )


def _transform(artifact: Artifact) -> InputTransform | None:
    raw = artifact.manifest["semantics"]["input_transform"]
    return raw and InputTransform(**{**raw, "thresholds": tuple(raw["thresholds"])})


def _bits(transform: InputTransform, image: Array, model: onnx.ModelProto) -> Array:
    """Return what the model sees of an image that becomes bits."""
    graph = load(model)
    attrs = transform.attributes(int(graph.types[transform.name].shape[1]))
    return image_bits(attrs, [image], 1)[0]


def _uint8(raw: Mapping[str, Any]) -> Uint8Input:
    return Uint8Input(raw["name"], tuple(raw["mean"]), tuple(raw["scale"]), raw["layout"])


def _pixels(spec: Uint8Input, image: Array) -> Array:
    """Return what the model sees of an image given as bytes."""
    if spec.layout == "nhwc":
        image = np.moveaxis(image, -1, 1)
    axis = channel_axis(image.shape)
    shape = tuple(-1 if k == axis else 1 for k in range(image.ndim))
    mean = np.array(spec.mean, np.float32).reshape(shape)
    scale = np.array(spec.scale, np.float32).reshape(shape)
    return np.ascontiguousarray((image.astype(np.float32) - mean) * scale)
