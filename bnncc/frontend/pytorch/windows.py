"""Unfolding and folding of windows, and positions of maxima."""

from __future__ import annotations

import math

import numpy as np

from bnncc.frontend.pytorch.products import batched
from bnncc.frontend.pytorch.site import Name, Rule, Site, Value


def _window(site: Site) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return kernel, dilation, padding and stride of two axes."""
    return (
        site.ints("kernel_size", 2, 1), site.ints("dilation", 2, 1),
        site.ints("padding", 2, 0), site.ints("stride", 2, 1),
    )  # fmt: skip


def _im2col(site: Site) -> Name:
    x = site.tensor("self")
    kernel, dilation, padding, stride = _window(site)
    channels, *sizes = site.sizes(x.shape[-3:], "its image is dynamic")

    def layer(data: Name) -> Name:
        if any(padding):
            pads = [0, 0, *padding, 0, 0, *padding]
            data = site.emit("Pad", [data, site.ints_const(pads)])
        counts = []
        for k in (0, 1):  # [N, C, kh, rows, kw, columns]
            reach = dilation[k] * (kernel[k] - 1)
            count = (sizes[k] + 2 * padding[k] - reach - 1) // stride[k] + 1
            places = np.arange(kernel[k])[:, None] * dilation[k] + np.arange(count) * stride[k]
            data = site.emit("Gather", [data, site.const(places, "int64")], axis=2 + 2 * k)
            counts.append(count)
        turned = site.transpose(data, [0, 1, 2, 4, 3, 5])
        return site.reshape(turned, [0, channels * math.prod(kernel), math.prod(counts)])

    return batched(site, x, 2, layer)


def _col2im(site: Site) -> Name:
    """Sum overlapping windows: a transposed convolution with one channel per tap."""
    x = site.tensor("self")
    kernel, dilation, padding, stride = _window(site)
    size = site.ints("output_size", 2, 1)
    counts = [
        (size[k] + 2 * padding[k] - dilation[k] * (kernel[k] - 1) - 1) // stride[k] + 1
        for k in (0, 1)
    ]
    taps = math.prod(kernel)
    if not isinstance(x.shape[-2], int):
        raise site.refuse("its channels are dynamic")
    channels = x.shape[-2] // taps
    weight = np.tile(np.eye(taps).reshape(taps, 1, *kernel), (channels, 1, 1, 1))

    def layer(data: Name) -> Name:
        grid = site.reshape(data, [0, 0, *counts])
        whole = [(counts[k] - 1) * stride[k] + dilation[k] * (kernel[k] - 1) + 1 for k in (0, 1)]
        made = site.emit(
            "ConvTranspose", [grid, site.const(weight, x.dtype)], strides=stride,
            dilations=dilation, group=channels, kernel_shape=kernel, pads=[0] * 4,
        )  # fmt: skip
        behind = [size[k] + padding[k] - whole[k] for k in (0, 1)]
        pads = [0, 0, *(-p for p in padding), 0, 0, *behind]
        return site.emit("Pad", [made, site.ints_const(pads)]) if any(pads) else made

    return batched(site, x, 1, layer)


def _unfold(site: Site) -> Name:
    """Write ``x.unfold(axis, size, step)``: windows along an axis become a new last axis."""
    x = site.tensor("self")
    axis = site.axis("dimension", x.rank)
    have, size, step = site.known(x.shape[axis], axis), site.get("size"), site.get("step")
    places = np.arange((have - size) // step + 1)[:, None] * step + np.arange(size)
    made = site.emit("Gather", [x, site.const(places, "int64")], axis=axis)
    perm = [k for k in range(x.rank + 1) if k != axis + 1]
    return site.transpose(made, [*perm, axis + 1])


def positions(site: Site, x: Value, rank: int, made: Name) -> Name:
    """Convert positions of maxima from ONNX's indices in the tensor to indices in an image."""
    sizes = site.sizes(x.shape[-rank:], "places of maxima in a dynamic image")
    return site.emit("Mod", [made, site.const(math.prod(sizes), "int64")])


def _unpool(site: Site) -> Name:
    x, indices = site.tensor("self"), site.tensor("indices")
    size = site.get("output_size")
    rank = len(size)
    site.sizes([*size, *x.shape[-rank:]], "to or from a dynamic image")
    lead = [0] * (x.rank - rank)
    plane = math.prod(size)
    flat, places = (site.reshape(v, [*lead, -1]) for v in (x, indices))
    zeros: Name = site.filled(site.ints_const([1] * len(lead) + [plane]), 0, x.dtype)
    if any(isinstance(n, str) for n in x.shape):
        shape = site.emit(
            "Concat",
            [site.emit("Shape", [x], start=0, end=len(lead)), site.ints_const([plane])],
            axis=0,
        )
    else:
        shape = site.ints_const([*(int(n) for n in x.shape[: len(lead)]), plane])
    zeros = site.emit("Expand", [zeros, shape])
    made = site.emit("ScatterElements", [zeros, places, flat], axis=len(lead))
    return site.reshape(made, [*lead, *size])


RULES: dict[str, Rule] = {
    **{f"max_unpool{k}d.default": _unpool for k in (2, 3)},
    "col2im.default": _col2im,
    "im2col.default": _im2col,
    "unfold.default": _unfold,
}
"""Rules, by operator."""
