"""Evaluate an ONNX file as DESIGN section 2 defines right: the oracle of the test collection.

The graph is evaluated node by node with NumPy. Conv, Gemm, MatMul, BatchNormalization and the pools
are written here (im2col, accumulation in float64, result rounded once to float32); when both
operands of a product are integer multiples of a scale (up to rounding noise, as straight-through
estimators leave it), the accumulator is an exact integer. Every other operator is `onnx.reference`.
It shares no code with the compiler.

Beside each value runs `err`, a conservative ``sum|terms|`` of the rounded operations it came from:
0 for inputs, constants, signs and exact integers. A sign, comparison or rounding whose distance to
its threshold is at most ``8 * eps * err`` is a *tie*: two correct implementations may decide it
differently. An exact zero with ``err == 0`` is not a tie: sign(0) is then a promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.collection.kernels import KERNELS, TIE, Value, add_values, attributes, mul_values

RELATIVE = 1e-4  # of the largest |wanted| element of the output
_NORMAL = float(np.finfo(np.float32).smallest_normal)


@dataclass(frozen=True)
class Tie:
    """Decisions of one node that rounding may turn either way."""

    node: str
    tensor: str
    count: int


@dataclass(frozen=True)
class Verdict:
    """Outcome of `compare`.

    `kind` is "right" (all outputs within tolerance), "tie" (they are not, but the oracle met ties,
    which may be the reason) or "wrong". `text` says what differs.
    """

    kind: str
    text: str = ""
    ties: tuple[Tie, ...] = ()

    @property
    def right(self) -> bool:
        """Tell whether all outputs agree."""
        return self.kind == "right"


@dataclass
class Evaluation:
    """All tensors of one run, and the ties met."""

    values: dict[str, Value]
    ties: list[Tie] = field(default_factory=list)


# ------------------------------------------------------------------------- error terms of other ops

_LAYOUT = {
    "Reshape",
    "Transpose",
    "Concat",
    "Split",
    "Slice",
    "Pad",
    "Gather",
    "Expand",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Identity",
    "Dropout",
    "Tile",
    "DepthToSpace",
    "SpaceToDepth",
}
_SAME = {"Neg", "Abs", "LeakyRelu", "HardSigmoid", "Elu"}
_DECIDE_ZERO = {"Sign"}
_COMPARE = {"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"}
_ROUND = {"Round": 0.5, "Floor": 0.0, "Ceil": 0.0}


def _is_float(value: Value | None) -> bool:
    return value is not None and value.data.dtype.kind == "f"


def _full(value: Value) -> np.ndarray:
    return np.broadcast_to(np.asarray(value.err, dtype=np.float64), value.data.shape).astype(
        np.float32
    )


def _crop(arrays: list[np.ndarray | None]) -> list[np.ndarray | None]:
    """Do the negative amounts of a Pad, which `onnx.reference` lacks, and leave the others."""
    data, pads = arrays[0], arrays[1]
    axes = arrays[3].tolist() if len(arrays) > 3 and arrays[3] is not None else range(data.ndim)
    half = len(pads) // 2
    for i, axis in enumerate(axes):
        cut = slice(max(0, -pads[i]), data.shape[axis] - max(0, -pads[i + half]))
        data = data[(slice(None),) * (axis % data.ndim) + (cut,)]
    return [data, np.maximum(pads, 0), *arrays[2:]]


class _Node:
    """One node, ready to be evaluated on any number of inputs."""

    def __init__(
        self,
        node: onnx.NodeProto,
        model: onnx.ModelProto,
        around: Mapping[str, np.ndarray] | None = None,
    ):
        self.node = node
        self.model = model
        self.around = {} if around is None else around  # what its subgraphs may read
        self.fallback: ReferenceEvaluator | None = None

    def _reference(self, arrays: list[np.ndarray | None]) -> list[np.ndarray]:
        if self.node.op_type == "Pad" and len(arrays) > 1 and (arrays[1] < 0).any():
            arrays = _crop(arrays)
        names = [n for n in self.node.input if n]
        if self.fallback is None:
            infos = [onnx.ValueInfoProto(name=n) for n in dict.fromkeys([*names, *self.around])]
            outs = [onnx.ValueInfoProto(name=n) for n in self.node.output if n]
            graph = helper.make_graph([self.node], "one", infos, outs)
            self.fallback = self._evaluator(graph)
        given = {n: a for n, a in zip(self.node.input, arrays, strict=True) if n}
        given = {**self.around, **given}
        results = iter(self.fallback.run(None, given))
        return [np.asarray(next(results)) if n else np.zeros(()) for n in self.node.output]

    def _evaluator(self, graph: onnx.GraphProto) -> ReferenceEvaluator:
        try:
            return ReferenceEvaluator(
                helper.make_model(graph, opset_imports=self.model.opset_import)
            )
        except (
            RuntimeError
        ):  # no implementation that old, and none differs for what the collection uses
            return ReferenceEvaluator(
                helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
            )

    def __call__(self, ins: list[Value | None], ties: list[Tie]) -> list[Value]:
        """Evaluate the node; append to `ties`."""
        kind = self.node.op_type
        if kind in KERNELS and _is_float(ins[0]) and self.node.domain in ("", "ai.onnx"):
            return KERNELS[kind](self.node, ins)
        arrays = [None if v is None else v.data for v in ins]
        results = self._reference(arrays)
        floats = [v for v in ins if _is_float(v)]
        if (
            not floats
            or all(r.dtype.kind != "f" for r in results)
            or kind in _ROUND
            or kind in _DECIDE_ZERO
        ):
            self._decide(kind, ins, floats, ties)
            return [Value(r) for r in results]
        return [
            Value(r, e)
            for r, e in zip(results, self._errors(kind, ins, floats, results), strict=True)
        ]

    def _decide(self, kind: str, ins: list, floats: list[Value], ties: list[Tie]) -> None:
        if not floats:
            return
        x = floats[0]
        if kind in _COMPARE and len(floats) == 2:
            distance = np.abs(floats[0].data.astype(np.float64) - floats[1].data)
            err = np.asarray(floats[0].err) + np.asarray(floats[1].err)
        elif kind in _ROUND or kind in ("Cast", "QuantizeLinear"):
            data = x.data.astype(np.float64)
            offset = _ROUND.get(kind, 0.0)
            err = np.asarray(x.err)
            if kind == "QuantizeLinear":
                scale = ins[1].data.astype(np.float64)
                data, offset, err = data / scale, 0.5, err / scale + np.abs(data / scale)
            near = data - offset - np.rint(data - offset)
            distance = np.abs(near)
            if kind == "Cast" and self._casts_to_bool():
                distance = np.abs(data)
        elif kind in _DECIDE_ZERO:
            distance, err = np.abs(x.data.astype(np.float64)), np.asarray(x.err)
        else:
            return
        count = int(np.sum((distance <= TIE * err) & (err > 0)))
        if count:
            ties.append(Tie(self.node.name or kind, self.node.output[0], count))

    def _casts_to_bool(self) -> bool:
        return attributes(self.node).get("to") == onnx.TensorProto.BOOL

    def _errors(self, kind: str, ins: list, floats: list[Value], results: list[np.ndarray]) -> list:
        if kind in _LAYOUT:
            arrays = [None if v is None else (_full(v) if _is_float(v) else v.data) for v in ins]
            if kind == "Pad" and len(arrays) > 2 and arrays[2] is not None:
                arrays[2] = np.zeros_like(arrays[2])
            return [np.asarray(r, dtype=np.float64) for r in self._reference(arrays)]
        if kind in ("Add", "Sub"):
            return [add_values(ins[0], ins[1], 1 if kind == "Add" else -1).err]
        if kind == "Mul":
            return [mul_values(ins[0], ins[1]).err]
        if kind == "Div":
            p, d = (v.data.astype(np.float64) for v in ins)
            err = np.asarray(ins[0].err) + np.abs(results[0]) * ins[1].err
            clean = (results[0] * d == p) & (err == 0)
            return [np.where(clean | (d == 0), 0.0, err / np.abs(d) + np.abs(results[0]))]
        if kind in ("Relu", "Clip"):  # well inside a flat part the result is a constant
            err, moved = _full(ins[0]).astype(np.float64), np.abs(results[0] - ins[0].data)
            return [np.where(moved > TIE * err, 0.0, err)]
        if kind in _SAME:
            return [_full(ins[0]).astype(np.float64)]
        if kind == "PRelu":
            return [_full(ins[0]) * np.maximum(1.0, np.abs(ins[1].data)) + np.abs(results[0])]
        if kind == "Where":
            parts = [v.err if _is_float(v) else 0.0 for v in ins[1:]]
            return [np.broadcast_to(np.where(ins[0].data, *parts), results[0].shape)]
        if kind in ("Min", "Max"):  # only operands that may be the chosen one count
            err = np.zeros(results[0].shape)
            for v in floats:
                near = np.abs(results[0].astype(np.float64) - v.data) <= TIE * np.asarray(v.err)
                err = np.maximum(err, np.where(near, v.err, 0.0))
            return [err]
        if kind == "Cast":
            return [_full(ins[0]).astype(np.float64)]
        if kind in ("ConstantOfShape", "Shape", "Constant"):
            return [0.0 for _ in results]
        worst = max((float(np.max(v.err, initial=0.0)) for v in floats), default=0.0)
        return [np.abs(r.astype(np.float64)) + worst for r in results]


# ---------------------------------------------------------------------------------------- the graph


def load(model: onnx.ModelProto | str | Path) -> onnx.ModelProto:
    """Load `model` when it is a path, and inline its local functions."""
    if not isinstance(model, onnx.ModelProto):
        model = onnx.load(str(model))
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def _ordered(graph: onnx.GraphProto, known: Iterable[str]) -> Iterable[onnx.NodeProto]:
    """Yield nodes in topological order: ONNX requires files to have it, but not all do."""
    ready, waiting = {*known, ""}, list(graph.node)
    while waiting:
        later = []
        for node in waiting:
            if ready.issuperset(node.input):
                ready.update(node.output)
                yield node
            else:
                later.append(node)
        if len(later) == len(waiting):
            raise ValueError(f"no order: {later[0].name or later[0].op_type} waits for ever")
        waiting = later


def evaluate(model: onnx.ModelProto | str | Path, feeds: Mapping[str, np.ndarray]) -> Evaluation:
    """Evaluate the graph and keep every tensor."""
    model = load(model)
    graph = model.graph
    done = Evaluation({t.name: Value(numpy_helper.to_array(t)) for t in graph.initializer})
    for sparse in graph.sparse_initializer:
        dense = np.zeros(list(sparse.dims), numpy_helper.to_array(sparse.values).dtype)
        dense.reshape(-1)[numpy_helper.to_array(sparse.indices)] = numpy_helper.to_array(
            sparse.values
        )
        done.values[sparse.values.name] = Value(dense)
    done.values.update({name: Value(np.asarray(array)) for name, array in feeds.items()})
    with np.errstate(all="ignore"):
        for node in list(_ordered(graph, done.values)):
            ins = [done.values[n] if n else None for n in node.input]
            nested = any(a.HasField("g") for a in node.attribute)
            around = {n: v.data for n, v in done.values.items()} if nested else None
            outs = _Node(node, model, around)(ins, done.ties)
            done.values.update({n: v for n, v in zip(node.output, outs, strict=True) if n})
    return done


def first_difference(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray]
) -> str:
    """Compare another evaluation of `model` with this one, tensor by tensor.

    Each node computes from the other's values, so nothing is excused: what decides must decide the
    same, and other floats may differ by their own rounding alone.
    """
    done = {t.name: Value(numpy_helper.to_array(t)) for t in model.graph.initializer}
    done.update({name: Value(array) for name, array in feeds.items()})
    with np.errstate(all="ignore"):
        for node in model.graph.node:
            outs = _Node(node, model)([done[n] if n else None for n in node.input], [])
            for name, out in zip(node.output, outs, strict=True):
                done[name] = out
                if name not in values:
                    continue
                other, want = values[name], out.data
                if other.shape != want.shape or other.dtype != want.dtype:
                    return (
                        f"`{name}`: {other.dtype}{other.shape}, expected {want.dtype}{want.shape}"
                    )
                same = (other == want) | ((other != other) & (want != want))
                if not same.all():
                    gap = np.abs(other.astype(np.float64) - want)
                    err = np.asarray(out.err)  # what is not normal is spaced like what just is
                    same |= gap <= TIE * np.where(err > 0, np.maximum(err, _NORMAL), 0.0)
                if not same.all():
                    return f"`{name}`: {int((~same).sum())} of {same.size} elements differ"
                done[name] = Value(other)
    return ""


def run(
    model: onnx.ModelProto | str | Path,
    feeds: Mapping[str, np.ndarray],
    keep: Iterable[str] | None = None,
) -> dict[str, np.ndarray]:
    """Return the graph's outputs and the tensors named in `keep`."""
    model = load(model)
    done = evaluate(model, feeds)
    names = [o.name for o in model.graph.output] + list(keep or [])
    return {name: done.values[name].data for name in names}


def ties(model: onnx.ModelProto | str | Path, feeds: Mapping[str, np.ndarray]) -> list[Tie]:
    """Return the ties that `feeds` meet in `model`."""
    return evaluate(model, feeds).ties


def compare(
    model: onnx.ModelProto | str | Path,
    feeds: Mapping[str, np.ndarray],
    got: Mapping[str, np.ndarray],
) -> Verdict:
    """Judge the outputs `got` of some implementation.

    Integer and bool outputs must be equal; float outputs must differ by at most `RELATIVE`, or the
    precision of their type, times the largest magnitude of the wanted output. Shapes, dtypes and
    NaN must be as wanted.
    """
    return judge(load(model), evaluate(model, feeds), got)


def judge(model: onnx.ModelProto, done: Evaluation, got: Mapping[str, np.ndarray]) -> Verdict:
    """Judge the outputs `got`, as `compare` does, by an evaluation of `model`."""
    faults = []
    for info in model.graph.output:
        want = done.values[info.name].data
        if info.name not in got:
            return Verdict("wrong", f"output `{info.name}` is missing")
        have = np.asarray(got[info.name])
        if have.shape != want.shape or have.dtype != want.dtype:
            kinds = f"{have.dtype}{have.shape}, expected {want.dtype}{want.shape}"
            return Verdict("wrong", f"`{info.name}`: {kinds}")
        if want.dtype.kind != "f":
            bad = have != want
            text = f"`{info.name}`: {int(bad.sum())} of {bad.size} elements differ"
        else:
            finite = np.isfinite(want)
            top = float(np.abs(want[finite]).max(initial=0.0))
            with np.errstate(invalid="ignore"):
                gap = np.abs(have.astype(np.float64) - want)
                near = max(RELATIVE, float(np.finfo(want.dtype).eps))
                bad = np.where(
                    finite,
                    ~(gap <= near * top + 1e-30),
                    ~((have == want) | (have != have) & (want != want)),
                )
            worst = float(np.nanmax(np.where(finite, gap, 0), initial=0.0))
            text = f"`{info.name}`: {int(bad.sum())} of {bad.size} elements differ, by up to "
            text += f"{worst:.3g} (largest {top:.3g})"
        if bad.any():
            faults.append(text)
    if not faults:
        return Verdict("right", ties=tuple(done.ties))
    return Verdict("tie" if done.ties else "wrong", "; ".join(faults), tuple(done.ties))


# -------------------------------------------------------------------------------------------- feeds


def _array(rng: np.random.Generator, shape: list[int], dtype: np.dtype, domain: str) -> np.ndarray:
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        high = 256 if dtype == np.uint8 else 4
        return rng.integers(0 if dtype.kind == "u" else -high, high, shape).astype(dtype)
    x = rng.standard_normal(shape)
    if domain == "zeros":  # a third exact zeros
        x = np.where(rng.random(shape) < 1 / 3, 0.0, x)
    elif domain == "relu":
        x = np.maximum(x, 0)
    elif domain == "grid":  # small integers: attainable thresholds and zeros
        x = rng.integers(-2, 3, shape)
    elif domain == "image":
        x = rng.integers(0, 256, shape) / 255
    return x.astype(dtype)


def make_feeds(
    model: onnx.ModelProto, *, domain: str = "normal", seed: int = 0, batch: int = 1
) -> dict[str, np.ndarray]:
    """Return random inputs; symbolic dimensions become `batch`."""
    rng = np.random.default_rng(seed)
    constants = {t.name for t in model.graph.initializer}
    feeds = {}
    for info in model.graph.input:
        if info.name in constants:
            continue
        kind = info.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else batch for d in kind.shape.dim]
        feeds[info.name] = _array(
            rng, shape, helper.tensor_dtype_to_np_dtype(kind.elem_type), domain
        )
    return feeds


def tie_free_feeds(
    model: onnx.ModelProto,
    *,
    domain: str = "normal",
    seed: int = 0,
    batch: int = 1,
    tries: int = 40,
) -> dict[str, np.ndarray]:
    """Return the inputs of the first seed that meets no tie (if all do, of the last)."""
    model = load(model)
    feeds: dict[str, np.ndarray] = {}
    for attempt in range(tries):
        feeds = make_feeds(model, domain=domain, seed=seed + 1000 * attempt, batch=batch)
        if not ties(model, feeds):
            break
    return feeds
