"""Random arguments to time a kernel with; a bundle's runner uses this file, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bnncc.ir.dims import evaluated

Array = np.ndarray[Any, Any]


def filled(rng: np.random.Generator, array: Array) -> Array:
    """Fill an array: normally distributed floats, any packed bits, and whole bytes."""
    kind = array.dtype.kind
    if kind == "f":
        array[...] = rng.standard_normal(array.shape, dtype=np.float32)
    elif kind == "b":
        array[...] = rng.integers(0, 2, array.shape)
    elif array.dtype == np.uint32:  # packed bits
        array[...] = rng.integers(0, 2**32, array.shape, dtype=np.uint32)
    else:
        low = 0 if kind == "u" else -128
        array[...] = rng.integers(low, low + 256, array.shape)
    return array


def arguments(
    kernel: Mapping[str, Any],
    seed: int,
    sizes: Mapping[str, int],
    empty: Callable[[tuple[int, ...], str], Array],
) -> list[Any]:
    """Return random arguments of a kernel.

    Parameters
    ----------
    kernel : mapping
        Its entry in a report: ``args``, ``zero_plane_args``, and ``sizes`` if it takes numbers.
    seed : int
        Same seed, same arguments.
    sizes : mapping of str to int
        Of symbolic dimensions; 1 where not given.
    empty : callable
        Makes an array of a shape and dtype.

    Returns
    -------
    list of ndarray and int
        Inputs and outputs. Integers may be indices or divisors, so they are 0, or 1 for a kernel
        that checks divisors.
    """
    rng = np.random.default_rng(seed)
    args: list[Any] = []
    for position, arg in enumerate(kernel["args"]):
        shape = tuple(evaluated(d, lambda s: sizes.get(s, 1)) for d in arg["shape"])
        array = filled(rng, empty(shape, arg["dtype"]))
        if position in kernel["zero_plane_args"]:
            array[...] = 0
        if array.dtype in (np.int32, np.int64):
            array[...] = kernel["name"].startswith("check_divisor")
        args.append(array)
    for position, symbol in kernel.get("sizes", ()):
        args.insert(position, sizes.get(symbol, 1))
    return args
