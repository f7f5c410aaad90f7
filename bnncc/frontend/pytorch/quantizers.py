"""Quantizers of PyTorch's quantization-aware training, as arithmetic.

    fake_quantize_per_*        ->  Mul by 1 / scale, Round, Add, Clip, Sub, Mul
    quantize_per_*             ->  Mul by 1 / scale, Round, Add, Clip, Cast
    dequantize_per_*           ->  Cast, Sub, Mul

``QuantizeLinear`` divides, which rounds differently. Scales are Python numbers or tensors; for
numbers, ``fake_quantize`` takes the reciprocal in float32, ``quantize_per_tensor`` in float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bnncc.frontend.pytorch.program import Ref
from bnncc.frontend.pytorch.site import Name, Rule, Site, Value

_DECOMPOSED = "torch.ops.quantized_decomposed."
_FLOAT = "float32"


def _parameter(site: Site, given: Any, rank: int, axis: int | None) -> Name:
    """Return a scale or zero point as float32 that broadcasts along `axis`."""
    if not isinstance(given, Ref):
        return site.const(given, _FLOAT)
    held = site.value(given)
    shape = [] if axis is None else [-1 if k == axis else 1 for k in range(rank)]
    return site.cast(site.reshape(held, shape), _FLOAT, held.dtype)


def _reciprocal(site: Site, scale: Name, given: Any) -> Name:
    if isinstance(given, Ref):
        return site.emit("Div", [site.const(1, _FLOAT), scale])
    double = site.call.target.startswith(_DECOMPOSED)
    one = np.float64(1) / np.float64(given) if double else np.float32(1) / np.float32(given)
    return site.const(one, _FLOAT)


def _whole(site: Site, x: Name, scale: Name, zero: Name, given: Any) -> Name:
    """Return the integers of a quantizer as float32."""
    scaled = site.emit("Mul", [x, _reciprocal(site, scale, given)])
    shifted = site.emit("Add", [site.emit("Round", [scaled]), zero])
    limits = [_limit(site, key) for key in ("quant_min", "quant_max")]
    return site.emit("Clip", [shifted, *limits])


def _limit(site: Site, key: str) -> Name:
    given = site.get(key)
    return _parameter(site, given, 0, None) if isinstance(given, Ref) else site.const(given, _FLOAT)


def _parts(site: Site, per_channel: bool) -> tuple[Value, Any, Name, Name]:
    """Return data, the scale as given, and scale and zero point as tensors."""
    x = site.value(site.first())
    axis = site.axis("axis" if site.has("axis") else "ch_axis", x.rank) if per_channel else None
    scale = site.get("scales" if site.has("scales") else "scale")
    zero = site.get("zero_points" if site.has("zero_points") else "zero_point", 0)
    zero = 0 if zero is None else zero
    return x, scale, _parameter(site, scale, x.rank, axis), _parameter(site, zero, x.rank, axis)


def _fake(per_channel: bool, site: Site) -> Name:
    x, given, scale, zero = _parts(site, per_channel)
    data = site.cast(x, _FLOAT)
    whole = _whole(site, data, scale, zero, given)
    made = site.emit("Mul", [site.emit("Sub", [whole, zero]), scale])
    return site.cast(made, site.out.dtype, _FLOAT)  # the mask, for gradients, is omitted


def _observed(site: Site) -> Name | list[Any]:
    """Return the result of an observing quantizer module after observation has been disabled.

    Torch computes its scale from the observed range whenever it quantizes.
    """
    for key, hint in (("observer_on", "disable_observer"), ("fake_quant_on", "enable_fake_quant")):
        held = site.stored(key)
        if held is None or int(held.reshape(-1)[0]) != (key == "fake_quant_on"):
            raise site.refuse(
                f"`{key}` is not {int(key == 'fake_quant_on')}",
                hint=f"call model.apply(torch.ao.quantization.{hint}) before torch.export.export",
            )
    lowest = site.stored("running_min")
    if lowest is None or not np.isfinite(lowest).all():
        raise site.refuse("has seen no data", hint="run the model on data, observing, first")
    return _fake(bool(site.get("per_row_fake_quant", False)), site)


def _quantize(per_channel: bool, site: Site) -> Name:
    x, given, scale, zero = _parts(site, per_channel)
    whole = _whole(site, site.cast(x, _FLOAT), scale, zero, given)
    return site.cast(whole, site.out.dtype, _FLOAT)


def _dequantize(per_channel: bool, site: Site) -> Name:
    x, _, scale, zero = _parts(site, per_channel)
    whole = site.emit("Sub", [site.cast(x, _FLOAT), zero])
    return site.cast(site.emit("Mul", [whole, scale]), site.out.dtype, _FLOAT)


_FAKE = "fake_quantize_per_"
RULES: dict[str, Rule] = {
    f"{_FAKE}tensor_affine.default": partial(_fake, False),
    f"{_FAKE}tensor_affine.tensor_qparams": partial(_fake, False),
    f"{_FAKE}tensor_affine_cachemask.default": partial(_fake, False),
    f"_{_FAKE}tensor_affine_cachemask_tensor_qparams.default": partial(_fake, False),
    f"{_FAKE}channel_affine.default": partial(_fake, True),
    f"{_FAKE}channel_affine_cachemask.default": partial(_fake, True),
    "fused_moving_avg_obs_fake_quant.default": _observed,
    **{
        f"{_DECOMPOSED}{kind}quantize_per_tensor.{form}": partial(rule, False)
        for kind, rule in (("", _quantize), ("de", _dequantize))
        for form in ("default", "tensor", "tensor2")
    },
    f"{_DECOMPOSED}quantize_per_channel.default": partial(_quantize, True),
    f"{_DECOMPOSED}dequantize_per_channel.default": partial(_dequantize, True),
}
"""Rules, by operator."""
