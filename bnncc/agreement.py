"""Compare an artifact with its model: its kernels, the tensors between them, and the outputs.

Rounding is not specified: two correct runs may differ where a value before a sign lies within
rounding error of 0 (a *tie*), and in everything that depends on it. So whole outputs decide only if
there was no tie. Three steps are compared separately, each from identical inputs:

- the model as a reference runtime computes it, and as `bnncc.ir.evaluate` does: layer by layer;
- that, and what the passes made of it: when the model is lowered again, as the manifest says;
- that, and the machine code of this artifact: kernel by kernel.

Floats agree to 1e-4 of the largest value, except that a decision may fall either way within 8 eps
of sum|terms|; outputs may differ only where they depend on such a decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

from bnncc import report
from bnncc.driver import Lowered, lowered
from bnncc.errors import ArtifactError, BnnccError, InputError, UsageError, VerificationError
from bnncc.frontend.checks import read
from bnncc.frontend.formats import Model, as_onnx
from bnncc.frontend.onnx import load, read_model
from bnncc.input_transforms import InputTransform
from bnncc.ir.evaluate import evaluate
from bnncc.ir.halves import is_float
from bnncc.ir.image_bits import image_bits
from bnncc.ir.magnitude import NORMAL, coarseness, magnitudes
from bnncc.ir.ties import TIE, tied
from bnncc.options import Uint8Input, require_int
from bnncc.progress import phase
from bnncc.recognise.dabnn import assume_dabnn
from bnncc.runtime.accuracy import accuracy, first_batch
from bnncc.runtime.artifact import Artifact
from bnncc.runtime.compare import (
    RELATIVE,
    apart,
    differs,
    gap,
    largest,
    overflows,
    tolerance,
    within,
)
from bnncc.runtime.runner import random_inputs
from bnncc.runtime.selfcheck import Check
from bnncc.transform.image import channel_axis
from bnncc.verification import reference
from bnncc.verification.confirm import LOOSER
from bnncc.verification.recorded import Orders, options_of, transform_of, uint8_input
from bnncc.verification.relaxed import Relaxed

Array = np.ndarray[Any, Any]

FORMAT = 2
_EXAMPLES = 3
_VERDICTS = {
    "pass": "PASS",
    "pass except for ties": "PASS: outputs differ only where a value is a tie",
    "fail": "FAIL",
    "undecided": "UNDECIDED: outputs depend on ties; try another --seed",
}
"""How verdicts are printed."""
_TIES = "a tie is a value within rounding error of a threshold: either decision is correct"


def verify(
    model: Model,
    artifact: Artifact | str | Path,
    inputs: Mapping[str, Array] | None = None,
    *,
    seed: int = 0,
    params: str | Path | None = None,
    labels: Array | None = None,
    scores: str | None = None,
    min_accuracy: float | None = None,
) -> dict[str, Any]:
    """Check an artifact against the model it was compiled from, layer by layer.

    Parameters
    ----------
    model : path, onnx.ModelProto or torch.export.ExportedProgram
        The model, of any format.
    artifact : Artifact or path
        The compiled model.
    inputs : mapping of str to ndarray, optional
        Inputs of the artifact; random by default.
    seed : int
        Seed of the random inputs.
    params : path, optional
        Parameters of an MXNet network, if not in the default file.
    labels : ndarray of int, optional
        A class number for each example in `inputs`, which may hold any number of examples. The
        model is then compared on the first batch, and accuracy is measured on all examples.
    scores : str, optional
        Output with a score per class; by default the only output.
    min_accuracy : float, optional
        Least accuracy that passes, from 0 to 1.

    Returns
    -------
    dict
        See docs/report.md; ``passed`` is true if outputs agree and accuracy is sufficient.

    Raises
    ------
    InputError
        If `inputs` are not finite, and outputs differ.
    UsageError
        If `seed` is no int, `labels` are given without `inputs`, or options for labels without
        `labels`.

    Notes
    -----
    Runtimes have bugs too. If ONNX Runtime disagrees with the artifact, but onnx.reference, the
    specification in NumPy, agrees with it on the whole model, the latter's verdict counts, and the
    note says where the two differ.
    """
    require_int(seed=seed)
    artifact = Artifact.of(artifact)
    if labels is None:
        if scores is not None or min_accuracy is not None:
            raise UsageError("scores and a minimum accuracy need labels")
        random = random_inputs(artifact.inputs, seed=seed) if inputs is None else dict(inputs)
        found = _judged(_Case.of(model, artifact, random, params))
        return dict(report.with_old_keys({**found, "seed": seed if inputs is None else None}))
    if inputs is None:
        raise UsageError("labels need inputs: the labelled examples")
    with phase("accuracy"):
        measured = accuracy(
            artifact, inputs, np.asarray(labels), scores=scores, minimum=min_accuracy
        )
    result = _judged(_Case.of(model, artifact, first_batch(artifact, inputs), params))
    result["passed"] = result["passed"] and measured["passed"]
    return {**report.with_old_keys(result), "accuracy": measured}


@np.errstate(all="ignore")  # networks may overflow
def _judged(case: _Case) -> dict[str, Any]:
    """Return what `verify` does, in new keys only."""
    runner = reference.Reference()
    result = _against(runner, case)
    if result["passed"] or reference.ONNX_RUNTIME not in runner.used:
        return result
    judge = reference.Reference(without=reference.ONNX_RUNTIME)
    other = _against(judge, case)
    if not other["passed"] or judge.used.keys() != {reference.ONNX_REFERENCE}:
        return result
    odd = [item["name"] for item in (*result["layers"], *result["outputs"]) if not item["passed"]]
    said = f"{runner.name} differs from the specification at `{odd[0]}`" if odd else ""
    return {**other, "note": "; ".join(filter(None, (said, other["note"])))}


class _Equality(NamedTuple):
    """When two tensors of a model agree: integers exactly, floats but for rounding."""

    coarse: Mapping[str, float]
    """Tolerance of tensors that the model computes in half precision, of the largest value."""
    finite: bool
    """Whether inputs are finite. Sums that overflow are then not compared."""

    def slack(self, name: str, wanted: Array) -> float:
        """Return how far the values of a tensor may be apart, of its largest value."""
        return tolerance(wanted, self.coarse.get(name, RELATIVE)) if is_float(wanted) else 0.0

    def overflows(self, mine: Array, wanted: Array) -> Array:
        """Return where values differ but do not count."""
        if not self.finite or mine.shape != wanted.shape:
            return np.zeros(wanted.shape, bool)
        return overflows(mine, wanted) & (apart(mine, wanted) != 0)

    def differ(self, name: str, mine: Array, wanted: Array) -> Array:
        """Return where two tensors disagree."""
        relative = self.coarse.get(name, RELATIVE)
        return differs(mine, wanted, relative=relative) & ~self.overflows(mine, wanted)

    def compared(self, name: str, mine: Array, wanted: Array) -> dict[str, Any]:
        """Return the entry of a tensor in the result of `verify`."""
        left = self.overflows(mine, wanted)
        if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
            difference = relative = float("inf")
        else:
            top, difference = largest(wanted), gap(np.where(left, wanted, mine), wanted)
            relative = difference / top if top else difference
        return {
            "name": name, "max_abs_error": difference, "relative": relative,
            "overflows": int(left.sum()), "passed": relative <= self.slack(name, wanted),
        }  # fmt: skip


class _Case(NamedTuple):
    """A model in the form that references run, an artifact, and inputs of both."""

    model: onnx.ModelProto
    proto: onnx.ModelProto
    """The model in the newest opset."""
    artifact: Artifact
    arrays: dict[str, Array]
    """Inputs of the artifact."""
    feeds: dict[str, Array]
    """Inputs of the model."""
    pixels: dict[str, Array]
    """Those of `arrays` that are bytes of images."""
    equal: _Equality
    """When its tensors agree."""

    @classmethod
    def of(
        cls, model: Model, artifact: Artifact, arrays: dict[str, Array],
        params: str | Path | None,
    ) -> _Case:  # fmt: skip
        """Load the model with the shapes of the artifact, and convert its inputs."""
        shapes = {t.name: t.shape for t in artifact.inputs}
        uint8 = {u["name"]: uint8_input(u) for u in artifact.manifest["semantics"]["input_uint8"]}
        transform = transform_of(artifact)
        wanted = {n: _model_shape(s, uint8.get(n)) for n, s in shapes.items()}
        if transform is not None:
            wanted.pop(transform.name)
        model = as_onnx(model, params=params, input_shapes=wanted)
        if artifact.manifest["semantics"]["assume"] == "dabnn":
            model, _ = assume_dabnn(model, wanted)
        shaped = {n: s for n, s in shapes.items() if n in wanted and n not in uint8}
        bounds = dict(bound for t in artifact.inputs for bound in t.bounds)
        _check_names(model, artifact)
        # This refuses what the reference would choke on.
        coarse = coarseness(load(model, input_shapes=shaped, max_dims=bounds))
        equal = _Equality(coarse, all(map(_finite, arrays.values())))
        proto = read_model(model)
        feeds = {n: _pixels(uint8[n], a) if n in uint8 else a for n, a in arrays.items()}
        if transform is not None:
            feeds[transform.name] = _bits(transform, arrays[transform.name], proto)
        pixels = {n: a for n, a in arrays.items() if n in uint8}
        return cls(model, proto, artifact, arrays, feeds, pixels, equal)


def _against(runner: reference.Reference, case: _Case) -> dict[str, Any]:
    """Return what `verify` does, by one reference."""
    model, proto, artifact, arrays, feeds, pixels, equal = case
    failed = ""
    try:
        ours = artifact.run(arrays)
    except ArtifactError as error:  # which kernel it is, is said below
        ours, failed = {t.name: np.zeros(0) for t in artifact.outputs}, str(error)
    with phase("reference"):
        exact = runner.run(proto, feeds)
    first = Relaxed.of(options_of(artifact), proto, feeds, pixels)
    wanted = exact if first is None else first.run(proto, feeds)
    if first is not None:
        equal = equal._replace(coarse=coarseness(first.loaded(proto, feeds)[0]))
    outputs = [equal.compared(t.name, ours[t.name], wanted[t.name]) for t in artifact.outputs]
    deviation = [equal.compared(t.name, ours[t.name], exact[t.name]) for t in artifact.outputs]

    with phase("layers"):
        layers, note = _layers(proto, artifact, feeds, runner, first, equal)
    kernels, missing, said = _kernels(model, artifact, arrays)
    ties: list[dict[str, Any]] = []
    for layer in layers:
        ties += [tie for tie in layer.pop("ties") if tie not in ties]  # several layers may read it
    inside = all(item["passed"] for item in (*layers, *kernels)) and not missing
    if inside:
        outputs = _excused(outputs, ours, wanted, proto, feeds, artifact, first, equal)
    verdict = _verdict(outputs, inside, bool(kernels))
    if verdict == "fail":
        _check_finite(artifact, arrays)
    return {
        "format": FORMAT,
        "model": artifact.manifest["model"],
        "reference": runner.name + (f", {reference.OWN} where rounded" if first else ""),
        "seed": None,
        "passed": verdict.startswith("pass"),
        "verdict": verdict,
        "outputs": outputs,
        "layers": layers,
        "kernels": kernels,
        "ties": ties,
        "deviation": [] if first is None else deviation,
        "note": "; ".join(filter(None, (failed, note, said, missing, _left([*layers, *outputs])))),
    }


def _left(items: Sequence[Mapping[str, Any]]) -> str:
    """Say where sums overflow."""
    over = {item["name"]: item["overflows"] for item in items if item["overflows"]}
    if not over:
        return ""
    name, count = next(iter(over.items()))
    more = f" and in {report.plural(len(over) - 1, 'tensor')} after it" if len(over) > 1 else ""
    left = f"{report.plural(count, 'value')} of `{name}`{more}"
    return f"sums overflow, so infinities and NaN are not compared: {left}"


def _verdict(outputs: Sequence[Mapping[str, Any]], inside: bool, kernels: bool) -> str:
    """Return one of `_VERDICTS`.

    Parameters
    ----------
    outputs : sequence of mapping
        From `_excused`, if `inside`.
    inside : bool
        Whether all layers and kernels agree.
    kernels : bool
        Whether kernels were compared.
    """
    if not inside or not all(o["passed"] or o["excused"] for o in outputs):
        return "fail"
    if all(o["passed"] for o in outputs):
        return "pass"
    return "pass except for ties" if kernels else "undecided"


def _check_finite(artifact: Artifact, arrays: Mapping[str, Array]) -> None:
    """Refuse inputs for which the results of `artifact` are not defined."""
    unusual = [t.name for t in artifact.inputs if not _finite(arrays[t.name])]
    if unusual:
        raise InputError(
            f"input `{unusual[0]}` contains NaN or infinity, and outputs differ: "
            "results are defined for finite inputs only",
            hint="give finite inputs; networks compiled with --check-finite reject others",
        )


def _finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _excused(
    outputs: list[dict[str, Any]],
    ours: Mapping[str, Array],
    wanted: Mapping[str, Array],
    proto: onnx.ModelProto,
    feeds: Mapping[str, Array],
    artifact: Artifact,
    first: Relaxed | None,
    equal: _Equality,
) -> list[dict[str, Any]]:
    """Add to each output that differs whether all that differs depends on a tie."""
    sure: Mapping[str, Array] = {}
    for item in outputs:
        item["excused"] = False
        name = item["name"]
        same = ours[name].shape == wanted[name].shape and ours[name].dtype == wanted[name].dtype
        if item["passed"] or not same:
            continue
        if not sure:
            semantics = artifact.manifest["semantics"]
            graph, fed = (first or reference.Reference()).loaded(proto, feeds)
            near = TIE * LOOSER.get(semantics["float_conv"], 1)
            sure = tied(graph, fed, near=near, zeros=semantics["sign_zero"] != "exact")
            sizes = magnitudes(graph, fed)
        off = equal.differ(name, ours[name], wanted[name]) & ~sure[name]
        off &= ~within(ours[name], wanted[name], near * sizes[name][1])
        item["excused"] = not off.any()
    return outputs


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


def text(result: Mapping[str, Any], width: int = report.WIDTH) -> str:
    """Render what `verify` returned for a terminal of `width` columns."""
    lines = [f"reference  {result['reference']}"]
    rows = [("tensor", "layer", "max abs error", "relative", "")]
    for item in (*result["layers"], *result["outputs"]):
        rows.append(
            (
                item["name"],
                item.get("layer", "output"),
                f"{item['max_abs_error']:.3g}",
                f"{item['relative']:.1e}",
                "" if item["passed"] else "FAIL" if "layer" in item else "differs",
            )
        )
    lines += report.table(rows, right=(2, 3), width=width, wraps=(0, 1))
    wrong = [k for k in result["kernels"] if not k["passed"]]
    for item in wrong:
        of = f" ({named})" if (named := report.computed(item)) else ""
        lines.append(f"kernel  {item['name']}{of}: FAIL, {item['wrong']} wrong values")
    if result["kernels"]:
        lines.append(
            f"kernels  {len(result['kernels']) - len(wrong)} of {len(result['kernels'])} pass, "
            "each run alone"
        )
    for tie in result["ties"]:
        lines.append(
            f"tie  {tie['tensor']}: {report.plural(tie['count'], 'value')}, such as "
            f"{tie['value']:.3g} at {tie['index']} (bound {tie['bound']:.3g})"
        )
    if result["ties"]:
        lines.append(_TIES)
    for item in result["deviation"]:
        lines.append(
            f"deviation  {item['name']}: max abs error {item['max_abs_error']:.3g} (relative "
            f"{item['relative']:.1e}) against the model without options that round"
        )
    if result["note"]:
        lines.append(f"note  {result['note']}")
    lines.append(_VERDICTS[result["verdict"]])
    if measured := result.get("accuracy"):
        wanted = measured["minimum"]
        lines.append(
            f"accuracy  {measured['accuracy']:.2%} ({measured['correct']:,} of "
            f"{measured['examples']:,} examples)"
            + ("" if wanted is None else f", minimum {wanted:.2%}: ")
            + ("" if wanted is None else "PASS" if measured["passed"] else "FAIL")
        )
    return "\n".join(lines)


def _layers(
    proto: onnx.ModelProto,
    artifact: Artifact,
    feeds: Mapping[str, Array],
    runner: reference.Reference,
    first: Relaxed | None,
    equal: _Equality,
) -> tuple[list[dict[str, Any]], str]:
    """Compare each tensor between layers as we evaluate it with the reference."""
    unseen = first.data if first is not None else frozenset()
    taps = [name for name in reference.tap_points(proto) if name not in unseen]
    made = reference.computed(proto)
    ends = [o.name for o in proto.graph.output if o.name in made]
    try:
        values = {**feeds, **evaluated(reference.with_outputs(proto, taps), feeds, first)}
    except BnnccError as error:
        return [], f"not compared layer by layer: {error}"
    # An output may be what a later decision reads: it is known, too.
    splitter = reference.Splitter(proto, {*feeds, *taps, *ends})
    semantics = artifact.manifest["semantics"]
    no_zeros = semantics["sign_zero"] != "exact"
    near = TIE * LOOSER.get(semantics["float_conv"], 1)
    bounds: dict[str, Array] = {}
    layers = []
    for name in reference.in_order(proto, {*taps, *ends}):
        part = splitter.segment(name, values)
        judge: reference.Reference | Relaxed = runner
        if first is not None and (first.inside or not feeds.keys().isdisjoint(part.leaves)):
            judge = first
        layers.append(_layer(part, values, bounds, judge, relaxed=no_zeros, near=near, equal=equal))
    return layers, ""


def evaluated(
    proto: onnx.ModelProto, feeds: Mapping[str, Array], first: Relaxed | None = None
) -> dict[str, Array]:
    """Return the outputs of a model as our own definition of its operators has them."""
    return evaluate(*(first or reference.Reference()).loaded(proto, feeds))


def _kernels(
    model: str | Path | onnx.ModelProto, artifact: Artifact, arrays: Mapping[str, Array]
) -> tuple[list[dict[str, Any]], str, str]:
    """Run every kernel of `artifact` alone; also return what its constants lack, and a note."""
    from bnncc.verification import kernels

    network = lowered_again(model, artifact)
    said = artifact.manifest["report"]["kernels"]
    calls = [(c.name, [(list(shape), dtype) for shape, dtype in c.args]) for c in network.calls]
    if calls != [(k["name"], [(a["shape"], a["dtype"]) for a in k["args"]]) for k in said]:
        return [], (
            "the artifact's kernels are not those that this bnncc makes of the model: it was "
            f"written by bnncc {artifact.manifest['bnncc']} from {artifact.manifest['model']}"
        ), ""  # fmt: skip
    session = artifact.session()
    if not session.times_kernels:
        return (
            [],
            "",
            "kernels were not run alone: the device's server cannot (`bnncc device-kit` can)",
        )
    walk = kernels.KernelWalk(network.module)
    missing = sum(c.tobytes() not in artifact.library for c in walk.constants())
    lack = f"lib.so lacks {missing} constants of the model" if missing else ""
    rows, unseen = [], ""
    feeds = [np.asarray(arrays[t.name], order="C") for t in network.inputs]
    names = ({key: k.get(key, []) for key in ("layers", "nodes")} for k in said)
    try:
        with phase("kernels"):
            for case in walk.cases(feeds):
                count, gap = case.differences(kernels.run(session, case))
                rows.append({"name": case.name, **next(names), "wrong": count,
                             "max_abs_error": gap, "passed": not count})  # fmt: skip
    except kernels.NotFollowed as error:
        rows, unseen = [], f"kernels were not run alone: {error}"
    return rows, lack, unseen


def _layer(
    part: reference.Segment,
    values: Mapping[str, Array],
    bounds: dict[str, Array],
    runner: reference.Reference | Relaxed,
    *,
    relaxed: bool,
    near: float,
    equal: _Equality,
) -> dict[str, Any]:
    """Compute one tensor from our values of those before it; `bounds` collects tie bounds."""
    name = part.tensor
    given = {leaf: values[leaf] for leaf in part.leaves}
    wanted = runner.run(part.model, given)[name]
    result = equal.compared(name, values[name], wanted)
    result["layer"] = part.node
    result["ties"] = []
    shaky = {leaf: b for leaf, b in bounds.items() if leaf in given and (b.any() or relaxed)}
    if shaky and reference.DECISIONS.intersection(part.ops):
        moved = []
        for sign in (-1, 1):
            shifted = dict(given)
            for leaf, bound in shaky.items():
                step = np.where((given[leaf] == 0) & relaxed, np.maximum(bound, NORMAL), bound)
                shifted[leaf] = (given[leaf] + sign * step).astype(given[leaf].dtype)
            moved.append(runner.run(part.model, shifted)[name].astype(np.float64))
        low = np.minimum(np.minimum(*moved), wanted)
        high = np.maximum(np.maximum(*moved), wanted)
        slack = equal.slack(name, wanted) * max(largest(wanted), 1e-30)
        if wanted.shape == values[name].shape:
            mine = values[name].astype(np.float64)
            off = ~((mine >= low - slack) & (mine <= high + slack))
            result["passed"] = not (off & ~equal.overflows(values[name], wanted)).any()
        crossed = (high - low) > 2 * slack
        if crossed.any():
            result["ties"] = [
                _tie(leaf, given[leaf], bound, crossed, relaxed) for leaf, bound in shaky.items()
            ]
            result["ties"] = [tie for tie in result["ties"] if tie["count"]]
    if not is_float(values[name]) and result["passed"]:
        return result
    graph, fed = runner.loaded(part.model, given)
    if is_float(values[name]):
        size = magnitudes(graph, fed)[name][1] if name in graph.outputs else np.zeros(())
        bounds[name] = np.broadcast_to(near * size, values[name].shape)
    if not result["passed"] and wanted.shape == values[name].shape and name in graph.outputs:
        off = equal.differ(name, values[name], wanted)
        if name in bounds:
            off &= ~within(values[name], wanted, bounds[name])
        if off.any():  # a tie within this part
            sizes = {leaf: bound / near for leaf, bound in bounds.items() if leaf in given}
            off &= ~tied(graph, fed, near=near, zeros=relaxed, sizes=sizes)[name]
        result["passed"] = not off.any()
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


def _bits(transform: InputTransform, image: Array, model: onnx.ModelProto) -> Array:
    """Return what the model sees of an image that becomes bits."""
    graph = load(model)
    attrs = transform.attributes(int(graph.types[transform.name].shape[1]))
    return image_bits(attrs, [image], 1)[0]


def _pixels(spec: Uint8Input, image: Array) -> Array:
    """Return what the model sees of an image given as bytes."""
    if spec.layout == "nhwc":
        image = np.moveaxis(image, -1, 1)
    axis = channel_axis(image.shape)
    shape = tuple(-1 if k == axis else 1 for k in range(image.ndim))
    mean = np.array(spec.mean, np.float32).reshape(shape)
    scale = np.array(spec.scale, np.float32).reshape(shape)
    return np.ascontiguousarray((image.astype(np.float32) - mean) * scale)


def lowered_again(model: str | Path | onnx.ModelProto, artifact: Artifact) -> Lowered:
    """Lower a model as it was for an artifact.

    Parameters
    ----------
    model : path or onnx.ModelProto
        What `artifact` was compiled from; what `--assume` adds is in it already.
    """
    orders = Orders(artifact.manifest["options"].get("weight_orders", {}))
    return lowered(model, replace(options_of(artifact), assume="none"), orders)


def whole_check(model: str | Path | onnx.ModelProto, artifact: Artifact, number: int = 0) -> Check:
    """Return inputs and whole right outputs of a self-check, of which an artifact has samples.

    Parameters
    ----------
    model : path or onnx.ModelProto
        What `artifact` was compiled from.
    number : int
        Which check.
    """
    return Check(*lowered(model, options_of(artifact)).checks.pair(number))
