"""Kernels of a product of two activations: the second one is laid out as weights first."""

from __future__ import annotations

import numpy as np

from bnncc.ir.graph import Dim, Node
from bnncc.topi_binary.layout import words
from bnncc.topi_binary.spec import BinaryConv2d, WeightsOfRows
from bnncc.transform.kernel_group import Group
from bnncc.transform.physical import Physical, Planes


def start_product(node: Node, physical: Physical) -> Group:
    """Start the group of a `products.BINARY_PRODUCT`.

    Parameters
    ----------
    node : Node
        The product.
    physical : Physical
        The graph being built; gets what makes weights of the second operand.

    Returns
    -------
    Group
        A convolution of one image for each matrix.
    """
    a = node.attrs
    left, right = (physical.bits(i) for i in node.inputs)
    batch, rows, columns = a["batch"], int(a["rows"]), int(a["columns"])
    depth = int(physical.source.types[node.inputs[0]].shape[1])
    spec = BinaryConv2d(
        batch, 1, rows, depth, columns, (1, 1), mode=a["mode"], ternary=left.zero is not None,
        per_image=True, weight_zeros=right.zero is not None,
    )  # fmt: skip
    data = [left.sign, left.zero] if left.zero else [left.sign]
    inputs = [physical.reshape(p, (batch, 1, rows, words(depth))) for p in data]
    inputs += _weights(physical, right, WeightsOfRows(batch, columns, depth, a["mode"] == "and"))
    scale, bias = np.full(columns, a["scale"]), np.zeros(columns)
    return Group(spec, inputs, scale, bias, node.outputs[0], node.name, node.covers, rank=2)


def _weights(physical: Physical, planes: Planes, spec: WeightsOfRows) -> list[str]:
    """Return weights: sign plane, zero plane, start values."""
    shape: tuple[Dim, ...] = (spec.n, spec.rows, words(spec.channels))
    signs = [physical.graph.fresh(f"{planes.sign}.{k}") for k in ("weight", "start")]
    signs = signs[: 1 + spec.count]
    physical.kernel(spec, [physical.reshape(planes.sign, shape)], signs, planes.sign)
    if planes.zero is None:
        return signs
    zero = physical.graph.fresh(f"{planes.zero}.weight")
    plain = WeightsOfRows(spec.n, spec.rows, spec.channels)
    physical.kernel(plain, [physical.reshape(planes.zero, shape)], [zero], planes.zero)
    return [signs[0], zero, *signs[1:]]
