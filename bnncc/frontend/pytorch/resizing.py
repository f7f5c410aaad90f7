"""Resizing of images, and sampling at positions given by a grid.

Positions are computed as torch does, in float32 where torch uses float32. ONNX's formulas are
mathematically equal, but an index is a rounded number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bnncc.frontend.pytorch.site import Name, Rule, Site, Value
from bnncc.ir.dims import is_static

_POOLS = (1, 2, 3)


def _target(site: Site) -> tuple[Value, list[Any], list[float | None]]:
    """Return the image, and for each axis the target size and the given scale."""
    x = site.value(site.first())
    rank = x.rank - 2
    factors = site.get("scale_factors")
    if factors is None:
        keys = ("scales",) if rank == 1 else ("scales_d", "scales_h", "scales_w")[-rank:]
        factors = [site.get(key) for key in keys]
    factors = list(factors) or [None] * rank
    if len(factors) != rank:
        raise site.refuse(f"{len(factors)} factors for {rank} axes")
    return x, list(site.out.shape[2:]), [f if f and f > 0 else None for f in factors]


def _step(have: int, want: int, factor: float | None) -> np.float32:
    """Return the distance of result pixels in the image."""
    if factor is not None:
        return np.float32(1.0 / factor)
    return np.float32(have) / np.float32(want)


def _places(have: int, want: int, factor: float | None, exact: bool) -> np.ndarray:
    """Return the image pixel that each result pixel copies."""
    if want == have and not exact:
        return np.arange(want)
    if want == 2 * have and not exact:
        return np.arange(want) // 2
    offset = np.float32(0.5 if exact else 0)
    places = (np.arange(want, dtype=np.float32) + offset) * _step(have, want, factor)
    return np.minimum(np.floor(places).astype(np.int64), have - 1)


def _nearest(site: Site, *, exact: bool) -> Name:
    x, sizes, factors = _target(site)
    known = [(h, w) for h, w in zip(x.shape[2:], sizes, strict=True)]
    attrs = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if not all(isinstance(h, int) and isinstance(w, int) for h, w in known):
        if not all(f is not None and f == int(f) for f in factors):
            raise site.refuse("to a dynamic size, by a factor that is not an integer")
        scales = site.const([1, 1, *[f or 1 for f in factors]], "float32")
        return site.emit("Resize", [x, "", scales], mode="nearest", **attrs)
    places = [_places(int(h), int(w), f, exact) for (h, w), f in zip(known, factors, strict=True)]
    times = [max(1, int(w) // int(h)) for h, w in known]
    whole = all(
        np.array_equal(p, np.repeat(np.arange(int(h)), t))
        for p, t, (h, _) in zip(places, times, known, strict=True)
    )
    if whole:
        scales = site.const([1, 1, *times], "float32")
        return site.emit("Resize", [x, "", scales], mode="nearest", **attrs)
    made: Name = x
    for axis, (place, (have, _)) in enumerate(zip(places, known, strict=True), 2):
        if not np.array_equal(place, np.arange(int(have))):
            made = site.emit("Gather", [made, site.ints_const(place.tolist())], axis=axis)
    return made


def _smooth(mode: str, site: Site) -> Name:
    x, sizes, factors = _target(site)
    corners = bool(site.get("align_corners"))
    kind = "align_corners" if corners else "half_pixel"
    attrs: dict[str, Any] = {
        "mode": mode,
        "coordinate_transformation_mode": kind,
        "cubic_coeff_a": -0.75,
    }
    if all(f is not None for f in factors) and not corners:
        scales = site.const([1, 1, *[f or 1 for f in factors]], "float32")
        return site.emit("Resize", [x, "", scales], **attrs)
    if not is_static(sizes) or not isinstance(x.shape[1], int):
        raise site.refuse("to a dynamic size")
    wanted = site.ints_const(list(sizes))
    return site.emit("Resize", [x, "", "", wanted], axes=list(range(2, x.rank)), **attrs)


# ----------------------------------------------------------------------------------- antialiasing


def _triangle(x: float) -> float:
    return max(0.0, 1.0 - abs(x))


def _keys(x: float) -> float:
    """Keys' cubic kernel with a = -0.5, which torch uses with antialiasing only."""
    x, a = abs(x), -0.5
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0


def _mixture(have: int, want: int, factor: float | None, corners: bool, cubic: bool) -> np.ndarray:
    """Return the matrix of weights of image pixels in result pixels."""
    if corners:
        step = (have - 1) / (want - 1) if want > 1 else 0.0
    else:
        step = 1.0 / factor if factor is not None else have / want
    reach = (2.0 if cubic else 1.0) * max(step, 1.0)
    narrow = 1.0 / step if step >= 1 else 1.0
    matrix = np.zeros((want, have))
    for row in range(want):
        center = step * (row + 0.5)
        start = max(int(center - reach + 0.5), 0)
        end = min(int(center + reach + 0.5), have)
        for k in range(start, end):
            matrix[row, k] = (_keys if cubic else _triangle)((k - center + 0.5) * narrow)
        total = matrix[row].sum()
        if total:
            matrix[row] /= total
    return matrix


def _antialiased(site: Site, *, cubic: bool) -> Name:
    x, sizes, factors = _target(site)
    corners = bool(site.get("align_corners"))
    made: Name = x
    for axis in (3, 2):
        have, want = x.shape[axis], sizes[axis - 2]
        if not isinstance(have, int) or not isinstance(want, int):
            raise site.refuse("to a dynamic size")
        matrix = _mixture(have, want, factors[axis - 2], corners, cubic)
        if have == want and np.array_equal(matrix, np.eye(have)):
            continue
        if axis == 3:
            made = site.emit("MatMul", [made, site.const(matrix.T, x.dtype)])
        else:
            made = site.emit("MatMul", [site.const(matrix, x.dtype), made])
    return made


# -------------------------------------------------------------------------------------------- grids


def _grid_sample(site: Site) -> Name:
    x, grid = site.tensor("input"), site.tensor("grid")
    mode = ("linear", "nearest", "cubic")[site.get("interpolation_mode", 0)]
    padding = ("zeros", "border", "reflection")[site.get("padding_mode", 0)]
    if (mode, padding) == ("cubic", "border"):
        return _cubic_border(site, x, grid)
    return site.emit(
        "GridSample", [x, grid], mode=mode, padding_mode=padding,
        align_corners=int(bool(site.get("align_corners"))),
    )  # fmt: skip


def _cubic_border(site: Site, x: Value, grid: Value) -> Name:
    """Sample with each of the 16 pixels taken from the border, if it is outside.

    ONNX Runtime moves the place itself to the border. So the image is given a border of three
    pixels, and places are moved no further than where all 16 pixels are in it.
    """
    sizes = site.sizes(x.shape[-2:], "a dynamic image")
    wide = 3
    pads = [0, 0, wide, wide] * 2
    image = site.emit("Pad", [x, site.ints_const(pads)], mode="edge")
    size = np.array(sizes[::-1], np.float64)  # places are (x, y)
    half = (size - 1) / 2 if site.get("align_corners") else size / 2
    dtype = grid.dtype
    place = site.emit("Mul", [grid, site.const(half, dtype)])
    place = site.emit("Add", [place, site.const((size - 1) / 2, dtype)])
    place = site.emit("Max", [place, site.const(-2, dtype)])
    place = site.emit("Min", [place, site.const(size + 1, dtype)])
    place = site.emit("Add", [place, site.const(wide, dtype)])
    scale = 2 / (size + 2 * wide - 1)
    place = site.emit("Mul", [place, site.const(scale, dtype)])
    place = site.emit("Sub", [place, site.const(1, dtype)])
    return site.emit("GridSample", [image, place], mode="cubic", align_corners=1)


def _affine_grid(site: Site) -> Name:
    sizes = site.shape(site.get("size"))
    corners = int(bool(site.get("align_corners")))
    return site.emit("AffineGrid", [site.tensor("theta"), sizes], align_corners=corners)


# --------------------------------------------------------------------------- adaptive pooling


def adaptive(site: Site, op: str, x: Value, wanted: list[int]) -> Name:
    """Pool to a size that does not divide the image's: each window is gathered.

    Windows are rows times columns, so that one axis is pooled after the other. Sums are divided
    once both are made, as torch does it.
    """
    first = x.rank - len(wanted)
    made: Name = x
    counts: list[tuple[int, np.ndarray]] = []
    for axis, want in enumerate(wanted, first):
        have = x.shape[axis]
        if not isinstance(have, int) or not isinstance(want, int):
            raise site.refuse(f"pools axis {axis}, which is dynamic")
        starts = np.arange(want) * have // want
        ends = -(-(np.arange(want) + 1) * have // want)
        lengths = ends - starts
        width = int(lengths.max())
        places = starts[:, None] + np.arange(width)
        inside = np.arange(width) < lengths[:, None]
        if op == "MaxPool":
            places = np.minimum(places, ends[:, None] - 1)  # a maximum may count one twice
        elif not inside.all():
            places = np.where(inside, places, have)  # a zero behind the last
            pads = np.zeros((2, x.rank), np.int64)
            pads[1, axis] = 1
            made = site.emit("Pad", [made, site.ints_const(pads.reshape(-1).tolist())])
        gathered = site.emit("Gather", [made, site.const(places, "int64")], axis=axis)
        reduce = "ReduceMax" if op == "MaxPool" else "ReduceSum"
        made = site.emit(reduce, [gathered, site.ints_const([axis + 1])], keepdims=0)
        counts.append((x.rank - axis - 1, lengths))
    if op != "MaxPool":
        for behind, lengths in counts:
            count = lengths.reshape(-1, *[1] * behind)
            made = site.emit("Div", [made, site.const(count, x.dtype)])
    return made


_SMOOTH = {
    **{"upsample_linear1d": "linear", "upsample_bilinear2d": "linear"},
    **{"upsample_trilinear3d": "linear", "upsample_bicubic2d": "cubic"},
}
_FORMS = ("vec", "default")

RULES: dict[str, Rule] = {
    **{f"upsample_nearest{k}d.{f}": partial(_nearest, exact=False) for k in _POOLS for f in _FORMS},
    **{
        f"_upsample_nearest_exact{k}d.{f}": partial(_nearest, exact=True)
        for k in _POOLS
        for f in _FORMS
    },
    **{f"{name}.{f}": partial(_smooth, mode) for name, mode in _SMOOTH.items() for f in _FORMS},
    **{f"_upsample_bilinear2d_aa.{f}": partial(_antialiased, cubic=False) for f in _FORMS},
    **{f"_upsample_bicubic2d_aa.{f}": partial(_antialiased, cubic=True) for f in _FORMS},
    **{f"{name}.default": _grid_sample for name in ("grid_sampler", "grid_sampler_2d")},
    "affine_grid_generator.default": _affine_grid,
    "grid_sampler_3d.default": _grid_sample,
}
"""What becomes of each operator."""
