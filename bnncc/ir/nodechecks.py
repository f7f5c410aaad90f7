"""Checks of attributes and shapes of single nodes, which onnx's inference does not make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bnncc.errors import ModelError, ShapeError, UnsupportedOp
from bnncc.ir.graph import Graph, Node, TensorType
from bnncc.ir.shaperules import at_most, broadcast, too_short


def check_node(node: Node, graph: Graph) -> None:
    """Check one node, whose inputs' types are known.

    Parameters
    ----------
    node : Node
        In canonical form.
    graph : Graph
        Types and constants.

    Raises
    ------
    ShapeError
        If shapes or attributes are inconsistent.
    ModelError
        If dtypes are inconsistent.
    """
    rule = _RULES.get(node.op)
    if rule is not None:
        kinds = [graph.types[i] if i else None for i in node.inputs]
        rule(node, kinds, graph, node.where)


def _positive(values: Sequence[int], count: int, what: str, where: str) -> None:
    if len(values) != count:
        raise ShapeError(f"{where}: `{what}` is {list(values)}, expected {count} values")
    if any(v <= 0 for v in values):
        raise ShapeError(f"{where}: `{what}` is {list(values)}, expected positive values")


def _same_float(kinds: Sequence[TensorType | None], where: str) -> None:
    found = [k.dtype for k in kinds if k is not None]
    if len(set(found)) > 1:
        raise ModelError(f"{where}: operands have types {', '.join(found)}; expected the same")


def _window(node: Node, x: TensorType, where: str) -> None:
    """Check the sliding window of a Conv or pool."""
    attrs = node.attrs
    spatial = x.shape[2:]
    rank = len(spatial)
    if rank < 1:
        raise ShapeError(
            f"{where}: input has shape {list(x.shape)}, expected (batch, channels, spatial...)"
        )
    kernel = attrs["kernel_shape"]
    _positive(kernel, rank, "kernel_shape", where)
    _positive(attrs["strides"], rank, "strides", where)
    dilations = attrs.get("dilations") or [1] * rank
    _positive(dilations, rank, "dilations", where)
    if attrs["auto_pad"] not in ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"):
        raise ModelError(f"{where}: `auto_pad` is {attrs['auto_pad']!r}")
    pads = attrs.get("pads") or [0] * 2 * rank
    if len(pads) != 2 * rank or any(p < 0 for p in pads):
        raise ShapeError(
            f"{where}: `pads` is {list(pads)}, expected {2 * rank} values of 0 or more"
        )
    for axis in range(rank):
        size = spatial[axis]
        span = (kernel[axis] - 1) * dilations[axis] + 1
        begin, end = pads[axis], pads[axis + rank]
        explicit = attrs["auto_pad"] in ("NOTSET", "VALID")
        # A window of ceil_mode extends beyond the end, by less than a stride.
        more = attrs["strides"][axis] - 1 if attrs.get("ceil_mode") else 0
        if isinstance(size, int) and explicit and size + begin + end + more < span:
            raise ShapeError(
                f"{where}: kernel spans {span}, larger than the padded input of "
                f"{size + begin + end} on axis {axis + 2}"
            )
        if node.op != "Conv" and max(begin, end) >= span:
            raise ShapeError(
                f"{where}: pads {begin}, {end} on axis {axis + 2} are not smaller than the "
                f"kernel's {span}"
            )


def _conv(node: Node, kinds: list[Any], graph: Graph, where: str) -> None:
    x, w = kinds[0], kinds[1]
    _same_float(kinds, where)
    if len(x.shape) < 3 or len(w.shape) != len(x.shape):
        raise ShapeError(
            f"{where}: input {list(x.shape)} and weight {list(w.shape)} do not fit together"
        )
    if not w.static:
        raise ShapeError(f"{where}: weight has shape {list(w.shape)}, expected fixed sizes")
    if 0 in w.shape:
        raise ShapeError(f"{where}: weight has shape {list(w.shape)}, expected sizes of 1 or more")
    units, depth = int(w.shape[0]), int(w.shape[1])
    group, channels = node.attrs["group"], x.shape[1]
    if not isinstance(channels, int):
        raise ShapeError(
            f"{where}: the number of its input channels is not known (`{channels}`)",
            hint="give the shape: --input-shape NAME:1x3x224x224",
        )
    if group <= 0:
        raise ShapeError(f"{where}: `group` is {group}, expected 1 or more")
    if isinstance(channels, int) and channels % group:
        raise ShapeError(
            f"{where}: `group` is {group} but {channels} input channels are not a multiple of it"
        )
    if units % group:
        raise ShapeError(
            f"{where}: `group` is {group} but {units} output channels are not a multiple of it"
        )
    if isinstance(channels, int) and channels != depth * group:
        raise ShapeError(
            f"{where}: input has {channels} channels, expected {depth * group} for weight "
            f"{list(w.shape)} and group {group}"
        )
    if list(node.attrs["kernel_shape"]) != list(w.shape[2:]):
        raise ShapeError(
            f"{where}: `kernel_shape` is {node.attrs['kernel_shape']}, the weight's is "
            f"{list(w.shape[2:])}"
        )
    bias = kinds[2] if len(kinds) > 2 else None
    if bias is not None and bias.shape != (units,):
        raise ShapeError(f"{where}: bias has shape {list(bias.shape)}, expected [{units}]")
    _window(node, x, where)


def _pool(node: Node, kinds: list[Any], graph: Graph, where: str) -> None:
    _window(node, kinds[0], where)
    if node.op == "MaxPool" and any(node.outputs[1:]):
        raise UnsupportedOp(f"{where}: its output `Indices` is not supported")


def _gemm(node: Node, kinds: list[Any], graph: Graph, where: str) -> None:
    a, b = kinds[0], kinds[1]
    _same_float(kinds, where)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise ShapeError(
            f"{where}: operands have shapes {list(a.shape)} and {list(b.shape)}, expected matrices"
        )
    rows, inner = a.shape[::-1] if node.attrs["transA"] else a.shape
    other, units = b.shape[::-1] if node.attrs["transB"] else b.shape
    if inner != other:
        raise ShapeError(f"{where}: inner sizes {inner} and {other} differ")
    c = kinds[2] if len(kinds) > 2 else None
    if c is not None and broadcast([c.shape, (rows, units)], where) != (rows, units):
        raise ShapeError(f"{where}: C of shape {list(c.shape)} does not fit [{rows}, {units}]")


def _matmul(node: Node, kinds: list[Any], graph: Graph, where: str) -> None:
    a, b = kinds[0], kinds[1]
    _same_float(kinds, where)
    if not a.shape or not b.shape:
        raise ShapeError(f"{where}: an operand is a scalar")
    inner = b.shape[-2] if len(b.shape) > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise ShapeError(f"{where}: inner sizes of {list(a.shape)} and {list(b.shape)} differ")


def _batch_norm(node: Node, kinds: list[Any], graph: Graph, where: str) -> None:
    x = kinds[0]
    if len(x.shape) < 2:
        raise ShapeError(f"{where}: input has shape {list(x.shape)}, expected two axes or more")
    channels = x.shape[1]
    for label, kind in zip(("scale", "B", "mean", "var"), kinds[1:5], strict=False):
        if kind is not None and isinstance(channels, int) and kind.shape != (channels,):
            raise ShapeError(
                f"{where}: `{label}` has shape {list(kind.shape)}, expected [{channels}]"
            )
    epsilon = float(node.attrs["epsilon"])
    variance = graph.constants.get(node.inputs[4])
    if not np.isfinite(epsilon):
        raise ModelError(f"{where}: `epsilon` is {epsilon}")
    if variance is not None and variance.size and float(variance.min()) + epsilon <= 0:
        raise ModelError(f"{where}: variance {float(variance.min())} is not positive")


def checked_axis(axis: int, rank: int, where: str, key: str = "axis") -> int:
    """Return an axis counted from the front.

    Raises
    ------
    ShapeError
        If the tensor, which has `rank` axes, does not have it.
    """
    if not -rank <= axis < rank:
        raise ShapeError(f"{where}: `{key}` is {axis}, the input has {rank} axes")
    return axis % rank


def _axis(node: Node, kinds: list[Any], graph: Graph, where: str) -> None:
    checked_axis(node.attrs.get("axis", 0), len(kinds[0].shape), where)


def _axes(node: Node, kinds: list[Any], graph: Graph, where: str) -> None:
    axes = graph.constants.get(node.input(1))
    rank = len(kinds[0].shape)
    if node.op == "Unsqueeze" and axes is not None:
        rank += axes.size
    if axes is not None:
        plain = [a + rank if a < 0 else a for a in axes.reshape(-1).tolist()]
        if any(not 0 <= a < rank for a in plain) or len(set(plain)) != len(plain):
            raise ShapeError(f"{where}: axes {axes.tolist()} do not fit {rank} axes")


def _transpose(node: Node, kinds: list[Any], graph: Graph, where: str) -> None:
    if sorted(node.attrs["perm"]) != list(range(len(kinds[0].shape))):
        raise ShapeError(
            f"{where}: `perm` is {node.attrs['perm']}, "
            f"expected a permutation of {len(kinds[0].shape)} axes"
        )


def _gather(node: Node, kinds: list[Any], graph: Graph, where: str) -> None:
    _axis(node, kinds, graph, where)
    size = kinds[0].shape[node.attrs.get("axis", 0)]
    index = graph.constants.get(node.inputs[1])
    if index is None or not index.size:
        return
    if not isinstance(size, int):
        needed = max(-int(index.min()), int(index.max()) + 1)
        if not at_most(needed, size, graph):
            raise too_short(graph, needed, size, where)
    elif int(index.min()) < -size or int(index.max()) >= size:
        raise ShapeError(f"{where}: an index is outside of the axis of size {size}")


def _block(node: Node, kinds: list[Any], graph: Graph, where: str) -> None:
    x = kinds[0]
    size = node.attrs["blocksize"]
    if size <= 0 or len(x.shape) != 4:
        raise ShapeError(f"{where}: `blocksize` is {size} for an input of shape {list(x.shape)}")
    cut = x.shape[1:2] if node.op == "DepthToSpace" else x.shape[2:]
    step = size * size if node.op == "DepthToSpace" else size
    if any(isinstance(d, int) and d % step for d in cut):
        raise ShapeError(f"{where}: shape {list(x.shape)} is not a multiple of block size {size}")


def _split(node: Node, kinds: list[Any], graph: Graph, where: str) -> None:
    _axis(node, kinds, graph, where)
    sizes = graph.constants.get(node.input(1))
    size = kinds[0].shape[node.attrs.get("axis", 0)]
    if sizes is None:
        return
    if sizes.size != len(node.outputs) or (sizes < 0).any():
        raise ShapeError(f"{where}: sizes {sizes.tolist()} for {len(node.outputs)} outputs")
    if isinstance(size, int) and int(sizes.sum()) != size:
        raise ShapeError(f"{where}: sizes {sizes.tolist()} do not add up to {size}")


_Rule = Callable[[Node, list[Any], Graph, str], None]
_RULES: dict[str, _Rule] = {
    "ArgMax": _axis,
    "ArgMin": _axis,
    "AveragePool": _pool,
    "BatchNormalization": _batch_norm,
    "Concat": _axis,
    "Conv": _conv,
    "DepthToSpace": _block,
    "Gather": _gather,
    "Gemm": _gemm,
    "LogSoftmax": _axis,
    "LpPool": _pool,
    "MatMul": _matmul,
    "MaxPool": _pool,
    "Softmax": _axis,
    "SpaceToDepth": _block,
    "Split": _split,
    "Squeeze": _axes,
    "Transpose": _transpose,
    "Unsqueeze": _axes,
    **{
        f"Reduce{k}": _axes
        for k in ("Max", "Mean", "Min", "Prod", "L1", "L2", "Sum", "SumSquare", "LogSum")
    },
}
