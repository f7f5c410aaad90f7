"""Normalizations, pooling and padding."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import ml_dtypes

from bnncc.frontend.pytorch import resizing, windows
from bnncc.frontend.pytorch.products import batched
from bnncc.frontend.pytorch.site import Name, Rule, Site, Value

# -------------------------------------------------------------------------------------- normalizing


def _batch_norm(site: Site) -> Name:
    x = site.tensor("input")
    if not site.has("running_mean") and site.get("training"):
        return _batch_norm_of_batch(site, x)
    site.refuse_training("training", "use_input_stats")
    if not site.has("running_mean") or not site.has("running_var"):
        raise site.refuse(
            "has no running statistics, so it depends on the rest of the batch",
            hint="build the layer with track_running_stats=True",
        )
    mean, variance = site.tensor("running_mean"), site.tensor("running_var")
    channels = mean.shape[0]
    ones, zeros = (site.full([int(channels)], k, mean.dtype) for k in (1, 0))
    scale = site.optional("weight") or ones
    bias = site.optional("bias") or zeros
    return site.emit(
        "BatchNormalization", [x, scale, bias, mean, variance], epsilon=float(site.get("eps", 1e-5))
    )


def _batch_norm_of_batch(site: Site, x: Value) -> Name:
    """Emit a layer without running statistics, which uses those of its batch, also in eval mode."""
    axes = site.ints_const([k for k in range(x.rank) if k != 1])
    mean = site.emit("ReduceMean", [x, axes], keepdims=1)
    off = site.emit("Sub", [x, mean])
    variance = site.emit("ReduceMean", [site.emit("Mul", [off, off]), axes], keepdims=1)
    eps = site.const(float(site.get("eps", 1e-5)), x.dtype)
    made = site.emit("Div", [off, site.emit("Sqrt", [site.emit("Add", [variance, eps])])])
    return _per_channel(site, made, x.rank)


def _per_channel(site: Site, made: Name, rank: int) -> Name:
    """Apply ``weight`` and ``bias`` after a normalization, if they are given."""
    for op, key in (("Mul", "weight"), ("Add", "bias")):
        if site.has(key):
            factor = site.reshape(site.tensor(key), [-1, *[1] * (rank - 2)])
            made = site.emit(op, [made, factor])
    return made


def _layer_norm(site: Site) -> Name:
    x, shape = site.tensor("input"), site.get("normalized_shape")
    dtype = x.dtype
    scale = site.optional("weight") or site.full(shape, 1, dtype)
    return site.emit(
        "LayerNormalization", [x, scale, site.optional("bias")],
        axis=x.rank - len(shape), epsilon=float(site.get("eps", 1e-5)),
    )  # fmt: skip


def _group_norm(site: Site) -> Name:
    x = site.value(site.first())
    groups, shape = site.get("num_groups", site.get("group")), site.shape_of(x)
    ones, zeros = (site.full([groups], k, x.dtype) for k in (1, 0))
    eps = float(site.get("eps", 1e-5))
    flat = site.reshape(x, [0, groups, -1])
    made = site.emit("InstanceNormalization", [flat, ones, zeros], epsilon=eps)
    return _per_channel(site, site.emit("Reshape", [made, shape]), x.rank)


def _instance_norm(site: Site) -> Name:
    x = site.tensor("input")
    if not site.get("use_input_stats"):
        return _batch_norm(site)
    channels = int(x.shape[1])
    scale = site.optional("weight") or site.full([channels], 1, x.dtype)
    bias = site.optional("bias") or site.full([channels], 0, x.dtype)
    return site.emit("InstanceNormalization", [x, scale, bias], epsilon=float(site.get("eps")))


def _rms_norm(site: Site) -> Name:
    x, shape = site.tensor("input"), site.get("normalized_shape")
    axes = site.ints_const([*range(x.rank - len(shape), x.rank)])
    eps = site.get("eps")
    eps = float(ml_dtypes.finfo(x.dtype).eps) if eps is None else eps
    mean = site.emit("ReduceMean", [site.emit("Mul", [x, x]), axes], keepdims=1)
    root = site.emit("Sqrt", [site.emit("Add", [mean, site.const(eps, x.dtype)])])
    made = site.emit("Div", [x, root])
    return site.emit("Mul", [made, site.tensor("weight")]) if site.has("weight") else made


def _weight_norm(site: Site) -> list[Any]:
    """Return weights with a given norm along all axes but one, or along all."""
    v, g, axis = site.tensor("v"), site.tensor("g"), site.get("dim", 0)
    axes = [k for k in range(v.rank) if axis == -1 or k != axis % v.rank]
    norm = site.emit("ReduceL2", [v, site.ints_const(axes)], keepdims=int(axis != -1))
    return [site.emit("Mul", [v, site.emit("Div", [g, norm])]), norm]


def _softmax(op: str, site: Site) -> Name:
    x = site.tensor("self")
    data = site.cast(x, site.out.dtype)
    return site.emit(op, [data], axis=site.axis("dim", x.rank, -1))


# -------------------------------------------------------------------------------------------- pools


def _max_pool(site: Site) -> list[Any]:
    """Write max-pooling, with the positions of the maxima if they are used."""
    x = site.tensor("self")
    rank = _pool_rank(site)
    kernel = site.ints("kernel_size", rank, 1)
    data: Name = x
    zero = site.ints_const([0])
    if x.rank == rank + 1:
        data = site.emit("Unsqueeze", [x, zero])
    results = site.emit_many(
        "MaxPool", [data], 2 if any(site.call.outputs[1:]) else 1, kernel_shape=kernel,
        strides=site.ints("stride", rank, kernel), pads=site.ints("padding", rank, 0) * 2,
        dilations=site.ints("dilation", rank, 1), ceil_mode=int(site.get("ceil_mode", False)),
    )  # fmt: skip
    made: list[Name] = [*results]
    if len(made) > 1:
        made[1] = windows.positions(site, x, rank, results[1])
    if x.rank == rank + 1:
        made = [site.emit("Squeeze", [m, zero]) for m in made]
    return made


def _pool_rank(site: Site) -> int:
    return int(site.call.target.partition("pool")[2][0])


def _average_pool(site: Site) -> Name:
    x = site.tensor("self")
    rank = _pool_rank(site)
    kernel = site.ints("kernel_size", rank, 1)
    strides, padding = site.ints("stride", rank, kernel), site.ints("padding", rank, 0)
    divisor, ceil = site.get("divisor_override"), int(site.get("ceil_mode", False))
    whole = divisor is not None or site.get("count_include_pad", True)
    pads = padding * 2
    value = x
    if divisor is not None and ceil:  # windows beyond the padding contain zeros
        have, want = x.shape[-rank:], site.out.shape[-rank:]
        site.sizes((*have, *want), "of a dynamic image, with both ceil_mode and divisor_override")
        behind = [
            max((int(w) - 1) * s + k - int(h) - p, 0)
            for w, s, k, h, p in zip(want, strides, kernel, have, padding, strict=True)
        ]
        lead = [0] * (x.rank - rank)
        padded = site.emit("Pad", [x, site.ints_const([*lead, *padding, *lead, *behind])])
        value, pads, ceil = Value(padded, x.dtype, x.shape), [0] * 2 * rank, 0
    made = batched(
        site, value, rank,
        lambda data: site.emit(
            "AveragePool", [data], kernel_shape=kernel, strides=strides, pads=pads,
            count_include_pad=int(whole), ceil_mode=ceil,
        ),
    )  # fmt: skip
    if divisor is None:
        return made
    return site.emit("Mul", [made, site.const(math.prod(kernel) / divisor, x.dtype)])


def _adaptive(op: str, site: Site) -> Name:
    """Write pooling to a given size."""
    x = site.tensor("self")
    rank = _pool_rank(site)
    wanted = site.get("output_size")
    wanted = wanted if isinstance(wanted, list) else [wanted]
    wanted = wanted * rank if len(wanted) == 1 else wanted
    if all(n == 1 for n in wanted) and x.rank == rank + 2:
        return site.emit(f"Global{op}", [x])
    sizes = x.shape[-rank:]
    kernel = []
    for have, want in zip(sizes, wanted, strict=True):
        if not isinstance(have, int) or not isinstance(want, int):
            raise site.refuse(f"pools {list(sizes)} to {wanted}, which is dynamic")
        if have % want:
            return resizing.adaptive(site, op, x, wanted)
        kernel.append(have // want)
    return batched(
        site, x, rank, lambda data: site.emit(op, [data], kernel_shape=kernel, strides=kernel)
    )


# --------------------------------------------------------------------------------------------- pads


def _pad(site: Site) -> Name:
    x, given = site.tensor("self"), site.get("pad", site.get("padding"))
    mode = site.get("mode", "constant")
    mode = next((m for m in ("reflection", "replication") if m in site.call.target), mode)
    modes = {
        **{"constant": "constant", "reflect": "reflect", "reflection": "reflect"},
        **{"replicate": "edge", "replication": "edge", "circular": "wrap"},
    }
    if mode not in modes or len(given) % 2 or len(given) > 2 * x.rank:
        raise site.refuse(f"mode `{mode}` with {len(given)} sizes")
    if not any(site.sizes(given, "its sizes are dynamic")):
        return x
    rank, count = x.rank, len(given) // 2
    front, back = [0] * rank, [0] * rank
    for k in range(count):  # from the last axis on
        front[rank - 1 - k], back[rank - 1 - k] = given[2 * k : 2 * k + 2]
    value = site.const(site.get("value") or 0, x.dtype) if mode == "constant" else ""
    return site.emit("Pad", [x, site.ints_const([*front, *back]), value], mode=modes[mode])


_POOLS = (1, 2, 3)
RULES: dict[str, Rule] = {
    **dict.fromkeys(("batch_norm.default", "native_batch_norm.default"), _batch_norm),
    "_native_batch_norm_legit_no_training.default": _batch_norm,
    **dict.fromkeys(("layer_norm.default", "native_layer_norm.default"), _layer_norm),
    **dict.fromkeys(("group_norm.default", "native_group_norm.default"), _group_norm),
    **{f"max_pool{k}d.default": _max_pool for k in _POOLS},
    **{f"max_pool{k}d_with_indices.default": _max_pool for k in _POOLS},
    **{f"avg_pool{k}d.default": _average_pool for k in _POOLS},
    **{
        f"{u}adaptive_avg_pool{k}d.default": partial(_adaptive, "AveragePool")
        for k in _POOLS
        for u in ("", "_")
    },
    **{f"adaptive_max_pool{k}d.default": partial(_adaptive, "MaxPool") for k in _POOLS},
    **dict.fromkeys(("softmax.int", "_softmax.default"), partial(_softmax, "Softmax")),
    **dict.fromkeys(("log_softmax.int", "_log_softmax.default"), partial(_softmax, "LogSoftmax")),
    **dict.fromkeys(("pad.default", "constant_pad_nd.default"), _pad),
    **{f"{name}_pad{k}d.default": _pad for name in ("reflection", "replication") for k in _POOLS},
    **dict.fromkeys(("_weight_norm.default", "_weight_norm_interface.default"), _weight_norm),
    "instance_norm.default": _instance_norm,
    "rms_norm.default": _rms_norm,
}
